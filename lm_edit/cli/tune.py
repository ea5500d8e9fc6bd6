"""``lm-edit tune``: a search over an editor's settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.numbers import NON_NEGATIVE, SEED
from lm_edit.cli.command import (
    DATA_HELP,
    EDITOR_HELP,
    SETTINGS_SYNTAX,
    Verb,
    add_model_arguments,
    add_overwrite_argument,
    check_output_files,
    data_settings,
    load_model,
    model_name,
    open_store,
    real,
    say,
    table,
    whole,
)

if TYPE_CHECKING:
    from torch import nn

    from lm_edit.tuning.search import Trial
    from lm_eval_tasks.common.cases import Case


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--editor", required=True, help=EDITOR_HELP)
    parser.add_argument("--editor-args", help=f"settings of all candidates: {SETTINGS_SYNTAX}")
    parser.add_argument(
        "--seed", type=whole(SEED), default=0, help="seed of the editor, and of the choice of candidates"
    )
    parser.add_argument("--edits", required=True, help="held-out facts: a benchmark, or a JSON(L) file of cases")
    parser.add_argument("--data", help=DATA_HELP)
    parser.add_argument("--num-edits", type=whole(), default=16, help="number of facts (default 16)")
    parser.add_argument("--skip", type=whole(NON_NEGATIVE), default=0, help="skip this many facts at the beginning")
    parser.add_argument("--layers", nargs="+", help="candidates: 5 6 7, or for several layers 3,4,5 4,5,6")
    parser.add_argument("--lr", nargs="+", type=real(), help="candidates for the learning rate")
    parser.add_argument("--clamp", nargs="+", type=real(), help="candidates for clamp_factor")
    parser.add_argument("--vary", action="append", default=[], help="candidates for any setting: name=value;value")
    parser.add_argument("--trials", type=whole(), help="try at most this many candidates, drawn at random")
    parser.add_argument("--grid", action="store_true", help="run every candidate on every fact, without halving")
    parser.add_argument("--store", help="folder of the store of finished trials, or off")
    parser.add_argument("--out", help="write the best settings to this YAML file, for editor_args=")
    add_overwrite_argument(parser)


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.utils.options import parse_editor_args
    from lm_edit.tuning.candidates import make_candidates, sample_candidates
    from lm_edit.tuning.search import tune
    from lm_edit.tuning.settings_file import write_settings

    check_output_files(args, "out", inputs=[args.edits, args.data, args.editor_args, args.pretrained])
    vary = _parse_candidates(args)
    cases = _load_facts(args)
    shared = {"seed": args.seed, **parse_editor_args(args.editor_args)}
    store, lm = open_store(args.store), load_model(args)
    candidates = sample_candidates(make_candidates(args.editor, lm.outline, shared, vary), args.trials, args.seed)
    trials = tune(lm.model, lm.tokenizer, args.editor, candidates, cases, halving=not args.grid, store=store)
    _print_trials(trials, candidates[0], lm.model, args.editor)
    best = trials[0]
    if best.error or best.score <= 0:
        say("every candidate scores 0; nothing is written")
        return 1
    if args.out:
        facts = f"{len(cases)} facts of {args.edits} from number {args.skip} on"
        write_settings(args.out, best, editor=args.editor, model=model_name(lm), facts=facts)
        say(f"written to {args.out}; use it with editor={args.editor},editor_args={args.out}, on other facts")
    return 0


def _load_facts(args: argparse.Namespace) -> list[Case]:
    """The facts that the options select."""
    from lm_edit.tuning.cases import load_cases

    cases = load_cases(args.edits, data_settings(args))[args.skip :]
    if len(cases) < args.num_edits:
        raise EditingError(f"{args.edits} has {len(cases)} facts after --skip {args.skip}; lower --num-edits.")
    return cases[: args.num_edits]


def _parse_candidates(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Setting -> candidate values, from all options that name some."""
    from edit_hooks.utils.yaml_io import parse_yaml

    vary: dict[str, list[Any]] = {}
    if args.layers:
        try:
            vary["layers"] = [[int(layer) for layer in text.split(",")] for text in args.layers]
        except ValueError:
            raise EditingError(f"--layers {' '.join(args.layers)}; write 5 6 7, or 3,4,5 4,5,6.") from None
    if args.lr:
        vary["lr"] = args.lr
    if args.clamp:
        vary["clamp_factor"] = args.clamp
    for text in args.vary:
        name, _, values = text.partition("=")
        if not name or not values:
            raise EditingError(f"--vary {text!r}; write name=value;value.")
        try:
            vary[name] = [parse_yaml(value) for value in values.split(";")]
        except ValueError as error:
            raise EditingError(f"--vary {text!r} is not readable: {error}.") from None
    return vary


def _print_trials(trials: Sequence[Trial], shipped: dict[str, Any], model: nn.Module, editor: str) -> None:
    from edit_hooks.base.registry import load_editor
    from lm_eval_tasks.common.cases import KINDS

    rows = []
    for trial in trials:
        layers = load_editor(editor, trial.settings).default_config(model).layers
        changes = [f"{name}:{value}" for name, value in trial.settings.items() if name not in ("seed", "layers")]
        means = ["-" if (mean := trial.mean(kind)) is None else f"{mean:.3f}" for kind in KINDS]
        margin = "-" if (mean := trial.mean("margin")) is None else f"{mean:+.3f}"
        note = "failed: " + trial.error if trial.error else "as shipped" if trial.settings == shipped else ""
        cells = (str(layers), f"{trial.score:.3f}", *means, margin, str(len(trial.facts)))
        rows.append([*cells, "; ".join(changes) or "-", note])
    table(("layers", "S", *KINDS, "margin", "facts", "settings", ""), rows)


VERBS: dict[str, Verb] = {
    "tune": Verb("search over layers, learning rate and clamp on held-out facts", _add_arguments, _run),
}
