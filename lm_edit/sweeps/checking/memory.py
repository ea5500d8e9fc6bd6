"""Memory and time of the edits of runs, from the configurations of their models."""

from __future__ import annotations

import functools

import torch

from edit_hooks.assets.demo_model import converted_demo
from edit_hooks.base.registry import load_editor
from edit_hooks.planning.outline import EIGHT_BITS, FOUR_BITS, Outline, outline_of, read_config
from edit_hooks.planning.plan import EditorPlan, RateSource, plan_editor
from edit_hooks.utils.errors import EditingError
from lm_edit.sweeps.checking.checks import ModelChoice, model_of
from lm_edit.sweeps.planning.grid import Run


class RunPlans:
    """What the edits of runs take; models and editors that several runs share are planned once."""

    def __init__(self) -> None:
        self._rates: dict[int, RateSource] = {}
        self._known: dict[str, EditorPlan | None] = {}

    def device_bytes(self, run: Run) -> int | None:
        """Bytes on the devices while an edit of a run is computed, weights included; ``None`` if they are not known."""
        outline, plan = _outline(run), self._plan(run)
        if outline is None or plan is None:
            return None
        return outline.num_bytes + (0 if plan.footprint is None else plan.footprint.device_bytes)

    def seconds_per_edit(self, run: Run) -> float | None:
        """Seconds of one edit of a run on this machine, by arithmetic; ``None`` if they are not known."""
        outline, plan = _outline(run), self._plan(run)
        if outline is None or plan is None or plan.footprint is None or plan.footprint.work is None:
            return None
        if id(outline) not in self._rates:
            here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            self._rates[id(outline)] = RateSource(outline, here)
        return self._rates[id(outline)].seconds(plan.footprint.work)

    def edit_bytes(self, run: Run) -> int | None:
        """Bytes of one edit of a run in the store; ``None`` if they are not known."""
        plan = self._plan(run)
        return None if plan is None or plan.footprint is None else plan.footprint.update

    def _plan(self, run: Run) -> EditorPlan | None:
        """The plan of a run's editor, without a footprint for the unedited model; ``None`` if there is none."""
        if run.model_args["mode"] == "none":
            return EditorPlan("none")
        outline = _outline(run)
        if outline is None:
            return None
        name, settings = str(run.model_args["editor"]), run.model_args.get("editor_args", {})
        key = repr((id(outline), name, settings))
        if key not in self._known:
            plan = plan_editor(name, load_editor(name, settings), outline)
            self._known[key] = None if plan.footprint is None else plan
        return self._known[key]


def _outline(run: Run) -> Outline | None:
    """The outline of a run's model; ``None`` if its configuration cannot be read here."""
    args = run.model_args
    bits = FOUR_BITS if args.get("load_in_4bit") else EIGHT_BITS if args.get("load_in_8bit") else None
    dtype = None if args.get("dtype") is None else str(args["dtype"])
    try:
        return _outline_of(model_of(run), dtype, bits)
    except EditingError:
        return None


@functools.lru_cache(maxsize=8)
def _outline_of(model: ModelChoice, dtype: str | None, bits: float | None) -> Outline:
    if model.pretrained is None:
        folder = converted_demo()
        if folder is None:
            raise EditingError("the demo model was not converted yet")
        return outline_of(read_config(str(folder)), dtype or "float32", bits)
    options = {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}
    return outline_of(read_config(model.pretrained, **options), dtype, bits)
