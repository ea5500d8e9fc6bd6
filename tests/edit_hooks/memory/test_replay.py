"""Replay of past edits while a side memory is trained: margins, turns, and what a stream stores for it."""

from __future__ import annotations

import random

import pytest
import torch
from hook_edits import EDIT_REQUESTS, SETTINGS, loaded, prompt_distance, stream_of, weight_of

from edit_hooks import Delta, EditingError, EditRequest, load_editor
from edit_hooks.editors.wise import WISEConfig, activation_of, training_rows
from edit_hooks.gradient.map_forward import map_activations, past_distances
from edit_hooks.memory.replay import PastEdits, Replay, mean_positive
from edit_hooks.memory.side_memory import Memory, MemoryBank

CONFIG = SETTINGS["wise"]
REPLAYED = {**CONFIG, "num_steps": 2, "save_every": 2, "merge_every": 2, "replay": True, "weight_decay": 0.0}


def test_replay_adds_margins_on_one_merged_edit_and_one_recent_edit():
    """The third edit, the first after a merge: by hand, with the module run on the rows of the first and the third."""
    model, tokenizer = loaded("llama")
    *earlier, one = stream_of("wise", model, tokenizer, EDIT_REQUESTS[:3], **{**REPLAYED, "num_steps": 1})
    *_, two = stream_of("wise", model, tokenizer, EDIT_REQUESTS[:3], **{**REPLAYED, "num_steps": 1, "replay": False})
    assert [record.get("replay") for record in one.diagnostics["losses"]] == [20.0]  # no distance yet: 0 + 20
    assert "replay" not in two.diagnostics["losses"][0]
    bank = MemoryBank.from_hook_edit(Delta.summed([*earlier, one]).hook_edit, weight_of(model, one))
    # A larger change, under which both margins are violated.
    change = Memory(0, 4 * bank.current.change, bank.current.mask, 0.0)

    def margins(request: EditRequest) -> tuple[float, float]:
        texts = [request.in_template(template) for template in CONFIG["context_templates"]]
        distances = [prompt_distance(model, tokenizer, edit.text + edit.continuation, change, one) for edit in texts]
        values = torch.tensor(distances)
        return float(mean_positive(values - 5.0)), float(mean_positive(20.0 - values))

    rows = [row.ids for row in training_rows(tokenizer, EDIT_REQUESTS[0], WISEConfig(**CONFIG))[:-1]]
    past = PastEdits([], [7])  # the eighth replay of a group of one
    past.add(rows)
    past.add([row.ids for row in training_rows(tokenizer, EDIT_REQUESTS[2], WISEConfig(**CONFIG))[:-1]])
    activation = activation_of(model, WISEConfig(**CONFIG))
    distance = past_distances(model, one.hook_edit.settings["module"], past.rows, activation, budget=0)
    loss = Replay(past, 1, distance, random.Random(0)).loss(change.change)
    assert float(loss) == pytest.approx(margins(EDIT_REQUESTS[0])[0] + margins(EDIT_REQUESTS[2])[1], rel=1e-5)
    assert past.turns == [8]


def test_merged_edits_take_turns_over_the_steps_of_a_stream(monkeypatch):
    """Every group one edit a step, going on where the edit before stopped; recent edits are drawn."""
    model, tokenizer = loaded("llama")
    seen: list[list[int]] = []

    def spy(model, name, ids_RT, mask_RT):
        seen.append(ids_RT[0][mask_RT[0].bool()].tolist())
        return map_activations(model, name, ids_RT, mask_RT)

    monkeypatch.setattr("edit_hooks.gradient.map_forward.map_activations", spy)
    requests = [EditRequest(prompt=f"The river number {n} flows to", target_new="Rome") for n in range(6)]
    settings = {**REPLAYED, "num_steps": 3, "engine": "reference"}  # which runs the rows in every step
    steps = stream_of("wise", model, tokenizer, requests, **settings)
    ids = [tokenizer(f"{request.text} Rome")["input_ids"] for request in requests]
    numbers = [ids.index(row) for row in seen]
    # Edits 2 and 3: one group, three steps each; edits 4 and 5: two groups.
    third, fourth, fifth, sixth = numbers[:6], numbers[6:12], numbers[12:21], numbers[21:]
    assert third == [0, 2, 1, 2, 0, 2]
    assert fourth[::2] == [1, 0, 1] and set(fourth[1::2]) <= {2, 3}
    assert fifth == [0, 2, 4, 1, 3, 4, 0, 2, 4]
    assert sixth[::3] == [1, 0, 1] and sixth[1::3] == [3, 2, 3] and set(sixth[2::3]) <= {4, 5}
    assert steps[-1].hook_edit.settings["turns"] == [12, 6, 0]


def test_replay_keeps_recent_edits_in_the_memory():
    model, tokenizer = loaded("llama")
    distances = []
    for replay in (False, True):
        settings = {**REPLAYED, "num_steps": 15, "merge_every": 4, "save_every": 4, "beta": 0.5, "replay": replay}
        steps = stream_of("wise", model, tokenizer, EDIT_REQUESTS[:4] + EDIT_REQUESTS[:3], **settings)
        memory = MemoryBank.from_hook_edit(Delta.summed(steps).hook_edit, weight_of(model, steps[-1])).current
        recent = [prompt_distance(model, tokenizer, edit.text, memory, steps[-1]) for edit in EDIT_REQUESTS[:2]]
        distances.append(min(recent))
    assert distances[1] > distances[0] + 0.5


def test_a_stream_with_replay_goes_on_from_saved_steps(tmp_path):
    model, tokenizer = loaded("llama")
    requests = EDIT_REQUESTS[:4]
    steps = stream_of("wise", model, tokenizer, requests, **REPLAYED)
    again: list[Delta] = []
    for number, request in enumerate(requests):
        again += load_editor("wise", REPLAYED).edit(model, tokenizer, [request], history=again)
        again[-1].save(tmp_path / f"{number}.safetensors")
        again[-1] = Delta.load(tmp_path / f"{number}.safetensors")
    assert [step.checksum() for step in again] == [step.checksum() for step in steps]
    (last,) = load_editor("wise", REPLAYED).edit(model, tokenizer, requests[3:], history=[Delta.summed(steps[:3])])
    assert last.checksum() == steps[3].checksum()


def test_replay_is_refused_where_it_cannot_be_done():
    model, tokenizer = loaded("llama")
    with pytest.raises(EditingError, match="needs retrieve=true"):
        load_editor("wise", {**CONFIG, "replay": True, "retrieve": False})
    steps = stream_of("wise", model, tokenizer, EDIT_REQUESTS[:1], **CONFIG)
    with pytest.raises(EditingError, match="made with replay=false"):
        load_editor("wise", REPLAYED).edit(model, tokenizer, EDIT_REQUESTS[1:2], history=steps)
