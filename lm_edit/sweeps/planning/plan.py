"""Plans of sweeps: YAML files with the axes of a grid of runs.

docs/guides/sweeps.md describes the format. This module checks its shape, with file and line in every message;
:mod:`lm_edit.sweeps.checking.checks` checks editors, tasks and settings, and :mod:`~lm_edit.sweeps.planning.grid` makes
the runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edit_hooks.run_options import BY_NAME as RUN_OPTIONS
from edit_hooks.utils.errors import EditingError, near_misses, unknown_keys_error
from edit_hooks.utils.settings.numbers import POSITIVE, SEED, Range, require_number, require_whole
from edit_hooks.utils.settings.options import SECRET_OPTIONS, parse_editor_args, settings_file
from edit_hooks.utils.storage.files import parse_size, read_text, require_file
from edit_hooks.utils.storage.yaml_io import parse_yaml, read_yaml
from lm_edit.results.filters import LABELS
from lm_edit.sweeps.planning.choices import (
    UNEDITED,
    BenchmarkChoice,
    EditorChoice,
    ModeChoice,
    Model,
    Plan,
    PlanFile,
    Resources,
    StepSize,
    Where,
)

PLANS = Path(__file__).parents[1] / "plans"
MODES = ("single", "batch", "sequential")

KEYS = (
    "description",
    "source",
    "unstated",
    "differs",
    "without",
    "models",
    "editors",
    "editor_args",
    "benchmarks",
    "modes",
    "num_edits",
    "edit_batch_size",
    "icl",
    "seeds",
    "model_args",
    "metadata",
    "limit",
    "lm_eval",
    "resources",
)
EDITOR_KEYS = ("editor", "name", "editor_args", "model_args", "models", "modes", "icl", "seeds", "seconds_per_edit")
BENCHMARK_KEYS = ("name", "tasks", "edits", "model_args", "metadata", "limit", "models", "modes", "seconds_per_case")
RESOURCE_KEYS = ("cpus", "gpus", "memory", "hours", "slurm")
# Options of `lm_eval run` that change what is asked, and that --model_args and --metadata do not cover.
LM_EVAL_KEYS = ("apply_chat_template", "batch_size", "gen_kwargs", "num_fewshot", "system_instruction")
# Axes of the plan, which an entry's model_args cannot set as well.
AXES = ("editor", "editor_args", "mode", "num_edits", "edit_batch_size", "icl", "seed", "edits", *LABELS.values())


def shipped_plans() -> dict[str, Path]:
    """Name -> file of the plans in the package."""
    return {path.stem: path for path in sorted(PLANS.glob("*.yaml"))}


def find_plan(name: str) -> Path:
    """The file of a plan: a path, or the name of a shipped one.

    Raises:
        EditingError: for neither, with near misses among the shipped names.
    """
    shipped = shipped_plans()
    if name in shipped:
        return shipped[name]
    if Path(name).suffix not in (".yaml", ".yml"):
        raise EditingError(
            f"no shipped plan has the name {name!r}.{near_misses(name, shipped)} Give a YAML file, or one of: "
            f"{', '.join(shipped)}."
        )
    return require_file(name, "plan")


def load_plan(path: Path) -> Plan:
    """Read and check the shape of a plan.

    Raises:
        EditingError: with file and line, for unknown keys, missing parts and values of another type.
    """
    file = PlanFile(path, read_text(path, "plan"))
    try:
        content = parse_yaml(file.text)
    except ValueError as error:
        raise EditingError(f"{path} is not valid YAML: {error}.") from None
    return _Reader(file).plan(content)


def read_editors(plan: Plan, entries: Sequence[Any], origin: Path) -> tuple[EditorChoice, ...]:
    """Entries of ``editors`` for a plan that was read, from elsewhere.

    Args:
        origin: names the entries in messages; their files of settings are relative to its folder.

    Raises:
        EditingError: as :func:`load_plan`.
    """
    models, modes = ([one.name for one in axis] for axis in (plan.models, plan.modes))
    choices = _Reader(PlanFile(origin, "")).editors({"editors": list(entries)}, models, modes)
    return tuple(choice._replace(where=()) for choice in choices)


def check_model_args(args: Mapping[str, Any], origin: Path) -> None:
    """Refuse options of the model class that are axes of a plan, and secrets.

    Args:
        origin: names them in messages.
    """
    _Reader(PlanFile(origin, "")).check_args(args, ())


class _Reader:
    """Reads the parts of one plan."""

    def __init__(self, file: PlanFile) -> None:
        self.file = file

    def plan(self, content: Any) -> Plan:
        top = self.mapping(content, ())
        self.check_keys(top, KEYS, "key of a plan", ())
        if missing := [key for key in ("editors", "benchmarks") if key not in top]:
            raise self.file.error((), f"the plan has no {' and no '.join(missing)}; both are lists.")
        limit = self.positive(top, "limit", ())
        models = self.models(top.get("models", {"demo": {}}))
        modes = self.modes(top)
        plan = Plan(
            file=self.file,
            description=self.text(top, "description"),
            source=self.text(top, "source"),
            unstated=self.sentences(top, "unstated"),
            differs=self.sentences(top, "differs"),
            models=models,
            editors=self.editors(top, [model.name for model in models], [mode.name for mode in modes]),
            benchmarks=self.benchmarks(top, [model.name for model in models], [mode.name for mode in modes], limit),
            modes=modes,
            icl=self.icl(top, ()) or (False,),
            seeds=self.seeds(top, ()) or (0,),
            model_args=self.model_args(top, ()),
            metadata=self.mapping(top.get("metadata"), ("metadata",)),
            lm_eval=self.lm_eval(top.get("lm_eval")),
            resources=self.resources(top.get("resources")),
            without=self.without(top.get("without")),
        )
        self.check_names("models", plan.models)
        self.check_names("editors", plan.editors)
        self.check_names("benchmarks", plan.benchmarks)
        self.check_names("modes", plan.modes)
        planned = {choice.editor for choice in plan.editors}
        for reason, names in plan.without.items():
            if both := sorted(planned.intersection(names)):
                raise self.file.error(
                    ("without", reason), f"editors of the plan include {both[0]!r}; drop one of both."
                )
        return plan

    # -- axes --------------------------------------------------------------------------------------------------------

    def models(self, content: Any) -> tuple[Model, ...]:
        where: Where = ("models",)
        if isinstance(content, list):
            for number, name in enumerate(self.listed(content, where)):
                if not isinstance(name, str):
                    raise self.file.error(
                        (*where, number),
                        "a list has hub ids or folders; a model with options is an entry of a mapping, as in "
                        "'models: {small: {pretrained: gpt2, dtype: bfloat16}}'.",
                    )
            content = {name: {"pretrained": name} for name in content}
        models = []
        for name, args in self.mapping(content, where).items():
            own = dict(self.mapping(args, (*where, name)))
            shape = own.pop("shape", None)
            if not isinstance(own.get("pretrained", ""), str):
                raise self.file.error((*where, name, "pretrained"), "a hub id or a folder is needed.")
            self.check_args(own, (*where, name))
            models.append(Model(str(name), own, shape, (*where, name)))
        if not models:
            raise self.file.error(where, "no model is named; without this key the demo model is used.")
        return tuple(models)

    def editors(self, top: Mapping[str, Any], models: list[str], modes: list[str]) -> tuple[EditorChoice, ...]:
        shared = self.settings(top.get("editor_args"), ("editor_args",))
        choices = []
        for position, entry in enumerate(self.listed(top["editors"], ("editors",))):
            where: Where = ("editors", position)
            own = self.mapping({"editor": entry} if isinstance(entry, str) else entry, where)
            self.check_keys(own, EDITOR_KEYS, "key of an editor", where)
            editor = own.get("editor")
            if not isinstance(editor, str):
                raise self.file.error(where, f"editor is {editor!r}; the name of an editor, or {UNEDITED}, is needed.")
            all_settings = self.settings(own.get("editor_args"), (*where, "editor_args"))
            if unused := [name for name in ("editor_args", "icl", "seeds") if editor == UNEDITED and own.get(name)]:
                raise self.file.error(where, f"{UNEDITED} has no {' and no '.join(unused)}; drop them.")
            combined = [{}] if editor == UNEDITED else [{**a, **b} for a in shared for b in all_settings]
            for settings in combined:
                name = str(own.get("name", editor))
                if len(combined) > 1:
                    name = f"{name}({_settings_name(settings)})"
                choices.append(
                    EditorChoice(
                        name,
                        name if "name" in own else None,
                        editor,
                        settings,
                        self.model_args(own, where),
                        self.subset(own, "models", models, where),
                        self.subset(own, "modes", modes, where),
                        self.icl(own, where),
                        self.seeds(own, where),
                        self.positive(own, "seconds_per_edit", where),
                        where,
                    )
                )
        return tuple(choices)

    def without(self, content: Any) -> dict[str, tuple[str, ...]]:
        """Reason -> editors that the plan leaves out."""
        left_out = {}
        for reason, names in self.mapping(content, ("without",)).items():
            listed = self.listed(names, ("without", reason))
            if not all(isinstance(name, str) for name in listed):
                raise self.file.error(("without", reason), "a list of names of editors is needed under a reason.")
            left_out[str(reason)] = tuple(listed)
        return left_out

    def settings(self, content: Any, where: Where) -> list[dict[str, Any]]:
        """Sets of editor settings: one mapping, text or file, or a list of them; ``[{}]`` for none."""
        sets = []
        for position, entry in enumerate(content if isinstance(content, list) else [content]):
            try:
                file = settings_file(entry)
                # relative to the plan, so that a plan and its settings can be moved together
                read = read_yaml(self.file.path.parent / Path(file).expanduser()) if file else parse_editor_args(entry)
            except EditingError as error:
                raise self.file.error((*where, position) if isinstance(content, list) else where, error) from None
            sets.append(dict(read))
        return sets or [{}]

    def benchmarks(
        self, top: Mapping[str, Any], models: list[str], modes: list[str], limit: float | None
    ) -> tuple[BenchmarkChoice, ...]:
        choices = []
        for position, entry in enumerate(self.listed(top["benchmarks"], ("benchmarks",))):
            where: Where = ("benchmarks", position)
            own = self.mapping({"tasks": [entry]} if isinstance(entry, str) else entry, where)
            self.check_keys(own, BENCHMARK_KEYS, "key of a benchmark", where)
            tasks = self.listed(own.get("tasks"), (*where, "tasks"))
            if not tasks or not all(isinstance(task, str) for task in tasks):
                raise self.file.error(where, "tasks are needed: a list of names of tasks or groups.")
            choices.append(
                BenchmarkChoice(
                    str(own.get("name", "+".join(tasks))),
                    tuple(dict.fromkeys(tasks)),
                    own.get("edits"),
                    self.model_args(own, where),
                    self.mapping(own.get("metadata"), (*where, "metadata")),
                    self.positive(own, "limit", where) if "limit" in own else limit,
                    self.subset(own, "models", models, where),
                    self.subset(own, "modes", [*modes, UNEDITED], where),
                    self.positive(own, "seconds_per_case", where),
                    isinstance(entry, str),
                    where,
                )
            )
        return tuple(choices)

    def modes(self, top: Mapping[str, Any]) -> tuple[ModeChoice, ...]:
        shared_num = self.whole_numbers(top.get("num_edits"), ("num_edits",))
        shared_steps = self.steps(top.get("edit_batch_size"), ("edit_batch_size",))
        choices = []
        for position, entry in enumerate(self.listed(top.get("modes", ["single"]), ("modes",))):
            where: Where = ("modes", position)
            own = dict(self.mapping({"mode": entry} if isinstance(entry, str) else entry, where))
            mode = own.pop("mode", None)
            if mode not in MODES:
                raise self.file.error(
                    where,
                    f"mode is {mode!r}.{near_misses(str(mode), MODES)} Accepted: {', '.join(MODES)}; the unedited "
                    f"model is the editor {UNEDITED}.",
                )
            name = str(own.pop("name", mode))
            num_edits = self.whole_numbers(own.pop("num_edits", None), (*where, "num_edits")) or shared_num
            steps = self.steps(own.pop("edit_batch_size", None), (*where, "edit_batch_size")) or shared_steps
            self.check_args(own, where)
            if isinstance(entry, dict) and mode == "single" and "num_edits" in entry:
                raise self.file.error(
                    (*where, "num_edits"), "num_edits has no meaning in mode=single; drop it, or limit the cases."
                )
            if isinstance(entry, dict) and mode != "sequential" and "edit_batch_size" in entry:
                raise self.file.error(
                    (*where, "edit_batch_size"), f"edit_batch_size has no meaning in mode={mode}; drop it."
                )
            choices.append(
                ModeChoice(
                    name,
                    mode,
                    own,
                    (None,) if mode == "single" else num_edits or (None,),
                    steps or (None,) if mode == "sequential" else (None,),
                    where,
                )
            )
        return tuple(choices)

    def steps(self, content: Any, where: Where) -> tuple[StepSize, ...]:
        sizes = []
        for entry in content if isinstance(content, list) else [] if content is None else [content]:
            by_kind = entry if isinstance(entry, dict) else {"joint": entry, "other": entry}
            self.check_keys(by_kind, StepSize._fields, "key of edit_batch_size", where)
            if by_kind.keys() != set(StepSize._fields):
                raise self.file.error(where, "edit_batch_size is a number, or {joint: number, other: number}.")
            sizes.append(StepSize(*(self.whole(by_kind[key], where, POSITIVE) for key in StepSize._fields)))
        return tuple(sizes)

    # -- settings of all runs ----------------------------------------------------------------------------------------

    def icl(self, own: Mapping[str, Any], where: Where) -> tuple[bool | str, ...] | None:
        """The values of ``icl``; the model class checks them."""
        if "icl" not in own:
            return None
        return tuple(self.listed(own["icl"], (*where, "icl")))

    def seeds(self, own: Mapping[str, Any], where: Where) -> tuple[int, ...] | None:
        return self.whole_numbers(own.get("seeds"), (*where, "seeds"), SEED) or None

    def positive(self, own: Mapping[str, Any], name: str, where: Where) -> float | None:
        if own.get(name) is None:
            return None
        return self.file.at((*where, name), require_number, name, own[name], POSITIVE)

    def model_args(self, own: Mapping[str, Any], where: Where) -> dict[str, Any]:
        args = dict(self.mapping(own.get("model_args"), (*where, "model_args")))
        self.check_args(args, (*where, "model_args"))
        return args

    def check_args(self, args: Mapping[str, Any], where: Where) -> None:
        """Refuse options of the model class that are axes of the plan, and secrets."""
        for key in args:
            if key == "edits":
                advice = "give it in an entry of benchmarks, as in {tasks: [editglue], edits: qaedit}."
                raise self.file.error((*where, key), f"edits belong to the tasks that are asked about them; {advice}")
            if key in AXES:
                name = {
                    "editor": "editors",
                    "editor_label": "name of an entry of editors",
                    "model_label": "name of an entry of models",
                    "mode": "modes",
                    "seed": "seeds",
                }.get(key, key)
                raise self.file.error((*where, key), f"{key} is an axis of the plan; give it as {name}.")
            if key in SECRET_OPTIONS:
                raise self.file.error((*where, key), f"{key} would be saved with every run; set HF_TOKEN instead.")

    def lm_eval(self, content: Any) -> dict[str, Any]:
        options = self.mapping(content, ("lm_eval",))
        self.check_keys(options, LM_EVAL_KEYS, "option of lm_eval in a plan", ("lm_eval",))
        return dict(options)

    def resources(self, content: Any) -> Resources:
        where: Where = ("resources",)
        own = self.mapping(content, where)
        self.check_keys(own, RESOURCE_KEYS, "resource", where)
        for key, least in (("cpus", POSITIVE), ("gpus", SEED)):
            if own.get(key) is not None:
                self.whole(own[key], (*where, key), least)
        if own.get("hours") is not None:
            self.file.at((*where, "hours"), require_number, "hours", own["hours"], POSITIVE)
        if own.get("memory") is not None:
            self.file.at((*where, "memory"), parse_size, str(own["memory"]))
        return Resources(**{**own, "slurm": self.mapping(own.get("slurm"), (*where, "slurm"))})

    # -- values ------------------------------------------------------------------------------------------------------

    def whole(self, value: Any, where: Where, within: Range) -> int:
        return self.file.at(where, require_whole, str(where[-1]), value, within)

    def whole_numbers(self, content: Any, where: Where, within: Range = POSITIVE) -> tuple[int, ...]:
        """One number or a list of them; nothing for ``None``."""
        values = content if isinstance(content, list) else [] if content is None else [content]
        return tuple(self.whole(value, where, within) for value in values)

    def text(self, top: Mapping[str, Any], key: str) -> str:
        return " ".join(str(top.get(key) or "").split())

    def sentences(self, top: Mapping[str, Any], key: str) -> tuple[str, ...]:
        return tuple(map(str, self.listed(top[key], (key,)))) if top.get(key) else ()

    def mapping(self, content: Any, where: Where) -> Mapping[str, Any]:
        if content is None:
            return {}
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise self.file.error(where, f"a mapping of names is needed, not {type(content).__name__}.")
        return content

    def listed(self, content: Any, where: Where) -> list[Any]:
        if content is None or isinstance(content, dict):
            raise self.file.error(where, f"a list is needed, not {type(content).__name__}.")
        values = content if isinstance(content, list) else [content]
        if not values:
            raise self.file.error(where, "the list is empty.")
        return values

    def subset(self, own: Mapping[str, Any], key: str, names: Sequence[str], where: Where) -> tuple[str, ...] | None:
        """Names of another axis to which an entry is restricted; ``None`` for all."""
        if key not in own:
            return None
        chosen = self.listed(own[key], (*where, key))
        if unknown := [name for name in chosen if name not in names]:
            hint = near_misses(str(unknown[0]), names)
            raise self.file.error(
                (*where, key), f"{key} of the plan do not include {unknown[0]!r}.{hint} They are: {', '.join(names)}."
            )
        return tuple(chosen)

    def check_keys(self, own: Mapping[str, Any], known: Iterable[str], what: str, where: Where) -> None:
        if unknown := [key for key in own if key not in set(known)]:
            error: EditingError = unknown_keys_error(what, unknown, known)
            if options := [key for key in unknown if key in RUN_OPTIONS and "model_args" in set(known)]:
                error = EditingError(
                    f"{', '.join(options)}: options of edited_hf; write them under model_args.\n{error}"
                )
            raise self.file.error((*where, unknown[0]), error)

    def check_names(self, axis: str, entries: Sequence[Any]) -> None:
        """Refuse two entries of an axis with one name, which the table of runs could not distinguish."""
        seen: dict[str, Where] = {}
        for entry in entries:
            if entry.name in seen:
                first = self.file.line(seen[entry.name])
                raise self.file.error(
                    entry.where, f"{axis} has {entry.name!r} twice (see line {first}); add a name: to one of them."
                )
            seen[entry.name] = entry.where


def _settings_name(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "default"


def described(plan: Plan) -> list[str]:
    """Lines about the origin of a plan: what it reproduces, what its source leaves open, and what differs from it."""
    lines = [plan.description] if plan.description else []
    lines += [f"source: {plan.source}"] if plan.source else []
    lines += [f"not stated: {text}" for text in plan.unstated]
    lines += [f"differs: {text}" for text in plan.differs]
    return [*lines, *(f"without {', '.join(names)}: {reason}" for reason, names in plan.without.items())]
