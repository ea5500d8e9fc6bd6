"""MEMOIR: a residual memory beside one MLP output projection, of which every edit trains a few columns.

"MEMOIR: Lifelong Model Editing with Minimal Overwrite and Informed Retention for LLMs" (2506.07899). The columns of an
edit are chosen by the features of its prompt and a fixed random permutation, so that similar prompts share columns and
others rarely do (:mod:`edit_hooks.memory.column_memory`). Training puts the prompt in context templates; the mask of
the bare prompt holds for all rows and positions:

    y = W k + M (mask * k),   M <- M - lr (g min(1, 1 / (||g|| + 1e-6)) + weight_decay M)

by plain gradient descent. Weight decay shrinks all of M, columns of other edits included. A prompt that is edited again
trains the columns that it has. As in the release a target of m tokens is divided by m + 1 (``target_mean``), and the
run ends after a loss of at most 0.02 that changed by at most 1e-4, and one more step.

The background b is the mean feature of unrelated prompts. The release ships files of 100 for four models; here it is
computed from ``background_texts`` when the configuration is resolved, or given.

Differences from the release: it finds prompts by comparing states with those of padding and loses a first token; it
counts the target's tokens on the first request of a run; it looks a prompt up again at every decoding step, from the
newest token alone. Here all are per row, and a row is looked up once.

Shapes: R rows, T tokens, P columns of a mask, F and D input and output width of the map.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.artifacts.given_tensors import read_shapes
from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import Footprint, StreamGrowth, dense_bytes, low_rank_footprint, training_work
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.forward_context import ForwardContext
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.editors.wise import has_converged
from edit_hooks.gradient.labeled_rows import LabeledRows, batch_rows, target_row
from edit_hooks.gradient.map_forward import MAP_ENGINES, map_activations
from edit_hooks.locate.context_templates import check_templates, num_templates, sample_templates, warn_of_english
from edit_hooks.memory.column_memory import KIND, ColumnMemory, Feature, Selection, masks_of, overlaps, prompt_features
from edit_hooks.memory.steps import step_numbers
from edit_hooks.memory.unrelated_texts import UNRELATED_TEXTS
from edit_hooks.modeling.architectures import architecture_of, input_device, map_shape, unwrapped
from edit_hooks.modeling.device.run_ahead import LateRead
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import encode
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE, SHARE

DEFAULT_SHARE = 2 / 7  # of the columns, 4096 of 14336 in the release's file for Llama 3
GRADIENT_EPS = 1e-6


@dataclass(kw_only=True)
class MEMOIRConfig(EditorConfig):
    """Settings of MEMOIR; the defaults are those of its file for Llama-3-8B-Instruct."""

    append_eos: bool = config_field("append the end-of-text token to the target", default=False)
    num_steps: int = config_field("largest number of loss evaluations of an edit", within=POSITIVE, default=30)
    lr: float = config_field("step size of the gradient descent", within=POSITIVE, default=1.0)
    weight_decay: float = config_field("L2 penalty on the whole memory", within=NON_NEGATIVE, default=1e-5)
    top_k: int | None = config_field(
        "number of columns of an edit; null: two sevenths of them, 4096 of 14336", within=POSITIVE, default=None
    )
    threshold: float = config_field(
        "share of its columns that a prompt needs in common with an edit to use it; the release has 0.4 for ZsRE and "
        "0.9 for hallucinations",
        within=SHARE,
        default=0.4,
    )
    feature: Feature = config_field(
        "what selects columns; mean_decentered: mean input over the prompt minus the background; mean: without it; "
        "last: input at the last prompt token",
        default="mean_decentered",
    )
    target_mean: Literal["released", "plain"] = config_field(
        "released: a target of m tokens is divided by m + 1; plain: by m", default="released"
    )
    context_templates: list[str] | str = config_field(
        "texts with {} for the prompt, each one training row: a list, or the name of a set that the model samples",
        default="wise_11",
    )
    background_texts: list[str] = config_field(
        "unrelated prompts whose mean feature is the background", default_factory=lambda: list(UNRELATED_TEXTS)
    )
    keep_intermediates: bool = config_field(
        "keep the prompt's feature and mask on the delta for inspection", default=False
    )
    given: dict[str, torch.Tensor] | str | None = config_field(
        "permutation [width in], in floating point, and background [width in] in place of a draw from the seed and of "
        "background_texts; a mapping or a safetensors file",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_templates(self.context_templates)
        if not self.background_texts:
            raise EditingError("editor setting 'background_texts' is empty; give at least one unrelated prompt.")
        if self.lr * self.weight_decay > 1:
            raise EditingError(
                f"lr={self.lr:g} with weight_decay={self.weight_decay:g} would turn the memory around in each step; "
                "their product can be at most 1."
            )
        self.require_one_layer("MEMOIR has the memory of a single map")


class _Selector(NamedTuple):
    """What selects columns on one model: the permutation and the background, [F], on the CPU."""

    permutation_F: torch.Tensor
    background_F: torch.Tensor


class MEMOIR(Editor[MEMOIRConfig]):
    """A residual memory, of which an edit trains the columns that its prompt selects."""

    name = "memoir"
    config_class = MEMOIRConfig
    config_folders = ("memoir",)
    needs_subject = False
    edits_quantized = True
    writes = ("hooks",)
    default_depth = 0.87
    stream_growth = StreamGrowth(
        "the trained columns of all steps, at most d f numbers, and top_k column numbers of eight bytes per "
        "edit; a step stores d top_k numbers (67 MB at Llama 3 8B)",
        "with edits",
    )
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "num_steps": 8,
        "lr": 1.0,
        "threshold": 0.6,
        # Half of the columns: rounding in 16 bits swaps a few at the edge of a mask.
        "top_k": 32,
        "context_templates": ["{}", "The band released. {}"],
        "background_texts": ["The museum in Karsk shows paintings.", "Water boils at one hundred degrees."],
    }

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self._selectors: weakref.WeakKeyDictionary[nn.Module, _Selector] = weakref.WeakKeyDictionary()

    def default_config(self, model: nn.Module) -> MEMOIRConfig:
        config = super().default_config(model)
        width = map_shape(unwrapped(model).get_submodule(_module_of(model, config)))[1]
        if config.top_k is None:
            config.top_k = max(1, round(DEFAULT_SHARE * width))
        if config.top_k > width:
            raise EditingError(f"'top_k' is {config.top_k}, and the map has {width} columns.")
        if config.given is not None:
            config.given = read_shapes(config.given, "given", {"permutation": (width,), "background": (width,)})
            if config.given["permutation"].sort().values.tolist() != list(range(width)):
                raise EditingError(f"the permutation in 'given' is none of the {width} columns of the map.")
        return config

    def fill_sampled_settings(
        self, config: MEMOIRConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> MEMOIRConfig:
        if isinstance(config.context_templates, str):
            texts = sample_templates(model, tokenizer, config.context_templates, config.seed)
            config = dataclasses.replace(config, context_templates=texts)
        return config

    def known_contexts(self, model: PreTrainedModel | None = None) -> list[str]:
        templates = self.overrides.get("context_templates")
        return templates if isinstance(templates, list) else []

    def prepare(self, config: MEMOIRConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        name = _module_of(model, config)
        if isinstance(config.given, dict):
            permutation_F, background_F = config.given["permutation"].long(), config.given["background"]
        else:
            width = map_shape(model.get_submodule(name))[1]
            permutation_F = torch.randperm(width, generator=torch.Generator().manual_seed(config.seed))
            texts = [encode(tokenizer, text).ids for text in config.background_texts]
            feature: Feature = "last" if config.feature == "last" else "mean"
            with frozen(model):
                background_F = _features(model, name, texts, feature, torch.zeros(width)).mean(0).cpu()
        self._selectors[model] = _Selector(permutation_F, background_F)

    def warnings(self, job: EditJob[MEMOIRConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        warn_of_english(job.config.context_templates, requests, self.name)
        return []

    def footprint(self, config: MEMOIRConfig, model: nn.Module) -> Footprint:
        """The trained columns, their gradient and the step in float32."""
        (layer,) = config.edited_layers
        name = _module_of(model, config)
        trained = int(dense_bytes(model, [name]) * DEFAULT_SHARE)
        rest = low_rank_footprint(model, [name], [layer], config)
        rows = num_templates(config.context_templates)
        return dataclasses.replace(
            rest,
            copies=3 * trained,
            activations=rows * rest.activations,
            update=trained,
            work=training_work(model, first=layer, steps=config.num_steps, trained=trained, rows=rows),
        )

    def compute(self, job: EditJob[MEMOIRConfig]) -> list[Delta]:
        name = _module_of(job.model, job.config)
        earlier = HookEdit.after((delta.hook_edit for delta in job.history), KIND, name, "a residual memory")
        if earlier is not None:
            assert job.config.top_k is not None
            own = Selection(job.config.feature, job.config.top_k, *self._selectors[job.model])
            Selection.of(earlier).require_same(own)
        deltas = []
        with frozen(job.model):
            for request in job.requests:
                deltas.append(self._edit(job, request, earlier, name))
                job.progress(1)
        return deltas

    def _edit(self, job: EditJob[MEMOIRConfig], request: EditRequest, earlier: HookEdit | None, name: str) -> Delta:
        """Train the columns of one request, from where earlier edits left them."""
        model, config, selector = job.model, job.config, self._selectors[job.model]
        assert config.top_k is not None
        prompt = encode(job.tokenizer, request.text).ids
        feature_1F = _features(model, name, [prompt], config.feature, selector.background_F)
        columns_P = masks_of(feature_1F, selector.permutation_F, config.top_k)[0].cpu()
        memory = None if earlier is None else ColumnMemory.of(earlier)
        width_out = map_shape(model.get_submodule(name))[0]
        start_DP = torch.zeros(width_out, config.top_k) if memory is None else memory.at(columns_P)
        known = memory is not None and bool((memory.masks_NP == columns_P).all(1).any())
        rows = [request.in_template(template) for template in config.context_templates]
        placed = [target_row(job.tokenizer, row.text, row.continuation, append_eos=config.append_eos) for row in rows]
        batch = batch_rows(model, placed)
        values_DP, losses, num_steps = _train(model, name, batch, columns_P, start_DP, config)
        tensors = {
            "values": values_DP.cpu(),
            "columns": columns_P,
            "masks": columns_P[None].clone(),
            "permutation": selector.permutation_F,
            "background": selector.background_F,
        }
        settings = {
            "module": name,
            "threshold": config.threshold,
            "feature": config.feature,
            "decay": (1 - config.lr * config.weight_decay) ** num_steps,
            **step_numbers(earlier),
        }
        diagnostics = {
            "initial_nll": losses[0],
            "final_loss": losses[-1],
            "final_nll": losses[-1],
            "steps": num_steps,
            "stop_reason": "loss" if num_steps < config.num_steps else "steps",
            "losses": [{"loss": loss} for loss in losses],
            "num_masks": (0 if memory is None else len(memory.masks_NP)) + (not known),
        }
        if memory is not None:
            others = overlaps(columns_P[None], memory.masks_NP, len(selector.permutation_F))
            diagnostics["largest_overlap"] = float(others.max())
        delta = Delta(hook_edit=HookEdit(KIND, tensors, settings), diagnostics=diagnostics)
        if config.keep_intermediates:
            delta.intermediates = {"feature": feature_1F[0], "mask": columns_P}
        return delta


def _module_of(model: nn.Module, config: MEMOIRConfig) -> str:
    (layer,) = config.edited_layers
    return architecture_of(model).rewrite_name(layer)


@torch.no_grad()
def _features(
    model: nn.Module, name: str, texts: Sequence[Sequence[int]], feature: Feature, background_F: torch.Tensor
) -> torch.Tensor:
    """phi [R, F] of texts of token ids."""
    ids_RT, mask_RT = right_padded(texts, input_device(model))
    x_RTF = map_activations(model, name, ids_RT, mask_RT).x_RTF
    context = ForwardContext.for_prefill(mask_RT, None).to(x_RTF.device)
    return prompt_features(x_RTF, context, feature, background_F)


def clipped(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, scaled to a Frobenius norm of at most one."""
    return gradient * (1 / (gradient.norm() + GRADIENT_EPS)).clamp(max=1)


def _train(
    model: nn.Module,
    name: str,
    rows: LabeledRows,
    columns_P: torch.Tensor,
    start_DP: torch.Tensor,
    config: MEMOIRConfig,
) -> tuple[torch.Tensor, list[float], int]:
    """Train some columns of the memory; returns them [D, P], the losses, and the number of steps."""
    forward = MAP_ENGINES[config.engine](model, rows, name)
    extra = 1 if config.target_mean == "released" else 0
    values_DP: torch.Tensor | None = None
    losses: list[float] = []
    late: LateRead | None = None
    num_steps = 0
    leaf: list[torch.Tensor] = []
    own_P: list[torch.Tensor] = []

    def with_memory(x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        if not leaf:
            dtype = torch.promote_types(output_RTD.dtype, torch.float32)
            leaf.append(start_DP.to(output_RTD.device, dtype).clone().requires_grad_())
            own_P.append(columns_P.to(x_RTF.device))
        x_RTP = at_least_float32(x_RTF)[..., own_P[0]].to(leaf[0])
        return (at_least_float32(output_RTD) + x_RTP @ leaf[0].T).to(output_RTD.dtype)

    with torch.enable_grad():
        for _ in range(config.num_steps):
            if late is not None:  # read when a GPU has the step that follows it
                losses += late.wait().tolist()
            stopped = has_converged(losses)  # of the losses that a step followed
            nll_L = forward.nll(with_memory)
            loss = (nll_L / (rows.counts_L().to(nll_L.device) + extra)).sum() / len(rows.ids_RT)
            late = LateRead(loss[None])
            if stopped:
                break
            (values_DP,) = leaf
            (gradient_DP,) = torch.autograd.grad(loss, values_DP)
            with torch.no_grad():
                values_DP -= config.lr * (clipped(gradient_DP) + config.weight_decay * values_DP)
            num_steps += 1
    if late is not None:
        losses += late.wait().tolist()
    return leaf[0].detach(), losses, num_steps
