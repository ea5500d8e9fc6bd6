"""What the model class does for edits that are not in the weights: contexts in prompts, hooks under ordinary tasks.

A context is put into the prompt as text and the token-level item is built again by the class's own rules, so chat
templates, special tokens and truncation are what they are for any prompt. Ordinary tasks (mmlu, glue, ...) under such
edits are answered by our engine, because the harness's own loops do not tell hooks where a prompt ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from lm_eval.api.instance import Instance

from edit_hooks.deltas.delta import Delta
from edit_hooks.in_context.selection import select_facts
from edit_hooks.inference.items import GenerateItem, ScoreItem
from edit_hooks.utils.errors import EditingError

log = logging.getLogger("lm_eval.edited_hf")


Item = TypeVar("Item", bound="ScoreItem | GenerateItem")


class Built(NamedTuple, Generic[Item]):
    """A token-level item, and whether its beginning did not fit."""

    item: Item
    cut: bool


# A mixin: its super() is the harness's class, which the type checker is told and importing this module is spared.
if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM as _Harness
else:
    _Harness = object


class PromptEditAdapter(_Harness):
    """Goes before the harness's class among the bases of the model class, which builds items and asks them."""

    session: Any
    _score: Any
    _generate: Any
    _score_item: Any
    _greedy_item: Any
    _generate_item: Any
    _standing: Delta | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._chats: dict[str, tuple[list[dict[str, str]], bool]] = {}
        super().__init__(*args, **kwargs)

    # -- edits that are text before the prompt -----------------------------------------------------------------------

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """As in the parent class; the messages are remembered, for edits that put text before the question."""
        text = super().apply_chat_template(chat_history, add_generation_prompt)
        self._chats[text] = ([dict(message) for message in chat_history], add_generation_prompt)
        return text

    def _told(self, jobs: Sequence[tuple[Any, Delta | None]], ask: Any) -> list[dict[str, Any]]:
        """Ask items of edits with a context with that context in the prompt; the answers say what was told."""
        rests: dict[int, Delta | None] = {}  # one object per edit: edits are told apart by identity
        placed, notes = [], []
        for item, delta in jobs:
            note = None
            if delta is not None and delta.contexts:
                if id(delta) not in rests:
                    rests[id(delta)] = delta.without_contexts
                item, note = self._with_context(item, delta)
                delta = rests[id(delta)]
            placed.append((item, delta))
            notes.append(note)
        answers = ask(placed)
        return [a if note is None else {**a, "context": note} for a, note in zip(answers, notes, strict=True)]

    def _with_context(self, item: Any, delta: Delta) -> tuple[Any, dict[str, Any]]:
        """An item built again from text with the edit's context before the question.

        Demonstrations that do not fit are left out from the far end; what still does not fit loses its beginning by the
        harness's rule, and the answer says so.
        """
        question = item.text if isinstance(item, GenerateItem) else item.texts and item.texts[0]
        if question is None:
            log.warning("texts without a prompt (rolling log-likelihoods) are answered without the edits' contexts.")
            return item, {"facts": 0, "demonstrations": 0, "left_out": 0, "cut": False}
        told = select_facts(delta.contexts, self._question_of(question))
        if told is None:
            return item, {"facts": 0, "demonstrations": 0, "left_out": 0, "cut": False}
        for shown in range(len(told.demonstrations), -1, -1):
            built = self._rebuilt(item, self._before_question(told.before(shown), question))
            if not built.cut:
                break
        note = {"facts": sum(fact.include_fact for fact in told.facts), "demonstrations": shown}
        return built.item, {**note, "left_out": len(told.demonstrations) - shown, "cut": built.cut}

    def _rebuilt(self, item: Any, text: str) -> Built[Any]:
        if isinstance(item, GenerateItem):
            return self._greedy_item(text, item.stops, item.max_new_tokens)
        return self._score_item(text, item.texts[1])

    def _before_question(self, text: str, prompt: str) -> str:
        """A prompt with text before the question: at its beginning, in chats at the beginning of the last user turn."""
        if not self._chats:
            return text + prompt
        if prompt not in self._chats:
            raise EditingError(
                f"prompt {prompt[:80]!r}... was not made by this model's chat template, so where a context belongs in "
                "it is not known; run without --apply_chat_template."
            )
        messages, generation_prompt = self._chats[prompt]
        messages = [dict(message) for message in messages]
        last = max(number for number, message in enumerate(messages) if message["role"] == "user")
        messages[last]["content"] = text + messages[last]["content"]
        return super().apply_chat_template(messages, generation_prompt)

    def _question_of(self, prompt: str) -> str:
        """What a prompt asks, without the clothes of a chat."""
        messages, _ = self._chats.get(prompt, ([{"role": "user", "content": prompt}], True))
        return next(message["content"] for message in reversed(messages) if message["role"] == "user")

    # -- ordinary tasks under edits that are not in the weights ------------------------------------------------------

    @contextlib.contextmanager
    def _answering_stock(self) -> Iterator[None]:
        with self.session.scope() as runtime_part:
            self._standing = runtime_part
            try:
                yield
            finally:
                self._standing = None

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """As in the parent class; under hooks or contexts by our own engine, which knows where prompts end."""
        if self._standing is None:
            stock = super()._loglikelihood_tokens
            return stock(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        items = [
            ScoreItem(tuple(context), tuple(target)) if texts is None else self._score_item(*texts).item
            for texts, context, target in requests
        ]
        answers = self._score([(item, self._standing) for item in items])
        return [(answer["logprob"], answer["is_greedy"]) for answer in answers]

    def _stock_generate(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The parent's ``generate_until``; under hooks or contexts by our own engine, greedily."""
        if self._standing is None:
            return super().generate_until(requests, disable_tqdm=disable_tqdm)
        items = [self._generate_item(*request.args) for request in requests]
        answers = self._generate([(item, self._standing) for item in items])
        texts = []
        for item, answer in zip(items, answers, strict=True):
            text = answer["text"]
            for stop in item.stops:
                text = text.split(stop)[0]
            texts.append(text)
        return texts
