"""Identity of a model with its tokenizer: everything besides code and settings that can change a number.

Stored results are found by it, and saved edits name it. Every field of a configuration counts unless it is listed here
with a reason, so a field that a later release of transformers adds counts from the start.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.modeling.architectures import given_modules, unwrapped
from edit_hooks.modeling.fingerprint.tensor_hash import weights_digest
from edit_hooks.modeling.linear_maps import is_quantized, linear_of, tensors
from edit_hooks.utils.storage.hashing import key_of

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

# Fields of a model's configuration that change no number -> why.
CONFIG_EXCLUSIONS = {
    "_name_or_path": "where the model was read from",
    "transformers_version": "of the release that wrote the file; the installed release is a part of its own",
    "architectures": "written by save_pretrained; the class of the model is a part of its own",
    "dtype": "of the file; the dtype of every tensor is part of the hash of the weights",
    "torch_dtype": "earlier name of dtype",
}
# Fields of a PEFT configuration that change no number -> why.
ADAPTER_EXCLUSIONS = {
    "base_model_name_or_path": "where the base model was read from",
    "revision": "of the base model; its weights are hashed",
    "peft_version": "of the release that wrote the file; the installed release is a part of its own",
    "inference_mode": "whether the adapter is to be trained",
    "auto_mapping": "names of the classes of the base model",
}
# Attributes of modules that change no number -> why.
MODULE_EXCLUSIONS = {
    "training": "editors and answers switch dropout off themselves",
    "gradient_checkpointing": "saves memory in training",
    "name_or_path": "where the model was read from",
    "hf_device_map": "which device computes what; device types are part of the keys that need them",
    "max_seq_len_cached": "length of the longest text so far",
    "warnings_issued": "messages so far",
}
PEFT_STATE = ("_active_adapter", "_disable_adapters")  # of PEFT's layers; other private attributes do not count
HOOK_DICTIONARIES = ("_forward_hooks", "_forward_pre_hooks")
LIBRARIES_WITH_HOOKS = ("accelerate", "peft", "torch", "transformers")  # covered by versions, configuration and state
# Attributes of a tokenizer that change no token -> why.
TOKENIZER_EXCLUSIONS = {
    "init_inputs": "arguments of the constructor; their effect counts",
    "init_kwargs": "arguments of the constructor; their effect counts",
    "name_or_path": "where the tokenizer was read from",
    "files_loaded": "where the tokenizer was read from",
    "padding_side": "set by every caller; texts are padded by this package",
    "verbose": "whether messages are logged",
    "deprecation_warnings": "messages so far",
    "cache": "words seen so far",
}


@dataclass(frozen=True)
class ModelIdentity:
    """A model with its tokenizer; every part is JSON-able.

    Attributes:
        weights: SHA-256 of all parameters and buffers, see
            :func:`~edit_hooks.modeling.fingerprint.tensor_hash.weights_digest`.
        dtype: of the first floating-point parameter, for messages; the hash covers that of every tensor.
        model: class of the model, SHA-256 of its source file if transformers does not contain it, and SHA-256 of its
            modules: classes and plain attributes, among them the scaling and the state of PEFT layers; SHA-256 of the
            modules' roles if a row gives them (option ``family``).
        config: the model's configuration without :data:`CONFIG_EXCLUSIONS`, and its attention implementation.
        end_tokens: end tokens of the generation configuration. No edit depends on its other entries; answers do, see
            :func:`~edit_hooks.modeling.fingerprint.generation_settings.answering_parts`.
        hooks: forward hooks other than those of :data:`LIBRARIES_WITH_HOOKS`. A hook can do anything, so a model with
            hooks is a new one each time: the list ends with a random number.
        adapters: PEFT configurations by name, without :data:`ADAPTER_EXCLUSIONS`.
        tokenizer: class and its source as for the model, SHA-256 of the serialized rules and vocabulary, attributes.
        libraries: versions of the packages that compute.
    """

    weights: str
    dtype: str
    model: dict[str, Json]
    config: dict[str, Json]
    end_tokens: Json
    hooks: list[Json]
    adapters: dict[str, Json]
    tokenizer: dict[str, Json]
    libraries: dict[str, Json]

    def to_dict(self) -> dict[str, Any]:
        """All parts, equal to what a JSON file with them reads back as."""
        return asdict(self)

    @functools.cached_property
    def key(self) -> str:
        """SHA-256 (hex) of all parts."""
        return key_of(self.to_dict())


def model_identity(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> ModelIdentity:
    """Identity of a model as it is now, with its tokenizer.

    Computed in every call: nothing cheaper than reading the weights notices every change of them.

    Raises:
        EditingError: for offloaded weights.
    """
    inner = unwrapped(model)
    adapters = getattr(inner, "peft_config", None) or {}
    config = _plain(inner.config.to_dict())
    return ModelIdentity(
        weights=weights_digest(inner),
        dtype=str(inner.dtype),
        model=_structure_of(inner),
        config={**_without(config, CONFIG_EXCLUSIONS), **_implementations(inner)},
        end_tokens=_plain(getattr(inner.generation_config, "eos_token_id", None)),
        hooks=_hook_names(inner),
        adapters={name: _without(_plain(adapter.to_dict()), ADAPTER_EXCLUSIONS) for name, adapter in adapters.items()},
        tokenizer=_tokenizer_identity(tokenizer),
        libraries=_library_versions(inner, bool(adapters), "quantization_config" in config),
    )


def computation_identity(model: nn.Module) -> dict[str, Json]:
    """What determines how a model computes, without the numbers in its weights: none of them is read."""
    inner = unwrapped(model)
    return {
        "model": _structure_of(inner),
        "config": {**_without(_plain(inner.config.to_dict()), CONFIG_EXCLUSIONS), **_implementations(inner)},
        "tensors": key_of([[name, str(one.dtype), str(one.device.type)] for name, one in inner.named_parameters()]),
        "adapters": sorted(getattr(inner, "peft_config", None) or {}),
        "hooks": _hook_names(inner),
        "libraries": _library_versions(inner, has_adapters=True, is_configured=True),
    }


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The entries in which two identities differ: ``config.rms_norm_eps (made with 1e-06, here 1e-05)``.

    Args:
        ours, theirs: parts of the identity of the present model and of the one that a result was made with.
    """
    return list(_differences("", ours, theirs))


def _differences(prefix: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for name in sorted(ours.keys() | theirs.keys()):
            yield from _differences(f"{prefix}.{name}".lstrip("."), ours.get(name), theirs.get(name))
    elif ours != theirs:
        yield f"{prefix} (made with {_abbreviated(theirs)}, here {_abbreviated(ours)})"


def _abbreviated(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:16]}..."


# --- model -----------------------------------------------------------------------------------------------------------


def _structure_of(model: PreTrainedModel) -> dict[str, Json]:
    """Class and modules, and the roles of the modules if a row gives them."""
    parts = {**_class_of(model), "modules": key_of(list(_module_settings(model)))}
    given = given_modules(model)
    return parts if given is None else {**parts, "roles": key_of(given)}


def _module_settings(model: nn.Module) -> Iterator[Json]:
    """Name, class and plain attributes of every module."""
    for name, module in model.named_modules():
        settings = {
            attribute: _plain(value)
            for attribute, value in sorted(vars(module).items())
            if attribute not in MODULE_EXCLUSIONS
            and (not attribute.startswith("_") or attribute in PEFT_STATE)
            and _is_plain(value)
        }
        # The rotary tables of Gemma list the types of layers in the order of a set, which differs between processes.
        lists = {key: sorted(value) for key, value in settings.items() if isinstance(value, list) and _is_names(value)}
        yield [name, _class_name(module), {**settings, **lists}]


def _hook_names(model: nn.Module) -> list[Json]:
    """Module and function of every foreign forward hook, and a random number if there is one."""
    names: list[Json] = [
        f"{name or 'model'}: {getattr(hook, '__qualname__', type(hook).__name__)}"
        for name, module in model.named_modules()
        for dictionary in HOOK_DICTIONARIES
        for hook in getattr(module, dictionary).values()
        if str(getattr(hook, "__module__", "")).partition(".")[0] not in LIBRARIES_WITH_HOOKS
    ]
    return [*names, uuid.uuid4().hex] if names else []


def _implementations(model: PreTrainedModel) -> dict[str, Json]:
    """The implementations of attention and of experts, which the configuration does not export."""
    names = ("_attn_implementation", "_experts_implementation")
    return {name: _plain(getattr(model.config, name, None)) for name in names}


def _library_versions(model: nn.Module, has_adapters: bool, is_configured: bool) -> dict[str, Json]:
    packages = {"torch", "transformers", "tokenizers", *_packages_of_maps(model)}
    packages |= {"peft"} if has_adapters else set()
    packages |= {"bitsandbytes"} if is_configured else set()
    return {package: _version(package) for package in sorted(packages)}


def _packages_of_maps(model: nn.Module) -> set[str]:
    """The packages whose classes quantized maps and their tensors are."""
    maps = [linear_of(module) for module in model.modules() if is_quantized(module)]
    classes = {type(part) for linear in maps for part in (linear, *tensors(linear))}
    imported = {cls.__module__.partition(".")[0] for cls in classes} - {"torch", "transformers"}
    known = packages_distributions() if imported else {}
    return {package for name in imported for package in known.get(name, [])}


@functools.cache
def _version(package: str) -> str | None:
    if package == "torch":
        return torch.__version__  # with the build, as +cpu
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# --- tokenizer -------------------------------------------------------------------------------------------------------


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Json]:
    settings = {
        name: _shortened(value)
        for name, value in sorted(vars(tokenizer).items())
        if name not in TOKENIZER_EXCLUSIONS and not name.startswith("_") and _is_plain(value)
    }
    rules = _backend_rules(tokenizer) if tokenizer.is_fast else _vocabulary_files(tokenizer)
    return {
        **settings,
        **_class_of(tokenizer),
        "rules": rules,
        "special_tokens": _special_tokens(tokenizer),
        "add_bos_token": _plain(getattr(tokenizer, "add_bos_token", None)),
        "add_eos_token": _plain(getattr(tokenizer, "add_eos_token", None)),
    }


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Json]:
    """Special tokens by role, without a pad token that is the token of another role.

    Such a pad token is a stand-in, set by lm-eval for batches of its own, and changes no set of special tokens.
    """
    tokens: dict[str, Json] = _plain(tokenizer.special_tokens_map)
    others = {role: token for role, token in tokens.items() if role != "pad_token"}
    return others if tokens.get("pad_token") in others.values() else tokens


def _backend_rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of a fast tokenizer: added tokens, normalizer, pre-tokenizer, post-processor, decoder, vocabulary.

    Truncation and padding, which come first in the text, are left out: every call sets its own.
    """
    text = tokenizer.backend_tokenizer.to_str()
    _, separator, rules = text.partition('"added_tokens":')
    return hashlib.sha256((rules if separator else text).encode()).hexdigest()


def _vocabulary_files(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the files of a tokenizer without a serialized form."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(path) for path in tokenizer.save_vocabulary(folder) or ()]
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    added = {index: str(token) for index, token in sorted(tokenizer.added_tokens_decoder.items())}
    return key_of([digests, added])


# --- plain values ----------------------------------------------------------------------------------------------------


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _class_of(value: object) -> dict[str, Json]:
    """Name of an object's class, and SHA-256 of its source file unless a versioned library contains it."""
    package = type(value).__module__.partition(".")[0]
    source = None if package == "transformers" else getattr(sys.modules[type(value).__module__], "__file__", None)
    content = None if source is None else hashlib.sha256(Path(source).read_bytes()).hexdigest()
    return {"class": _class_name(value), "source": content}


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(entry) for entry in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _is_names(values: list[Json]) -> bool:
    return all(isinstance(value, str) for value in values)


def _plain(value: Any) -> Any:
    """A JSON-able copy that reading it from a file gives back."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _shortened(value: Any) -> Json:
    """A plain value, or the SHA-256 of a long one (a chat template)."""
    plain = _plain(value)
    return plain if len(json.dumps(plain)) <= 200 else f"sha256:{key_of(plain)}"


def _without(mapping: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in names}
