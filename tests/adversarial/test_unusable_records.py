"""One record that a model or an editor cannot use leaves the others scored: it is unscored, with the reason."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lm_runs import FAST, build, run
from record_files import invented_records, write_jsonl
from task_runs import metrics_of

from edit_hooks import EditRequest, load_editor
from edit_hooks.base.editor import Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.editors.ft_m import FTM
from edit_hooks.editors.rome import ROME
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from lm_edit.edits import make_edits

LONG = " ".join(["Dravonia"] * 500)


def spoiled(**changes: Any) -> list[dict[str, Any]]:
    """The invented records, the second with other values in its edit."""
    records = invented_records("bake_qa.jsonl")
    records[1]["requested_rewrite"] |= changes
    return records


BROKEN = {
    "a target too long": ({"target_new": {"str": LONG}}, "positions"),
    "a prompt too long": ({"prompt": f"{LONG} {{}} is the capital of"}, "positions"),
    "a surrogate in the target": ({"target_new": {"str": "Dra\ud800vonia"}}, "surrogate"),
    "a surrogate in the prompt": ({"prompt": "\udfff{} is the capital of"}, "surrogate"),
}


MODES: dict[str, dict[str, Any]] = {
    "single": {"editor": "rome"},
    "sequential": {"editor": "memit", "edits": "bake"},
    "batch": {"editor": "memit", "edits": "bake"},
}


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("single", name) for name in BROKEN),
        ("sequential", "a target too long"),
        ("batch", "a surrogate in the target"),
    ],
)
def test_the_other_cases_are_scored(
    mode: str, name: str, tiny_path: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes, reason = BROKEN[name]
    data = str(write_jsonl(tmp_path / "records.jsonl", spoiled(**changes)))
    lm = build(str(tiny_path("gpt2")), mode=mode, data=data, **MODES[mode])
    with caplog.at_level(logging.WARNING, "lm_eval.edited_hf"):
        results = run(lm, ["bake_es"], data, {"generate": False, "mode": mode})
    row = metrics_of(results, "bake_es")
    assert (row["efficacy_prob_n"], row["unscored"]) == (3, 1)
    assert reason in row["unscored_reason"]
    (sample,) = [sample for sample in results["samples"]["bake_es"] if sample["doc_id"] == 1]
    assert all(sample[metric] is None for metric in ("efficacy_prob", "efficacy_argmax", "efficacy_match"))
    json.dumps(results["samples"], ensure_ascii=False, default=str).encode()  # lm-eval hashes and saves it
    warned = [record.getMessage() for record in caplog.records if "stay unscored" in record.getMessage()]
    assert warned, "one line says how many"


def test_counts_are_logged_before_the_weights_are_loaded(
    tiny_path: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = str(write_jsonl(tmp_path / "records.jsonl", spoiled(target_new={"str": LONG})))
    lm = build(str(tiny_path("gpt2")), editor="rome", data=data)

    class Loaded(Exception):
        pass

    def load() -> None:
        raise Loaded

    monkeypatch.setattr(lm, "load", load)
    with caplog.at_level(logging.WARNING, "lm_eval.edited_hf"), pytest.raises(Loaded):
        run(lm, ["bake_es"], data, {"generate": False})
    texts = [record.getMessage() for record in caplog.records]
    assert any("1 of 4 edits cannot be used" in text for text in texts)
    assert any("of 8 questions cannot be used" in text for text in texts)


def test_an_edit_without_a_usable_request_leaves_a_stream_going(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    """Its place in the stream stays, so checkpoints keep their meaning."""
    data = str(write_jsonl(tmp_path / "records.jsonl", spoiled(target_new={"str": LONG})))
    settings = {"mode": "sequential", "checkpoints": "2;4", "generate": False}
    options = {"mode": "sequential", "edits": "bake", "editor": "memit", "checkpoints": "2;4", "data": data}
    lm = build(str(tiny_path("gpt2")), **options)
    results = run(lm, ["bake_es"], data, settings)
    row = metrics_of(results, "bake_es")
    assert (row["efficacy_prob@2_n"], row["efficacy_prob@4_n"], row["efficacy_prob@immediate_n"]) == (1, 3, 3)
    facts = results["config"]["edited_hf"] if "edited_hf" in results["config"] else lm.session.result_metadata()
    assert (facts["num_edits"] or 3, facts["unusable_edits"]) == (3, 1)
    assert [report.step.num_edits for report in lm.session.stream.reports] == [1, 1, 2, 3]


class Picky(ROME):
    """Fails for one target in the middle of a computation, as an editor of another package might."""

    name = "picky"
    calls: ClassVar[list[list[str]]] = []

    def compute(self, job: Any) -> list[Delta]:
        type(self).calls.append([request.target_new for request in job.requests])
        if any(request.target_new == "The Amber Stair" for request in job.requests):
            raise EditingError("no table for this target")
        return super().compute(job)


class PickyJoint(FTM):
    """The same for joint edits."""

    name = "picky_joint"

    def compute(self, job: Any) -> list[Delta]:
        if any(request.target_new == "The Amber Stair" for request in job.requests):
            raise EditingError("no table for this target")
        return super().compute(job)


def test_a_failure_in_a_batch_is_retried_one_by_one(
    tiny_path: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Picky.calls = []
    data = str(write_jsonl(tmp_path / "records.jsonl", spoiled()))
    lm = build(str(tiny_path("gpt2")), editor=f"{__name__}:Picky", data=data)
    results = run(lm, ["bake_es"], data, {"generate": False})
    row = metrics_of(results, "bake_es")
    assert (row["efficacy_prob_n"], row["unscored"]) == (3, 1)
    assert json.loads(row["unscored_reason"]) == {"edit failed: no table for this target": 1}
    assert [len(call) for call in Picky.calls] == [4, 1, 1, 1, 1]
    order = [sample["doc_id"] for sample in results["samples"]["bake_es"]]
    assert order == sorted(order)


class PickyByName(FTM):
    """Names the requests that it cannot use, so that the others need no batch of their own each."""

    name = "picky_by_name"
    calls: ClassVar[list[int]] = []

    def compute(self, job: Any) -> list[Delta]:
        type(self).calls.append(len(job.requests))
        reasons = {
            request.key: "no table for this target"
            for request in job.requests
            if request.target_new == "The Amber Stair"
        }
        if reasons:
            raise UnusableRequestError("no table for this target", reasons)
        return super().compute(job)


@pytest.mark.parametrize("mode", ["single", "batch"])
def test_requests_that_an_error_names_are_left_out_of_the_batch(
    mode: str, tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    PickyByName.calls = []
    data = str(write_jsonl(tmp_path / "records.jsonl", spoiled()))
    options = {"edits": "bake", "mode": mode} if mode == "batch" else {}
    lm = build(
        str(tiny_path("gpt2")), editor=f"{__name__}:PickyByName", data=data, editor_args={"num_steps": 1}, **options
    )
    row = metrics_of(run(lm, ["bake_es"], data, {"generate": False, "mode": mode}), "bake_es")
    assert (row["efficacy_prob_n"], row["unscored"]) == (3, 1)
    assert json.loads(row["unscored_reason"]) == {"edit failed: no table for this target": 1}
    assert PickyByName.calls == [4, 3]


@pytest.mark.parametrize("size", [{"mode": "batch"}, {"mode": "batch", "group_size": 2}], ids=str)
def test_a_failure_in_a_joint_edit_leaves_the_rest_of_the_group(
    size: dict[str, Any], tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    data = str(write_jsonl(tmp_path / "records.jsonl", spoiled()))
    options = {
        "editor": f"{__name__}:PickyJoint",
        "edits": "bake",
        "data": data,
        "editor_args": {"num_steps": 1},
        **size,
    }
    results = run(build(str(tiny_path("gpt2")), **options), ["bake_es"], data, {"generate": False, "mode": "batch"})
    row = metrics_of(results, "bake_es")
    assert (row["efficacy_prob_n"], row["unscored"]) == (3, 1)
    assert json.loads(row["unscored_reason"]) == {"edit failed: no table for this target": 1}


@pytest.mark.parametrize("mode", ["single", "sequential"])
def test_failed_edits_have_the_population_of_the_unedited_model(
    mode: str, tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    """Which cases a filter excludes depends on the unedited model alone; a failed edit of such a case is no failure."""
    data = str(write_jsonl(tmp_path / "records.jsonl", spoiled()))
    model = str(tiny_path("gpt2"))
    stream = {"edits": "bake", "mode": "sequential", "guard": "stop", "guard_norm_ratio": 1e-9}
    options = {"editor": f"{__name__}:Picky"} if mode == "single" else {"editor": "ft_m", **stream}

    def row(**options: Any) -> dict[str, Any]:
        given = {"data": data, "editor_args": {"num_steps": 1}, **options}
        results = run(
            build(model, **given), ["bake_rq"], data, {"generate": False, "mode": given.get("mode", "single")}
        )
        return metrics_of(results, "bake_rq")

    before, after = row(mode="none"), row(**options)
    assert after["reverse_qa_prob_failed"] > 0 and before["reverse_qa_prob_excluded"] > 0  # else nothing is shown
    assert after["reverse_qa_prob_excluded"] == before["reverse_qa_prob_excluded"]
    assert after["reverse_qa_prob_n"] + after["reverse_qa_prob_failed"] == before["reverse_qa_prob_n"]
    assert (
        after["reverse_qa_prob_or_0"]
        == (after["reverse_qa_prob"] or 0.0) * after["reverse_qa_prob_n"] / before["reverse_qa_prob_n"]
    )


def test_a_fault_of_the_run_stays_an_error(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    """No edit succeeds, and the error is not one of a request: settings or statistics are at fault."""
    records = [{**record} for record in invented_records("bake_qa.jsonl")]
    for record in records:
        record["requested_rewrite"]["target_new"] = {"str": "The Amber Stair"}
    data = str(write_jsonl(tmp_path / "records.jsonl", records))
    lm = build(str(tiny_path("gpt2")), editor=f"{__name__}:Picky", data=data)
    with pytest.raises(EditingError, match="no table for this target"):
        run(lm, ["bake_es"], data, {"generate": False})


def test_edits_that_are_all_unusable_are_an_error_before_loading(
    tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    records = [{"prompt": f"Town {number} lies in", "target_new": "Velm"} for number in range(3)]
    edits = str(write_jsonl(tmp_path / "edits.jsonl", records))
    with pytest.raises(EditingError, match=r"no edit of this run \(3\) can be used.*'subject'"):
        build(str(tiny_path("gpt2")), editor="memit", mode="batch", edits=edits)


@pytest.mark.parametrize(
    ("request_fields", "reason"),
    [
        ({"prompt": "Velm lies in", "target_new": "Karsk"}, "needs the field 'subject'"),
        ({"prompt": "{} lies in", "subject": "Velm", "target_new": LONG}, "positions"),
        ({"prompt": "{} lies in", "subject": "Ve\ud800lm", "target_new": "Karsk"}, "surrogate"),
    ],
)
def test_editors_name_the_request_that_they_cannot_use(
    request_fields: dict[str, str], reason: str, tiny_model: Any, tiny_tokenizer: Any
) -> None:
    editor: Editor[Any] = load_editor("rome", FAST)
    good = EditRequest(prompt="{} lies in", subject="Velm", target_new="Karsk")
    bad = EditRequest(**request_fields, case_id="7")
    assert list(editor.find_unusable(tiny_tokenizer("byte_bpe"), [good, bad], 64)) == [bad.key]
    with pytest.raises(UnusableRequestError, match=reason):
        editor.edit(tiny_model("gpt2"), tiny_tokenizer("byte_bpe"), [good, bad])


@pytest.mark.parametrize(
    ("editor", "settings", "prompt", "reason"),
    [
        ("kn", {"layers": [1]}, "{} lies in", "no 'target_true'"),
        ("rome", {**FAST, "evk_align": True, "evk_drifts": ["relation"]}, "{}", "no token for evk_drifts"),
    ],
    ids=["kn", "evk_align"],
)
def test_what_an_editor_finds_out_while_it_works_is_a_fault_of_the_request_too(
    editor: str, settings: dict[str, Any], prompt: str, reason: str, tiny_model: Any, tiny_tokenizer: Any
) -> None:
    """Any other error in the first step of a stream ends the run."""
    bad = EditRequest(prompt=prompt, subject="Velm", target_new="Karsk")
    with pytest.raises(UnusableRequestError, match=reason):
        load_editor(editor, settings).edit(tiny_model("gpt2"), tiny_tokenizer("byte_bpe"), [bad])


def test_saved_edits_list_the_requests_that_they_write(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    good = {"prompt": "{} lies in", "target_new": "Karsk"}
    bad = {**good, "subject": "Brenholt", "target_new": LONG, "case_id": "b"}
    records = [{**good, "subject": "Velm", "case_id": "a"}, bad]
    edits = str(write_jsonl(tmp_path / "edits.jsonl", records))
    model = {"pretrained": str(tiny_path("gpt2")), "device": "cpu", "store": "off"}
    settings = {"editor": "ft_m", "editor_args": {"num_steps": 1}}
    saved = make_edits(tmp_path / "out", edits, grouping="joint", model_options={**model, **settings})
    assert list(saved.failed) == ["b"] and "positions" in saved.failed["b"]
    (edit,) = saved.edits
    lm = build(model["pretrained"], load_edit=str(edit.file), editor_args=None)
    requests = lm.session.requests
    assert requests is not None and len(requests) == 1
