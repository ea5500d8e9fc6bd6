"""A scripted model whose tokenizer, like GPT-2's, has another token for a word after a space."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from scripted import ScriptedLM

from edit_hooks.answers import GeneratedText


class SpacedLM(ScriptedLM):
    """Continues a prompt with the words of a table, as many as the question's decoding settings ask for.

    Args:
        words: (prompt, unedited?) -> the words, each after a space.
    """

    def __init__(self, words: Any) -> None:
        super().__init__()
        self.words = words
        self.vocabulary: dict[str, int] = {}

    def _answer(self, request: Instance, answer: Any) -> Any:
        edited = super()._answer(request, answer)
        final = self._continued(request, unedited=False)
        if edited.final.unedited is not None:
            final = replace(final, unedited=self._continued(request, unedited=True))
        return replace(edited, final=final)

    def _continued(self, request: Instance, *, unedited: bool) -> GeneratedText:
        decoding = request.doc["asked"]["decoding"]
        if decoding is None:  # the placeholder of a case without questions
            return GeneratedText(raw="", token_ids=(), target_ids=None)
        gold = decoding["length_of"].split()
        words = [*self.words(request.args[0], unedited).split(), *["er"] * len(gold)][: len(gold)]
        first = gold[0] if decoding["length_of_alone"] else f" {gold[0]}"
        return GeneratedText(
            raw=" " + " ".join(words),
            token_ids=self._ids([f" {word}" for word in words]),
            target_ids=self._ids([first, *(f" {word}" for word in gold[1:])]),
        )

    def _ids(self, words: list[str]) -> tuple[int, ...]:
        return tuple(self.vocabulary.setdefault(word, len(self.vocabulary)) for word in words)
