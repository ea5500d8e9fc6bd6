"""The lines that a run of ``edited_hf`` logs about itself before it starts."""

from __future__ import annotations

from typing import Any

from edit_hooks.assets.demo_name import DEMO_NAME
from edit_hooks.lm.options import EditingOptions


def banner_lines(options: EditingOptions, editor: str, pretrained: Any, is_demo: bool, data: str | None) -> list[str]:
    """Model, editor, mode and data; for the demo also what its numbers are good for.

    Args:
        pretrained: name or model, as given.
        data: data of the benchmark behind ``edits``.
    """
    edits = {"none": "no editing", "loaded": f"saved edit {options.load_edit}"}.get(options.mode, f"editor {editor}")
    name = DEMO_NAME if is_demo else getattr(pretrained, "name_or_path", pretrained)
    source = f"; edits={options.edits}" if options.edits else ""
    source += f", data={data}" if data else ""
    lines = [f"edited_hf: {name}; {edits}; mode {options.mode}{source}."]
    if is_demo:
        # Tasks can get other data in --metadata, which the model does not see.
        default = ", and the embedded sample wherever no data are given"
        given = f"; data={options.data}" if options.data else default
        lines.append(
            f"Demo: no pretrained=... given, so the embedded model is used{given}. Numbers are for trying things out, "
            "not for comparing with published tables."
        )
    return lines
