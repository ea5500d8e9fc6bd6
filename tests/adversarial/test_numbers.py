"""Every number that a user can set is finite and in range, or refused before a model is loaded."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from typing import Any

import pytest
from scripted import ScriptedLM
from task_runs import run

from edit_hooks.base.config import EditorConfig
from edit_hooks.base.editor import Editor
from edit_hooks.base.registry import editor_class, editor_names
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.training.mend.config import TrainingConfig
from edit_hooks.training.serac.config import SERACTrainingConfig
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import FINITE
from judges.settings import JudgeSettings
from lm_edit.cli.main import VERBS, build_parser

# Never a number that a setting accepts.
NOT_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, "nan", "inf", "-inf", 10**400, "1e999", "yes", True, "", {}]
# In range of some settings and out of range of others.
NUMBERS: list[Any] = [-1, 0, 0.5, 2.5, 10**6, 10**30, "-1", "3"]
# Settings that any finite number fits.
UNBOUNDED = {"early_stop_loss"}
# Of distances, and of log-likelihoods: of any sign.
MARGINS = {("wise", "alpha"), ("wise", "beta"), ("wise", "gamma"), ("consequence_ft", "min_gain")}


def numeric(hint: Any) -> bool:
    """Whether a setting holds a number, possibly in a list or mapping."""
    return hint in (int, float) or any(numeric(part) for part in typing.get_args(hint))


def scalar(hint: Any) -> bool:
    return hint in (int, float) or (type(None) in typing.get_args(hint) and numeric(hint) and "[" not in str(hint))


CONFIGS: dict[str, type[EditorConfig]] = {
    **{name: editor_class(name).config_class for name in editor_names()},
    "train mend": TrainingConfig,
    "train serac": SERACTrainingConfig,
}
FIELDS = [
    (name, field.name)
    for name, config in CONFIGS.items()
    for field in dataclasses.fields(config)
    if numeric(typing.get_type_hints(config)[field.name])
]


def refused(config: type[EditorConfig], name: str, value: Any) -> str | None:
    """The message about a setting, or ``None`` if it is accepted."""
    try:
        config.from_mapping({name: value})
    except EditingError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("editor", "name"), FIELDS)
def test_editor_settings_refuse_what_is_no_number_in_range(editor: str, name: str) -> None:
    config = CONFIGS[editor]
    (field,) = [field for field in dataclasses.fields(config) if field.name == name]
    hint, within = typing.get_type_hints(config)[name], field.metadata["within"]
    assert (within == FINITE) == (name in UNBOUNDED or (editor, name) in MARGINS), (
        "the declaration of a number has its range"
    )
    for value in NOT_NUMBERS:
        if scalar(hint):
            message = refused(config, name, value)
            assert message is not None and repr(name) in message, value
        for nested in ([value], {"rewrite": [value]}):
            message = refused(config, name, nested)
            assert message is not None and name in message, nested
    if not scalar(hint):
        return
    for value in NUMBERS:
        message = refused(config, name, value)
        number = float(value)
        if number not in within or (number != int(number) and float not in (hint, *typing.get_args(hint))):
            assert message is not None and repr(name) in message and ("needed" in message or "accepted" in message)
        elif message is not None:
            assert repr(name) in message or name in message, "a check that involves other settings names them"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("guard_norm_ratio", [math.nan, math.inf, -1, 0, "1", True, 10**400]),
        ("guard_loss_increase", [math.nan, math.inf, -1, "yes", True]),
        ("seed", [-1, 1.5, 2**32, 10**400, True, "0", math.nan]),
        ("max_batch_tokens", [0, -1, 1.5, True, math.inf]),
        ("num_edits", [0, -1, 2.0, True, "3", 10**400]),
        ("edit_batch_size", [0, -1, 2.0, True]),
        ("group_size", [0, -1, 2.0, True]),
        ("checkpoints", [0, -1, "0;1", 1.5, True, "nan"]),
        ("immediate", ["yes", 1, None]),
        ("retention", ["yes", 1]),
        ("max_length", [0, -1, 2.5, "-3", True]),
        ("batch_size", [0, -4, 1.5, "none"]),
        ("max_batch_size", [0, -4, "many"]),
    ],
)
def test_options_of_the_model_class_are_checked_before_it_loads(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(EditingError, match=name):
            EditedHFLM(pretrained="no/such-model", **{name: value})


@pytest.mark.parametrize("setting", ["lr:inf", "lr:nan", "num_steps:-3", "seed:-1", "layers:[-1]", "num_steps:yes"])
def test_editor_settings_are_checked_before_the_model_loads(setting: str) -> None:
    with pytest.raises(EditingError, match=setting.partition(":")[0]):
        EditedHFLM(pretrained="no/such-model", editor="rome", editor_args=setting)


@pytest.mark.parametrize("wrapper", [name for name in editor_names() if "base" in typing.get_type_hints(CONFIGS[name])])
def test_settings_of_a_wrapped_editor_are_checked_too(wrapper: str) -> None:
    editor: type[Editor[Any]] = editor_class(wrapper)
    if "base_settings" in typing.get_type_hints(CONFIGS[wrapper]):
        with pytest.raises(EditingError, match=r"base_settings|lr"):
            editor({"base": "memit", "base_settings": {"lr": math.inf}})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, [-1, 1.5, True, "4", 10**400]) for name in ("seed", "max_calls", "max_tokens")),
        *((name, [0, -1, 1.5, True, "4"]) for name in ("concurrency", "max_attempts", "give_up_after", "batch_size")),
        *((name, [math.nan, math.inf, -1, True, "4"]) for name in ("timeout", "max_wait", "temperature")),
        ("min_coverage", [math.nan, -0.1, 1.1, True]),
        ("max_reply_tokens", [0, -1, 2.5]),
        ("extra", [{"top_p": math.nan}, {"penalties": [1.0, math.inf]}]),
    ],
)
def test_judge_settings(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(EditingError, match=name):
            JudgeSettings(backend="openai", model="m", **{name: value})


NEEDED = {
    "edit": ["--editor", "rome", "--edits", "bake", "--out", "x"],
    "tune": ["--editor", "rome", "--edits", "bake"],
    "trace": ["--edits", "bake"],
    "embed": ["--out", "x.safetensors"],
    "train": ["mend", "--edits", "bake", "--out", "x"],
    "judge": ["x"],
    "judge-quality": ["--judge", "published"],
    "stats": [],
    "build-bake": ["x", "--out", "y"],
    "bake-templates": ["x", "--out", "y"],
    "build-knowgic": ["x", "--out", "y"],
    "build-qaedit": ["x", "--locality", "x", "--writer", "hf:x", "--out", "y"],
    "build-seeds": ["--out", "y"],
    "grow-graph": ["x", "--writer", "hf:m", "--out", "y"],
    "leaderboard": ["x", "--out", "y"],
    "figure": ["x", "--out", "y"],
    "sweep": ["example"],
    "compare": ["m:C"],
    "editors": [],
    "export": ["x", "--out", "y"],
    "passport": ["x"],
}
OPTIONS = {
    "edit": ["--subset", "--subset-seed", "--num-edits", "--edit-batch-size", "--seed"],
    "tune": ["--subset", "--subset-seed", "--num-edits", "--skip", "--lr", "--clamp", "--trials", "--seed"],
    "trace": ["--subset", "--subset-seed", "--num-edits", "--samples", "--noise", "--window", "--max-tokens", "--seed"],
    "embed": ["--subset", "--subset-seed", "--num-prompts", "--noise", "--relative-noise", "--noise-seed"],
    "train": ["--subset", "--subset-seed", "--num-edits", "--validation-share"],
    "judge": ["--max-calls", "--min-coverage"],
    "judge-quality": ["--max-calls", "--min-coverage"],
    "stats": ["--layers", "--tokens", "--max-length", "--threshold", "--energy", "--seed"],
    "build-bake": ["--per-relation", "--paraphrases", "--neighbors", "--seed", "--max-calls"],
    "bake-templates": ["--min-records", "--min-share"],
    "build-knowgic": ["--max-steps"],
    "build-qaedit": ["--num-locality", "--seed", "--limit", "--max-calls"],
    "build-seeds": ["--per-relation", "--seed"],
    "grow-graph": [
        "--rounds",
        "--attempts",
        "--chain-questions",
        "--max-chains",
        "--max-facts",
        "--seed",
        "--max-calls",
    ],
    "leaderboard": ["--resamples", "--max-mb", "--watch", "--serve"],
    "figure": ["--width", "--height", "--font-size"],
    "sweep": ["--workers", "--limit", "--num-edits"],
    "compare": ["--workers", "--limit", "--num-edits"],
    "editors": ["--devices", "--device-memory", "--teraflops"],
    "export": ["--rank"],
    "passport": ["--subset", "--subset-seed", "--steps", "--limit", "--ability-rows", "--seed"],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("verb", "option"), [(verb, option) for verb in OPTIONS for option in OPTIONS[verb]])
def test_numbers_of_the_command_line(verb: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("nan", "inf", "-inf", "-1", "1" * 400, "some"):
        with pytest.raises(SystemExit) as ended:
            build_parser().parse_args([verb, *NEEDED[verb], f"{option}={value}"])
        assert ended.value.code == 2
        assert option in capsys.readouterr().err


def test_a_port_is_one_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["leaderboard", "x", "--out", "y", "--serve", "70000"])
    assert "a port from 0 to 65535" in capsys.readouterr().err


def test_the_table_has_every_number_of_the_command_line() -> None:
    """An option that parses text by itself is a number; a bare ``int`` or ``float`` has no range."""
    import argparse

    found: dict[str, set[str]] = {}
    for verb, entry in VERBS.items():
        parser = argparse.ArgumentParser()
        entry.add_arguments(parser)
        for action in parser._actions:
            assert action.type not in (int, float), f"{verb} {action.option_strings}"
            if getattr(action.type, "__qualname__", "").split(".")[0] in ("whole", "real", "subset_size"):
                found.setdefault(verb, set()).update(action.option_strings)
    assert found == {verb: set(options) for verb, options in OPTIONS.items()}


@pytest.mark.parametrize(
    ("name", "value"), [*itertools.product(["samples", "window", "max_tokens"], [0, -1, True, 1.5])]
)
def test_trace_settings(name: str, value: Any) -> None:
    from edit_hooks.locate.tracing.causal_trace import TraceSettings

    with pytest.raises(EditingError, match=name):
        TraceSettings(**{name: value})


@pytest.mark.parametrize("noise", [math.nan, math.inf, 0.0, -1.0])
def test_trace_noise(noise: float) -> None:
    from edit_hooks.locate.tracing.causal_trace import TraceSettings

    with pytest.raises(EditingError, match="noise"):
        TraceSettings(noise=noise)


@pytest.mark.parametrize(
    "kwargs",
    [
        "max_gen_toks=-1",
        "max_gen_toks=0",
        "max_gen_toks=2.5",
        "max_new_tokens=-3",
        "max_gen_toks=some",
        "temperature=nan",
        "temperature=inf",
        "temperature=-1",
        "until=3",
        "top_p=nan",
        "do_sample=maybe",
    ],
)
def test_generation_settings_are_checked_before_any_question(kwargs: str) -> None:
    class Unasked(ScriptedLM):
        def generate_until(self, requests: list[Any]) -> list[Any]:
            raise AssertionError("the settings were not checked")

        loglikelihood = generate_until

    with pytest.raises(EditingError, match=kwargs.partition("=")[0]):
        run("bake_es", lm=Unasked(), gen_kwargs=kwargs)
