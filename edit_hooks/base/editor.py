"""Base class of editors: from edit requests to deltas."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.checks import (
    position_limit,
    require_deltas,
    require_editable,
    require_fitting,
    require_positions,
    require_tokens,
)
from edit_hooks.base.configured import ConfiguredEditor
from edit_hooks.base.footprint import Footprint, StreamGrowth, low_rank_footprint
from edit_hooks.base.job import ConfigT, EditJob
from edit_hooks.base.model_support import check_targets, require_support
from edit_hooks.base.origin import report_origin_once
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit, HookKind, register_kinds
from edit_hooks.deltas.placement import on_cpu, placed
from edit_hooks.modeling.adapter_layers import has_adapter_layers
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.fingerprint.guard import unchanged
from edit_hooks.modeling.grad_mode import gradients
from edit_hooks.modeling.weights import (
    check_weights,
    has_quantized_weights,
    keep_layout,
    refuse_compiled,
    refuse_offloaded,
)
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, UnusableRequestError, refuse
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.plugins import is_own
from edit_hooks.utils.progress import Progress
from edit_hooks.utils.text.readable import readable
from edit_hooks.utils.text.slots import split_template

log = get_logger("lm_eval.edited_hf")

# In ``contract_settings``: replaced by a list of short texts on which the tiny models' tokenizers were trained.
CONTRACT_TEXTS = "contract-texts"


@readable
class Editor(ConfiguredEditor[ConfigT]):
    """Computes deltas for edit requests and leaves the model unchanged.

    A subclass implements :meth:`compute`; hooks are optional:

    =====================================  =============================================================================
    kind of editor                         hooks that it overrides
    =====================================  =============================================================================
    any                                    ``check_request``, ``warnings``, ``guesses``
    carries state through a stream         ``condensed``, ``most_state_bytes``
    chooses blocks in its own way          ``default_layers``, ``names_layers``, ``layer_settings``
    edits other maps than MLP outputs      ``target_modules``
    keeps more than a low-rank update      ``footprint``
    samples texts with the seed            ``fill_sampled_settings``, ``known_contexts``
    reads statistics or a trained network  ``check_inputs`` (before loading), ``prepare``, ``default_config``
    runs more tokens than prompt, target   ``num_tokens_past_target``, ``other_lengths``
    wraps another editor                   all that the wrapped editor answers (:mod:`edit_hooks.base.wrapping.wrapper`)
    =====================================  =============================================================================

    Capabilities are attributes that runners read; no code compares editor names. Editors that wrap another one set them
    per instance.

    Attributes:
        name: registry name, also of file, configuration folder and parity test. A class that does not set it and
            extends an editor in use is named by its class, so that their results have different names.
        config_class: its typed configuration.
        config_folders: folders of shipped configurations; the first with a match wins.
        needs_subject: requests must mark the subject.
        supports_joint: can write several requests into one delta.
        reads_past_updates: ``False`` if :meth:`compute` reads only ``stream_state``, hooks and metadata of
            ``job.history``; updates of earlier steps then stay on the CPU, and need not stay in memory at all.
        writes: parts that its edits change: ``weights``, ``hooks`` (the running model), ``context`` (the prompt).
        hook_kinds: name -> class of the hook kinds that the editor brings along, so that ``package.module:Class`` works
            without installation. Where only a saved edit is used, a kind needs an entry point, see
            :mod:`edit_hooks.deltas.hook_edit`.
        edits_quantized: can edit maps with quantized weights: it reads them through
            :func:`edit_hooks.modeling.weights.read_weight` and trains nothing in their place.
        writes_states: can be the base of an editor that makes the states of tokens
            (:class:`edit_hooks.locate.text_states.StateWriter`).
        feeds_last_token: runs the target's last token as well, not only those that predict a token.
        stream_growth: what a stream carries from step to step; ``None`` if the class does not state it. It is checked
            by the contract, and shown by ``lm-edit editors``.
        default_depth: relative depth of the default layer for models without a shipped configuration.
        trainer: ``package.module:Class`` of the :class:`~edit_hooks.training.trainer.Trainer` behind ``lm-edit train``,
            for an editor that has to be trained for a model; its artifacts are what the setting ``artifact`` names.
        contract_settings: settings under which ``lm-edit check-editor`` runs the editor on tiny models.
        contract_exemptions: checks of that contract which cannot hold for the method -> reason.
    """

    needs_subject: bool = True
    supports_joint: bool = False
    reads_past_updates: bool = True
    hook_kinds: ClassVar[Mapping[str, type[HookKind]]] = {}
    edits_quantized: bool = False
    writes_states: bool = False
    feeds_last_token: bool = False
    stream_growth: StreamGrowth | None = None
    trainer: ClassVar[str | None] = None
    contract_settings: ClassVar[Mapping[str, Any]] = {}
    contract_exemptions: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named = next((base for base in cls.__mro__ if "name" in vars(base)), None)
        if named is not None and named is not cls and not inspect.isabstract(named):
            cls.name = cls.__name__

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield "name", self.name
        yield "writes", list(self.writes)
        yield "settings", self.overrides or "defaults"

    def __init__(self, overrides: Mapping[str, Any] | None = None) -> None:
        register_kinds(self.hook_kinds)
        super().__init__(overrides)
        self._logged: set[str] = set()
        self._guarded_models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()

    @property
    def source_modules(self) -> tuple[str, ...]:
        """Modules whose code, imports included, determines the results of this editor."""
        return (type(self).__module__,)

    @property
    def parts(self) -> tuple[Editor[Any], ...]:
        """The editors whose classes determine the results; several for one that wraps another."""
        return (self,)

    @property
    def key_identity(self) -> str:
        """The identity of the editor in the keys of stored results.

        The name, followed by the classes of other packages: several classes of one module can have the same name.
        """
        paths = ", ".join(f"{cls.__module__}:{cls.__qualname__}" for cls in self._foreign_classes)
        return f"{self.name} ({paths})" if paths else self.name

    @property
    def _foreign_classes(self) -> list[type[Editor[Any]]]:
        """The classes of other packages among the parts."""
        return [type(part) for part in self.parts if not is_own(type(part))]

    # -- weights -----------------------------------------------------------------------------------------------------

    def footprint(self, config: ConfigT, model: nn.Module) -> Footprint:
        """Hook: memory and arithmetic of one edit; the model may be without weights."""
        return low_rank_footprint(model, self.target_modules(config, model), config.edited_layers, config)

    def check_model(self, model: nn.Module) -> None:
        """Refuse models whose weights this editor cannot edit; computes nothing but the self-check of an unknown one.

        Raises:
            EditingError: maps that fail the self-check, a compiled model, offloaded weights, quantized weights of an
                unsupported kind anywhere in it, or of a supported kind in a module that this editor cannot edit
                quantized, and modules inside an adapter that its updates do not fit.
        """
        refuse_compiled(model)
        inner = unwrapped(model)
        if self.writes == ("context",):
            return
        refuse_offloaded(inner)
        check_weights(inner)
        keep_layout(inner)
        if require_support(inner).unusable:
            config = self.default_config(inner)
            check_targets(self.name, inner, config.edited_layers, self._targets_of(config, inner))
        through_adapters = "weights" in self.writes and has_adapter_layers(inner)
        if through_adapters or (not self.edits_quantized and has_quantized_weights(inner)):
            names = self.target_modules(self.default_config(inner), inner)
            modules = {name: inner.get_submodule(name) for name in names}
            require_editable(modules, self.name, through_adapters, self.edits_quantized)

    # -- editing -----------------------------------------------------------------------------------------------------

    def edit(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EditRequest],
        *,
        joint: bool = False,
        history: Sequence[Delta] = (),
        progress: Progress | None = None,
        measure: bool = True,
    ) -> list[Delta]:
        """Compute deltas for the requests; the model is left unchanged.

        Args:
            joint: return one delta that writes all requests, instead of one independent delta each.
            history: deltas of the earlier steps of a stream, already applied to the weights; they also hold the state
                that an editor carries from step to step (``Delta.stream_state``).
            progress: called with the number of requests finished since the last call.
            measure: record the divergence on four neutral prompts (``first_token_kl``) among the effects of every
                delta, and warn of one that wrecks the model (``wrecked``). With a history it is that of this step, or
                of the hooks of all steps. Contexts, which leave the model as it is, have neither.

        Raises:
            UnusableRequestError: before any computation, for a request that this editor cannot use.
            EditingError: for modes and settings that it cannot.
        """
        if not requests:
            return []
        if joint and not self.supports_joint:
            raise EditingError(f"editor {self.name!r} writes one request at a time; joint=True is not possible.")
        self.check_model(model)
        inner = unwrapped(model)
        limit, contexts = position_limit(inner.config), self.known_contexts(inner)
        refuse(self.find_unusable(tokenizer, requests, limit, inner))
        # lm-eval disables gradients; editors need them in any mode of the caller.
        with gradients(True):
            config = self.resolve_config(inner, tokenizer)
            if self.known_contexts(inner) != contexts:  # sampled just now; they take positions, too
                refuse(self.find_unusable(tokenizer, requests, limit, inner))
            if self.writes != ("context",):
                report_origin_once(self.settings_origin(inner))
            report = progress or (lambda count: None)
            # some may come from the store, or another device
            steps = [placed(inner, delta, updates=self.reads_past_updates) for delta in history]
            job = EditJob(inner, tokenizer, config, list(requests), joint, steps, report)
            with self._guarded(inner, tokenizer):
                computed = self.compute(job)
            deltas = require_deltas(computed, self.name, len(job.groups), self.writes, self.stream_growth)
            if self._foreign_classes:
                require_fitting(deltas, self.name, inner)
        settings = config.to_dict()
        for group, delta in zip(job.groups, deltas, strict=True):
            requests_of_delta = [request.to_dict() for request in group]
            # As a loaded edit's: a GPU multiplies strided factors by other kernels, with other last bits.
            delta.factors = {name: factor.detached() for name, factor in delta.factors.items()}
            delta.dense = {name: update.detach() for name, update in delta.dense.items()}
            delta.meta |= {"editor": self.name, "config": settings, "requests": requests_of_delta}
            delta.stream_state = on_cpu(delta.stream_state)
            self._record_warnings(delta, self.warnings(job, group, delta))
        if measure and self.writes != ("context",):
            self._measure(inner, tokenizer, deltas, steps)
        return deltas

    @contextlib.contextmanager
    def _guarded(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
        """Refuse an editor of another package that leaves the model changed: no test here has run its contract."""
        if not self._foreign_classes:
            yield
            return
        whole = model not in self._guarded_models
        self._guarded_models.add(model)  # whole once, also if compute raises: it reads all weights twice
        with unchanged(self.name, model, tokenizer, whole=whole):
            yield

    def _measure(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        deltas: Sequence[Delta],
        history: Sequence[Delta],
    ) -> None:
        """Record the damage of edits among their effects, and warn of those that wreck the model."""
        from edit_hooks.inference.effects.damage import (  # edits are computed without that room
            WRECKED_WARNING,
            record_damage,
        )

        for delta in record_damage(model, tokenizer, deltas, history):
            self._record_warnings(delta, [WRECKED_WARNING])

    @abc.abstractmethod
    def compute(self, job: EditJob[ConfigT]) -> list[Delta]:
        """Compute one delta per group of ``job.groups``, with ``diagnostics``."""

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        """Hook: the history of a stream without what later steps do not read.

        A runner calls it after every step, with what it returned for the steps before and the new one. Later edits have
        the result as their history, and must be the same bit for bit. By default nothing is left if
        :attr:`stream_growth` says that nothing is read. Else the steps of an editor of hooks become one edit without
        metadata, unless they have a ``stream_state``; of other editors the updates of the new step leave, unless the
        editor reads them (:attr:`reads_past_updates`).
        """
        if self.stream_growth is not None and not self.stream_growth.is_read:
            return []
        if self.writes == ("hooks",) and history and not any(delta.stream_state for delta in history):
            return [Delta(hook_edit=HookEdit.combine(delta.hook_edit for delta in history))]
        if self.reads_past_updates or not history:
            return list(history)
        return [*history[:-1], dataclasses.replace(history[-1], factors={}, dense={}, masks={})]

    def most_state_bytes(self, model: nn.Module) -> int | None:
        """Hook: the largest size of what a stream carries from step to step; ``None`` if it grows without bound."""
        return 0 if self.stream_growth is not None and not self.stream_growth.is_read else None

    def warnings(self, job: EditJob[ConfigT], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        """Hook: warnings about a finished edit of these requests.

        Each sentence is logged once and recorded with every edit it applies to, so it must not contain numbers of a
        single edit.
        """
        return []

    def known_contexts(self, model: PreTrainedModel | None = None) -> Sequence[str]:
        """Hook: context templates that are known before sampling, or for a model whose configuration is resolved."""
        return ()

    def find_unusable(
        self,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EditRequest],
        limit: int | None,
        model: PreTrainedModel | None = None,
    ) -> dict[str, str]:
        """Return request key -> reason for the requests that this editor cannot use; needs no weights.

        Args:
            limit: number of positions of the model, if it has one.
            model: extends the check to its shipped settings, and to context templates that are resolved for it.
        """
        prefix = max((split_template(template)[0] for template in self.known_contexts(model)), key=len, default="")
        subject_for, in_prompts = self.name if self.needs_subject else None, self.writes == ("context",)
        reasons: dict[str, str] = {}
        for request in requests:
            try:
                length = require_tokens(tokenizer, request, prefix, subject_for, in_prompts)
                self.check_request(tokenizer, request, model)
                lengths = {"prompt and target_new": length + self.num_tokens_past_target()}
                lengths |= self.other_lengths(tokenizer, request, model)
                require_positions(request, prefix, lengths, limit)
            except UnusableRequestError as error:
                reasons[request.key] = str(error)
        return reasons

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        """Hook: refuse a request that this editor cannot use under its settings (``known_config``).

        For what can be told from the request and the settings alone. All requests of a call are checked before any of
        them is computed, so that the error names every one at fault.

        Raises:
            UnusableRequestError: with the reason.
        """

    def num_tokens_past_target(self) -> int:
        """Hook: number of tokens that are run behind those that predict the target.

        By default the target's last token, if it is run at all: with ``append_eos`` it predicts the end of the text,
        or the space before it (``released``), which is run then, too.
        """
        append_eos = self._append_eos
        return int(self.feeds_last_token or bool(append_eos)) + (append_eos == "released")

    def other_lengths(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> Mapping[str, int]:
        """Hook: further texts that an edit of a request runs, as a plural for the error -> tokens of the longest."""
        return {}

    def _record_warnings(self, delta: Delta, warnings: Sequence[str]) -> None:
        delta.warnings += [text for text in warnings if text not in delta.warnings]
        for text in warnings:
            if text not in self._logged:
                self._logged.add(text)
                log.warning("editor %s: %s", self.name, text)
