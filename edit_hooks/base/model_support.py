"""What the self-check of a model means for an editor: refused maps, and default layers that it can edit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from edit_hooks.modeling.architectures import architecture_of, num_layers
from edit_hooks.modeling.support import Support, known_support
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.plugins import import_object

SELF_CHECK = "edit_hooks.self_check.run:require_support"  # above this room: it runs the engines that editors use

TargetsOf = Callable[[list[int]], Iterable[str]]  # names of the maps that an editor changes in these blocks


def require_support(model: nn.Module) -> Support:
    """Run the self-check of a model unless its result is known.

    Raises:
        EditingError: none of its weights can be edited.
    """
    known = known_support(model)
    if known is not None and known.weights:
        return known
    support: Support = import_object(SELF_CHECK, "self-check")(model)
    return support


def check_targets(editor: str, model: nn.Module, layers: Sequence[int], targets_of: TargetsOf) -> None:
    """Refuse an editor whose maps fail the self-check of a model.

    Raises:
        EditingError: with the reason.
    """
    unusable = require_support(model).unusable
    if not unusable:
        return
    arch, targets = architecture_of(model), set(targets_of(list(layers)))
    for role, reason in unusable.items():
        if any(arch.has(role, layer) and targets & set(arch.module_names(role, layer)) for layer in layers):
            raise EditingError(
                f"editor {editor!r} changes {role} maps, which fail the self-check of {type(model).__name__}: "
                f"{reason}. lm-edit check-model names what this model supports."
            )


def nearest_editable(model: nn.Module, layers: Sequence[int], targets_of: TargetsOf) -> list[int]:
    """Default layers, each moved to the nearest block that has the maps which an editor changes.

    Raises:
        EditingError: no block has them.
    """

    def is_editable(layer: int) -> bool:
        try:
            targets_of([layer])
        except EditingError:
            return False
        return True

    editable = [layer for layer in range(num_layers(model)) if is_editable(layer)]
    if not editable:
        targets_of(list(layers))  # raises with the reason
    return sorted({min(editable, key=lambda block: (abs(block - layer), block)) for layer in layers})
