"""The verb ``lm-edit trace``."""

from __future__ import annotations

import json
import re

from tiny import REQUESTS, save_tiny

from edit_hooks import EditRequest
from lm_edit.cli.main import main

FACTS = [EditRequest(**{"case_id": f"c{number}", **request}) for number, request in enumerate(REQUESTS)]


def test_trace_prints_a_table_and_writes_json(tmp_path, capsys):
    path = str(save_tiny(tmp_path, "llama"))
    edits = tmp_path / "facts.jsonl"
    edits.write_text("\n".join(json.dumps(request.to_dict()) for request in FACTS), encoding="utf-8")
    out = tmp_path / "trace.json"
    model = ["--pretrained", path, "--device", "cpu", "--store", str(tmp_path / "store")]
    chosen = ["--edits", str(edits), "--num-edits", "3", "--answer", "predicted", "--samples", "2", "--out", str(out)]
    assert main(["trace", *model, *chosen]) == 0
    lines = capsys.readouterr().out.strip().split("\n")
    record = json.loads(out.read_text())
    assert record["num_facts"] == 3 and record["settings"]["samples"] == 2
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    (row,) = [row for row in rows if row[0] == "1"]
    assert f"{record['effects']['mlp']['subject_last']['mean'][1]:+.4f}" in row
    if record["suggested"]:
        assert any(f"layers:{record['suggested']['one']}" in line for line in lines)
    assert main(["trace", *model, "--edits", "bakee"]) == 2
    assert "Did you mean 'bake'" in capsys.readouterr().err
    assert main(["trace", *model, *chosen, "--plot", str(tmp_path / "trace.txt")]) == 2
    assert ".svg, .png" in capsys.readouterr().err
