"""Objects of other records: their source, the draw, and objects that would be the case's own."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.protocols.other_objects import OtherObjects, draw_other_objects


def case(subject: str, new: str, true: str | None, relation: str | None = None, prompt: str = "{} lies in") -> Case:
    return Case(
        EditRequest(prompt=prompt, subject=subject, target_new=new, target_true=true, relation_id=relation, case_id="0")
    )


def test_the_relation_comes_before_the_prompt_and_the_prompt_before_all_records() -> None:
    cases = [
        case("Velm", "Karsk", "Ostmark", "P17"),
        case("Tarn", "Lund", "Ostmark", "P17", prompt="{} is a town in"),
        case("Brenholt", "Inverra", "Sud", "P131"),
        case("Quorn", "curling", "rowing", "P641", prompt="{} plays"),
    ]
    drawn = draw_other_objects(cases, 1)
    assert [one.source for one in drawn] == ["relation", "relation", "template", "all records"]
    assert drawn[0].objects == ("Lund",)  # the only object of P17 that is neither Karsk nor Ostmark
    assert drawn[1].objects == ("Karsk",)
    assert drawn[2].objects[0] in ("Karsk", "Ostmark")  # "{} lies in" is the prompt of the first record only


def test_first_word_and_digits_count_in_questions_only() -> None:
    cases = [
        case("Velm", "Karsk", None, prompt="Who built {}?"),
        case("Tarn", "Orsa Lind", None, prompt="who painted the {} bridge"),
        case("Lund", "Louis 14", None, prompt="Who owned {}?"),
        case("Brenholt", "1911", None, prompt="When was {} built?"),
    ]
    drawn = draw_other_objects(cases, 1, questions=True)
    assert drawn[0] == OtherObjects(("Orsa Lind",), "first word")
    assert drawn[1] == OtherObjects(("Karsk",), "first word")
    assert drawn[2] == OtherObjects(("1911",), "digits")  # the other answers to who have none
    assert drawn[3] == OtherObjects(("Louis 14",), "digits")
    assert draw_other_objects(cases, 1)[0].source == "all records"


def test_no_object_is_the_cases_own_in_another_spelling_and_none_is_drawn_twice() -> None:
    cases = [case("Velm", "The Karsk", "ostmark."), case("Tarn", "karsk", "Ostmark"), case("Lund", "Sud", "Nord")]
    for seed in range(20):
        assert set(draw_other_objects(cases, 2, seed=seed)[0].objects) == {"Sud", "Nord"}


def test_signs_are_objects_too() -> None:
    cases = [case("Velm", ")", None), case("Tarn", "(", None)]
    assert [one.objects for one in draw_other_objects(cases, 1)] == [("(",), (")",)]


def test_too_few_objects_are_none_at_all() -> None:
    cases = [case("Velm", "Karsk", "Ostmark"), case("Tarn", "Karsk", "Sud")]
    assert draw_other_objects(cases, 2)[0] == OtherObjects()
    assert draw_other_objects(cases, 1)[0].objects == ("Sud",)


def test_the_draw_is_fixed_by_seed_and_edit_and_close_to_uniform() -> None:
    cases = [case(f"town {number}", f"land {number % 5}", "Ostmark") for number in range(500)]
    first = draw_other_objects(cases, 1)
    assert first == draw_other_objects(cases, 1) == draw_other_objects(cases[::-1], 1)[::-1]
    assert first != draw_other_objects(cases, 1, seed=1)
    counts = Counter(one.objects[0] for one in first)
    assert len(counts) == 5 and all(60 < count < 140 for count in counts.values())  # 100 expected, sd 8.9
    # the definition: SHA-256 of "<seed> <key of the edit> <number>" modulo the sorted objects
    assert draw_other_objects(cases[:3], 1)[0].objects == (expected_draw(cases[0], ["land 1", "land 2"]),)


def expected_draw(one: Case, allowed: list[str]) -> str:
    names = sorted(["land 0", "land 1", "land 2", "ostmark"])
    number = 0
    while True:
        digest = hashlib.sha256(f"0 {one.request.key} {number}".encode()).hexdigest()
        name = names[int(digest, 16) % len(names)]
        if name in allowed:
            return name
        number += 1


@pytest.mark.parametrize("half", ["\ud83d", "Velm \udc00"])
def test_half_surrogates_do_not_stop_the_run(half: str) -> None:
    cases = [case(half, half, half), case("Tarn", "Sud", "Nord")]
    assert draw_other_objects(cases, 1)[0].objects[0] in ("Sud", "Nord")
