"""WISE's released switches through the harness: replay in a stored stream, the chat template, a file of questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hook_edits import SETTINGS
from lm_runs import answers, build, flat, run
from paths import REAL_DATA, RECORDS

from edit_hooks.utils.errors import EditingError

WISE: dict[str, Any] = {**SETTINGS["wise"], "num_steps": 2}
STREAM = {"editor": "wise", "mode": "sequential", "edits": "bake", "data": str(RECORDS / "bake_qa.jsonl")}
ZSRE = REAL_DATA / "zsre/zsre_mend_eval_first34.json"


@pytest.fixture(scope="module")
def model_path(tiny_path: Callable[..., Path]) -> str:
    return str(tiny_path("llama", "byte_bpe_bos"))


def test_a_stream_with_replay_goes_on_from_the_store(model_path: str, tmp_path: Path) -> None:
    """Two steps stored by one run, then two runs of three: one from the store, one without; the same numbers."""
    settings = {**WISE, "replay": True, "save_every": 1, "merge_every": 1}
    stream = {**STREAM, "editor_args": settings}
    run(build(model_path, tmp_path, **stream, num_edits=2), ["bake_es"])
    resumed = run(build(model_path, tmp_path, **stream, num_edits=3), ["bake_es"])
    fresh = run(build(model_path, **stream, num_edits=3), ["bake_es"])
    assert [flat(answer) for answer in answers(resumed)] == [flat(answer) for answer in answers(fresh)]
    losses = {answer.position.step: answer.edit.diagnostics["final_loss"] for answer in answers(fresh) if answer.edit}
    assert min(losses[1], losses[2]) > losses[0] + 10  # the margin of 20 on recent edits, from the first merge on


def test_a_file_without_questions_ends_the_run_before_the_weights_are_loaded(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "knowedit.json"
    records.write_text(json.dumps([{"prompt": "p", "locality": {"x": []}}]), encoding="utf-8")
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", lambda *_a, **_k: pytest.fail("weights read"))
    with pytest.raises(EditingError, match=r"knowedit.json holds 1 records and no locality question"):
        build(model_path, editor="wise", editor_args={**WISE, "loc_prompts": str(records)})


@pytest.mark.skipif(not ZSRE.exists(), reason="no records of zsRE here; set LM_EDIT_SHARED_DATA to run this")
def test_the_released_file_of_questions_is_read(model_path: str) -> None:
    arguments = {**WISE, "loc_prompts": str(ZSRE), "num_loc_prompts": 5}
    lm = build(model_path, editor="wise", editor_args=arguments)
    run(lm, ["bake_es"], limit=1)
    texts = lm.editor.resolve_config(lm.model, lm.tokenizer).loc_prompts
    assert len(texts) == 5 and all(text.startswith("nq question: ") for text in texts)
