"""Second moments of keys, C_l = E[k k^T]: collected from text, described in full, kept on disk.

Where the text comes from (``source``):

- ``self``: text the model writes itself, sampled at temperature 1 from its start token, so that nothing has to be
  downloaded and the statistics fit the model;
- a path: a ``.txt`` file (documents are separated by empty lines), a ``.jsonl`` file (field ``text``), or a folder of
  such files;
- a hub id, ``owner/name`` or ``owner/name/config``, optionally ``@revision``: field ``text`` of the training split;
- in Python also a list of texts (collected each time, nothing is kept on disk).

A key is the input of the rewrite module at any token that is not padding; C is their plain, uncentered mean. Sums run
in float64, the result is kept in float32. Every layer's matrix lies in its own file with the complete description of
how it came about beside it, and is read only for exactly that description.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from edit_hooks.locate.corpora import _Corpus, _corpus, _hub_texts
from edit_hooks.locate.solve import SecondMoment
from edit_hooks.modeling.architectures import architecture_of, input_device, map_shape, unwrapped
from edit_hooks.modeling.fingerprint import model_fingerprint
from edit_hooks.modeling.hooks import frozen, hooks, on_input
from edit_hooks.modeling.tokens import encode
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import cache_root, replacing, write_atomically
from edit_hooks.utils.hashing import key_of

log = logging.getLogger(__name__)


FORMAT = "lm-eval-editing/second-moment/3"


MomentDtype = Literal["float32", "float64"]


TOKENS_PER_DIMENSION = 4


MAX_LENGTH = 256


BATCH_TOKENS = 2**13


SAMPLED_ROWS, SHORTEST_TEXT = 64, 64


EXACT_CONDITION_UP_TO = 4096


POWER_STEPS = 50


@dataclass(frozen=True)
class TokenBudget:
    """How much text is used.

    Attributes:
        num_tokens: stop after so many tokens; ``None`` takes four per dimension of the keys (``self`` and hub corpora)
            or everything (files and lists).
        max_length: documents are cut after so many tokens.
    """

    num_tokens: int | None = None
    max_length: int = MAX_LENGTH

    def __post_init__(self) -> None:
        for name in ("num_tokens", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EditingError(f"{name} is {value}; a positive number is needed.")


def second_moments(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int],
    source: str | os.PathLike[str] | Sequence[str],
    *,
    budget: TokenBudget | None = None,
    seed: int = 0,
    dtype: MomentDtype = "float32",
    folder: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> dict[int, SecondMoment]:
    """C of every layer: from disk where it was collected before, else collected now (all missing layers in one pass).

    Args:
        source: see the module's description.
        seed: seed of the sampled text (``self``) and of the order in which a hub corpus is read.
        dtype: precision in which the matrices are kept; sums run in float64.
        folder: where matrices are kept; ``<cache>/stats`` unless given (for a list of texts: nowhere).

    Raises:
        EditingError: when the source cannot be read or holds no text.
    """
    inner = unwrapped(model)
    corpus = _corpus(source, seed)
    budget = _filled(inner, corpus, budget or TokenBudget(), layers)
    root: Path | None = Path(folder) if folder is not None else cache_root() / "stats"
    if folder is None and isinstance(source, (list, tuple)):
        root = None
    fingerprint = model_fingerprint(inner) if root else ""
    descriptions = {
        layer: _description(inner, tokenizer, fingerprint, layer, corpus, budget, dtype) for layer in layers
    }
    found = {layer: _load(root, description) if root else None for layer, description in descriptions.items()}
    missing = [layer for layer, moment in found.items() if moment is None]
    if missing:
        matrices, facts = _collect(inner, tokenizer, missing, corpus, budget, seed, quiet)
        for layer, sum_FF in matrices.items():
            report = {**facts, "width": len(sum_FF), **_condition(sum_FF)}
            report["warnings"] = _warnings(report, budget)
            _say(layer, report)
            matrix_FF = sum_FF.to(getattr(torch, dtype))
            if root:
                _save(root, descriptions[layer], matrix_FF, report)
            found[layer] = SecondMoment(matrix_FF, {"description": descriptions[layer], **report})
    if root:
        for moment in found.values():
            moment.report["folder"] = str(root)  # type: ignore[union-attr]
    return {layer: found[layer] for layer in layers}  # type: ignore[misc]


# --- token batches ---------------------------------------------------------------------------------------------------


def _filled(model: nn.Module, corpus: _Corpus, budget: TokenBudget, layers: Sequence[int]) -> TokenBudget:
    """The budget with its default made explicit."""
    if budget.num_tokens is not None or corpus.is_finite:
        return budget
    width = max(map_shape(model.get_submodule(architecture_of(model).rewrite_name(layer)))[1] for layer in layers)
    return TokenBudget(TOKENS_PER_DIMENSION * width, budget.max_length)


def _documents(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    corpus: _Corpus,
    budget: TokenBudget,
    seed: int,
    progress: Callable[[int], object],
) -> Iterator[list[int]]:
    """Token ids of document after document, cut to length and to the token budget.

    Args:
        progress: called with numbers of tokens; while they are sampled, which takes longer than reading their keys.
    """
    is_sampled = corpus.texts is None and corpus.hub is None
    if not is_sampled:
        texts: Iterator[str] = iter(corpus.texts) if corpus.texts is not None else _hub_texts(*corpus.hub)  # type: ignore[misc]
        documents: Iterator[list[int]] = (encode(tokenizer, text).ids[: budget.max_length] for text in texts)
    else:
        documents = _sampled(model, tokenizer, budget, seed, progress)
    left = budget.num_tokens
    for ids in documents:
        if left is not None and len(ids) > left:
            ids = ids[:left]
        if ids:
            yield ids
            if not is_sampled:
                progress(len(ids))
        if left is not None:
            left -= len(ids)
            if left <= 0:
                return


def _sampled(
    model: Any, tokenizer: PreTrainedTokenizerBase, budget: TokenBudget, seed: int, progress: Callable[[int], object]
) -> Iterator[list[int]]:
    """Texts the model writes from its start token at temperature 1, without ever stopping; the global RNG is kept."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        start = encode(tokenizer, "The").ids[0]
    device = input_device(model)
    generator = torch.Generator().manual_seed(seed)
    specials = sorted(set(tokenizer.all_special_ids))
    limit = getattr(model.config, "max_position_embeddings", None) or budget.max_length
    length = min(budget.max_length, limit)
    rows = SAMPLED_ROWS
    if budget.num_tokens is not None:  # wide batches of shorter texts rather than narrow ones of long texts
        length = min(length, max(SHORTEST_TEXT, -(-budget.num_tokens // rows)))
        rows = max(1, min(rows, -(-budget.num_tokens // length)))
    while True:
        ids_RT = torch.full((rows, 1), start, dtype=torch.long)
        cache = None
        while ids_RT.shape[1] < length:
            fed = (ids_RT if cache is None else ids_RT[:, -1:]).to(device)
            output = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            logits = output.logits[:, -1].float().cpu()
            logits[:, specials] = -torch.inf
            ids_RT = torch.cat([ids_RT, torch.multinomial(logits.softmax(1), 1, generator=generator)], 1)
            progress(rows)
        yield from ids_RT.tolist()


def _batches(documents: Iterator[list[int]]) -> Iterator[list[list[int]]]:
    """Documents of similar length side by side, about ``BATCH_TOKENS`` padded tokens at a time."""
    while block := list(itertools.islice(documents, 256)):
        block.sort(key=len)
        batch: list[list[int]] = []
        for ids in block:
            if batch and (len(batch) + 1) * len(ids) > BATCH_TOKENS:
                yield batch
                batch = []
            batch.append(ids)
        yield batch


# --- collection ------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def _collect(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int],
    corpus: _Corpus,
    budget: TokenBudget,
    seed: int,
    quiet: bool,
) -> tuple[dict[int, torch.Tensor], dict[str, Any]]:
    """C in float64 and what the collection can say about itself."""
    arch = architecture_of(model)
    sums: dict[int, torch.Tensor] = {}
    num_tokens = num_documents = 0
    began = time.perf_counter()
    mask_RT = torch.zeros(0)

    def accumulate(layer: int) -> Any:
        def read(hidden: torch.Tensor) -> None:
            keys_TF = hidden[mask_RT.to(hidden.device)].double()
            product_FF = keys_TF.T @ keys_TF
            sums[layer] = sums[layer].add_(product_FF) if layer in sums else product_FF

        return read

    registrations = [on_input(model.get_submodule(arch.rewrite_name(n)), accumulate(n)) for n in layers]
    decoder = getattr(model, model.base_model_prefix)
    device = input_device(model)
    total = budget.num_tokens
    with frozen(model), tqdm(total=total, desc="Collecting second moments", unit="token", disable=quiet) as bar:
        for batch in _batches(_documents(model, tokenizer, corpus, budget, seed, bar.update)):
            width = max(map(len, batch))
            ids_RT = torch.tensor([ids + [0] * (width - len(ids)) for ids in batch])
            mask_RT = torch.tensor([[True] * len(ids) + [False] * (width - len(ids)) for ids in batch])
            with hooks(*registrations):
                decoder(input_ids=ids_RT.to(device), attention_mask=mask_RT.long().to(device), use_cache=False)
            num_tokens += int(mask_RT.sum())
            num_documents += len(batch)
    if not num_tokens:
        raise EditingError("second moments need text; the given source gave no token.")
    facts = {
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "model_name": str(getattr(model.config, "_name_or_path", "") or ""),
        "seconds": round(time.perf_counter() - began, 2),
        "torch": torch.__version__,
    }
    return {layer: (total_FF / num_tokens).cpu() for layer, total_FF in sums.items()}, facts


def _condition(matrix_FF: torch.Tensor) -> dict[str, Any]:
    """Trace, largest and smallest eigenvalue and condition number; by power iteration for large matrices."""
    width = len(matrix_FF)
    trace = float(matrix_FF.diagonal().sum())
    if width <= EXACT_CONDITION_UP_TO:
        values = torch.linalg.eigvalsh(matrix_FF)
        smallest, largest = float(values[0]), float(values[-1])
    else:
        largest = _largest(lambda x: matrix_FF @ x, width)
        factor_FF, info = torch.linalg.cholesky_ex(matrix_FF)
        smallest = 0.0
        if not int(info):
            smallest = 1 / _largest(lambda x: torch.cholesky_solve(x[:, None], factor_FF)[:, 0], width)
    condition = largest / smallest if smallest > 0 else None
    return {"trace": trace, "largest_eigenvalue": largest, "smallest_eigenvalue": smallest, "condition": condition}


def _largest(apply: Any, width: int) -> float:
    vector_F = torch.ones(width, dtype=torch.float64) / width**0.5
    value = 0.0
    for _ in range(POWER_STEPS):
        vector_F = apply(vector_F)
        value = float(vector_F.norm())
        vector_F = vector_F / value
    return value


def _warnings(report: dict[str, Any], budget: TokenBudget) -> list[str]:
    """What is to be said about a matrix that comes from too little text."""
    count, width, found = report["num_tokens"], report["width"], []
    if count < 2 * width:
        found.append(
            f"the second moment comes from {count} tokens, fewer than twice the keys' width {width}; edits constrained "
            "by it may be poor. Give more text or a larger token budget."
        )
    if budget.num_tokens is not None and count < budget.num_tokens:
        asked = budget.num_tokens
        found.append(f"the text behind the second moment ended after {count} of the {asked} tokens asked for.")
    return found


def _say(layer: int, report: dict[str, Any]) -> None:
    condition = "singular" if report["condition"] is None else f"condition number {report['condition']:.1e}"
    tokens, width = report["num_tokens"], report["width"]
    log.info("layer %d: second moment of %d keys of width %d, %s.", layer, tokens, width, condition)
    for text in report["warnings"]:
        log.warning("layer %d: %s", layer, text)


# --- files -----------------------------------------------------------------------------------------------------------


def _description(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    fingerprint: str,
    layer: int,
    corpus: _Corpus,
    budget: TokenBudget,
    dtype: MomentDtype,
) -> dict[str, Any]:
    """Everything that alters the matrix."""
    return {
        "format": FORMAT,
        "model": fingerprint,
        "module": architecture_of(model).rewrite_name(layer),
        "layer": layer,
        "corpus": corpus.identity,
        "num_tokens": budget.num_tokens,
        "max_length": budget.max_length,
        "tokenizer": key_of([len(tokenizer), encode(tokenizer, " A test: naïve 東京 1234\n\n  x").ids]),
        "dtype": dtype,
    }


def _paths(root: Path, description: dict[str, Any]) -> tuple[Path, Path]:
    stem = root / key_of(description)[:2] / key_of(description)
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def _save(root: Path, description: dict[str, Any], matrix_FF: torch.Tensor, report: dict[str, Any]) -> None:
    """Matrix first, manifest last: a matrix without its manifest does not exist for readers."""
    tensors, manifest = _paths(root, description)
    tensors.parent.mkdir(parents=True, exist_ok=True)
    with replacing(tensors) as temporary:
        save_file({f"layer{description['layer']}": matrix_FF.contiguous()}, temporary)
    write_atomically(manifest, json.dumps({"description": description, "report": report}, indent=2) + "\n")


def _load(root: Path, description: dict[str, Any]) -> SecondMoment | None:
    tensors, manifest = _paths(root, description)
    if not manifest.exists():
        return None
    try:
        record = json.loads(manifest.read_text(encoding="utf-8"))
        if record["description"] != description:
            raise EditingError("it was collected for something else")
        (matrix_FF,) = load_file(tensors).values()
    except Exception as error:  # whatever is wrong with the file: say so, collect again
        log.warning("cannot use the second moment in %s (%s); it is collected again.", tensors, error)
        return None
    return SecondMoment(matrix_FF, {"description": description, **record["report"]})
