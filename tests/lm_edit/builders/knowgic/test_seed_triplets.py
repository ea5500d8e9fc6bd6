"""Seed triplets from MQuAKE's edits: the draw by hand, what is left out, the verb; and the template of such a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from graph_world import World
from paths import REAL_DATA, ROOT

from edit_hooks.utils.errors import EditingError
from lm_edit.builders.knowgic import seed_triplets
from lm_edit.builders.knowgic.graph import build_record
from lm_edit.builders.knowgic.growth import Grower, GrowthLimits
from lm_edit.builders.knowgic.seed_triplets import THINKEDIT_RELATIONS, SeedDraw, draw_seeds
from lm_edit.builders.knowgic.seeds import parse_seeds, read_seeds
from lm_eval_tasks.mquake.benchmark import MQUAKE

TEMPLATE = ROOT / "docs" / "templates" / "knowgic_seeds.json"
LABELS = {"P26": "spouse", "P108": "employer", "P19": "place of birth"}
WORDINGS = {
    "P26": ("{} is wed to", "Who is the partner of {}?"),
    "P108": ("{} works for", "For whom does {} work?"),
    "P19": ("{} was born in", "Where was {} born?"),
}


def fact(relation: str, subject: str, target: str, *others: str, wording: tuple[str, str] | None = None) -> Any:
    """A fact of a chain: question, cloze, answer, other names, and its triples."""
    cloze, question = (text.replace("{}", subject) for text in wording or WORDINGS[relation])
    return {"question": question, "cloze": cloze, "answer": target, "answer_alias": list(others)}, [
        subject, relation, target,
    ]  # fmt: skip


def record(
    relation: str,
    subject: str,
    true: str,
    new: str,
    *others: str,
    wording: tuple[str, str] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A record with one edit, whose fact is the whole chain."""
    old, triple = fact(relation, subject, true, *others, wording=wording)
    after, new_triple = fact(relation, subject, new, wording=wording)
    labeled = [[[one[0], LABELS[one[1]], one[2]]] for one in (triple, new_triple)]
    rewrite = {
        "prompt": (wording or WORDINGS[relation])[0], "relation_id": relation, "subject": subject,
        "target_new": {"str": new}, "target_true": {"str": true},
    }  # fmt: skip
    return {
        "requested_rewrite": [rewrite], "questions": ["Which one?"], "answer": true, "new_answer": new,
        "single_hops": [old], "new_single_hops": [after],
        "orig": {
            "triples": [triple], "new_triples": [new_triple],
            "triples_labeled": labeled[0], "new_triples_labeled": labeled[1],
        },
    }  # fmt: skip


def load(folder: Path, *records: dict[str, Any]) -> Any:
    path = folder / "mquake.jsonl"
    lines = [json.dumps({"case_id": 100 + number, **one}) for number, one in enumerate(records)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return MQUAKE.load({"data": str(path)}).records


def draw(folder: Path, *records: dict[str, Any], number: int = 9, wanted: Any = None, seed: int = 0) -> SeedDraw:
    return draw_seeds(load(folder, *records), number, wanted, seed)


def test_an_edit_becomes_a_seed_with_question_statement_and_other_names(tmp_path: Path) -> None:
    """Codes of up to three characters are left out: "IN" is also a common word."""
    drawn = draw(tmp_path, record("P108", "Ada Moss", "Brindle India", "Fenwick", "IN", "Brindle"))
    assert drawn.content() == {
        "seeds": [["Ada Moss", "employer", "Brindle India", "Fenwick"]],
        "relations": {"employer": {"prompt": "{} works for", "question": "For whom does {} work?"}},
        "aliases": {"Brindle India": ["Brindle"]},
    }
    assert drawn.candidates[0].source_id == "100" and drawn.available == {"employer": 1} and not drawn.left_out
    seeds = parse_seeds(drawn.content() | {"provenance": {"seed": 0}}, "test")
    assert seeds.edits == [drawn.candidates[0].edit]


def test_a_second_edit_has_its_question_from_the_new_chain_and_names_from_other_records(tmp_path: Path) -> None:
    """Edits: Ada works for Fenwick, and Fenwick was born in Oak. The old chain goes on from Brindle."""
    (old, a), (new, b) = fact("P108", "Ada", "Brindle"), fact("P108", "Ada", "Fenwick")
    (old_end, c), (new_end, d) = fact("P19", "Brindle", "Ur"), fact("P19", "Fenwick", "Oak")
    rewrites = [
        {"prompt": WORDINGS[one][0], "relation_id": one, "subject": subject, "target_new": {"str": to},
         "target_true": {"str": true}}
        for one, subject, true, to in (("P108", "Ada", "Brindle", "Fenwick"), ("P19", "Fenwick", "Elmton", "Oak"))
    ]  # fmt: skip
    both = {
        "requested_rewrite": rewrites, "questions": ["Which one?"], "answer": "Ur", "new_answer": "Oak",
        "single_hops": [old, old_end], "new_single_hops": [new, new_end],
        "orig": {"triples": [a, c], "new_triples": [b, d]},
    }  # fmt: skip
    elsewhere = record("P19", "Fenwick", "Elmton", "Pine", "Elmton Town")
    drawn = draw(tmp_path, both, elsewhere, wanted=["P19"])
    assert drawn.content()["seeds"] == [["Fenwick", "place of birth", "Elmton", "Oak"]]
    assert drawn.content()["aliases"] == {"Elmton": ["Elmton Town"]}
    assert drawn.left_out == {seed_triplets.REPEATED: 1}


def test_what_cannot_be_a_seed_is_counted_with_its_reason(tmp_path: Path) -> None:
    other = ("{} has the employer", "Who pays {}?")
    asked = record("P108", "Gus", "Dale", "Fenwick")
    asked["single_hops"][0]["cloze"] = asked["new_single_hops"][0]["cloze"] = "Another text"
    drawn = draw(
        tmp_path,
        record("P108", "Ada", "Brindle", "Fenwick"),
        record("P108", "Bo", "Brindle", "Fenwick"),
        record("P108", "Cyd", "Dale", "Fenwick", wording=other),
        record("P108", "Ada", "Brindle", "Carver"),
        record("P108", "Brindle Junior", "Brindle", "Fenwick"),
        record("P108", "Jon", "work", "Fenwick"),
        record("P108", "Dan", "Brindle", "the Brindle Group", "Brindle Group"),
        record("P108", "Eve {x}", "Brindle", "Fenwick"),
        record("P108", "Fay", "Dale", "Carver", wording=("{} works for", "For whom?")),
        asked,
        record("P26", "Ada", "Brindle", "Fenwick"),
        record("P19", "Hal", "Oak", "Elm"),
        wanted=["employer", "P26"],
    )
    seeds = [row[0] for row in drawn.content()["seeds"]]
    assert sorted(seeds[:2]) == ["Ada", "Bo"] and len(seeds) == 2
    assert drawn.left_out == {
        seed_triplets.OTHER_WORDING: 1, seed_triplets.REPEATED: 1, seed_triplets.HAS_OBJECT: 1,
        seed_triplets.SAME_OBJECT: 1, seed_triplets.UNUSABLE: 1, seed_triplets.NO_TEMPLATE: 1,
        seed_triplets.NO_QUESTION: 1, seed_triplets.SECOND_LINK: 1, seed_triplets.GIVEN_AWAY: 1,
    }  # fmt: skip
    assert drawn.available == {"employer": 2, "spouse": 1} and list(drawn.relations) == ["employer"]


def test_a_place_in_the_draw_depends_on_the_triplet_and_the_seed_alone(tmp_path: Path) -> None:
    names = [f"Person {letter}" for letter in "ABCDEFGHIJ"]
    records = [record("P108", name, f"Firm {name[-1]}", "Fenwick") for name in names]
    records += [record("P26", name, f"Partner {name[-1]}", "Fenwick") for name in names]

    def drawn(seed: int, some: list[dict[str, Any]], number: int = 2) -> list[list[str]]:
        return draw(tmp_path, *some, number=number, seed=seed).content()["seeds"]

    first = drawn(0, records)
    assert [row[1] for row in first] == ["spouse", "spouse", "employer", "employer"]  # in the order of the paper
    assert drawn(0, records[::-1]) == first and len({json.dumps(drawn(seed, records)) for seed in range(6)}) > 3
    assert [row for row in drawn(0, records, 3) if row in first] == first
    taken = {row[0] for row in first if row[1] == "employer"}
    fewer = [one for one in records if one["requested_rewrite"][0]["subject"] in taken]
    assert sorted(row for row in drawn(0, fewer) if row[1] == "employer") == sorted(first[2:])


def test_default_relations_are_those_of_the_paper_that_the_records_have(tmp_path: Path) -> None:
    drawn = draw(tmp_path, record("P26", "Ada", "Bo", "Cyd"), record("P19", "Hal", "Oak", "Elm"))
    assert list(drawn.relations) == ["spouse"]
    assert drawn.absent == [identity for identity in THINKEDIT_RELATIONS if identity != "P26"]
    with pytest.raises(EditingError, match=r"no edit of the relations P27, .*--relations: P19 \(place of birth\)"):
        draw(tmp_path, record("P19", "Hal", "Oak", "Elm"))
    with pytest.raises(EditingError, match=r"no edit has the relation 'spuose'. Did you mean 'spouse'"):
        draw(tmp_path, record("P26", "Ada", "Bo", "Cyd"), wanted=["spuose"])


def test_a_relation_without_a_label_has_its_id(tmp_path: Path) -> None:
    bare = record("P26", "Ada", "Bo", "Cyd")
    bare["orig"] = {name: bare["orig"][name] for name in ("triples", "new_triples")}
    assert draw(tmp_path, bare).content()["seeds"] == [["Ada", "P26", "Bo", "Cyd"]]
    wrong = record("P26", "Ada", "Bo", "Cyd")
    wrong["orig"] |= {"triples_labeled": [], "new_triples_labeled": "none"}
    assert draw(tmp_path, wrong).content()["seeds"] == [["Ada", "P26", "Bo", "Cyd"]]


def test_the_verb_writes_a_file_that_grow_graph_reads(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "seeds.json"
    assert run_verb(["build-seeds", "--out", str(out), "--per-relation", "4"]) == 0
    printed = capsys.readouterr().out
    assert "P495: 3 of 3 edits, 4 wanted" in printed and "without an edit: P40, P170" in printed
    seeds = read_seeds(out)
    assert len(seeds.edits) == 11 and set(seeds.relations) == {"P27", "P495", "P176"}
    provenance = json.loads(out.read_text(encoding="utf-8"))["provenance"]
    assert provenance["records"]["data"] == "mini" and len(provenance["source_ids"]) == 11
    first = out.read_bytes()
    assert run_verb(["build-seeds", "--out", str(out), "--per-relation", "4"]) == 2  # it exists
    assert run_verb(["build-seeds", "--out", str(out), "--per-relation", "4", "--overwrite"]) == 0
    assert out.read_bytes() == first
    assert run_verb(["build-seeds", "--out", str(tmp_path / "no.json"), "--relations", "P77"]) == 2
    assert "no edit has the relation 'P77'" in capsys.readouterr().err and not (tmp_path / "no.json").exists()


@pytest.mark.realdata
def test_published_records_have_the_question_templates_of_the_paper() -> None:
    path = REAL_DATA / "mquake" / "mquake_cf_hard_first200_4hop.json"
    if not path.exists():
        pytest.skip("the published records are not here")
    drawn = draw_seeds(MQUAKE.load({"data": str(path)}).records, 2)
    assert drawn.relations["country of citizenship"].question == "What is the country of citizenship of {}?"
    assert drawn.relations["spouse"].question == "Who is {} married to?"
    assert len(drawn.candidates) == 18 and drawn.absent == ["P937"]
    parse_seeds(drawn.content(), "the drawn seeds")


def test_the_template_is_read_and_grows(tmp_path: Path) -> None:
    """A scripted model that knows the given triplets, and one further fact, which closes a chain."""
    content = json.loads(TEMPLATE.read_text(encoding="utf-8"))
    seeds = read_seeds(TEMPLATE)
    assert len(seeds.edits) == len(content["seeds"]) >= 3 and seeds.facts and seeds.aliases
    edit = seeds.edits[0].fact
    further = ["Elsinore", "described by", edit.object]
    known = {
        seeds.relations[fact.relation].question.replace("{}", fact.subject): fact.object
        for fact in seeds.triplets
        if fact.relation in seeds.relations
    }

    def answer(question: str) -> str | None:
        named = [fact.object for fact in seeds.facts if fact.subject in question]
        return known.get(question) or (" ".join([*named, edit.object, "Elsinore"]))

    world = World({
        "question": answer,
        "reasoning": lambda question: f"{edit.subject} is set in Elsinore.",
        "extraction": lambda sentence: json.dumps([[edit.subject, "set in", "Elsinore"], further]),
    })  # fmt: skip
    grower = Grower(seeds, world.ask, GrowthLimits(rounds=1))
    growth = grower.grow()
    assert [one.fact for one in growth.facts[: len(seeds.triplets)]] == seeds.triplets
    graph = grower.graph()
    assert {fact.relation for fact in graph.facts} >= {"set in", "described by"}
    record = build_record(graph, graph.edits[0], 0)
    assert record["requested_rewrite"][0]["prompt"] == content["relations"]["author"]["prompt"]
    assert [chain["answers"] for chain in record["chains"]] == [[edit.object], ["Elsinore", edit.object]]
