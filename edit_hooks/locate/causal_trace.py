"""Causal tracing: which states, at which layer and token, carry a fact ("Locating and Editing Factual Associations in
GPT", section 2; stage 1 of the framework in appendix B of "Beyond Local Edits").

For every fact three kinds of runs over its prompt, read as the probability of the answer's first token at the prompt's
last token:

- clean: the plain prompt;
- corrupted: Gaussian noise on the embeddings of the subject's tokens, ``noise`` times the standard deviation of the
  embeddings of all subjects, ``samples`` draws (the same ones for every fact of as many subject tokens);
- restored: the corrupted run with clean values at one token put back: the output of block l (``state``), or of the MLP
  (``mlp``) or attention (``attention``) modules in a window of blocks around l.

The indirect effect is p(restored) - p(corrupted), averaged over the draws; its mean over the facts, by layer and by
where the token stands, is the average indirect effect. Tokens before the subject are not corrupted, so restoring them
does nothing and is left out. Every position belongs to one group: the prompt's last token is ``last`` (also where the
subject ends there), a one-token subject is ``subject_last``, the only token between subject and end ``after_first``.

The window of the paper is 10 of the 48 blocks of GPT-2 XL; without one given it is that share of the model's depth.
Restoring a block's output needs only the blocks above it to run, restoring a window those from its first block on; what
lies below is handed on from the corrupted run. Rows of different facts, tokens and draws share a pass.

Shapes: F facts, N draws, T tokens, L layers, R rows of a pass, d residual width.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from edit_hooks.modeling.architectures import architecture_of, head_of, input_device, num_layers, unwrapped
from edit_hooks.modeling.fingerprint import model_fingerprint
from edit_hooks.modeling.hooks import forward_replaced, frozen, hidden_of, hooks, on_input, on_output, select_positions
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import encode, split_continuation
from edit_hooks.request import EditRequest, require_subjects
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import code_fingerprint

log = logging.getLogger("lm_eval.edited_hf")


AnswerRule = Literal["known", "predicted", "true"]


KINDS = ("state", "mlp", "attention")


GROUPS = ("subject_first", "subject_middle", "subject_last", "after_first", "after_further", "last")


PAPER_WINDOW, PAPER_DEPTH = 10, 48


SEVERAL_LAYERS = 5


MAX_TOKENS = 4096


@dataclass(frozen=True)
class TraceSettings:
    """What is traced.

    Attributes:
        samples: noise draws per fact. noise: in standard deviations of the subjects' embeddings. seed: of the draws.
        window: blocks restored together for MLP and attention; ``None``: the paper's share of the depth.
        answer: ``known``: the first token of target_true, facts whose answer the model does not put first are skipped;
            ``true``: the same, all facts; ``predicted``: whatever the model puts first. Facts without a target_true
            use the prediction under every rule.
        max_tokens: bound on the tokens (padding included) of one pass.
    """

    samples: int = 10
    noise: float = 3.0
    seed: int = 0
    window: int | None = None
    answer: AnswerRule = "known"
    max_tokens: int = MAX_TOKENS

    def __post_init__(self) -> None:
        for name in ("samples", "noise", "window", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise EditingError(f"{name} is {value}; a positive number is needed.")
        if self.answer not in get_args(AnswerRule):
            raise EditingError(f"answer is {self.answer!r}; accepted: {', '.join(get_args(AnswerRule))}.")


class Fact(NamedTuple):
    """A fact as token ids: the prompt, the subject's tokens [first, end), and the first token of the answer."""

    key: str
    ids: tuple[int, ...]
    first: int
    end: int
    answer: int


@dataclass
class FactTrace:
    """One fact's probabilities, and effects by kind, [tokens from the subject on][layers]."""

    clean: float
    corrupted: float
    effects: dict[str, list[list[float]]]


@dataclass
class Trace:
    """Average indirect effects.

    Attributes:
        effects: kind -> group -> ``mean`` and ``stderr`` [L] over ``count`` tokens; groups without tokens are absent.
        clean, corrupted: mean probability of the answer. skipped: case -> reason.
        noise_std: standard deviation of the noise, in units of the embeddings.
    """

    settings: dict[str, Any]
    num_facts: int
    skipped: dict[str, str]
    noise_std: float
    clean: float
    corrupted: float
    effects: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def suggested(self) -> dict[str, list[int]]:
        """Layers to edit: ``one``, where restoring MLPs at the subject's last token helps most, and ``several``, the
        run of five blocks where it does; empty where restoring them never helps."""
        group = self.effects["mlp"].get("subject_last")
        if group is None or max(group["mean"]) <= 0:
            return {}
        mean = group["mean"]
        size = min(SEVERAL_LAYERS, len(mean))
        start = max(range(len(mean) - size + 1), key=lambda first: sum(mean[first : first + size]))
        return {"one": [mean.index(max(mean))], "several": list(range(start, start + size))}

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        return {**asdict(self), "suggested": self.suggested()}


def trace_facts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[EditRequest],
    settings: TraceSettings | None = None,
    *,
    store: Store | None = None,
    quiet: bool = False,
) -> Trace:
    """Trace facts; what the store has is not computed again.

    Args:
        requests: facts to trace, with subjects; only prompt and target_true matter.

    Raises:
        EditingError: for requests without subject, and when no fact is left to trace.
    """
    settings = settings or TraceSettings()
    inner = unwrapped(model)
    require_subjects(requests, "trace")
    with frozen(inner), torch.inference_mode(False), torch.no_grad():
        facts, skipped = _facts(inner, tokenizer, requests, settings)
        if not facts:
            raise EditingError(
                f"none of the {len(requests)} facts can be traced: {next(iter(skipped.values()))}. "
                "Use --answer predicted to trace what the model predicts, right or wrong."
            )
        std = settings.noise * _embedding_std(inner, facts)
        runner = _Runner(inner, settings, std)
        found = _load_or_run(inner, runner, facts, store, quiet)
    kept = {"layers": num_layers(inner), **asdict(settings), "window": runner.window}
    mean = [sum(getattr(trace, name) for trace in found) / len(found) for name in ("clean", "corrupted")]
    return Trace(kept, len(facts), skipped, std, mean[0], mean[1], _averages(facts, found))


# --- facts -----------------------------------------------------------------------------------------------------------


def _facts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, requests: Sequence[EditRequest], settings: TraceSettings
) -> tuple[list[Fact], dict[str, str]]:
    """Facts to trace, and the reasons of the others by case."""
    prepared = [_prepare(tokenizer, request) for request in requests]
    facts, skipped = [], {}
    predicted = _predictions(model, [fact.ids for fact, _ in prepared], settings.max_tokens)
    for request, (fact, wanted), token in zip(requests, prepared, predicted, strict=True):
        answer = token if wanted is None or settings.answer == "predicted" else wanted
        if settings.answer == "known" and answer != token:
            case = str(request.case_id or request.text)
            skipped[case] = "the model does not predict the first token of target_true"
        else:
            facts.append(fact._replace(answer=answer))
    return facts, skipped


def _prepare(tokenizer: PreTrainedTokenizerBase, request: EditRequest) -> tuple[Fact, int | None]:
    """The prompt's tokens with the subject among them, and the first token of target_true."""
    encoding = encode(tokenizer, request.text)
    span = request.subject_span
    assert span is not None
    inside = [i for i, (start, end) in enumerate(encoding.offsets) if start < span[1] and end > span[0]]
    if not inside:
        raise EditingError(f"no token of {request.text!r} covers the subject {request.subject!r}.")
    wanted = None
    if request.target_true is not None:
        wanted = split_continuation(tokenizer, request.text, f" {request.target_true}")[1][0]
    return Fact(request.key, tuple(encoding.ids), inside[0], inside[-1] + 1, -1), wanted


def _predictions(model: Any, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[int]:
    """The likeliest next token of every prompt."""
    found = []
    for part in _parts(prompts, max_tokens):
        ids_RT, last_R = _padded(part, input_device(model))
        with hooks(on_input(head_of(model), select_positions(torch.arange(len(part)), last_R))):
            found += _logits(model, ids_RT).argmax(1).tolist()
    return found


def _parts(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> Iterator[Sequence[tuple[int, ...]]]:
    """Consecutive prompts whose padded size stays within the bound."""
    start = 0
    while start < len(prompts):
        stop, width = start + 1, len(prompts[start])
        while stop < len(prompts) and (stop + 1 - start) * max(width, len(prompts[stop])) <= max_tokens:
            width = max(width, len(prompts[stop]))
            stop += 1
        yield prompts[start:stop]
        start = stop


def _padded(prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids [R, T], and where each prompt ends [R]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
    return ids, torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)


def _logits(model: Any, ids_RT: torch.Tensor) -> torch.Tensor:
    """Logits [R, V] where a hook at the head says. Padding is on the right, so by causality nothing needs to be masked
    (and a masked-out row of a sliding window would be a softmax over nothing)."""
    return model(input_ids=ids_RT, attention_mask=torch.ones_like(ids_RT), use_cache=False).logits[0]


def _embedding_std(model: Any, facts: Sequence[Fact]) -> float:
    """Standard deviation over all entries of the embeddings of all facts' subject tokens."""
    tokens = [token for fact in facts for token in fact.ids[fact.first : fact.end]]
    embedded = model.get_input_embeddings()(torch.tensor(tokens, device=input_device(model)))
    return float(embedded.double().std(correction=0))


def subject_noise(samples: int, num_tokens: int, width: int, std: float, seed: int) -> torch.Tensor:
    """The draws [N, tokens of the subject, d], float32 on the CPU; they depend on these arguments only."""
    generator = torch.Generator().manual_seed(seed)
    return std * torch.randn(samples, num_tokens, width, generator=generator)


# --- runs ------------------------------------------------------------------------------------------------------------


def _load_or_run(
    model: nn.Module, runner: _Runner, facts: Sequence[Fact], store: Store | None, quiet: bool
) -> list[FactTrace]:
    fingerprint = model_fingerprint(model) if store else ""
    settings = {
        "noise_std": runner.std,
        "samples": runner.settings.samples,
        "seed": runner.settings.seed,
        "window": runner.window,
    }

    def description(fact: Fact) -> Description:
        inputs = {**settings, "request": fact.key, "answer": fact.answer}
        return Description(what="causal trace", model=fingerprint, code=code_fingerprint(__name__), inputs=inputs)

    found: dict[int, FactTrace] = {}
    for index, fact in enumerate(facts):
        kept = store.load_json("traces", description(fact)) if store else None
        if kept is not None:
            found[index] = FactTrace(**kept)
    missing = sorted((index for index in range(len(facts)) if index not in found), key=lambda i: len(facts[i].ids))
    with tqdm(total=len(facts), initial=len(found), desc="Tracing", unit="fact", disable=quiet) as bar:
        room = max(1, runner.settings.max_tokens // runner.settings.samples)
        start = 0
        for part in _parts([facts[index].ids for index in missing], room):
            indices = missing[start : start + len(part)]
            start += len(part)
            for index, trace in zip(indices, runner.run([facts[index] for index in indices]), strict=True):
                found[index] = trace
                if store:
                    store.save_json("traces", description(facts[index]), asdict(trace))
            bar.update(len(indices))
    return [found[index] for index in range(len(facts))]


class _Runner:
    """Clean, corrupted and restored runs of a few facts at a time."""

    def __init__(self, model: Any, settings: TraceSettings, std: float) -> None:
        self.model, self.settings, self.std = model, settings, std
        self.arch = architecture_of(model)
        self.depth = num_layers(model)
        scaled = max(1, round(PAPER_WINDOW * self.depth / PAPER_DEPTH))
        self.window = min(settings.window or scaled, self.depth)
        templates = {"state": self.arch.block, "mlp": self.arch.mlp, "attention": self.arch.attention}
        self.names = {kind: [templates[kind].format(n) for n in range(self.depth)] for kind in KINDS}
        self.embedding = model.get_input_embeddings()

    def run(self, facts: Sequence[Fact]) -> list[FactTrace]:
        """All runs of these facts."""
        device = input_device(self.model)
        samples = self.settings.samples
        self.ids_FT, self.last_F = _padded([fact.ids for fact in facts], device)
        self.answer_F = torch.tensor([fact.answer for fact in facts], device=device)
        self._keep_clean()
        clean_F = self.clean_probability
        low_FN = self._keep_corrupted(facts).view(len(facts), samples)
        cells = [(f, token) for f, fact in enumerate(facts) for token in range(fact.first, len(fact.ids))]
        effects = {kind: torch.zeros(len(cells), self.depth, dtype=torch.float64) for kind in KINDS}
        size = max(1, self.settings.max_tokens // (samples * self.ids_FT.shape[1]))
        for start in range(0, len(cells), size):
            piece = cells[start : start + size]
            low_C = low_FN.mean(1)[[fact for fact, _ in piece]]
            for kind in KINDS:
                for layer in range(self.depth):
                    restored_C = self._restored(kind, layer, piece).view(len(piece), samples).mean(1)
                    effects[kind][start : start + len(piece), layer] = restored_C - low_C
        found, start = [], 0
        for index, fact in enumerate(facts):
            stop = start + len(fact.ids) - fact.first
            own = {kind: effects[kind][start:stop].tolist() for kind in KINDS}
            found.append(FactTrace(float(clean_F[index]), float(low_FN[index].mean()), own))
            start = stop
        return found

    def _probabilities(self, fact_R: torch.Tensor) -> torch.Tensor:
        """Probabilities [R] of the answers at their prompts' last tokens under the active hooks, float64 on the CPU."""
        rows_R = torch.arange(len(fact_R))
        with hooks(on_input(head_of(self.model), select_positions(rows_R, self.last_F[fact_R]))):
            logits_RV = _logits(self.model, self.ids_FT[fact_R])
        chosen_R = self.answer_F[fact_R].to(logits_RV.device)
        return at_least_float32(logits_RV).softmax(1).gather(1, chosen_R[:, None])[:, 0].double().cpu()

    def _keep_clean(self) -> None:
        """Outputs of all blocks, MLPs and attentions, [F, T, d] each, on the plain prompts."""
        self.clean: dict[tuple[str, int], torch.Tensor] = {}

        def keep(kind: str, layer: int) -> Any:
            def read(hidden: torch.Tensor) -> None:
                self.clean[kind, layer] = hidden

            return on_output(self.model.get_submodule(self.names[kind][layer]), read)

        reads = [keep(kind, layer) for kind in KINDS for layer in range(self.depth)]
        with hooks(*reads):
            self.clean_probability = self._probabilities(torch.arange(len(self.ids_FT), device=self.ids_FT.device))

    def _keep_corrupted(self, facts: Sequence[Fact]) -> torch.Tensor:
        """Block outputs and embeddings [F N, T, d] of the corrupted runs; returns the answers' probabilities [F N]."""
        samples, width = self.settings.samples, self.embedding.weight.shape[1]
        self.low: list[torch.Tensor] = [torch.empty(0)] * self.depth
        self.tuple_lengths: list[int | None] = [None] * self.depth

        def corrupt(hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.clone()
            for index, fact in enumerate(facts):
                noise = subject_noise(samples, fact.end - fact.first, width, self.std, self.settings.seed)
                hidden[index * samples : (index + 1) * samples, fact.first : fact.end] += noise.to(hidden)
            self.low_embedded = hidden
            return hidden

        def keep(layer: int) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                self.low[layer] = hidden_of(output)
                self.tuple_lengths[layer] = None if isinstance(output, torch.Tensor) else len(output)

            return lambda: self.model.get_submodule(self.names["state"][layer]).register_forward_hook(hook)

        reads = [on_output(self.embedding, corrupt), *(keep(layer) for layer in range(self.depth))]
        with hooks(*reads):
            return self._probabilities(torch.arange(len(facts), device=self.ids_FT.device).repeat_interleave(samples))

    def _restored(self, kind: str, layer: int, cells: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Probabilities [cells N] with the clean value of ``kind`` put back around ``layer`` at each cell's token."""
        samples, device = self.settings.samples, self.ids_FT.device
        fact_C, token_C = (torch.tensor(part, device=device) for part in zip(*cells, strict=True))
        fact_R, token_R = fact_C.repeat_interleave(samples), token_C.repeat_interleave(samples)
        low_R = fact_R * samples + torch.arange(samples, device=device).repeat(len(cells))

        def restore(hidden: torch.Tensor, number: int) -> torch.Tensor:
            where = hidden.device
            clean_R = self.clean[kind, number].to(where)[fact_R.to(where), token_R.to(where)]
            hidden = hidden.clone()
            hidden[torch.arange(len(hidden), device=where), token_R.to(where)] = clean_R
            return hidden

        with contextlib.ExitStack() as scope:
            if kind == "state":
                low = self.low[layer]
                self._hand_on(scope, layer, restore(low[low_R.to(low.device)], layer))
                return self._probabilities(fact_R)
            numbers = self._windowed(layer)
            if numbers[0] > 0:
                low = self.low[numbers[0] - 1]
                self._hand_on(scope, numbers[0] - 1, low[low_R.to(low.device)])
            else:
                scope.enter_context(hooks(on_output(self.embedding, lambda _: self.low_embedded[low_R])))
            for number in numbers:
                module = self.model.get_submodule(self.names[kind][number])
                scope.enter_context(hooks(on_output(module, functools.partial(restore, number=number))))
            return self._probabilities(fact_R)

    def _windowed(self, layer: int) -> list[int]:
        """Blocks restored together around a layer: half the window below it, itself, the rest above."""
        start = layer - self.window // 2
        return list(range(max(0, start), min(self.depth, start + self.window)))

    def _hand_on(self, scope: contextlib.ExitStack, layer: int, hidden: torch.Tensor) -> None:
        """Let the blocks up to ``layer`` hand on their kept output instead of running."""
        for number in range(layer + 1):
            length = self.tuple_lengths[number]
            result = hidden if length is None else (hidden, *[None] * (length - 1))
            block = self.model.get_submodule(self.names["state"][number])
            scope.enter_context(forward_replaced(block, lambda *_args, _result=result, **_kwargs: _result))


# --- averages --------------------------------------------------------------------------------------------------------


def group_of(fact: Fact, token: int) -> str:
    """Where a token from the subject on stands, one of :data:`GROUPS`."""
    if token == len(fact.ids) - 1:
        return "last"
    if token >= fact.end:
        return "after_first" if token == fact.end else "after_further"
    if token == fact.end - 1:
        return "subject_last"
    return "subject_first" if token == fact.first else "subject_middle"


def _averages(facts: Sequence[Fact], found: Sequence[FactTrace]) -> dict[str, dict[str, dict[str, Any]]]:
    """Mean and standard error over the tokens of each group, by kind and layer."""
    averages: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in KINDS:
        rows: dict[str, list[list[float]]] = {}
        for fact, trace in zip(facts, found, strict=True):
            for offset, by_layer in enumerate(trace.effects[kind]):
                rows.setdefault(group_of(fact, fact.first + offset), []).append(by_layer)
        averages[kind] = {group: _mean(rows[group]) for group in GROUPS if group in rows}
    return averages


def _mean(rows: list[list[float]]) -> dict[str, Any]:
    table = torch.tensor(rows, dtype=torch.float64)
    spread = table.std(0) / math.sqrt(len(rows)) if len(rows) > 1 else torch.full_like(table[0], math.nan)
    stderr = [None if math.isnan(value) else value for value in spread.tolist()]
    return {"mean": table.mean(0).tolist(), "stderr": stderr, "count": len(rows)}
