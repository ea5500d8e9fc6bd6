"""The damage that edits do, and the warning about an edit that wrecks its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.edit_report import FIRST_TOKEN_KL, WRECKED_KL
from edit_hooks.inference.effects.neutral_prompts import NeutralPrompts, verdict

WRECKED_REMEDY = (
    "Try a smaller step (num_steps, lr, clamp_factor), another layer or editor, or a prompt with words before the "
    "subject; lm-edit tune searches over settings."
)
WRECKED_WARNING = (
    f"the edit wrecks the model: the distribution of the next token after neutral prompts is more than {WRECKED_KL:g} "
    f"nats from that before the edit ({FIRST_TOKEN_KL}). {WRECKED_REMEDY}"
)


def record_damage(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, deltas: Sequence[Delta], history: Sequence[Delta] = ()
) -> list[Delta]:
    """Measure the divergence of edits of the model as it is now: their effects, with the verdict.

    Args:
        history: the earlier steps of a stream, whose hooks a step is measured with: it may hold a part of them.

    Returns:
        The edits that wreck it.
    """
    earlier = [step.hook_edit for step in history]
    whole = [
        delta if delta.hook_edit is None else replace(delta, hook_edit=HookEdit.combine([*earlier, delta.hook_edit]))
        for delta in deltas
    ]
    for delta, divergence in zip(deltas, NeutralPrompts(model, tokenizer).divergences(whole), strict=True):
        delta.effects = verdict(divergence)
    return [delta for delta in deltas if delta.effects.wrecked]
