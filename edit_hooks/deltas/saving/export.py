"""Export of edits: as a PEFT LoRA adapter, or the edited model as a checkpoint folder.

An adapter is exact: at every edited module ``lora_B @ lora_A`` is the update (scaling 1), in float32. Writing it needs
neither peft nor the model. Stock ``lm_eval --model hf`` with ``peft=<folder>`` and servers with LoRA support then run
the edited model. Two differences remain: when the harness loads an adapter, it shrinks the embedding to the length of
the tokenizer, so log-likelihoods of models with unused vocabulary rows exclude those rows; and an adapter adds to the
output of a module, whereas a checkpoint rounds W + update to the weight's dtype.

A checkpoint holds W + update, formed in at least float32 and rounded once.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.content import check_metadata
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.saving.peft_rules import check_adapter_config, check_expressions, rank_of, scaling, target_names
from edit_hooks.deltas.saving.truncation import adapter_name, editor_of
from edit_hooks.deltas.schema import Record, Tensor, mapping_of, of_file, require_shallow
from edit_hooks.modeling.adapter_layers import has_adapter_layers
from edit_hooks.modeling.architectures import head_of, is_transposed, unwrapped, weight_of
from edit_hooks.modeling.tensors import read_tensors, write_tensors
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.scopes import undone
from edit_hooks.utils.storage.files import without_folders
from edit_hooks.utils.storage.json_io import json_text, read_json
from edit_hooks.utils.storage.outputs import check_output_folder, disk_errors

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
ORIGIN_NAME = "edit_origin.json"  # metadata of the edit, beside peft's files
PREFIX = "base_model.model."  # of peft's tensor names


def export_peft(delta: Delta, folder: str | Path, base_model: str | None = None, revision: str | None = None) -> Path:
    """Write a low-rank edit as a PEFT LoRA adapter; peft itself is not needed.

    Args:
        base_model: hub id of the edit's base model, for the adapter's description. A folder is not recorded:
            ``edit_origin.json`` identifies the model by the hash of its weights.
        revision: its revision on the hub.

    Returns:
        The folder, with ``adapter_config.json``, ``adapter_model.safetensors`` and ``edit_origin.json``.

    Raises:
        EditingError: the edit is not a sum of low-rank updates, changes no weight, or the folder is not empty.
    """
    rank, matrices = adapter_matrices(delta)
    target = check_output_folder(folder)
    transposed = {factor.transposed for factor in delta.factors.values()}
    if len(transposed) > 1:
        raise EditingError("the edit mixes weights of both orientations, which one adapter cannot; export it merged.")
    tensors = {}
    for name, (a_KF, b_DK) in matrices.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a_KF, b_DK
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base_model is None or Path(base_model).expanduser().exists() else base_model,
        "revision": revision,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed == {True},
        "target_modules": sorted(matrices),  # complete names: no other module can match
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    with new_folder(target) as work:
        write_tensors(work / WEIGHTS_NAME, tensors, {"format": "pt"})
        _write_json(work / CONFIG_NAME, config)
        write_origin(work, delta)
    return target


def adapter_matrices(delta: Delta) -> tuple[int, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The rank of an adapter, and A [K, F] and B [D, K] by module, float32 on the CPU: the update is B A.

    All modules have one rank, padded with zeros: not every reader supports several.

    Raises:
        EditingError: the edit is not a sum of low-rank updates, or changes no weight.
    """
    _require_low_rank(delta)
    factors = {name: _with_minimal_rank(factor) for name, factor in delta.factors.items()}
    rank = max(factor.left.shape[1] for factor in factors.values())
    matrices = {}
    for name, factor in factors.items():
        a_KF = nn.functional.pad(factor.right.T.float(), (0, 0, 0, rank - factor.right.shape[1]))
        b_DK = nn.functional.pad(factor.left.float(), (0, rank - factor.left.shape[1]))
        matrices[name] = a_KF.cpu(), b_DK.cpu()
    return rank, matrices


def export_merged(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, delta: Delta, folder: str | Path) -> Path:
    """Write the edited model as a checkpoint folder: safetensors, configuration, tokenizer.

    If the edit changes a head that is tied to the embedding, the checkpoint has a head of its own. The model is
    restored afterwards.

    Args:
        delta: an edit of weights, low-rank or dense.

    Raises:
        EditingError: the edit does not fit the model, the model has adapters, or the folder is not empty.
    """
    if unwrapped(model) is not model or has_adapter_layers(model):
        raise EditingError(
            "the model has adapters, which a checkpoint does not hold. Merge them into it (merge_and_unload of peft), "
            "save the model, and make and export the edit on that."
        )
    _require_weights(delta)
    target = check_output_folder(folder)
    with new_folder(target) as work, _untied_head(model, delta), AppliedDeltas(model) as applied:
        applied.add(delta)
        if applied.adds_to_outputs:
            as_adapter = (
                "Export it as an adapter (lm-edit export --format peft), or load" if delta.is_low_rank else "Load"
            )
            raise EditingError(
                "the edit is of quantized weights, whose codes cannot hold it. "
                f"{as_adapter} the saved edit over the quantized model (load_edit=...)."
            )
        config = dict(vars(model.config))
        try:
            model.save_pretrained(work)
        finally:
            vars(model.config).update(config)  # save_pretrained writes the class's name into the configuration
        tokenizer.save_pretrained(work)
        write_origin(work, delta)
    return target


@contextmanager
def _untied_head(model: PreTrainedModel, delta: Delta) -> Iterator[None]:
    """Scope in which the head has a weight of its own, if it is tied and the edit changes it."""
    head, config = head_of(model), model.config
    weight = weight_of(head)
    name = next(name for name, module in model.named_modules() if module is head)
    parameter = f"{name}.weight"
    is_tied = any(one is weight for other, one in model.named_parameters(remove_duplicate=False) if other != parameter)
    if not (is_tied and parameter in delta.parameter_names):
        yield
        return
    was_tied = config.tie_word_embeddings

    def tie_again() -> None:
        head.register_parameter("weight", weight)
        config.tie_word_embeddings = was_tied

    with undone(tie_again):
        own = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        head.register_parameter("weight", own)
        config.tie_word_embeddings = False
        yield


def read_peft(folder: str | Path, model: nn.Module) -> Delta:
    """Read a LoRA adapter folder, written by :func:`export_peft` or another tool, as an edit of ``model``.

    Raises:
        EditingError: for adapters that are not low-rank updates of linear maps only, and for damaged folders.
    """
    folder = Path(folder)
    config = _read_adapter_config(folder / CONFIG_NAME)
    _, tensors = read_tensors(folder / WEIGHTS_NAME, "adapter")
    inner = unwrapped(model)
    names = list(dict.fromkeys(_module_of(key, str(folder)) for key in tensors))
    modules = {name for name, _ in inner.named_modules()}
    if unknown := [name for name in names if name not in modules]:
        raise EditingError(f"{folder}: the model has no module {unknown[0]!r}; is it another base model?")
    with of_file(folder / CONFIG_NAME):
        check_expressions(config, modules)
    factors = {name: _read_factor(inner, config, name, tensors, str(folder)) for name in names}
    targets = target_names(config, inner)
    if targets is not None and (differing := sorted(targets ^ factors.keys())):
        what = "no tensors for" if differing[0] in targets else "tensors, but target_modules leave out,"
        raise EditingError(f"{folder} is incomplete or for another base model: it has {what} {', '.join(differing)}.")
    delta = Delta(meta=_read_origin(folder / ORIGIN_NAME), factors=factors)
    with of_file(folder):
        delta.check_finite()
    return delta


def _module_of(key: str, source: str) -> str:
    """Name of the module that a tensor of an adapter belongs to."""
    name, _, kind = key.removeprefix(PREFIX).rpartition(".lora_")
    if kind not in ("A.weight", "B.weight"):
        raise EditingError(
            f"{source}: tensor {key!r} is not part of a low-rank update of a linear map, so the adapter is no edit of "
            f"weights. Load it with peft={source} instead, as part of the unedited model; if it is a copy of the base "
            "model's weights, save the adapter with save_embedding_layers=False."
        )
    return name


def _read_factor(
    model: nn.Module, config: Mapping[str, Any], name: str, tensors: Mapping[str, torch.Tensor], source: str
) -> Factor:
    """The update of one module, scaling included."""
    keys = {part: f"{PREFIX}{name}.lora_{part}.weight" for part in "AB"}
    if missing := [key for key in keys.values() if key not in tensors]:
        raise EditingError(f"{source} is incomplete: it has no tensor {missing[0]!r}.")
    for part, dims in (("A", "r F"), ("B", "D r")):
        Tensor(dims).check(f"{keys[part]} of {source}", tensors[keys[part]], {})
    right_KF, left_DK = tensors[keys["A"]].float(), tensors[keys["B"]].float()
    rank = rank_of(config, name)
    if (len(right_KF), left_DK.shape[1]) != (rank, rank):
        raise EditingError(
            f"{source}: the tensors of {name} have ranks {len(right_KF)} and {left_DK.shape[1]}, its configuration "
            f"says {rank}."
        )
    return Factor(left_DK * scaling(config, name), right_KF.T, is_transposed(model.get_submodule(name)))


def _require_weights(delta: Delta) -> None:
    if delta.runtime_part is not None:
        raise EditingError(
            "this edit is not all in the weights: it needs hooks while the model runs, or text before the prompt "
            "(with a second model that answers, for some editors), "
            "which neither a checkpoint nor an adapter can hold. Use it with edited_hf (load_edit=...)."
        )
    if not delta.parameter_names:
        raise EditingError("this edit changes no weight, so there is nothing to export.")


def _require_low_rank(delta: Delta) -> None:
    _require_weights(delta)
    if not delta.is_low_rank:
        raise EditingError(
            f"the updates of {', '.join(sorted([*delta.dense, *delta.masks]))} are not low-rank, "
            "which a LoRA adapter cannot hold. Use it with edited_hf (load_edit=...), or, unless the weights are "
            "quantized, export it as a checkpoint: lm-edit export --format merged, or export_merged(...)."
        )


def _with_minimal_rank(factor: Factor) -> Factor:
    """The same update with rank at most min(d, f); the summed ranks of a long stream exceed it."""
    (width_out, rank), width_in = factor.left.shape, factor.right.shape[0]
    if rank <= min(width_out, width_in):
        return factor
    update_DF = factor.left.double() @ factor.right.double().T
    if width_out <= width_in:
        return Factor(torch.eye(width_out), update_DF.T.float(), factor.transposed)
    return Factor(update_DF.float(), torch.eye(width_in), factor.transposed)


def _read_adapter_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(path, "configuration of an adapter")
    check_adapter_config(config, path)
    return config


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json_text(content, indent=2) + "\n", encoding="utf-8")


def write_origin(folder: Path, delta: Delta) -> None:
    """Write where an exported edit comes from beside it."""
    checksum = delta.checksum()
    name = adapter_name(editor_of(delta.meta), checksum)
    _write_json(folder / ORIGIN_NAME, {"meta": shared_meta(delta.meta), "checksum": checksum, "name": name})


def shared_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata for a file that is passed on: names in place of the paths of this machine.

    The model of the edit stays checkable by its identity, and files by their digests. Requests are texts.
    """
    return dict(without_folders(meta, keep=("requests",)))


def holds_edits(pretrained: object) -> bool:
    """Whether a model is a folder of :func:`export_merged`; not one that is given as an object."""
    if not isinstance(pretrained, (str, Path)):
        return False
    place = Path(pretrained)
    return (place / "config.json").is_file() and (place / ORIGIN_NAME).is_file()


def _read_origin(path: Path) -> dict[str, Any]:
    """The exported edit's metadata; empty for adapters of other tools."""
    if not path.is_file():
        return {}
    origin = read_json(path, "origin of an adapter", finite=False, halves="keep")
    with of_file(path):
        require_shallow("it", origin)
        Record({"meta": mapping_of()}, is_open=True)("", origin)
        check_metadata(origin["meta"])
    meta: dict[str, Any] = origin["meta"]
    return meta


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary sibling that is renamed to ``folder`` if the block succeeds and removed otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    with undone(lambda: shutil.rmtree(work, ignore_errors=True)), disk_errors(folder):
        work.mkdir()
        yield work
        if folder.exists():
            folder.rmdir()
        work.rename(folder)
