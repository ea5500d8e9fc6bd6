"""Second moments and null-space projectors of other projects, checked against the model they are said to be of.

Both are one [f, f] matrix per edited layer, f being the width of the keys. A second moment C is symmetric and positive
semi-definite. A projector P is symmetric and idempotent. To find a matrix of another model or layer, a few sentences
are run through the model; C0 are the second moments of their keys:

- of C: the correlation of C and C0, after the isotropic part of both (trace / f times the identity) is taken out. It is
  near 1 for text of the same layer (.70 to .90 on Gemma 3 270M) and near 0 for another layer or model. trace(C) /
  trace(C0) is the ratio of mean squared norms.
- of P: trace(P C0) / trace(C0), the share of the keys' energy that updates may disturb, over rank(P) / f. A
  projector of another model keeps as much of the energy as of the directions, so this is near 1; that of its own null
  space keeps less (.32 to .42 there, with a tenth of the trace).

Shapes: L layers, f key width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.locate.moments.matrix_files import matrix_file
from edit_hooks.locate.moments.second_moments import moments_of_texts
from edit_hooks.modeling.architectures import architecture_of, check_layers, map_shape, unwrapped
from edit_hooks.modeling.tensors import read_tensors, write_tensors
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import require_file, sha256_of
from lm_edit.imports.npz_file import read_key_sum
from lm_edit.imports.torch_file import TorchFile, tensors_of

Kind = Literal["second_moments", "projectors"]

LAYER_IN_NAME = re.compile(r"(?:\bh|\blayers?|\bblocks?)[._](\d+)(?=\D|$)")
SYMMETRY = 1e-3  # ||C - C^T|| / ||C||
IDEMPOTENCE = 1e-2  # ||P P - P|| / ||P||
LEAST_CORRELATION = 0.3
NORMS = (0.05, 20.0)  # trace(C) / trace(C0)
MOST_ENERGY = 0.8  # share of the energy that P keeps, over its share of the directions
# Plain sentences about nothing in particular, to read a model's keys.
SENTENCES = (
    "The train left the station a few minutes after eight, and nobody on the platform seemed to be in a hurry.",
    "In 1984 the company moved its main office to a larger building near the river, where it still is today.",
    "She mixed the flour with two eggs and a little milk, then let the dough rest for about half an hour.",
    "Scientists measured the temperature of the water every day for three years and published their results.",
    "The committee will meet again on Tuesday to discuss the budget, the new rules and the election of a chair.",
    "If the value is negative, the function returns zero; otherwise it returns the square root of the value.",
    "Most birds of this family live in forests, eat seeds and insects, and build their nests in old trees.",
    "He asked whether the shop was open on Sundays, but the woman behind the counter only shook her head.",
)


class LayerCheck(NamedTuple):
    """What was measured of one matrix.

    Attributes:
        num_tokens: behind a second moment, where the file has it.
        correlation, norm_ratio: of a second moment. rank_share, energy: of a projector.
    """

    layer: int
    num_tokens: int | None = None
    correlation: float | None = None
    norm_ratio: float | None = None
    rank_share: float | None = None
    energy: float | None = None


@dataclass(frozen=True)
class SourceMatrix:
    """A matrix of a file, with the layer that its name states and the tokens behind it; ``None`` where unknown."""

    layer: int | None
    matrix_FF: torch.Tensor
    num_tokens: int | None = None


def read_matrices(path: Path) -> Iterator[SourceMatrix]:
    """The matrices of a file: ``.npz`` of ROME's layout, ``.pt`` of torch.save, or safetensors.

    Raises:
        EditingError: for other and damaged files.
    """
    if path.suffix == ".npz":
        read = read_key_sum(path)
        yield SourceMatrix(_layer_of(path.name), read.mean_FF, read.num_tokens)
    elif path.suffix == ".safetensors":
        for name, tensor in read_tensors(path, "file of matrices")[1].items():
            yield SourceMatrix(_layer_of(name.replace("layer", "layer.")), tensor)
    elif path.suffix in (".pt", ".pth", ".bin"):
        file = TorchFile(path)
        for key, stored in tensors_of(file.content).items():
            tensor = file.read(stored)
            if tensor.dim() == 3:  # of AlphaEdit: the layers in the order of its settings
                yield from (SourceMatrix(None, matrix) for matrix in tensor)
            else:
                yield SourceMatrix(_layer_of(key) if isinstance(key, str) else None, tensor)
    else:
        raise EditingError(f"{path} is a {path.suffix or 'file without ending'}; .npz, .pt and .safetensors are read.")


def _layer_of(name: str) -> int | None:
    """The block in the name of a module, as of ``transformer.h.13.mlp.c_proj_float32_mom2_100000.npz``."""
    found = LAYER_IN_NAME.findall(name)
    return int(found[0]) if len(found) == 1 else None


def import_matrices(
    sources: Sequence[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    layers: Sequence[int] | None = None,
    kind: Kind | None = None,
    any_spectrum: bool = False,
) -> tuple[Kind, list[LayerCheck]]:
    """Check the matrices of files against a model and write them as one safetensors file with tensors ``layerN``.

    Args:
        sources: files, or ``hf:`` addresses of files.
        layers: of the matrices, in their order; by default those in the names of files or tensors.
        kind: what they are; by default told from the first matrix: a projector is idempotent.
        any_spectrum: keep matrices whose spectrum does not fit the keys of the model.

    Returns:
        The kind, for the name of the editor's setting, and a report by layer.

    Raises:
        EditingError: for matrices of another width, that are no second moments or projectors, or of another model.
    """
    paths = [require_file(matrix_file(source), "file of matrices") for source in sources]
    found = [matrix for path in paths for matrix in read_matrices(path)]
    by_layer = _assign(found, layers)
    inner = unwrapped(model)
    check_layers(list(by_layer), inner)
    for layer, source in by_layer.items():
        _check_shape(layer, source.matrix_FF, inner)
    first = next(iter(by_layer.values())).matrix_FF
    chosen: Kind = kind or ("projectors" if _idempotence(first) < IDEMPOTENCE else "second_moments")
    own = moments_of_texts(model, tokenizer, list(by_layer), SENTENCES)
    checks = []
    for layer, source in by_layer.items():
        matrix_FF = source.matrix_FF.double()
        measure = _check_moment if chosen == "second_moments" else _check_projector
        checks.append(measure(layer, matrix_FF, own[layer], any_spectrum)._replace(num_tokens=source.num_tokens))
    header = {
        "kind": chosen,
        "files": ", ".join(path.name for path in paths),
        "sha256": ", ".join(map(sha256_of, paths)),
        "model": Path(str(getattr(inner.config, "_name_or_path", "") or "")).name,
    }
    write_tensors(out, {f"layer{layer}": source.matrix_FF.float() for layer, source in by_layer.items()}, header)
    return chosen, checks


def _assign(found: Sequence[SourceMatrix], layers: Sequence[int] | None) -> dict[int, SourceMatrix]:
    """The matrices by layer."""
    if layers is None:
        unknown = sum(source.layer is None for source in found)
        if unknown:
            raise EditingError(
                f"{unknown} of {len(found)} matrices have no layer in their names; give --layers in their order, as "
                "the settings have them that made the file."
            )
        layers = [source.layer for source in found if source.layer is not None]
    if len(layers) != len(found):
        raise EditingError(f"--layers names {len(layers)} layers, and there are {len(found)} matrices.")
    if len(set(layers)) < len(layers):
        raise EditingError(f"a layer has two matrices: {', '.join(map(str, layers))}. Give the files of one set.")
    return dict(sorted(zip(layers, found, strict=True), key=lambda pair: pair[0]))


def _check_shape(layer: int, matrix_FF: torch.Tensor, model: nn.Module) -> None:
    width = map_shape(model.get_submodule(architecture_of(model).rewrite_name(layer)))[1]
    if tuple(matrix_FF.shape) != (width, width):
        raise EditingError(
            f"the matrix of layer {layer} has shape {list(matrix_FF.shape)}; keys of this model have width {width}. It "
            "belongs to another model, or to another module of it."
        )
    if not torch.isfinite(matrix_FF).all():
        raise EditingError(f"the matrix of layer {layer} has entries that are not finite.")
    if float((matrix_FF - matrix_FF.T).norm()) > SYMMETRY * float(matrix_FF.norm()) or not matrix_FF.any():
        raise EditingError(
            f"the matrix of layer {layer} is zero or not symmetric, so it is no second moment or projector."
        )


def _idempotence(matrix_FF: torch.Tensor) -> float:
    """||P P x - P x|| / ||P x|| for a few random x, which costs a product and no more."""
    probe_FR = torch.randn(len(matrix_FF), 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    once_FR = matrix_FF.double() @ probe_FR
    return float((matrix_FF.double() @ once_FR - once_FR).norm() / once_FR.norm().clamp(min=1e-300))


def _check_moment(layer: int, matrix_FF: torch.Tensor, own_FF: torch.Tensor, any_spectrum: bool) -> LayerCheck:
    if (matrix_FF.diagonal() < 0).any():
        raise EditingError(
            f"the matrix of layer {layer} has negative entries on its diagonal, so it is no mean of k k^T."
        )
    ratio = float(matrix_FF.trace() / own_FF.trace())
    correlation = _correlation(matrix_FF, own_FF)
    if not any_spectrum and (correlation < LEAST_CORRELATION or not NORMS[0] < ratio < NORMS[1]):
        raise EditingError(
            f"layer {layer}: the second moment does not fit the keys of this model: correlation {correlation:.2f} with "
            f"those of a few sentences (at least {LEAST_CORRELATION}), {ratio:.3g} times their mean squared norm "
            f"(between {NORMS[0]:g} and {NORMS[1]:g}). It is of another model, layer or module; --any-spectrum imports "
            "it anyway."
        )
    return LayerCheck(layer, correlation=correlation, norm_ratio=ratio)


def _correlation(a_FF: torch.Tensor, b_FF: torch.Tensor) -> float:
    """Cosine of two symmetric matrices without their isotropic parts."""
    a_FF, b_FF = (
        matrix - torch.eye(len(matrix), dtype=matrix.dtype) * matrix.diagonal().mean() for matrix in (a_FF, b_FF)
    )
    norms = float(a_FF.norm() * b_FF.norm())
    return float((a_FF * b_FF).sum()) / norms if norms else 0.0


def _check_projector(layer: int, matrix_FF: torch.Tensor, own_FF: torch.Tensor, any_spectrum: bool) -> LayerCheck:
    defect = _idempotence(matrix_FF)
    if defect > IDEMPOTENCE:
        raise EditingError(f"the matrix of layer {layer} is no projector: ||P P x - P x|| / ||P x|| is {defect:.2g}.")
    share = float(matrix_FF.trace()) / len(matrix_FF)
    energy = float((matrix_FF * own_FF).sum() / own_FF.trace())
    if not any_spectrum and energy > MOST_ENERGY * share:
        raise EditingError(
            f"layer {layer}: the projector keeps {energy:.1%} of the energy of this model's keys and {share:.1%} of "
            "the directions, as one of another model would. The null space of its own keys keeps much less; "
            "--any-spectrum imports it anyway."
        )
    return LayerCheck(layer, rank_share=share, energy=energy)


def describe_checks(checks: Sequence[LayerCheck]) -> list[dict[str, Any]]:
    """The report as rows, without what does not apply."""
    return [{name: value for name, value in check._asdict().items() if value is not None} for check in checks]
