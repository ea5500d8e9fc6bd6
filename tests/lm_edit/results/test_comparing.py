"""One description of a run: an option of the table is known everywhere, and runs have one label in all tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import printed_lines, run_verb
from paths import ROOT
from result_files import write_run
from result_rows import frame, row
from warm_python import run_warm

from edit_hooks.utils.errors import EditingError
from lm_edit.figures.select import edited_labels
from lm_edit.leaderboard.table import build_board
from lm_edit.results.comparing import EDITED_MODEL, SETTINGS, differences, run_labels, shared_facts
from lm_edit.results.filters import filter_rows
from lm_edit.results.show import comparison
from lm_edit.results.tables import load_cases, load_results

# What a developer of an option writes, before anything reads the table; then everything that a user sees.
NEW_OPTIONS = r"""
import dataclasses, sys
import edit_hooks.run_options as table
table.RUN_OPTIONS = (
    *table.RUN_OPTIONS,
    table.RunOption(name="warmth", default=1, changes="edits", modes=("single",), at_default=(None, 1), help="new"),
    table.RunOption(
        name="rounds", default=None, changes="edits", column="rounds", column_help="rounds of each edit",
        label="{} rounds", help="also new",
    ),
)
table.BY_NAME = {option.name: option for option in table.RUN_OPTIONS}

from pathlib import Path
from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.utils.errors import EditingError
from result_files import change, write_run
from lm_edit.figures.select import by_model, require_one_line
from lm_edit.figures.needs import Needs
from lm_edit.leaderboard.table import build_board
from lm_edit.results.comparing import run_labels
from lm_edit.results.filters import filter_rows
from lm_edit.results.show import comparison
from lm_edit.results.tables import load_cases, load_results

def refused(call):
    try:
        call()
    except EditingError as error:
        return str(error)

# the constructor
fields = [("warmth", int, 1), ("rounds", object, None)]
Options = dataclasses.make_dataclass("Options", fields, bases=(EditingOptions,), frozen=True)
assert Options(warmth=2).warmth == 2
assert "warmth=2 has no meaning in mode=none" in refused(lambda: Options(mode="none", warmth=2))
# the reference of the site
from blocks_options import run_options
assert "`warmth`\n: new" in run_options("").text and "`rounds`\n: also new" in run_options("").text
# files of runs: names of folders, columns, identity
root = Path(sys.argv[1])
made = {"plain": {}, "default": {"warmth": 1}, "warm": {"warmth": 2}, "often": {"rounds": 3}}
paths = {name: write_run(root / name, **options) for name, options in made.items()}
results = load_results([paths["plain"], paths["warm"], paths["often"]])
names = dict(zip(results["file"], results["run_name"]))
runs = dict(zip(results["file"], results["run"]))
plain, warm, often = (str(paths[name]) for name in ("plain", "warm", "often"))
assert "__single-warmth=2__" in names[warm] and "__single-rounds=3__" in names[often] and "=" not in names[plain]
assert len(set(runs.values())) == 3 and set(load_results(paths["default"])["run"]) == {runs[plain]}
first = results.drop_duplicates("run").set_index("file")
assert first["edit_options"].to_dict() == {plain: "", warm: "warmth=2", often: ""}
assert first["rounds"].fillna(0).to_dict() == {plain: 0, warm: 0, often: 3}
# labels of show, figures and leaderboard
expected = {runs[plain]: "r_rome", runs[warm]: "r_rome (warmth=2)", runs[often]: "r_rome (3 rounds)"}
assert run_labels(results) == expected
assert set(comparison([plain, warm, often]).rows[0][2:]) == set(expected.values())
assert set(by_model(results)[0].labels.values()) == set(expected.values())
(section,) = build_board(results, load_cases([plain, warm, often]), resamples=9).sections
assert {one.label for one in section.rows} == set(expected.values())
# runs that differ in an option are not one line
of_metric = results[results["metric"] == "efficacy_prob"]
needs = Needs("figure", "", "")
for one, column in ((warm, "edit_options"), (often, "rounds")):
    pair = of_metric[of_metric["file"].isin([plain, one])]
    assert f"differ in {column} (" in refused(lambda: require_one_line(pair, needs, "r_rome"))
# --only
chosen = {"warmth=2": {warm}, "warmth=1": {plain, often}, "rounds=3": {often}, "rounds=": {plain, warm}}
for condition, kept in chosen.items():
    assert set(filter_rows(results, [condition])["file"]) == kept, condition
assert "Did you mean 'warmth'" in refused(lambda: filter_rows(results, ["warmt=2"]))
assert "Did you mean 'rounds'" in refused(lambda: filter_rows(results, ["round=2"]))
"""


def test_an_option_of_the_table_is_known_everywhere(tmp_path: Path) -> None:
    """Both kinds: one is listed in `edit_options`, the other has a column of its own."""
    pytest.importorskip("statsmodels", reason="the statistics of the leaderboard are an extra")
    pytest.importorskip("scikit_posthocs", reason="the statistics of the leaderboard are an extra")
    code = f"import sys\nsys.path[:0] = {sys.path!r}\n{NEW_OPTIONS}"
    done = run_warm(["-c", code, str(tmp_path)], cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def test_columns_that_tell_runs_apart_follow_from_the_table() -> None:
    assert set(SETTINGS) == {
        "editor", "settings", "mode", "edits", "num_edits", "edit_batch_size", "group_size", "icl", "seed",
        "edit_options", "answer_options",
    }  # fmt: skip
    assert {"model", "model_hash", "model_parts", "context_editor"} == set(EDITED_MODEL) - set(SETTINGS)
    assert set(SETTINGS) - set(EDITED_MODEL) == {"seed", "edits"}


def test_labels_have_what_differs_and_no_more() -> None:
    def labels(*rows: dict[str, object]) -> list[str]:
        return list(run_labels(frame(*rows)).values())

    rome, unedited = row("rome", "t", "m", 1.0), row("unedited", "t", "m", 1.0)
    assert labels(rome, unedited) == ["rome", "unedited"]  # the mode of the unedited model is no difference
    stream = row("memit", "t", "m", 1.0, mode="sequential", num_edits=100.0, edit_batch_size=10.0)
    assert labels(rome, stream, unedited) == [
        "rome (single)",
        "memit (sequential, 100 edits, batches of 10)",
        "unedited",
    ]
    other = row("rome", "t", "m", 1.0, settings="ffff0000", seed=1.0)
    assert labels(rome, other, row("memit", "t", "m", 1.0, seed=2.0)) == [
        "rome (settings 0000aaaa, seed 0)", "rome (settings ffff0000, seed 1)", "memit",
    ]  # fmt: skip
    short = row("rome", "t", "m", 1.0, answer_options="max_length=64", run="b" * 12)
    assert labels(rome, short) == ["rome", "rome (max_length=64)"]
    qa = row("memit", "t", "m", 1.0, edit_options="edit_context=qa")
    assert labels(rome, qa) == ["rome", "memit (edit_context=qa)"]
    assert labels(rome, row("rome", "t", "m", 1.0, model="large")) == ["rome (tiny)", "rome (large)"]
    few = row("rome", "t", "m", 1.0, limit=4.0, run="c" * 12)
    assert labels(rome, few) == ["rome", "rome (--limit 4)"]
    again = [row("rome", "t", "m", 1.0, run=digit * 12) for digit in "de"]
    assert labels(*again) == ["rome [dddddd]", "rome [eeeeee]"]
    added = row("rome+ike", "t", "m", 1.0, icl="yes")
    assert labels(rome, added) == ["rome", "rome+ike"]
    named = row("rome+ike", "t", "m", 1.0, icl="yes", editor_label="mine")
    assert labels(row("rome", "t", "m", 1.0, editor_label="mine"), named) == ["mine", "mine (icl)"]


def test_facts_that_all_runs_share_are_said_once() -> None:
    runs = [row(name, "t", "m", 1.0, mode="batch", num_edits=8.0, group_size=2.0) for name in ("rome", "memit")]
    unedited = row("unedited", "t", "m", 1.0)
    assert shared_facts(frame(*runs, unedited)) == (
        "All runs: model tiny; data mini; edits: batch, 8 edits, groups of 2."
    )
    assert shared_facts(frame(runs[0], row("ft_m", "t", "m", 1.0, model="large"))) == "All runs: data mini."


def test_a_run_under_two_protocols_differs_from_itself() -> None:
    twice = frame(row("rome", "t", "m", 1.0, protocol="a"), row("rome", "t", "m", 1.0, protocol="b"))
    (found,) = differences(twice, ("task", "metric"), ("protocol", "data"))
    run = twice["run"][0]
    assert found == (("t", "m"), "protocol", ((run, "a"), (run, "b")))
    twice["protocol"] = ["a", None]
    assert list(differences(twice, ("task",), ("protocol",), silent=("protocol",))) == []
    assert len(list(differences(twice, ("task",), ("protocol",)))) == 1


def test_one_run_has_one_label_in_tables_figures_and_the_leaderboard(tmp_path: Path) -> None:
    pytest.importorskip("statsmodels", reason="the statistics of the leaderboard are an extra")
    pytest.importorskip("scikit_posthocs", reason="the statistics of the leaderboard are an extra")
    write_run(tmp_path / "a", editor_label="mine")
    write_run(tmp_path / "b", editor_label="mine", edit_context="qa")
    write_run(tmp_path / "c", mode="none", editor=None, editor_config=None)
    results = load_results(tmp_path)
    (section,) = build_board(results, load_cases(tmp_path), resamples=9).sections
    expected = {"mine", "mine (edit_context=qa)"}
    assert {one.label for one in section.rows} == {"unedited", *expected}
    assert set(edited_labels(results).values()) == expected
    assert set(comparison(tmp_path).rows[0][2:]) == {"unedited", *expected}


def test_only_has_options_as_fields_in_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", edit_context="qa")
    assert set(filter_rows(load_results(tmp_path), ["edit_context=bare"])["edit_options"]) == {""}
    runs, out = str(tmp_path / "runs"), tmp_path / "csv"
    assert run_verb(["results", "export", runs, "--to", "csv", "--only", "edit_context=qa", "--out", str(out)]) == 0
    kept = filter_rows(load_results(runs), ["edit_context=qa"])
    for name in ("results.csv", "cases.csv"):
        lines = (out / name).read_text(encoding="utf-8").splitlines()[1:]
        assert lines and {line.split(",")[0] for line in lines} == set(kept["run"])
    capsys.readouterr()
    assert run_verb(["results", "show", runs, "--only", "edit_context=qa"]) == 0
    assert printed_lines(capsys)[0] == "| task | metric | r_rome |"
    for verb in (["results", "show", runs], ["results", "export", runs, "--to", "csv", "--out", str(tmp_path / "x")],
                 ["leaderboard", runs, "-o", str(tmp_path / "site")],
                 ["figure", "wild_gap", runs, "-o", str(tmp_path / "x.svg")]):  # fmt: skip
        assert run_verb([*verb, "--only", "edit_contxt=qa"]) == 2
        assert "Did you mean 'edit_context'" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["every-eval-ever", pytest.param("inspect", marks=pytest.mark.slow)])
def test_exports_have_the_chosen_runs(target: str, tmp_path: Path) -> None:
    from lm_edit.results.exports.options import ExportOptions
    from lm_edit.results.exports.targets import export_results

    if target == "inspect":
        pytest.importorskip("inspect_ai", reason="an extra")
    paths = [write_run(tmp_path / name, editor=name) for name in ("memit", "ft_m")]
    exported = export_results(target, paths, tmp_path / "out", ExportOptions(only=["editor=memit"]))
    assert exported.files and all("memit" in str(path.relative_to(tmp_path)) for path in exported.files)
    with pytest.raises(EditingError, match="Did you mean 'memit'"):
        export_results(target, paths, tmp_path / "none", ExportOptions(only=["editor=memt"]))
