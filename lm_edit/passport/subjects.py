"""What an edit gives away: are its subjects recovered from the row space of one updated map?

After Sun et al., Reverse-Engineering Model Editing on Language Models (arXiv:2602.10134): locate-then-edit updates are
sums of outer products whose right factors are made of the keys of their subjects, so the row space of the update
points at them. Simpler than their attack, since it needs no second moment of keys: candidates are ranked by the share
of their centered key that lies in the row space. So a subject that is not recovered here may still be by theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.deltas.delta import Delta
from edit_hooks.modeling.architectures import edited_module, input_device, is_transposed, unwrapped
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.hooks import frozen, hooks, on_input, record_at
from edit_hooks.modeling.tokens import encode
from edit_hooks.utils.errors import EditingError

MAX_CANDIDATES = 512
MAX_DIRECTIONS = 64  # of the row space, which bounds the time of its decomposition
MIN_OTHERS = 4  # candidates that are no subjects of the edit


class Recovery(NamedTuple):
    """Whether each subject of an edit is among the best candidates, and how that was found."""

    found: dict[str, float]
    chance: float
    details: dict[str, Any]


def recover_subjects(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    delta: Delta,
    subjects: Sequence[str],
    others: Sequence[str],
    seed: int,
) -> Recovery:
    """Rank subjects and other names by their keys' share in the row space of the update.

    A subject is recovered if it is among the first m candidates, m the number of the edit's subjects.

    Args:
        model: the unedited model, which an attacker of an adapter has.
        subjects: of the edit. others: names that it does not edit.

    Raises:
        EditingError: for edits without a weight of a map or without an update, and too few candidates.
    """
    parameter = _largest_update(delta, unwrapped(model))
    subjects = list(dict.fromkeys(subjects))
    others = [name for name in dict.fromkeys(others) if name not in subjects][: MAX_CANDIDATES - len(subjects)]
    if not subjects:
        raise EditingError("the edit's requests name no subject.")
    if len(others) < MIN_OTHERS:
        raise EditingError(
            f"{len(others)} names besides the edit's subjects to tell them from, at least {MIN_OTHERS} are needed; "
            "give a source with more facts (--facts)."
        )
    if len(subjects) > MAX_DIRECTIONS:
        raise EditingError(
            f"the edit has {len(subjects)} subjects; recovery is measured for at most {MAX_DIRECTIONS}. "
            "Give an edit of fewer facts."
        )
    rows_KF = _row_space(delta, parameter, unwrapped(model), len(subjects), seed)
    candidates = [*subjects, *others]
    keys_CF = _keys(unwrapped(model), tokenizer, candidates, parameter.removesuffix(".weight"))
    centered_CF = keys_CF - keys_CF.mean(0)
    shares_C = (centered_CF @ rows_KF.T).norm(dim=1) / centered_CF.norm(dim=1).clamp_min(1e-12)
    ranks = {name: int((shares_C >= shares_C[index]).sum()) for index, name in enumerate(subjects)}  # of ties the last
    found = {name: float(rank <= len(subjects)) for name, rank in ranks.items()}
    details = {
        "map": parameter,
        "directions": len(rows_KF),
        "candidates": len(candidates),
        "mean_rank": sum(ranks.values()) / len(ranks),
        "key_share_of_subjects": float(shares_C[: len(subjects)].mean()),
        "key_share_of_others": float(shares_C[len(subjects) :].mean()),
    }
    return Recovery(found, len(subjects) / len(candidates), details)


def _largest_update(delta: Delta, model: PreTrainedModel) -> str:
    """The parameter of a linear map with the largest update."""
    norms = {
        name: float(delta.weight(name).norm())
        for name in delta.parameter_names
        if name.endswith(".weight") and delta.weight(name).ndim == 2
    }
    if not norms:
        raise EditingError(f"the edit changes {' and '.join(delta.writes) or 'nothing'}, not the weight of a map.")
    largest = max(norms, key=lambda name: norms[name])
    if not norms[largest]:
        raise EditingError("the edit's updates are zero, so nothing points at its subjects.")
    return largest


def _row_space(delta: Delta, parameter: str, model: PreTrainedModel, most: int, seed: int) -> torch.Tensor:
    """At most ``most`` orthonormal directions [K, f] of the inputs that the update acts on, the strongest first."""
    update = delta.weight(parameter).detach().float().cpu()
    update_DF = update.T if is_transposed(edited_module(model, parameter.removesuffix(".weight"))) else update
    number = min(most, *update_DF.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _, singular_K, right_FK = torch.svd_lowrank(update_DF, q=min(number + 8, *update_DF.shape), niter=4)
    kept = singular_K[:number] > 1e-6 * singular_K[0]
    return right_FK.T[:number][kept]


@torch.no_grad()
def _keys(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, names: Sequence[str], module: str
) -> torch.Tensor:
    """Inputs [C, f] of a map at the last token of each name, without a prompt: an attacker does not have it."""
    target = edited_module(model, module)
    parts = []
    with frozen(model):
        for start in range(0, len(names), 32):
            tokens = [tuple(encode(tokenizer, name).ids) for name in names[start : start + 32]]
            ids_RT, mask_RT = right_padded(tokens, input_device(model))
            found: dict[int, torch.Tensor] = {}
            positions = torch.tensor([len(ids) - 1 for ids in tokens])
            with hooks(on_input(target, record_at(found, 0, positions))):
                model(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False)
            parts.append(found[0].float().cpu())
    return torch.cat(parts)
