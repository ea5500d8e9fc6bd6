"""Misspelled keys of ``--metadata`` are errors; keys of the model and of other tasks are not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from paths import ROOT
from scripted import ScriptedLM
from task_runs import build, metrics_of, run

from edit_hooks.lm.model import EditedHFLM
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common import settings as task_settings
from lm_eval_tasks.common.records.benchmark import all_benchmarks
from lm_eval_tasks.common.settings import COMMON_SETTINGS, Setting


def declared() -> dict[str, Setting[Any]]:
    """All settings of all benchmarks."""
    settings = [
        *COMMON_SETTINGS,
        *(one for benchmark in all_benchmarks().values() for one in benchmark.declared_settings),
    ]
    return {setting.name: setting for setting in settings}


@pytest.mark.parametrize(
    ("task", "key", "meant"),
    [
        ("bake_rj", "judge_tempalte", "judge_template"),
        ("bake_rj", "judgeTemplate", "judge_template"),
        ("bake_rj", "judge-template", "judge_template"),
        ("bake_es", "generat", "generate"),
        ("bake_es", "bad_record", "bad_records"),
        ("bake_es", "score_unedited_case", "score_unedited_cases"),
        ("bake_es", "imediate", "immediate"),
        ("bake_es", "check_points", "checkpoints"),
        ("bake_es", "judges", "judge"),
        ("bake_es", "data_rev", "data_revision"),
        ("qaedit_wild_reliability", "wild_contexts", "wild_context"),
        ("qaedit_wild_reliability", "popluation", "population"),
        ("bake_es", "wild_contexts", "wild_context"),  # of the other benchmark: both get all keys of a run
    ],
)
def test_a_misspelled_key_is_an_error_that_names_the_setting(task: str, key: str, meant: str) -> None:
    with pytest.raises(EditingError, match=rf"unknown setting {key!r}.*Did you mean .*{meant!r}"):
        run(task, settings={key: "true"})


def test_one_key_for_two_benchmarks_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lm_eval.editing_tasks"):
        build("bake_es", wild_context="question_only", population="wrong_em")
    assert not [record for record in caplog.records if "belongs to no" in record.getMessage()]


def test_a_foreign_key_is_named_once_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A task of another package in the same run reads it, as RULER reads max_seq_lengths."""
    task_settings._warn_of.cache_clear()
    with caplog.at_level(logging.WARNING, "lm_eval.editing_tasks"):
        for _ in range(2):
            assert metrics_of(run("bake_es", settings={"max_seq_lengths": [4096]}), "bake_es")["efficacy_prob_n"] == 4
    assert [
        record.getMessage() for record in caplog.records if "'max_seq_lengths' belongs to no" in record.getMessage()
    ]
    assert sum("belongs to no" in record.getMessage() for record in caplog.records) == 1


def test_arguments_of_the_model_class_are_no_settings(caplog: pytest.LogCaptureFixture) -> None:
    """lm-eval merges them into the metadata: those of HFLM, of edited_hf, and of any class in memory."""
    task_settings._warn_of.cache_clear()

    class Served(ScriptedLM):
        def __init__(self, gpu_share: float = 0.9, generates: bool = True) -> None:
            super().__init__()

    names = [
        "dtype",
        "max_length",
        "guard_norm_ratio",
        "edits",
        "editor_args",
        "load_in_8bit",
        "gpu_share",
        "generates",
    ]
    assert set(EditedHFLM.option_names) <= task_settings.model_parameters()
    with caplog.at_level(logging.WARNING, "lm_eval.editing_tasks"):
        run("bake_es", lm=Served(), settings=dict.fromkeys(names, 1))
    assert not [record for record in caplog.records if "belongs to no" in record.getMessage()]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("judge_template", "Raw"),
        ("generate", "yes"),
        ("generate", 1),
        ("bad_records", "drop"),
        ("score_unedited_cases", "on"),
        ("data_revision", 3),
        ("data", ""),
    ],
)
def test_values_are_checked_when_the_task_is_built(key: str, value: Any) -> None:
    with pytest.raises(EditingError, match=key):
        build("bake_rj", **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("checkpoints", "0;1"), ("immediate", "yes"), ("retention", 1)],
)
def test_settings_of_a_stream_are_checked(key: str, value: Any) -> None:
    with pytest.raises(EditingError, match=key):
        build("bake_es", mode="sequential", **{key: value})


def test_every_setting_is_documented_and_explained() -> None:
    for setting in declared().values():
        assert setting.help and setting.accepted and "\n" not in setting.help


def test_tasks_read_declared_settings_only() -> None:
    """No module of the tasks reads a key of the metadata past the declarations."""
    import ast

    CONDITIONS = {"listed['only_with']", "listed['only_without']"}  # names in metric lists, tested with them
    allowed = {"settings.py"}
    reads = set()
    for path in (ROOT / "lm_eval_tasks").rglob("*.py"):
        if path.name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_get = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
            if is_get and isinstance(node.func.value, ast.Name) and node.func.value.id == "settings":
                if ast.unparse(node.args[0]) in CONDITIONS:
                    continue
                assert isinstance(node.args[0], ast.Constant)
                reads.add(node.args[0].value)
    assert reads <= set(declared()) and "data" in reads
