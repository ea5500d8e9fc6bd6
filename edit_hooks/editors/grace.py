"""GRACE: a codebook beside one linear map of the MLP; the weights stay as they are.

"Aging with GRACE: Lifelong Model Editing with Discrete Key-Value Adaptors". The key of an edit is the module's input at
the last prompt token, its value a trained vector that replaces the module's output, its radius decides how near a
prompt must come. A new edit near an old key widens it (same target), splits the distance with it (another target), or
trains a new value for it (the same prompt again). What a changed prompt does follows from this: with text in front, the
last token's activation is another one, no key is near and the model answers unedited.

Kept from the released code: Adam on the value for a fixed number of steps, no early stop. Not kept: its label test
compares means of padded label rows, and its label list runs the other way round than its keys; targets are compared as
token ids here. A second edit of the same prompt overwrites the value instead of splitting a distance of zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.forward_context import ForwardContext
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.gradient.labeled_rows import LabeledRows, batch_rows, cache_lower_blocks, label_nll, target_row
from edit_hooks.memory.codebook import Query, Replacement, distances, replaced_positions
from edit_hooks.modeling.architectures import architecture_of, map_shape, weight_of
from edit_hooks.modeling.hooks import frozen, hooks, on_input, on_output
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

SPLIT_GAP = 1e-5  # by which the older key's radius is smaller after a split, so that one of the two is nearer


@dataclass(kw_only=True)
class GRACEConfig(EditorConfig):
    """Settings of GRACE."""

    module: Literal["mlp_out", "mlp_in"] = config_field(
        "the linear map beside which the codebook is", default="mlp_out"
    )
    num_steps: int = config_field("Adam steps on the value; there is no early stop", default=100)
    lr: float = config_field("Adam learning rate of the value", default=1.0)
    radius: float = config_field("radius of a new key", default=1.0)
    value_init: Literal["cold", "warm"] = config_field(
        "cold: uniform in [0, 1); warm: the module's own output", default="cold"
    )
    replacement: Replacement = config_field("which tokens' outputs the value replaces", default="replace_last")
    query: Query = config_field("look a row up once at prefill, or every new token as well", default="prefill")
    expand: Literal["coverage", "moving_average"] = config_field(
        "same target nearby: widen the key's radius, or also move the key half way", default="coverage"
    )
    same_key: float = config_field("a key this near, in units of its norm, is the same prompt again", default=1e-4)
    append_eos: bool = config_field("train the end-of-text token after the target", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_steps", "lr", "radius"):
            if getattr(self, name) <= 0:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)!r}; a positive number is needed.")
        if self.layers is not None and len(self.layers) != 1:
            raise EditingError(f"GRACE keeps one codebook; 'layers' names {self.layers}, one layer is needed.")


@dataclass
class Entry:
    """One entry of a codebook: key [f], value [d], radius, and the token ids of its target."""

    key_F: torch.Tensor
    value_D: torch.Tensor
    radius: float
    label: list[int]


class Change(NamedTuple):
    """What a new edit does to a codebook: the entries it adds or changes by number, which one is trained, and why."""

    entries: dict[int, Entry]
    trained: int
    reason: str


def change_of(book: list[Entry], query_F: torch.Tensor, fresh_D: torch.Tensor, label: list[int], config: Any) -> Change:
    """The rules of GRACE for an edit whose key is ``query_F``; values are not trained yet.

    Args:
        fresh_D: value of a new entry.
    """
    new = Entry(query_F, fresh_D, config.radius, label)
    if not book:
        return Change({0: new}, 0, "first")
    all_N = distances(query_F[None], torch.stack([entry.key_F for entry in book]))[0]
    number = int(all_N.argmin())
    distance, near = float(all_N[number]), book[number]
    if distance > config.radius + near.radius:
        return Change({len(book): new}, len(book), "new")
    if near.label == label:
        radius = max(near.radius, distance)
        moved = config.expand == "moving_average" and distance > near.radius
        key = (near.key_F + query_F) / 2 if moved else near.key_F
        return Change({number: Entry(key, near.value_D, radius, label)}, number, "expanded")
    if distance <= config.same_key * float(query_F.norm()):
        return Change({number: Entry(near.key_F, fresh_D, near.radius, label)}, number, "overwritten")
    narrowed = Entry(near.key_F, near.value_D, distance / 2 - SPLIT_GAP, near.label)
    halved = Entry(query_F, fresh_D, distance / 2, label)
    return Change({number: narrowed, len(book): halved}, len(book), "split")


class GRACE(Editor[GRACEConfig]):
    """A codebook beside one linear map: prompts near a key get the key's value; no weight changes."""

    name = "grace"
    config_class = GRACEConfig
    config_folders = ("grace",)
    needs_subject = False
    writes = ("hooks",)
    default_depth = 0.85
    contract_settings: ClassVar[Mapping[str, Any]] = {"layers": [1], "num_steps": 8, "lr": 0.5}

    def compute(self, job: EditJob[GRACEConfig]) -> list[Delta]:
        """Independent edits are trained in one batch, each beside its own copy of the codebook."""
        model, tokenizer = job.model, job.tokenizer
        (layer,) = job.config.edited_layers
        name = architecture_of(model).linear_name(job.config.module, layer)
        examples = [target_row(tokenizer, r.text, r.target_new, append_eos=job.config.append_eos) for r in job.requests]
        rows = batch_rows(model, examples)
        with frozen(model):
            if job.config.engine == "fast":
                cache_lower_blocks(model, rows, layer)
            now = _prompts(rows)
            query_RF, output_RD = _at_prompt_end(model, name, rows, now)
            book = entries_of(job.history, name)
            changes = []
            for row, (request, example) in enumerate(zip(job.requests, examples, strict=True)):
                fresh_D = output_RD[row] if job.config.value_init == "warm" else self._cold(model, name, request, job)
                label = [token for _, token in example.labels]
                changes.append(change_of(book, query_RF[row], fresh_D, label, job.config))
            start_RD = torch.stack([change.entries[change.trained].value_D.to(output_RD) for change in changes])
            values_RD, losses_SR = _train(model, name, rows, now, start_RD, job.config)
        deltas = []
        for row, change in enumerate(changes):
            change.entries[change.trained].value_D = values_RD[row]
            deltas.append(_delta(change, len(book), [float(loss_R[row]) for loss_R in losses_SR], name, job.config))
        job.progress(len(deltas))
        return deltas

    @staticmethod
    def _cold(model: nn.Module, name: str, request: EditRequest, job: EditJob[GRACEConfig]) -> torch.Tensor:
        """Uniform in [0, 1), from the seed and the request: alone or in a batch, the same numbers."""
        module = model.get_submodule(name)
        generator = torch.Generator().manual_seed((job.config.seed * 1_000_003 + int(request.key[:15], 16)) % 2**63)
        return torch.rand(map_shape(module)[0], generator=generator, dtype=torch.float64).to(
            at_least_float32(weight_of(module))
        )


def entries_of(history: list[Delta], module: str) -> list[Entry]:
    """The codebook after the steps of a stream."""
    book = HookEdit.combine(delta.hook_edit for delta in history)
    if book is None:
        return []
    if book.kind != "codebook" or book.settings["module"] != module:
        raise EditingError(
            f"the edits so far are a {book.kind} at {book.settings['module']}, not a codebook at {module}."
        )
    tensors = book.tensors
    columns = (tensors["keys"], tensors["values"], tensors["radii"].tolist(), book.settings["labels"])
    return [Entry(*column) for column in zip(*columns, strict=True)]


def _prompts(rows: LabeledRows) -> ForwardContext:
    """Each row's prompt ends where its first label is predicted."""
    end_R = torch.full((len(rows.ids_RT),), rows.ids_RT.shape[1], device=rows.ids_RT.device)
    end_R = end_R.scatter_reduce(0, rows.row_L, rows.column_L, "amin")
    return ForwardContext(rows.mask_RT.bool(), end_R, prefill=True)


@torch.no_grad()
def _at_prompt_end(
    model: nn.Module, name: str, rows: LabeledRows, now: ForwardContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input [r, f] and output [r, d] of the module at the last prompt tokens, at least float32."""
    module, seen = model.get_submodule(name), {}
    index_R = torch.arange(len(rows.ids_RT), device=rows.ids_RT.device)

    def keep(what: str) -> Any:
        def read(hidden: torch.Tensor) -> None:
            here = now.to(hidden.device)
            seen[what] = at_least_float32(hidden[index_R.to(hidden.device), here.prompt_end_R]).clone()

        return read

    with hooks(on_input(module, keep("input")), on_output(module, keep("output"))):
        label_nll(model, rows)
    return seen["input"], seen["output"]


def _train(
    model: nn.Module, name: str, rows: LabeledRows, now: ForwardContext, start_RD: torch.Tensor, config: GRACEConfig
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Trained values [r, d] and the loss of every row at every step; rows do not see one another."""
    values_RD = start_RD.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([values_RD], lr=config.lr)
    is_replaced_RT1 = replaced_positions(config.replacement, now)[:, :, None]

    def substitute(output_RTD: torch.Tensor) -> torch.Tensor:
        return torch.where(is_replaced_RT1.to(output_RTD.device), values_RD[:, None].to(output_RTD), output_RTD)

    losses = []
    for _ in range(config.num_steps):
        with hooks(on_output(model.get_submodule(name), substitute)), torch.enable_grad():
            nll_L = label_nll(model, rows)
            nll_L = nll_L / rows.counts_L().to(nll_L.device)
        loss_R = torch.zeros(len(rows.ids_RT), dtype=nll_L.dtype, device=nll_L.device)
        loss_R = loss_R.index_add(0, rows.row_L.to(nll_L.device), nll_L)
        losses.append(loss_R.detach())
        optimizer.zero_grad()
        loss_R.sum().backward()
        optimizer.step()
    return values_RD.detach(), losses


def _delta(change: Change, size_before: int, losses: list[float], name: str, config: GRACEConfig) -> Delta:
    numbers = sorted(change.entries)
    entries = [change.entries[number] for number in numbers]
    tensors = {
        "keys": torch.stack([entry.key_F for entry in entries]),
        "values": torch.stack([entry.value_D for entry in entries]),
        "radii": torch.tensor([entry.radius for entry in entries], dtype=entries[0].key_F.dtype),
        "index": torch.tensor(numbers),
    }
    settings = {
        "module": name,
        "replacement": config.replacement,
        "query": config.query,
        "labels": [entry.label for entry in entries],
    }
    return Delta(
        hook_edit=HookEdit("codebook", {key: tensor.cpu() for key, tensor in tensors.items()}, settings),
        diagnostics={
            "final_loss": losses[-1],
            "initial_nll": losses[0],
            "steps": len(losses),
            "stop_reason": "steps",
            "entry": change.reason,
            "num_entries": max(size_before, change.trained + 1),
            "radius": change.entries[change.trained].radius,
            "losses": [{"loss": loss} for loss in losses],
        },
    )
