"""Counts of cases, and intervals, in the tables of finished runs are those of the samples."""

from __future__ import annotations

import copy
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from lm_eval.api.model import LM
from result_files import change, scripted_results, write_run
from scripted import ScriptedLM, StreamLM
from task_managers import task_manager
from task_runs import run

from lm_edit import load_cases, load_results
from lm_edit.cli.main import main


class Classifier(LM):
    """Answers " positive" or " negative", never without a label; pairs without token counts, as of a stock model."""

    tokenizer_name = "none"

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [(-1.0 - number % 2, False) for number in range(len(requests))]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        return [" positive" if number % 3 else " negative" for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("EditGLUE asks no such question")


def undecided(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
    """Every target is equally likely per token, so preferences and their margins are 0, and all tokens are right."""
    num_tokens = len(continuation.split())
    return -1.0 * num_tokens, list(range(num_tokens))


def editglue() -> dict[str, Any]:
    """Results of 12 embedded sentences; the label -> 6 right, 6 wrong, none without a label."""
    return lm_eval.simple_evaluate(
        model=Classifier(), tasks=["editglue_sst2"], task_manager=task_manager({"data": "mini"}), bootstrap_iters=0
    )


def leaderboard(paths: Sequence[Path], site: Path) -> list[dict[str, str]]:
    """The numbers that `lm-edit leaderboard` writes."""
    assert main(["leaderboard", *map(str, paths), "-o", str(site), "--resamples", "99"]) == 0
    with (site / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------ intervals


def test_a_difference_that_is_zero_in_all_cases_has_no_interval_of_a_share(tmp_path: Path) -> None:
    results = run("bake_es", lm=ScriptedLM(likelihoods=undecided), bootstrap_iters=0)
    for name in ("one", "other"):
        write_run(tmp_path / name, results=copy.deepcopy(results), editor=name)
    rows = {row["metric"]: row for row in leaderboard([tmp_path], tmp_path / "site")}  # both rows are the same
    assert (
        rows["efficacy_magnitude"]["value"],
        rows["efficacy_magnitude"]["low"],
        rows["efficacy_magnitude"]["high"],
    ) == ("0.0", "", "")
    assert rows["efficacy_argmax"]["value"] == "1.0" and float(rows["efficacy_argmax"]["low"]) == pytest.approx(
        0.5101, abs=1e-4
    )


def test_numbers_of_rows_have_neither_direction_nor_interval(tmp_path: Path) -> None:
    results = editglue()
    for name in ("one", "other"):
        write_run(tmp_path / name, task="editglue_sst2", results=copy.deepcopy(results), editor=name)
    frame = load_results(tmp_path)
    counts = frame[frame["metric"].isin(["correct", "incorrect", "invalid"])]
    assert counts["is_total"].all() and counts["higher_is_better"].isna().all() and not counts["is_share"].any()
    rows = {row["metric"]: row for row in leaderboard([tmp_path], tmp_path / "site")}
    assert (rows["invalid"]["value"], rows["invalid"]["low"], rows["invalid"]["rank"]) == ("0.0", "", "")
    assert (rows["correct"]["value"], rows["correct"]["rank"], rows["f1"]["rank"]) == ("6.0", "", "1")


def test_shares_are_those_that_a_task_declares(tmp_path: Path) -> None:
    """Less is better in some, and neither in those of the unedited model; a drift in nats is none."""
    for task in ("bake_mcq", "bake_revert", "bake_truth"):
        write_run(tmp_path / task, task)
    frame = load_results(tmp_path)
    shares = dict(zip(frame["metric"], frame["is_share"], strict=True))
    rates = dict(zip(frame["metric"], frame["is_rate"], strict=True))
    assert shares["mcq_old"] and not rates["mcq_old"] and shares["mcq_new"] and rates["mcq_new"]
    assert shares["mcq_new_unedited"] and shares["truth_acc_unedited"] and not rates["truth_acc_unedited"]
    assert not any(shares[name] for name in ("revert_drift", "revert_neighborhood_drift", "mcq_position_bias"))


# ------------------------------------------------------------------ columns without a count of their own


def test_an_unscored_column_of_a_stock_model_is_no_mistake(tmp_path: Path, capsys: Any) -> None:
    """`f1_new` needs token counts, which the model does not report; the counts of the others are those of the task."""
    path = write_run(tmp_path / "hf", task="editglue_sst2", results=editglue(), stock=True)
    rows = load_results(path).set_index("metric")
    assert rows["n"].to_dict() == {"f1": 12, "f1_new": 0, "mcc": 12, "correct": 12, "incorrect": 12, "invalid": 12}
    assert (rows["coverage"]["f1_new"], rows["coverage"]["f1"]) == (0.0, 1.0)
    assert main(["results", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "| f1_new | unscored (0) |" in shown and "| invalid | 0.000 (12) |" in shown
    assert main(["results", "check", str(path)]) == 0, capsys.readouterr()
    assert main(["results", "submit", str(path), "--repository", str(tmp_path / "repository")]) == 0, (
        capsys.readouterr()
    )
    (cell,) = [row for row in leaderboard([path], tmp_path / "site") if row["metric"] == "f1_new"]
    assert (cell["value"], cell["scored"], cell["cases"]) == ("", "0", "12")
    assert cell["left_out"] == "this model class does not report the number of tokens of a label: 12"


# ------------------------------------------------------------------ failures and unknown values


def shown(path: Path, metric: str, capsys: Any) -> str:
    """The cell of a metric in `lm-edit results show`, of one run."""
    capsys.readouterr()
    assert main(["results", "show", str(path), "--metrics", metric]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return lines[-1].split("|")[-2].strip()


@pytest.mark.parametrize(
    ("errors", "cell", "zeroed"),
    [
        # One record has no paraphrases; the others score 1, 0, 0 (Wilson's interval of 1 of 3).
        ({}, "0.333, 0.061 to 0.792 (3, 1 unscored)", 0),
        # Without the first: 0 of 2, and 0 of 3 with a 0 for it.
        ({"0": "no edit"}, "0.000, 0.000 to 0.658 (2, 1 failed, 0.000 with them as 0, 1 unscored)", 1),
        # Without the last: 1 of 2, and 1 of 3.
        ({"3": "no edit"}, "0.500, 0.095 to 0.905 (2, 1 failed, 0.333 with them as 0, 1 unscored)", 1),
    ],
)
def test_only_failures_count_as_zero(
    errors: dict[str, str], cell: str, zeroed: int, tmp_path: Path, capsys: Any
) -> None:
    results = scripted_results("bake_gs", errors=tuple(errors.items()))
    path = write_run(tmp_path, results=results)
    assert shown(path, "paraphrase_prob", capsys) == cell
    row = load_results(path).set_index("metric").loc["paraphrase_prob"]
    cases = load_cases(path)
    assert (row["failed"], row["zeroed"]) == (1 + zeroed, zeroed)
    assert cases[cases["metric"] == "paraphrase_prob"]["zeroed"].sum() == zeroed
    assert main(["results", "check", str(path)]) == 0


def test_a_wrong_number_of_failures_is_found(tmp_path: Path, capsys: Any) -> None:
    path = write_run(tmp_path, results=scripted_results("bake_gs"))
    change(path, lambda content: content["results"]["bake_gs"].update({"paraphrase_prob_zeroed,none": 2}))
    assert main(["results", "check", str(path)]) == 1
    told = capsys.readouterr().out
    assert "paraphrase_prob: 2 cases count as 0, but only 1 have no value." in told
    assert "paraphrase_prob_zeroed: the result is 2, but the value of the samples is 0." in told


def test_older_files_do_not_know_the_number_of_failures(tmp_path: Path, capsys: Any) -> None:
    path = write_run(tmp_path, results=scripted_results("bake_gs", errors=(("3", "no edit"),)), samples=False)
    change(path, lambda content: content["results"]["bake_gs"].pop("paraphrase_prob_zeroed,none"))
    assert shown(path, "paraphrase_prob", capsys) == "0.500, 0.095 to 0.905 (2, 2 unscored, 0.333 with failures as 0)"
    (row,) = [row for row in leaderboard([path], tmp_path / "site") if row["metric"] == "paraphrase_prob"]
    assert row["left_out"] == "unscored: 2"


# ------------------------------------------------------------------ stages of a stream


def test_cases_that_are_edited_after_a_checkpoint_are_not_asked_there(tmp_path: Path) -> None:
    """Streams of 4, a checkpoint after 2: in one nothing fails, in the other the second edit, which is due there."""
    whole = {"0": "1100", "1": ".100", "2": "..11", "3": "...1"}
    stopped = {"0": "1100", "1": ".?", "2": "..11", "3": "...1"}
    for name, holds in (("whole", whole), ("stopped", stopped)):
        settings = {"mode": "sequential", "checkpoints": "2", "immediate": True}
        results = run("bake_es", StreamLM(holds, {2: 1}), settings, bootstrap_iters=0)
        options = {"mode": "sequential", "num_edits": 4, "edits": "bake", "edit_batch_size": 1}
        write_run(tmp_path / name, results=results, editor=name, **options)
    rows = {
        (row["editor"], row["stage"]): (row["scored"], row["cases"], row["left_out"])
        for row in leaderboard([tmp_path], tmp_path / "site")
        if row["metric"] == "efficacy_prob"
    }
    reason = "edit failed: the guard stopped the stream: 1"
    assert rows == {
        ("whole", ""): ("4", "4", ""),
        ("whole", "immediate"): ("4", "4", ""),
        ("whole", "2"): ("2", "2", ""),
        ("stopped", ""): ("3", "4", reason),
        ("stopped", "immediate"): ("3", "4", reason),
        ("stopped", "2"): ("1", "2", reason),
    }
    frame = load_results(tmp_path)
    at_checkpoint = frame[(frame["metric"] == "efficacy_prob") & (frame["stage"] == "2")].set_index("editor")[
        "coverage"
    ]
    assert at_checkpoint.to_dict() == {"whole": 1.0, "stopped": 0.5}  # as on the leaderboard
    cases = load_cases(tmp_path)
    due = cases[(cases["metric"] == "efficacy_prob") & (cases["stage"] == "2")].groupby("case_id")["due"].all()
    assert due.to_dict() == {"0": True, "1": True, "2": False, "3": False}
    assert cases[cases["stage"] != "2"]["due"].all()


def test_cases_outside_the_stream_have_no_part_in_its_stages(tmp_path: Path) -> None:
    settings = {"mode": "sequential", "checkpoints": "1", "immediate": True}
    results = run("bake_es", StreamLM({"0": "11", "1": ".1"}, {1: 0}), settings, bootstrap_iters=0)
    write_run(tmp_path, results=results, mode="sequential", num_edits=2, edits="bake", edit_batch_size=1)
    rows = [row for row in leaderboard([tmp_path], tmp_path / "site") if row["metric"] == "efficacy_prob"]
    found = {row["stage"]: (row["scored"], row["cases"], row["left_out"]) for row in rows}
    assert found == {
        "": ("2", "4", "not among this run's edits: 2"),
        "immediate": ("2", "2", ""),
        "1": ("1", "1", ""),
    }
