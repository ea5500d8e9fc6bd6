"""What judging later writes, pays for, keeps and leaves alone; `lm-edit judge --write-results`."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer, ServerFault, serve
from judged_runs import RELIABILITY, STREAM, contents, grade_by_containment, judge_of, run_without_judge, stream
from paths import RECORDS
from result_files import change, write_run
from scripted import StockLM
from task_runs import run
from wild_answers import wild_texts

from edit_hooks.utils.storage.files import sha256_of
from lm_edit import load_cases, load_results
from lm_edit.cli.main import main
from lm_edit.judged_results import writing
from lm_edit.judged_results.judging import Judging
from lm_edit.results.answers.selection import select_wrong
from lm_edit.results.checking.check import check_results
from lm_edit.results.checking.merge import merge_results
from lm_edit.results.files.provenance import JUDGED_LATER

METRIC = "efficacy_wild_judge"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with serve(grade_by_containment) as running:
        yield running


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A run of a task with judged columns and of one without."""
    run_without_judge(tmp_path / "results", "qaedit_wild")
    return tmp_path / "results"


def judge_later(results: Path, server: JudgeServer, out: Path, *options: str) -> int:
    judge = json.dumps(judge_of(server, out.parent / "store"))
    return main(["judge", str(results), "--judge", judge, "--write-results", str(out), *options])


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_command_writes_results_and_prints_the_judged_values(
    results: Path, server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(results)
    assert judge_later(results, server, tmp_path / "judged") == 0
    printed = capsys.readouterr().out
    assert re.search(rf"{RELIABILITY} +{METRIC} +0\.667 +3\n", printed) and "results written to" in printed
    assert files(results) == before
    content, samples = contents(tmp_path / "judged")
    assert sorted(samples) == ["qaedit_wild_generalization", "qaedit_wild_locality", RELIABILITY]
    assert content["results"][RELIABILITY][f"{METRIC},judge"] == pytest.approx(2 / 3)
    run_content, run_samples = contents(results)
    locality = "qaedit_wild_locality"  # is copied
    assert samples[locality] == run_samples[locality]
    assert content["results"][locality] == run_content["results"][locality]


def test_the_file_says_when_it_was_judged_and_of_which_answers(
    results: Path, server: JudgeServer, tmp_path: Path
) -> None:
    assert judge_later(results, server, tmp_path / "judged") == 0
    (source,), (path,) = results.rglob("results_*.json"), (tmp_path / "judged").rglob("results_*.json")
    (known,) = json.loads(path.read_text(encoding="utf-8"))[JUDGED_LATER]
    assert known["run"] == {"file": source.name, "sha256": sha256_of(source)}
    assert known["judge"]["model"] == "scripted" and known["judge"]["prompt_hash"]
    assert sorted(known["tasks"]) == ["qaedit_wild_generalization", RELIABILITY]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", known["date"])
    assert {"lm-eval-editing", "lm-eval"} <= known["versions"].keys()


def test_a_dry_run_counts_the_calls_of_all_stages_and_writes_nothing(
    server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run("qaedit_wild", stream(), {**STREAM, "population": "all"}, bootstrap_iters=0)
    write_run(tmp_path / "results", results=results, mode="sequential")
    assert judge_later(tmp_path / "results", server, tmp_path / "judged", "--dry-run") == 0
    planned = re.search(r"(\d+) answers, (\d+) distinct, 0 in the store: (\d+) calls", capsys.readouterr().out)
    assert planned and not server.bodies and not (tmp_path / "judged").exists()
    assert judge_later(tmp_path / "results", server, tmp_path / "judged") == 0
    assert int(planned[3]) == int(planned[2]) == sum(server.replies.values()) < int(planned[1])


HALDEN = "What year did the Halden tram start running?"


def test_low_coverage_writes_nothing_and_the_next_command_resumes(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replies without a verdict are stored: the message names the option that requests them again."""
    replies = {"": "A", HALDEN: "hm"}
    with serve(lambda item, attempt: replies.get(item.question) or replies[""]) as server:
        assert judge_later(results, server, tmp_path / "judged") == 2
        error = capsys.readouterr().err
        assert "less than min_coverage=95%" in error and error.endswith("No results of this run were written.\n")
        assert "request them again with ask_again=unscored (--ask-again unscored)" in error
        assert "lm-edit judge " not in error.replace("lm-edit judge:", "") and "the next run" not in error
        assert not any((tmp_path / "judged").rglob("*.*")) and not any(tmp_path.rglob("pending"))
        assert judge_later(results, server, tmp_path / "lower", "--min-coverage", "0.5") == 0
        assert set(server.replies.values()) == {1}
        del replies[HALDEN]  # the judge has recovered
        assert judge_later(results, server, tmp_path / "judged") == 2
        assert "(--ask-again unscored)" in capsys.readouterr().err and set(server.replies.values()) == {1}
        assert judge_later(results, server, tmp_path / "judged", "--ask-again", "unscored") == 0
        assert sorted(set(server.replies.values())) == [1, 2]
    assert check_results(tmp_path / "judged").problems == []


def test_without_a_store_the_next_command_requests_all_replies_again(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = {"": "A", HALDEN: "hm"}
    with serve(lambda item, attempt: replies.get(item.question) or replies[""]) as server:
        assert judge_later(results, server, tmp_path / "judged", "--store", "off") == 2
        error = capsys.readouterr().err
        assert "the next run requests all of them again" in error
        assert "ask_again" not in error and "goes on" not in error
        paid = sum(server.requests.values())
        del replies[HALDEN]
        assert judge_later(results, server, tmp_path / "judged", "--store", "off") == 0
        assert sum(server.requests.values()) >= 2 * paid


def test_replies_that_did_not_come_are_requested_by_the_same_command(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that are complete, in the order of their names, are not judged again."""
    run_without_judge(results, "qaedit_wild_generalization", editor="memit")
    is_broken = True
    fault = ServerFault(400)
    with serve(lambda item, attempt: fault if is_broken and item.question == HALDEN else "A") as server:
        assert judge_later(results, server, tmp_path / "judged") == 2
        error = capsys.readouterr().err
        assert "the next run requests only the missing ones. No results of this run were written; " in error
        assert "those of the runs before it (1) were, and are not judged again." in error
        assert judged_columns(tmp_path / "judged") == {"paraphrase_wild_judge"}
        is_broken = False
        assert judge_later(results, server, tmp_path / "judged") == 0
        assert judged_columns(tmp_path / "judged") == {"paraphrase_wild_judge", METRIC}


def test_an_interrupt_while_writing_leaves_no_file(
    results: Path, server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    judging = Judging([str(results)], judge_of(server, tmp_path / "store"))
    for owner, name in ((writing, "_content"), (shutil, "copyfile"), (os, "replace")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupt)
            judging.write(tmp_path / "judged")
        assert files(tmp_path / "judged") == {}


# Without fork (Windows) no process can be killed between two steps.
@pytest.mark.one_in(2)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize(
    ("step", "number", "options", "written"),
    [
        ("shutil.copyfile", 1, (), 0),  # while the files of the first run are written
        ("os.replace", 1, (), 0),
        ("shutil.copyfile", 2, (), 1),
        ("os.replace", 2, (), 1),
        ("os.replace", 2, ("--overwrite",), 3),  # before the first run's old files are removed
        ("shutil.rmtree", 1, ("--overwrite",), 2),  # while they are
    ],
)
def test_a_kill_leaves_whole_results_and_the_next_command_completes_them(
    step: str, number: int, options: tuple[str, ...], written: int, results: Path, server: JudgeServer, tmp_path: Path
) -> None:
    """No command reads half of a run's files, and none is left over."""
    run_without_judge(results, "qaedit_wild", editor="memit")
    out = tmp_path / "judged"
    if options:
        assert judge_later(results, server, out) == 0
    if (process := os.fork()) == 0:
        kill_at(step, number, out)
        judge_later(results, server, out, *options)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    found = [path for path in out.rglob("results_*.json") if ".tmp" not in str(path)]
    assert len(found) == written
    if found:
        assert check_results(out).problems == []
        assert main(["judge", str(out), "--judge", "em", "--out", str(tmp_path / "answers.jsonl")]) == 0
        answers = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
        parts = ("run", "task", "case", "helper")
        assert len(answers) == len({tuple(map(json.loads(row).get, parts)) for row in answers})
    paid = sum(server.requests.values())
    assert judge_later(results, server, out, *options) == 0 and sum(server.requests.values()) == paid
    assert len(list(out.rglob("results_*.json"))) == 2 and len(files(out)) == 8
    assert check_results(out).problems == [] and load_results(out)["run"].nunique() == 2


def kill_at(step: str, number: int, folder: Path) -> None:
    """End the process, as by SIGKILL, at a call of a function that has to do with the folder."""
    module, _, name = step.partition(".")
    original, calls = getattr(sys.modules[module], name), [0]

    def count(*args: Any, **options: Any) -> Any:
        calls[0] += any(str(arg).startswith(str(folder)) for arg in args)
        if calls[0] == number:
            os._exit(9)
        return original(*args, **options)

    setattr(sys.modules[module], name, count)


def test_tasks_that_have_verdicts_are_kept_beside_those_judged_now(
    results: Path, server: JudgeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether one sample file is judged before the others, or again after them."""
    out = tmp_path / "judged"
    (samples,) = results.rglob(f"samples_{RELIABILITY}_*.jsonl")
    assert judge_later(samples, server, out) == 0
    assert judged_columns(out) == {"efficacy_wild_judge"}
    paid = sum(server.requests.values())
    assert judge_later(results, server, out) == 0
    assert sum(server.requests.values()) > paid
    assert f"these tasks are left out; {out}" in caplog.text and f"this judge on {RELIABILITY}" in caplog.text
    both = {"efficacy_wild_judge", "paraphrase_wild_judge"}
    assert judged_columns(out) == both and len(files(out)) == 4
    together = tmp_path / "together"
    assert judge_later(results, server, together) == 0
    assert contents(out) == contents(together)
    assert judge_later(samples, server, out, "--overwrite") == 0
    assert judged_columns(out) == both and len(files(out)) == 4 and contents(out) == contents(together)
    assert judge_later(results, server, out) == 2
    (path,) = out.rglob("results_*.json")
    entries = json.loads(path.read_text(encoding="utf-8"))[JUDGED_LATER]
    assert [entry["tasks"] for entry in entries] == [["qaedit_wild_generalization"], [RELIABILITY]]
    assert check_results(out).problems == []


def judged_columns(out: Path) -> set[str]:
    table = load_results(out)
    return {name for name in table[table["filter"] == "judge"]["metric"] if name.endswith("_judge")}


def test_a_run_that_arrives_later_is_judged_beside_those_that_are(
    results: Path, server: JudgeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "judged"
    assert judge_later(results, server, out) == 0
    before = files(out)
    run_without_judge(results, editor="memit")
    assert judge_later(results, server, out) == 0
    left_out = [record for record in caplog.records if "it is left out; " in record.getMessage()]
    assert len(left_out) == 1
    after = files(out)
    assert before.items() <= after.items() and len(after) == len(before) + 2
    assert load_results(out).query("metric == @METRIC")["run"].nunique() == 2
    assert judge_later(results, server, out) == 2 and files(out) == after


def test_a_merged_file_has_the_judgings_of_its_tasks(server: JudgeServer, tmp_path: Path) -> None:
    """So it is not judged again where its tasks are, and the new file names the answers' own runs."""
    results, out = tmp_path / "results", tmp_path / "judged"
    run_without_judge(results, "qaedit_wild_generalization", date="2026-11-21T10-00-00.000001")
    run_without_judge(results, date="2026-11-22T10-00-00.000001", start=1.79e9 + 9e4)
    assert judge_later(results, server, out) == 0
    merged = merge_results(out, tmp_path / "merged")[0]
    entries = json.loads(merged.read_text(encoding="utf-8"))[JUDGED_LATER]
    known = {entry["run"]["file"]: entry["tasks"] for entry in entries}
    assert known == {
        "results_2026-11-21T10-00-00.000001.json": ["qaedit_wild_generalization"],
        "results_2026-11-22T10-00-00.000001.json": [RELIABILITY],
    }
    assert judge_later(tmp_path / "merged", server, out) == 2
    with serve(lambda item, attempt: "B") as strict:
        assert judge_later(tmp_path / "merged", strict, tmp_path / "strict") == 0
    (path,) = (tmp_path / "strict").rglob("results_*.json")
    of_strict = json.loads(path.read_text(encoding="utf-8"))[JUDGED_LATER]
    assert {entry["run"]["file"]: entry["tasks"] for entry in of_strict} == known


def test_the_same_judge_does_not_write_twice_and_two_judges_stand_side_by_side(
    results: Path, server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "judged"
    assert judge_later(results, server, out) == 0
    paid, before = sum(server.requests.values()), files(out)
    assert judge_later(results, server, out) == 2
    assert "has the verdicts of this judge on" in capsys.readouterr().err
    assert sum(server.requests.values()) == paid and files(out) == before
    first = contents(out)
    assert judge_later(results, server, out, "--overwrite") == 0
    assert sum(server.requests.values()) == paid and len(files(out)) == len(before)
    assert contents(out) == first
    with serve(lambda item, attempt: "B") as strict:
        assert judge_later(results, strict, out) == 0
    judged = load_results(out).query("metric == @METRIC")
    assert sorted(judged["value"]) == [0.0, pytest.approx(2 / 3)] and judged["judge"].nunique() == 2
    assert check_results(out).problems == []


def test_results_of_an_earlier_judge_are_judged_by_another(results: Path, server: JudgeServer, tmp_path: Path) -> None:
    """Also in the folder of the run, whose files stay."""
    before = files(results)
    assert judge_later(results, server, tmp_path / "direct") == 0
    with serve(lambda item, attempt: "B") as strict:
        assert judge_later(results, strict, results) == 0
        assert judge_later(results, strict, results) == 2  # the newest samples are now those with its verdicts
    assert judge_later(results, server, tmp_path / "second") == 0
    assert contents(tmp_path / "second") == contents(tmp_path / "direct")
    (path,) = (tmp_path / "second").rglob("results_*.json")
    (of_run,) = (name for name in before if name.split("/")[-1].startswith("results_"))
    assert json.loads(path.read_text(encoding="utf-8"))[JUDGED_LATER][0]["run"]["file"] == Path(of_run).name
    assert {name: content for name, content in files(results).items() if name in before} == before


def test_judged_results_count_beside_those_of_the_run(
    results: Path, server: JudgeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of the machine with the judge may be behind: the judged file is newer all the same."""
    for path in results.rglob("*_2026-*"):
        path.rename(path.with_name(path.name.replace("2026-11-21", "2126-11-21")))
    out = tmp_path / "judged"
    assert judge_later(results, server, out) == 0
    caplog.clear()
    table = load_results([results, out])
    assert set(table["file"]) == {str(path) for path in out.rglob("results_*.json")} and not caplog.records
    assert not any(old["changed"] for old in table.attrs["superseded"])
    assert table["run"].nunique() == 1 and METRIC in set(table["metric"])
    assert len(load_cases([results, out])) == len(load_cases(out)) > len(load_cases(results))
    merged = merge_results([results, out], tmp_path / "merged")
    columns = contents(tmp_path / "merged")[0]["results"]
    assert {task: contents(out)[0]["results"][task] for task in columns} == columns and len(merged) == 4


def test_only_current_samples_are_judged(tmp_path: Path, server: JudgeServer) -> None:
    """As in `load_results`, of two files with one result of a run the newest counts."""
    results = tmp_path / "results"
    run_without_judge(results, "qaedit_wild", date="2026-11-21T10-00-00.000001", start=1.79e9)
    newer = run_without_judge(results, date="2026-11-22T10-00-00.000001", start=1.79e9 + 9e4)
    assert judge_later(results, server, tmp_path / "judged") == 0
    judged = {
        content[JUDGED_LATER][0]["run"]["file"]: content[JUDGED_LATER][0]["tasks"]
        for path in (tmp_path / "judged").rglob("results_*.json")
        if (content := json.loads(path.read_text(encoding="utf-8")))
    }
    assert judged[newer.name] == [RELIABILITY] and len(judged) == 2
    assert sorted(judged.values()) == [["qaedit_wild_generalization"], [RELIABILITY]]
    table = load_results([results, tmp_path / "judged"]).query("metric == @METRIC")
    assert len(table) == 1


def test_a_result_file_or_a_sample_file_can_be_named(results: Path, server: JudgeServer, tmp_path: Path) -> None:
    (path,) = results.rglob("results_*.json")
    assert judge_later(path, server, tmp_path / "all") == 0
    assert len(contents(tmp_path / "all")[0]["task_hashes"]) == 3
    (samples,) = results.rglob(f"samples_{RELIABILITY}_*.jsonl")
    assert judge_later(samples, server, tmp_path / "one") == 0
    judged = {task for task, columns in contents(tmp_path / "one")[0]["results"].items() if "judge,judge" in columns}
    assert judged == {RELIABILITY}


def test_anomalies_are_those_of_the_new_columns_too(results: Path, server: JudgeServer, tmp_path: Path) -> None:
    (path,) = results.rglob("results_*.json")
    change(path, lambda content: content.update(anomalies=[{"kind": "no_effect", "text": "an old one"}]))
    assert judge_later(results, server, tmp_path / "judged") == 0
    assert contents(tmp_path / "judged")[0]["anomalies"] == []


def test_the_score_of_a_group_is_named_as_that_of_the_run(
    results: Path, server: JudgeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No group of this project has one; lm-eval aggregates those of others."""
    (path,) = results.rglob("results_*.json")
    group = {"name": "qaedit_wild", "alias": "qaedit_wild", "efficacy_wild_em,none": 0.5}
    change(path, lambda content: content.update(groups={"qaedit_wild": group}))
    assert judge_later(results, server, tmp_path / "judged") == 0
    assert "the score of group qaedit_wild is that of the run" in caplog.text
    assert contents(tmp_path / "judged")[0]["groups"] == {"qaedit_wild": group}


def test_other_commands_read_the_judged_results(
    results: Path, server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
    out = tmp_path / "judged"
    assert judge_later(results, server, out) == 0
    assert main(["results", "check", str(out)]) == 0 and "1 result files, 0 problems" in capsys.readouterr().out
    assert main(["results", "show", str(out)]) == 0 and METRIC in capsys.readouterr().out
    assert main(["leaderboard", str(results), str(out), "-o", str(tmp_path / "site"), "--resamples", "99"]) == 0
    assert METRIC in (tmp_path / "site" / "leaderboard.md").read_text(encoding="utf-8")
    for target in ("csv", "every-eval-ever"):
        assert main(["results", "export", str(out), "--to", target, "--out", str(tmp_path / target)]) == 0
    assert main(["results", "submit", str(out), "--repository", str(tmp_path / "repository")]) == 0
    assert check_results(tmp_path / "repository").problems == []


def test_records_are_selected_by_a_judge_that_came_later(server: JudgeServer, tmp_path: Path) -> None:
    data = str(RECORDS / "qaedit.jsonl")
    answered = run(RELIABILITY, StockLM(texts=wild_texts), {"population": "all"}, bootstrap_iters=0)
    write_run(tmp_path / "results", results=answered, stock=True)
    assert judge_later(tmp_path / "results", server, tmp_path / "judged") == 0
    assert [record["id"] for record in select_wrong(tmp_path / "judged", data, by="judge").records] == [7, 9]
