"""How fast the edit engine is, as ratios against the plain reference path, both measured in this run.

    python benchmarks/engine.py                 # the demo model, a few minutes on two CPU cores
    python benchmarks/engine.py --pretrained /path/or/hub-id --dtype bfloat16 --device cuda
    python benchmarks/engine.py --shape llama-3-8b --dtype bfloat16 --device cuda   # random weights of that shape

Prints seconds per edit (value optimization with 21, 11 and 6 context templates), seconds per case (an edit and eight
questions, half of them decoded naturally), the peak memory of each, and with --growth how the time grows with the
number of edits, the depth and the templates. The last line is machine-readable:

    RATIO edit=<x> case=<y> peak=<z>

where ``edit`` and ``case`` are reference seconds over fast seconds (21 templates; 6 templates and 8 questions) and
``peak`` is the fast path's peak memory over the size of the model's weights.

With --operations the floating-point operations per edit are counted too (matrix products, from two short runs): a ratio
that depends on no machine.

The reference path computes every token of every row in every step, writes each edit into the weights and asks one
question at a time with the model's own generate. Both run the same number of steps: early stopping is off.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHAPES = {
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "llama-tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128256, "max_position_embeddings": 256, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass
class Setup:
    """What a measurement runs on; made anew in each process so that peaks are its own."""

    model: Any
    tokenizer: Any
    arguments: argparse.Namespace

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())


def load(arguments: argparse.Namespace) -> Setup:
    """The model under test and a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    from edit_hooks.assets.demo_model import demo_model_path

    dtype = getattr(torch, arguments.dtype)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.shape:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer or demo_model_path())
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPES[arguments.shape])
        with torch.device(arguments.device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    else:
        path = arguments.pretrained or demo_model_path()
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(arguments.device)
    return Setup(_within_vocabulary(model.eval(), tokenizer, arguments), tokenizer, arguments)


def _within_vocabulary(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> Any:
    """Refuse a tokenizer with ids the model has no embedding for."""
    size = model.get_input_embeddings().weight.shape[0]
    used = max(max(tokenizer(request.text)["input_ids"]) for request in requests(arguments, 16))
    if used >= size:
        raise SystemExit(f"the tokenizer uses id {used}, the model has {size} embeddings; give another --tokenizer")
    return model


def requests(arguments: argparse.Namespace, count: int) -> list[Any]:
    """The first records of the benchmark's mini set or of a JSONL file, once more from the start when they run out."""
    from edit_hooks.lm.edit_sources import load_edits

    records = load_edits(arguments.edits_from, {"data": "mini"}, None)
    return [records[index % len(records)] for index in range(count)]


def editor(setup: Setup, engine: str, num_templates: int, steps: int, layer: int | None = None) -> Any:
    """R-ROME with the published template sets (sampled here) and early stopping off: both engines make all steps."""
    from edit_hooks import load_editor

    settings = {
        "context_templates": f"sampled_{num_templates}", "num_steps": steps, "early_stop_loss": 1e-9, "engine": engine,
    }  # fmt: skip
    made = load_editor("r_rome", settings | ({"layers": [layer]} if layer is not None else {}))
    made.resolve_config(setup.model, setup.tokenizer)
    return made


def timed(action: Callable[[], Any]) -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def seconds_per_edit(setup: Setup, engine: str, num_templates: int, edits: int, steps: int, layer: Any = None) -> float:
    """Seconds per edit."""
    made = editor(setup, engine, num_templates, steps, layer)
    asked = requests(setup.arguments, edits)
    return timed(lambda: made.edit(setup.model, setup.tokenizer, asked)) / edits


def operations_per_edit(setup: Setup, engine: str, num_templates: int, edits: int, steps: int) -> float:
    """Floating-point operations per edit, in 1e9; every step costs the same, so two short runs tell the rest."""
    from torch.utils.flop_counter import FlopCounterMode

    asked = requests(setup.arguments, edits)

    def counted(steps: int) -> float:
        made = editor(setup, engine, num_templates, steps)
        with FlopCounterMode(display=False) as counter:
            made.edit(setup.model, setup.tokenizer, asked)
        return counter.get_total_flops() / edits / 1e9

    first, second = counted(2), counted(3)
    return first + (steps - 2) * (second - first)


def case_items(setup: Setup, request: Any) -> tuple[list[Any], list[Any]]:
    """Eight questions of a case: four scored continuations and four natural continuations of up to 50 tokens."""
    from edit_hooks.inference.items import GenerateItem, ScoreItem
    from edit_hooks.modeling.tokens import split_continuation

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(setup.tokenizer(text)["input_ids"])

    subject, target = request.subject, " " + request.target_new.strip()
    prompts = [request.text, f"It is well known about {subject} that", f"A traveller once wrote of {subject}:",
               f"Question: what do you know of {subject}? Answer:"]  # fmt: skip
    scored = [ScoreItem(*map(tuple, split_continuation(setup.tokenizer, prompt, target))) for prompt in prompts]
    written = [GenerateItem(tokens(f"Please answer the question:\n\nQ: {p}?\nA:"), (".", "\n"), 50) for p in prompts]
    return scored, written


def seconds_per_case(setup: Setup, engine: str, edits: int, steps: int) -> float:
    """Seconds per case: the edit (6 templates), four scored and four written answers under it."""
    from edit_hooks.inference.decoding import generate
    from edit_hooks.inference.items import Limits
    from edit_hooks.inference.reference import generate_reference, score_reference
    from edit_hooks.inference.scoring import score

    made = editor(setup, engine, 6, steps)
    asked = requests(setup.arguments, edits)
    items = [case_items(setup, request) for request in asked]

    def run() -> None:
        deltas = made.edit(setup.model, setup.tokenizer, asked)
        to_score = [(item, delta) for delta, (scored, _) in zip(deltas, items, strict=True) for item in scored]
        to_write = [(item, delta) for delta, (_, written) in zip(deltas, items, strict=True) for item in written]
        if engine == "reference":
            score_reference(setup.model, to_score, lambda count: None)
            generate_reference(setup.model, setup.tokenizer, to_write, lambda count: None)
        else:
            score(setup.model, to_score, Limits(), lambda count: None)
            generate(setup.model, setup.tokenizer, to_write, Limits(), lambda count: None)

    return timed(run) / edits


def measure(arguments: argparse.Namespace, name: str, job: dict[str, Any], connection: Any) -> None:
    """One measurement in its own process: seconds (or operations), peak memory, size of the weights."""
    import torch

    setup = load(arguments)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    measures = {"edit": seconds_per_edit, "case": seconds_per_case, "operations": operations_per_edit}
    seconds = measures[name](setup, **job)
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    connection.send((seconds, peak, setup.weight_bytes))


def in_own_process(arguments: argparse.Namespace, name: str, **job: Any) -> tuple[float, float, int]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(arguments, name, job, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        raise SystemExit(f"the measurement {name} {job} failed; its error is above") from None
    process.join()
    return result


def compare(arguments: argparse.Namespace, label: str, name: str, fast: dict, reference: dict) -> tuple[float, float]:
    """Measure both engines and print a row; returns (ratio, fast peak over the weights)."""
    slow_seconds, slow_peak, weights = in_own_process(arguments, name, engine="reference", **reference)
    fast_seconds, fast_peak, _ = in_own_process(arguments, name, engine="fast", **fast)
    ratio = slow_seconds / fast_seconds
    print(
        f"| {label} | {slow_seconds:.2f} | {fast_seconds:.2f} | {ratio:.1f} | {slow_peak / weights:.2f} "
        f"| {fast_peak / weights:.2f} |",
        flush=True,
    )
    return ratio, fast_peak / weights


def growth(arguments: argparse.Namespace, label: str, jobs: dict[Any, dict[str, Any]]) -> None:
    """How the fast path's seconds per edit change with one thing."""
    rows = [f"{key}: {in_own_process(arguments, 'edit', engine='fast', **job)[0]:.2f}" for key, job in jobs.items()]
    print(f"Seconds per edit by {label}: " + ", ".join(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", help="model folder or hub id; the demo model when absent")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a known shape instead")
    parser.add_argument("--tokenizer", help="tokenizer for --shape; the demo model's when absent")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; torch's default when 0")
    parser.add_argument("--edits-from", default="bake", help="a benchmark's name (its mini set) or a JSONL file")
    parser.add_argument("--edits", type=int, default=16, help="edits made together by the fast path")
    parser.add_argument("--steps", type=int, default=20, help="steps of the value optimization")
    parser.add_argument("--reference-edits", type=int, default=1, help="edits the reference path is timed on")
    parser.add_argument("--operations", action="store_true", help="also count operations per edit")
    parser.add_argument("--growth", action="store_true", help="also measure growth with edits, depth and templates")
    arguments = parser.parse_args()
    fast = {"edits": arguments.edits, "steps": arguments.steps}
    slow = {"edits": arguments.reference_edits, "steps": arguments.steps}
    print(
        f"{platform.processor() or platform.machine()}, {arguments.dtype}, {arguments.device}; {arguments.steps} steps"
    )
    print("| measurement | reference s | fast s | ratio | reference peak / weights | fast peak / weights |")
    print("|---|---|---|---|---|---|")
    ratios = {}
    for templates in (21, 11, 6):
        job = {"num_templates": templates}
        ratios[templates] = compare(arguments, f"edit, {templates} templates", "edit", fast | job, slow | job)
    case_ratio, case_peak = compare(arguments, "case, 6 templates, 8 questions", "case", fast, slow)
    if arguments.operations:
        print("\n| operations per edit | reference 1e9 | fast 1e9 | ratio |\n|---|---|---|---|")
        for templates in (21, 11, 6):
            row = [
                in_own_process(arguments, "operations", engine=engine, num_templates=templates, **job)[0]
                for engine, job in (("reference", slow), ("fast", fast))
            ]
            print(f"| {templates} templates | {row[0]:.0f} | {row[1]:.0f} | {row[0] / row[1]:.1f} |", flush=True)
    if arguments.growth:
        base = {"num_templates": 6, "steps": arguments.steps}
        growth(arguments, "number of edits", {n: base | {"edits": n} for n in (1, 4, 16, 32)})
        depth = {layer: base | {"edits": 8, "layer": layer} for layer in (2, 6, 10, 14)}
        growth(arguments, "edited layer", depth)
        growth(arguments, "templates", {n: base | {"edits": 8, "num_templates": n} for n in (6, 11, 21)})
    peak = max(case_peak, *(peak for _, peak in ratios.values()))
    print(f"RATIO edit={ratios[21][0]:.1f} case={case_ratio:.1f} peak={peak:.2f}")


if __name__ == "__main__":
    main()
