"""A run with a broken edit says so after its table, and no other run does."""

from __future__ import annotations

import json
from typing import Any

import lm_eval.tasks.manager
import pytest
from lm_eval.__main__ import cli_evaluate
from lm_eval.utils import make_table
from lm_runs import build
from lm_runs import run as run_model
from record_files import write_jsonl
from scripted import StreamLM
from task_runs import run

import lm_eval_editing_autoload
from edit_hooks.utils.logs import BANNER, get_logger
from lm_eval_tasks.report.printing.anomalies import find_anomalies

lm_eval_editing_autoload.install()  # as the .pth file does in an installed environment

ES_LS = ["bake_es", "bake_ls"]
FAST = {"generate": False}
NO_STEP = {"layers": [1], "num_steps": 2, "lr": 1e-12}


class ReportingStream(StreamLM):
    """A scripted stream that describes itself in the results, as `edited_hf` does."""

    mode = "sequential"

    def get_model_info(self) -> dict[str, Any]:
        return {"edited_hf": {"mode": self.mode, "editor": "scripted", "editor_writes": ["weights"]}}


def kinds(results: dict[str, Any]) -> list[str]:
    return [anomaly["kind"] for anomaly in results["anomalies"]]


def stream(marks: list[str], tmp_path: Any, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The results of a stream with one case per mark; "1" and "0" after each step, "." before the case's edit."""
    holds = {str(number): mark for number, mark in enumerate(marks)}
    path = write_jsonl(tmp_path / "bake_qa.jsonl", [bake_record(number) for number in range(len(marks))])
    return run("bake_es", ReportingStream(holds), {"mode": "sequential", "data": str(path), **(settings or {})})


def bake_record(number: int) -> dict[str, Any]:
    return {
        "case_id": number,
        "requested_rewrite": {
            "prompt": "{} is the capital of",
            "subject": f"Town {number}",
            "target_new": {"str": "Dravonia"},
            "target_true": {"str": "Ostravia"},
        },
        "paraphrase_prompts": [],
        "neighborhood_prompts": ["Velm is the capital of", "Karsk is the capital of"],
        "reverse_qa": question("The capital of Dravonia is", f"Town {number}", "Velm"),
        "reverse_judge": question(f"Whether the capital of Dravonia is Town {number}?", "Yes", "No"),
    }


def question(prompt: str, new: str, true: str) -> dict[str, Any]:
    return {"prompt": prompt, "target_new": {"str": new}, "target_true": {"str": true}}


def collapsing(num_cases: int, num_held: int) -> list[str]:
    """Marks of cases that hold after their own edit, of which some hold to the end."""
    steps = range(num_cases)
    return ["." * own + "1" + ("1" if own < num_held else "0") * (num_cases - own) for own in steps]


# --- a stream that ends worse than chance --------------------------------------------------------------------------


def test_a_stream_that_ends_below_chance_is_named_after_the_table(tmp_path, caplog) -> None:
    results = stream(collapsing(8, 0), tmp_path)
    assert kinds(results) == ["below_chance"]
    (anomaly,) = results["anomalies"]
    expected = (
        "bake_es: efficacy_prob was 1.00 right after each edit and is 0.00 after the stream, worse than chance (0.5)"
    )
    assert anomaly["text"].startswith(expected) and f"anomaly: {expected}" in caplog.text
    assert make_table(results).splitlines()[-1].startswith(f"Anomaly: {expected}")


@pytest.mark.parametrize(
    ("num_cases", "num_held", "settings"),
    [
        (8, 8, {}),  # everything holds
        (8, 3, {}),  # below a half, but within the error of the mean
        (4, 0, {}),  # too few cases
        (1, 0, {}),  # --limit 1
        (8, 0, {"immediate": False}),  # nothing to compare with
    ],
)
def test_other_streams_are_not_named(tmp_path, num_cases, num_held, settings) -> None:
    results = stream(collapsing(num_cases, num_held), tmp_path, settings)
    assert results["anomalies"] == [] and "Anomaly" not in make_table(results)


def test_a_stream_whose_edits_never_held_is_not_said_to_have_lost_them(tmp_path) -> None:
    marks = ["." * own + "0" * (9 - own) for own in range(8)]
    assert "below_chance" not in kinds(stream(marks, tmp_path))


def test_the_note_comes_once_after_the_last_table() -> None:
    results = {"anomalies": [{"kind": "no_effect", "text": "x"}], "results": {}, "groups": {}, "versions": {}}
    assert "Anomaly" not in make_table(results) and make_table(results, "groups").endswith("\nAnomaly: x")


def test_the_command_prints_it_after_its_table(tiny_path, wrong_first, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "built_in").mkdir()  # lm-eval's own thousands of tasks are not read
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(tmp_path / "built_in" / "manager.py"))
    options = f"pretrained={tiny_path('llama')},editor=ft_m,store=off,data={wrong_first}"
    settings = "editor_args=layers:[1];num_steps:1;lr:1e-12"
    words = ["lm_eval", "--model", "edited_hf", "--model_args", f"{options},{settings}", "--tasks", "bake_es"]
    results = ["--metadata", '{"generate": false}', "--output_path", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", [*words, "--device", "cpu", *results])
    cli_evaluate()
    *_, row, edits, note = (line for line in capsys.readouterr().out.splitlines() if line)
    assert row.startswith("|") and edits.startswith("Edits of bake_es: 6 made, 0 failed")
    assert note.startswith("Anomaly: bake_es: the target's negative log-likelihood did not fall")
    (saved,) = (tmp_path / "results").rglob("results_*.json")
    (anomaly,) = json.loads(saved.read_text(encoding="utf-8"))["anomalies"]
    assert anomaly == {"kind": "target_nll", "text": note.removeprefix("Anomaly: ")}


# --- edits without effect, and targets that do not become likelier --------------------------------------------------


@pytest.fixture(scope="module")
def wrong_first(tmp_path_factory: Any, tiny_path: Any) -> Any:
    """A tiny model and records whose old answers it prefers, so that an edit without effect has efficacy 0."""
    lm = build(str(tiny_path("llama")), mode="none", editor_args={})
    folder = tmp_path_factory.mktemp("records")
    path = write_jsonl(folder / "all.jsonl", [bake_record(number) for number in range(20)])
    rows = run_model(lm, ["bake_es"], str(path), FAST)["samples"]["bake_es"]
    wrong = [
        bake_record(int(row["doc"]["case_id"])) for row in rows if row["filter"] == "none" and not row["efficacy_prob"]
    ]
    assert len(wrong) >= 6
    return write_jsonl(folder / "bake_qa.jsonl", wrong[:6])


def test_edits_that_change_nothing_are_named(tiny_path, wrong_first) -> None:
    lm = build(str(tiny_path("llama")), editor="ft_m", editor_args=NO_STEP)
    results = run_model(lm, ES_LS, str(wrong_first), FAST)
    texts = {anomaly["kind"]: anomaly["text"] for anomaly in results["anomalies"]}
    assert list(texts) == ["target_nll", "no_effect"]
    assert "did not fall in the edits of 6 of 6 cases" in texts["target_nll"]
    assert "efficacy_prob is 0 over 6 cases and neighborhood_agree_tf exactly 1" in texts["no_effect"]
    assert texts["no_effect"].endswith("lm-edit tune --editor ft_m searches it.")


@pytest.mark.parametrize(
    ("options", "limit", "expected"),
    [
        ({"editor": "ft_m", "editor_args": {"layers": [1], "num_steps": 6, "lr": 0.05}}, None, []),  # edits that take
        ({"editor": "ft_m", "editor_args": NO_STEP}, 1, ["target_nll"]),  # one case: nothing about rates
        ({"editor": "ft_m", "editor_args": NO_STEP, "mode": "none"}, None, []),  # no edit at all
    ],
)
def test_no_alarm_without_a_reason(tiny_path, wrong_first, options, limit, expected) -> None:
    results = run_model(build(str(tiny_path("llama")), **options), ES_LS, str(wrong_first), FAST, limit=limit)
    assert kinds(results) == expected


def test_context_edits_are_not_told_to_take_larger_steps(tiny_path, wrong_first) -> None:
    results = run_model(build(str(tiny_path("llama")), editor="ice", editor_args={}), ES_LS, str(wrong_first), FAST)
    assert "target_nll" not in kinds(results)  # a context has no optimization
    assert all("lm-edit tune" not in anomaly["text"] for anomaly in results["anomalies"])
    answered = (
        results["results"]["bake_es"]["efficacy_prob,none"],
        results["results"]["bake_ls"]["neighborhood_agree_tf,none"],
    )
    assert ("no_effect" in kinds(results)) == (answered == (0, 1))


def test_runs_of_other_models_have_no_such_entry(tmp_path) -> None:
    path = write_jsonl(tmp_path / "bake_qa.jsonl", [bake_record(0)])
    assert "anomalies" not in run("bake_es", StreamLM({"0": "1"}), {"data": str(path)})


SAVED = {"efficacy_prob,none": 0.0, "efficacy_prob_n,none": 9, "edit,none": "{}"}
UNCHANGED = {"neighborhood_agree_tf,none": 1.0, "neighborhood_agree_tf_n,none": 9}


@pytest.mark.parametrize(
    ("efficacy", "unchanged", "expected"),
    [
        (SAVED, UNCHANGED, ["no_effect"]),
        (SAVED, {}, []),  # the other task is not in the run
        (SAVED, {"neighborhood_agree_tf,none": None, "neighborhood_agree_tf_n,none": 0}, []),  # nothing was scored
        (SAVED, {**UNCHANGED, "neighborhood_agree_tf,none": 0.999}, []),
        ({**SAVED, "efficacy_prob,none": 0.001}, UNCHANGED, []),
        ({**SAVED, "efficacy_prob_n,none": 4}, UNCHANGED, []),
        ({**SAVED, "edit,none": '{"edits": 3, "failed": 0, "target_nll_not_lower": 1}'}, {}, ["target_nll"]),
    ],
)
def test_both_conditions_are_needed(efficacy, unchanged, expected) -> None:
    run_info = {"mode": "single", "editor": "rome", "editor_writes": ["weights"]}
    configs = {
        "a": {"custom_dataset": "bake", "metric_list": [{"metric": "efficacy_prob", "role": "efficacy"}]},
        "b": {"custom_dataset": "bake", "metric_list": [{"metric": "neighborhood_agree_tf", "role": "unchanged"}]},
    }
    results = {"config": {"edited_hf": run_info}, "results": {"a": efficacy, "b": unchanged}, "configs": configs}
    assert [anomaly["kind"] for anomaly in find_anomalies(results)] == expected


# --- warnings of the run --------------------------------------------------------------------------------------------


class WarningStream(ReportingStream):
    """Logs lines while it answers, as an editor does whose optimization ends early."""

    log = get_logger("lm_eval.edited_hf")

    def loglikelihood(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        for _ in range(3):
            self.log.warning("edits ended %s", "early\x1b[2J")
        self.log.warning("another one")
        self.log.warning("edited_hf: a model", extra=BANNER)
        self.log.info("plain")
        return super().loglikelihood(requests, *args, **kwargs)


def test_the_table_ends_with_each_warning_of_its_run_once(tmp_path, caplog) -> None:
    path = write_jsonl(tmp_path / "bake_qa.jsonl", [bake_record(number) for number in range(2)])
    model = WarningStream({"0": "11", "1": ".1"})
    results = run("bake_es", model, {"mode": "sequential", "data": str(path), **FAST})
    lines = [line for line in make_table(results).split("\n") if line.startswith("Warning: ")]
    assert lines[:2] == ["Warning: edits ended early\\x1b[2J (3 times)", "Warning: another one"]
    assert not [line for line in lines if "a model" in line or "plain" in line]
    logged = [record.message for record in caplog.records]
    assert [logged.count(text) for text in ("edits ended early\\x1b[2J", "another one")] == [1, 1]
    assert "Warning: " not in make_table({**results, "date": 1.0}), "results of another run"
    assert "another one" not in json.dumps(results, default=str), "the file of a repeated run is the same"
    WarningStream.log.warning("another one")
    assert [record.message for record in caplog.records].count("another one") == 2, "after the run, each line counts"
