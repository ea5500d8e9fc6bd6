"""Causal tracing: the states, by layer and token, that carry a fact.

Section 2 of "Locating and Editing Factual Associations in GPT"; stage 1 of the framework in appendix B of "Beyond Local
Edits". For every fact three kinds of runs over its prompt, measured by the probability of the answer's first token at
the prompt's last token:

- clean: the plain prompt;
- corrupted: Gaussian noise on the embeddings of the subject's tokens, ``noise`` times the standard deviation of the
  embeddings of all subjects, ``samples`` draws (the same ones for all facts with as many subject tokens), or the noise
  that is given;
- restored: the corrupted run with clean values restored at one token: the output of block l (``state``), or of the MLP
  (``mlp``) or attention (``attention``) modules in a window of blocks around l.

The indirect effect is p(restored) - p(corrupted), averaged over the draws; its mean over the facts, by layer and by
token group, is the average indirect effect. Tokens before the subject are not corrupted, so restoring them has no
effect and is left out. Every position belongs to one group: the prompt's last token is ``last`` (also where the subject
ends there), a one-token subject is ``subject_last``, the only token between subject and end ``after_first``.

The window of the paper is 10 of the 48 blocks of GPT-2 XL; the default is that share of the model's depth.

Shapes: F facts, N draws, C cells (a fact and one of its tokens), L layers, d residual width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.artifacts.given_tensors import read_given_tensors, tensor_of
from edit_hooks.base.model_support import require_support
from edit_hooks.locate.tracing.restored_runs import KINDS, RestoredRuns, TracedFact, TracedToken, last_logits
from edit_hooks.modeling.architectures import input_device, num_layers, unwrapped
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.grad_mode import gradients
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tokens import encode, split_continuation, tokens_in_span
from edit_hooks.request import EditRequest, require_subjects
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.numbers import POSITIVE, SEED, require_number, require_whole
from edit_hooks.utils.storage.hashing import code_fingerprint

log = get_logger("lm_eval.edited_hf")


AnswerRule = Literal["known", "predicted", "true"]


GROUPS = ("subject_first", "subject_middle", "subject_last", "after_first", "after_further", "last")


PAPER_WINDOW, PAPER_DEPTH = 10, 48


SEVERAL_LAYERS = 5


MAX_TOKENS = 4096


@dataclass(frozen=True)
class TraceSettings:
    """Settings of a trace.

    Attributes:
        samples: noise draws per fact. noise: in standard deviations of the subjects' embeddings. seed: of the draws.
        window: blocks restored together for MLP and attention; ``None``: the paper's share of the depth.
        answer: ``known``: the first token of target_true, and facts whose answer is not the model's prediction are
            skipped; ``true``: the same for all facts; ``predicted``: the model's prediction. Facts without a
            target_true use the prediction under every rule.
        max_tokens: bound on the tokens of one forward pass, padding included.
    """

    samples: int = 10
    noise: float = 3.0
    seed: int = 0
    window: int | None = None
    answer: AnswerRule = "known"
    max_tokens: int = MAX_TOKENS

    def __post_init__(self) -> None:
        for name in ("samples", "window", "max_tokens"):
            if (value := getattr(self, name)) is not None:
                require_whole(name, value)
        require_number("noise", self.noise, POSITIVE)
        require_whole("seed", self.seed, SEED)
        if self.answer not in get_args(AnswerRule):
            raise EditingError(f"answer is {self.answer!r}; accepted: {', '.join(get_args(AnswerRule))}.")

    def window_for(self, depth: int) -> int:
        """Blocks restored together in a model of that depth."""
        return min(self.window or max(1, round(PAPER_WINDOW * depth / PAPER_DEPTH)), depth)


@dataclass
class FactTrace:
    """Probabilities of one fact, and effects by kind.

    Effects are indexed [token from the subject on][layer].
    """

    clean: float
    corrupted: float
    effects: dict[str, list[list[float]]]


@dataclass
class Trace:
    """Average indirect effects.

    Attributes:
        effects: kind -> group -> ``mean`` and ``stderr`` [L] over ``count`` tokens; groups without tokens are absent.
        clean, corrupted: mean probability of the answer. skipped: case -> reason.
        noise_std: standard deviation of the noise, in units of the embeddings; ``None`` if the noise was given.
    """

    settings: dict[str, Any]
    num_facts: int
    skipped: dict[str, str]
    noise_std: float | None
    clean: float
    corrupted: float
    effects: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def suggested(self) -> dict[str, list[int]]:
        """Suggest layers to edit, by the effect of MLPs at the subject's last token.

        Returns:
            ``one``, the layer of the largest effect, and ``several``, the run of five layers with the largest sum;
            empty where no effect is positive.
        """
        group = self.effects["mlp"].get("subject_last")
        if group is None or max(group["mean"]) <= 0:
            return {}
        mean = group["mean"]
        size = min(SEVERAL_LAYERS, len(mean))
        start = max(range(len(mean) - size + 1), key=lambda first: sum(mean[first : first + size]))
        return {"one": [mean.index(max(mean))], "several": list(range(start, start + size))}

    def to_dict(self) -> dict[str, Any]:
        """The trace and the suggested layers, JSON-able."""
        return {**asdict(self), "suggested": self.suggested()}


def trace_facts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[EditRequest],
    settings: TraceSettings | None = None,
    *,
    noise: Mapping[str, torch.Tensor] | str | None = None,
    store: Store | None = None,
    quiet: bool = False,
) -> Trace:
    """Trace facts; facts in the store are loaded.

    Args:
        requests: facts to trace, with subjects; only prompt and target_true matter.
        noise: the noise itself, in the place of draws with the settings' ``noise`` and ``seed``: by prompt, subject
            filled in, what is added to the embeddings of its subject's tokens, [samples, subject tokens, d]. A mapping
            or a safetensors file.

    Raises:
        EditingError: for requests without subject, when no fact is left to trace, for noise that does not fit, and for
            a model whose weights cannot be edited.
    """
    settings = settings or TraceSettings()
    inner = unwrapped(model)
    require_subjects(requests, "trace")
    require_support(inner)
    given = None if noise is None else read_given_tensors(noise, "noise")
    with frozen(inner), gradients(False):
        facts, skipped = _select_facts(inner, tokenizer, requests, settings)
        if not facts:
            raise EditingError(
                f"none of the {len(requests)} facts can be traced: {next(iter(skipped.values()))}. "
                "Use --answer predicted to trace what the model predicts, right or wrong."
            )
        if given is not None:
            facts = _with_noise(inner, facts, requests, given, settings.samples)
        noise_std = settings.noise * _embedding_std(inner, facts) if given is None else None
        traces = _load_or_run(inner, tokenizer, facts, settings, noise_std, store, quiet)
    depth, unused = num_layers(inner), {} if given is None else {"noise": None, "seed": None}
    return Trace(
        settings={"layers": depth, **asdict(settings), **unused, "window": settings.window_for(depth)},
        num_facts=len(facts),
        skipped=skipped,
        noise_std=noise_std,
        clean=sum(trace.clean for trace in traces) / len(traces),
        corrupted=sum(trace.corrupted for trace in traces) / len(traces),
        effects=_average(facts, traces),
    )


# --- facts -----------------------------------------------------------------------------------------------------------


def _select_facts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, requests: Sequence[EditRequest], settings: TraceSettings
) -> tuple[list[TracedFact], dict[str, str]]:
    """Facts to trace, and by case the reasons why the others are skipped."""
    encoded = [_encode_fact(tokenizer, request) for request in requests]
    facts, skipped = [], {}
    predicted_tokens = _predict(model, [fact.ids for fact, _ in encoded], settings.max_tokens)
    for request, (fact, true_token), predicted in zip(requests, encoded, predicted_tokens, strict=True):
        answer = predicted if true_token is None or settings.answer == "predicted" else true_token
        if settings.answer == "known" and answer != predicted:
            case = str(request.case_id or request.text)
            skipped[case] = "the model does not predict the first token of target_true"
        else:
            facts.append(fact._replace(answer=answer))
    return facts, skipped


def _encode_fact(tokenizer: PreTrainedTokenizerBase, request: EditRequest) -> tuple[TracedFact, int | None]:
    """Encode a prompt with its subject, and the first token of target_true."""
    encoding = encode(tokenizer, request.text)
    assert request.subject_span is not None
    subject = tokens_in_span(encoding, request.subject_span)
    if not subject:
        raise EditingError(f"no token of {request.text!r} covers the subject {request.subject!r}.")
    true_token = None
    if request.target_true is not None:
        true_token = split_continuation(tokenizer, request.text, request.continued_by(request.target_true))[1][0]
    return TracedFact(request.key, tuple(encoding.ids), subject[0], subject[-1] + 1, -1), true_token


def _with_noise(
    model: Any,
    facts: Sequence[TracedFact],
    requests: Sequence[EditRequest],
    given: Mapping[str, torch.Tensor],
    samples: int,
) -> list[TracedFact]:
    """The facts with the noise that is given for their prompts."""
    width, text_of = model.get_input_embeddings().weight.shape[1], {request.key: request.text for request in requests}
    return [
        fact._replace(noise=tensor_of(given, text_of[fact.key], (samples, fact.end - fact.first, width), "noise"))
        for fact in facts
    ]


def _predict(model: Any, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[int]:
    """The most likely next token of every prompt."""
    tokens = []
    for batch in token_batches(range(len(prompts)), [len(ids) for ids in prompts], max_tokens):
        ids_RT, mask_RT = right_padded([prompts[index] for index in batch], input_device(model))
        tokens += last_logits(model, ids_RT, mask_RT.sum(1) - 1).argmax(1).tolist()
    return tokens


def _embedding_std(model: Any, facts: Sequence[TracedFact]) -> float:
    """Standard deviation of the embeddings of all subject tokens over all entries, unbiased as in ROME's release."""
    tokens = [token for fact in facts for token in fact.ids[fact.first : fact.end]]
    embedded = model.get_input_embeddings()(torch.tensor(tokens, device=input_device(model)))
    return float(embedded.double().std())


# --- runs ------------------------------------------------------------------------------------------------------------


def _load_or_run(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    facts: Sequence[TracedFact],
    settings: TraceSettings,
    noise_std: float | None,
    store: Store | None,
    quiet: bool,
) -> list[FactTrace]:
    """Traces of all facts; new ones are stored as soon as their batch is done."""
    model_parts = model_identity(model, tokenizer).to_dict() if store else {}
    identity = {
        "noise_std": noise_std,
        "samples": settings.samples,
        "seed": settings.seed,
        "window": settings.window_for(num_layers(model)),
    }

    def description(fact: TracedFact) -> Description:
        inputs = {**identity, "request": fact.key, "answer": fact.answer}
        if fact.noise is not None:
            inputs |= {"seed": None, "noise": tensor_digest(fact.noise)}
        return Description(what="causal trace", model=model_parts, code=code_fingerprint(__name__), inputs=inputs)

    traces: dict[int, FactTrace] = {}
    for index, fact in enumerate(facts):
        stored = store.load_json("traces", description(fact)) if store else None
        if stored is not None:
            traces[index] = FactTrace(**stored)
    lengths = [len(fact.ids) for fact in facts]
    missing = sorted((index for index in range(len(facts)) if index not in traces), key=lambda index: lengths[index])
    with tqdm(total=len(facts), initial=len(traces), desc="Tracing", unit="fact", disable=quiet) as bar:
        for batch in token_batches(missing, lengths, max(1, settings.max_tokens // settings.samples)):
            batch_traces = _trace_batch(model, [facts[index] for index in batch], settings, noise_std)
            for index, trace in zip(batch, batch_traces, strict=True):
                traces[index] = trace
                if store:
                    store.save_json("traces", description(facts[index]), asdict(trace))
            bar.update(len(batch))
    return [traces[index] for index in range(len(facts))]


def _trace_batch(
    model: nn.Module, facts: Sequence[TracedFact], settings: TraceSettings, noise_std: float | None
) -> list[FactTrace]:
    """All runs of a few facts."""
    runs = RestoredRuns(model, facts, samples=settings.samples, noise_std=noise_std or 0.0, seed=settings.seed)
    window = settings.window_for(runs.depth)
    corrupted_F = runs.corrupted_FN.mean(1)
    cells = [
        TracedToken(index, token) for index, fact in enumerate(facts) for token in range(fact.first, len(fact.ids))
    ]
    effects = {kind: torch.zeros(len(cells), runs.depth, dtype=torch.float64) for kind in KINDS}
    cells_at_once = max(1, settings.max_tokens // (settings.samples * runs.ids_FT.shape[1]))
    for start in range(0, len(cells), cells_at_once):
        chunk = cells[start : start + cells_at_once]
        corrupted_C = corrupted_F[[cell.fact for cell in chunk]]
        for kind in KINDS:
            for layer in range(runs.depth):
                restored_C = runs.restored(kind, layer, window, chunk).mean(1)
                effects[kind][start : start + len(chunk), layer] = restored_C - corrupted_C
    num_cells = [len(fact.ids) - fact.first for fact in facts]
    by_fact = {kind: [part.tolist() for part in effects[kind].split(num_cells)] for kind in KINDS}
    return [
        FactTrace(float(runs.clean_F[i]), float(corrupted_F[i]), {kind: by_fact[kind][i] for kind in KINDS})
        for i in range(len(facts))
    ]


# --- averages --------------------------------------------------------------------------------------------------------


def group_of(fact: TracedFact, token: int) -> str:
    """The group, one of :data:`GROUPS`, of a token from the subject on."""
    if token == len(fact.ids) - 1:
        return "last"
    if token >= fact.end:
        return "after_first" if token == fact.end else "after_further"
    if token == fact.end - 1:
        return "subject_last"
    return "subject_first" if token == fact.first else "subject_middle"


def _average(facts: Sequence[TracedFact], traces: Sequence[FactTrace]) -> dict[str, dict[str, dict[str, Any]]]:
    """Mean and standard error over the tokens of each group, by kind and layer."""
    averages: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in KINDS:
        rows: dict[str, list[list[float]]] = {}
        for fact, trace in zip(facts, traces, strict=True):
            for offset, by_layer in enumerate(trace.effects[kind]):
                rows.setdefault(group_of(fact, fact.first + offset), []).append(by_layer)
        averages[kind] = {group: _mean_and_stderr(rows[group]) for group in GROUPS if group in rows}
    return averages


def _mean_and_stderr(rows: list[list[float]]) -> dict[str, Any]:
    """By layer; the standard error of a single row is ``None``."""
    table = torch.tensor(rows, dtype=torch.float64)
    spread = table.std(0) / math.sqrt(len(rows)) if len(rows) > 1 else torch.full_like(table[0], math.nan)
    stderr = [None if math.isnan(value) else value for value in spread.tolist()]
    return {"mean": table.mean(0).tolist(), "stderr": stderr, "count": len(rows)}
