"""``--only`` reaches matrices and samples, results that cannot be compared are refused, and the advice is a command."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from paths import RECORDS
from result_files import change, judged_run, write_run
from scripted import ScriptedLM, StreamLM
from task_runs import run

from edit_hooks import EditingError
from lm_edit import load_results
from lm_edit.figures.drawing.charts import Chart
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import Options
from lm_edit.figures.registry import find_figure

pytest.importorskip("matplotlib", reason="the report extra is not installed")

WILD = "qaedit_wild_reliability"
# The first stream forgets every edit at the next step, the second one none; the rows of both are one run.
STREAMS = {"qa_inst": ("1000", ".100", "..10", "...1"), "question_only": ("1111", ".111", "..11", "...1")}
FORGOTTEN = [[1.0], [0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]  # "St. Brannock" ends at its full stop


def date(number: int) -> dict[str, Any]:
    """Start of a run and the date in the names of its files; a higher number is newer."""
    return {"start": 1.79e9 + number, "date": f"2026-11-2{number}T10-00-00.000001"}


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The result files of one run under two settings of its task, with their matrices."""
    folder = tmp_path_factory.mktemp("streams")
    files = []
    for number, (context, marks) in enumerate(STREAMS.items()):
        lm = StreamLM({str(case): own for case, own in enumerate(marks)}, retention=True)
        settings = {"mode": "sequential", "retention": True, "wild_context": context}
        facts = {"editor": "rome", "mode": "sequential", "num_edits": 4, "edits": "qaedit", "edit_batch_size": 1}
        results = run(WILD, lm, settings, bootstrap_iters=0)
        files.append(write_run(folder / context, results=results, **facts, **date(number)))
    assert load_results(folder)["run"].nunique() == 1
    return files


def respond(knows: bool) -> Callable[[str, bool], str]:
    """A model that knows all chains; edited, it has lost the answers to one question in three, or none."""
    records = json.loads((RECORDS / "chains.json").read_text(encoding="utf-8"))
    chains = [chain for record in records for chain in record.get("chains") or [record["chain"]]]
    answers = " . ".join(answer for chain in chains for answer in chain["answers"])

    def texts(context: str, unedited: bool) -> str:
        return f" {answers}" if unedited or knows or sum(map(ord, context)) % 3 else " nothing"

    return texts


@pytest.fixture(scope="module")
def draws(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The result files of one run with two numbers of draws."""
    folder = tmp_path_factory.mktemp("draws")
    files = []
    for number, num_draws in enumerate((2, 3)):
        lm = ScriptedLM(texts=respond(knows=num_draws == 3))
        results = run("knowgic", lm, {"knowgic_draws": num_draws}, bootstrap_iters=0)
        files.append(write_run(folder / str(num_draws), results=results, **date(number)))
    assert load_results(folder)["run"].nunique() == 1
    return files


def draw(name: str, files: list[Path], only: Sequence[str] = (), **options: Any) -> Any:
    inputs = Inputs([str(file) for file in files], only)
    return find_figure(name).draw(inputs, Options(**options))


def table_of(out: Path, name: str, *words: object) -> list[list[str]]:
    assert run_verb(["figure", name, *map(str, words), "-o", str(out), "--overwrite"]) == 0
    return list(csv.reader(out.read_text(encoding="utf-8").splitlines()))


def advised(error: str) -> list[str]:
    """The option that an error advises, as a shell reads it."""
    return shlex.split(error.partition("hoose with ")[2].partition(" or give ")[0])


class TestMatrices:
    def test_the_matrix_is_of_the_chosen_file(self, streams: list[Path]) -> None:
        for file, context in zip(streams, STREAMS, strict=True):
            chart: Chart = draw("wild_retention", streams, [f"file={file}"])
            alone: Chart = draw("wild_retention", [file])
            assert [panel.values for panel in chart.panels] == [panel.values for panel in alone.panels]
            assert f"wild_context={context}" in chart.caption[0] and chart.caption == alone.caption
        assert draw("wild_retention", streams, [f"file={streams[0]}"]).panels[0].values == FORGOTTEN

    def test_the_advice_can_be_executed(
        self, streams: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The protocol has commas, spaces and quotes."""
        words = ["figure", "wild_retention", *map(str, streams), "-o", str(tmp_path / "r.svg")]
        assert run_verb(words) == 2
        error = capsys.readouterr().err
        assert f"differ in protocol of efficacy_wild_em ({WILD})" in error
        option, chosen = advised(error)
        assert option == "--only" and chosen.endswith("wild_context=qa_inst")
        assert run_verb([*words, option, chosen]) == 0
        assert draw("wild_retention", streams, [chosen]).panels[0].values == FORGOTTEN

    def test_results_without_a_matrix_are_not_drawn(self, streams: list[Path], tmp_path: Path) -> None:
        bare = write_run(
            tmp_path, results=run(WILD, StreamLM({"0": "1"}), {"mode": "sequential", "wild_context": "question_only"}),
            editor="rome", mode="sequential", num_edits=4, edits="qaedit", edit_batch_size=1, **date(2),
        )  # fmt: skip
        assert draw("wild_retention", [streams[0], bare]).panels[0].values == FORGOTTEN


class TestSamples:
    def test_one_run_under_two_protocols_is_refused_and_can_be_chosen(
        self, draws: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out, other = tmp_path / "steps.csv", tmp_path / "other.csv"
        first, second = (table_of(out, "thinkedit_steps", file) for file in draws)
        assert first != second and first[-1][1] == second[-1][1] == "8"  # chains of each
        assert run_verb(["figure", "thinkedit_steps", *map(str, draws), "-o", str(other)]) == 2
        error = capsys.readouterr().err
        assert "the runs differ in protocol of " in error and "(knowgic)" in error
        assert table_of(out, "thinkedit_steps", *draws, *advised(error)) == first
        assert table_of(out, "thinkedit_steps", *draws, "--only", f"file={draws[1]}") == second

    @pytest.mark.parametrize(("name", "ending"), [("thinkedit_graph", ".svg"), ("case_answers", ".csv")])
    def test_so_it_is_in_figures_of_one_case(
        self, draws: list[Path], name: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["figure", name, *map(str, draws), "-o", str(tmp_path / f"f{ending}"), "--case", "0"]
        assert run_verb(words) == 2
        error = capsys.readouterr().err
        assert "the runs differ in protocol of " in error
        assert run_verb([*words, *advised(error)]) == 0

    def test_the_efficacy_is_of_one_protocol(self, draws: list[Path], tmp_path: Path) -> None:
        files = [
            write_run(tmp_path / str(number), "knowgic_es", **date(number)) for number in range(3, 5)
        ]  # fmt: skip
        change(files[1], lambda content: content["configs"]["knowgic_es"]["settings"].update(score_unedited_cases=True))
        assert any(
            "efficacy (efficacy_prob of knowgic_es)" in note
            for note in draw("thinkedit_steps", [draws[0], files[0]]).notes
        )
        with pytest.raises(EditingError, match=r"differ in protocol of .*\(knowgic_es\)"):
            draw("thinkedit_steps", [draws[0], *files])

    def test_limits_matter_to_tables_of_all_cases_only(self, tmp_path: Path) -> None:
        runs = {"rome": None, "memit": 2}
        files = [
            write_run(
                tmp_path / editor, results=run("knowgic", ScriptedLM(texts=respond(True)), limit=limit), editor=editor
            )
            for editor, limit in runs.items()
        ]
        with pytest.raises(EditingError, match=r"differ in limit of .*--only limit=2 or give"):
            draw("thinkedit_steps", files)
        assert len(draw("thinkedit_steps", files, ["limit=2"]).notes) == 2
        assert draw("thinkedit_steps", files, case="0").header[0] == "run"
        assert len(draw("thinkedit_graph", files, case="0").panels) == 2

    def test_models_with_their_own_chat_templates_stand_in_one_table_of_answers(self, tmp_path: Path) -> None:
        files = [
            write_run(
                tmp_path / name, WILD, model_args=f"pretrained=org/{name},editor=r_rome",
                model_identity={"weights": name}, **date(number),
            )
            for number, name in enumerate(("one", "two"))
        ]  # fmt: skip
        for sha, file in enumerate(files, start=12345):
            change(file, lambda content, sha=str(sha): content.update(chat_template_sha=sha))
        table = draw("case_answers", files)
        assert table.header[4:6] == ["unedited, org/one", "unedited, org/two"]

    def test_the_cases_are_those_of_the_chosen_judge(self, tmp_path: Path) -> None:
        """Two files of one run; cases come once, from the newest of the chosen ones."""
        for number, (judge, verdict) in enumerate((("gpt, 4", 1.0), ("tiny", 0.0))):
            judged_run(tmp_path, judge, number, (verdict,) * 4)

        def verdicts(*only: str) -> list[Any]:
            documents = Inputs([str(tmp_path)], only).documents()
            return [document.metrics["efficacy_wild_judge,judge"] for document in documents]

        assert verdicts() == verdicts("judge=model=tiny") == [0.0] * 4
        assert verdicts("judge=model=gpt, 4") == [1.0] * 4
        assert verdicts("judge=model=gpt, 4", "judge=model=tiny") == [0.0] * 4

    def test_a_score_in_two_pipelines_is_not_a_difference(self, tmp_path: Path) -> None:
        """The protocol of the judged pipeline ends in "judged"; the answers are the same."""
        path = judged_run(tmp_path, "tiny", 0, (1.0,) * 4)
        change(path, lambda content: content["results"][WILD].update({"efficacy_wild_em,judge": 0.5}))
        assert load_results(path).groupby("metric")["protocol"].nunique()["efficacy_wild_em"] == 2
        assert draw("case_answers", [path]).rows


class TestSetsOfCases:
    def test_other_samples_are_refused_and_can_be_chosen(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for editor, samples in {"rome": None, "memit": {"bake_rq": [0]}}.items():
            results = run("bake_rq", samples=samples, bootstrap_iters=0)
            assert results["config"].get("samples") == samples
            write_run(tmp_path / editor, results=results, editor=editor)
        words = ["figure", "bake_logprob", str(tmp_path), "-o", str(tmp_path / "f.svg")]
        assert run_verb(words) == 2
        error = capsys.readouterr().err
        assert "the runs differ in samples of reverse_qa_logprob_new (bake_rq): none, " in error
        assert run_verb([*words, *advised(error)]) == 0
        (digest,) = {*load_results(tmp_path)["samples"], ""} - {""}
        assert run_verb([*words[:-1], str(tmp_path / "g.svg"), "--only", f"samples={digest}"]) == 0
