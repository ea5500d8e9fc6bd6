"""Long streams: constant state and time per step, killed and resumed, and a warning before memory runs out."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from paths import ROOT

from edit_hooks import edited
from edit_hooks.base.footprint import NOTHING_CARRIED
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.base.wrapping.wrapper import PostProcessingEditor
from edit_hooks.deltas import apply as apply_module
from edit_hooks.deltas.hook_edit import kind_class
from edit_hooks.lm.editing import memory_limit, stream_state
from edit_hooks.lm.editing import stream as stream_module
from edit_hooks.lm.editing.stream_state import GrowthWatch, StreamState
from edit_hooks.modeling.tensors import read_tensors
from edit_hooks.store.store import Store

CHECKSUM = apply_module.Delta.checksum
VALUES = torch.arange(64.0).reshape(2, 32)
KINDS = {
    "grace": "codebook",
    "neural_db": "residual_table",
    "memoir": "column_memory",
    "melo": "adapter_database",
    "wise": "side_memory",
    "defer": "gated_predictor",
}
EARLY, LATE = range(4, 7), range(25, 28)  # steps with the same targets, which take as many tokens
SCRIPT = ROOT / "scripts" / "perf" / "long_streams.py"


@pytest.fixture
def long_streams(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    yield importlib.import_module("long_streams")
    sys.modules.pop("long_streams", None)


def test_a_killed_stream_resumes_to_the_same_weights(long_streams, tmp_path, monkeypatch):
    """Ended after the switch from keys to their factor (beyond 32 of 64); the script itself ends by SIGKILL."""
    facts, steps = long_streams.requests(42), []

    def kill(pid, signal):
        steps.extend(tmp_path.rglob("*.safetensors"))
        raise KeyboardInterrupt

    monkeypatch.setattr(long_streams.os, "kill", kill)
    with pytest.raises(KeyboardInterrupt):
        long_streams.measure(long_streams.stream_of("alphaedit", long_streams.QUICK, facts, tmp_path), 7, kill_at=38)
    assert len(steps) == 38
    resumed, unbroken = (
        long_streams.stream_of("alphaedit", long_streams.QUICK, facts, store) for store in (tmp_path, None)
    )
    sections = long_streams.measure(resumed, 7)
    unbroken.make()
    assert resumed.final_state == unbroken.final_state
    assert "42 steps" in str(sections[-1])
    # 64 x 64 numbers and the ridge from the switch on; before it the keys
    assert [section.state for section in sections[5:]] == [8 * (64**2 + 1)] * 2
    assert [section.state for section in sections[:5]] == [6 * n * 64 * 4 for n in range(1, 6)]


@pytest.mark.parametrize(
    ("editor", "settings", "state"),
    [
        ("memit", {"carry_keys": True, "num_steps": 1, "layers": [1]}, 8 * (64**2 + 1)),
        ("memit", {"num_steps": 1, "layers": [1]}, 0),
        ("ultraedit", {}, None),
        ("ft_m", {"num_steps": 1}, 0),
        (
            "rect",
            {"layers": [1], "base_settings": {"num_steps": 1, "second_moments": None, "carry_keys": True}},
            8 * (64**2 + 1),
        ),
    ],
)
def test_the_state_of_a_long_stream_does_not_grow(editor, settings, state, long_streams, tmp_path, monkeypatch):
    """Finished steps leave memory for the store, and later passes read them there."""
    monkeypatch.setattr(memory_limit, "MOST_STREAM_EDITS", 2)
    monkeypatch.setattr(stream_module, "rebuilt", None)  # the state goes on from step to step
    num_steps = 36 if state else 12  # beyond 32 keys they become a factor
    stream = long_streams.stream_of(editor, settings, long_streams.requests(num_steps), tmp_path)
    sections = long_streams.measure(stream, 4)
    assert sections[-1].state == (sections[0].state if state is None else state)
    assert sum(1 for delta in stream.deltas if delta.num_bytes) == 2
    assert not any(delta.meta or delta.diagnostics for delta in stream.deltas[2:])
    assert stream.whole(10).parameter_names and stream.whole(10).meta["requests"]
    states = [stream.state_after(step) for step in range(num_steps)]
    stream.visit(lambda step, runtime_part: None)  # checks the fingerprint after every step
    assert [stream.state_after(step) for step in range(num_steps)] == states


@pytest.mark.parametrize("editor", KINDS)
def test_every_step_of_a_memory_takes_one_sum_of_two(editor, long_streams, monkeypatch):
    """What a step costs in bookkeeping does not grow with the steps before it, and the sum is that of all steps."""
    kind = kind_class(KINDS[editor])
    combine, terms = vars(kind)["combine"].__func__, []

    def counted(cls, steps):
        terms.append(len(steps))
        return combine(cls, steps)

    monkeypatch.setattr(kind, "combine", classmethod(counted))
    hashed = []
    monkeypatch.setattr(apply_module.Delta, "checksum", lambda delta: hashed.append(delta) or CHECKSUM(delta))
    stream = long_streams.stream_of(editor, long_streams.quick_settings(editor), long_streams.requests(5), None)
    stream.make()
    assert terms == [2] * 4
    (carried,) = stream._carried.history
    assert carried.hook_edit.settings["num_before"] == 0
    assert not any(delta.hook_edit is carried.hook_edit for delta in hashed)
    whole = combine(kind, [stream.whole(step).hook_edit for step in range(5)])
    assert whole.settings == carried.hook_edit.settings
    assert whole.tensors.keys() == carried.hook_edit.tensors.keys()
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, carried.hook_edit.tensors[name]), name


def calls_of(work: Callable[[], object]) -> int:
    """Number of calls, of Python and of C, that something takes; those of finalizers come at any time."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("editor", KINDS)
def test_an_edit_takes_as_many_operations_as_those_before_it(editor, long_streams):
    """No object is formed, copied or checked per past edit: not by the editor, the sum, the model, or a stored step."""
    stream = long_streams.stream_of(editor, long_streams.quick_settings(editor), long_streams.requests(38), None)
    model, made, history, sizes = stream.model, stream.editor, [], []
    ids = torch.tensor([stream.tokenizer("The home of Person 3 is")["input_ids"]])

    def edit(request):
        (delta,) = made.edit(model, stream.tokenizer, [request], history=history, measure=False)
        history[:] = made.condensed(model, [*history, delta])
        with torch.no_grad(), edited(model, *history):
            model(ids)
        sizes.append(delta.num_bytes)

    groups, counts = stream.plan.groups[10:], {}  # numbers of two digits
    for step, (request,) in enumerate(groups):
        if step in EARLY or step in LATE:
            counts[step] = calls_of(lambda request=request: edit(request))
        else:
            edit(request)
    # The fewest of some: the memory of a table grows now and then, and some steps change two entries. Prompts differ by
    # a few tokens; a single call per past edit would make it one per step between.
    assert min(counts[step] for step in LATE) < min(counts[step] for step in EARLY) + LATE[0] - EARLY[0]
    assert statistics.median(sizes) < 1.5 * sizes[0]


@pytest.mark.parametrize("editor", ["grace", "neural_db", "melo", "memoir"])
def test_the_rows_of_a_table_are_not_copied_with_every_step(editor, long_streams):
    stream = long_streams.stream_of(editor, long_streams.quick_settings(editor), long_streams.requests(14), None)
    name = {"grace": "keys", "neural_db": "keys", "melo": "up/0", "memoir": "masks"}[editor]
    places, sums = [], []

    def after(_step, runtime_part):
        sums.append(runtime_part.hook_edit)
        places.append(sums[-1].tensors[name].data_ptr())

    stream.visit(after)
    assert len(set(places)) <= 8 and places[-1] == places[-2]
    for step, (one, other) in enumerate(itertools.pairwise(sums), start=1):  # earlier sums stay as they are
        assert len(one.tensors[name]) == step and torch.equal(other.tensors[name][:step], one.tensors[name])


def test_given_values_are_counted_over_the_stream(long_streams):
    """GRACE counts by the edits of the codebook, since the history of a stream is one edit."""
    settings = {"layers": [1], "num_steps": 1, "lr": 1e-9, "value_init": "cold", "initial_values": {"values": VALUES}}
    stream = long_streams.stream_of("grace", settings, long_streams.requests(3), None)
    stream.make()
    (reason,) = stream.unusable.values()
    assert "this is edit 3 of its stream" in reason
    for step in range(2):
        assert torch.allclose(stream.whole(step).hook_edit.tensors["values"][-1], VALUES[step], atol=1e-6)


def test_a_state_that_an_interrupt_lost_is_made_again(long_streams, tmp_path, monkeypatch):
    """An interrupt can come between the line that keeps a step and the one that keeps the state after it."""
    facts = long_streams.requests(4)
    lost, unbroken = (long_streams.stream_of("alphaedit", long_streams.QUICK, facts, None) for _ in range(2))

    def stop(pid, signal):
        raise KeyboardInterrupt

    monkeypatch.setattr(long_streams.os, "kill", stop)
    with pytest.raises(KeyboardInterrupt):
        long_streams.measure(lost, 1, kill_at=3)
    lost._carried = StreamState()
    lost.make()
    unbroken.make()
    assert lost.final_state == unbroken.final_state and lost.carried_bytes == unbroken.carried_bytes == 4 * 64 * 4


def test_what_later_steps_need_is_in_the_stored_steps(long_streams, tmp_path):
    stream = long_streams.stream_of("alphaedit", long_streams.QUICK, long_streams.requests(2), tmp_path)
    stream.make()
    for path in tmp_path.rglob("*.safetensors"):
        _, tensors = read_tensors(path, "edit")
        assert tensors["carry/keys.layer1"].shape == (64, 1)  # its own key alone, never the factor


class Growing(StreamState):
    """A state of a given size."""

    num_bytes = 0


def carried(num_steps: int, num_bytes: int) -> StreamState:
    state = Growing(num_steps)
    object.__setattr__(state, "num_bytes", num_bytes)
    return state


# Editors that carry keys, and the wrappers whose base can; the base of simie carries nothing from step to step.
CARRY_KEYS = [
    *(name for name in EDITORS if "carry_keys" in {one.name for one in fields(editor_class(name).config_class)}),
    *(
        name
        for name in EDITORS
        if issubclass(editor_class(name), PostProcessingEditor)
        and editor_class(name).stream_growth != NOTHING_CARRIED
        and name != "simie"
    ),
]


@pytest.mark.parametrize("editor", CARRY_KEYS)
def test_a_fact_that_is_edited_again_after_a_resume_is_announced(editor, long_streams, tmp_path):
    settings = {"layers": [1], "num_steps": 1, "context_templates": ["{}"], "carry_keys": True}
    if issubclass(editor_class(editor), PostProcessingEditor):
        base = {name: settings[name] for name in ("num_steps", "carry_keys")}
        settings = {"layers": [1], "base": "memit", "base_settings": base}
    first, second = long_streams.requests(2)
    facts = [first, second, dataclasses.replace(first, target_new="Oslo")]
    long_streams.stream_of(editor, settings, facts[:2], tmp_path).make()
    resumed = long_streams.stream_of(editor, settings, facts, tmp_path)
    resumed.make()
    assert [any("edited again" in text for text in delta.warnings) for delta in resumed.deltas] == [False, False, True]


WILL_NEED = "GiB of memory"


@pytest.mark.parametrize(("bound", "free", "warns"), [(None, 10**6, True), (None, 10**9, False), (10**6, 10**6, False)])
def test_a_stream_that_will_not_fit_is_announced_early(bound, free, warns, caplog, monkeypatch, tmp_path):
    """1 kB per step and 100 kB from the first on: 10,000 steps need 10 MB more."""
    monkeypatch.setattr(stream_state, "free_bytes", lambda device: free)
    monkeypatch.setattr(Store, "_free_bytes", lambda store: None)
    watch = GrowthWatch("grace", 10_000, bound, Store(tmp_path))
    for step in range(1, 200):
        watch.check_store(step, 10**9)
        watch.check(carried(step, 100_000 + 1000 * step), 0)
    messages = [record.getMessage() for record in caplog.records if WILL_NEED in record.getMessage()]
    assert len(messages) == warns
    if warns:
        assert "the stream of grace" in messages[0] and "after 16 of 10000 steps" in messages[0]


@pytest.mark.parametrize("stores", [True, False])
def test_steps_that_stay_in_memory_are_counted(stores, caplog, monkeypatch, tmp_path):
    """1 GB per step, with 300 GB free: memory holds 256 MiB of those that a store has, and all without one."""
    monkeypatch.setattr(stream_state, "free_bytes", lambda device: 3 * 10**11)
    watch = GrowthWatch("ft_m", 10_000, 0, Store(tmp_path) if stores else None)
    for step in range(1, 40):
        watch.check(carried(step, 0), 2**28 if stores else 10**9 * step)
    messages = [record.getMessage() for record in caplog.records if WILL_NEED in record.getMessage()]
    assert len(messages) == (not stores)
    assert stores or "without store=off" in messages[0]


def test_a_stream_that_the_disk_cannot_hold_is_announced_once(caplog, monkeypatch, tmp_path):
    """And its later steps stay in memory, which is then too small, too."""
    monkeypatch.setattr(Store, "_free_bytes", lambda store: 10**9)
    monkeypatch.setattr(stream_state, "free_bytes", lambda device: 10**9)
    watch = GrowthWatch("ft_m", 1000, 0, Store(tmp_path))
    for step in range(1, 40):
        watch.check_store(step, 10**7)
        watch.check(carried(step, 0), 10**7 * step)
    disk, memory = (
        [record.getMessage() for record in caplog.records if words in record.getMessage()]
        for words in ("has room for", WILL_NEED)
    )
    assert len(disk) == len(memory) == 1 and "992 edits" in disk[0]


def test_a_machine_that_does_not_report_its_memory_is_not_warned_about(monkeypatch, caplog):
    monkeypatch.setattr(stream_state, "free_bytes", lambda device: None)
    watch = GrowthWatch("grace", 10_000, None, None)
    for step in range(1, 64):
        watch.check(carried(step, 10**9 * step), 0)
    assert not [record for record in caplog.records if WILL_NEED in record.getMessage()]


def test_a_stream_asks_for_its_disk_where_it_makes_steps(long_streams, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(Store, "expect", lambda store, count, size: asked.append((count, size)) or True)
    for _ in range(2):  # the second pass loads them
        long_streams.stream_of("grace", long_streams.quick_settings("grace"), long_streams.requests(9), tmp_path).make()
    assert asked == [(1, 4 * (64 + 32 + 1) + 8)]
