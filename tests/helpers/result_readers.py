"""Every reader of result files as a function of a folder of runs and of a new folder for what it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from judges.model.factory import make_judge
from lm_edit import load_breakdown, load_cases, load_documents, load_retention
from lm_edit.leaderboard.site import make_site
from lm_edit.results.answers.rejudge import judge_answers, table_rows
from lm_edit.results.answers.samples import read_saved_answers
from lm_edit.results.answers.selection import select_wrong
from lm_edit.results.checking.merge import merge_results
from lm_edit.results.checking.repository import submit
from lm_edit.results.exports.options import ExportOptions
from lm_edit.results.exports.targets import export_results
from lm_edit.results.separating import separation
from lm_edit.results.show import comparison, edits_comparison
from lm_edit.sweeps.checking.estimate import Estimator
from lm_edit.sweeps.execution.complete import missing_parts

Reader = Callable[[Path, Path], object]


def _judge(runs: Path, _: Path) -> None:
    saved = read_saved_answers([str(runs)])
    list(table_rows(saved, {"em": judge_answers(make_judge("em"), saved).verdicts}, {}))


def _leaderboard(runs: Path, out: Path) -> None:
    out.mkdir()
    for name, text in make_site([str(runs)], resamples=9).files.items():
        (out / name).write_text(text, encoding="utf-8")


def _export(target: str) -> Reader:
    return lambda runs, out: export_results(target, runs, out, ExportOptions())


READERS: Mapping[str, Reader] = {
    "show": lambda runs, _: comparison(runs),
    "edits": lambda runs, _: edits_comparison(runs),
    "cases": lambda runs, _: load_cases(runs),
    "documents": lambda runs, _: [document.to_json() for document in load_documents(runs)],
    "matrices": lambda runs, _: (load_retention(runs), load_breakdown(runs)),
    "merge": merge_results,
    "submit": submit,
    "csv": _export("csv"),
    "every-eval-ever": _export("every-eval-ever"),
    "hf": _export("hf"),
    "judge": _judge,
    "select-wrong": lambda runs, _: select_wrong(runs, "mini", task="bake_es"),
    "separate": lambda runs, _: separation(runs, runs),
    "estimate": lambda runs, _: Estimator([str(runs)]),
    "complete": lambda runs, _: missing_parts(runs, ["bake_es"]),
    "leaderboard": _leaderboard,
}
SLOW_READERS: Mapping[str, Reader] = {"inspect": _export("inspect")}  # its library takes seconds to import
