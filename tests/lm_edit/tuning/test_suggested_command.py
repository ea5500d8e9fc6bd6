"""The `lm-edit tune` command of a run with guessed settings: it parses, keeps the settings, and holds facts out."""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_runs import build
from tuning_cases import CASES

from edit_hooks import EditingError, load_editor
from edit_hooks.base import origin as origins
from edit_hooks.base.origin import SettingsOrigin
from edit_hooks.contract.tiny_models import build_model
from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.utils.settings.options import parse_editor_args
from edit_hooks.utils.storage.yaml_io import read_yaml
from lm_edit.cli.editing import tune
from lm_edit.cli.main import build_parser, main
from lm_edit.tuning.cases import load_cases
from lm_edit.tuning.search import check_search
from lm_edit.tuning.trials import FactScore

SUGGESTION = "To search better ones: "


def parse(command: str) -> argparse.Namespace:
    program, *words = shlex.split(command)
    assert program == "lm-edit"
    return build_parser().parse_args(words)


@pytest.fixture
def suggest(tiny_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Build the model of a run; returns the command of its log line."""

    def build_run(editor: str, editor_args: Any, **options: Any) -> str:
        monkeypatch.setattr(origins, "_reported", set())
        caplog.set_level(logging.INFO, "lm_eval.edited_hf")
        caplog.clear()
        build(str(tiny_path("llama")), editor=editor, editor_args=editor_args, **options)
        (line,) = [record.getMessage() for record in caplog.records if SUGGESTION in record.getMessage()]
        return line.partition(SUGGESTION)[2].rpartition("; then editor_args=")[0]

    return build_run


def command_of(editor: str, settings: dict[str, Any], **run: Any) -> tuple[SettingsOrigin, argparse.Namespace]:
    """Origin and parsed command of an editor on a model without shipped settings."""
    origin = load_editor(editor, settings).settings_origin(build_model("llama"))
    if run:
        origin = origin.of_run(
            **{"pretrained": None, "settings_file": None, "editor": editor, "tune_options": (), **run}
        )
    assert origin.is_guess
    return origin, parse(origin.tune_command)


@pytest.mark.parametrize(
    ("editor", "settings"),
    [
        ("simie", {"base": "memit", "ridge": 0.5}),
        ("mend", {"artifact": "identity", "modules": ["rewrite"]}),
        ("rect", {"base": "rome", "base_settings": {"lr": 1e-6, "context_templates": ["{}", 'It\'s 1; "2". {}']}}),
        ("memit", {"second_moments": "/data/my texts/it's;one.txt", "moment_weight": 1e-5}),
        ("ft_m", {}),
    ],
)
def test_the_command_has_the_settings_of_the_run(suggest: Any, editor: str, settings: dict[str, Any]) -> None:
    """It named the editor alone: `simie` on `memit` was tuned on `rome`, and `mend` without a network is refused."""
    if "second_moments" in settings:
        command = command_of(editor, settings)[0].tune_command  # the file does not exist
    else:
        command = suggest(editor, settings)
    args = parse(command)
    parsed = parse_editor_args(args.editor_args)
    config = load_editor(editor, settings).default_config(build_model("llama"))
    assert load_editor(editor, parsed).default_config(build_model("llama")) == config
    assert set(parsed) == set(settings) and (args.editor, args.out) == (editor, "tuned.yaml")
    if "second_moments" not in settings:
        check_search(args.editor, build_model("llama"), parsed, {}, CASES[:1])


def test_the_command_runs_and_writes_the_settings(
    suggest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = []

    def score(runner: Any, editor: Any, cases: Any) -> list[FactScore]:
        scored.extend(case.request.subject for case in cases)
        return [FactScore(0.9, 0.9, 0.9, 0.5) for _ in cases]

    monkeypatch.setattr("lm_edit.tuning.trials.TrialRunner._score_cases", score)
    monkeypatch.chdir(tmp_path)
    command = suggest("simie", {"base": "ft_m", "ridge": 0.5}, data="mini", seed=3)
    quick = ["--num-edits", "4", "--trials", "2", "--lr", "0.01", "--store", "off", "--device", "cpu"]
    assert main([*shlex.split(command)[1:], *quick]) == 0
    written = read_yaml("tuned.yaml")
    assert (written["base"], written["ridge"]) == ("ft_m", 0.5) and "seed" not in written
    evaluated = {case.request.subject for case in load_cases("bake", {"data": "mini"})}
    assert scored and not evaluated & set(scored)


def test_a_settings_file_is_read_again_and_never_overwritten(suggest: Any, tmp_path: Path) -> None:
    for name, out in (("my settings.yaml", "tuned.yaml"), ("tuned.yaml", "tuned_again.yaml")):
        path = tmp_path / name
        path.write_text("{lr: 0.5, seed: 2}", encoding="utf-8")
        args = parse(suggest("ft_m", str(path)))
        assert (args.editor_args, args.out, args.seed) == (str(path), out, 2)


def test_the_model_of_the_run_is_named_in_full(suggest: Any, tiny_path: Any) -> None:
    args = parse(suggest("ft_m", {}, revision="main", dtype="bfloat16"))
    assert (args.pretrained, args.revision, args.dtype) == (str(tiny_path("llama")), "main", "bfloat16")
    assert parse(suggest("ft_m", {}, edit_context="qa")).edit_context == "qa"
    args = parse(suggest("broken_editors:Sound", {}))
    assert args.editor == "broken_editors:Sound"  # which no table knows by its name
    assert args.dtype is None and args.seed == 0


def test_a_model_without_a_name_is_not_taken_for_the_demo_model() -> None:
    """`lm-edit tune` without `--pretrained` runs the demo model."""
    assert command_of("ft_m", {})[1].pretrained == "<model>"
    assert command_of("ft_m", {}, tune_options=("--edits", "bake"))[1].pretrained is None


def test_what_no_command_can_hold_is_named() -> None:
    origin, args = command_of("r_rome", {"second_moments": {0: torch.eye(64)}, "lr": 0.25})
    assert parse_editor_args(args.editor_args) == {"lr": 0.25}
    assert str(origin).endswith("editor_args=tuned.yaml with your second_moments, which a command cannot hold")


def test_mend_without_a_network_is_refused_before_a_search() -> None:
    with pytest.raises(EditingError, match="lm-edit train mend"):
        check_search("mend", build_model("llama"), {}, {}, CASES[:1])
    check_search("mend", build_model("llama"), {}, {"artifact": ["identity"]}, CASES[:1])


# --- facts that the run does not evaluate ----------------------------------------------------------------------------


def facts_of(options: EditingOptions, is_demo: bool) -> list[str]:
    """Keys of the facts that the command of a run loads."""
    _, args = command_of("ft_m", {}, tune_options=options.facts_to_tune_on(is_demo))
    return [case.request.key for case in tune._load_facts(args)]


@pytest.mark.parametrize(
    ("data", "is_demo", "evaluated"),
    [(None, True, "mini"), ("mini", False, "mini"), ("mini:held_out", True, "mini:held_out")],
)
def test_facts_of_embedded_samples_are_not_those_of_the_run(data: str | None, is_demo: bool, evaluated: str) -> None:
    """They were the first 16 of the sample that is evaluated."""
    facts = facts_of(EditingOptions(data=data), is_demo)
    of_run = {case.request.key for case in load_cases("bake", {"data": evaluated})}
    assert len(set(facts)) == 16 and not of_run & set(facts)


def test_a_file_of_the_user_is_evaluated_as_a_whole(tmp_path: Path) -> None:
    assert EditingOptions(data=str(tmp_path)).facts_to_tune_on(False) == EditingOptions().facts_to_tune_on(True)


@pytest.mark.parametrize("options", [{}, {"data": "hub"}, {"subset": 40, "subset_seed": 3}, {"subset": 40}])
def test_facts_of_published_data_are_the_last_of_the_runs_order(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample in place of the published file: 64 records, of which the run evaluates the first 40 of its order."""
    chosen = EditingOptions(**options)
    _, args = command_of("ft_m", {}, pretrained="owner/model", tune_options=chosen.facts_to_tune_on(False))
    asked = []

    def load_from_sample(source: str, settings: dict[str, Any]) -> list[Any]:
        asked.append((source, settings.get("data", "hub" if settings.get("pretrained") else "mini")))
        return load_cases(source, {**settings, "data": "mini"})

    monkeypatch.setattr("lm_edit.tuning.cases.load_cases", load_from_sample)
    facts = {case.request.key for case in tune._load_facts(args)}
    order = {name: value for name, value in options.items() if name != "data"}
    of_run = load_cases("bake", {"data": "mini", **order})[:40]
    assert asked == [("bake", "hub")] and len(facts) == 16
    assert not {case.request.key for case in of_run} & facts


@pytest.mark.parametrize(
    ("options", "numbers", "place"),
    [
        ([], range(16), "from number 0 on"),
        (["--skip", "3", "--num-edits", "2"], range(3, 5), "from number 3 on"),
        (["--last"], range(48, 64), "at the end"),
        (["--last", "--skip", "3", "--num-edits", "2"], range(59, 61), "before the last 3"),
    ],
)
def test_last_counts_from_the_end(options: list[str], numbers: range, place: str) -> None:
    args = build_parser().parse_args(["tune", "--editor", "ft_m", "--edits", "bake", "--data", "mini", *options])
    cases = load_cases("bake", {"data": "mini"})
    assert tune._load_facts(args) == [cases[number] for number in numbers]
    assert tune._place(args) == place
