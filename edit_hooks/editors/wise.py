"""WISE: edits go to a copy of one weight beside the original, and each prompt is routed to one of the two.

"WISE: Rethinking the Knowledge Memory for Lifelong Model Editing of Large Language Models". The copy is trained by
plain gradient descent on a random part of its entries; next to the loss on the target, margins push the distance
between the outputs of copy and original up on the edit and down on an unrelated text, so that a threshold tells them
apart (``side_memory.py`` routes). After ``save_every`` edits the copy is stored and a fresh one begun; after
``merge_every`` the stored ones are merged.

Where this follows the released code (EasyEdit) and not the paper: distances are taken after the activation function
(``distance: plain`` is the paper's), and the mean over a target's tokens counts one token more
(``target_mean: released``; ``plain`` does not). Where it does not follow the release: weight decay touches trained
entries only (the release shrinks the whole weight), pads are in no mean, biases are kept on every family, every
row is routed by itself, and evaluation never merges. In ``retrieve: false`` a merged memory has the smallest threshold
of its parts; the release compares it with that of the current memory, which is infinite after each storing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.gradient.labeled_rows import (
    LabeledRow,
    LabeledRows,
    batch_rows,
    cache_lower_blocks,
    label_nll,
    target_row,
)
from edit_hooks.locate.context_templates import check_templates, sample_templates
from edit_hooks.memory.merging import MERGES, merge_changes
from edit_hooks.memory.side_memory import (
    Decide,
    Distance,
    Memory,
    MemoryBank,
    activation_shift,
    output_with_delta,
    row_distance,
)
from edit_hooks.modeling.architectures import architecture_of, is_transposed, unwrapped, weight_of
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import encode, split_template
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

log = logging.getLogger("lm_eval.edited_hf")


STOP_CHANGE, STOP_LOSS = 1e-4, 0.02  # a run ends where the loss is this small and hardly moves


KEPT_SHARE = 0.6  # weight of the memory merged before, with retrieve=false


# Unrelated texts, our own: on them the copy is to give what the original gives.
LOC_PROMPTS = (
    "how many legs does a spider have eight",
    "what do bees make from nectar honey",
    "which metal is liquid at room temperature mercury",
    "what is the opposite of north south",
    "how many minutes are in an hour sixty",
    "what is frozen water called ice",
    "which season comes after winter spring",
    "what do you call a baby cat a kitten",
    "how many sides does a triangle have three",
    "what gas do plants take in carbon dioxide",
    "which organ pumps blood the heart",
    "what is the color of an emerald green",
)


@dataclass(kw_only=True)
class WISEConfig(EditorConfig):
    """Settings of WISE."""

    module: Literal["mlp_out", "mlp_in"] = config_field("the linear map that gets side memories", default="mlp_out")
    num_steps: int = config_field("loss evaluations of an edit at most", default=70)
    lr: float = config_field("step size of the gradient descent", default=1.0)
    alpha: float = config_field("margin: the distance on the unrelated text is to be below", default=5.0)
    beta: float = config_field("margin: the distance on the edit is to be above", default=20.0)
    gamma: float = config_field("margin: the edit's distance is to exceed the unrelated text's by", default=10.0)
    act_ratio: float = config_field("a memory is used from this share of its threshold on", default=0.88)
    mask_ratio: float = config_field("share of the entries that a memory may change", default=0.2)
    norm_constraint: float | None = config_field("radius of the l-infinity ball around the original", default=1.0)
    weight_decay: float = config_field("L2 penalty on the trained entries", default=1e-5)
    target_mean: Literal["released", "plain"] = config_field(
        "released: a target of m tokens is divided by m + 1; plain: by m", default="released"
    )
    distance: Distance = config_field(
        "activation: after the activation function (released); plain: before", default="activation"
    )
    context_templates: list[str] | str = config_field("name of a template set or a list of texts", default="wise_11")
    loc_prompts: list[str] = config_field(
        "unrelated texts, question and answer", default_factory=lambda: list(LOC_PROMPTS)
    )
    chat: bool = config_field("put the prompt through the tokenizer's chat template", default=False)
    save_every: int = config_field("edits after which a memory is stored and a fresh one begun", default=500)
    merge_every: int = config_field(
        "edits after which stored memories are merged; a multiple of save_every", default=1000
    )
    retrieve: bool = config_field(
        "merge groups of stored memories and keep the groups; else merge all into one", default=True
    )
    merge: Literal["ties", "linear"] = config_field("how memories are merged", default="ties")
    merge_density: float = config_field("ties: share of the entries that is kept", default=0.53)
    decide: Decide = config_field("route a row once by its prompt, or anew in every forward pass", default="prompt")
    max_over: int | None = config_field(
        "tokens above which the largest distance counts instead of the mean", default=100
    )
    mask: Any = config_field("a given mask [bool, shape of the weight] instead of a drawn one", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_templates(self.context_templates)
        for name in ("num_steps", "lr", "save_every", "merge_every", "mask_ratio", "act_ratio", "merge_density"):
            if getattr(self, name) <= 0:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)!r}; a positive number is needed.")
        if self.merge_every % self.save_every:
            raise EditingError(f"merge_every={self.merge_every} is no multiple of save_every={self.save_every}.")
        if not self.loc_prompts:
            raise EditingError("editor setting 'loc_prompts' is empty; one unrelated text is needed at least.")
        if self.layers is not None and len(self.layers) != 1:
            raise EditingError(
                f"WISE has side memories of one weight; 'layers' names {self.layers}, one layer is needed."
            )
        assert self.merge in MERGES


class WISE(Editor[WISEConfig]):
    """Side memories of one weight, with each prompt routed to the original or to a memory."""

    name = "wise"
    config_class = WISEConfig
    config_folders = ("wise",)
    needs_subject = False
    writes = ("hooks",)
    default_depth = 0.85
    contract_settings: ClassVar[Mapping[str, Any]] = {
        "layers": [1],
        "num_steps": 8,
        "lr": 0.3,
        "mask_ratio": 0.5,
        "act_ratio": 0.5,
        "alpha": 0.5,
        "beta": 4.0,
        "gamma": 2.0,
        "context_templates": ["{}", "The band released. {}"],
        "loc_prompts": ["The museum in Karsk shows paintings."],
    }

    def fill_sampled_settings(
        self, config: WISEConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> WISEConfig:
        if isinstance(config.context_templates, str):
            texts = sample_templates(model, tokenizer, config.context_templates, config.seed)
            config = dataclasses.replace(config, context_templates=texts)
        return config

    def known_contexts(self, model: PreTrainedModel) -> list[str]:
        templates = self.overrides.get("context_templates")
        return templates if isinstance(templates, list) else []

    def compute(self, job: EditJob[WISEConfig]) -> list[Delta]:
        model = job.model
        (layer,) = job.config.edited_layers
        name = architecture_of(model).linear_name(job.config.module, layer)
        before = HookEdit.combine(delta.hook_edit for delta in job.history)
        if before is not None and (before.kind, before.settings["module"]) != ("side_memory", name):
            raise EditingError(
                f"the edits so far are a {before.kind} at {before.settings['module']}, not side memories of {name}."
            )
        deltas = []
        with frozen(model):
            for request in job.requests:
                bank = MemoryBank.from_hook_edit(before, weight_of(model.get_submodule(name)).detach())
                deltas.append(self._edit(model, job.tokenizer, request, bank, name, job.config))
                job.progress(1)
        return deltas

    def _edit(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        request: EditRequest,
        bank: MemoryBank,
        name: str,
        config: WISEConfig,
    ) -> Delta:
        module = model.get_submodule(name)
        memory = bank.current or _fresh(weight_of(module), bank, config)
        rows = batch_rows(model, examples_of(tokenizer, request, config))
        (layer,) = config.edited_layers
        if config.engine == "fast":
            cache_lower_blocks(model, rows, layer)
        trained = train(model, name, rows, rows.mask_RT.bool(), memory.change, memory.mask, config)
        memory.change = trained.change
        memory.threshold = min(memory.threshold, trained.distance_in) if bank.current else trained.distance_in
        bank.current, bank.num_edits = memory, bank.num_edits + 1
        bank.next_number = max(bank.next_number, memory.number + 1)
        changed, report = {memory.number}, {}
        if bank.num_edits % config.save_every == 0:
            bank.stored.append(memory)
            bank.current = None
            if bank.num_edits % config.merge_every == 0:
                changed.add(_merge(bank, config))
                report["merged"] = True
        settings = {
            "module": name,
            "shape": list(weight_of(module).shape),
            "act_ratio": config.act_ratio,
            "activation": activation_of(model, config),
            "decide": config.decide,
            "max_over": config.max_over,
        }
        weight_norm = float(at_least_float32(weight_of(module).detach()).norm())
        return Delta(
            hook_edit=bank.to_hook_edit(settings, changed),
            diagnostics={
                "final_loss": trained.losses[-1]["loss"],
                "initial_nll": trained.losses[0]["nll"],
                "final_nll": trained.losses[-1]["nll"],
                "steps": trained.steps,
                "stop_reason": "loss" if trained.stopped else "steps",
                "distance_in": trained.distance_in,
                "distance_out": trained.distance_out,
                "threshold": memory.threshold,
                "memories": len(bank.memories),
                "update_norm_ratio": float(memory.change.norm()) / weight_norm,
                "losses": trained.losses,
                **report,
            },
        )


def examples_of(tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: WISEConfig) -> list[LabeledRow]:
    """The edit in every context template, and last an unrelated text without labels (chosen by the request)."""
    examples = []
    for template in config.context_templates:
        before, after = split_template(template)
        text = before + request.text + after
        examples.append(target_row(tokenizer, _in_chat(tokenizer, text) if config.chat else text, request.target_new))
    unrelated = config.loc_prompts[int(request.key[:8], 16) % len(config.loc_prompts)]
    return [*examples, LabeledRow(encode(tokenizer, unrelated).ids, [])]


def _in_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A user turn with the header of the answer; the BOS is left to the encoding."""
    if not tokenizer.chat_template:
        raise EditingError("chat=true, but the tokenizer has no chat template; use an instruct model or chat=false.")
    messages = [{"role": "user", "content": text}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(shown).removeprefix(tokenizer.bos_token or "")


def activation_of(model: nn.Module, config: WISEConfig) -> str | None:
    """Name of the MLP's activation function, if distances are taken after it."""
    if config.distance == "plain":
        return None
    told = unwrapped(model).config
    found = [getattr(told, key, None) for key in ("hidden_activation", "hidden_act", "activation_function")]
    return next(str(value) for value in found if value)


def _fresh(weight: torch.Tensor, bank: MemoryBank, config: WISEConfig) -> Memory:
    """A memory equal to the original, with the mask of its turn."""
    if config.mask is not None:
        mask = torch.as_tensor(config.mask).bool().view(weight.shape)
    else:
        turn = bank.num_edits // config.save_every
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + turn)
        mask = torch.rand(weight.shape, generator=generator) < config.mask_ratio
    zero = torch.zeros(weight.shape, dtype=at_least_float32(weight.detach()[:0]).dtype, device=weight.device)
    return Memory(bank.next_number, zero, mask.to(weight.device), 0.0)


class Trained(NamedTuple):
    """Result of one edit: the change of the weight, the losses of every evaluation, and the last distances."""

    change: torch.Tensor
    losses: list[dict[str, float]]
    steps: int
    stopped: bool
    distance_in: float
    distance_out: float


def train(
    model: nn.Module,
    name: str,
    rows: LabeledRows,
    counted_RT: torch.Tensor,
    start: torch.Tensor,
    mask: torch.Tensor,
    config: WISEConfig,
) -> Trained:
    """Gradient descent on the masked entries of the copy.

    Args:
        rows: the edit's rows, and last the unrelated one, which has no labels.
        counted_RT: the tokens over which a row's distance is a mean.
        start: W' - W before the edit, in the stored orientation.
    """
    module = model.get_submodule(name)
    transposed, activation = is_transposed(module), activation_of(model, config)
    weight = at_least_float32(weight_of(module).detach())
    change = start.clone().requires_grad_(True)
    kept: dict[str, torch.Tensor] = {}

    def beside(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        other = output_with_delta(args[0], output, change, transposed)
        kept["shift_RT"] = activation_shift(output, other, activation)
        return other.to(output.dtype)

    losses: list[dict[str, float]] = []
    steps, stopped, previous = 0, False, None
    for _ in range(config.num_steps):
        handle = module.register_forward_hook(beside)
        try:
            nll_L = label_nll(model, rows)
        finally:
            handle.remove()
        extra = 1 if config.target_mean == "released" else 0
        nll = (nll_L / (rows.counts_L().to(nll_L.device) + extra)).sum() / (len(rows.ids_RT) - 1)
        distance_R = row_distance(kept["shift_RT"], counted_RT.to(kept["shift_RT"].device))
        inside_R, outside_R = distance_R[:-1], distance_R[-1:]
        margin = (
            _mean_positive(outside_R - inside_R + config.gamma)
            + _mean_positive(outside_R - config.alpha)
            + _mean_positive(config.beta - inside_R)
        )
        loss = nll + margin.to(nll.device)
        losses.append({"loss": float(loss.detach()), "nll": float(nll.detach()), "margin": float(margin.detach())})
        distances = float(inside_R.detach().mean()), float(outside_R.detach().mean())
        stopped = previous is not None and abs(losses[-1]["loss"] - previous) <= STOP_CHANGE
        stopped = stopped and losses[-1]["loss"] <= STOP_LOSS
        if stopped:
            break
        previous = losses[-1]["loss"]
        (gradient,) = torch.autograd.grad(loss, change)
        with torch.no_grad():
            change -= config.lr * (gradient + config.weight_decay * (weight + change)) * mask
            if config.norm_constraint is not None:
                change.clamp_(-config.norm_constraint, config.norm_constraint)
        steps += 1
    return Trained(change.detach(), losses, steps, stopped, *distances)


def _mean_positive(values: torch.Tensor) -> torch.Tensor:
    """Mean of the positive entries; 0 if there are none."""
    positive = values > 0
    return (values * positive).sum() / positive.sum().clamp(min=1)


def _merge(bank: MemoryBank, config: WISEConfig) -> int:
    """Merge stored memories into one and say its number.

    With ``retrieve`` the last group, with equal weights; older groups stay as they are. Without, all of them: the first
    time with equal weights, later with 0.6 for what was merged before and 0.4 for all that is new.
    """
    group = config.merge_every // config.save_every
    if config.retrieve:
        parts, bank.stored = bank.stored[-group:], bank.stored[:-group]
        weights = [1.0 / len(parts)] * len(parts)
    else:
        parts, bank.stored = bank.stored, []
        first = bank.num_edits == config.merge_every
        new = len(parts) if first else len(parts) - 1
        weights = [1.0 / new] * new if first else [KEPT_SHARE, *[(1 - KEPT_SHARE) / new] * new]
    change = merge_changes(config.merge, [part.change for part in parts], weights, config.merge_density)
    threshold = min(part.threshold for part in parts)
    bank.stored.append(Memory(bank.next_number, change, change != 0, threshold))
    bank.next_number += 1
    return bank.stored[-1].number
