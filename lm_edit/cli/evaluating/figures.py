"""``lm-edit figure`` and ``lm-edit figures``: figures and tables from result files."""

from __future__ import annotations

import argparse

from edit_hooks.utils.settings.numbers import POSITIVE
from lm_edit.cli.command import (
    DATA_HELP,
    Verb,
    add_only_argument,
    add_overwrite_argument,
    check_output_files,
    real,
    say,
    table,
)


def _add_figure_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the figure, see lm-edit figures")
    parser.add_argument("results", nargs="*", help="result files of lm_eval, or folders with some")
    parser.add_argument(
        "-o", "--out", required=True, help="file: .svg, .png, .pdf, .html (interactive); tables: .md, .csv"
    )
    add_only_argument(parser)
    parser.add_argument("--order", default="", metavar="NAMES", help="names that come first, as rome,memit")
    parser.add_argument("--palette", help="okabe-ito (default), tol-bright, gray, or colors as #0072B2,#E69F00")
    image = parser.add_argument_group("images", "for .svg, .png and .pdf")
    image.add_argument("--dark", action="store_true", help="for a dark page")
    image.add_argument("--width", type=real(POSITIVE), metavar="INCHES", help="of the figure, as 3.25 for a column")
    image.add_argument("--height", type=real(POSITIVE), metavar="INCHES", help="of the figure; default: as it needs")
    image.add_argument("--font", default="", metavar="NAME", help="an installed font; default: DejaVu Sans")
    image.add_argument("--font-size", type=real(POSITIVE), default=7.5, metavar="POINTS", help="of texts (default 7.5)")
    image.add_argument("--no-title", action="store_true", help="without the title inside the figure")
    image.add_argument("--no-caption", action="store_true", help="without the caption inside, which is printed")
    parser.add_argument(
        "--metric", help="column to draw in place of the default; an error where a figure has no choice of it"
    )
    parser.add_argument("--case", help="case id, for figures of one case")
    parser.add_argument("--data", help=f"tables of a data set: {DATA_HELP} (default mini)")
    add_overwrite_argument(parser)


def _draw(args: argparse.Namespace) -> int:
    from lm_edit.figures.drawing.charts import Chart
    from lm_edit.figures.drawing.style import Style, read_palette
    from lm_edit.figures.needs import Options
    from lm_edit.figures.registry import draw_figure, find_figure

    spec = find_figure(args.name)
    check_output_files(args, "out", inputs=[*args.results, *([args.data] if args.data else [])])
    options = Options(args.metric, args.case, args.data)
    style = Style(
        dark=args.dark,
        palette=read_palette(args.palette) if args.palette else (),
        font=args.font,
        font_size=args.font_size,
        width=args.width,
        height=args.height,
        title=not args.no_title,
        caption=not args.no_caption,
    )
    order = [name.strip() for name in args.order.split(",") if name.strip()]
    drawn = draw_figure(spec, args.results, args.out, args.only, options, style=style, order=order)
    if args.no_caption and isinstance(drawn, Chart):
        for sentence in drawn.sentences:
            say(sentence)
    say(f"written to {args.out}")
    return 0


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show what this figure needs; default: list all")


def _list(args: argparse.Namespace) -> int:
    from lm_edit.figures.registry import all_figures, find_figure

    if args.name is None:
        table(("figure", "follows", "shows"), [(spec.name, spec.published, spec.title) for spec in all_figures()])
        say("\nlm-edit figures NAME prints what a figure needs.")
        return 0
    spec = find_figure(args.name)
    say(f"{spec.name}: {spec.title} ({spec.published})\nneeds: {spec.needs.columns}\nfor example: {spec.needs.example}")
    if spec.options:
        say(f"choices: {', '.join(f'--{name}' for name in spec.options)}")
    return 0


VERBS: dict[str, Verb] = {
    "figure": Verb("draw a figure, or write a table, from result files", _add_figure_arguments, _draw, is_core=True),
    "figures": Verb("list the figures, or show what one needs", _add_list_arguments, _list),
}
