"""An editor under its contract settings on one tiny model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from edit_hooks.answers import ScoredContinuation
from edit_hooks.base.config import EditorConfig
from edit_hooks.base.editor import CONTRACT_TEXTS, Editor
from edit_hooks.base.registry import editor_class
from edit_hooks.base.wrapping.wrapper import EditorOnBase
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import REQUESTS, SENTENCES, build_model, build_tokenizer, natural_tokenizer
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.architectures import text_config
from edit_hooks.modeling.fingerprint.guard import changes
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.request import EditRequest

CPU = torch.device("cpu")
# float32 rounding through a dozen optimizer steps of random models stays below 1e-5; a wrong mean or a leaking pad is
# above 1e-2.
TOLERANCE = 1e-4
EDIT_REQUESTS = tuple(map(EditRequest.from_dict, REQUESTS))

tiny_tokenizer = functools.cache(build_tokenizer)


@functools.cache
def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> PreTrainedModel:
    """A cached tiny model; leave it as found."""
    return build_model(model_type, dtype=dtype).to(device)


class ContractViolation(AssertionError):
    """An editor breaks its contract; the message says how."""


def require(condition: bool, message: str) -> None:
    """Raise ContractViolation unless the condition holds."""
    if not condition:
        raise ContractViolation(message)


def contract_settings(chosen: type[Editor[Any]]) -> dict[str, Any]:
    """The class's contract settings with the texts filled in."""
    return _with_texts(chosen.contract_settings)


class Subject:
    """One editor on one tiny model; edits are made once and shared by the checks.

    Args:
        editor: name or ``package.module:Class``.
        model_type: family of the tiny model.
        device: of the tiny model, which is built on the CPU and moved.
    """

    def __init__(
        self,
        editor: str,
        model_type: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.editor, self.model_type, self.dtype = editor, model_type, dtype
        self.device = torch.device(device)
        self.editor_class = editor_class(editor)
        self.settings = contract_settings(self.editor_class)

    @property
    def model(self) -> PreTrainedModel:
        return tiny_model(self.model_type, self.dtype, self.device)

    def new_model(self) -> PreTrainedModel:
        """A model with the same weights, for a check that changes it."""
        return build_model(self.model_type, dtype=self.dtype).to(self.device)

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return tiny_tokenizer(natural_tokenizer(self.model_type))

    @functools.cached_property
    def capabilities(self) -> Editor[Any]:
        """An editor object to read capabilities from: editors that wrap another one set them per instance."""
        return self.make()

    def make(self, **overrides: Any) -> Editor[Any]:
        """The editor under its contract settings, some of them replaced."""
        return self.editor_class({**self.settings, **overrides})

    def make_for_target(self) -> Editor[Any]:
        """The editor on one layer, with the bare prompt as its only context and enough steps to reach its targets."""
        wanted: dict[str, Any] = {"context_templates": ["{}"], "num_steps": 25}
        if layers := self.settings.get("layers"):
            wanted["layers"] = layers[-1:]

        def accepted(config_class: type[EditorConfig]) -> dict[str, Any]:
            known = {field.name for field in dataclasses.fields(config_class)}
            return {name: value for name, value in wanted.items() if name in known}

        changes = accepted(self.editor_class.config_class)
        if isinstance(self.capabilities, EditorOnBase):
            base = accepted(self.capabilities.base.config_class)
            changes["base_settings"] = {**self.settings.get("base_settings", {}), **base}
        return self.make(**changes)

    def edit(self, requests: Sequence[EditRequest] = EDIT_REQUESTS, **arguments: Any) -> list[Delta]:
        """Edits of a fresh editor object.

        Raises:
            EditingError: for an update with NaN or infinity, with which every comparison would fail for another reason.
        """
        deltas = self.make().edit(self.model, self.tokenizer, requests, **{"measure": False, **arguments})
        for delta in deltas:
            delta.check_finite()
        return deltas

    @functools.cached_property
    def deltas(self) -> tuple[Delta, ...]:
        """All requests edited independently in one call."""
        return tuple(self.edit())

    def answers(self, delta: Delta | None, requests: Sequence[EditRequest] = EDIT_REQUESTS) -> list[ScoredContinuation]:
        """The targets of the requests scored under one edit; contexts are put before the prompts."""
        items = [(self.item(request, delta), _on_model(delta)) for request in requests]
        return score(self.model, items, Limits(), lambda count: None)

    def item(self, request: EditRequest, delta: Delta | None = None) -> ScoreItem:
        """The target of a request after its prompt."""
        context = delta.contexts[0].before(request.text) if delta is not None and delta.contexts else ""
        prompt, target = split_continuation(self.tokenizer, context + request.text, request.continuation)
        room = text_config(self.model).max_position_embeddings + 1 - len(target)
        return ScoreItem(tuple(prompt[-room:]), tuple(target))

    def target_nll(self, delta: Delta | None, request: EditRequest) -> float:
        """Mean negative log-likelihood of a request's target per token."""
        (nll,) = self.target_nlls([delta], [request])
        return nll

    def target_nlls(
        self, deltas: Sequence[Delta | None], requests: Sequence[EditRequest] = EDIT_REQUESTS
    ) -> list[float]:
        """Mean negative log-likelihood per token of the requests' targets, each under its own edit, in one batch."""
        pairs = zip(requests, deltas, strict=True)
        items = [(self.item(request, delta), _on_model(delta)) for request, delta in pairs]
        answers = score(self.model, items, Limits(), lambda count: None)
        return [-answer.logprob / (answer.num_tokens or math.nan) for answer in answers]


def recording_tokenizer(tokenizer: PreTrainedTokenizerFast) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """A copy of a tokenizer, and the list to which it appends every text that it encodes."""
    texts: list[str] = []
    copied = copy.copy(tokenizer)
    encode_plus = copied._encode_plus

    def recorded(text: Any, *rest: Any, **named: Any) -> Any:
        texts.extend([text] if isinstance(text, str) else text)
        return encode_plus(text, *rest, **named)

    copied._encode_plus = recorded
    return copied, texts


def distance(ours: Delta, theirs: Delta) -> float:
    """Largest relative difference of two edits over their tensors; infinite if they differ in anything else."""
    first, second = _tensors(ours), _tensors(theirs)
    same = (
        first.keys() == second.keys()
        and all(first[name].shape == second[name].shape for name in first)
        and ours.contexts == theirs.contexts
        and (ours.hook_edit is None) == (theirs.hook_edit is None)
    )
    if not same:
        return float("inf")
    return max((_relative(first[name], second[name]) for name in first), default=0.0)


def largest_difference(ours: ScoredContinuation, theirs: ScoredContinuation) -> float:
    """Largest difference of two answers over their tokens, in nats."""
    return max(abs(a - b) for a, b in zip(ours.token_logprobs or (), theirs.token_logprobs or (), strict=True))


def require_unchanged(before: dict[str, Any], subject: Subject, when: str) -> None:
    """Raise ContractViolation if model or tokenizer differ from a snapshot of them."""
    differences = changes(before, snapshot(subject.model, subject.tokenizer))
    require(not differences, f"{when} this has changed: {first_names(differences)}")


def first_names(names: Sequence[str]) -> str:
    """The first three of some names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.cpu(), theirs.cpu()  # dense updates may wait on the CPU, or not
    if ours.dtype in (torch.uint8, torch.bool, torch.int64):  # packed masks, indices
        return 0.0 if torch.equal(ours, theirs) else float("inf")
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def _tensors(delta: Delta) -> dict[str, torch.Tensor]:
    hooks = {} if delta.hook_edit is None else delta.hook_edit.tensors
    return {**delta.weights(), **{f"hook/{name}": tensor for name, tensor in hooks.items()}}


def _on_model(delta: Delta | None) -> Delta | None:
    return None if delta is None else delta.without_contexts


def _with_texts(settings: Mapping[str, Any]) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            filled[name] = _with_texts(value)
        else:
            filled[name] = list(SENTENCES) if value == CONTRACT_TEXTS else value
    return filled
