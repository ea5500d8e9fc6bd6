"""The tables of measured numbers: plans are complete, their runs are kept, and each number is that of the kept runs."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import blocks_measured
import pytest
from blocks import BLOCKS
from blocks_measured import (
    ABLATIONS,
    FINDINGS,
    FOUND,
    GROUPS,
    HEADINGS,
    MEASURED,
    PARTS,
    PUBLISHED,
    ablation_front,
    ablations,
    kept_passports,
    plan_editors,
)
from blocks_reverse import (
    COMPARED_WITH,
    REVERSE,
    REVERSE_COLUMNS,
    STUDY,
    reverse_cases,
    reverse_rows,
    reverse_tests,
    study_rows,
)
from model_shapes import MODELS, model_like
from paths import ROOT

from edit_hooks.base.registry import EDITORS, load_editor
from lm_edit.passport.making import PARTS as PASSPORT_PARTS
from lm_edit.passport.record import SCHEMA
from lm_edit.results.files.runs import ResultFile, read_result_files
from lm_edit.sweeps.checking.checks import check_plan
from lm_edit.sweeps.checking.tasks import leaf_tasks
from lm_edit.sweeps.planning.choices import UNEDITED
from lm_edit.sweeps.planning.plan import find_plan, load_plan

# Settings that name a rule; a run records the texts that it gave, which are not kept.
SAMPLED = ("context_templates", "calibration")
# Settings that are newer than kept runs and cannot have changed them -> why.
NEWER = {
    "append_eos": "no end token after targets, as before",
    "shuffle": "False: in the order of the requests, as before",
    "stream": "the released stream, as before",
    "trained": "the MLP output projection, as before",
    "aligned": "without error feedback, as before",
    "clean_paraphrases": "concerns pools of CounterFact's records; the pool of these runs is built in",
    "first_position": "the demo model's tokenizer begins every prompt with a start token",
    "initial_adapters": "None: drawn, as before",
    "initial_predictor": "None: drawn, as before",
    "initial_values": "None: drawn, as before",
    "evk_noise": "None: drawn, as before",
}


@functools.cache
def kept(folder: Path) -> list[ResultFile]:
    return read_result_files([folder])


def place(args: Any, name: str, seed: object, task: str) -> tuple[Any, ...]:
    """What tells the results of one task from others of a plan's runs."""
    stream = [args.get(option) for option in ("num_edits", "edit_batch_size")] if args["mode"] == "sequential" else []
    return name, args["mode"], *stream, seed, task


def planned(path: Path) -> Iterator[tuple[Any, ...]]:
    for run in check_plan(load_plan(path)).runs:
        for task in (task for name in run.tasks for task in leaf_tasks(name)):
            yield place(run.model_args, run.editor, run.model_args.get("seed"), task)


def made(folder: Path) -> Iterator[tuple[Any, ...]]:
    for file in kept(folder):
        recorded, facts = file.content["config"]["edited_hf"], file.facts
        seed = None if facts.mode == "none" else facts.seed
        for task in file.tasks:
            yield place(recorded, facts.editor_label or facts.editor, seed, task)


def test_kept_runs_name_the_model_whose_weights_they_had() -> None:
    names: dict[str, set[str]] = {}
    for file in read_result_files([ROOT / "docs/_data"]):
        recorded = file.content["config"]["edited_hf"]
        if recorded.get("pretrained"):
            names.setdefault(recorded["model_identity"]["weights"], set()).add(recorded["pretrained"])
    assert len(names) == 2 and all(len(of_weights) == 1 for of_weights in names.values()), names


def test_the_kept_runs_are_those_of_the_plan() -> None:
    """But for editors that cannot use some edits, and seeds of streams in which nothing is drawn."""
    wanted, found = set(planned(find_plan("demo_editors"))), list(made(MEASURED))
    assert set(found) <= wanted and len(found) == len(set(found)) > 1000
    for name, mode, *_, seed, task in wanted - set(found):
        cannot = name.startswith("bird") and task.startswith("qaedit")
        draws_nothing = name == "ultraedit" and mode == "sequential" and seed
        assert cannot or draws_nothing, (name, mode, seed, task)


def test_the_kept_findings_are_runs_of_their_plan() -> None:
    """Steps of one edit are the default of the plan's streams, which the runs did not name."""
    wanted = {tuple(part for part in one if part != 1) for one in planned(ROOT / "docs/_data/findings.yaml")}
    found = {tuple(part for part in one if part is not None or one[1] == "none") for one in made(FINDINGS)}
    assert found <= wanted and len(found) > 30


def test_the_kept_ablations_are_runs_of_their_plan_and_the_page_has_their_numbers() -> None:
    """The text of the page quotes cells of its table."""
    wanted, found = set(planned(find_plan("two_way_ablations"))), list(made(ABLATIONS))
    assert len(found) == len(set(found)) == 19 * 4 and {one[:2] for one in found} == {one[:2] for one in wanted}
    cells = {name: {heading: cell.value for heading, cell in own.items()} for name, own in ablations().items()}
    assert list(cells)[:2] == [UNEDITED, "two_way"] and len(cells) == 19
    page = " ".join((ROOT / "docs/explain/two-way-parts.md").read_text(encoding="utf-8").split())

    def quoted(text: str, *places: tuple[str, str]) -> None:
        assert text.format(*(f"{cells[name][heading]:.2f}" for name, heading in places)) in page, text

    parts = ("no cloze", "no link", "no question")
    quoted(
        "falls from {} to {} without `cloze`, to {} without `link`, and to {} without `question`. RLS rises with every "
        "row that is left out ({}, {}, {})",
        ("two_way", "RQS"),
        *((name, "RQS") for name in parts),
        *((name, "RLS") for name in parts),
    )
    spent = ("gate 0.05", "twelve blocks", "all prompts kept")
    assert [cells[name]["RQS"] for name in spent] == [1.0] * 3
    quoted("RLS {}, {}, {}. A higher gate (1), or one block", *((name, "RLS") for name in spent))
    saved = ("gate 1", "one block")
    assert [cells[name]["RQS"] for name in saved] == [pytest.approx(2 / 6)] * 2
    for name in saved:
        quoted("keep it (RLS {}) and answer two of six", (name, "RLS"))
    quoted("At four steps RQS is {} and RLS {}", ("four steps", "RQS"), ("four steps", "RLS"))
    assert all(min(own["RQS"], own["RLS"]) < 0.75 for own in cells.values())
    bare = "no locality term"
    quoted(
        "RLS is {} with it and {} without, LS {} and {}; names alone and neighbors alone also have RLS {}",
        *(("two_way", "RLS"), (bare, "RLS"), ("two_way", "LS"), (bare, "LS"), ("locality names only", "RLS")),
    )
    assert cells["locality names only"]["RLS"] == cells["locality neighbors only"]["RLS"]
    heavy = "locality weight 10"
    quoted("Weight 10 has RQS {}, RLS {} and LS {}", (heavy, "RQS"), (heavy, "RLS"), (heavy, "LS"))
    turned = [name for name, own in cells.items() if own["RQS"] >= cells["ice"]["RQS"] and name != "ice"]
    assert all(cells[name]["RLS"] < cells["ice"]["RLS"] and cells[name]["LS"] < cells["ice"]["LS"] for name in turned)
    assert cells["ice"]["RQS"] == cells["two_way"]["RQS"]
    for name in ("no inverse rows", "ft_m"):
        assert (cells[name]["RQS"], cells[name]["RLS"]) == (0.0, 1.0)
    front = ablation_front()
    assert [panel.title for panel in front.panels] == ["RQS against RLS", "GS against LS"]
    assert [series.values[0] for series in front.panels[0].series] == [own["RQS"] for own in cells.values()]


def test_the_scores_of_single_cases_are_those_of_the_kept_runs() -> None:
    """Reverse locality: the means of the cases are the files' values, and unscored cases are not counted."""
    assert set(made(REVERSE)) <= set(planned(find_plan("reverse_locality")))
    columns = {heading: place for place, heading in REVERSE_COLUMNS.items()}
    assert {one.name for one in reverse_rows()} == set(reverse_cases())
    for file in kept(REVERSE):
        own = reverse_cases()[file.facts.editor_label or file.facts.editor or UNEDITED]
        for heading, scores in own.items():
            task, metric = columns[heading]
            scored = [score for score in scores if score is not None]
            assert file.tasks[task][f"{metric},none"] == pytest.approx(fmean(scored), abs=1e-5), (file.path, heading)
            assert file.tasks[task][f"{metric}_n,none"] == len(scored) <= len(scores) == 8


def test_the_tests_of_reverse_questions_are_paired_and_corrected() -> None:
    """MEMIT answers none of the questions of which the note in the prompt answers six: p = 2 / 2 ** 6 before Holm."""
    tests = reverse_tests("RQS")
    assert COMPARED_WITH not in tests and UNEDITED not in tests
    memit = tests["memit"]
    assert memit is not None and (memit.test, memit.num_cases, memit.difference) == ("mcnemar", 8, -0.75)
    assert memit.p == min(1.0, 2 / 2**6 * len(tests))  # the smallest p of the family
    row = next(line for line in BLOCKS["reverse-locality"]("").text.splitlines() if line.startswith("| `memit`"))
    assert f"| {memit.p:.2f} |" in row


def test_the_kept_runs_of_the_study_are_of_its_plan_and_the_page_quotes_them() -> None:
    found = set(made(STUDY))
    assert len(found) == 10 * 5 and found <= set(planned(find_plan("two_way_study")))
    rows = {one.name: {heading: cell.value for heading, cell in one.cells.items()} for one in study_rows("smollm2")}
    assert list(rows) == [UNEDITED, "ice", "two_way", "ft_m"]
    page = " ".join((ROOT / "docs/explain/two-way-study.md").read_text(encoding="utf-8").split())
    assert [rows[name]["RQS"] * 8 for name in ("two_way", "ft_m", "ice")] == [3, 0, 2]
    for text in (
        "RLS falls from {unedited[RLS]:.2f} to {two_way[RLS]:.2f} and LS from {unedited[LS]:.2f} to {two_way[LS]:.2f}",
        "With FT-M they are {ft_m[RLS]:.2f} and {ft_m[LS]:.2f}",
        "RQS {ice[RQS]:.2f}, and ES {ice[ES]:.2f}",
        "most neighbors (LS {ice[LS]:.2f}), and of the other reverse questions fewer than FT-M (RLS {ice[RLS]:.2f})",
        "in {two_way[RJS]:.2f} of the cases with two-way edits",
        "{ice[RJS]:.2f} with the note, and {ft_m[RJS]:.2f} with FT-M",
        "second model has LS {unedited[LS]:.2f} and RLS {unedited[RLS]:.2f}",
    ):
        assert text.format(**rows) in page, text
    rows = {one.name: {heading: cell.value for heading, cell in one.cells.items()} for one in study_rows("demo")}
    assert list(rows) == [UNEDITED, "ice", "two_way", "mirror", "ft_m", "r_rome", "memit"]
    answered = [rows[name]["RQS"] * 64 for name in ("mirror", "two_way", "ice", "ft_m", "r_rome", "memit")]
    assert answered == [56, 52, 45, 0, 0, 0]
    aims = {"RQS": 0.8, "RLS": 0.8, "LS": 0.9, "GS": 0.8}
    assert [name for name in rows if all(rows[name][one] >= least for one, least in aims.items())] == ["mirror"]
    for text in (
        "RLS is {two_way[RLS]:.2f}, of the note {ice[RLS]:.2f}",
        "editors {r_rome[RLS]:.2f} to {memit[RLS]:.2f}",
        "Neighbors keep {two_way[LS]:.2f}**, between FT-M ({ft_m[LS]:.2f}) and the note ({ice[LS]:.2f})",
        "MEMIT keeps {memit[LS]:.2f} and generalizes to {memit[GS]:.2f} of the paraphrases, two-way edits to "
        "{two_way[GS]:.2f}",
        "RJS {ice[RJS]:.2f} with it, {mirror[RJS]:.2f} with mirrored edits and R-ROME, {two_way[RJS]:.2f} with two-way",
        "generalizes to {mirror[GS]:.2f} of the paraphrases, and keeps {mirror[LS]:.2f} of the neighbors and "
        "{mirror[RLS]:.2f} of the other reverse questions. The note in the prompt has {ice[RQS]:.2f}, {ice[GS]:.2f}, "
        "{ice[LS]:.2f} and {ice[RLS]:.2f}",
    ):
        assert text.format(**rows) in page, text
    own = " ".join((ROOT / "docs/editors/mirror.md").read_text(encoding="utf-8").split())
    for text in (
        "RQS {mirror[RQS]:.2f}, RLS {mirror[RLS]:.2f}, LS {mirror[LS]:.2f}, GS {mirror[GS]:.2f}, ES {mirror[ES]:.2f}.",
        "RQS {memit[RQS]:.2f}, RLS {memit[RLS]:.2f}, LS {memit[LS]:.2f} and GS {memit[GS]:.2f}",
    ):
        assert text.format(**rows) in own, text
    found_rows = study_rows("demo", "sequential")
    rows = {one.name: {heading: cell.value for heading, cell in one.cells.items()} for one in found_rows}
    assert list(rows) == [UNEDITED, "ice", "two_way", "ft_m"]
    for text in (
        "ES {two_way[ES]:.2f}, RQS {two_way[RQS]:.2f} and LS {two_way[LS]:.2f}, where FT-M has {ft_m[ES]:.2f}, "
        "{ft_m[RQS]:.2f} and {ft_m[LS]:.2f}",
        "its RLS falls to {ft_m[RLS]:.2f}",
    ):
        assert text.format(**rows) in page, text


def test_the_page_of_reverse_locality_quotes_its_table() -> None:
    page = " ".join((ROOT / "docs/benchmarks/bake-reverse.md").read_text(encoding="utf-8").split())
    rows = {one.name: {heading: cell.value for heading, cell in one.cells.items()} for one in reverse_rows()}
    inside = {
        one.name for one in reverse_rows() if one.name != UNEDITED and "context" not in EDITORS[one.editor].writes
    }
    still = {name for name in inside if (rows[name]["RQS"], rows[name]["RLS"]) == (0.0, 1.0)}
    assert inside - still == {"two_way", "consequence_ft", "bird", "memoir"}
    assert {name for name in inside if rows[name]["RQS"] > 0} == {"two_way", "consequence_ft"}
    assert rows["bird"]["RQS"] == rows["memoir"]["RQS"] == 0
    assert {name for name in rows if rows[name]["ES"] < 0.5} == {UNEDITED, "revive", "scr"}
    for text in (
        "`two_way` has RQS {two_way[RQS]:.2f} and RLS {two_way[RLS]:.2f}, "
        "`consequence_ft` RQS {consequence_ft[RQS]:.2f} and RLS {consequence_ft[RLS]:.2f}",
        "no question turned, and RLS {bird[RLS]:.2f} and {memoir[RLS]:.2f}",
        "With ES {revive[ES]:.2f} and {scr[ES]:.2f}",
        "`ice` has RLS {ice[RLS]:.2f}, and 32 demonstrations (`ike`) {ike[RLS]:.2f}",
        "`scr` keeps {scr[RLS]:.2f}",
    ):
        assert text.format(**rows) in page, text
    assert f"{len(still)} of the {len(inside)} editors of weights and hooks here have it" in page
    missing = {choice.name for choice in load_plan(find_plan("reverse_locality")).editors} - set(rows)
    assert missing == {"unke", "any_edit"} and "only `unke` and `any_edit` were not run" in page


def test_an_editor_trained_on_a_question_of_the_evaluation_is_marked() -> None:
    """In the table, and on the page with what is left without that fact."""
    assert [one.name for one in reverse_rows() if one.saw_questions] == ["consequence_ft"]
    assert "| `consequence_ft` (trained on questions) |" in BLOCKS["reverse-locality"]("").text
    own = reverse_cases()["consequence_ft"]
    assert (own["RQS"][-1], own["RLS"][-1], sum(filter(None, own["RQS"][:-1]))) == (1.0, None, 6.0)


def test_published_settings_are_named_as_such() -> None:
    for name, choice in plan_editors().items():
        assert ("shipped" in choice.settings) == name.endswith(PUBLISHED), name


def as_recorded(expected: Any, record: Any) -> Any:
    """The expected settings without nulls, and without those of :data:`NEWER` that a record lacks; also inner ones."""
    if not isinstance(expected, dict):
        return expected
    known = record if isinstance(record, dict) else {}
    return {
        name: as_recorded(value, known.get(name))
        for name, value in expected.items()
        if value is not None and (name in known or name not in NEWER)
    }


def test_kept_runs_had_the_settings_that_the_editors_have_now() -> None:
    """A changed default or shipped file makes a row of the table be measured again."""
    model = model_like(MODELS["gemma-3-270m"])
    expected = {
        name: json.dumps(load_editor(choice.editor, dict(choice.settings)).default_config(model).to_dict())
        for name, choice in plan_editors().items()
        if not choice.is_unedited
    }
    checked = 0
    for file in kept(MEASURED):
        if (facts := file.facts).mode == "none":
            continue
        record = dict(facts.editor_config)
        now = as_recorded(json.loads(expected[facts.editor_label or facts.editor]), record)
        assert without_draws(now) == without_draws(record), file.path
        checked += 1
    assert checked > 200


def without_draws(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {name: without_draws(one) for name, one in config.items() if name not in (*SAMPLED, "seed")}


def means() -> dict[tuple[str, str, str], float]:
    """(name, edits in the stream, task) -> mean over seeds, computed from the files alone."""
    seeds: dict[tuple[str, str, str], list[float]] = {}
    for file in kept(MEASURED):
        edits = str(file.content["config"]["edited_hf"].get("num_edits", ""))
        for (task, metric), _ in HEADINGS.items():
            if task in file.tasks:
                value = file.tasks[task][f"{metric},none"]
                seeds.setdefault((file.facts.editor_label or file.facts.editor, edits, task), []).append(value)
    return {key: fmean(values) for key, values in seeds.items()}


def shown_tables(text: str) -> Iterator[tuple[str, str, dict[str, dict[str, str]]]]:
    """Title, group, and the rows of each table of editors: editor -> heading -> cell."""
    for title, group, rows in re.findall(r"^(.*); (.*):\n\n((?:\|.*\n?)+)", text, flags=re.MULTILINE):
        heads, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.splitlines()]
        yield title, group, {line[0].strip("`"): dict(zip(heads, line, strict=True)) for line in lines}


def test_every_number_of_the_tables_is_that_of_the_files() -> None:
    expected, checked = means(), set()
    for title, group, rows in shown_tables(BLOCKS["measured-editors"]("").text):
        (part,) = (part for part, text in PARTS.items() if text == title)
        (ending,) = (ending for ending, text in GROUPS.items() if text == group)
        columns = {
            one: task for (task, _), one in HEADINGS.items() if task.startswith("counterfact") == (part == "200")
        }
        assert rows.pop(UNEDITED)["changes"] == "nothing"
        for editor, cells in rows.items():
            for heading, task in columns.items():
                key = (editor + ending, part, task)
                assert (cells[heading] == "-") == (key not in expected), key
                if key in expected:
                    assert float(cells[heading].split(" ")[0]) == pytest.approx(expected[key], abs=0.00501), key
                    checked.add(key)
    assert checked == {key for key in expected if key[0] != UNEDITED}


def test_another_number_in_a_file_is_another_number_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = next(file for file in kept(MEASURED) if file.facts.name.startswith("ice__single"))
    copied = shutil.copytree(file.path.parent, tmp_path / "results" / file.path.parent.name)
    content = json.loads((copied / file.path.name).read_text(encoding="utf-8"))
    content["results"]["bake_es"]["efficacy_prob,none"] = 0.5
    (copied / file.path.name).write_text(json.dumps(content), encoding="utf-8")
    monkeypatch.setattr(blocks_measured, "MEASURED", tmp_path)
    (row,) = blocks_measured.measured_rows.__wrapped__()  # not the kept answer of the other tests
    assert next(row.cells([key for key in row.row.cells if key.task == "bake_es"])) == "0.50"


def test_every_finding_is_on_its_page_with_its_command() -> None:
    page = (ROOT / "docs/explain/findings.md").read_text(encoding="utf-8")
    assert re.findall(r"^<!-- generated: finding (\w+) -->$", page, flags=re.MULTILINE) == list(FOUND)
    shown = "".join(BLOCKS["finding"](name).text for name in FOUND)
    for file in kept(FINDINGS):
        for task, columns in file.tasks.items():
            for name, value in columns.items():
                metric = name.partition(",")[0]
                if name.endswith(",none") and not metric.endswith(("_stderr", "_n")):
                    assert re.search(rf"^\| {task} \| {metric} \|.* {value:.3f}[, ]", shown, flags=re.MULTILINE), metric


def test_editors_that_were_not_measured_have_no_table() -> None:
    assert BLOCKS["measured"]("kn").text == "Not measured on the demo model."


def test_the_kept_passports_are_of_one_fact_and_of_this_schema() -> None:
    kept_ones = kept_passports()
    assert {one["schema"] for one in kept_ones.values()} == {SCHEMA}
    assert all(one["edit"]["editor"] == editor for editor, one in kept_ones.items())
    for field in ("model", "facts", "settings", "versions"):
        assert len({json.dumps(one[field], sort_keys=True) for one in kept_ones.values()}) == 1, field
    assert len({json.dumps(one["edit"]["statements"]) for one in kept_ones.values()}) == 1
    assert all([part["name"] for part in one["parts"]] == list(PASSPORT_PARTS) for one in kept_ones.values())
    assert not any(re.search(r'"/(?:home|root|tmp|Users)/', json.dumps(one)) for one in kept_ones.values())
    text = BLOCKS["passports"]("").text
    nll = kept_ones["ft_m"]["parts"][0]["scores"][0]
    assert nll["name"] == "target_nll"
    assert f"{nll['before']:.3g} → {nll['value']:.3g}" in text
