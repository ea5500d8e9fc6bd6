"""Seeded mutations of JSON records: what damaged, hand-written and foreign files hold."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 7, 1.5, 10**30, "", "  ", "{}", "{} and {}", "a\nb", " x ", "né ", "\ud800", "x" * 300,
    [], [[]], ["a", 1], [{}], [None], {}, {"str": "deep"}, {"prompt": "deep", "loc": "deep"},
)  # fmt: skip

# Container of a value, and its key or index.
Place = tuple[Any, Any]


def places(value: Any) -> Iterator[Place]:
    """All places of a record, from the outermost inwards."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield value, key
        yield from places(inner)


def _delete(rng: random.Random, box: Any, key: Any, others: list[Place]) -> None:
    del box[key]


def _replace(rng: random.Random, box: Any, key: Any, others: list[Place]) -> None:
    box[key] = copy.deepcopy(rng.choice(ODD_VALUES))


def _write(rng: random.Random, box: Any, key: Any, others: list[Place]) -> None:
    box[key] = f"word{rng.randrange(10**6)}"


def _rename(rng: random.Random, box: Any, key: Any, others: list[Place]) -> None:
    if isinstance(box, dict):
        box[rng.choice((f"{key}s", key[:-1], key.upper(), f"my_{key}", "note"))] = box.pop(key)


def _add(rng: random.Random, box: Any, key: Any, others: list[Place]) -> None:
    if isinstance(box, dict):
        box[f"note_{rng.randrange(10)}"] = copy.deepcopy(rng.choice(ODD_VALUES))
    else:
        box.insert(key, copy.deepcopy(rng.choice((box[key], *ODD_VALUES))))


def _wrap(rng: random.Random, box: Any, key: Any, others: list[Place]) -> None:
    box[key] = rng.choice(([box[key]], {"str": box[key]}, str(box[key])))


def _swap(rng: random.Random, box: Any, key: Any, others: list[Place]) -> None:
    other_box, other_key = rng.choice(others)
    value = copy.deepcopy(other_box[other_key])
    other_box[other_key] = copy.deepcopy(box[key])
    box[key] = value


OPERATIONS: tuple[Callable[[random.Random, Any, Any, list[Place]], None], ...] = (
    _delete, _replace, _write, _rename, _add, _wrap, _swap,
)  # fmt: skip


def mutate(record: dict[str, Any], rng: random.Random) -> Any:
    """A copy of a record with one to three random changes; rarely something that is no record at all."""
    if rng.random() < 0.01:
        return copy.deepcopy(rng.choice(ODD_VALUES))
    changed = copy.deepcopy(record)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(changed))
        if found:
            rng.choice(OPERATIONS)(rng, *rng.choice(found), found)
    return changed
