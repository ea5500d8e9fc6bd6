"""``lm-edit trace``."""

from __future__ import annotations

import json

import pytest
from command_line import printed_lines, split_cells, write_requests

from lm_edit.cli.main import main


@pytest.fixture
def command(tiny_path, tmp_path):
    model = ["--pretrained", str(tiny_path("llama")), "--device", "cpu", "--store", str(tmp_path / "store")]
    edits = str(write_requests(tmp_path / "facts.jsonl"))
    return ["trace", *model, "--edits", edits, "--num-edits", "3", "--answer", "predicted", "--samples", "2"]


def test_trace_prints_a_table_and_writes_json(command, tmp_path, capsys):
    out = tmp_path / "trace.json"
    assert main([*command, "--out", str(out)]) == 0
    lines = printed_lines(capsys)
    record = json.loads(out.read_text())
    assert record["num_facts"] == 3 and record["settings"]["samples"] == 2
    (row,) = [cells for line in lines if (cells := split_cells(line))[0] == "1"]
    assert f"{record['effects']['mlp']['subject_last']['mean'][1]:+.4f}" in row
    if record["suggested"]:
        assert any(f"layers:{record['suggested']['one']}" in line for line in lines)


def test_unknown_benchmarks_and_plot_formats_are_explained(command, tmp_path, capsys):
    assert main(["trace", "--edits", "bakee"]) == 2
    assert "Did you mean 'bake'" in capsys.readouterr().err
    assert main([*command, "--plot", str(tmp_path / "trace.txt")]) == 2
    assert ".svg, .png" in capsys.readouterr().err
