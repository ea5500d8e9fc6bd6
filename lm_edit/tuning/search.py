"""A search over an editor's settings on held-out facts.

Every candidate edits facts one by one on the untouched model and answers three kinds of questions: the edit prompt
(efficacy), rewordings (paraphrase), other facts (neighborhood). A question with a competing answer is correct if the
wanted answer is likelier per token. Without one, the score is the share of teacher-forced argmaxes that agree with the
wanted answer or, for other facts, with the unedited model along that answer. Scores are averaged per kind over a fact's
questions, then over the facts; S is the harmonic mean of the kinds. Ties are broken by the margin, the mean lead in
per-token probability.

Successive halving: all candidates on a quarter of the facts, the better half of them on half of the facts, the better
half of those on all. The store keeps finished (candidate, fact) pairs, so an interrupted search resumes.
The facts of a search are no longer held out: evaluate the result on others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from edit_hooks.answers import ScoredContinuation
from edit_hooks.base.editor import Editor
from edit_hooks.base.registry import editor_class, load_editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.lm.independent import BATCH, BATCH_ON_GPU
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.identity import model_identity
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.prompt_context import BARE
from edit_hooks.request import require_subjects
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import code_fingerprint, key_of
from edit_hooks.utils.logs import get_logger
from lm_eval_tasks.common.cases import KINDS, NEIGHBORHOOD, Case, Question

log = get_logger("lm_eval.edited_hf")

MIN_FACTS = 2  # per round, so that one odd fact does not decide


@dataclass
class FactScore:
    """One fact under one candidate.

    Attributes:
        efficacy, paraphrase, neighborhood: means over the questions of each kind; ``None`` if there are none.
        margin: mean lead in per-token probability.
        reason: error of an edit that could not be made.
    """

    efficacy: float | None
    paraphrase: float | None
    neighborhood: float | None
    margin: float
    reason: str | None = None


@dataclass
class Trial:
    """A candidate and its facts so far, by request key; ``error`` if the editor refuses its settings."""

    settings: dict[str, Any]
    facts: dict[str, FactScore] = field(default_factory=dict)
    error: str | None = None

    def mean(self, kind: str) -> float | None:
        """Mean of a kind (or of ``margin``) over the facts that have it."""
        return _mean([value for fact in self.facts.values() if (value := getattr(fact, kind)) is not None])

    @property
    def score(self) -> float:
        """S, the harmonic mean over the kinds that have questions; 0 for a failed candidate."""
        means = [mean for kind in KINDS if (mean := self.mean(kind)) is not None]
        if self.error or not means or min(means) <= 0:
            return 0.0
        return len(means) / math.fsum(1 / mean for mean in means)

    @property
    def rank(self) -> tuple[int, float, float]:
        """Sort key: number of facts, S, margin."""
        return len(self.facts) if not self.error else 0, self.score, self.mean("margin") or 0.0


def tune(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    editor: str,
    candidates: Sequence[dict[str, Any]],
    cases: Sequence[Case],
    *,
    halving: bool = True,
    store: Store | None = None,
    quiet: bool = False,
) -> list[Trial]:
    """Score candidates; best first.

    Args:
        candidates: settings to try, see :func:`~lm_edit.tuning.candidates.make_candidates`.
        cases: held-out facts with their questions.
        halving: drop the worse half twice on the way; otherwise every candidate runs on every fact.

    Raises:
        EditingError: for cases without questions about other facts: efficacy alone favors edits that overwrite all.
    """
    if not any(case.neighbors for case in cases):
        raise EditingError(
            "no case has questions about other facts (neighbors); a search on efficacy alone favors edits that "
            "overwrite all. Use a benchmark, or add neighbors to the file."
        )
    if editor_class(editor).needs_subject:
        require_subjects([case.request for case in cases], editor)
    runner = _TrialRunner(unwrapped(model), tokenizer, editor, store)
    trials = [Trial(settings) for settings in candidates]
    rounds = _plan_rounds(len(trials), len(cases), halving)
    total = sum(item.num_trials * (item.stop - item.start) for item in rounds)
    with tqdm(total=total, desc=f"Tuning {editor}", unit="edit", disable=quiet) as bar:
        for num_trials, start, stop in rounds:
            running = sorted((t for t in trials if not t.error), key=lambda trial: trial.rank, reverse=True)
            for trial in running[:num_trials]:
                runner.run(trial, cases[start:stop])
                bar.update(stop - start)
    return sorted(trials, key=lambda trial: trial.rank, reverse=True)


class _Round(NamedTuple):
    """The best ``num_trials`` candidates run on the facts from ``start`` to ``stop``."""

    num_trials: int
    start: int
    stop: int


def _plan_rounds(num_trials: int, num_cases: int, halving: bool) -> list[_Round]:
    if not halving or num_trials <= 2:
        return [_Round(num_trials, 0, num_cases)]
    stops = sorted({min(num_cases, max(MIN_FACTS, -(-num_cases // divisor))) for divisor in (4, 2, 1)})
    rounds, start = [], 0
    for stop in stops:
        rounds.append(_Round(num_trials, start, stop))
        start, num_trials = stop, -(-num_trials // 2)
    return rounds


class _Probe(NamedTuple):
    """A question under the edit of one case."""

    case_index: int
    kind: str
    question: Question


class _ProbeResult(NamedTuple):
    """Share of correct tokens (0 or 1 with a competing answer), and the lead in per-token probability."""

    share: float
    lead: float


class _TrialRunner:
    """Makes the edits of a search and scores its questions."""

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, editor: str, store: Store | None) -> None:
        self.model, self.tokenizer, self.editor, self.store = model, tokenizer, editor, store
        self.model_parts = model_identity(model, tokenizer).to_dict() if store else {}
        self.batch_size = BATCH_ON_GPU if next(model.parameters()).is_cuda else BATCH

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
                "editor": self.editor,
                "settings": config,
                "request": case.request.key,
                "questions": key_of([list(map(list, case.paraphrases)), list(map(list, case.neighbors))]),
            },
        )

    def _load(self, editor: Editor[Any], trial: Trial, config: dict[str, Any], case: Case) -> bool:
        """Load a fact's score from the store; false if it is not there."""
        record = self.store.load_json("trials", self._description(editor, config, case)) if self.store else None
        if record is not None:
            trial.facts[case.request.key] = FactScore(**record)
        return record is not None

    def _score_cases(self, editor: Editor[Any], cases: Sequence[Case]) -> list[FactScore]:
        deltas = editor.edit(self.model, self.tokenizer, [case.request for case in cases])
        reasons = [_failure(delta) for delta in deltas]
        probes = [
            _Probe(index, kind, question)
            for index, case in enumerate(cases)
            if reasons[index] is None
            for kind in KINDS
            for question in case.questions(kind)
        ]
        results = self._score_probes(probes, deltas)
        facts = []
        for index, reason in enumerate(reasons):
            if reason is not None:
                facts.append(FactScore(0.0, 0.0, None, 0.0, reason))
                continue
            of_case = [
                (probe.kind, result) for probe, result in zip(probes, results, strict=True) if probe.case_index == index
            ]
            efficacy, paraphrase, neighborhood = (
                _mean([result.share for probe_kind, result in of_case if probe_kind == kind]) for kind in KINDS
            )
            margin = _mean([result.lead for _, result in of_case]) or 0.0
            facts.append(FactScore(efficacy, paraphrase, neighborhood, margin))
        return facts

    def _score_probes(self, probes: Sequence[_Probe], deltas: Sequence[Delta]) -> list[_ProbeResult]:
        jobs: list[tuple[ScoreItem, Delta | None]] = []
        job_indices: list[tuple[int, int | None]] = []  # of the wanted answer, and of the one it is compared with
        for case_index, kind, question in probes:
            has_reference = question.other is not None or kind == NEIGHBORHOOD
            job_indices.append((len(jobs), len(jobs) + 1 if has_reference else None))
            wanted = self._item(question.prompt, question.wanted)
            jobs.append((wanted, deltas[case_index]))
            if question.other is not None:
                jobs.append((self._item(question.prompt, question.other), deltas[case_index]))
            elif kind == NEIGHBORHOOD:
                jobs.append((wanted, None))  # the unedited model's predictions along the answer
        with torch.no_grad():
            answers = score(self.model, jobs, Limits(), lambda count: None)
        results = []
        for probe, (wanted_index, reference_index) in zip(probes, job_indices, strict=True):
            reference = None if reference_index is None else answers[reference_index]
            results.append(_compare(answers[wanted_index], reference, probe.question.other is not None))
        return results

    def _item(self, prompt: str, answer: str) -> ScoreItem:
        context, continuation = split_continuation(self.tokenizer, prompt, BARE.continuation(answer))
        if not context or not continuation:
            raise EditingError(
                f"the tokenizer does not separate the answer {answer!r} from the prompt {prompt!r}, or the prompt is "
                "empty; reword the question."
            )
        return ScoreItem(tuple(context), tuple(continuation))


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
    """Geometric mean over the tokens."""
    assert answer.num_tokens is not None
    return math.exp(answer.logprob / answer.num_tokens)


def _share_equal(left: Sequence[int], right: Sequence[int]) -> float:
    return sum(first == second for first, second in zip(left, right, strict=True)) / len(left)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _failure(delta: Delta) -> str | None:
    """The reason why an edit cannot be used; ``None`` if it can."""
    try:
        delta.check_finite()
    except EditingError as error:
        return str(error)
    return None
