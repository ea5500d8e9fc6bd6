"""Speed and memory of the edit engine, as ratios to the reference path measured in the same run.

    python scripts/perf/engine.py                 # the demo model, a few minutes on two CPU cores
    python scripts/perf/engine.py --pretrained /path/or/hub-id --dtype bfloat16 --device cuda
    python scripts/perf/engine.py --shape llama-3-8b --dtype bfloat16 --device cuda   # random weights of that shape

Prints seconds per edit (value optimization with 21, 11 and 6 context templates), seconds per case (an edit and eight
questions, half of them decoded naturally), the peak memory of each, and with --growth the growth of the time with the
number of edits, the depth and the templates. The last line is machine-readable:

    RATIO edit=<x> case=<y> peak=<z>

where ``edit`` and ``case`` are reference seconds over fast seconds (21 templates; 6 templates and 8 questions) and
``peak`` is the fast path's peak memory over the size of the model's weights.

With --operations the floating-point operations per edit (matrix products) are counted too, from two short runs: their
ratio does not depend on the machine.

With --gradient the editors that train by gradients are measured instead (--editors names them, others too): operations
and seconds per edit of the plain loop on --reference-edits edits and of the engine on --edits edits; with
--operations-only no seconds, on a machine that is busy with other work. The last line is then, per editor,

    GRADIENT <editor>=<ratio of operations>/<ratio of seconds> ...

With --table everything that the page "How fast" of the documentation shows is measured on one model, in Markdown:

    python scripts/perf/engine.py --table --shape llama-3-8b --dtype bfloat16 --device cuda

Seconds per edit of the editors alone and 4, 16 and 64 together, their share of the rate of a large matrix product,
joint edits of 16 to 1,000 requests, questions scored and continued under edits of their own, a covariance solve, peak
memory, and where the time goes. Columns beside it: the plain loop, and numbers of EasyEdit from ``measured.json``. The
numbers with goals come first. With --save FILE.json each is saved as it ends, with FILE.md beside it, and the next call
goes on; --minutes ends a call in time. ``gpu_session.py`` does this and runs the tests that need a GPU.

The reference path computes every token of every row in every step, writes each edit into the weights and answers one
question at a time with the model's own generate. Early stopping is off, so both paths run the same number of steps.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import platform
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from how_fast import SECTIONS
from how_fast_parts import measure_all
from how_fast_table import markdown
from measured_model import SHAPES, Setup, load, load_requests, make_editor, time_seconds

if TYPE_CHECKING:
    from edit_hooks.deltas.delta import Delta
    from edit_hooks.inference.items import GenerateItem, ScoreItem
    from edit_hooks.request import EditRequest

ENGINES = ("reference", "fast")
TEMPLATES = (21, 11, 6)
VALUE_EDITOR = "r_rome"  # of the measurements of the value optimization
GRADIENT_EDITORS = ["ft_m", "ft_l", "wise", "lora", "mend"]


class Measurement(NamedTuple):
    """Seconds (or operations), peak memory in bytes, size of the weights in bytes."""

    value: float
    peak_bytes: int
    weight_bytes: int


def seconds_per_edit(
    setup: Setup, engine: str, edits: int, steps: int, editor: str = VALUE_EDITOR, **more: Any
) -> float:
    """Seconds per edit, of ``edits`` edits made in one call, after a first one.

    Args:
        more: further arguments of :func:`make_editor`.
    """
    made = make_editor(setup, engine, editor, steps, **more)
    requests = load_requests(setup.args, edits)
    made.edit(setup.model, setup.tokenizer, requests[:1])
    return time_seconds(lambda: made.edit(setup.model, setup.tokenizer, requests)) / edits


def operations_per_edit(
    setup: Setup, engine: str, edits: int, steps: int, editor: str = VALUE_EDITOR, **more: Any
) -> float:
    """Floating-point operations per edit, in 1e9, extrapolated from two short runs: every step costs the same."""
    from torch.utils.flop_counter import FlopCounterMode

    requests = load_requests(setup.args, edits)

    def count(num_steps: int) -> float:
        made = make_editor(setup, engine, editor, num_steps, **more)
        with FlopCounterMode(display=False) as counter:
            made.edit(setup.model, setup.tokenizer, requests)
        return counter.get_total_flops() / edits / 1e9

    two_steps, three_steps = count(2), count(3)
    return two_steps + (steps - 2) * (three_steps - two_steps)


def case_items(setup: Setup, request: EditRequest) -> tuple[list[ScoreItem], list[GenerateItem]]:
    """Eight questions of a case: four scored continuations and four natural continuations of up to 50 tokens."""
    from edit_hooks.inference.items import GenerateItem, ScoreItem
    from edit_hooks.modeling.tokens import split_continuation

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(setup.tokenizer(text)["input_ids"])

    subject, target = request.subject, " " + request.target_new.strip()
    prompts = [request.text, f"It is well known about {subject} that", f"A traveller once wrote of {subject}:",
               f"Question: what do you know of {subject}? Answer:"]  # fmt: skip
    score_items = []
    for prompt in prompts:
        context, continuation = split_continuation(setup.tokenizer, prompt, target)
        score_items.append(ScoreItem(tuple(context), tuple(continuation)))
    questions = [f"Please answer the question:\n\nQ: {prompt}?\nA:" for prompt in prompts]
    return score_items, [GenerateItem(tokens(question), (".", "\n"), 50) for question in questions]


def seconds_per_case(setup: Setup, engine: str, edits: int, steps: int) -> float:
    """Seconds per case: the edit (6 templates), four scored and four written answers under it."""
    from edit_hooks.inference.batching import limits_for
    from edit_hooks.inference.decoding import generate
    from edit_hooks.inference.reference import generate_reference, score_reference
    from edit_hooks.inference.scoring import score

    editor = make_editor(setup, engine, VALUE_EDITOR, steps)
    requests = load_requests(setup.args, edits)
    items = [case_items(setup, request) for request in requests]

    def run() -> None:
        deltas = editor.edit(setup.model, setup.tokenizer, requests)
        score_jobs: list[tuple[ScoreItem, Delta | None]] = []
        generate_jobs: list[tuple[GenerateItem, Delta | None]] = []
        for delta, (score_items, generate_items) in zip(deltas, items, strict=True):
            score_jobs += [(item, delta) for item in score_items]
            generate_jobs += [(item, delta) for item in generate_items]
        if engine == "reference":
            score_reference(setup.model, score_jobs, lambda count: None)
            generate_reference(setup.model, setup.tokenizer, generate_jobs, lambda count: None)
        else:
            score(setup.model, score_jobs, limits_for(setup.model), lambda count: None)
            generate(setup.model, setup.tokenizer, generate_jobs, limits_for(setup.model), lambda count: None)

    return time_seconds(run) / edits


MEASURES: dict[str, Callable[..., float]] = {
    "edit": seconds_per_edit,
    "case": seconds_per_case,
    "operations": operations_per_edit,
}


def measure(args: argparse.Namespace, name: str, job: Mapping[str, object], connection: Connection) -> None:
    """Run one measurement and send it; the body of a process."""
    import torch

    setup = load(args)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    value = MEASURES[name](setup, **job)
    if torch.cuda.is_available():
        peak_bytes = torch.cuda.max_memory_allocated()
    else:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    connection.send(Measurement(value, peak_bytes, setup.weight_bytes))


def measure_in_process(args: argparse.Namespace, name: str, **job: object) -> Measurement:
    """Run one measurement in a process of its own."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(args, name, job, sender))
    process.start()
    sender.close()
    try:
        measurement = receiver.recv()
    except EOFError:
        raise SystemExit(f"the measurement {name} {job} failed; its error is above") from None
    process.join()
    return measurement


def compare(
    args: argparse.Namespace, label: str, name: str, fast_job: Mapping[str, int], reference_job: Mapping[str, int]
) -> tuple[float, float]:
    """Measure both engines and print a row; returns the ratio of seconds, and the fast peak over the weights."""
    slow = measure_in_process(args, name, engine="reference", **reference_job)
    fast = measure_in_process(args, name, engine="fast", **fast_job)
    ratio, fast_peak = slow.value / fast.value, fast.peak_bytes / fast.weight_bytes
    slow_peak = slow.peak_bytes / slow.weight_bytes
    print(
        f"| {label} | {slow.value:.2f} | {fast.value:.2f} | {ratio:.1f} | {slow_peak:.2f} | {fast_peak:.2f} |",
        flush=True,
    )
    return ratio, fast_peak


def print_operations(args: argparse.Namespace, fast_job: Mapping[str, int], reference_job: Mapping[str, int]) -> None:
    """Print a table of the operations per edit of both engines."""
    print("\n| operations per edit | reference 1e9 | fast 1e9 | ratio |\n|---|---|---|---|")
    for num_templates in TEMPLATES:
        slow, fast = (
            measure_in_process(args, "operations", engine=engine, num_templates=num_templates, **job).value
            for engine, job in (("reference", reference_job), ("fast", fast_job))
        )
        print(f"| {num_templates} templates | {slow:.0f} | {fast:.0f} | {slow / fast:.1f} |", flush=True)


def print_gradient_editors(args: argparse.Namespace) -> None:
    """Print operations, seconds and peak memory of editors that train by gradients, as ratios to the plain loop.

    Operations are counted on the same edits for both; seconds of the plain loop on the first ones.
    """
    print("\n| editor | plain 1e9 | fast 1e9 | ratio | plain s | fast s | ratio | plain peak / weights | fast |")
    print("|---|---|---|---|---|---|---|---|---|")
    ratios = []
    for editor in args.editors or GRADIENT_EDITORS:
        job = {"editor": editor, "edits": args.edits, "steps": args.steps, "num_templates": None}
        slow_count, fast_count = (
            measure_in_process(args, "operations", engine=engine, **job).value for engine in ENGINES
        )
        fewer, faster = f"{slow_count / fast_count:.1f}", "-"
        cells = [f"{slow_count:.0f}", f"{fast_count:.0f}", fewer, *["-"] * 5]
        if not args.operations_only:
            slow = measure_in_process(args, "edit", engine="reference", **{**job, "edits": args.reference_edits})
            fast = measure_in_process(args, "edit", engine="fast", **job)
            faster = f"{slow.value / fast.value:.1f}"
            peaks = [f"{m.peak_bytes / m.weight_bytes:.2f}" for m in (slow, fast)]
            cells[3:] = [f"{slow.value:.2f}", f"{fast.value:.2f}", faster, *peaks]
        print(f"| {editor} | {' | '.join(cells)} |", flush=True)
        ratios.append(f"{editor}={fewer}/{faster}")
    print("GRADIENT " + " ".join(ratios))


def print_growth(args: argparse.Namespace) -> None:
    """Print the fast path's seconds per edit by number of edits, edited layer and templates."""

    def print_series(label: str, name: str, values: Sequence[int], **job: int) -> None:
        cells = []
        for value in values:
            seconds = measure_in_process(args, "edit", engine="fast", steps=args.steps, **{**job, name: value}).value
            cells.append(f"{value}: {seconds:.2f}")
        print(f"Seconds per edit by {label}: " + ", ".join(cells), flush=True)

    print_series("number of edits", "edits", (1, 4, 16, 32), num_templates=6)
    print_series("edited layer", "layer", (2, 6, 10, 14), num_templates=6, edits=8)
    print_series("templates", "num_templates", (6, 11, 21), edits=8)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", help="model folder or hub id; default: the demo model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a known shape instead")
    parser.add_argument("--tokenizer", help="tokenizer for --shape; default: one trained on the requests")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 (default): torch's choice")
    parser.add_argument("--edits-from", default="bake", help="a benchmark (its mini set) or a JSONL file")
    parser.add_argument("--edits", type=int, default=16, help="edits made together by the fast path")
    parser.add_argument("--steps", type=int, default=20, help="steps of the value optimization")
    parser.add_argument("--reference-edits", type=int, default=1, help="edits on which the reference path is timed")
    parser.add_argument("--operations", action="store_true", help="also count operations per edit")
    parser.add_argument("--growth", action="store_true", help="also measure growth with edits, depth and templates")
    parser.add_argument("--gradient", action="store_true", help="measure the editors that train by gradients instead")
    parser.add_argument("--table", action="store_true", help="measure the table of the page How fast instead")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="parts of --table")
    parser.add_argument("--editors", nargs="+", help="editors of --gradient or --table; by default all of the mode")
    parser.add_argument("--together", nargs="+", type=int, default=[1, 4, 16, 64], help="--table: edits made together")
    parser.add_argument("--joint", nargs="+", type=int, default=[16, 64, 200, 1000], help="--table: requests per edit")
    parser.add_argument("--questions", type=int, default=256, help="--table: number of questions")
    parser.add_argument("--new-tokens", type=int, default=50, help="--table: tokens that each is continued by")
    parser.add_argument("--most-steps", type=int, default=0, help="--table: steps of all editors; 0: those of the rows")
    parser.add_argument("--save", help="--table: JSON file of what was measured; the next call measures what it lacks")
    parser.add_argument("--minutes", type=float, default=0.0, help="--table: begin nothing after these; 0: no bound")
    parser.add_argument("--operations-only", action="store_true", help="with --gradient: measure no seconds")
    return parser.parse_args()


def main() -> None:
    start = time.monotonic()
    args = parse_arguments()
    if args.table:
        logging.disable(logging.WARNING)  # edits of random weights rarely take
        try:
            results = measure_all(load(args), start + 60 * args.minutes if args.minutes else math.inf)
        finally:
            logging.disable(logging.NOTSET)
        print(markdown(results.about, results.parts))
        return
    fast_job = {"edits": args.edits, "steps": args.steps}
    reference_job = {"edits": args.reference_edits, "steps": args.steps}
    print(f"{platform.processor() or platform.machine()}, {args.dtype}, {args.device}; {args.steps} steps")
    if args.gradient:
        print_gradient_editors(args)
        return
    print("| measurement | reference s | fast s | ratio | reference peak / weights | fast peak / weights |")
    print("|---|---|---|---|---|---|")
    ratios, peaks = {}, []
    for num in TEMPLATES:
        jobs = (fast_job | {"num_templates": num}, reference_job | {"num_templates": num})
        ratios[num], peak = compare(args, f"edit, {num} templates", "edit", *jobs)
        peaks.append(peak)
    case_ratio, peak = compare(args, "case, 6 templates, 8 questions", "case", fast_job, reference_job)
    peaks.append(peak)
    if args.operations:
        print_operations(args, fast_job, reference_job)
    if args.growth:
        print_growth(args)
    print(f"RATIO edit={ratios[21]:.1f} case={case_ratio:.1f} peak={max(peaks):.2f}")


if __name__ == "__main__":
    main()
