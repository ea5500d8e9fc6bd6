"""Result files of runs with one part deleted, of another type, or extreme: every reader reads them or refuses them.

A refusal is an EditingError, and `lm-edit results check` reports a problem wherever the leaderboard refuses.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_line import run_verb
from real_runs import RealRuns, result_file
from result_readers import READERS, SLOW_READERS, Reader

from edit_hooks.utils.errors import EditingError
from lm_edit import load_documents, load_results
from lm_edit.results.checking.check import check_results

DELETED = "<deleted>"
RAW = "<raw>"
# JSON texts of values; some have none in Python.
VALUES = (
    DELETED, "null", "true", "-1", "1.5", "1e308", "NaN", "Infinity", "1" + "0" * 400, "9" * 5000, '""', '"x"',
    '"\\ud800"', '"\\u0000"', "[]", '["a", 1]', "{}", '{"a": 1}', "[null]", "[" * 400 + "]" * 400,
)  # fmt: skip
Place = tuple[str | int, ...]


class Mutation(NamedTuple):
    """A place in a JSON file and the text of what is written there."""

    place: Place
    value: str

    def of(self, content: Any) -> str:
        """The text of the mutated content."""
        changed = copy.deepcopy(content)
        box = changed
        for key in self.place[:-1]:
            box = box[key]
        if self.value == DELETED:
            del box[self.place[-1]]
        else:
            box[self.place[-1]] = RAW
        return json.dumps(changed).replace(json.dumps(RAW), self.value)


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Every place in a JSON value; of a list those in its first entry."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*above, key)
        yield from places(inner, (*above, key))


class Damaged(NamedTuple):
    """A copy of the files of a run, of which one JSON text is mutated again and again."""

    runs: Path
    path: Path
    content: Any
    other_lines: list[str]

    def write(self, mutation: Mutation) -> None:
        self.path.write_text("\n".join([mutation.of(self.content), *self.other_lines]) + "\n", encoding="utf-8")


def damaged(real: Path, folder: Path, what: str) -> Damaged:
    """The result file of a run, or the first line of its samples, to be mutated."""
    shutil.copytree(real, folder / "runs")
    path = result_file(folder / "runs")
    if what == "results":
        return Damaged(folder / "runs", path, json.loads(path.read_text(encoding="utf-8")), [])
    path = sorted(path.parent.glob("samples_*.jsonl"))[0]
    first, *others = path.read_text(encoding="utf-8").split("\n")[:-1]
    return Damaged(folder / "runs", path, json.loads(first), others)


def check_readers(one: Damaged, mutation: Mutation, readers: Mapping[str, Reader], out: Path) -> None:
    """Read a mutated run in every way; anything but a refusal is an error of the test."""
    one.write(mutation)
    refusals: dict[str, str] = {}
    for name, read in readers.items():
        shutil.rmtree(out, ignore_errors=True)
        try:
            read(one.runs, out)
        except EditingError as error:
            refusals[name] = str(error)
        except Exception as error:
            raise AssertionError(f"{name}, {mutation.place}, {mutation.value[:20]}: {error!r}") from error
    problems = [problem.text for problem in check_results(one.runs).problems]
    if "leaderboard" in refusals:
        assert problems, f"{mutation.place}, {mutation.value[:20]}: only the leaderboard: {refusals['leaderboard']}"


@pytest.mark.parametrize("what", ["results", "samples"])
def test_some_mutations(what: str, real_runs: RealRuns, tmp_path: Path) -> None:
    one = damaged(real_runs.command, tmp_path, what)
    rng = random.Random(what)
    found = list(places(one.content))
    for _ in range(8):
        check_readers(one, Mutation(rng.choice(found), rng.choice(VALUES)), READERS, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["results", "samples"])
@pytest.mark.parametrize("run", ["command", "mapping"])
def test_every_mutation(run: str, what: str, real_runs: RealRuns, tmp_path: Path) -> None:
    """Values that the reader of files refuses are read by one reader alone, since all of them begin with it."""
    one = damaged(getattr(real_runs, run), tmp_path, what)
    rng = random.Random(0)
    for place in places(one.content):
        chosen = rng.sample(VALUES, 2)
        for value in VALUES:
            mutation = Mutation(place, value)
            one.write(mutation)
            try:
                load_results(one.runs)
                list(load_documents(one.runs))
            except EditingError:
                assert check_results(one.runs).problems, (place, value[:20])
            else:
                if value in chosen:
                    check_readers(one, mutation, {**READERS, **SLOW_READERS}, tmp_path / "out")


COUNT = ("n-samples", "bake_es", "effective")
METRIC = "<the first metric>"
KNOWN: dict[str, tuple[str, Place, str, str]] = {
    "huge count": ("results", COUNT, "1" + "0" * 400, "too many digits"),
    "NaN as count": ("results", COUNT, "NaN", "n-samples.bake_es.effective is nan; a whole number of at least 0"),
    "infinite count": (
        "results",
        ("results", "bake_es", f"{METRIC}_failed,none"),
        "Infinity",
        "failed is inf, which is no",
    ),
    "huge value": ("results", ("results", "bake_es", f"{METRIC},none"), "1" + "0" * 400, "too many digits"),
    "list as value": ("results", ("results", "bake_es", f"{METRIC},none"), "[]", f"{METRIC},none is a list; a number"),
    "versions": ("results", ("versions",), "[]", "versions is a list; an object is needed"),
    "nesting": ("results", ("config", "edited_hf", "retention"), VALUES[-1], "nested too deeply"),
    "limit": ("results", ("config", "limit"), "Infinity", "config.limit is inf; a finite number is needed"),
    "editor": ("results", ("config", "edited_hf", "editor"), "{}", "config.edited_hf.editor is an object"),
    "sample": ("samples", ("doc", "edit_requests", 0, "prompt"), "1", "doc.edit_requests[0].prompt is 1"),
    "metrics": ("samples", (METRIC,), DELETED, f"{METRIC} is among its metrics and has no value"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_refusals_name_file_and_field(name: str, real_runs: RealRuns, tmp_path: Path) -> None:
    what, place, value, words = KNOWN[name]
    one = damaged(real_runs.command, tmp_path, what)
    (metric,) = load_results(real_runs.command)["metric"].unique()[:1]
    words = words.replace(METRIC, metric)
    named = (key.replace(METRIC, metric) if isinstance(key, str) else key for key in place)
    mutation = Mutation(tuple(named), value)
    check_readers(one, mutation, {"leaderboard": READERS["leaderboard"]}, tmp_path / "out")
    with pytest.raises(EditingError) as refusal:
        READERS["leaderboard"](one.runs, tmp_path / "out2")
    assert words in str(refusal.value) and one.path.name in str(refusal.value)
    assert any(words in problem.text for problem in check_results(one.runs).problems)


@pytest.mark.parametrize("place", [("resps", 0, 0), ("doc", "source_id"), ("filtered_resps", 0), ("doc", "\ud83d")])
def test_half_of_a_surrogate_pair_costs_no_file(place: Place, real_runs: RealRuns, tmp_path: Path) -> None:
    """It stands as U+FFFD in everything that is written."""
    one = damaged(real_runs.command, tmp_path, "samples")
    one.content["doc"]["\ud83d"] = "a key"
    one.write(Mutation(place, '"a \\ud800 b"'))
    assert check_results(one.runs).problems == []
    for name, read in {**READERS, **SLOW_READERS}.items():
        if name not in ("hf", "select-wrong"):  # these refuse the run for other reasons
            read(one.runs, tmp_path / f"out_{name}")
    written = [path for path in (tmp_path / "out_merge").rglob("*") if path.is_file()]
    assert written and all(path.read_text(encoding="utf-8") for path in written)


def test_the_check_names_what_the_leaderboard_refuses_together(
    real_runs: RealRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of which each is right, asked in two ways."""
    for name in ("one", "other"):
        shutil.copytree(real_runs.command if name == "one" else real_runs.unedited, tmp_path / name)
    path = result_file(tmp_path / "other")
    content = json.loads(path.read_text(encoding="utf-8"))
    content["versions"]["bake_es"] = 99
    path.write_text(json.dumps(content), encoding="utf-8")
    assert run_verb(["results", "check", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "2 result files, 0 problems" in printed
    assert "lm-edit leaderboard refuses them together" in printed and "task version" in printed
