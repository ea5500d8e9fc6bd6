"""Second moments of keys, C_l = E[k k^T]: collection and storage.

A key is the input of the rewrite module at any token that is not padding; C is their plain, uncentered mean. Sums run
in float64. Every layer's matrix is stored in its own file beside a manifest that describes how it was collected, and is
loaded only for exactly that description. Sources of text are those of :mod:`edit_hooks.locate.moments.corpora`.

Shapes: R rows, T tokens, f key width.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.locate.moments.corpora import Corpus, Source, open_corpus
from edit_hooks.locate.moments.moment_documents import Meter, batch_documents, document_length, read_documents
from edit_hooks.locate.moments.sampled_texts import keep_documents, read_text_file, text_file
from edit_hooks.locate.moments.solve import SecondMoment
from edit_hooks.locate.moments.stored_matrices import collected_once, load_matrices, save_matrices
from edit_hooks.modeling.architectures import architecture_of, decoder_of, input_device, map_shape, unwrapped
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.hooks import frozen, hooks, on_input, stop_after
from edit_hooks.modeling.memory import free_bytes
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import cache_root

log = get_logger(__name__)


FORMAT = "lm-eval-editing/second-moment/3"


MomentDtype = Literal["float32", "float64"]


TOKENS_PER_DIMENSION = 16


FEWEST_TOKENS_PER_DIMENSION = 8  # fewer give a warning


EXACT_CONDITION_UP_TO = 4096  # key width; beyond, eigenvalues take minutes


POWER_STEPS = 50


@dataclass(frozen=True)
class MomentSettings:
    """Text that second moments are collected from, and their precision.

    Attributes:
        source: ``self``, a path, a hub id or a list of texts (see :mod:`edit_hooks.locate.moments.corpora`).
        num_tokens: number of tokens; ``None`` takes 16 per dimension of the keys (``self`` and hub corpora) or
            everything (files, lists and ``published``).
        max_length: tokens after which a document is cut, at most the model's context; ``None`` takes 256 if the context
            has as many, and the whole context for ``published``. Sampled documents (``self``) have at most 128.
        seed: of the sampled text (``self``), and of the order in which a hub corpus is read.
        dtype: precision in which the matrices are stored.
    """

    source: Source
    _: KW_ONLY
    num_tokens: int | None = None
    max_length: int | None = None
    seed: int = 0
    dtype: MomentDtype = "float32"

    def __post_init__(self) -> None:
        for name in ("num_tokens", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EditingError(f"{name} is {value}; a positive number is needed.")


def second_moments(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int],
    settings: MomentSettings,
    *,
    folder: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> dict[int, SecondMoment]:
    """Load or collect C of every layer.

    All layers that were not stored before are collected in one pass.

    Args:
        folder: where matrices are stored; ``<cache>/stats`` by default, and nowhere for a list of texts.

    Raises:
        EditingError: when the source cannot be read or contains no text, and for documents longer than the context.
    """
    inner = unwrapped(model)
    corpus = open_corpus(settings.source, settings.seed)
    settings = _with_defaults(settings, inner, corpus, layers)
    root: Path | None = Path(folder) if folder is not None else cache_root() / "stats"
    if folder is None and not isinstance(settings.source, (str, os.PathLike)):
        root = None
    identity = model_identity(inner, tokenizer).to_dict() if root else {}
    descriptions = _describe(inner, layers, corpus, settings, identity)
    moments = _load_all(root, descriptions, settings)
    if len(moments) < len(descriptions):
        missing = {layer: one for layer, one in descriptions.items() if layer not in moments}
        key = _describe_text(descriptions) if corpus.is_sampled else list(descriptions.values())
        with collected_once(root, key, "second moments"):
            moments |= _load_all(root, missing, settings)  # another process may have been faster
            missing = {layer: one for layer, one in missing.items() if layer not in moments}
            moments |= _collect_all(inner, tokenizer, missing, corpus, settings, quiet, root)
    for moment in moments.values() if root else ():
        moment.report["folder"] = str(root)  # projectors are stored beside the matrix
    return {layer: moments[layer] for layer in layers}


def moments_of_texts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, layers: Sequence[int], texts: Sequence[str]
) -> dict[int, torch.Tensor]:
    """C of every layer over a few texts, float64, without a report or a file: to look at a model's keys."""
    inner, corpus = unwrapped(model), open_corpus(texts, seed=0)
    settings = _with_defaults(MomentSettings(texts), inner, corpus, layers)
    return _collect(inner, tokenizer, layers, corpus, settings, True, None)[0]


def _load_all(
    root: Path | None, descriptions: dict[int, dict[str, Any]], settings: MomentSettings
) -> dict[int, SecondMoment]:
    """The stored matrices by layer."""
    found = {layer: _load(root, description) for layer, description in descriptions.items()} if root else {}
    moments = {layer: moment for layer, moment in found.items() if moment is not None}
    for moment in moments.values():
        moment.report["warnings"] = _collect_warnings(moment.report, settings)
    return moments


def _collect_all(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    descriptions: dict[int, dict[str, Any]],
    corpus: Corpus,
    settings: MomentSettings,
    quiet: bool,
    root: Path | None,
) -> dict[int, SecondMoment]:
    """Collect the matrices of all layers in one pass, and store them."""
    if not descriptions:
        return {}
    texts = text_file(root, _describe_text(descriptions)) if root and corpus.is_sampled else None
    matrices, report = _collect(model, tokenizer, list(descriptions), corpus, settings, quiet, texts)
    moments = {}
    for layer, matrix_FF in matrices.items():
        moments[layer] = _make_moment(layer, matrix_FF, descriptions[layer], report, settings)
        if root:
            _save(root, moments[layer])
    return moments


def _with_defaults(settings: MomentSettings, model: nn.Module, corpus: Corpus, layers: Sequence[int]) -> MomentSettings:
    """The settings with an explicit length limit and, unless everything is read, an explicit number of tokens."""
    max_length, num_tokens = document_length(model, corpus, settings.max_length), settings.num_tokens
    if num_tokens is None and not corpus.is_finite:
        width = max(map_shape(model.get_submodule(architecture_of(model).rewrite_name(layer)))[1] for layer in layers)
        num_tokens = TOKENS_PER_DIMENSION * width
    return dataclasses.replace(settings, max_length=max_length, num_tokens=num_tokens)


def _make_moment(
    layer: int,
    matrix_FF: torch.Tensor,
    description: dict[str, Any],
    report: dict[str, Any],
    settings: MomentSettings,
) -> SecondMoment:
    """Round a second moment to its stored precision and report on it."""
    report = {**report, "width": len(matrix_FF), **_condition(matrix_FF)}
    report["warnings"] = _collect_warnings(report, settings)
    _log_report(layer, report)
    return SecondMoment(matrix_FF.to(getattr(torch, settings.dtype)), {"description": description, **report})


# --- collection ------------------------------------------------------------------------------------------------------


class _KeySums:
    """Sums of k k^T over all tokens read so far, float64, by layer.

    On the device of the layer, or in main memory if the sums of all layers would take more than half of what is free:
    five layers of Llama 3 70B take 31 GiB.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.model, self.layers = model, layers
        self.sum_FF: dict[int, torch.Tensor] = {}
        self._in_main: bool | None = None
        self.num_tokens = self.num_documents = 0

    def add(self, batch: Sequence[Sequence[int]]) -> None:
        """Run a batch of documents and add its keys."""
        ids_RT, mask_RT = right_padded(batch, input_device(self.model))
        arch, is_token_RT = architecture_of(self.model), mask_RT.bool()
        modules = {layer: self.model.get_submodule(arch.rewrite_name(layer)) for layer in self.layers}
        readers = [on_input(module, self._reader(layer, is_token_RT)) for layer, module in modules.items()]
        with hooks(*readers), stop_after(modules[max(modules)]):
            decoder_of(self.model)(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False)
        self.num_tokens += sum(map(len, batch))
        self.num_documents += len(batch)

    def _reader(self, layer: int, is_token_RT: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def read(hidden_RTF: torch.Tensor) -> None:
            keys_NF = hidden_RTF[is_token_RT.to(hidden_RTF.device)].double()
            product_FF = (keys_NF.T @ keys_NF).to(self._place(keys_NF))
            self.sum_FF[layer] = self.sum_FF[layer].add_(product_FF) if layer in self.sum_FF else product_FF

        return read

    def _place(self, keys_NF: torch.Tensor) -> torch.device:
        """Where the sums are kept, chosen before the first one."""
        if self._in_main is None:
            num_bytes = len(self.layers) * 8 * keys_NF.shape[1] ** 2
            free = free_bytes(keys_NF.device)
            self._in_main = keys_NF.device.type != "cpu" and free is not None and num_bytes > free // 2
        return torch.device("cpu") if self._in_main else keys_NF.device

    def means(self) -> dict[int, torch.Tensor]:
        """C by layer, float64 on the CPU; the sums are used up."""
        return {layer: sum_FF.div_(self.num_tokens).cpu() for layer, sum_FF in self.sum_FF.items()}


@torch.inference_mode(False)
@torch.no_grad()
def _collect(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int],
    corpus: Corpus,
    settings: MomentSettings,
    quiet: bool,
    texts: Path | None,
) -> tuple[dict[int, torch.Tensor], dict[str, Any]]:
    """C in float64 by layer, and a report on the collection; ``texts`` is the file of sampled text."""
    start = time.perf_counter()
    sums = _KeySums(model, layers)
    stored = read_text_file(texts) if texts is not None else None
    with frozen(model), Meter(corpus, settings.num_tokens, quiet) as meter:
        documents = iter(stored) if stored else read_documents(model, tokenizer, corpus, settings, meter)
        if texts is not None and not stored:
            documents = keep_documents(texts, documents)
        for batch in batch_documents(documents):
            sums.add(batch)
            if stored or not corpus.is_sampled:  # sampling takes longer than reading the keys, and counts by itself
                meter.add(len(batch), sum(map(len, batch)))
    if not sums.num_tokens:
        raise EditingError("second moments need text; the given source gave no token.")
    report = {
        "num_tokens": sums.num_tokens,
        "num_documents": sums.num_documents,
        "model_name": str(getattr(model.config, "_name_or_path", "") or ""),
        "seconds": round(time.perf_counter() - start, 2),
        "torch": torch.__version__,
    }
    return sums.means(), report


def _condition(matrix_FF: torch.Tensor) -> dict[str, Any]:
    """Trace, extreme eigenvalues and condition number.

    Large matrices use power iteration.
    """
    width = len(matrix_FF)
    trace = float(matrix_FF.diagonal().sum())
    if width <= EXACT_CONDITION_UP_TO:
        values = torch.linalg.eigvalsh(matrix_FF)
        smallest, largest = float(values[0]), float(values[-1])
    else:
        largest = _largest_eigenvalue(lambda x: matrix_FF @ x, width)
        factor_FF, info = torch.linalg.cholesky_ex(matrix_FF)
        smallest = 0.0
        if not int(info):
            smallest = 1 / _largest_eigenvalue(lambda x: torch.cholesky_solve(x[:, None], factor_FF)[:, 0], width)
    condition = largest / smallest if smallest > 0 else None
    return {"trace": trace, "largest_eigenvalue": largest, "smallest_eigenvalue": smallest, "condition": condition}


def _largest_eigenvalue(multiply: Callable[[torch.Tensor], torch.Tensor], width: int) -> float:
    """Largest eigenvalue of a positive definite map, by power iteration."""
    vector_F = torch.ones(width, dtype=torch.float64) / width**0.5
    value = 0.0
    for _ in range(POWER_STEPS):
        vector_F = multiply(vector_F)
        value = float(vector_F.norm())
        vector_F = vector_F / value
    return value


def _collect_warnings(report: dict[str, Any], settings: MomentSettings) -> list[str]:
    """Warnings about a matrix that comes from too little text."""
    count, width, warnings = report["num_tokens"], report["width"], []
    if count < FEWEST_TOKENS_PER_DIMENSION * width:
        warnings.append(
            f"the second moment comes from {count} tokens, {count / width:.1f} per dimension of the keys (width "
            f"{width}). Below {FEWEST_TOKENS_PER_DIMENSION}, edits constrained by it may be poor and fade early in a "
            f"stream. Give more text or a larger budget: moment_tokens={TOKENS_PER_DIMENSION * width} is "
            f"{TOKENS_PER_DIMENSION} per dimension, the default."
        )
    if settings.num_tokens is not None and count < settings.num_tokens:
        warnings.append(
            f"the text behind the second moment ended after {count} of the {settings.num_tokens} tokens asked for."
        )
    return warnings


def _log_report(layer: int, report: dict[str, Any]) -> None:
    condition = "singular" if report["condition"] is None else f"condition number {report['condition']:.1e}"
    tokens, width = report["num_tokens"], report["width"]
    log.info("layer %d: second moment of %d keys of width %d, %s.", layer, tokens, width, condition)
    for text in report["warnings"]:
        log.warning("layer %d: %s", layer, text)


# --- files -----------------------------------------------------------------------------------------------------------


def _describe(
    model: nn.Module,
    layers: Sequence[int],
    corpus: Corpus,
    settings: MomentSettings,
    identity: dict[str, Any],
) -> dict[int, dict[str, Any]]:
    """Everything that determines the matrix, by layer (JSON-able).

    It is the key of the file.

    Args:
        identity: parts of the identity of the model and its tokenizer.
    """
    return {
        layer: {
            "format": FORMAT,
            "model": identity,
            "module": architecture_of(model).rewrite_name(layer),
            "layer": layer,
            "corpus": corpus.identity,
            "num_tokens": settings.num_tokens,
            "max_length": settings.max_length,
            "dtype": settings.dtype,
        }
        for layer in layers
    }


def _describe_text(descriptions: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """What determines a sampled text: all but the block and the precision of the matrix."""
    description = next(iter(descriptions.values()))
    return {name: description[name] for name in ("model", "corpus", "num_tokens", "max_length")}


def _save(root: Path, moment: SecondMoment) -> None:
    """Write the matrix and its manifest."""
    description = moment.report["description"]
    report = {name: value for name, value in moment.report.items() if name != "description"}
    assert moment.matrix_FF is not None
    save_matrices(root, description, report, {f"layer{description['layer']}": moment.matrix_FF})


def _load(root: Path, description: dict[str, Any]) -> SecondMoment | None:
    """Load a matrix; ``None`` if there is none, or none that can be used."""
    stored = load_matrices(root, description, "second moment")
    if stored is None:
        return None
    (matrix_FF,) = stored.matrices.values()
    return SecondMoment(matrix_FF, {"description": description, **stored.report})
