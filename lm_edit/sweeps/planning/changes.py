"""Plans with other models, sizes or editors, to try one small or to add an editor of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import require_file
from edit_hooks.utils.storage.yaml_io import read_yaml
from lm_edit.sweeps.planning.choices import UNEDITED, ModeChoice, Model, Plan, StepSize
from lm_edit.sweeps.planning.plan import check_model_args, read_editors

DEMO = "demo"  # in place of a hub id: the demo model and the embedded samples


def with_limit(plan: Plan, limit: float | None) -> Plan:
    """The same plan with another number of cases per task."""
    if limit is None:
        return plan
    return dataclasses.replace(plan, benchmarks=tuple(item._replace(limit=limit) for item in plan.benchmarks))


def with_model(plan: Plan, pretrained: str | None, args: Mapping[str, Any] | None = None) -> Plan:
    """The same plan on one other model.

    Args:
        pretrained: hub id or folder; ``demo``: the demo model, which is edited on the embedded samples.
        args: further options of the model class; they replace those of the plan, as ``data`` does.

    Raises:
        EditingError: for options without a model.
    """
    if pretrained is None:
        if args:
            raise EditingError("--model-args are of the model that --pretrained names; add --pretrained, or drop them.")
        return plan
    check_model_args(args or {}, Path("--model-args"))
    is_demo = pretrained == DEMO
    own = {**({} if is_demo else {"pretrained": pretrained}), **(args or {})}
    replaced = {*own, "data", "data_revision"} if is_demo or "data" in own else set(own)

    def rest(others: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in others.items() if name not in replaced}

    return dataclasses.replace(
        plan,
        models=(Model(pretrained, own, None, ("models",)),),
        editors=tuple(one._replace(models=None, seconds_per_edit=None, args=rest(one.args)) for one in plan.editors),
        benchmarks=tuple(
            one._replace(models=None, seconds_per_case=None, args=rest(one.args)) for one in plan.benchmarks
        ),
        model_args=rest(plan.model_args),
        resources=dataclasses.replace(plan.resources, gpus=None),  # one where there are any
    )


def with_num_edits(plan: Plan, num_edits: int | None) -> Plan:
    """The same plan with another number of edits in batches and streams; longer steps and later checkpoints shrink."""
    if num_edits is None:
        return plan
    return dataclasses.replace(plan, modes=tuple(_resized(mode, num_edits) for mode in plan.modes))


def _resized(mode: ModeChoice, num_edits: int) -> ModeChoice:
    if mode.mode == "single":
        return mode
    steps = [step and StepSize(*(min(size, num_edits) for size in step)) for step in mode.steps]
    args = dict(mode.args)
    if "checkpoints" in args:
        kept = [part for part in str(args.pop("checkpoints")).split(";") if int(part) < num_edits]
        args |= {"checkpoints": ";".join(kept)} if kept else {}
    return mode._replace(num_edits=(num_edits,), steps=tuple(dict.fromkeys(steps)), args=args)


def with_editor(plan: Plan, editor: str) -> Plan:
    """The same plan with one editor and the unedited model in place of its editors.

    Args:
        editor: a name, ``package.module:Class``, or a YAML file of an entry: ``editor``, ``name``, ``editor_args``, ...

    Raises:
        EditingError: as for an entry of a plan.
    """
    entry = (
        read_yaml(require_file(editor, "editor")) if Path(editor).suffix in (".yaml", ".yml") else {"editor": editor}
    )
    if entry.get("editor") == UNEDITED:
        raise EditingError(f"{UNEDITED} is a row of the plan already; name an editor to compare.")
    return dataclasses.replace(plan, editors=read_editors(plan, [UNEDITED, dict(entry)], Path(editor)))
