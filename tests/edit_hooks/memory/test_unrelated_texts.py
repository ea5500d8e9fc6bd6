"""Unrelated texts from benchmark files: which fields are read, what is drawn, and files without any."""

from __future__ import annotations

import json

import pytest

from edit_hooks import EditingError, load_editor
from edit_hooks.memory.unrelated_texts import UNRELATED_TEXTS, draw_texts


def write(path, records) -> str:
    path.write_text(json.dumps(records), encoding="utf-8")
    return str(path)


def test_question_and_answer_are_joined_for_every_released_layout(tmp_path):
    for records in (
        [{"src": "s", "loc": "nq question: who sang ", "loc_ans": " Ann"}],
        [{"prompt": "p", "locality_prompt": "nq question: who sang", "locality_ground_truth": "Ann"}],
    ):
        assert draw_texts(write(tmp_path / "records.json", records), 5, 0) == ["nq question: who sang Ann"]
    lines = tmp_path / "records.jsonl"
    lines.write_text('{"loc": "one", "loc_ans": "1"}\n{"loc": "two", "loc_ans": "2"}\n', encoding="utf-8")
    assert draw_texts(lines, 5, 0) == ["one 1", "two 2"]


def test_the_seed_draws_and_a_short_file_gives_all(tmp_path):
    path = write(tmp_path / "records.json", [{"loc": f"question {n}", "loc_ans": "yes"} for n in range(50)])
    draws = [draw_texts(path, 10, seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert all(len(set(texts)) == 10 for texts in draws)
    assert len(draw_texts(path, 100, 0)) == 50


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "records.json"
    assert draw_texts(write(path, [{"loc": "a", "loc_ans": "b"}]), 1, 0) == ["a b"]
    write(path, [{"loc": "c", "loc_ans": "d"}])
    path.touch()
    assert draw_texts(path, 1, 0) == ["c d"]


def test_records_without_a_question_are_left_out_and_counted(tmp_path, caplog):
    records = [
        {"loc": "who", "loc_ans": "Ann"},
        {"loc": "who"},
        {"loc": "", "loc_ans": "x"},
        {"loc": "a\ud800", "loc_ans": "b"},
        {"loc": ["who", "when"], "loc_ans": "Ann"},
        3,
    ]
    with caplog.at_level("WARNING"):
        assert draw_texts(write(tmp_path / "some.json", records), 9, 0) == ["who Ann"]
    assert "5 of 6 records have no 'loc' and 'loc_ans'" in caplog.text


def test_lists_of_questions_give_a_text_each(tmp_path):
    record = {"locality_prompt": ["who", "when", "a\ud800"], "locality_ground_truth": ["Ann", "then", "b"]}
    assert draw_texts(write(tmp_path / "some.json", [record]), 9, 0) == ["who Ann", "when then"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("[]", "no records"),
        ('[{"prompt": "p", "target_new": "t"}]', "no locality question.*'loc' and 'loc_ans'.*zsre_mend_train"),
        ("[3, 4]", "no locality question"),
        ("{", "not valid JSON"),
    ],
)
def test_files_without_questions_are_refused_before_the_model_is_loaded(tmp_path, content, message, tiny_model):
    path = tmp_path / "records.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    editor = load_editor("wise", {"layers": [1], "loc_prompts": str(path)})
    with pytest.raises(EditingError, match=message):
        editor.check_settings(tiny_model("llama"))


def test_our_own_texts_are_short_and_distinct():
    assert len(set(UNRELATED_TEXTS)) == len(UNRELATED_TEXTS) == 12
