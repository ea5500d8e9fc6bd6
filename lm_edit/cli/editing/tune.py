"""``lm-edit tune``: a search over an editor's settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edit_hooks.prompt_context import EDIT_CONTEXTS
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, SEED
from lm_edit.cli.command import (
    EDITOR_HELP,
    SETTINGS_SYNTAX,
    Verb,
    add_data_arguments,
    add_model_arguments,
    add_overwrite_argument,
    check_output_files,
    data_settings,
    load_model,
    loading_options,
    model_name,
    open_store,
    real,
    say,
    table,
    whole,
)

COLUMNS = ("efficacy", "paraphrase", "neighborhood", "stability")  # of a trial, as lm_edit.tuning.trials.PARTS

if TYPE_CHECKING:
    from torch import nn

    from edit_hooks.lm.model import EditedHFLM
    from lm_edit.tuning.search import SearchOutcome
    from lm_edit.tuning.trials import Trial
    from lm_eval_tasks.common.records.cases import Case


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--editor", required=True, help=EDITOR_HELP)
    parser.add_argument(
        "--editor-args",
        help=f"settings of all candidates; layers and a step among them are not searched: {SETTINGS_SYNTAX}",
    )
    parser.add_argument(
        "--seed",
        type=whole(SEED),
        default=0,
        help="seed of the editor, unless --editor-args has one, and of the choice of candidates",
    )
    parser.add_argument("--edits", required=True, help="held-out facts: a benchmark, or a JSON(L) file of facts")
    add_data_arguments(parser)
    parser.add_argument(
        "--edit-context",
        choices=EDIT_CONTEXTS,
        default=EDIT_CONTEXTS[0],
        help="text in which edits are made and questions asked (default bare)",
    )
    parser.add_argument("--num-edits", type=whole(), default=16, help="number of facts (default 16)")
    parser.add_argument("--skip", type=whole(NON_NEGATIVE), default=0, help="skip this many facts at the beginning")
    parser.add_argument(
        "--last",
        action="store_true",
        help="take the last facts, which runs of the first ones (--limit, num_edits, subset) do not evaluate; with "
        "--skip, those before that many at the end",
    )
    parser.add_argument("--layers", nargs="+", help="candidates: 5 6 7, or for several layers 3,4,5 4,5,6")
    parser.add_argument("--lr", nargs="+", type=real(), help="candidates for the learning rate; by default found first")
    parser.add_argument("--clamp", nargs="+", type=real(), help="candidates for clamp_factor")
    parser.add_argument("--vary", action="append", default=[], help="candidates for any setting: name=value;value")
    parser.add_argument("--trials", type=whole(), help="try at most this many candidates, drawn at random")
    parser.add_argument("--grid", action="store_true", help="run every candidate on every fact, without halving")
    parser.add_argument("--store", help="folder of the store of finished trials, or off")
    parser.add_argument("-o", "--out", help="write the best settings to this YAML file, for editor_args=")
    add_overwrite_argument(parser)


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.lm.asking.contexts import edit_context_of
    from edit_hooks.utils.settings.options import parse_editor_args
    from lm_edit.tuning.candidates import fixed_settings
    from lm_edit.tuning.cases import in_context
    from lm_edit.tuning.search import check_search, search
    from lm_edit.tuning.settings_file import SearchRecord, write_settings

    check_output_files(args, "out", inputs=[args.edits, args.data, args.editor_args, args.pretrained])
    vary = _parse_candidates(args)
    cases = _load_facts(args)
    settings = parse_editor_args(args.editor_args)
    shared = {"seed": args.seed, **settings}
    store, lm = open_store(args.store), load_model(args)
    cases = in_context(cases, edit_context_of(args.edit_context, lm.tokenizer, lm.chats.template))
    check_search(args.editor, lm.outline, shared, vary, cases)
    if fixed := fixed_settings(shared, vary):
        say(f"as in --editor-args, not searched: {', '.join(fixed)}")
    outcome = search(
        lm.model,
        lm.tokenizer,
        args.editor,
        shared,
        vary,
        cases,
        num=args.trials,
        seed=args.seed,
        halving=not args.grid,
        store=store,
        announce=say,
    )
    _print_trials(outcome, lm.model, args.editor)
    for note in _notes(outcome, args.editor):
        say(note)
    if not outcome.found:
        return 1
    if args.out:
        seed = None if "seed" in {**settings, **vary} else args.seed
        facts = f"{_scored(outcome)} of {_source(args)} {_place(args)}"
        searched = [case for case in cases if case.request.key in outcome.unedited.facts]
        record = SearchRecord(args.editor, _model_text(args, lm), facts, searched, seed)
        write_settings(args.out, outcome.trials[0], record)
        options = f"editor={args.editor},editor_args={args.out}{f',seed={seed}' if seed else ''}"
        options += "" if args.edit_context == EDIT_CONTEXTS[0] else f",edit_context={args.edit_context}"
        say(f"written to {args.out}; use it with {options}, on other facts")
    return 0


def _load_facts(args: argparse.Namespace) -> list[Case]:
    """The facts that the options select."""
    from lm_edit.tuning.cases import load_cases

    cases = load_cases(args.edits, data_settings(args))
    remaining = max(0, len(cases) - args.skip)
    if remaining < args.num_edits:
        raise EditingError(f"{args.edits} has {remaining} facts after --skip {args.skip}; lower --num-edits.")
    start = remaining - args.num_edits if args.last else args.skip
    return cases[start : start + args.num_edits]


def _model_text(args: argparse.Namespace, lm: EditedHFLM) -> str:
    """The model of the options, with those that decide which weights are loaded."""
    options = {name: value for name, value in loading_options(args).items() if name != "pretrained"}
    return f"{model_name(lm)}{_in_brackets(options)}"


def _source(args: argparse.Namespace) -> str:
    """The source of the facts, with the options that choose its records and their order."""
    from edit_hooks.utils.storage.files import names_file
    from lm_eval_tasks.common.records.dataset import choose_data

    if names_file(args.edits):
        return str(args.edits)
    settings = data_settings(args)
    is_shuffled = args.subset is not None or args.subset_seed is not None
    subset = {"subset": args.subset or "all", "subset_seed": args.subset_seed or 0} if is_shuffled else {}
    return f"{args.edits}{_in_brackets({'data': choose_data(settings), **subset})}"


def _in_brackets(options: Mapping[str, object]) -> str:
    text = ", ".join(f"{name}={value}" for name, value in options.items())
    return f" ({text})" if text else ""


def _place(args: argparse.Namespace) -> str:
    """Where the facts of the options are among those of their source."""
    if not args.last:
        return f"from number {args.skip} on"
    return f"before the last {args.skip}" if args.skip else "at the end"


def _parse_candidates(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Setting -> candidate values, from all options that name some."""
    from edit_hooks.utils.storage.yaml_io import parse_yaml

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


def _print_trials(outcome: SearchOutcome, model: nn.Module, editor: str) -> None:
    from edit_hooks.base.registry import load_editor

    rows = []
    own = _own_settings(editor, outcome.first, model)
    for trial in outcome.trials:
        layers = load_editor(editor, trial.settings).default_config(model).layers
        changes = [f"{name}:{value}" for name, value in trial.settings.items() if name not in ("seed", "layers")]
        note = "failed: " + trial.error if trial.error else own if trial.settings == outcome.first else ""
        rows.append([str(layers), *_value_cells(trial), "; ".join(changes) or "-", note])
    rows.append(["-", *_value_cells(outcome.unedited), "-", "unedited"])
    table(("layers", "score", *COLUMNS, "margin", "facts", "settings", ""), rows)


def _own_settings(editor: str, settings: Mapping[str, Any], model: nn.Module) -> str:
    """What the editor's own settings are for a model."""
    from edit_hooks.base.registry import load_editor

    return "as shipped" if load_editor(editor, settings).settings_origin(model).shipped else "at its defaults"


def _value_cells(trial: Trial) -> list[str]:
    means = ["-" if (mean := trial.mean(kind)) is None else f"{mean:.3f}" for kind in COLUMNS]
    margin = "-" if (mean := trial.mean("margin")) is None else f"{mean:+.3f}"
    return [f"{trial.score:.3f}", *means, margin, str(len(trial.facts))]


def _scored(outcome: SearchOutcome) -> str:
    """The facts behind the score of the best candidate, in words, and those that were left out."""
    text = f"{len(outcome.trials[0].facts)} facts"
    if outcome.known:
        text += f" ({len(outcome.known)} more were known to the unedited model and left out)"
    return text


def _notes(outcome: SearchOutcome, editor: str) -> list[str]:
    """Sentences under the table: the step, what the score lacks, and why there is no result."""
    notes = []
    step = outcome.step
    if step is not None and step.size is not None:
        tried = ", ".join(f"{size:g} ({trial.gain:.2f})" for size, trial in sorted(step.tried.items()))
        notes.append(f"step: {step.name} {step.size:g}, from (gain in efficacy): {tried}")
    if not outcome.found:
        notes.append(f"{_reason(outcome, editor)}; nothing is written")
    num_facts = len(outcome.unedited.facts)
    if outcome.known:
        names = ", ".join(case.request.label for case in outcome.known)
        notes.append(f"left out: {len(outcome.known)} facts whose new answer the unedited model gives already: {names}")
    if outcome.num_without_paraphrases == num_facts:
        notes.append("no fact has paraphrases: the score says nothing about generalization (GS)")
    elif outcome.num_without_paraphrases:
        notes.append(
            f"{outcome.num_without_paraphrases} of {num_facts} facts have no paraphrases; that column is of the others"
        )
    return notes


def _reason(outcome: SearchOutcome, editor: str) -> str:
    """Why a search has no result."""
    step = outcome.step
    if step is not None and step.size is None:
        return (
            f"no {step.name} from {min(step.tried):g} to {max(step.tried):g} makes {editor} take: the new answers gain "
            "nothing over the unedited model. Other layers (--layers) or another editor may"
        )
    if all(trial.error for trial in outcome.trials):
        return "every candidate failed, for the reasons in the table"
    if not any(trial.gain for trial in outcome.trials):
        return "no candidate takes: the new answers gain nothing over the unedited model"
    return "every candidate scores 0: a column of the table is 0 for each"


VERBS: dict[str, Verb] = {
    "tune": Verb("search over layers, step and other settings on held-out facts", _add_arguments, _run, is_core=True),
}
