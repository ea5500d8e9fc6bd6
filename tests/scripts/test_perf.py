"""The speed measurements run, here on tiny models."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

from edit_hooks import load_editor
from edit_hooks.contract.tiny_models import build_model, build_tokenizer, save_tiny
from edit_hooks.modeling.device import recording


@pytest.fixture
def load_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "perf"))
    yield importlib.import_module
    for name in ("engine", "demonstrations", "how_fast", "how_fast_table", "measured_model"):
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
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every section on random weights; the columns of other measurements where they are of the same shape."""
    engine, table = load_script("engine"), load_script("how_fast_table")
    elsewhere = json.loads(table.ELSEWHERE.read_text())
    monkeypatch.setattr(table.json, "loads", lambda _text: {**elsewhere, "shape": "llama-tiny"})
    small = ["--editors", "ft_m", "--together", "1", "2", "--joint", "2", "--most-steps", "2"]
    small += ["--questions", "4", "--new-tokens", "3"]
    monkeypatch.setattr(sys, "argv", ["engine.py", "--table", "--shape", "llama-tiny", *small])
    engine.main()
    lines = capsys.readouterr().out.splitlines()
    assert logging.root.manager.disable == logging.NOTSET
    (ft_m,) = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ft_m, as shipped")]
    assert ft_m[1] == elsewhere["easyedit"]["ft_m"] and "(goal 0.12)" in ft_m[3]
    seconds = [float(cell.split()[0]) for cell in ft_m[2:5]]
    assert min(seconds) > 0 and 0 < float(ft_m[5].rstrip("%")) < 100 and ft_m[6] == "-"
    rows = [line.strip("| ").split(" | ")[0] for line in lines if line.startswith("| ")]
    assert {
        "2 requests",
        "rank 16 in 4 modules",
        "one dense edit",
        "the model's own generate",
        "ft_m alone",
        "decoding",
    } <= set(rows)
    (decoding,) = [line.strip("| ").split(" | ") for line in lines if line.startswith("| decoding")]
    assert int(decoding[2]) > 100 and decoding[6:] == ["-", "-"], "operators are counted; there is no card"


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
    assert how_fast.RECORD_SWITCH == recording.SWITCH
    assert set(elsewhere["goals"]) == keys and set(elsewhere["easyedit"]) <= keys


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
