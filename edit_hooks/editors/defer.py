"""DEFER: a gate and a predictor beside one linear map, trained further with every edit.

A baseline of "Aging with GRACE", from its official repository; also in EasyEdit. With q the map's input at the query
token (of width F), and both affine functions drawn as torch draws a Linear (weights and biases uniform within
1/sqrt(F)):

    gate    = sigmoid(w q + b),   value = W q + c
    output' = gate * value + (1 - gate) * output         in training, at every token of the row
    output' = value if gate >= threshold else output     in use, at every token of the row

Adam, fresh per edit, makes a fixed number of steps on the mean negative log-likelihood of the target tokens. A stream
trains one gate and predictor with edit after edit, so it forgets; each step holds both in full, as large as the map.
Nothing trains the gate on other texts, and it starts near 1/2: prompts that no edit concerns can pass it, too.

Not copied from the releases:

- The query in training. EasyEdit's is the last token of prompt and target (``query_token: last_text``), which no prompt
  to be answered contains. The official repository means the last prompt token, the default here, but counts a masked
  end-of-text token with the prompt on GPT-2 XL and reads the first target token; it trains a space behind the target
  (``append_eos: released``).
- The look-up in use. EasyEdit's is by the last token of each pass: with a cache every new token decides by itself
  (``query: every_step``), and without one, the last token of the text so far for all tokens. Here a row is looked up
  once.
- A batch of several rows, whose gates and values are broadcast over the tokens of one another.

Shapes: E edits (one row each), F and D input and output width of the map.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.artifacts.given_tensors import read_shapes
from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.label_forward import CachedLabelForward, PlainLabelForward, shared_nll
from edit_hooks.gradient.labeled_rows import (
    APPEND_EOS_HELP,
    AppendEos,
    LabeledRow,
    batch_rows,
    mean_per_row,
    target_row,
)
from edit_hooks.gradient.side_by_side import make_adam, split_edits
from edit_hooks.memory.adapter_database import QueryToken
from edit_hooks.memory.codebook import Query
from edit_hooks.memory.gated_predictor import KIND, GatedPredictor
from edit_hooks.memory.steps import step_numbers
from edit_hooks.modeling.architectures import architecture_of, map_shape, unwrapped, weight_of
from edit_hooks.modeling.hooks import Registration, frozen, hooks, on_input, on_output, record_at, stop_after
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.request import EditRequest
from edit_hooks.utils.settings.numbers import INNER_SHARE, POSITIVE


@dataclass(kw_only=True)
class DEFERConfig(EditorConfig):
    """Settings of DEFER."""

    module: Literal["mlp_out", "mlp_in"] = config_field(
        "the linear map whose output the values replace", default="mlp_out"
    )
    initial_predictor: dict[str, torch.Tensor] | str | None = config_field(
        "gate and predictor at the start, instead of a draw from the seed: gate_weight [width in], gate_bias [], "
        "weight [width out, width in], bias [width out]; a mapping or a safetensors file",
        default=None,
    )
    num_steps: int = config_field(
        "Adam steps on gate and predictor; there is no early stop", within=POSITIVE, default=100
    )
    lr: float = config_field(
        "Adam learning rate; a step moves a value by up to lr times the sum of the query's magnitudes",
        within=POSITIVE,
        default=7e-5,
    )
    threshold: float = config_field("gate from which on the value replaces the output", within=INNER_SHARE, default=0.5)
    query: Query = config_field(
        "look-up of a row: once at prefill, or for every new token by itself (released)", default="prefill"
    )
    query_token: QueryToken = config_field(
        "token of the query in training; last_prompt: the last of the prompt; last_text: the last of prompt and target "
        "(EasyEdit; prompts alone are looked up by another one)",
        default="last_prompt",
    )
    append_eos: AppendEos = config_field(APPEND_EOS_HELP, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_one_layer("DEFER has a single gate and predictor")


class DEFER(Editor[DEFERConfig]):
    """A gate and a predictor at one linear map; where the gate opens, the prediction is the output."""

    name = "defer"
    config_class = DEFERConfig
    config_folders = ("defer",)
    needs_subject = False
    edits_quantized = True
    reads_past_updates = False
    writes = ("hooks",)
    default_depth = 0.85
    stream_growth = StreamGrowth(
        "gate and predictor after the last step: d f numbers (235 MB at Llama 3 8B), which every step stores", "no"
    )
    contract_settings: ClassVar[Settings] = {"layers": [1], "num_steps": 8, "lr": 0.015}

    def default_config(self, model: nn.Module) -> DEFERConfig:
        config = super().default_config(model)
        if config.initial_predictor is not None:
            (layer,) = config.edited_layers
            module = unwrapped(model).get_submodule(architecture_of(model).linear_name(config.module, layer))
            shapes = predictor_shapes(module)
            config.initial_predictor = read_shapes(config.initial_predictor, "initial_predictor", shapes)
        return config

    def num_tokens_past_target(self) -> int:
        """Also the last token, which holds the query."""
        return super().num_tokens_past_target() + (self.overrides.get("query_token") == "last_text")

    def compute(self, job: EditJob[DEFERConfig]) -> list[Delta]:
        """Train independent edits side by side, each its own copy of the stream's gate and predictor."""
        with frozen(job.model):
            return _Training(job).train()

    def warnings(self, job: EditJob[DEFERConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        if delta.diagnostics["gate"] >= job.config.threshold:
            return []
        return [
            "after training, the gate at the edit's own prompt is below the threshold, so the edit has no effect "
            "there; try another lr or seed."
        ]


@dataclass
class _Group:
    """Independent edits whose rows run together.

    Attributes:
        edits: indices of the requests.
        query_EF: the queries in training; constant, since nothing below the map changes.
        prompt_query_EF: the queries by which the prompts are looked up.
        leaves: the trained parameters, stacked.
    """

    edits: list[int]
    forward: CachedLabelForward | PlainLabelForward
    query_EF: torch.Tensor
    prompt_query_EF: torch.Tensor
    leaves: GatedPredictor

    def mixing(self, module: nn.Module) -> Registration:
        """The hook by which the map's output is mixed with the values."""

        def mixed(output_ETD: torch.Tensor) -> torch.Tensor:
            gate_E11 = self.leaves.gate(self.query_EF)[:, None, None]
            value_E1D = self.leaves.value(self.query_EF)[:, None]
            return (gate_E11 * value_E1D + (1 - gate_E11) * at_least_float32(output_ETD)).to(output_ETD.dtype)

        return on_output(module, mixed)


class _Training:
    """Training of gates and predictors for the edits of a job."""

    def __init__(self, job: EditJob[DEFERConfig]) -> None:
        self.job, self.model, self.config = job, job.model, job.config
        (layer,) = job.config.edited_layers
        self.name = architecture_of(job.model).linear_name(job.config.module, layer)
        self.module = job.model.get_submodule(self.name)
        self.rows = [_target_row(job.tokenizer, request, job.config) for request in job.requests]
        hook_edits = (delta.hook_edit for delta in job.history)
        self.earlier = HookEdit.after(hook_edits, KIND, self.name, "a gate and predictor")

    def train(self) -> list[Delta]:
        """Train one edit per request."""
        width_out, width_in = map_shape(self.module)
        element_size = at_least_float32(weight_of(self.module).detach()[:0]).element_size()
        trained_bytes = (width_out + 1) * (width_in + 1) * element_size
        if self.config.engine == "reference":
            batches = [[[edit]] for edit in range(len(self.rows))]
        else:
            batches = split_edits(self.model, [len(row.ids) for row in self.rows], trained_bytes)
        deltas: dict[int, Delta] = {}
        for batch in batches:
            groups = [self._group(edits) for edits in batch]
            for group, losses_SE in zip(groups, self._fit(groups), strict=True):
                deltas |= self._deltas(group, losses_SE)
            self.job.progress(sum(map(len, batch)))
        return [deltas[edit] for edit in range(len(self.rows))]

    def _group(self, edits: list[int]) -> _Group:
        rows = [self.rows[edit] for edit in edits]
        batch = batch_rows(self.model, rows)
        forward_class = PlainLabelForward if self.config.engine == "reference" else CachedLabelForward
        last_text = self.config.query_token == "last_text"
        prompt_ends = torch.tensor([row.labels[0][0] for row in rows])
        ends = torch.tensor([len(row.ids) - 1 for row in rows]) if last_text else prompt_ends
        prompt_query_EF, query_EF = (
            _query_at(self.model, self.module, batch, columns) for columns in (prompt_ends, ends)
        )
        standing = self.earlier and GatedPredictor(**self.earlier.tensors)
        starts = [standing or initial_predictor(self.module, self.job.requests[e], self.config) for e in edits]
        like = at_least_float32(weight_of(self.module).detach()[:0])
        leaves = GatedPredictor(
            *(torch.stack(tensors).to(like).requires_grad_(True) for tensors in zip(*starts, strict=True))
        )
        return _Group(edits, forward_class(self.model, batch, [self.name]), query_EF, prompt_query_EF, leaves)

    def _fit(self, groups: Sequence[_Group]) -> list[torch.Tensor]:
        """Train all groups in place; for every group the loss of each edit before each step [S, E]."""
        config = self.config
        optimizer = make_adam([leaf for group in groups for leaf in group.leaves], config.lr, 0.0, config.engine)
        losses: list[list[torch.Tensor]] = [[] for _ in groups]
        for _ in range(config.num_steps):
            with torch.enable_grad():
                step = [
                    mean_per_row(nll_L, group.forward.rows)
                    for nll_L, group in zip(self._label_nlls(groups), groups, strict=True)
                ]
            for records, loss_E in zip(losses, step, strict=True):
                records.append(loss_E.detach())
            optimizer.zero_grad()
            torch.cat(step).sum().backward()
            optimizer.step()
        return [torch.stack(records) for records in losses]

    def _label_nlls(self, groups: Sequence[_Group]) -> list[torch.Tensor]:
        """Negative log-likelihood [L] of the labels of every group; cached forward passes share the vocabulary."""
        results, forwards = [], []
        for group in groups:
            with hooks(group.mixing(self.module)):
                if isinstance(group.forward, PlainLabelForward):
                    results.append(group.forward.nll())
                else:
                    forwards.append(group.forward)
                    results.append(group.forward.label_states())
        return shared_nll(results, forwards) if forwards else results

    @torch.no_grad()
    def _deltas(self, group: _Group, losses_SE: torch.Tensor) -> dict[int, Delta]:
        """The deltas of a group, by index of the request."""
        settings = {"module": self.name, "threshold": self.config.threshold, "query": self.config.query}
        settings |= step_numbers(self.earlier)
        deltas = {}
        gates = group.leaves.gate(group.prompt_query_EF).tolist()
        for row, (edit, gate) in enumerate(zip(group.edits, gates, strict=True)):
            own = group.leaves.map(operator.itemgetter(row)).map(lambda tensor: tensor.detach().cpu().clone())
            losses = losses_SE[:, row].tolist()
            diagnostics: dict[str, Any] = {**loss_diagnostics(losses, num_steps=len(losses)), "gate": gate}
            deltas[edit] = Delta(hook_edit=HookEdit(KIND, own._asdict(), settings), diagnostics=diagnostics)
        return deltas


def initial_predictor(module: nn.Module, request: EditRequest, config: DEFERConfig) -> GatedPredictor:
    """Gate and predictor at the start: those given, or a draw that is uniform within 1/sqrt(F).

    Drawn from the seed and the request, so that they are the same alone and in a batch.
    """
    if isinstance(config.initial_predictor, dict):
        return GatedPredictor(**config.initial_predictor)
    generator = torch.Generator().manual_seed((config.seed * 1_000_003 + int(request.key[:15], 16)) % 2**63)
    bound = 1 / math.sqrt(map_shape(module)[1])
    tensors = (torch.empty(shape, dtype=torch.float32) for shape in predictor_shapes(module).values())
    return GatedPredictor(*(tensor.uniform_(-bound, bound, generator=generator) for tensor in tensors))


def predictor_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of gate and predictor at a map, by name and in the order of :class:`GatedPredictor`."""
    width_out, width_in = map_shape(module)
    return {"gate_weight": (width_in,), "gate_bias": (), "weight": (width_out, width_in), "bias": (width_out,)}


def _target_row(tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: DEFERConfig) -> LabeledRow:
    """The row of a request; the query at the end of the text needs its last token, too."""
    feed_last = config.query_token == "last_text"
    return target_row(tokenizer, request.text, request.continuation, append_eos=config.append_eos, feed_last=feed_last)


@torch.no_grad()
def _query_at(model: Any, module: nn.Module, rows: Any, column_E: torch.Tensor) -> torch.Tensor:
    """Input [E, F] of the map at one column per row, in at least float32, on the map's device."""
    records: dict[str, torch.Tensor] = {}
    with hooks(on_input(module, record_at(records, "query", column_E))), stop_after(module):
        model(input_ids=rows.ids_RT, attention_mask=rows.mask_RT, use_cache=False)
    return records["query"].to(weight_of(module).device)
