"""What surrounds a command: a full disk, Ctrl-C, a terminal without Unicode, a removed folder, tasks chosen twice."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lm_eval._cli import harness
from lm_eval.loggers import EvaluationTracker
from task_managers import task_manager

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.terminal import check_working_folder
from lm_edit.cli.main import main
from lm_eval_tasks.startup.saving import save_or_fail

HASHES = {"doc_hash": "a", "prompt_hash": "b", "target_hash": "c"}
SAMPLE = {**HASHES, "arguments": [["a", "b"]], "resps": [["x"]], "filtered_resps": ["x"], "target": "t"}


class FullDisk:
    """A value at which writing fails, as on a full disk."""

    def __str__(self) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def tracker(tmp_path: Path) -> EvaluationTracker:
    tracker = EvaluationTracker(output_path=str(tmp_path))
    tracker.general_config_tracker.model_name_sanitized = "run"
    tracker.date_id = "today"
    save_or_fail(tracker)
    save_or_fail(tracker)  # of a second run with the same tracker
    return tracker


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_samples_on_a_full_disk_end_the_run_and_leave_no_part(tracker: EvaluationTracker, tmp_path: Path) -> None:
    tracker.save_results_samples("whole", [dict(SAMPLE)])
    with pytest.raises(EditingError, match=r"the samples cannot be saved in .*No space left on device.*Make room"):
        tracker.save_results_samples("task", [dict(SAMPLE), {**SAMPLE, "doc": FullDisk()}])
    assert files(tmp_path) == ["samples_whole_today.jsonl"]
    size = (tmp_path / "run/samples_whole_today.jsonl").stat().st_size
    with pytest.raises(EditingError, match="the samples cannot be saved"):  # what was there before stays
        tracker.save_results_samples("whole", [dict(SAMPLE), {**SAMPLE, "doc": FullDisk()}])
    assert (tmp_path / "run/samples_whole_today.jsonl").stat().st_size == size


def test_results_on_a_full_disk_end_the_run_and_leave_no_part(
    tracker: EvaluationTracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_text(path: Path, text: str, **_: Any) -> int:
        with path.open("w") as file:
            file.write(text[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", write_text)
        with pytest.raises(EditingError, match=r"the results cannot be saved.*No space left on device"):
            tracker.save_results_aggregated({"results": {}}, {"task": [SAMPLE]})
    assert files(tmp_path) == []
    tracker.save_results_aggregated({"results": {}}, {"task": [SAMPLE]})
    assert len(files(tmp_path)) == 1


def test_files_that_cannot_be_pushed_to_the_hub_stay(
    tracker: EvaluationTracker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def create_repo(**_: Any) -> None:
        raise ConnectionError("the hub is down")

    tracker.api = hub = SimpleNamespace(create_repo=create_repo)
    tracker.push_results_to_hub = tracker.push_samples_to_hub = tracker.public_repo = True
    tracker.results_repo = tracker.details_repo = "somebody/results"
    tracker.save_results_aggregated({"results": {}}, {"task": [SAMPLE]})
    tracker.save_results_samples("task", [dict(SAMPLE)])
    assert len(files(tmp_path)) == 2 and tracker.api is hub
    assert caplog.text.count("but could not be pushed to the hub: ConnectionError('the hub is down').") == 2


def test_what_another_run_saves_meanwhile_stays(tracker: EvaluationTracker, tmp_path: Path) -> None:
    other = tmp_path / "run/results_tomorrow.json"

    class Meanwhile(FullDisk):
        def __str__(self) -> str:
            other.write_text("{}")
            return super().__str__()

    with pytest.raises(EditingError, match="the samples cannot be saved"):
        tracker.save_results_samples("task", [{**SAMPLE, "doc": Meanwhile()}])
    assert files(tmp_path) == [other.name]
    del tracker.date_id  # set right before the first file is written
    other.unlink()
    with pytest.raises(EditingError, match="the results cannot be saved"):
        tracker.save_results_aggregated({"results": {"task": Meanwhile()}})
    assert files(tmp_path) == [other.name]


@pytest.mark.parametrize(("model", "code"), [("edited_hf", 130), ("hf", None)])
def test_ctrl_c_ends_a_run_of_ours_with_one_line(
    model: str, code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(args: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if code is None else SystemExit) as caught:
        harness.HarnessCLI().execute(SimpleNamespace(model=model, func=interrupt))
    if code is not None:
        assert caught.value.code == code
        printed = capsys.readouterr().err
        assert printed.startswith("lm_eval: interrupted;") and printed.count("\n") == 1


def test_commands_print_on_ascii_terminals() -> None:
    code = "import lm_eval._cli.harness as h, sys; cli = h.HarnessCLI()\n" + (
        "class Args: model = 'edited_hf'; func = staticmethod(lambda args: print('up \\u2191 \\u00b1'))\n"
        "cli.execute(Args)"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode("ascii").strip() == "up \\u2191 \\xb1"


def test_a_removed_working_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(EditingError, match="the working folder cannot be found"):
        check_working_folder()
    assert main(["editors"]) == 2
    assert "it was removed or renamed. Change to another one." in capsys.readouterr().err


def test_a_task_beside_its_group_is_refused_in_a_sentence_and_groups_share_tasks() -> None:
    manager = task_manager({"data": "mini"})
    with pytest.raises(EditingError, match=r"knowgic_es is part of the group knowgic_deterministic.* drop"):
        manager.load(["knowgic_deterministic", "knowgic_es"])
    loaded = manager.load(["bake_qj", "bake_table3"])
    names = [{task.task_name for task in loaded["groups"][name].get_all_tasks()} for name in ("bake_qj", "bake_table3")]
    assert "bake_es" in names[0] & names[1] and "bake_es" in loaded["tasks"]
