"""Pools of demonstrations: the built-in one, files, and files without usable records."""

from __future__ import annotations

import json

import pytest
from paths import RECORDS

from edit_hooks import EditingError
from edit_hooks.in_context.demonstrations import BUILTIN, load_pool, query_text, without_unrelated_sentences

REWRITE = {
    "prompt": "{} lies in",
    "subject": "Lake Omber",
    "target_new": {"str": "Peru"},
    "target_true": {"str": "Chile"},
}
RECORD = {
    "requested_rewrite": REWRITE,
    "paraphrase_prompts": ["Where is Lake Omber? In", " "],
    "neighborhood_prompts": ["Lake Sill lies in"],
}


def test_built_in_records_can_be_asked_in_every_way():
    pool = load_pool(BUILTIN)
    assert len(pool.records) == 42 and pool.incomplete == 0
    for record in pool.records:
        assert len(record.paraphrases) == 2 and len(record.neighbors) == 2
        assert record.edit.target_new != record.edit.target_true
        assert all(answer != record.edit.target_new for _, answer in record.neighbors)
    prompts = [record.edit.text for record in pool.records]
    assert len(set(prompts)) == 42 and {prompt.lower() for prompt in prompts} == pool.edits < pool.prompts


@pytest.mark.parametrize("layout", ["json", "jsonl"])
def test_a_file_in_the_counterfact_schema_is_a_pool(layout, tmp_path):
    path = tmp_path / f"pool.{layout}"
    rows = [{**RECORD, "neighborhood_prompts": []}, RECORD]
    path.write_text(json.dumps(rows) if layout == "json" else "\n".join(map(json.dumps, rows)) + "\n")
    pool = load_pool(str(path))
    (record,) = pool.records
    assert pool.incomplete == 1 and record.edit.text == "Lake Omber lies in" and record.edit.target_new == "Peru"
    assert record.paraphrases == ("Where is Lake Omber? In",) and record.neighbors == (("Lake Sill lies in", "Chile"),)
    assert record.demonstration(*record.neighbors[0]) == (
        "New Fact: Lake Omber lies in Peru\nPrompt: Lake Sill lies in Chile"
    )
    assert record.copy_demonstration() == f"{query_text(record.edit)} Peru"
    assert load_pool(str(path), 1).incomplete == 0


@pytest.mark.parametrize(
    ("paraphrase", "cleaned"),
    [
        ("Lake Omber is found in", "Lake Omber is found in"),
        ("The visitor of Lake Omber travels to", "The visitor of Lake Omber travels to"),
        ("Rain fell. Nobody came. The shores of Lake Omber are in", "The shores of Lake Omber are in"),
        (
            "He was St. Ives' mayor\nOne reaches Lake Omber, i.e. the lake, in",
            "One reaches Lake Omber, i.e. the lake, in",
        ),
        ("References\n\nCategory:Rivers of Ostmark Lake Omber lies in", "Lake Omber lies in"),
        ("Nobody came. The lake is in", "Nobody came. The lake is in"),  # no subject
    ],
)
def test_unrelated_sentences_before_a_paraphrase_are_removed_as_released(paraphrase, cleaned):
    assert without_unrelated_sentences(paraphrase, "Lake Omber") == cleaned


def test_only_paraphrases_of_counterfact_are_cleaned_and_on_request(tmp_path):
    path = tmp_path / "pool.jsonl"
    other = {**RECORD, "paraphrase_prompts": ["Rain fell. Lake Omber is in"]}
    path.write_text("\n".join(map(json.dumps, [other, {**other, "pararel_idx": 7}])) + "\n")
    verbatim = ("Rain fell. Lake Omber is in",)
    assert [record.paraphrases for record in load_pool(str(path)).records] == [verbatim, verbatim]
    cleaned = load_pool(str(path), clean_paraphrases=True)
    assert [record.paraphrases for record in cleaned.records] == [verbatim, ("Lake Omber is in",)]
    assert load_pool(BUILTIN, 0, True).records == load_pool(BUILTIN).records


def test_records_before_the_start_are_not_used():
    path = str(RECORDS / "bake_qa.jsonl")
    whole, rest = load_pool(path), load_pool(path, 1)
    assert rest.records == whole.records[1:] and rest.digest == whole.digest


def test_files_that_are_no_pools_are_refused(tmp_path):
    path = tmp_path / "pool.jsonl"
    with pytest.raises(EditingError, match="cannot be read"):
        load_pool(str(path))
    for text, message in (
        ("{not json", "not valid JSON"),
        (json.dumps({"prompt": "a"}), "record 0 .*: the field 'requested_rewrite' is missing"),
        (json.dumps({**RECORD, "paraphrase_prompts": []}), "no usable record"),
    ):
        path.write_text(text)
        load_pool.cache_clear()
        with pytest.raises(EditingError, match=message):
            load_pool(str(path))
