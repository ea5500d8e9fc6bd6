"""``lm-edit build-knowgic``: chains by search on a small graph, the records they make, and errors."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import scored

from lm_edit.cli.main import main
from lm_eval_tasks.common.asking.probes import CaseAnswers, case_requests
from lm_eval_tasks.common.scoring.measures import evaluate
from lm_eval_tasks.knowgic.benchmark import KNOWGIC
from lm_eval_tasks.knowgic.chains import prob_doc, score_chains

# A -> Z directly, over B, over B and C, and back; D is reached, but leads nowhere.
GRAPH: dict[str, Any] = {
    "relations": {
        "near": {"prompt": "{} is near", "question": "What is {} near?"},
        "in": {"prompt": "{} is in", "question": "Where is {}?"},
    },
    "facts": [
        ["A", "in", "Z"],
        ["A", "near", "B"],
        ["B", "in", "Z"],
        ["B", "near", "C"],
        ["C", "near", "A"],
        ["C", "in", "Z"],
        ["B", "near", "D"],
        ["Z", "in", "Y"],
        ["E", "in", "Z"],
    ],
    "edits": [["A", "in", "X"]],
    "aliases": {"Z": ["Zed"]},
}


def build(tmp_path: Path, graph: Any, *options: str) -> tuple[int, Path]:
    source, out = tmp_path / "graph.json", tmp_path / "chains.json"
    source.write_text(json.dumps(graph), encoding="utf-8")
    return main(["build-knowgic", str(source), "--out", str(out), "--overwrite", *options]), out


def test_chains_are_all_simple_paths_to_the_original_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = tmp_path / "attributes_with_aliases.json"
    code, out = build(tmp_path, GRAPH, "--aliases-out", str(names))
    assert code == 0 and "chains of length 3: 1" in capsys.readouterr().out
    (case,) = KNOWGIC.load({"data": str(out)}).records
    paths = [[chain[0].subject, *(hop.answer for hop in chain)] for chain in case.chains]
    assert paths == [["A", "Z"], ["A", "B", "Z"], ["A", "B", "C", "Z"]]
    # facts about B and C: neither the edited subject nor E, which no chain meets
    assert [hop.statement + " " + hop.answer for hop in case.context] == [
        "B is in Z",
        "B is near C",
        "C is near A",
        "C is in Z",
        "B is near D",
    ]
    assert (case.request.text, case.request.target_new, case.request.target_true) == ("A is in", "X", "Z")
    assert json.loads(names.read_text(encoding="utf-8")) == {"Z": {"answer_alias": ["Zed"]}}


def test_the_longest_chain_is_a_setting(tmp_path: Path) -> None:
    code, out = build(tmp_path, GRAPH, "--max-steps", "2")
    (case,) = KNOWGIC.load({"data": str(out)}).records
    assert code == 0 and [len(chain) for chain in case.chains] == [1, 2]
    line = [*"ABCDEFGZ"]  # seven steps besides the direct one
    facts = [["A", "in", "Z"], *([one, "near", other] for one, other in itertools.pairwise(line))]
    code, out = build(tmp_path, {**GRAPH, "facts": facts}, "--max-steps", "7")
    (case,) = KNOWGIC.load({"data": str(out)}).records
    doc = prob_doc(case, {"data": str(out)})
    answers = [replace(scored(-1.0, [0]), unedited=scored(-1.0, [0])) for _ in case_requests(doc)]
    found = score_chains(doc, CaseAnswers(doc, answers))
    assert (evaluate(found["ifr_longer_active_prob"]).value, evaluate(found["ifr_active_prob"]).value) == (1, 2)


@pytest.mark.parametrize(
    ("options", "context"),
    [
        ([], ["B in Z", "B near C", "C near A", "C in Z", "B near D"]),
        (["--context", "entities"], ["B in Z", "B near C", "C near A", "C in Z", "B near D"]),
        (["--context", "chains"], ["B in Z", "B near C", "C in Z"]),
        (["--context", "graph"], ["B in Z", "B near C", "C near A", "C in Z", "B near D", "Z in Y", "E in Z"]),
        (["--context", "chains", "--max-steps", "2"], ["B in Z"]),
        (["--context", "graph", "--max-steps", "1"],
         ["B in Z", "B near C", "C near A", "C in Z", "B near D", "Z in Y", "E in Z"]),
    ],
)  # fmt: skip
def test_the_broader_context_is_a_choice(tmp_path: Path, options: list[str], context: list[str]) -> None:
    """In the order of the graph, and never about A, the edited subject."""
    code, out = build(tmp_path, GRAPH, *options)
    (case,) = KNOWGIC.load({"data": str(out)}).records
    assert code == 0
    assert [f"{hop.subject} {hop.relation.removeprefix('is ')} {hop.answer}" for hop in case.context] == context


def test_names_may_hold_dots(tmp_path: Path) -> None:
    names = tmp_path / "names.json"
    relation = {"prompt": "{} is in", "question": "Where is {}?"}
    graph = {"relations": {"in the U.S.": relation}, "facts": [["A", "in the U.S.", "St. Z"]],
             "edits": [["A", "in the U.S.", "X"]], "aliases": {"St. Z": ["Zed"]}}  # fmt: skip
    code, out = build(tmp_path, graph, "--aliases-out", str(names))
    assert code == 0 and json.loads(names.read_text(encoding="utf-8")) == {"St. Z": {"answer_alias": ["Zed"]}}
    (case,) = KNOWGIC.load({"data": str(out)}).records
    assert case.request.target_true == "St. Z"


def test_a_fact_may_have_a_wording_of_its_own(tmp_path: Path) -> None:
    """The edited one gives the edit prompt; other facts of the relation keep that of the relation."""
    own = [{"fact": ["A", "in", "Z"], "prompt": "{} lies in", "question": "In which one does {} lie?"}]
    code, out = build(tmp_path, {**GRAPH, "wordings": own})
    assert code == 0
    (case,) = KNOWGIC.load({"data": str(out)}).records
    assert case.request.text == "A lies in" and case.chains[0][0].question == "In which one does A lie?"
    assert [hop.question for hop in case.chains[1]] == ["What is A near?", "Where is B?"]


def test_facts_whose_question_has_the_answer_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The released files have nine such questions, so they are no errors."""
    relation = {"prompt": "{} is in", "question": "In which Zed is {}?"}
    code, _ = build(tmp_path, {**GRAPH, "relations": GRAPH["relations"] | {"in": relation}, "provenance": {"by": "me"}})
    named = "In which Zed is A?; In which Zed is B?; In which Zed is C?; In which Zed is E?"
    line = "facts whose question has the answer, as a response that repeats it: "
    assert code == 0 and f"{line}4 ({named})" in capsys.readouterr().out
    assert build(tmp_path, GRAPH)[0] == 0 and line not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"facts": [["A", "in", "Z"], ["A", "near", "Z"]]}, "links 'A' to 'Z' by two facts"),
        ({"facts": [["A", "nere", "Z"]]}, "has the relation 'nere'. Did you mean"),
        ({"facts": [["A", "in"]]}, "facts[0]"),
        ({"facts": []}, "'facts' must be a list"),
        ({"edits": [["B", "in", "X"]], "facts": [["A", "in", "Z"]]}, "of which the graph has 0 facts"),
        ({"edits": [["A", "in", "Z"]]}, "with another object"),
        ({"relations": {"in": {"prompt": "is in", "question": "{}?"}}, "facts": [["A", "in", "Z"]]}, "one {} for the"),
        ({"relations": {}}, "'relations' must be an object"),
        ({"relations": {"in": {"prompt": "{}'s", "question": "{}?"}}, "facts": [["A", "in", "Z"]]}, "words around {}"),
        ({"aliases": {"Z": "Zed"}}, "a list of texts is needed"),
        ({"wordings": {"fact": ["A", "in", "Z"]}}, "a non-empty list of objects is needed"),
        (
            {"wordings": [{"fact": ["A", "in", "Y"], "prompt": "{} is", "question": "Is {}?"}]},
            "is not a fact of the graph",
        ),
        ({"wordings": [{"fact": ["A", "in", "Z"], "prompt": "is", "question": "Is {}?"}]}, "wordings[0].prompt"),
        ({"wordings": [{"fact": ["A", "in", "Z"], "prompt": "{} is"}]}, "'question' is missing"),
        ({"wordngs": []}, "'wordngs'. Did you mean 'wordings'"),
        ({"relations": {"in": {"prompt": "{} is in", "questions": "Where is {}?"}}}, "Did you mean 'question'"),
        ({"wordings": [{"fact": ["A", "in", "Z"], "promt": "{} is", "question": "{}?"}]}, "Did you mean 'prompt'"),
        ({"facts": [["A", "in", "Z"], ["b", "near", "Z"], ["A", "near", "B"]]}, "'B' and 'b', one name in two cases"),
        ({"edits": [["A", "in", "b"]]}, "'b' and 'B', one name in two cases"),
        ({"edits": [["A", "in", "X"], ["A", "in", "X"]]}, "changes A | in | Z to 'X' twice"),
        ({"edits": [["A", "in", "X"], ["B", "in", "x"]]}, "'x' and 'X', one name in two cases"),
        ({"edits": [["A", "in", "z"]]}, "changes 'Z' to 'z', another name of it"),
        ({"edits": [["A", "in", "zed"]]}, "changes 'Z' to 'zed', another name of it"),
    ],
)
def test_bad_graphs_are_errors(
    tmp_path: Path, change: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = build(tmp_path, {**GRAPH, **change})
    error = capsys.readouterr().err
    assert code == 2 and problem in error and "graph.json" in error and not out.exists()
