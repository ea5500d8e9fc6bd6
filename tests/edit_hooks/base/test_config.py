"""Editor configurations: validation against annotations, earlier names, JSON-able values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from edit_hooks import EditingError
from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.registry import editor_class
from edit_hooks.utils.settings.numbers import POSITIVE


@dataclass(kw_only=True)
class Config(EditorConfig):
    lr: float = config_field("step size", default=0.1)
    rank: int | None = config_field("rank", within=POSITIVE, default=None)
    mode: Literal["a", "b"] = config_field("mode", default="a")
    normalize: bool = config_field("switch", default=True)
    names: list[str] = config_field("names", default_factory=list)
    table: dict[str, list[float]] = config_field("table", default_factory=dict)


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("lr", "5e-4", 5e-4),  # YAML reads 5e-4 as text
        ("lr", 1, 1.0),
        ("rank", "8", 8),
        ("rank", None, None),
        ("rank", 8.0, 8),
        ("layers", (3, "4"), [3, 4]),
        ("table", {"x": ["1", 2]}, {"x": [1.0, 2.0]}),
    ],
)
def test_values_are_converted_to_their_annotation(setting: str, value: Any, expected: Any) -> None:
    converted = getattr(Config.from_mapping({setting: value}), setting)
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    ("setting", "value", "accepted"),
    [
        ("lr", "fast", "float"),
        ("lr", True, "float"),
        ("lr", 10**400, "float"),
        ("rank", 1.5, "int | None"),
        ("mode", "c", "'a' or 'b'"),
        ("mode", ["a"], "'a' or 'b'"),
        ("normalize", "yes", "bool"),
        ("names", "one", r"list\[str\]"),
        ("names", [1], "str"),
        ("table", [], "dict"),
        ("layers", 5, r"list\[int\] | None"),
    ],
)
def test_other_values_are_errors_with_the_accepted_type(setting: str, value: Any, accepted: str) -> None:
    with pytest.raises(EditingError, match=f"editor setting {setting!r} is .*; accepted: .*{accepted}"):
        Config.from_mapping({setting: value})


@pytest.mark.parametrize(
    ("setting", "value", "needed"),
    [
        ("lr", "nan", "a finite number"),
        ("lr", float("inf"), "a finite number"),
        ("rank", 0, "a positive number"),
        ("table", {"x": [1, "-inf"]}, "a finite number"),
        ("layers", [0, -1], "zero or a positive number"),
        ("seed", 2**32, "a whole number from 0"),
    ],
)
def test_numbers_out_of_range_are_errors_with_the_range(setting: str, value: Any, needed: str) -> None:
    with pytest.raises(EditingError, match=f"editor setting {setting!r} is .*; {needed}.* is needed"):
        Config.from_mapping({setting: value})


def test_unknown_settings_are_errors_with_near_misses() -> None:
    with pytest.raises(EditingError, match=r"unknown editor setting 'lrr'\. Did you mean 'lr'"):
        Config.from_mapping({"lrr": 1})


def test_all_settings_are_written_as_json() -> None:
    settings = Config.from_mapping({"table": {"x": [1]}}).to_dict()
    assert json.loads(json.dumps(settings)) == settings
    assert settings["table"] == {"x": [1.0]} and settings["lr"] == 0.1 and "layers" in settings
    assert Config.from_mapping(settings) == Config.from_mapping({"table": {"x": [1]}})


def test_tensors_are_described_by_shape_and_content() -> None:
    """A second moment can be given as a matrix; edits with another matrix have another identity."""
    matrices = [torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])]
    config_class = editor_class("memit").config_class
    described = [
        json.dumps(config_class.from_mapping({"second_moments": {3: matrix}}).to_dict()) for matrix in matrices
    ]
    assert described[0] != described[1] and '"shape": [2, 2]' in described[0]
