"""Module names of each model family, by ``config.model_type``.

Module templates are relative to the causal language model and take the block index. A new family is one row here and
one tiny model in :mod:`edit_hooks.contract.tiny_models`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from edit_hooks.utils.errors import EditingError, near_misses

Role = Literal["rewrite", "mlp_in", "query_value", "attention_out"]
ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True)
class Architecture:
    """Module templates of one model family.

    Attributes:
        block: the decoder block; its output is the residual stream h^l.
        mlp: the MLP module; ROME optimizes its output m^l.
        rewrite: the MLP output projection, the linear map R^f -> R^d that is edited.
        attention: the attention module.
        attention_out: the attention output projection.
        mlp_in: the MLP input projections. With f the MLP's inner width, the first f output columns of the first
            projection go through the non-linearity (fused projections begin with the gate).
        query_value: the query and value projections of the attention, or the fused projection that contains them.
        post_norm: the norm that the block applies to m^l before adding it to the residual stream, if it has one.
    """

    block: str
    mlp: str
    rewrite: str
    attention: str
    attention_out: str
    mlp_in: tuple[str, ...]
    query_value: tuple[str, ...]
    post_norm: str | None = None

    @property
    def normalizes_mlp_output(self) -> bool:
        """Whether m^l passes through a norm before it is added to the residual stream."""
        return self.post_norm is not None

    def block_name(self, layer: int) -> str:
        return self.block.format(layer)

    def mlp_name(self, layer: int) -> str:
        return self.mlp.format(layer)

    def rewrite_name(self, layer: int) -> str:
        return self.rewrite.format(layer)

    def module_names(self, role: str, layer: int) -> list[str]:
        """Names of the linear maps with a role (one of :data:`ROLES`) in a block."""
        templates = {
            "rewrite": (self.rewrite,),
            "mlp_in": self.mlp_in,
            "query_value": self.query_value,
            "attention_out": (self.attention_out,),
        }
        return [template.format(layer) for template in templates[role]]

    def all_module_names(self, roles: Iterable[str], layers: Iterable[int]) -> list[str]:
        """Names of the linear maps with these roles in these blocks, block by block.

        Raises:
            EditingError: for a role that is named twice.
        """
        roles = list(roles)
        require_distinct("modules", roles)
        return [name for layer in layers for role in roles for name in self.module_names(role, layer)]

    def linear_name(self, which: str, layer: int) -> str:
        """Name of the MLP's linear map ``mlp_out`` (the rewrite module) or ``mlp_in``.

        Raises:
            EditingError: for ``mlp_in`` of a gated MLP, which has two input projections.
        """
        if which == "mlp_in" and len(self.mlp_in) > 1:
            raise EditingError("module=mlp_in, but the MLPs of this model are gated: two maps lead in. Use mlp_out.")
        return (self.mlp_in[0] if which == "mlp_in" else self.rewrite).format(layer)

    def post_norm_name(self, layer: int) -> str:
        assert self.post_norm is not None
        return self.post_norm.format(layer)


_LLAMA = Architecture(
    block="model.layers.{}",
    mlp="model.layers.{}.mlp",
    rewrite="model.layers.{}.mlp.down_proj",
    attention="model.layers.{}.self_attn",
    attention_out="model.layers.{}.self_attn.o_proj",
    mlp_in=("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    query_value=("model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.v_proj"),
)


_LLAMA_WITH_POST_NORM = replace(_LLAMA, post_norm="model.layers.{}.post_feedforward_layernorm")


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        block="transformer.h.{}",
        mlp="transformer.h.{}.mlp",
        rewrite="transformer.h.{}.mlp.c_proj",
        attention="transformer.h.{}.attn",
        attention_out="transformer.h.{}.attn.c_proj",
        mlp_in=("transformer.h.{}.mlp.c_fc",),
        query_value=("transformer.h.{}.attn.c_attn",),
    ),
    "gptj": Architecture(
        block="transformer.h.{}",
        mlp="transformer.h.{}.mlp",
        rewrite="transformer.h.{}.mlp.fc_out",
        attention="transformer.h.{}.attn",
        attention_out="transformer.h.{}.attn.out_proj",
        mlp_in=("transformer.h.{}.mlp.fc_in",),
        query_value=("transformer.h.{}.attn.q_proj", "transformer.h.{}.attn.v_proj"),
    ),
    "gpt_neox": Architecture(
        block="gpt_neox.layers.{}",
        mlp="gpt_neox.layers.{}.mlp",
        rewrite="gpt_neox.layers.{}.mlp.dense_4h_to_h",
        attention="gpt_neox.layers.{}.attention",
        attention_out="gpt_neox.layers.{}.attention.dense",
        mlp_in=("gpt_neox.layers.{}.mlp.dense_h_to_4h",),
        query_value=("gpt_neox.layers.{}.attention.query_key_value",),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": replace(
        _LLAMA,
        mlp_in=("model.layers.{}.mlp.gate_up_proj",),
        query_value=("model.layers.{}.self_attn.qkv_proj",),
    ),
    "gemma2": _LLAMA_WITH_POST_NORM,
    "gemma3_text": _LLAMA_WITH_POST_NORM,
    "olmo2": _LLAMA_WITH_POST_NORM,
}


def architecture_of(model_or_config: object) -> Architecture:
    """Look up the row of a model, or of its config, by ``config.model_type``.

    Raises:
        EditingError: for an unknown model type, with the list of known ones.
    """
    config = getattr(model_or_config, "config", model_or_config)
    model_type = getattr(config, "model_type", None)
    row = ARCHITECTURES.get(str(model_type))
    if row is None:
        raise EditingError(
            f"no row for model type {model_type!r} in the architecture table, so its MLP output projections cannot be "
            f"found.{near_misses(str(model_type), ARCHITECTURES)} Supported: {', '.join(sorted(ARCHITECTURES))}. "
            "A new family is one row in edit_hooks/modeling/architectures.py; mode=none evaluates any model unedited."
        )
    return row


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Strip adapter wrappers (peft) from a Hugging Face causal model."""
    base: Any = getattr(model, "get_base_model", None)
    return base() if base is not None else model


def input_device(model: Any) -> torch.device:
    """Device for token ids: that of the input embedding.

    A device map may put other modules elsewhere.
    """
    return weight_of(model.get_input_embeddings()).device


def head_of(model: Any) -> nn.Module:
    """The vocabulary projection as a module, which also works for tied embeddings."""
    return model.get_output_embeddings()


def decoder_of(model: Any) -> nn.Module:
    """The model without its head: embeddings, blocks, and final norm."""
    return getattr(model, model.base_model_prefix)


def num_layers(model_or_config: Any) -> int:
    """Number of decoder blocks."""
    return int(getattr(model_or_config, "config", model_or_config).num_hidden_layers)


def edited_module(model: nn.Module, name: str) -> nn.Module:
    """The module that an edit names.

    Raises:
        EditingError: the model has none of this name.
    """
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise EditingError(f"the model has no module {name!r}; was this edit made for another model?") from None


def linear_of(module: nn.Module) -> nn.Module:
    """Strip adapter layers (peft's) from a linear map or an embedding: the module whose weight is in use.

    Of a module that the adapter replaces as a whole (``modules_to_save``) that is the adapter's copy.
    """
    own: Any = module
    while True:
        parts = own._modules
        if isinstance(parts.get("modules_to_save"), nn.ModuleDict) and "original_module" in parts:
            in_use = [] if own.disable_adapters else list(own.active_adapters)
            own = parts["modules_to_save"][in_use[0]] if in_use else parts["original_module"]
        elif (inner := parts.get("base_layer", parts.get("token_adapter"))) is not None:
            own = inner
        else:
            return own


def weight_of(module: nn.Module) -> nn.Parameter:
    """The weight of a linear map or an embedding, inside an adapter layer or not.

    For its device and dtype; :func:`edit_hooks.modeling.weights.read_weight` reads its numbers, also of quantized maps.
    """
    weight = linear_of(module).weight
    assert isinstance(weight, nn.Parameter)
    return weight


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored as [in, out], as in GPT-2's Conv1D."""
    return isinstance(linear_of(module), Conv1D)


def map_shape(module: nn.Module) -> tuple[int, int]:
    """(output width d, input width f) of a linear map in either storage orientation, quantized or not."""
    linear = linear_of(module)
    if isinstance(linear, nn.Linear):  # the weight of a quantized one may be packed into another shape
        return linear.out_features, linear.in_features
    rows, columns = weight_of(module).shape
    return (columns, rows) if is_transposed(module) else (rows, columns)


def check_layers(layers: list[int], model_or_config: object) -> None:
    """Check layer numbers against the depth of a model.

    Raises:
        EditingError: for an empty list, for blocks that the model does not have, and for one that is named twice.
    """
    count = num_layers(model_or_config)
    if not layers:
        raise EditingError("'layers' is empty; give at least one layer to edit.")
    missing = [layer for layer in layers if not 0 <= layer < count]
    if missing:
        raise EditingError(f"'layers' names {missing}, but the model has blocks 0 to {count - 1}.")
    require_distinct("layers", layers)


def require_distinct(setting: str, values: Sequence[object]) -> None:
    """Refuse a setting that names a block or a role twice.

    Raises:
        EditingError: editors that keep something per map would train or write one map twice.
    """
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise EditingError(f"{setting!r} names {', '.join(map(repr, repeated))} more than once; name each one once.")
