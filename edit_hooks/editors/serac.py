"""SERAC: a memory of edits, a scope classifier, and a small counterfactual model that answers questions in scope.

Mitchell et al., "Memory-Based Model Editing at Scale" (ICML 2022). The base model does not change. An edit is a fact in
the memory. A question in the scope of a fact (:mod:`edit_hooks.in_context.fact_memory`) is answered by the
counterfactual model, which reads ``{fact} {question}``; any other one by the base model. Both models are trained for
the base model first (``lm-edit train serac``, :mod:`edit_hooks.training.serac.loss`), and refused on every other one.
``artifact: identity`` needs no training: the classifier is an embedder and the base model answers itself.

As in EasyEdit's version for causal models: the embedding classifier, trained with the soft mixture of both models
(``supervised: false``). Not copied from it: a memory that forgets (its new memory is returned, not kept, so every edit
of a stream is alone); the choice made on prompt and gold answer when likelihoods are scored, here on the question; base
models recognized by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.artifacts.trained_artifact import TrainingEdits
from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import TEXTS_CARRIED, Footprint
from edit_hooks.base.job import EditJob
from edit_hooks.base.shipped import find_shipped
from edit_hooks.deltas.context_edit import ContextEdit, MemoryModels
from edit_hooks.deltas.delta import Delta
from edit_hooks.in_context.embeddings import EMBEDDERS, require_embedder
from edit_hooks.in_context.fact_memory import IDENTITY
from edit_hooks.in_context.memory_artifact import MEMORY_MODELS
from edit_hooks.in_context.scope_classifier import Pooling, ScopeTexts
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.fingerprint.base_model import compare_models
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE
from edit_hooks.utils.storage.files import path_digest

BASE = "base"


@dataclass(kw_only=True)
class SERACConfig(EditorConfig):
    """Settings of SERAC; a trained artifact fixes those from ``classifier`` on."""

    artifact: str | None = config_field(
        "folder written by lm-edit train serac, or identity (untrained: an embedder, and the base model answers)",
        default=None,
    )
    artifact_digest: str | None = config_field("set by the editor: checksum of the artifact", default=None)
    classifier: str = config_field(
        "scope classifier: hub id or folder of an encoder, or minilm; artifact=identity: an embedder (words, minilm)",
        default="distilbert-base-cased",
    )
    pooling: Pooling = config_field(
        "vector of a text; cls: state of the first token (release); unit_mean: mean state at unit length (minilm)",
        default="cls",
    )
    scope_texts: ScopeTexts = config_field(
        "texts of the classifier; prompts: both without answers; released: the fact without its last word, and in "
        "training the question with its answer",
        default="prompts",
    )
    counterfactual: str = config_field(
        "counterfactual model: hub id or folder of a causal model with the same tokenizer, or base (a copy)",
        default=BASE,
    )
    counterfactual_blocks: int | None = config_field(
        "keep only the first blocks of the counterfactual model; null: all", within=POSITIVE, default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            raise EditingError("'layers' is set, but this editor changes no layer; drop the setting.")


class SERAC(Editor[SERACConfig]):
    """A memory of facts; a trained model answers the questions in their scope."""

    name = "serac"
    config_class = SERACConfig
    config_folders = ("serac",)
    needs_subject = False
    supports_joint = True
    reads_past_updates = False
    writes = ("context",)
    edits_quantized = True
    stream_growth = TEXTS_CARRIED
    trainer = "edit_hooks.training.serac.trainer:SERACTrainer"
    # Untrained: the base model reads the fact before questions in scope.
    contract_settings: ClassVar[Settings] = {"artifact": IDENTITY, "classifier": "words"}
    contract_exemptions: ClassVar[Mapping[str, str]] = {"target": "a random model does not follow its prompt"}

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self._training_edits = TrainingEdits(MEMORY_MODELS)

    def default_config(self, model: nn.Module) -> SERACConfig:
        shipped = find_shipped(self.config_folders, unwrapped(model).config, self.overrides.get("shipped"))
        config = self.config_class.from_mapping(self.config_class.overridden(shipped.settings, self.overrides))
        if config.artifact == IDENTITY:
            digest = None if config.classifier in EMBEDDERS else path_digest(config.classifier)
            config.record_digest("artifact_digest", "classifier", digest)
        elif config.artifact is not None:
            config.record_digest("artifact_digest", "artifact", MEMORY_MODELS.digest(config.artifact))
            MEMORY_MODELS.apply_settings(
                config, self.overrides, config.artifact, MEMORY_MODELS.read_manifest(config.artifact)
            )
        return config

    def check_inputs(self, config: SERACConfig) -> None:
        if config.artifact is None:
            raise EditingError(
                "editor 'serac' needs a scope classifier and a counterfactual model trained for this model: run "
                "lm-edit train serac and pass its folder as editor_args=artifact:<folder> (artifact:identity: "
                "untrained, an embedder and the base model itself)."
            )
        if config.artifact == IDENTITY:
            if "classifier" not in self.overrides:
                raise EditingError(
                    "artifact:identity scores questions with an embedder; name it: classifier:words, classifier:minilm "
                    "or a sentence-transformers model."
                )
            require_embedder(config.classifier)
        else:
            MEMORY_MODELS.load(config.artifact)  # checks every tensor

    def prepare(self, config: SERACConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.check_inputs(config)
        if config.artifact is not None and config.artifact != IDENTITY:
            recorded = MEMORY_MODELS.read_manifest(config.artifact)["model"]
            source = f"the {MEMORY_MODELS.what} in {config.artifact}"
            compare_models(recorded, model_identity(model, tokenizer), source)

    def footprint(self, config: SERACConfig, model: nn.Module) -> Footprint:
        """The trained models beside the edited one; without an artifact the base model answers itself."""
        if config.artifact is None or config.artifact == IDENTITY:
            return Footprint()
        return Footprint(models=sum(file.stat().st_size for file in Path(config.artifact).glob("**/*.safetensors")))

    def compute(self, job: EditJob[SERACConfig]) -> list[Delta]:
        deltas = []
        for group in job.groups:
            contexts = tuple(_fact(request, job.config) for request in group)
            deltas.append(Delta(contexts=contexts, diagnostics={"facts": len(contexts)}))
            job.progress(len(group))
        return deltas

    def warnings(self, job: EditJob[SERACConfig], requests: Sequence[EditRequest], delta: Delta) -> list[str]:
        config = job.config
        if config.artifact is None or config.artifact == IDENTITY:
            return []
        return self._training_edits.warnings(config.artifact, config.artifact_digest, requests)


def _fact(request: EditRequest, config: SERACConfig) -> ContextEdit:
    """A request as a fact of the memory."""
    assert config.artifact is not None
    if config.artifact == IDENTITY:
        models, embedder = MemoryModels(IDENTITY), config.classifier
    else:
        # as the settings name it: a stored edit is found by them, also after the folder around it was renamed
        models, embedder = MemoryModels(config.artifact, config.artifact_digest or ""), ""
    return ContextEdit(
        request.bare_text, request.target_new, embedder=embedder, memory=models, separator=request.without_context.seam
    )
