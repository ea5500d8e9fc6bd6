"""AnyEdit: one state per window of the answer, written by another editor, so that long answers are written in parts.

"AnyEdit: Edit Any Knowledge Encoded in Language Models" (2502.05628). The answer is cut into windows of ``window``
tokens. The state at the token before a window makes the window's tokens likely with those of all earlier windows in
place (:mod:`edit_hooks.locate.answer_windows`). The base editor then writes the states at these tokens of question and
answer together, and every other token keeps its own (:mod:`edit_hooks.locate.text_states`): ``unke`` trains whole
blocks, ``memit`` and ``alphaedit`` solve for MLP output projections (``UnKE_ARE``, ``MEMIT_ARE``, ``AlphaEdit_ARE`` of
the release).

Decoding reaches a window only by the exact text before it. The release ends a window's optimization at a loss below
5e-3, the default here, too, for UnKE, and below 1e-2 for the others. Its last window under an ``overlap`` can lie in
the window before, and then is written one token too late; such a window is left out here. Nothing is carried from step
to step of a stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import NOTHING_CARRIED, Footprint
from edit_hooks.base.job import EditJob
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.base.wrapping.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.delta import Delta
from edit_hooks.editors.unke import UnKE
from edit_hooks.locate.answer_windows import (
    AnswerConfig,
    answer_of,
    answer_warnings,
    optimize_answers,
    record_answers,
    stated,
    with_answers,
)
from edit_hooks.locate.text_states import StateWriter
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE


@dataclass(kw_only=True)
class AnyEditConfig(WrapperConfig, AnswerConfig):
    """Settings of the windows and of their optimization; those of the writing are the base's."""

    base: str = config_field("the editor that writes the states: unke, memit or alphaedit", default="unke")
    base_settings: dict[str, Any] = config_field(
        "its settings, over its shipped configuration; the optimization of states has those of any_edit",
        default_factory=dict,
    )
    early_stop_loss: float = config_field(
        "stop when the loss of a window falls below this; 0: never; the release has 5e-3 on unke, else 1e-2",
        default=5e-3,
    )
    window: int = config_field("tokens of the answer per window", within=POSITIVE, default=40)
    overlap: int = config_field("tokens that a window shares with the one before", within=NON_NEGATIVE, default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap >= self.window:
            raise EditingError(
                f"'overlap' is {self.overlap} and 'window' {self.window}, so windows would not advance; give a smaller "
                "overlap."
            )


OWN = tuple(
    item.name for item in dataclasses.fields(AnswerConfig) if item.name not in EditorConfig.__dataclass_fields__
)


class AnyEdit(PostProcessingEditor[AnyEditConfig]):
    """States of an answer's windows, written by a base editor."""

    name = "any_edit"
    config_class = AnyEditConfig
    config_folders = ("any_edit",)
    reads_past_updates = False
    feeds_last_token = True
    stream_growth = NOTHING_CARRIED
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "num_steps": 6,
        "window": 2,
        "base_settings": {
            name: value for name, value in UnKE.contract_settings.items() if name not in ("layers", "num_steps")
        },
    }

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self.needs_subject, self.supports_joint = False, True

    def settings_of_base(self, base: type[Editor[Any]], config: AnyEditConfig) -> dict[str, Any]:
        if not base.writes_states:
            able = [name for name in EDITORS if editor_class(name).writes_states]
            raise EditingError(
                f"base={config.base!r} writes no states that another editor made; bases that do: {', '.join(able)}."
            )
        fixed = cast(type[StateWriter], base).states_settings
        for name, value in fixed.items():
            if config.base_settings.get(name, value) != value:
                raise EditingError(
                    f"base_settings have {name}: {config.base_settings[name]!r}, and under any_edit it is {value!r}: "
                    "its streams carry nothing, and its prompts have no templates. Drop it."
                )
        return {**config.base_settings, **fixed}

    @property
    def writer(self) -> StateWriter:
        return cast(StateWriter, self.base)

    def footprint(self, config: AnyEditConfig, model: nn.Module) -> Footprint:
        written = self.writer.states_footprint(self.base.default_config(model), model)
        return with_answers(written, config, model)

    def num_tokens_past_target(self) -> int:
        """The whole answer is run, its end-of-text token included."""
        return 1 + bool(self._append_eos)

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        config = self.known_config(model)
        answer_of(tokenizer, request, config.append_eos, config.window, config.overlap)

    def most_state_bytes(self, model: nn.Module) -> int | None:
        return 0

    def warnings(self, job: EditJob[AnyEditConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        return [*self.writer.constraint_warnings(job.model), *answer_warnings(delta)]

    def compute(self, job: EditJob[AnyEditConfig]) -> list[Delta]:
        config = job.config
        answers = [
            answer_of(job.tokenizer, request, config.append_eos, config.window, config.overlap)
            for request in job.requests
        ]
        values = optimize_answers(job, answers, config.edited_layers[-1])
        texts = [stated(answer.ids, answer, of_it) for answer, of_it in zip(answers, values, strict=True)]
        of_base = dataclasses.replace(job, config=self.base.resolve_config(job.model, job.tokenizer))
        deltas = self.writer.write_states(of_base, texts)
        record_answers(job, deltas, texts, values)
        return deltas

    def _with_base(self, base: EditorConfig, model: nn.Module) -> AnyEditConfig:
        """The configuration with the settings of the optimization in those of the base, where it has them."""
        config = super()._with_base(base, model)
        used = {name: getattr(config, name) for name in OWN if name in config.base_settings}
        return dataclasses.replace(config, base_settings={**config.base_settings, **used})
