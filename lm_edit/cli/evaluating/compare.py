"""``lm-edit compare``: one editor in the runs of a plan, beside results that are there already."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from lm_edit.cli.command import Verb, say
from lm_edit.cli.evaluating.leaderboard import editor_kind, write_site
from lm_edit.cli.evaluating.sweep import add_run_arguments, add_size_arguments, dry_run, execute, resized

if TYPE_CHECKING:
    from lm_edit.sweeps.planning.choices import Plan

DEFAULT_PLAN = "field_3k"
RUNS = "runs"  # folder of the runs below --out


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("editor", help="package.module:Class, a name of lm-edit editors, or a YAML file of an entry")
    parser.add_argument("--plan", default=DEFAULT_PLAN, help=f"YAML file, or a shipped plan (default {DEFAULT_PLAN})")
    parser.add_argument(
        "--baselines",
        nargs="+",
        default=[],
        help="result files or folders of other editors, such as those of lm-edit sweep with the same plan and options",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs with their estimated time; run nothing")
    parser.add_argument("-o", "--out", help="folder of runs and tables (default compare/<editor>)")
    parser.add_argument("--overwrite", action="store_true", help="replace tables that lm-edit has not written")
    add_size_arguments(parser)
    add_run_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.utils.storage.files import require_folder
    from edit_hooks.utils.storage.outputs import check_output_file
    from lm_edit.leaderboard.site import FILES, is_own, make_site
    from lm_edit.results.files.runs import find_result_files
    from lm_edit.sweeps.checking.checks import check_inputs, check_plan
    from lm_edit.sweeps.execution.runs import RESULTS
    from lm_edit.sweeps.planning.grid import RULES
    from lm_edit.sweeps.planning.selection import select_runs

    plan = _plan(args)
    grid = check_plan(plan)
    grid = grid._replace(runs=select_runs(grid, args.only, plan.name))
    (name,) = {choice.name for choice in plan.editors if not choice.is_unedited}
    if not any(run.editor == name for run in grid.runs):
        rules = "; ".join(f"{item.name}: {RULES[item.rule]}" for item in grid.left_out[:3])
        raise EditingError(f"{plan.name} has no run of {name}." + (f" Left out: {rules}." if rules else ""))
    folder = Path(args.out or Path("compare", name.replace(":", ".")))
    out = require_folder(folder / RUNS, "the folder of the runs,")
    baselines = list(find_result_files(args.baselines)) if args.baselines else []
    if args.dry_run:
        state = dry_run(args, plan, grid, out)
        check_inputs(plan, grid.runs)
        return state
    check_inputs(plan, grid.runs)
    for file in FILES:
        check_output_file(folder / file, inputs=baselines, overwrite=args.overwrite or is_own(folder / file))
    state = execute(args, plan, grid, out)
    finished = [str(out / run.folder_name / RESULTS) for run in grid.runs if (out / run.folder_name / RESULTS).is_dir()]
    if not finished:
        return state
    site = make_site([*finished, *args.baselines], title=f"{name} in {plan.name}", kind_of=editor_kind, progress=True)
    write_site(folder, site)
    say(f"{site.num_rows} rows; tables in Markdown, LaTeX and CSV beside {folder / 'index.html'}")
    return state


def _plan(args: argparse.Namespace) -> Plan:
    """The plan with the editor and the unedited model alone, and with the sizes and the model of the options."""
    from lm_edit.sweeps.planning.changes import with_editor
    from lm_edit.sweeps.planning.plan import find_plan, load_plan

    return resized(with_editor(load_plan(find_plan(args.plan)), args.editor), args)


VERBS: dict[str, Verb] = {
    "compare": Verb("run one editor in a plan and compare it with stored results", _add_arguments, _run, is_core=True),
}
