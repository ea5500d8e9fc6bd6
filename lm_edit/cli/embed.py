"""``lm-edit embed``: vectors of prompts for maps of an embedding space."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, SEED
from lm_edit.cli.command import (
    Verb,
    add_data_arguments,
    add_model_arguments,
    add_overwrite_argument,
    check_output_files,
    data_settings,
    model_options,
    real,
    say,
    whole,
)

SUFFIX = ".safetensors"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--prompts",
        dest="edits",
        metavar="BENCHMARK",
        default="counterfact",
        help="benchmark of the prompts (default counterfact)",
    )
    add_data_arguments(parser)
    parser.add_argument("--num-prompts", type=whole(), default=100, help="number of its first cases (default 100)")
    parser.add_argument(
        "--edit", nargs="+", default=[], metavar="FILE", help="saved edits or folders of streams, in order"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--noise", type=real(NON_NEGATIVE), help="sigma of the noise on embeddings (default 0.3)")
    size.add_argument("--relative-noise", type=real(NON_NEGATIVE), help="the same in the embeddings' deviations")
    parser.add_argument("--noise-seed", type=whole(SEED), help="seed of the noise (default 0)")
    parser.add_argument("--state", help="after_norm (default), before_norm, or the number of a block")
    parser.add_argument(
        "-o", "--out", required=True, help=f"file of the vectors, {SUFFIX}; a .json beside it describes them"
    )
    add_overwrite_argument(parser)


def _run(args: argparse.Namespace) -> int:
    if Path(args.out).suffix != SUFFIX:
        raise EditingError(f"--out {args.out} does not end in {SUFFIX}.")
    args.description = str(Path(args.out).with_suffix(".json"))
    check_output_files(args, "out", "description", inputs=[*args.edit, args.data, args.pretrained])
    from lm_edit.embeddings import write_embeddings

    options = ("noise", "relative_noise", "noise_seed", "state")
    given: dict[str, Any] = {f"evk_{name}": getattr(args, name) for name in options if getattr(args, name) is not None}
    written = write_embeddings(
        args.out,
        args.edits,
        {**data_settings(args), **given},
        num_prompts=args.num_prompts,
        edits=args.edit,
        model_options=model_options(args),
    )
    for reason, count in written.skipped.items():
        say(f"left out: {count}: {reason}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in written.counts.items())
    say(f"{kinds} written to {written.vectors}, described in {written.description}")
    return 0


VERBS: dict[str, Verb] = {
    "embed": Verb("write hidden states of prompts and their perturbed versions", _add_arguments, _run),
}
