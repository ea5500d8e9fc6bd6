"""Check of a plan against the engine and the tasks, before anything runs.

This room is the one of sweeps that imports lm-eval or torch: schedulers and workers do without.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from lm_eval.models.huggingface import HFLM
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from edit_hooks.assets.gguf_file import config_source
from edit_hooks.base.editor import Editor
from edit_hooks.base.registry import editor_class, load_editor
from edit_hooks.base.shipped import FOLDER, shipped_files
from edit_hooks.lm.model import OWN_OPTIONS
from edit_hooks.lm.options.editing import EditingOptions, check_known_options, take_sets
from edit_hooks.lm.stock.checks import refuse_in_groups
from edit_hooks.run_options import BY_NAME
from edit_hooks.utils.errors import EditingError, first_line, near_misses, unknown_keys_error
from edit_hooks.utils.storage.hashing import key_of
from lm_edit.sweeps.checking.tasks import benchmarks_of
from lm_edit.sweeps.planning.choices import EditorChoice, Plan, Where
from lm_edit.sweeps.planning.grid import Grid, Run, expand
from lm_eval_tasks.common.records.benchmark import Benchmark, find_benchmark
from lm_eval_tasks.common.settings import COMMON_SETTINGS

DEMO_SHAPE = "gemma-3-270m"  # of the demo model, whose files may not be there yet
Tuning = Literal["shipped", "given", "untuned", "unknown", ""]


class EngineFacts:
    """Facts about editors and tasks, from their classes and YAML files: see ``Facts`` of the grid."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._editors: dict[str, Editor[Any]] = {}

    def editor(self, choice: EditorChoice) -> Editor[Any]:
        """The editor with its settings; an error names the line."""
        if choice.name not in self._editors:
            try:
                self._editors[choice.name] = load_editor(choice.editor, choice.settings)
            except EditingError as error:
                raise self.plan.file.error(choice.where, error) from None
        return self._editors[choice.name]

    def supports_joint(self, choice: EditorChoice) -> bool:
        return self.editor(choice).supports_joint

    def is_context(self, choice: EditorChoice) -> bool:
        return self.editor(choice).writes == ("context",)

    def is_read_in(self, mode: str, option: str) -> bool:
        return option not in BY_NAME or mode in BY_NAME[option].modes

    def edit_sources(self, tasks: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(benchmark.name for task in tasks for benchmark in benchmarks_of(task)))


def check_plan(plan: Plan) -> Grid:
    """The runs of a plan, after every check that needs neither data nor weights.

    Raises:
        EditingError: with file and line, for unknown tasks, editors, options and settings, and for values that they
            do not accept.
    """
    facts = EngineFacts(plan)
    _check_shapes(plan)
    for choice in plan.benchmarks:
        for task in choice.tasks:
            plan.file.at((*choice.where, "tasks") if not choice.bare else choice.where, benchmarks_of, task)
        if choice.edits is not None and not str(choice.edits).endswith((".json", ".jsonl")):
            plan.file.at((*choice.where, "edits"), find_benchmark, str(choice.edits), "a JSON or JSONL file")
    for editor in plan.editors:
        if not editor.is_unedited:
            facts.editor(editor)
    for reason, names in plan.without.items():
        for name in names:
            plan.file.at(("without", reason), editor_class, name)
    for args, where in _arguments(plan):
        for name in args:
            plan.file.at((*where, name), check_known_options, {name: None}, HFLM, (*OWN_OPTIONS, *_sets()))
    _check_metadata(plan)
    grid = expand(plan, facts)
    checked: set[str] = set()
    for run in grid.runs:
        _check_run(plan, run, checked)
    return grid


def _arguments(plan: Plan) -> Iterator[tuple[Mapping[str, Any], Where]]:
    """All options of the model class in a plan, with their positions."""
    yield plan.model_args, ("model_args",)
    for axis in (plan.editors, plan.benchmarks):
        for entry in axis:
            yield entry.args, (*entry.where, "model_args")
    for model in plan.models:
        yield model.args, model.where
    for mode in plan.modes:
        yield mode.args, mode.where


@functools.cache
def _sets() -> tuple[str, ...]:
    """Options that choose a published set, as ``qaedit_set``."""
    from lm_eval_tasks.common.records.benchmark import all_benchmarks
    from lm_eval_tasks.common.settings import SET_SUFFIX

    return tuple(f"{known.name}{SET_SUFFIX}" for known in all_benchmarks().values() if known.source.sets)


def _check_metadata(plan: Plan) -> None:
    """Refuse settings of the tasks that no task of the plan, or of their entry, declares.

    Entries with tasks that are not of a benchmark may have any: those tasks read their own.
    """
    known_in_plan: set[str] = set()
    has_others = False
    for choice in plan.benchmarks:
        found = {task: benchmarks_of(task) for task in choice.tasks}
        has_others |= not all(found.values())
        known = {setting.name for benchmarks in found.values() for setting in _settings(benchmarks)}
        known_in_plan |= known
        if all(found.values()):
            _refuse_unknown(plan, choice.metadata, known, (*choice.where, "metadata"))
    if not has_others:
        _refuse_unknown(plan, plan.metadata, known_in_plan, ("metadata",))


def _settings(benchmarks: Sequence[Benchmark[Any]]) -> Iterator[Any]:
    yield from COMMON_SETTINGS
    for benchmark in benchmarks:
        yield from benchmark.declared_settings


def _refuse_unknown(plan: Plan, metadata: Mapping[str, Any], known: set[str], where: Where) -> None:
    if unknown := [name for name in metadata if name not in known]:
        raise plan.file.error((*where, unknown[0]), unknown_keys_error("setting of the tasks", unknown, known))


def _check_run(plan: Plan, run: Run, checked: set[str]) -> None:
    """Check values and combinations of options as the model class and the tasks of a run do.

    Args:
        checked: keys of benchmarks with settings that were checked before, for other editors.
    """
    args = dict(run.model_args)

    def check() -> None:
        sets = take_sets(args)
        check_known_options(args, HFLM, OWN_OPTIONS)
        options = EditingOptions(**{name: args[name] for name in OWN_OPTIONS if name in args})
        refuse_in_groups(options, [task for task in run.tasks if not benchmarks_of(task)])
        for benchmark in {b.name: b for task in run.tasks for b in benchmarks_of(task)}.values():
            declared = {setting.name for setting in _settings([benchmark])}
            settings = {name: value for name, value in {**args, **sets, **run.metadata}.items() if name in declared}
            key = key_of([benchmark.name, settings])
            if key not in checked:
                benchmark.check_settings(settings)
                checked.add(key)

    try:
        check()
    except EditingError as error:
        raise plan.file.error(run.where, f"run {run.name}: {error}") from None


# -- editors with their models ------------------------------------------------------------------------------------


def check_inputs(plan: Plan, runs: Sequence[Run]) -> None:
    """Check the files and folders that the editors of runs need, as the model class does before it loads a model.

    Not a part of :func:`check_plan`: the states of runs can be read where their inputs are no longer.

    Raises:
        EditingError: with file and line, for missing and unreadable inputs, such as a trained network, and for settings
            that do not fit the model. Models whose configuration cannot be read are left out.
    """
    checked: set[str] = set()
    for run in runs:
        options = EditingOptions(**{name: value for name, value in run.model_args.items() if name in OWN_OPTIONS})
        editors = [(options.editor, options.overrides)] if options.makes_edits else []
        if options.icl != "no":
            editors.append(options.context_editor)
        for name, settings in editors:
            key = key_of([name, settings, model_of(run)])
            if key not in checked and (outline := _outline(*model_of(run))) is not None:
                try:
                    load_editor(name, settings).check_settings(outline)
                except EditingError as error:
                    raise plan.file.error(run.where, f"run {run.name}: {error}") from None
            checked.add(key)


class ModelChoice(NamedTuple):
    """The arguments of :func:`_config`."""

    pretrained: str | None
    revision: str | None
    trust_remote_code: bool
    shape: str | None


def model_of(run: Run) -> ModelChoice:
    """The model of a run."""
    args = run.model_args
    return ModelChoice(args.get("pretrained"), args.get("revision"), bool(args.get("trust_remote_code")), run.shape)


@functools.cache
def _outline(*choice: Any) -> nn.Module | None:
    """A model without weights: modules and shapes; ``None`` where its configuration cannot be read."""
    try:
        config = _config(*choice)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=choice[2])
    except (OSError, ValueError):
        return None


class TuningOrigin(NamedTuple):
    """Where an editor's settings for a model come from.

    Attributes:
        tuning: ``untuned`` if nothing was chosen for this model; "" for contexts and the unedited model, which have
            nothing to tune; ``unknown`` if the model's configuration cannot be read.
        text: the reason or the files.
    """

    tuning: Tuning
    text: str = ""


def origin_of(plan: Plan, run: Run) -> TuningOrigin:
    """Where the settings of a run come from.

    Raises:
        EditingError: with file and line, for settings that do not fit the model, such as a block that it lacks.
    """
    if run.model_args["mode"] == "none":
        return TuningOrigin("")
    editor = load_editor(str(run.model_args["editor"]), run.model_args.get("editor_args", {}))
    if editor.writes == ("context",):
        return TuningOrigin("")
    try:
        config = _config(*model_of(run))
    except (OSError, ValueError) as error:
        return TuningOrigin(
            "unknown", f"the configuration of {run.model_args['pretrained']} cannot be read ({first_line(error)})"
        )
    if (outline := _outline(*model_of(run))) is None:
        return TuningOrigin("unknown", f"transformers has no causal model of type {config.model_type!r}")
    try:
        origin = editor.settings_origin(outline)
    except EditingError as error:
        raise plan.file.error(run.where, f"run {run.name}: {error}") from None
    if origin.is_guess or not (origin.shipped or origin.given):
        return TuningOrigin("untuned", "; ".join(origin.guesses) or f"no settings are shipped for this {origin.model}")
    return TuningOrigin("given" if origin.given else "shipped", ", ".join(origin.shipped or origin.given))


@functools.cache
def _config(
    pretrained: str | None, revision: str | None, trust_remote_code: bool, shape: str | None
) -> PretrainedConfig:
    """The configuration of a model; where it cannot be read, one with the shape of shipped settings.

    Raises:
        OSError, ValueError: from transformers.
        EditingError: for an unknown shape.
    """
    if pretrained is None:
        return shape_config(DEMO_SHAPE)
    try:
        return AutoConfig.from_pretrained(
            **config_source(pretrained), revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError):
        if shape is None:
            raise
        return shape_config(shape)


def shape_config(name: str) -> PretrainedConfig:
    """A configuration with the shape that shipped settings of this name are for.

    Raises:
        EditingError: for a name that no shipped settings have.
    """
    shapes = {stem: content["matches"] for folder in FOLDER.iterdir() for stem, content in shipped_files(folder.name)}
    if name not in shapes:
        raise EditingError(
            f"shape is {name!r}, but no settings are shipped under that name.{near_misses(name, shapes)} Accepted: "
            f"{', '.join(sorted(shapes))}."
        )
    matches = dict(shapes[name])
    config = AutoConfig.for_model(matches.pop("model_type"), **matches)
    if config.hidden_size % config.num_attention_heads:  # GPT-2 XL: the default of its type fits another width
        config.num_attention_heads = config.hidden_size // 64
    return config


def _check_shapes(plan: Plan) -> None:
    for model in plan.models:
        if model.shape is not None:
            plan.file.at((*model.where, "shape"), shape_config, str(model.shape))
