"""MQuAKE through the public API on a tiny model: groups of k cases, contradicting edits, unreachable data."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from lm_runs import build, run
from paths import RECORDS

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import read_rows

FILE = RECORDS / "mquake.jsonl"
TASK = "mquake_edit_wise"
METRIC = "efficacy_magnitude"
SETTINGS = {"generate": False}
FT = {"editor": "ft_m", "editor_args": {"num_steps": 2, "lr": 0.01}}


@pytest.fixture
def values(tiny_path, tmp_path):
    """Options of a run -> per case the magnitude."""

    def evaluate(records: slice = slice(0, 3), **options: Any) -> list[float]:
        path = tmp_path / "mquake.jsonl"
        rows = [record for _, record in read_rows(FILE)][records]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        lm = build(str(tiny_path("llama")), data=str(path), **FT, **options)
        samples = run(lm, [TASK], str(path), SETTINGS)["samples"][TASK]
        return [sample[METRIC] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]

    return evaluate


def test_k_edit_groups_are_what_they_are_made_of(values) -> None:
    """Cases 0, 1 and 2 have 1, 2 and 1 edits. A group of one case, the last of two included, is a run of its own."""
    batch = {"mode": "batch", "edits": "mquake", "num_edits": 3}
    single, grouped = values(), values(**batch, group_size=1)
    assert grouped == pytest.approx(single, abs=1e-6)
    pairs, together = values(**batch, group_size=2), values(**batch, group_size=3)
    assert together == pytest.approx(values(**batch), abs=1e-6)  # group_size=all
    assert pairs[2] == pytest.approx(single[2], abs=1e-6)  # the last group has one case
    for case in range(2):
        assert abs(pairs[case] - single[case]) > 1e-5 and abs(together[case] - pairs[case]) > 1e-5


def test_contradicting_edits_are_named(values, caplog) -> None:
    """Cases 2 and 3 want Marn and Tarvia as the home country of Ada Brenn."""
    with caplog.at_level(logging.WARNING):
        values(slice(2, 4), mode="batch", edits="mquake", num_edits=2)
    assert (
        "the cases want several answers to 1 of 3 edit prompts, first 'Marn' and 'Tarvia' to 'The home" in caplog.text
    )


def test_one_case_with_two_answers_to_a_prompt_is_refused(tiny_path, tmp_path) -> None:
    (_, record), *_ = read_rows(FILE)
    second = json.loads(json.dumps(record["requested_rewrite"][0]))
    second["target_new"]["str"] = "Marn"
    path = tmp_path / "mquake.jsonl"
    path.write_text(json.dumps(record | {"requested_rewrite": [*record["requested_rewrite"], second]}))
    lm = build(str(tiny_path("llama")), **FT)
    with pytest.raises(EditingError, match="wants two answers to 'The country in which Harrow Tower can be found is'"):
        run(lm, [TASK], str(path), SETTINGS)


@pytest.mark.parametrize("task", ["mquake_edit_wise", "mquake_multi_hop"])
@pytest.mark.parametrize("chosen", [{"data": "hub"}, {"mquake_set": "remastered_t"}])
def test_unreachable_data_name_the_address_and_a_remedy(task: str, chosen: dict[str, str]) -> None:
    from task_managers import task_manager

    with pytest.raises(EditingError, match=r"https://raw.githubusercontent.com/.*MQuAKE.*put it at"):
        task_manager(chosen).load([task])
