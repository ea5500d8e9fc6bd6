"""A search over an editor's settings on held-out facts.

First the size of the step, where the editor has one (:mod:`lm_edit.tuning.steps`), then all candidates around the size
found, by successive halving: all of them on a quarter of the facts, the better half of them on half of the facts, the
better half of those on all. :mod:`lm_edit.tuning.trials` defines the score. The search ends early once no candidate
takes, or once one has a score of 1. The store keeps finished (candidate, fact) pairs, so an interrupted search resumes.

Facts whose new answer the unedited model gives already are left out: no edit can add to them. The facts of a search are
no longer held out: evaluate the result on others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.registry import editor_class, load_editor
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.request import require_subjects
from edit_hooks.store.store import Store
from edit_hooks.utils.durations import spell_duration
from edit_hooks.utils.errors import EditingError
from lm_edit.tuning.candidates import STEP_SETTINGS, make_candidates, refused_step, sample_candidates, step_of
from lm_edit.tuning.steps import MAX_STEP_SIZES, StepSearch, find_step
from lm_edit.tuning.trials import Trial, TrialRunner
from lm_eval_tasks.common.records.cases import Case

MIN_FACTS = 2  # per round, so that one odd fact does not decide
BEST_SCORE = 0.9995  # counts as 1: the table shows three digits


@dataclass
class SearchOutcome:
    """The result of a search.

    Attributes:
        trials: best first; those of the search for the step alone if no step takes.
        unedited: the unedited model on the same facts.
        known: facts that were left out because the unedited model gives their new answer already.
        step: the search for the step; ``None`` where the editor has none or its candidates were given.
        num_without_paraphrases: facts that say nothing about generalization.
    """

    trials: list[Trial]
    unedited: Trial
    known: list[Case]
    step: StepSearch | None
    num_without_paraphrases: int
    first: dict[str, Any] = field(default_factory=dict)  # settings of the first candidate, the editor's own

    @property
    def found(self) -> bool:
        """Whether some candidate takes and scores above 0."""
        return bool(self.trials) and self.trials[0].score > 0


def search(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    editor: str,
    shared: Mapping[str, Any],
    vary: Mapping[str, Sequence[Any]],
    cases: Sequence[Case],
    *,
    num: int | None = None,
    seed: int = 0,
    halving: bool = True,
    store: Store | None = None,
    quiet: bool = False,
    announce: Callable[[str], None] = lambda text: None,
) -> SearchOutcome:
    """Find the best settings of an editor.

    Args:
        shared: settings of every candidate.
        vary: setting -> values, see :func:`~lm_edit.tuning.candidates.make_candidates`.
        cases: held-out facts with their questions.
        num: most candidates: the editor's own settings and those with the step found, then a random choice; of one
            candidate, the latter.
        halving: drop the worse half twice on the way; otherwise every candidate runs on every fact.
        announce: receives the bound on the edits before the first one, and the expected time after it.

    Raises:
        EditingError: for an editor without settings to search, facts without questions about other facts, and facts
            that the unedited model knows already.
    """
    check_search(editor, model, shared, vary, cases)
    inner = unwrapped(model)
    candidates = sample_candidates(make_candidates(editor, inner, shared, vary), num, seed)
    bound = [0]

    def announce_time(seconds: float) -> None:
        announce(f"{seconds:.2g} s per edit with its questions: at most {spell_duration(seconds * bound[0])}")

    runner = TrialRunner(inner, tokenizer, editor, store, seed, announce_time)
    before = runner.unedited(cases)
    unknown = [case for case in cases if before.facts[case.request.key].before < 1]
    if not unknown:
        raise EditingError(
            f"the unedited model gives the new answer to all {len(cases)} facts already, so no edit can add to them; "
            "use other facts (--skip, or another --edits)."
        )
    step = step_of(editor, inner, shared, vary)
    for note in _not_searched(editor, inner, shared, vary, len(candidates)):
        announce(note)
    most = len(candidates) + (step is not None)  # around another size none of them is the editor's own
    rounds = plan_rounds(most if num is None else min(most, num), len(unknown), halving)
    num_edits = sum(item.num_trials * (item.stop - item.start) for item in rounds)
    num_step_edits = MAX_STEP_SIZES * min(MIN_FACTS, len(unknown)) if step else 0
    bound[0] = num_edits + num_step_edits
    parts = f": {num_step_edits} to find a step that takes, {num_edits} to search around it" if step else ""
    announce(f"at most {bound[0]} edits{parts}")
    outcome = SearchOutcome(
        trials=[],
        unedited=runner.unedited(unknown),
        known=[case for case in cases if before.facts[case.request.key].before >= 1],
        step=None,
        num_without_paraphrases=sum(not case.paraphrases for case in unknown),
        first=candidates[0],
    )
    with tqdm(total=bound[0], desc=f"Tuning {editor}", unit="edit", disable=quiet) as bar:
        if step is not None:
            outcome.step = find_step(runner, step, unknown[:MIN_FACTS], bar.update)
            if outcome.step.size is None:
                outcome.trials = sorted(outcome.step.trials, key=lambda trial: trial.rank, reverse=True)
                return outcome
            around = make_candidates(editor, inner, shared, vary, outcome.step.size)
            # The editor's own settings, and those with the step found, unless the two are one.
            keep = 1 + (step.with_size(outcome.step.size) in around)
            candidates = sample_candidates(around, num, seed, keep)
        outcome.trials = tune(runner, candidates, unknown, halving=halving, progress=bar.update)
    return outcome


def _not_searched(
    editor: str, model: nn.Module, shared: Mapping[str, Any], vary: Mapping[str, Sequence[Any]], num: int
) -> Iterator[str]:
    """Sentences about a step that the editor's other settings fix or that has another name, and about one candidate."""
    if (refused := refused_step(editor, model, shared, vary)) is not None:
        name, size = refused
        yield f"{name} is not searched: the other settings fix it at {size:g}"
        if num == 1:
            yield "one candidate is left, so the score below is all; --vary adds others"
    elif not {*STEP_SETTINGS} & {*vary, *shared} and step_of(editor, model, shared, vary) is None:
        settings = load_editor(editor, shared).default_config(model).to_dict()
        rest = [name for name, value in settings.items() if isinstance(value, float) and name not in {*vary, *shared}]
        if rest:
            yield f"not searched: {', '.join(rest)}; --vary '{rest[0]}=VALUE;VALUE' searches one of them"


def tune(
    runner: TrialRunner,
    candidates: Sequence[dict[str, Any]],
    cases: Sequence[Case],
    *,
    halving: bool = True,
    progress: Callable[[int], object] = lambda count: None,
) -> list[Trial]:
    """Score candidates; best first."""
    trials = [Trial(settings) for settings in candidates]
    for num_trials, start, stop in plan_rounds(len(trials), len(cases), halving):
        running = sorted((t for t in trials if not t.error), key=lambda trial: trial.rank, reverse=True)
        if start and halving and (not running or not running[0].gain):
            break  # no candidate takes on the facts so far
        if start and halving and running[0].score >= BEST_SCORE:
            running = running[:1]
        for trial in running[:num_trials]:
            runner.run(trial, cases[start:stop])
            progress(stop - start)
    return sorted(trials, key=lambda trial: trial.rank, reverse=True)


class Round(NamedTuple):
    """The best ``num_trials`` candidates run on the facts from ``start`` to ``stop``."""

    num_trials: int
    start: int
    stop: int


def plan_rounds(num_trials: int, num_cases: int, halving: bool) -> list[Round]:
    """The rounds of successive halving."""
    if not halving or num_trials <= 2:
        return [Round(num_trials, 0, num_cases)]
    stops = sorted({min(num_cases, max(MIN_FACTS, -(-num_cases // divisor))) for divisor in (4, 2, 1)})
    rounds, start = [], 0
    for stop in stops:
        rounds.append(Round(num_trials, start, stop))
        start, num_trials = stop, -(-num_trials // 2)
    return rounds


def check_search(
    editor: str,
    outline: nn.Module,
    shared: Mapping[str, Any],
    vary: Mapping[str, Sequence[Any]],
    cases: Sequence[Case],
) -> None:
    """Refuse what :func:`search` cannot search, before anything is computed.

    Args:
        outline: the model, with or without weights.
    """
    editor_type = editor_class(editor)
    if editor_type.writes == ("context",):
        raise EditingError(f"editor {editor!r} changes prompts, not the model: it has no layer or step to search.")
    if not any(case.neighbors for case in cases):
        raise EditingError(
            "no case has questions about other facts (neighbors); a search on efficacy alone favors edits that "
            "overwrite all. Use a benchmark, or add 'locality_prompt' and 'locality_ground_truth' to the records."
        )
    if editor_type.needs_subject:
        require_subjects([case.request for case in cases], editor)
    _require_usable(editor, outline, make_candidates(editor, unwrapped(outline), shared, vary))


def _require_usable(editor: str, outline: nn.Module, candidates: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a search in which every candidate lacks an input, as MEND without a hyper-network."""
    for number, candidate in enumerate(candidates):
        try:
            load_editor(editor, candidate).check_settings(outline)
            return
        except EditingError:
            if number == len(candidates) - 1:
                raise
