"""Trials: candidate settings of an editor scored on held-out facts.

A candidate edits facts one by one on the untouched model and answers three kinds of questions: the edit prompt
(efficacy), rewordings (paraphrase), other facts (neighborhood). A question with a competing answer is correct if the
wanted answer is likelier per token. Without one, the value is the share of teacher-forced argmaxes that agree with the
wanted answer or, for other facts, with the unedited model along that answer. Beside them stands the stability of the
answers near the edit prompt (:mod:`lm_edit.tuning.stability`). All four lie in 0..1 and are averaged per kind over a
fact's questions, then over the facts.

The score of a candidate is the harmonic mean of

    gain = (efficacy - efficacy of the unedited model) / (1 - efficacy of the unedited model), at least 0,

of paraphrase, of neighborhood and of stability, as far as the facts have such questions. A candidate that changes
nothing has gain 0 and therefore score 0, however well it keeps everything else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.answers import ScoredContinuation
from edit_hooks.base.editor import Editor
from edit_hooks.base.registry import load_editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.batching import limits_for
from edit_hooks.inference.items import ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.lm.editing.independent import BATCH, BATCH_ON_GPU
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.prompt_context import continuation
from edit_hooks.request import EditRequest
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.hashing import code_fingerprint, key_of
from lm_edit.tuning.stability import NearbyPrompts
from lm_eval_tasks.common.records.cases import KINDS, NEIGHBORHOOD, PARAPHRASE, Case, Question

log = get_logger("lm_eval.edited_hf")

STABILITY = "stability"
PARTS = (*KINDS, STABILITY)  # values of a trial in its table


@dataclass
class FactScore:
    """One fact under one candidate.

    Attributes:
        efficacy, paraphrase, neighborhood: means over the questions of each kind; ``None`` if there are none.
        margin: mean lead in per-token probability.
        stability: see :mod:`lm_edit.tuning.stability`; ``None`` where it cannot be measured.
        before: efficacy of the unedited model.
        reason: error of an edit that could not be made.
    """

    efficacy: float | None
    paraphrase: float | None
    neighborhood: float | None
    margin: float
    stability: float | None = None
    before: float = 0.0
    reason: str | None = None


@dataclass
class Trial:
    """A candidate and its facts so far, by request key; ``error`` if the editor refuses its settings."""

    settings: dict[str, Any]
    facts: dict[str, FactScore] = field(default_factory=dict)
    error: str | None = None

    def mean(self, kind: str) -> float | None:
        """Mean of one of :data:`PARTS` (or of ``margin``, ``before``) over the facts that have it."""
        return _mean([value for fact in self.facts.values() if (value := getattr(fact, kind)) is not None])

    @property
    def gain(self) -> float:
        """Share of what the unedited model lacks in efficacy that the edits add, 0 to 1."""
        after, before = self.mean("efficacy"), self.mean("before")
        if self.error or after is None or before is None or before >= 1:
            return 0.0
        return max(0.0, (after - before) / (1 - before))

    @property
    def score(self) -> float:
        """Harmonic mean of the gain and of what is measured beside it; 0 for a failed candidate."""
        rest = [mean for kind in (PARAPHRASE, NEIGHBORHOOD, STABILITY) if (mean := self.mean(kind)) is not None]
        parts = [self.gain, *rest]
        return len(parts) / math.fsum(1 / part for part in parts) if min(parts) > 0 else 0.0

    @property
    def rank(self) -> tuple[int, float, float, float]:
        """Sort key: number of facts, score, gain, margin."""
        return len(self.facts) if not self.error else 0, self.score, self.gain, self.mean("margin") or 0.0


class _Probe(NamedTuple):
    """A question under the edit of one case; ``separator`` is that of the case's context or record, if it has one."""

    case_index: int
    kind: str
    question: Question
    separator: str | None = None


class _ProbeResult(NamedTuple):
    """Share of correct tokens (0 or 1 with a competing answer), and the lead in per-token probability."""

    share: float
    lead: float


class TrialRunner:
    """Makes the edits of a search and scores its questions.

    Args:
        seed: of the virtual instances behind stability.
        on_first_batch: called once with the measured seconds per fact, edit and questions together.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        editor: str,
        store: Store | None,
        seed: int = 0,
        on_first_batch: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.model, self.tokenizer, self.editor, self.store, self.seed = model, tokenizer, editor, store, seed
        self.nearby = NearbyPrompts(model, tokenizer, seed)
        self.model_parts = model_identity(model, tokenizer).to_dict() if store else {}
        self.batch_size = BATCH_ON_GPU if next(model.parameters()).is_cuda else BATCH
        self._before: dict[str, FactScore] = {}
        self._on_first_batch: Callable[[float], None] | None = on_first_batch

    def unedited(self, cases: Sequence[Case]) -> Trial:
        """The unedited model on facts: what an edit without any effect would score."""
        if missing := [case for case in cases if case.request.key not in self._before]:
            facts = self._assemble(missing, [None] * len(missing))
            self._before |= {case.request.key: fact for case, fact in zip(missing, facts, strict=True)}
        return Trial({}, {case.request.key: self._before[case.request.key] for case in cases})

    def run(self, trial: Trial, cases: Sequence[Case]) -> None:
        """Score a candidate on more facts."""
        editor = load_editor(self.editor, trial.settings)
        try:
            config = editor.default_config(self.model).to_dict()
            missing = [case for case in cases if not self._load(editor, trial, config, case)]
            for start in range(0, len(missing), self.batch_size):
                batch = missing[start : start + self.batch_size]
                for case, fact in zip(batch, self._score_cases(editor, batch), strict=True):
                    trial.facts[case.request.key] = fact
                    if self.store:
                        self.store.save_json("trials", self._description(editor, config, case), asdict(fact))
        except EditingError as error:
            log.warning("%s cannot be used: %s", trial.settings, error)
            trial.error = str(error)

    def _description(self, editor: Editor[Any], config: dict[str, Any], case: Case) -> Description:
        return Description(
            what="trial of a search",
            model=self.model_parts,
            code=code_fingerprint(*editor.source_modules, __name__),
            inputs={
                "editor": editor.key_identity,
                "settings": config,
                "request": case.request.key,
                "questions": key_of([list(map(list, case.paraphrases)), list(map(list, case.neighbors))]),
                "instances": self.seed,
            },
        )

    def _load(self, editor: Editor[Any], trial: Trial, config: dict[str, Any], case: Case) -> bool:
        """Load a fact's score from the store; false if it is not there."""
        record = self.store.load_json("trials", self._description(editor, config, case)) if self.store else None
        if record is not None:
            trial.facts[case.request.key] = FactScore(**record)
        return record is not None

    def _score_cases(self, editor: Editor[Any], cases: Sequence[Case]) -> list[FactScore]:
        editor.resolve_config(self.model, self.tokenizer)  # preparation is not part of an edit's time
        began = time.perf_counter()
        deltas = editor.edit(self.model, self.tokenizer, [case.request for case in cases], measure=False)
        before = self.unedited(cases)
        facts = self._assemble(cases, deltas)
        for case, fact in zip(cases, facts, strict=True):
            fact.before = before.facts[case.request.key].before
        if self._on_first_batch is not None:
            self._on_first_batch((time.perf_counter() - began) / len(cases))
            self._on_first_batch = None
        return facts

    def _assemble(self, cases: Sequence[Case], deltas: Sequence[Delta | None]) -> list[FactScore]:
        """The scores of facts under their edits; ``None`` is the unedited model."""
        reasons = [_failure(delta) for delta in deltas]
        made = [index for index, reason in enumerate(reasons) if reason is None]
        probes = [
            _Probe(index, kind, question, _separator_of(cases[index].request))
            for index in made
            for kind in KINDS
            for question in cases[index].questions(kind)
        ]
        results = self._score_probes(probes, deltas)
        stability = self._stabilities(cases, deltas, made)
        facts = []
        for index, (case, reason) in enumerate(zip(cases, reasons, strict=True)):
            if reason is not None:
                facts.append(FactScore(0.0, 0.0 if case.paraphrases else None, None, 0.0, reason=reason))
                continue
            of_case = [
                (probe.kind, result) for probe, result in zip(probes, results, strict=True) if probe.case_index == index
            ]
            efficacy, paraphrase, neighborhood = (
                _mean([result.share for probe_kind, result in of_case if probe_kind == kind]) for kind in KINDS
            )
            margin = _mean([result.lead for _, result in of_case]) or 0.0
            fact = FactScore(efficacy, paraphrase, neighborhood, margin, stability[index])
            if deltas[index] is None:
                fact.before = efficacy or 0.0
            facts.append(fact)
        return facts

    def _stabilities(
        self, cases: Sequence[Case], deltas: Sequence[Delta | None], made: Sequence[int]
    ) -> dict[int, float | None]:
        """Stability by index of the case."""
        values = self.nearby.stabilities([cases[index].request for index in made], [deltas[index] for index in made])
        return dict(zip(made, values, strict=True))

    def _score_probes(self, probes: Sequence[_Probe], deltas: Sequence[Delta | None]) -> list[_ProbeResult]:
        jobs: list[tuple[ScoreItem, Delta | None]] = []
        job_indices: list[tuple[int, int | None]] = []  # of the wanted answer, and of the one it is compared with
        for probe in probes:
            question = probe.question
            has_reference = question.other is not None or probe.kind == NEIGHBORHOOD
            job_indices.append((len(jobs), len(jobs) + 1 if has_reference else None))
            wanted = self._item(probe, question.wanted)
            jobs.append((wanted, deltas[probe.case_index]))
            if question.other is not None:
                jobs.append((self._item(probe, question.other), deltas[probe.case_index]))
            elif probe.kind == NEIGHBORHOOD:
                jobs.append((wanted, None))  # the unedited model's predictions along the answer
        with torch.no_grad():
            answers = score(self.model, jobs, limits_for(self.model), lambda count: None)
        results = []
        for probe, (wanted_index, reference_index) in zip(probes, job_indices, strict=True):
            reference = None if reference_index is None else answers[reference_index]
            results.append(_compare(answers[wanted_index], reference, probe.question.other is not None))
        return results

    def _item(self, probe: _Probe, answer: str) -> ScoreItem:
        prompt = probe.question.prompt
        text = continuation(prompt, answer, probe.separator)
        context, target = split_continuation(self.tokenizer, prompt, text)
        if not context or not target:
            raise EditingError(
                f"the tokenizer does not separate the answer {answer!r} from the prompt {prompt!r}, or the prompt is "
                "empty; reword the question."
            )
        return ScoreItem(tuple(context), tuple(target))


def _compare(wanted: ScoredContinuation, reference: ScoredContinuation | None, competes: bool) -> _ProbeResult:
    """Compare an answer.

    Args:
        reference: the competing answer (``competes``), or the unedited model's scores of the wanted answer.
    """
    assert wanted.token_argmax is not None and wanted.token_ids is not None
    probability = _token_probability(wanted)
    if reference is None:
        return _ProbeResult(_share_equal(wanted.token_argmax, wanted.token_ids), probability)
    lead = probability - _token_probability(reference)
    if competes:
        return _ProbeResult(float(lead > 0), lead)
    assert reference.token_argmax is not None
    return _ProbeResult(_share_equal(wanted.token_argmax, reference.token_argmax), min(0.0, lead))


def _token_probability(answer: ScoredContinuation) -> float:
    """Geometric mean over the tokens; 0 if the model's logits are no longer finite."""
    assert answer.num_tokens is not None
    return math.exp(answer.logprob / answer.num_tokens) if math.isfinite(answer.logprob) else 0.0


def _share_equal(left: Sequence[int], right: Sequence[int]) -> float:
    return sum(first == second for first, second in zip(left, right, strict=True)) / len(left)


def _separator_of(request: EditRequest) -> str | None:
    """The white space before answers; ``None``: by the scripts of the texts."""
    return request.separator if request.context is None else request.context.separator


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _failure(delta: Delta | None) -> str | None:
    """The reason why an edit cannot be used; ``None`` if it can, or if there is none."""
    if delta is None:
        return None
    try:
        delta.check_finite()
    except EditingError as error:
        return str(error)
    return None
