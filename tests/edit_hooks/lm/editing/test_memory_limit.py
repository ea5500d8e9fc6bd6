"""Edits beyond a bound leave memory and are read again from the store; nothing else changes."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_runs import build, instance

from edit_hooks import EditRequest
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.inference.items import ScoreItem
from edit_hooks.lm.editing import memory_limit as large_edits
from edit_hooks.utils.errors import EditingError

pytestmark = pytest.mark.usefixtures("collects_new_objects_only")

EDITS = [
    EditRequest(prompt="{} is the capital of", subject=f"Port {number}", target_new="Dravonia") for number in range(6)
]
FT_M = {"editor": "ft_m", "editor_args": {"layers": [1], "num_steps": 1}}
KINDS: dict[str, dict[str, Any]] = {
    "wise": {"layers": [1], "num_steps": 2},
    "grace": {"layers": [1], "num_steps": 2},
    "r_rome": {"layers": [1], "num_steps": 2, "context_templates": ["{}"]},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def hold(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the bound be that of a number of edits of the tiny model."""
    monkeypatch.setattr(large_edits, "MOST_BYTES", count * 32 * 64 * 4)


ALIVE: weakref.WeakSet[Delta] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def _register_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Delta.__init__

    def registered(self: Delta, *args: Any, **named: Any) -> None:
        plain(self, *args, **named)
        ALIVE.add(self)

    monkeypatch.setattr(Delta, "__init__", registered)


def num_dense() -> int:
    """Number of dense edits in memory that were made since ``ALIVE.clear()``; model objects of earlier runs are in
    cycles, and keep theirs until the garbage collector runs."""
    return sum(1 for one in ALIVE if one.dense)


def num_whole() -> int:
    """Number of edits in memory with tensors of any kind, as :func:`num_dense`."""
    gc.collect()
    return sum(1 for one in ALIVE if one.num_bytes)


def questions() -> list[Any]:
    return [
        instance({"edit_requests": [edit.to_dict()], "case_id": edit.key}, edit.text, f" {target}")
        for edit in EDITS
        for target in ("Dravonia", "Ostravia")
    ]


def logprobs(lm: Any) -> list[float]:
    """Of the final answers, and of those after every step of a stream."""
    answers = lm.loglikelihood(questions(), disable_tqdm=True)
    return [
        one.logprob
        for answer in answers
        for one in (answer.final, *(at for stage, at in answer.stages.items() if isinstance(stage, int)))
    ]


def stored(folder: Path) -> list[Path]:
    return sorted((folder / "store" / "deltas").rglob("*.safetensors"))


@pytest.mark.parametrize("count", [0, 2])
def test_single_edits_leave_memory(count: int, model_path: str, tmp_path: Path, monkeypatch: Any) -> None:
    expected = logprobs(build(model_path, **FT_M))
    hold(monkeypatch, count)
    alive = []
    for _ in ("made", "from the store"):
        ALIVE.clear()
        lm = build(model_path, tmp_path, **FT_M)
        score = lm.engine.score
        lm.engine.score = lambda jobs, score=score: alive.append(num_dense()) or score(jobs)
        assert logprobs(lm) == expected == logprobs(lm)  # the second call finds the edits made
        assert num_dense() == count
        assert all(answer.edit.diagnostics for answer in lm.loglikelihood(questions()[:1]))
        del lm, score
    assert max(alive) <= count + max(count, 1)
    assert len(stored(tmp_path)) == 6


@pytest.mark.parametrize(("editor", "settings"), KINDS.items())
def test_edits_of_every_kind_leave_memory(
    editor: str, settings: dict[str, Any], model_path: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Side memories, codebooks, and updates of low rank, which act per row."""
    options = {"editor": editor, "editor_args": settings}
    expected = logprobs(build(model_path, **options))
    (first, *_) = build(model_path, tmp_path, **options).session.edits([(EDITS[0],)])
    assert not first.dense
    monkeypatch.setattr(large_edits, "MOST_BYTES", int(2.5 * first.num_bytes))
    del first
    for _ in ("made", "from the store"):
        ALIVE.clear()
        lm = build(model_path, tmp_path, **options)
        # in portions, whose batches differ in the last bits
        assert logprobs(lm) == pytest.approx(expected, abs=1e-4) == logprobs(lm)
        assert num_whole() == 2
        del lm


def test_all_stay_where_nothing_stores_them(model_path: str, monkeypatch: Any) -> None:
    hold(monkeypatch, 1)
    ALIVE.clear()
    lm = build(model_path, **FT_M)
    logprobs(lm)
    assert num_dense() == 6


def test_edits_to_be_saved_are_read_one_by_one(model_path: str, tmp_path: Path, monkeypatch: Any) -> None:
    groups = [(edit,) for edit in (*EDITS, EDITS[0])]
    expected = [delta.checksum() for delta in build(model_path, **FT_M).session.edits(groups)]
    hold(monkeypatch, 1)
    ALIVE.clear()
    lm, alive = build(model_path, tmp_path, **FT_M), []
    assert [(alive.append(num_dense()), delta.checksum())[1] for delta in lm.session.edits(groups)] == expected
    assert max(alive[1:]) <= 3 and expected[0] == expected[-1]  # the one that stays, this one, and the one before


def test_an_edit_that_was_pruned_meanwhile_is_made_again(model_path: str, tmp_path: Path, monkeypatch: Any) -> None:
    expected = logprobs(build(model_path, **FT_M))
    hold(monkeypatch, 1)
    lm = build(model_path, tmp_path, **FT_M)
    assert logprobs(lm) == expected
    for path in stored(tmp_path):
        path.unlink()
    # in a batch of its own, so the last bits may differ
    assert logprobs(lm) == pytest.approx(expected, abs=1e-4) and len(stored(tmp_path)) == 5


def stream(model_path: str, tmp_path: Path, store: Path | None, **options: Any) -> Any:
    edits = tmp_path / "edits.jsonl"
    records = [{name: value for name, value in edit.to_dict().items() if value is not None} for edit in EDITS]
    lines = [json.dumps({**record, "case_id": str(number)}) for number, record in enumerate(records)]
    edits.write_text("\n".join(lines))
    return build(model_path, store, **{**FT_M, "mode": "sequential", "edits": str(edits), "retention": True, **options})


def test_the_steps_of_a_stream_leave_memory(model_path: str, tmp_path: Path, monkeypatch: Any) -> None:
    plain = stream(model_path, tmp_path, None)
    expected, state = logprobs(plain), plain.stream_state()
    steps = [delta.checksum() for delta in plain.session.edits([])]
    del plain
    hold(monkeypatch, 2)
    for _ in ("made", "from the store"):
        ALIVE.clear()
        lm = stream(model_path, tmp_path, tmp_path)
        assert logprobs(lm) == expected == logprobs(lm)
        assert lm.stream_state() == state and num_dense() == 2
        assert [delta.checksum() for delta in lm.session.edits([])] == steps
        weights = lm.model.state_dict()
        untouched = {name: weight.clone() for name, weight in weights.items()}
        with lm.session.stock_task_scope():
            assert any(not torch.equal(weights[name], weight) for name, weight in untouched.items())
        assert all(torch.equal(weights[name], weight) for name, weight in untouched.items())
    for path in stored(tmp_path):
        path.unlink()
    with pytest.raises(EditingError, match="step 2 of the stream was removed from the store"):
        logprobs(lm)


@pytest.mark.parametrize("icl", [False, "fact"])
def test_the_low_rank_steps_of_a_stream_leave_memory(
    icl: Any, model_path: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """What later steps read of them, their running statistics, stays. With a context it is what the editor reads."""
    ultraedit = {"editor": "ultraedit", "editor_args": {"layers": [1], "lr": 3e-3, "start": "empty"}, "icl": icl}
    plain = stream(model_path, tmp_path, None, **ultraedit)
    expected, state = logprobs(plain), plain.stream_state()
    assert all(delta.factors and delta.stream_state for delta in plain.session.edits([]))
    del plain
    monkeypatch.setattr(large_edits, "MOST_BYTES", 0)
    for _ in ("made", "from the store"):
        gc.collect()
        ALIVE.clear()
        lm = stream(model_path, tmp_path, tmp_path, **ultraedit)
        assert logprobs(lm) == expected == logprobs(lm)
        gc.collect()
        assert lm.stream_state() == state and not any(one.factors for one in ALIVE)
        assert sum(1 for one in ALIVE if one.stream_state) == 1  # of the last step


@pytest.mark.parametrize(
    ("editor", "settings"),
    [("prune", {"base": "ft_m", "base_settings": FT_M["editor_args"]}), ("lora", {"layers": [1], "num_steps": 2})],
)
def test_editors_that_read_earlier_steps_have_them(
    editor: str, settings: dict[str, Any], model_path: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """PRUNE reads the raw updates beside the written ones, LoRA the written ones."""
    options = {"editor": editor, "editor_args": settings}
    expected = logprobs(stream(model_path, tmp_path, None, **options))
    monkeypatch.setattr(large_edits, "MOST_BYTES", 0)
    assert logprobs(stream(model_path, tmp_path, tmp_path, **options)) == expected


def test_an_edit_becomes_dense_while_it_is_written(model_path: str) -> None:
    """`answer=patch` writes every edit, and holds them in the form in which they were made."""
    lm = build(model_path, answer="patch", editor="r_rome")
    ALIVE.clear()
    low_rank = Delta(factors={"model.layers.1.mlp.down_proj": Factor(torch.ones(32, 1), torch.ones(64, 1))})
    ((_, written),) = lm.engine._written([(ScoreItem((1, 2), (3,)), low_rank)])
    assert written is not None and not written.acts_per_row and num_dense() == 0
    assert written.checksum() == low_rank.checksum()
