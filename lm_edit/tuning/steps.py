"""Search for the step size of an editor: from one that may do nothing to one at which edits succeed.

A learning rate belongs to the models it was published for; on others it can be off by orders of magnitude, and a search
within a factor of it finds nothing. The walk enlarges the step by factors of ten until edits succeed (their gain is
above 0, see :mod:`lm_edit.tuning.trials`) and stops when the score no longer improves. If larger steps do not help, it
walks down. While no edit succeeds, it takes several factors at once: the drift near the edit prompt
(:mod:`lm_edit.tuning.stability`) grows with the square of a small step, so its size at a step without effect tells how
many factors are missing.

The walk uses a few facts and one choice of layers, and its length is bounded. It ends early if larger steps cannot be
better: they fail, they wreck the model, or they change nothing more (a clamped or converged optimization).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_edit.tuning.trials import STABILITY, Trial, TrialRunner
from lm_eval_tasks.common.records.cases import Case

MAX_UP, MAX_DOWN = 5, 3  # sizes tried above and below the start
MAX_STEP_SIZES = 1 + MAX_UP + MAX_DOWN
MAX_JUMP = 4  # factors of ten; drifts smaller than those it bridges are rounding
MAX_EXPONENT = 8  # factors of ten above the start: where those change nothing, the step is not what is missing
# Nats per instance. An edit takes at a drift of about 0.01 to 1; below it a step is small, and drift is quadratic.
SMALL_DRIFT = 0.01
DESTROYED = 0.01  # stability below which an edit has left nothing of the answers near its prompt
HARMLESS = 0.9  # stability above which a smaller step is pointless
SAME_DRIFT = 0.05  # relative difference


@dataclass(frozen=True)
class StepSetting:
    """The setting that holds an editor's step.

    Attributes:
        name: of the setting.
        size: where the walk starts.
        with_size: size -> settings of a candidate.
    """

    name: str
    size: float
    with_size: Callable[[float], dict[str, Any]]


@dataclass(frozen=True)
class StepSearch:
    """The sizes tried.

    Attributes:
        name: of the setting.
        tried: size -> trial, in the order of the walk.
        size: the best size; ``None`` if no size takes.
    """

    name: str
    tried: Mapping[float, Trial]
    size: float | None

    @property
    def trials(self) -> list[Trial]:
        return list(self.tried.values())


def find_step(
    runner: TrialRunner,
    step: StepSetting,
    cases: Sequence[Case],
    progress: Callable[[int], object] = lambda count: None,
) -> StepSearch:
    """Walk over step sizes by factors of ten; see the module."""
    tried: dict[float, Trial] = {}

    def attempt(exponent: int) -> Trial:
        size = scaled(step.size, 10.0**exponent)
        tried[size] = trial = Trial(step.with_size(size))
        runner.run(trial, cases)
        progress(len(cases))
        return trial

    start = best = previous = attempt(0)
    exponent = 0
    for _ in range(MAX_UP):
        exponent = min(exponent + _factors_missing(previous), MAX_EXPONENT)
        trial = attempt(exponent)
        if best.gain and trial.rank <= best.rank:
            break
        best = max(best, trial, key=lambda trial: trial.rank)
        if trial.error or _stability(trial) < DESTROYED or _is_same(previous, trial) or exponent == MAX_EXPONENT:
            break
        previous = trial
    # Without a gain the margins of ruined models order the trials, and say nothing about smaller steps.
    if (best is start or not best.gain) and (start.error or start.gain or _stability(start) < HARMLESS):
        for exponent in range(-1, -1 - MAX_DOWN, -1):
            trial = attempt(exponent)
            if best.gain and trial.rank <= best.rank:
                break
            best = max(best, trial, key=lambda trial: trial.rank)
    found = next(size for size, trial in tried.items() if trial is best)
    return StepSearch(step.name, tried, found if best.gain else None)


def scaled(size: float, factor: float) -> float:
    """A step times a factor, without the noise of binary fractions: 0.0003, not 0.00030000000000000003."""
    return float(f"{size * factor:.6g}")


def _factors_missing(trial: Trial) -> int:
    """Factors of ten to the next size: 1, or more after a step that changes next to nothing."""
    drift = _drift(trial)
    if trial.gain or drift is None:
        return 1
    if drift <= 0:
        return MAX_JUMP
    return min(MAX_JUMP, max(1, math.floor(math.log10(SMALL_DRIFT / drift) / 2)))


def _stability(trial: Trial) -> float:
    """The mean stability; 1 where it cannot be measured, which ends no walk."""
    stability = trial.mean(STABILITY)
    return 1.0 if stability is None else stability


def _drift(trial: Trial) -> float | None:
    """The drift of a mean stability, in nats."""
    stability = trial.mean(STABILITY)
    return None if not stability else -math.log(stability)


def _is_same(smaller: Trial, larger: Trial) -> bool:
    """Whether the larger step changes no more than the smaller one, though both change something."""
    first, second = _drift(smaller), _drift(larger)
    if first is None or second is None or min(first, second) < SMALL_DRIFT:
        return False
    return abs(second - first) <= SAME_DRIFT * first
