"""Questions and locality pairs from the layouts of other data sets; unusable rows have a place and a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from record_files import published_data
from writer_server import LOCALITY, write_json

from edit_hooks.utils.errors import EditingError
from lm_edit.builders.qaedit.questions import QuestionFile, parse_question_file, read_locality, read_questions
from lm_eval_tasks.qaedit.texts import same_text


def read(path: Path) -> list[tuple[str, str]]:
    """Question and answer of every usable row."""
    return [(pair.question, pair.answer) for pair in read_questions([QuestionFile(path, "X")]).pairs]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# ------------------------------------------------------------------ layouts


def test_nq_open(tmp_path: Path) -> None:
    rows = [{"question": "who dug the salt canal", "answer": ["Ada Ruhl", "Ruhl"]}, {"question": "q", "answer": ["a"]}]
    lines = write(tmp_path / "nq.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert (
        read(lines)
        == [("who dug the salt canal", "Ada Ruhl"), ("q", "a")]
        == read(write_json(tmp_path / "nq.json", rows))
    )


@pytest.mark.parametrize("layout", ["rows", "release"])
def test_trivia_qa(layout: str, tmp_path: Path) -> None:
    if layout == "rows":
        answer = {"value": "Ada Ruhl", "aliases": ["Ruhl"], "normalized_value": "ada ruhl"}
        path = write_json(tmp_path / "t.json", [{"question": "Who dug it?", "question_id": "tc_1", "answer": answer}])
    else:
        row = {"Question": "Who dug it?", "QuestionId": "tc_1", "Answer": {"Value": "Ada Ruhl", "Aliases": ["Ruhl"]}}
        path = write(tmp_path / "t.json", json.dumps({"Data": [row], "Domain": "Web", "Version": 1.0}, indent=4))
    assert read(path) == [("Who dug it?", "Ada Ruhl")]


def test_simple_qa(tmp_path: Path) -> None:
    text = (
        "metadata,problem,answer\n"
        "\"{'topic': 'Art', 'urls': ['x']}\",\"Who, in \"\"Ode\"\",\nspeaks last?\",Pim\n"
        "{},When did it end?,1931\n"
    )
    reading = read_questions([QuestionFile(write(tmp_path / "s.csv", text), "SQA")])
    assert [(pair.question, pair.answer) for pair in reading.pairs] == [
        ('Who, in "Ode",\nspeaks last?', "Pim"),
        ("When did it end?", "1931"),
    ]
    assert [pair.where for pair in reading.pairs] == ["s.csv, record 0 (line 2)", "s.csv, record 1 (line 4)"]
    assert [pair.row for pair in reading.pairs] == [0, 1]


def test_lists_in_cells_of_a_table(tmp_path: Path) -> None:
    text = 'question,answers\na?,"[""x"", ""y""]"\nb?,"[\'x\', \'y\']"\nc?,x\n'
    reading = read_questions([QuestionFile(write(tmp_path / "s.csv", text), "X")])
    assert [pair.answer for pair in reading.pairs] == ["x", "x"]
    assert reading.left_out == [
        ("s.csv, record 1 (line 3)", "the answer begins like a list or an object and is no JSON")
    ]


def test_byte_order_mark_capital_suffix_and_names(tmp_path: Path) -> None:
    assert read(write(tmp_path / "S.CSV", "\ufeffProblem , ANSWER\r\nq?,a\r\n\r\n")) == [("q?", "a")]


# ------------------------------------------------------------------ unusable rows


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "a"}, "there is no question"),
        ({"question": None, "answer": "a"}, "there is no question"),
        ({"question": " ", "answer": "a"}, "the question is empty"),
        ({"question": 3, "answer": "a"}, "the question is no text"),
        ({"question": "q?"}, "there is no answer"),
        ({"question": "q?", "answer": ""}, "the answer is empty"),
        ({"question": "q?", "answer": []}, "the answer is empty"),
        ({"question": "q?", "answer": ["", "a"]}, "the answer is empty"),
        ({"question": "q?", "answer": [["a"]]}, "the answer is no text"),
        ({"question": "q?", "answer": 4}, "the answer is no text"),
        ({"question": "q?", "answer": {"aliases": ["a"]}}, "there is no answer"),
        ({"question": "q {}?", "answer": "a"}, "the question holds {}, which marks the subject of an edit request"),
        ({"question": "\ud800?", "answer": "a"}, "the question holds half of a surrogate pair"),
        ({"question": "q?", "answer": "\udc00"}, "the answer holds half of a surrogate pair"),
        (["q?", "a"], "the row is no object"),
        ({"question": "known", "answer": "b"}, "an earlier row has the same question"),
    ],
)
def test_a_row_that_cannot_be_used_has_a_place_and_a_reason(row: Any, reason: str, tmp_path: Path) -> None:
    path = write_json(
        tmp_path / "q.json", [{"question": "known", "answer": "a"}, row, {"problem": "p", "answers": "b"}]
    )
    reading = read_questions([QuestionFile(path, "X")])
    assert reading.left_out == [("q.json, record 1", reason)]
    assert [(pair.question, pair.answer, pair.row) for pair in reading.pairs] == [("known", "a", 0), ("p", "b", 2)]


def test_equal_questions_of_two_files_count_once(tmp_path: Path) -> None:
    """Also with another case or closing mark: the second edit would undo the first."""
    texts = ["q? ", "who wrote Paper Harbor?", "Q", "Who  wrote 'Paper Harbor'?"]
    first = write_json(
        tmp_path / "a.json", [{"question": text, "answer": "a"} for text in ("q?", "Who wrote Paper Harbor")]
    )
    second = write_json(tmp_path / "b.json", [{"question": text, "answer": "b"} for text in texts])
    reading = read_questions([QuestionFile(first, "A"), QuestionFile(second, "B")])
    assert [(pair.question, pair.file.origin) for pair in reading.pairs] == [
        ("q?", "A"),
        ("Who wrote Paper Harbor", "A"),
        ("Who  wrote 'Paper Harbor'?", "B"),  # marks inside count
    ]
    reason = "an earlier row has the same question"
    assert reading.left_out == [(f"b.json, record {number}", reason) for number in range(3)]


def test_ragged_rows_of_a_table(tmp_path: Path) -> None:
    text = "question,answer\nwho, then?,a\nonly a question?\nq?,a\n"
    reading = read_questions([QuestionFile(write(tmp_path / "s.csv", text), "X")])
    assert [reason for _, reason in reading.left_out] == [
        "the row has more cells than the header",
        "there is no answer",
    ]
    assert len(reading.pairs) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.json", "", "holds no records"),
        ("q.json", "[]", "holds no records"),
        ("q.json", '{"Data": []}', "holds no records"),
        ("q.json", '{"Data": {"question": "q"}}', "a list of records is needed"),
        ("q.jsonl", '{"question": "q", "answer": }', "line 1.*not valid JSON"),
        ("q.json", '[{"text": "q"}, {"question": "q"}]', r"none of the 2 rows.*no question \(1\).*no answer \(1\)"),
        ("q.csv", "", "has the columns none; 'question' or 'problem' and 'answer' or 'answers' are needed"),
        ("q.csv", "question\tanswer\nq\ta\n", "'question' or 'problem'"),
        ("q.csv", "question,answer,Answer\nq,a,b\n", "the column 'answer' occurs twice"),
        ("q.csv", 'question,answer\n"q,a\n', "line 2: not valid CSV"),
        ("q.csv", f"question,answer\n{'q' * 200_000},a\n", "line 2: not valid CSV .*field limit"),
        ("q.csv", "question,answer\n", "holds no records"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=message):
        read(write(tmp_path / name, text))


def test_names_of_origins(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a=b.json", [])
    assert parse_question_file(f"NQ={path}") == QuestionFile(path, "NQ")
    assert parse_question_file(str(path)) == QuestionFile(path, "a=b")
    assert parse_question_file("nq.jsonl") == QuestionFile(Path("nq.jsonl"), "nq")
    for text in ("=nq.jsonl", "NQ=", ""):
        with pytest.raises(EditingError, match="write NAME=FILE or FILE"):
            parse_question_file(text)


# ------------------------------------------------------------------ locality


def test_locality_pairs_lose_their_prefix(tmp_path: Path) -> None:
    rows = [
        *LOCALITY[:2],
        {"loc": "nq question: When did canal 0 open?", "loc_ans": "1900"},
        {"loc": "who sang the harbor song", "loc_ans": "Mina Kell"},
        {"loc": "nq question: ", "loc_ans": "x"},
        {"loc": "q?", "loc_ans": ""},
        {"src": "q?"},
    ]
    reading = read_locality(write_json(tmp_path / "z.json", rows))
    assert reading.pairs == [
        ("when did canal 0 open", "1800"),
        ("when did canal 1 open", "1801"),
        ("who sang the harbor song", "Mina Kell"),
    ]
    assert [reason for _, reason in reading.left_out] == [
        "an earlier row has the same question",
        "the question is empty",
        "the answer is empty",
        "there is no question",
    ]
    with pytest.raises(EditingError, match=r"none of the 1 rows has a usable loc and loc_ans: there is no question"):
        read_locality(write_json(tmp_path / "z.json", [{"question": "q"}]))


def test_texts_are_the_same_but_for_case_white_space_and_outer_marks() -> None:
    assert same_text(" Who  dug\u00a0it?") == same_text("who dug it") == same_text("\u201cWho dug it\uff1f\u201d")
    assert same_text("who dug it") != same_text("who dug, it")


@pytest.mark.realdata
def test_published_locality_pairs() -> None:
    reading = read_locality(published_data() / "zsre" / "zsre_mend_eval_first34.json")
    assert len(reading.pairs) == 34 and reading.pairs[0].answer == "Hugo Weaving"
    assert not any(pair.question.startswith("nq question") for pair in reading.pairs)
