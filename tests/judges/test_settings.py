"""Judge settings: presets, checks, keys, and the settings that make another judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edit_hooks.utils.errors import EditingError
from judges.settings import JudgeSettings, read_settings


def test_the_published_preset() -> None:
    settings = read_settings("published")
    assert (settings.backend, settings.model, settings.temperature) == ("openai", "gpt-4o-mini", 0.0)
    assert settings.system == ""
    assert settings.key_variable == "OPENAI_API_KEY"
    assert read_settings({"preset": "published", "concurrency": 2}).concurrency == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("publishd", "Did you mean 'published'"),
        ({"backend": "openai"}, "model missing"),
        ({"backend": "openai", "model": "m", "concurency": 2}, "Did you mean 'concurrency'"),
        ({"backend": "grpc", "model": "m"}, "Accepted: openai, hf"),
        ({"preset": "paper"}, "Accepted: published"),
        ({"backend": "openai", "model": "m", "timeout": 0}, "positive number"),
        ({"backend": "openai", "model": "m", "max_calls": 1.5}, "whole number"),
        ({"backend": "openai", "model": "m", "min_coverage": 2}, "a share from 0 to 1"),
        ({"backend": "openai", "model": "m", "dry_run": "yes"}, "switch"),
        ({"backend": "openai", "model": "m", "base_url": "localhost:8000"}, "http://HOST:PORT"),
        ({"backend": "openai", "model": ""}, "no default"),
        ("{bad", "cannot be read"),
        ("missing.yaml", "cannot be read"),
        (3, "names no judge"),
        ({"backend": "openai", "model": "m", "prompt": None}, "prompt is a NoneType"),
        ({"backend": "openai", "model": "m", 1: 2}, "unknown judge setting '1'"),
        ({"backend": "openai", "model": "m", "extra": [1]}, "extra is no mapping"),
    ],
)
def test_invalid_settings_are_refused(source: Any, message: str) -> None:
    with pytest.raises(EditingError, match=message):
        read_settings(source)


@pytest.mark.parametrize(
    "mapping",
    [
        {"backend": "openai", "model": "m", "api_key": "sk-secret"},
        {"backend": "openai", "model": "m", "openai_api_key": "sk-secret"},
        {"backend": "openai", "model": "m", "extra": {"headers": {"Authorization": "sk-secret"}}},
        {"backend": "openai", "model": "m", "api_key_env": "sk-secret"},
        {"backend": "openai", "model": "m", "base_url": "https://me:sk-secret@host/v1"},
        {"backend": "openai", "model": "m", "base_url": "https://host/v1?key=sk-secret"},
    ],
)
def test_a_key_among_the_settings_is_refused_and_not_repeated(mapping: dict[str, Any]) -> None:
    with pytest.raises(EditingError) as caught:
        read_settings(mapping)
    assert "sk-secret" not in str(caught.value)


def test_the_identity_holds_only_what_changes_replies(tmp_path: Path) -> None:
    plain = JudgeSettings(backend="openai", model="m")
    assert JudgeSettings(backend="openai", model="m", concurrency=3, timeout=5, max_calls=9).identity == plain.identity
    for change in ({"model": "n"}, {"temperature": 0.5}, {"max_reply_tokens": 9}, {"base_url": "http://h/v1"}):
        assert JudgeSettings(**{"backend": "openai", "model": "m"} | change).identity != plain.identity
    (tmp_path / "config.json").write_text("{}")
    identity = JudgeSettings(backend="hf", model=str(tmp_path)).identity
    (tmp_path / "config.json").write_text("{ }")
    assert JudgeSettings(backend="hf", model=str(tmp_path)).identity != identity
