"""States of joint trainings in a store: an interrupted edit goes on to the same weights, and from nothing else."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from lm_runs import build, instance

from edit_hooks import Delta, EditRequest
from edit_hooks.edit_report import Cost
from edit_hooks.gradient.stepping import kept_training
from edit_hooks.lm.editing import stored_trainings
from edit_hooks.store.store import Store

NAMES = ("Amelin", "Brisk", "Corvo", "Delmar", "Estra")
FACTS = [EditRequest(prompt="{} is the capital of", subject=f"Port {name}", target_new="Dravonia") for name in NAMES]
TEXTS = ["The harbor was quiet in the morning.", "They sold bread and apples.", "A letter came from the north."]
PAIRS: dict[str, Any] = {"layers": [1], "batch_size": 2, "num_steps": 4, "lr": 1e-2}
LISTS = {**PAIRS, "num_names": 2, "num_lists": 1, "locality_prompts": 2}
PROJECTED = {**PAIRS, "factors": TEXTS, "factor_tokens": 30, "energy": 0.5}


class Case(NamedTuple):
    """An edit in twelve steps, three in each of four passes, and how many of them are made before the kill."""

    editor: str
    settings: dict[str, Any]
    killed_after: int
    options: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "ft_m": Case("ft_m", PAIRS, 6),
    "shuffled": Case("loc_ft", PAIRS, 7),
    "a block": Case("loc_ft", {**PAIRS, "trained": "block", "engine": "reference"}, 5),
    "second step of a stream": Case("crisp_edit", PROJECTED, 10, {"mode": "sequential", "edit_batch_size": 3}),
    "dropout": Case("lora", {**PAIRS, "dropout": 0.3}, 7),
    "locality": Case("two_way", LISTS, 7),
    "a wrapper": Case("rect", {"base": "ft_m", "base_settings": PAIRS}, 7),
}


class Training:
    """Runs one joint edit of all facts by ``edited_hf``, with a state after every step.

    Attributes:
        num_steps: of the optimizers so far. most: the step after them is killed.
    """

    def __init__(self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.folder, self.num_steps, self.most = path, folder, 0, 1000
        self.edits = folder / "edits.jsonl"
        self.edits.write_text("".join(f"{json.dumps(fact.to_dict())}\n" for fact in FACTS))
        step = torch.optim.Adam.step

        def counted(optimizer: Any, *rest: Any, **named: Any) -> Any:
            if self.num_steps == self.most:
                raise KeyboardInterrupt
            self.num_steps += 1
            return step(optimizer, *rest, **named)

        monkeypatch.setattr(torch.optim.Adam, "step", counted)
        monkeypatch.setattr(kept_training, "INTERVAL", 0.0)
        monkeypatch.setattr(kept_training, "SPACING", 0)

    def run(self, store: str, editor: str, settings: dict[str, Any], most: int = 1000, **options: Any) -> Delta:
        """The edit by a new process, as far as a model that is loaded again is one."""
        self.num_steps, self.most = 0, most
        options = {"mode": "batch", "edits": str(self.edits), **options}
        lm = build(str(self.path), editor=editor, editor_args=dict(settings), store=str(self.folder / store), **options)
        doc = {"edit_requests": [FACTS[0].to_dict()], "asked": {"model": "edited"}, "case_id": "0"}
        lm.loglikelihood([instance(doc, "Port Amelin is the capital of", " Dravonia")])
        paths = sorted((self.folder / store / "deltas").rglob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        return Delta.load(paths[-1])

    def kill(self, store: str, editor: str, settings: dict[str, Any], steps: int, **options: Any) -> Path:
        """Interrupt the edit after ``steps`` steps; the file of its state."""
        with pytest.raises(KeyboardInterrupt):
            self.run(store, editor, settings, most=steps, **options)
        (path,) = (self.folder / store / "trainings").rglob("*.safetensors")
        return path


@pytest.fixture
def training(tiny_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(tiny_path("llama"), tmp_path, monkeypatch)


def same(first: Delta, second: Delta) -> bool:
    """The same update and state, bit for bit, with the same record of how it came about."""
    return first.checksum() == second.checksum() and first.diagnostics == second.diagnostics


@pytest.mark.parametrize("case", CASES)
def test_a_joint_edit_goes_on_where_it_was_killed(training: Training, case: str) -> None:
    editor, settings, killed_after, options = CASES[case]
    whole = training.run("whole", editor, settings, **options)
    assert training.num_steps == 12
    state = training.kill("killed", editor, settings, killed_after, **options)
    assert same(training.run("killed", editor, settings, **options), whole)
    assert training.num_steps == 12 - killed_after and not state.exists()
    assert "trainings" not in Store(training.folder / "whole").size()


def test_a_pass_that_ends_the_training_ends_it_after_a_kill(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state behind the last facts is written before the loop looks whether all are learned."""
    settings = {**LISTS, "learned_nll": 20.0}
    whole = training.run("whole", "two_way", settings)
    save = Store.save_training

    def save_and_end(store: Store, *rest: Any) -> None:
        save(store, *rest)
        if len(rest[1].meta[kept_training.RECORD]["history"][-1][0]) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Store, "save_training", save_and_end)
        training.run("killed", "two_way", settings)
    assert same(training.run("killed", "two_way", settings), whole)
    assert "trainings" not in Store(training.folder / "killed").size()  # the found state, without a later one


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def of_other_texts(path: Path) -> None:
    """An intact file of this edit, as of a release that would train other rows."""
    state = Delta.load(path)
    state.meta[kept_training.FINGERPRINT] = "another"
    state.save(path)


def of_another_edit(path: Path) -> None:
    state = Delta.load(path)
    state.meta["description"]["training"] = 1
    state.save(path)


@pytest.mark.parametrize("damage", [flip_a_bit, cut, of_other_texts, of_another_edit])
def test_a_state_that_cannot_be_used_costs_one_warning(
    training: Training, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    whole = training.run("whole", "ft_m", PAIRS)
    damage(training.kill("killed", "ft_m", PAIRS, 7))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert same(training.run("killed", "ft_m", PAIRS), whole) and training.num_steps == 12
    (warning,) = [record.message for record in caplog.records if "training" in record.message]
    assert warning.endswith("begins again.")
    assert "trainings" not in Store(training.folder / "killed").size()


def test_another_edit_does_not_go_on_from_it(training: Training) -> None:
    state = training.kill("killed", "ft_m", PAIRS, 7)
    other = {**PAIRS, "lr": 2e-2}
    assert same(training.run("killed", "ft_m", other), training.run("whole", "ft_m", other))
    assert training.num_steps == 12 and state.exists()  # for the edit that it belongs to
    assert Store(training.folder / "killed").size()["trainings"][0] == 1  # can be pruned
    assert Store(training.folder / "killed").prune() and not state.exists()


def test_a_resumed_edit_costs_what_an_unbroken_one_does(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    path = training.kill("killed", "ft_m", PAIRS, 7)
    state = Delta.load(path)
    state.cost = Cost(seconds=1000.0)
    state.save(path)
    ticks = itertools.count(step=100.0)  # each of five writes takes 100 seconds by this clock
    monkeypatch.setattr(stored_trainings, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    seconds = training.run("killed", "ft_m", PAIRS).cost.seconds
    assert seconds is not None and 1000 - 5 * 100 < seconds < 1000 - 4 * 100


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_without_room_nothing_is_kept_and_one_line_says_so(
    training: Training, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if place == "disk":
        monkeypatch.setattr(Store, "has_room", lambda *_: False)
    else:
        monkeypatch.setattr(stored_trainings, "free_bytes", lambda device: 1000)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        training.run("store", "ft_m", PAIRS, most=7)
    assert caplog.text.count("is not kept: ") == caplog.text.count("begins again.") == 1
    assert "trainings" not in Store(training.folder / "store").size()


def test_without_room_for_later_states_the_first_one_serves(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rooms = itertools.chain([True], itertools.repeat(False))
    with monkeypatch.context() as patch:
        patch.setattr(Store, "has_room", lambda *_: next(rooms))
        training.kill("store", "ft_m", PAIRS, 7)
    (warning,) = [record.message for record in caplog.records if "is not kept any longer" in record.message]
    assert warning.endswith("goes on from an earlier state.")
    training.run("store", "ft_m", PAIRS)
    assert training.num_steps == 11


def test_a_short_edit_writes_nothing(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_training, "INTERVAL", 60.0)
    with pytest.raises(KeyboardInterrupt):
        training.run("store", "ft_m", PAIRS, most=7)
    assert not (training.folder / "store" / "trainings").exists()
