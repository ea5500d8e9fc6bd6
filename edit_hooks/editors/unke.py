"""UnKE: whole blocks trained so that a question's last token has the state that makes a long answer likely.

"Everything is Editable: Extend Knowledge Editing to Unstructured Data in Large Language Models" (2405.15349).

1. z: the output of the last edited block L at the question's last token that makes the answer likely, optimized as
   MEMIT's, without context templates, KL term and early stop (:mod:`edit_hooks.locate.answer_windows`).
2. For the edited blocks in order, with n of them left and the updates so far in place: from inputs X_Q, X_S and outputs
   O, S of the block on the questions and on unrelated texts,

       O[last] <- O[last] + (z - h^L[last]) / n,
       minimize mean (block(X_S) - S)^2 + mean (block(X_Q) - O)^2

   by ``fit_steps`` steps of AdamW on all parameters of the block. Inputs are fixed.

As released: the means run over padded positions, too (rows are padded on the right, by the tokenizer's padding token);
parameters of norms have no weight decay; AdamW moves every weight by about its rate at first, whatever the loss, and
shrinks all others by ``fit_weight_decay`` times the rate per step. A parameter without effect, as the bias of
attention's keys, moves at that rate, too, by rounding (``fit_eps``). The release draws 20 sentences of Alpaca for
every batch; here ``preserved_texts`` are the same for all edits.

Weights are trained in float32 and computed with in the model's dtype.

Shapes: R rows, T tokens, d residual width, W positions of a row whose state is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.checks import position_limit
from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.editor import CONTRACT_TEXTS, Editor
from edit_hooks.base.footprint import (
    ADAM_TRAFFIC,
    NOTHING_CARRIED,
    ROW_TOKENS,
    Footprint,
    Work,
    copies_bytes,
    dense_bytes,
    passes,
)
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.editors.ft_m import maps_of_blocks
from edit_hooks.gradient.weight_copies import BlockCopies
from edit_hooks.locate.answer_windows import (
    AnswerConfig,
    answer_of,
    answer_warnings,
    optimize_answers,
    record_answers,
    stated,
    with_answers,
)
from edit_hooks.locate.text_states import StatedText, TextBatch
from edit_hooks.memory.unrelated_texts import UNRELATED_TEXTS
from edit_hooks.modeling.architectures import architecture_of, input_device, num_layers
from edit_hooks.modeling.hooks import Registration, frozen, hidden_of, hooks, on_output, stop_after
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import encode
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE


@dataclass(kw_only=True)
class UnKEConfig(AnswerConfig):
    """Settings of the target state and of the training of blocks."""

    fit_steps: int = config_field("AdamW steps on the parameters of a block", within=POSITIVE, default=50)
    fit_lr: float = config_field("learning rate of AdamW", within=POSITIVE, default=2e-4)
    fit_weight_decay: float = config_field("decay of AdamW; norms have none", within=NON_NEGATIVE, default=0.01)
    fit_eps: float = config_field(
        "epsilon of AdamW; gradients far below it move no weight, at 1e-8 those move that are zero but for rounding",
        within=POSITIVE,
        default=1e-8,
    )
    preserved_texts: list[str] = config_field(
        "unrelated texts on which the outputs of the block should stay", default_factory=lambda: list(UNRELATED_TEXTS)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.preserved_texts or not all(text.strip() for text in self.preserved_texts):
            raise EditingError("editor setting 'preserved_texts' needs at least one text, and none that is empty.")
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise EditingError(f"'layers' is {self.layers}; give each layer once, in ascending order.")


class UnKE(Editor[UnKEConfig]):
    """Blocks trained towards one state per question."""

    name = "unke"
    config_class = UnKEConfig
    config_folders = ("unke",)
    needs_subject = False
    supports_joint = True
    reads_past_updates = False
    writes_states = True
    default_depth = 0.23
    stream_growth = NOTHING_CARRIED
    states_settings: ClassVar[Settings] = {}
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "num_steps": 6,
        "fit_steps": 10,
        "fit_lr": 2e-3,
        # A key's bias has no effect on attention, so its gradient is rounding, which AdamW scales to its rate.
        "fit_eps": 1e-3,
        "preserved_texts": CONTRACT_TEXTS,
    }

    def target_modules(self, config: UnKEConfig, model: nn.Module) -> list[str]:
        return maps_of_blocks(model, config.edited_layers)

    def footprint(self, config: UnKEConfig, model: nn.Module) -> Footprint:
        return with_answers(self.states_footprint(config, model), config, model)

    def states_footprint(self, config: UnKEConfig, model: nn.Module) -> Footprint:
        """One block at a time with AdamW's state."""
        layers = config.edited_layers
        names = [maps_of_blocks(model, [layer]) for layer in layers]
        rows, steps = len(config.preserved_texts) + 1, config.fit_steps * len(layers)
        fitting = passes(model, first=num_layers(model) - 1, rows=rows, tokens=ROW_TOKENS, steps=steps)
        trained = dense_bytes(model, [name for of_layer in names for name in of_layer])
        return Footprint(
            copies=max(copies_bytes(model, of_layer) for of_layer in names),
            update=trained,
            work=fitting + Work(moved=float(config.fit_steps * trained * ADAM_TRAFFIC)),
        )

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        answer_of(tokenizer, request, self.known_config(model).append_eos, None, 0)

    def warnings(self, job: EditJob[UnKEConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        return answer_warnings(delta)

    def constraint_warnings(self, model: nn.Module) -> list[str]:
        return []

    def compute(self, job: EditJob[UnKEConfig]) -> list[Delta]:
        answers = [answer_of(job.tokenizer, one, job.config.append_eos, None, 0) for one in job.requests]
        values = optimize_answers(job, answers, job.config.edited_layers[-1])
        texts = [stated(answer.question, answer, of_it) for answer, of_it in zip(answers, values, strict=True)]
        deltas = self.write_states(job, texts)
        record_answers(job, deltas, texts, values)
        return deltas

    def write_states(self, job: EditJob[UnKEConfig], texts: Sequence[StatedText]) -> list[Delta]:
        groups = [texts] if job.joint else [[text] for text in texts]
        with frozen(job.model):
            return [self._fit(job, group) for group in groups]

    def _fit(self, job: EditJob[UnKEConfig], texts: Sequence[StatedText]) -> Delta:
        """One edit: the blocks trained one after the other, each with the updates of those before."""
        config, model = job.config, job.model
        arch, last = architecture_of(model), config.edited_layers[-1]
        pad = job.tokenizer.pad_token_id
        written = TextBatch.of([text.ids for text in texts], pad, input_device(model))
        preserved = TextBatch.of(_preserved_rows(job), pad, input_device(model))
        delta = Delta(diagnostics={"fits": []})
        with contextlib.ExitStack() as fitted:
            for index, layer in enumerate(config.edited_layers):
                block = arch.block_name(layer)
                preserve, _ = _BlockCall.read(model, preserved, block, block)
                write, hidden_RTD = _BlockCall.read(model, written, block, arch.block_name(last))
                for row, text in enumerate(texts):
                    residual_WD = text.states_WD.to(hidden_RTD) - hidden_RTD[row, text.positions]
                    share_WD = residual_WD / (len(config.edited_layers) - index)
                    write.output_RTD[row, text.positions] += share_WD.to(write.output_RTD)
                copies = BlockCopies(model, [block])
                losses = _fit_block(model.get_submodule(block), copies, [preserve, write], config)
                part = copies.delta({})
                delta.dense |= part.dense
                delta.diagnostics["fits"].append({"layer": layer, "losses": losses, **part.diagnostics})
                fitted.enter_context(copies.used_by_model())
        ratios = [record.pop("update_norm_ratio") for record in delta.diagnostics["fits"]]
        delta.diagnostics["update_norm_ratio"] = max(ratios)
        return delta


def _preserved_rows(job: EditJob[UnKEConfig]) -> list[list[int]]:
    """The texts whose outputs stay, cut at the model's context; those without a token are left out."""
    limit = position_limit(job.model.config)
    rows = [encode(job.tokenizer, text).ids[:limit] for text in job.config.preserved_texts]
    if not any(rows):
        raise EditingError("no text in 'preserved_texts' has a token of this tokenizer; give others.")
    return [row for row in rows if row]


class _BlockCall(NamedTuple):
    """A block's arguments in a forward pass of the model, and its output [R, T, d], at least float32."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output_RTD: torch.Tensor

    @classmethod
    @torch.no_grad()
    def read(cls, model: nn.Module, batch: TextBatch, block: str, last: str) -> tuple[_BlockCall, torch.Tensor]:
        """The call of a block, and the output [R, T, d] of the block ``last``, the same one or a later one."""
        calls: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []
        outputs: dict[str, torch.Tensor] = {}

        def keep_arguments(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            calls.append((arguments, dict(keywords)))

        def keep(name: str, hidden_RTD: torch.Tensor) -> None:
            outputs[name] = at_least_float32(hidden_RTD).clone()

        module, last_module = model.get_submodule(block), model.get_submodule(last)
        with (
            hooks(
                Registration(module, keep_arguments, on_input=True),
                on_output(module, lambda hidden: keep(block, hidden)),
                on_output(last_module, lambda hidden: keep(last, hidden)),
            ),
            stop_after(last_module),
        ):
            model(input_ids=batch.ids_RT, attention_mask=batch.mask_RT, use_cache=False)
        hidden_RTD = outputs[last].clone()
        return cls(*calls[0], outputs[block]), hidden_RTD


def _fit_block(module: nn.Module, copies: BlockCopies, calls: Sequence[_BlockCall], config: UnKEConfig) -> list[float]:
    """Train the copies of a block's parameters towards the outputs of the calls; returns the loss before each step."""
    decayed = [leaf for name, leaf in copies.leaves.items() if copies.has_matrix(name)]
    others = [leaf for name, leaf in copies.leaves.items() if not copies.has_matrix(name)]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.fit_weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=config.fit_lr, eps=config.fit_eps)
    losses = []
    for _ in range(config.fit_steps):
        with torch.enable_grad(), copies.used_by_model():
            outputs = [at_least_float32(hidden_of(module(*call.arguments, **call.keywords))) for call in calls]
            terms = [(y - call.output_RTD).square().mean() for y, call in zip(outputs, calls, strict=True)]
            loss = torch.stack(terms).sum()
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.stack(losses).tolist()  # after the last step: a GPU does not wait
