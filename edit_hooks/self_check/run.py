"""The self-check of a model: which probes run, what their results allow, and where the results are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.locate.values.value_batch import Site
from edit_hooks.modeling.architectures import (
    ROLES,
    Architecture,
    architecture_of,
    attention_output,
    map_shape,
    row_chosen,
    text_config,
    unwrapped,
)
from edit_hooks.modeling.fingerprint.identity import computation_identity
from edit_hooks.modeling.forward.forward_pass import forward_pass_of
from edit_hooks.modeling.grad_mode import gradients
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.support import Support, editable_blocks, known_support, record_support
from edit_hooks.self_check.probes import PlainPasses, ProbeError, plain_errors, require
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.hashing import code_fingerprint

log = get_logger("lm_eval.edited_hf")

KIND = "self_checks"
ATTENTION_ROW = "attention_output"  # value of the option `family`, and what the table calls its result
SAME_SCALE = 1e-2  # relative difference of the scales of two blocks that counts as rounding

# Name of a check -> what it is about, in the order in which they run.
CHECKS = {
    "structure": "decoder blocks, their MLPs and attention are found",
    "maps": "hooks record the input and output of every map that is edited",
    "written": "a low-rank change written into a weight changes its map's output by it, and is undone bit for bit",
    "gate": "the first input map of a gated MLP is, or begins with, its gate",
    "padding": "padding changes no row under an edit",
    "beside": "the same change beside the weight changes its own row by it, and no other row",
    "residual": "an MLP's output reaches the residual stream at a constant scale, or through the norm behind it",
    "cache": "keys and values of earlier tokens stand for them, also for several new tokens",
    "suffix": "losses and gradients from the suffix alone are those of the whole pass",
    "labels": "losses with constant parts kept are those of the whole pass",
}


def checked(model: nn.Module, store: Store | None = None) -> Support:
    """What a model supports: known, stored, or found by the self-check, which then takes a few short passes.

    A stored result is found by how the model computes (class, configuration, dtypes, devices, library versions), not by
    the numbers in its weights, so a fine-tuned model is not checked again.
    """
    inner = unwrapped(model)
    known = known_support(inner)
    if known is not None:
        return known
    place = Store() if store is None else store
    description = Description(
        what="self-check", model=computation_identity(inner), code=code_fingerprint(__name__), inputs={}
    )
    stored = place.load_json(KIND, description)
    if stored is not None:
        support = Support(**{**stored, "passed": tuple(stored["passed"])})
    else:
        support = self_check(inner)
        place.save_json(KIND, description, as_json(support))
    record_support(inner, support)
    if support.failed:
        log.warning("%s: %s. %s", type(inner).__name__, support.offer, " ".join(reasons(support)))
    return support


def as_json(support: Support) -> dict[str, Any]:
    """The fields of a result, JSON-able."""
    return {
        **vars(support),
        "unusable": dict(support.unusable),
        "failed": dict(support.failed),
        "passed": list(support.passed),
    }


def reasons(support: Support) -> list[str]:
    """One line per failed check."""
    return [f"{name}: {reason}." for name, reason in support.failed.items()]


def require_support(model: nn.Module) -> Support:
    """The support of a model whose weights can be edited.

    Raises:
        EditingError: they cannot, with the reason.
    """
    support = checked(model)
    if not support.weights:
        raise EditingError(
            f"{type(unwrapped(model)).__name__} fails the self-check that every model passes before its weights are "
            f"edited. {' '.join(reasons(support))} Editors of prompts (ike, ice) and mode=none run on it; lm-edit "
            "check-model prints all checks."
        )
    return support


def self_check(model: nn.Module) -> Support:
    """Run all checks; the model is left as it was."""
    run = _Run(unwrapped(model))
    with frozen(run.model), gradients(False):
        run.all_checks()
    rows = "beside" not in run.failed
    fast = rows and not {"cache", "suffix", "labels"} & set(run.failed)
    return Support(run.unusable, rows, fast, run.scale, run.prefix_apart, run.failed, tuple(run.passed))


class _Run:
    """One run of the checks."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.scale: float | None = 1.0
        self.prefix_apart = True
        self.failed: dict[str, str] = {}
        self.passed: list[str] = []
        self.unusable: dict[str, str] = {}
        self.roles: dict[str, list[str]] = {}
        self.blocks: list[int] = []
        self.kinds: list[int] = []

    def all_checks(self) -> None:
        if not self._holds("structure", self._structure):
            self.unusable = dict.fromkeys(ROLES, self.failed["structure"])
            return
        self.unedited = self.probe.run(self.names)
        self._by_role("maps", lambda name: self.probe.check_map(name, self.unedited))
        if "rewrite" not in self.unusable:
            self._by_role("maps", self._check_width)
        self._written()
        if self.names and not self._holds("padding", self._padding):
            self.unusable = dict.fromkeys(ROLES, self.failed["padding"])
        if not self.names:
            return
        self._holds("beside", self._beside)
        self._holds("cache", self._cache)
        if "rewrite" not in self.unusable:
            self.scale = None
            self._holds("residual", self._residual)
            self._holds("gate", self._gate)
            if "cache" not in self.failed:
                self._holds("suffix", self._suffix)
        one_of_each_kind = {name.rpartition(".")[0]: name for name in reversed(self.names)}.values()
        self._holds("labels", lambda: self.probe.check_labels(list(one_of_each_kind), self.unedited))

    @property
    def names(self) -> list[str]:
        """The maps of one block of each kind that can be edited as far as is known."""
        return [name for role in self.roles if role not in self.unusable for name in self.roles[role]]

    def _by_role(self, check_name: str, check: Callable[[str], None]) -> None:
        """Run a check for every role; a role that fails is unusable, and others are not."""
        for role, names in self.roles.items():
            if role in self.unusable:
                continue
            try:
                with plain_errors():
                    for name in names:
                        check(name)
            except ProbeError as error:
                self.unusable[role] = str(error)
                self.failed[check_name] = self.failed.get(check_name, str(error))
        if check_name not in (*self.failed, *self.passed):
            self.passed.append(check_name)

    def _check_width(self, name: str) -> None:
        width = text_config(self.model).hidden_size
        if name in self.roles["rewrite"]:
            found = map_shape(self.model.get_submodule(name))[0]
            require(found == width, f"{name} leads into {found} dimensions, the residual stream has {width}")

    def _written(self) -> None:
        """Write an update of all maps at once, which takes two passes; each map is compared for its own input."""
        names = self.names
        if not names:
            return
        delta = self.probe.rank_one(names, self.unedited)
        try:
            with plain_errors():
                run = self.probe.run_written(names, delta)
                self.probe.check_undone(run)
        except ProbeError as error:
            self.failed["written"] = str(error)
            self.unusable |= dict.fromkeys(self.roles, str(error))
            return
        self._by_role("written", lambda name: self.probe.check_update(name, delta, run, len(self.probe.rows)))

    def _beside(self) -> None:
        delta = self.probe.rank_one(self.names, self.unedited)
        run = self.probe.run_beside(self.names, delta)
        for name in self.names:
            self.probe.check_update(name, delta, run, 1)
        self.probe.check_other_row(run)

    def _holds(self, name: str, check: Callable[[], object]) -> bool:
        try:
            with plain_errors():
                check()
        except ProbeError as error:
            self.failed[name] = str(error)
            return False
        self.passed.append(name)
        return True

    def _structure(self) -> None:
        try:
            arch = architecture_of(self.model)
        except EditingError:
            raise ProbeError("no decoder blocks with an MLP or an attention of linear maps were found") from None
        self.blocks = editable_blocks(self.model)
        candidates = self.blocks or editable_blocks(self.model, "query_value")
        require(bool(candidates), "no block has an MLP or an attention whose maps can be edited")
        self.kinds = _one_of_each_kind(arch, candidates)
        self.roles = {
            role: [name for layer in self.kinds if arch.has(role, layer) for name in arch.module_names(role, layer)]
            for role in ROLES
        }
        self.roles = {role: names for role, names in self.roles.items() if names}
        if not self.blocks:
            experts = "is a mixture of experts in tensors of all experts" if arch.routed else "has no linear output map"
            self.unusable = {"rewrite": f"the MLP {experts}", "mlp_in": f"the MLP {experts}"}
        for role in ROLES:
            if role not in self.roles:
                self.unusable.setdefault(role, "no block has such a map")
        self.probe = PlainPasses(self.model, arch)
        require(not bool(self.probe.plain_PV.isnan().any()), "its logits are not numbers")

    def _padding(self) -> None:
        require(forward_pass_of(self.model).pads, "rows of different lengths change each other in a batch")
        if "rewrite" not in self.unusable:
            for layer in self.kinds:
                self.probe.check_plain(layer)

    def _suffix(self) -> None:
        try:
            with plain_errors():
                self._check_suffixes()
        except ProbeError:
            # Latent attention computes keys behind the cache, where a prefix kept apart is lost: put both together.
            self.prefix_apart = False
            record_support(self.model, Support(prefix_apart=False))
            self._check_suffixes()

    def _check_suffixes(self) -> None:
        sites: tuple[Site, ...] = ("mlp", "block")
        for layer in self.kinds:
            for site in sites:
                self.probe.check_suffix(layer, site)

    def _gate(self) -> None:
        for layer in self.kinds:
            if self.probe.arch.has("mlp_in", layer):
                self.probe.check_gate(layer)

    def _residual(self) -> None:
        blocks = sorted({self.blocks[0], *self.kinds, self.blocks[-1]})
        scales = self.probe.contributions(blocks)
        spread = max(scales) / min(scales) - 1
        require(spread <= SAME_SCALE, f"the blocks {blocks} add their MLPs' outputs at different scales {scales}")
        scale = sum(scales) / len(scales)
        # Rounding must not turn the plain sum into a scaled one.
        self.scale = 1.0 if abs(scale - 1) <= 4 * torch.finfo(self.probe.plain_PV.dtype).eps ** 0.5 else scale

    def _cache(self) -> None:
        found = forward_pass_of(self.model)
        require(found.decodes, "keys and values of earlier tokens cannot stand for them")
        require(found.shares, "several new tokens cannot run on top of those of earlier ones")


def _one_of_each_kind(arch: Architecture, blocks: Sequence[int]) -> list[int]:
    """Of the blocks with the same modules, the one in the middle; the first of the list has most blocks of its kind."""
    kinds: dict[str, list[int]] = {}
    for layer in blocks:
        kinds.setdefault(repr(sorted(arch.special.get(layer, {}).items())), []).append(layer)
    return [alike[len(alike) // 2] for alike in sorted(kinds.values(), key=len, reverse=True)]


def summary(model: nn.Module, support: Support) -> dict[str, Any]:
    """The row of a model in the table of families: what is offered, and one line per failed check.

    Where no MLP can be edited, also what is offered with the attention's output map in its place.
    """
    row: dict[str, Any] = {"class": type(unwrapped(model)).__name__, "offer": support.offer}
    if support.weights and "rewrite" not in support.unusable:
        row |= {"blocks": len(editable_blocks(model)), "scale": support.scale and round(support.scale, 4)}
    elif "attention_out" not in support.unusable:
        inner = unwrapped(model)
        with row_chosen(inner, attention_output):
            row[ATTENTION_ROW] = self_check(inner).offer
    return row | ({"failed": dict(support.failed)} if support.failed else {})
