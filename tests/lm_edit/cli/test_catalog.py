"""``lm-edit editors``, ``lm-edit tasks`` and ``lm-edit validate``."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from command_line import printed_lines, write_requests
from distributions import write_metadata
from paths import RECORDS, ROOT
from templates import copy_template

from edit_hooks.base.registry import EDITORS
from edit_hooks.contract.tiny_models import REQUESTS
from edit_hooks.training.mend.config import TrainingConfig
from edit_hooks.training.serac.config import SERACTrainingConfig
from edit_hooks.utils.errors import EditingError
from lm_edit.cli.main import main
from lm_eval_tasks.common.records.benchmark import ENTRY_POINTS
from lm_eval_tasks.report import catalog

BAKE = RECORDS / "bake_qa.jsonl"


def test_editors_are_listed_with_capabilities_and_settings(capsys):
    assert main(["editors"]) == 0
    lines = printed_lines(capsys)
    assert [line.split()[0] for line in lines[1 : 1 + len(EDITORS)]] == list(EDITORS)
    memit = next(line for line in lines if line.startswith("memit ")).split()
    assert memit[1:4] == ["core", "yes", "yes"]
    assert main(["editors", "rome"]) == 0
    settings = {line.split()[0]: line for line in printed_lines(capsys)[2:]}
    assert "float" in settings["lr"] and "0.5" in settings["lr"] and settings["seed"].endswith("at random")


@pytest.mark.parametrize(
    ("editor", "setting", "sources"),
    [
        ("simie", "ridge", ["EasyEdit's files", "command line has 1", "its README 10"]),
        ("emmet", "ridge_single", ["as EasyEdit does", "false: for batches only, as the authors do"]),
        ("melo", "query_token", ["last_text", "released"]),
        ("melo", "scale", ["the release's is its number of blocks, 350"]),
    ],
)
def test_settings_in_which_releases_differ_name_them(editor, setting, sources, capsys):
    assert main(["editors", editor]) == 0
    (line,) = [line for line in printed_lines(capsys) if line.split()[:1] == [setting]]
    assert all(source in line for source in sources), line


@pytest.mark.parametrize(("editor", "config"), [("mend", TrainingConfig), ("serac", SERACTrainingConfig)])
def test_settings_of_a_training_are_listed_with_their_help(editor, config, capsys):
    """Once no command and no page had them."""
    assert main(["editors", editor]) == 0
    editors, trainings = capsys.readouterr().out.split(f"\nSettings of its training (lm-edit train {editor} --settings")
    assert "num_steps" not in editors
    rows = {line.split()[0]: line for line in trainings.splitlines()[2:]}
    for field in dataclasses.fields(config):
        row = rows.get(field.name, editors)
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        assert field.metadata["help"] in row and repr(default) in row


def test_tasks_and_groups_are_listed_with_a_description(capsys):
    """None lacks one: `list_tasks` refuses a task without."""
    assert main(["tasks"]) == 0
    rows = [re.split(r" {2,}", line, maxsplit=3) for line in printed_lines(capsys)[1:-2]]
    in_files = list((ROOT / "lm_eval_tasks").glob("*/*.yaml"))
    assert {row[0] for row in rows} == {path.stem.removeprefix("_") for path in in_files} and len(rows) == len(in_files)
    assert all(len(row) == 4 and 15 < len(row[3]) < 140 for row in rows)
    tasks = {name: description for name, kind, _, description in rows if kind == "task"}
    assert len(set(tasks.values())) == len(tasks)  # no two tasks read alike
    assert tasks["bake_j_es"].startswith("BAKE-J: efficacy")
    assert main(["tasks", "BIRD", "reversal"]) == 0
    assert [line.split()[:2] for line in printed_lines(capsys)[1:-2]] == [["bird_table5", "group"]]
    assert main(["tasks", "no such task"]) == 2
    assert "lm-edit tasks lists all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("task: bake_new\ncustom_dataset: !function lm_eval_tasks.bake.benchmark.BAKE_QJ\n", "protocol"),
        ("group: bake_new\ntask: [bake_es]\nmetadata: {version: 1.0}\n", "its metadata"),
    ],
)
def test_a_task_without_a_description_is_refused(text, place, tmp_path, monkeypatch):
    (tmp_path / "new.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(catalog, "TASKS_DIR", tmp_path)
    with pytest.raises(EditingError, match=rf"new.yaml: bake_new has no description.*{place}"):
        catalog.list_tasks()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the import path, for installed packages."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


def test_tasks_of_another_package_are_listed_under_its_name(site, capsys):
    words = {"my_benchmark": "lake_facts", "MY_BENCHMARK": "LAKE_FACTS", "MyBenchmark": "LakeFacts"}
    words["lm_eval_tasks.my_benchmark"] = "lake_package.lake_facts"
    folder = copy_template("benchmark", site / "lake_package" / "lake_facts", words)
    registered = {"lake_facts": "lake_package.lake_facts.benchmark:BENCHMARKS", "gone": "gone_package.tasks:BENCHMARKS"}
    write_metadata(site, "lake-package", {ENTRY_POINTS: registered})
    (folder / "bare.yaml").write_text("task: lake_bare\ntag: lake_tag\ncustom_dataset: !function no_such.THING\n")
    (folder / "bake_es.yaml").write_text("task: bake_es\nsummary: replaced\n")  # `lm_eval` keeps ours
    rows = {row.name: row for row in catalog.list_tasks()}
    assert rows["lake_facts_es"] == ("lake_facts_es", "task", "lake_package", "LakeFacts: efficacy: the edit prompt")
    assert rows["lake_facts"].kind == "group" and rows["lake_facts"].folder == "lake_package"
    assert rows["lake_bare"].description == "no summary" and "lake_tag" not in rows
    assert rows["bake_es"].folder == "bake" and rows["bake_es"].description.startswith("BAKE")
    assert [row.folder for row in rows.values()][-1] == "lake_package"  # after our own
    assert main(["tasks", "lake_facts_ls"]) == 0
    assert printed_lines(capsys)[1].split()[:3] == ["lake_facts_ls", "task", "lake_package"]


def test_an_unknown_editor_gets_a_hint(capsys):
    assert main(["editors", "rom"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Did you mean 'rome'" in captured.err and "Traceback" not in captured.err


def test_validate_lists_every_bad_record(tmp_path, capsys):
    edits = write_requests(tmp_path / "requests.jsonl")
    assert main(["validate", str(edits)]) == 0
    assert printed_lines(capsys)[-1] == f"{len(REQUESTS)} good, 0 bad, 0 repeated"
    with edits.open("a", encoding="utf-8") as file:
        for record in ({"prompt": "{} is", "target_new": "x"}, dict(REQUESTS[0]), {"prompt": "a", "target_new": ""}):
            file.write(json.dumps(record) + "\n")
    assert main(["validate", str(edits)]) == 1
    lines = printed_lines(capsys)
    assert sum(line.startswith("bad: ") for line in lines) == 2 and lines[-1] == "5 good, 2 bad, 1 repeated"
    assert any("line 5" in line and "'subject' is missing" in line for line in lines)


def test_validate_checks_a_benchmarks_own_file(tmp_path, capsys):
    assert main(["validate", "bake", "--data", str(BAKE)]) == 0
    assert printed_lines(capsys)[-1].startswith("4 good, 0 bad")
    broken = tmp_path / "broken.jsonl"
    rows = BAKE.read_text(encoding="utf-8").splitlines()
    broken.write_text("\n".join([rows[0], rows[1].replace('"requested_rewrite"', '"rewrite"')]) + "\n")
    assert main(["validate", "bake", "--data", str(broken)]) == 1
    lines = printed_lines(capsys)
    assert lines[-1].startswith("1 good, 1 bad") and any("requested_rewrite" in line for line in lines)


def test_validate_explains_an_unknown_benchmark(capsys):
    assert main(["validate", "bakee"]) == 2
    assert "Did you mean 'bake'" in capsys.readouterr().err
