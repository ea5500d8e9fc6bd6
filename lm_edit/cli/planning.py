"""The plan of ``lm-edit editors --pretrained``: memory and time of one edit, by editor."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lm_edit.cli.command import say, table

if TYPE_CHECKING:
    from edit_hooks.planning.outline import Outline
    from edit_hooks.planning.plan import Device, EditorPlan

GIB = 2**30
DEMO = "demo"  # in place of a hub id
HEADER = ("editor", "copies", "solve", "activations", "models", "device", "main", "edit", "seconds", "blocks")


def print_plan(args: argparse.Namespace) -> int:
    """Print a row per editor; the exit code is 0."""
    from edit_hooks.base.registry import EDITORS, load_editor
    from edit_hooks.planning.outline import EIGHT_BITS, FOUR_BITS, outline_of, read_config
    from edit_hooks.planning.plan import plan_editors

    revision = {} if args.revision is None else {"revision": args.revision}
    bits = None if args.bits is None else {"4": FOUR_BITS, "8": EIGHT_BITS}[args.bits]
    source = args.pretrained
    if source == DEMO:
        from edit_hooks.assets.demo_model import demo_model_path

        source = str(demo_model_path())  # converted at the first use of the demo model
    outline = outline_of(read_config(source, **revision), args.dtype, bits)
    device = _device(args, outline)
    shares = [outline.num_bytes] if args.devices == 1 else list(outline.spread(args.devices).values())
    weights = max(shares)
    plans = plan_editors(outline, {name: load_editor(name) for name in args.names or EDITORS}, device.rates)
    kind = "" if outline.bits is None else f", {outline.bits:.3g} bits per weight of the blocks"
    say(f"{args.pretrained}: weights {outline.num_bytes / GIB:.2f} GiB{kind}")
    if len(shares) > 1:
        say(f"on {len(shares)} devices: {' + '.join(f'{share / GIB:.2f}' for share in shares)} GiB")
    say("memory of one edit alone in GiB, without the weights; the column device includes them:\n")
    rows = [_row(plan, weights, device) for plan in plans]
    table((*HEADER, "fits"), rows)
    _explain(plans, device, len(shares))
    return 0


def _device(args: argparse.Namespace, outline: Outline) -> Device:
    """The device here, with measured rates, or the one that the options state."""
    import torch

    from edit_hooks.modeling.memory import free_bytes
    from edit_hooks.planning.plan import Device, RateSource
    from edit_hooks.planning.rates import Rates

    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.teraflops is not None:
        rates: RateSource | None = RateSource(outline, stated=Rates(args.teraflops * 1e12))
    else:
        rates = None if args.device_memory is not None else RateSource(outline, here)
    if args.device_memory is not None:
        return Device(int(args.device_memory * GIB), False, rates)
    return Device(free_bytes(here), here.type == "cpu", rates)


def _row(plan: EditorPlan, weights: int, device: Device) -> tuple[str, ...]:
    footprint = plan.footprint
    if footprint is None:
        return (plan.editor, *[""] * (len(HEADER) - 1), plan.reason)
    needed = device.needed(weights, footprint)
    numbers = (footprint.copies, footprint.solve, footprint.activations, footprint.models, needed)
    seconds = "" if plan.seconds is None else f"{plan.seconds:.{0 if plan.seconds >= 10 else 2}f}"
    is_known = device.free_bytes is not None
    fits = ("yes" if needed <= (device.free_bytes or 0) else "no") if is_known else "unknown"
    main, edit = f"{footprint.main_bytes / GIB:.2f}", _small(footprint.update)
    blocks = f"{plan.layers[0]} to {plan.layers[-1]}" if len(plan.layers) > 1 else "".join(map(str, plan.layers))
    return (plan.editor, *(f"{number / GIB:.2f}" for number in numbers), main, edit, seconds, blocks, fits)


def _small(num_bytes: int) -> str:
    """The size of an edit in the unit that fits it."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.2f} MiB"


def _explain(plans: list[EditorPlan], device: Device, num_devices: int) -> None:
    """The columns, the device, and what the numbers leave out."""
    from edit_hooks.base.footprint import ROW_TOKENS, SUFFIX_TOKENS, TARGET_TOKENS

    held = "main memory holds at once, statistics and the edit too" if device.is_main else "a device holds at once"
    say(f"\nGiB; device: weights and all else that {held}; main: statistics and one edit, in main memory")
    if device.free_bytes is not None:
        say(f"fits: in {device.free_bytes / GIB:.1f} GiB" + (" each" if num_devices > 1 else ""))
    say(
        f"for a request with {ROW_TOKENS} tokens, {SUFFIX_TOKENS} of them behind the subject, {TARGET_TOKENS} of the "
        "target; all steps are counted, and an early stop makes an edit quicker"
    )
    if any(plan.footprint is not None and plan.seconds is None for plan in plans) and device.rates is not None:
        say("without seconds: the number of rows depends on what the model answers")
    if device.rates is None:
        say("time: give --teraflops, the rate of matrix products that the device reaches")
