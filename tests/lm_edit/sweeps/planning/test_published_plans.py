"""Plans, published_tables.yaml and docs/reference/plans.md name the same run for a published table or figure."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import yaml
from paths import ROOT

from lm_edit.sweeps.checking.checks import check_plan
from lm_edit.sweeps.checking.tasks import benchmarks_of, leaf_tasks
from lm_edit.sweeps.planning.choices import Plan
from lm_edit.sweeps.planning.grid import Run
from lm_edit.sweeps.planning.plan import load_plan, shipped_plans

MAP: dict[str, Any] = yaml.safe_load((ROOT / "docs/_data/published_tables.yaml").read_text(encoding="utf-8"))
ENTRIES = [(section, entry) for section in MAP.values() for entry in section["tables"]]
PAPERS = {"BAKE", *(paper for section in MAP.values() for paper in section["papers"])}
PLANS = (ROOT / "docs/reference/plans.md").read_text(encoding="utf-8")

NUMBERS = r"\d+(?: \([^)]*\))?(?:(?:, | and | to )\d+(?: \([^)]*\))?)*"
NAME = re.compile(rf"(?:\b({'|'.join(sorted(PAPERS))}) )?\b(?:(table|figure)s? ({NUMBERS})|(appendix [A-Z](?:\.\d+)?))")
WITHOUT_NUMBER = re.compile(rf"({'|'.join(sorted(PAPERS))}), ")
# Sizes, modes and editor settings, which a plan varies: one of its runs has the stated value. Others hold in all runs.
VARIED = {"mode", "edits", "num_edits", "edit_batch_size", "group_size", "immediate", "retention", "icl", "editor_args"}

CHAT_TEMPLATE = "`--apply_chat_template`"

# Tables and figures with results of models, by paper; the others are illustrations, examples of data, statistics and
# settings. Figure 3 of EVK and the figures of ThinkEdit are those of docs/reference/figures.md.
RESULTS = {
    "BIRD": ("table", [3, 4, 5], "figure", [3, 4, 5, 6, 7]),
    "TMLR": ("table", [3, 4, 5, 9], "figure", [3, 4, 5, 6, 7, 8]),
    "WILD": ("table", [1, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14], "figure", [1, 4, 5]),
    "EVK": ("table", [1, 2], "figure", [4, 5]),
    "ThinkEdit": ("table", [1, 2, 5, 6], "figure", []),
}


class Item(NamedTuple):
    """A published table or figure, as ``WILD``, ``table 3``; a paper whose tables have no numbers here has ""."""

    paper: str
    name: str


def items_of(text: str, papers: Sequence[str] = ()) -> set[Item]:
    """The tables and figures that a text names; without a paper before them, they are of the last one, or the only."""
    paper = papers[0] if len(papers) == 1 else ""
    found = set()
    for segment in text.split("; "):
        before = len(found)
        for named, kind, numbers, appendix in NAME.findall(segment):
            paper = {"": paper, "BAKE": "TMLR"}.get(named, named)
            assert paper, f"{text}: of which paper?"
            found |= {Item(paper, appendix)} if appendix else {Item(paper, f"{kind} {n}") for n in numbers_of(numbers)}
        if len(found) == before and (match := WITHOUT_NUMBER.match(segment)):
            found.add(Item(match[1], ""))
    return found


def numbers_of(text: str) -> Iterator[int]:
    """3, 4, 6, 7 and 8 of ``3 (Q&J), 4 and 6 to 8``."""
    for first, last in re.findall(r"(\d+)(?: to (\d+))?", re.sub(r" \([^)]*\)", "", text)):
        yield from range(int(first), int(last or first) + 1)


def entry_items(section: dict[str, Any], entry: dict[str, Any]) -> set[Item]:
    return items_of(entry["published"], list(section["papers"]))


@functools.cache
def planned() -> dict[Item, tuple[str, ...]]:
    """Table or figure -> the plans whose description names it."""
    found: dict[Item, tuple[str, ...]] = {}
    for name, path in shipped_plans().items():
        for item in items_of(load_plan(path).description):
            found[item] = (*found.get(item, ()), name)
    return found


@functools.cache
def without_plan() -> dict[Item, str]:
    """Table or figure -> why no plan in the package runs it, from docs/reference/plans.md."""
    section = PLANS.partition("<!-- without a plan: begin -->")[2].partition("<!-- without a plan: end -->")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section, flags=re.MULTILINE)[1:]  # the first is the head
    return {item: why for names, why in rows for item in items_of(names)}


@functools.cache
def runs_of(name: str) -> tuple[Plan, list[Run]]:
    plan = load_plan(shipped_plans()[name])
    return plan, check_plan(plan).runs


@functools.cache
def asked(tasks: tuple[str, ...]) -> frozenset[str]:
    return frozenset(leaf for task in tasks for leaf in leaf_tasks(task))


def title(case: Any) -> str:
    return str(case["published"])[:60] if isinstance(case, dict) and "published" in case else ""


def test_names_of_tables_are_read() -> None:
    assert items_of("BIRD tables 3 (Q&J) and 4 (J), which have figures 3 and 5 to 7") == {
        *(Item("BIRD", f"table {n}") for n in (3, 4)),
        *(Item("BIRD", f"figure {n}") for n in (3, 5, 6, 7)),
    }
    assert items_of("BIRD table 5, multi-hop; MQuAKE, k edits") == {Item("BIRD", "table 5"), Item("MQuAKE", "")}
    assert items_of("tables 5 and 6, IFR; appendix A.5", ["ThinkEdit"]) == {
        Item("ThinkEdit", name) for name in ("table 5", "table 6", "appendix A.5")
    }
    assert items_of("appendix A (text): the models", ["ThinkEdit"]) == {Item("ThinkEdit", "appendix A")}
    assert items_of("BAKE table 9, single edits") == {Item("TMLR", "table 9")}
    assert items_of("eleven editors on the demo model") == set()


def test_the_map_has_every_table_and_figure_with_results() -> None:
    mapped = {item for section, entry in ENTRIES for item in entry_items(section, entry)}
    results = {
        Item(paper, f"{kind} {number}")
        for paper, row in RESULTS.items()
        for kind, numbers in zip(row[::2], row[1::2], strict=True)
        for number in numbers
    }
    assert results <= mapped
    assert all(entry_items(section, entry) for section, entry in ENTRIES)


@pytest.mark.parametrize(("section", "entry"), ENTRIES, ids=title)
def test_a_published_table_has_a_plan_or_the_docs_say_why_not(section: dict[str, Any], entry: dict[str, Any]) -> None:
    for item in entry_items(section, entry):
        assert (item in planned()) != (item in without_plan()), item


def test_plans_name_tables_of_the_map() -> None:
    mapped = {item for section, entry in ENTRIES for item in entry_items(section, entry)}
    unknown = {item for item in planned() if item.paper in RESULTS and item not in mapped}
    assert {item for item in unknown if item.paper not in ("EVK", "ThinkEdit") or "figure" not in item.name} == set()
    assert not set(without_plan()) & set(planned())


MAPPED = [(section, entry) for section, entry in ENTRIES if entry["agreement"] != "none"]


def plans_of(section: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    return sorted({name for item in entry_items(section, entry) for name in planned().get(item, ())})


@pytest.mark.parametrize(("section", "entry"), MAPPED, ids=title)
def test_the_plans_ask_the_tasks_of_their_tables(section: dict[str, Any], entry: dict[str, Any]) -> None:
    names = plans_of(section, entry)
    tasks = {task for name in names for run in runs_of(name)[1] for task in asked(run.tasks)}
    assert not names or set(entry["tasks"]) <= tasks


@pytest.mark.parametrize(("section", "entry"), MAPPED, ids=title)
def test_the_plans_have_the_stated_settings(section: dict[str, Any], entry: dict[str, Any]) -> None:
    names = plans_of(section, entry)
    runs = [run for name in names for run in runs_of(name)[1] if asked(run.tasks) & set(entry["tasks"])]
    if not runs:
        assert all(item in without_plan() for item in entry_items(section, entry))
        return
    by_model = any("model" in claim.get("rows", {}) for claim in entry.get("cells", []))
    for key, accepted in stated_settings(entry["run"]).items():
        if key == "editor":  # which may be in a comment, as it needs a file of the user
            assert any(f"editor: {name}" in runs_of(plan)[0].file.text for plan in names for name in accepted)
            continue
        values = [value_of(run, key, entry) for run in runs]
        if key in VARIED or (by_model and key != "data"):
            assert accepted <= set(values), f"{names}: {key} of {accepted} nowhere, only {set(values)}"
        else:
            assert set(values) <= accepted, f"{names}: {key} is {set(values) - accepted}, published is {accepted}"
    if CHAT_TEMPLATE in entry["run"]:
        assert all(run.lm_eval.get("apply_chat_template") for run in runs)
    if limit := re.search(r"`--limit (\d+)`", entry["run"]):
        assert {run.limit for run in runs} == {int(limit[1])}


@pytest.mark.parametrize("name", shipped_plans())
def test_a_plan_with_a_chat_template_has_it_from_the_map(name: str) -> None:
    plan = load_plan(shipped_plans()[name])
    texts = [entry["run"] for section, entry in MAPPED if name in plans_of(section, entry)]
    assert bool(plan.lm_eval.get("apply_chat_template")) == any(CHAT_TEMPLATE in text for text in texts)


def stated_settings(run: str) -> dict[str, set[str]]:
    """Key -> values that the text of an entry names, as `` `data=hub:v1,mode=single` ``."""
    found: dict[str, set[str]] = {}
    for quoted in re.findall(r"`([^`]*=[^`]*)`", run):
        for setting in quoted.split(","):
            key, value = setting.split("=")
            found.setdefault(key, set()).add(value)
    return found


def value_of(run: Run, key: str, entry: dict[str, Any]) -> str:
    """A setting of a run as text; ``data`` with the set of the entry's benchmark."""
    if key == "data":
        benchmarks = {benchmark.name for task in entry["tasks"] for benchmark in benchmarks_of(task)}
        sets = {str(run.model_args[f"{name}_set"]) for name in benchmarks if f"{name}_set" in run.model_args}
        return ":".join([str(run.model_args.get("data")), *sorted(sets)])
    value = run.metadata.get(key, run.model_args.get(key))
    if isinstance(value, Mapping):  # settings of an editor, as on the command line
        return ";".join(f"{name}:{setting}" for name, setting in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)
