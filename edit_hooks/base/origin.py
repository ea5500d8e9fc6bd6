"""Origin of an editor's settings: one line for the log, and a record for result files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal

from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.options import has_text_form, inline_settings

log = get_logger("lm_eval.edited_hf")

UNNAMED = "<model>"  # a model that was built in memory
LayersFrom = Literal["given", "shipped", "by depth"]
# Facts for a search on the published data: runs take records from the start, so the last ones are the least evaluated.
LAST_FACTS = ("--edits", "bake", "--last")

_reported: set[tuple[str, str]] = set()  # editor and model of the lines so far in this process


@dataclass(frozen=True, kw_only=True)
class SettingsOrigin:
    """Where the settings of an editor for a model come from.

    Attributes:
        editor: its name. base: the editor whose update it post-processes, or that it combines with a context.
        model: kind and depth of the model. pretrained: its hub id or folder; ``None`` for the demo model of a run.
        shipped: shipped files, selected by the shape of the model.
        given: names of settings given by the user, those of the base editor included. settings: the editor's own, with
            seed and engine. settings_file: the file that holds them.
        layers: the edited blocks. layers_from: ``given``, ``shipped``, or ``by depth`` if no setting of user or file
            names them, so that they are a share of the depth.
        by_rule: the shipped file is for another model.
        guesses: further settings that were not chosen for this model, as clauses.
        tune_editor: the editor as a command names it; ``None`` if none can import its class.
        tune_options: further options of ``lm-edit tune`` for the model and the facts of a run.
    """

    editor: str
    base: str | None = None
    model: str
    pretrained: str | None = None
    shipped: tuple[str, ...]
    given: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    settings_file: str | None = None
    layers: tuple[int, ...]
    layers_from: LayersFrom
    by_rule: bool = False
    guesses: tuple[str, ...] = ()
    tune_editor: str | None = None
    tune_options: tuple[str, ...] = LAST_FACTS

    @property
    def by_depth(self) -> bool:
        """Whether no setting names the edited blocks."""
        return self.layers_from == "by depth"

    @property
    def is_guess(self) -> bool:
        """Whether some setting was chosen without knowledge of the model."""
        return self.by_depth or bool(self.guesses)

    @property
    def is_moved(self) -> bool:
        """Whether the shipped file is for a model of another depth, as far as is known."""
        return self.by_rule or "shipped" in self.given

    def of_run(
        self, *, pretrained: str | None, settings_file: str | None, editor: str, tune_options: Sequence[str]
    ) -> SettingsOrigin:
        """The same with the names that a run has for the model, the editor and the user's settings."""
        return replace(
            self,
            pretrained=pretrained,
            settings_file=settings_file,
            tune_editor=editor,
            tune_options=tuple(tune_options),
        )

    def to_json(self) -> dict[str, Any]:
        """The record for result files."""
        return {
            "shipped": list(self.shipped),
            "moved": self.is_moved,
            "given": list(self.given),
            "settings_file": self.settings_file,
            "layers": self.layers_from,
            "guesses": list(self.guesses),
            "tune_editor": self.tune_editor,
        }

    def __str__(self) -> str:
        parts = []
        if self.given:
            source = f"from {self.settings_file}" if self.settings_file else "as given"
            parts.append(f"{', '.join(self.given)} {source}")
        if self.shipped:
            reason = "with its blocks by depth" if self.is_moved else "which match the model's shape"
            parts.append(f"settings of {' and '.join(self.shipped)}, {reason}")
        else:
            parts.append(f"no settings are shipped for this {self.model}, so the editor's defaults")
        parts.append(f"blocks {list(self.layers)}{' by depth' if self.by_depth else ''}")
        line = f"editor {self.editor}: {'; '.join([*parts, *self.guesses])}."
        if not self.is_guess:
            return line
        if self.tune_editor is None:
            return (
                f"{line} lm-edit tune searches better ones once the class is in a module: lm-edit tune --editor "
                "<module>:<class>."
            )
        lost = [name for name, value in self._own_settings.items() if not has_text_form(value)]
        with_lost = f" with your {' and '.join(lost)}, which a command cannot hold" if lost else ""
        return f"{line} To search better ones: {self.tune_command}; then editor_args={self._tuned_file}{with_lost}"

    @property
    def tune_command(self) -> str:
        """The command that searches settings around the user's, quoted for a shell.

        Settings without a text form, such as tensors, are left out.
        """
        assert self.tune_editor is not None
        words = ["lm-edit", "tune"]
        if self.pretrained:
            words += ["--pretrained", self.pretrained]
        words += ["--editor", self.tune_editor]
        spelled = {name: value for name, value in self._own_settings.items() if has_text_form(value)}
        if self.settings_file or spelled:
            words += ["--editor-args", self.settings_file or inline_settings(spelled)]
        if seed := self.settings.get("seed"):
            words += ["--seed", str(seed)]
        return shlex.join([*words, *self.tune_options, "--out", self._tuned_file])

    @property
    def _own_settings(self) -> dict[str, Any]:
        return {name: value for name, value in self.settings.items() if name not in ("seed", "engine")}

    @property
    def _tuned_file(self) -> str:
        """The file for the result, which must not be the one that is read."""
        is_taken = self.settings_file is not None and PurePath(self.settings_file).name == "tuned.yaml"
        return "tuned_again.yaml" if is_taken else "tuned.yaml"


def report_origin(origin: SettingsOrigin, is_first_process: bool = True) -> None:
    """Log the line of a run on its first process; a warning if a setting is a guess."""
    _reported.update((name, origin.model) for name in (origin.editor, origin.base) if name)
    if is_first_process:
        (log.warning if origin.is_guess else log.info)("%s", origin)


def report_origin_once(origin: SettingsOrigin) -> None:
    """Log the line for use without a harness: once per process, editor and kind of model."""
    if (origin.editor, origin.model) not in _reported:
        report_origin(origin)
