"""Does an edit last? The edited model after further training, in 4 bits, and with another adapter on top.

Each function is a scope: the model is changed inside, and restored bit for bit outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.registry import load_editor
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saving.saved import LoadedEdit
from edit_hooks.edit_report import LOSSES
from edit_hooks.inference.effects.neutral_prompts import NeutralPrompts, verdict
from edit_hooks.modeling.architectures import architecture_of, linear_of, num_layers, unwrapped
from edit_hooks.modeling.linear_maps import PLAIN_FORWARDS
from edit_hooks.modeling.weights import has_quantized_weights
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.scopes import undone
from lm_eval_tasks.common.records.dataset import MINI
from lm_eval_tasks.general_ability.editglue import COLA, MRPC, RTE

# Dettmers et al., QLoRA (2023), appendix E: the 16 values of NormalFloat 4, and the block size of section 3.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
NF4_BLOCK = 64
NF4_NAME = (
    "NF4, blocks of 64 values, scale by the largest absolute value, float32 scales, computed in the model's dtype"
)
MIN_FALL = 0.1  # share of the loss on the texts that training must take away, else the steps did not move the model
LEARNING_RATE = 2e-4
BATCH = 4  # texts per training step
MIN_WORDS = 4
EMBEDDED = {"data": MINI}


def embedded_texts() -> list[str]:
    """Sentences about nothing that a benchmark edits, from the embedded samples of EditGLUE."""
    return [
        *(row["sentence"] for row in COLA.source.load(EMBEDDED)[0] if row["label"] == 1),
        *(row["sentence1"] for row in RTE.source.load(EMBEDDED)[0]),
        *(row["sentence1"] for row in MRPC.source.load(EMBEDDED)[0]),
    ]


@contextmanager
def trained(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], steps: int, seed: int
) -> Iterator[dict[str, Any]]:
    """The model as it is now after LoRA steps on texts; yields what the steps did.

    The adapter is that of the editor ``lora`` on the texts as targets: query and value maps of all blocks, rank 8.

    Raises:
        EditingError: for too few texts; if the steps did not move the model, whose loss on the texts hardly fell; and
            if they wreck it.
    """
    requests = [request for text in texts if (request := _as_target(text)) is not None]
    if len(requests) < BATCH:
        raise EditingError(f"{len(requests)} texts of at least {MIN_WORDS} words; at least {BATCH} are needed.")
    requests = requests[: len(requests) // BATCH * BATCH]
    per_pass = len(requests) // BATCH
    settings = {"num_steps": max(1, round(steps / per_pass)), "lr": LEARNING_RATE, "dropout": 0.0, "batch_size": BATCH}
    editor = load_editor("lora", {**settings, "seed": seed})
    (delta,) = editor.edit(model, tokenizer, requests, joint=True, measure=False)
    losses = [float(entry["loss"]) for entry in delta.diagnostics[LOSSES]]
    divergence = NeutralPrompts(model, tokenizer).divergence(delta)
    details = {
        "adapter": "LoRA, rank 8, query and value maps of all blocks",
        **settings,
        "steps": settings["num_steps"] * per_pass,
        "texts": len(requests),
        "text_loss_before": losses[0],
        "text_loss_after": losses[-1],
        "first_token_kl_of_the_steps": divergence,
    }
    if not losses[-1] < (1 - MIN_FALL) * losses[0]:
        raise EditingError(
            f"{details['steps']} steps did not move the model: the loss on the texts went from {losses[0]:.3f} to "
            f"{losses[-1]:.3f} nats per token. Give more steps (--steps) or other texts (--text)."
        )
    if verdict(divergence).wrecked:
        raise EditingError(
            f"{details['steps']} steps wreck the model (first-token KL {divergence:.2f} nats), so that a lost fact "
            "would say nothing. Give fewer steps (--steps) or more texts (--text)."
        )
    with edited(model, delta):
        yield details


def _as_target(text: str) -> EditRequest | None:
    """A text as a prompt of one word and its continuation; ``None`` for a short one."""
    words = text.split()
    if len(words) < MIN_WORDS:
        return None
    return EditRequest(prompt=words[0].replace("{", "(").replace("}", ")"), target_new=" ".join(words[1:]))


@contextmanager
def quantized(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The model as it is now with the linear maps of its blocks rounded to NF4, map by map; yields what was rounded.

    Embeddings, norms and the head stay as they are, as bitsandbytes leaves them. The rounded weights are computed with
    in the model's dtype, so this needs no kernel and runs on a CPU.

    Raises:
        EditingError: for a model whose weights are quantized already.
    """
    inner = unwrapped(model)
    if has_quantized_weights(inner):
        raise EditingError("the model's weights are quantized already; there are no weights to round.")
    blocks = tuple(f"{architecture_of(inner).block_name(layer)}." for layer in range(num_layers(inner)))
    maps = [module for name, module in inner.named_modules() if name.startswith(blocks) and _is_map(module)]
    originals: list[tuple[nn.Parameter, torch.Tensor]] = []

    def restore() -> None:
        with torch.no_grad():
            while originals:
                weight, original = originals[-1]
                weight.copy_(original)
                originals.pop()

    change = total = 0.0
    with undone(restore):
        for module in maps:
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            originals.append((weight, weight.detach().to("cpu", copy=True)))
            with torch.no_grad():
                rounded = round_nf4(weight)
                change += float((rounded.float() - weight.float()).norm()) ** 2
                total += float(weight.float().norm()) ** 2
                weight.copy_(rounded)
        yield {"quantization": NF4_NAME, "maps": len(maps), "relative_change_of_weights": (change / total) ** 0.5}


def _is_map(module: nn.Module) -> bool:
    return type(linear_of(module)) is type(module) and type(module).forward in PLAIN_FORWARDS


def round_nf4(weight: torch.Tensor) -> torch.Tensor:
    """The nearest NF4 values of a matrix, in its shape and dtype; blocks run along the stored rows."""
    flat = weight.detach().float().flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % NF4_BLOCK)).view(-1, NF4_BLOCK)
    scale = padded.abs().amax(1, keepdim=True)
    levels = torch.tensor(NF4, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(padded / scale.clamp_min(torch.finfo(torch.float32).tiny), middles)
    return (levels[codes] * scale).flatten()[: len(flat)].view(weight.shape).to(weight.dtype)


@contextmanager
def merged(model: nn.Module, other: LoadedEdit) -> Iterator[dict[str, Any]]:
    """The model as it is now with another adapter or saved edit added to its weights; yields what was added.

    Raises:
        EditingError: for one that is not in the weights.
    """
    require_weights(other.delta, "the edit of --merge-with")
    with edited(model, other.delta):
        yield {
            "checksum": other.delta.checksum(),
            "parameters": len(other.delta.parameter_names),
            "differences": list(other.differences),
        }


def require_weights(delta: Delta, what: str) -> None:
    """Refuse an edit that acts through hooks or prompts while the model runs, or changes no weight."""
    if delta.runtime_part is not None or not delta.parameter_names:
        kinds = " and ".join(delta.writes) or "nothing"
        raise EditingError(
            f"{what} changes {kinds}; only an edit that is in the weights alone can be changed with them."
        )
