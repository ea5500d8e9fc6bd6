"""Weights of linear maps, plain or quantized: reading them, adding to them, refusing those that are not supported.

Quantized codes cannot be written without quantizing again, so an update of a quantized map acts beside its weight, as
:class:`AddedMap`: y = Q(x) + D x. Supported are the 4- and 8-bit layers of bitsandbytes, whose weights can be
dequantized and whose outputs have gradients with respect to their inputs. All others are refused by the kind of module
and tensor, not by the name of a scheme.

Design: docs/explain/design/quantized-weights.md.

Shapes: D and F output and width of a linear map, K rank.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from edit_hooks.modeling.architectures import linear_of, map_shape
from edit_hooks.modeling.hooks import Registration
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.errors import EditingError

PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Of buffers with two or more axes: codes. Models have one-dimensional or 64-bit integer buffers of their own.
CODE_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
PLAIN_FORWARDS = (nn.Linear.forward, Conv1D.forward)
SUPPORTED_WEIGHTS = (
    "Edits need weights in float32, float16 or bfloat16, or bitsandbytes' 4- or 8-bit layers (load_in_4bit=True, "
    "load_in_8bit=True). Editors of prompts (ike, ice) and mode=none run on any model."
)


class AddedMap:
    """A forward hook that adds an update to the output of a linear map whose weight cannot be written.

    Sums are formed in at least float32 and rounded once. Low-rank updates stay factors while those are smaller than
    the dense update.
    """

    def __init__(self, linear: nn.Module) -> None:
        width_out, width_in = map_shape(linear)
        device = _weight(linear_of(linear)).device
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

    A plain weight itself, in its dtype. Of a quantized one a copy in float32: the dequantized codes and the updates
    added to them.

    Raises:
        EditingError: for quantized weights of an unsupported kind.
    """
    linear = linear_of(module)
    weight = _weight(linear)
    if not is_quantized(linear):
        if not _is_plain(weight):
            raise _unsupported(type(linear).__name__, linear, weight)
        return weight.detach()
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight  # imports bitsandbytes, which is slow

    state = getattr(linear, "state", None)  # holds the scales of 8-bit weights after the first forward pass
    with torch.no_grad():
        matrix = at_least_float32(dequantize_bnb_weight(weight, state))
        for hook in linear._forward_hooks.values():
            if isinstance(hook, AddedMap):
                matrix = matrix + hook.update()
    return matrix


def weight_norm(module: nn.Module) -> float:
    """Frobenius norm of a linear map's weight, summed in float64."""
    return float(torch.linalg.vector_norm(read_weight(module), dtype=torch.float64))


def is_quantized(module: nn.Module) -> bool:
    """Whether a linear map has quantized weights of a supported kind.

    bitsandbytes' layers, with codes in place of the weight.
    """
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:  # then no module can be one of its layers
        return False
    linear = linear_of(module)
    if isinstance(linear, bitsandbytes.nn.Linear4bit):
        return getattr(linear.weight, "quant_state", None) is not None
    return isinstance(linear, bitsandbytes.nn.Linear8bitLt) and linear.weight.dtype == torch.int8


def has_quantized_weights(model: nn.Module) -> bool:
    """Whether any linear map of a model has quantized weights of a supported kind."""
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

    Args:
        prefix: name of the part.

    Raises:
        EditingError: it names the first such module and the kinds of weights that are supported.
    """
    for name, module in model.named_modules(prefix=prefix):
        if is_quantized(module):
            continue
        for tensor in module.parameters(recurse=False):
            if not _is_plain(tensor):
                raise _unsupported(name, module, tensor)
        for tensor in module.buffers(recurse=False):
            if tensor.dim() > 1 and tensor.dtype in CODE_DTYPES:
                raise _unsupported(name, module, tensor)
        if isinstance(module, nn.Linear | Conv1D) and not _has_plain_forward(module):
            raise EditingError(
                f"{name} is a {type(module).__name__}, which does not compute with its weight as it is stored. "
                f"{SUPPORTED_WEIGHTS}"
            )


def _has_plain_forward(module: nn.Module) -> bool:
    """Whether a linear map's forward is torch's, or its model's own, which the self-check tests."""
    cls = type(module)
    return cls.forward in PLAIN_FORWARDS or cls.__module__.startswith("transformers.models.")


def _weight(linear: nn.Module) -> torch.Tensor:
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise EditingError(f"{type(linear).__name__} has no weight that an edit could read. {SUPPORTED_WEIGHTS}")
    return weight


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds the weights themselves, not codes.

    Quantized weights can be subclasses of Tensor with a floating-point dtype. Those of torch itself are plain
    (distributed tensors).
    """
    return tensor.dtype in PLAIN_DTYPES and type(tensor).__module__.partition(".")[0] == "torch"


def _unsupported(name: str, module: nn.Module, tensor: torch.Tensor) -> EditingError:
    kind = type(tensor).__name__
    described = str(tensor.dtype).removeprefix("torch.") + ("" if kind in ("Parameter", "Tensor") else f", {kind}")
    return EditingError(
        f"{name} is a {type(module).__name__} with quantized weights ({described}) of a kind that edits cannot read or "
        f"add to. {SUPPORTED_WEIGHTS}"
    )
