"""Reading YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from edit_hooks.utils.errors import EditingError


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a mapping from a YAML file; ``~`` in the path is expanded.

    Raises:
        EditingError: if the file is missing, not UTF-8, not YAML, or holds something other than a mapping.
    """
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise EditingError(f"cannot read {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise EditingError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise EditingError(f"{path} holds {type(content).__name__}; a mapping of settings is needed.")
    return content
