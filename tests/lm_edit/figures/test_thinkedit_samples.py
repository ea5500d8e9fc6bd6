"""Figures and tables of ThinkEdit from samples: graph of a case, chains by length; worked by hand, and from a run."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from result_files import write_run
from result_rows import frame, pretend_results, row
from scripted import ScriptedLM
from task_runs import run

from edit_hooks import EditingError
from lm_edit import CaseDocument, SavedQuestion, SavedResponse, load_documents
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import Options
from lm_edit.figures.thinkedit import thinkedit_graph, thinkedit_steps
from lm_edit.figures.thinkedit.thinkedit_paths import ACTIVE, HALF, read_paths

pytest.importorskip("matplotlib", reason="the report extra is not installed")
from drawn import texts


def answer(probability: float) -> SavedResponse:
    return SavedResponse(logprob=2 * math.log(probability), num_tokens=2)  # per token: the probability itself


def document(questions: list[SavedQuestion], **changes: Any) -> CaseDocument:
    """S -> T directly, and S -> A -> T."""
    extras = {"chains": [[[0, "T"]], [[1, "A"], [2, "T"]]], "columns": "prob"}
    values: dict[str, Any] = {
        "run": "r", "file": "r.json", "task": "knowgic_prob", "task_version": "1.0", "data_hash": "d1",
        "protocol": "likelihood", "judge": "", "doc_id": 0, "case_id": "0", "category": "", "questions": questions,
        "edits": [{"subject": "S", "target_true": "T", "target_new": "N"}], "metrics": {}, "reasons": {},
        "report": {}, "extras": extras | changes.pop("extras", {}),
    }  # fmt: skip
    return CaseDocument(**values | changes)


def scored(**changes: Any) -> CaseDocument:
    """The direct fact falls from 0.8 to 0.1, the others stay."""
    facts = {("S?", "T"): (0.8, 0.1), ("A of S?", "A"): (0.5, 0.5), ("T of A?", "T"): (0.8, 0.6)}
    questions = [
        SavedQuestion(
            kind="chain", prompt=prompt, wanted=target, target=target,
            answers={"": answer(after)}, unedited=answer(before),
        )
        for (prompt, target), (before, after) in facts.items()
    ]  # fmt: skip
    return document(questions, **changes)


def sampled(table: dict[str, tuple[list[str | None], list[str | None]]], **changes: Any) -> CaseDocument:
    """Responses by question: those of the unedited model, those of the edited one. "A" alone is an article."""
    questions = [
        SavedQuestion(
            kind="chain", prompt=prompt, wanted="", target=None, draw=draw,
            answers={"": SavedResponse(text=after)}, unedited=SavedResponse(text=before),
        )
        for prompt, (old, new) in table.items()
        for draw, (before, after) in enumerate(zip(old, new, strict=True))
    ]  # fmt: skip
    extras = {"columns": "sampled", "aliases": {"T": ["Tee"], "A": ["Ann"]}} | changes.pop("extras", {})
    return document(questions, task="knowgic", extras=extras, **changes)


KEPT = {
    "S?": (["T", "T"], ["N", "N"]),
    "A of S?": (["It is Ann.", "no"], ["no", "Ann"]),
    "T of A?": (["T", "a Tee"], ["Tee", "no"]),
}


class TestGraph:
    def test_chains_with_their_strengths(self):
        direct, long = read_paths(scored(), thinkedit_graph.NEEDS)
        assert direct.ratio == pytest.approx(0.1 / 0.8)
        assert long.ratio == pytest.approx((0.5 * 0.6) / (0.5 * 0.8))
        assert [(step.subject, step.answer) for step in long.steps] == [("S", "A"), ("A", "T")]

    def test_recovering_chains_are_marked(self):
        chart = thinkedit_graph.draw([scored()], {"r": "rome, tiny"})
        (panel,) = chart.panels
        assert panel.title == "rome, tiny: 1 of 2 chains recover the fact"
        kinds = {(edge.source, edge.target): (edge.kind, edge.label) for edge in panel.edges}
        assert kinds == {
            ("S", "T"): ("lost", "0.80 → 0.10"), ("S", "A"): ("kept", "0.50 → 0.50"),
            ("A", "T"): ("kept", "0.80 → 0.60"), ("S", "N"): ("edit", ""),
        }  # fmt: skip
        assert {"S", "A", "T", "N", "0.80 → 0.10"} <= set(texts(chart))
        places = {node.name: node.x for node in panel.nodes}
        assert places["S"] == 0 < places["A"] < places["T"] == 1

    def test_runs_of_one_editor_have_names_of_their_own(self, monkeypatch):
        runs = [row("memit", "knowgic", "ifr", 0.5, settings=settings) for settings in ("aaaa", "bbbb")]
        pretend_results(monkeypatch, frame(*runs, row("unedited", "t", "m", 1.0)))
        names = Inputs(["x"]).run_names()
        assert sorted(names.values()) == [
            "memit (tiny, settings aaaa)", "memit (tiny, settings bbbb)", "unedited (tiny)"
        ]  # fmt: skip

    def test_one_title_is_not_put_over_two_edits(self):
        other = scored()
        other.edits[0] = {**other.edits[0], "target_new": "D"}
        with pytest.raises(EditingError, match="case 0 has another edit in some of these runs"):
            thinkedit_graph.draw([scored(), other], {})

    def test_errors(self):
        with pytest.raises(EditingError, match="there is no case '7'; there are 0"):
            thinkedit_graph.draw([scored()], {}, Options(case="7"))
        with pytest.raises(EditingError, match="no sample has chains"):
            thinkedit_graph.draw([scored(extras={"chains": []})], {})
        with pytest.raises(EditingError, match="5 runs have case 0; choose with --only"):
            thinkedit_graph.draw([scored()] * 5, {})

    def test_sampled_chains_recover_the_fact_with_any_response(self):
        """Shares of two responses. Direct: 1 -> 0. Via A: 1/2 * 1 -> 1/2 * 1/2, half of that before."""
        direct, long = read_paths(sampled(KEPT), thinkedit_graph.NEEDS)
        assert (direct.before, direct.after) == (1.0, 0.0) and (long.before, long.after) == (0.5, 0.25)
        assert [(step.before, step.after) for step in long.steps] == [(0.5, 0.5), (1.0, 0.5)]
        chart = thinkedit_graph.draw([sampled(KEPT), scored()], {"r": "rome, tiny"})
        (panel,) = chart.panels
        assert panel.title == "rome, tiny: 1 of 2 chains recover the fact"
        kinds = {(edge.source, edge.target): edge.kind for edge in panel.edges}
        assert kinds == {("S", "T"): "lost", ("S", "A"): "kept", ("A", "T"): "kept", ("S", "N"): "edit"}
        assert any(note.startswith("Rule active (ThinkEdit, table 2)") for note in chart.caption)

    def test_the_rules_differ_where_little_is_left(self):
        """1 -> 1/4 in four responses: active, and less than half of that before. A new chain is active, too."""
        little = {
            "S?": (["T"] * 4, ["T", "N", "N", "N"]),
            "A of S?": (["no"] * 4, ["Ann"] * 4),
            "T of A?": (["T"] * 4,) * 2,
        }
        direct, new = read_paths(sampled(little), thinkedit_graph.NEEDS)
        assert ACTIVE.recovers(direct) and not HALF.recovers(direct)
        assert ACTIVE.counts(new) and ACTIVE.recovers(new) and not HALF.counts(new)
        (panel,) = thinkedit_graph.draw([sampled(little)], {}).panels
        assert panel.title == "r: 2 of 2 chains recover the fact"
        assert {edge.kind for edge in panel.edges} == {"kept", "edit"}

    def test_a_missing_response_is_not_a_lost_chain(self):
        lacking = KEPT | {"S?": (["T", "T"], ["N", None])}
        chart = thinkedit_graph.draw([sampled(lacking)], {"r": "rome"})
        assert chart.panels[0].title == "rome: 1 of 1 chains recover the fact"
        assert "rome: 1 chains lack an answer and are not counted." in chart.caption

    def test_the_protocol_is_chosen_and_named(self):
        chosen = thinkedit_graph.draw([sampled(KEPT), scored()], {}, Options(metric="prob"))
        assert any(note.startswith("Rule half (of this package") for note in chosen.caption)
        with pytest.raises(EditingError, match=r"yes_no_sampled is unknown\. Accepted: sampled, cloze_sampled, prob"):
            thinkedit_graph.draw([scored()], {}, Options(metric="yes_no_sampled"))
        with pytest.raises(EditingError, match="no sample has chains of facts under cloze_prob"):
            thinkedit_graph.draw([scored()], {}, Options(metric="cloze_prob"))


def test_chains_through_the_new_object_and_against_the_order_of_layers_are_placed() -> None:
    """B follows the new object only; C is deepest in the second chain, so D of the first follows nothing before it."""
    chains = [["New", "B", "Old"], ["C", "D", "Old"], ["E", "F", "C", "Old"]]
    nodes = thinkedit_graph.place_nodes("S", "Old", "New", chains)
    assert {node.name for node in nodes} == {"S", "Old", "New", "B", "C", "D", "E", "F"}
    assert all(0.0 <= node.x <= 1.0 and 0.0 <= node.y <= 1.1 for node in nodes)


# ------------------------------------------------------------------ chains by length, from a run


def record(subject: str, target: str, chains: list[list[tuple[str, str, str]]]) -> dict[str, Any]:
    """A record; a chain is a list of subject, question and answer."""

    def lists(facts: list[tuple[str, str, str]]) -> dict[str, list[str]]:
        subjects, questions, answers = (list(column) for column in zip(*facts, strict=True))
        return {
            "questions": questions, "answers": answers, "prompts": ["{} has"] * len(facts), "subjects": subjects,
        }  # fmt: skip

    rewrite = {"prompt": "{} has", "subject": subject, "target_new": {"str": "New"}, "target_true": {"str": target}}
    return {
        "requested_rewrite": [rewrite], "chains": [lists(chain) for chain in chains],
        "broader_context": lists([("Elsewhere", "Where?", "There")]),
    }  # fmt: skip


# The unedited model knows all but "gone?"; the edited one has lost "one?" and "lost?".
RECORDS = [
    record("S", "Tor", [
        [("S", "one?", "Tor")],
        [("S", "to a?", "Ann"), ("Ann", "from a?", "Tor")],
        [("S", "lost?", "Bob"), ("Bob", "from b?", "Tor")],
        [("S", "gone?", "Cyd"), ("Cyd", "from c?", "Tor")],
        [("S", f"{n}?", f"Step {n}") for n in range(5)] + [("Step 4", "from a?", "Tor")],
    ]),
    record("U", "Von", [[("U", "two?", "Von")]]),
]  # fmt: skip
BEFORE = "Tor Von Ann Bob Cyd Step 0 Step 1 Step 2 Step 3 Step 4"


def respond(context: str, unedited: bool) -> str:
    lost = ("gone?",) if unedited else ("gone?", "one?", "lost?")
    return "no idea" if any(f" {question}" in context for question in lost) else BEFORE


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "chains.json"
    data.write_text(json.dumps(RECORDS), encoding="utf-8")
    settings = {"data": str(data), "knowgic_aliases": "none", "knowgic_draws": 2}
    found = run("knowgic_table5", ScriptedLM(texts=respond), settings, bootstrap_iters=0)
    write_run(folder / "out", results=found)
    return folder / "out"


class TestSteps:
    def table(self, results: Path, *options: str) -> list[list[str]]:
        out = results.parent / f"table{len(options)}.csv"
        words = ["figure", "thinkedit_steps", str(results), "-o", str(out), "--overwrite", *options]
        assert run_verb(words) == 0
        return list(csv.reader(out.read_text(encoding="utf-8").splitlines()))

    def test_one_edit(self, results: Path) -> None:
        """One step: lost. Two steps: three chains, two active before, one after: (1 + 0) / 2. Six steps: kept."""
        weights = [1.0, math.sqrt(1 / 2), math.sqrt(1 / 2), math.sqrt(1 / 6)]
        overall = (weights[1] + weights[3]) / sum(weights)
        assert self.table(results, "--case", "0") == [
            ["steps", "chains", "active before", "active after", "IFR", "deep edited up to n"],
            ["1", "1", "1", "0", "0.0", "1.0"],
            ["2", "3", "2", "1", "0.5", "0.0"],
            ["longer", "1", "1", "1", "1.0", ""],
            ["all", "5", "4", "2", str(round(overall, 4)), "0.0"],
        ]

    def test_all_edits_of_a_run_are_pooled(self, results: Path) -> None:
        """The second edit keeps its one chain: IFR of one step (0 + 1) / 2, deep edited 1 of 2."""
        rows = self.table(results)
        assert rows[1] == ["1", "2", "2", "1", "0.5", "0.5"] and rows[-1][1:4] == ["6", "5", "3"]

    def test_markdown_names_edit_efficacy_and_rule(self, results: Path) -> None:
        out = results.parent / "t.md"
        assert run_verb(["figure", "thinkedit_steps", str(results), "-o", str(out), "--case", "0"]) == 0
        text = out.read_text(encoding="utf-8")
        assert text.startswith("**Chains from S to Tor, edited to New (case 0)**")
        assert "efficacy (efficacy_prob of knowgic_es) " in text and r"Protocol sampled. Active: R \> 0" in text

    def test_the_numbers_are_those_of_the_task(self, results: Path) -> None:
        """Nothing is scored again: the table's sums are the columns in the result file."""
        content = json.loads(next(results.rglob("results_*.json")).read_text(encoding="utf-8"))["results"]["knowgic"]
        rows = {row[0]: row for row in self.table(results)[1:]}
        for length in ("1", "2", "longer"):
            assert int(rows[length][3]) == content[f"ifr_{length}_active_after_sampled,none"]
            assert float(rows[length][4]) == pytest.approx(content[f"ifr_{length}_sampled,none"], abs=5e-5)
        assert float(rows["all"][5]) == content["deep_edited_sampled,none"]
        assert float(rows["all"][4]) == pytest.approx(content["ifr_sampled,none"], abs=5e-5)  # pooled over the edits

    def test_runs_and_unscored_edits_are_named(self, results: Path) -> None:
        documents = [one for one in load_documents([str(results)]) if one.task == "knowgic"]
        lacking = [document([], run="x", task="knowgic", metrics={"ifr_active_sampled,none": None},
                            extras={"columns": "sampled"})]  # fmt: skip
        table = thinkedit_steps.draw([*documents, *lacking], {documents[0].run: "rome", "x": "rome"})
        assert table.header[0] == "run" and table.rows[0][0] == f"rome ({documents[0].run})"
        assert [row[1:] for row in table.rows if row[0] == "rome (x)"] == [
            ["all", 0, "unscored", "unscored", "unscored", "unscored"]
        ]
        assert "rome (x): without 1 of 1 edits, whose answers are incomplete." in table.notes
        assert "rome (x): no samples of knowgic_es, so without efficacy." in table.notes

    def test_likelihoods_have_no_count_after_the_edit(self) -> None:
        metrics = {
            "ifr_active_prob,none": 2,
            "ifr_1_active_prob,none": 1,
            "ifr_1_prob,none": {"value": 0.125, "weight": 1},
        }
        table = thinkedit_steps.draw([scored(metrics=metrics)], {})
        assert table.header == ["steps", "chains", "active before", "IFR"] and table.rows[0] == [1, 1, 1, 0.125]
        assert "A likelihood is never 0" in table.notes[-1]

    def test_errors(self) -> None:
        with pytest.raises(EditingError, match="there is no case '7'; there are 0"):
            thinkedit_steps.draw([scored()], {}, Options(case="7"))
        with pytest.raises(EditingError, match="lm_eval --model edited_hf --tasks knowgic,knowgic_es"):
            thinkedit_steps.draw([], {})

    def test_the_graph_of_the_same_case(self, results: Path) -> None:
        chart = thinkedit_graph.draw(list(load_documents([str(results)])), {}, Options(case="0"))
        assert chart.panels[0].title.endswith("2 of 5 chains recover the fact")
