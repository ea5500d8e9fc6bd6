"""Options of ``edited_hf`` in ``--model_args``, validated before loading."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edit_hooks.base.origin import LAST_FACTS
from edit_hooks.base.registry import editor_class
from edit_hooks.lm.options.harness import check_parent_options
from edit_hooks.lm.options.plan import MODES
from edit_hooks.lm.options.quantization import QUANTIZATION_OPTIONS
from edit_hooks.prompt_context import AUTO, EDIT_CONTEXTS, read_separator, separator_name
from edit_hooks.run_options import RUN_OPTIONS, default_of
from edit_hooks.utils.errors import EditingError, near_misses, unknown_keys_error
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE, SEED, require_number, require_whole
from edit_hooks.utils.settings.options import SECRET_OPTIONS, parse_checkpoints, parse_editor_args

ANSWERS = ("auto", "patch")
ENGINES = ("fast", "reference")

# Options that choose a benchmark's records, besides `data` and those that end with SET_SUFFIX; its package checks them.
DATA_OPTIONS = tuple(one.name for one in RUN_OPTIONS if one.tasks_read_it == "always" and one.name != "data")
SET_SUFFIX = "_set"  # as in qaedit_set=inter_1k: a published file by name

# Values of `data`: the embedded samples, the published files, and embedded facts for the search over settings.
MINI, HUB, HELD_OUT = "mini", "hub", "mini:held_out"

# icl -> the editor of the context, and its settings
ICL: dict[str, tuple[str, dict[str, Any]]] = {
    "no": ("", {}),
    "yes": ("ike", {}),
    "fact": ("ice", {}),
    "demonstrations": ("ike", {"include_fact": False}),
}

# Keyword arguments that lm-eval's class passes to transformers' from_pretrained.
FROM_PRETRAINED = (
    "attn_implementation",
    "cache_dir",
    "device_map",
    "force_download",
    "local_files_only",
    "low_cpu_mem_usage",
    "max_memory",
    "rope_scaling",
    "use_safetensors",
    "variant",
)

GUARD_OPTIONS = ("guard", "guard_norm_ratio", "guard_loss_increase")


@dataclass(frozen=True)
class EditingOptions:
    """Options besides those of ``--model hf``: a field for each of :data:`~edit_hooks.run_options.RUN_OPTIONS`.

    Raises:
        EditingError: for values that are not accepted, and options that have no meaning together or in this mode.
    """

    editor: str = default_of("editor")
    editor_label: str | None = default_of("editor_label")
    model_label: str | None = default_of("model_label")
    mode: str = default_of("mode")
    load_edit: str | None = default_of("load_edit")
    editor_args: Mapping[str, Any] | None = default_of("editor_args")
    data: str | None = default_of("data")
    data_revision: str | None = default_of("data_revision")
    bad_records: str | None = default_of("bad_records")
    subset: int | str | None = default_of("subset")
    subset_seed: int | None = default_of("subset_seed")
    separator: str = default_of("separator")
    icl: bool | str = default_of("icl")
    icl_args: Mapping[str, Any] | None = default_of("icl_args")
    edit_context: str = default_of("edit_context")
    family: str | None = default_of("family")
    seed: int = default_of("seed")
    answer: str = default_of("answer")
    server: str | None = default_of("server")
    engine: str = default_of("engine")
    store: str | None = default_of("store")
    max_batch_tokens: int | None = default_of("max_batch_tokens")
    edits: str | None = default_of("edits")
    num_edits: int | None = default_of("num_edits")
    edit_batch_size: int | None = default_of("edit_batch_size")
    group_size: int | None = default_of("group_size")
    checkpoints: Sequence[int] | int | str = default_of("checkpoints")
    immediate: bool = default_of("immediate")
    retention: bool = default_of("retention")
    compare_unedited: bool = default_of("compare_unedited")
    measure_edits: bool = default_of("measure_edits")
    max_thought_tokens: int | None = default_of("max_thought_tokens")
    guard: Literal["report", "stop"] = default_of("guard")
    guard_norm_ratio: float = default_of("guard_norm_ratio")
    guard_loss_increase: float = default_of("guard_loss_increase")

    def __post_init__(self) -> None:
        if self.mode is None:  # lm-eval reads mode=none in a string of model arguments as None
            object.__setattr__(self, "mode", "none")
        for option in RUN_OPTIONS:
            if option.is_text:
                _text(option.name, getattr(self, option.name), required=option.name == "editor")
        object.__setattr__(self, "mode", self.mode or ("loaded" if self.load_edit else "single"))
        _one_of("mode", self.mode, MODES)
        self._check_plan()
        _one_of("answer", self.answer, ANSWERS)
        _one_of("engine", self.engine, ENGINES)
        editor_class(self.editor)  # raises with near misses
        object.__setattr__(self, "separator", separator_name(read_separator(self.separator)))
        require_whole("seed", self.seed, SEED)
        if self.max_batch_tokens is not None:
            require_whole("max_batch_tokens", self.max_batch_tokens)
        require_number("guard_norm_ratio", self.guard_norm_ratio, POSITIVE)
        require_number("guard_loss_increase", self.guard_loss_increase, NON_NEGATIVE)
        object.__setattr__(self, "editor_args", parse_editor_args(self.editor_args))
        self._check_icl()
        self._check_edit_context()
        self._check_server()

    def _check_server(self) -> None:
        if self.server is None or not self.makes_edits:
            return
        if editor_class(self.editor).writes != ("weights",) or self.icl != "no":
            raise EditingError(
                f"server={self.server} answers with one adapter per edit, but editor={self.editor}"
                f"{' with icl' * (self.icl != 'no')} changes more than weights; drop server= or name another editor."
            )

    def _check_edit_context(self) -> None:
        _one_of("edit_context", self.edit_context, EDIT_CONTEXTS)
        if self.edit_context == "bare":
            return
        if self.mode in ("none", "loaded"):
            raise EditingError(
                f"edit_context={self.edit_context} is the text in which edits are made; mode={self.mode} makes no edit "
                "(a saved edit records its own). Drop it."
            )
        if editor_class(self.editor).writes == ("context",):
            raise EditingError(
                f"editor={self.editor} states the bare fact before questions, so edit_context={self.edit_context} has "
                "no meaning; drop it. Questions are asked in a chat with --apply_chat_template."
            )

    def _check_icl(self) -> None:
        icl = ("yes" if self.icl else "no") if isinstance(self.icl, bool) else self.icl
        _one_of("icl", icl, ICL)
        object.__setattr__(self, "icl", icl)
        object.__setattr__(self, "icl_args", parse_editor_args(self.icl_args, "icl_args"))
        if self.icl == "no" and self.icl_args:
            raise EditingError("icl_args has no meaning without icl=true; drop it.")
        if self.icl != "no" and self.mode in ("none", "loaded"):
            raise EditingError(
                f"icl={self.icl} puts each edit's context before its questions; mode={self.mode} makes no edit. For "
                "the context without an editor use editor=ike."
            )
        if self.icl != "no" and editor_class(self.editor).writes == ("context",):
            raise EditingError(f"editor={self.editor} is a context already; drop icl or name another editor.")

    @property
    def context_editor(self) -> tuple[str, dict[str, Any]]:
        """Name and settings of the editor behind ``icl``."""
        name, settings = ICL[str(self.icl)]
        return name, {"seed": self.seed, **settings, **(self.icl_args or {})}

    def _check_plan(self) -> None:
        """Validate options of batch and sequential runs: complete and none ignored."""
        for name in ("num_edits", "edit_batch_size", "group_size", "max_thought_tokens"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        for name in ("immediate", "retention", "compare_unedited", "measure_edits"):
            if not isinstance(getattr(self, name), bool):
                raise EditingError(f"{name}={getattr(self, name)!r}; accepted: true, false.")
        _one_of("guard", self.guard, ("report", "stop"))
        object.__setattr__(self, "checkpoints", parse_checkpoints(self.checkpoints))
        for option in RUN_OPTIONS:
            value = getattr(self, option.name)
            if self.mode not in option.modes and value not in (option.default, ""):
                raise EditingError(
                    f"{option.name}={value!r} has no meaning in mode={self.mode}; drop it or use "
                    f"mode={' or mode='.join(option.modes)}."
                )
        if self.group_size and (guards := [name for name in GUARD_OPTIONS if getattr(self, name) != default_of(name)]):
            raise EditingError(
                f"{guards[0]} watches one edited model, but with group_size each group has its own; drop it."
            )
        if self.compare_unedited and (self.mode == "single" or self.group_size):
            raise EditingError(
                "compare_unedited=True compares lm-eval's tasks on one edited model with the unedited one, but here "
                "each case or group has its own edits. Use mode=sequential, mode=batch without group_size, or "
                "load_edit."
            )
        if self.mode == "loaded" and not self.load_edit:
            raise EditingError(
                "mode=loaded needs load_edit=<delta file, folder of a saved stream, or LoRA adapter folder>."
            )
        if self.mode == "loaded" and self.editor_args:
            raise EditingError("editor_args has no meaning in mode=loaded, which makes no edit; drop it.")
        if self.mode in ("batch", "sequential") and not self.edits:
            raise EditingError(
                f"mode={self.mode} needs edits=<benchmark or JSONL file>; the tasks only supply questions."
            )

    def data_settings(self, is_demo: bool) -> dict[str, Any]:
        """Settings of the records that ``edits=<benchmark>`` reads; tasks find the same ones in their metadata.

        Args:
            is_demo: the model is the embedded one, for which the embedded sample is the default.
        """
        place = {"data": self.data} if self.data else {"pretrained": None if is_demo else True}
        given = {name: getattr(self, name) for name in DATA_OPTIONS}
        return {**place, **{name: value for name, value in given.items() if value not in (None, AUTO)}}

    def facts_to_tune_on(self, is_demo: bool) -> tuple[str, ...]:
        """Options of ``lm-edit tune`` for facts that this run does not evaluate.

        Of published data the last ones, in this run's order, since the number of records that the tasks read is unknown
        here. Else the embedded facts that belong to no benchmark's sample.
        """
        data = self.data or (MINI if is_demo else HUB)
        context = () if self.edit_context == EDIT_CONTEXTS[0] else ("--edit-context", self.edit_context)
        if data.partition(":")[0] != HUB:
            return ("--edits", "bake", "--data", MINI if data == HELD_OUT else HELD_OUT, *context)
        is_shuffled = self.subset is not None or self.subset_seed is not None
        order = ("--subset-seed", str(self.subset_seed or 0)) if is_shuffled else ()
        return (*LAST_FACTS, *order, *context)

    @property
    def makes_edits(self) -> bool:
        """Whether this run makes edits: not in ``mode=none`` or with a saved edit."""
        return self.mode not in ("none", "loaded")

    @property
    def overrides(self) -> dict[str, Any]:
        """The user's settings of the editor, seed and engine included."""
        return {"seed": self.seed, "engine": self.engine, **(self.editor_args or {})}


def _one_of(name: str, value: object, accepted: Iterable[str]) -> None:
    accepted = list(accepted)
    if value not in accepted:
        hint = near_misses(str(value), accepted)
        raise EditingError(f"{name}={value!r} is not known.{hint} Accepted: {', '.join(accepted)}.")


def _text(name: str, value: object, required: bool) -> None:
    if not isinstance(value, str) and (required or value is not None):
        raise EditingError(
            f"{name}={value!r} is no text; a text is needed. For a file or folder of that name write ./{value}."
        )


def take_sets(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that end with :data:`SET_SUFFIX`, and return them."""
    return {name: options.pop(name) for name in list(options) if name.endswith(SET_SUFFIX)}


def check_known_options(options: Mapping[str, Any], base_class: type, own: Iterable[str]) -> None:
    """Refuse options that neither this class, lm-eval's nor from_pretrained has, and those that edits cannot honor."""
    if secrets := sorted(set(options) & set(SECRET_OPTIONS)):
        raise EditingError(
            f"{secrets[0]}= would be printed, and saved with every result; set HF_TOKEN in the environment instead, or "
            "log in with the hub's command line."
        )
    accepted = set(inspect.signature(base_class).parameters) - {"kwargs"}
    known = accepted | set(own) | set(FROM_PRETRAINED) | set(QUANTIZATION_OPTIONS)
    if cut := [name for name in options if set(name) & set("[]{}'\"")]:
        raise EditingError(
            f"{cut[0]!r} is no option of edited_hf, but the rest of a list: in Python, lm-eval splits a string of "
            "model arguments at every comma. Give model_args as a mapping; the command keeps lists in brackets whole."
        )
    if unknown := set(options) - known:
        raise unknown_keys_error("option of edited_hf", unknown, known)
    check_parent_options(options, accepted)
