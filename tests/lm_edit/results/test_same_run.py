"""One run started in several ways is one run: one hash, one row over its benchmarks, one merged folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_runs import LIMIT, RealRuns, content_of, facts_of_model, result_file
from result_files import EDITING, change

from edit_hooks.utils.errors import EditingError
from lm_edit import load_cases, load_results
from lm_edit.leaderboard.site import make_site
from lm_edit.leaderboard.table import build_board
from lm_edit.results.checking.merge import merge_results
from lm_edit.results.show import comparison
from lm_eval_tasks.report.run_facts import RunFacts, run_facts


def test_benchmarks_that_were_run_separately_are_one_run(real_runs: RealRuns) -> None:
    frame = load_results(real_runs.edited)
    assert set(frame["task"]) >= {"bake_es", "bake_gs", "qaedit_wild_reliability"} and frame["file"].nunique() == 3
    assert frame["run"].nunique() == 1 and frame["run_name"].nunique() == 1, frame[["run", "run_name"]].values
    assert load_results(real_runs.unedited)["run"].nunique() == 1


def test_an_editor_has_one_row_over_its_benchmarks(real_runs: RealRuns) -> None:
    results, cases = load_results(real_runs), load_cases(real_runs)
    (section,) = build_board(results, cases, resamples=99).sections
    assert [row.label for row in section.rows] == ["unedited", "ft_m"]
    assert {key.task for key in section.rows[1].cells} == set(results["task"])
    assert make_site([str(folder) for folder in real_runs], resamples=99).num_rows == 2
    header = comparison(real_runs).rows[0]
    assert header == ["task", "metric", "ft_m", "unedited"]


def test_show_keeps_chosen_results(real_runs: RealRuns) -> None:
    assert comparison(real_runs, only=["editor=ft_m"]).rows[0] == ["task", "metric", "ft_m"]
    with pytest.raises(EditingError, match=r"--only editor=rome leaves no result; editor is one of: ft_m, unedited"):
        comparison(real_runs, only=["editor=rome"])


def test_merge_writes_one_file_of_the_editor(real_runs: RealRuns, tmp_path: Path) -> None:
    written = merge_results(real_runs.edited, tmp_path / "merged")
    assert len([path for path in written if path.name.startswith("results_")]) == 1
    assert set(load_results(written[0])["task"]) == set(load_results(real_runs.edited)["task"])


def test_examples_of_a_run_are_recorded_beside_its_contexts(real_runs: RealRuns) -> None:
    first, other = (content_of(folder)["config"]["edited_hf"] for folder in (real_runs.command, real_runs.mapping))
    assert first["edit_context"] == other["edit_context"] == "bare"
    assert first["edit_example"] != other["edit_example"]
    assert content_of(real_runs.unedited)["config"]["edited_hf"]["edit_example"] is None


def test_the_invented_facts_of_other_tests_have_the_form_of_recorded_ones(real_runs: RealRuns) -> None:
    recorded = content_of(real_runs.command)["config"]["edited_hf"]
    for name, value in EDITING.items():
        known = recorded[name]
        assert value is None or known is None or type(value) is type(known), name


def test_files_of_before_are_the_same_run(real_runs: RealRuns) -> None:
    """They recorded the first edit in the place of its context, and the model in the arguments alone."""
    content = content_of(real_runs.command)
    recorded = content["config"]["edited_hf"]
    recorded["edit_context"] = {"name": recorded["edit_context"], "example": recorded["edit_example"]}
    for name in ("pretrained", "peft", "answer_options"):
        del recorded[name]
    assert run_facts(content) == run_facts(content_of(real_runs.command))


def test_one_model_under_two_names_is_one(real_runs: RealRuns, tmp_path: Path) -> None:
    """As from the hub and from a folder."""
    shutil.copytree(real_runs.mapping, tmp_path / "copy")
    change(result_file(tmp_path / "copy"), lambda content: content["config"]["edited_hf"].update(pretrained="org/tiny"))
    assert load_results([real_runs.command, tmp_path / "copy"])["model"].nunique() == 1


# ------------------------------------------------------------------ every option that can be given in two ways


@pytest.fixture(scope="module")
def facts(tiny_path: Callable[..., Path]) -> Callable[..., RunFacts]:
    """The facts of a run on a tiny model with some arguments, and changes of lm-eval's own entries."""
    place = {"pretrained": str(tiny_path("gpt2", "byte_bpe")), "editor": "ft_m"}

    def of_run(arguments: dict[str, Any], **changes: Any) -> RunFacts:
        settings = {"num_steps": 1, **arguments.get("editor_args", {})}
        return run_facts({"config": facts_of_model({**place, **arguments, "editor_args": settings}, **changes)})

    return of_run


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_path: Callable[..., Path]) -> Path:
    """A working folder with a file of edits and a link to the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inputs").mkdir()
    text = "".join(f'{{"prompt": "{{}} is in", "subject": "Town {n}", "target_new": "Rome"}}\n' for n in range(3))
    (tmp_path / "inputs" / "edits.jsonl").write_text(text, encoding="utf-8")
    place = tiny_path("gpt2", "byte_bpe")
    (tmp_path / "inputs" / place.name).symlink_to(place)
    return tmp_path


STREAM = {"mode": "sequential", "edits": "inputs/edits.jsonl"}
GROUPS = {"mode": "batch", "edits": "inputs/edits.jsonl", "group_size": 2}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {"mode": "single", "icl": False, "edit_context": "bare", "answer": "auto", "seed": 0}),
    "defaults of the records": ({}, {"bad_records": "error", "subset": "all"}),
    "defaults of the model": ({}, {"revision": "main", "max_length": 128, "prefix_token_id": 0, "dtype": "float32"}),
    "start token": ({}, {"add_bos_token": False}),
    "settings at their default": ({}, {"editor_args": {"lr": 5e-4, "weight_decay": 0, "layers": [1]}}),
    "numbers as texts": ({"editor_args": {"lr": "1e-3"}}, {"editor_args": {"lr": 0.001}}),
    "a setting that changes no number": ({}, {"editor_args": {"engine": "reference"}}),
    "where the seed is given": ({"seed": 3}, {"editor_args": {"seed": 3}}),
    "a seed without edits": ({"mode": "none"}, {"mode": "none", "seed": 3}),
    "seed of a subset": ({"subset": 2}, {"subset": 2, "subset_seed": 0}),
    "in-context settings": ({"icl": True}, {"icl": "yes", "icl_args": {"num_facts": 1}}),
    "a relative path of the model": ({}, {"pretrained": "inputs/MODEL"}),
    "a tokenizer beside the model": ({}, {"tokenizer": "inputs/MODEL"}),
    "paths of edits": (STREAM, {**STREAM, "edits": "./inputs/../inputs/edits.jsonl"}),
    "sizes of a stream": (STREAM, {**STREAM, "num_edits": 3, "edit_batch_size": 1}),
    "sizes of groups": (GROUPS, {**GROUPS, "num_edits": 3}),
    "thresholds": (STREAM, {**STREAM, "guard": "report", "guard_norm_ratio": 1, "guard_loss_increase": 3}),
    "options of chats": ({"chat_template_args": {"enable_thinking": False}}, {"enable_thinking": False}),
}


@pytest.mark.parametrize("name", SAME)
def test_the_way_in_which_an_option_is_given_makes_no_other_run(
    name: str, facts: Callable[..., RunFacts], files: Path, tiny_path: Callable[..., Path]
) -> None:
    model = tiny_path("gpt2", "byte_bpe").name
    one, other = (vars(facts(json.loads(json.dumps(given).replace("MODEL", model)))) for given in SAME[name])
    told = {"editor_config", "guesses", "settings_origin", *(("seed", "name") if "without edits" in name else ())}
    assert {field: (one[field], other[field]) for field in one.keys() - told if one[field] != other[field]} == {}


DIFFERENT: dict[str, dict[str, Any]] = {
    "context": {"edit_context": "qa"},
    "length": {"max_length": 64},
    "prefix": {"prefix_token_id": 5},
    "setting": {"editor_args": {"lr": 1e-3}},
    "seed": {"seed": 3},
    "thought": {"enable_thinking": False},
    "subset": {"subset": 2},
    "in context": {"icl": True},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_changes_answers_makes_another_run(name: str, facts: Callable[..., RunFacts]) -> None:
    assert facts(DIFFERENT[name]).run != facts({}).run


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"limit": LIMIT}, {"limit": float(LIMIT)}),
        ({"samples": {"bake_es": [1, 0]}}, {"samples": {"bake_es": [0, 1, 1], "bake_gs": []}}),
    ],
)
def test_what_lm_eval_records_is_compared_by_its_meaning(
    one: dict[str, Any], other: dict[str, Any], facts: Callable[..., RunFacts]
) -> None:
    found = facts({}, **one), facts({}, **other)
    assert found[0].run == found[1].run != facts({}).run


@pytest.mark.parametrize(
    ("text", "mapping"),
    [
        ("pretrained=org/tiny,max_length=512", {"pretrained": "org/tiny", "max_length": 512}),
        ("pretrained=org/tiny,enable_thinking=true", {"pretrained": "org/tiny", "enable_thinking": True}),
        ("pretrained=org/tiny", {"pretrained": "org/tiny", "revision": "main", "dtype": "float32", "peft": None}),
    ],
)
def test_arguments_of_a_stock_model_are_compared_as_lm_eval_parses_them(text: str, mapping: dict[str, Any]) -> None:
    config = {"model": "hf", "model_dtype": "torch.float32", "limit": None}
    one, other = (run_facts({"config": {**config, "model_args": arguments}}) for arguments in (text, mapping))
    assert vars(one) == vars(other)
