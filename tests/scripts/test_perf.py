"""The speed measurements run, here on tiny models."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from paths import ROOT

from edit_hooks import load_editor
from edit_hooks.contract.tiny_models import build_model, build_tokenizer, save_tiny
from edit_hooks.modeling.device import recording

pytestmark = pytest.mark.usefixtures("collects_new_objects_only")  # as each measurement does


@pytest.fixture
def load_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "perf"))
    yield importlib.import_module
    names = ("engine", "demonstrations", "gpu_session", "how_fast", "how_fast_parts", "how_fast_table")
    for name in (*names, "measured_model"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", ["fast", "reference"])
def test_the_engine_is_measured(load_script: Callable[[str], ModuleType], path: str) -> None:
    engine = load_script("engine")
    args = argparse.Namespace(edits_from="bake")
    setup = engine.Setup(build_model("llama"), build_tokenizer("byte_bpe_bos"), args)
    load_script("measured_model").check_vocabulary(setup)
    assert engine.seconds_per_edit(setup, path, edits=1, steps=2, num_templates=6) > 0
    assert engine.seconds_per_case(setup, path, edits=1, steps=2) > 0
    assert setup.weight_bytes > 0


def test_the_fast_path_needs_fewer_operations(load_script: Callable[[str], ModuleType]) -> None:
    engine = load_script("engine")
    args = argparse.Namespace(edits_from="bake")
    setup = engine.Setup(build_model("llama"), build_tokenizer("byte_bpe_bos"), args)
    fast, reference = (engine.operations_per_edit(setup, path, edits=1, steps=20) for path in ("fast", "reference"))
    assert fast < reference


@pytest.mark.parametrize("editor", ["ft_m", "lora", "mend", "wise"])
def test_gradient_editors_need_fewer_operations(load_script: Callable[[str], ModuleType], editor: str) -> None:
    engine = load_script("engine")
    args = argparse.Namespace(edits_from="bake")
    setup = engine.Setup(build_model("llama"), build_tokenizer("byte_bpe_bos"), args)
    fast, plain = (engine.operations_per_edit(setup, path, 2, 5, editor) for path in ("fast", "reference"))
    assert fast < plain
    assert engine.seconds_per_edit(setup, "fast", 2, 2, editor) > 0


def test_gradient_editors_are_printed_beside_each_other_without_seconds_if_wanted(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """WISE counts the rows of its own set of templates; what is not measured is a hyphen."""
    engine = load_script("engine")
    setup = engine.Setup(build_model("llama"), build_tokenizer("byte_bpe_bos"), argparse.Namespace(edits_from="bake"))
    jobs: list[tuple[str, str | None]] = []

    def measure(_args: object, name: str, **job: object) -> object:
        jobs.append((name, job["num_templates"]))
        return engine.Measurement(engine.MEASURES[name](setup, **job), 10, 5)

    monkeypatch.setattr(engine, "measure_in_process", measure)
    monkeypatch.setattr(sys, "argv", ["engine.py", "--gradient", "--operations-only", "--edits", "1", "--steps", "2"])
    args = engine.parse_arguments()
    assert args.editors is None and engine.GRADIENT_EDITORS == ["ft_m", "ft_l", "wise", "lora", "mend"]
    args.editors = ["ft_m", "wise"]
    engine.print_gradient_editors(args)
    *_, ft_m, wise, last = capsys.readouterr().out.splitlines()
    assert jobs == [("operations", None)] * 4
    for editor, line in (("ft_m", ft_m), ("wise", wise)):
        cells = line.strip("| ").split(" | ")
        assert cells[0] == editor and float(cells[3]) > 1 and cells[4:] == ["-"] * 5
    assert last.startswith("GRADIENT ft_m=") and last.endswith("/-")
    args.operations_only, args.editors, args.reference_edits = False, ["ft_m"], 1
    engine.print_gradient_editors(args)
    assert "-" not in capsys.readouterr().out.splitlines()[-2]
    assert [name for name, _ in jobs[4:]] == ["operations", "operations", "edit", "edit"]


def test_the_table_of_the_page_is_measured(
    load_script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Every section on random weights; the columns of other measurements where they are of the same shape.

    The next call goes on behind a kill, and a fault ends one measurement only.
    """
    engine, table, parts = (load_script(name) for name in ("engine", "how_fast_table", "how_fast_parts"))
    elsewhere = json.loads(table.ELSEWHERE.read_text())
    monkeypatch.setattr(table, "ELSEWHERE", tmp_path / "measured.json")
    table.ELSEWHERE.write_text(json.dumps({**elsewhere, "shape": "llama-tiny"}))
    saved = tmp_path / "table.json"
    small = ["--editors", "ft_m", "--together", "1", "2", "--joint", "2", "--most-steps", "2"]
    small += ["--questions", "4", "--new-tokens", "3", "--save", str(saved)]
    monkeypatch.setattr(sys, "argv", ["engine.py", "--table", "--shape", "llama-tiny", *small])

    def broken(_setup: object) -> tuple[float, float]:
        raise RuntimeError("no kernel\nfor this card")

    monkeypatch.setattr(parts, "solve_times", broken)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parts, "operations_per_edit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        engine.main()
    assert logging.root.manager.disable == logging.NOTSET
    before = json.loads(saved.read_text())["parts"]
    assert before["ft_m operations"] == {"tries": 1} and before["ft_m 1"]["seconds"] > 0
    assert "ft_m operations did not end" in saved.with_suffix(".md").read_text()
    engine.main()
    text = capsys.readouterr().out
    assert text.strip() == saved.with_suffix(".md").read_text().strip()
    lines = text.splitlines()
    after = json.loads(saved.read_text())["parts"]
    assert after["ft_m operations"]["operations"] > 0 and after["ft_m 1"] == before["ft_m 1"], "measured once"
    assert text.rstrip().endswith("- solves failed: RuntimeError: no kernel")
    (ft_m,) = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ft_m, as shipped")]
    assert ft_m[1] == elsewhere["easyedit"]["ft_m"] and "(goal 0.12, was 0.43)" in ft_m[3]
    seconds = [float(cell.split()[0]) for cell in ft_m[2:5]]
    assert min(seconds) > 0 and 0 < float(ft_m[5].rstrip("%")) < 100 and ft_m[6] == "-"
    rows = [line.strip("| ").split(" | ")[0] for line in lines if line.startswith("| ")]
    answers = {"rank 16 in 4 modules", "one dense edit", "the model's own generate"}
    assert {"2 requests", *answers, "ft_m", "decoding"} <= set(rows)
    (decoding,) = [line.strip("| ").split(" | ") for line in lines if line.startswith("| decoding")]
    assert int(decoding[2]) > 100 and decoding[6:] == ["-", "-"], "operators are counted; there is no card"


class Model:
    """A model whose measurements are pretended."""

    device = torch.device("cpu")
    dtype = torch.float32

    def parameters(self) -> list[torch.Tensor]:
        return []


@pytest.fixture
def pretended(load_script: Callable[[str], ModuleType], tmp_path: Path) -> tuple[ModuleType, Callable[..., Any]]:
    """The order of measurements, and a set-up with one of them, saved in a file."""
    parts = load_script("how_fast_parts")

    def make(dtype: torch.dtype = torch.float32) -> Any:
        names = ("shape", "pretrained", "edits_from", "questions", "new_tokens", "most_steps")
        args = argparse.Namespace(**dict.fromkeys(names), sections=[], save=str(tmp_path / "table.json"))
        model = Model()
        model.dtype = dtype
        return load_script("measured_model").Setup(model, None, args)

    return parts, make


def test_a_measurement_that_loses_the_card_is_tried_twice(pretended, monkeypatch) -> None:
    """Each time by another process; the results of two models are not mixed."""
    parts, make = pretended
    calls: list[str] = []
    monkeypatch.setattr(parts, "matrix_rate", lambda *_: calls.append("rate") or 1.0)

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(recording, "release_memory", lost)
        for tries in (1, 2):
            with pytest.raises(SystemExit) as error:
                parts.measure_all(make(), math.inf)
            assert error.value.code == parts.CARD_LOST == 3 and len(calls) == tries
    assert parts.measure_all(make(), math.inf).parts == {"rate": {"tries": 2}} and len(calls) == 2
    with pytest.raises(SystemExit, match="give another file"):
        parts.measure_all(make(torch.bfloat16), math.inf)


def test_nothing_begins_after_the_time(pretended, monkeypatch) -> None:
    parts, make = pretended
    monkeypatch.setattr(parts, "matrix_rate", lambda *_: 1.0)
    assert parts.measure_all(make(), 0.0).parts == {}
    assert parts.measure_all(make(), math.inf).parts == {"rate": {"rate": 1.0}}


def test_a_session_goes_on_behind_what_it_has(load_script, monkeypatch, tmp_path: Path) -> None:
    """Files of tests that were run to their end, and the table of a process that was lost."""
    session = load_script("gpu_session")
    ran: list[str] = []
    statuses = {"recording": 0, "decoding": 1, "waiting_edits": None}
    tables = iter([3, -9, None, 0])

    def run(command: list[str], log: Path, seconds: float) -> int | None:
        assert seconds > 0
        if "--table" in command:
            ran.append("table")
            assert command[command.index("--save") + 1] == str(tmp_path / "table.json")
            return next(tables)
        ran.append(re.sub(r".*test_cuda_(\w+)\.py", r"\1", command[-1]))
        return statuses[ran[-1]]

    monkeypatch.setattr(session, "run", run)
    monkeypatch.setattr(session, "CARD", "")
    until = time.monotonic() + 600
    session.run_tests(tmp_path, until)
    assert ran == ["recording", "decoding", "waiting_edits"]
    statuses = dict.fromkeys(("waiting_edits", "locate", "editors", "runs"), 0)
    ran.clear()
    session.run_tests(tmp_path, until)
    assert ran == list(statuses)
    ran.clear()
    session.measure_table(tmp_path, until, ["--shape", "llama-tiny"])
    assert ran == ["table"] * 4
    tables = iter([1])
    session.measure_table(tmp_path, until, [])
    assert len(ran) == 5, "an error of the command itself"
    assert all((ROOT / file).is_file() for file in (*session.TESTS, session.WITH_LM_EVAL))
    assert session.CARD_LOST == load_script("how_fast_parts").CARD_LOST


def test_a_session_that_would_be_for_nothing_ends_at_once(load_script, monkeypatch, tmp_path: Path) -> None:
    """Without torch; without pytest only the tests are left out, and the next call runs them."""
    session = load_script("gpu_session")
    find_spec = importlib.util.find_spec

    def lack(name: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda one: None if one == name else find_spec(one))

    monkeypatch.setattr(session, "run", lambda *_: pytest.fail("a command was run"))
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", str(tmp_path / "out")])
    lack("torch")
    with pytest.raises(SystemExit, match="nothing is measured: torch cannot be imported by"):
        session.main()
    lack("pytest")
    session.run_tests(tmp_path, math.inf)
    assert not any(tmp_path.iterdir())


def test_another_card_has_a_table_of_its_own(load_script, monkeypatch, tmp_path: Path) -> None:
    session = load_script("gpu_session")
    for found, other, expected in (
        ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "table-nvidia-h200.json"),
        ("NVIDIA H200", "NVIDIA H200", "table.json"),
        ("", "NVIDIA H200", "table.json"),
    ):
        monkeypatch.setattr(session, "CARD", f"print({found!r})")
        assert session.table_file(tmp_path).name == "table.json"
        (tmp_path / "table.json").write_text(json.dumps({"about": {"device": other}}))
        assert session.table_file(tmp_path).name == expected
        (tmp_path / "table.json").unlink()


def test_measurements_with_goals_come_first_and_those_of_minutes_behind_them(load_script) -> None:
    parts, args = load_script("how_fast_parts"), argparse.Namespace(editors=None, together=[1, 4, 16, 64], joint=[200])
    setup = argparse.Namespace(args=args, model=build_model("llama"))
    found = [*parts._editor_parts(setup), *parts._joint_parts(setup), *parts._answer_parts(setup)]
    urgent = {part.name for part in found if part.urgency == 1}
    assert {"rome 1", "rome 16", "adalora 1", "r_rome 64", "answers no edit"} <= urgent
    assert {part.name for part in found if part.urgency == 2} >= {"adalora 16", "wise 16", "joint 200"}


def test_a_clone_that_is_not_installed_has_its_entry_points(load_script, tmp_path: Path) -> None:
    """By which benchmarks are found; the commands of an installation are not needed."""
    load_script("gpu_session").write_metadata(tmp_path)
    (written,) = importlib.metadata.distributions(path=[str(tmp_path)])
    installed = importlib.metadata.distribution("lm-eval-editing")
    expected = {entry for entry in installed.entry_points if entry.group != "console_scripts"}
    assert {*written.entry_points} == expected and len(expected) > 1
    assert (written.name, written.version) == ("lm-eval-editing", installed.version)


def test_a_command_of_a_session_is_stopped_in_time(load_script, tmp_path: Path) -> None:
    session = load_script("gpu_session")
    log = tmp_path / "log"
    assert (
        session.run([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], log, 1) is None
    )
    assert session.run([sys.executable, "-c", "raise SystemExit(3)"], log, 60) == 3
    assert session.run(["nvidia-smi-of-another-machine"], log, 1) == 127
    assert log.read_text().startswith("begun\n") and "No such file" in log.read_text()


def test_a_joint_edit_has_as_many_facts_as_it_is_measured_with(load_script: Callable[[str], ModuleType]) -> None:
    """The mini set has fewer than a joint edit of 1,000."""
    model, args = load_script("measured_model"), argparse.Namespace(edits_from="bake")
    requests = model.distinct_requests(args, 1000)
    assert (
        len({request.key for request in requests}) == 1000 > len({one.key for one in model.load_requests(args, 1000)})
    )
    assert all(request.subject in request.text for request in requests)


def test_the_rows_of_the_table_have_settings_of_their_editors(load_script: Callable[[str], ModuleType]) -> None:
    how_fast = load_script("how_fast")
    for row in (*how_fast.EDITOR_ROWS, how_fast.JOINT_ROW):
        assert load_editor(row.editor, row.settings).name == row.editor
    elsewhere = json.loads(load_script("how_fast_table").ELSEWHERE.read_text())
    keys = {row.key for row in how_fast.EDITOR_ROWS}
    assert set(elsewhere["goals"]) == set(elsewhere["ours"]) == keys and set(elsewhere["easyedit"]) <= keys


def test_prompts_with_demonstrations_are_measured(
    load_script: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    demonstrations = load_script("demonstrations")
    arguments = ["--pretrained", str(save_tiny(tmp_path, "llama")), "--editor", "ice", "--cases", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["demonstrations.py", *arguments])
    assert demonstrations.main() == 0
    printed = capsys.readouterr().out
    assert "reference generated: " in printed and "fast scored: " in printed
    assert re.search(r"^DEMONSTRATIONS scored=[\d.]+ generated=[\d.]+$", printed, re.MULTILINE)
