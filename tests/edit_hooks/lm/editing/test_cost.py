"""Seconds and GPU memory of edits: measured around their computation, stored with them, and in results.

The counter of a GPU is scripted here; tests/end_to_end/test_cuda_editors.py reads that of a real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import printed_lines, run_verb, write_requests, write_settings
from lm_runs import BAKE, build, run
from paths import RECORDS
from pretended_device import dispatch_model, move_model, pretended_device
from saved_results import evaluate_here

from edit_hooks import EditingError
from edit_hooks.base.editor import Editor
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.edit_report import Cost
from edit_hooks.inference.effects.edit_effects import EditEffects
from edit_hooks.lm.editing import cost as edit_cost
from edit_hooks.lm.editing.cost import GIB, GPUMemory
from edit_hooks.store.store import Store
from edit_hooks.utils.storage.hashing import key_of
from lm_edit import load_documents, load_results

MODEL_GIB = 0.5
PEAK_MEMORY, MODEL_MEMORY, SECONDS = "peak_memory_gib", "model_memory_gib", "seconds"  # in files
STREAM = {"mode": "sequential", "edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), "edit_batch_size": 1}


class ScriptedCounter:
    """A GPU whose peaks are those of a list, and what happened meanwhile."""

    def __init__(self) -> None:
        self.peaks: list[float] = []
        self.events: list[str] = []

    def start(self) -> None:
        self.events.append("start")

    def read(self) -> Cost:
        self.events.append("read")
        return Cost(peak_memory_gib=self.peaks.pop(0), model_memory_gib=MODEL_GIB)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> ScriptedCounter:
    scripted = ScriptedCounter()
    monkeypatch.setattr(edit_cost, "memory_counter", lambda model: scripted)
    return scripted


@pytest.fixture
def model_path(tiny_path: Callable[..., Path]) -> str:
    return str(tiny_path("llama"))


def reports(results: dict[str, Any], task: str = "bake_es") -> list[dict[str, Any]]:
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["edit"] for sample in samples if sample["edit"]]


def peaks(results: dict[str, Any]) -> list[Any]:
    return [report.get(PEAK_MEMORY) for report in reports(results)]


def summary(results: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(results["results"]["bake_es"]["edit,none"])
    return content


# -- runs --------------------------------------------------------------------------------------------------------------


def test_edits_of_a_batch_have_the_peak_of_the_batch(model_path: str, tmp_path: Path, counter: ScriptedCounter) -> None:
    """They were computed together; from the store they have what they took then."""
    counter.peaks = [3.0, 3.25]  # the first is kept with the solved values
    first = run(build(model_path, tmp_path), BAKE)
    assert peaks(first) == [3.25] * 4 and counter.events == ["start", "read", "read"]
    assert {report[MODEL_MEMORY] for report in reports(first)} == {MODEL_GIB}
    assert (summary(first)[PEAK_MEMORY], summary(first)[MODEL_MEMORY]) == (3.25, MODEL_GIB)
    again = run(build(model_path, tmp_path), BAKE)
    assert reports(again) == reports(first) and counter.events == ["start", "read", "read"]
    assert summary(again) == summary(first)


def test_values_that_were_solved_before_cost_what_they_did_then(
    model_path: str, tmp_path: Path, counter: ScriptedCounter
) -> None:
    """So the memory and the time of a row do not depend on the rows before it in a table."""
    settings = {"layers": [1], "num_steps": 2, "second_moments": None, "context_templates": ["{}"]}
    memit = {"editor": "memit", "editor_args": settings}
    counter.peaks = [6.0, 3.25]
    run(build(model_path, tmp_path, **memit), ["bake_es"])
    (entry,) = (tmp_path / "store" / "json" / "values").iterdir()
    content = json.loads(entry.read_text())["content"]
    entry.write_text(entry.read_text().replace(f'"seconds": {content["seconds"]}', '"seconds": 1000.0'))
    rewritten = json.loads(entry.read_text())
    entry.write_text(json.dumps(rewritten | {"checksum": key_of(rewritten["content"])}))
    counter.peaks = [2.0]
    emmet = memit | {"editor": "emmet"}
    found = run(build(model_path, tmp_path, **emmet), ["bake_es"])
    assert peaks(found) == [6.0] * 4 and all(250 < report[SECONDS] < 251 for report in reports(found))


def test_a_resumed_stream_has_the_peaks_of_the_steps_when_they_were_computed(
    model_path: str, tmp_path: Path, counter: ScriptedCounter
) -> None:
    """The summary has the largest: what the stream needs."""
    counter.peaks = [2.0, 7.0]
    run(build(model_path, tmp_path, **STREAM, num_edits=2), ["bake_es"])
    counter.peaks = [3.0]
    lm = build(model_path, tmp_path, **STREAM, num_edits=3)
    resumed = run(lm, ["bake_es"])
    assert peaks(resumed) == [2.0, 7.0, 3.0]
    assert summary(resumed)[PEAK_MEMORY] == 7.0
    steps = lm.get_model_info()["edited_hf"]["steps"]
    assert [step[PEAK_MEMORY] for step in steps] == [2.0, 7.0, 3.0]


def test_a_group_and_the_edits_of_a_failed_batch_are_measured_each(
    model_path: str, counter: ScriptedCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter.peaks = [4.0, 5.0]
    groups = {"mode": "batch", "edits": "bake", "data": STREAM["data"], "num_edits": 4, "group_size": 2}
    ft_m = {"editor": "ft_m", "editor_args": {"num_steps": 2, "lr": 0.01}}
    assert peaks(run(build(model_path, **groups, **ft_m), ["bake_es"])) == [4.0, 4.0, 5.0, 5.0]
    edit = Editor.edit

    def fails_together(self: Any, model: Any, tokenizer: Any, requests: Any, **options: Any) -> Any:
        if len(requests) > 1:
            raise EditingError("not together")
        return edit(self, model, tokenizer, requests, **options)

    monkeypatch.setattr(Editor, "edit", fails_together)
    counter.peaks = [1.0, 2.0, 3.0, 4.0]
    assert peaks(run(build(model_path), ["bake_es"])) == [1.0, 2.0, 3.0, 4.0]


def test_without_a_counter_there_is_no_number(model_path: str) -> None:
    """On a CPU: neither 0 nor a guess."""
    found = run(build(model_path), ["bake_es"])
    for facts in (*reports(found), summary(found)):
        assert not {PEAK_MEMORY, MODEL_MEMORY} & set(facts)
    assert all(report[SECONDS] > 0 for report in reports(found))


def test_what_is_done_with_an_edit_is_no_part_of_its_cost(
    model_path: str, tmp_path: Path, counter: ScriptedCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its effects on other prompts, and the store: they are measured together."""
    of_independent, save = EditEffects.of_independent, Store.save_delta

    def measured(*arguments: Any) -> Any:
        counter.events.append("effects")
        return of_independent(*arguments)

    def saved(*arguments: Any) -> Any:
        counter.events.append("save")
        return save(*arguments)

    monkeypatch.setattr(EditEffects, "of_independent", measured)
    monkeypatch.setattr(Store, "save_delta", saved)
    monkeypatch.setattr(edit_cost, "time", SimpleNamespace(perf_counter=iter([10.0, 18.0]).__next__))
    counter.peaks = [1.0, 1.0]
    found = run(build(model_path, tmp_path), ["bake_es"])
    assert counter.events == ["start", "read", "read", "effects", *["save"] * 4]
    assert [report[SECONDS] for report in reports(found)] == [2.0] * 4


def test_the_memory_is_in_result_files_and_in_lm_edit_results(
    model_path: str, tmp_path: Path, counter: ScriptedCounter, capsys: pytest.CaptureFixture[str]
) -> None:
    counter.peaks = [41.25]
    settings = '{"context_templates": ["{}"], "num_steps": 3}'
    (tmp_path / "settings.yaml").write_text(settings, encoding="utf-8")
    arguments = f"pretrained={model_path},editor=r_rome,editor_args={tmp_path / 'settings.yaml'},store=off"
    evaluate_here(tmp_path / "results", arguments, ["bake_es", "bake_ls"], RECORDS / "bake_qa.jsonl")
    results = load_results(str(tmp_path / "results"))
    assert {edit[PEAK_MEMORY] for edit in results["edit"]} == {41.2}  # three digits, as all summaries
    document = next(iter(load_documents(str(tmp_path / "results"))))
    assert (document.report[PEAK_MEMORY], document.report[MODEL_MEMORY]) == (41.25, MODEL_GIB)
    capsys.readouterr()
    assert run_verb(["results", "show", str(tmp_path / "results"), "--edits"]) == 0
    lines = printed_lines(capsys)
    assert "| bake_es, bake_ls | peak_memory_gib | 41.2 |" in lines
    assert "| bake_es, bake_ls | model_memory_gib | 0.5 |" in lines
    assert any(line.startswith("| bake_es, bake_ls | seconds_per_edit | ") for line in lines)


def test_saved_edits_are_listed_with_their_memory(model_path: str, tmp_path: Path, counter: ScriptedCounter) -> None:
    counter.peaks = [1.5, 2.5]
    edits, settings = (write_requests(tmp_path / "edits.jsonl"), write_settings(tmp_path / "fast.yaml"))
    command = ["edit", "--pretrained", model_path, "--device", "cpu", "--editor", "r_rome", "--edits", str(edits)]
    command += ["--editor-args", str(settings), "--num-edits", "2", "--sequential", "--store", "off"]
    assert run_verb([*command, "--out", str(tmp_path / "saved")]) == 0
    listed = json.loads((tmp_path / "saved" / "edits.json").read_text(encoding="utf-8"))["edits"]
    assert [entry["diagnostics"][PEAK_MEMORY] for entry in listed] == [1.5, 2.5]


# -- the counter of a GPU ----------------------------------------------------------------------------------------------


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[torch.device, int]]:
    """Device -> its peak, which `reset_peak_memory_stats` sets to 1 GiB; pretended devices."""
    found: dict[torch.device, int] = {}
    with pretended_device():
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: found.update({device: GIB}))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: found[device])
        yield found


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def test_the_peaks_of_all_devices_are_added(devices: dict[torch.device, int]) -> None:
    model = build_model("llama")
    expected = weight_bytes(model)
    parts = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers": 1, "model.norm": 1, "lm_head": 1}
    dispatch_model(model, parts)
    gpus = [torch.device("cuda", number) for number in range(2)]
    devices |= dict.fromkeys(gpus, 70 * GIB)  # of loading the model, say
    with edit_cost.measured(model) as cost:
        assert devices == dict.fromkeys(gpus, GIB)
        devices[gpus[1]] = 3 * GIB
    assert cost.memory == Cost(peak_memory_gib=4.0, model_memory_gib=round(expected / GIB, 6))
    assert cost.memory.model_memory_gib > 0 and cost.of_one(2).peak_memory_gib == 4.0


def test_tied_weights_count_once(devices: dict[torch.device, int]) -> None:
    """The state dict has both names."""
    model = build_model("llama")
    move_model(model)
    assert (untied := GPUMemory(model).model_bytes) == weight_bytes(model)
    head, embeddings = model.lm_head, model.get_input_embeddings()
    head.weight = embeddings.weight
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(model.state_dict())
    assert GPUMemory(model).model_bytes == weight_bytes(model) == untied - 4 * embeddings.weight.numel()


def test_quantization_states_count(devices: dict[torch.device, int]) -> None:
    """They are in the state dict only."""
    model = build_model("llama")
    move_model(model)
    before = GPUMemory(model).model_bytes
    scale = torch.ones(7).to(torch.device("cuda", 0))

    def add(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}absmax"] = scale

    model.lm_head.register_state_dict_post_hook(add)
    assert GPUMemory(model).model_bytes == before + 7 * 4


def test_a_peak_below_the_weights_is_no_measurement(devices: dict[torch.device, int]) -> None:
    model = build_model("llama")
    move_model(model)
    found = GPUMemory(model)
    devices[torch.device("cuda", 0)] = found.model_bytes - 1
    assert found.read() == Cost()
    devices[torch.device("cuda", 0)] = found.model_bytes
    assert found.read().peak_memory_gib == found.read().model_memory_gib > 0


def test_weights_on_a_cpu_have_no_counter() -> None:
    assert edit_cost.memory_counter(build_model("llama")) is None
