"""Published records at hand, end to end: one case of every file, edited by R-ROME on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_runs import run
from record_files import published_data

from edit_hooks.lm.model import EditedHFLM

TASKS = {
    "counterfact/counterfact-edit.json": ["counterfact_flat_es"],
    "qaedit/QAEdit_inter_1k.json": ["qaedit_syn_reliability"],
    "zsre/zsre_mend_eval_first34.json": ["zsre_memit_efficacy"],
    "zsre/knowedit_zsre_test_first300.json": ["knowedit_portability"],
    "knowgic/chains_v1_21cases_558.json": ["knowgic_es"],
    "knowgic/chains.json": ["knowgic_cloze_prob"],
    "mquake/mquake_cf_hard_first200_4hop.json": ["mquake_edit_wise"],
    "glue": ["editglue_sst2"],
}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory, tiny_path: Callable[..., Path]) -> EditedHFLM:
    published_data()
    return EditedHFLM(
        pretrained=str(tiny_path("llama", "byte_bpe_bos")),
        editor_args={"num_steps": 1, "context_templates": ["{}"]},
        store=str(tmp_path_factory.mktemp("store")),
    )


@pytest.mark.parametrize("name", TASKS)
def test_a_published_file_runs(name: str, lm: EditedHFLM) -> None:
    tasks = TASKS[name]
    settings = {"population": "all", "generate": False} | (
        {"demonstrations": "own"} if name.startswith("mquake") else {}
    )
    results: dict[str, Any] = run(lm, tasks, data=published_data() / name, settings=settings, limit=1)
    for task in tasks:
        source = results["configs"][task]["metadata"].get("data_source", {})
        assert source.get("data") not in ("mini", "hub"), source
        row = results["results"][task]
        scores = [
            value
            for key, value in row.items()
            if key.endswith(("_prob,none", "_match,none", "_syn,none", "acc,none", "f1,none"))
        ]
        assert any(isinstance(value, float) for value in scores), json.dumps(row)[:800]
        if not name.startswith("glue"):  # whose questions are about no edit
            edits = json.loads(row["edit,none"])
            assert edits["edits"] > 0 and edits["failed"] == 0
