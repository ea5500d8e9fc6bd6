"""All editors on the demo model under the same settings, as one table: single edits, and a stream of edits in steps.

    python benchmarks/editors.py --out results/editors                  # hours on two CPU cores; resumes where it was
    python benchmarks/editors.py --out results/editors --editors r_rome memit --limit 8
    python benchmarks/editors.py --out results/editors --table          # only print what is there

The numbers of a row come from four `lm_eval` runs on the embedded mini sets, each in its own process; a result file is
kept under --out and never made twice. ``single``: the first --limit cases of each task, every case alone on the
untouched model. ``stream``: --stream edits in steps of --step (one by one where an editor cannot write several at
once), the first --limit of their cases scored after the last step. ``seconds``: eight single edits made together, one
job at a time after all other runs. Rows are grouped by what an editor changes, because context editors answer another
question: the model is told the new fact.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BAKE = ("bake_es", "bake_gs", "bake_ls", "bake_rq", "bake_rj")


WILD = ("qaedit_wild_reliability",)


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


TIMED = 8  # edits whose time is taken


def runs_of(name: str, how: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The evaluations behind a part of a row: options of the model class and tasks."""
    if name == UNEDITED:
        return (
            [{"options": {"mode": "none"}, "tasks": list(tasks)} for tasks in (BAKE, WILD)] if how == "single" else []
        )
    options = {"editor": name, "editor_args": settings_of(name, arguments)}
    if how == "single":
        return [{"options": {**options, "mode": "single"}, "tasks": list(tasks)} for tasks in (BAKE, WILD)]
    if how == "seconds":
        return [{"options": options, "tasks": []}]
    from edit_hooks.base.registry import load_editor

    step = arguments.step if load_editor(name, options["editor_args"]).supports_joint else 1  # wrappers: as the base
    stream = {**options, "mode": "sequential", "num_edits": arguments.stream, "edit_batch_size": step}
    stream["immediate"] = False  # what is asked right after each step is not shown
    return [
        {"options": {**stream, "edits": "bake"}, "tasks": list(BAKE)},
        {"options": {**stream, "edits": "qaedit"}, "tasks": list(WILD)},
    ]


def settings_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """An editor's settings over the shipped ones."""
    return json.loads(arguments.settings.read_text(encoding="utf-8")).get(name, {}) if arguments.settings else {}


def make(name: str, how: str, number: int, arguments: argparse.Namespace) -> None:
    """One evaluation (or timing) in this process; writes its file."""
    run = runs_of(name, how, arguments)[number]
    kept = {"run": run, **(timed(run) if how == "seconds" else evaluated(run, arguments.limit))}
    place(name, how, number, arguments).write_text(json.dumps(kept, default=str, indent=1), encoding="utf-8")


def evaluated(run: dict[str, Any], limit: int) -> dict[str, Any]:
    import lm_eval

    found = lm_eval.simple_evaluate(
        model="edited_hf", model_args=run["options"], tasks=run["tasks"], limit=limit, bootstrap_iters=0
    )
    config = {key: value for key, value in found["config"].items() if key != "model_args"}
    return {"results": found["results"], "limit": limit, "config": config}


def timed(run: dict[str, Any]) -> dict[str, Any]:
    """Seconds per edit of eight edits made together, after one that warms up (and reads or makes statistics)."""
    from edit_hooks.lm.edit_sources import load_edits
    from edit_hooks.lm.model import EditedHFLM

    lm = EditedHFLM(**run["options"], store="off")
    requests = load_edits("bake", {"data": "mini"}, TIMED + 1)
    lm.editor.edit(lm.model, lm.tokenizer, requests[TIMED:])
    began = time.perf_counter()
    lm.editor.edit(lm.model, lm.tokenizer, requests[:TIMED])
    return {"seconds": (time.perf_counter() - began) / TIMED}


def place(name: str, how: str, number: int, arguments: argparse.Namespace) -> Path:
    return arguments.out / f"{name}-{how}-{number}.json"


def make_all(arguments: argparse.Namespace) -> None:
    """All missing runs, --jobs at a time, each in a process of its own; timings last and one by one."""
    arguments.out.mkdir(parents=True, exist_ok=True)

    def missing(*parts: str) -> list[tuple[str, str, int]]:
        return [
            (name, how, number)
            for name in arguments.editors
            for how in parts
            for number in range(len(runs_of(name, how, arguments)))
            if not place(name, how, number, arguments).exists()
        ]

    def start(job: tuple[str, str, int]) -> None:
        name, how, number = job
        log = place(name, how, number, arguments).with_suffix(".log")
        command = [sys.executable, __file__, *sys.argv[1:], "--one", name, how, str(number)]
        with log.open("w", encoding="utf-8") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        print(f"{name} {how} {number}: " + ("done" if code == 0 else f"failed, see {log}"), flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(start, missing(*(part for part in arguments.parts if part != "seconds"))))
    for job in missing(*(part for part in arguments.parts if part == "seconds")):
        start(job)


def cells(name: str, how: str, arguments: argparse.Namespace) -> list[str]:
    """Printed numbers of a row, one per entry of :data:`COLUMNS`; hyphen: no run, or nothing scored."""
    found = {task: row for part in files_of(name, how, arguments) for task, row in part["results"].items()}
    row = []
    for _, task, metric in COLUMNS:
        values = [v for key, v in found.get(task, {}).items() if key.partition(",")[0] == metric]
        row.append(f"{values[0]:.2f}" if values and isinstance(values[0], float) else "-")
    return row


def files_of(name: str, how: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What the finished runs of a part of a row have written."""
    files = [place(name, how, number, arguments) for number in range(len(runs_of(name, how, arguments)))]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def changes(name: str) -> str:
    """What an editor changes: weights, hooks or context."""
    if name == UNEDITED:
        return "nothing"
    from edit_hooks.base.registry import editor_class

    return "/".join(editor_class(name).writes)


def table(arguments: argparse.Namespace) -> None:
    headings = [heading for heading, _, _ in COLUMNS]
    groups = ["nothing", "weights", "hooks", "context"]
    for how in ("single", "stream"):
        last = " s/edit |" if how == "single" else ""
        width = len(headings) + 2 + bool(last)
        print(f"\n{how}:\n\n| editor | changes | " + " | ".join(headings) + f" |{last}\n" + "|---" * width + "|")
        for name in sorted(arguments.editors, key=lambda name: groups.index(changes(name))):
            row = [f"`{name}`", changes(name), *cells(name, "single" if name == UNEDITED else how, arguments)]
            if last:
                seconds = [part["seconds"] for part in files_of(name, "seconds", arguments)]
                row.append(f"{seconds[0]:.1f}" if seconds else "-")
            print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    parser.add_argument("--editors", nargs="+", help="names; all when absent")
    parser.add_argument("--settings", type=Path, help="JSON file: editor -> its settings over the shipped ones")
    parser.add_argument("--limit", type=int, default=16, help="cases per task")
    parser.add_argument("--stream", type=int, default=48, help="edits of a stream")
    parser.add_argument("--step", type=int, default=8, help="edits written at once in a stream")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; set OMP_NUM_THREADS accordingly")
    parser.add_argument("--table", action="store_true", help="print the table of what is there and stop")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.editors:
        from edit_hooks.base.registry import EDITORS

        arguments.editors = [UNEDITED, *EDITORS]
    if arguments.one:
        make(arguments.one[0], arguments.one[1], int(arguments.one[2]), arguments)
        return
    if not arguments.table:
        make_all(arguments)
    table(arguments)


if __name__ == "__main__":
    main()
