"""The Markdown of :mod:`how_fast`, printed row by row as it is measured."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

from how_fast import (
    EDITOR_ROWS,
    JOINT_ROW,
    QUESTION_EDITS,
    EditorRow,
    Measured,
    adapter_cases,
    answer_times,
    editor_action,
    matrix_rate,
    measured,
    operations_per_edit,
    plain_generate_rate,
    question_jobs,
    solve_times,
    split_time,
)
from measured_model import Setup

ELSEWHERE = Path(__file__).with_name("measured.json")
GIB = 2**30
NONE = "-"


class HowFast:
    """All measurements of one model on one device."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.args = setup, setup.args
        elsewhere = json.loads(ELSEWHERE.read_text())
        self.elsewhere: dict[str, Any] = elsewhere if self.args.shape == elsewhere["shape"] else {}
        self.rate = matrix_rate(setup.model.device, setup.model.dtype)

    def print(self) -> None:
        """Print the wanted sections."""
        self._print_heading()
        for section in self.args.sections:
            getattr(self, f"_print_{section}")()

    def _print_heading(self) -> None:
        import torch

        model, args = self.setup.model, self.args
        device = model.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
        what = f"{args.shape}, random weights" if args.shape else args.pretrained or "the demo model"
        print(
            f"{name}, torch {torch.__version__}, {datetime.date.today()}: {what}, {str(model.dtype)[6:]} "
            f"({self.setup.weight_bytes / GIB:.1f} GiB), requests from {args.edits_from}. "
            f"A large matrix product runs at {self.rate / 1e12:.3g} TFLOP/s.\n"
        )
        if args.most_steps:
            print(f"All editors make {args.most_steps} steps, whatever the table names.\n")
        if self.elsewhere:
            print(f"Column EasyEdit: {self.elsewhere['origin']}; {self.elsewhere['settings']}.\n")

    def _print_editors(self) -> None:
        counts = self.args.together
        columns = ["alone" if count == 1 else f"{count} together" for count in counts]
        _print_row("editor, seconds per edit", "EasyEdit", "plain loop", *columns, "share of the rate", "GiB")
        _print_rule(5 + len(counts))
        for row in self._rows():
            plain = self._per_edit(row, 1, engine="reference")
            measured_counts = [count for count in counts if count <= row.most_together]
            found = {count: self._per_edit(row, count) for count in measured_counts}
            cells = [self._beside_goal(row, count, found.get(count)) for count in counts]
            last = found.get(measured_counts[-1])
            share = NONE if last is None else f"{operations_per_edit(self.setup, row) / last.seconds / self.rate:.1%}"
            other = self.elsewhere.get("easyedit", {}).get(row.key, NONE)
            _print_row(f"{row.editor}, {row.label}", other, _seconds(plain), *cells, share, _gib(last))

    def _rows(self) -> list[EditorRow]:
        wanted = self.args.editors
        return [row for row in EDITOR_ROWS if wanted is None or row.editor in wanted or row.key in wanted]

    def _per_edit(self, row: EditorRow, count: int, **kind: Any) -> Measured | None:
        """Seconds per edit; ``None`` if the device has too little memory."""
        import torch

        try:
            found = measured(editor_action(self.setup, row, count, **kind))
        except torch.OutOfMemoryError:
            return None
        return found._replace(seconds=found.seconds / count)

    def _beside_goal(self, row: EditorRow, count: int, found: Measured | None) -> str:
        goal = self.elsewhere.get("goals", {}).get(row.key, {}).get(str(count))
        return _seconds(found) if goal is None else f"{_seconds(found)} (goal {goal:g})"

    def _print_joint(self) -> None:
        print("\n| memit, one edit of | seconds per request | GiB |\n|---|---|---|")
        for count in self.args.joint:
            found = self._per_edit(JOINT_ROW, count, joint=True)
            _print_row(f"{count} requests", _seconds(found), _gib(found))

    def _print_answers(self) -> None:
        args = self.args
        print()
        what = f"{args.questions} questions under {QUESTION_EDITS} edits"
        _print_row(what, "scored, s", f"{args.new_tokens} tokens each, s", "tokens/s", "GiB")
        _print_rule(5)
        for label, deltas in adapter_cases(self.setup):
            found = answer_times(self.setup, deltas)
            seconds = f"{found.generated.seconds:.3g}"
            _print_row(
                label, f"{found.scored.seconds:.3g}", seconds, f"{found.tokens_per_second:.0f}", _gib(found.generated)
            )
        _print_row("the model's own generate", NONE, NONE, f"{plain_generate_rate(self.setup):.0f}", NONE)

    def _print_solves(self) -> None:
        first, later = solve_times(self.setup)
        print(
            f"\nA covariance solve of 16 keys in float64: {first:.3g} s with the factorization, {later:.3g} s after it."
        )

    def _print_time(self) -> None:
        """Where the time of one edit alone goes, and that of decoding."""
        from edit_hooks.inference.batching import limits_for
        from edit_hooks.inference.decoding import generate

        model, tokenizer = self.setup.model, self.setup.tokenizer
        print()
        _print_row(
            "where the time goes", "s", "operators", "s in them", "launches", "s in them", "s of the card", "busy"
        )
        _print_rule(8)
        actions = {f"{row.editor} alone": editor_action(self.setup, row, 1) for row in self._rows()}
        _, jobs = question_jobs(self.setup, lambda index: None)
        actions["decoding"] = lambda: generate(model, tokenizer, jobs, limits_for(model), lambda count: None)
        for label, action in actions.items():
            seconds, split = measured(action).seconds, split_time(action)
            card = NONE if split.card_seconds is None else f"{split.card_seconds:.3g}"
            busy = NONE if split.card_seconds is None else f"{split.card_seconds / seconds:.0%}"
            numbers = [
                f"{split.operators}",
                f"{split.operator_seconds:.3g}",
                f"{split.launches}",
                f"{split.launch_seconds:.3g}",
            ]
            _print_row(label, f"{seconds:.3g}", *numbers, card, busy)


def _seconds(found: Measured | None) -> str:
    return NONE if found is None else f"{found.seconds:.3g}"


def _gib(found: Measured | None) -> str:
    return NONE if found is None or found.peak_bytes is None else f"{found.peak_bytes / GIB:.1f}"


def _print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _print_rule(columns: int) -> None:
    print("|" + "---|" * columns, flush=True)
