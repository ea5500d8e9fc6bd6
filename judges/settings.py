"""Which judge: presets, settings and where they come from. API keys never pass through here, only variable names do."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from edit_hooks.utils.errors import EditingError, near_misses, unknown_keys_error

ENVIRONMENT = "LM_EDIT_JUDGE"


OFF = "off"


BACKENDS = ("openai", "hf")


OPENAI_URL = "https://api.openai.com/v1"


HOW_TO = (
    "--metadata judge=published (gpt-4o-mini; OPENAI_API_KEY in the environment), "
    "judge=openai:MODEL@http://HOST:PORT/v1 (any compatible server), judge=hf:MODEL (a local model), judge=FILE.yaml, "
    f"or the same in the environment variable {ENVIRONMENT}"
)


# Named settings; a preset is the start, other keys beside it replace its values.
PRESETS: dict[str, dict[str, Any]] = {
    # What the WILD paper states: model, temperature, empty system message, one letter. The wording is ours.
    "published": {"backend": "openai", "model": "gpt-4o-mini", "temperature": 0.0, "system": ""},
}


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Everything about a model judge, checked on construction.

    Args:
        backend: ``openai`` (any compatible server) or ``hf`` (a local Hugging Face model in this process).
        model: the judge model, always named explicitly.
        prompt: name of a shipped prompt, or path of your own.
        system: system message in place of the prompt's own; ``None`` leaves that.
        temperature: ``None`` leaves it to the server (some models accept no other).
        max_reply_tokens: bound of a reply; ``None`` sends none. Judges that think aloud need hundreds.
        seed: sent to the server when given.
        extra: further fields of the request's body, for what a server needs on top.
        base_url: the server; without one ``OPENAI_BASE_URL`` or OpenAI's own.
        api_key_env: name of the environment variable that holds the key. Without one ``OPENAI_API_KEY``, but for a
            ``base_url`` given here ``LM_EDIT_JUDGE_API_KEY``, so that no server is sent another one's key.
        concurrency: requests at a time, in each process.
        timeout: seconds without a sign of life after which an attempt has failed.
        max_attempts: attempts per answer.
        max_wait: longest pause before an attempt, in seconds; a server that asks for a longer one fails the answer.
        give_up_after: answers failing in a row after which no more are asked.
        max_calls, max_tokens: budget of one task in one process; a run that plainly exceeds it is refused before the
            first call, one that turns out to exceed it asks no more.
        min_coverage: least share of answers with a verdict, 0..1; a run below it fails.
        dry_run: count calls and tokens, ask nothing; verdicts stay unscored.
        store: folder of the verdict store; ``off`` keeps nothing. Default: in the user's cache folder.
        revision, dtype, device, batch_size: of a local model. ``device`` is by default a GPU if there is one.
        allow_edited_checkpoint: a local judge may be loaded from the checkpoint that is being edited.
    """

    backend: str
    model: str
    prompt: str = "correctness_v1"
    system: str | None = None
    temperature: float | None = 0.0
    max_reply_tokens: int | None = 16
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    base_url: str | None = None
    api_key_env: str | None = None
    concurrency: int = 8
    timeout: float = 60.0
    max_attempts: int = 6
    max_wait: float = 60.0
    give_up_after: int = 10
    max_calls: int | None = None
    max_tokens: int | None = None
    min_coverage: float = 0.95
    dry_run: bool = False
    store: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str | None = None
    batch_size: int = 8
    allow_edited_checkpoint: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise EditingError(f"judge backend {self.backend!r} is unknown. Accepted: {', '.join(BACKENDS)}.")
        if not isinstance(self.model, str) or not self.model.strip():
            raise EditingError("judge: name the judge model; there is no default.")
        _check_types(self)
        if not 0 <= self.min_coverage <= 1:
            raise EditingError(f"judge min_coverage={self.min_coverage} is not a share between 0 and 1.")
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z][A-Z0-9_]*", self.api_key_env):
            # The value is not repeated: it may be a key.
            raise EditingError(
                "judge api_key_env is not the name of an environment variable (capitals, digits, underscores); "
                "the key itself belongs into that variable only."
            )
        if self.backend == "openai":
            _check_url(self.url)

    @property
    def url(self) -> str:
        """The server that is asked."""
        return (self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")

    @property
    def key_variable(self) -> str:
        """Name of the environment variable with the key."""
        return self.api_key_env or ("LM_EDIT_JUDGE_API_KEY" if self.base_url else "OPENAI_API_KEY")

    @property
    def identity(self) -> dict[str, Any]:
        """What a reply depends on besides the prompt: goes into the store's keys and the results."""
        shared = {"backend": self.backend, "model": self.model, "max_reply_tokens": self.max_reply_tokens}
        if self.backend == "hf":
            return {**shared, "revision": self.revision, "dtype": self.dtype, "files": _state_of(self.model)}
        asked = {"temperature": self.temperature, "seed": self.seed, "extra": dict(self.extra)}
        return {**shared, **asked, "base_url": self.url}


def read_settings(given: Any, folder: Path | None = None) -> JudgeSettings:
    """Settings from what a user gave.

    Args:
        given: a preset's name, ``openai:MODEL``, ``openai:MODEL@URL``, ``hf:MODEL``, a YAML file, JSON text, or a
            mapping with our keys and optionally ``preset``.
        folder: where a relative ``prompt`` path of a YAML file begins.

    Raises:
        EditingError: for unknown presets, keys and values. Values are not repeated where one may be a key.
    """
    if isinstance(given, Mapping):
        return _from_mapping(given, folder)
    if not isinstance(given, str) or not given:
        raise EditingError(f"judge={given!r} names no judge. Accepted: {HOW_TO}.")
    if given.lstrip().startswith("{"):
        try:
            return _from_mapping(json.loads(given), folder)
        except json.JSONDecodeError as error:
            raise EditingError(f"judge: the JSON text cannot be read ({error.msg}, column {error.colno}).") from None
    if given in PRESETS:
        return _from_mapping({"preset": given}, folder)
    backend, found, model = given.partition(":")
    if found and backend in BACKENDS:
        name, at, url = model.partition("@http") if backend == "openai" else (model, "", "")
        return _from_mapping({"backend": backend, "model": name} | ({"base_url": f"http{url}"} if at else {}), folder)
    path = Path(given).expanduser()
    if path.suffix in (".yaml", ".yml", ".json"):
        return _from_file(path)
    raise EditingError(f"judge {given!r} is unknown.{near_misses(given, PRESETS)} Accepted: {HOW_TO}.")


def _from_file(path: Path) -> JudgeSettings:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EditingError(f"judge settings {path} cannot be read: {type(error).__name__}.") from error
    if not isinstance(content, Mapping):
        raise EditingError(f"judge settings {path} hold no mapping of our settings.")
    return _from_mapping(content, path.parent)


def _from_mapping(given: Mapping[str, Any], folder: Path | None) -> JudgeSettings:
    known = [item.name for item in dataclasses.fields(JudgeSettings)]
    if any(_is_secret(name) and name != "api_key_env" for name in _names(given)):
        raise EditingError(
            "judge: API keys are read from the environment only, since settings are written to results. Put the key "
            "into OPENAI_API_KEY, or into the variable that api_key_env names."
        )
    if unknown := set(given) - {*known, "preset"}:
        raise unknown_keys_error("judge setting", unknown, [*known, "preset"])
    preset = given.get("preset")
    if preset is not None and preset not in PRESETS:
        raise EditingError(f"judge preset {preset!r} is unknown. Accepted: {', '.join(PRESETS)}.")
    values = {**PRESETS.get(preset or "", {}), **{key: value for key, value in given.items() if key != "preset"}}
    if missing := [name for name in ("backend", "model") if name not in values]:
        raise EditingError(f"judge: {' and '.join(missing)} missing. Accepted: {HOW_TO}.")
    if folder is not None and (folder / str(values.get("prompt", ""))).is_file():
        values["prompt"] = str(folder / str(values["prompt"]))
    return JudgeSettings(**values)


def _state_of(model: str) -> str | None:
    """SHA-256 (hex) over names, sizes and times of a local model's files; ``None`` for a model of the hub."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _names(given: Any) -> Iterator[str]:
    """All keys of nested mappings."""
    if isinstance(given, Mapping):
        for name, value in given.items():
            yield str(name)
            yield from _names(value)


def _is_secret(name: str) -> bool:
    return re.search(r"key|secret|password|authorization", name, re.IGNORECASE) is not None


_POSITIVE = ("concurrency", "timeout", "max_attempts", "give_up_after", "batch_size", "max_reply_tokens")


_WHOLE = (
    "concurrency",
    "max_attempts",
    "give_up_after",
    "batch_size",
    "max_reply_tokens",
    "seed",
    "max_calls",
    "max_tokens",
)


_NUMBERS = (*_WHOLE, "timeout", "max_wait", "min_coverage", "temperature")


_OPTIONAL = ("max_reply_tokens", "seed", "max_calls", "max_tokens", "temperature")


_TEXTS = ("prompt", "system", "base_url", "store", "revision", "dtype", "device")


def _check_types(settings: JudgeSettings) -> None:
    for name in _NUMBERS:
        value = getattr(settings, name)
        if value is None and name in _OPTIONAL:
            continue
        wanted = int if name in _WHOLE else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted) or value < 0 or (name in _POSITIVE and value == 0):
            kind = "whole number" if name in _WHOLE else "number"
            raise EditingError(f"judge {name}={value!r}: a {'positive ' if name in _POSITIVE else ''}{kind} is needed.")
    for name in _TEXTS:
        if not isinstance(value := getattr(settings, name), (str, type(None))):
            raise EditingError(f"judge {name} is a {type(value).__name__}; a text is needed.")
    for name in ("dry_run", "allow_edited_checkpoint"):
        if not isinstance(value := getattr(settings, name), bool):
            raise EditingError(f"judge {name}={value!r} is not a switch. Accepted: true, false.")
    if not isinstance(settings.extra, Mapping):
        raise EditingError("judge extra: a mapping of fields for the request's body is needed.")


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        # Not repeated: this is where a key may be.
        raise EditingError("judge base_url holds a user name, password or query; give the plain address.")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EditingError(f"judge base_url={url!r} is no address; write http://HOST:PORT/v1.")
