"""Which columns tell the facts of one group of runs from those of another, as facts trained in from edited ones.

A column is a task, metric, stage and filter. A fact is a record of a data file; its score in a group is the mean over
the group's runs. The area under the ROC curve is the probability that a fact of the first group scores above one of the
second (:mod:`lm_edit.results.statistics.separation`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from edit_hooks.utils.errors import EditingError, near_misses
from lm_edit.results.comparing import SAME_SCORE, name_of
from lm_edit.results.files.runs import Paths
from lm_edit.results.files.task_facts import UNEDITED
from lm_edit.results.filters import filter_rows, text_of
from lm_edit.results.statistics.case_scores import read_case_scores
from lm_edit.results.statistics.intervals import Interval
from lm_edit.results.statistics.separation import area_interval, area_under_curve
from lm_edit.results.tables import ResultSet, load_cases, load_results

PLACE = ["task", "metric", "stage", "filter"]
# Groups may have other records; whatever else makes scores comparable has to agree.
CONDITIONS = {name: text for name, text in SAME_SCORE.items() if not name.startswith("data")}
COMPOSITE = "not a single number per fact"
EXCLUDED = "excluded by the column's published filter"
NO_SCORE = "no score"
Place = tuple[str, str, str, str]
Fact = tuple[str, str]  # hash of the data, id of the record


@dataclass(frozen=True)
class Side:
    """A column of one group.

    Attributes:
        scores: of the facts, in the order of their ids.
        unscored: reason -> facts without a score.
    """

    scores: tuple[float, ...]
    unscored: Mapping[str, int]

    @property
    def mean(self) -> float | None:
        """The mean score, ``None`` without a fact."""
        return math.fsum(self.scores) / len(self.scores) if self.scores else None

    def to_json(self) -> dict[str, Any]:
        """Number, mean, scores and unscored facts."""
        numbers = {"facts": len(self.scores), "mean": self.mean, "scores": list(self.scores)}
        return numbers | {"unscored": dict(self.unscored)}


@dataclass(frozen=True)
class SeparatingColumn:
    """A column and how well it separates the groups.

    Attributes:
        area: under the ROC curve; ``None`` if a group has no score.
        unedited: the column is about the unedited model. It separates the groups by which facts they have.
    """

    task: str
    metric: str
    stage: str
    filter: str
    first: Side
    second: Side
    area: float | None
    interval: Interval | None
    unedited: bool

    @property
    def name(self) -> str:
        """The metric, with its stage."""
        return f"{self.metric}@{self.stage}" if self.stage else self.metric

    @property
    def separates(self) -> bool:
        """Whether the interval is without 1/2."""
        return self.interval is not None and not self.interval.low <= 0.5 <= self.interval.high

    @property
    def verdict(self) -> str:
        """Which group scores higher; a dash if the interval has 1/2."""
        if self.area is None:
            return "unscored"
        return "-" if not self.separates else "first higher" if self.area > 0.5 else "second higher"

    def to_json(self) -> dict[str, Any]:
        """All of it as a mapping."""
        return {
            **{name: getattr(self, name) for name in ("task", "metric", "stage", "filter")},
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "auc": self.area,
            "interval": self.interval and [self.interval.low, self.interval.high],
            "separates": self.separates,
            "unedited": self.unedited,
        }


class Group(NamedTuple):
    """The facts of a group that are compared.

    Attributes:
        names: of its editors.
        facts: number of facts before matching.
        kept: number of those that are compared.
        cases: their rows, with the fact of each.
        results: rows of :func:`lm_edit.load_results`.
    """

    names: tuple[str, ...]
    facts: int
    kept: int
    cases: pd.DataFrame
    results: pd.DataFrame

    def to_json(self) -> dict[str, Any]:
        """Editors, runs and numbers of facts."""
        return {
            "editors": list(self.names),
            "runs": list(dict.fromkeys(self.results["run_name"])),
            "facts": self.facts,
            "compared": self.kept,
        }


@dataclass(frozen=True)
class Separation:
    """Two groups, and every column that both have.

    Attributes:
        columns: those that separate best first; those about the unedited model last.
        matched: metrics -> score that a fact had to reach.
        left_out: columns that are not compared -> why.
    """

    first: Group
    second: Group
    columns: tuple[SeparatingColumn, ...]
    matched: Mapping[str, float]
    left_out: Mapping[Place, str]

    def rows(self) -> Iterator[list[str]]:
        """A table; the header first."""
        yield ["task", "column", "first", "second", "AUC (95% interval)", "separates"]
        for one in self.columns:
            area = "-" if one.area is None else f"{one.area:.2f}"
            if one.interval:
                area += f" ({one.interval.low:.2f} to {one.interval.high:.2f})"
            yield [one.task, one.name, _side_text(one.first), _side_text(one.second), area, one.verdict]

    def notes(self) -> Iterator[str]:
        """Sentences about the groups, the rule, and what was left out."""
        for name, group in (("first", self.first), ("second", self.second)):
            rule = " and ".join(f"{metric} >= {least:g}" for metric, least in self.matched.items())
            kept = f", {group.kept} of {group.facts} with {rule}" if rule else f", {group.facts} facts"
            yield f"{name}: {', '.join(group.names)}{kept}."
        if shared := len({*self.first.cases["fact"]} & {*self.second.cases["fact"]}):
            yield f"{shared} facts are in both groups; each counts in both."
        tested = [one for one in self.columns if one.area is not None and not one.unedited]
        yield (
            "AUC: probability that a fact of the first group scores above one of the second, ties half; Newcombe's "
            f"interval over facts. {sum(one.separates for one in tested)} of {len(tested)} columns separate; by chance "
            f"alone about {_few(len(tested) / 20)} would."
        )
        if any(one.unedited for one in self.columns):
            yield "Columns of the unedited model are last: if one separates, the groups have facts of another kind."
        for reason, count in Counter(self.left_out.values()).items():
            yield f"{count} columns left out: {reason}."

    def to_json(self) -> dict[str, Any]:
        """Groups and columns as a mapping."""
        return {
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "matched": dict(self.matched),
            "columns": [one.to_json() for one in self.columns],
            "left_out": [dict(zip(PLACE, place, strict=True)) | {"why": why} for place, why in self.left_out.items()],
        }


def separation(
    first: Paths,
    second: Paths,
    *,
    matched: Mapping[str, float] | None = None,
    only: Sequence[str] = (),
    only_second: Sequence[str] = (),
) -> Separation:
    """Compare two groups of runs column by column.

    Args:
        first, second: result files with samples, or folders of some.
        matched: metric -> least score; a fact whose score of it is lower or missing in a run is left out of that run.
        only, only_second: conditions on the runs of each group (``editor=ft_m``).

    Raises:
        EditingError: as :func:`lm_edit.load_cases`; if a metric is unknown, if a group has no fact left, and if the
            groups have no column in common.
    """
    rules = dict(matched or {})
    groups = _group(first, only, rules, "first"), _group(second, only_second, rules, "second")
    places = [dict.fromkeys(group.results[PLACE].itertuples(index=False, name=None)) for group in groups]
    common = [place for place in places[0] if place in places[1]]
    if not common:
        raise EditingError("the two groups have no column in common; evaluate both on the same tasks.")
    left_out: dict[Place, str] = {
        place: "of one group alone" for one, other in (places, places[::-1]) for place in one if place not in other
    }
    sides = [dict(list(group.cases.groupby(PLACE, sort=False))) for group in groups]
    found = []
    for place in common:
        if why := _incomparable(place, groups):
            left_out[place] = why
        elif any(place not in one for one in sides) or (pair := _pair(place, sides)) is None:
            left_out[place] = COMPOSITE
        else:
            found.append(_column(place, *pair))
    found.sort(key=lambda one: (one.unedited, -abs((0.5 if one.area is None else one.area) - 0.5)))
    return Separation(*groups, tuple(found), rules, left_out)


def read_rules(texts: Sequence[str]) -> dict[str, float]:
    """``METRIC`` or ``METRIC=SCORE`` -> the least score; 1 without a number.

    Raises:
        EditingError: for a score that is not a finite number.
    """
    rules = {}
    for text in texts:
        metric, equals, score = text.partition("=")
        try:
            least = float(score) if equals else 1.0
        except ValueError:
            least = math.nan
        if not metric or not math.isfinite(least):
            raise EditingError(f"--where {text!r}: METRIC or METRIC=SCORE is needed, as in --where efficacy_prob=0.5.")
        rules[metric] = least
    return rules


def _group(paths: Paths, only: Sequence[str], rules: Mapping[str, float], name: str) -> Group:
    read = ResultSet.of(paths)
    results = filter_rows(load_results(read), only)
    cases = load_cases(read, require_samples=False)
    files = set(results["file"])
    if lacking := [one for one in cases.attrs["without_samples"] if one["file"] in files]:
        raise EditingError(
            f"{lacking[0]['file']}: no samples of {lacking[0]['task']}, which have the scores of single facts. Use "
            "--log_samples, or leave the run out with --only."
        )
    cases = cases[cases["run"].isin(results["run"])]
    hashes = {(row["run"], row["task"]): text_of(row["data_hash"]) for row in results.to_dict("records")}
    keys = [
        (hashes.get((run, task), ""), case)
        for run, task, case in zip(cases["run"], cases["task"], cases["case_id"], strict=True)
    ]
    cases = cases.assign(fact=keys)
    facts = cases["fact"].nunique()
    for metric, least in rules.items():
        known = set(cases["metric"])
        if metric not in known:
            raise EditingError(f"the {name} group has no metric {metric!r} to match by.{near_misses(metric, known)}")
        reached = cases[(cases["metric"] == metric) & (cases["stage"] == "")]
        passed = reached.groupby(["run", "fact"])["value"].min(numeric_only=True) >= least  # in all tasks that have it
        kept = set(passed[passed].index)
        cases = cases[[pair in kept for pair in zip(cases["run"], cases["fact"], strict=True)]]
    if cases.empty:
        rule = " and ".join(f"{metric} >= {least:g}" for metric, least in rules.items())
        raise EditingError(f"no fact of the {name} group has {rule}; lower the score, or match by another metric.")
    names = tuple(dict.fromkeys(name_of(row) for row in results.drop_duplicates("run").to_dict("records")))
    return Group(names, facts, cases["fact"].nunique(), cases, results)


def _incomparable(place: Place, groups: Sequence[Group]) -> str:
    """Why a column of the two groups has two meanings; "" if it has one."""
    rows = pd.concat([group.results[(group.results[PLACE] == list(place)).all(axis=1)] for group in groups])
    differing = [text for name, text in CONDITIONS.items() if rows[name].map(text_of).nunique() > 1]
    return f"another {' and '.join(differing)}" if differing else ""


def _pair(place: Place, sides: Sequence[Mapping[Place, pd.DataFrame]]) -> tuple[Side, Side] | None:
    """The column in both groups; ``None`` if its cases have no single number."""
    first, second = (_side(one[place]) for one in sides)
    return None if first is None or second is None else (first, second)


def _side(rows: pd.DataFrame) -> Side | None:
    """Scores of the facts of one column: means over runs."""
    values: dict[Fact, list[float]] = defaultdict(list)
    reasons: dict[Fact, str] = {}
    for _, of_run in rows.groupby("run", sort=False):
        ordered = of_run.sort_values("doc_id")
        scores = read_case_scores(ordered)
        if scores.factors is not None:
            return None
        for row, value in zip(ordered.to_dict("records"), scores.values[:, 0, 0], strict=True):
            if not row["due"]:
                continue
            if math.isfinite(value):
                values[row["fact"]].append(float(value))
            else:
                reasons[row["fact"]] = row["reason"] or (EXCLUDED if row["excluded"] else NO_SCORE)
    unscored = Counter(reason for fact, reason in reasons.items() if fact not in values)
    return Side(tuple(float(np.mean(values[fact])) for fact in sorted(values)), dict(sorted(unscored.items())))


def _column(place: Place, first: Side, second: Side) -> SeparatingColumn:
    _, metric, stage, _ = place
    area = interval = None
    if first.scores and second.scores:
        area = area_under_curve(np.asarray(first.scores), np.asarray(second.scores))
        interval = area_interval(area, len(first.scores), len(second.scores))
    is_unedited = metric.endswith(UNEDITED) or stage == UNEDITED.strip("_")
    return SeparatingColumn(*place, first, second, area, interval, is_unedited)


def _few(number: float) -> str:
    """A number to one digit below 10 and whole above: ``.1g`` would write 15 as 2e+01."""
    return f"{number:.1g}" if number < 9.5 else f"{number:.0f}"


def _side_text(side: Side) -> str:
    mean = "-" if side.mean is None else f"{side.mean:.3g}"
    unscored = sum(side.unscored.values())
    return f"{mean} ({len(side.scores)}{f', {unscored} unscored' if unscored else ''})"
