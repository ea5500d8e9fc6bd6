"""The result of a search as a settings file."""

from __future__ import annotations

import hashlib
import json

import pytest
from tuning_cases import CASES

from edit_hooks import EditRequest
from edit_hooks.utils.settings.options import parse_editor_args
from lm_edit.tuning.settings_file import MAX_LISTED, SearchRecord, list_cases, write_settings
from lm_edit.tuning.trials import FactScore, Trial
from lm_eval_tasks.common.records.cases import Case

TRIAL = Trial({"seed": 3, "layers": [1], "lr": 0.25}, {"fact": FactScore(1.0, None, 0.5, 0.1)})
RECORD = SearchRecord("rome", "tiny", "1 facts", CASES[:1])
ORIGIN = "# rome for tiny: best of lm-edit tune on 1 facts, score 0.667. Score it on other facts."


@pytest.mark.parametrize(
    ("seed", "settings", "comment"),
    [
        (None, {"seed": 3}, []),  # the user's own setting
        (0, {}, []),  # the default
        (3, {}, ["# Edits were made with seed=3, an option of edited_hf."]),  # not in the file, which fixes all runs
    ],
)
def test_the_file_holds_the_settings_and_their_origin(tmp_path, seed, settings, comment):
    path = tmp_path / "best.yaml"
    write_settings(path, TRIAL, RECORD._replace(seed=seed))
    assert parse_editor_args(str(path)) == {"layers": [1], "lr": 0.25, **settings}
    lines = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert lines == [ORIGIN, f"# Facts: {CASES[0].request.text!r}", *comment]


def test_facts_are_listed_by_their_ids_and_many_by_a_digest(tmp_path):
    def cases(num: int) -> list[Case]:
        return [Case(EditRequest(prompt="{} is", subject="A", target_new="b", case_id=n), [], []) for n in range(num)]

    names = [f"case {number}" for number in range(MAX_LISTED + 1)]
    assert list_cases(cases(MAX_LISTED)) == ", ".join(names[:-1])
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    assert list_cases(cases(MAX_LISTED + 1)) == f"101 cases, SHA-256 of the JSON list of their names: {digest}"
    write_settings(tmp_path / "best.yaml", TRIAL, RECORD._replace(cases=cases(MAX_LISTED)))
    comment = [line for line in (tmp_path / "best.yaml").read_text().splitlines() if line.startswith("# ")]
    assert max(map(len, comment)) <= 120 and comment[-1].endswith(names[-2])


def test_texts_of_users_stay_in_the_comment(tmp_path):
    record = RECORD._replace(model="a\nlr: 7\x1b[2J", facts="1 facts of b\u2028lr: 8")
    write_settings(tmp_path / "best.yaml", TRIAL, record)
    assert parse_editor_args(str(tmp_path / "best.yaml"))["lr"] == 0.25
    assert "\x1b" not in (tmp_path / "best.yaml").read_text()
