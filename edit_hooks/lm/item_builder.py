"""Questions as token ids, by lm-eval's rules.

The rules cover special tokens, truncation and stop strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from edit_hooks.inference.items import GenerateItem, Item, ScoreItem
from edit_hooks.lm.harness import LateLoadingHFLM
from edit_hooks.request import require_text
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from edit_hooks.utils.options import check_generation_kwargs

GREEDY_ONLY = {"until", "max_gen_toks", "do_sample", "temperature"}

ItemT = TypeVar("ItemT", ScoreItem, GenerateItem)


class Built(NamedTuple, Generic[ItemT]):
    """An item, and whether its prompt was cut at the beginning to fit."""

    item: ItemT
    cut: bool


class ItemBuilder:
    """Builds items with the tokenizer and the limits of an lm-eval model."""

    def __init__(self, lm: LateLoadingHFLM) -> None:
        self._lm = lm

    def from_instance(self, request: Instance) -> Item:
        """Build the item of an lm-eval request.

        Raises:
            UnusableRequestError: for continuations without a token, texts without room, and half surrogate pairs.
            EditingError: for generation settings out of range, and sampling.
        """
        if request.request_type == "loglikelihood":
            return self.score_item(*request.args).item
        return self.generate_item(*request.args).item

    def score_item(self, context: str, continuation: str) -> Built[ScoreItem]:
        """Build an item for scoring; long contexts are cut at the start, as in lm-eval."""
        lm = self._lm
        require_text(context + continuation)
        if context == "":
            ids = [lm.prefix_token_id]
            target = lm.tok_encode(continuation, add_special_tokens=False)
        else:
            ids, target = lm.encode_pair(context, continuation)
        if not target:
            raise UnusableRequestError(f"continuation {continuation!r} has no token besides those of {context!r}.")
        room = lm.max_length + 1 - len(target)
        if room < 1:
            raise UnusableRequestError(
                f"continuation of {len(target)} tokens does not fit into {lm.max_length} positions."
            )
        return Built(ScoreItem(tuple(ids[-room:]), tuple(target), (context, continuation)), cut=len(ids) > room)

    def generate_item(self, context: str, gen_kwargs: Mapping[str, Any]) -> Built[GenerateItem]:
        """Build an item for decoding from the generation settings of an lm-eval task."""
        lm = self._lm
        check_generation_kwargs(gen_kwargs)
        settings = normalize_gen_kwargs(dict(gen_kwargs), lm.max_gen_toks)
        sampling = settings.get("do_sample") or settings.get("temperature", 0.0) not in (0, 0.0)
        if sampling or (other := set(settings) - GREEDY_ONLY):
            setting = "sampling" if sampling else ", ".join(sorted(other))
            raise EditingError(f"editing benchmarks decode greedily; generation_kwargs ask for {setting}.")
        end = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
        stops = handle_stop_sequences(settings.get("until"), eos=end)
        stops = tuple(stop for stop in stops if stop and stop != end)
        return self.greedy_item(context, stops, int(settings["max_gen_toks"]))

    def greedy_item(self, context: str, stops: tuple[str, ...], max_new_tokens: int) -> Built[GenerateItem]:
        """Build an item for decoding; long prompts are cut at the start, as in lm-eval."""
        lm = self._lm
        require_text(context)
        room = lm.max_length - max_new_tokens
        if room < 1:
            raise EditingError(f"max_gen_toks={max_new_tokens} leaves no room in {lm.max_length} positions.")
        ids = lm.tok_encode(context) or [lm.prefix_token_id]
        return Built(GenerateItem(tuple(ids[-room:]), stops, max_new_tokens, context), cut=len(ids) > room)
