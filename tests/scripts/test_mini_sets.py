"""The embedded sample sets keep their promises: schema, counts, true facts, no leaks; and the model's measured view."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from paths import ROOT

from edit_hooks.assets import demo_model as demo
from judges.match import exact_match, normalize
from lm_eval_tasks.bake.benchmark import parse_concept, parse_judge, parse_qa
from lm_eval_tasks.common.fields import Fields
from lm_eval_tasks.protocols.wild import CONTEXTS
from lm_eval_tasks.qaedit.benchmark import parse

SCRIPTS = ROOT / "scripts"
SHARED_MODULES = ("_mini_common", "_bake_records")
COUNTERFACT_DATA = ROOT / "lm_eval_tasks" / "counterfact" / "data"


def read(benchmark: str, name: str = "mini") -> list[dict[str, Any]]:
    path = ROOT / "lm_eval_tasks" / benchmark / "data" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


BAKE, HELD_OUT, QAEDIT = read("bake"), read("bake", "held_out"), read("qaedit")
BAKE_J, CONCEPT = read("bake", "mini_judge"), read("bake", "mini_concept")
FACTS = {
    table["relation"]: [tuple(pair) for pair in table["facts"]]
    for table in (json.loads(path.read_text(encoding="utf-8")) for path in (SCRIPTS / "facts" / "bake").glob("*.json"))
}
FACTS_CONCEPT = SCRIPTS / "facts" / "bake_concept"
FACTS_J = {
    table["relation"]: table["facts"]
    for table in (
        json.loads(path.read_text(encoding="utf-8")) for path in (SCRIPTS / "facts" / "bake_j").glob("*.json")
    )
}
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


def test_the_builder_leaves_out_every_fact_with_a_name_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import build_mini_bake

    relations = build_mini_bake.without_names(build_mini_bake.load_relations(), BAKE)
    for name in (*SHARED_MODULES, "build_mini_bake"):
        sys.modules.pop(name, None)
    left = {relation.name: {tuple(fact) for fact in relation.facts} for relation in relations}
    taken = {(r["relation"], r["requested_rewrite"]["subject"]) for r in BAKE}
    taken |= {(r["relation"], r["requested_rewrite"]["target_new"]["str"]) for r in BAKE}
    assert sum(map(len, left.values())) > 40
    assert not {(relation, word) for relation, facts in left.items() for fact in facts for word in fact} & taken
    built = {(r["requested_rewrite"]["subject"], r["requested_rewrite"]["target_true"]["str"]) for r in HELD_OUT}
    assert built <= set().union(*left.values())


def test_bake_prompts_have_the_subject_in_different_places() -> None:
    places = [record["requested_rewrite"]["prompt"].index("{}") for record in BAKE]
    at_start = sum(place == 0 for place in places)
    assert 10 <= at_start <= len(BAKE) - 10
    assert not [r for r in BAKE if r["requested_rewrite"]["prompt"].endswith("{}")]


@pytest.mark.parametrize("relation", sorted(FACTS))
def test_fact_tables_are_one_to_one(relation: str) -> None:
    subjects, objects = zip(*FACTS[relation], strict=True)
    assert max(Counter(subjects).values()) == 1 and max(Counter(objects).values()) == 1


def test_neighbor_table_does_not_give_answers_away() -> None:
    lines = (SCRIPTS / "facts" / "bake" / "neighbors.tsv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    assert len({tuple(row) for row in rows}) == len(rows)
    assert not [prompt for answer, prompt in rows if occurs(answer, prompt)]


@case
def test_bake_record(record: dict[str, Any]) -> None:
    parsed = parse_qa(Fields(record, "mini.jsonl"), record["case_id"])  # the reader of the published file takes it
    request, facts = parsed.request, FACTS[record["relation"]]
    true, new, subject = request.target_true, request.target_new, request.subject
    assert subject is not None and true is not None and record["requested_rewrite"]["prompt"].count("{}") == 1
    assert not clean(record)

    # Triples: (s, o) is a fact, (s*, o*) is another of the same relation.
    reverse = record["reverse_qa"]
    original = reverse["target_true"]["str"]
    assert (subject, true) in facts and (original, new) in facts
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
    assert (ROOT / provenance["facts"]).is_file()
    unedited = provenance["unedited"]
    assert len(unedited["neighbors"]) == len(record["neighborhood_prompts"])
    assert len(unedited["paraphrases"]) == len(record["paraphrase_prompts"])
    for outcome in (unedited["forward"], unedited["reverse_qa"], *unedited["neighbors"]):
        assert 0 < outcome["nll_true"] < outcome["nll_new"]
    assert unedited["reverse_qa"]["true_is_greedy"]


# ---------------------------------------------------------------------------------------------- BAKE-J, BAKE-concept


def test_bake_j_covers_relations_evenly_and_its_edits_do_not_collide() -> None:
    counts = Counter(record["relation"] for record in BAKE_J)
    assert len(BAKE_J) >= 32 and set(counts) == set(FACTS_J) and len(counts) >= 6
    assert min(counts.values()) >= 4 and max(counts.values()) <= 5
    assert [record["case_id"] for record in BAKE_J] == list(range(len(BAKE_J)))
    assert len({record["relation"] for record in BAKE_J[: len(counts)]}) == len(counts)
    assert max(Counter(record["requested_rewrite"]["subject"] for record in BAKE_J).values()) == 1


def test_facts_of_bake_j_have_many_subjects_for_an_object() -> None:
    for objects in FACTS_J.values():
        assert all(len(subjects) == len(set(subjects)) >= 4 for subjects in objects.values())
        assert max(Counter(subject for subjects in objects.values() for subject in subjects).values()) == 1


@pytest.mark.parametrize("record", BAKE_J, ids=lambda r: r["requested_rewrite"]["subject"])
def test_bake_j_record(record: dict[str, Any]) -> None:
    parsed = parse_judge(Fields(record, "mini_judge.jsonl"), record["case_id"])
    request, facts = parsed.request, FACTS_J[record["relation"]]
    true, new, subject = request.target_true, request.target_new, request.subject
    assert true is not None and subject in facts[true] and new in facts and subject not in facts[new]
    assert "reverse_qa" not in record and not clean(record)
    edited = {other["requested_rewrite"]["subject"] for other in BAKE_J}
    others = [other for other in facts[true] if other not in edited]
    assert 2 <= len(record["neighborhood_prompts"]) <= 4
    for prompt in record["neighborhood_prompts"]:  # another subject of the same object, in the wording of the edit
        assert prompt in [record["requested_rewrite"]["prompt"].replace("{}", other) for other in others]
        assert not occurs(true, prompt) and not occurs(new, prompt)
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
    rows = [line.split("\t") for line in (FACTS_CONCEPT / "concepts.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    superclass = {name: kind for kind, name, _ in rows}
    definition = {name: text for _, name, text in rows}
    concept_of = {text: name for name, text in definition.items()}
    request = parsed.request
    assert request.subject is not None and request.target_true == definition[request.subject] and not clean(record)
    other = concept_of[request.target_new]
    assert other != request.subject
    assert (superclass[other] == superclass[request.subject]) == (record["module"] == "intra")
    locality = (FACTS_CONCEPT / "locality.tsv").read_text(encoding="utf-8").splitlines()[1:]
    (neighbor,) = parsed.neighbors
    assert f"{neighbor.prompt}\t{neighbor.wanted}" in locality and not occurs(neighbor.wanted, neighbor.prompt)
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


def test_counterfact_samples_are_those_of_the_builder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import build_mini_counterfact

    assert build_mini_counterfact.main(["--check"]) == 0, capsys.readouterr().out
    for name in ("_mini_common", "build_mini_bake", "build_mini_counterfact"):
        sys.modules.pop(name, None)


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
ZSRE_RELATIONS = [json.loads(path.read_text("utf-8")) for path in (SCRIPTS / "facts" / "zsre").glob("*.json")]


def test_zsre_samples_have_true_facts_and_clean_texts() -> None:
    facts = {(r["question"].format(**fact), fact["answer"]) for r in ZSRE_RELATIONS for fact in r["facts"]}
    assert len(ZSRE) == len(ZSRE_PORTABILITY) == len(KNOWEDIT) >= 24
    assert {(record["src"], record["answers"][0]) for record in ZSRE} <= facts
    assert len({record["src"] for record in ZSRE}) == len(ZSRE)
    for record in [*ZSRE, *ZSRE_PORTABILITY, *KNOWEDIT]:
        own_words = {key: value for key, value in record.items() if key not in ("pred", "cond")}  # they quote the model
        assert not clean(own_words)
    for record in ZSRE:
        assert record["alt"] not in record["answers"] and record["loc"].startswith("nq question: ")
        assert not occurs(record["alt"], record["src"]) and not occurs(record["alt"], record["rephrase"])


def test_zsre_files_hold_the_same_edits_and_consequences_of_the_new_answer() -> None:
    follows = {fact["answer"]: fact["of_answer"] for relation in ZSRE_RELATIONS for fact in relation["facts"]}
    for plain, hop, by_kind in zip(ZSRE, ZSRE_PORTABILITY, KNOWEDIT, strict=True):
        assert {key: value for key, value in hop.items() if key != "portability"} == plain
        assert (by_kind["prompt"], by_kind["target_new"]) == (plain["src"], plain["alt"])
        assert hop["portability"]["New Answer"] == follows[plain["alt"]]
        gold = {kind: asked[0]["ground_truth"] for kind, asked in by_kind["portability"].items()}
        new, old = plain["alt"], plain["subject"]
        assert gold == {"Reasoning": follows[new], "Logical_Generalization": old, "Subject_Aliasing": new}
        unedited = plain["provenance"]["unedited"]
        assert unedited["answer_mentions_truth"] and unedited["nll_true"] < unedited["nll_target"]


# ------------------------------------------------------------------------------------------- the model's view, again


@pytest.mark.model
@pytest.mark.skipif(not demo.demo_available(), reason="needs the extra 'demo'")
def test_samples_are_what_the_builders_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import _mini_common
    import build_mini_bake
    import build_mini_bake_concept
    import build_mini_bake_j
    import build_mini_knowgic
    import build_mini_qaedit
    import build_mini_zsre

    oracle = _mini_common.Oracle(num_threads=1)
    assert build_mini_bake.check(oracle, build_mini_bake.OUTPUT, 1) == 0, capsys.readouterr().out
    assert build_mini_bake.check(oracle, build_mini_bake.HELD_OUT, 1) == 0, capsys.readouterr().out
    assert build_mini_bake_j.check(oracle, build_mini_bake_j.OUTPUT, 1) == 0, capsys.readouterr().out
    assert build_mini_bake_concept.check(oracle, build_mini_bake_concept.OUTPUT, 1) == 0, capsys.readouterr().out
    assert build_mini_qaedit.check(oracle, build_mini_qaedit.OUTPUT, 1) == 0, capsys.readouterr().out
    assert build_mini_knowgic.check(oracle, build_mini_knowgic.OUTPUT, 1) == 0, capsys.readouterr().out
    assert build_mini_zsre.check(oracle, build_mini_zsre.OUTPUT, 1) == 0, capsys.readouterr().out
    for name in [name for name in sys.modules if name.startswith("build_mini_") or name in SHARED_MODULES]:
        sys.modules.pop(name, None)


def test_knowgic_chains_are_true_facts_that_the_demo_model_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is a fact of the table, with both measurements; no chain meets the new object."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import build_mini_knowgic as builder

    graph = builder.read_graph(builder.GRAPH)
    facts = {(graph.relations[fact.relation].prompt.replace("{}", fact.subject), fact.object) for fact in graph.facts}
    records = read("knowgic")
    assert len(records) >= 12 and max(len(chain["answers"]) for one in records for chain in one["chains"]) == 5
    for record in records:
        words = builder.wordings(record)
        assert {(statement, answer) for _, statement, answer in words} <= facts
        assert len(record["provenance"]["unedited"]) == len(words)
        assert len({len(chain["answers"]) for chain in record["chains"]}) >= builder.LEAST_LENGTHS
        rewrite = record["requested_rewrite"][0]
        new = rewrite["target_new"]["str"]
        assert new != rewrite["target_true"]["str"] and new not in {answer for _, _, answer in words}
    for name in ("build_mini_knowgic", *SHARED_MODULES):
        sys.modules.pop(name, None)


def test_a_check_reports_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from _mini_common import NLL_TOLERANCE, differences

    stored = {"forward": {"nll_true": 1.0, "first_token": "a"}, "neighbors": [{"nll_true": 2.0}], "nll": 3.0}
    near = {
        "forward": {"nll_true": 1.0 + NLL_TOLERANCE / 2, "first_token": "b"},
        **{k: stored[k] for k in ("neighbors", "nll")},
    }
    assert list(differences(stored, near)) == []
    far = {"forward": {"nll_true": 1.1, "first_token": "a"}, "neighbors": [], "nll": None}
    lines = list(differences(stored, far))
    fields = [line.split(":")[0] for line in lines]
    assert fields == ["provenance.forward.nll_true", "provenance.neighbors", "provenance.nll"]
