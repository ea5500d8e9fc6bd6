"""``lm-edit stats``, ``trace`` and ``tune``: what locate-then-edit editors stand on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError
from lm_edit.cli.command import Verb, model_arguments, model_options, table


def _stats_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument("--show", action="store_true", help="list what is kept and stop")
    parser.add_argument("--editor", help="collect what this editor would use; fills in what is not given")
    parser.add_argument("--editor-args", help="its settings: name:value;name:value, or a YAML file")
    parser.add_argument("--layers", type=int, nargs="+", help="blocks; those of the editor when absent")
    parser.add_argument("--source", help="self (default), a text file or folder, or a hub id such as owner/name/config")
    parser.add_argument("--tokens", type=int, help="stop after so many tokens; four per dimension, or all of a file")
    parser.add_argument("--max-length", type=int, help="cut documents after so many tokens (default 256)")
    parser.add_argument("--moment-dtype", choices=("float32", "float64"), help="precision of the kept matrix")
    parser.add_argument("--seed", type=int, help="seed of the sampled text, or of the order of a hub corpus")
    parser.add_argument("--threshold", type=float, help="also make the projector on eigenvalues below this")
    parser.add_argument("--energy", type=float, help="also make the projector that holds this share of the trace")
    parser.add_argument("--folder", type=Path, help="where matrices are kept; the user's cache when absent")


def _stats(given: argparse.Namespace) -> int:
    from edit_hooks.utils.options import parse_editor_args
    from lm_edit.stats import prepare_stats

    if given.show:
        return _show_stats(given.folder)
    named = {
        "layers": given.layers,
        "second_moments": given.source,
        "moment_tokens": given.tokens,
        "moment_length": given.max_length,
        "moment_dtype": given.moment_dtype,
        "seed": given.seed,
    }
    settings = {name: value for name, value in named.items() if value is not None}
    if given.editor_args and not given.editor:
        raise EditingError("--editor-args are the settings of an editor; add --editor or drop them.")
    options = {k: v for k, v in model_options(given).items() if k not in ("editor", "editor_args", "seed")}
    reports = prepare_stats(
        options,
        editor=given.editor,
        settings={**parse_editor_args(given.editor_args), **settings},
        threshold=given.threshold,
        energy=given.energy,
        folder=given.folder,
    )
    rows = []
    for entry in reports:
        report, projector = entry.report, entry.projector
        kept = "-" if projector is None else f"{projector.rank} of {report['width']} ({projector.share:.1%})"
        ratio = report["num_tokens"] / report["width"]
        where = "collected" if entry.is_new else "from the store"
        cells = (entry.layer, report["num_tokens"], report["width"], f"{ratio:.1f}", _condition(report), kept, where)
        rows.append([str(cell) for cell in cells])
    table(("layer", "tokens", "width", "tokens/width", "condition", "null space kept", ""), rows)
    for entry in reports:
        for text in entry.warnings:
            print(f"warning: layer {entry.layer}: {text}")
    print(f"kept in {reports[0].report['folder']}")
    return 0


def _show_stats(folder: Path | None) -> int:
    from edit_hooks.utils.files import cache_root
    from lm_edit.stats import corpus_name, stored_stats

    rows = []
    for entry in stored_stats(folder):
        description, report = entry.description, entry.report
        name = Path(report.get("model_name") or "model").name
        projectors = ", ".join(f"{named}: {rank}/{width}" for named, rank, width in entry.projectors) or "-"
        model = f"{name} {description['model'][:8]}"
        text = f"{corpus_name(entry)}, cut at {description['max_length']}"
        size = f"{entry.num_bytes / 1e6:.1f} MB"
        facts = (
            model,
            description["layer"],
            text,
            report["num_tokens"],
            description["dtype"],
            _condition(report),
            size,
        )
        rows.append([*map(str, facts), projectors])
    table(("model", "layer", "text", "tokens", "dtype", "condition", "size", "null spaces"), rows)
    print(f"\n{len(rows)} second moments in {folder or cache_root() / 'stats'}")
    return 0


def _condition(report: dict[str, Any]) -> str:
    return "singular" if report["condition"] is None else f"{report['condition']:.1e}"


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument("--edits", required=True, help="facts: a benchmark's name, or a JSON(L) file of edit requests")
    parser.add_argument("--data", help="where the benchmark's records are: mini, hub, a file or a folder")
    parser.add_argument("--num-edits", type=int, help="how many of them, in order; all when absent")
    parser.add_argument(
        "--answer", default="known", help="known (default): facts the model answers rightly; true: all; predicted"
    )
    parser.add_argument("--samples", type=int, default=10, help="noise draws per fact (default 10)")
    parser.add_argument("--noise", type=float, default=3.0, help="in standard deviations of the subjects (default 3)")
    parser.add_argument("--window", type=int, help="blocks restored together (10 of 48, in proportion, when absent)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise")
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens of one pass (default 4096)")
    parser.add_argument("--store", help="folder of the store of finished facts, or off")
    parser.add_argument("--out", type=Path, help="write everything to this JSON file")
    parser.add_argument("--plot", type=Path, help="write a picture, .svg or .png (needs matplotlib)")


def _trace(given: argparse.Namespace) -> int:
    import json

    from edit_hooks.lm.edit_sources import load_edits
    from edit_hooks.lm.model import EditedHFLM
    from edit_hooks.locate.causal_trace import TraceSettings, trace_facts
    from edit_hooks.store.store import Store
    from edit_hooks.utils.files import write_atomically
    from lm_edit.figures.causal_trace import check_plot, plot_trace

    if given.plot:
        check_plot(given.plot)
    settings = TraceSettings(given.samples, given.noise, given.seed, given.window, given.answer, given.max_tokens)
    data = {"data": given.data} if given.data else {"pretrained": given.pretrained}
    requests = load_edits(given.edits, data, given.num_edits)
    options = {name: value for name, value in model_options(given).items() if name not in ("seed", "store")}
    lm = EditedHFLM(**options, mode="none")
    store = None if given.store == "off" else Store(given.store)
    trace = trace_facts(lm.model, lm.tokenizer, requests, settings, store=store)
    _print_trace(trace)
    if given.out:
        write_atomically(given.out, json.dumps({"model": _name(lm), **trace.to_dict()}, indent=1) + "\n")
        print(f"written to {given.out}")
    if given.plot:
        print(f"plot: {plot_trace(trace, given.plot)}")
    return 0


def _name(lm: Any) -> str:
    """The model as people know it: the demo's name instead of the folder it lies in."""
    from edit_hooks.assets.demo_model import DEMO_NAME

    return DEMO_NAME if lm.is_demo else str(lm.pretrained)


def _print_trace(trace: Any) -> None:
    shown = [
        (kind, group) for kind in trace.effects for group in ("subject_last", "last") if group in trace.effects[kind]
    ]
    rows = [
        [str(layer), *(f"{trace.effects[kind][group]['mean'][layer]:+.4f}" for kind, group in shown)]
        for layer in range(trace.settings["layers"])
    ]
    print(
        f"average indirect effect over {trace.num_facts} facts ({len(trace.skipped)} skipped); probability of the "
        f"answer {trace.clean:.3f}, with noise on the subject {trace.corrupted:.3f}; MLP and attention restored in "
        f"windows of {trace.settings['window']} blocks"
    )
    table(("layer", *(f"{kind} {group}" for kind, group in shown)), rows)
    found = trace.suggested()
    if not found:
        print("restoring MLPs at the subject's last token never helps here, so no layer is suggested")
        return
    print(f"one layer to edit: editor_args=layers:{found['one']}; several: editor_args=layers:{found['several']}")


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument("--editor", required=True, help="name of the editor, see lm-edit editors")
    parser.add_argument("--editor-args", help="settings all candidates share: name:value;name:value, or a YAML file")
    parser.add_argument("--seed", type=int, default=0, help="seed of the editor, and of the choice of candidates")
    parser.add_argument("--edits", required=True, help="held-out facts: a benchmark's name, or a JSON(L) file of cases")
    parser.add_argument("--data", help="where the benchmark's records are: mini, hub, a file or a folder")
    parser.add_argument("--num-edits", type=int, default=16, help="how many facts (default 16)")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many facts at the beginning")
    parser.add_argument("--layers", nargs="+", help="candidates: 5 6 7, or for several layers 3,4,5 4,5,6")
    parser.add_argument("--lr", nargs="+", type=float, help="candidates for the learning rate")
    parser.add_argument("--clamp", nargs="+", type=float, help="candidates for clamp_factor")
    parser.add_argument("--vary", action="append", default=[], help="candidates for any setting: name=value;value")
    parser.add_argument("--trials", type=int, help="try at most so many candidates, drawn at random")
    parser.add_argument("--grid", action="store_true", help="every candidate on every fact, without halving")
    parser.add_argument("--store", help="folder of the store of finished trials, or off")
    parser.add_argument("--out", type=Path, help="write the best settings to this YAML file, for editor_args=")


def _tune(given: argparse.Namespace) -> int:
    import random

    from edit_hooks.lm.model import EditedHFLM
    from edit_hooks.store.store import Store
    from edit_hooks.utils.options import parse_editor_args
    from lm_edit.tuning.cases import load_cases
    from lm_edit.tuning.search import candidates, tune

    for name in ("num_edits", "trials"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise EditingError(f"--{name.replace('_', '-')} is {getattr(given, name)}; a positive number is needed.")
    vary = _varied(given)
    data = {"data": given.data} if given.data else {"pretrained": given.pretrained}
    cases = load_cases(given.edits, data)[max(0, given.skip) :]
    if len(cases) < given.num_edits:
        raise EditingError(f"{given.edits} has {len(cases)} facts after --skip {given.skip}; lower --num-edits.")
    cases = cases[: given.num_edits]
    options = {k: v for k, v in model_options(given).items() if k not in ("editor", "editor_args", "seed", "store")}
    lm = EditedHFLM(**options, mode="none")
    shared = {"seed": given.seed, **parse_editor_args(given.editor_args)}
    tried = candidates(given.editor, lm.model, shared, vary)
    if given.trials is not None and given.trials < len(tried):
        tried = [tried[0], *random.Random(given.seed).sample(tried[1:], given.trials - 1)]
    store = None if given.store == "off" else Store(given.store)
    found = tune(lm.model, lm.tokenizer, given.editor, tried, cases, halving=not given.grid, store=store)
    _print_trials(found, tried[0], lm.model, given.editor)
    best = found[0]
    if best.error or best.score <= 0:
        print("no candidate does better than nothing; nothing is written")
        return 1
    if given.out:
        facts = f"{len(cases)} facts of {given.edits} from number {given.skip} on"
        _write_settings(given.out, given.editor, best, _name(lm), facts)
        print(f"written to {given.out}; use it with editor={given.editor},editor_args={given.out}, on other facts")
    return 0


def _varied(given: argparse.Namespace) -> dict[str, list[Any]]:
    """Setting -> candidate values, from all options that give some."""
    import yaml

    vary: dict[str, list[Any]] = {}
    if given.layers:
        try:
            vary["layers"] = [[int(layer) for layer in text.split(",")] for text in given.layers]
        except ValueError:
            raise EditingError(f"--layers {' '.join(given.layers)}; write 5 6 7, or 3,4,5 4,5,6.") from None
    if given.lr:
        vary["lr"] = given.lr
    if given.clamp:
        vary["clamp_factor"] = given.clamp
    for text in given.vary:
        name, _, values = text.partition("=")
        if not name or not values:
            raise EditingError(f"--vary {text!r}; write name=value;value.")
        vary[name] = [yaml.safe_load(value) for value in values.split(";")]
    return vary


def _print_trials(found: Any, base: dict[str, Any], model: Any, editor: str) -> None:
    from edit_hooks.base.registry import load_editor
    from lm_edit.tuning.search import KINDS

    rows = []
    for trial in found:
        layers = load_editor(editor, trial.settings).default_config(model).layers
        changed = {name: value for name, value in trial.settings.items() if name not in ("seed", "layers")}
        named = "; ".join(f"{name}:{value}" for name, value in changed.items()) or "-"
        means = ["-" if (mean := trial.mean(kind)) is None else f"{mean:.3f}" for kind in KINDS]
        margin = trial.mean("margin")
        cells = (layers, f"{trial.score:.3f}", *means, "-" if margin is None else f"{margin:+.3f}", len(trial.facts))
        note = "failed: " + trial.error if trial.error else "as shipped" if trial.settings == base else ""
        rows.append([*map(str, cells), named, note])
    table(("layers", "S", *KINDS, "margin", "facts", "settings", ""), rows)


def _write_settings(path: Path, editor: str, best: Any, model: str, facts: str) -> None:
    import yaml

    from edit_hooks.utils.files import write_atomically

    settings = {name: value for name, value in best.settings.items() if name != "seed"}
    head = f"# {editor} for {model}: best of lm-edit tune on {facts}, S {best.score:.3f}. Score it on other facts.\n"
    write_atomically(path, head + yaml.safe_dump(settings, sort_keys=False))


VERBS: dict[str, Verb] = {
    "stats": Verb("collect second moments and null spaces, or show those that are kept", _stats_arguments, _stats),
    "trace": Verb("causal tracing: the layers and tokens that carry a set of facts", _trace_arguments, _trace),
    "tune": Verb("search over layers, learning rate and clamp on held-out facts", _tune_arguments, _tune),
}
