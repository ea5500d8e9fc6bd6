"""``lm-edit sweep``: the runs of a plan."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE
from edit_hooks.utils.storage.files import read_text, require_folder, size_text
from lm_edit.cli.command import Verb, real, say, table, whole

if TYPE_CHECKING:
    from lm_edit.sweeps.planning.choices import Plan
    from lm_edit.sweeps.planning.grid import Grid

DEFAULT_OUT = "sweeps"  # with a folder for each plan
RETRY = "--retry executes failed runs again, and those with damaged results, which are set aside"
LARGE_EDIT = 2**25  # bytes in the store from which a plan names them: those of dense updates


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", nargs="?", help="YAML file, or the name of a shipped plan")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="list the shipped plans")
    action.add_argument("--print", action="store_true", help="print the plan's file, to start your own")
    action.add_argument("--dry-run", action="store_true", help="list the runs with their estimated time; run nothing")
    action.add_argument("--status", action="store_true", help="list the runs with their states; run nothing")
    parser.add_argument("-o", "--out", help=f"folder of the runs (default {DEFAULT_OUT}/<plan>)")
    add_run_arguments(parser)
    add_size_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where and which runs of a plan are executed."""
    parser.add_argument("--workers", type=whole(), help="runs at a time (default 1, or one per GPU; of a cluster any)")
    parser.add_argument(
        "--keep-model", action="store_true", help="execute the runs of a worker in one process that keeps the model"
    )
    parser.add_argument("--on", choices=("local", "slurm", "ray"), default="local", help="where runs are executed")
    parser.add_argument("--address", help="Ray cluster, as ray://head:10001 (default: one on this machine)")
    parser.add_argument(
        "--slurm-cluster", choices=("slurm", "local"), help="local: submitit's processes here, to try a plan"
    )
    parser.add_argument(
        "--retry", action="store_true", help="also execute runs that failed before or whose results are damaged"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="FIELD=VALUE[,VALUE]",
        help="only runs with one of these values, e.g. editor=memit,rome; or a text: only runs with it in their names; "
        "may be repeated, for texts and for one field with alternatives",
    )
    parser.add_argument(
        "--estimate-from", nargs="+", default=[], help="further result files or folders whose seconds to estimate from"
    )


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that give a plan another size or model."""
    parser.add_argument("--limit", type=real(POSITIVE), help="cases per task, in place of the plan's limit")
    parser.add_argument(
        "--num-edits", type=whole(), help="edits of batches and streams, in place of the plan's; steps shrink with them"
    )
    parser.add_argument(
        "--pretrained",
        help="hub id or folder, in place of the plan's models; demo: the demo model and embedded samples",
    )
    parser.add_argument(
        "--model-args",
        help="options of that model as in lm_eval, in place of the plan's: dtype=bfloat16,data=mini, ...",
    )


def _run(args: argparse.Namespace) -> int:
    from lm_edit.sweeps.planning.plan import find_plan, load_plan

    for option, value, place in (("address", args.address, "ray"), ("slurm-cluster", args.slurm_cluster, "slurm")):
        if value is not None and args.on != place:
            raise EditingError(f"--{option} {value} is for --on {place}, not --on {args.on}; nothing was run.")
    if args.list:
        return _list_plans()
    if args.plan is None:
        raise EditingError("name a plan: a YAML file, or one of lm-edit sweep --list.")
    path = find_plan(args.plan)
    if args.print:
        _say_lines(read_text(path, "plan").rstrip("\n"))
        return 0
    from lm_edit.sweeps.checking.checks import check_inputs, check_plan
    from lm_edit.sweeps.planning.selection import select_runs

    plan = resized(load_plan(path), args)
    grid = check_plan(plan)
    grid = grid._replace(runs=select_runs(grid, args.only, str(path)))
    out = require_folder(args.out or Path(DEFAULT_OUT, plan.name), "the folder of the runs,")
    if args.status:
        return _print_states(grid, out)
    if args.dry_run:  # a plan is shown before its files are there, and then what it lacks
        state = dry_run(args, plan, grid, out)
        check_inputs(plan, grid.runs)
        return state
    check_inputs(plan, grid.runs)
    return execute(args, plan, grid, out)


def resized(plan: Plan, args: argparse.Namespace) -> Plan:
    """The plan with the sizes and the model of :func:`add_size_arguments`."""
    from lm_eval.utils import simple_parse_args_string

    from lm_edit.sweeps.planning.changes import with_limit, with_model, with_num_edits

    model_args = simple_parse_args_string(args.model_args or "")
    return with_num_edits(with_model(with_limit(plan, args.limit), args.pretrained, model_args), args.num_edits)


def _say_lines(text: str) -> None:
    """Print a text line by line, at once: the output of a sweep is read while it runs."""
    for line in text.split("\n"):
        say(line)
    sys.stdout.flush()


def _list_plans() -> int:
    from lm_edit.sweeps.planning.plan import load_plan, shipped_plans

    table(("plan", "description"), [(name, load_plan(path).description) for name, path in shipped_plans().items()])
    return 0


def dry_run(args: argparse.Namespace, plan: Plan, grid: Grid, out: Path) -> int:
    """Print the runs of a plan with their states and estimates."""
    from edit_hooks.utils.durations import spell_duration
    from lm_edit.sweeps.checking.checks import origin_of
    from lm_edit.sweeps.checking.estimate import Estimator
    from lm_edit.sweeps.checking.memory import RunPlans
    from lm_edit.sweeps.execution.executors import defaults_of, on_cluster
    from lm_edit.sweeps.execution.runs import RESULTS
    from lm_edit.sweeps.execution.status import described_state
    from lm_edit.sweeps.planning.grid import RULES
    from lm_edit.sweeps.planning.plan import described

    for line in described(plan):
        say(line)
    states = {out / run.folder_name / RESULTS: described_state(out / run.folder_name, run.tasks) for run in grid.runs}
    damaged = {results for results, (state, _) in states.items() if state == "damaged"}
    finished = [str(path) for path in sorted(out.glob(f"*/{RESULTS}")) if path not in damaged]  # also of other plans
    estimator, plans = Estimator(args.estimate_from, finished), RunPlans()
    rows: list[tuple[str, ...]] = []
    notes: dict[str, None] = {}
    total, num_unknown = 0.0, 0
    made: set[str | None] = set()  # edits that an earlier run of the list leaves in the store
    for run in grid.runs:
        state, reason = states[out / run.folder_name / RESULTS]
        edits = estimator.edits_of(run)
        seconds, origin = estimator.seconds(run, makes_edits=edits is None or edits not in made), origin_of(plan, run)
        made.add(edits)
        if not state.startswith("done"):
            notes |= dict.fromkeys(f"{run.name}: {warning}" for warning in estimator.warnings(run))
            total += seconds or 0.0
            num_unknown += seconds is None
        if origin.tuning in ("untuned", "unknown"):
            notes[f"{origin.tuning}: {run.model}, {run.editor}: {origin.text}"] = None
        if reason:
            notes[f"{state}: {run.name}: {reason}"] = None
        estimate = "unknown" if seconds is None else spell_duration(seconds)
        if seconds is None and (per_edit := plans.seconds_per_edit(run)):
            edits_alone = f"{per_edit:.1f} s per edit alone, on this machine; the time of the answers is unknown"
            notes[f"by arithmetic: {run.model}, {run.editor}: {edits_alone}"] = None
        if (size := plans.edit_bytes(run) or 0) >= LARGE_EDIT:
            notes[f"disk: {run.model}, {run.editor}: each edit takes {size_text(size)} in the store"] = None
        memory = plans.device_bytes(run)
        gib = "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"
        rows.append((state, estimate, gib, origin.tuning, run.name, ",".join(run.tasks)))
    table(("state", "estimate", "memory", "settings", "run", "tasks"), rows)
    for named in dict.fromkeys(str(named) for run in grid.runs for named in run.named_files):
        say(f"part of the runs by its content: {named}")
    for left_out in grid.left_out:
        say(f"left out: {left_out.name}: {left_out.rule} ({RULES[left_out.rule]})")
    for note in notes:
        say(note)
    used = on_cluster(args.on, plan.resources, grid.runs, args.slurm_cluster)
    for default in defaults_of(args.on, plan.resources, used):
        say(default)
    for folder, reason in estimator.unreadable.items():
        say(f"not used for estimates: {folder}: {reason}")
    known = f"to do: about {spell_duration(total)} one after another"
    unknown = f"{num_unknown} of unknown length"
    parts = [known] * bool(total or not num_unknown) + [unknown] * bool(num_unknown)
    say(f"{len(rows)} run{'s' * (len(rows) != 1)}; {', and '.join(parts)}")
    return 0


def _print_states(grid: Grid, out: Path) -> int:
    from lm_edit.sweeps.execution.watch import HEADER, SweepFolder

    seen = SweepFolder(out, grid.runs).read()
    table(HEADER, seen.rows)
    for line in seen.summary:
        say(line)
    if seen.has_failed:
        say(RETRY)
    return 1 if seen.has_failed else 0


def execute(args: argparse.Namespace, plan: Plan, grid: Grid, out: Path) -> int:
    """Execute the runs of a plan that are not finished; 1 if some run has no results."""
    from lm_edit.sweeps.execution.executors import make_executor
    from lm_edit.sweeps.execution.runs import FAILED, LOG, prepare
    from lm_edit.sweeps.execution.schedule import run_all
    from lm_edit.sweeps.execution.status import UNSCORED, Progress

    executor = make_executor(
        args.on,
        out,
        args.workers,
        plan.resources,
        grid.runs,
        address=args.address,
        slurm_cluster=args.slurm_cluster,
        keep_model=args.keep_model,
    )
    runs = {prepare(out, run): run for run in grid.runs}
    folders = {folder: run.name for folder, run in runs.items()}
    tasks = {folder: run.tasks for folder, run in runs.items()}
    if grid.left_out:
        say(f"{len(grid.left_out)} combinations are left out; --dry-run names them")
    progress = Progress(folders, _say_lines)
    try:
        outcomes = run_all(tasks, executor, retry=args.retry, report=progress.report, tick=progress.tick)
    except KeyboardInterrupt:
        say("the same command continues where this one stopped; with --status it lists what is done")
        raise
    failed = [folder for folder, outcome in outcomes.items() if outcome.state != "done"]
    say(f"{len(outcomes) - len(failed)} of {len(folders)} runs have results in {out}")
    for folder, reason in progress.unscored.items():
        say(f"{UNSCORED}: {folders[folder]}: {reason}")
    to_retry = [folder for folder in failed if outcomes[folder].state == "damaged" or (folder / FAILED).is_file()]
    for folder in failed:
        state, log = outcomes[folder].state, folder / LOG
        if state == "damaged" or not (folder / FAILED).is_file():  # the log of `lm_eval` does not have the reason
            say(f"{state}: {folders[folder]}: {outcomes[folder].reason}")
        else:
            say(f"failed: {folders[folder]}; log: {log}")
    if to_retry:
        say(RETRY)
    if len(to_retry) < len(failed):
        say("the same command executes the runs again that were interrupted, not submitted, or lost their worker")
    return 1 if failed else 0


VERBS: dict[str, Verb] = {
    "sweep": Verb("run a plan: models x editors x benchmarks x modes", _add_arguments, _run, is_core=True),
}
