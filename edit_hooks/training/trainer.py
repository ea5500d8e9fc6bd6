"""Training of what an editor learns for a frozen model: optimization, validation, early stop, resuming.

One optimizer step averages the loss over ``accumulate`` batches of ``edits_per_example`` edits; up to ``batch_size``
edits share the passes of the model. Validation edits are made in groups of ``edits_per_validation``. The artifact holds
the weights with the best validation loss.

A killed run that is started again with the same settings resumes from its last validation, bit-identical.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.artifacts.trained_artifact import ArtifactKind, edit_digest
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tensors import read_tensors, write_tensors
from edit_hooks.modeling.weights import check_weights, keep_layout
from edit_hooks.training.edit_data import EditData, LossTerms, NumberedExample, training_batch
from edit_hooks.training.settings import TrainingSettings
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import remove_leftovers, without_folders
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.outputs import check_output_folder, check_writable_folder

log = get_logger("lm_eval.edited_hf")

RESUME_NAME = "resume.safetensors"
MAX_SKIPPED = 20  # optimizer steps without finite gradients after which a run fails
MAX_QUOTED = 600  # characters of the other run's settings in an error message

ConfigT = TypeVar("ConfigT", bound=TrainingSettings)


class BatchLoss(Protocol):
    """The training loss as a function of batches."""

    def __call__(self, batches: Sequence[Sequence[NumberedExample]], observe: bool) -> list[LossTerms]:
        """Losses of some batches, each of edits made jointly.

        Args:
            observe: the batches are training batches, whose statistics are collected, if there are any.
        """

    def unedited(self, batch: Sequence[NumberedExample]) -> dict[str, float]:
        """The loss of one batch for the unedited model, and its terms: the values that training has to beat."""


@dataclass
class TrainingProgress:
    """State of a run beside its tensors.

    Attributes:
        step: optimizer steps so far.
        best_step, best_loss: step and loss of the best validation.
        skipped: steps without finite gradients.
        losses: one record per validation.
    """

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    skipped: int = 0
    losses: list[dict[str, float]] = dataclasses.field(default_factory=list)


def describe_model(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a manifest records about the model that an artifact is for."""
    return {
        "model": model_identity(model, tokenizer).to_dict(),
        "model_name": without_folders(str(getattr(model.config, "name_or_path", ""))),  # artifacts are passed on
        "model_type": model.config.model_type,
        "dtype": str(model.get_input_embeddings().weight.dtype),
    }


@dataclass(frozen=True)
class ImportSource:
    """Where imported weights come from, and where their artifact goes.

    Attributes:
        model_info: entries of the manifest about the model.
        imported: entries about the weights.
        out: folder of the artifact.
    """

    model_info: Mapping[str, Any]
    imported: Mapping[str, Any]
    out: Path

    def manifest(self, editor: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest of the artifact.

        Args:
            editor: the settings that hold for every edit made with it.
        """
        return {**self.model_info, "editor": dict(editor), "imported": dict(self.imported)}


def check_training_folder(out: str | Path) -> Path:
    """Check that a training can write into a folder: a new or empty one, or that of an interrupted run.

    Raises:
        EditingError: for other folders.
    """
    folder = check_writable_folder(out)
    remove_leftovers(folder)
    return folder if (folder / RESUME_NAME).exists() else check_output_folder(out)


class Trainer(abc.ABC, Generic[ConfigT]):
    """Trains something for a model into a folder.

    A subclass sets the attributes up to ``artifact_settings`` and implements the abstract methods. An editor names its
    trainer in :attr:`edit_hooks.base.editor.Editor.trainer`.

    Args:
        out: folder of the artifact and of the state that a killed run resumes from.
        model_info: JSON-able entries of the manifest about the model, as ``model_name``; its identity is added.

    Attributes:
        config_class: the settings of the editor and of its training.
        kind: of its artifacts.
        title: what is trained, for the progress bar.
        resume_format: name and version of the saved state.
        rates: the settings to lower if gradients are not finite.
        artifact_settings: settings that an artifact fixes for every edit made with it.
        loss, optimizer: created by :meth:`set_up` from ``model``, ``config`` and ``data``.
        sources: digests of the files that the training starts from, if any.

    Raises:
        EditingError: no training or validation edits, or a folder with a run of other settings, data or model.
    """

    config_class: type[ConfigT]
    kind: ClassVar[ArtifactKind]
    title: ClassVar[str]
    resume_format: ClassVar[str]
    rates: ClassVar[str] = "lr"
    artifact_settings: ClassVar[tuple[str, ...]]

    loss: BatchLoss
    optimizer: torch.optim.Optimizer
    sources: Mapping[str, str | None] = MappingProxyType({})

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: ConfigT,
        data: EditData,
        out: str | Path,
        model_info: dict[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        if not data.train or not data.validation:
            raise EditingError(
                f"{len(data.train)} training and {len(data.validation)} validation edits; both are needed."
            )
        self.model = unwrapped(model)
        check_weights(self.model)
        keep_layout(self.model)
        self.config, self.data, self.out, self.quiet = config, data, check_training_folder(out), quiet
        self.set_up(tokenizer)
        self.progress = TrainingProgress()
        self.model_info = {**describe_model(self.model, tokenizer), **without_folders(model_info or {})}
        # A resumed run may train for longer than the interrupted one, but nothing else may differ.
        settings = {name: value for name, value in config.to_dict().items() if name not in ("num_steps", "patience")}
        self.identity: dict[str, Any] = {
            "model": self.model_info["model"],
            "data": data.report,
            "settings": settings,
            **({"sources": self.sources} if self.sources else {}),
        }

    @classmethod
    def check_inputs(cls, config: ConfigT, tokenizer: PreTrainedTokenizerBase, data: EditData) -> None:
        """Check what the training reads besides the model, before any weight is loaded.

        Raises:
            EditingError: for inputs that are missing or do not fit.
        """

    @classmethod
    def import_artifact(
        cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase, config: ConfigT, weights: Path, source: ImportSource
    ) -> None:
        """Hook: write an artifact of weights that were trained elsewhere, with :meth:`ImportSource.manifest`.

        Args:
            config: settings of the editor under which they were trained.
            weights: a safetensors file, or a folder with such files.

        Raises:
            EditingError: for weights that cannot be read, or do not fit the model and the settings.
        """
        raise EditingError(f"weights for {cls.title} cannot be imported; its trainer has no import_artifact.")

    @abc.abstractmethod
    def set_up(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Create the trained modules, their loss and the optimizer."""

    @abc.abstractmethod
    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are clipped together."""

    @abc.abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that training changes, by name."""

    @abc.abstractmethod
    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned."""

    @abc.abstractmethod
    def save_artifact(self) -> None:
        """Write the artifact with the present weights."""

    def run(self) -> TrainingProgress:
        """Train to the last step or the early stop, resuming an interrupted run in the folder.

        A run ends at a validation: patience is compared there, as in the release, and the last step is validated.

        Raises:
            EditingError: the run wrote no artifact, because no validation loss was finite.
        """
        if (self.out / RESUME_NAME).exists():
            self._resume()
        config, progress = self.config, self.progress
        with (
            frozen(self.model),
            torch.inference_mode(False),
            torch.enable_grad(),
            tqdm(
                total=config.num_steps,
                initial=progress.step,
                desc=f"Training {self.title}",
                unit="step",
                disable=self.quiet,
            ) as bar,
        ):
            if not progress.losses:
                self._validate_and_save()
            while progress.step < config.num_steps and progress.step - progress.best_step < config.patience:
                self._train_to_validation(bar)
                self._validate_and_save()
        if progress.best_step == 0:
            raise EditingError(
                f"no artifact was written to {self.out}: no validation loss of {progress.step} steps was finite. Lower "
                f"{self.rates}, or train in float32, in a new folder; or a validation edit overflows in the model."
            )
        if progress.best_loss >= progress.losses[0]["loss"]:
            log.warning("%s", self._no_gain())
        return progress

    def _no_gain(self) -> str:
        """The warning about a run that did not beat the unedited model."""
        unedited, best = (next(r for r in self.progress.losses if r["step"] == s) for s in (0, self.progress.best_step))
        terms = f"of the edit {best['edit']:.4f} and of locality {best['locality']:.4f}"
        return (
            f"the artifact in {self.out} is worse than no edit: its validation loss, {best['loss']:.4f} ({terms}), is "
            f"not below that of the unedited model, {unedited['loss']:.4f}. Raise num_steps to resume this run, "
            f"or change {self.rates}, c_edit or c_loc in a new folder."
        )

    def _train_to_validation(self, bar: tqdm[Any]) -> None:
        """The steps up to the next validation, or to the last one."""
        progress, every = self.progress, self.config.validate_every
        for _ in range(min(every - progress.step % every, self.config.num_steps - progress.step)):
            loss = self._step(progress.step)
            progress.step += 1
            bar.update(1)
            bar.set_postfix(loss=f"{loss:.3f}", best=f"{progress.best_loss:.3f}", refresh=False)

    def _step(self, step: int) -> float:
        """One optimizer step; returns its mean loss. Steps without finite gradients are skipped and counted."""
        config = self.config
        self.optimizer.zero_grad()
        mean_loss = 0.0
        numbers = range(step * config.accumulate, (step + 1) * config.accumulate)
        batches = [training_batch(self.data.train, config.edits_per_example, config.seed, number) for number in numbers]
        for shared in self._sharing_passes(batches):
            loss = torch.stack([terms.loss for terms in self.loss(shared, observe=True)]).sum() / config.accumulate
            loss.backward()
            mean_loss += float(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.trained_parameters(), config.max_grad_norm)
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            self.progress.skipped += 1
            if self.progress.skipped >= MAX_SKIPPED:
                raise EditingError(
                    f"{MAX_SKIPPED} steps of the training had gradients that are not finite; lower {self.rates}, or "
                    "train in float32."
                )
        return mean_loss

    def _sharing_passes(self, batches: list[list[NumberedExample]]) -> Iterator[list[list[NumberedExample]]]:
        """The batches in groups of at most ``batch_size`` edits, but at least one batch."""
        size = max(1, self.config.batch_size // len(batches[0]))
        for start in range(0, len(batches), size):
            yield batches[start : start + size]

    # -------------------------------------------------------------------------------------- validation, saving

    def _validate_and_save(self) -> None:
        """Record the validation losses, save the artifact if they are the best so far, and save the run's state."""
        progress = self.progress
        record = {"step": float(progress.step), **self._validation_losses(self._validation_batches())}
        progress.losses.append(record)
        if progress.step and record["loss"] < progress.best_loss:
            progress.best_loss, progress.best_step = record["loss"], progress.step
            self.save_artifact()
        self._save_state()

    def _validation_batches(self) -> list[list[NumberedExample]]:
        """The validation edits in the groups that are made jointly; the last one can be smaller."""
        examples, size = self.data.validation[: self.config.num_validation], self.config.edits_per_validation
        assert size is not None, "the settings resolve it"
        numbered = [NumberedExample(example, -1 - index) for index, example in enumerate(examples)]
        return [numbered[start : start + size] for start in range(0, len(numbered), size)]

    @torch.no_grad()
    def _validation_losses(self, batches: list[list[NumberedExample]]) -> dict[str, float]:
        """Means over the validation edits; before the first step those of the unedited model."""
        count, means = sum(map(len, batches)), dict[str, float]()
        with tqdm(total=count, desc="Validating", leave=False, disable=self.quiet) as bar:
            for shared in self._sharing_passes(batches):
                for batch, terms in zip(shared, self._terms(shared), strict=True):
                    for name, value in terms.items():
                        means[name] = means.get(name, 0.0) + value * len(batch) / count
                    bar.update(len(batch))
        log.info("step %d: %s", self.progress.step, ", ".join(f"{name} {mean:.4f}" for name, mean in means.items()))
        return means

    def _terms(self, batches: list[list[NumberedExample]]) -> list[dict[str, float]]:
        """Loss and its terms of some validation batches."""
        if self.progress.step == 0:  # a normalizing network has no statistics yet
            return [self.loss.unedited(batch) for batch in batches]
        return [{"loss": float(loss), **metrics} for loss, metrics in self.loss(batches, observe=False)]

    def manifest(self) -> dict[str, Any]:
        """What an artifact records about its run."""
        config = self.config.to_dict()
        return {
            **self.model_info,
            "editor": {name: config[name] for name in self.artifact_settings},
            "training": {name: value for name, value in config.items() if name not in self.artifact_settings},
            "data": self.data.report,
            "step": self.progress.step,
            "losses": self.progress.losses,
            "skipped_steps": self.progress.skipped,
        }

    def training_digests(self) -> set[int]:
        """Of the training edits, which an artifact records."""
        return {edit_digest(example.prompt, example.target) for example in self.data.train}

    def _save_state(self) -> None:
        """Write what a killed run resumes from.

        Raises:
            EditingError: it is no longer finite; the file keeps the last state that was.
        """
        tensors = {f"network/{name}": tensor for name, tensor in self.state().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"adam/{index}/{name}": torch.as_tensor(value) for name, value in state.items()}
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise EditingError(
                f"after {self.progress.step} steps of the training its state is no longer finite; lower {self.rates}, "
                "or train in float32, in a new folder."
            )
        header = {
            "format": self.resume_format,
            "identity": json.dumps(self.identity),
            "progress": json.dumps(dataclasses.asdict(self.progress)),
        }
        self.out.mkdir(parents=True, exist_ok=True)
        write_tensors(self.out / RESUME_NAME, tensors, header)

    def _resume(self) -> None:
        """Restore the state that an interrupted run left in the folder."""
        header, tensors = self._read_state()
        stored = json.loads(header["identity"])
        different = [name for name in self.identity if key_of(stored.get(name)) != key_of(self.identity[name])]
        if different:
            raise EditingError(
                f"{self.out} holds a run with other {', '.join(different)}; name another folder, or use those of that "
                f"run: {json.dumps({name: stored.get(name) for name in different})[:MAX_QUOTED]}"
            )
        self.load_state(
            {name.removeprefix("network/"): tensor for name, tensor in tensors.items() if name.startswith("network/")}
        )
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adam/"):
                _, index, entry = name.split("/")
                state.setdefault(int(index), {})[entry] = tensor.cpu() if entry == "step" else tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.progress = TrainingProgress(**json.loads(header["progress"]))
        log.info("resuming the run in %s after step %d.", self.out, self.progress.step)

    def _read_state(self) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        """Header and tensors of the state file."""
        path = self.out / RESUME_NAME
        device = str(self.trained_parameters()[0].device)
        header, tensors = read_tensors(path, "state of an earlier run", device)
        if header.get("format") != self.resume_format:
            raise EditingError(f"{path} is not the state of a training run; name another folder.")
        return header, tensors
