"""The trainer of an editor."""

from __future__ import annotations

from typing import Any

from edit_hooks.base.editor import Editor
from edit_hooks.base.registry import editor_class, editor_names
from edit_hooks.training.trainer import Trainer
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.plugins import import_object


def trainer_class(editor: type[Editor[Any]]) -> type[Trainer[Any]]:
    """Import the class that trains an editor.

    Raises:
        EditingError: for an editor without training, a class that cannot be imported, and one that is no trainer of
            this editor.
    """
    if editor.trainer is None:
        raise EditingError(f"editor {editor.name!r} needs no training; those that do: {', '.join(trained_editors())}.")
    trainer = import_object(editor.trainer, "trainer")
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise EditingError(f"editor {editor.name!r}: {editor.trainer} is not a subclass of edit_hooks' Trainer.")
    if not (hasattr(trainer, "config_class") and issubclass(trainer.config_class, editor.config_class)):
        raise EditingError(
            f"editor {editor.name!r}: config_class of {editor.trainer} has to extend {editor.config_class.__name__}."
        )
    return trainer


def trained_editors() -> list[str]:
    """Names of the editors that have to be trained; those of other packages that cannot be imported are left out."""
    names = []
    for name in editor_names():
        try:
            names += [name] if editor_class(name).trainer is not None else []
        except EditingError:  # `lm-edit editors` warns about it
            continue
    return names
