"""KN: attribute the old answer to MLP units and rewrite their output vectors.

Dai et al., "Knowledge Neurons in Pretrained Transformers". Unit (l, i) is the i-th inner unit of the MLP of block l, a
its activation at the last token of a context, P the probability of an answer token after it. Its attribution is

    Attr(l, i) = a_i * integral over c in [0, 1] of dP(c a) / d(c a_i)

with the whole activation vector of the block scaled by c; the integral is a mean over ``num_steps`` points. Units above
``threshold`` times the largest attribution over all blocks are selected (coarse). With several prompts, only those
selected for more than ``sharing`` of them remain (refine). Their output vectors r, columns of the rewrite module, move
away from the embedding of the old answer and toward that of the new one.

The paper's release ("original") and EasyEdit's, which the BAKE papers ran, differ in these settings; the first value is
EasyEdit's and the default:

- ``site``: ``before_activation``, the output of the first MLP matrix; original: ``after_activation``, the input of the
  rewrite module.
- ``riemann``: ``both_ends``, c = j / (m - 1); original: ``left``, c = j / m.
- ``factors``: ``easyedit``, r += sum E[new] - sum E[old] where the old tokens are the model's own greedy continuation,
  as many as the new answer has, and count twice if there is only one; original: ``original``,
  r += ||r|| (8 E[new] / ||E[new]|| - E[old] / ||E[old]||) with the old answer. ``easyedit_single`` doubles E[new] too,
  as EasyEdit does where it takes the whole new answer for one vocabulary entry (Mistral). Both sums grow with the
  answer's length without bound; long targets get a warning.
- ``sharing``: unused with EasyEdit's single prompt; original: 0.7, moved by 0.05 up to 6 times toward 2 to 5 units
  (``sharing_adjustments: 6``), with at least three prompts.

The original edits single-token answers of BERT; for several tokens, ``factors: original`` uses their mean embedding. It
also drops units that occur in over a tenth of a relation's facts. That would make one edit depend on others and is left
out.

Not copied from EasyEdit: one step (its files for 7B models), which is a gradient at zero and no integral; the answer
encoded alone, BOS included, for Llama; an unknown token for Mistral's answers. Every token of the old answer is scored
after the prompt and the answer's own earlier tokens; ``answer_context`` selects the released ways.

Where blocks normalize the MLP's output (Gemma 2 and 3, OLMo 2), scaling an activation changes nothing until c is nearly
zero. The points near zero decide there, and attributions do not add up to the change of P. The method was not designed
for such models.

Shapes: f width of the inner layer, d residual width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import NOTHING_CARRIED, ROW_TOKENS, TARGET_TOKENS, Footprint, low_rank_footprint, passes
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import update_norm_ratio
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.integrated_gradients import (
    ActivationSite,
    Riemann,
    TokenProbability,
    integrated_gradients,
)
from edit_hooks.gradient.labeled_rows import batch_rows, label_nll, mean_over_rows, target_row
from edit_hooks.modeling.architectures import architecture_of, is_transposed, num_layers
from edit_hooks.modeling.forward.sampling import greedy_continuation
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import encode, split_continuation
from edit_hooks.modeling.weights import read_weight
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from edit_hooks.utils.settings.numbers import AT_LEAST_TWO, INNER_SHARE, NON_NEGATIVE, POSITIVE
from edit_hooks.utils.text.slots import split_template

SHARING_STEP, MIN_NEURONS, MAX_NEURONS = 0.05, 2, 5

# Number of target tokens above which a sum of their embeddings is reported as large.
LONG_TARGET = 3
LONG_TARGET_WARNING = (
    f"a target has more than {LONG_TARGET} tokens, and as released the update is a sum over the embeddings of all of "
    "them: it grows with the length of the target without bound, and long targets damage the model. Shorten the "
    "targets, or use factors=original, in units of the output vector's norm."
)

AnswerContext = Literal["in_context", "own", "prompt"]


@dataclass(kw_only=True)
class KNConfig(EditorConfig):
    """Settings of knowledge neurons; ``layers`` are the attributed blocks.

    All blocks by default.
    """

    num_steps: int = config_field(
        "points of the integral (at 1, as in EasyEdit's files for 7B models, it is a gradient at zero)",
        within=AT_LEAST_TWO,
        default=20,
    )
    batch_size: int = config_field("points of the integral computed at once", within=POSITIVE, default=20)
    riemann: Riemann = config_field(
        "positions of the m points; both_ends: j/(m-1) (EasyEdit); left: j/m (original)", default="both_ends"
    )
    site: ActivationSite = config_field(
        "the scaled activation: before the non-linearity (EasyEdit) or after it (original)",
        default="before_activation",
    )
    answer_context: AnswerContext = config_field(
        "text between the prompt and a later token of the old answer; in_context: the answer's earlier tokens; own: "
        "the model's greedy tokens (EasyEdit on Llama and Qwen); prompt: nothing (EasyEdit on GPT)",
        default="in_context",
    )
    threshold: float = config_field(
        "selects units whose attribution exceeds this share of the largest", within=INNER_SHARE, default=0.2
    )
    context_templates: list[str] = config_field(
        "texts with {} for the prompt; attributions are computed for each", default_factory=lambda: ["{}"]
    )
    paraphrases: dict[str, list[str]] = config_field(
        "edit prompt -> further prompts for which attributions are computed", default_factory=dict
    )
    sharing: float = config_field(
        "with several prompts: share of them that must select a unit", within=INNER_SHARE, default=0.7
    )
    sharing_adjustments: int = config_field(
        "largest number of times 'sharing' moves by 0.05 until 2 to 5 units are selected",
        within=NON_NEGATIVE,
        default=0,
    )
    factors: Literal["original", "easyedit", "easyedit_single"] = config_field(
        "rewriting of a unit's output vector; original: in units of its norm, with 'erase' and 'write'; easyedit: "
        "by sums of embeddings; easyedit_single: with the new answer's doubled",
        default="easyedit",
    )
    erase: float = config_field(
        "factors=original: weight of the old answer, in norms of the output vector", within=NON_NEGATIVE, default=1.0
    )
    write: float = config_field(
        "factors=original: weight of the new answer, in norms of the output vector", within=NON_NEGATIVE, default=8.0
    )
    keep_intermediates: bool = config_field("keep the attributions on the delta for inspection", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.context_templates:
            raise EditingError("editor setting 'context_templates' is empty; give at least one text with {}.")
        for template in self.context_templates:
            split_template(template)


class Neuron(NamedTuple):
    """An inner unit of a block's MLP."""

    layer: int
    unit: int


class NeuronSelection(NamedTuple):
    """The selected units, and the share of prompts that selected them.

    The share is ``None`` for a single prompt.
    """

    neurons: list[Neuron]
    sharing: float | None


class KN(Editor[KNConfig]):
    """Rewritten output vectors of the MLP units that carry the old answer."""

    name = "kn"
    config_class = KNConfig
    config_folders = ("kn",)
    needs_subject = False
    edits_quantized = True
    reads_past_updates = False
    stream_growth = NOTHING_CARRIED
    contract_settings: ClassVar[Settings] = {"layers": [1]}
    contract_exemptions: ClassVar[Mapping[str, str]] = {
        "target": "embeddings of answers are added to MLP outputs, which means nothing to a random model's head"
    }

    def default_layers(self, model_config: PretrainedConfig) -> list[int]:
        return list(range(num_layers(model_config)))

    def warnings(self, job: EditJob[KNConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        is_long = delta.diagnostics["target_tokens"] > LONG_TARGET
        return [LONG_TARGET_WARNING] if is_long and job.config.factors != "original" else []

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        if request.target_true is None:
            raise UnusableRequestError(
                f"{request.label} (prompt {request.text!r}) has no 'target_true'; editor 'kn' needs the old "
                "answer to find its units. Add it to the record, or use another editor."
            )
        _answer_tokens(tokenizer, request.text, request.continued_by(request.target_true))

    def other_lengths(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> Mapping[str, int]:
        """The old answer is attributed in every template and after every paraphrase."""
        config, lengths = self.known_config(model), [0]
        # without a model the shipped value is unknown, and no request is refused for a guess
        is_known = model is not None or "answer_context" in self.overrides
        in_place = is_known and config.answer_context != "prompt"
        for prompt in attribution_prompts(request, config):
            ids, answer_ids = _answer_tokens(tokenizer, prompt, request.continued_by(str(request.target_true)))
            # answer_context=own runs as many tokens of the model's own in the answer's place
            lengths.append(len(ids) + (len(answer_ids) - 1 if in_place else 0))
        return {"target_true and the longest prompt that is attributed": max(lengths)}

    def footprint(self, config: KNConfig, model: nn.Module) -> Footprint:
        """The points of the integral for each block, prompt and answer token; a few units are written."""
        rest = low_rank_footprint(model, self.target_modules(config, model), config.edited_layers, config)
        number = len(config.edited_layers) * len(config.context_templates) * TARGET_TOKENS
        work = passes(model, first=0, rows=number * config.num_steps, tokens=ROW_TOKENS, steps=1)
        return dataclasses.replace(rest, activations=config.batch_size * rest.activations, work=work)

    def compute(self, job: EditJob[KNConfig]) -> list[Delta]:
        if job.model.get_input_embeddings().weight.shape[1] != job.model.config.hidden_size:
            raise EditingError(
                "editor 'kn' adds embeddings to MLP outputs, and this model's embeddings have another width; use "
                "another editor."
            )
        deltas = []
        with frozen(job.model):
            for request in job.requests:
                deltas.append(_edit(job, request))
                job.progress(1)
        return deltas


def _edit(job: EditJob[KNConfig], request: EditRequest) -> Delta:
    model, tokenizer, config = job.model, job.tokenizer, job.config
    scores = [
        attributions(model, tokenizer, prompt, request.continued_by(str(request.target_true)), config)
        for prompt in attribution_prompts(request, config)
    ]
    neurons, sharing = select_neurons(scores, config)
    _, new = split_continuation(tokenizer, request.text, request.continuation)
    direction_D = _direction(model, tokenizer, request, new, config)
    delta = Delta()
    for layer in sorted({neuron.layer for neuron in neurons}):
        name = architecture_of(model).rewrite_name(layer)
        units = torch.tensor([neuron.unit for neuron in neurons if neuron.layer == layer])
        delta.factors[name] = _rewrite(model.get_submodule(name), units, direction_D, config)
    delta.diagnostics = {
        **_losses(model, tokenizer, request, delta),
        "target_tokens": len(new),
        "num_neurons": len(neurons),
        "neurons": [list(neuron) for neuron in neurons],
        "largest_attribution": max(float(score.max()) for layers in scores for score in layers.values()),
        "sharing": sharing,
        "update_norm_ratio": update_norm_ratio(model, delta),
    }
    if config.keep_intermediates:  # [prompts, layers, f]
        delta.intermediates["attributions"] = torch.stack([torch.stack(list(layers.values())) for layers in scores])
    return delta


# -- rewriting ---------------------------------------------------------------------------------------------------------


def _direction(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    request: EditRequest,
    new: list[int],
    config: KNConfig,
) -> torch.Tensor:
    """The vector [d] added to every selected output vector.

    ``factors: original`` scales it by that vector's norm. The other ones grow with the number of target tokens.

    Args:
        new: the target's tokens.
    """
    embedding_VD = at_least_float32(model.get_input_embeddings().weight.detach())
    if config.factors == "original":
        _, old = split_continuation(tokenizer, request.text, request.continued_by(str(request.target_true)))
        old_D, new_D = embedding_VD[old].mean(0), embedding_VD[new].mean(0)
        return config.write * new_D / new_D.norm() - config.erase * old_D / old_D.norm()
    old = greedy_continuation(model, encode(tokenizer, request.text).ids, len(new))
    old_D = embedding_VD[old].sum(0) * (2.0 if len(old) == 1 else 1.0)
    new_D = embedding_VD[new].sum(0) * (2.0 if config.factors == "easyedit_single" else 1.0)
    return new_D - old_D


def _rewrite(module: nn.Module, units: torch.Tensor, direction_D: torch.Tensor, config: KNConfig) -> Factor:
    """The rank-one update that adds the direction to the units' output vectors."""
    transposed = is_transposed(module)
    weight = at_least_float32(read_weight(module))
    weight_DF = weight.T if transposed else weight
    right_F1 = weight_DF.new_zeros(weight_DF.shape[1], 1)
    right_F1[units, 0] = weight_DF[:, units].norm(dim=0) if config.factors == "original" else 1.0
    return Factor(direction_D[:, None].to(right_F1), right_F1, transposed)


@torch.no_grad()
def _losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, request: EditRequest, delta: Delta
) -> dict[str, Any]:
    """Loss of the new answer before and after the edit."""
    rows = batch_rows(model, [target_row(tokenizer, request.text, request.continuation)])
    before = float(mean_over_rows(label_nll(model, rows), rows))
    with edited(model, delta):
        after = float(mean_over_rows(label_nll(model, rows), rows))
    return loss_diagnostics([before, after], num_steps=1)


# -- selection ---------------------------------------------------------------------------------------------------------


def select_neurons(scores: Sequence[dict[int, torch.Tensor]], config: KNConfig) -> NeuronSelection:
    """Coarse selection per prompt, refined over several prompts.

    Args:
        scores: per prompt, layer -> attributions [f].
    """
    selections = [coarse_neurons(layers, config.threshold) for layers in scores]
    if len(selections) == 1:
        return NeuronSelection(selections[0], None)
    counts = Counter(neuron for neurons in selections for neuron in neurons)
    sharing = config.sharing
    for _ in range(config.sharing_adjustments):
        size = len(_shared_neurons(counts, sharing * len(selections)))
        if MIN_NEURONS <= size <= MAX_NEURONS:
            break
        sharing += SHARING_STEP if size > MAX_NEURONS else -SHARING_STEP
    return NeuronSelection(_shared_neurons(counts, sharing * len(selections)), round(sharing, 10))


def _shared_neurons(counts: Counter[Neuron], bound: float) -> list[Neuron]:
    return sorted(neuron for neuron, count in counts.items() if count > bound)


def coarse_neurons(scores: dict[int, torch.Tensor], threshold: float) -> list[Neuron]:
    """Units whose attribution exceeds ``threshold`` times the largest one.

    None if no attribution is positive.
    """
    largest = max(float(score.max()) for score in scores.values())
    if largest <= 0:
        return []
    return [
        Neuron(layer, unit)
        for layer, score in sorted(scores.items())
        for unit in (score > threshold * largest).nonzero()[:, 0].tolist()
    ]


# -- attribution -------------------------------------------------------------------------------------------------------


def attribution_prompts(request: EditRequest, config: KNConfig) -> list[str]:
    """The edit prompt in every context template, and its paraphrases."""
    contexts = [request.in_template(template).text for template in config.context_templates]
    paraphrases = config.paraphrases.get(request.bare_text, [])
    return [*contexts, *(request.context.wrap(text) if request.context else text for text in paraphrases)]


def attributions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, config: KNConfig
) -> dict[int, torch.Tensor]:
    """Attributions of ``answer`` after ``prompt``: layer -> [f].

    The mean over the answer's tokens. The answer begins with the white space that follows the prompt, if any.
    """
    total: dict[int, torch.Tensor] = {}
    contexts = list(_answer_contexts(model, tokenizer, prompt, answer, config.answer_context))
    for ids, token in contexts:
        for layer, score_F in _token_attributions(model, ids, token, config).items():
            total[layer] = total[layer] + score_F if layer in total else score_F
    return {layer: score_F / len(contexts) for layer, score_F in total.items()}


def _answer_contexts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, kind: AnswerContext
) -> Iterator[tuple[list[int], int]]:
    """For every token of the answer, the ids that precede it."""
    ids, answer_ids = _answer_tokens(tokenizer, prompt, answer)
    if kind == "in_context":
        yield from (([*ids, *answer_ids[:i]], token) for i, token in enumerate(answer_ids))
        return
    text = prompt
    for token in answer_ids:
        ids = encode(tokenizer, text).ids
        yield ids, token
        if kind == "own":  # as released: the model's own token, appended as text
            text += tokenizer.decode(greedy_continuation(model, ids, 1))


def _answer_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of the answer after it.

    Raises:
        UnusableRequestError: one of them has no token.
    """
    ids, answer_ids = split_continuation(tokenizer, prompt, answer)
    if not ids or not answer_ids:
        raise UnusableRequestError(
            f"answer {answer!r} after prompt {prompt!r} has no token to attribute; give a prompt and an answer that "
            "are not empty."
        )
    return ids, answer_ids


def _token_attributions(
    model: PreTrainedModel, ids: Sequence[int], token: int, config: KNConfig
) -> dict[int, torch.Tensor]:
    probability = TokenProbability(
        model, ids, token, config.edited_layers, config.site, use_cache=config.engine == "fast"
    )
    return {
        layer: integrated_gradients(
            functools.partial(probability, layer), activation_F, config.num_steps, config.riemann, config.batch_size
        )
        for layer, activation_F in probability.activations.items()
    }
