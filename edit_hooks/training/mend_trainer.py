"""Training MEND's hyper-network on a frozen model: data, loss, optimizer, validation, resuming.

One optimizer step sees ``accumulate`` batches of ``edits_per_example`` edits. A batch's loss is

    c_edit * NLL(target | paraphrase, edited model) + c_loc * KL(unedited || edited) on locality texts

both means over tokens ("Fast Model Editing at Scale", eq. 5; gradients of the edit are taken as given, so it is first
order). The edited model is the model with the update's factors added at the edited matrices' outputs; its weights are
never written. One Adam: the networks at ``lr``, the step sizes at ``lr_step_sizes``. (The released code makes a second
optimizer for the step sizes, whose gradient the first has just cleared: there they move at ``lr``.)

Not copied from EasyEdit: the paraphrase is loaded but the loss is taken on the edit itself (``edit_loss: edit`` does
so), the early stop never fires and the last checkpoint is kept, locality tokens are counted from the wrong end, and
statistics start anew when a run is resumed.

All that is random is a function of the seed and the step. A run that is killed and started again with the same
settings goes on from its last validation and ends in the same bits.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import config_field
from edit_hooks.editors.mend import MEND, MENDConfig, edited_shapes, token_factors
from edit_hooks.gradient.hypernetwork import HyperNetwork, Tokens, Update, edit_digest, save_network
from edit_hooks.gradient.labeled_rows import (
    Example,
    LabeledRows,
    keep_below,
    label_logits,
    label_nll,
    padded_for,
    target_example,
)
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.fingerprint import model_fingerprint
from edit_hooks.modeling.hooks import frozen, hooks
from edit_hooks.modeling.tensors import write_tensors
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import key_of

log = logging.getLogger("lm_eval.edited_hf")


RESUME_NAME, RESUME_FORMAT = "resume.safetensors", "lm-eval-editing/mend-resume/1"


# What the artifact fixes for every later edit.
FIXED = ("layers", "modules", "edit_lr", "rank", "num_hidden", "normalize", "sign", "append_eos")


MAX_SKIPPED = 20


@dataclass(frozen=True, kw_only=True)
class EditExample:
    """A training edit: the edit itself, rewordings of its prompt, and unrelated texts that should stay as they are."""

    prompt: str
    target: str
    paraphrases: tuple[str, ...] = ()
    locality: tuple[tuple[str, str], ...] = ()


class EditData(NamedTuple):
    """Training and validation examples, and where they come from (JSON-able)."""

    train: list[EditExample]
    validation: list[EditExample]
    report: dict[str, Any]


@dataclass(kw_only=True)
class TrainingConfig(MENDConfig):
    """Settings of MEND and of its training; those of the networks and the edited matrices end up in the artifact."""

    num_steps: int = config_field("optimizer steps at most", default=10000)
    accumulate: int = config_field("batches per optimizer step", default=10)
    edits_per_example: int = config_field("edits made jointly in a batch", default=1)
    lr: float = config_field("Adam learning rate of the networks", default=1e-6)
    lr_step_sizes: float = config_field("Adam learning rate of the step sizes", default=1e-4)
    max_grad_norm: float = config_field("gradients are clipped to this norm", default=100.0)
    c_edit: float = config_field("weight of the edit loss", default=0.1)
    c_loc: float = config_field("weight of the locality loss", default=1.0)
    edit_loss: Literal["paraphrase", "edit"] = config_field(
        "the prompt of the edit loss; edit as EasyEdit", default="paraphrase"
    )
    locality_tokens: Literal["all", "answer"] = config_field("where the locality loss is taken", default="all")
    validate_every: int = config_field("optimizer steps between validations (and saved states)", default=100)
    num_validation: int = config_field("validation examples used", default=100)
    patience: int = config_field("stop after so many steps without a better validation loss", default=2000)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "num_steps",
            "accumulate",
            "edits_per_example",
            "lr",
            "validate_every",
            "num_validation",
            "patience",
        ):
            if getattr(self, name) <= 0:
                raise EditingError(
                    f"training setting {name!r} is {getattr(self, name)!r}; a positive number is needed."
                )


@dataclass
class Progress:
    """How far a run is; all that a resumed run needs beside the tensors."""

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    skipped: int = 0
    losses: list[dict[str, float]] = dataclasses.field(default_factory=list)


class Trainer:
    """Trains a hyper-network into a folder.

    Args:
        out: folder of the artifact and of the state a killed run resumes from.
        base: what the manifest says about the model beside its fingerprint (JSON-able), ``model_name`` among it.

    Raises:
        EditingError: for a folder with a run of other settings, data or model.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: TrainingConfig,
        data: EditData,
        out: str | Path,
        base: dict[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        if not data.train or not data.validation:
            raise EditingError(
                f"{len(data.train)} training and {len(data.validation)} validation edits; both are needed."
            )
        assert config.layers is not None
        self.model: Any = unwrapped(model)
        self.tokenizer, self.config, self.data, self.out = tokenizer, config, data, Path(out)
        self.quiet = quiet
        weight = self.model.get_input_embeddings().weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.network = HyperNetwork(edited_shapes(self.model, config), config.network_settings()).to(
            weight.device, dtype
        )
        networks = [p for name, p in self.network.named_parameters() if name != "step_sizes"]
        self.optimizer = torch.optim.Adam(
            [{"params": networks, "lr": config.lr}, {"params": [self.network.step_sizes], "lr": config.lr_step_sizes}]
        )
        self.progress = Progress()
        self.base = {
            "model": model_fingerprint(self.model),
            "model_name": str(getattr(self.model.config, "name_or_path", "")),
            "model_type": self.model.config.model_type,
            "dtype": str(weight.dtype),
            **(base or {}),
        }
        settings = {name: value for name, value in config.to_dict().items() if name not in ("num_steps", "patience")}
        self.identity = {"model": self.base["model"], "data": data.report, "settings": settings}

    def run(self) -> Progress:
        """Train to the end (steps or early stop), from where an earlier run stopped; returns how it went."""
        if (self.out / RESUME_NAME).exists():
            self._resume()
        config, progress = self.config, self.progress
        with (
            frozen(self.model),
            torch.inference_mode(False),
            torch.enable_grad(),
            tqdm(
                total=config.num_steps, initial=progress.step, desc="Training MEND", unit="step", disable=self.quiet
            ) as bar,
        ):
            if not progress.losses:
                self._validate_and_save()
            while progress.step < config.num_steps and not self._stalled():
                loss = self._step(progress.step)
                progress.step += 1
                bar.update(1)
                if progress.step % config.validate_every == 0 or progress.step == config.num_steps:
                    self._validate_and_save()
                bar.set_postfix(loss=f"{loss:.3f}", best=f"{progress.best_loss:.3f}", refresh=False)
        return progress

    def _stalled(self) -> bool:
        return self.progress.step - self.progress.best_step >= self.config.patience

    # ---------------------------------------------------------------------------------------------- one step

    def _step(self, step: int) -> float:
        """One optimizer step; returns its mean loss. Steps without finite gradients are skipped and counted."""
        config = self.config
        self.optimizer.zero_grad()
        total = 0.0
        for part in range(config.accumulate):
            loss, _ = self._loss(self._batch(step * config.accumulate + part), training=True)
            (loss / config.accumulate).backward()
            total += float(loss.detach()) / config.accumulate
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), config.max_grad_norm)
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            self.progress.skipped += 1
            if self.progress.skipped >= MAX_SKIPPED:
                raise EditingError(
                    f"{MAX_SKIPPED} steps of the training had gradients that are not finite; lower lr or edit_lr, or "
                    "train in float32."
                )
        return total

    def _batch(self, number: int) -> list[tuple[EditExample, int]]:
        """Examples of batch ``number`` of the run, each with a number that its own random choices are made from."""
        train, size = self.data.train, self.config.edits_per_example
        chosen = []
        for place in range(number * size, (number + 1) * size):
            epoch, index = divmod(place, len(train))
            chosen.append((train[_order(len(train), self.config.seed, epoch)[index]], place))
        return chosen

    def _loss(self, batch: Sequence[tuple[EditExample, int]], training: bool) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss of a batch of edits made jointly, and its parts."""
        config, first = self.config, min(self.config.layers or [0])
        eos = config.append_eos
        edits = [target_example(self.tokenizer, e.prompt, e.target, append_eos=eos) for e, _ in batch]
        tokens = self._tokens(padded_for(self.model, edits))
        if training and config.normalize:
            self.network.observe(tokens)
        updates = self.network(tokens)
        reworded = [
            target_example(self.tokenizer, self._reworded(example, number), example.target, append_eos=eos)
            for example, number in batch
        ]
        unrelated = [self._unrelated(example, number) for example, number in batch]
        rows = padded_for(self.model, [*reworded, *unrelated])
        keep_below(self.model, rows, first)
        is_edit_L = rows.row_L < len(reworded)
        unrelated_rows = dataclasses.replace(
            rows, **{name: getattr(rows, name)[~is_edit_L] for name in ("row_L", "column_L", "token_L")}
        )
        with torch.no_grad():
            before_LV = label_logits(self.model, unrelated_rows).log_softmax(1)
        with hooks(*(_added(self.model.get_submodule(name), update) for name, update in updates.items())):
            after_LV = label_logits(self.model, rows).log_softmax(1)
        wanted_L = rows.token_L[is_edit_L].to(after_LV.device)
        edit = -after_LV[is_edit_L].gather(1, wanted_L[:, None]).mean()
        locality = (
            nn.functional.kl_div(after_LV[~is_edit_L], before_LV, reduction="none", log_target=True).sum(1).mean()
        )
        right = float((after_LV[is_edit_L].argmax(1) == wanted_L).float().mean())
        parts = {"edit": float(edit.detach()), "locality": float(locality.detach()), "right": right}
        return config.c_edit * edit + config.c_loc * locality, parts

    def _tokens(self, rows: LabeledRows) -> dict[str, Tokens]:
        """Token factors of a joint edit: the loss is the mean over all target tokens (or the sum of edits' means)."""
        keep_below(self.model, rows, min(self.config.layers or [0]))
        divisor = rows.counts_L() if self.config.joint_loss == "sum" else len(rows.token_L)
        factors, _ = token_factors(self.model, rows, divisor, list(self.network.shapes))
        kept, home = rows.mask_RT.bool(), self.network.step_sizes.device
        return {
            name: Tokens(x[kept.to(x.device)].to(home), delta[kept.to(delta.device)].to(home))
            for name, (x, delta) in factors.items()
        }

    def _reworded(self, example: EditExample, number: int) -> str:
        """The prompt of the edit loss: one of the paraphrases, the edit's own prompt where it has none."""
        if self.config.edit_loss == "edit" or not example.paraphrases:
            return example.prompt
        return example.paraphrases[_draw(len(example.paraphrases), self.config.seed, number, 1)]

    def _unrelated(self, example: EditExample, number: int) -> Example:
        """One of the example's locality texts; another edit's prompt where it has none."""
        if example.locality:
            prompt, answer = example.locality[_draw(len(example.locality), self.config.seed, number, 2)]
        else:
            train = self.data.train
            start = _draw(len(train), self.config.seed, number, 2)
            others = (train[(start + i) % len(train)] for i in range(len(train)))
            other = next((other for other in others if other.prompt != example.prompt), None)
            if other is None:
                raise EditingError("an edit without locality texts needs other edits to take some from.")
            prompt, answer = other.prompt, other.target
        text = target_example(self.tokenizer, prompt, answer)
        if self.config.locality_tokens == "answer":
            return text
        following = [*text.ids[1:], text.labels[-1][1]]
        return Example(text.ids, list(enumerate(following)))

    # -------------------------------------------------------------------------------------- validation, saving

    def _validate_and_save(self) -> None:
        """Losses on the validation edits; the artifact if they are the best so far; the state to resume from."""
        progress, examples = self.progress, self.data.validation[: self.config.num_validation]
        record = {"step": float(progress.step)}
        if progress.step:  # before the first step a normalizing network has no statistics
            sums = {"loss": 0.0, "edit": 0.0, "locality": 0.0, "right": 0.0}
            with torch.no_grad():
                for number, example in enumerate(tqdm(examples, desc="Validating", leave=False, disable=self.quiet)):
                    loss, parts = self._loss([(example, -1 - number)], training=False)
                    for name, value in {"loss": float(loss), **parts}.items():
                        sums[name] += value / len(examples)
            record |= sums
            log.info("step %d: %s", progress.step, ", ".join(f"{k} {v:.4f}" for k, v in sums.items()))
        else:
            record |= self._unedited(examples)
        progress.losses.append(record)
        if progress.step and record["loss"] < progress.best_loss:
            progress.best_loss, progress.best_step = record["loss"], progress.step
            self._save_artifact()
        self._save_state()

    @torch.no_grad()
    def _unedited(self, examples: Sequence[EditExample]) -> dict[str, float]:
        """The validation edit loss of the unedited model: what training has to beat."""
        total = 0.0
        for number, example in enumerate(examples):
            prompt = self._reworded(example, -1 - number)
            rows = padded_for(self.model, [target_example(self.tokenizer, prompt, example.target)])
            total += float(label_nll(self.model, rows).mean()) / len(examples)
        return {"loss": self.config.c_edit * total, "edit": total, "locality": 0.0}

    def _save_artifact(self) -> None:
        config = self.config.to_dict()
        manifest = {
            **self.base,
            "editor": {name: config[name] for name in FIXED},
            "training": {name: value for name, value in config.items() if name not in FIXED},
            "data": self.data.report,
            "step": self.progress.step,
            "losses": self.progress.losses,
            "skipped_steps": self.progress.skipped,
        }
        seen = {edit_digest(example.prompt, example.target) for example in self.data.train}
        save_network(self.network, manifest, self.out, seen)

    def _save_state(self) -> None:
        tensors = {f"network/{name}": tensor for name, tensor in self.network.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"adam/{index}/{name}": torch.as_tensor(value) for name, value in state.items()}
        header = {
            "format": RESUME_FORMAT,
            "identity": json.dumps(self.identity),
            "progress": json.dumps(dataclasses.asdict(self.progress)),
        }
        self.out.mkdir(parents=True, exist_ok=True)
        write_tensors(self.out / RESUME_NAME, tensors, header)

    def _resume(self) -> None:
        """Take up the state that an earlier run left in the folder."""
        path = self.out / RESUME_NAME
        try:
            with safe_open(path, framework="pt", device=str(self.network.step_sizes.device)) as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise EditingError(f"cannot read the state of an earlier run in {path}: {error}") from error
        if header.get("format") != RESUME_FORMAT:
            raise EditingError(f"{path} is not the state of a training run; name another folder.")
        found = json.loads(header["identity"])
        different = [name for name in self.identity if key_of(found.get(name)) != key_of(self.identity[name])]
        if different:
            raise EditingError(
                f"{self.out} holds a run with other {', '.join(different)}; name another folder, or give what that run "
                f"was given: {json.dumps({name: found.get(name) for name in different})[:600]}"
            )
        self.network.load_state_dict(
            {name.removeprefix("network/"): tensor for name, tensor in tensors.items() if name.startswith("network/")}
        )
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adam/"):
                _, index, part = name.split("/")
                state.setdefault(int(index), {})[part] = tensor.cpu() if part == "step" else tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.progress = Progress(**json.loads(header["progress"]))
        log.info("going on from step %d of the run in %s.", self.progress.step, self.out)


def _added(module: nn.Module, update: Update) -> Any:
    """Registration of a hook that adds an update's share to a linear map's output; gradients flow into the update."""
    left, right = update

    def hook(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        share = (args[0].to(right) @ right) @ left.T
        return (output.to(share.dtype) + share.to(output.device)).to(output.dtype)

    return lambda: module.register_forward_hook(hook)


_ORDERS: dict[tuple[int, int, int], list[int]] = {}


def _order(length: int, seed: int, epoch: int) -> list[int]:
    """The order of the training edits in one epoch."""
    key = (length, seed, epoch)
    if key not in _ORDERS:
        _ORDERS.clear()
        _ORDERS[key] = torch.randperm(length, generator=_generator(seed, epoch, 0)).tolist()
    return _ORDERS[key]


def _draw(length: int, seed: int, number: int, purpose: int) -> int:
    return int(torch.randint(length, (), generator=_generator(seed, number, purpose)))


def _generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(key_of(list(parts))[:15], 16))


def training_config(model: nn.Module, settings: dict[str, Any]) -> TrainingConfig:
    """Full training settings for a model: defaults, the shipped file of editor ``mend``, then the given ones."""
    fields = {field.name for field in dataclasses.fields(MENDConfig)}
    TrainingConfig.from_mapping(settings)  # unknown settings are named here, with near misses
    if "artifact" in settings:
        raise EditingError("'artifact' is what training makes; drop it, and name the folder with --out.")
    editor = MEND({name: value for name, value in settings.items() if name in fields})
    resolved = editor.default_config(model)
    own = {field.name: getattr(resolved, field.name) for field in dataclasses.fields(MENDConfig)}
    return TrainingConfig(**{**own, **settings})
