"""The results of a row at several dates, and what made the older ones stale."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_shapes import MODELS, model_like
from result_files import change, scripted_results, write_run

from edit_hooks import EditingError
from edit_hooks.base.registry import EDITORS, editor_class, load_editor
from edit_hooks.base.shipped import shipped_files
from edit_hooks.lm.loading.versions import installed_versions
from edit_hooks.utils.storage.hashing import code_fingerprint
from lm_edit import installed
from lm_edit.cli.main import main
from lm_edit.installed import ENGINE, stale_rows
from lm_edit.results.history import DatedRow, history
from lm_edit.sweeps.checking.tasks import task_metadata


def write(folder: Path, day: int, value: float, **changes: Any) -> Path:
    results = scripted_results()
    results["results"]["bake_es"]["efficacy_prob,none"] = value
    start = 1.79e9 + 86_400 * day
    return write_run(folder / str(day), results=results, start=start, date=f"2026-11-2{day}T10-00-00.000001", **changes)


def cells(*paths: Path, **options: Any) -> list[list[str]]:
    return [[row[4], row[6]] for row in history([str(path) for path in paths], ["efficacy_prob"], **options).rows[1:]]


def test_every_date_has_its_number_and_what_changed_after_it(tmp_path):
    write(tmp_path, 1, 0.5)
    write(tmp_path, 2, 0.75, versions={"lm-eval-editing": "0.2.0"})
    config = {"layers": [5], "num_steps": 40, "lr": 0.1}
    revised = write(tmp_path, 3, 0.25, versions={"lm-eval-editing": "0.2.0"}, editor_config=config)
    change(revised, lambda content: content["versions"].update(bake_es=9.0))
    write(tmp_path, 4, 0.25, versions={"lm-eval-editing": "0.2.0"}, editor_config=config)
    change(tmp_path / "4" / revised.relative_to(tmp_path / "3").parent / "results_2026-11-24T10-00-00.000001.json",
           lambda content: content["versions"].update(bake_es=9.0))  # fmt: skip
    assert cells(tmp_path) == [
        ["0.500", "version of lm-eval-editing 0.1.0 to 0.2.0"],
        ["0.750 (+0.250)", "task version 1.1 to 9.0; setting num_steps 20 to 40; now setting lr"],
        ["0.250 (-0.500)", "a run of the same settings and versions"],
        ["0.250 (+0.000)", "newest"],
    ]


def test_other_editors_seeds_and_copies_are_no_history(tmp_path, capsys):
    first = write(tmp_path, 1, 0.5)
    write(tmp_path, 2, 0.75, editor="memit")
    write(tmp_path, 3, 0.75, seed=1)
    shutil.copytree(first.parent, tmp_path / "copy" / first.parent.name)
    with pytest.raises(EditingError, match="each of one date"):
        history([str(tmp_path)])
    write(tmp_path, 4, 1.0)
    assert main(["results", "history", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| bake_es | efficacy_prob | r_rome" in out and "2 further rows have one date only." in out
    with pytest.raises(EditingError, match=r"no run has a metric named 'efficacy_prop'.*efficacy_prob"):
        history([str(tmp_path)], ["efficacy_prop"])


def test_facts_that_a_file_has_not_recorded_are_no_change(tmp_path):
    write(tmp_path, 1, 0.5, versions={})
    write(tmp_path, 2, 0.5, versions={"lm-eval-editing": "0.2.0"}, model_identity={})
    assert cells(tmp_path)[0][1] == "a run of the same settings and versions"


def stale(*paths: Path) -> tuple[list[str], str]:
    found = stale_rows([str(path) for path in paths], ["efficacy_prob"])
    return [row[-1] for row in found.rows[1:]], found.notes[0]


def as_installed(folder: Path, day: int) -> Path:
    """A run of what is installed now, by its versions, code, task, data and shipped settings."""
    shipped = dict(shipped_files("r_rome"))["gemma-3-270m"]["config"]
    editor = load_editor("r_rome")
    path = write(
        folder,
        day,
        0.5,
        versions=installed_versions(),
        code_fingerprint=code_fingerprint(ENGINE, *editor.source_modules),
        settings_origin={"shipped": ["r_rome/gemma-3-270m.yaml"], "given": ["num_steps"]},
        editor_config={**shipped, "num_steps": 7},
    )
    change(path, lambda content: content["versions"].update(bake_es=task_metadata("bake_es")["version"]))
    return path


def test_the_newest_result_of_a_row_is_compared_with_what_is_installed(tmp_path):
    """Only the newest counts. A setting that the run gave itself and a fact that is not recorded do not."""
    write(tmp_path, 1, 0.25, versions={"torch": "0.1"}, code_fingerprint="0" * 64)
    newest = as_installed(tmp_path, 2)
    changes, note = stale(tmp_path)
    assert (changes, note) == ([], "0 of 1 rows are stale; 1 is of what is installed.")
    for edit, words in (
        (lambda own: own["versions"].update(torch="0.1"), "version of torch 0.1 to "),
        (lambda own: own.update(code_fingerprint="0" * 64), "code of the package 000000000000... to "),
        (lambda own: own["editor_config"].update(layers=[99]), "setting layers [99] to "),
        (
            lambda own: own["settings_origin"].update(shipped=["r_rome/no.yaml"]),
            "settings file r_rome/no.yaml shipped to not shipped",
        ),
    ):
        original = newest.read_text(encoding="utf-8")
        change(newest, lambda content, edit=edit: edit(content["config"]["edited_hf"]))
        changes, note = stale(tmp_path)
        assert len(changes) == 1 and changes[0].startswith(words), words
        newest.write_text(original, encoding="utf-8")
    change(newest, lambda content: content["versions"].update(bake_es=0.5))
    assert stale(tmp_path)[0][0].startswith("task version 0.5 to ")


@pytest.mark.parametrize("shape", ["gemma-3-270m", "qwen3-8b"])
def test_a_result_of_now_has_the_shipped_settings_of_now(shape: str) -> None:
    """Whole numbers of files are floats in configurations, and the second model gets the blocks of other ones."""
    model, moved = model_like(MODELS[shape]), 0
    for name in (name for name in EDITORS if "context" not in editor_class(name).writes and name != "serac"):
        editor = load_editor(name)
        origin = editor.settings_origin(model)
        config = json.loads(json.dumps(editor.default_config(model).to_dict()))
        moved += origin.is_moved
        assert not dict(installed._settings({"settings_origin": origin.to_json(), "editor_config": config})), name
    assert (moved > 0) == (shape == "qwen3-8b")


def test_shipped_settings_of_a_base_editor_are_compared(tmp_path: Path) -> None:
    """In the configuration of the editor around it; not those that it drew."""
    shipped = dict(shipped_files("memit"))["gpt2-xl"]["config"]
    base = {name: 99 if name == "moment_weight" else value for name, value in shipped.items()}
    origin = {"shipped": ["memit/gpt2-xl.yaml"], "given": ["base"], "moved": False}
    options = {"editor_config": {"layers": shipped["layers"], "base_settings": base}, "settings_origin": origin}
    path = write(tmp_path, 1, 0.5, **options)
    assert [change for change in stale(tmp_path)[0][0].split("; ") if "setting" in change] == [
        "setting base_settings.moment_weight 99 to 20000"
    ]
    change(path, lambda content: content["config"]["edited_hf"].update(drawn_settings={"base_settings": base}))
    assert "setting" not in "".join(stale(tmp_path)[0])


def test_a_revision_that_the_task_was_given_is_no_pinned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = SimpleNamespace(source=SimpleNamespace(published=SimpleNamespace(revision="new"), sets=None))
    monkeypatch.setattr(installed, "find_benchmark", lambda _: pinned)
    row = {"benchmark": "bake", "data": "hub", "data_hash": "", "task": "bake_es"}
    for settings, found in (({}, {"data revision": "new"}), ({"data_revision": "old"}, {})):
        assert dict(installed._data(DatedRow(row, {}, {}, settings))) == found


@pytest.mark.parametrize("named", ["editor", "base"])
def test_no_module_that_a_file_names_is_imported(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"bomb_as_{named}"
    (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'exploded')!r}, 'w')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = f"{module}:Bomb"
    chosen = {"editor": path} if named == "editor" else {"editor": "rect", "editor_config": {"base": path}}
    write(tmp_path / "runs", 1, 0.5, code_fingerprint="0" * 64, **chosen)
    assert "code of the package" not in "".join(stale(tmp_path / "runs")[0])
    assert not (tmp_path / "exploded").exists()
