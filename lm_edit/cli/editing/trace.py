"""``lm-edit trace``: causal tracing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from edit_hooks.utils.settings.numbers import SEED
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.cli.command import (
    Verb,
    add_data_arguments,
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
    write_output,
)

if TYPE_CHECKING:
    from edit_hooks.locate.tracing.causal_trace import Trace

FACTS_HELP = "facts: a benchmark, or a JSON(L) file of facts, or of known ones as ROME's known_1000.json"
PRINTED_GROUPS = ("subject_last", "last")  # --out has all token groups


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--edits", required=True, help=FACTS_HELP)
    add_data_arguments(parser)
    parser.add_argument("--num-edits", type=whole(), help="use the first facts only; default: all")
    parser.add_argument(
        "--answer",
        default="known",
        help="known (default): only facts that the model predicts correctly; true: all facts; "
        "predicted: trace the model's prediction",
    )
    parser.add_argument("--samples", type=whole(), default=10, help="noise draws per fact (default 10)")
    parser.add_argument("--noise", type=real(), default=3.0, help="in standard deviations of the subjects (default 3)")
    parser.add_argument(
        "--window", type=whole(), help="blocks restored together; default: 10 of 48, scaled to the model's depth"
    )
    parser.add_argument("--seed", type=whole(SEED), default=0, help="seed of the noise")
    parser.add_argument(
        "--noise-file",
        help="the noise itself, in the place of --noise and --seed: a safetensors file with a tensor [samples, subject "
        "tokens, width] per prompt, named by the prompt",
    )
    parser.add_argument("--max-tokens", type=whole(), default=4096, help="tokens per forward pass (default 4096)")
    parser.add_argument("--store", help="folder of the store of finished facts, or off")
    parser.add_argument("-o", "--out", help="write all effects to this JSON file")
    parser.add_argument("--plot", help="write a figure: .svg, .png, .pdf (needs matplotlib), .html (needs plotly)")
    add_overwrite_argument(parser)


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.locate.tracing.causal_trace import TraceSettings, trace_facts
    from edit_hooks.modeling.tensors import require_tensors
    from edit_hooks.request import require_subjects
    from lm_edit.figures.causal_trace import plot_trace
    from lm_edit.figures.drawing.output import check_output
    from lm_edit.traced_facts import load_facts

    check_output_files(args, "out", "plot", inputs=[args.edits, args.data, args.pretrained, args.noise_file])
    if args.plot:
        check_output(args.plot)
    if args.noise_file:
        require_tensors(args.noise_file, "file of --noise-file")
    settings = TraceSettings(args.samples, args.noise, args.seed, args.window, args.answer, args.max_tokens)
    requests = load_facts(args.edits, data_settings(args), args.num_edits)
    require_subjects(requests, "trace")
    store, lm = open_store(args.store), load_model(args)
    trace = trace_facts(lm.model, lm.tokenizer, requests, settings, noise=args.noise_file, store=store)
    _print_trace(trace)
    if args.out:
        write_output(args.out, json_text({"model": model_name(lm), **trace.to_dict()}, indent=1) + "\n")
        say(f"written to {args.out}")
    if args.plot:
        say(f"plot: {plot_trace(trace, args.plot)}")
    return 0


def _print_trace(trace: Trace) -> None:
    columns = [(kind, group) for kind in trace.effects for group in PRINTED_GROUPS if group in trace.effects[kind]]
    rows = [
        [str(layer), *(f"{trace.effects[kind][group]['mean'][layer]:+.4f}" for kind, group in columns)]
        for layer in range(trace.settings["layers"])
    ]
    say(
        f"average indirect effect over {trace.num_facts} facts ({len(trace.skipped)} skipped); probability of the "
        f"answer {trace.clean:.3f}, with noise on the subject {trace.corrupted:.3f}; MLP and attention restored in "
        f"windows of {trace.settings['window']} blocks"
    )
    table(("layer", *(f"{kind} {group}" for kind, group in columns)), rows)
    layers = trace.suggested()
    if not layers:
        say("no layer is suggested: restoring an MLP at the subject's last token has no positive effect")
        return
    say(f"one layer to edit: editor_args=layers:{layers['one']}; several: editor_args=layers:{layers['several']}")


VERBS: dict[str, Verb] = {
    "trace": Verb("causal tracing: layers and tokens that mediate a set of facts", _add_arguments, _run),
}
