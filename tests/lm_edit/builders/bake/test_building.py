"""``lm-edit build-bake``: records as the papers construct them, the model's part in it, and errors."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import printed_lines, run_verb
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from edit_hooks.lm.model import EditedHFLM
from lm_edit.builders.bake.building import (
    NO_NEIGHBOR,
    NO_NEW_OBJECT,
    FactTable,
    RelationTemplates,
    build_records,
    read_fact_table,
)
from lm_edit.builders.facts import Fact
from lm_edit.builders.known_facts import Choice, Known, ask
from lm_eval_tasks.bake.benchmark import BAKE_J, BAKE_QJ

EXAMPLE = ROOT / "docs" / "templates" / "bake_facts.json"
# Towers have one mayor each; several towns share a river.
TABLE: dict[str, Any] = {
    "relations": {
        "mayor": {
            "prompts": ["{} is the mayor of", "Who says {}? The mayor of", "{}, mayor of"],
            "reverse": ["The mayor of {} is"],
            "judge": "Whether the mayor of {object} is {subject}?",
        },
        "twin": {"prompts": ["{} is a twin of"]},
    },
    "facts": [
        ["Ada", "mayor", "Elm"],
        ["Bo", "mayor", "Fir"],
        ["Cy", "mayor", "Gum"],
        ["Di", "mayor", "Gum"],
        ["Oak", "twin", "Elm"],
        ["Yew", "twin", "Elm"],
        ["Ash", "twin", "Fir"],
    ],
}


def write(tmp_path: Path, table: Any) -> str:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    return str(path)


def table_of(tmp_path: Path, **changes: Any) -> FactTable:
    return read_fact_table(write(tmp_path, TABLE | changes))


def test_records_are_those_of_the_papers(tmp_path: Path) -> None:
    """Worked by hand: an object with two mayors is no new object, and a fact without a twin has no locality prompt."""
    built = build_records(table_of(tmp_path), "qa", relations=["mayor"])
    by_subject = {record["requested_rewrite"]["subject"]: record for record in built.records}
    ada = by_subject["Ada"]
    assert ada["requested_rewrite"]["target_true"] == {"str": "Elm"}
    assert ada["requested_rewrite"]["target_new"] == {"str": "Fir"}  # Gum has two mayors
    assert sorted(ada["neighborhood_prompts"]) == ["Oak is a twin of", "Yew is a twin of"]
    assert ada["reverse_qa"] == {
        "prompt": "The mayor of Fir is", "target_new": {"str": "Ada"}, "target_true": {"str": "Bo"}
    }  # fmt: skip
    assert ada["reverse_judge"] == {
        "prompt": "Whether the mayor of Fir is Ada?", "target_new": {"str": "yes"}, "target_true": {"str": "no"}
    }  # fmt: skip
    prompts = [ada["requested_rewrite"]["prompt"].replace("{}", "Ada"), *ada["paraphrase_prompts"]]
    assert sorted(prompts) == ["Ada is the mayor of", "Ada, mayor of", "Who says Ada? The mayor of"]
    assert len(by_subject["Bo"]["neighborhood_prompts"]) == 1


def test_the_judge_form_takes_objects_with_several_subjects_and_asks_no_reverse_question(tmp_path: Path) -> None:
    table = table_of(tmp_path, facts=[*TABLE["facts"], ["Fay", "twin", "Gum"]])
    built = build_records(table, "judge", relations=["mayor"])
    assert len(built.records) == 4 and not any("reverse_qa" in record for record in built.records)
    new = {record["requested_rewrite"]["target_new"]["str"] for seed in range(20) for record in build_records(
        table, "judge", relations=["mayor"], seed=seed
    ).records}  # fmt: skip
    assert new == {"Elm", "Fir", "Gum"}


def test_an_object_that_the_subject_has_anyway_is_no_new_one(tmp_path: Path) -> None:
    facts = [["Ada", "mayor", "Elm"], ["Ada", "mayor", "Fir"], ["Bo", "mayor", "Fir"], ["Oak", "twin", "Elm"]]
    built = build_records(table_of(tmp_path, facts=facts), "judge", relations=["mayor"])
    assert (Fact("Ada", "mayor", "Elm"), NO_NEW_OBJECT) in built.left_out


def test_the_subject_itself_is_no_new_object(tmp_path: Path) -> None:
    """A symmetric relation with both directions in the table: "Ada is the twin of" was edited to Ada."""
    pairs = [("Ada", "Bo"), ("Cy", "Di"), ("Eve", "Fay"), ("Gus", "Hal")]
    facts = [[a, "mayor", b] for pair in pairs for a, b in (pair, pair[::-1])]
    facts += [[f"Oak {number}", "twin", fact[0]] for number, fact in enumerate(facts)]
    table = table_of(tmp_path, facts=facts)
    for form, seed in itertools.product(("qa", "judge"), range(20)):
        built = build_records(table, form, relations=["mayor"], seed=seed)
        rewrites = [record["requested_rewrite"] for record in built.records]
        assert len(rewrites) == 8 and not any(one["target_new"]["str"] == one["subject"] for one in rewrites)
    alone = table_of(tmp_path, facts=[["Ada", "mayor", "Bo"], ["Bo", "mayor", "Ada"], ["Cy", "twin", "Bo"]])
    left_out = build_records(alone, "qa", relations=["mayor"]).left_out
    assert [reason for _, reason in left_out] == [NO_NEW_OBJECT, NO_NEW_OBJECT]


def test_a_neighbor_that_also_has_the_new_object_is_no_locality_prompt(tmp_path: Path) -> None:
    """For Bo and Cy, Fir is as true as Elm, so that either answer may be the likelier one."""
    both = [["Bo", "mayor", "Elm"], ["Bo", "mayor", "Fir"], ["Cy", "mayor", "Fir"], ["Cy", "mayor", "Elm"]]
    ada = Fact("Ada", "mayor", "Elm")
    built = build_records(table_of(tmp_path, facts=[list(ada), *both]), "judge", relations=["mayor"])
    assert (ada, NO_NEIGHBOR) in built.left_out and not built.records
    # the other ones stay, also a fact of another relation about a subject that has both objects
    facts = [list(ada), *both, ["Di", "mayor", "Elm"], ["Cy", "twin", "Elm"]]
    built = build_records(table_of(tmp_path, facts=facts), "judge", relations=["mayor"])
    (neighbors,) = (r["neighborhood_prompts"] for r in built.records if r["requested_rewrite"]["subject"] == "Ada")
    assert len(neighbors) == 2 and "Cy is a twin of" in neighbors and any("Di" in prompt for prompt in neighbors)


def test_an_edit_without_a_locality_prompt_is_left_out(tmp_path: Path) -> None:
    facts = [["Ada", "mayor", "Elm"], ["Bo", "mayor", "Fir"], ["Oak", "twin", "Elm"]]
    built = build_records(table_of(tmp_path, facts=facts), "qa", relations=["mayor"])
    assert built.left_out == [(Fact("Bo", "mayor", "Fir"), NO_NEIGHBOR)] and len(built.records) == 1


NAMES = st.sampled_from(["Ada", "Bo", "{}", "{subject}", "{object}", "Elm", "the Elm tower", "Ünal", "a\\b"])


@given(
    facts=st.lists(st.tuples(NAMES, st.sampled_from(["r", "q"]), NAMES), min_size=1, max_size=14, unique=True),
    form=st.sampled_from(["qa", "judge"]),
    seed=st.integers(0, 3),
    most=st.integers(1, 3),
)
def test_properties_of_all_records(facts: Any, form: str, seed: int, most: int) -> None:
    wordings = {
        name: RelationTemplates((f"{name} of {{}} is", f"{{}} has {name}", f"{{}}: {name}?"), (f"{{}} is {name} of",),
                      f"Whether {{object}} is {name} of {{subject}}?")
        for name in ("r", "q")
    }  # fmt: skip
    table = FactTable(wordings, [Fact(*fact) for fact in facts])
    built = build_records(table, form, num_paraphrases=most, max_neighbors=most, seed=seed)
    assert built.records == build_records(table, form, num_paraphrases=most, max_neighbors=most, seed=seed).records
    assert len(built.records) + len(built.left_out) == len(facts)
    known = set(table.facts)
    for record in built.records:
        rewrite = record["requested_rewrite"]
        subject, new, true = rewrite["subject"], rewrite["target_new"]["str"], rewrite["target_true"]["str"]
        assert Fact(subject, record["relation"], true) in known and Fact(subject, record["relation"], new) not in known
        assert new != subject
        assert rewrite["prompt"].count("{}") == 1 and rewrite["prompt"] in wordings[record["relation"]].prompts
        texts = [rewrite["prompt"].replace("{}", subject), *record["paraphrase_prompts"]]
        assert len(set(texts)) == len(texts) == 1 + min(most, 2) and all(subject in text for text in texts)
        assert 1 <= len(record["neighborhood_prompts"]) <= most
        for prompt in record["neighborhood_prompts"]:
            assert not re.search(rf"(?<!\w)({re.escape(true)}|{re.escape(subject)})(?!\w)", prompt)
            stated = (
                one for one in known for text in wordings[one.relation].prompts
                if text.replace("{}", one.subject, 1) == prompt
            )  # fmt: skip
            assert any(one.object == true and one._replace(object=new) not in known for one in stated)
        assert record["reverse_judge"]["prompt"] == f"Whether {new} is {record['relation']} of {subject}?"
        if form == "qa":
            original = record["reverse_qa"]["target_true"]["str"]
            having = [fact.subject for fact in table.facts if fact[1:] == (record["relation"], new)]
            assert having == [original] != [subject]


def test_what_is_drawn_does_not_depend_on_which_other_facts_are_edited(tmp_path: Path) -> None:
    table = read_fact_table(EXAMPLE)
    every = {str(r["requested_rewrite"]): r for r in build_records(table, "qa", relations=["capital_of"]).records}
    few = build_records(table, "qa", relations=["capital_of"], per_relation=4).records
    assert len(few) == 4 and all(every[str(r["requested_rewrite"])] | {"case_id": r["case_id"]} == r for r in few)
    others = build_records(table, "qa", relations=["capital_of"], seed=1).records
    assert [r["requested_rewrite"] for r in others] != [r["requested_rewrite"] for r in every.values()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"facts": [["Ada", "mayor", "Elm"], ["Ada", "mayor", "Elm"]]}, r"'facts' has \['Ada', 'mayor', 'Elm'\] twice"),
        ({"facts": [["Ada", "major", "Elm"]]}, "has the relation 'major'. Did you mean 'mayor'"),
        ({"facts": [["Ada", "mayor", " "]]}, "three texts are needed"),
        ({"relations": {"mayor": {"prompts": ["{} is mayor of {}"]}}}, "words and one {} are needed"),
        ({"relations": {"mayor": {"prompts": ["{}"]}}}, "words and one {} are needed"),
        ({"relations": {"mayor": {"prompts": ["{} is"], "judge": "Is it {subject}?"}}}, "{object} and {subject}"),
        ({"relations": {"mayor": {"prompts": ["{} is"], "judge": "Is {object} {subject}?"}}}, "begins with 'Whether '"),
        ({"relations": {"mayor": {"prompts": ["{} is"], "revers": ["x {}"]}}}, "Did you mean 'reverse'"),
        ({"relations": {}}, "must be an object of named entries"),
        ({"relations": {"mayor": []}}, "must be an object with prompts"),
    ],
)
def test_a_bad_table_is_one_error_before_any_work(changes: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    assert run_verb(["build-bake", write(tmp_path, TABLE | changes), "--out", str(out)]) == 2
    assert re.search(re.escape(message) if "\\" not in message else message, capsys.readouterr().err)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "relation 'twin' needs two prompts"),
        (["--relations", "mayor", "twin"], "relation 'twin' needs two prompts"),
        (["--relations", "majors"], "there is no relation 'majors'. Did you mean 'mayor'"),
    ],
)
def test_a_relation_that_cannot_be_edited_is_named(
    options: list[str], message: str, tmp_path: Path, capsys: Any
) -> None:
    words = ["build-bake", write(tmp_path, TABLE), "--filter", "none", "--out", str(tmp_path / "out.json"), *options]
    assert run_verb(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("form", "benchmark"), [("qa", BAKE_QJ), ("judge", BAKE_J)])
def test_the_verb_writes_records_that_the_benchmark_reads(
    form: str, benchmark: Any, tiny_path: Any, tmp_path: Path, capsys: Any
) -> None:
    """A random model knows some of the facts by chance; every fact is a record or has a reason."""
    out = tmp_path / "bake.json"
    model = ["--pretrained", str(tiny_path("llama")), "--device", "cpu"]
    words = ["build-bake", str(EXAMPLE), "--relations", "capital_of", "--form", form, "--out", str(out), *model]
    assert run_verb(words) == 0
    printed = printed_lines(capsys)
    loaded = benchmark.load({"data": str(out)})
    records = json.loads(out.read_text(encoding="utf-8"))
    assert "facts: 40" in printed and f"edits: {len(records)}, of 1 relations" in printed
    assert loaded.source["unknown_fields"] == {} if "unknown_fields" in loaded.source else True
    assert 0 < len(loaded.records) < 10 and [record["case_id"] for record in records] == list(range(len(records)))
    lm = EditedHFLM(pretrained=str(tiny_path("llama")), device="cpu", mode="none", store="off")
    for record, case in zip(records, loaded.records, strict=True):
        question = case.reverse_qa if form == "qa" else case.reverse_judge
        (known,) = ask(lm, [Choice(question.prompt, question.other, question.wanted)])
        measured = record["provenance"]
        assert known.passes("prob") and measured["seed"] == 0 and measured["filter"] == "prob"
        assert (measured["nll_original"], measured["nll_desired"]) == (
            round(known.nll_original, 4), round(known.nll_desired, 4)
        )  # fmt: skip
        assert measured["weights"] == lm.identity.weights
    assert any("the model does not prefer the original answer" in line for line in printed)


def test_without_a_filter_no_model_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("edit_hooks.lm.model.EditedHFLM.__init__", lambda *args, **kwargs: pytest.fail("loaded"))
    out = tmp_path / "bake.json"
    words = ["build-bake", str(EXAMPLE), "--relations", "capital_of", "--filter", "none", "--out", str(out)]
    assert run_verb(words) == 0 and len(json.loads(out.read_text())) == 10
    assert run_verb(words) == 2  # exists


def test_a_table_without_a_record_replaces_nothing(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "bake.json"
    out.write_text("[1]", encoding="utf-8")
    facts = write(tmp_path, TABLE | {"facts": [["Ada", "mayor", "Elm"]]})
    words = ["build-bake", facts, "--relations", "mayor", "--filter", "none", "--out", str(out), "--overwrite"]
    assert run_verb(words) == 2 and out.read_text(encoding="utf-8") == "[1]"
    printed = capsys.readouterr()
    assert "no record is left; nothing is written" in printed.err and "Ada" in printed.out


def test_answers_are_means_per_token_of_a_plain_forward_pass(tiny_path: Any) -> None:
    lm = EditedHFLM(pretrained=str(tiny_path("gpt2")), device="cpu", mode="none", store="off")
    choice = Choice("The mayor of Elm is", "Ada Long Name", "Bo")
    too_long = Choice("a " * 2000, "Ada", "Bo")
    known, none = ask(lm, [choice, too_long])
    assert none is None and known is not None
    for answer, nll in (("Ada Long Name", known.nll_original), ("Bo", known.nll_desired)):
        prompt, whole = (lm.tokenizer(text)["input_ids"] for text in (choice.prompt, f"{choice.prompt} {answer}"))
        with torch.no_grad():
            logprobs = lm.model(torch.tensor([whole])).logits[0].log_softmax(-1)
        rows = [float(logprobs[at - 1, whole[at]]) for at in range(len(prompt), len(whole))]
        assert nll == pytest.approx(-math.fsum(rows) / len(rows), abs=1e-5)  # sums of float32 in another order


def test_the_rules_are_strict() -> None:
    assert not Known(1.0, 1.0, True).passes("prob")  # a tie, as in the filter of the scores
    assert Known(1.0, 2.0, False).passes("prob") and not Known(1.0, 2.0, False).passes("argmax")
    assert Known(1.0, 2.0, True).passes("argmax") and not Known(2.0, 1.0, True).passes("argmax")
