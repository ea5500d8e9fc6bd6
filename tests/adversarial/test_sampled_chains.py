"""KnowGIC on real generations: no edit changes nothing, and neither batch size nor a kill changes a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_runs import answers, build, flat, run

from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.lm.model import EditedHFLM

TASKS = ["knowgic", "knowgic_prob"]
FILE = "chains.json"
SHORT: dict[str, Any] = {"knowgic_draws": 2, "knowgic_max_tokens": 6, "knowgic_context": "question_only"}


def column(ratio: str, ending: str) -> str:
    """The estimate stands before the population."""
    name, at, population = ratio.partition("@")
    return f"{name}_{ending}{at}{population}"


RATIOS = ["ifr", *(f"ifr_{steps}" for steps in range(1, 6)), "ifr_clipped", "ckp", "ckp_clipped", "ckp@distinct"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def results(lm: EditedHFLM, tasks: list[str] | None = None, **options: Any) -> dict[str, Any]:
    return run(lm, tasks or TASKS, FILE, SHORT, **options)


@pytest.fixture(scope="module")
def edited(model: str) -> dict[str, Any]:
    return results(build(model, batch_size=7))


@pytest.fixture(scope="module")
def answering(edited: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings under which the unedited model has every answer: its own first response is another name of it."""
    names: dict[str, list[str]] = {}
    for sample in edited["samples"]["knowgic"]:
        doc, asked = sample["doc"], sample["resps"][:: SHORT["knowgic_draws"]]
        firsts = [responses[0].final.unedited.raw for responses in asked]
        for chain in [*doc["chains"], doc["context"]]:
            for number, answer in chain:
                names.setdefault(answer, []).append(firsts[number])
    path = tmp_path_factory.mktemp("aliases") / "aliases.json"
    path.write_text(json.dumps({answer: {"answer_alias": texts} for answer, texts in names.items()}), encoding="utf-8")
    return {"knowgic_aliases": str(path)}


@pytest.mark.parametrize("options", [{"mode": "none"}, {"editor": "null_editors:NoChange"}], ids=["none", "null"])
def test_without_a_change_every_ratio_is_one(model: str, options: dict[str, Any], answering: dict[str, str]) -> None:
    lm = build(model, editor_args=None, **options)
    found = run(lm, TASKS, FILE, {**SHORT, **answering})["results"]
    for task, ending in zip(TASKS, ("sampled", "prob"), strict=True):
        ratios = {name: found[task].get(f"{column(name, ending)},none") for name in RATIOS}
        assert ratios == dict.fromkeys(RATIOS, 1.0) | {"ifr_4": None}  # no invented chain has four steps: no column
        assert found[task][f"ifr_active_{ending},none"] == found[task][f"ifr_chains_{ending},none"] == 8
        assert found[task][f"ifr_{ending}_stderr,none"] == 0.0
    row = found["knowgic"]
    assert row["deep_edited_sampled,none"] == row["deep_edited_2_sampled,none"] == 0.0  # nothing was edited
    for length in (1, 2, 3, 5):  # no chain has four steps, or more than five
        assert row[f"ifr_{length}_active_after_sampled,none"] == row[f"ifr_{length}_active_sampled,none"]


def test_an_edit_changes_ratios(edited: dict[str, Any]) -> None:
    row = edited["results"]["knowgic_prob"]
    assert row["ifr_prob,none"] != 1.0 and row["ifr_active_prob,none"] == 8 and row["ifr_prob_n,none"] == 4
    assert row["ifr_prob_stderr,none"] > 0 and row["ckp_prob_n,none"] == 3


def test_responses_are_the_same_at_every_batch_size(model: str, edited: dict[str, Any]) -> None:
    wanted = [flat(answer) for answer in answers(edited)]
    texts = {text for text, _, *_ in wanted if isinstance(text, str)}
    assert len(texts) > 20  # sampled, not one answer
    for size in (1, 64):
        found = results(build(model, batch_size=size), ["knowgic"])
        assert [flat(answer) for answer in answers(found)] == wanted[: len(answers(found))]
        assert found["results"]["knowgic"] == edited["results"]["knowgic"] or seconds_differ(found, edited)


def seconds_differ(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether two rows are the same but for the times of the edits."""
    rows = [dict(one["results"]["knowgic"]) for one in (found, wanted)]
    edits = [json.loads(row.pop("edit,none")) for row in rows]
    return rows[0] == rows[1] and all(edit.pop("seconds_per_edit") for edit in edits) and edits[0] == edits[1]


class Killed(BaseException):
    """Nothing catches it, like a signal."""


def test_a_killed_run_resumes_to_the_same_responses(model: str, tmp_path: Path, edited: dict[str, Any]) -> None:
    """A run dies while it samples, with its edits in the store; a second one goes on from there."""
    lm = build(model, tmp_path)
    passes: list[int] = []

    def die(*_: Any) -> None:
        if any(tmp_path.rglob("deltas/**/*.safetensors")):
            passes.append(1)
            if len(passes) == 10:
                raise Killed

    lm.model.register_forward_pre_hook(die)
    with pytest.raises(Killed):
        results(lm, ["knowgic"])
    resumed = answers(results(build(model, tmp_path), ["knowgic"]))
    assert [flat(answer) for answer in resumed] == [flat(answer) for answer in answers(edited)][: len(resumed)]
