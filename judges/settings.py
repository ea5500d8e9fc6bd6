"""Settings of model judges: presets, sources and checks.

Settings are written to results, so they never hold an API key, only the name of the environment variable with it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edit_hooks.utils.errors import EditingError, near_misses, unknown_keys_error
from edit_hooks.utils.settings.numbers import (
    NON_NEGATIVE,
    POSITIVE,
    SHARE,
    require_number,
    require_numbers,
    require_whole,
)
from edit_hooks.utils.storage.files import user_path
from edit_hooks.utils.storage.json_io import parse_json
from edit_hooks.utils.storage.yaml_io import read_yaml
from judges.checkpoint import commit_of, folder_digest, folder_of
from judges.keys import refuse_keys

JUDGE_VARIABLE = "LM_EDIT_JUDGE"  # environment variable with the default judge
OFF = "off"
BACKENDS = ("openai", "hf")
ASK_AGAIN = ("unscored",)
OPENAI_URL = "https://api.openai.com/v1"

HOW_TO = (
    "--metadata judge=published_setting (gpt-4o-mini; OPENAI_API_KEY in the environment; published_wording for the "
    "authors' own prompt), "
    "judge=openai:MODEL@http://HOST:PORT/v1 (any compatible server), judge=hf:MODEL (a local model), judge=FILE.yaml, "
    f"or the same in the environment variable {JUDGE_VARIABLE}"
)

# As the released code of WILD: model, temperature, empty system message, one-letter reply.
_WILD: dict[str, Any] = {"backend": "openai", "model": "gpt-4o-mini", "temperature": 0.0, "system": ""}

# Named settings. Keys given beside a preset override its values.
PRESETS: dict[str, dict[str, Any]] = {
    "published_setting": _WILD,  # with the default prompt, whose wording is ours
    "published_wording": {**_WILD, "prompt": "published_wording"},  # with the authors' prompt
}

# Numbers: accepted values
_WHOLE = {
    "concurrency": POSITIVE,
    "max_attempts": POSITIVE,
    "give_up_after": POSITIVE,
    "batch_size": POSITIVE,
    "max_reply_tokens": POSITIVE,
    "seed": NON_NEGATIVE,
    "max_calls": NON_NEGATIVE,
    "max_tokens": NON_NEGATIVE,
}
_REAL = {"timeout": POSITIVE, "max_wait": NON_NEGATIVE, "min_coverage": SHARE, "temperature": NON_NEGATIVE}
_NULLABLE = ("max_reply_tokens", "seed", "max_calls", "max_tokens", "temperature")
_TEXTS = (
    "prompt",
    "system",
    "think_end_token",
    "base_url",
    "served_as",
    "store",
    "ask_again",
    "revision",
    "dtype",
    "device",
)
# Words before ``token`` in names of settings about tokens of text
_TEXT_TOKENS = {"eos", "bos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "end", "special", "first", "per"}
_SWITCHES = ("dry_run", "allow_edited_checkpoint")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Settings of a model judge, validated on construction.

    Args:
        backend: ``openai`` (any compatible server) or ``hf`` (a Hugging Face model in this process).
        model: the judge model; there is no default.
        prompt: name of a shipped prompt, ``published_wording`` (downloaded), or path of a prompt file.
        system: system message that replaces the prompt's own; ``None`` keeps the prompt's own.
        temperature: sampling temperature; ``None`` sends none (some models accept only their default).
        max_reply_tokens: token limit of a reply; ``None`` sends none. Reasoning models need hundreds.
        seed: sampling seed; sent to the server if set.
        think_end_token: text that ends the thought of every reply, such as ``</think>``; only what follows the last one
            is read, and a reply without one has no answer. Common markers of thoughts are found without it.
        extra: further fields of the request body.
        base_url: address of the server. Default: ``OPENAI_BASE_URL``, else OpenAI's own.
        served_as: name of the server, which replaces its address in the judge's identity, so that the same model at
            another host or port is the same judge.
        api_key_env: name of the environment variable with the API key. Default: ``OPENAI_API_KEY``, but
            ``LM_EDIT_JUDGE_API_KEY`` if ``base_url`` is set, so that a server never receives another provider's key.
        concurrency: parallel requests of each process.
        timeout: seconds of a whole request after which an attempt fails.
        max_attempts: attempts per answer.
        max_wait: longest pause before a retry, in seconds. If the server requests a longer one, the answer fails.
        give_up_after: consecutive failed answers after which no more requests are sent.
        max_calls, max_tokens: budget of one task in one process. If the estimate exceeds it, no request is sent; if it
            runs out, no further request is sent.
        min_coverage: minimum share of answers with a label, 0..1; the run fails below it.
        dry_run: count calls and tokens without sending a request; all answers stay unscored.
        store: folder of the verdict store, or ``off``. Default: in the user's cache folder.
        ask_again: ``unscored`` requests new replies for answers whose stored reply holds no verdict.
        revision, dtype, device, batch_size: of a local model. ``device`` defaults to a GPU if there is one.
        allow_edited_checkpoint: accept a local judge from the checkpoint under edits.
    """

    backend: str
    model: str
    prompt: str = "correctness_v1"
    system: str | None = None
    temperature: float | None = 0.0
    max_reply_tokens: int | None = 16
    seed: int | None = None
    think_end_token: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    base_url: str | None = None
    served_as: str | None = None
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
    ask_again: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str | None = None
    batch_size: int = 8
    allow_edited_checkpoint: bool = False

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            refuse_keys(f"judge {item.name}", getattr(self, item.name))
        if self.backend not in BACKENDS:
            raise EditingError(f"judge backend {self.backend!r} is unknown. Accepted: {', '.join(BACKENDS)}.")
        if not isinstance(self.model, str) or not self.model.strip():
            raise EditingError("judge: name the judge model; there is no default.")
        _check_types(self)
        if self.ask_again not in (None, *ASK_AGAIN):
            raise EditingError(f"judge ask_again={self.ask_again!r} is unknown. Accepted: {', '.join(ASK_AGAIN)}.")
        if self.think_end_token is not None and not self.think_end_token.strip():
            raise EditingError(
                "judge think_end_token is empty; give the text that ends a thought, or drop the setting."
            )
        if self.served_as is not None and (self.backend != "openai" or not self.served_as.strip()):
            raise EditingError(
                "judge served_as is a name for the server of the backend openai; name it or drop the setting."
            )
        if self.api_key_env is not None and not re.fullmatch(r"[A-Z][A-Z0-9_]*", self.api_key_env):
            # The message does not repeat the value: it may be a key.
            raise EditingError(
                "judge api_key_env is not the name of an environment variable (capitals, digits, underscores); put the "
                "key itself into that variable only."
            )
        if self.backend == "openai":
            refuse_keys("judge OPENAI_BASE_URL", self.url)
            _check_url(self.url)

    @property
    def url(self) -> str:
        """Address of the server."""
        return (self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")

    @property
    def key_variable(self) -> str:
        """Name of the environment variable with the API key."""
        return self.api_key_env or ("LM_EDIT_JUDGE_API_KEY" if self.base_url else "OPENAI_API_KEY")

    @property
    def loaded_revision(self) -> str | None:
        """Revision to load a local model at: the commit to which the given one resolves, if that is known."""
        if self.backend != "hf" or folder_of(self.model):
            return self.revision
        return commit_of(self.model, self.revision) or self.revision

    @property
    def reading(self) -> dict[str, object]:
        """The settings by which replies are read, and on which they do not depend (JSON-able)."""
        return {} if self.think_end_token is None else {"think_end_token": self.think_end_token}

    @property
    def identity(self) -> dict[str, object]:
        """All settings that a reply depends on besides the prompt (JSON-able).

        Part of the verdict store's keys and of the results.
        """
        shared = {"backend": self.backend, "model": self.model, "max_reply_tokens": self.max_reply_tokens}
        if self.backend == "hf" and (folder := folder_of(self.model)):
            files = folder_digest(folder)  # a copy elsewhere is the same judge
            return {**shared, "model": folder.resolve().name, "revision": None, "dtype": self.dtype, "files": files}
        if self.backend == "hf":
            return {**shared, "revision": self.loaded_revision, "dtype": self.dtype, "files": None}
        sampling = {"temperature": self.temperature, "seed": self.seed, "extra": dict(self.extra)}
        server = {"base_url": self.url} if self.served_as is None else {"served_as": self.served_as}
        return {**shared, **sampling, **server}


def read_settings(
    source: object,
    folder: Path | None = None,
    *,
    defaults: Mapping[str, object] | None = None,
    how_to: str = HOW_TO,
) -> JudgeSettings:
    """Build settings from a user's choice of judge.

    Args:
        source: a preset's name, ``openai:MODEL``, ``openai:MODEL@URL``, ``hf:MODEL``, the path of a YAML file, JSON
            text, or a mapping of settings with an optional ``preset``.
        folder: base of a relative ``prompt`` path.
        defaults: values of settings that neither the source nor its preset names.
        how_to: accepted sources, for messages.

    Raises:
        EditingError: for unknown presets, settings and values. The message never repeats a value that may be a key.
    """
    values = _given_values(source, folder, how_to)
    if missing := [name for name in ("backend", "model") if name not in values]:
        raise EditingError(f"judge: {' and '.join(missing)} missing. Accepted: {how_to}.")
    return JudgeSettings(**{**(defaults or {}), **values})


def with_settings(source: object, settings: Mapping[str, object]) -> object:
    """A user's choice of judge with some settings replaced; the choice as it is if there are none.

    Raises:
        EditingError: as :func:`read_settings`.
    """
    return {**_given_values(source, None, HOW_TO), **settings} if settings else source


def _given_values(source: object, folder: Path | None, how_to: str) -> dict[str, Any]:
    """The settings that a source and its preset name."""
    refuse_keys("judge", source)
    if isinstance(source, Mapping):
        return _from_mapping(source, folder)
    if not isinstance(source, str) or not source:
        raise EditingError(f"judge={source!r} names no judge. Accepted: {how_to}.")
    if source.lstrip().startswith("{"):
        return _from_mapping(parse_json(source, "judge"), folder)
    if source in PRESETS:
        return _from_mapping({"preset": source}, folder)
    backend, colon, model = source.partition(":")
    if colon and backend in BACKENDS:
        name, at, url = model.partition("@http") if backend == "openai" else (model, "", "")
        return _from_mapping({"backend": backend, "model": name} | ({"base_url": f"http{url}"} if at else {}), folder)
    path = user_path(source, "judge")
    if path.suffix in (".yaml", ".yml", ".json"):
        return _from_mapping(read_yaml(path, "judge settings"), path.parent)
    raise EditingError(f"judge {source!r} is unknown.{near_misses(source, PRESETS)} Accepted: {how_to}.")


def _from_mapping(mapping: Mapping[Any, Any], folder: Path | None) -> dict[str, Any]:
    known = [item.name for item in dataclasses.fields(JudgeSettings)]
    if any(_may_hold_secret(name) and name != "api_key_env" for name in _nested_keys(mapping)):
        raise EditingError(
            "judge: API keys are read from the environment only, because settings are written to results. Put the key "
            "into OPENAI_API_KEY, or into the variable that api_key_env names."
        )
    if unknown := set(mapping) - {*known, "preset"}:
        raise unknown_keys_error("judge setting", map(str, unknown), [*known, "preset"])
    preset = mapping.get("preset")
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise EditingError(f"judge preset {preset!r} is unknown. Accepted: {', '.join(PRESETS)}.")
    values = {**PRESETS.get(preset or "", {}), **{key: value for key, value in mapping.items() if key != "preset"}}
    if folder is not None and (folder / str(values.get("prompt", ""))).is_file():
        values["prompt"] = str(folder / str(values["prompt"]))
    return values


def _nested_keys(value: object) -> Iterator[str]:
    """Yield all keys of nested mappings."""
    if isinstance(value, Mapping):
        for key, nested in value.items():
            yield str(key)
            yield from _nested_keys(nested)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _nested_keys(entry)


def _may_hold_secret(name: str) -> bool:
    """Whether a setting of this name may be a key, such as ``api_token``; ``max_tokens`` and ``eos_token`` may not."""
    if re.search(r"key|secret|password|authorization|bearer|credential", name, re.IGNORECASE):
        return True
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return bool(words) and words[-1].endswith("token") and not _TEXT_TOKENS.intersection(words)


def _check_types(settings: JudgeSettings) -> None:
    for name, within in {**_WHOLE, **_REAL}.items():
        value = getattr(settings, name)
        if value is not None or name not in _NULLABLE:
            (require_whole if name in _WHOLE else require_number)(f"judge {name}", value, within)
    for name in _TEXTS:
        value = getattr(settings, name)
        if not isinstance(value, str) and (value is not None or name == "prompt"):
            raise EditingError(f"judge {name} is a {type(value).__name__}; a text is needed.")
    for name in _SWITCHES:
        if not isinstance(value := getattr(settings, name), bool):
            raise EditingError(f"judge {name}={value!r} is not a switch. Accepted: true, false.")
    if not isinstance(settings.extra, Mapping):
        raise EditingError("judge extra is no mapping; give further fields of the request body by name.")
    require_numbers("judge extra", settings.extra)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets without an IPv6 address
        raise EditingError(f"judge base_url={url!r} is no address; write http://HOST:PORT/v1.") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        # The message does not repeat the address: it may contain a key.
        raise EditingError("judge base_url holds a user name, password or query; give the plain address.")
    if not is_address:
        raise EditingError(f"judge base_url={url!r} is no address; write http://HOST:PORT/v1.")
