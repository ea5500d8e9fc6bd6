"""All editors on the demo model: single edits, and streams of 48 and 200 edits.

    python scripts/measure_editors.py --out results/editors                  # many hours on two CPU cores; resumes
    python scripts/measure_editors.py --out results/editors --rows tuned/rome tuned/memit --parts single --seeds 0
    python scripts/measure_editors.py --out results/editors --keep           # adds to docs/_data/measured_editors.jsonl
    python scripts/editors_table.py                                          # prints the tables of the site

scripts/measure_editors.yaml lists the rows: a group, an editor, settings. Every run is a process of its own and ends as
one JSON file under --out with the score of every case. What has a file there, or a line in the kept file,
is not computed again (_measurements.py), so the command can be interrupted and continued elsewhere. Parts of a row:

``single``      all 64 cases of BAKE's embedded sample and all 62 of QAEdit's, each edited alone on the unedited model.
``stream48``    the first 48 cases of both samples as one stream each, in steps of 8 (one at a time for editors without
                joint edits); the 48 cases are scored after the last step.
``stream200``   the first 200 records of CounterFact (flat; downloaded once) in steps of 20, scored after the last step.
``trial``       four single edits, and a stream of them, under two seeds: whether the editor draws anything.
``seconds``     time per edit of eight single edits made together, after all other runs and one at a time.

Seeds: an editor whose trial gives the same scores under both seeds, likelihoods included, to the last bit, draws
nothing: one seed is run.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from _measurements import COLUMNS, KEPT, NUM_STREAMED, UNEDITED, VERSION, Finished, Row

PLAN = Path(__file__).with_suffix(".yaml")
BAKE = ["bake_es", "bake_gs", "bake_ls", "bake_rq", "bake_rj"]
WILD = ["qaedit_wild_reliability"]
COUNTERFACT = ["counterfact_flat_es", "counterfact_flat_gs", "counterfact_flat_ls"]
# Likelihoods suffice for the first two, and no column needs the answers of the unedited model.
METADATA = {"generate": False, "population": "all"}
PARTS = ("trial", *COLUMNS, "seconds")
SEEDLESS = ("trial", "seconds")  # parts that are run once
UNEDITED_PARTS = ("single", "stream200")  # the cases of stream48 are among those of single
SEEDS = (0, 1, 2)
NUM_TIMED = 8  # edits whose time is taken
NUM_TRIED = 4  # edits made under two seeds
NUM_COUNTERFACT = 200  # cases of the part stream200: the first ones of 10,000


@dataclass(frozen=True)
class Job:
    """One process: one part of a row under one seed."""

    row: Row
    part: str
    seed: int

    def path(self, out: Path, limit: int | None = None) -> Path:
        """Its result file; a run of the first cases only has one of its own."""
        first = "" if limit is None else f"-first{limit}"
        return out / f"{self.row.name.replace('/', '-')}-{self.part}-{self.seed}{first}.json"

    @property
    def options(self) -> dict[str, Any]:
        """Options of ``edited_hf`` that all evaluations of the job share."""
        if self.row.is_unedited:
            return {"mode": "none"}
        return {"editor": self.row.editor, "editor_args": {**self.row.settings, "seed": self.seed}}

    def evaluations(self) -> Iterator[tuple[dict[str, Any], list[str], dict[str, Any]]]:
        """Options of the model class, tasks and metadata of each evaluation."""
        if self.part == "single":
            for tasks in (BAKE, WILD):
                yield {**self.options, "mode": "none" if self.row.is_unedited else "single"}, tasks, METADATA
        elif self.part == "stream48":
            for edits, tasks in (("bake", BAKE), ("qaedit", WILD)):
                yield self._stream(edits, NUM_STREAMED, 8), tasks, METADATA
        elif self.part == "trial":
            for seed in SEEDS[:2]:
                # Without a store, what shares a batch, and with it the last digits, is the same in both runs.
                seeded = {"editor_args": {**self.row.settings, "seed": seed}, "store": "off"}
                yield {**self.options, **seeded, "mode": "single"}, BAKE, METADATA
                yield {**self._stream("bake", NUM_TRIED, 2), **seeded}, BAKE, METADATA
        elif self.part == "stream200":
            stream = self.options if self.row.is_unedited else self._stream("counterfact_flat", NUM_COUNTERFACT, 20)
            yield {**stream, "data": "hub"}, COUNTERFACT, METADATA

    def _stream(self, edits: str, number: int, step: int) -> dict[str, Any]:
        from edit_hooks.base.registry import load_editor

        joint = load_editor(self.row.editor, self.row.settings).supports_joint  # a wrapper supports what its base does
        size = {"edits": edits, "num_edits": number, "edit_batch_size": step if joint else 1}
        return {**self.options, "mode": "sequential", **size, "immediate": False}

    @property
    def num_cases(self) -> int | None:
        """First cases of the tasks that are evaluated; ``None``: all."""
        return NUM_COUNTERFACT if self.part == "stream200" else None


def load_rows(path: Path, settings: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The rows of the plan; ``settings`` by row name are added to a row's own."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    rows = [Row("", UNEDITED, {})]
    for group, content in groups.items():
        for editor, own in content["rows"].items():
            rows.append(Row(group, editor, {**own, **settings.get(f"{group}/{editor}", {})}))
    return rows


def load_titles(path: Path) -> dict[str, str]:
    """Group -> its title."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return {name: str(group["title"]) for name, group in groups.items()}


def execute(job: Job, args: argparse.Namespace) -> None:
    """Run one job in this process and write its file."""
    record: dict[str, Any] = {"version": VERSION, "row": job.row.name, "part": job.part, "seed": job.seed}
    record |= {"settings": dict(job.row.settings), "limit": args.limit}
    if job.part == "seconds":
        record |= measure_seconds(job)
    elif job.part == "trial":
        record |= {"draws": draws(job)}
    else:
        limit = args.limit or job.num_cases
        results = [evaluate(*evaluation, limit=limit) for evaluation in job.evaluations()]
        record |= {"scores": {}, "failed": {}, "runs": []}
        for result in results:
            record["scores"] |= result["scores"]
            record["failed"] |= result["failed"]
            record["runs"] += result["runs"]
    record |= {"cpu_seconds": round(time.process_time(), 1), "commit": commit()}
    path = job.path(args.out, args.limit)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(record, default=str, indent=1), encoding="utf-8")
    partial.replace(path)


def commit() -> str | None:
    """The revision of the code that is measured, with ``+`` if files were changed after it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        revision = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return revision + ("+" if changed.stdout.strip() else "")


def evaluate(options: dict[str, Any], tasks: list[str], metadata: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """The score of every case, and the configuration; no scores, with the reason, if the editor can use no edit."""
    import lm_eval

    from edit_hooks.utils.errors import NoUsableRequestError

    try:
        evaluation = lm_eval.simple_evaluate(
            model="edited_hf", model_args=options, tasks=tasks, limit=limit, bootstrap_iters=0, metadata=metadata
        )
    except NoUsableRequestError as error:
        columns = {column for part in COLUMNS.values() for column in part}
        empty: dict[str, Any] = {
            task: {metric: [] for _, of_task, metric in columns if of_task == task} for task in tasks
        }
        return {"scores": empty, "failed": {task: str(error) for task in tasks}, "runs": []}
    scores = {task: read_scores(samples) for task, samples in evaluation["samples"].items()}
    failed = {task: evaluation["results"][task]["unscored_reason,none"] for task in scores}  # without groups
    record = evaluation["config"]["edited_hf"]
    kept = (
        "editor_config",
        "mode",
        "edits",
        "num_edits",
        "edit_batch_size",
        "edits_data",
        "code_fingerprint",
        "versions",
        "device",
    )
    run = {"options": options, "tasks": tasks, "metadata": metadata, **{key: record[key] for key in kept}}
    run["versions"], run["weights"] = record["versions"], record["model_identity"]["weights"]
    run["warnings"] = count_warnings(next(iter(evaluation["samples"].values())))
    return {"scores": scores, "failed": failed, "runs": [run]}


def draws(job: Job) -> dict[str, bool]:
    """Kind of run -> whether two seeds give other scores."""
    found = [evaluate(*evaluation, limit=NUM_TRIED)["scores"] for evaluation in job.evaluations()]
    return {"single": found[0] != found[2], "stream": found[1] != found[3]}


def read_scores(samples: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Metric -> one value per case, in the order of the documents; ``None`` where a case has none."""
    samples = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    names = [name for name in samples[0] if f"{name}_n" in samples[0]]
    return {name: [_score(sample.get(name)) for sample in samples] for name in names}


def _score(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def count_warnings(samples: list[dict[str, Any]]) -> dict[str, int]:
    """First words of the editor's warnings -> number of cases."""
    counts: dict[str, int] = {}
    for sample in samples:
        for warning in (sample.get("edit") or {}).get("warnings", []):
            counts[warning[:80]] = counts.get(warning[:80], 0) + 1
    return counts


def measure_seconds(job: Job) -> dict[str, Any]:
    """Seconds per edit of eight edits made together, after one that warms up and loads or collects statistics."""
    import torch

    from edit_hooks.lm.model import EditedHFLM
    from edit_hooks.lm.options.edit_sources import load_edits

    lm = EditedHFLM(**job.options, store="off")
    requests = load_edits("bake", {"data": "mini"}, NUM_TIMED + 1)
    lm.editor.edit(lm.model, lm.tokenizer, requests[NUM_TIMED:])
    start = time.perf_counter()
    lm.editor.edit(lm.model, lm.tokenizer, requests[:NUM_TIMED])
    return {"seconds": (time.perf_counter() - start) / NUM_TIMED, "threads": torch.get_num_threads()}


def missing_jobs(rows: list[Row], parts: list[str], seed: int, finished: Finished) -> list[Job]:
    """Jobs of one seed that are not finished, part by part."""
    jobs = []
    for part in parts:
        for row in rows:
            job = Job(row, part, seed)
            once = row.is_unedited or part in SEEDLESS
            if (row.is_unedited and part not in UNEDITED_PARTS) or (once and seed != SEEDS[0]):
                continue
            if seed != SEEDS[0] and finished.draws_nothing(row, part):
                continue
            if finished.get(row, part, seed) is None:
                jobs.append(job)
    return jobs


def execute_all(rows: list[Row], args: argparse.Namespace) -> None:
    """Execute all missing jobs, --jobs at a time, each in its own process; timings last and one at a time."""
    args.out.mkdir(parents=True, exist_ok=True)

    def start(job: Job) -> None:
        log = job.path(args.out, args.limit).with_suffix(".log")
        one = ["--one", job.row.name, job.part, str(job.seed)]
        with log.open("w", encoding="utf-8") as file:
            command = [sys.executable, __file__, *sys.argv[1:], *one]
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        state = "done" if code == 0 else f"failed, see {log}"
        print(f"{job.row.name} {job.part} seed {job.seed}: {state}", flush=True)

    untimed = [part for part in args.parts if part != "seconds"]
    for seed in args.seeds:  # all rows under one seed first; whether the third is needed shows after the second
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(start, missing_jobs(rows, untimed, seed, Finished.read(args.out, args.kept, args.limit))))
    timed = [part for part in args.parts if part == "seconds"]
    for job in missing_jobs(rows, timed, SEEDS[0], Finished.read(args.out, args.kept, args.limit)):
        start(job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the result files")
    parser.add_argument("--plan", type=Path, default=PLAN, help="rows (default: measure_editors.yaml)")
    parser.add_argument(
        "--settings", type=Path, help="YAML file: row name -> further settings, as in an artifact of mend"
    )
    parser.add_argument("--rows", nargs="+", help="names, as in tuned/rome; default: all")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS, help="seeds of the editors")
    parser.add_argument("--limit", type=int, help="first cases of each task only, to try the command")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs; set OMP_NUM_THREADS accordingly")
    parser.add_argument("--keep", action="store_true", help="add the finished runs to the kept lines and stop")
    parser.add_argument("--kept", type=Path, default=KEPT, help="the kept lines (default: in docs/_data)")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    settings = yaml.safe_load(args.settings.read_text(encoding="utf-8")) if args.settings else {}
    rows = {row.name: row for row in load_rows(args.plan, settings)}
    if unknown := set(args.rows or ()) - set(rows):
        parser.error(f"no row {', '.join(sorted(unknown))}; rows are {', '.join(rows)}")
    if args.one:
        name, part, seed = args.one
        execute(Job(rows[name], part, int(seed)), args)
        return
    chosen = [rows[name] for name in args.rows] if args.rows else list(rows.values())
    if args.keep:
        if args.limit is not None:
            parser.error("--keep takes whole runs only; leave out --limit, whose runs are no measurement")
        print(f"{Finished.read(args.out, args.kept).keep(rows.values(), args.kept)} runs in {args.kept}")
        return
    execute_all(chosen, args)


if __name__ == "__main__":
    main()
