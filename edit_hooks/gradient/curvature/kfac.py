"""K-FAC factors of linear maps: second moments of a map's inputs and of the loss gradients at its output.

Over the positions s of ordinary text that have a next token,

    A = E[k_s k_s^T],   B = E[g_s g_s^T],   g_s = d(sum of the text's next-token losses) / d(output of the map at s),

so g_s holds the effect of a position on all later tokens of its text. Labels are those of the text (the empirical
Fisher). B (x) A approximates the curvature of the loss in the map's weight. Sums run in float64.

An update G of the weight is kept out of the directions of high curvature by masking it in the eigenbases of both
(CrispEdit, 2602.15823):

    A = U_A diag(a) U_A^T,  B = U_B diag(b) U_B^T,  M_ij = [b_i a_j < tau],  P(G) = U_B ((U_B^T G U_A) o M) U_A^T

tau is the product at which the sum of the products in descending order reaches the share ``energy`` of their total.

Shapes: R rows, T tokens, N positions, f and d input and output width of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edit_hooks.gradient.label_forward import ENGINES
from edit_hooks.gradient.labeled_rows import LabeledRow, batch_rows
from edit_hooks.modeling.architectures import architecture_of, is_transposed, unwrapped, weight_of
from edit_hooks.modeling.hooks import Registration, frozen, hooks, on_input, on_output
from edit_hooks.modeling.memory import eigenvectors
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.errors import EditingError

INPUT, GRADIENT = "input", "gradient"
BATCH_TOKENS = 2**11  # whose activations are kept for the backward pass


@dataclass(frozen=True, eq=False)
class KFACFactors:
    """The factors of one map.

    Attributes:
        input_FF: A. gradient_DD: B. Both at least float32, on the CPU.
        num_tokens: n, the positions they are means over.
    """

    input_FF: torch.Tensor
    gradient_DD: torch.Tensor
    num_tokens: int

    def matrices(self) -> dict[str, torch.Tensor]:
        """A and B by name."""
        return {INPUT: self.input_FF, GRADIENT: self.gradient_DD}

    @classmethod
    def of(cls, matrices: Mapping[str, torch.Tensor], num_tokens: int) -> KFACFactors:
        """The inverse of :meth:`matrices`."""
        return cls(matrices[INPUT], matrices[GRADIENT], num_tokens)

    def merged(self, other: KFACFactors | None) -> KFACFactors:
        """The factors over the texts of both."""
        if other is None:
            return self
        total = self.num_tokens + other.num_tokens

        def mean(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
            return (self.num_tokens * ours + other.num_tokens * theirs.to(ours)) / total

        return KFACFactors(mean(self.input_FF, other.input_FF), mean(self.gradient_DD, other.gradient_DD), total)


def factors_of_documents(
    model: nn.Module, documents: Iterable[Sequence[int]], layers: Sequence[int], engine: str
) -> dict[int, KFACFactors]:
    """The factors of the rewrite module of every layer over documents of token ids.

    Args:
        engine: of the passes, ``fast`` or ``reference``.

    Raises:
        EditingError: no document has two tokens.
    """
    inner = unwrapped(model)
    sums = FactorSums(inner, layers, engine)
    kept = list(documents)
    with frozen(inner):
        for batch in token_batches(range(len(kept)), [len(ids) for ids in kept], BATCH_TOKENS):
            sums.add([kept[index] for index in batch])
    return {layer: KFACFactors.of(matrices, sums.num_tokens) for layer, matrices in sums.matrices().items()}


class FactorSums:
    """Sums over all positions read so far, float64 on the CPU, by layer."""

    def __init__(self, model: Any, layers: Sequence[int], engine: str) -> None:
        arch = architecture_of(model)
        self.model, self.engine = model, engine
        self.names = {layer: arch.rewrite_name(layer) for layer in layers}
        self.inputs: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.num_tokens = self.num_documents = 0

    def add(self, batch: Sequence[Sequence[int]]) -> None:
        """Run a batch of documents forward and backward, and add its positions; of one token there is none."""
        batch = [ids for ids in batch if len(ids) > 1]
        if not batch:
            return
        rows = batch_rows(self.model, [LabeledRow(list(ids[:-1]), list(enumerate(ids[1:]))) for ids in batch])
        forward = ENGINES[self.engine](self.model, rows, list(self.names.values()))
        inputs: dict[int, torch.Tensor] = {}
        probes: dict[int, torch.Tensor] = {}
        with torch.enable_grad(), hooks(*self._readers(inputs, probes)):
            loss = forward.nll().sum()
        gradients = torch.autograd.grad(loss, [probes[layer] for layer in self.names])
        for layer, gradient_RTD in zip(self.names, gradients, strict=True):
            for sums, of_RT in ((self.inputs, inputs[layer]), (self.gradients, gradient_RTD)):
                row_L, column_L = rows.row_L.to(of_RT.device), rows.column_L.to(of_RT.device)
                of_N = of_RT[row_L, column_L].double()
                product = (of_N.T @ of_N).cpu()
                sums[layer] = sums[layer].add_(product) if layer in sums else product
        self.num_tokens += len(rows.token_L)
        self.num_documents += len(batch)

    def _readers(self, inputs: dict[int, torch.Tensor], probes: dict[int, torch.Tensor]) -> list[Registration]:
        """Hooks that record the inputs of the maps, and add zeros to their outputs, whose gradients are wanted."""

        def read(layer: int) -> Callable[[torch.Tensor], None]:
            def keep(hidden: torch.Tensor) -> None:
                inputs[layer] = hidden.detach()

            return keep

        def probe(layer: int) -> Callable[[torch.Tensor], torch.Tensor]:
            def add(output: torch.Tensor) -> torch.Tensor:
                probes[layer] = torch.zeros_like(output, requires_grad=True)
                return output + probes[layer]

            return add

        modules = {layer: self.model.get_submodule(name) for layer, name in self.names.items()}
        return [
            registration
            for layer, module in modules.items()
            for registration in (on_input(module, read(layer)), on_output(module, probe(layer)))
        ]

    def matrices(self) -> dict[int, dict[str, torch.Tensor]]:
        """A and B by layer and name, in at least float32.

        Raises:
            EditingError: no document had two tokens.
        """
        if not self.num_tokens:
            raise EditingError("K-FAC factors need text with at least two tokens; the given source has none.")
        means = {}
        for layer, name in self.names.items():
            dtype = torch.promote_types(weight_of(self.model.get_submodule(name)).dtype, torch.float32)
            sums = {INPUT: self.inputs[layer], GRADIENT: self.gradients[layer]}
            means[layer] = {part: (matrix / self.num_tokens).to(dtype) for part, matrix in sums.items()}
        return means


class CurvatureProjection:
    """P of one map: keeps the part of an update outside of the directions of high curvature.

    Args:
        energy: share of the sum of the products of eigenvalues that is protected.

    Attributes:
        free_DF: M. threshold: tau.
    """

    def __init__(self, factors: KFACFactors, energy: float, module: nn.Module) -> None:
        self.is_transposed = is_transposed(module)
        self._placed: dict[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        device = weight_of(module).device
        values_F, self.basis_FF = eigenvectors(factors.input_FF, device)
        values_D, self.basis_DD = eigenvectors(factors.gradient_DD, device)
        product_DF = values_D[:, None] * values_F
        descending = product_DF.flatten().sort(descending=True).values
        reached = (descending.cumsum(0) / descending.sum() >= energy).nonzero()
        # At energy 1 rounding may keep the sum from reaching it: then nothing but rounding is free.
        self.threshold = float(descending[reached[0, 0]]) if len(reached) else float(descending[-1])
        self.free_DF = product_DF < self.threshold  # strict: the product at the threshold is protected

    @property
    def free_share(self) -> float:
        """Share of the entries of M that are free."""
        return float(self.free_DF.double().mean())

    def __call__(self, update: torch.Tensor) -> torch.Tensor:
        """P(G) for an update, or several with an axis in front, in the stored orientation."""
        # Every step asks for the same place and precision, and the bases are as large as the factors.
        if (place := (update.device, update.dtype)) not in self._placed:
            self._placed = {place: (self.basis_FF.to(update), self.basis_DD.to(update), self.free_DF.to(update.device))}
        basis_FF, basis_DD, free_DF = self._placed[place]
        update_DF = update.mT if self.is_transposed else update
        masked_DF = (basis_DD.T @ update_DF @ basis_FF) * free_DF
        projected_DF = basis_DD @ masked_DF @ basis_FF.T
        return (projected_DF.mT if self.is_transposed else projected_DF).contiguous()
