"""How well columns tell two groups of facts apart: areas under the ROC curve with intervals, a panel per task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import read_json
from lm_edit.figures.drawing.charts import SHARE, Bars, Chart, Reference, Series
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import FILE, Needs, Options
from lm_edit.figures.spec import FigureSpec

CHANCE = 0.5  # the area of a column that does not separate
NOT_COMPARED = "not compared"
MOST_COLUMNS = 8  # of a panel

NEEDS = Needs(
    "separation",
    "files written by lm-edit results separate --out, all with the same first group",
    "lm-edit results separate runs --only editor=document_training --from runs --only-from editor=ft_m "
    "--where efficacy_argmax --out ft_m.json",
    FILE,
    "a file per second group; `lm-edit sweep metrics_judged --out runs` makes the runs",
)


class Area(NamedTuple):
    """The area of a column in one file: NaN if a group has no score, and then without an interval."""

    value: float
    low: float
    high: float
    separates: bool


class ComparedGroups(NamedTuple):
    """A file.

    Attributes:
        first, second: editors of each group, with the number of facts that are compared.
        name: editors of the second group.
        matched: the rule by which facts were chosen.
        areas: (task, column) -> its area, without columns of the unedited model.
    """

    first: str
    second: str
    name: str
    matched: str
    areas: Mapping[tuple[str, str], Area]


def read_groups(content: Mapping[str, Any]) -> ComparedGroups:
    """The fields of :meth:`lm_edit.results.separating.Separation.to_json`; raises EditingError for other content."""
    try:
        return ComparedGroups(
            _group(content["first"]),
            _group(content["second"]),
            ", ".join(content["second"]["editors"]),
            " and ".join(f"{metric} >= {float(least):g}" for metric, least in content["matched"].items()),
            {place: area for one in content["columns"] if not one["unedited"] for place, area in _areas(one)},
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise NEEDS.missing(f"a file is of another kind ({type(error).__name__}: {error})") from None


def _group(side: Mapping[str, Any]) -> str:
    return f"{', '.join(side['editors'])} ({int(side['compared'])} of {int(side['facts'])})"


def _areas(one: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Area]]:
    name = f"{one['metric']}@{one['stage']}" if one["stage"] else str(one["metric"])
    name += "" if one["filter"] in ("", "none") else f",{one['filter']}"
    if one["auc"] is None:
        yield (str(one["task"]), name), Area(math.nan, math.nan, math.nan, False)
        return
    low, high = one["interval"]
    yield (str(one["task"]), name), Area(float(one["auc"]), float(low), float(high), bool(one["separates"]))


def draw(files: Sequence[ComparedGroups]) -> Chart:
    """A panel per task, a bar per file from 0.5 to the area; of the columns that separate in some file."""
    if len(firsts := dict.fromkeys((one.first, one.matched) for one in files)) > 1:
        raise NEEDS.missing(f"the files have several first groups: {'; '.join(' with '.join(one) for one in firsts)}")
    names = [one.name for one in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise NEEDS.missing(f"two files are about {twice[0]}; give one of them")
    places = list(dict.fromkeys(place for one in files for place in one.areas))
    drawn = [place for place in places if any(_area(one, place).separates for one in files)]
    if not drawn:
        raise NEEDS.missing("no column separates the groups")
    by_task = {task: [place for place in drawn if place[0] == task] for task, _ in drawn}
    # Panels beside each other have one height, so those with as many columns go together.
    panels = [
        panel
        for own in sorted(by_task.values(), key=len, reverse=True)
        for panel in _panels(files, sorted(own, key=lambda place: -_strength(files, place)))
    ]
    rule = f" Only facts with {files[0].matched}." if files[0].matched else ""
    caption = [
        "AUC: probability that a fact of the first group scores above one of the second, ties half. Whiskers: "
        "Newcombe's 95% intervals over facts.",
        f"First group: {files[0].first}. Second groups: {', '.join(one.second for one in files)}.{rule}",
        f"{len(places) - len(drawn)} further columns separate in no file and are not drawn.",
    ]
    return Chart(name=NEEDS.figure, title=f"Columns that tell {files[0].first} apart", panels=panels, caption=caption)


def _panels(files: Sequence[ComparedGroups], places: Sequence[tuple[str, str]]) -> Iterator[Bars]:
    """The columns of a task, in as many panels of equal size as it takes."""
    size = math.ceil(len(places) / math.ceil(len(places) / MOST_COLUMNS))
    for begin in range(0, len(places), size):
        own = places[begin : begin + size]
        yield Bars(
            title=own[0][0] + (", continued" if begin else ""),
            categories=[column for _, column in own],
            series=[_series(one, own, number) for number, one in enumerate(files)],
            value_label="AUC",
            references=[Reference(name="does not separate", value=CHANCE)],
            limits=SHARE,
            start=CHANCE,
        )


def _area(one: ComparedGroups, place: tuple[str, str]) -> Area:
    return one.areas.get(place, Area(math.nan, math.nan, math.nan, False))


def _strength(files: Sequence[ComparedGroups], place: tuple[str, str]) -> float:
    """How far the weakest area of a column is from chance, of those that there are."""
    values = [_area(one, place).value for one in files]
    return min((abs(value - CHANCE) for value in values if not math.isnan(value)), default=0.0)


def _series(one: ComparedGroups, places: Sequence[tuple[str, str]], number: int) -> Series:
    areas = [_area(one, place) for place in places]
    return Series(
        name=one.name,
        values=[area.value for area in areas],
        low=[area.low for area in areas],
        high=[area.high for area in areas],
        gaps=["" if place in one.areas else NOT_COMPARED for place in places],
        color=number,
    )


def _from_files(inputs: Inputs, options: Options) -> Chart:
    return draw([read_groups(content) for content in map(_content, inputs.files(NEEDS))])


def _content(path: Path) -> Mapping[str, Any]:
    content = read_json(path, "separation of groups")
    if not isinstance(content, Mapping):
        raise EditingError(f"{path}: a file of lm-edit results separate --out is a mapping.")
    return content


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="how well each column tells two groups of facts apart, as facts trained in from edited ones",
    published="no paper",
    needs=NEEDS,
    draw=_from_files,
)
