"""Judge settings: presets, checks, keys, and the settings that make another judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edit_hooks.utils.errors import EditingError
from judges.settings import JudgeSettings, read_settings


@pytest.mark.parametrize(
    ("preset", "prompt"), [("published_setting", "correctness_v1"), ("published_wording", "published_wording")]
)
def test_the_published_presets_differ_in_the_prompt_alone(preset: str, prompt: str) -> None:
    settings = read_settings(preset)
    assert (settings.backend, settings.model, settings.temperature) == ("openai", "gpt-4o-mini", 0.0)
    assert (settings.system, settings.prompt) == ("", prompt)
    assert settings.key_variable == "OPENAI_API_KEY"
    assert read_settings({"preset": preset, "concurrency": 2}).concurrency == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("publishd_setting", "Did you mean 'published_setting'"),
        ({"backend": "openai"}, "model missing"),
        ({"backend": "openai", "model": "m", "concurency": 2}, "Did you mean 'concurrency'"),
        ({"backend": "grpc", "model": "m"}, "Accepted: openai, hf"),
        ({"preset": "paper"}, "Accepted: published_setting, published_wording"),
        ({"backend": "openai", "model": "m", "timeout": 0}, "positive number"),
        ({"backend": "openai", "model": "m", "max_calls": 1.5}, "whole number"),
        ({"backend": "openai", "model": "m", "min_coverage": 2}, "a share from 0 to 1"),
        ({"backend": "openai", "model": "m", "dry_run": "yes"}, "switch"),
        ({"backend": "openai", "model": "m", "base_url": "localhost:8000"}, "http://HOST:PORT"),
        ({"backend": "openai", "model": ""}, "no default"),
        ("{bad", "not valid JSON"),
        ("missing.yaml", "cannot be read"),
        (3, "names no judge"),
        ({"backend": "openai", "model": "m", "prompt": None}, "prompt is a NoneType"),
        ({"backend": "openai", "model": "m", 1: 2}, "unknown judge setting '1'"),
        ({"backend": "openai", "model": "m", "extra": [1]}, "extra is no mapping"),
        ({"backend": "openai", "model": "m", "ask_again": "all"}, "Accepted: unscored"),
        ({"backend": "openai", "model": "m", "served_as": " "}, "served_as is a name for the server"),
        ({"backend": "hf", "model": "m", "served_as": "x"}, "served_as is a name for the server"),
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
        {"backend": "openai", "model": "m", "extra": {"api_token": "sk-secret"}},
        {"backend": "openai", "model": "m", "extra": {"user": [{"accessToken": "sk-secret"}]}},
        {"backend": "openai", "model": "m", "extra": {"auth": {"hf_token": "sk-secret"}}},
        {"backend": "openai", "model": "m", "extra": {"token": "sk-secret"}},
        {"backend": "openai", "model": "m", "extra": {"bearer": "sk-secret"}},
        {"backend": "openai", "model": "m", "api_key_env": "sk-secret"},
        {"backend": "openai", "model": "m", "base_url": "https://me:sk-secret@host/v1"},
        {"backend": "openai", "model": "m", "base_url": "https://host/v1?key=sk-secret"},
    ],
)
def test_a_key_among_the_settings_is_refused_and_not_repeated(mapping: dict[str, Any]) -> None:
    with pytest.raises(EditingError) as caught:
        read_settings(mapping)
    assert "sk-secret" not in str(caught.value)


def test_settings_about_tokens_of_text_are_no_keys() -> None:
    extra = {
        **{"max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 1, "token_limit": 9, "eos_token": "</s>"},
        **{"stop_token_ids": [2], "allowed_token_ids": [1], "skip_special_tokens": True, "thinking_token_budget": 8},
    }
    assert read_settings({"backend": "openai", "model": "m", "max_tokens": 9, "extra": extra}).extra == extra


def test_a_named_server_is_the_same_judge_at_every_address() -> None:
    given = {"backend": "openai", "model": "m"}
    first, second = (JudgeSettings(**given, base_url=f"http://node{n}:80{n}/v1", served_as="vllm-bf16") for n in (1, 2))
    assert first.identity == second.identity and first.identity["served_as"] == "vllm-bf16"
    assert (first.url, first.key_variable) == ("http://node1:801/v1", "LM_EDIT_JUDGE_API_KEY")
    assert first.identity != JudgeSettings(**given, base_url="http://node1:801/v1", served_as="vllm-fp8").identity
    # unchanged without the setting: the keys of stored verdicts
    address = JudgeSettings(**given, base_url="http://node1:801/v1").identity
    assert list(address) == ["backend", "model", "max_reply_tokens", "temperature", "seed", "extra", "base_url"]


def test_the_identity_holds_only_what_changes_replies(tmp_path: Path) -> None:
    plain = JudgeSettings(backend="openai", model="m")
    assert JudgeSettings(backend="openai", model="m", concurrency=3, timeout=5, max_calls=9).identity == plain.identity
    for change in ({"model": "n"}, {"temperature": 0.5}, {"max_reply_tokens": 9}, {"base_url": "http://h/v1"}):
        assert JudgeSettings(**{"backend": "openai", "model": "m"} | change).identity != plain.identity
    (tmp_path / "config.json").write_text("{}")
    identity = JudgeSettings(backend="hf", model=str(tmp_path)).identity
    (tmp_path / "config.json").write_text("{ }")
    assert JudgeSettings(backend="hf", model=str(tmp_path)).identity != identity
