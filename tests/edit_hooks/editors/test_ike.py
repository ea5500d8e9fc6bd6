"""ICE and IKE: the text of contexts, the choice of demonstrations, tested edits in the pool."""

from __future__ import annotations

import json

import pytest
import torch
from context_edits import FACT, WORDS, context_edits
from paths import RECORDS

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import build_tokenizer
from edit_hooks.in_context import embeddings
from edit_hooks.in_context.demonstrations import load_pool
from edit_hooks.in_context.embeddings import embed_words, most_similar
from edit_hooks.utils.errors import UnusableRequestError


def test_ice_states_the_fact_before_the_question():
    (delta,) = context_edits("ice")
    assert delta.contexts[0].before() == FACT + "Prompt: "
    assert delta.writes == ["context"] and not delta.parameter_names and delta.without_contexts is None


def test_demonstrations_are_four_copies_twelve_updates_sixteen_retains_and_the_edit_last():
    (delta,) = context_edits("ike", **WORDS)
    (context,) = delta.contexts
    counts = {kind: delta.diagnostics[kind] for kind in ("copy", "update", "retain")}
    assert counts == {"copy": 4, "update": 12, "retain": 16} and len(context.demonstrations) == 33
    assert context.demonstrations[-1] == f"{FACT}Prompt: Port Elna is the capital of Dravonia"
    pool = load_pool("builtin")
    seen = {"copy": 0, "update": 0, "retain": 0}
    for text, index in zip(context.demonstrations, delta.diagnostics["records"], strict=False):
        record = pool.records[index]
        fact, question = text.split("\nPrompt: ")
        assert fact == f"New Fact: {record.edit.text} {record.edit.target_new}"
        if question == f"{record.edit.text} {record.edit.target_new}":
            seen["copy"] += 1
        elif any(question == f"{prompt} {record.edit.target_new}" for prompt in record.paraphrases):
            seen["update"] += 1
        else:
            seen["retain"] += 1
            assert any(question == f"{prompt} {answer}" for prompt, answer in record.neighbors)
    assert seen == counts
    assert context.before().endswith(f"{FACT}Prompt: ")


def test_the_most_similar_record_comes_last_and_kinds_depend_on_seed_and_request():
    (delta,) = context_edits("ike", **WORDS)
    pool = load_pool("builtin")
    query = f"{FACT}Prompt: Port Elna is the capital of"
    order = most_similar("words", query, [record.copy_demonstration() for record in pool.records], 32)
    assert delta.diagnostics["records"] == [record.number for record in reversed(order)]
    again, other_seed = context_edits("ike", **WORDS)[0], context_edits("ike", **WORDS, seed=1)[0]
    assert again.checksum() == delta.checksum() != other_seed.checksum()


def test_any_embedder_can_measure_similarity(monkeypatch):
    """Any function from texts to unit rows; here similarity is that of the share of the letter e."""

    def share_of_e(texts):
        share = torch.tensor([text.count("e") / len(text) for text in texts])
        return torch.stack([share, (1 - share**2).sqrt()], 1)

    monkeypatch.setitem(embeddings.EMBEDDERS, "letters", lambda: share_of_e)
    (delta,) = context_edits("ike", embedder="letters", num_demonstrations=8)
    pool = load_pool("builtin")
    texts = [record.copy_demonstration() for record in pool.records]
    query = share_of_e([f"{FACT}Prompt: Port Elna is the capital of"])[0]
    distances = [float(abs(share_of_e([texts[i]])[0, 0] - query[0])) for i in delta.diagnostics["records"]]
    assert distances == sorted(distances, reverse=True)


def test_the_sentences_variant_starts_with_the_most_similar_and_leaves_out_the_edit():
    (delta,) = context_edits("ike", **WORDS, selection="sentences")
    (context,) = delta.contexts
    assert len(context.demonstrations) == 16 and FACT not in "".join(context.demonstrations)
    scores = embed_words(context.demonstrations) @ embed_words([f"{FACT}Prompt: Port Elna is the capital of"])[0]
    assert scores.tolist() == sorted(scores.tolist(), reverse=True)


def test_without_the_fact_its_demonstration_is_left_out_too():
    (delta,) = context_edits("ike", **WORDS, include_fact=False)
    text = delta.contexts[0].before()
    assert "Port Elna" not in text and text.count("New Fact:") == 32 and text.endswith("\n\nPrompt: ")


def test_a_tested_edit_in_the_pool_is_refused_except_by_ike_leaky_pool(tmp_path):
    pool = tmp_path / "pool.jsonl"
    pool.write_text((RECORDS / "bake_qa.jsonl").read_text())
    rewrite = json.loads(pool.read_text().splitlines()[0])["requested_rewrite"]
    tested = EditRequest(prompt=rewrite["prompt"], subject=rewrite["subject"], target_new="anything", case_id="0")
    other = EditRequest(prompt="{} lies in", subject="Nowhere", target_new="Peru")
    settings = {**WORDS, "pool": str(pool), "num_demonstrations": 1}
    with pytest.raises(UnusableRequestError, match=r"case 0.*pool_start") as refused:
        context_edits("ike", tested, other, **settings)
    assert list(refused.value.reasons) == [tested.key]  # so that others are written without it
    unusable = {
        name: load_editor(name, settings).find_unusable(build_tokenizer("byte_bpe"), [other, tested], None)
        for name in ("ike", "ike_leaky_pool")
    }  # without a model
    assert unusable == {"ike": refused.value.reasons, "ike_leaky_pool": {}}
    (leaky,) = context_edits("ike_leaky_pool", tested, **settings)
    assert tested.text in leaky.contexts[0].before()
    (clean,) = context_edits("ike", tested, **settings, pool_start=1)
    assert tested.text not in "".join(clean.contexts[0].demonstrations[:-1])


@pytest.mark.parametrize(
    ("settings", "is_cleaned"),
    [({}, True), ({"clean_paraphrases": False}, False), ({"selection": "sentences"}, False)],
)
def test_paraphrases_of_counterfact_come_without_their_unrelated_sentence(settings, is_cleaned, tmp_path):
    targets = {"target_new": {"str": "Peru"}, "target_true": {"str": "Chile"}}
    record = {
        "pararel_idx": 7,
        "requested_rewrite": {"prompt": "{} lies in", "subject": "Lake Omber", **targets},
        "paraphrase_prompts": ["Rain fell. Lake Omber is in"],
        "neighborhood_prompts": ["Lake Sill lies in"],
    }
    pool = tmp_path / "pool.json"
    pool.write_text(json.dumps([record]))
    count = 3 if "selection" in settings else 1  # all sentences of the record, or its update
    given = {**WORDS, "pool": str(pool), "num_demonstrations": count, "ratio": [0, 1, 0], **settings}
    (delta,) = context_edits("ike", **given)
    text = delta.contexts[0].before()
    assert "Lake Omber is in Peru" in text and ("Rain fell." not in text) is is_cleaned


def test_a_similarity_outside_the_range_of_cosines_is_refused():
    with pytest.raises(EditingError, match="min_similarity"):
        load_editor("ice", {"min_similarity": 20})


def test_layers_have_no_meaning_for_contexts():
    with pytest.raises(EditingError, match="layers"):
        load_editor("ice", {"layers": [1]})


def test_a_pool_that_is_too_small_is_refused():
    with pytest.raises(EditingError, match="42 usable records"):
        context_edits("ike", **WORDS, num_demonstrations=100)
