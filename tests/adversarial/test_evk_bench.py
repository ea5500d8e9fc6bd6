"""EVK-Bench through the public interface: anchors, modes, hand-made edits, unscored editors, settings."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_runs import build, case, instance, run
from paths import RECORDS
from random_deltas import rewrite_name
from scripted import ScriptedLM
from task_managers import task_manager
from task_runs import build as build_task
from task_runs import metrics_of
from task_runs import run as run_scripted

from edit_hooks import Delta, Factor
from edit_hooks.answers import EditedAnswer, StateSimilarity
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.modeling.architectures import weight_of
from edit_hooks.modeling.forward.embedding_noise import generator_of
from edit_hooks.state_reading import EmbeddingDrift, StateReading
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.protocols.stability import DRIFTS

ES, TS = "counterfact_evk_es", "counterfact_evk_ts"
TASKS = [ES, TS]
COLUMNS = ("evk_es", "evk_es_subject", "evk_es_relation", "evk_es_all")
FT = {"layers": [1], "num_steps": 5, "lr": 0.05}
NULL = {"layers": [1], "num_steps": 1, "lr": 1e-30}
STREAM = {"mode": "sequential", "edits": "counterfact", "num_edits": 3, "edit_batch_size": 1}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def evaluate(lm: Any, tasks: list[str] = TASKS, **settings: Any) -> dict[str, Any]:
    return run(lm, tasks, "counterfact.jsonl", settings)


def scores(results: dict[str, Any]) -> dict[str, Any]:
    """The plain columns of all tasks."""
    found: dict[str, Any] = {}
    for task in results["samples"]:
        values = metrics_of(results, task)
        found |= {name: values[name] for name in values if name.startswith("evk_") and "_n" not in name}
    return {name: value for name, value in found.items() if name in (*COLUMNS, "evk_ts")}


def stream_model(path: str, **options: Any) -> Any:
    return build(path, editor="ft_m", editor_args=FT, **{**STREAM, **options}, data=str(RECORDS / "counterfact.jsonl"))


# ------------------------------------------------------------------ anchors


MODES: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "single": {},
    "batch": {"mode": "batch", "edits": "counterfact", "num_edits": 3},
    "groups": {"mode": "batch", "edits": "counterfact", "num_edits": 4, "group_size": 2},
    "stream": STREAM,
}


@pytest.mark.parametrize("mode", MODES)
def test_without_an_effect_every_column_is_exactly_1(model_path: str, mode: str) -> None:
    edit = {} if mode == "none" else {"editor": "ft_m", "editor_args": NULL}
    data = {} if "edits" not in MODES[mode] else {"data": str(RECORDS / "counterfact.jsonl")}
    lm = build(model_path, **{"editor_args": None, **edit, **MODES[mode], **data})
    found = scores(evaluate(lm, **MODES[mode]))
    assert found == dict.fromkeys((*COLUMNS, "evk_ts"), 1.0)


def test_an_edit_lowers_every_column_in_every_mode(model_path: str) -> None:
    single = scores(evaluate(build(model_path, editor="ft_m", editor_args=FT)))
    assert all(0 < value < 0.9999 for value in single.values()) and len(single) == 5
    stream = evaluate(stream_model(model_path), **STREAM)
    assert all(0 < value < 0.9999 for value in scores(stream).values())
    # Asked of the edited model as a whole: also the two prompts whose facts were not edited.
    assert metrics_of(stream, ES)["evk_es_n"] == 5 > STREAM["num_edits"]
    assert stream["samples"][ES][0]["doc"]["edit_requests"] == []


def test_a_hand_made_edit_has_the_stability_worked_out_by_hand_in_float64(model_path: str, tmp_path: Path) -> None:
    lm = build(model_path, dtype="float64", mode="none", editor_args=None)
    model, tokenizer = lm.model, lm.tokenizer
    module = model.get_submodule(rewrite_name(model))
    rows, columns = weight_of(module).shape
    left, right = torch.linspace(-1, 1, rows)[:, None].double(), torch.linspace(0, 0.5, columns)[:, None].double()
    Delta(factors={rewrite_name(model): Factor(left, right)}, meta={"editor": "hand"}).save(tmp_path / "edit")

    def state(text: str, positions: list[int], seed: str) -> list[float]:
        embeds = model.get_input_embeddings()(torch.tensor([tokenizer(text)["input_ids"]])).detach().clone()
        if positions:
            drawn = torch.randn(len(positions), embeds.shape[2], dtype=torch.float64, generator=generator_of(seed))
            embeds[0, positions] += 0.3 * drawn
        with torch.no_grad():
            return model(inputs_embeds=embeds, output_hidden_states=True).hidden_states[-1][0, -1].tolist()

    # "Port Elna is the capital of": the subject is its first words, the token that begins a text is in "all" only.
    prompt, subject = "Port Elna is the capital of", len("Port Elna")
    offsets = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    visible = [index for index, (start, end) in enumerate(offsets) if start < end]
    inside = [index for index in visible if offsets[index][0] < subject]
    positions = {
        "subject": inside,
        "relation": [i for i in visible if i not in inside],
        "all": list(range(len(offsets))),
    }
    assert len(visible) == len(offsets) - 1
    text = "The island of Zealand belongs to"
    asked = [(prompt, positions[drift], f"0 0 {drift}") for drift in DRIFTS] + [(text, [], "")]
    before = [state(*one) for one in asked]
    with torch.no_grad():
        weight_of(module).add_(left @ right.T)
    after = [state(*one) for one in asked]
    by_hand = []
    for x, y in zip(before, after, strict=True):
        dot, xx, yy = (math.fsum(a * b for a, b in zip(*pair, strict=True)) for pair in ((x, y), (x, x), (y, y)))
        by_hand.append(dot / math.sqrt(xx) / math.sqrt(yy))

    edited = build(model_path, dtype="float64", load_edit=str(tmp_path / "edit"), editor_args=None)
    results = evaluate(edited, load_edit="given")
    sample = next(sample for sample in results["samples"][ES] if sample["doc_id"] == 0)
    found = [sample[f"evk_es_{drift}"] for drift in DRIFTS]
    assert found == pytest.approx(by_hand[:3], abs=1e-12)
    assert sample["evk_es"] == pytest.approx(math.fsum(by_hand[:3]) / 3, abs=1e-12)
    first_text = next(sample for sample in results["samples"][TS] if sample["doc_id"] == 0)
    assert first_text["evk_ts"] == pytest.approx(by_hand[3], abs=1e-12) and max(by_hand) < 0.999


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_relative_noise_is_that_of_the_unedited_embeddings_whatever_an_edit_changes(
    model_path: str, tmp_path: Path, engine: str
) -> None:
    """A saved edit that makes the embeddings three times as large: the noise of both models is the absolute one."""
    lm = build(model_path, mode="none", editor_args=None)
    embeddings = lm.model.get_input_embeddings()
    name = next(name for name, module in lm.model.named_modules() if module is embeddings)
    weight = embeddings.weight.detach()
    assert float(embeddings(torch.arange(len(weight))).detach().std()) == pytest.approx(float(weight.std()), rel=1e-5)
    Delta(dense={f"{name}.weight": 2 * weight.clone()}, meta={"editor": "hand"}).save(tmp_path / "edit")
    edited = build(model_path, load_edit=str(tmp_path / "edit"), editor_args=None, engine=engine)
    absolute = scores(evaluate(edited, [ES], load_edit="given", evk_noise=0.5 * float(weight.std())))
    relative = scores(evaluate(edited, [ES], load_edit="given", evk_relative_noise=0.5))
    assert relative == pytest.approx(absolute, abs=1e-6) and relative["evk_es"] < 0.999


# ------------------------------------------------------------------ modes and engines


def test_batch_sizes_and_engines_agree(model_path: str) -> None:
    runs = [
        scores(evaluate(build(model_path, editor="ft_m", editor_args=FT, **options)))
        for options in ({"batch_size": 1}, {"batch_size": 7}, {"max_batch_tokens": 16}, {"engine": "reference"})
    ]
    for other in runs[1:]:
        assert other == pytest.approx(runs[0], abs=1e-5)


def test_hook_edits_are_scored(model_path: str) -> None:
    grace = build(model_path, editor="grace", editor_args={"layers": [1], "num_steps": 4, "radius": 1e6})
    assert scores(evaluate(grace))["evk_es_subject"] < 1.0


def test_own_edits_have_the_stages_of_a_stream(model_path: str) -> None:
    settings = {**STREAM, "evk_under": "own_edit", "checkpoints": "2", "retention": True}
    lm = stream_model(model_path, checkpoints="2", retention=True)
    results = evaluate(lm, [ES], **settings)
    found = metrics_of(results, ES)
    assert found["evk_es_n"] == 3 and found["evk_es@immediate_n"] == 3 and found["evk_es@2_n"] == 2
    # After the first step only the first edit is in the weights; the states are compared with the unedited ones.
    single = evaluate(build(model_path, editor="ft_m", editor_args=FT), [ES])
    first = next(sample for sample in results["samples"][ES] if sample["doc_id"] == 0)
    alone = next(sample for sample in single["samples"][ES] if sample["doc_id"] == 0)
    assert first["evk_es@immediate"] == pytest.approx(alone["evk_es"], abs=1e-6)
    assert first["evk_es"] < first["evk_es@immediate"]


def test_the_edited_model_is_asked_at_checkpoints(model_path: str) -> None:
    """After two of three edits, over all five prompts: what a stream of two edits gives at its end."""
    found = metrics_of(evaluate(stream_model(model_path, checkpoints="2"), [ES], **STREAM, checkpoints="2"), ES)
    shorter = metrics_of(evaluate(stream_model(model_path, num_edits=2), [ES], **{**STREAM, "num_edits": 2}), ES)
    assert found["evk_es@2_n"] == 5 and found["evk_es@immediate_n"] == 0
    assert found["evk_es@2"] == pytest.approx(shorter["evk_es"], abs=1e-7) and found["evk_es"] < found["evk_es@2"]


def test_answers_hold_the_cosine_and_no_state(model_path: str) -> None:
    results = evaluate(build(model_path, mode="none", editor_args=None), [ES])
    (response,) = results["samples"][ES][0]["resps"][0]
    assert isinstance(response, EditedAnswer) and response.final == StateSimilarity(cosine=1.0)
    assert response.to_json()["answer"] == {"kind": "states", "cosine": 1.0}


# ------------------------------------------------------------------ unscored, with a reason


@pytest.mark.parametrize("options", [{"editor": "ice"}, {"editor": "ft_m", "editor_args": FT, "icl": True}])
def test_edits_in_the_prompt_are_unscored(model_path: str, options: dict[str, Any]) -> None:
    other = [] if "icl" in options else ["counterfact_es"]
    results = evaluate(build(model_path, **{"editor_args": None, **options}), [*other, ES])
    found = metrics_of(results, ES)
    assert found["evk_es"] is None and found["evk_es_n"] == 0 and found["evk_es_failed"] == 5
    assert "text before the prompt" in found["unscored_reason"]
    assert all(metrics_of(results, task)["efficacy_prob_n"] == 5 for task in other)


def test_stock_models_are_unscored(model_path: str) -> None:
    manager = task_manager({"data": str(RECORDS / "counterfact.jsonl")})
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": model_path, "device": "cpu"},
        tasks=TASKS,
        task_manager=manager,
        bootstrap_iters=0,
        limit=2,
    )
    for task, metric in ((ES, "evk_es_all"), (TS, "evk_ts")):
        found = metrics_of(results, task)
        assert found[metric] is None and "--model edited_hf" in found["unscored_reason"]


def test_a_state_that_is_not_finite_is_a_failure() -> None:
    class Broken(ScriptedLM):
        def _likelihood(self, args: tuple, unedited: bool) -> Any:
            return StateSimilarity(cosine=math.nan)

    found = metrics_of(run_scripted(TS, Broken()), TS)
    # The fifth of five records is scored like the others; four have attribute prompts.
    assert found["evk_ts"] is None and found["evk_ts_failed"] == 5
    assert (
        "not finite" in found["unscored_reason"] and "the record has no attribute prompts" in found["unscored_reason"]
    )


def test_scores_by_hand() -> None:
    values = {"subject": 0.5, "relation": 0.7, "all": 0.3}

    class Scripted(ScriptedLM):
        def _answer(self, request: Any, answer: Any) -> Any:
            cosine = values[request.doc["asked"]["kind"]] + 0.1 * (request.doc["case_id"] == "0")
            return EditedAnswer(final=StateSimilarity(cosine=cosine))

    found = metrics_of(run_scripted(ES, Scripted()), ES)
    # Five records, one of them 0.1 higher: 0.5 + 0.1/5, and the mean of the three.
    assert [found[f"evk_es_{drift}"] for drift in DRIFTS] == pytest.approx([0.52, 0.72, 0.32])
    assert found["evk_es"] == pytest.approx((0.52 + 0.72 + 0.32) / 3)


# ------------------------------------------------------------------ documents and settings


def test_documents_hold_the_published_numbers_of_prompts_in_order() -> None:
    assert len(build_task(ES).test_docs()) == 5
    assert [doc["case_id"] for doc in build_task(ES, evk_num_prompts=2).test_docs()] == ["0", "1"]
    texts = [probe["prompt"] for doc in build_task(TS, evk_num_texts=2).test_docs() for probe in doc["probes"]]
    assert texts == ["The island of Zealand belongs to", "Jan Kos is a native speaker of"]
    noise = build_task(ES, evk_noise_seed=3).test_docs()[1]["probes"][0]["states"]["noise"]
    assert noise["seed"] == "3 1 subject" and noise["sigma"] == 0.3 and not noise["relative"]
    state = build_task(ES, evk_state="4").test_docs()[0]["probes"][0]["states"]["state"]
    assert state == 4


def test_prompts_of_another_benchmark(model_path: str) -> None:
    settings = {"data": str(RECORDS / "bake_qa.jsonl"), "evk_prompts": "bake"}
    task = build_task(ES, **settings)
    assert task.test_docs()[0]["probes"][0]["prompt"] == build_task("bake_es").test_docs()[0]["probes"][0]["prompt"]
    assert task.config.metadata["data_source"]["file"] == "bake_qa.jsonl"
    with pytest.raises(EditingError, match=r"evk_prompts=bake: its records have no attribute prompts"):
        build_task(TS, **settings)
    with pytest.raises(EditingError, match="unknown benchmark 'counterfakt'"):
        build_task(ES, evk_prompts="counterfakt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evk_noise": -1}, "evk_noise"),
        ({"evk_noise": 0.1, "evk_relative_noise": 0.5}, "both set the size of the noise"),
        ({"evk_state": "middle"}, "evk_state='middle' is unknown. Accepted: after_norm, before_norm"),
        ({"evk_state": True}, "evk_state=True"),
        ({"evk_num_prompts": 0}, "evk_num_prompts"),
        ({"evk_under": "mine"}, "evk_under"),
        ({"evk_nois": 0.1}, "unknown setting 'evk_nois'"),
    ],
)
def test_settings_are_checked_when_the_task_is_built(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        build_task(ES, **settings)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state": "middle"}, "after_norm, before_norm or the number of a block"),
        ({"layer": 3}, "unknown field of a state reading 'layer'"),
    ],
)
def test_readings_survive_json_and_are_checked(changed: dict[str, Any], message: str) -> None:
    drift = EmbeddingDrift(drift="all", subject_span=(0, 4), sigma=0.5, seed="0 1 all")
    reading = StateReading(prompt="Oslo is in", state=2, noise=drift)
    assert StateReading.from_json(reading.to_json()) == reading
    with pytest.raises(EditingError, match=message):
        StateReading.from_json({**reading.to_json(), **changed})


def test_noise_follows_the_prompt_in_its_context(model_path: str) -> None:
    """With text before the prompt, as a chat template has it, the same words are perturbed."""
    lm = build(model_path, mode="none", editor_args=None)
    noise = EmbeddingDrift(drift="subject", subject_span=(0, 9), sigma=0.3, seed="x")
    reading = StateReading(prompt="Port Elna is the capital of", noise=noise)

    def perturbed(context: str, reading: StateReading = reading) -> str:
        doc = case() | {"asked": {"states": reading.to_json()}}
        item, _ = lm.items.from_instance(instance(doc, context, " Norvania"))
        return lm.tokenizer.decode([item.context[position] for position in item.noise.positions])

    assert perturbed("Port Elna is the capital of") == "Port Elna"
    assert perturbed("User: Port Elna? Port Elna is the capital of\nAnswer:").strip() == "Port Elna"
    relation = dataclasses.replace(reading, noise=dataclasses.replace(noise, drift="relation"))
    for before, after in (("", ""), ("<|begin_of_text|>User: ", "\nAnswer:")):
        assert perturbed(f"{before}Port Elna is the capital of{after}", relation) == " is the capital of"
    deep = StateReading(prompt="Port Elna is the capital of", state=99)
    with pytest.raises(EditingError, match="block 99, but the model has blocks 0 to"):
        doc = case() | {"asked": {"states": deep.to_json()}}
        lm.items.from_instance(instance(doc, "Port Elna is the capital of", " Norvania"))
