"""Weights of linear maps, plain or quantized: reading them, adding to them, refusing those that are not supported.

Quantized codes cannot be written without quantizing again, so an update of a quantized map acts beside its weight, as
:class:`AddedMap`: y = Q(x) + D x. Any package's map will do if it keeps three promises, which are tested on the map:
its output is an affine function of its input, gradients reach the input, and unit vectors read out its matrix. No
scheme is named but bitsandbytes, whose layers keep them and whose codes are dequantized.

Design: docs/explain/design/quantized-weights.md.

Shapes: D and F output and width of a linear map, K rank, N rows of an input.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from edit_hooks.modeling.grad_mode import gradients
from edit_hooks.modeling.hooks import Registration
from edit_hooks.modeling.linear_maps import (
    CODE_DTYPES,
    is_linear_map,
    is_plain,
    is_quantized,
    linear_of,
    map_shape,
    tensors,
    weight_of,
)
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.scopes import undone

# Of a change of an output: quantized activations make up to 0.02.
MAX_DEVIATION = 0.05
ROWS_AT_ONCE = 1024  # unit vectors in one pass
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUPPORTED_WEIGHTS = (
    "Edits need weights in float32, float16 or bfloat16, or quantized maps through which gradients pass, as those of "
    "bitsandbytes (load_in_4bit=True, load_in_8bit=True). dequantize=True loads FP8, MXFP4 and compressed-tensors "
    "checkpoints as bfloat16. Editors of prompts (ike, ice) and mode=none run on any model."
)

# Maps of other packages that keep the promises.
_tested: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class AddedMap:
    """A forward hook that adds an update to the output of a linear map whose weight cannot be written.

    Sums are formed in at least float32 and rounded once. Low-rank updates stay factors while those are smaller than
    the dense update.
    """

    def __init__(self, linear: nn.Module) -> None:
        width_out, width_in = map_shape(linear)
        device = weight_of(linear).device
        self.left_DK = torch.zeros(width_out, 0, device=device)
        self.right_FK = torch.zeros(width_in, 0, device=device)
        self.dense_DF: torch.Tensor | None = None
        # First, so that the hooks of editors and of hook edits see the edited output, as they do with a written weight.
        self._registration = Registration(linear, self, is_first=True)

    def attach(self) -> None:
        """Register the hook."""
        self._registration.register()

    def add_low_rank(self, left_DK: torch.Tensor, right_FK: torch.Tensor) -> None:
        """Add the update ``left @ right.T``."""
        self.left_DK = torch.cat([self.left_DK, left_DK.to(self.left_DK)], 1)
        self.right_FK = torch.cat([self.right_FK, right_FK.to(self.right_FK)], 1)
        if self.left_DK.numel() + self.right_FK.numel() > len(self.left_DK) * len(self.right_FK):
            self.add_dense(self.left_DK @ self.right_FK.T)
            self.left_DK, self.right_FK = self.left_DK[:, :0], self.right_FK[:, :0]

    def add_dense(self, update_DF: torch.Tensor) -> None:
        """Add a dense update of the map R^F -> R^D."""
        update_DF = update_DF.to(self.left_DK)
        self.dense_DF = update_DF if self.dense_DF is None else self.dense_DF + update_DF

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that determine the map."""
        return [self.left_DK, self.right_FK, *([] if self.dense_DF is None else [self.dense_DF])]

    def update(self) -> torch.Tensor:
        """The whole update, [D, F]."""
        low_rank_DF = self.left_DK @ self.right_FK.T
        return low_rank_DF if self.dense_DF is None else low_rank_DF + self.dense_DF

    def remove(self) -> None:
        """Remove the hook; the map computes as before."""
        self._registration.remove()

    def __call__(self, _module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = args[0].to(self.right_FK.dtype)
        added = (x @ self.right_FK) @ self.left_DK.T
        if self.dense_DF is not None:
            added = added + x @ self.dense_DF.T
        return (at_least_float32(output) + added).to(output.dtype)


def read_weight(module: nn.Module) -> torch.Tensor:
    """The matrix that a linear map computes with, detached, in the stored orientation.

    A plain weight itself, in its dtype. Of a quantized one a copy in float32, [D, F]: what its codes stand for, and the
    updates added to them.

    Raises:
        EditingError: for quantized weights of an unsupported kind.
    """
    linear = linear_of(module)
    if not is_quantized(linear):
        if is_linear_map(linear):
            return weight_of(linear).detach()
        weight = getattr(linear, "weight", None)  # an embedding
        if isinstance(weight, torch.Tensor) and is_plain(weight):
            return weight.detach()
        raise _unsupported(type(linear).__name__, linear, "it has no weight of numbers")
    with torch.no_grad():
        matrix = _dequantized(linear) if _is_of_bitsandbytes(linear) else _read_out(linear)
        for hook in linear._forward_hooks.values():
            if isinstance(hook, AddedMap):
                matrix = matrix + hook.update()
    return matrix


def _dequantized(linear: nn.Module) -> torch.Tensor:
    """The matrix of a layer of bitsandbytes."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight  # imports bitsandbytes, which is slow

    own: Any = linear
    state = getattr(own, "state", None)  # holds the scales of 8-bit weights after the first forward pass
    return at_least_float32(dequantize_bnb_weight(own.weight, state))


def _read_out(linear: nn.Module) -> torch.Tensor:
    """The matrix of a map: its outputs for the unit vectors. Quantized activations are exact on these.

    Raises:
        EditingError: the map does not compute with what is read.
    """
    _require_promises(linear, type(linear).__name__)
    probe = _Probe(linear)
    width_in = map_shape(linear)[1]
    with _without_bias(linear):
        parts = []
        for start in range(0, width_in, ROWS_AT_ONCE):
            unit_NF = torch.zeros(min(ROWS_AT_ONCE, width_in - start), width_in, device=probe.device)
            unit_NF[torch.arange(len(unit_NF)), start + torch.arange(len(unit_NF))] = 1
            parts.append(at_least_float32(probe.run(unit_NF)))
        inputs_NF, outputs_ND = probe.sample()
    matrix_DF = torch.cat(parts).T.contiguous()
    found_D = outputs_ND[0] - outputs_ND[1]
    if not _is_near(matrix_DF @ (inputs_NF[0] - inputs_NF[1]), found_D):
        raise _unsupported(type(linear).__name__, linear, "its outputs for unit vectors are not its matrix")
    return matrix_DF


class _Probe:
    """Runs a quantized map alone, without hooks, on states of a dtype that it takes."""

    def __init__(self, linear: nn.Module) -> None:
        self.linear = linear
        self.device = next(tensors(linear)).device
        self.dtype: torch.dtype | None = None

    def run(self, inputs_NF: torch.Tensor) -> torch.Tensor:
        """Outputs [N, D]."""
        if self.dtype is not None:
            return self._run(inputs_NF, self.dtype)
        error: Exception | None = None
        for dtype in INPUT_DTYPES:
            try:
                outputs_ND = self._run(inputs_NF, dtype)
            except Exception as raised:  # whatever the code of another package raises
                error = error or raised
                continue
            self.dtype = dtype
            return outputs_ND
        assert error is not None
        raise error

    def _run(self, inputs_NF: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        outputs_1ND: torch.Tensor = self.linear.forward(inputs_NF.to(dtype)[None])
        return outputs_1ND[0]

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two random inputs and their mean [3, F], and the outputs, at least float32."""
        generator = torch.Generator().manual_seed(0)
        first_F, second_F = torch.randn(2, map_shape(self.linear)[1], generator=generator).to(self.device)
        inputs_NF = torch.stack([first_F, second_F, (first_F + second_F) / 2])
        return inputs_NF, at_least_float32(self.run(inputs_NF))


def _require_promises(linear: nn.Module, name: str) -> None:
    """Refuse a quantized map that is not affine, or that passes no or another gradient; tested once per map.

    Raises:
        EditingError: it names the map and what failed.
    """
    if linear in _tested:
        return
    probe = _Probe(linear)
    try:
        with _without_bias(linear), gradients(False):  # a large bias hides the change in 16 bits
            inputs_NF, outputs_ND = probe.sample()
        assert probe.dtype is not None
        change_D = (outputs_ND[0] - outputs_ND[1]).detach()
        middle_D = (outputs_ND[0] + outputs_ND[1]) / 2
        is_affine = outputs_ND.shape[1] == map_shape(linear)[0] and _is_near(outputs_ND[2], middle_D, change_D)
        with gradients(True):
            leaf_NF = inputs_NF[:1].to(probe.dtype).requires_grad_(True)
            output_D = at_least_float32(linear.forward(leaf_NF[None])[0, 0])
            gradient_NF = None
            if output_D.requires_grad:
                (gradient_NF,) = torch.autograd.grad(output_D @ change_D, leaf_NF, allow_unused=True)
    except Exception as error:  # whatever the code of another package raises
        raise _unsupported(name, linear, f"it does not run alone ({first_line(error)})") from error
    if not is_affine:
        raise _unsupported(name, linear, "its output is no affine function of its input")
    if gradient_NF is None:
        raise _unsupported(name, linear, "no gradient reaches its input")
    found = gradient_NF[0].float() @ (inputs_NF[0] - inputs_NF[1])  # J^T of the change times what made the change
    if not _is_near(found[None], change_D.square().sum()[None]):
        raise _unsupported(name, linear, "the gradient of its input is another one")
    _tested.add(linear)


def _is_near(found: torch.Tensor, wanted: torch.Tensor, change: torch.Tensor | None = None) -> bool:
    """Whether two vectors differ by little of a change of the output, by default of the wanted one; NaN never."""
    size = float((wanted if change is None else change).norm())
    return float((found - wanted).norm()) <= MAX_DEVIATION * size and size > 0


@contextmanager
def _without_bias(linear: nn.Module) -> Iterator[None]:
    """Scope in which a map adds no bias, where it keeps one under that name."""
    places: tuple[dict[str, Any], ...] = (linear._parameters, linear._buffers, vars(linear))
    kept = [(place, place["bias"]) for place in places if isinstance(place.get("bias"), torch.Tensor)]

    def restore() -> None:
        for place, bias in kept:
            place["bias"] = bias

    with undone(restore):
        for place, _ in kept:
            place["bias"] = None
        yield


def weight_norm(module: nn.Module) -> float:
    """Frobenius norm of a linear map's weight, summed in float64."""
    return float(torch.linalg.vector_norm(read_weight(module), dtype=torch.float64))


def _is_of_bitsandbytes(linear: nn.Module) -> bool:
    """Whether a map is one of bitsandbytes' layers with codes in place of the weight."""
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:  # then no module can be one of its layers
        return False
    if isinstance(linear, bitsandbytes.nn.Linear4bit):
        return getattr(linear.weight, "quant_state", None) is not None
    return isinstance(linear, bitsandbytes.nn.Linear8bitLt) and linear.weight.dtype == torch.int8


def has_quantized_weights(model: nn.Module) -> bool:
    """Whether any linear map of a model has quantized weights."""
    return any(is_quantized(module) for module in model.modules())


def refuse_compiled(model: nn.Module) -> None:
    """Refuse models compiled by ``torch.compile``: a compiled graph ignores hooks that are attached later.

    Raises:
        EditingError: a module or its forward is compiled.
    """
    for name, module in model.named_modules():
        if (
            hasattr(module, "_orig_mod")
            or getattr(module, "_compiled_call_impl", None) is not None
            or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        ):
            raise EditingError(
                f"{name or type(module).__name__} is compiled (torch.compile), and a compiled graph ignores the hooks "
                "that make, apply and read edits. Pass the model as it was before torch.compile."
            )


def refuse_offloaded(model: nn.Module) -> None:
    """Refuse models with offloaded weights: edits need them in place.

    Raises:
        EditingError: a weight is on the meta device.
    """
    offloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if offloaded:
        raise EditingError(
            f"{len(offloaded)} weights do not fit the devices and were offloaded ({offloaded[0]}, ...), but edits need "
            "them in place. Allow more memory (max_memory_per_gpu=, without a GPU max_cpu_memory=), use more devices "
            "or a smaller dtype, or drop parallelize=True."
        )


def keep_layout(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights at the first forward pass on a CPU with AVX512-BF16.

    Repacked weights have scales rounded to bfloat16, no gradients, and no way back: reading the state restores the
    codes but not the scales.

    Raises:
        EditingError: it has repacked them already.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise EditingError(
                f"bitsandbytes has repacked the 4-bit weight of {name} for this CPU in an earlier forward pass, which "
                "rounds its scales and removes its gradients. Load the model again, and give it to edited_hf or to the "
                "editor before its first forward pass."
            )
        module.support_avx512bf16_for_cpu = False


def check_weights(model: nn.Module, prefix: str = "") -> None:
    """Refuse models, or parts of one, with weights that edits cannot read or add to; looks at every module.

    Quantized maps are run on three rows, once each.

    Args:
        prefix: name of the part.

    Raises:
        EditingError: it names the first such module and the kinds of weights that are supported.
    """
    for name, module in model.named_modules(prefix=prefix):
        if is_quantized(module):
            linear = linear_of(module)
            if not _is_of_bitsandbytes(linear):
                _require_promises(linear, name)
            continue
        for tensor in tensors(module):
            is_buffer = not isinstance(tensor, nn.Parameter)
            if (tensor.dim() > 1 and tensor.dtype in CODE_DTYPES) if is_buffer else not is_plain(tensor):
                raise _unsupported(name, module, "such a module cannot be tested alone")


def _unsupported(name: str, module: nn.Module, reason: str) -> EditingError:
    kinds = ", ".join({_kind(tensor): None for tensor in tensors(module)})
    return EditingError(
        f"{name} is a {type(module).__name__} with quantized weights ({kinds}) that edits cannot read or add to: "
        f"{reason}. {SUPPORTED_WEIGHTS}"
    )


def _kind(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__
    return str(tensor.dtype).removeprefix("torch.") + ("" if kind in ("Parameter", "Tensor") else f" {kind}")
