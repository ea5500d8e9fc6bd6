"""``lm-edit edit`` and ``lm-edit export``: edits as files."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from edit_hooks.prompt_context import read_separator, separator_name
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.printable import printable
from edit_hooks.utils.settings.numbers import SEED
from lm_edit.cli.command import (
    DATA_OPTIONS,
    EDITOR_HELP,
    SETTINGS_SYNTAX,
    Verb,
    add_data_arguments,
    add_model_arguments,
    check_data_options,
    loading_options,
    loading_words,
    model_options,
    say,
    say_reasons,
    table,
    whole,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lm_edit.edits import AdapterFacts, SavedEdit, SavedEdits

MAX_SHOWN = 20  # requests in the table
MAX_NAMES = 3  # files in a sentence
MAX_TEXT = 60  # characters of a prompt or target in it
MAX_LIKELY = math.log(2)  # nats per token: a probability of one half


def _add_edit_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--editor", required=True, help=EDITOR_HELP)
    parser.add_argument("--editor-args", help=f"settings of the editor: {SETTINGS_SYNTAX}")
    parser.add_argument("--edit-context", help="text in which edits are made: bare (default), qa or chat")
    parser.add_argument("--seed", type=whole(SEED), help="seed of the editor")
    parser.add_argument("--edits", required=True, help="a benchmark, or a JSON(L) file of facts")
    add_data_arguments(parser)
    parser.add_argument("--num-edits", type=whole(), help="use the first edits only; default: all")
    grouping = parser.add_mutually_exclusive_group()
    grouping.add_argument("--joint", action="store_true", help="one edit that writes all requests at once")
    grouping.add_argument("--sequential", action="store_true", help="a stream: each step edits the result of the last")
    parser.add_argument("--edit-batch-size", type=whole(), help="requests per step of a stream (default 1)")
    parser.add_argument("--store", help="folder of the store of finished edits, or off")
    parser.add_argument("-o", "--out", required=True, help="new folder for the edits")


def _run_edit(args: argparse.Namespace) -> int:
    if args.edit_batch_size is not None and not args.sequential:
        raise EditingError("--edit-batch-size sets the size of a stream's steps; add --sequential or drop it.")
    check_data_options(args)
    from lm_edit.edits import make_edits

    result = make_edits(
        args.out,
        args.edits,
        grouping="joint" if args.joint else "sequential" if args.sequential else "independent",
        num_edits=args.num_edits,
        edit_batch_size=args.edit_batch_size,
        model_options=model_options(args, "editor", "editor_args", "edit_context", "seed", "store", *DATA_OPTIONS),
    )
    print_effects(result.edits)
    for case, reason in result.failed.items():
        say(f"failed: {case}: {reason}")
    _print_next_steps(result.edits, args)
    _print_wrecked(result, is_stream=args.sequential)
    counts = f"{len(result.failed)} failed" + (f", {len(result.wrecked)} wrecked" if result.wrecked else "")
    say(f"{len(result.edits)} edits written to {args.out}, {counts}")
    return 1 if result.failed or result.wrecked else 0


def print_effects(edits: Sequence[SavedEdit]) -> None:
    """A row per request: whether its target became likely, and how far its edit moved neutral prompts.

    Then the requests whose targets did not, and all warnings.
    """
    from edit_hooks.deltas.saving.saved import INDEX_NAME

    if not edits:
        return
    rows, unlikely = [], []
    acts_in_prompts = all(edit.writes == ("context",) for edit in edits)
    for edit in edits:
        effects = edit.report.effects
        single = [(effects.target_nll_before, effects.target_nll_after)]
        nlls = single if len(edit.requests) == 1 else effects.target_nlls or [(None, None)] * len(edit.requests)
        for request, (before, after) in zip(edit.requests, nlls, strict=True):
            numbers = [_number(value) for value in (before, after, effects.first_token_kl)]
            text = f"{printable(request.text, MAX_TEXT)} -> {printable(request.target_new, MAX_TEXT)}"
            rows.append([edit.file.name, *numbers, text])
            if after is not None and not after < MAX_LIKELY:  # NaN, too
                unlikely.append((text, "target is less likely than not (above 0.69 nats per token)"))
    header = ["file", "target NLL before", "after", "first-token KL", "edit"]
    if acts_in_prompts:  # nothing was measured
        header, rows = [header[0], header[-1]], [[row[0], row[-1]] for row in rows]
    table(header, rows[:MAX_SHOWN])
    if len(rows) > MAX_SHOWN:
        say(f"... and {len(rows) - MAX_SHOWN} more in {edits[0].file.with_name(INDEX_NAME)}")
    if acts_in_prompts:
        say("not measured: these edits act through the prompts of questions; evaluate them")
    say_reasons("after the edit", unlikely)
    warnings = [(edit.file.name, text) for edit in edits for text in edit.report.warnings]
    say_reasons("warning", warnings)


def _print_wrecked(result: SavedEdits, *, is_stream: bool) -> None:
    """One sentence about the edits that wreck the model, with what to try."""
    if not result.wrecked:
        return
    from edit_hooks.edit_report import WRECKED_KL
    from edit_hooks.inference.effects.damage import WRECKED_REMEDY

    first = result.wrecked[0]
    what = _wreck([edit.file.name for edit in result.wrecked])
    if is_stream:
        what = f"the stream wrecks the model at step {result.edits.index(first)} ({first.file.name})"
    say(f"wrecked: {what}: first-token KL {first.report.effects.first_token_kl:.2f}, above {WRECKED_KL:g} nats.")
    say(WRECKED_REMEDY)


def _wreck(names: Sequence[str]) -> str:
    """The clause about files, the first of which are named."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more} {'wrecks' if len(names) == 1 else 'wreck'} the model"


def _number(value: float | None) -> str:
    """A diagnostic in nats; ``-`` where the edit has none."""
    return "-" if value is None else f"{value:.3f}"


def _print_next_steps(edits: Sequence[SavedEdit], args: argparse.Namespace) -> None:
    """The commands that evaluate and export what was written; steps of a stream act together only."""
    if not edits:
        return
    file, is_stream = edits[0].file, args.sequential and len(edits) > 1
    separator = {} if args.separator is None else {"separator": separator_name(read_separator(args.separator))}
    words = _model_words({**loading_options(args), **separator, "load_edit": file.parent if is_stream else file})
    say(f"evaluate: lm_eval --model edited_hf --model_args {words} --tasks ...")
    together = edits if is_stream else edits[:1]
    if formats := [name for name in edits[0].formats if all(name in edit.formats for edit in together)]:
        files = f"{shlex.quote(args.out)}/*.safetensors" if args.sequential else shlex.quote(str(file))
        words = shlex.join([*loading_words(args), "--format", formats[0]])
        say(f"export: lm-edit export {files} {words} --out <folder>")


def _model_words(options: Mapping[str, object]) -> str:
    """Model arguments as one word of a shell."""
    return shlex.quote(",".join(f"{name}={value}" for name, value in options.items()))


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("deltas", nargs="+", help="saved edits or folders of streams, added up in this order")
    add_model_arguments(parser)
    formats = "LoRA adapter of peft or, for llama.cpp, in GGUF; or full checkpoint"
    parser.add_argument("--format", required=True, choices=("peft", "gguf", "merged"), help=formats)
    parser.add_argument("-o", "--out", required=True, help="new folder")
    parser.add_argument(
        "--rank", type=whole(), help="largest rank of the adapter: the nearest update of it, with the error it makes"
    )


def _run_export(args: argparse.Namespace) -> int:
    from edit_hooks.assets.demo_model import demo_dtype, demo_model_path
    from lm_edit.edits import export_edits

    export = export_edits(args.deltas, args.out, args.format, model_options(args), args.rank)
    folder, loadable, is_low_rank, wrecked, adapter, sum_nlls = export
    of_model, is_adapter = loading_options(args), args.format == "peft"
    demo = {} if args.pretrained else {"pretrained": demo_model_path(demo_dtype(args.dtype))}
    whole = {**demo, **of_model, "peft": folder} if is_adapter else {"pretrained": folder}
    say(f"written to {folder}")
    if wrecked:
        say(f"wrecked: {_wreck(wrecked)}, as measured when it was edited (first-token KL)")
    if sum_nlls is not None:
        say(f"NLL of the edits' targets: {sum_nlls[0]:.3f} each edit alone, {sum_nlls[1]:.3f} in the sum")
    if adapter is not None:
        _print_truncation(adapter)
    if adapter is not None and is_adapter:
        _print_serving(adapter, folder, str(whole.get("pretrained", "")))
    if args.format == "gguf":
        base = args.pretrained if str(args.pretrained).endswith(".gguf") else "<base model>.gguf"
        say(f"serve: llama-server -m {shlex.quote(base)} --lora {shlex.quote(str(folder / 'adapter.gguf'))}")
        if "peft" in of_model:
            say(f"the base model of llama-server needs {of_model['peft']} merged into it")
    elif is_adapter and "peft" in of_model:
        say(f"stock models load one adapter: merge {of_model['peft']} into the model before loading this one")
    else:
        say(f"lm-eval's own tasks: lm_eval --model hf --model_args {_model_words(whole)} --tasks ...")
    if loadable is None and not is_low_rank:
        say("editing tasks: not for this sum; load_edit= takes the folder of a stream (lm-edit edit --sequential)")
        return 0
    words = _model_words({**of_model, "load_edit": loadable or "<the edits as one adapter>"})
    say(f"editing tasks: lm_eval --model edited_hf --model_args {words} --tasks ...")
    return 0


def _print_truncation(adapter: AdapterFacts) -> None:
    """What a smaller rank has changed."""
    if (cut := adapter.truncation) is not None:
        share = f"up to {cut.left_out:.1%} of an update's norm is left out"
        say(f"truncated from rank {cut.rank} to {adapter.rank}: {share}")
        columns = [("first-token KL of neutral prompts", cut.first_token_kls)]
        if cut.target_nlls is not None:
            columns.insert(0, ("NLL of the edits' targets", cut.target_nlls))
        for what, (whole, smaller) in columns:
            say(f"{what}: {whole:.3f} whole, {smaller:.3f} truncated")


def _print_serving(adapter: AdapterFacts, folder: Path, base: str) -> None:
    """What the rank means for vLLM, and the command that serves the adapter."""
    from edit_hooks.deltas.saving.truncation import VLLM_DEFAULT, VLLM_RANKS, vllm_words

    say(vllm_words(adapter.rank))
    if adapter.rank > VLLM_RANKS[-1]:
        return
    needed = next(allowed for allowed in VLLM_RANKS if allowed >= adapter.rank)
    limit = f" --max-lora-rank {needed}" if needed > VLLM_DEFAULT else ""
    module = shlex.quote(f"{adapter.name}={folder}")
    say(f"serve: vllm serve {shlex.quote(base or '<base model>')} --enable-lora{limit} --lora-modules {module}")


VERBS: dict[str, Verb] = {
    "edit": Verb("make edits and save them", _add_edit_arguments, _run_edit, is_core=True),
    "export": Verb("write saved edits as a LoRA adapter or a checkpoint", _add_export_arguments, _run_export),
}
