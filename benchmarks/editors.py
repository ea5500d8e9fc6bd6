"""All editors on the demo model under the same settings, as one table: single edits, and a stream of edits in steps.

    python benchmarks/editors.py --out results/editors                  # hours on two CPU cores; resumes where it was
    python benchmarks/editors.py --out results/editors --editors r_rome memit --limit 8
    python benchmarks/editors.py --out results/editors --table          # only print what is there

Every cell is one `lm_eval` run on the embedded mini sets, in its own process; its result file is kept under --out and
never made twice. ``single``: the first --limit cases of each task, every case alone on the untouched model.
``stream``: --stream edits in steps of --step (one by one where an editor cannot write several at once), the first
--limit of their cases scored after the last step. Seconds per edit are those of the run, on a machine that may be busy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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


def runs_of(name: str, how: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The evaluations behind one row: options of the model class and tasks."""
    if name == UNEDITED:
        return [{"options": {"mode": "none"}, "tasks": [*BAKE, *WILD]}]
    own = json.loads(arguments.settings.read_text(encoding="utf-8")) if arguments.settings else {}
    editor = {"editor": name, **({"editor_args": own[name]} if name in own else {})}
    if how == "single":
        return [{"options": {**editor, "mode": "single"}, "tasks": [*BAKE, *WILD]}]
    from edit_hooks.registry import editor_class

    step = arguments.step if editor_class(name).supports_joint else 1
    stream = {**editor, "mode": "sequential", "num_edits": arguments.stream, "edit_batch_size": step}
    return [
        {"options": {**stream, "edits": "bake"}, "tasks": list(BAKE)},
        {"options": {**stream, "edits": "qaedit"}, "tasks": list(WILD)},
    ]


def make(name: str, how: str, number: int, arguments: argparse.Namespace) -> None:
    """One evaluation in this process; writes its file."""
    import lm_eval

    run = runs_of(name, how, arguments)[number]
    found = lm_eval.simple_evaluate(
        model="edited_hf",
        model_args=run["options"],
        tasks=run["tasks"],
        limit=arguments.limit,
        bootstrap_iters=0,
    )
    seconds = [
        sample["edit"]["seconds"]
        for samples in found["samples"].values()
        for sample in samples
        if isinstance(sample.get("edit"), dict) and "seconds" in sample["edit"]
    ]
    kept = {
        "results": found["results"],
        "run": run,
        "limit": arguments.limit,
        "seconds_per_edit": sum(seconds) / len(seconds) if seconds else None,
        "config": {key: value for key, value in found["config"].items() if key != "model_args"},
    }
    place(name, how, number, arguments).write_text(json.dumps(kept, default=str, indent=1), encoding="utf-8")


def place(name: str, how: str, number: int, arguments: argparse.Namespace) -> Path:
    return arguments.out / f"{name}-{how}-{number}.json"


def make_all(arguments: argparse.Namespace) -> None:
    """All missing runs, --jobs at a time, each in a process of its own."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    todo = [
        (name, how, number)
        for name in arguments.editors
        for how in (("single",) if name == UNEDITED else ("single", "stream"))
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
        list(pool.map(start, todo))


def cells(name: str, how: str, arguments: argparse.Namespace) -> list[str]:
    """Printed numbers of a row: the metrics of :data:`COLUMNS`, then seconds per edit; hyphen: no run."""
    numbers = range(len(runs_of(name, how, arguments)))
    files = [place(name, how, number, arguments) for number in numbers]
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    found = {task: row for part in kept for task, row in part["results"].items()}
    row = []
    for _, task, metric in COLUMNS:
        values = [v for key, v in found.get(task, {}).items() if key.partition(",")[0] == metric]
        row.append(f"{values[0]:.2f}" if values and isinstance(values[0], float) else "-")
    seconds = [part["seconds_per_edit"] for part in kept if part["seconds_per_edit"] is not None]
    return [*row, f"{sum(seconds) / len(seconds):.1f}" if seconds else "-"]


def table(arguments: argparse.Namespace) -> None:
    headings = [heading for heading, _, _ in COLUMNS] + ["s/edit"]
    for how in ("single", "stream"):
        print(f"\n{how}:\n\n| editor | " + " | ".join(headings) + " |\n|---|" + "---|" * len(headings))
        for name in arguments.editors:
            print(f"| `{name}` | " + " | ".join(cells(name, "single" if name == UNEDITED else how, arguments)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    parser.add_argument("--editors", nargs="+", help="names; all when absent")
    parser.add_argument("--settings", type=Path, help="JSON file: editor -> its settings over the shipped ones")
    parser.add_argument("--limit", type=int, default=16, help="cases per task")
    parser.add_argument("--stream", type=int, default=48, help="edits of a stream")
    parser.add_argument("--step", type=int, default=8, help="edits written at once in a stream")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; set OMP_NUM_THREADS accordingly")
    parser.add_argument("--table", action="store_true", help="print the table of what is there and stop")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.editors:
        from edit_hooks.registry import EDITORS

        arguments.editors = [UNEDITED, *EDITORS]
    if arguments.one:
        make(arguments.one[0], arguments.one[1], int(arguments.one[2]), arguments)
        return
    if not arguments.table:
        make_all(arguments)
    table(arguments)


if __name__ == "__main__":
    main()
