"""Checks of fields and tensors, each refusal with the field."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edit_hooks import EditingError
from edit_hooks.deltas.schema import (
    MAX_DEPTH,
    Record,
    Tensor,
    either,
    flag,
    list_of,
    mapping_of,
    nullable,
    number,
    of_file,
    one_of,
    read_field,
    require_shallow,
    text,
    whole,
)
from edit_hooks.utils.settings.numbers import NON_NEGATIVE

CHECK = Record(
    {"name": text, "kind": one_of("near", "far", None)},
    {
        "sizes": list_of(whole()),
        "pair": list_of(number(), 2),
        "on": nullable(flag),
        "more": mapping_of(either(flag, text)),
    },
)
GOOD = {"name": "x", "kind": None, "sizes": [1, 2], "pair": [0.5, 1], "on": None, "more": {"a": True, "b": "c"}}


def test_a_good_record_is_accepted() -> None:
    for record in (GOOD, {"name": "", "kind": "far"}):
        before = copy.deepcopy(record)
        CHECK("it", record)
        assert record == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 7}, "it.name is 7; a text is needed"),
        ({"kind": "fr"}, "it.kind is 'fr'; one of near, far, None is needed. Did you mean 'far'"),
        ({"kind": False}, "it.kind is false"),
        ({"sizes": [1, -2]}, r"it.sizes\[1\] is -2; a whole number >= 0"),
        ({"sizes": [True]}, r"it.sizes\[0\] is True"),
        ({"sizes": {}}, "it.sizes is a mapping of 0; a list is needed"),
        ({"pair": [1]}, "it.pair is a list of 1; a list of 2 is needed"),
        ({"pair": [1, math.nan]}, r"it.pair\[1\] is nan; a finite number"),
        ({"on": 1}, "it.on is 1; true or false is needed"),
        ({"more": {"a": 1}}, "it.more.a is 1; a text is needed"),
        ({"nam": "x"}, "it has the unknown field 'nam'. Did you mean 'name'"),
    ],
)
def test_a_refusal_names_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        CHECK("it", {**GOOD, **changes})


def test_missing_fields_and_other_values_are_refused() -> None:
    with pytest.raises(EditingError, match="it lacks 'kind'"):
        CHECK("", {"name": "x"})
    for value in (None, 7, "x", [GOOD], {1: 2}):
        with pytest.raises(EditingError, match="a mapping of names is needed"):
            CHECK("it", value)
    with pytest.raises(EditingError, match="some file: it lacks"), of_file("some file"):
        CHECK("", {"name": "x"})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
)
def test_no_value_raises_anything_else(value: object) -> None:
    for candidate in (value, *({**GOOD, name: value} for name in GOOD)):
        try:
            CHECK("it", candidate)
        except EditingError as error:
            assert "it" in str(error)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, 3, dtype=torch.long), "tensor x is int64; float32, float16, bfloat16, float64 is needed"),
        (torch.ones(2), r"tensor x has shape \[2\]; 2 dimensions"),
        (torch.ones(2, 4), r"tensor x has shape \[2, 4\]; 3 is needed in place of 4"),
        (torch.full((2, 3), torch.inf), "tensor x has entries that are not finite"),
        (-torch.ones(2, 3), "tensor x has the entry -1.0; zero or a positive number"),
    ],
)
def test_tensors_are_checked(tensor: torch.Tensor, message: str) -> None:
    sizes = {"F": 3}
    Tensor("N F", within=NON_NEGATIVE).check("x", torch.ones(2, 3), sizes)
    assert sizes == {"N": 2, "F": 3}
    with pytest.raises(EditingError, match=message):
        Tensor("N F", within=NON_NEGATIVE).check("x", tensor, sizes)
    Tensor("_ F").check("x", torch.ones(9, 3), sizes)


def test_nested_values_are_refused_beyond_a_depth() -> None:
    value: object = 0
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    require_shallow("it", value)
    with pytest.raises(EditingError, match="it is nested more than 64 levels deep"):
        require_shallow("it", {"a": [value]})


def test_entries_of_a_header_are_parsed_strictly() -> None:
    header = {"strict": "[NaN]"}
    for name, message in (("strict", "strict: NaN is not a JSON number"), ("no", "its header has no 'no'")):
        with pytest.raises(EditingError, match=message):
            read_field(header, name)
    assert math.isnan(read_field(header, "strict", strict=False)[0])
