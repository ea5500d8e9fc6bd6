"""Streams: stored, resumed bit for bit, undone, guarded; a stream of one edit equals the single edit."""

from __future__ import annotations

import pytest
import torch
from editor_settings import FT_CONFIG, LORA_CONFIG, MEND_CONFIG
from state import assert_same_state

from edit_hooks import EditingError, EditRequest, StreamGrowth, load_editor
from edit_hooks.base.registry import editor_class
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import EDIT_LAYER, REQUESTS
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.edit_report import Effects
from edit_hooks.lm.editing.joint import write_together
from edit_hooks.lm.editing.memory_limit import LargeEdits
from edit_hooks.lm.editing.stream import PROBE_TEXT, EditStream, Guard
from edit_hooks.lm.editing.unusable import edit_usable
from edit_hooks.lm.options.plan import EditPlan, chunked
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.store.store import Store
from edit_hooks.utils.storage.hashing import code_fingerprint

EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]
SETTINGS = {"ft_l": FT_CONFIG, "kn": {"layers": [EDIT_LAYER]}, "lora": LORA_CONFIG, "mend": MEND_CONFIG}
SMALL_ROME = {"context_templates": ["{}"], "num_steps": 3}


def stream(model, tokenizer, editor, size, store):
    return stream_of(model, tokenizer, load_editor(editor, SETTINGS[editor]), size, store)


def stream_of(model, tokenizer, editor, size=1, store=None, cases=None):
    """A stream of cases, by default of one request each."""
    cases = cases or [(request,) for request in EDIT_REQUESTS]
    plan = EditPlan(chunked(cases, size, cumulative=True), cumulative=True)
    return EditStream(model, tokenizer, editor, plan, store, model_identity(model, tokenizer), Guard(), quiet=True)


@pytest.mark.parametrize(
    ("editor", "size"), [("ft_l", 1), ("ft_l", 4), ("kn", 1), ("lora", 1), ("lora", 2), ("mend", 3)]
)
def test_a_stream_repeats_and_resumes_bit_for_bit(editor, size, tiny_model, tiny_tokenizer, tmp_path):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    before = snapshot(model, tokenizer)
    logits = []
    ids = torch.tensor([tokenizer(EDIT_REQUESTS[0].text)["input_ids"]])

    def record_logits(step, runtime_part):
        with torch.no_grad():
            logits.append(model(ids).logits)

    first = stream(model, tokenizer, editor, size, Store(tmp_path))
    first.visit(record_logits)
    steps = len(logits)
    assert steps == -(-len(EDIT_REQUESTS) // size)
    resumed = stream(model, tokenizer, editor, size, Store(tmp_path))  # from the store
    resumed.visit(record_logits)
    fresh = stream(model, tokenizer, editor, size, None)
    fresh.visit(record_logits)
    for start in (steps, 2 * steps):
        for ours, theirs in zip(logits[start : start + steps], logits[:steps], strict=True):
            assert torch.equal(ours, theirs)
    assert first.final_state == resumed.final_state == fresh.final_state
    assert_same_state(before, snapshot(model, tokenizer))


@pytest.mark.parametrize("editor", sorted(SETTINGS))
def test_a_stream_of_one_edit_is_the_single_edit(editor, tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    (single,) = load_editor(editor, SETTINGS[editor]).edit(model, tokenizer, EDIT_REQUESTS[:1])
    one = stream(model, tokenizer, editor, 1, None)
    one.visit(lambda step, runtime_part: None)
    assert isinstance(one.deltas[0], Delta)
    for name, update in single.weights().items():
        torch.testing.assert_close(one.deltas[0].weights()[name], update, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("editor", "settings"),
    [
        ("rome", SMALL_ROME),
        ("simie", {"base": "rome", "base_settings": SMALL_ROME, "ridge": 0.1}),
        ("simie", {"base": "rome", "base_settings": SMALL_ROME, "ridge": 0.1, "base_weights": "running"}),
        # restrained at every step
        (
            "prune",
            {"base": "rome", "base_settings": {**SMALL_ROME, "lr": 5.0, "clamp_factor": 100}, "function": "linear"},
        ),
        ("prune", {"base": "kn", "layers": [EDIT_LAYER]}),
    ],
)
def test_the_edits_of_a_case_are_steps_to_later_ones(editor, settings, tiny_model, tiny_tokenizer, tmp_path):
    """An editor that writes one request at a time finds the state of each in the history, also from the store."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    apart = stream_of(model, tokenizer, load_editor(editor, settings))
    apart.make()
    first, second, *others = EDIT_REQUESTS
    cases = [(first, second), *((request,) for request in others)]
    for _ in ("made", "from the store"):
        together = stream_of(model, tokenizer, load_editor(editor, settings), store=Store(tmp_path), cases=cases)
        together.make()
        assert not together.unusable and together.num_steps == len(EDIT_REQUESTS) - 1
        for ours, expected in zip(together.deltas[1:], apart.deltas[2:], strict=True):
            assert ours.writes == expected.writes
            assert ours.stream_state.keys() == expected.stream_state.keys()
            for name, update in expected.weights().items():
                torch.testing.assert_close(ours.weights()[name], update, atol=1e-4, rtol=1e-3)
        total, expected = (Delta.summed(one.deltas).weights() for one in (together, apart))
        for name, update in expected.items():
            torch.testing.assert_close(total[name], update, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["step", "step/keys", "step/0"])
def test_an_editor_names_its_state_as_it_likes(name, tiny_model, tiny_tokenizer):
    """The steps of a case are known by the metadata of their sum, not by names."""

    class Own(editor_class("rome")):
        stream_growth = StreamGrowth("a number", "no")

        def compute(self, job):
            assert all(delta.stream_state.keys() == {name} for delta in job.history)
            deltas = super().compute(job)
            for delta in deltas:
                delta.stream_state[name] = torch.ones(1)
            return deltas

    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    first, second, *others = EDIT_REQUESTS
    for cases in ([(request,) for request in EDIT_REQUESTS], [(first, second), *((one,) for one in others)]):
        stream = stream_of(model, tokenizer, Own(SMALL_ROME), cases=cases)
        stream.make()
        assert not stream.unusable and all(delta.writes for delta in stream.deltas)


def test_the_code_that_writes_a_case_is_in_the_keys_of_its_step_and_of_later_ones(tiny_model, tiny_tokenizer):
    model, tokenizer, editor = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"), load_editor("rome", SMALL_ROME)
    first, second, third, *_ = EDIT_REQUESTS
    made = stream_of(model, tokenizer, editor, cases=[(first,), (second, third), (EDIT_REQUESTS[3],)])
    made.make()
    alone = code_fingerprint(*editor.source_modules, AppliedDeltas.__module__)
    together = code_fingerprint(
        *editor.source_modules, AppliedDeltas.__module__, write_together.__module__, edit_usable.__module__
    )
    assert [delta.meta["description"]["code"] for delta in made.deltas] == [alone, together, together]


def test_an_interrupted_pass_can_be_repeated(tiny_model, tiny_tokenizer, monkeypatch):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    before = snapshot(model, tokenizer)
    repeated = stream(model, tokenizer, "ft_l", 1, None)
    probe, calls = EditStream._probe, []

    def fail_once(self):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return probe(self)

    monkeypatch.setattr(EditStream, "_probe", fail_once)
    with pytest.raises(KeyboardInterrupt):
        repeated.make()
    assert_same_state(before, snapshot(model, tokenizer))
    repeated.make()
    undisturbed = stream(model, tokenizer, "ft_l", 1, None)
    undisturbed.make()
    assert len(repeated.reports) == len(repeated.deltas) == len(EDIT_REQUESTS)
    assert repeated.final_state == undisturbed.final_state


def test_a_step_interrupted_after_its_record_has_one_record(tiny_model, tiny_tokenizer, monkeypatch):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    repeated = stream(model, tokenizer, "ft_l", 1, None)
    repeated.guard = Guard("stop", max_norm_ratio=1e-9)  # the first step is beyond it
    kept, calls = LargeEdits.kept, []

    def fail_once(self, *arguments):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return kept(self, *arguments)

    monkeypatch.setattr(LargeEdits, "kept", fail_once)
    with pytest.raises(KeyboardInterrupt):
        repeated.make()
    repeated.make()
    assert [report.step.step for report in repeated.reports] == [0]
    assert len(repeated.deltas) == 1 and repeated.edits_after(0) == 1


def test_editors_of_single_requests_are_refused_for_larger_steps(tiny_model, tiny_tokenizer):
    with pytest.raises(EditingError, match="writes one request at a time, the plan has steps of 2"):
        EditStream(
            tiny_model("llama"),
            tiny_tokenizer("byte_bpe_bos"),
            load_editor("rome"),
            EditPlan(chunked([(request,) for request in EDIT_REQUESTS], 2, cumulative=True), cumulative=True),
            None,
            model_identity(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")),
            Guard(),
        )


@pytest.mark.parametrize(
    ("change", "loss_before", "complaint"),
    [
        ({}, 2.0, None),
        ({"finite": False}, 2.0, "logits are not finite"),
        ({"norm_ratio": 1.5}, 2.0, "moved by 1.50 of their norm"),
        ({"probe_loss": 5.5}, 2.0, "rose from 2.00 to 5.50"),
        ({"probe_loss": 5.5}, 5.0, None),  # of a model that is bad at the sentence anyway
        ({"probe_loss": 5.5}, 7.0, None),
    ],
)
def test_the_guard_names_what_diverges(change, loss_before, complaint):
    now = {"finite": True, "norm_ratio": 0.5, "probe_loss": 3.0, **change}
    message = Guard().complaint(now["norm_ratio"], (loss_before, now["probe_loss"]), now["finite"], Effects())
    assert message is None if complaint is None else complaint in message


def test_the_loss_of_the_plain_sentence_is_that_of_every_next_token(tiny_model, tiny_tokenizer):
    """Under the edits so far: each token after the first, predicted from those before it."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    ids = tokenizer(PROBE_TEXT)["input_ids"]
    by_hand = []

    def read_loss(step, runtime_part):
        with torch.no_grad():
            logprob_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        nll = [-float(logprob_TV[position, token]) for position, token in enumerate(ids[1:])]
        by_hand.append(sum(nll) / len(nll))

    read_loss(-1, None)
    edits = stream(model, tokenizer, "ft_l", 1, None)
    assert edits._unedited_loss == pytest.approx(by_hand.pop(), abs=1e-4)
    edits.visit(read_loss)
    assert [report.step.probe_loss for report in edits.reports] == pytest.approx(by_hand, abs=1e-4)
    assert max(by_hand) - min(by_hand) > 0.01
