"""The table of one case's answers by editor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from result_rows import frame, pretend_results, row

import lm_edit.results.answers.documents
import lm_edit.results.tables
from edit_hooks import EditingError
from lm_edit import CaseDocument, SavedQuestion, SavedResponse
from lm_edit.figures.case_answers import draw
from lm_edit.figures.drawing.tables import as_csv, as_markdown, write_table
from lm_edit.figures.needs import Options
from lm_edit.figures.registry import all_figures
from lm_edit.figures.spec import FigureSpec

EDIT = {"prompt": "{} is the capital of", "subject": "Paris", "target_new": "Japan", "target_true": "France"}
RUNS = {"a": "rome", "b": "ft_m"}


def text_of(text: str | None, failure: str | None = None) -> SavedResponse:
    return SavedResponse(text=text, failure=failure)


def document(run: str, answers: dict[str, SavedResponse], case: str = "7", **changes: Any) -> CaseDocument:
    questions = [
        SavedQuestion(kind="rq", prompt="The capital of Japan is", wanted="Paris", target=None, answers={"": answer},
                 unedited=text_of(" Tokyo"))
        for answer in answers.values()
    ]  # fmt: skip
    likelihood = SavedQuestion(
        kind="es", prompt="Paris", wanted="Japan", target=" Japan", answers={"": SavedResponse()}
    )
    fields = {"task": "bake_rq", "edits": [EDIT], "questions": [likelihood, *questions]} | changes
    return CaseDocument(
        run=run, file="r.json", task_version="1.0", data_hash="d1", protocol="likelihood", judge="", doc_id=0,
        case_id=case, category="", metrics={}, reasons={}, report={}, **fields
    )  # fmt: skip


def test_a_column_per_run_and_one_of_the_unedited_model() -> None:
    documents = [document("a", {"rq": text_of(" Paris\nand")}), document("b", {"rq": text_of(None, "too long")})]
    table = draw(documents, RUNS)
    assert table.header == ["task", "kind", "question", "wanted", "unedited", "rome", "ft_m"]
    assert table.rows == [
        ["bake_rq", "rq", "The capital of Japan is", "Paris", " Tokyo", " Paris\nand", "unscored: too long"]
    ]
    assert table.notes[0] == "Edits: Paris is the capital of Japan (was France)."
    assert "Paris and" in as_markdown(table)


def test_a_run_without_the_case_is_not_asked_and_one_of_the_unedited_model_has_its_column() -> None:
    other = SavedQuestion(kind="rq", prompt="Which city?", wanted="Paris", target=None, answers={"": text_of("")})
    unedited = document("c", {"rq": text_of(" Kyoto")}, questions=[other])
    table = draw([document("a", {"rq": text_of(" Paris")}), unedited], RUNS)
    assert table.header[4:] == ["unedited", "rome"]
    assert [row[4:] for row in table.rows] == [[" Tokyo", " Paris"], ['""', "-"]]


def test_every_model_has_a_column_of_its_unedited_answers() -> None:
    both = [document("a", {"rq": text_of(" Paris")}), document("b", {"rq": text_of("?")})]
    both[1].questions[1].__dict__["unedited"] = text_of(" Kyoto")
    table = draw(both, RUNS, models={"a": "small", "b": "large"})
    assert table.header[4:] == ["unedited, small", "unedited, large", "rome", "ft_m"]
    assert table.rows[0][4:] == [" Tokyo", " Kyoto", " Paris", "?"]


def test_the_case_is_chosen_and_two_cases_with_one_id_are_not_mixed() -> None:
    documents = [document("a", {"rq": text_of(str(number))}, str(number)) for number in range(3)]
    assert draw(documents, RUNS).title.endswith("case 0")
    assert draw(documents, RUNS, Options(case="2")).rows[0][-1] == "2"
    with pytest.raises(EditingError, match="there is no case '9'; there are 0, 1, 2"):
        draw(documents, RUNS, Options(case="9"))
    qaedit = document(
        "a", {"rq": text_of("x")}, "0", task="qaedit_wild_reliability", edits=[EDIT | {"target_new": "x"}]
    )
    with pytest.raises(EditingError, match=r"several cases have the id 0 \(bake_rq.*qaedit_wild.*--only task="):
        draw([*documents, qaedit], RUNS)
    with pytest.raises(EditingError, match="no sample has a question that is answered freely"):
        draw([document("a", {})], RUNS)


def test_text_of_a_model_is_escaped(tmp_path: Path) -> None:
    table = draw([document("a", {"rq": text_of("<b>|x|</b>\x1b[31m")}), document("b", {"rq": text_of("=1+1")})], RUNS)
    markdown = as_markdown(table)
    assert "<b>" not in markdown and "\x1b" not in markdown and "\\|x\\|" in markdown
    assert "'=1+1" in as_csv(table)
    image = "![](http://x)`"
    edit = EDIT | {"prompt": f"{image}\n\n# {{}} is", "target_new": "[a](b)"}
    everywhere = as_markdown(draw([document("a", {"rq": text_of(image)}, image, edits=[edit])], {"a": image}))
    assert not re.search(r"(?<!\\)[\[\]`]", everywhere) and r"!\[\](http://x)\`" in everywhere
    assert "\n#" not in everywhere
    assert write_table(table, tmp_path / "case.csv").read_text(encoding="utf-8").startswith("task,kind,question")


def test_the_verb_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = frame(*(row("rome", task, "reverse_qa_prob", 0.5, file="r.json") for task in ("bake_rq", "bake_s")))
    (run,) = set(rows["run"])
    pretend_results(monkeypatch, rows)
    asked = [document(run, {"rq": text_of(" Paris")}), document(run, {"rq": text_of("?")}, task="bake_s")]
    monkeypatch.setattr(
        lm_edit.results.answers.documents,
        "load_documents",
        lambda paths, places: (one for one in asked if (one.file, one.task) in places),
    )
    out = tmp_path / "case.md"
    words = ["figure", "case_answers", "results", "--only", "task=bake_rq", "-o", str(out)]
    assert run_verb(words) == 0 and "| Tokyo | Paris |" in out.read_text(encoding="utf-8")
    assert "| unedited | rome |" in out.read_text(encoding="utf-8")
    assert run_verb([*words[:-1], str(tmp_path / "case.svg")]) == 2


@pytest.mark.parametrize("spec", [spec for spec in all_figures() if spec.is_table], ids=lambda spec: spec.name)
def test_titles_name_tables(spec: FigureSpec) -> None:
    assert spec.title.startswith("table: ")


@pytest.mark.parametrize("spec", [spec for spec in all_figures() if not spec.is_table], ids=lambda spec: spec.name)
def test_titles_of_charts_name_none(spec: FigureSpec) -> None:
    assert not spec.title.startswith("table: ")
