"""Module names of a model by their roles: found from its structure, corrected or given by rows.

Module templates are relative to the causal language model and take the block index.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import EntryPoint
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.modeling.linear_maps import is_transposed as is_transposed
from edit_hooks.modeling.linear_maps import linear_of as linear_of
from edit_hooks.modeling.linear_maps import map_shape as map_shape
from edit_hooks.modeling.linear_maps import weight_of as weight_of
from edit_hooks.modeling.structure import BlockParts, find_blocks, most_common
from edit_hooks.modeling.token_lists import may_run_on_lists
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.plugins import import_object, registered
from edit_hooks.utils.scopes import undone

ENTRY_POINTS = "lm_eval_editing.families"
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
        special: blocks with other modules: index -> attribute -> template, empty where the block has no such module.
        routed: blocks with experts among which each token is routed.
    """

    block: str
    mlp: str
    rewrite: str
    attention: str
    attention_out: str
    mlp_in: tuple[str, ...]
    query_value: tuple[str, ...]
    post_norm: str | None = None
    special: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    routed: frozenset[int] = frozenset()

    @property
    def normalizes_mlp_output(self) -> bool:
        """Whether m^l passes through a norm before it is added to the residual stream."""
        return self.post_norm is not None

    def changes_attention(self, layer: int) -> bool:
        """Whether the edited map is a part of the attention."""
        rewrite, attention = self._template("rewrite", layer), self._template("attention", layer)
        return bool(rewrite and attention and rewrite.startswith(f"{attention}."))

    @property
    def is_mixed(self) -> bool:
        """Whether some blocks lack modules that others have, or all lack an MLP of linear maps."""
        return bool(self.special) or not self.rewrite

    def block_name(self, layer: int) -> str:
        return self.block.format(layer)

    def mlp_name(self, layer: int) -> str:
        return self._name("mlp", layer)

    def rewrite_name(self, layer: int) -> str:
        return self._name("rewrite", layer)

    def attention_name(self, layer: int) -> str:
        return self._name("attention", layer)

    def has(self, attribute: str, layer: int) -> bool:
        """Whether a block has the modules of an attribute."""
        return bool(self._template(attribute, layer))

    def _template(self, attribute: str, layer: int) -> Any:
        return self.special.get(layer, {}).get(attribute, getattr(self, attribute))

    def _name(self, attribute: str, layer: int) -> str:
        template: str = self._required(attribute, layer)
        return template.format(layer)

    def _required(self, attribute: str, layer: int) -> Any:
        """The template of a block.

        Raises:
            EditingError: the block has no such module.
        """
        template = self._template(attribute, layer)
        if template:
            return template
        what = "attention" if attribute in ("attention", "attention_out", "query_value") else "MLP"
        why = "was not found"
        if what == "MLP" and layer in self.routed:
            why = "is a mixture of experts that keeps the maps of all in one tensor"
        if self.changes_attention(layer):
            why = "is left alone where the attention's output map is the edited one"
        other = what == "MLP" and not self.changes_attention(layer) and self.has("attention_out", layer)
        remedy = "family=attention_output edits the attention's output map in its place, lora" if other else "lora"
        raise EditingError(
            f"block {layer}: its {what} {why}, so there is no linear map in the role {attribute!r} that edits could "
            f"change. lm-edit check-model names the blocks that have one. {remedy} edits the attention with "
            "editor_args=modules:query_value, and editors of prompts (ike, ice) and mode=none run on any model."
        )

    def module_names(self, role: str, layer: int) -> list[str]:
        """Names of the linear maps with a role (one of :data:`ROLES`) in a block.

        Raises:
            EditingError: the block has none.
        """
        templates = self._required(role, layer)
        return [template.format(layer) for template in ([templates] if isinstance(templates, str) else templates)]

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
        (name, *others) = self.module_names("mlp_in" if which == "mlp_in" else "rewrite", layer)
        if others:
            raise EditingError("module=mlp_in, but the MLPs of this model are gated: two maps lead in. Use mlp_out.")
        return name

    def post_norm_name(self, layer: int) -> str:
        return self._name("post_norm", layer)

    def as_json(self) -> dict[str, Any]:
        """All attributes, JSON-able."""
        special = {str(layer): dict(others) for layer, others in self.special.items()}
        return {**asdict(self), "special": special, "routed": sorted(self.routed)}


# Made from the row that a model's structure gives.
RowOf: TypeAlias = Callable[[Architecture], Architecture]


def attention_output(found: Architecture) -> Architecture:
    """The row in which the attention's output map is the one that is edited, in place of the MLP's.

    For mixtures of experts, whose maps are in tensors of all experts. The MLP behind the attention reads the change,
    too, so no change of the map's output makes a given one of the residual stream.
    """
    moved = ("mlp", "rewrite", "mlp_in", "post_norm", "attention_out")

    def edited(template: str | None) -> dict[str, Any]:
        return {"mlp": template or "", "rewrite": template or "", "attention_out": ""}

    special = {
        layer: {name: value for name, value in others.items() if name not in moved}
        | (edited(others["attention_out"]) if "attention_out" in others else {})
        for layer, others in found.special.items()
    }
    return replace(
        found,
        **edited(found.attention_out),
        mlp_in=(),
        post_norm=None,
        special={layer: others for layer, others in special.items() if others},
    )


ROWS: Mapping[str, RowOf] = {"attention_output": attention_output}  # values of the option `family`


def row_of_option(text: str) -> Architecture | RowOf:
    """The row that the option ``family`` names: one of :data:`ROWS`, or an object ``package.module:ROW``."""
    row: Any = ROWS[text] if text in ROWS else import_object(text, "family")
    _check_row(row, f"family={text}")
    return row


# Classes of the families on which the tests run every editor. Their structure is known to be what was found, so they
# need no self-check, and their MLP's output is that of its output map.
TESTED_CLASSES = (
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Olmo2ForCausalLM",
)

_found: weakref.WeakKeyDictionary[nn.Module, Architecture] = weakref.WeakKeyDictionary()
_given: dict[str, Architecture | RowOf] = {}  # by model type
_chosen: weakref.WeakKeyDictionary[nn.Module, Architecture | RowOf] = weakref.WeakKeyDictionary()  # for one object


def register_family(model_type: str, row: Architecture | RowOf) -> None:
    """Use a row for all models of a type in this process, in place of what their structure shows.

    :func:`choose_row` uses one for a single model.

    Args:
        row: or a function that makes it of the row that the structure gives.
    """
    _check_row(row, f"the family of model type {model_type!r}")
    _given[model_type] = row
    _found.clear()


def _check_row(row: object, what: str) -> None:
    if not isinstance(row, Architecture) and not callable(row):
        raise EditingError(
            f"{what} is a {type(row).__name__}; give an edit_hooks.modeling.architectures.Architecture with the names "
            "of the modules, or a function of one."
        )


def choose_row(model: nn.Module, row: Architecture | RowOf | None) -> None:
    """Use a row for one model object, in place of that of its type or structure.

    Args:
        row: ``None``: that of the type or structure again.
    """
    inner = unwrapped(model)
    if _chosen.get(inner) is row:
        return
    if row is None:
        del _chosen[inner]
    else:
        _chosen[inner] = row
    _found.pop(inner, None)


@contextlib.contextmanager
def row_chosen(model: nn.Module, row: Architecture | RowOf | None) -> Iterator[None]:
    """Scope of :func:`choose_row`."""
    before = _chosen.get(unwrapped(model))
    with undone(lambda: choose_row(model, before)):
        choose_row(model, row)
        yield


def is_tested(model: nn.Module) -> bool:
    """Whether a model is of a class on which the tests run every editor, with the modules found in it."""
    cls = type(model)
    is_stock = cls.__module__.startswith("transformers.") and cls.__name__ in TESTED_CLASSES
    return is_stock and given_row(model) is None


def architecture_of(model: nn.Module) -> Architecture:
    """The module templates of a causal model, with weights or without.

    From the row that the option ``family`` chose for it, or that a package has for its ``model_type``, else from its
    structure.

    Raises:
        EditingError: no decoder blocks with an MLP or an attention were found.
    """
    inner = unwrapped(model)
    if inner not in _found:
        given = given_row(inner)
        row = given if isinstance(given, Architecture) else _from_structure(inner)
        if given is not None:
            row = given if isinstance(given, Architecture) else given(row)
            _require_modules(row, inner)
        _found[inner] = row
        if not is_tested(inner):
            _find_token_lists(inner, _found[inner])
    return _found[inner]


def _find_token_lists(model: PreTrainedModel, arch: Architecture) -> None:
    """Let hooks see rows in MLPs that run on lists of tokens (shared experts, OPT)."""
    for layer in range(num_layers(model)):
        roles = [role for role in ("mlp_in", "rewrite") if arch.has(role, layer)]
        maps = [model.get_submodule(name) for role in roles for name in arch.module_names(role, layer)]
        may_run_on_lists(model.get_submodule(arch.block_name(layer)), maps)


def given_modules(model: nn.Module) -> dict[str, Any] | None:
    """The row of a model that does not come from its structure, JSON-able; ``None`` if it does."""
    inner = unwrapped(model)
    return None if given_row(inner) is None else architecture_of(inner).as_json()


def _require_modules(row: Architecture, model: nn.Module) -> None:
    """Refuse a row that names modules which the first block lacks.

    Raises:
        EditingError: with the first such name.
    """
    roles = [role for role in ("mlp", "attention", *ROLES) if row.has(role, 0)]
    for name in (row.block_name(0), *(name for role in roles for name in row.module_names(role, 0))):
        try:
            model.get_submodule(name)
        except AttributeError:
            raise EditingError(f"the family's row names no module {name!r} of {type(model).__name__}.") from None


def given_row(model: nn.Module) -> Architecture | RowOf | None:
    """The row of a model that was chosen for it, or registered for its type; ``None``: its structure counts."""
    if (chosen := _chosen.get(unwrapped(model))) is not None:
        return chosen
    model_type = str(getattr(model.config, "model_type", None))
    if model_type not in _given and (entry := _registered_families().get(model_type)) is not None:
        register_family(model_type, import_object(entry.value, "family"))
    return _given.get(model_type)


@functools.cache
def _registered_families() -> dict[str, EntryPoint]:
    """The entry points of installed packages, by ``model_type``."""
    return registered(ENTRY_POINTS)


def _from_structure(model: PreTrainedModel) -> Architecture:
    config = text_config(model)
    width = getattr(config, "hidden_size", None)
    blocks = find_blocks(model, num_layers(model), width) if width else None
    if blocks is None or not any(part.rewrite or part.attention for part in blocks.parts):
        raise EditingError(
            f"no decoder blocks with an MLP or an attention were found in {type(model).__name__} (model type "
            f"{config.model_type!r}), so there is nothing that edits of weights could change. Editors of prompts (ike, "
            "ice) and mode=none run on any model; a package can name the modules (docs: a model family)."
        )
    parts = blocks.parts
    if not is_tested(model):
        # Some MLPs scale the map's output or add the residual stream to it; the map's own output is m^l in all.
        parts = [replace(part, mlp=part.rewrite) for part in parts]
    rows = [_templates(blocks.name, part) for part in parts]
    usual = {name: most_common([row[name] for row in rows if row[name]]) for name in rows[0]}
    special = {
        layer: {name: value for name, value in row.items() if (value or None) != usual[name]}
        for layer, row in enumerate(rows)
    }
    none = {name: () if name in ("mlp_in", "query_value") else "" for name in usual if usual[name] is None}
    return Architecture(
        block=f"{blocks.name}.{{}}",
        **{**usual, **none, "post_norm": usual["post_norm"]},
        special={layer: others for layer, others in special.items() if others},
        routed=frozenset(layer for layer, part in enumerate(parts) if part.routed),
    )


def _templates(blocks: str, part: BlockParts) -> dict[str, Any]:
    """Attributes of :class:`Architecture` for one block, ``None`` or empty where it has no such module."""

    def full(name: Any) -> Any:
        return tuple(map(full, name)) if isinstance(name, tuple) else name and f"{blocks}.{{}}.{name}"

    names = ("mlp", "rewrite", "attention", "attention_out", "mlp_in", "query_value", "post_norm")
    return {name: full(getattr(part, name)) for name in names}


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
    """The model without its head: embeddings, blocks, and final norm; the module that the model itself calls."""
    decoder: nn.Module | None = getattr(model, model.base_model_prefix, None)
    if decoder is None:  # some classes have the prefix of a larger model
        decoder = model.get_decoder()
        return block_owner(model) if decoder is model else decoder
    inner = decoder._modules.get("decoder")  # OPT, Bart: half of a pair, called by its own name
    return decoder if inner is None else inner


def block_owner(model: nn.Module) -> nn.Module:
    """The module that runs the blocks: the decoder, or the text model inside it."""
    return model.get_submodule(architecture_of(model).block.rpartition(".")[0].rpartition(".")[0])


def text_config(model_or_config: Any) -> Any:
    """The configuration of the text model, which is a part of that of a model for images or sound as well."""
    config = getattr(model_or_config, "config", model_or_config)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def num_layers(model_or_config: Any) -> int:
    """Number of decoder blocks."""
    return int(text_config(model_or_config).num_hidden_layers)


def edited_module(model: nn.Module, name: str) -> nn.Module:
    """The module that an edit names.

    Raises:
        EditingError: the model has none of this name.
    """
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise EditingError(f"the model has no module {name!r}; was this edit made for another model?") from None


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
