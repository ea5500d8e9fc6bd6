"""MQuAKE by hand: records of both layouts, chains of facts, wordings, demonstrations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import REAL_DATA, RECORDS
from record_files import write_jsonl
from scripted import ScriptedLM
from task_managers import task_manager
from task_runs import build, metrics_of, run

from edit_hooks.answers import EditedAnswer, FailedAnswer
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import read_rows
from lm_eval_tasks.common.records.benchmark import load_edit_requests
from lm_eval_tasks.mquake.benchmark import MQUAKE
from lm_eval_tasks.mquake.demonstrations import find_demonstrations
from lm_eval_tasks.mquake.multi_hop import MATCHES, equals, final_answer

FILE = RECORDS / "mquake.jsonl"
REAL = REAL_DATA / "mquake"
EDIT_WISE, INSTANCE_WISE = "mquake_edit_wise", "mquake_instance_wise"
DIRECT, THOUGHTS = "mquake_multi_hop", "mquake_multi_hop_cot"
INSTANCE, ANSWER, THOUGHT = "instance_wise", "multi_hop", "multi_hop_cot"  # columns of the last three


def records() -> list[dict[str, Any]]:
    return [record for _, record in read_rows(FILE)]


def load(record: dict[str, Any], folder: Path) -> Any:
    path = folder / "mquake.jsonl"
    path.write_text(json.dumps(record), encoding="utf-8")
    return MQUAKE.load({"data": str(path)})


# ------------------------------------------------------------------------- records


def test_both_layouts_have_the_same_cases() -> None:
    """Record 4 (flattened) and record 0 (nested) have the fields of a case; the edits of a case are a group."""
    loaded = MQUAKE.load({"data": str(FILE)})
    nested, flat = loaded.records[0], loaded.records[4]
    assert nested.requests == (
        EditRequest(
            prompt="The country in which {} can be found is",
            subject="Harrow Tower",
            target_new="Tarvia",
            target_true="Ostrel",
            case_id="0",
            relation_id="P17",
        ),
    )
    assert (flat.request.target_new, flat.request.target_true) == ("Tarvia", "Marn")
    assert len(nested.wordings) == 2  # the blank one is dropped
    assert [hop.edited for hop in loaded.records[2].hops] == [False, True, False]
    assert [hop.relation_id for hop in loaded.records[5].hops] == ["P50", "P27", "P36"]
    assert loaded.records[7].answers == ["New Quill", "Elna Bay"]  # the blank alias is dropped
    assert loaded.records[6].old_answers == ["Saint Ola", "Ola"]  # answer_extended of MQuAKE-T
    assert flat.extras["split_100"] == "edited+extra" and flat.extras["split_1000"] == "(none)"
    assert [len(group) for group in load_edit_requests("mquake", {"data": str(FILE)}).cases] == [1, 2, 1, 3, 1, 3, 1, 2]


def test_odd_records_are_counted() -> None:
    """Three prompts have two answers; case 5 has the capital Quill before and after its edits."""
    source = MQUAKE.load({"data": str(FILE)}).source
    wanted: dict[tuple[str, str], set[str]] = {}
    for record in records():
        for edit in record["requested_rewrite"]:
            target = edit.get("target_new_str") or edit["target_new"]["str"]
            wanted.setdefault((edit["prompt"], edit["subject"]), set()).add(target)
    # Harrow Tower: Tarvia, Marn; Low Bridge: Ostrel, Tarvia; Ada Brenn: Marn, Tarvia.
    assert sorted(subject for (_, subject), targets in wanted.items() if len(targets) > 1) == [
        "Ada Brenn",
        "Harrow Tower",
        "Low Bridge",
    ]
    assert (source["edits"], source["distinct_edit_prompts"], source["edit_prompts_in_conflict"]) == (
        14,
        len(wanted),
        3,
    )
    assert source["cases_in_conflict"] == 8  # every case edits one of the three
    assert (source["not_three_questions"], source["new_answer_is_old"], source["edits_outside_the_chain"]) == (1, 1, 0)
    assert [source[f"cases_of_{number}_edits"] for number in (1, 2, 3)] == [4, 2, 2]


def test_targets_that_the_stop_of_the_edit_wise_answers_cuts_are_counted(tmp_path: Path) -> None:
    """A final period is no inner one."""
    changed = records()[:3]
    for record, target in zip(changed, ("George W. Quill", "Marn.", "Marn"), strict=True):
        record["requested_rewrite"][0]["target_new"] = {"str": target}
    path = write_jsonl(tmp_path / "mquake.jsonl", changed)
    assert MQUAKE.load({"data": str(path)}).source["targets_with_inner_period"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"questions": [" "]}, "field 'questions' has no question"),
        ({"requested_rewrite": []}, "non-empty list of objects"),
        ({"new_answer": ""}, "field 'new_answer' is empty"),
        ({"new_answer_alias": "Elna"}, "a list of texts is needed"),
        ({"split": ["edited"]}, "field 'split' is no object"),
        ({"split": {"1": [1]}}, "field 'split.1' is neither a label nor"),
        ({"orig": {"triples": [], "new_triples": []}}, "is no list of 2 triples of texts"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        load(records()[0] | change, tmp_path)


def test_a_record_without_triples_has_no_relations(tmp_path: Path) -> None:
    record = {key: value for key, value in records()[0].items() if key != "orig"}
    assert [hop.relation_id for hop in load(record, tmp_path).records[0].hops] == ["", ""]


@pytest.mark.skipif(not REAL.is_dir(), reason="published records are not available")
def test_published_records_and_demonstrations_are_read() -> None:
    data = {"data": str(REAL / "mquake_cf_hard_first200_4hop.json")}
    loaded = MQUAKE.load(data)
    assert (loaded.source["records"], loaded.source["edits"], loaded.source["cases_of_4_edits"]) == (200, 800, 200)
    assert (loaded.source["edits_outside_the_chain"], loaded.source["edit_prompts_in_conflict"]) == (0, 0)
    assert loaded.source["targets_with_inner_period"] == 7
    assert "unknown_fields" not in loaded.source
    manager = task_manager(data | {"demonstrations": str(REAL)})
    doc = manager.load([DIRECT])["tasks"][DIRECT].test_docs()[0]
    prompt = doc["probes"][0]["prompt"]
    assert prompt.count("Q: ") == 17 and prompt.endswith(" A:") and "Dodge Ram SRT-10 created by? Dodge\n" in prompt
    shown = find_demonstrations({"demonstrations": str(REAL)})
    assert len(shown.of_relations) == 37
    assert {lines.count("Q: ") for lines in shown.of_relations.values()} == {8}
    thoughts = shown.thought_prompt("Who?")
    assert thoughts.count("Question: ") == 6 and thoughts.endswith("General Motors\n\nQuestion: Who?\nThoughts:")


# ---------------------------------------------------------------------- comparison


@pytest.mark.parametrize(
    ("answer", "accepted", "right"),
    [
        (" Port  Elna.", ["port elna"], True),
        ("Washington, D.C.", ["Washington, D.C."], True),
        ("D.C", ["D.C."], True),
        ("The Port Elna", ["Port Elna"], False),
        ("Port Elna, Ostrel", ["Port Elna"], False),
        ("", [""], False),
        (".", ["."], False),
        ("ELNA", ["Port Elna", "Elna"], True),
        ("罗马。", ["罗马"], True),
        ("रोम।", ["रोम"], True),
        ("罗马是", ["罗马"], False),
    ],
)
def test_exact_is_equality_up_to_case_spaces_and_a_final_period(answer: str, accepted: list[str], right: bool) -> None:
    assert equals(answer, accepted) == right


@pytest.mark.parametrize(
    ("answer", "accepted", "right"),
    [
        ("So it is Tarvia", ["Ostrel", "OL", "it"], True),  # the case of the alias
        ("It is in Tarvia", ["Ostrel", "OL", "IT", "IN"], False),
        ("let us look", ["United States", "US", "U.S."], False),
        ("It is the U.S. of A.", ["United States", "US"], True),
        ("ostrelia", ["Ostrel"], False),  # whole words
        ("OSTREL", ["Ostrel"], True),
        ("in dc", ["DC"], True),  # the answer itself
        ("首都是罗马。", ["Rome", "罗马"], True),
        ("", ["", "IT"], False),
    ],
)
def test_short_aliases_are_contained_in_their_own_case_only(answer: str, accepted: list[str], right: bool) -> None:
    assert MATCHES["alias_contains"](answer, accepted) == right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" It is in Marn.\nAnswer: Quill\nQuestion", "Quill"),
        (" Answer: first\nAnswer:  second ", "second"),
        (" It is in Marn, so Quill", ""),
        (" x\nAnswer:", ""),
    ],
)
def test_the_answer_after_thoughts_is_the_line_of_the_last_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


# ------------------------------------------------------------------------ edit-wise


def test_edit_wise_is_the_mean_over_edits_then_over_cases() -> None:
    """Only new objects of countries' languages and capitals are not written: cases 1 and 7 have 1/2, 3 and 5 2/3."""

    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        num_tokens = len(continuation.split())
        hard = "language" in context or "capital" in context
        return -1.0 * num_tokens, [7 if hard else index for index in range(num_tokens)]

    def texts(context: str, unedited: bool) -> str:
        return " Tarvia. More" if "country" in context else " no"

    found = metrics_of(run(EDIT_WISE, ScriptedLM(likelihoods, texts)), EDIT_WISE)
    assert found["efficacy_argmax"] == pytest.approx((1 + 1 / 2 + 1 + 2 / 3 + 1 + 2 / 3 + 1 + 1 / 2) / 8)
    assert found["efficacy_prob"] == 0.0  # old and new objects are equally likely per token
    # Tarvia is wanted by case 0 (1 of 1), 3 (1 of 3), 4 (1 of 1) and 5 (1 of 3).
    assert found["efficacy_gen_alias_exact"] == pytest.approx((1 + 0 + 0 + 1 / 3 + 1 + 1 / 3 + 0 + 0) / 8)


# -------------------------------------------------------------------- instance-wise

FACTS = {
    "Which city is the capital of Tarvia?": "Sudden",
    "Which city is the capital of Marn?": "Quill",
    "Which city is the capital of Ostrel?": "Elna.",
    "Who wrote The Salt Road?": "Ada Brenn",
    "Who wrote Nine Lamps?": "It was Jo Marsh",
    "In which country is Harrow Tower?": "Ostrelia",
    "In which country is Low Bridge?": "Marn",
    "Which country did Ada Brenn come from?": "Ostrel",
    "Which country did Jo Marsh come from?": "Marn",
    "Which language is mainly spoken in Ostrel?": "Ostrish",
    "Which language is mainly spoken in Marn?": "Tarvic",
}


def knows(facts: dict[str, str]) -> Callable[[str, bool], str]:
    """Answers to the last question of a prompt."""

    def texts(context: str, unedited: bool) -> str:
        question = context.rpartition("Q: ")[2].removesuffix(" A:")
        return f" {facts[question]}\nQ: Who"

    return texts


def writes(*wrong: str) -> Callable[[str, str, bool], tuple[float, list[int]]]:
    """Every target is the argmax, but after prompts with one of these words."""

    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        num_tokens = len(continuation.split())
        missed = any(word in context for word in wrong)
        return -1.0, [99 if missed else index for index in range(num_tokens)]

    return likelihoods


def test_an_instance_needs_every_fact_of_its_chain() -> None:
    """Edited facts are written, but that of Low Bridge (cases 1 and 4).

    0: capital of Tarvia. 1: Low Bridge is missed. 2: The Salt Road and capital of Marn. 3, 5, 7: edits only.
    4: Low Bridge is missed. 6: no demonstrations of P999.
    Kept facts: case 0, 2 and 4 have such facts, all right; case 6 has one without demonstrations.
    Before the edits: 0: Ostrelia, Elna. 1: Marn, Tarvic for Marnish. 2: right. 3, 5: "It was Jo Marsh" is contained
    only, and 3 has the wrong language. 4: right. 6: P999. 7: right.
    """
    lm = ScriptedLM(writes("Low Bridge"), knows(FACTS))
    found = metrics_of(run(INSTANCE_WISE, lm), INSTANCE_WISE)
    prefix = "instance_wise"
    assert found[f"{prefix}_alias_exact"] == pytest.approx((1 + 0 + 1 + 1 + 0 + 1 + 1) / 7)
    assert (found[f"{prefix}_alias_exact_n"], found[f"{prefix}_alias_exact_failed"]) == (7, 1)
    assert found[f"{prefix}_kept_alias_exact"] == 1.0
    counts = [found[f"{prefix}_kept_alias_exact{ending}"] for ending in ("_n", "_excluded", "_failed")]
    assert counts == [3, 4, 1]
    assert found[f"{prefix}_old_alias_exact_unedited"] == pytest.approx((1 + 0 + 1 + 0 + 1 + 0 + 1) / 7)
    assert found[f"{prefix}_old_alias_contains_unedited"] == pytest.approx((1 + 0 + 1 + 0 + 1 + 1 + 1) / 7)
    assert "there are no demonstrations of relation P999" in found["unscored_reason"]
    prompts = [request.args[0] for request in lm.seen if request.request_type == "generate_until"]
    assert all(prompt.count("Q: ") == 9 for prompt in prompts)  # eight demonstrations
    cloze = [request.args for request in lm.seen if request.request_type == "loglikelihood"]
    assert cloze[0] == ("The country in which Harrow Tower can be found is", " Tarvia")


def test_one_wrong_kept_fact_fails_its_instance() -> None:
    facts = FACTS | {"Which city is the capital of Tarvia?": "It is Sudden"}
    found = metrics_of(run(INSTANCE_WISE, ScriptedLM(writes(), knows(facts))), INSTANCE_WISE)
    # Cases 0 and 4 have the kept fact; nothing else is wrong.
    assert found["instance_wise_alias_exact"] == pytest.approx((0 + 1 + 1 + 1 + 0 + 1 + 1) / 7)
    assert found["instance_wise_alias_contains"] == 1.0
    assert found["instance_wise_kept_alias_exact"] == pytest.approx((0 + 1 + 0) / 3)


class NoRoom(ScriptedLM):
    """Prompts that end with one of these texts do not fit the model."""

    def __init__(self, *without_answer: str, **script: Any) -> None:
        super().__init__(**script)
        self.without_answer = without_answer

    def _answer(self, request: Any, answer: Any) -> Any:
        if request.args[0].endswith(self.without_answer):
            return EditedAnswer(final=FailedAnswer("no room"))
        return super()._answer(request, answer)


def test_a_wrong_fact_decides_an_instance_whose_other_facts_have_no_answer() -> None:
    """Kept facts without an answer: the capital of Tarvia (cases 0, 4), that of Marn (case 2).

    The edited fact of Low Bridge is wrong: case 1 is wrong as before, case 4 (Low Bridge, capital of Tarvia) is wrong
    whatever its kept fact; 0 and 2 stay unscored, and 6 has no demonstrations. 3, 5 and 7 are right: 3 / (8 - 3).
    """
    without = ("capital of Tarvia? A:", "capital of Marn? A:")
    lm = NoRoom(*without, likelihoods=writes("Low Bridge"), texts=knows(FACTS))
    found = metrics_of(run(INSTANCE_WISE, lm, {"pre_edit": False}), INSTANCE_WISE)
    for name in ("alias_exact", "alias_contains"):
        counts = [found[f"{INSTANCE}_{name}{ending}"] for ending in ("", "_n", "_failed")]
        assert counts == [pytest.approx((0 + 1 + 0 + 1 + 1) / 5), 5, 3], name
    # The kept facts alone: in cases 0 and 4 nothing else is asked, in case 2 The Salt Road is right.
    assert found[f"{INSTANCE}_kept_alias_exact_n"] == 0 and "no room" in found["unscored_reason"]


# ------------------------------------------------------------------------ multi-hop


def test_one_right_wording_of_three_suffices() -> None:
    """The last wording of Harrow Tower and all about authors: Sudden (edited), Elna (unedited); else "in Elna".

    New answers: Sudden (0, 4), Tarvic (1), Quill (2, 5), Ostrish (3), Saint Bo (6), New Quill or Elna Bay (7).
    Old answers: Port Elna or Elna (0, 2, 7), Marnish (1, 3), Quill (4, 5), Saint Ola or Ola (6). Authors: 2, 3, 5.
    """

    def texts(context: str, unedited: bool) -> str:
        question = context.rpartition("Q: ")[2]
        if question.endswith(" that has Harrow Tower? A:") or "author" in question:
            return f" {'Elna' if unedited else 'SUDDEN.'}\nQ:"
        return " in Elna"

    found = metrics_of(run(DIRECT, ScriptedLM(texts=texts)), DIRECT)
    assert found[f"{ANSWER}_alias_exact"] == pytest.approx(1 / 8)  # 0, whose other wording says "in Elna"
    assert found[f"{ANSWER}_alias_contains"] == pytest.approx(1 / 8)
    assert found[f"{ANSWER}_old_alias_exact"] == 0.0
    assert found[f"{ANSWER}_old_alias_contains"] == pytest.approx((1 + 1) / 8)  # 0 and 7 in their first wordings
    assert found[f"{ANSWER}_old_alias_exact_unedited"] == pytest.approx((1 + 1 + 1) / 8)  # 0, 2 and 7
    assert "multi_hop_alias_exact_or_0" in found and "multi_hop_old_alias_exact_unedited_or_0" not in found


def test_any_wording_decides() -> None:
    """Case 4 in its second wording; case 0 contains the answer in its first."""

    def texts(context: str, unedited: bool) -> str:
        question = context.rpartition("Q: ")[2]
        return " Sudden" if "in which Low Bridge stands?" in question else " It is Sudden"

    found = metrics_of(run(DIRECT, ScriptedLM(texts=texts)), DIRECT)
    assert (found[f"{ANSWER}_alias_exact"], found[f"{ANSWER}_alias_contains"]) == (
        pytest.approx(1 / 8),
        pytest.approx(2 / 8),
    )


def test_thoughts_end_with_an_answer_or_are_wrong() -> None:
    def texts(context: str, unedited: bool) -> str:
        if context.endswith("the country of Harrow Tower?\nThoughts:"):
            return " It is in Tarvia. The capital is Sudden.\nAnswer: Sudden\n\nQuestion: Which"
        return " It is in Tarvia, so Sudden."

    lm = ScriptedLM(texts=texts)
    found = metrics_of(run(THOUGHTS, lm), THOUGHTS)
    assert found[f"{THOUGHT}_alias_exact"] == pytest.approx(1 / 8)  # case 4 wants Sudden, too, but gives no answer
    # Harrow Tower's first wording, in cases 0 (of two wordings), 6 and 7; the last two ask for something else
    asked = sum("the country of Harrow Tower?" in record["questions"][0] for record in records())
    assert asked == 3
    assert found[f"{THOUGHT}_answered"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 3) / 8)
    first = lm.seen[0]
    assert first.doc["asked"]["until"] == ["\n\n", "\nQuestion:"]
    assert first.args[1]["max_gen_toks"] == 200


def test_without_the_unedited_model_there_are_half_as_many_answers() -> None:
    lm = ScriptedLM()
    found = metrics_of(run(DIRECT, lm, {"pre_edit": False}), DIRECT)
    assert not [name for name in found if "unedited" in name]
    assert {request.doc["asked"]["model"] for request in lm.seen} == {"edited"}


def test_a_missing_answer_leaves_a_case_unscored_unless_another_wording_is_right() -> None:
    """Case 0: the edit failed, every answer is missing."""
    found = metrics_of(run(DIRECT, ScriptedLM(errors={"0": "no such layer"})), DIRECT)
    assert (found[f"{ANSWER}_alias_exact_n"], found[f"{ANSWER}_alias_exact_failed"]) == (7, 1)


# ------------------------------------------------------------------ demonstrations


def test_demonstrations_follow_the_data() -> None:
    assert find_demonstrations({"data": "mini"}).origin.startswith("own (")
    assert find_demonstrations({"data": str(FILE)}).origin.startswith("own (")
    assert "demonstrations" in build(DIRECT).test_docs()[0]
    for settings in ({"data": "hub"}, {"data": "hub:t"}, {"mquake_set": "t"}, {"pretrained": "x"}):
        with pytest.raises(EditingError, match=r"prompts/rel-prompts.json .* Or set demonstrations=own"):
            find_demonstrations(settings)


def test_demonstrations_are_checked(tmp_path: Path) -> None:
    with pytest.raises(EditingError, match="demonstrations"):
        find_demonstrations({"demonstrations": str(tmp_path / "absent")})
    for name in ("multihop-prompts.txt", "multihop-cot-prompts.txt"):
        (tmp_path / name).write_text("Q: Who? A: Me\n", encoding="utf-8")
    (tmp_path / "rel-prompts.json").write_text('{"P17": ["Q: Who? A: Me"]}', encoding="utf-8")
    with pytest.raises(EditingError, match="an object relation id -> lines"):
        find_demonstrations({"demonstrations": str(tmp_path)})


def test_no_demonstration_shows_a_fact_of_the_sample() -> None:
    """A subject of the embedded facts occurs in no demonstration of the relation."""
    shown = find_demonstrations({"demonstrations": "own"})
    assert all(lines.count("Q: ") == 8 for lines in shown.of_relations.values())
    assert (shown.questions.count("Q: "), shown.thoughts.count("Question: ")) == (16, 5)
    for case in MQUAKE.load({"data": "mini"}).records:
        for hop in (*case.hops, *case.old_hops):
            assert hop.question not in shown.of_relations[hop.relation_id]
            assert hop.question not in shown.questions
