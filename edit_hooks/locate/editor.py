"""Base class of locate-then-edit editors, whose updates are constrained by second moments of keys."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import FLOAT32, FLOAT64, Footprint
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.locate.moments.corpora import check_source, digest_of, is_text_source
from edit_hooks.locate.moments.matrix_files import matrix_file
from edit_hooks.locate.moments.moment_documents import check_length
from edit_hooks.locate.moments.second_moments import MomentDtype, MomentSettings, second_moments
from edit_hooks.locate.moments.solve import KeyMetric, SecondMoment, load_second_moments
from edit_hooks.locate.value_editor import ValueEditConfig, ValueEditor
from edit_hooks.modeling.architectures import map_shape, unwrapped
from edit_hooks.modeling.grad_mode import gradients
from edit_hooks.modeling.tensors import require_tensors
from edit_hooks.request import EditRequest
from edit_hooks.utils.settings.numbers import POSITIVE

SECOND_MOMENTS_HELP = (
    "source of C: null (the identity), self (text of the model), published (100,000 Wikipedia articles, as in the "
    "releases), a text file or folder, a hub data set, a safetensors file with one matrix per layer (also "
    "hf:owner/name@revision), or a mapping from layer to matrix"
)


@dataclass(kw_only=True)
class LocateThenEditConfig(ValueEditConfig):
    """Settings of the locate-then-edit editors."""

    second_moments: Any = config_field(SECOND_MOMENTS_HELP, default=None)
    moment_tokens: int | None = config_field(
        "number of tokens C is collected from; null: 16 per dimension of the keys, or all of a file and of published",
        within=POSITIVE,
        default=None,
    )
    moment_length: int | None = config_field(
        "tokens used of each document behind C, at most the model's context; null: up to 256, all of it for published",
        within=POSITIVE,
        default=None,
    )
    moment_dtype: MomentDtype = config_field("precision in which C is stored; sums run in float64", default="float32")
    moment_digest: str | None = config_field("set by the editor: checksum of the file or folder behind C", default=None)


LocateThenEditConfigT = TypeVar("LocateThenEditConfigT", bound=LocateThenEditConfig)


class LocateThenEditEditor(ValueEditor[LocateThenEditConfigT]):
    """Base of the locate-then-edit editors."""

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self._constraints: weakref.WeakKeyDictionary[nn.Module, Mapping[int, KeyMetric]] = weakref.WeakKeyDictionary()

    def default_config(self, model: nn.Module) -> LocateThenEditConfigT:
        config = super().default_config(model)
        is_path = isinstance(config.second_moments, (str, os.PathLike))
        digest = digest_of(matrix_file(config.second_moments)) if is_path else None
        config.record_digest("moment_digest", "second_moments", digest)
        if is_text_source(config.second_moments):
            check_length(model, config.moment_length)
        return config

    def check_inputs(self, config: LocateThenEditConfigT) -> None:
        if is_text_source(source := config.second_moments):
            check_source(source)
        elif isinstance(source, (str, os.PathLike)):
            require_tensors(matrix_file(source), "file of 'second_moments'")

    def footprint(self, config: LocateThenEditConfigT, model: nn.Module) -> Footprint:
        footprint = super().footprint(config, model)
        solve, statistics = self.solve_bytes(config, model), self.statistics_bytes(config, model)
        return dataclasses.replace(footprint, solve=solve, statistics=statistics)

    def solve_bytes(self, config: LocateThenEditConfigT, model: nn.Module) -> int:
        """Hook: bytes on the devices that factorizing C needs: it, and its factor, in float64.

        Collecting takes a product there. The sums move to main memory if the devices have no room for them.
        """
        return 0 if config.second_moments is None else 2 * FLOAT64 * max(self._squares(config, model))

    def statistics_bytes(self, config: LocateThenEditConfigT, model: nn.Module) -> int:
        """Hook: bytes in main memory: C of every layer and its float64 factor, one more while C is collected."""
        if config.second_moments is None:
            return 0
        squares = self._squares(config, model)
        moment = FLOAT32 if config.moment_dtype == "float32" else FLOAT64
        collected = FLOAT64 * max(squares) if is_text_source(config.second_moments) else 0
        return (moment + FLOAT64) * sum(squares) + collected

    def _squares(self, config: LocateThenEditConfigT, model: nn.Module) -> list[int]:
        """Entries of a matrix over the keys of each edited layer."""
        return [map_shape(model.get_submodule(name))[1] ** 2 for name in self.target_modules(config, model)]

    def prepare(
        self, config: LocateThenEditConfigT, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        with gradients(False):
            self._constraints[model] = self.load_constraints(config, model, tokenizer)

    def constraints(self, model: nn.Module) -> Mapping[int, KeyMetric]:
        """The constraint of every edited layer, which protects the values of other keys.

        Loaded when the configuration is resolved.
        """
        return self._constraints[unwrapped(model)]

    def load_constraints(
        self, config: LocateThenEditConfigT, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> Mapping[int, KeyMetric]:
        """Hook: the constraint of every edited layer; by default the second moments."""
        return self.load_moments(config, model, tokenizer)

    def load_moments(
        self, config: LocateThenEditConfigT, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> dict[int, SecondMoment]:
        """The second moments of the edited layers, from the configured source."""
        source = config.second_moments
        if not is_text_source(source):
            return load_second_moments(source, config.edited_layers, model)
        settings = MomentSettings(
            source,
            num_tokens=config.moment_tokens,
            max_length=config.moment_length,
            seed=config.seed,
            dtype=config.moment_dtype,
        )
        return second_moments(model, tokenizer, config.edited_layers, settings)

    def warnings(self, job: EditJob[LocateThenEditConfigT], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        return [*self.constraint_warnings(job.model), *super().warnings(job, requests, delta)]

    def constraint_warnings(self, model: nn.Module) -> list[str]:
        """Warnings about the constraint of every layer."""
        metrics = self.constraints(model).items()
        return [f"layer {layer}: {text}" for layer, metric in metrics for text in metric.warnings]
