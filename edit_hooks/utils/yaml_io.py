"""TODO: say what is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from edit_hooks.utils.errors import EditingError


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping from a file.

    Raises:
        EditingError: when the file is missing, is not YAML or holds something else than a mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise EditingError(f"cannot read {path}: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise EditingError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise EditingError(f"{path} holds {type(content).__name__}, a mapping of settings is needed.")
    return content
