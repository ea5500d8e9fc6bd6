"""What editing a model supports: the result of its self-check (:mod:`edit_hooks.self_check`)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from edit_hooks.modeling.architectures import (
    ROLES,
    architecture_of,
    given_row,
    is_tested,
    num_layers,
    unwrapped,
)
from edit_hooks.utils.errors import EditingError


@dataclass(frozen=True)
class Support:
    """Which editors and engines a model supports.

    Attributes:
        unusable: role of a map -> why it cannot be edited, one line each.
        rows: low-rank edits can act beside the weights, per row of a batch; otherwise they are written.
        fast: the fast engine is exact; otherwise edits are computed by the plain one.
        scale: constant factor between an MLP's output and its contribution to the residual stream, behind the post-norm
            where there is one; ``None`` where the contribution is another function of the output.
        prefix_apart: attention can read a cached prefix in place (:mod:`edit_hooks.modeling.forward.prefix_attention`).
        failed: name of a check -> why it failed, one line each.
        passed: names of the checks that passed.
    """

    unusable: Mapping[str, str] = field(default_factory=dict)
    rows: bool = True
    fast: bool = True
    scale: float | None = 1.0
    prefix_apart: bool = True
    failed: Mapping[str, str] = field(default_factory=dict)
    passed: tuple[str, ...] = ()

    @property
    def offer(self) -> str:
        """The largest set of editors and engines that is offered, in words."""
        if not self.weights:
            return "context editors only"
        maps = "attention maps only, " if "rewrite" in self.unusable else ""
        answers = "" if self.rows else ", weights by patching only"
        return f"{maps}{'fast engine' if self.fast else 'plain engine'}{answers}"

    @property
    def weights(self) -> bool:
        """Whether editors that change weights or run hooks are offered, at least for some maps."""
        return set(ROLES) > set(self.unusable)


# By model, what each row supports that was used for it: another row names other modules.
_supports: weakref.WeakKeyDictionary[nn.Module, list[tuple[object, Support]]] = weakref.WeakKeyDictionary()


def record_support(model: nn.Module, support: Support) -> None:
    """Remember what a model supports with the modules that are found in it now, for this process."""
    inner = unwrapped(model)
    row = given_row(inner)
    others = [pair for pair in _supports.get(inner, ()) if pair[0] is not row]
    _supports[inner] = [*others, (row, support)]


def known_support(model: nn.Module) -> Support | None:
    """What a model supports; ``None`` before its self-check. Families on which the tests run every editor need none."""
    inner = unwrapped(model)
    if is_tested(inner):
        return Support()
    row = given_row(inner)
    return next((support for checked, support in _supports.get(inner, ()) if checked is row), None)


def contribution_scale(model: nn.Module) -> float:
    """:attr:`Support.scale` of a model that was checked.

    Raises:
        EditingError: the residual stream changes in another way than by a multiple of an MLP's output.
    """
    support = known_support(model)
    if support is None:
        return 1.0
    if support.scale is None:
        raise EditingError(
            f"{type(unwrapped(model)).__name__} fails the self-check 'residual': {support.failed.get('residual')}. So "
            "no change of an MLP's output makes a given change of the residual stream, and editors that spread a "
            "residual over blocks (memit and its variants) are refused; rome, r_rome, lora and ft_m do not need it."
        )
    return support.scale


def rows_can_differ(model: nn.Module) -> bool:
    """:attr:`Support.rows` of a model that was checked, true before."""
    support = known_support(model)
    return support is None or support.rows


def prefix_stays_apart(model: nn.Module) -> bool:
    """:attr:`Support.prefix_apart` of a model that was checked, true before."""
    support = known_support(model)
    return support is None or support.prefix_apart


def editable_blocks(model: nn.Module, attribute: str = "rewrite") -> list[int]:
    """The blocks that have the modules of an attribute of :class:`~edit_hooks.modeling.architectures.Architecture`."""
    arch = architecture_of(model)
    return [layer for layer in range(num_layers(model)) if arch.has(attribute, layer)]
