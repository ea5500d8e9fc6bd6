"""The runs of a plan: every combination of its axes, without those that a named rule leaves out.

Rules (:data:`RULES`) leave out combinations that cannot run: they are listed, with the reason, never dropped quietly.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from edit_hooks.utils.storage.hashing import key_of
from lm_edit.results.filters import LABELS
from lm_edit.sweeps.planning.choices import BenchmarkChoice, EditorChoice, ModeChoice, Model, Plan, Where
from lm_edit.sweeps.planning.named_files import NamedFile, named_files

RULES = {
    "joint": "the editor writes one edit at a time",
    "context": "the editor is a context already, which icl would repeat",
    "no edits": "the tasks have no edits of their own, so no case is edited in mode=single",
    "steps": "the steps are larger than the stream",
}
HASH_LENGTH = 12
MAX_SLUG = 100  # characters of the readable part of a folder's name


class Facts(Protocol):
    """Facts of the engine and the tasks about the names in a plan."""

    def supports_joint(self, choice: EditorChoice) -> bool:
        """Whether several edits can be written in one step."""
        ...

    def is_context(self, choice: EditorChoice) -> bool:
        """Whether the edits are texts before the questions."""
        ...

    def is_read_in(self, mode: str, option: str) -> bool:
        """Whether an option of the model class has a meaning in a mode."""
        ...

    def edit_sources(self, tasks: Sequence[str]) -> tuple[str, ...]:
        """The benchmarks whose edits the tasks ask about."""
        ...


@dataclass(frozen=True)
class Run:
    """One run of ``lm_eval``.

    Attributes:
        model, editor, benchmark, mode: names in the plan.
        details: sizes and settings that distinguish the runs of these names, as text.
        model_args, tasks, metadata, limit, lm_eval: of the command.
        label: name of the editor in tables of results; not a part of :attr:`content`, since it changes no result.
        seconds_per_edit, seconds_per_case: the plan's estimates.
        shape: see :class:`lm_edit.sweeps.planning.plan.Model`.
        where: entries of the plan that this run comes from, the editor's first.
    """

    model: str
    editor: str
    benchmark: str
    mode: str
    details: tuple[str, ...]
    model_args: Mapping[str, Any]
    tasks: tuple[str, ...]
    metadata: Mapping[str, Any]
    limit: float | None
    lm_eval: Mapping[str, Any]
    shape: str | None
    where: Where
    label: str | None = None
    seconds_per_edit: float | None = None
    seconds_per_case: float | None = None

    @property
    def content(self) -> dict[str, Any]:
        """All inputs of the results, as data: settings, and the digests of files and folders that they name."""
        return {
            "model_args": dict(self.model_args),
            "tasks": sorted(self.tasks),
            "metadata": dict(self.metadata),
            "limit": self.limit,
            "lm_eval": dict(self.lm_eval),
            "files": {named.place: named.digest for named in self.named_files},
        }

    @property
    def named_files(self) -> list[NamedFile]:
        """The files and folders that its options name, with their present content."""
        return named_files({"model_args": self.model_args, "metadata": self.metadata})

    @property
    def labels(self) -> dict[str, str]:
        """Names of editor and model in the plan that results would not have otherwise; no part of :attr:`content`."""
        pretrained = str(self.model_args.get("pretrained") or "")
        model = "" if self.model in (pretrained, Path(pretrained).name) else self.model
        return {name: label for name, label in zip(LABELS.values(), (self.label, model), strict=True) if label}

    @property
    def name(self) -> str:
        """A name for people; runs of one plan differ in it."""
        return ", ".join([self.model, self.editor, self.benchmark, self.mode, *self.details])

    @property
    def folder_name(self) -> str:
        """The readable name and a hash of :attr:`content`."""
        slug = re.sub(r"[^A-Za-z0-9._=+-]+", "-", self.name).strip("-")[:MAX_SLUG]
        return f"{slug}-{key_of(self.content)[:HASH_LENGTH]}"


class OmittedRun(NamedTuple):
    """A combination that a rule leaves out: names as in :class:`Run`, and the rule's key in :data:`RULES`."""

    name: str
    rule: str


class Grid(NamedTuple):
    """All combinations of a plan."""

    runs: list[Run]
    left_out: list[OmittedRun]


class Sizes(NamedTuple):
    """Values of the numeric axes of one combination; ``None`` where the mode has none."""

    num_edits: int | None
    edit_batch_size: int | None
    icl: bool | str
    seed: int


def expand(plan: Plan, facts: Facts) -> Grid:
    """Make the runs of a plan, in its order: models, editors, benchmarks, modes, sizes, contexts, seeds.

    Raises:
        EditingError: with file and line, for streams and batches of tasks whose edits the plan must name.
    """
    runs: dict[str, Run] = {}
    left_out: dict[OmittedRun, None] = {}
    benchmarks = group_bare(plan.benchmarks, facts)
    for model, editor, benchmark in itertools.product(plan.models, plan.editors, benchmarks):
        if not _wanted(model.name, editor.models) or not _wanted(model.name, benchmark.models):
            continue
        if editor.is_unedited:
            run = _unedited_run(plan, model, editor, benchmark, facts)
            runs.setdefault(run.folder_name, run)
            continue
        for mode in plan.modes:
            if not _wanted(mode.name, editor.modes) or not _wanted(mode.name, benchmark.modes):
                continue
            for sizes in _sizes(plan, editor, mode, facts):
                run = _run(plan, model, editor, benchmark, mode, sizes, facts)
                if rule := _broken_rule(editor, benchmark, mode, sizes, facts):
                    left_out[OmittedRun(run.name, rule)] = None
                else:
                    runs.setdefault(run.folder_name, run)
    return Grid(list(runs.values()), list(left_out))


def group_bare(benchmarks: Sequence[BenchmarkChoice], facts: Facts) -> list[BenchmarkChoice]:
    """Join entries that are task names alone and have the same edits, so that these are made once."""
    joined: dict[tuple[str, ...], BenchmarkChoice] = {}
    for choice in benchmarks:
        sources = facts.edit_sources(choice.tasks)
        key = sources if choice.bare and sources else (choice.name, "alone")
        if key in joined:
            tasks = tuple(dict.fromkeys([*joined[key].tasks, *choice.tasks]))
            joined[key] = joined[key]._replace(name="+".join(tasks), tasks=tasks)
        else:
            joined[key] = choice
    return list(joined.values())


def _wanted(name: str, chosen: tuple[str, ...] | None) -> bool:
    return chosen is None or name in chosen


def _sizes(plan: Plan, editor: EditorChoice, mode: ModeChoice, facts: Facts) -> Iterator[Sizes]:
    icl = plan.icl if editor.icl is None else editor.icl
    seeds = plan.seeds if editor.seeds is None else editor.seeds
    for num_edits, step, context, seed in itertools.product(mode.num_edits, mode.steps, icl, seeds):
        size = None if step is None else step.joint if facts.supports_joint(editor) else step.other
        yield Sizes(num_edits, size, context, seed)


def _broken_rule(
    editor: EditorChoice, benchmark: BenchmarkChoice, mode: ModeChoice, sizes: Sizes, facts: Facts
) -> str | None:
    """The first rule of :data:`RULES` against a combination."""
    together = sizes.edit_batch_size or 1
    if mode.mode == "batch":
        together = mode.args.get("group_size") or sizes.num_edits or 2  # all cases of the benchmark
    # Groups of several cases are refused, too: one delta writes a group.
    if together > 1 and not facts.supports_joint(editor):
        return "joint"
    if sizes.icl not in (False, "no") and facts.is_context(editor):
        return "context"
    if mode.mode == "single" and not facts.edit_sources(benchmark.tasks):
        return "no edits"
    if sizes.num_edits is not None and (sizes.edit_batch_size or 1) > sizes.num_edits:
        return "steps"
    return None


def _shared_args(plan: Plan, mode: str, facts: Facts) -> dict[str, Any]:
    """The options of all runs that have a meaning in a mode."""
    return {name: value for name, value in plan.model_args.items() if facts.is_read_in(mode, name)}


def _unedited_run(plan: Plan, model: Model, editor: EditorChoice, benchmark: BenchmarkChoice, facts: Facts) -> Run:
    args = {**_shared_args(plan, "none", facts), **model.args, **benchmark.args, **editor.args, "mode": "none"}
    return _with_names(plan, model, editor, benchmark, "none", (), args)


def _run(
    plan: Plan,
    model: Model,
    editor: EditorChoice,
    benchmark: BenchmarkChoice,
    mode: ModeChoice,
    sizes: Sizes,
    facts: Facts,
) -> Run:
    args = {**_shared_args(plan, mode.mode, facts), **model.args, **benchmark.args, **editor.args, **mode.args}
    args |= {"editor": editor.editor, "mode": mode.mode, "seed": sizes.seed}
    if editor.settings:
        args["editor_args"] = dict(editor.settings)
    details = []
    if mode.mode != "single":
        args["edits"] = benchmark.edits or _only_source(plan, benchmark, mode, facts)
    if sizes.num_edits is not None:
        args["num_edits"] = sizes.num_edits
        details.append(f"{sizes.num_edits} edits")
    if sizes.edit_batch_size is not None:
        args["edit_batch_size"] = sizes.edit_batch_size
        details.append(f"steps of {sizes.edit_batch_size}")
    if sizes.icl not in (False, "no"):
        args["icl"] = sizes.icl
        details.append("icl" if sizes.icl is True else f"icl={sizes.icl}")
    if len(plan.seeds) > 1 or editor.seeds is not None:
        details.append(f"seed {sizes.seed}")
    return _with_names(plan, model, editor, benchmark, mode.name, tuple(details), args)


def _with_names(
    plan: Plan,
    model: Model,
    editor: EditorChoice,
    benchmark: BenchmarkChoice,
    mode: str,
    details: tuple[str, ...],
    args: Mapping[str, Any],
) -> Run:
    metadata = {**plan.metadata, **benchmark.metadata}
    names = (model.name, editor.name, benchmark.name, mode, details)
    limit = _with_one_form(benchmark.limit)
    estimates = (editor.seconds_per_edit, benchmark.seconds_per_case)
    own = (plan.lm_eval, model.shape, editor.where, editor.label)
    return Run(*names, args, benchmark.tasks, metadata, limit, *own, *estimates)


def _with_one_form(limit: float | None) -> float | None:
    """A limit in the form that :attr:`Run.content` hashes: 2 for 2.0, as ``--limit 2`` gives it."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _only_source(plan: Plan, benchmark: BenchmarkChoice, mode: ModeChoice, facts: Facts) -> str:
    sources = facts.edit_sources(benchmark.tasks)
    if len(sources) == 1:
        return sources[0]
    has = f"those of {' and '.join(sources)}" if sources else "none of their own"
    raise plan.file.error(
        benchmark.where,
        f"mode={mode.mode} needs the edits of one benchmark, and {', '.join(benchmark.tasks)} have {has}; add "
        "edits: to this entry, or restrict it with modes:.",
    )
