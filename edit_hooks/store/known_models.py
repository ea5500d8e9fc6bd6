"""Record of the models whose results a store holds, to name the part that makes stored results useless."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from edit_hooks.modeling.fingerprint.identity import ModelIdentity, differences
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.json_io import read_json

log = get_logger("lm_eval.edited_hf")

KIND = "models"


def record_model(store: Store, identity: ModelIdentity) -> None:
    """Record a model; log how it differs from the most similar one with equal weights, if results of that are stored.

    A model that is recorded already is not compared, so the sentence is logged once.
    """
    if identity.hooks:
        log.warning(
            "the model has forward hooks (%s), whose effect no key can cover, so nothing that is stored can be found "
            "again; remove them, or use store=off.",
            ", ".join(map(str, identity.hooks[:-1])),
        )
        return
    description = Description(what="model", model=identity.to_dict(), code="", inputs={})
    if store.load_json(KIND, description) is not None:
        return
    ours = identity.to_dict()
    found = sorted(
        (differences(ours, other) for other in _models(store) if other["weights"] == ours["weights"]), key=len
    )
    if found:
        log.warning(
            "the store has results for these weights under another model, which differs in %s. They are not used; "
            "edits and answers are computed again.",
            "; ".join(found[0]),
        )
    with contextlib.suppress(OSError):  # a store that is only read
        store.save_json(KIND, description, {"key": identity.key})


def _models(store: Store) -> Iterator[Mapping[str, Any]]:
    """The recorded models; unreadable files are skipped."""
    for path in (store.root / "json" / KIND).glob("*.json"):
        with contextlib.suppress(EditingError, TypeError, KeyError):
            yield read_json(path, finite=False)["description"]["model"]
