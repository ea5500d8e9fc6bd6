"""``lm-edit check-model``: what editing a model supports."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from lm_edit.cli.command import Verb, add_model_arguments, load_model, model_name, say, table

if TYPE_CHECKING:
    from edit_hooks.modeling.support import Support


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="the model, as in --pretrained")
    add_model_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.modeling.architectures import unwrapped
    from edit_hooks.self_check.run import self_check

    if args.model is not None and args.pretrained is not None:
        raise EditingError("give the model once: as the argument or in --pretrained.")
    args.pretrained = args.model if args.model is not None else args.pretrained
    lm = load_model(args)
    support = self_check(unwrapped(lm.model))
    say(f"{model_name(lm)}: {type(unwrapped(lm.model)).__name__}, model type {lm.config.model_type}\n")
    _print(support)
    _print_blocks(lm.model, support)
    return 0 if support.weights else 1


def _print(support: Support) -> None:
    from edit_hooks.self_check.run import CHECKS

    results = {**dict.fromkeys(support.passed, "ok"), **dict.fromkeys(support.failed, "FAIL")}
    table(("check", "", "promise"), [(name, results.get(name, "-"), text) for name, text in CHECKS.items()])
    for name, reason in support.failed.items():
        say(f"{name}: {reason}")


def _print_blocks(model: object, support: Support) -> None:
    from torch import nn

    from edit_hooks.modeling.architectures import architecture_of
    from edit_hooks.modeling.support import editable_blocks
    from edit_hooks.self_check.run import ATTENTION_ROW

    assert isinstance(model, nn.Module)
    say(f"\noffered: {support.offer}")
    if not support.weights:
        say("editors of prompts (ike, ice) and mode=none run on any model")
        return
    for role, reason in support.unusable.items():
        say(f"no edits of {role} maps: {reason}")
    if "rewrite" in support.unusable and "attention_out" not in support.unusable:
        say(f"--model-args family={ATTENTION_ROW} checks the attention's output map in the MLP's place")
    blocks = [] if "rewrite" in support.unusable else editable_blocks(model)
    if blocks:
        part = "attention" if architecture_of(model).changes_attention(blocks[0]) else "MLP"
        say(f"blocks whose {part} can be edited: {_ranges(blocks)}")
        if support.scale is None:
            say(f"memit and its variants are refused: no constant scale between {part} and residual stream")
        elif support.scale != 1.0:
            say(f"memit and its variants divide residuals by {support.scale:.6g}, the scale of the MLPs' outputs")


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as ``0 to 3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


VERBS: dict[str, Verb] = {
    "check-model": Verb("check which editors and engines a model supports", _arguments, _run),
}
