"""The embedded samples are those of docs/explain/design/embedded-samples.md: checksums, schema, counts, no leaks."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from paths import ROOT

from edit_hooks.assets import demo_model as demo
from edit_hooks.utils.storage.files import sha256_of
from judges.match import exact_match, normalize
from lm_eval_tasks.bake.benchmark import parse_concept, parse_judge, parse_qa
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.protocols.wild import CONTEXTS
from lm_eval_tasks.qaedit.benchmark import parse

COUNTERFACT_DATA = ROOT / "lm_eval_tasks" / "counterfact" / "data"


def read(benchmark: str, name: str = "mini") -> list[dict[str, Any]]:
    path = ROOT / "lm_eval_tasks" / benchmark / "data" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


BAKE, HELD_OUT, QAEDIT = read("bake"), read("bake", "held_out"), read("qaedit")
BAKE_J, CONCEPT = read("bake", "mini_judge"), read("bake", "mini_concept")
case = pytest.mark.parametrize(
    "record", [*BAKE, *HELD_OUT], ids=lambda r: f"{r['relation']}-{r['requested_rewrite']['subject']}"
)
question = pytest.mark.parametrize("record", QAEDIT, ids=lambda r: f"{r['category']}-{r['subject']}")


def occurs(words: str, text: str) -> bool:
    """True if the words occur as whole words, in any case."""
    return re.search(rf"(?<!\w){re.escape(words.lower())}(?!\w)", text.lower()) is not None


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from strings(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from strings(entry)


def test_samples_are_frozen() -> None:
    """Numbers of the documents depend on them."""
    page = (ROOT / "docs/explain/design/embedded-samples.md").read_text(encoding="utf-8")
    recorded = dict(re.findall(r"^\| `([^`]+)` \| [^|]+ \| `([0-9a-f]{64})` \|$", page, re.MULTILINE))
    folder = ROOT / "lm_eval_tasks"
    assert {name: sha256_of(folder / name) for name in recorded} == recorded
    samples = {path.relative_to(folder).as_posix() for path in folder.glob("[!g]*/data/*.jsonl")}
    assert samples and samples <= set(recorded)


def clean(record: dict[str, Any]) -> list[str]:
    """Texts of a record, less the model's own words, that are padded, empty or hold odd white space."""
    texts = strings({key: value for key, value in record.items() if key != "provenance"})
    return [text for text in texts if not text or text != " ".join(text.split())]


# ---------------------------------------------------------------------------------------------------------------- BAKE


def test_bake_covers_enough_relations_evenly() -> None:
    counts = Counter(record["relation"] for record in BAKE)
    assert len(BAKE) >= 48 and len(counts) >= 6
    assert min(counts.values()) >= 4 and max(counts.values()) <= 8
    assert [record["case_id"] for record in BAKE] == list(range(len(BAKE)))
    assert len({record["relation"] for record in BAKE[: len(counts)]}) == len(counts)  # any --limit sees many relations


@pytest.mark.parametrize("records", [BAKE, HELD_OUT], ids=["mini", "held_out"])
def test_bake_edits_do_not_collide(records: list[dict[str, Any]]) -> None:
    """As one batch or stream, no subject is edited twice and no object of a relation is wanted twice."""
    subjects = Counter(record["requested_rewrite"]["subject"] for record in records)
    assert max(subjects.values()) == 1
    wanted = Counter((r["relation"], r["requested_rewrite"]["target_new"]["str"]) for r in records)
    assert max(wanted.values()) == 1


def test_held_out_facts_are_other_facts() -> None:
    """No subject of one file is that of the other, and within a relation no name at all is in both."""

    def names(records: list[dict[str, Any]]) -> set[tuple[str, str]]:
        return {
            (record["relation"], record[field][target]["str"])
            for record in records
            for field in ("requested_rewrite", "reverse_qa")
            for target in ("target_new", "target_true")
        }

    assert len(HELD_OUT) >= 32 and len({record["relation"] for record in HELD_OUT}) >= 6
    assert not names(BAKE) & names(HELD_OUT)
    subjects = [{record["requested_rewrite"]["subject"] for record in records} for records in (BAKE, HELD_OUT)]
    assert not subjects[0] & subjects[1]


def test_bake_prompts_have_the_subject_in_different_places() -> None:
    places = [record["requested_rewrite"]["prompt"].index("{}") for record in BAKE]
    at_start = sum(place == 0 for place in places)
    assert 10 <= at_start <= len(BAKE) - 10
    assert not [r for r in BAKE if r["requested_rewrite"]["prompt"].endswith("{}")]


@case
def test_bake_record(record: dict[str, Any]) -> None:
    parsed = parse_qa(Fields(record, "mini.jsonl"), record["case_id"])  # the reader of the published file takes it
    request = parsed.request
    true, new, subject = request.target_true, request.target_new, request.subject
    assert subject is not None and true is not None and record["requested_rewrite"]["prompt"].count("{}") == 1
    assert not clean(record)

    reverse = record["reverse_qa"]
    original = reverse["target_true"]["str"]
    assert subject != original and true != new and reverse["target_new"]["str"] == subject

    # Wordings: each holds what it asks about and not what it asks for.
    assert len(record["paraphrase_prompts"]) == 2 and len(record["neighborhood_prompts"]) >= 2
    assert len({request.text, *record["paraphrase_prompts"]}) == 3
    for prompt in (request.text, *record["paraphrase_prompts"]):
        assert occurs(subject, prompt) and not occurs(true, prompt) and not occurs(new, prompt)
    for prompt in record["neighborhood_prompts"]:
        assert not occurs(subject, prompt) and not occurs(true, prompt) and not occurs(new, prompt)
    assert occurs(new, reverse["prompt"])
    assert not occurs(subject, reverse["prompt"]) and not occurs(original, reverse["prompt"])
    judge = record["reverse_judge"]
    assert judge["prompt"].startswith("Whether ") and judge["prompt"].endswith("?")
    assert subject in judge["prompt"] and new in judge["prompt"]
    assert (judge["target_new"]["str"], judge["target_true"]["str"]) == ("yes", "no")


@case
def test_bake_record_qualified(record: dict[str, Any]) -> None:
    provenance = record["provenance"]
    assert provenance["model_sha256"] == demo.DEMO_SHA256 and provenance["dtype"] == "float32"
    unedited = provenance["unedited"]
    assert len(unedited["neighbors"]) == len(record["neighborhood_prompts"])
    assert len(unedited["paraphrases"]) == len(record["paraphrase_prompts"])
    for outcome in (unedited["forward"], unedited["reverse_qa"], *unedited["neighbors"]):
        assert 0 < outcome["nll_true"] < outcome["nll_new"]
    assert unedited["reverse_qa"]["true_is_greedy"]


# ---------------------------------------------------------------------------------------------- BAKE-J, BAKE-concept


def test_bake_j_covers_relations_evenly_and_its_edits_do_not_collide() -> None:
    counts = Counter(record["relation"] for record in BAKE_J)
    assert len(BAKE_J) >= 32 and len(counts) >= 6
    assert min(counts.values()) >= 4 and max(counts.values()) <= 5
    assert [record["case_id"] for record in BAKE_J] == list(range(len(BAKE_J)))
    assert len({record["relation"] for record in BAKE_J[: len(counts)]}) == len(counts)
    assert max(Counter(record["requested_rewrite"]["subject"] for record in BAKE_J).values()) == 1


@pytest.mark.parametrize("record", BAKE_J, ids=lambda r: r["requested_rewrite"]["subject"])
def test_bake_j_record(record: dict[str, Any]) -> None:
    parsed = parse_judge(Fields(record, "mini_judge.jsonl"), record["case_id"])
    request = parsed.request
    true, new, subject = request.target_true, request.target_new, request.subject
    assert true is not None and true != new
    assert "reverse_qa" not in record and not clean(record)
    assert 2 <= len(record["neighborhood_prompts"]) <= 4
    for prompt in record["neighborhood_prompts"]:
        assert prompt != request.text and not occurs(true, prompt) and not occurs(new, prompt)
    for prompt in (request.text, *record["paraphrase_prompts"]):
        assert occurs(str(subject), prompt) and not occurs(true, prompt) and not occurs(new, prompt)
    judge = record["reverse_judge"]["prompt"]
    assert judge.startswith("Whether ") and judge.endswith("?") and str(subject) in judge and new in judge
    unedited = record["provenance"]["unedited"]
    assert record["provenance"]["model_sha256"] == demo.DEMO_SHA256 and unedited["forward"]["true_is_greedy"]
    assert all(outcome["nll_true"] < outcome["nll_new"] for outcome in (unedited["forward"], *unedited["neighbors"]))


@pytest.mark.parametrize("record", CONCEPT, ids=lambda r: f"{r['requested_rewrite']['subject']}-{r['module']}")
def test_concept_record(record: dict[str, Any]) -> None:
    parsed = parse_concept(Fields(record, "mini_concept.jsonl"), record["case_id"])
    request = parsed.request
    assert request.subject is not None and request.target_true != request.target_new and not clean(record)
    (neighbor,) = parsed.neighbors
    assert not occurs(neighbor.wanted, neighbor.prompt)
    unedited = record["provenance"]["unedited"]
    assert record["provenance"]["model_sha256"] == demo.DEMO_SHA256
    assert all(outcome["nll_true"] < outcome["nll_new"] for outcome in (unedited["forward"], *unedited["neighbors"]))


def test_both_modules_of_concepts_are_covered_evenly() -> None:
    assert Counter(record["module"] for record in CONCEPT) == {"inter": 12, "intra": 12}
    assert [record["case_id"] for record in CONCEPT] == list(range(len(CONCEPT)))
    pairs = [(r["requested_rewrite"]["subject"], r["requested_rewrite"]["target_new"]["str"]) for r in CONCEPT]
    assert len(set(pairs)) == len(pairs)


# -------------------------------------------------------------------------------------------------------------- QAEdit


def test_qaedit_covers_enough_categories_evenly() -> None:
    counts = Counter(record["category"] for record in QAEDIT)
    assert len(QAEDIT) >= 48 and len(counts) >= 6
    assert min(counts.values()) >= 5 and max(counts.values()) <= 8
    assert [record["id"] for record in QAEDIT] == list(range(len(QAEDIT)))
    assert len({record["category"] for record in QAEDIT[: len(counts)]}) == len(counts)  # any --limit sees many


def test_qaedit_edits_do_not_collide() -> None:
    assert max(Counter(record["subject"].lower() for record in QAEDIT).values()) == 1
    questions = [text for r in QAEDIT for text in (r["prompt"], r["rephrase"])]
    assert len(set(questions)) == len(questions)
    assert not {r["locality"][0]["loc"] for r in QAEDIT} & set(questions)


@question
def test_qaedit_record(record: dict[str, Any]) -> None:
    request = parse(Fields(record, "mini.jsonl"), record["id"]).request
    assert not clean(record)
    target, subject = request.target_new, request.subject
    assert subject is not None and 1 <= len(target.split()) <= 4 and len(normalize(target)) > 0
    assert "." not in target  # the protocol stops at a full stop
    for text in (record["prompt"], record["rephrase"]):
        assert text.endswith("?") and text[0].isupper() and subject in text
        assert not occurs(target, text)
    (locality,) = record["locality"]
    assert not occurs(locality["loc_ans"], locality["loc"])
    assert not occurs(subject, locality["loc"]) and not exact_match(locality["loc_ans"], target)


@question
def test_qaedit_record_is_answered_wrongly_without_an_edit(record: dict[str, Any]) -> None:
    provenance = record["provenance"]
    assert provenance["model_sha256"] == demo.DEMO_SHA256 and provenance["dtype"] == "float32"
    unedited = provenance["unedited"]
    assert not unedited["answer_is_true"] and not exact_match(unedited["answer"], record["target"])
    assert normalize(record["target"]) not in normalize(unedited["answer"])
    assert "\n" not in unedited["answer"] and "." not in unedited["answer"] and unedited["nll_true"] > 0


def test_qaedit_context_is_the_one_of_the_task() -> None:
    assert CONTEXTS["qa_inst"] == "Please answer the question:\n\nQ: {question}\nA:"


# --------------------------------------------------------------------------------------------------------- CounterFact


def test_counterfact_texts_are_clean_and_about_their_object() -> None:
    snippets = json.loads((COUNTERFACT_DATA / "attribute_snippets.json").read_text(encoding="utf-8"))
    texts = {(entry["relation_id"], entry["target_id"]): entry["samples"] for entry in snippets}
    for record in read("counterfact"):
        rewrite = record["requested_rewrite"]
        new, true = rewrite["target_new"], rewrite["target_true"]
        assert not clean(record)
        assert not any(occurs(word["str"], prompt) for word in (new, true) for prompt in record["generation_prompts"])
        for sample in texts[rewrite["relation_id"], new["id"]]:
            assert occurs(new["str"], sample["text"]) and not clean(sample) and len(sample["text"].split()) >= 30


# ------------------------------------------------------------------------------------------------- ZsRE and KnowEdit

ZSRE, ZSRE_PORTABILITY, KNOWEDIT = read("zsre"), read("zsre", "mini_portability"), read("knowedit", "mini_zsre")


def test_zsre_samples_have_clean_texts() -> None:
    assert len(ZSRE) == len(ZSRE_PORTABILITY) == len(KNOWEDIT) >= 24
    assert len({record["src"] for record in ZSRE}) == len(ZSRE)
    for record in [*ZSRE, *ZSRE_PORTABILITY, *KNOWEDIT]:
        own_words = {key: value for key, value in record.items() if key not in ("pred", "cond")}  # they quote the model
        assert not clean(own_words)
    for record in ZSRE:
        assert record["alt"] not in record["answers"] and record["loc"].startswith("nq question: ")
        assert not occurs(record["alt"], record["src"]) and not occurs(record["alt"], record["rephrase"])


def test_zsre_files_hold_the_same_edits_and_consequences_of_the_new_answer() -> None:
    for plain, hop, by_kind in zip(ZSRE, ZSRE_PORTABILITY, KNOWEDIT, strict=True):
        assert {key: value for key, value in hop.items() if key != "portability"} == plain
        assert (by_kind["prompt"], by_kind["target_new"]) == (plain["src"], plain["alt"])
        gold = {kind: asked[0]["ground_truth"] for kind, asked in by_kind["portability"].items()}
        new, old = plain["alt"], plain["subject"]
        assert gold == {
            "Reasoning": hop["portability"]["New Answer"],
            "Logical_Generalization": old,
            "Subject_Aliasing": new,
        }
        unedited = plain["provenance"]["unedited"]
        assert unedited["answer_mentions_truth"] and unedited["nll_true"] < unedited["nll_target"]
