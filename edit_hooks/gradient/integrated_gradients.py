"""Integrated gradients of a token's probability over one MLP activation.

Shapes: f width of the activation, M points of the integral, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from edit_hooks.modeling.architectures import architecture_of, head_of, input_device, map_shape
from edit_hooks.modeling.forward.kv_cache import CACHE
from edit_hooks.modeling.hooks import Registration, hooks, on_input, on_output, select_positions
from edit_hooks.modeling.tensors import at_least_float32

ActivationSite = Literal["before_activation", "after_activation"]
Riemann = Literal["both_ends", "left"]


def integrated_gradients(
    function: Callable[[torch.Tensor], torch.Tensor],
    activation_F: torch.Tensor,
    num_steps: int,
    riemann: Riemann,
    batch_size: int,
) -> torch.Tensor:
    """a times the mean over points c of the gradient of ``function`` at c a, [f].

    Args:
        function: maps rows [M, f] to values [M].
        riemann: ``both_ends``: c = j / (num_steps - 1); ``left``: c = j / num_steps.
        batch_size: points computed at once.
    """
    divisor = num_steps - 1 if riemann == "both_ends" else num_steps
    points_M = torch.arange(num_steps, device=activation_F.device).to(activation_F) / divisor
    gradient_F = torch.zeros_like(activation_F)
    for chunk_M in points_M.split(batch_size):
        scaled_MF = (chunk_M[:, None] * activation_F).requires_grad_(True)
        gradient_F += torch.autograd.grad(function(scaled_MF).sum(), scaled_MF)[0].sum(0)
    return activation_F * gradient_F / num_steps


class TokenProbability:
    """P(token | ids) as a function of one block's MLP activation at the last position.

    Attributes:
        activations: by layer, the activation of the unedited model at the last position [f], at least float32.

    Args:
        site: ``before_activation``: output of the first MLP matrix; ``after_activation``: input of the rewrite module.
        use_cache: run the earlier positions, which cannot change, once and reuse their keys and values.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids: Sequence[int],
        token: int,
        layers: Sequence[int],
        site: ActivationSite,
        use_cache: bool,
    ) -> None:
        self.model, self.token, self.site = model, token, site
        self.ids_1T = torch.tensor([list(ids)], device=input_device(model))
        arch = architecture_of(model)
        self._modules: dict[int, nn.Module] = {}
        self._widths: dict[int, int] = {}
        for layer in layers:
            rewrite = model.get_submodule(arch.rewrite_name(layer))
            first = model.get_submodule(arch.module_names("mlp_in", layer)[0])
            self._modules[layer] = first if site == "before_activation" else rewrite
            self._widths[layer] = map_shape(rewrite)[1]
        self.activations: dict[int, torch.Tensor] = {}
        self._cache: DynamicCache | None = None
        with torch.no_grad():
            with hooks(*(self._at_site(layer, self._reader(layer)) for layer in layers)):
                model(input_ids=self.ids_1T, attention_mask=torch.ones_like(self.ids_1T), use_cache=False)
            if use_cache and len(ids) > 1:
                self._cache = self._run_prefix()

    def __call__(self, layer: int, activation_MF: torch.Tensor) -> torch.Tensor:
        """Probabilities [M] with the activation replaced by each row in turn."""
        width = self._widths[layer]

        def replace(hidden_MTX: torch.Tensor) -> torch.Tensor:
            replaced = hidden_MTX.clone()
            replaced[:, -1, :width] = activation_MF.to(hidden_MTX.dtype)
            return replaced

        arguments = self._arguments(len(activation_MF))
        row_M = torch.arange(len(activation_MF))
        last_M = torch.full_like(row_M, arguments["input_ids"].shape[1] - 1)
        at_head = on_input(head_of(self.model), select_positions(row_M, last_M))
        with hooks(self._at_site(layer, replace), at_head):
            logits_MV = self.model(**arguments).logits[0]
        return at_least_float32(logits_MV).softmax(1)[:, self.token]

    def _arguments(self, rows: int) -> dict[str, Any]:
        """Arguments of a forward pass of equal rows.

        All tokens, or the last one with the cache.
        """
        length, device = self.ids_1T.shape[1], self.ids_1T.device
        mask = torch.ones(rows, length, dtype=torch.long, device=device)
        if self._cache is None:
            return {"input_ids": self.ids_1T.expand(rows, -1), "attention_mask": mask, "use_cache": False}
        entries = [
            (entry.keys.expand(rows, -1, -1, -1), entry.values.expand(rows, -1, -1, -1)) for entry in self._cache.layers
        ]
        return {
            "input_ids": self.ids_1T[:, -1:].expand(rows, -1),
            "attention_mask": mask,
            CACHE: DynamicCache(entries),
            "position_ids": torch.full((rows, 1), length - 1, device=device),
            "use_cache": True,
        }

    def _run_prefix(self) -> DynamicCache:
        """Keys and values of all positions but the last."""
        cache, prefix_1T = DynamicCache(), self.ids_1T[:, :-1]
        self.model(input_ids=prefix_1T, attention_mask=torch.ones_like(prefix_1T), use_cache=True, **{CACHE: cache})
        return cache

    def _at_site(self, layer: int, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Registration:
        register = on_output if self.site == "before_activation" else on_input
        return register(self._modules[layer], hook)

    def _reader(self, layer: int) -> Callable[[torch.Tensor], None]:
        def read(hidden_RTX: torch.Tensor) -> None:
            self.activations[layer] = at_least_float32(hidden_RTX[0, -1, : self._widths[layer]])

        return read
