"""Modules of a decoder by their roles, found from its structure: blocks, MLP, attention, norms.

Found are the list of blocks, in each block the MLP's maps by their shapes (R^d -> R^f, once or twice, and R^f -> R^d),
and in the attention the projections by the names that transformers uses. What is found is a hypothesis: the self-check
(:mod:`edit_hooks.self_check`) tests it before a model is edited.

Shapes: d residual width, f MLP width.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from edit_hooks.modeling.linear_maps import is_linear_map, map_shape

# Last parts of module names, as the model classes of transformers have them.
QUERY = ("q_proj", "q_b_proj", "query", "wq")
VALUE = ("v_proj", "kv_b_proj", "value", "wv")
FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "qkv")
ATTENTION_OUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")
_ATTENTION = re.compile(r"(?<!linear_)(attn|attention)")
_ATTENTION_CLASS = re.compile(r"Attention")
_MLP = re.compile(r"mlp|feed_?forward|ffn", re.IGNORECASE)
_GATE = re.compile(r"gate|^w1$")
_POST_NORM = re.compile(r"post_(feedforward|feed_forward|mlp|ffn)_(layer)?norm|post_norm2")
_ROUTED = re.compile(r"experts|router")
_SHARED = re.compile(r"shared_(experts?|mlp)")


@dataclass(frozen=True)
class BlockParts:
    """Module names in one block, relative to it; ``None`` or empty where the block has no such part.

    Attributes:
        rewrite, mlp, mlp_in: the MLP's output map, the module of the MLP, and its input maps, the gate first.
        attention, attention_out, query_value: the attention and its projections.
        post_norm: the norm between the MLP and the residual stream, by its name.
        routed: the block has routed experts.
    """

    rewrite: str | None = None
    mlp: str | None = None
    mlp_in: tuple[str, ...] = ()
    attention: str | None = None
    attention_out: str | None = None
    query_value: tuple[str, ...] = ()
    post_norm: str | None = None
    routed: bool = False


class Blocks(NamedTuple):
    """The decoder blocks of a model: the name of their list, and their parts in order."""

    name: str
    parts: list[BlockParts]


def find_blocks(model: nn.Module, depth: int, width: int) -> Blocks | None:
    """The decoder blocks of a causal model; ``None`` if it has no list of that many blocks.

    Args:
        model: with weights or on the meta device.
        depth, width: number of blocks and residual width d, from the configuration of the text model.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth and not _is_nested(name)
    }
    if not lists:
        return None
    # Towers of images or sound can have as many blocks; the text model's, of width d, have most maps of that width.
    name = max(lists, key=lambda name: sum(width in shape for block in lists[name] for shape in _shapes(block)))
    return Blocks(name, [_block_parts(block, width) for block in lists[name]])


def _is_nested(name: str) -> bool:
    """Whether a list is inside a block of another list."""
    return any(part.isdigit() for part in name.split("."))


def _shapes(block: nn.Module) -> list[tuple[int, int]]:
    return [map_shape(module) for _, module in _maps(block)]


def _maps(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The linear maps below a module, adapters around them included, with their names."""
    for name, child in module.named_children():
        if is_linear_map(child):
            yield f"{prefix}{name}", child
        else:
            yield from _maps(child, f"{prefix}{name}.")


def _block_parts(block: nn.Module, width: int) -> BlockParts:
    children = dict(block.named_children())
    attention = next(
        (f"{name}{inner}" for name, child in children.items() if (inner := _attention_in(name, child)) is not None),
        None,
    )
    mlp = _find_mlp(block, width, attention)
    norms = [name for name, child in children.items() if _POST_NORM.fullmatch(name) and list(child.parameters())]
    return BlockParts(
        **mlp,
        **({} if attention is None else _attention_parts(block.get_submodule(attention), attention, width)),
        post_norm=norms[0] if mlp and norms else None,
        routed=any(_ROUTED.search(name) for name, _ in block.named_modules()),
    )


def _attention_in(name: str, child: nn.Module) -> str | None:
    """``""`` if a child of a block is its attention, the rest of the name if it contains it (DBRX), else ``None``."""
    if not _ATTENTION.search(name) and not _ATTENTION_CLASS.search(type(child).__name__):
        return None
    leaves = [leaf.rpartition(".")[2] for leaf, _ in _maps(child)]
    if not any(leaf in ATTENTION_OUT for leaf in leaves):
        return None
    return ".attn" if "attn" in dict(child.named_children()) else ""


def _attention_parts(attention: nn.Module, name: str, width: int) -> dict[str, Any]:
    by_leaf: dict[str, str] = {}
    for map_name, _ in _maps(attention):
        by_leaf.setdefault(map_name.rpartition(".")[2], f"{name}.{map_name}")
    fused = [by_leaf[leaf] for leaf in FUSED if leaf in by_leaf]
    query = [by_leaf[leaf] for leaf in QUERY if leaf in by_leaf]
    value = [by_leaf[leaf] for leaf in VALUE if leaf in by_leaf]
    out = [by_leaf[leaf] for leaf in ATTENTION_OUT if leaf in by_leaf]
    return {
        "attention": name,
        "attention_out": out[0] if out else None,
        "query_value": tuple(fused[:1]) or (tuple(query[:1] + value[:1]) if query and value else ()),
    }


def _find_mlp(block: nn.Module, width: int, attention: str | None) -> dict[str, Any]:
    """The MLP of a block: a child with the maps of one, the block itself, or the expert that every token passes."""
    children = [(name, child) for name, child in block.named_children() if name != (attention or "").split(".")[0]]
    # RecurrentGemma's recurrent block has three maps of the same shapes.
    for name, child in sorted(children, key=lambda pair: not _MLP.search(pair[0] + type(pair[1]).__name__)):
        if found := _mlp_maps([*child.named_children()], f"{name}.", width):
            return {"mlp": name, **found}
    if found := _mlp_maps(children, "", width):
        return {"mlp": found["rewrite"], **found}
    for name, module in block.named_modules():
        if _SHARED.fullmatch(name.rpartition(".")[2]) and (
            found := _mlp_maps([*module.named_children()], f"{name}.", width)
        ):
            return {"mlp": name, **found}
    return {}


def _mlp_maps(children: Sequence[tuple[str, nn.Module]], prefix: str, width: int) -> dict[str, Any] | None:
    """Names of the output and input maps among modules, if their maps are exactly those of an MLP."""
    maps = [(name, map_shape(child)) for name, child in children if is_linear_map(child)]
    out = [(name, shape[1]) for name, shape in maps if shape[0] == width]
    if len(maps) not in (2, 3):
        return None
    for name, inner in reversed(out):  # the output map is the last one where d equals f
        others = [(other, shape) for other, shape in maps if other != name]
        widths = [inner] if len(others) == 2 else [inner, 2 * inner]
        if all(shape[1] == width and shape[0] in widths for _, shape in others):
            ordered = sorted((other for other, _ in others), key=lambda other: not _GATE.search(other))
            return {"rewrite": f"{prefix}{name}", "mlp_in": tuple(f"{prefix}{other}" for other in ordered)}
    return None


def most_common(values: Sequence[Any]) -> Any:
    """The most frequent value, the first of them in a tie; ``None`` without any."""
    return Counter(values).most_common(1)[0][0] if values else None
