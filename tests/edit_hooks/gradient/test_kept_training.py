"""When states of trainings are written, and where their tensors are."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_device import dispatch_model, move_delta, pretended_device

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.deltas.placement import off_device
from edit_hooks.edit_report import Cost
from edit_hooks.gradient.stepping import kept_training
from edit_hooks.gradient.stepping.kept_training import KeptTraining, trainings_kept_in

NAMES = ("Amelin", "Brisk", "Corvo")
FACTS = [EditRequest(prompt="{} is the capital of", subject=f"Port {name}", target_new="Dravonia") for name in NAMES]
DEVICE_MAP = {
    **dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), 0),
    **dict.fromkeys(("model.layers.1", "model.layers.2", "model.norm", "lm_head"), 1),
}


class Place:
    """The last state of each training, on the CPU; a write takes some seconds of a clock that stands still else."""

    def __init__(self, seconds: float = 0.0, most: int = 1000) -> None:
        self.states: dict[int, Delta] = {}
        self.now, self.seconds, self.most = 0.0, seconds, most
        self.written: list[float] = []
        self.num_begun = self.num_resumed = 0

    def begin(self) -> int:
        self.num_begun += 1
        return self.num_begun - 1

    def load(self, number: int) -> Delta | None:
        return self.states.get(number)

    def save(self, number: int, state: Delta) -> float:
        self.written.append(self.now)
        if len(self.written) > self.most:
            raise KeyboardInterrupt
        self.states[number] = move_delta(off_device(state), torch.clone)
        self.states[number].meta = json.loads(json.dumps(state.meta))
        self.now += self.seconds
        return self.seconds

    def has_room(self, num_bytes: int) -> bool:
        return True

    def resumed(self, cost: Cost) -> None:
        self.num_resumed += 1


def train(place: Place, monkeypatch: pytest.MonkeyPatch, size: int = 8, minutes: int = 70) -> list[Any]:
    """A training of an hour and more in steps of ten seconds; the seconds that each state records."""
    monkeypatch.setattr(kept_training, "time", SimpleNamespace(monotonic=lambda: place.now))
    leaf = torch.zeros(size, requires_grad=True)
    with trainings_kept_in(place):
        kept = KeptTraining(torch.nn.Identity(), torch.optim.Adam([leaf]), rows=[])
        kept.resume()
    seconds = []
    while place.now < 60 * minutes:
        place.now += 10
        before = len(place.written)
        kept.after_step(dict)
        if len(place.written) > before:
            seconds.append(place.states[0].cost.seconds)
    return seconds


def test_states_are_written_at_intervals_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each minute; or so that writing takes at most a twentieth of the time."""
    quick, slow = Place(0.0), Place(30.0)
    assert train(quick, monkeypatch) == quick.written == [60.0 * number for number in range(1, 71)]
    assert train(slow, monkeypatch)[:3] == [60, 660, 1260]  # without the seconds of the writes
    assert slow.written[:3] == [60, 690, 1320]


def test_the_first_state_of_a_large_training_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_training, "WRITTEN_PER_SECOND", 1000)
    place = Place()
    train(place, monkeypatch, size=5000)  # three copies of 20,000 bytes
    assert place.written[0] == 1200.0


def test_the_seconds_before_a_kill_count(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place()
    train(place, monkeypatch, minutes=2)
    place.now, place.num_begun = 0.0, 0
    assert train(place, monkeypatch, minutes=2) == [180, 240] and place.num_resumed == 1


@pytest.mark.parametrize(
    ("editor", "settings"), [("loc_ft", {"batch_size": 2}), ("lora", {"dropout": 0.3, "modules": ["rewrite"]})]
)
def test_a_training_goes_on_across_devices(
    editor: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are read on the CPU; the trained tensors, moments and generators are on two pretended GPUs."""
    monkeypatch.setattr(kept_training, "INTERVAL", 0.0)
    tokenizer = build_tokenizer("byte_bpe_bos")
    instance = load_editor(editor, {"layers": [0, 1], "num_steps": 3, "lr": 1e-2, **settings})
    with pretended_device():
        model = build_model("llama")
        dispatch_model(model, DEVICE_MAP)

        def edit(place: Place | None) -> Delta:
            with trainings_kept_in(place):
                (delta,) = instance.edit(model, tokenizer, FACTS, joint=True, measure=False)
            return move_delta(delta, torch.Tensor.cpu)

        whole, place = edit(None), Place(most=4)
        with pytest.raises(KeyboardInterrupt):
            edit(place)
        place.most, place.num_begun = 1000, 0
        resumed = edit(place)
    assert place.num_resumed == 1 and resumed.checksum() == whole.checksum()
