"""Which columns a leaderboard has, which are shown first, and what columns of groups lack."""

from __future__ import annotations

import csv
import io
import math

import pandas as pd
import pytest
import yaml
from lm_eval.tasks import TaskManager

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from board_frames import frames

from edit_hooks.utils.errors import EditingError
from lm_edit.leaderboard.board import Board
from lm_edit.leaderboard.columns import DEFAULTS, ColumnKey
from lm_edit.leaderboard.render_text import render_csv, render_markdown
from lm_edit.leaderboard.table import OF_GROUP, build_board
from lm_edit.results.filters import filter_rows
from lm_eval_tasks.folder import TASKS_DIR

SCORES = {"bake_es/efficacy_prob": [1.0, 0.0]}


def board(*parts: tuple[pd.DataFrame, pd.DataFrame]) -> Board:
    results, cases = (pd.concat(tables, ignore_index=True) for tables in zip(*parts, strict=True))
    return build_board(results, cases, resamples=99)


def test_columns_shown_first_are_those_of_the_list():
    """All metrics of a task's entry; of alternatives the first one that the results have."""
    values = {
        "knowgic_prob/ifr_prob": [0.5],
        "knowgic_prob/ckp_prob": [0.5],
        "knowgic_prob/known_prob": [0.5],
        "qaedit_wild_reliability/efficacy_wild_contains": [1.0],
        "qaedit_wild_reliability/efficacy_wild_em": [1.0],
        "qaedit_wild_reliability/efficacy_wild_judge": [1.0],
        "own_task/second": [1.0],
        "own_task/third": [1.0],
    }
    shown = {column.key.metric for column in board(frames({"rome": values})).columns if column.is_default}
    assert shown == {"ifr_prob", "ckp_prob", "efficacy_wild_judge", "second"}


def test_the_list_names_columns_of_tasks():
    """Metrics of this package's tasks; lm-eval's own tasks are not checked."""
    configs = TaskManager(include_path=TASKS_DIR, include_defaults=False).task_index
    columns_of = yaml.safe_load(DEFAULTS.read_text(encoding="utf-8"))
    assert len({*columns_of} & {*configs}) > 20
    for task, columns in columns_of.items():
        if task in configs:
            declared = {entry["metric"] for entry in configs[task].cfg["metric_list"]}
            named = [name for column in columns for name in ([column] if isinstance(column, str) else column)]
            assert {name.removesuffix("@wrong_judge") for name in named} <= declared | {
                name.replace("_em", "_judge") for name in declared
            }, task


@pytest.mark.parametrize("first", ["bake_first.jsonl (aaaaaaaaaaaa)", "bake_j (hub)", "bake (hub)"])
def test_streams_of_other_edits_do_not_share_a_column(first):
    """Also where the names of the edits begin with that of the benchmark."""
    stream = {"mode": "sequential", "num_edits": 4}
    unedited, rome = frames({"unedited": SCORES}), frames({"rome": SCORES}, edits=first, **stream)
    other = frames({"memit": SCORES}, edits="bake_last.jsonl (bbbbbbbbbbbb)", **stream)
    with pytest.raises(EditingError, match="the set of edits differs"):
        board(unedited, rome, other)
    (section,) = board(unedited, rome, frames({"memit": SCORES}, edits=first, **stream)).sections
    assert [row.label for row in section.rows] == ["unedited", "memit", "rome"]


def test_streams_of_published_edits_that_differ_do_not_share_a_column():
    """As of two commits of one data set. Streams of another length have other edits, and files of before no digest."""
    stream = {"mode": "sequential", "edits": "qaedit (hub)"}

    def rome(digest: str, num_edits: int = 4, editor: str = "rome") -> tuple[pd.DataFrame, pd.DataFrame]:
        return frames({editor: SCORES}, edits_hash=digest, num_edits=num_edits, **stream)

    others = (rome("bb", 8), rome("", editor="ft_m"), frames({"unedited": SCORES}))
    with pytest.raises(EditingError, match=r"the set of edits or their order differs: aa in rome.*; cc in") as caught:
        board(rome("aa"), rome("cc", editor="memit"), *others)
    assert (
        "Leave out the runs of all but one, or name what is kept: --only edits_hash=aa, the same for each list of "
        "another number of edits, and --only edits_hash= for runs without one."
    ) in str(caught.value)
    everything = pd.concat([one for one, _ in (rome("aa"), rome("cc", editor="memit"), *others)])
    advised = filter_rows(everything, ["edits_hash=aa", "edits_hash=bb", "edits_hash="])
    assert len(advised) == len(everything) - len(rome("cc")[0])
    sections = board(rome("aa"), rome("aa", editor="memit"), *others).sections
    assert [[row.label for row in section.rows] for section in sections] == [
        ["unedited", "ft_m", "memit", "rome"],
        ["unedited", "rome"],
    ]


def test_runs_that_were_asked_after_other_examples_do_not_share_a_column():
    """As few-shot prompts of stock model classes in one and in two processes."""

    def asked(editor: str, prompts: list[str], scores: list[float] | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
        results, cases = frames({editor: {"gsm8k/exact_match": scores or [1.0, 0.0]}})
        return results, cases.assign(prompt_hash=prompts)

    one, other = asked("unedited", ["aa", "bb"]), asked("rome", ["aa", "cc"])
    with pytest.raises(EditingError, match=r"the hash of the prompts differs: .*The few-shot examples are others"):
        board(one, other)
    unknown = frames({"ft_m": {"gsm8k/exact_match": [1.0, 0.0]}})
    (section,) = board(one, asked("rome", ["aa", "bb"]), unknown).sections
    assert [row.label for row in section.rows] == ["unedited", "ft_m", "rome"]
    with pytest.raises(EditingError, match="the set of cases differs") as caught:
        board(one, asked("rome", ["aa", "bb", "cc"], [1.0, 0.0, 1.0]))
    assert "prompts" not in str(caught.value)


GROUPS = {"mmlu": ["mmlu_stem", "mmlu_other"], "mmlu_stem": ["mmlu_anatomy"], "mmlu_other": ["mmlu_virology"]}


def of_groups(tasks: list[str], groups: dict[str, list[str]], **common: object) -> Board:
    """Three editors, of which each is better than the next, in tasks and groups; groups have no cases."""
    scores = {
        editor: {f"{task}/acc": [quality, quality / 2] for task in tasks}
        for editor, quality in zip("cba", (0.2, 0.4, 0.8), strict=True)
    }
    results, cases = frames(scores, **common)
    results["benchmark"] = ["default" if task.startswith("mmlu_") else task for task in results["task"]]
    results.attrs["groups"] = groups
    return build_board(results, cases[~cases["task"].isin(list(groups))], resamples=99)


def test_members_of_a_group_are_neither_shown_first_nor_ranked():
    """Of mmlu's parts, mmlu alone has a vote; they stand beside it, at any depth."""
    subjects = ["mmlu_anatomy", "mmlu_virology"]
    made = of_groups([*subjects, *GROUPS, "bake_es", "gsm8k"], GROUPS)
    assert [column.key.task for column in made.default_columns] == ["mmlu", "bake_es", "gsm8k"]
    assert {column.key.task for column in made.columns if column.benchmark == "mmlu"} == {*subjects, *GROUPS}
    assert made.columns[0].key.task == "mmlu"
    assert made.sections[0].ranking is not None and made.sections[0].ranking.num_blocks == 3


def test_a_group_without_a_column_does_not_hide_its_members():
    made = of_groups(["mmlu_anatomy", "mmlu_stem", "bake_es"], GROUPS)
    assert [column.key.task for column in made.default_columns] == ["mmlu_stem", "bake_es"]
    # Groups that contain each other are an error of the file, and no reason to hide anything.
    made = of_groups(["x", "y"], {"x": ["y"], "y": ["x"]})
    assert [column.key.task for column in made.default_columns] == ["x", "y"]


def test_groups_have_the_documents_of_their_tasks_and_no_cases():
    key = ColumnKey("mmlu", "acc", "", "none")
    cell = of_groups(["mmlu"], GROUPS).sections[0].rows[0].cells[key]
    assert (cell.counts, cell.interval, cell.note) == ("2/2", None, f"no interval and no test: {OF_GROUP}")
    results, cases = frames({"rome": SCORES})
    results["n"] = math.nan
    unknown = board((results, cases[:0]))
    assert unknown.sections[0].rows[0].cells[unknown.columns[0].key].counts == ""
    assert "| rome | 0.500 |" in render_markdown(unknown, unknown.columns, [])
    (line,) = csv.DictReader(io.StringIO(render_csv(unknown, [])))
    assert (line["scored"], line["cases"]) == ("", "")


def test_judges_are_told_apart_by_the_settings_that_differ():
    """In their whole texts the first 80 characters are equal."""
    shared = "backend=openai; model=qwen; max_reply_tokens=16; temperature=0.0; seed=None; extra={}"
    judges = [f"{shared}; base_url=http://node{n}:8000/v1; prompt=correctness_v1" for n in (1, 2)]
    parts = [frames({editor: SCORES}, judge=judge) for editor, judge in zip(("rome", "memit"), judges, strict=True)]
    with pytest.raises(EditingError) as caught:
        board(*parts)
    sides = str(caught.value).split("the judge differs: ")[1].split(" Keep one")[0]
    assert "base_url=http://node1:8000/v1 in " in sides and "; base_url=http://node2:8000/v1 in " in sides
    assert "model=qwen" not in sides and "prompt=" not in sides


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("", "model=m; seed=1", ["none in", "model=m; seed=1 in"]),
        ("model=m", "model=m; seed=1", ["model=m in", "; seed=1 in"]),
        ("model=" + "m" * 90 + "1", "model=" + "m" * 90 + "2", ["m1 in", "m2 in"]),
    ],
)
def test_judges_in_a_refusal_are_never_shown_alike(first: str, second: str, shown: list[str]):
    with pytest.raises(EditingError) as caught:
        board(frames({"rome": SCORES}, judge=first), frames({"memit": SCORES}, judge=second))
    assert all(each in str(caught.value) for each in shown)


def test_a_run_without_a_judge_hides_no_difference_of_the_others():
    judges = {"rome": "", "memit": "model=m; seed=1", "ft": "model=m; seed=2"}
    with pytest.raises(EditingError, match=r"differs: none in [^;]+; seed=1 in [^;]+; seed=2 in "):
        board(*(frames({editor: SCORES}, judge=judge) for editor, judge in judges.items()))
