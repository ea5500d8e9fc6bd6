"""Check of a whole saved edit: its tensors, metadata, contexts and hooks, each by its schema."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from edit_hooks.deltas.context_edit import MOST_ROUNDS
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.schema import (
    Record,
    Tensor,
    check_numeric,
    flag,
    list_of,
    mapping_of,
    nullable,
    number,
    one_of,
    require_shallow,
    text,
    whole,
)
from edit_hooks.prompt_context import require_separator
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import COSINE, NON_NEGATIVE, POSITIVE, require_number


class HasContent(Protocol):
    """The content of a :class:`~edit_hooks.deltas.delta.Delta`, with named tuples (left, right, ...) as factors."""

    meta: dict[str, Any]
    diagnostics: dict[str, Any]
    factors: Any
    dense: dict[str, torch.Tensor]
    masks: dict[str, torch.Tensor]
    stream_state: dict[str, torch.Tensor]
    hook_edit: HookEdit | None


LEFT, RIGHT = Tensor("d r"), Tensor("f r")


def _request(what: str, value: Any) -> None:
    EditRequest.from_dict(value, what)


def _separator(what: str, value: Any) -> None:
    require_separator(value, what)


def _metadata(what: str, value: Any) -> None:
    """Metadata of an edit, or of a sum of edits."""
    META(what, value)


_MODEL = nullable(mapping_of())  # the parts of an identity
META = Record(
    {},
    {
        "editor": nullable(text),
        "config": nullable(mapping_of()),
        "requests": nullable(list_of(_request)),
        "model": _MODEL,
        "description": nullable(Record({}, {"model": _MODEL, "state_before": nullable(text)}, is_open=True)),
        "state_before": nullable(text),
        "state_after": nullable(text),
        "parts": list_of(_metadata),
    },
    is_open=True,
)


def _measured(what: str, value: Any) -> None:
    """A number that was measured: NaN and infinity are values."""
    if not isinstance(value, float) or math.isfinite(value):
        require_number(what, value)


FACTS = Record(
    {},
    {
        "effects": Record(
            {},
            {
                "first_token_kl": _measured,
                "wrecked": flag,
                "target_nll_before": _measured,
                "target_nll_after": _measured,
                "target_nlls": list_of(list_of(_measured, 2)),
            },
        ),
        "cost": Record({}, dict.fromkeys(("seconds", "peak_memory_gib", "model_memory_gib"), number(NON_NEGATIVE))),
        "warnings": list_of(text),
        "unusable": mapping_of(text),
    },
)
CONTEXT = Record(
    {
        "prompt": text,
        "target_new": text,
        "demonstrations": list_of(text),
        "include_fact": flag,
        "num_facts": whole(POSITIVE),
        "embedder": text,
        "min_similarity": nullable(number(COSINE)),
        "rounds": whole(replace(MOST_ROUNDS, text="a whole number from 0 to 1000", least=0)),
        "memory": nullable(Record({"artifact": text, "digest": text})),
        "separator": _separator,
        "choice": one_of("released", "named", None),
    },
)


def check_content(delta: HasContent) -> None:
    """Check the content of an edit, apart from the model that it is for.

    Raises:
        EditingError: it names the field.
    """
    check_metadata(delta.meta)
    mapping_of()("diagnostics", delta.diagnostics)
    require_shallow("diagnostics", delta.diagnostics)
    for name, factor in delta.factors.items():
        sizes: dict[str, int] = {}
        LEFT.check(f"left/{name}", factor.left, sizes)
        RIGHT.check(f"right/{name}", factor.right, sizes)
        if factor.left.dtype != factor.right.dtype:
            raise EditingError(f"tensors left/{name} and right/{name} have types that differ.")
    _check_masks(delta)
    for name, tensor in delta.dense.items():
        if not tensor.dim():
            raise EditingError(f"tensor dense/{name} has no dimension; the shape of a parameter is needed.")
        Tensor(" ".join(f"size{place}" for place in range(tensor.dim()))).check(f"dense/{name}", tensor, {})
    for name, tensor in delta.stream_state.items():
        check_numeric(f"carry/{name}", tensor)
    if delta.hook_edit is not None:
        delta.hook_edit.check_content()


def check_metadata(meta: Any) -> None:
    """Check the metadata of an edit, as of a file beside an exported adapter.

    Raises:
        EditingError: it names the field.
    """
    require_shallow("meta", meta)
    META("meta", meta)


def check_facts(value: Any) -> Mapping[str, Any]:
    """The facts in a file's header."""
    FACTS("facts", value)
    facts: Mapping[str, Any] = value
    return facts


def check_contexts(value: Any) -> list[Mapping[str, Any]]:
    """The contexts in a file's header."""
    list_of(CONTEXT)("contexts", value)
    contexts: list[Mapping[str, Any]] = value
    return contexts


def _check_masks(delta: HasContent) -> None:
    for name, packed in delta.masks.items():
        if name not in delta.factors:
            raise EditingError(f"tensor mask/{name} belongs to no factors.")
        factor = delta.factors[name]
        num_bytes = -(-len(factor.left) * len(factor.right) // 8)
        Tensor(str(num_bytes), "bits").check(f"mask/{name}", packed, {})


def sorted_tensors(
    tensors: Mapping[str, torch.Tensor], prefixes: tuple[str, ...]
) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by the prefix of their names in a file, and by the rest.

    Raises:
        EditingError: for names with another prefix or nothing behind it.
    """
    by_prefix: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in prefixes}
    for key, tensor in tensors.items():
        prefix, _, name = key.partition("/")
        if prefix not in by_prefix or not name:
            raise EditingError(f"tensor {key!r} is unknown; names begin with {'/, '.join(prefixes)}/.")
        by_prefix[prefix][name] = tensor
    return by_prefix
