"""The checks of the editor contract on batches whose rows are under different edits."""

from __future__ import annotations

import torch

from edit_hooks.contract.subject import EDIT_REQUESTS, Subject, require
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.items import GenerateItem, Limits
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.tensors import at_least_float32

# Rounding of float32 in sums of another order stays below 1e-4 nats on the tiny models; answers under another edit
# differ by whole nats.
TOLERANCE = 5e-4


def check_rows(subject: Subject) -> None:
    """Rows of several edits and of none in one batch answer as each alone."""
    deltas = [*subject.deltas, None]
    requests = [*EDIT_REQUESTS, EDIT_REQUESTS[0]]
    items = [
        (subject.item(request, delta), None if delta is None else delta.without_contexts)
        for request, delta in zip(requests, deltas, strict=True)
    ]
    together = score(subject.model, items, Limits(), lambda count: None)
    for item, answer in zip(items, together, strict=True):
        (alone,) = score(subject.model, [item], Limits(), lambda count: None)
        difference = max(
            abs(a - b) for a, b in zip(alone.token_logprobs or (), answer.token_logprobs or (), strict=True)
        )
        require(difference < TOLERANCE, f"a row answers otherwise beside other edits ({difference:.1e} nats)")


def check_generation(subject: Subject) -> None:
    """Texts that a batch writes with a cache are those of full passes without one, also after rows have ended."""
    if subject.capabilities.writes == ("context",):
        return  # the model is the unedited one
    items = _texts_to_write(subject)
    for (item, delta), answer in zip(
        items, generate(subject.model, subject.tokenizer, items, Limits(), lambda count: None), strict=True
    ):
        gap_L = _gaps(subject, item, delta, answer.token_ids or ())
        wrong = (gap_L > TOLERANCE).nonzero()[:, 0].tolist()
        require(
            not wrong,
            f"token {wrong[0] + 1 if wrong else 0} of a text written under an edit, in a batch and with a cache, is "
            f"{float(gap_L.max()):.1e} nats less likely than the best one in a full pass; does the hook kind act in "
            "decoding steps, and does its row_state name all that it keeps per row?",
        )


def _texts_to_write(subject: Subject) -> list[tuple[GenerateItem, Delta | None]]:
    """Rows in the order of a batch, longest prompt first, in which the upper ones end first.

    A kind that loses its rows' state then takes that of a row without an edit, or of a prompt of another edit.
    """
    prompts = [subject.item(request).context for request in EDIT_REQUESTS[:2]]
    (long, first), (short, second) = sorted(zip(prompts, subject.deltas[:2], strict=True), key=lambda row: -len(row[0]))
    texts: list[tuple[tuple[int, ...], Delta | None]] = [(long, None), (long, second), (long, first), (short, second)]
    return [
        (GenerateItem(prompt, (), 2 * (index + 1), ignore_end=True), delta)
        for index, (prompt, delta) in enumerate(texts)
    ]


@torch.no_grad()
def _gaps(subject: Subject, item: GenerateItem, delta: Delta | None, tokens: tuple[int, ...]) -> torch.Tensor:
    """How much less likely than the best one each token [L] is in a full pass over the text before it, in nats."""
    ids_1T = torch.tensor([[*item.context, *tokens[:-1]]], device=subject.device)
    with edited(subject.model, *([] if delta is None else [delta]), prompt_lengths=[len(item.context)]):
        logits_TV = subject.model(ids_1T, use_cache=False).logits[0]
    logits_LV = at_least_float32(logits_TV[len(item.context) - 1 :])
    written_L = logits_LV.gather(1, torch.tensor(tokens, device=subject.device)[:, None])[:, 0]
    return logits_LV.amax(1) - written_L
