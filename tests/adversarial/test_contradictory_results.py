"""A leaderboard refuses columns whose runs were not computed in the same way, and says which differ in what."""

from __future__ import annotations

import re

import pandas as pd
import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from board_frames import frames

from edit_hooks.utils.errors import EditingError
from lm_edit.leaderboard.table import build_board
from lm_edit.results.filters import filter_rows

SCORES = {"bake_es/efficacy_prob": [1.0, 0.0, 1.0]}

DIFFERENCES = [
    ("protocol", "log-probability of two answers", "generation", "protocol"),
    ("data", "mini", "hub", "data source"),
    ("data_revision", "4f1c", "9ab2", "data revision"),
    ("data_hash", "aa", "bb", "hash of the data"),
    ("judge", "exact", "published_wording", "judge"),
    ("population", "all", "wrong_em", "population"),
    ("task_version", "1.0", "1.1", "task version"),
]


def both(left, right):
    return [pd.concat(tables, ignore_index=True) for tables in zip(left, right, strict=True)]


@pytest.mark.parametrize(("field", "one", "other", "name"), DIFFERENCES)
def test_runs_that_differ_are_refused(field, one, other, name):
    results, cases = both(frames({"rome": SCORES}, **{field: one}), frames({"memit": SCORES}, **{field: other}))
    with pytest.raises(EditingError) as refusal:
        build_board(results, cases)
    message = str(refusal.value)
    assert f"bake_es efficacy_prob: the {name} differs: " in message
    # Each value with the runs that have it, and what to do.
    for value, editor in ((one, "rome"), (other, "memit")):
        assert re.search(rf"{re.escape(value)} in {editor} single", message)
    assert f"--only {field}={min(one, other)}" in message
    assert (" --only judge=, or" in message) == (field == "judge")  # columns without a judge stay
    kept = filter_rows(results, [f"{field}={one}"])
    assert [row.label for row in build_board(kept, cases).sections[0].rows] == ["rome"]


def test_other_cases_are_refused():
    results, cases = both(frames({"rome": SCORES}), frames({"memit": {"bake_es/efficacy_prob": [1.0, 0.0]}}))
    with pytest.raises(
        EditingError, match=r"set of cases differs: 2 cases \(\w+\) in memit.*; 3 cases \(\w+\) in rome"
    ):
        build_board(results, cases)


def test_as_many_but_other_cases_are_refused():
    left, right = frames({"rome": SCORES}), frames({"memit": SCORES})
    right[1]["case_id"] = ["7", "8", "9"]
    results, cases = both(left, right)
    with pytest.raises(EditingError, match="set of cases differs"):
        build_board(results, cases)


def test_without_samples_the_limit_is_compared():
    left, right = frames({"rome": SCORES}), frames({"memit": SCORES}, limit=3.0)
    results, cases = both(left, right)
    build_board(results, cases)  # the samples show that the limit changed nothing
    with pytest.raises(EditingError, match=r"set of cases differs: --limit 3 in memit.*; all cases in rome"):
        build_board(results, left[1])


def test_one_run_in_two_versions_is_refused():
    """Two files of one run, of which the newer one has another version of the task."""
    (older, cases), (newer, _) = frames({"rome": SCORES}), frames({"rome": SCORES}, task_version="2.0", file="b.json")
    with pytest.raises(EditingError, match=r"task version differs: 1\.0 in rome.*; 2\.0 in rome"):
        build_board(pd.concat([older, newer], ignore_index=True), cases)


def test_abilities_after_other_edits_are_refused():
    """General ability after a stream of one benchmark's edits says nothing about that after another's."""
    scores = {"editglue_cola/f1": [1.0, 0.0, 1.0]}
    stream = {"mode": "sequential", "num_edits": 4.0}
    parts = [
        frames({"unedited": scores}),
        frames({"rome": scores}, edits="qaedit (hub)", **stream),
        frames({"memit": scores}, edits="counterfact (hub)", **stream),
    ]
    with pytest.raises(EditingError, match=r"set of edits differs: counterfact \(hub\) in memit") as refusal:
        build_board(*(pd.concat(tables, ignore_index=True) for tables in zip(*parts, strict=True)))
    assert "e.g. --only 'edits=counterfact (hub)' --only edits=, or" in str(refusal.value)
    (section,) = build_board(*both(*parts[:2])).sections  # the unedited model has none
    assert [row.label for row in section.rows] == ["unedited", "rome"]
    own = [frames({"rome": SCORES}, edits="bake (hub)", mode="sequential"), frames({"memit": SCORES}, edits="")]
    build_board(*both(*own))  # a benchmark's own edits need not be named


def test_one_task_of_a_run_in_two_files_is_refused():
    """As with two judges, one of them chosen by --only: cases of both files would count twice."""
    (exact, cases), (judged, again) = frames({"rome": SCORES}), frames({"rome": {"bake_es/judged": [1.0, 1.0, 0.0]}})
    judged["file"] = "results_2.json"
    results = pd.concat([exact, judged], ignore_index=True)
    with pytest.raises(EditingError, match=r"rome single mini has results of bake_es in 2 files, .*Give only one"):
        build_board(results, pd.concat([cases, again], ignore_index=True))


def test_many_columns_are_one_sentence():
    scores = {f"bake_es/m{number}": [1.0, 0.0] for number in range(9)}
    results, cases = both(frames({"rome": scores}), frames({"memit": scores}, data="hub"))
    with pytest.raises(EditingError, match="m0, bake_es m1, bake_es m2 and 6 more: the data source differs"):
        build_board(results, cases)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("data", r"FIELD=VALUE\[,VALUE\] is needed"),
        ("dat=mini", r"no such field. Did you mean 'date' or 'data'.* Accepted: run, "),
        ("data=hub", "leaves no result; data is one of: mini"),
    ],
)
def test_conditions_that_select_nothing_are_refused(condition, message):
    with pytest.raises(EditingError, match=message):
        filter_rows(frames({"rome": SCORES})[0], [condition])
