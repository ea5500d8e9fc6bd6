"""``lm-edit build-knowgic`` with several graphs: what is joined, what the order decides, provenance, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from hypothesis import given
from hypothesis import strategies as st

from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic.graph import Relation, parse_graph, read_graph
from lm_edit.builders.knowgic.growth import SECOND_LINK, SECOND_OBJECT
from lm_edit.builders.knowgic.joining import GraphFile, JoinedGraph, join_graphs, read_graphs
from lm_eval_tasks.knowgic.benchmark import KNOWGIC

IN = {"prompt": "{} is in", "question": "Where is {}?"}
NEAR = {"prompt": "{} is near", "question": "What is {} near?"}
OTHER_IN = {"prompt": "{} lies in", "question": "In what does {} lie?"}
# Only the two together have the chain A, B, Z.
FIRST: dict[str, Any] = {
    "relations": {"in": IN, "near": NEAR},
    "facts": [["A", "in", "Z"], ["A", "near", "B"], ["C", "in", "Z"]],
    "edits": [["A", "in", "X"]],
    "aliases": {"Z": ["Zedd"]},
    "provenance": {"writer": {"backend": "hf", "model": "qwen"}},
}
SECOND: dict[str, Any] = {
    "relations": {"in": OTHER_IN, "of": {"prompt": "{} is of", "question": "Of what is {}?"}},
    "facts": [["A", "in", "Z"], ["B", "in", "Z"], ["D", "of", "Z"]],
    "edits": [["A", "in", "X"]],
    "provenance": {"writer": {"backend": "hf", "model": "llama"}},
}


def files_of(*graphs: dict[str, Any]) -> list[GraphFile]:
    return [
        GraphFile(f"{letter}.json", letter, None, parse_graph(graph, f"{letter}.json"))
        for letter, graph in zip("abc", graphs, strict=False)
    ]


def join(*changes: dict[str, Any]) -> JoinedGraph:
    """Join the two graphs with changes."""
    graphs = [{**graph, **change} for graph, change in zip((FIRST, SECOND), changes, strict=True)]
    return join_graphs(files_of(*graphs))


def build(tmp_path: Path, *graphs: dict[str, Any], options: tuple[str, ...] = ()) -> tuple[int, Path]:
    paths = [tmp_path / f"{letter}.json" for letter in "abc"[: len(graphs)]]
    for path, graph in zip(paths, graphs, strict=True):
        path.write_text(json.dumps(graph), encoding="utf-8")
    out = tmp_path / "chains.json"
    return run_verb(["build-knowgic", *map(str, paths), "--out", str(out), "--overwrite", *options]), out


def test_records_have_the_facts_of_both_and_name_the_graphs_of_each(tmp_path: Path, capsys: Any) -> None:
    code, out = build(tmp_path, FIRST, SECOND)
    printed = capsys.readouterr().out
    assert code == 0
    assert "a.json (qwen): 3 facts, 3 of them joined, 2 in no other graph" in printed
    assert "b.json (llama): 3 facts, 3 of them joined, 2 in no other graph" in printed
    assert "facts: 5, 1 in all graphs" in printed and "chains of length 2: 1" in printed
    assert "relations, worded otherwise in an earlier graph (1): b.json: in" in printed
    assert "names" not in printed and "left out" not in printed
    (case,) = KNOWGIC.load({"data": str(out)}).records
    assert [[hop.answer for hop in chain] for chain in case.chains] == [["Z"], ["B", "Z"]]
    # The fact of both has the first wording, that of the second alone the second one.
    assert [hop.question for hop in case.chains[1]] == ["What is A near?", "In what does B lie?"]
    assert case.chains[0][0].question == "Where is A?" and case.request.text == "A is in"
    (record,) = json.loads(out.read_text(encoding="utf-8"))
    found = record["provenance"]
    assert [(one["name"], one["writer"]["model"]) for one in found["graphs"]] == [
        ("a.json", "qwen"),
        ("b.json", "llama"),
    ]
    assert len({one["sha256"] for one in found["graphs"]}) == 2
    assert found["facts"] == [
        {"fact": ["A", "in", "Z"], "graphs": ["a.json", "b.json"]},
        {"fact": ["A", "near", "B"], "graphs": ["a.json"]},
        {"fact": ["B", "in", "Z"], "graphs": ["b.json"]},
    ]


def test_provenance_covers_the_broader_context(tmp_path: Path) -> None:
    _, out = build(tmp_path, FIRST, SECOND, options=("--context", "graph"))
    (record,) = json.loads(out.read_text(encoding="utf-8"))
    assert [one["fact"] for one in record["provenance"]["facts"]][3:] == [["C", "in", "Z"], ["D", "of", "Z"]]


def test_one_graph_has_no_provenance_and_nothing_is_joined(tmp_path: Path, capsys: Any) -> None:
    code, out = build(tmp_path, FIRST)
    assert code == 0 and "in no other graph" not in capsys.readouterr().out
    assert "provenance" not in json.loads(out.read_text(encoding="utf-8"))[0]


def test_the_joined_graph_is_a_graph(tmp_path: Path, capsys: Any) -> None:
    """It gives the same records, apart from their provenance."""
    joined = tmp_path / "joined.json"
    _, out = build(tmp_path, FIRST, SECOND, options=("--joined-out", str(joined)))
    records = json.loads(out.read_text(encoding="utf-8"))
    content = json.loads(joined.read_text(encoding="utf-8"))
    assert len(content["provenance"]["facts"]) == len(content["facts"]) == 5
    assert content["wordings"] == [{"fact": ["B", "in", "Z"], **OTHER_IN}]
    assert run_verb(["build-knowgic", str(joined), "--out", str(out), "--overwrite"]) == 0
    assert json.loads(out.read_text(encoding="utf-8")) == [
        {key: value for key, value in record.items() if key != "provenance"} for record in records
    ]
    code, _ = build(tmp_path, FIRST, options=("--joined-out", str(joined)))
    assert code == 2 and "--joined-out is for several graphs" in capsys.readouterr().err


def test_the_order_decides_on_wordings() -> None:
    first, second = join_graphs(files_of(FIRST, SECOND)).graph, join_graphs(files_of(SECOND, FIRST)).graph
    both, alone = Fact("A", "in", "Z"), Fact("C", "in", "Z")
    assert first.wording(both) == Relation(**IN) and second.wording(both) == Relation(**OTHER_IN)
    assert first.wording(alone) == second.wording(alone) == Relation(**IN)
    assert dict(first.wordings) == {Fact("B", "in", "Z"): Relation(**OTHER_IN)}
    assert dict(second.wordings) == {alone: Relation(**IN)}


def test_a_fact_keeps_a_wording_of_its_own() -> None:
    own = [{"fact": ["A", "in", "Z"], "prompt": "{} is inside", "question": "Inside what is {}?"}]
    joined = join({"wordings": own}, {}).graph
    assert joined.question(Fact("A", "in", "Z")) == "Inside what is A?"
    assert join({}, {"wordings": own}).graph.question(Fact("A", "in", "Z")) == "Where is A?"


@pytest.mark.parametrize(
    ("first", "second", "name"),
    [
        ({}, {"facts": [["a", "in", "z"]], "edits": [["a", "in", "x"]]}, "another case"),
        ({}, {"facts": [["A", "in", "the Z."]], "edits": [["A", "in", "An X"]]}, "punctuation and articles"),
        ({}, {"facts": [["A", "in", "Zedd"]], "edits": [["A", "in", "X"]]}, "another name in the first graph"),
        ({}, {"facts": [["A", "in", "ZZ"]], "aliases": {"ZZ": ["zedd"]}}, "a common other name"),
        (
            {"aliases": {}},
            {"facts": [["A", "in", "ZZ"]], "aliases": {"ZZ": ["the Z"]}},
            "another name in the second graph",
        ),
        ({}, {"facts": [["A", "IN", "Z"]], "relations": {"IN": IN}, "edits": [["A", "IN", "X"]]}, "the relation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_of_the_same_are_those_of_the_first_graph(first: Any, second: Any, name: str) -> None:
    joined = join(first, second)
    assert joined.graph.facts == [Fact(*fact) for fact in FIRST["facts"]] and len(joined.graph.edits) == 1
    assert joined.origin.holders[Fact("A", "in", "Z")] == ["a.json", "b.json"]
    assert joined.renamed and not joined.left_out


def test_other_names_are_joined_under_the_first_name() -> None:
    second = {"facts": [["A", "in", "Zedd"]], "aliases": {"Zedd": ["Z", "Zett"], "Q": ["Cue"]}}
    assert join({}, second).graph.aliases == {"Z": ["Zedd", "Zett"], "Q": ["Cue"]}
    assert join({"aliases": {}}, second).graph.aliases == {"Z": ["Zedd", "Zett"], "Q": ["Cue"]}
    assert join({"aliases": {}}, {"facts": [["A", "in", "z"]], "aliases": {"z": ["Zett"]}}).graph.aliases == {
        "Z": ["Zett"]
    }


def test_two_names_of_one_graph_stay_two() -> None:
    """The second graph has Z and Zedd, an equal name and another name of the first graph's Z."""
    joined = join({}, {"facts": [["A", "in", "Z"], ["Zedd", "of", "Z"], ["The Z", "of", "Zedd"]]})
    assert set(joined.graph.facts[3:]) == {Fact("Zedd", "of", "Z"), Fact("The Z", "of", "Zedd")}
    assert not joined.renamed
    # also where the better match comes later
    joined = join({}, {"facts": [["The Z", "of", "z"]], "edits": [["The Z", "of", "X"]]})
    assert [tuple(one) for one in joined.renamed] == [("b.json", "z", "Z")]


def test_a_short_other_name_counts_in_its_own_case() -> None:
    """As for answers: "IT", another name of Italy, does not name the novel "It"."""
    first = {"facts": [*FIRST["facts"], ["Italy", "near", "B"]], "aliases": {"Italy": ["IT"]}}
    for second, names in (
        ({"facts": [["A", "in", "Z"], ["It", "of", "B"]]}, []),
        ({"facts": [["A", "in", "Z"], ["IT", "of", "B"]]}, [("b.json", "IT", "Italy")]),
        ({"facts": [["A", "in", "Z"], ["Italia", "of", "B"]], "aliases": {"Italia": ["it"]}}, []),
        ({"facts": [["A", "in", "Z"], ["Italia", "of", "B"]], "aliases": {"Italia": ["I.T."]}},
         [("b.json", "Italia", "Italy")]),
    ):  # fmt: skip
        assert [tuple(one) for one in join(first, second).renamed] == names
    novel = {"facts": [*FIRST["facts"], ["It", "near", "B"]]}
    italy = {"facts": [["A", "in", "Z"], ["Italy", "of", "B"]], "aliases": {"Italy": ["IT"]}}
    assert not join(novel, italy).renamed


def test_renamed_names_are_printed_and_in_the_joined_graph(tmp_path: Path, capsys: Any) -> None:
    second = {**SECOND, "facts": [["A", "in", "zedd"]]}
    _, _ = build(tmp_path, FIRST, second, options=("--joined-out", str(tmp_path / "joined.json")))
    assert "names, as in an earlier graph (1): b.json: zedd -> Z" in capsys.readouterr().out
    content = json.loads((tmp_path / "joined.json").read_text(encoding="utf-8"))
    assert content["provenance"]["renamed"] == [{"graph": "b.json", "name": "zedd", "joined_name": "Z"}]


def test_a_second_link_is_left_out_but_an_opposite_one_is_not(tmp_path: Path, capsys: Any) -> None:
    second = {**SECOND, "facts": [["A", "in", "Z"], ["C", "of", "Z"], ["Z", "of", "C"]]}
    code, _ = build(tmp_path, FIRST, second)
    printed = capsys.readouterr().out
    assert code == 0 and f"left out, {SECOND_LINK} (1): b.json: C | of | Z" in printed
    assert "b.json (llama): 3 facts, 2 of them joined, 1 in no other graph" in printed
    joined = join_graphs(files_of(FIRST, second))
    assert Fact("Z", "of", "C") in joined.graph.facts and Fact("C", "in", "Z") in joined.graph.facts
    assert joined.origin.holders[Fact("C", "in", "Z")] == ["a.json"]
    assert joined.content()["provenance"]["left_out"] == [
        {"graph": "b.json", "fact": ["C", "of", "Z"], "reason": SECOND_LINK}
    ]


def test_edited_facts_precede_those_of_earlier_graphs() -> None:
    """B's edit needs its one original object, and its link."""
    first = {"facts": [*FIRST["facts"], ["B", "in", "Y"], ["B", "near", "Z"]]}
    joined = join(first, {"edits": [["B", "in", "X"]]})
    assert [tuple(one) for one in joined.left_out] == [
        ("a.json", Fact("B", "in", "Y"), SECOND_OBJECT), ("a.json", Fact("B", "near", "Z"), SECOND_LINK)
    ]  # fmt: skip
    assert [edit.fact for edit in joined.graph.edits] == [Fact("A", "in", "Z"), Fact("B", "in", "Z")]
    later = join({}, {"facts": [["A", "in", "Y"], ["B", "in", "Z"]], "edits": [["B", "in", "X"]]})
    assert [tuple(one) for one in later.left_out] == [("b.json", Fact("A", "in", "Y"), SECOND_OBJECT)]


def test_edits_are_joined() -> None:
    assert len(join({}, {}).graph.edits) == 1
    assert [edit.target_new for edit in join({}, {"edits": [["A", "in", "W"]]}).graph.edits] == ["X", "W"]


def test_three_graphs() -> None:
    joined = join_graphs(files_of(FIRST, SECOND, {**FIRST, "facts": [["A", "in", "Z"], ["B", "in", "Z"]]}))
    assert joined.origin.holders[Fact("A", "in", "Z")] == ["a.json", "b.json", "c.json"]
    assert joined.graph.question(Fact("B", "in", "Z")) == "In what does B lie?"
    assert len(joined.held_by(joined.files[2])) == 2


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"facts": [["A", "in", "Y"]]}, "b.json edits A | in | Y, and a.json A | in | Z; an edited relation has one"),
        (
            {"facts": [["A", "of", "Z"]], "edits": [["A", "of", "X"]]},
            "b.json edits A | of | Z, and a.json A | in | Z; one relation may link two entities",
        ),
        (
            {"facts": [["B", "in", "Z"]], "edits": [["B", "in", "W"]], "aliases": {"Z": ["X"]}},
            "a.json + b.json: field 'edits' changes 'Z' to 'X', another name of it",
        ),
        (
            {"facts": [["B", "in", "Z"]]},
            "b.json: field 'edits' changes 'A', 'in' to 'X', of which the graph has 0 facts",
        ),
    ],
)
def test_edits_that_exclude_each_other_are_errors(
    second: dict[str, Any], message: str, tmp_path: Path, capsys: Any
) -> None:
    code, out = build(tmp_path, FIRST, {**SECOND, **second})
    assert code == 2 and message in capsys.readouterr().err and not out.exists()


def test_a_graph_counts_once_and_equal_file_names_are_distinguished(tmp_path: Path, capsys: Any) -> None:
    assert build(tmp_path, FIRST, FIRST)[0] == 2
    assert "b.json has the content of a.json; give each graph once" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "graph.json", tmp_path / "other" / "graph.json"]
    for path, graph in zip(paths, (FIRST, SECOND), strict=True):
        path.write_text(json.dumps(graph), encoding="utf-8")
    assert [file.name for file in read_graphs([str(path) for path in paths])] == [str(path) for path in paths]
    assert build(tmp_path, FIRST, {**SECOND, "provenance": "mine"})[0] == 0
    assert "\nb.json: 3 facts" in capsys.readouterr().out  # without a writer


def test_no_input_is_overwritten(tmp_path: Path, capsys: Any) -> None:
    build(tmp_path, FIRST, SECOND)
    words = ["build-knowgic", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(tmp_path / "b.json")]
    assert run_verb([*words, "--overwrite"]) == 2 and "is a file of the input" in capsys.readouterr().err
    assert len(read_graph(tmp_path / "b.json").facts) == 3


NAMES = st.sampled_from(["A", "B", "C", "the B", "c.", "Dee", "D", "E"])


@st.composite
def graphs(draw: Any) -> dict[str, Any]:
    rows = draw(st.lists(st.tuples(NAMES, st.sampled_from(["r", "q", "the r"]), NAMES), max_size=8))
    by_link = {(s, o): [s, r, o] for s, r, o in rows if not (s == "A" and r == "r") and s != o}
    facts = [["A", "r", "Z"], *(fact for link, fact in by_link.items() if link != ("A", "Z"))]
    used = {fact[1] for fact in facts}
    number = draw(st.integers(0, 1))
    wording = {"prompt": f"{{}} is {number}", "question": f"What is {number} of {{}}?"}
    aliases = draw(st.dictionaries(st.sampled_from(["D", "E", "Z"]), st.lists(NAMES, max_size=2), max_size=2))
    return {"relations": dict.fromkeys(used, wording), "facts": facts, "edits": [["A", "r", "New"]], "aliases": aliases}


@given(first=graphs(), second=graphs())
def test_every_fact_is_joined_or_left_out(first: dict[str, Any], second: dict[str, Any]) -> None:
    files = files_of(first, second)
    joined = join_graphs(files)
    assert joined.origin.holders.keys() == set(joined.graph.facts)
    for file in files:
        out = [one for one in joined.left_out if one.graph == file.name]
        assert len(joined.held_by(file)) + len(out) == len(file.graph.facts)
    assert [fact for fact in joined.graph.facts if fact in files[0].graph.facts] == list(files[0].graph.facts)
    assert not [one for one in joined.renamed if one.graph == "a.json"]
    for fact in files[0].graph.facts:
        assert joined.graph.wording(fact) == files[0].graph.wording(fact)
    again = join_graphs([GraphFile("j", "j", None, joined.graph), files[0], files[1]])
    assert again.graph.facts == joined.graph.facts
