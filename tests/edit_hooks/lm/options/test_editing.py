"""Options of `edited_hf`: defaults, combinations that have no meaning, near misses."""

from __future__ import annotations

from typing import Any

import pytest

from edit_hooks import EditingError
from edit_hooks.lm.options.editing import FROM_PRETRAINED, EditingOptions, check_known_options


class Base:
    def __init__(self, pretrained: str, batch_size: int = 1, **kwargs: Any) -> None: ...


def test_the_mode_follows_from_the_other_options() -> None:
    assert EditingOptions().mode == "single" and EditingOptions().makes_edits
    loaded = EditingOptions(load_edit="x.safetensors")
    assert loaded.mode == "loaded" and not loaded.makes_edits
    assert not EditingOptions(mode="none").makes_edits


def test_settings_of_the_editor_override_seed_and_engine() -> None:
    options = EditingOptions(seed=3, engine="reference", editor_args="lr:0.3;seed:4")
    assert options.overrides == {"seed": 4, "engine": "reference", "lr": 0.3}


@pytest.mark.parametrize(
    ("icl", "name", "settings"),
    [
        (True, "ike", {"seed": 7}),
        ("yes", "ike", {"seed": 7}),
        ("fact", "ice", {"seed": 7}),
        ("demonstrations", "ike", {"seed": 7, "include_fact": False}),
    ],
)
def test_icl_names_the_editor_of_the_context(icl: bool | str, name: str, settings: dict[str, Any]) -> None:
    assert EditingOptions(icl=icl, seed=7).context_editor == (name, settings)
    assert EditingOptions(icl=False).icl == "no"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sngle"}, r"mode='sngle' is not known\. Did you mean 'single'"),
        ({"mode": "batch"}, "mode=batch needs edits="),
        ({"mode": "loaded"}, "needs load_edit="),
        ({"load_edit": "x", "editor_args": "lr:1"}, "editor_args has no meaning in mode=loaded"),
        ({"edits": "bake"}, "edits='bake' has no meaning in mode=single; drop it or use mode=batch or mode=sequential"),
        ({"group_size": 2}, "no meaning in mode=single; drop it or use mode=batch"),
        ({"retention": True}, "no meaning in mode=single"),
        ({"retention": "yes"}, "retention='yes'; accepted: true, false"),
        ({"num_edits": 0}, "num_edits is 0; a whole number >= 1"),
        ({"max_batch_tokens": True}, "max_batch_tokens is True"),
        ({"guard": "panic"}, "Accepted: report, stop"),
        ({"answer": "patched"}, "Did you mean 'patch'"),
        ({"engine": "quick"}, "Accepted: fast, reference"),
        ({"editor": "rom"}, "Did you mean 'rome'"),
        ({"icl": "facts"}, "Did you mean 'fact'"),
        ({"guard": "stop"}, "guard='stop' has no meaning in mode=single"),
        ({"guard_norm_ratio": 0.1, "mode": "none"}, "guard_norm_ratio=0.1 has no meaning in mode=none"),
        ({"guard": "stop", "mode": "batch", "edits": "bake", "group_size": 2}, "guard watches one edited model"),
        ({"immediate": False, "mode": "batch", "edits": "bake"}, "immediate=False has no meaning in mode=batch"),
        ({"icl_args": "k:1"}, "icl_args has no meaning without icl=true"),
        ({"icl": True, "mode": "none"}, "mode=none makes no edit"),
        ({"icl": True, "editor": "ice"}, "editor=ice is a context already"),
    ],
)
def test_other_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        EditingOptions(**options)


def test_tokens_are_refused_without_being_printed() -> None:
    for name in ("token", "use_auth_token"):
        with pytest.raises(EditingError, match=rf"^{name}= would be printed, .* set HF_TOKEN") as caught:
            check_known_options({name: "hf_SECRET"}, Base, ["editor"])
        assert "SECRET" not in str(caught.value)


def test_unknown_options_are_errors_with_near_misses() -> None:
    check_known_options({"batch_size": 2, "editor": "rome", FROM_PRETRAINED[0]: 1}, Base, ["editor"])
    with pytest.raises(EditingError, match=r"unknown option of edited_hf 'edtor'\. Did you mean 'editor'"):
        check_known_options({"edtor": "rome"}, Base, ["editor"])
