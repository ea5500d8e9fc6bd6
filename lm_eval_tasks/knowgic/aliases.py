"""Other names of the answers, which a sampled response may have instead.

The release keeps them in ``attributes_with_aliases.json``: entity -> ``{"answer_alias": [...]}``. It states no rule for
finding them in a response; ours is :func:`judges.match.has_answer`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import user_path
from edit_hooks.utils.storage.json_io import read_json
from edit_hooks.utils.storage.pinned_file import PinnedFile
from lm_eval_tasks.common.records.dataset import MINI, choose_data, named_set
from lm_eval_tasks.common.settings import Settings, text_setting

logger = get_logger("lm_eval.editing_tasks")

FILE = "attributes_with_aliases.json"
EMBEDDED = Path(__file__).parent / "data" / FILE
# Both releases have this file.
PUBLISHED = PinnedFile(
    repository="manitbaser/KnowGIC",
    commit="bd157255f0d48b032a92afbb4e72a23db8a3daab",
    path=FILE,
    sha256="923f4c7b0ba24db9f74576395c2c09fff84e37e5da222eeb49c02d196ba06449",
)

KNOWGIC_ALIASES = text_setting("knowgic_aliases", "other names of the answers", f"a file like {FILE}, or none")
NO_ALIASES = "none"

Aliases = Mapping[str, tuple[str, ...]]  # answer in lower case -> its other names


def find_aliases(settings: Settings) -> Aliases:
    """The other names for a run.

    Args:
        settings: those of the task, with ``data`` as the benchmark reads it. Without ``knowgic_aliases``, the names
            are those that belong to the data: embedded, published, or :data:`FILE` beside your own file.

    Raises:
        EditingError: for a file that is missing or violates the layout.
    """
    given = KNOWGIC_ALIASES.read(settings)
    if given == NO_ALIASES:
        return {}
    if given is not None:
        return read_aliases(user_path(given, KNOWGIC_ALIASES.name))
    data = choose_data(settings)
    if data == MINI:
        return read_aliases(EMBEDDED)
    if data == "hub" or named_set(data):
        return read_aliases(PUBLISHED.fetch())
    place = user_path(data, "data")
    matches = (
        sorted(place.rglob(FILE)) if place.is_dir() else [path for path in [place.parent / FILE] if path.is_file()]
    )
    if matches:
        return read_aliases(matches[0])
    _warn_missing(str(place))
    return {}


@functools.cache
def _warn_missing(place: str) -> None:
    """Log once per process; several tasks read the same data."""
    logger.warning(
        "%s has no %s beside it, so a response must have the answer itself. Give knowgic_aliases=/path, or none.",
        place,
        FILE,
    )


@functools.cache
def read_aliases(path: Path) -> Aliases:
    """Read a file of other names.

    Raises:
        EditingError: for unreadable JSON, and another layout.
    """
    table = read_json(path, "file of aliases")
    aliases: dict[str, tuple[str, ...]] = {}
    for name, entry in table.items() if isinstance(table, dict) else [("", None)]:
        names = entry.get("answer_alias") if isinstance(entry, dict) else None
        if not isinstance(names, list) or not all(isinstance(alias, str) for alias in names):
            raise EditingError(
                f'{path}: the entry {name!r} has no alias list; {{"answer": {{"answer_alias": ["name"]}}}} is needed.'
            )
        key = name.casefold()
        aliases[key] = tuple(
            dict.fromkeys([*aliases.get(key, ()), *(alias.strip() for alias in names if alias.strip())])
        )
    return aliases
