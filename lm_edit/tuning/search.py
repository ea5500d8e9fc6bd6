"""A small search over an editor's settings on held-out facts.

Every candidate edits facts one by one on the untouched model and is asked three kinds of questions: the edited prompt
(efficacy), rewordings (paraphrase), other facts (neighborhood). A question with a competing answer is right when the
wanted one is likelier per token; one without counts the teacher-forced argmaxes that agree with the wanted answer, for
other facts with the unedited model's along that answer. Per kind the mean over a fact's questions, then over the facts;
S is their harmonic mean. Ties are broken by the margin, the mean lead in per-token probability.

Successive halving: all candidates on a quarter of the facts, the better half of them on half of the facts, the better
half of those on all. Finished (candidate, fact) pairs are kept in the store, so that a killed search goes on.
The facts a search has seen are no longer held out: score the result on others.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from edit_hooks.answers import ScoredContinuation
from edit_hooks.base.config import EditorConfig
from edit_hooks.base.editor import Editor
from edit_hooks.base.registry import editor_class, load_editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.lm.independent import BATCH, BATCH_ON_GPU
from edit_hooks.modeling.architectures import num_layers, unwrapped
from edit_hooks.modeling.fingerprint import model_fingerprint
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.request import require_subjects
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.errors import EditingError, unknown_keys_error
from edit_hooks.utils.hashing import code_fingerprint, key_of

if TYPE_CHECKING:
    from lm_eval_tasks.common.cases import Case, Question


log = logging.getLogger("lm_eval.edited_hf")


KINDS = ("efficacy", "paraphrase", "neighborhood")


DEFAULT_DEPTHS = (0.1, 0.2, 0.3, 0.45, 0.6)


DEFAULT_LR_FACTORS = (0.2, 1.0)


FEWEST_FACTS = 2


@dataclass
class FactScore:
    """One fact under one candidate: means over the questions of each kind (``None`` without any), and the margin."""

    efficacy: float | None
    paraphrase: float | None
    neighborhood: float | None
    margin: float
    reason: str | None = None


@dataclass
class Trial:
    """A candidate and its facts so far; ``error`` when the editor cannot work with these settings at all."""

    settings: dict[str, Any]
    facts: dict[str, FactScore] = field(default_factory=dict)
    error: str | None = None

    def mean(self, kind: str) -> float | None:
        """Mean of a kind (or of ``margin``) over the facts that have it."""
        values = [value for fact in self.facts.values() if (value := getattr(fact, kind)) is not None]
        return math.fsum(values) / len(values) if values else None

    @property
    def score(self) -> float:
        """S, the harmonic mean of the kinds there are; 0 for a candidate that failed."""
        means = [mean for kind in KINDS if (mean := self.mean(kind)) is not None]
        if self.error or not means or min(means) <= 0:
            return 0.0
        return len(means) / math.fsum(1 / mean for mean in means)

    @property
    def rank(self) -> tuple[int, float, float]:
        """What candidates are compared by: seen more facts, larger S, larger margin."""
        return len(self.facts) if not self.error else 0, self.score, self.mean("margin") or 0.0


# --- candidates ------------------------------------------------------------------------------------------------------


def candidates(
    editor: str, model: nn.Module, given: Mapping[str, Any], vary: Mapping[str, Sequence[Any]]
) -> list[dict[str, Any]]:
    """Settings to try, the ones given without any change first.

    Args:
        given: settings all candidates share.
        vary: setting -> values, all combinations of them. Without ``layers`` five depths are tried, with as many blocks
            as the editor's configuration has; without ``lr`` a fifth of its value and the value itself.

    Raises:
        EditingError: for settings the editor does not have, and values it refuses.
    """
    config = load_editor(editor, given).default_config(model)
    vary = {name: list(values) for name, values in vary.items()}
    vary.setdefault("layers", _default_layers(config, num_layers(unwrapped(model))))
    if "lr" not in vary and (lr := _value(config, "lr")) is not None:
        vary["lr"] = [factor * lr for factor in DEFAULT_LR_FACTORS]
    found = [{**given, "layers": config.layers}]
    known = [config.to_dict()]
    for values in itertools.product(*vary.values()):
        settings = dict(given)
        for name, value in zip(vary, values, strict=True):
            settings = _with(editor, settings, name, value)
        chosen = load_editor(editor, settings).default_config(model).to_dict()
        if chosen not in known:
            known.append(chosen)
            found.append(settings)
    return found


def _default_layers(config: EditorConfig, depth: int) -> list[list[int]]:
    assert config.layers is not None
    size = len(config.layers)
    ends = {round(share * (depth - 1)) for share in DEFAULT_DEPTHS}
    return [list(range(end - size + 1, end + 1)) for end in sorted(ends) if end - size + 1 >= 0]


def _value(config: Any, name: str) -> Any:
    """A setting of an editor, or of the editor it post-processes."""
    return getattr(config, name, None) if hasattr(config, name) else getattr(config, "base_settings", {}).get(name)


def _with(editor: str, settings: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Settings with one more; what a post-processing editor does not have itself goes to its base."""
    own = {item.name for item in fields(editor_class(editor).config_class)}
    if name in own:
        return {**settings, name: value}
    if "base_settings" not in own:
        raise unknown_keys_error(f"setting of {editor}", [name], own)
    return {**settings, "base_settings": {**settings.get("base_settings", {}), name: value}}


# --- search ----------------------------------------------------------------------------------------------------------


def tune(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    editor: str,
    trials: Sequence[dict[str, Any]],
    cases: Sequence[Case],
    *,
    halving: bool = True,
    store: Store | None = None,
    quiet: bool = False,
) -> list[Trial]:
    """Candidates, best first.

    Args:
        trials: settings to try, see :func:`candidates`.
        cases: held-out facts with their questions.
        halving: drop the worse half twice on the way; else every candidate sees every fact.

    Raises:
        EditingError: for cases that ask nothing about other facts: efficacy alone finds edits that overwrite all.
    """
    if not any(case.neighbors for case in cases):
        raise EditingError("no case asks about other facts; a search on efficacy alone finds edits that overwrite all.")
    if editor_class(editor).needs_subject:
        require_subjects([case.request for case in cases], editor)
    search = _Search(unwrapped(model), tokenizer, editor, store)
    found = [Trial(settings) for settings in trials]
    rounds = _rounds(len(found), len(cases), halving)
    total = sum(number * (stop - start) for number, start, stop in rounds)
    with tqdm(total=total, desc=f"Tuning {editor}", unit="edit", disable=quiet) as bar:
        for number, start, stop in rounds:
            running = sorted((t for t in found if not t.error), key=lambda trial: trial.rank, reverse=True)[:number]
            for trial in running:
                search.run(trial, cases[start:stop])
                bar.update(stop - start)
    return sorted(found, key=lambda trial: trial.rank, reverse=True)


def _rounds(num_trials: int, num_cases: int, halving: bool) -> list[tuple[int, int, int]]:
    """(candidates, first fact, end of facts) of every round."""
    if not halving or num_trials <= 2:
        return [(num_trials, 0, num_cases)]
    ends = sorted({min(num_cases, max(FEWEST_FACTS, -(-num_cases // part))) for part in (4, 2, 1)})
    rounds, start = [], 0
    for end in ends:
        rounds.append((num_trials, start, end))
        start, num_trials = end, -(-num_trials // 2)
    return rounds


class _Search:
    """Edits and questions of one search."""

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, editor: str, store: Store | None) -> None:
        self.model, self.tokenizer, self.editor, self.store = model, tokenizer, editor, store
        self.fingerprint = model_fingerprint(model) if store else ""
        self.batch = BATCH_ON_GPU if next(model.parameters()).is_cuda else BATCH

    def run(self, trial: Trial, cases: Sequence[Case]) -> None:
        """Score more facts under a candidate."""
        editor = load_editor(self.editor, trial.settings)
        try:
            config = editor.default_config(self.model).to_dict()
            missing = [case for case in cases if not self._load(editor, trial, config, case)]
            for start in range(0, len(missing), self.batch):
                part = missing[start : start + self.batch]
                for case, found in zip(part, self._score(editor, part), strict=True):
                    trial.facts[case.request.key] = found
                    if self.store:
                        self.store.save_json("trials", self._description(editor, config, case), asdict(found))
        except EditingError as error:
            log.warning("%s cannot be used: %s", trial.settings, error)
            trial.error = str(error)

    def _description(self, editor: Editor[Any], config: dict[str, Any], case: Case) -> Description:
        return Description(
            what="trial of a search",
            model=self.fingerprint,
            code=code_fingerprint(*editor.source_modules, __name__),
            inputs={
                "editor": self.editor,
                "settings": config,
                "request": case.request.key,
                "questions": key_of([list(map(list, case.paraphrases)), list(map(list, case.neighbors))]),
            },
        )

    def _load(self, editor: Editor[Any], trial: Trial, config: dict[str, Any], case: Case) -> bool:
        kept = self.store.load_json("trials", self._description(editor, config, case)) if self.store else None
        if kept is not None:
            trial.facts[case.request.key] = FactScore(**kept)
        return kept is not None

    def _score(self, editor: Editor[Any], cases: Sequence[Case]) -> list[FactScore]:
        deltas = editor.edit(self.model, self.tokenizer, [case.request for case in cases])
        reasons = [_reason(delta) for delta in deltas]
        asked: list[tuple[int, str, Question]] = []
        for number, case in enumerate(cases):
            if reasons[number] is None:
                asked += [(number, kind, question) for kind, question in _questions(case)]
        values = self._ask(asked, deltas)
        found = []
        for number, reason in enumerate(reasons):
            if reason is not None:
                found.append(FactScore(0.0, 0.0, None, 0.0, reason))
                continue
            own = [(kind, *value) for (index, kind, _), value in zip(asked, values, strict=True) if index == number]
            efficacy, paraphrase, neighborhood = (
                _mean([right for name, right, _ in own if name == kind]) for kind in KINDS
            )
            margin = _mean([lead for _, _, lead in own]) or 0.0
            found.append(FactScore(efficacy, paraphrase, neighborhood, margin))
        return found

    def _ask(self, asked: Sequence[tuple[int, str, Question]], deltas: Sequence[Delta]) -> list[tuple[float, float]]:
        """(share right, lead in per-token probability) of every question under its fact's edit."""
        jobs: list[tuple[ScoreItem, Delta | None]] = []
        places: list[tuple[int, int | None]] = []
        for number, kind, question in asked:
            places.append((len(jobs), None if question.other is None and kind != "neighborhood" else len(jobs) + 1))
            wanted = self._item(question.prompt, question.wanted)
            jobs.append((wanted, deltas[number]))
            if question.other is not None:
                jobs.append((self._item(question.prompt, question.other), deltas[number]))
            elif kind == "neighborhood":
                jobs.append((wanted, None))  # what the unedited model says along the answer
        with torch.no_grad():
            answers = score(self.model, jobs, Limits(), lambda count: None)
        return [
            _compare(answers[first], None if second is None else answers[second], question.other is not None)
            for (first, second), (_, _, question) in zip(places, asked, strict=True)
        ]

    def _item(self, prompt: str, answer: str) -> ScoreItem:
        context, continuation = split_continuation(self.tokenizer, prompt, f" {answer}")
        if not context or not continuation:
            raise EditingError(f"{answer!r} has no token of its own after {prompt!r}, or nothing comes before it.")
        return ScoreItem(tuple(context), tuple(continuation))


def _questions(case: Case) -> list[tuple[str, Question]]:
    from lm_eval_tasks.common.cases import Question  # the tasks know their records, we do not

    request = case.request
    edited = Question(request.text, request.target_new, request.target_true)
    paraphrases = [("paraphrase", question) for question in case.paraphrases]
    return [("efficacy", edited), *paraphrases, *(("neighborhood", question) for question in case.neighbors)]


def _compare(wanted: ScoredContinuation, second: ScoredContinuation | None, competes: bool) -> tuple[float, float]:
    """(share right, lead in per-token probability); ``second`` is the competitor's or the unedited model's answer."""
    assert wanted.token_argmax is not None and wanted.token_ids is not None
    probability = _token_probability(wanted)
    if second is None:
        return _share_equal(wanted.token_argmax, wanted.token_ids), probability
    other = _token_probability(second)
    if competes:
        return float(probability > other), probability - other
    assert second.token_argmax is not None
    return _share_equal(wanted.token_argmax, second.token_argmax), min(0.0, probability - other)


def _token_probability(answer: ScoredContinuation) -> float:
    """Geometric mean over the tokens."""
    assert answer.num_tokens is not None
    return math.exp(answer.logprob / answer.num_tokens)


def _share_equal(left: Sequence[int], right: Sequence[int]) -> float:
    return sum(first == second for first, second in zip(left, right, strict=True)) / len(left)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _reason(delta: Delta) -> str | None:
    try:
        delta.check_finite()
    except EditingError as error:
        return str(error)
    return None
