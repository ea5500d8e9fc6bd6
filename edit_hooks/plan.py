"""`EditPlan`: which requests are written together, in which order, and under which of these a document is answered.

Modes: ``none`` (no edit), ``single`` (each case's own edits on the untouched model), ``batch`` (all edits at once, or
groups of ``group_size`` edits, each group on the untouched model), ``sequential`` (a stream in steps of
``edit_batch_size`` on the same weights) and ``loaded`` (everything with one saved edit). In ``batch`` and
``sequential`` the edits come from ``edits=``, never from the documents that happened to be asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edit_hooks.errors import EditingError
from edit_hooks.request import EditRequest

Unit = tuple[EditRequest, ...]
MODES = ("none", "single", "batch", "sequential", "loaded")


@dataclass(frozen=True)
class EditPlan:
    """The units of a run.

    Attributes:
        units: requests written together, in order; empty for ``none`` and ``single``.
        cumulative: units are written one after another on the same weights.
        checkpoints: numbers of edits after which everything edited so far is answered too.
        unit_of: request key -> index of its unit.
    """

    units: tuple[Unit, ...] = ()
    cumulative: bool = False
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        beyond = [checkpoint for checkpoint in self.checkpoints if checkpoint > self.num_edits]
        if beyond:
            raise EditingError(f"checkpoints={beyond} lie beyond the {self.num_edits} edits of this run.")

    @property
    def unit_of(self) -> Mapping[str, int]:
        return {request.key: index for index, unit in enumerate(self.units) for request in unit}

    @property
    def num_edits(self) -> int:
        return sum(len(unit) for unit in self.units)

    def edits_after(self, step: int) -> int:
        """Number of edits made once unit ``step`` has been written."""
        return sum(len(unit) for unit in self.units[: step + 1])

    def checkpoint_steps(self) -> dict[int, int]:
        """Checkpoint (number of edits) -> the first step that reaches it."""
        steps = range(len(self.units))
        return {
            checkpoint: next(step for step in steps if self.edits_after(step) >= checkpoint)
            for checkpoint in self.checkpoints
        }


def chunked(requests: Sequence[EditRequest], size: int) -> tuple[Unit, ...]:
    """Consecutive units of ``size`` requests; the last may be smaller."""
    return tuple(tuple(requests[start : start + size]) for start in range(0, len(requests), size))


def parse_checkpoints(value: object) -> tuple[int, ...]:
    """Numbers of edits from a list, a number, or ``10;100;1000`` (the harness splits model_args at commas)."""
    if value is None or value == "":
        return ()
    parts = value if isinstance(value, (list, tuple)) else str(value).replace(":", ";").split(";")
    try:
        numbers = tuple(int(str(part)) for part in parts)
    except ValueError:
        raise EditingError(f"checkpoints={value!r}; write numbers of edits as checkpoints=10;100;1000.") from None
    if any(number < 1 for number in numbers) or list(numbers) != sorted(set(numbers)):
        raise EditingError(f"checkpoints={value!r}; rising numbers of edits, each at least 1, are needed.")
    return numbers


def load_edits(source: str, settings: Mapping[str, Any], num_edits: int | None) -> list[EditRequest]:
    """The first ``num_edits`` edits of a benchmark (by the name of its task folder) or of a JSONL file.

    Raises:
        EditingError: for an unknown source, malformed lines, too few edits, and edits that occur twice.
    """
    path = Path(source).expanduser()
    requests = _from_file(path) if path.suffix in (".jsonl", ".json") else _from_benchmark(source, settings)
    if num_edits is not None:
        if num_edits > len(requests):
            raise EditingError(f"num_edits={num_edits}, but {source} has {len(requests)} edits.")
        requests = requests[:num_edits]
    seen: dict[str, EditRequest] = {}
    for request in requests:
        if request.key in seen:
            raise EditingError(
                f"edits={source}: cases {seen[request.key].case_id} and {request.case_id} are the same edit; "
                "a stream that makes it twice would score it twice. Remove one."
            )
        seen[request.key] = request
    return requests


def _from_file(path: Path) -> list[EditRequest]:
    """Edit requests from JSON lines (one per line) or a JSON list."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EditingError(f"edits={path} cannot be read: {error.strerror}.") from None
    if text.lstrip().startswith("["):
        rows = [(f"{path}, record {number}", row) for number, row in enumerate(_parse(text, str(path)))]
    else:
        lines = enumerate(text.split("\n"), start=1)
        rows = [(f"{path}, line {n}", _parse(line, f"{path}, line {n}")) for n, line in lines if line.strip()]
    if not rows:
        raise EditingError(f"edits={path} holds no edit request.")
    return [EditRequest.from_dict(row, where=where) for where, row in rows]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise EditingError(f"{where}: not valid JSON ({error.msg}).") from None


def _from_benchmark(name: str, settings: Mapping[str, Any]) -> list[EditRequest]:
    """A benchmark's edits, from the folder of its tasks."""
    from lm_eval_tasks.common.requests import load_edit_requests  # the tasks know their records, we do not

    return load_edit_requests(name, settings)
