"""The labeled pairs, and scores of judges on them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from edit_hooks.utils.errors import EditingError
from judges.base import CORRECT, INCORRECT, Item, Judgment, Report, Verdict
from judges.evaluation.quality import load_pairs, measure_judge
from judges.string_judge import StringJudge
from lm_edit.cli.main import main

MAIN_CATEGORIES = {
    *("paraphrase", "partial", "extra_wrong", "repetition", "continuation"),
    *("unit", "date", "negation", "empty", "language"),
}


def test_the_hand_labeled_set_is_large_and_balanced() -> None:
    pairs = load_pairs()
    assert len(pairs) >= 300
    counts = Counter((pair.category, pair.label) for pair in pairs)
    for category in MAIN_CATEGORIES:
        assert counts[category, CORRECT] + counts[category, INCORRECT] >= 25
        assert min(counts[category, CORRECT], counts[category, INCORRECT]) >= 5
    assert all(pair.reason and pair.item.question and pair.item.gold for pair in pairs)
    assert len({pair.item[:3] for pair in pairs}) == len(pairs) == len({pair.id for pair in pairs})
    assert len({pair.item.question for pair in pairs}) > 150  # varied topics


def test_no_label_contradicts_exact_match() -> None:
    """By the protocol, an answer equal to the gold answer after normalization is correct."""
    judge = StringJudge("em")
    pairs = load_pairs()
    for pair, verdict in zip(pairs, judge.judge([pair.item for pair in pairs]).verdicts, strict=True):
        assert verdict.label == INCORRECT or pair.label == CORRECT, pair


class ScriptedJudge:
    """Labels answers with an "x" correct, and leaves "?" unscored."""

    name = "scripted"

    def judge(self, items: Sequence[Item]) -> Judgment:
        verdicts = [
            Verdict(unscored_reason="odd")
            if item.answer == "?"
            else Verdict(label=CORRECT if "x" in item.answer else INCORRECT)
            for item in items
        ]
        return Judgment(verdicts, Report(judge=self.name, num_items=len(items), num_scored=len(items)))


def test_scores_by_hand(tmp_path: Path) -> None:
    rows = [("a", "x", CORRECT), ("a", "x1", CORRECT), ("a", "y", CORRECT), ("a", "x2", INCORRECT), ("b", "?", CORRECT)]
    path = tmp_path / "pairs.jsonl"
    shared = {"question": "q", "gold": "g", "reason": "r"}
    records = [{"category": category, "answer": answer, "label": label} | shared for category, answer, label in rows]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    quality = measure_judge(ScriptedJudge(), load_pairs(str(path)))
    # by chance: 3/4 * 3/4 + 1/4 * 1/4 = 0.625
    assert quality.scores["a"][:7] == (4, 3, 4, 0.5, *[pytest.approx(2 / 3)] * 2, pytest.approx(-0.125 / 0.375))
    assert quality.scores["b"] == (1, 1, 0, None, None, None, None, None)
    assert quality.scores["all"][:3] == (5, 4, 4)
    assert [pair.id for pair, _ in quality.errors] == ["a-03", "a-04"]


def test_rows_of_judge_out_need_only_a_label(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = tmp_path / "answers.jsonl"
    rows = [{"question": "q", "gold": "g", "answer": answer} for answer in ("g", "h", "i")]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "v.jsonl"
    assert main(["judge", str(answers), "--judge", "em", "--out", str(out)]) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    for row, label in zip(written, (CORRECT, INCORRECT), strict=False):
        row["label"] = label
    out.write_text("".join(json.dumps(row) + "\n" for row in written))
    with caplog.at_level(logging.WARNING):
        pairs = load_pairs(str(out))
    assert [(pair.id, pair.label, pair.reason) for pair in pairs] == [
        ("answers-01", CORRECT, ""),
        ("answers-02", INCORRECT, ""),
    ]
    assert "1 of 3 rows have no label and are left out" in caplog.text


def test_a_file_without_any_label_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"question": "q", "gold": "g", "answer": "a"}\n')
    with pytest.raises(EditingError, match="no row has a label; add label: correct or incorrect"):
        load_pairs(str(path))


def test_an_unknown_label_names_the_accepted_ones(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    for label in ("ok", 1, True, ["correct"]):
        path.write_text(json.dumps({"question": "q", "gold": "g", "answer": "a", "label": label}))
        with pytest.raises(EditingError, match=r"line 1\): label .* is unknown\. Accepted: correct, incorrect"):
            load_pairs(str(path))


UNKNOWN_LABEL = {"category": "a", "question": "q", "gold": "g", "answer": "a", "label": "ok", "reason": "r"}


@pytest.mark.parametrize(
    "line",
    [
        '{"category": "a"}',
        "{",
        json.dumps(UNKNOWN_LABEL),
        json.dumps(UNKNOWN_LABEL | {"label": CORRECT, "reason": 3}),
        json.dumps(UNKNOWN_LABEL | {"label": CORRECT, "aliases": "an alias"}),
    ],
)
def test_an_invalid_pair_is_refused_with_its_line_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n" + line)
    with pytest.raises(EditingError, match="line 2"):
        load_pairs(str(path))
