"""What of a model besides its weights makes it another model, from the parts that a run recorded of it.

A run records a ``model_identity``, by which stored edits are found (docs/explain/design/store-keys.md). The identity of
a run is coarser: releases of libraries, folders of this machine and what only changes speed are no part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from edit_hooks.utils.storage.hashing import key_of
from lm_eval_tasks.report.portable import portable

PART_DIGITS = 8

# Entries, at any depth, that change no answer -> why. Top levels of configurations are recorded without the first five.
NO_ANSWER = {
    "_name_or_path": "where the model was read from",
    "transformers_version": "of the release that wrote the file",
    "architectures": "written by save_pretrained; the class is a part of its own",
    "dtype": "the dtype of every tensor is part of the hash of the weights",
    "torch_dtype": "earlier name of dtype",
    "auto_map": "where code was read from",
    "_attn_implementation": "the same sums in another order; they move last digits, as the number of threads does",
    "_experts_implementation": "the same sums in another order",
    "use_cache": "the same answer in less time",
}


def model_parts(editing: Mapping[str, Any]) -> dict[str, str]:
    """Part of the model -> digest of what was recorded of it; parts that were not recorded are left out.

    Digests of modules are left out, too: the names of their attributes change with every release of transformers, and
    what they hold follows from class, configuration, adapters and weights, unless a program changed them.

    Args:
        editing: ``edited_hf`` of a result file.
    """
    recorded = editing.get("model_identity") or {}
    parts = {
        "class": _without_module(recorded.get("model"), "modules"),
        "config": recorded.get("config"),
        "generation": {"end_tokens": recorded.get("end_tokens"), **(recorded.get("generation") or {})},
        "adapters": recorded.get("adapters"),
        "tokenizer": _without_module(recorded.get("tokenizer")),
        "hooks": (recorded.get("hooks") or [])[:-1],  # the last one is a random number
    }
    as_saved = json.loads(json.dumps(parts, default=str))  # results in memory may have objects
    telling = {name: _telling(part) for name, part in as_saved.items()}
    return {name: key_of(part)[:PART_DIGITS] for name, part in telling.items() if part}


def parts_text(parts: Mapping[str, str]) -> str:
    """Parts as one text, as in ``config=0c45f1a2; tokenizer=9d3e77b0``."""
    return "; ".join(f"{name}={digest}" for name, digest in parts.items())


def differing_parts(texts: Iterable[str]) -> dict[str, str]:
    """Each text of :func:`parts_text` -> the entries that not all of them have; "" if there are none."""
    entries = {text: [entry for entry in text.split("; ") if entry] for text in texts}
    common = set.intersection(*map(set, entries.values())) if entries else set()
    return {text: "; ".join(entry for entry in own if entry not in common) for text, own in entries.items()}


def _without_module(described: Mapping[str, Any] | None, *dropped: str) -> dict[str, Any]:
    """A described object with the bare name of its class, whose module another release may have moved."""
    kept = {name: value for name, value in (described or {}).items() if name not in dropped}
    return kept | {"class": kept["class"].rpartition(".")[2]} if "class" in kept else kept


def _telling(value: Any) -> Any:
    """The value without entries that change no answer and without those that say nothing.

    An entry that one release has and another lacks is nothing, false or empty where it has no effect.
    """
    if isinstance(value, Mapping):
        found = {name: _telling(entry) for name, entry in value.items() if not _is_irrelevant(str(name))}
        return {name: entry for name, entry in found.items() if not _says_nothing(entry)}
    if isinstance(value, (list, tuple)):
        return [_telling(entry) for entry in value]
    if isinstance(value, float) and value.is_integer() and abs(value) >= 2**63:
        return int(value)  # saved as a float because 64 bits do not hold it
    return portable(value)


def _is_irrelevant(name: str) -> bool:
    return name in NO_ANSWER or name.endswith("_file")  # names of a tokenizer's files, whose content is hashed


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (Mapping, list, str)) and not value)
