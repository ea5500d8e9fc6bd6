"""What a run of ``edited_hf`` logs about itself before it starts."""

from __future__ import annotations

from typing import Any

from edit_hooks.assets.demo_name import DEMO_NAME
from edit_hooks.deltas.saving.export import holds_edits
from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.utils.logs import BANNER, get_logger

log = get_logger("lm_eval.edited_hf")


def log_banner(options: EditingOptions, editor: str, pretrained: Any, is_demo: bool, data: str | None) -> None:
    """Log the lines of :func:`banner_lines`, and a warning about a checkpoint that has edits in it already."""
    for line in banner_lines(options, editor, pretrained, is_demo, data):
        log.warning(line, extra=BANNER) if is_demo else log.info(line)
    if (text := about_edits_in(pretrained, options.mode)) is not None:
        log.warning(text)


def about_edits_in(pretrained: Any, mode: str) -> str | None:
    """What a run on an exported checkpoint with edits in it measures; ``None`` for other models."""
    if not holds_edits(pretrained):
        return None
    text = "the model of pretrained=... was exported with edits in it (edit_origin.json). "
    if mode != "none":
        return text + "This run's edits are made on top of them; mode=none evaluates the model as it is."
    return text + (
        "Columns that compare with the unedited model compare it with itself. To compare it with the model before the "
        "edits, give that one, and load_edit=<the saved edit or adapter>."
    )


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
