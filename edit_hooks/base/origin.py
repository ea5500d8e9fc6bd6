"""Origin of an editor's settings: one line for the log, and a record for result files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

_reported: set[tuple[str, str]] = set()  # editor and model of the lines so far in this process


@dataclass(frozen=True, kw_only=True)
class SettingsOrigin:
    """Where the settings of an editor for a model come from.

    Attributes:
        editor: its name. base: the editor whose update it post-processes, or that it combines with a context.
        model: kind and depth of the model. pretrained: its hub id or folder, if known.
        shipped: shipped files, selected by the shape of the model.
        given: settings given by the user. settings_file: the file that holds them.
        layers: the edited blocks. by_depth: they are a share of the depth, because no file and no user names them.
        guesses: further settings that were not chosen for this model, as clauses.
    """

    editor: str
    base: str | None = None
    model: str
    pretrained: str | None = None
    shipped: tuple[str, ...]
    given: tuple[str, ...]
    settings_file: str | None = None
    layers: tuple[int, ...]
    by_depth: bool
    guesses: tuple[str, ...] = ()

    @property
    def is_guess(self) -> bool:
        """Whether some setting was chosen without knowledge of the model."""
        return self.by_depth or bool(self.guesses)

    def of_run(self, pretrained: str | None, settings_file: str | None) -> SettingsOrigin:
        """The same with the names that a run has for the model and the user's settings."""
        return replace(self, pretrained=pretrained, settings_file=settings_file)

    def to_json(self) -> dict[str, Any]:
        """The record for result files."""
        return {
            "shipped": list(self.shipped),
            "given": list(self.given),
            "settings_file": self.settings_file,
            "layers": "by depth" if self.by_depth else "given" if "layers" in self.given else "shipped",
            "guesses": list(self.guesses),
        }

    def __str__(self) -> str:
        parts = []
        if self.given:
            source = f"from {self.settings_file}" if self.settings_file else "as given"
            parts.append(f"{', '.join(self.given)} {source}")
        if self.shipped:
            reason = "with its blocks by depth" if "shipped" in self.given else "which match the model's shape"
            parts.append(f"settings of {' and '.join(self.shipped)}, {reason}")
        else:
            parts.append(f"no settings are shipped for this {self.model}, so the editor's defaults")
        parts.append(f"blocks {list(self.layers)}{' by depth' if self.by_depth else ''}")
        line = f"editor {self.editor}: {'; '.join([*parts, *self.guesses])}."
        return f"{line} To search better ones: {self.tune_command}" if self.is_guess else line

    @property
    def tune_command(self) -> str:
        """The command that searches settings, and the use of its result."""
        pretrained = f" --pretrained {self.pretrained}" if self.pretrained else ""
        command = f"lm-edit tune{pretrained} --editor {self.editor} --edits bake --out tuned.yaml"
        return f"{command}; then editor_args=tuned.yaml"


def report_origin(origin: SettingsOrigin, is_first_process: bool = True) -> None:
    """Log the line of a run on its first process; a warning if a setting is a guess."""
    _reported.update((name, origin.model) for name in (origin.editor, origin.base) if name)
    if is_first_process:
        (log.warning if origin.is_guess else log.info)("%s", origin)


def report_origin_once(origin: SettingsOrigin) -> None:
    """Log the line for use without a harness: once per process, editor and kind of model."""
    if (origin.editor, origin.model) not in _reported:
        report_origin(origin)
