"""Settings with a closed set of values, and switches."""

from __future__ import annotations

from typing import Any

import pytest

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.options import choice, switch


def test_a_choice_has_a_default_and_near_misses() -> None:
    assert choice({}, "color", ("red", "blue"), "blue") == "blue"
    assert choice({"color": "red"}, "color", ("red", "blue"), "blue") == "red"
    with pytest.raises(EditingError, match=r"color='blu' is unknown\. Did you mean 'blue'\? Accepted: red, blue"):
        choice({"color": "blu"}, "color", ("red", "blue"), "red")


@pytest.mark.parametrize(("value", "expected"), [(True, True), ("false", False), ("True", True)])
def test_switches_understand_the_command_line(value: Any, expected: bool) -> None:
    assert switch({"generate": value}, "generate", not expected) is expected


@pytest.mark.parametrize("value", [None, "yes", 1])
def test_other_values_of_a_switch_are_errors(value: Any) -> None:
    with pytest.raises(EditingError, match="Accepted: true, false"):
        switch({"generate": value}, "generate", True)
