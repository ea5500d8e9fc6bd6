"""Loading of models that refuses incomplete files, where transformers only warns, and that can keep a model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from edit_hooks.utils.checkpoints import REPORTED, require_complete


class KeptModel:
    """The last model that this process loaded, for further runs in it; empty until :meth:`start`.

    A run leaves the model as it found it, and computes its identity from the weights, so a model that differs from its
    checkpoint would make its own edits under another hash.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._key: str | None = None
        self._model: Any = None

    def start(self) -> None:
        """Keep models from now on."""
        self._is_on = True

    def find(self, key: str) -> Any:
        """The model loaded with this key, or ``None``; another one is dropped, so that both never are in memory."""
        if self._model is not None and self._key != key:
            self._key = self._model = None
            gc.collect()  # takes up to a second: not if there is nothing to free
        return self._model

    def put(self, key: str, model: Any) -> None:
        """Keep a model, if this process keeps models."""
        if self._is_on:
            self._key, self._model = key, model


KEPT = KeptModel()


class CompleteLoading:
    """A transformers class whose ``from_pretrained`` refuses incomplete checkpoints.

    Args:
        model_class: for example ``AutoModelForCausalLM``.
        may_be_kept: whether the model may serve further runs of a process that keeps models: not if something is loaded
            into it afterwards.
    """

    def __init__(self, model_class: Any, may_be_kept: bool = False) -> None:
        self.model_class = model_class
        self.may_be_kept = may_be_kept

    def from_pretrained(self, source: str, *args: Any, **kwargs: Any) -> Any:
        """Load a model.

        Raises:
            EditingError: weights are missing, or have other shapes than the model's.
        """
        key = _key(self.model_class, source, args, kwargs) if self.may_be_kept else ""
        if (kept := KEPT.find(key)) is not None:
            return kept
        model, report = self.model_class.from_pretrained(source, *args, **{**kwargs, **REPORTED})
        require_complete(report, str(source))
        if self.may_be_kept:
            KEPT.put(key, model)
        return model


def _key(model_class: Any, source: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What a model was loaded from and how; of a folder with the sizes and times of its files."""
    folder = Path(source)
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder] if folder.is_file() else []
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return repr((model_class, source, facts, args, sorted(kwargs.items())))
