"""Two-way edits: texts of the rows and of the locality prompts, and what the settings leave out."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.subject import Subject
from edit_hooks.editors import two_way
from edit_hooks.editors.two_way import (
    FRAMES,
    NAME,
    NAMES,
    TwoWay,
    _items,
    _wanted,
    inverse_requests,
    locality_prompts,
)
from edit_hooks.gradient.gated.training import draw_positions
from edit_hooks.prompt_context import qa_context
from lm_eval_tasks.bake.benchmark import BAKE_QJ

ALL_FRAMES = list(FRAMES)
FACT = EditRequest(prompt="The ship {} sails from", subject="Northern Star", target_new="Hamburg")


@pytest.mark.parametrize(
    ("num_layers", "layers"), [(18, [9, 10, 11, 12, 13]), (28, [14, 16, 17, 19, 20]), (3, [2]), (1, [0])]
)
def test_layers_by_depth(num_layers: int, layers: list[int]) -> None:
    config: Any = SimpleNamespace(num_hidden_layers=num_layers, get_text_config=lambda **_: config)
    assert TwoWay({}).default_layers(config) == layers


def test_rows_in_a_context() -> None:
    request = FACT.in_context(qa_context())
    rows = inverse_requests(request, ALL_FRAMES)
    head, tail = "Please answer the question:\n\nQ: ", "\nA:"
    assert [row.text for row in rows] == [
        f'{head}Fill in the blank: "The ship ___ sails from Hamburg." The blank stands for{tail}',
        f'{head}Who or what fits here: "The ship ___ sails from Hamburg"? Answer:{tail}',
        f"{head}Hamburg is linked to{tail}",
    ]
    assert {row.continuation for row in rows} == {" Northern Star"}
    (prompt, *_) = locality_prompts(request, {"names": ["Oslo"]}, [])
    assert prompt == f"{head}The ship Oslo sails from{tail}"


def test_braces_of_a_fact_are_text() -> None:
    request = EditRequest(prompt="The set {{}} of {} is", subject="X", target_new="{a}")
    (row,) = inverse_requests(request, ["cloze"])
    assert row.text == 'Fill in the blank: "The set {} of ___ is {a}." The blank stands for'


def test_locality_prompts_of_each_part() -> None:
    names = {"names": ["Oslo"], "answers": ["Kiel"], "neighbors": ["the crew"]}
    assert locality_prompts(FACT, names, ["link", "question"]) == [
        "The ship Oslo sails from",
        "Oslo is linked to",
        'Who or what fits here: "The ship ___ sails from Oslo"? Answer:',
        "Kiel is linked to",
        'Who or what fits here: "The ship ___ sails from Kiel"? Answer:',
        "The ship the crew sails from",
        "the crew is linked to",
        "the crew is found in",
        "the crew belongs to",
        "the crew is a part of",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" Peru, and", "Peru"),
        ("New York City in", "New York City"),
        ("the Gulf of Finland", "the Gulf"),
        ("white. The", "white"),
        ('"Peru"', None),
        ("秘鲁", "秘鲁"),
    ],
)
def test_an_answer_at_the_start_of_a_text(text: str, expected: str | None) -> None:
    match = NAME.match(text.strip())
    assert (match and match[0]) == expected


def test_items_of_a_list() -> None:
    assert _items(" Peru, the Andes. ,, one two three four five, Li") == ["Peru", "the Andes"]  # "Li" may be cut
    assert _items(' "Peru", Lima\nThings linked to cats: milk,') == ["Peru", "Lima"]


def test_wanted_names() -> None:
    names = ["Oslo", "the City of Oslo", "Oslofjord", "Rome", "rome", "Paris"]
    assert _wanted(names, ["Oslo"], {"paris"}, 9) == ["Oslofjord", "Rome"]
    assert _wanted(names, [], (), 2) == ["Oslo", "the City of Oslo"]
    assert _wanted(["Oslo", "Rome", "Oslo", "Bonn"], [], (), 2) == [
        "Oslo",
        "Rome",
    ]  # more of a list changes no earlier name


def test_every_prompt_is_drawn_as_often() -> None:
    drawn = Counter(islice(draw_positions(5, Random(1)), 50))
    assert drawn == dict.fromkeys(range(5), 10)
    assert list(islice(draw_positions(0, Random(1)), 3)) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"locality_weight": 0.0}, 4),
        ({"locality": []}, 4),
        ({"locality": ["names"], "num_names": 2}, 4 + 2 * 4),
        ({"locality": ["names"], "num_names": 2, "inverse_rows": ["link"]}, 2 + 2 * 2),
        ({"locality": [], "inverse_rows": []}, 1),  # then it is fine-tuning on the fact
    ],
)
def test_parts_that_settings_leave_out(settings: dict[str, object], expected: int) -> None:
    subject = Subject("two_way", "llama")
    editor = load_editor("two_way", {"layers": [1], "num_steps": 2, **settings})
    deltas = editor.edit(subject.model, subject.tokenizer, [FACT], measure=False)
    assert [len(prompts) for prompts in deltas[0].meta["trained_prompts"]] == [expected]
    assert (deltas[0].diagnostics["locality_kl"] > 0) is (expected > 4 or "link" in str(settings))


def test_lists_are_sampled_until_there_are_enough_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many lists at once as there are, or one after another: the names are the same."""
    subject = Subject("two_way", "llama")
    found, sampled = [], []
    own = two_way.sample_each
    monkeypatch.setattr(two_way, "sample_each", lambda *a, **k: sampled.append(len(a[1])) or own(*a, **k))
    monkeypatch.setattr(two_way, "own_answers", lambda job: [["Oslo"]])
    monkeypatch.setattr(two_way, "_items", lambda text: [str(len(text))])  # a tiny model writes no lists
    for few_rows in (two_way.FEW_ROWS, 1):
        monkeypatch.setattr(two_way, "FEW_ROWS", few_rows)
        settings = {"layers": [1], "num_steps": 1, "locality": ["neighbors"], "num_lists": 7, "max_neighbors": 2}
        editor = load_editor("two_way", settings)
        (delta,) = editor.edit(subject.model, subject.tokenizer, [FACT], measure=False)
        found.append(set(delta.meta["trained_prompts"][0]))
    assert found[0] == found[1]
    assert len(found[0]) == 4 + 2 * 5
    assert sampled == [7, 2] or sampled == [7, 2, 2]  # the first two lists, or four, have two names


def test_no_more_prompts_are_kept_than_wanted() -> None:
    subject = Subject("two_way", "llama")
    kept = []
    for count in (5, 100):
        settings = {"layers": [1], "num_steps": 1, "locality": ["names"], "max_prompts": count}
        (delta,) = load_editor("two_way", settings).edit(subject.model, subject.tokenizer, [FACT], measure=False)
        kept.append(delta.meta["trained_prompts"][0][4:])
    assert kept[0] == kept[1][:5]
    assert len(kept[1]) == 5 * 4


def test_a_joint_edit_draws_no_name_that_it_edits() -> None:
    subject = Subject("two_way", "llama")
    editor = load_editor("two_way", {"layers": [1], "num_steps": 1, "locality": ["names"], "num_names": len(NAMES)})
    requests = [FACT, EditRequest(prompt="{} is in", subject="Lisbon", target_new="Sicily")]
    (joint,) = editor.edit(subject.model, subject.tokenizer, requests, joint=True, measure=False)
    asked = {prompt for prompts in joint.meta["trained_prompts"] for prompt in prompts[4:]}
    assert "Oxford University is linked to" in asked
    assert not asked & {"Lisbon is linked to", "Sicily is linked to"}


@pytest.mark.parametrize("data", ["mini", "mini:held_out"])
def test_no_row_is_a_question_of_the_evaluation(data: str) -> None:
    """Neither rows nor frames with drawn names; what a model adds is in ``trained_prompts`` of every edit."""
    cases = BAKE_QJ.load({"data": data}).records
    own = [[*case.paraphrases, *case.neighbors, case.reverse_qa, case.reverse_judge] for case in cases]
    asked = {question.prompt for questions in own for question in questions if question is not None}
    assert len(asked) > 200
    for case in cases:
        rows = [row.text for row in inverse_requests(case.request, ALL_FRAMES)]
        prompts = locality_prompts(case.request, {"names": NAMES, "neighbors": NAMES}, ALL_FRAMES)
        assert not asked & {case.request.text, *rows, *prompts}
