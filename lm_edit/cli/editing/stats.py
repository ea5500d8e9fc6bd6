"""``lm-edit stats``: second moments and null spaces, collected ahead of edits or listed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import INNER_SHARE, NON_NEGATIVE, SEED
from lm_edit.cli.command import SETTINGS_SYNTAX, Verb, add_model_arguments, model_options, real, say, table, whole
from lm_edit.cli.editing.importing import add_import_arguments, import_matrices

if TYPE_CHECKING:
    from lm_edit.stats import LayerReport, StoredMoment


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="[import]")
    description = "bring second moments and null-space projectors of other projects here"
    add_import_arguments(actions.add_parser("import", help=description, description=description))
    add_model_arguments(parser)
    parser.add_argument("--show", action="store_true", help="list the stored second moments and stop")
    parser.add_argument("--editor", help="collect for this editor; its configuration is the default of other options")
    parser.add_argument("--editor-args", help=f"settings of the editor: {SETTINGS_SYNTAX}")
    parser.add_argument("--layers", type=whole(NON_NEGATIVE), nargs="+", help="blocks; default: those of the editor")
    parser.add_argument(
        "--source",
        help="self (default), published, a text file or folder, or a hub id such as owner/name/config",
    )
    parser.add_argument(
        "--tokens", type=whole(), help="stop after this many tokens; default: 16 per dimension, or all of a file"
    )
    parser.add_argument(
        "--max-length",
        type=whole(),
        help="cut documents after this many tokens (default 256, or a shorter context; published: the model's context)",
    )
    parser.add_argument("--moment-dtype", choices=("float32", "float64"), help="precision of the stored matrix")
    parser.add_argument("--seed", type=whole(SEED), help="seed of the sampled text, or of the order of a hub corpus")
    parser.add_argument("--threshold", type=real(), help="also compute the projector onto eigenvalues below this")
    parser.add_argument(
        "--energy", type=real(INNER_SHARE), help="also compute the projector that holds this share of the trace"
    )
    parser.add_argument("--folder", type=Path, help="folder of the matrices; default: the user's cache")


def _run(args: argparse.Namespace) -> int:
    if args.action == "import":
        return import_matrices(args)
    if args.show:
        return _show(args.folder)
    if args.editor_args and not args.editor:
        raise EditingError("--editor-args are the settings of an editor; add --editor or drop them.")
    from edit_hooks.utils.settings.options import parse_editor_args
    from lm_edit.stats import prepare_stats

    options = {
        "layers": args.layers,
        "second_moments": args.source,
        "moment_tokens": args.tokens,
        "moment_length": args.max_length,
        "moment_dtype": args.moment_dtype,
        "seed": args.seed,
    }
    settings = parse_editor_args(args.editor_args)
    settings |= {name: value for name, value in options.items() if value is not None}
    reports = prepare_stats(
        model_options(args),
        editor=args.editor,
        settings=settings,
        threshold=args.threshold,
        energy=args.energy,
        folder=args.folder,
    )
    header = ("layer", "tokens", "width", "tokens/width", "condition", "null space kept", "")
    table(header, [_layer_cells(layer) for layer in reports])
    for layer in reports:
        for text in layer.warnings:
            say(f"warning: layer {layer.layer}: {text}")
    say(f"stored in {reports[0].report['folder']}")
    return 0


def _layer_cells(layer: LayerReport) -> list[str]:
    num_tokens, width = layer.report["num_tokens"], layer.report["width"]
    projector = layer.projector
    return [
        str(layer.layer),
        str(num_tokens),
        str(width),
        f"{num_tokens / width:.1f}",
        _format_condition(layer.report["condition"]),
        "-" if projector is None else f"{projector.rank} of {width} ({projector.share:.1%})",
        "collected" if layer.is_new else "from the store",
    ]


def _show(folder: Path | None) -> int:
    from edit_hooks.utils.storage.files import cache_root
    from lm_edit.stats import list_stored_moments

    moments = list_stored_moments(folder)
    header = ("model", "layer", "text", "tokens", "dtype", "condition", "size", "null spaces")
    table(header, [_stored_cells(moment) for moment in moments])
    say(f"\n{len(moments)} second moments in {folder or cache_root() / 'stats'}")
    return 0


def _stored_cells(moment: StoredMoment) -> list[str]:
    from edit_hooks.utils.storage.hashing import key_of
    from lm_edit.stats import corpus_label

    description, report = moment.description, moment.report
    name = Path(report.get("model_name") or "model").name
    projectors = [f"{item.rule}: {item.rank}/{item.width}" for item in moment.projectors]
    return [
        f"{name} {key_of(description['model'])[:8]}",
        str(description["layer"]),
        f"{corpus_label(description['corpus'])}, cut at {description['max_length']}",
        str(report["num_tokens"]),
        description["dtype"],
        _format_condition(report["condition"]),
        f"{moment.num_bytes / 1e6:.1f} MB",
        ", ".join(projectors) or "-",
    ]


def _format_condition(condition: float | None) -> str:
    return "singular" if condition is None else f"{condition:.1e}"


VERBS: dict[str, Verb] = {
    "stats": Verb("collect, import or list second moments and null spaces", _add_arguments, _run),
}
