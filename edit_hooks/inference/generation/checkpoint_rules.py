"""Rules of a checkpoint's generation configuration for greedy decoding: penalties, suppressed and forced tokens.

``model.generate`` follows them, and with it lm-eval's own tasks, so this package's decoder does, too: otherwise columns
of one comparison would come from different rules. The classes and their order are those of transformers. Each text is
treated as if it were the only one of its batch; lm-eval's batches are padded on the left, and there ``min_length``
counts the padding.

Two kinds of questions do not follow the rules: teacher forcing, which reads scores and continues nothing, and draws,
which in the released evaluations come from a loop over plain scores (ROME's ``generate_fast``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from edit_hooks.inference.items import GenerateItem
from edit_hooks.modeling.fingerprint.generation_settings import ABOUT_THE_END, FOLLOWED
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.errors import EditingError, first_line


def rules_off(item: GenerateItem) -> dict[str, Any]:
    """Entries that a question does not follow, with the values that switch them off."""
    if item.forced or item.sampling is not None:
        return dict(FOLLOWED)
    return {name: FOLLOWED[name] for name in ABOUT_THE_END if item.ignore_end}


class CheckpointRules:
    """The rules for the answer to one question; false where there are none."""

    def __init__(self, settings: Mapping[str, Any], item: GenerateItem, end_tokens: Collection[int]) -> None:
        """Set up the rules.

        Args:
            settings: of :func:`~edit_hooks.modeling.fingerprint.generation_settings.generation_settings`.

        Raises:
            EditingError: for an entry that transformers does not accept.
        """
        self.context = item.context
        off = rules_off(item)
        settings = {name: value for name, value in settings.items() if name in FOLLOWED and name not in off}
        try:
            self._processors = LogitsProcessorList(_processors(settings, item, sorted(end_tokens)))
        except (TypeError, ValueError) as error:
            raise EditingError(f"the checkpoint's generation_config cannot be used: {first_line(error)}.") from error

    def __bool__(self) -> bool:
        return bool(self._processors)

    def token(self, new_tokens: Sequence[int], logits_V: torch.Tensor) -> int:
        """The most likely token after the prompt and ``new_tokens`` under the rules; computed on the CPU."""
        ids_1T = torch.tensor([[*self.context, *new_tokens]])
        scores_1V: torch.Tensor = self._processors(ids_1T, at_least_float32(logits_V)[None].to("cpu", copy=True))
        return int(scores_1V[0].argmax())


def _processors(settings: Mapping[str, Any], item: GenerateItem, ends: list[int]) -> list[LogitsProcessor]:
    """The processors of all entries, in the order of transformers."""
    prompt, length = torch.tensor([item.context]), len(item.context)
    begin = length + (length <= 1 and "forced_bos_token_id" in settings)
    make: dict[str, Callable[[Any], LogitsProcessor]] = {
        "sequence_bias": logits_process.SequenceBiasLogitsProcessor,
        "encoder_repetition_penalty": lambda value: logits_process.EncoderRepetitionPenaltyLogitsProcessor(
            value, prompt
        ),
        "repetition_penalty": logits_process.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": logits_process.NoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size": lambda value: logits_process.EncoderNoRepeatNGramLogitsProcessor(value, prompt),
        "bad_words_ids": lambda value: logits_process.NoBadWordsLogitsProcessor(value, ends),
        "min_length": lambda value: logits_process.MinLengthLogitsProcessor(value, ends),
        "min_new_tokens": lambda value: logits_process.MinNewTokensLengthLogitsProcessor(length, value, ends),
        "forced_bos_token_id": logits_process.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda value: logits_process.ForcedEOSTokenLogitsProcessor(
            length + item.most_tokens, value
        ),
        "remove_invalid_values": lambda _value: logits_process.InfNanRemoveLogitsProcessor(),
        "exponential_decay_length_penalty": lambda value: logits_process.ExponentialDecayLengthPenalty(
            value, ends, length
        ),
        "suppress_tokens": logits_process.SuppressTokensLogitsProcessor,
        "begin_suppress_tokens": lambda value: logits_process.SuppressTokensAtBeginLogitsProcessor(value, begin),
    }
    return [maker(settings[name]) for name, maker in make.items() if name in settings]
