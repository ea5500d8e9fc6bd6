"""SERAC against EasyEdit with imported models: scores, the choice of a fact, and the logits of whoever answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_data import golden_json, golden_names, golden_tensors
from parity import golden_requests
from transformers import AutoTokenizer, BertConfig, BertModel

from edit_hooks import Delta, load_editor
from edit_hooks.in_context.fact_memory import load_memory
from edit_hooks.training.importing import import_artifact

SCORE_BOUND, LOGIT_BOUND = 1e-5, 1e-4


def released_models(case: dict[str, Any], counterfactual: Path, folder: Path) -> Path:
    """A folder with the encoder and the counterfactual model as transformers saves them."""
    stored = golden_tensors(f"serac-import/{case['classifier']}")
    encoder = BertModel(BertConfig(**case["classifier_config"]), add_pooling_layer=False)
    encoder.load_state_dict({name.removeprefix("classifier."): tensor for name, tensor in stored.items()})
    encoder.save_pretrained(folder / "classifier")
    tokenizer = AutoTokenizer.from_pretrained(counterfactual)
    tokenizer.sep_token = case["separator"]
    tokenizer.save_pretrained(folder / "classifier")
    (folder / "counterfactual").symlink_to(counterfactual, target_is_directory=True)
    return folder


@torch.no_grad()
def last_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]).to(model.device)).logits[0, -1].double()


@pytest.mark.parametrize(("model_name", "name"), golden_names("serac-import"))
def test_answers_are_those_of_the_release(model_name, name, golden_model, golden_model_path, tmp_path):
    """Ten questions to a memory of three facts; the other golden model is the counterfactual one."""
    case = golden_json(f"serac-import/{model_name}")[name]
    model, tokenizer = golden_model(model_name)
    weights = released_models(case, golden_model_path(case["counterfactual"]), tmp_path / "weights")
    settings = {"scope_texts": "released", "pooling": case["pooling"]}
    artifact = import_artifact("serac", model, tokenizer, weights, tmp_path / "artifact", settings)
    requests = [golden_requests()[number] for number in case["edits"]]
    (delta,) = load_editor("serac", {"artifact": str(artifact)}).edit(model, tokenizer, requests, joint=True)
    check_questions(delta, case, model, tokenizer)


def check_questions(delta: Delta, case: dict[str, Any], model: Any, tokenizer: Any) -> None:
    memory = load_memory(delta.contexts[0].memory, "")
    assert {question["in_scope"] for question in case["questions"]} == {True, False}
    for question in case["questions"]:
        text = question["question"]
        assert memory.scores(delta.contexts, text).tolist() == pytest.approx(question["scores"], abs=SCORE_BOUND)
        best = memory.best(delta.contexts, text)
        assert (best.number, best.in_scope) == (question["best_fact"], question["in_scope"])
        fact = delta.contexts[best.number]
        read = tokenizer(f"{fact.prompt} {fact.target_new} {text}")["input_ids"]
        assert read == question["replacement_ids"]
        answering, ids = (memory.counterfactual, read) if best.in_scope else (model, tokenizer(text)["input_ids"])
        logits_V = last_logits(answering, ids)
        probe_V = torch.cos(torch.arange(len(logits_V), dtype=torch.float64))
        assert float(logits_V @ probe_V) == pytest.approx(question["logits_probe"], abs=LOGIT_BOUND)
        assert float(logits_V.norm()) == pytest.approx(question["logits_norm"], rel=LOGIT_BOUND)
