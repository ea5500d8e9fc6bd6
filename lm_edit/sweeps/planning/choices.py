"""The parts of a plan as data: models, editors, benchmarks, modes, resources.

:mod:`lm_edit.sweeps.planning.plan` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.yaml_io import line_of

UNEDITED = "unedited"  # in place of an editor: the model without edits, mode=none

ValueT = TypeVar("ValueT")
Where: TypeAlias = tuple[str | int, ...]  # keys and positions in the file


class Model(NamedTuple):
    """A model: options of the model class, and the name of shipped settings with its shape.

    ``shape`` is the stem of a file of ``edit_hooks/configs``; it counts where the model's own config cannot be read.
    """

    name: str
    args: Mapping[str, Any]
    shape: str | None
    where: Where


class EditorChoice(NamedTuple):
    """An editor with one set of settings; ``models``, ``modes``, ``icl`` and ``seeds``: only these of the plan.

    ``label`` is the name where the plan gives one; result files have it for tables. ``seconds_per_edit`` is an estimate
    where nothing was measured.
    """

    name: str
    label: str | None
    editor: str
    settings: Mapping[str, Any]
    args: Mapping[str, Any]
    models: tuple[str, ...] | None
    modes: tuple[str, ...] | None
    icl: tuple[bool | str, ...] | None
    seeds: tuple[int, ...] | None
    seconds_per_edit: float | None
    where: Where

    @property
    def is_unedited(self) -> bool:
        """Whether this is the unedited model."""
        return self.editor == UNEDITED


class BenchmarkChoice(NamedTuple):
    """Tasks that are asked in one run.

    Attributes:
        edits: the edits of batch and sequential runs; ``None``: those of the tasks' own benchmark.
        seconds_per_case: an estimate where nothing was measured; a case of a task counts once.
        bare: entries of the plan that are task names alone; those with the same edits share a run.
    """

    name: str
    tasks: tuple[str, ...]
    edits: str | None
    args: Mapping[str, Any]
    metadata: Mapping[str, Any]
    limit: float | None
    models: tuple[str, ...] | None
    modes: tuple[str, ...] | None
    seconds_per_case: float | None
    bare: bool
    where: Where


class StepSize(NamedTuple):
    """An ``edit_batch_size``: for editors that write several edits jointly, and for the others."""

    joint: int
    other: int


class ModeChoice(NamedTuple):
    """A mode with its options; ``num_edits`` and ``steps`` are empty where the mode has none."""

    name: str
    mode: str
    args: Mapping[str, Any]
    num_edits: tuple[int | None, ...]
    steps: tuple[StepSize | None, ...]
    where: Where


@dataclass(frozen=True)
class Resources:
    """Resources of one run.

    Attributes:
        cpus: processor cores; ``None``: the machine's, divided by the number of workers, and 1 on clusters.
        gpus: devices; ``None``: one per run where there are any; on clusters see the executors.
        memory: bytes as text, such as ``32GB``.
        hours: time limit of a Slurm job.
        slurm: further parameters for submitit, such as ``slurm_partition``.
    """

    cpus: int | None = None
    gpus: int | None = None
    memory: str | None = None
    hours: float | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanFile:
    """Path and text of a plan, for messages with a line."""

    path: Path
    text: str

    def line(self, where: Where) -> int:
        """Line, from 1, of an entry."""
        return line_of(self.text, where)

    def error(self, where: Where, message: object) -> EditingError:
        """An error at the line of an entry."""
        return EditingError(f"{self.path}, line {self.line(where)}: {message}")

    def at(self, where: Where, check: Callable[..., ValueT], *arguments: Any) -> ValueT:
        """Call a function; its error gets the line of an entry."""
        try:
            return check(*arguments)
        except EditingError as error:
            raise self.error(where, error) from None


@dataclass(frozen=True)
class Plan:
    """A plan as written; its lists are the axes of the grid.

    Attributes:
        without: reason -> editors that have no row, in a plan that means all.
    """

    file: PlanFile
    description: str
    source: str
    unstated: tuple[str, ...]
    differs: tuple[str, ...]
    models: tuple[Model, ...]
    editors: tuple[EditorChoice, ...]
    benchmarks: tuple[BenchmarkChoice, ...]
    modes: tuple[ModeChoice, ...]
    icl: tuple[bool | str, ...]
    seeds: tuple[int, ...]
    model_args: Mapping[str, Any]
    metadata: Mapping[str, Any]
    lm_eval: Mapping[str, Any]
    resources: Resources
    without: Mapping[str, tuple[str, ...]]

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.file.path.stem
