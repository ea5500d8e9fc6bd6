"""Decoding in slots, the way of a GPU, on the CPU: the tokens of the CPU's own way, and what the slots do.

tests/end_to_end/test_cuda_decoding.py compares both on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from host_reads import HostReads
from inference_cases import PROMPTS, edits, model_and_tokenizer
from recorded_operations import recorded_on_a_cpu
from value_problems import each_model

from edit_hooks.answers import GeneratedText
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.decoding import Sampling
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.inference import batching
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.generation import slots
from edit_hooks.inference.items import GenerateItem, Limits
from edit_hooks.modeling.device import run_ahead

Jobs = list[tuple[GenerateItem, Delta | None]]
FOUR_SLOTS = Limits(4096, 4)
LENGTHS = [(4, 9), (11, 3), (30, 20), (2, 15), (17, 1), (8, 30), (5, 12), (3, 3), (9, 4)]  # of prompt and answer


def random_items(vocabulary: int, **more: object) -> list[GenerateItem]:
    generator = torch.Generator().manual_seed(1)
    contexts = [tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist()) for length, _ in LENGTHS]
    return [
        GenerateItem(ids, (), most, ignore_end=True, **more) for ids, (_, most) in zip(contexts, LENGTHS, strict=True)
    ]


def on_cpu(model, tokenizer, jobs: Jobs) -> list[GeneratedText]:
    assert not slots.uses_slots(model, None)
    return generate(model, tokenizer, jobs, Limits(), lambda count: None)


@pytest.fixture
def in_slots(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[GeneratedText], list[int]]]:
    """Decode in slots; the answers and the number of slots of every step."""

    def decode(model, tokenizer, jobs: Jobs, limits: Limits = FOUR_SLOTS) -> tuple[list[GeneratedText], list[int]]:
        step, sizes, answered = slots._SlotBatch.step, [], []

        def counted(self: slots._SlotBatch, edits: object) -> torch.Tensor:
            sizes.append(len(self.ids_B))
            return step(self, edits)

        with monkeypatch.context() as patch:
            patch.setattr(run_ahead, "KINDS", {"cpu"})
            patch.setattr(slots._SlotBatch, "step", counted)
            answers = generate(model, tokenizer, jobs, limits, answered.append)
        assert sum(answered) == len(jobs)
        return answers, sizes

    return decode


@each_model
def test_every_family_writes_the_same_tokens(model_type: str, in_slots) -> None:
    """More items than slots, of prompts and answers on both sides of sliding windows."""
    model, tokenizer = build_model(model_type), build_tokenizer("byte_bpe_bos")
    jobs: Jobs = [(item, None) for item in random_items(model.get_input_embeddings().weight.shape[0])]
    found, sizes = in_slots(model, tokenizer, jobs)
    assert found == on_cpu(model, tokenizer, jobs)
    assert max(sizes) == 4 and sizes[-1] < 4, "slots that nothing needs are given up"
    answer_tokens = sum(most for _, most in LENGTHS)
    assert sum(sizes) < answer_tokens + 4 * max(most for _, most in LENGTHS), "rows that have ended are refilled"


@pytest.mark.parametrize(
    ("stops", "limits"), [((), Limits(64, 1)), (("e", "zzz"), FOUR_SLOTS), (("e",), Limits(128, 99))]
)
def test_rows_of_other_edits_stops_and_ends(stops: tuple[str, ...], limits: Limits, in_slots, monkeypatch) -> None:
    model, tokenizer = model_and_tokenizer()
    items = [GenerateItem(tuple(tokenizer(prompt)["input_ids"]), stops, 12) for prompt in PROMPTS]
    jobs: Jobs = [(item, delta) for item in items for delta in edits(model).values()]
    (first, *_) = on_cpu(model, tokenizer, jobs)
    for ends in ([0], [0, first.token_ids[2]]):
        monkeypatch.setattr(model.generation_config, "eos_token_id", ends)
        found, sizes = in_slots(model, tokenizer, jobs, limits)
        assert found == on_cpu(model, tokenizer, jobs) and sizes
    assert "eos" in {answer.stop for answer in found}


def test_tokens_that_the_processor_decides(in_slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws, given targets and a checkpoint's rule, beside items that need none."""
    model, tokenizer = model_and_tokenizer()
    plain, *others = random_items(500)
    drawn = [replace(item, sampling=Sampling(seed=3, draw=draw)) for draw, item in enumerate(others[:3])]
    target = tuple(range(7, 7 + others[3].max_new_tokens))
    forced = replace(others[3], target=target, forced=True)
    low_rank = edits(model)["first"]
    jobs: Jobs = [(item, delta) for item in (plain, *drawn, forced, *others[4:]) for delta in (None, low_rank)]
    assert in_slots(model, tokenizer, jobs)[0] == on_cpu(model, tokenizer, jobs)
    monkeypatch.setattr(model.generation_config, "no_repeat_ngram_size", 2)
    assert in_slots(model, tokenizer, jobs)[0] == on_cpu(model, tokenizer, jobs)


def test_shared_beginnings_and_thoughts(in_slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "MIN_SHARED_TOKENS", 8)
    model, tokenizer = model_and_tokenizer()
    beginning = tuple(range(5, 25))
    items = [replace(item, context=beginning + item.context) for item in random_items(500)]
    items += [replace(item, think_end=int(item.context[-1]), max_thought_tokens=5) for item in items[:3]]
    jobs: Jobs = [(item, delta) for item in items for delta in (None, edits(model)["first"])]
    assert in_slots(model, tokenizer, jobs)[0] == on_cpu(model, tokenizer, jobs)


def test_logits_without_a_token(in_slots) -> None:
    """Infinite weights: the row ends, and no token beyond the vocabulary is read meanwhile."""
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    name = "model.layers.1.mlp.down_proj.weight"
    broken = Delta(dense={name: torch.full_like(model.get_parameter(name), torch.inf)})
    items = random_items(500)
    jobs: Jobs = [(item, delta) for item in items[:2] for delta in (None, broken)]
    found, _ = in_slots(model, tokenizer, jobs)
    assert found == on_cpu(model, tokenizer, jobs) and found[1].stop == "not_finite"


def test_a_broken_edit_leaves_nothing_in_its_slots(in_slots) -> None:
    """NaN in keys and values behind a shorter text would reach it, though its mask hides them."""
    model, tokenizer = model_and_tokenizer()
    good = edits(model)["first"]
    broken = Delta(
        factors={
            name: factor._replace(left=torch.full_like(factor.left, torch.inf)) for name, factor in good.factors.items()
        }
    )
    short, *_, long = sorted(random_items(500), key=lambda item: len(item.context))
    jobs: Jobs = [(long, broken)] * 4 + [(short, good), (short, None)] * 2
    found, _ = in_slots(model, tokenizer, jobs)
    assert found == on_cpu(model, tokenizer, jobs)
    assert [answer.stop for answer in found] == ["not_finite"] * 4 + ["length"] * 4


def test_caches_have_few_sizes_and_room_for_every_token(in_slots) -> None:
    """Also for texts that fill their columns, and those that ask for no token and get one."""
    sizes = [slots._bucket(columns) for columns in range(1, 5000)]
    assert all(columns <= size <= max(columns + 63, 1.25 * columns) for columns, size in enumerate(sizes, 1))
    assert len({*sizes}) < 30
    model, tokenizer = model_and_tokenizer()
    items = [
        GenerateItem(tuple(range(5, 5 + length)), (), most) for length, most in [(64, 0), (63, 1), (40, 24), (65, 63)]
    ]
    jobs: Jobs = [(item, None) for item in items]
    assert in_slots(model, tokenizer, jobs)[0] == on_cpu(model, tokenizer, jobs)


def test_short_memory_takes_fewer_slots(in_slots, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    """Answers that were finished are kept; the others, drawn ones too, begin again."""
    model, tokenizer = model_and_tokenizer()
    items = random_items(500)
    items += [replace(item, sampling=Sampling(seed=1, draw=0)) for item in items]
    jobs: Jobs = [(item, None) for item in items]
    expected = on_cpu(model, tokenizer, jobs)
    step, steps = slots._SlotBatch.step, 0

    def failing(self: slots._SlotBatch, edits: object) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps > 6 and len(self.ids_B) > 2:
            raise torch.OutOfMemoryError("no room")
        return step(self, edits)

    monkeypatch.setattr(slots._SlotBatch, "step", failing)
    with caplog.at_level(logging.WARNING, logger="lm_eval.edited_hf"):
        found, _ = in_slots(model, tokenizer, jobs)
    assert found == expected
    assert "2 at a time" in caplog.text and "1 at a time" not in caplog.text


def test_other_models_and_hook_edits_decode_without_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_ahead, "KINDS", {"cpu"})
    model, _ = model_and_tokenizer()
    assert slots.uses_slots(model, None) and slots.uses_slots(model, edits(model)["dense"])
    assert not slots.uses_slots(model, Delta(hook_edit=HookEdit("codebook", {}, {"module": "model"})))
    other = build_model("llama")
    monkeypatch.setattr(slots._SlotBatch, "_masks", lambda self: torch.zeros(2, 1, 1, self.columns))
    with caplog.at_level(logging.INFO, logger="lm_eval.edited_hf"):
        assert not slots.uses_slots(other, None) and not slots.uses_slots(other, None)
    assert caplog.text.count("decodes without slots: its logits are others there") == 1


def test_recorded_steps_write_the_same_tokens(in_slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bare and dense edits replay; batches of one shape share a recording, across refills, edits and calls."""
    model, tokenizer = build_model("gemma3_text"), build_tokenizer("byte_bpe_bos")  # two kinds of masks
    items = random_items(model.get_input_embeddings().weight.shape[0])
    dense = [edit for name, edit in edits(model).items() if name in ("none", "dense")]
    jobs: Jobs = [(item, edit) for edit in dense for item in items]
    low_rank: Jobs = [(item, edits(model)["first"]) for item in items]
    expected, expected_low_rank = on_cpu(model, tokenizer, jobs), on_cpu(model, tokenizer, low_rank)
    with recorded_on_a_cpu() as recorder:
        assert in_slots(model, tokenizer, jobs)[0] == expected
        assert recorder.num_replays > 20
        captures = recorder.num_captures
        assert 0 < captures <= 3, "of four, two and one slots"
        assert in_slots(model, tokenizer, jobs[::-1])[0] == expected[::-1] and recorder.num_captures == captures
        replays = recorder.num_replays
        assert in_slots(model, tokenizer, low_rank)[0] == expected_low_rank
        assert recorder.num_replays == replays, "edits beside the weights are not recorded"
    with recorded_on_a_cpu(RuntimeError("no graph")):
        assert in_slots(model, tokenizer, jobs)[0] == expected
    monkeypatch.setattr(slots, "MOST_RECORDED_BYTES", 1)
    with recorded_on_a_cpu() as recorder:
        assert in_slots(model, tokenizer, jobs)[0] == expected and recorder.num_captures == 0


def test_steps_do_not_wait_for_the_host(in_slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """No value of a step is read on the host, and nothing is copied from it, under edits of all rows."""
    model, tokenizer = model_and_tokenizer()
    jobs: Jobs = [(item, edits(model)["first"]) for item in random_items(500)]
    found: list[str] = []
    advance = slots._SlotBatch.advance

    def watched(self: slots._SlotBatch, *args: object) -> torch.Tensor:
        with HostReads(of_cpu=True) as reads:
            tokens_B = advance(self, *args)
        # where the rows of each edit are is uploaded in the first step after a refill
        found.extend(read for read in reads.found if "lift_fresh at " not in read or "row_adapters.py" not in read)
        return tokens_B

    monkeypatch.setattr(slots._SlotBatch, "advance", watched)
    assert in_slots(model, tokenizer, jobs)[1] and not found, found[:3]
