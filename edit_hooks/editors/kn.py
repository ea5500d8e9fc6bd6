"""KN: find the MLP units that carry the old answer by integrated gradients, and rewrite their output vectors.

Dai et al., "Knowledge Neurons in Pretrained Transformers". Unit (l, i) is the i-th inner unit of the MLP of block l, a
its activation at the last token of a context, P the probability of an answer token there. Its attribution is

    Attr(l, i) = a_i * integral over c in [0, 1] of dP(c a) / d(c a_i)

with the whole activation vector of the block scaled by c, and the integral a mean over ``num_steps`` points. Units
above ``threshold`` times the largest attribution over all blocks are chosen (coarse); with several prompts, those
chosen for more than ``sharing`` of them (refine). Their output vectors r, columns of the rewrite module, move away from
the embedding of the old answer and towards that of the new one.

What differs between the paper's release ("original") and EasyEdit's, behind most published tables, is a setting each,
the first value EasyEdit's and the default:

- ``site``: ``before_activation``, output of the first MLP matrix; original: ``after_activation``, what the rewrite
  module reads.
- ``riemann``: ``both_ends``, c = j / (m - 1); original: ``left``, c = j / m.
- ``factors``: ``easyedit``, r += sum E[new] - sum E[old] with the model's own greedy continuation, as long as the new
  answer, as old tokens, and twice E[old] if that is one token; original: ``original``,
  r += ||r|| (8 E[new] / ||E[new]|| - E[old] / ||E[old]||) with the old answer. ``easyedit_single`` doubles E[new] too,
  which EasyEdit does where it takes the whole new answer for one vocabulary entry (Mistral).
- ``sharing``: unused with EasyEdit's single prompt; original: 0.7, moved by 0.05 up to 6 times towards 2 to 5 units
  (``sharing_adjustments: 6``), with at least three prompts.

The original edits single-token answers of BERT; for several tokens their mean embedding stands here. It also drops
units that occur in over a tenth of a relation's facts, which would make one edit depend on others: not done.

Not copied from EasyEdit: one step (its files for 7B models), which is a gradient at zero and no integral; the answer
encoded alone, BOS included, for Llama; an unknown token for Mistral's answers. A several-token old answer is scored
token by token after its own earlier tokens; ``answer_context`` has the released ways.

Where blocks normalize the MLP's output (Gemma 2 and 3, OLMo 2) scaling an activation changes nothing until c is nearly
zero, so the points near zero decide and attributions do not add up to the change of P. The method was not made for it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import update_norm_ratio
from edit_hooks.gradient.labeled_rows import batch_rows, label_nll, mean_over_rows, target_row
from edit_hooks.modeling.architectures import (
    architecture_of,
    head_of,
    input_device,
    is_transposed,
    map_shape,
    num_layers,
)
from edit_hooks.modeling.hooks import frozen, hooks, on_input, on_output, select_positions
from edit_hooks.modeling.sampling import greedy_continuation
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import encode, split_continuation, split_template
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

SHARING_STEP, FEWEST, MOST = 0.05, 2, 5


@dataclass(kw_only=True)
class KNConfig(EditorConfig):
    """Settings of knowledge neurons; ``layers`` are the blocks whose units may be chosen, all unless given."""

    num_steps: int = config_field("points of the integral", default=20)
    batch_size: int = config_field("points computed at once", default=20)
    riemann: Literal["both_ends", "left"] = config_field("where the points are: j/(m-1) or j/m", default="both_ends")
    site: Literal["before_activation", "after_activation"] = config_field(
        "the activation that is scaled: before or after the non-linearity", default="before_activation"
    )
    answer_context: Literal["in_context", "own", "prompt"] = config_field(
        "what precedes the old answer's later tokens: its own earlier ones, the model's greedy ones (EasyEdit on Llama "
        "and Qwen), or nothing (EasyEdit on GPT)",
        default="in_context",
    )
    threshold: float = config_field("chosen units: attribution above this share of the largest", default=0.2)
    context_templates: list[str] = config_field(
        "texts with {} for the prompt; each gives one prompt", default_factory=lambda: ["{}"]
    )
    paraphrases: dict[str, list[str]] = config_field("further prompts of an edit, by its prompt", default_factory=dict)
    sharing: float = config_field("with several prompts: share of them that must choose a unit", default=0.7)
    sharing_adjustments: int = config_field("how often the share moves by 0.05 towards 2 to 5 units", default=0)
    factors: Literal["original", "easyedit", "easyedit_single"] = config_field(
        "how units are rewritten", default="easyedit"
    )
    erase: float = config_field(
        "factors=original: weight of the old answer, in norms of the output vector", default=1.0
    )
    write: float = config_field("factors=original: weight of the new answer, likewise", default=8.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps < 2:
            raise EditingError(
                f"editor setting 'num_steps' is {self.num_steps}; an integral needs at least 2 points, 20 are usual. "
                "(EasyEdit's files for 7B models have 1, which attributes a gradient at zero.)"
            )
        if self.batch_size < 1 or not self.context_templates:
            raise EditingError("editor settings 'batch_size' (at least 1) and 'context_templates' (not empty).")
        for name in ("threshold", "sharing"):
            if not 0 < getattr(self, name) < 1:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)!r}; a share between 0 and 1.")
        for template in self.context_templates:
            split_template(template)


class Neuron(NamedTuple):
    """An inner unit of a block's MLP."""

    layer: int
    unit: int


class KN(Editor[KNConfig]):
    """Knowledge neurons: attribution, selection, rewriting; one request at a time."""

    name = "kn"
    config_class = KNConfig
    config_folders = ("kn",)
    needs_subject = False
    contract_settings: ClassVar[Mapping[str, Any]] = {"layers": [1]}
    contract_exemptions: ClassVar[Mapping[str, str]] = {
        "target": "embeddings of answers are added to MLP outputs, which means nothing to a random model's head"
    }

    def default_layers(self, config: Any) -> list[int]:
        return list(range(num_layers(config)))

    def compute(self, job: EditJob[KNConfig]) -> list[Delta]:
        model: Any = job.model
        for request in job.requests:
            if request.target_true is None:
                raise EditingError(
                    f"editor 'kn' looks for the units of the old answer, and case {request.case_id} "
                    f"(prompt {request.text!r}) has none; give 'target_true'."
                )
        if model.get_input_embeddings().weight.shape[1] != model.config.hidden_size:
            raise EditingError("editor 'kn' adds embeddings to MLP outputs; this model's have different widths.")
        deltas = []
        with frozen(model):
            for request in job.requests:
                deltas.append(self._edit(model, job.tokenizer, request, job.config))
                job.progress(1)
        return deltas

    def _edit(self, model: Any, tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: KNConfig) -> Delta:
        scores = [
            attributions(model, tokenizer, prompt, str(request.target_true), config)
            for prompt in prompts_of(request, config)
        ]
        neurons, sharing = choose(scores, config)
        direction_D, scaled = self._direction(model, tokenizer, request, config)
        factors = {}
        for layer in sorted({neuron.layer for neuron in neurons}):
            name = architecture_of(model).rewrite_name(layer)
            module = model.get_submodule(name)
            weight_DF = (
                at_least_float32(module.weight.detach()).T
                if is_transposed(module)
                else at_least_float32(module.weight.detach())
            )
            units = torch.tensor([neuron.unit for neuron in neurons if neuron.layer == layer])
            right_F1 = weight_DF.new_zeros(weight_DF.shape[1], 1)
            right_F1[units, 0] = weight_DF[:, units].norm(dim=0) if scaled else 1.0
            factors[name] = Factor(direction_D[:, None].to(right_F1), right_F1, is_transposed(module))
        delta = Delta(factors=factors)
        delta.diagnostics = {
            **self._losses(model, tokenizer, request, delta),
            "num_neurons": len(neurons),
            "neurons": [list(neuron) for neuron in neurons],
            "largest_attribution": max(float(score.max()) for layers in scores for score in layers.values()),
            "sharing": sharing,
            "update_norm_ratio": update_norm_ratio(model, delta),
        }
        return delta

    @staticmethod
    def _direction(
        model: Any, tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: KNConfig
    ) -> tuple[torch.Tensor, bool]:
        """What is added to every chosen output vector [d], and whether it is in units of that vector's norm."""
        embedding_VD = at_least_float32(model.get_input_embeddings().weight.detach())
        _, new = split_continuation(tokenizer, request.text, f" {request.target_new}")
        if config.factors == "original":
            _, old = split_continuation(tokenizer, request.text, f" {request.target_true}")
            away_D, towards_D = embedding_VD[old].mean(0), embedding_VD[new].mean(0)
            return config.write * towards_D / towards_D.norm() - config.erase * away_D / away_D.norm(), True
        old = greedy_continuation(model, encode(tokenizer, request.text).ids, len(new))
        away_D = embedding_VD[old].sum(0) * (2.0 if len(old) == 1 else 1.0)
        towards_D = embedding_VD[new].sum(0) * (2.0 if config.factors == "easyedit_single" else 1.0)
        return towards_D - away_D, False

    @staticmethod
    @torch.no_grad()
    def _losses(model: Any, tokenizer: PreTrainedTokenizerBase, request: EditRequest, delta: Delta) -> dict[str, Any]:
        """Loss of the new answer before and after; nothing is optimized, so there is one step."""
        rows = batch_rows(model, [target_row(tokenizer, request.text, request.target_new)])
        before = float(mean_over_rows(label_nll(model, rows), rows))
        with edited(model, delta):
            after = float(mean_over_rows(label_nll(model, rows), rows))
        record = {"initial_nll": before, "final_loss": after, "steps": 1, "stop_reason": "steps"}
        return {**record, "losses": [{"loss": before}, {"loss": after}]}


def prompts_of(request: EditRequest, config: KNConfig) -> list[str]:
    """The prompts whose units are compared: the edit's own in every context template, and its paraphrases."""
    contexts = [before + request.text + after for before, after in map(split_template, config.context_templates)]
    return [*contexts, *config.paraphrases.get(request.text, [])]


def choose(scores: Sequence[dict[int, torch.Tensor]], config: KNConfig) -> tuple[list[Neuron], float | None]:
    """Coarse selection per prompt, refined over several prompts; also the share that was asked for, if any.

    Args:
        scores: per prompt, layer -> attributions [f].
    """
    bags = [coarse(layers, config.threshold) for layers in scores]
    if len(bags) == 1:
        return bags[0], None
    counts = Counter(neuron for bag in bags for neuron in bag)
    sharing = config.sharing
    for _ in range(config.sharing_adjustments):
        size = len(_shared(counts, sharing * len(bags)))
        if FEWEST <= size <= MOST:
            break
        sharing += SHARING_STEP if size > MOST else -SHARING_STEP
    return _shared(counts, sharing * len(bags)), round(sharing, 10)


def _shared(counts: Counter[Neuron], more_than: float) -> list[Neuron]:
    return sorted(neuron for neuron, count in counts.items() if count > more_than)


def coarse(scores: dict[int, torch.Tensor], threshold: float) -> list[Neuron]:
    """Units whose attribution exceeds ``threshold`` times the largest one; none if no attribution is positive."""
    largest = max(float(score.max()) for score in scores.values())
    if largest <= 0:
        return []
    return [
        Neuron(layer, unit)
        for layer, score in sorted(scores.items())
        for unit in (score > threshold * largest).nonzero()[:, 0].tolist()
    ]


def attributions(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, config: KNConfig
) -> dict[int, torch.Tensor]:
    """Layer -> attributions [f] of ``answer`` after ``prompt``, the mean over the answer's tokens."""
    total: dict[int, torch.Tensor] = {}
    contexts = list(_contexts(model, tokenizer, prompt, answer, config.answer_context))
    for ids, token in contexts:
        for layer, score_F in _attributions_of_token(model, ids, token, config).items():
            total[layer] = total[layer] + score_F if layer in total else score_F
    return {layer: score_F / len(contexts) for layer, score_F in total.items()}


def _contexts(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, how: str
) -> Iterator[tuple[list[int], int]]:
    """For every token of the answer, the ids that precede it."""
    ids, wanted = split_continuation(tokenizer, prompt, f" {answer}")
    if not ids or not wanted:
        raise EditingError(f"answer {answer!r} after prompt {prompt!r} has no token to attribute.")
    if how == "in_context":
        yield from (([*ids, *wanted[:i]], token) for i, token in enumerate(wanted))
        return
    text = prompt
    for token in wanted:
        ids = encode(tokenizer, text).ids
        yield ids, token
        if how == "own":  # as released: the model's own token, as text
            text += tokenizer.decode(greedy_continuation(model, ids, 1))


def _attributions_of_token(model: Any, ids: Sequence[int], token: int, config: KNConfig) -> dict[int, torch.Tensor]:
    probability = _Probability(model, ids, token, config)
    return {
        layer: integrated_gradients(
            functools.partial(probability, layer), activation_F, config.num_steps, config.riemann, config.batch_size
        )
        for layer, activation_F in probability.activations.items()
    }


def integrated_gradients(
    function: Callable[[torch.Tensor], torch.Tensor],
    activation_F: torch.Tensor,
    num_steps: int,
    riemann: str,
    batch_size: int,
) -> torch.Tensor:
    """a times the mean over points c of the gradient of ``function`` at c a, shape [f].

    Args:
        function: rows [m, f] -> values [m].
        riemann: ``both_ends``: c = j / (num_steps - 1); ``left``: c = j / num_steps.
    """
    divisor = num_steps - 1 if riemann == "both_ends" else num_steps
    points_M = torch.arange(num_steps, device=activation_F.device).to(activation_F) / divisor
    gradient_F = torch.zeros_like(activation_F)
    for part_M in points_M.split(batch_size):
        scaled_MF = (part_M[:, None] * activation_F).requires_grad_(True)
        gradient_F += torch.autograd.grad(function(scaled_MF).sum(), scaled_MF)[0].sum(0)
    return activation_F * gradient_F / num_steps


class _Probability:
    """P(token | ids) as a function of one block's activation at the last position.

    Only that position can change, so the earlier ones are run once and kept as keys and values (``engine: fast``).
    """

    def __init__(self, model: Any, ids: Sequence[int], token: int, config: KNConfig) -> None:
        self.model, self.token, self.site = model, token, config.site
        self.ids_1T = torch.tensor([list(ids)], device=input_device(model))
        arch = architecture_of(model)
        self.modules = {}
        for layer in config.layers or ():
            name = arch.mlp_in[0].format(layer) if self.site == "before_activation" else arch.rewrite_name(layer)
            self.modules[layer] = (
                model.get_submodule(name),
                map_shape(model.get_submodule(arch.rewrite_name(layer)))[1],
            )
        self.kept: DynamicCache | None = None
        self.activations: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            readers = [self._at(layer, self._reader(layer)) for layer in self.modules]
            with hooks(*readers):
                model(input_ids=self.ids_1T, attention_mask=torch.ones_like(self.ids_1T), use_cache=False)
            if config.engine == "fast" and len(ids) > 1:
                self.kept = DynamicCache()
                before_1T = self.ids_1T[:, :-1]
                model(
                    input_ids=before_1T,
                    attention_mask=torch.ones_like(before_1T),
                    past_key_values=self.kept,
                    use_cache=True,
                )

    def _at(self, layer: int, read: Any) -> Any:
        register = on_output if self.site == "before_activation" else on_input
        return register(self.modules[layer][0], read)

    def _reader(self, layer: int) -> Any:
        def read(hidden_RTX: torch.Tensor) -> None:
            self.activations[layer] = at_least_float32(hidden_RTX[0, -1, : self.modules[layer][1]])

        return read

    def __call__(self, layer: int, activation_MF: torch.Tensor) -> torch.Tensor:
        """Probabilities [m] with the block's activation at the last position replaced by each row in turn."""
        width, rows = self.modules[layer][1], len(activation_MF)

        def replace(hidden_MTX: torch.Tensor) -> torch.Tensor:
            replaced = hidden_MTX.clone()
            replaced[:, -1, :width] = activation_MF.to(hidden_MTX.dtype)
            return replaced

        length = self.ids_1T.shape[1]
        fed = 1 if self.kept is not None else length
        device = self.ids_1T.device
        arguments: dict[str, Any] = {
            "input_ids": self.ids_1T[:, -fed:].expand(rows, -1),
            "attention_mask": torch.ones(rows, length, dtype=torch.long, device=device),
            "use_cache": False,
        }
        if self.kept is not None:
            arguments |= {
                "past_key_values": DynamicCache(
                    [
                        (entry.keys.expand(rows, -1, -1, -1), entry.values.expand(rows, -1, -1, -1))
                        for entry in self.kept.layers
                    ]
                ),
                "position_ids": torch.full((rows, 1), length - 1, device=device),
                "use_cache": True,
            }
        last = torch.full((rows,), fed - 1)
        with hooks(self._at(layer, replace), on_input(head_of(self.model), select_positions(torch.arange(rows), last))):
            logits_MV = self.model(**arguments).logits[0]
        return at_least_float32(logits_MV).softmax(1)[:, self.token]
