"""Documents whose edits are written one after another: against a stream of the same edits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from editor_settings import settings_of
from lm_eval.api.instance import Instance
from lm_runs import build, flat, instance

from edit_hooks import EditingError, EditRequest
from edit_hooks.answers import EditedAnswer, FailedAnswer
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.lm.editing.independent import group_key
from edit_hooks.request import InTurn, require_compatible

PROMPT, SUBJECT = "{} is the capital of", "Port Elna"
THERE = EditRequest(prompt=PROMPT, subject=SUBJECT, target_new="Dravonia", target_true="Ostmark")
BACK = EditRequest(prompt=PROMPT, subject=SUBJECT, target_new="Ostmark", target_true="Dravonia")
TEXT = "Port Elna is the capital of"

# A joint editor, memories of three kinds, a context.
EDITORS = ["ft_m", "grace", "wise", "melo", "ike"]
FAST_FT = {**settings_of("ft_m"), "num_steps": 6, "lr": 0.02}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def questions(*requests: EditRequest, in_turn: Any = True) -> list[Instance]:
    doc = {"edit_requests": [request.to_dict() for request in requests], "case_id": "0", "ask_unedited": True}
    doc |= {} if in_turn is None else {"edit_in_turn": in_turn}
    return [instance(doc, TEXT, f" {target}") for target in ("Dravonia", "Ostmark")]


def settings(editor: str) -> dict[str, Any]:
    return {"editor": editor, "editor_args": FAST_FT if editor == "ft_m" else settings_of(editor)}


@pytest.mark.parametrize("editor", EDITORS)
def test_edits_in_turn_are_those_of_a_stream(editor: str, model_path: str, tmp_path: Path) -> None:
    file = tmp_path / "edits.jsonl"
    file.write_text("".join(json.dumps(request.to_dict()) + "\n" for request in (THERE, BACK)), encoding="utf-8")
    single = build(model_path, **settings(editor)).loglikelihood(questions(THERE, BACK))
    stream = build(model_path, mode="sequential", edits=str(file), **settings(editor)).loglikelihood(
        questions(THERE, BACK)
    )
    for one, other in zip(single, stream, strict=True):
        assert flat(one)[0] == pytest.approx(flat(other)[0], abs=1e-4)
        assert other.position.edited and other.position.step == 1
    assert any(abs(one.final.logprob - one.final.unedited.logprob) > 1e-6 for one in single)


def test_the_order_decides_also_for_an_editor_that_writes_jointly(model_path: str, tmp_path: Path) -> None:
    lm = build(model_path, tmp_path, **settings("ft_m"))
    back, there = (lm.loglikelihood(questions(*pair)) for pair in ((THERE, BACK), (BACK, THERE)))
    margin = [answers[0].final.logprob - answers[1].final.logprob for answers in (back, there)]
    assert margin[0] < margin[1]  # Dravonia against Ostmark
    again = build(model_path, tmp_path, **settings("ft_m")).loglikelihood(questions(THERE, BACK))
    assert [flat(answer) for answer in again] == [flat(answer) for answer in back]  # from the store


def test_the_same_requests_in_turn_and_together_are_two_edits() -> None:
    other = EditRequest(prompt=PROMPT, subject="Velm", target_new="Karsk")
    together, in_turn = (THERE, other), InTurn((THERE, other))
    assert group_key(together) != group_key(in_turn) != group_key(InTurn((other, THERE)))
    assert group_key(InTurn((THERE,))) == group_key((THERE,)) == THERE.key


def test_the_store_keeps_them_apart(model_path: str, tmp_path: Path) -> None:
    other = EditRequest(prompt=PROMPT, subject="Velm", target_new="Karsk")

    def logprobs(in_turn: bool | None, store: Path | None) -> list[float]:
        lm = build(model_path, store, **settings("ft_m"))
        return [flat(answer)[0] for answer in lm.loglikelihood(questions(THERE, other, in_turn=in_turn))]

    together = logprobs(None, tmp_path)
    assert logprobs(True, tmp_path) == logprobs(True, None) != together


def test_two_answers_to_one_prompt_are_refused_unless_in_turn(model_path: str) -> None:
    lm = build(model_path, **settings("ft_m"))
    with pytest.raises(EditingError, match=r"two answers to 'Port Elna is the capital of', 'Dravonia' and 'Ostmark'"):
        lm.loglikelihood(questions(THERE, BACK, in_turn=None))
    assert lm._model is None  # before the weights are loaded
    with pytest.raises(EditingError, match="edit_in_turn='yes'; true or false"):
        lm.loglikelihood(questions(THERE, BACK, in_turn="yes"))
    require_compatible((THERE, EditRequest(prompt=TEXT, subject=SUBJECT, target_new="Dravonia")))
    require_compatible(InTurn((THERE, BACK)))


@pytest.mark.parametrize("order", [(BACK, THERE), (THERE,)])
def test_a_stream_without_the_order_does_not_hold_the_case(
    order: tuple[EditRequest, ...], model_path: str, tmp_path: Path
) -> None:
    file = tmp_path / "edits.jsonl"
    file.write_text("".join(json.dumps(request.to_dict()) + "\n" for request in order), encoding="utf-8")
    lm = build(model_path, mode="sequential", edits=str(file), **settings("r_rome"))
    answers = lm.loglikelihood(questions(THERE, BACK))
    assert all(answer.position.not_in_stream for answer in answers)


def test_groups_of_a_batch_do_not_hold_a_case_in_turn(model_path: str, tmp_path: Path) -> None:
    file = tmp_path / "edits.jsonl"
    other = EditRequest(prompt=PROMPT, subject="Velm", target_new="Karsk")
    file.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in (THERE, other)), encoding="utf-8")
    grouped = {"mode": "batch", "edits": str(file), "group_size": 2, **settings("ft_m")}
    in_turn, together = (
        build(model_path, **grouped).loglikelihood(questions(THERE, other, in_turn=flag)) for flag in (True, None)
    )
    assert all(isinstance(answer.final, FailedAnswer) for answer in in_turn)
    assert all(isinstance(answer, EditedAnswer) and not isinstance(answer.final, FailedAnswer) for answer in together)
