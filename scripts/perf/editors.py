"""All editors on the demo model under the same settings, in one table: single edits, and a stream of edits in steps.

    python scripts/perf/editors.py --out results/editors    # hours on two CPU cores; resumes
    python scripts/perf/editors.py --out results/editors --editors r_rome memit --limit 8
    python scripts/perf/editors.py --out results/editors --table    # only print the finished runs

The numbers of a row come from `lm_eval` runs on the embedded mini sets, each in its own process; finished result files
under --out are never computed again. ``single``: the first --limit cases of each task, each on the unedited model.
``stream``: --stream edits in steps of --step (one at a time for editors without joint edits); the first --limit of
their cases are scored after the last step. ``seconds``: time per edit of eight single edits made together, after all
other runs and one at a time. Rows are grouped by what an editor changes, because context editors answer another
question: the prompt contains the new fact.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

BAKE = ["bake_es", "bake_gs", "bake_ls", "bake_rq", "bake_rj"]
WILD = ["qaedit_wild_reliability"]
# heading, task, metric
COLUMNS = (
    ("ES", "bake_es", "es_prob"),
    ("GS", "bake_gs", "gs_prob"),
    ("LS", "bake_ls", "ls_prob"),
    ("RQS", "bake_rq", "rqs_prob"),
    ("RJS", "bake_rj", "rjs_prob"),
    ("WILD EM", "qaedit_wild_reliability", "reliability_wild_em"),
)
UNEDITED = "unedited"
PARTS = ("single", "stream", "seconds")
NUM_TIMED = 8  # edits whose time is taken


class Run(TypedDict):
    """One evaluation: options of the model class, and tasks (none where only the time is taken)."""

    options: dict[str, Any]
    tasks: list[str]


class Job(NamedTuple):
    """One run of a part of an editor's row."""

    editor: str
    part: str
    number: int

    def path(self, out: Path) -> Path:
        """Its result file."""
        return out / f"{self.editor}-{self.part}-{self.number}.json"


def list_runs(editor: str, part: str, args: argparse.Namespace) -> list[Run]:
    """The runs behind a part of a row."""
    if editor == UNEDITED:
        return [Run(options={"mode": "none"}, tasks=tasks) for tasks in (BAKE, WILD)] if part == "single" else []
    settings = load_settings(editor, args.settings)
    options = {"editor": editor, "editor_args": settings}
    if part == "single":
        return [Run(options={**options, "mode": "single"}, tasks=tasks) for tasks in (BAKE, WILD)]
    if part == "seconds":
        return [Run(options=options, tasks=[])]
    from edit_hooks.base.registry import load_editor

    step = args.step if load_editor(editor, settings).supports_joint else 1  # a wrapper supports what its base does
    stream = {**options, "mode": "sequential", "num_edits": args.stream, "edit_batch_size": step}
    stream["immediate"] = False  # the table has no scores from right after each step
    return [
        Run(options={**stream, "edits": "bake"}, tasks=BAKE),
        Run(options={**stream, "edits": "qaedit"}, tasks=WILD),
    ]


def load_settings(editor: str, path: Path | None) -> dict[str, Any]:
    """An editor's settings that override the shipped ones."""
    return json.loads(path.read_text(encoding="utf-8")).get(editor, {}) if path else {}


def execute(job: Job, args: argparse.Namespace) -> None:
    """Run one evaluation (or timing) in this process and write its file."""
    run = list_runs(job.editor, job.part, args)[job.number]
    result = measure_seconds(run) if job.part == "seconds" else evaluate(run, args.limit)
    text = json.dumps({"run": run, **result}, default=str, indent=1)
    job.path(args.out).write_text(text, encoding="utf-8")


def evaluate(run: Run, limit: int) -> dict[str, Any]:
    """Scores of one evaluation, with its configuration."""
    import lm_eval

    evaluation = lm_eval.simple_evaluate(
        model="edited_hf", model_args=run["options"], tasks=run["tasks"], limit=limit, bootstrap_iters=0
    )
    config = {key: value for key, value in evaluation["config"].items() if key != "model_args"}
    return {"results": evaluation["results"], "limit": limit, "config": config}


def measure_seconds(run: Run) -> dict[str, float]:
    """Seconds per edit of eight edits made together, after one that warms up and loads or collects statistics."""
    from edit_hooks.lm.edit_sources import load_edits
    from edit_hooks.lm.model import EditedHFLM

    lm = EditedHFLM(**run["options"], store="off")
    requests = load_edits("bake", {"data": "mini"}, NUM_TIMED + 1)
    lm.editor.edit(lm.model, lm.tokenizer, requests[NUM_TIMED:])
    start = time.perf_counter()
    lm.editor.edit(lm.model, lm.tokenizer, requests[:NUM_TIMED])
    return {"seconds": (time.perf_counter() - start) / NUM_TIMED}


def execute_all(args: argparse.Namespace) -> None:
    """Execute all missing jobs, --jobs at a time, each in its own process; timings last and one at a time."""
    args.out.mkdir(parents=True, exist_ok=True)

    def missing(parts: list[str]) -> list[Job]:
        return [
            job
            for editor in args.editors
            for part in parts
            for number in range(len(list_runs(editor, part, args)))
            if not (job := Job(editor, part, number)).path(args.out).exists()
        ]

    def start(job: Job) -> None:
        log = job.path(args.out).with_suffix(".log")
        command = [sys.executable, __file__, *sys.argv[1:], "--one", job.editor, job.part, str(job.number)]
        with log.open("w", encoding="utf-8") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        print(f"{job.editor} {job.part} {job.number}: " + ("done" if code == 0 else f"failed, see {log}"), flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(start, missing([part for part in args.parts if part != "seconds"])))
    for job in missing([part for part in args.parts if part == "seconds"]):
        start(job)


def read_results(editor: str, part: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Results of the finished jobs of a part of a row."""
    paths = [Job(editor, part, number).path(args.out) for number in range(len(list_runs(editor, part, args)))]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def format_scores(editor: str, part: str, args: argparse.Namespace) -> list[str]:
    """Cells of a row, one per entry of :data:`COLUMNS`; a hyphen for missing runs and unscored metrics."""
    scores = {task: row for result in read_results(editor, part, args) for task, row in result["results"].items()}
    cells = []
    for _, task, metric in COLUMNS:
        values = [value for key, value in scores.get(task, {}).items() if key.partition(",")[0] == metric]
        cells.append(f"{values[0]:.2f}" if values and isinstance(values[0], float) else "-")
    return cells


def changed_part(editor: str) -> str:
    """The part of the model that an editor changes: weights, hooks or context."""
    if editor == UNEDITED:
        return "nothing"
    from edit_hooks.base.registry import editor_class

    return "/".join(editor_class(editor).writes)


def print_tables(args: argparse.Namespace) -> None:
    """Print the finished runs as two Markdown tables."""
    headings = [heading for heading, _, _ in COLUMNS]
    groups = ["nothing", "weights", "hooks", "context"]
    for part in ("single", "stream"):
        last = " s/edit |" if part == "single" else ""
        width = len(headings) + 2 + bool(last)
        print(f"\n{part}:\n\n| editor | changes | " + " | ".join(headings) + f" |{last}\n" + "|---" * width + "|")
        for editor in sorted(args.editors, key=lambda editor: groups.index(changed_part(editor))):
            scores = format_scores(editor, "single" if editor == UNEDITED else part, args)
            row = [f"`{editor}`", changed_part(editor), *scores]
            if last:
                seconds = [result["seconds"] for result in read_results(editor, "seconds", args)]
                row.append(f"{seconds[0]:.1f}" if seconds else "-")
            print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    parser.add_argument("--editors", nargs="+", help="names; default: all")
    parser.add_argument("--settings", type=Path, help="JSON file: editor -> settings that override the shipped ones")
    parser.add_argument("--limit", type=int, default=16, help="cases per task")
    parser.add_argument("--stream", type=int, default=48, help="edits of a stream")
    parser.add_argument("--step", type=int, default=8, help="joint edits per step of a stream")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs; set OMP_NUM_THREADS accordingly")
    parser.add_argument("--table", action="store_true", help="print the tables of the finished runs and stop")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.editors:
        from edit_hooks.base.registry import EDITORS

        args.editors = [UNEDITED, *EDITORS]
    if args.one:
        editor, part, number = args.one
        execute(Job(editor, part, int(number)), args)
        return
    if not args.table:
        execute_all(args)
    print_tables(args)


if __name__ == "__main__":
    main()
