"""The measurements of :mod:`how_fast` in an order, each saved as it ends.

A measurement that ends the process (a fault of the card, a kill) is tried once more by the next call, then left out.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from how_fast import (
    EDITOR_ROWS,
    JOINT_ROW,
    EditorRow,
    Measured,
    adapter_cases,
    answer_times,
    decoding,
    editor_action,
    matrix_rate,
    measured,
    operations_per_edit,
    plain_generate_rate,
    solve_times,
    split_time,
)
from how_fast_table import GIB, goals, markdown
from measured_model import Setup

MOST_TRIES = 2  # of a measurement that does not end
CARD_LOST = 3  # exit status
FIRST_JOINT = 200
FIRST_ANSWERS = ("no edit", "rank 1 in one module")
MOST_TOGETHER = EditorRow.most_together

Found = dict[str, Any]  # numbers and notes, as JSON


class Part(NamedTuple):
    """A measurement that is made and saved as a whole.

    Attributes:
        name: in the results. urgency: parts of lower numbers are measured first.
    """

    name: str
    urgency: int
    measure: Callable[[], Found]


class Results:
    """What was measured so far; in a file, if wanted, which is written before and after each part.

    Args:
        about: model, device and options; a file is continued with the same ones only.
    """

    def __init__(self, path: Path | None, about: Found) -> None:
        self.path, self.about = path, about
        self.parts: dict[str, Found] = {}
        if path is not None and path.is_file():
            stored = json.loads(path.read_text())
            if stored["about"] != about:
                raise SystemExit(f"{path} has measurements of {stored['about']}, not of {about}; give another file")
            self.parts = stored["parts"]

    def is_open(self, name: str) -> bool:
        """Whether a part still has to be measured."""
        return name not in self.parts or 0 < self.parts[name].get("tries", 0) < MOST_TRIES

    def begin(self, name: str) -> None:
        """Note that a part is being measured: if the process ends with it, the next one knows."""
        self.parts[name] = {"tries": self.parts.get(name, {}).get("tries", 0) + 1}
        self._write()

    def end(self, name: str, found: Found) -> None:
        self.parts[name] = found
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        for path, text in (
            (self.path, json.dumps({"about": self.about, "parts": self.parts}, indent=1)),
            (self.path.with_suffix(".md"), markdown(self.about, self.parts)),
        ):
            partial = path.with_name(f"{path.name}.partial")
            partial.write_text(text)
            os.replace(partial, path)


def measure_all(setup: Setup, until: float) -> Results:
    """Measure the wanted sections of one model on one device, the numbers with goals first.

    Args:
        until: nothing begins after this time of ``time.monotonic``.

    Raises:
        SystemExit: the device does not answer any more; another process can go on.
    """
    args = setup.args
    results = Results(Path(args.save) if args.save else None, _about(setup))
    for part in sorted(_parts(setup), key=lambda part: part.urgency):
        if results.is_open(part.name) and time.monotonic() < until:
            _measure(setup, part, results)
    return results


def _measure(setup: Setup, part: Part, results: Results) -> None:
    """Measure a part; an error is a result, too, unless the device is lost."""
    import torch

    from edit_hooks.modeling.device.recording import refusals, release_memory
    from edit_hooks.utils.errors import first_line

    start = time.monotonic()
    results.begin(part.name)
    try:
        found = part.measure()
    except Exception as error:  # of whatever is measured; the other parts go on
        found = {"error": first_line(error)}
    gc.collect()
    try:
        release_memory()  # no part pays for the memory of another
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as error:  # after some errors no call of CUDA succeeds in this process
        print(f"{part.name}: the device does not answer: {first_line(error)}", file=sys.stderr)
        raise SystemExit(CARD_LOST) from error
    if refused := refusals(setup.model):
        found["not_recorded"] = refused
    results.end(part.name, found)
    print(f"{time.monotonic() - start:6.1f} s  {part.name}: {json.dumps(found)}", file=sys.stderr, flush=True)


def _about(setup: Setup) -> Found:
    import torch

    model, args, device = setup.model, setup.args, setup.model.device
    what = f"{args.shape}, random weights" if args.shape else args.pretrained or "the demo model"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "torch": str(torch.__version__),
        "model": f"{what}, {str(model.dtype)[6:]} ({setup.weight_bytes / GIB:.1f} GiB)",
        "shape": args.shape,
        "edits_from": args.edits_from,
        "questions": args.questions,
        "new_tokens": args.new_tokens,
        "most_steps": args.most_steps,
    }


def _parts(setup: Setup) -> Iterator[Part]:
    model = setup.model
    yield Part("rate", 0, lambda: {"rate": matrix_rate(model.device, model.dtype)})
    sections = {
        "editors": _editor_parts,
        "joint": _joint_parts,
        "answers": _answer_parts,
        "solves": _solve_parts,
        "time": _time_parts,
    }
    for section in setup.args.sections:
        yield from sections[section](setup)


def wanted_rows(setup: Setup) -> list[EditorRow]:
    wanted = setup.args.editors
    return [row for row in EDITOR_ROWS if wanted is None or row.editor in wanted or row.key in wanted]


def _editor_parts(setup: Setup) -> Iterator[Part]:
    for row in wanted_rows(setup):
        for count in setup.args.together:
            if count <= row.most_together:
                takes_minutes = count > 1 and row.most_together < MOST_TOGETHER
                urgency = (2 if takes_minutes else 1) if str(count) in goals(row.key) else 4
                yield Part(f"{row.key} {count}", urgency, lambda row=row, count=count: _per_edit(setup, row, count))
        yield Part(f"{row.key} plain", 5, lambda row=row: _per_edit(setup, row, 1, engine="reference"))
        yield Part(f"{row.key} operations", 3, lambda row=row: {"operations": operations_per_edit(setup, row)})


def _per_edit(setup: Setup, row: EditorRow, count: int, **kind: Any) -> Found:
    found = measured(editor_action(setup, row, count, **kind))
    return _numbers(found._replace(seconds=found.seconds / count))


def _numbers(found: Measured) -> Found:
    return {name: value for name, value in found._asdict().items() if value is not None}


def _joint_parts(setup: Setup) -> Iterator[Part]:
    for count in setup.args.joint:
        urgency = 2 if count == FIRST_JOINT else 5
        yield Part(f"joint {count}", urgency, lambda count=count: _per_edit(setup, JOINT_ROW, count, joint=True))


def _answer_parts(setup: Setup) -> Iterator[Part]:
    for label, make in adapter_cases(setup):
        urgency = 1 if label in FIRST_ANSWERS else 2
        yield Part(f"answers {label}", urgency, lambda make=make: answer_times(setup, make()))
    yield Part("answers the model's own generate", 4, lambda: {"tokens_per_second": plain_generate_rate(setup)})


def _solve_parts(setup: Setup) -> Iterator[Part]:
    def measure() -> Found:
        first, later = solve_times(setup)
        return {"first": first, "later": later}

    yield Part("solves", 3, measure)


def _time_parts(setup: Setup) -> Iterator[Part]:
    def measure(make: Callable[[], Callable[[], object]]) -> Found:
        action = make()
        return {"seconds": measured(action).seconds, **split_time(action)._asdict()}

    for row in wanted_rows(setup):
        yield Part(f"time {row.key}", 4, lambda row=row: measure(lambda: editor_action(setup, row, 1)))
    yield Part("time decoding", 4, lambda: measure(lambda: decoding(setup)))
