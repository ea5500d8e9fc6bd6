"""lm-eval's internals: every one that `edit_hooks.lm` uses is listed, and every one that is listed exists."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lm_eval.models.huggingface import HFLM

import edit_hooks.lm
from edit_hooks.lm.loading.hflm import PRIVATE_MEMBERS
from edit_hooks.lm.model import EditedHFLM

FOLDER = Path(edit_hooks.lm.__file__).parent
SOURCES = {path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.py")}
LISTED = [(owner, member) for owner, members in PRIVATE_MEMBERS.items() for member in members]
MEMBERS = {member for _, member in LISTED}
# Documented: the interface of a model class in lm-eval's model guide.
DOCUMENTED = {"apply_chat_template", "generate_until", "loglikelihood", "loglikelihood_rolling"}
NOT_LM_EVAL = {"_attn_implementation", "_replace"}  # transformers' model config; named tuples


def resolve(owner: str) -> object:
    module, _, name = owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def members_of(owner: object) -> set[str]:
    """Attributes of a module or class; of a class also those that its methods set on ``self``."""
    if not isinstance(owner, type):
        return set(dir(owner))
    set_in_methods = {
        node.attr
        for base in owner.__mro__[:-1]
        if base.__module__.startswith("lm_eval.")
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base))))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return set(dir(owner)) | set_in_methods


@pytest.mark.parametrize(("owner", "member"), LISTED)
def test_lm_eval_still_has_the_member(owner: str, member: str) -> None:
    assert member in members_of(resolve(owner)), f"{owner} no longer has {member}; adapt edit_hooks/lm"


def test_a_vanished_member_is_noticed() -> None:
    assert "_create_models" not in members_of(HFLM)


def private_names(source: str, context: type[ast.expr_context]) -> Iterator[str]:
    """Private attributes that a module reads or sets, on any object."""
    for node in ast.walk(ast.parse(source)):
        is_access = isinstance(node, ast.Attribute) and isinstance(node.ctx, context)
        if is_access and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr


@functools.cache
def own_names() -> set[str]:
    """Private attributes that the room itself defines: methods, class attributes, attributes set on ``self``."""
    names = {name for source in SOURCES.values() for name in private_names(source, ast.Store)}
    for source in SOURCES.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
    return names


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_every_private_member_that_a_module_reads_is_listed(module: str) -> None:
    unlisted = set(private_names(SOURCES[module], ast.Load)) - own_names() - MEMBERS - NOT_LM_EVAL
    assert not unlisted, f"{module} uses {sorted(unlisted)}; add them to edit_hooks.lm.loading.hflm.PRIVATE_MEMBERS"


def test_every_override_is_listed() -> None:
    ours = {name for base in EditedHFLM.__mro__ if base.__module__.startswith("edit_hooks.lm.") for name in vars(base)}
    theirs = {name for base in HFLM.__mro__[:-1] for name in vars(base)}
    overridden = {name for name in ours & theirs if not name.startswith("__")} - {"_abc_impl"}
    assert overridden - DOCUMENTED <= MEMBERS, sorted(overridden - DOCUMENTED - MEMBERS)


def test_no_attribute_of_ours_replaces_one_of_lm_eval_unnoticed() -> None:
    clashes = {name for source in SOURCES.values() for name in private_names(source, ast.Store)} & members_of(HFLM)
    assert clashes <= MEMBERS, sorted(clashes - MEMBERS)


@pytest.mark.parametrize("form", ["text", "mapping"])
def test_an_option_of_lm_evals_own_may_be_among_the_models(tiny_path: Callable[[str], Path], form: str) -> None:
    """lm-eval passes ``--device`` and ``--batch_size`` beside the model's arguments, with defaults: cuda:0 and 1."""
    options = {"pretrained": str(tiny_path("llama")), "device": "cpu", "batch_size": 4, "store": "off"}
    defaults = {"device": "cuda:0", "batch_size": 1, "max_batch_size": None}
    if form == "text":
        text = ",".join(f"{name}={value}" for name, value in options.items())
        lm = EditedHFLM.create_from_arg_string(text, defaults)
    else:
        lm = EditedHFLM.create_from_arg_obj(options, defaults)
    assert (lm.device.type, lm.batch_size_per_gpu) == ("cpu", 4)


def test_every_import_from_lm_evals_helpers_is_listed() -> None:
    imported = {
        alias.name
        for source in SOURCES.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module == "lm_eval.models.utils"
        for alias in node.names
    }
    assert imported == set(PRIVATE_MEMBERS["lm_eval.models.utils"])


def test_every_listed_member_is_used() -> None:
    code = "\n".join(SOURCES.values())
    table = code[code.index("PRIVATE_MEMBERS: ") : code.index("class LateLoadingHFLM")]
    code = code.replace(table, "")
    assert not [member for member in MEMBERS if member not in code]
