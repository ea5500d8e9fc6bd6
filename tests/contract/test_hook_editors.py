"""Editors that act through hooks: what they promise on every family, while scoring, while decoding, and afterwards."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import pytest
import torch
from hook_edits import EDIT_REQUESTS, SETTINGS, generate_item, loaded, make, nll, score_item, stream_of, texts
from lm_runs import BAKE, answers, assert_same_answers, build, case, instance, run
from paths import RECORDS
from state import assert_same_state, snapshot
from tiny import ALL_MODEL_TYPES, build_model, build_tokenizer, save_tiny

from edit_hooks import Delta, EditingError, edited
from edit_hooks.answers import ScoredContinuation
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.deltas.export import export_merged, export_peft
from edit_hooks.deltas.forward_context import ForwardContext
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.inference.items import Limits
from edit_hooks.inference.reference import generate_reference, score_reference
from edit_hooks.inference.scoring import score

HOOKED = [name for name in EDITORS if "hooks" in editor_class(name).writes]
each_editor = pytest.mark.parametrize("editor", HOOKED)
each_model = pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@functools.cache
def deltas_of(editor: str, model_type: str, dtype: torch.dtype = torch.float32) -> tuple[Delta, ...]:
    return tuple(make(editor).edit(*loaded(model_type, dtype), EDIT_REQUESTS))


def logprobs(answers_: list[ScoredContinuation]) -> list[tuple[float, ...]]:
    return [answer.token_logprobs for answer in answers_]


# -- every hooked editor ---------------------------------------------------------------------------------------------


@each_editor
@pytest.mark.parametrize(
    ("model_type", "dtype"), [*((name, "float32") for name in ALL_MODEL_TYPES), ("llama", "bfloat16")]
)
def test_an_edit_works_inside_and_is_gone_outside(editor, model_type, dtype):
    """Making, applying (twice over) and leaving edits changes nothing; inside, the targets are likelier."""
    model, tokenizer = loaded(model_type, DTYPES[dtype])
    before = snapshot(model, tokenizer)
    deltas = deltas_of(editor, model_type, DTYPES[dtype])
    assert_same_state(before, snapshot(model, tokenizer))
    gains = []
    for request, delta in zip(EDIT_REQUESTS, deltas, strict=True):
        unedited, inside = nll(model, tokenizer, request, None), nll(model, tokenizer, request, delta)
        assert math.isfinite(inside) and abs(inside - unedited) > 1e-3
        assert nll(model, tokenizer, request, None) == unedited
        gains.append(unedited - inside)
    assert sum(gains) / len(gains) > 0.05
    prompt = torch.tensor([tokenizer(EDIT_REQUESTS[0].text)["input_ids"]])
    with torch.no_grad(), edited(model, deltas[0]):
        once = model(prompt).logits
        with edited(model, deltas[1]):
            model(prompt)
        assert torch.equal(model(prompt).logits, once)
    assert_same_state(before, snapshot(model, tokenizer))


@each_editor
@each_model
def test_all_ways_of_answering_agree(editor, model_type):
    """Batches of several edits and none, right-padded, against one plain forward, one plain generate at a time."""
    model, tokenizer = loaded(model_type)
    first, second, third, _ = deltas_of(editor, model_type)
    deltas = [first, None, second, first, third]
    requests = [EDIT_REQUESTS[number] for number in (0, 0, 1, 3, 2)]
    jobs = [(score_item(tokenizer, request), delta) for request, delta in zip(requests, deltas, strict=True)]
    fast = logprobs(score(model, jobs, Limits(), lambda count: None))
    small = logprobs(score(model, jobs, Limits(max_rows=2), lambda count: None))
    plain = logprobs(score_reference(model, jobs, lambda count: None))
    for ours, narrow, theirs in zip(fast, small, plain, strict=True):
        assert ours == pytest.approx(theirs, abs=2e-4) and narrow == pytest.approx(theirs, abs=2e-4)
    spoken = [(generate_item(tokenizer, request.text), delta) for request, delta in zip(requests, deltas, strict=True)]
    slow = [list(answer.token_ids) for answer in generate_reference(model, tokenizer, spoken, lambda count: None)]
    assert texts(model, tokenizer, spoken) == slow


@each_editor
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_cached_and_uncached_decoding_write_the_same(editor, model_type):
    """Left-padded batch through the model's own generate, with and without a cache; and our loop."""
    model, tokenizer = loaded(model_type)
    delta = deltas_of(editor, model_type)[0]
    prompts = [EDIT_REQUESTS[0].text, EDIT_REQUESTS[3].text, "The band"]
    rows = [tokenizer(text)["input_ids"] for text in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    written = []
    for use_cache in (True, False):
        with edited(model, delta, prompt_lengths=[len(row) for row in rows]):
            written.append(
                model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=8,
                    use_cache=use_cache,
                    eos_token_id=None,
                    pad_token_id=0,
                )[:, width:].tolist()
            )
    assert written[0] == written[1]
    ours = texts(model, tokenizer, [(generate_item(tokenizer, text), delta) for text in prompts])
    ends = {tokenizer.eos_token_id}
    for own, theirs in zip(ours, written[0], strict=True):
        stop = next((place + 1 for place, token in enumerate(theirs) if token in ends), len(theirs))
        assert own == theirs[:stop]


@each_editor
@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "phi3"])
def test_a_request_alone_equals_the_request_in_a_batch(editor, model_type):
    model, tokenizer = loaded(model_type)
    for request, together in zip(EDIT_REQUESTS[:2], deltas_of(editor, model_type), strict=False):
        (alone,) = make(editor).edit(model, tokenizer, [request])
        for name, tensor in alone.hook_edit.tensors.items():
            torch.testing.assert_close(tensor, together.hook_edit.tensors[name], atol=2e-4, rtol=2e-4)


@each_editor
def test_both_engines_make_the_same_edit(editor):
    """float64, where the kept lower blocks and the full forward differ by rounding only."""
    model, tokenizer = loaded("llama", torch.float64)
    fast, plain = (make(editor, engine=engine).edit(model, tokenizer, EDIT_REQUESTS[:2]) for engine in ENGINES)
    for ours, theirs in zip(fast, plain, strict=True):
        for name, tensor in ours.hook_edit.tensors.items():
            torch.testing.assert_close(tensor, theirs.hook_edit.tensors[name], atol=1e-8, rtol=1e-8)


ENGINES = ("fast", "reference")


@each_editor
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_everything_is_restored_after_an_exception(editor, error):
    model, tokenizer = loaded("llama")
    first, second, *_ = deltas_of(editor, "llama")
    before = snapshot(model, tokenizer)
    with pytest.raises(error), edited(model, first), edited(model, second):
        raise error
    assert_same_state(before, snapshot(model, tokenizer))

    def interrupt(*_: Any) -> None:
        raise error

    handle = model.get_output_embeddings().register_forward_hook(interrupt)
    with pytest.raises(error):
        make(editor).edit(model, tokenizer, EDIT_REQUESTS)
    with pytest.raises(error):
        score(model, [(score_item(tokenizer, EDIT_REQUESTS[0]), first)], Limits(), lambda count: None)
    handle.remove()
    assert_same_state(before, snapshot(model, tokenizer))


@each_editor
def test_a_training_model_is_edited_in_evaluation_mode_and_left_as_it_was(editor):
    model, tokenizer = build_model("gpt2"), build_tokenizer("byte_bpe")
    model.train()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    before = snapshot(model, tokenizer)
    with torch.no_grad():
        deltas = make(editor).edit(model, tokenizer, EDIT_REQUESTS)
    assert_same_state(before, snapshot(model, tokenizer))
    for ours, theirs in zip(deltas, deltas_of(editor, "gpt2"), strict=True):
        assert ours.checksum() == theirs.checksum()


@each_editor
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_delta_survives_the_disk_bit_for_bit(editor, dtype, tmp_path):
    model, tokenizer = loaded("llama", DTYPES[dtype])
    request, delta = EDIT_REQUESTS[0], deltas_of(editor, "llama", DTYPES[dtype])[0]
    delta.save(tmp_path / "delta.safetensors")
    again = Delta.load(tmp_path / "delta.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["delta.safetensors"]
    assert again.checksum() == delta.checksum() and again.hook_edit.settings == delta.hook_edit.settings
    assert nll(model, tokenizer, request, again) == nll(model, tokenizer, request, delta)
    json.dumps({"diagnostics": again.diagnostics, "meta": again.meta}, allow_nan=False)
    content = (tmp_path / "delta.safetensors").read_bytes()
    (tmp_path / "damaged.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(EditingError, match="damaged"):
        Delta.load(tmp_path / "damaged.safetensors")


@each_editor
def test_exports_and_other_models_are_refused(editor, tmp_path):
    model, tokenizer = loaded("llama")
    delta = deltas_of(editor, "llama")[0]
    with pytest.raises(EditingError, match="not all in the weights"):
        export_peft(delta, tmp_path / "adapter")
    with pytest.raises(EditingError, match="not all in the weights"):
        export_merged(model, tokenizer, delta, tmp_path / "merged")
    for other in (loaded("gpt2")[0], build_model("llama", hidden_size=48)):
        with pytest.raises(EditingError), edited(other, delta):
            pytest.fail("the scope was entered")
    with pytest.raises(EditingError, match="unknown kind"), edited(model, Delta(hook_edit=HookEdit("spell"))):
        pytest.fail("the scope was entered")
    with pytest.raises(EditingError, match="joint"):
        make(editor).edit(model, tokenizer, EDIT_REQUESTS, joint=True)
    with pytest.raises(EditingError, match="layer"):
        make(editor, layers=[0, 1])


@each_editor
def test_steps_of_a_stream_add_up_to_what_the_stream_holds(editor):
    """Earlier edits survive later ones, and the sum of the steps is the stream's state."""
    model, tokenizer = loaded("llama")
    steps = stream_of(editor, model, tokenizer, EDIT_REQUESTS)
    total = Delta.summed(steps)
    for request in EDIT_REQUESTS:
        assert nll(model, tokenizer, request, total) < nll(model, tokenizer, request, None) - 0.05
    item = score_item(tokenizer, EDIT_REQUESTS[1])
    with edited(model, *steps, prompt_lengths=[len(item.context)]), torch.no_grad():
        rows = model(torch.tensor([[*item.context, *item.continuation]])).logits[0].log_softmax(1)
    ours = [float(rows[len(item.context) - 1 + i, token]) for i, token in enumerate(item.continuation)]
    assert ours == pytest.approx(
        score(model, [(item, total)], Limits(), lambda count: None)[0].token_logprobs, abs=1e-4
    )
    again = Delta.summed([Delta.summed(steps[:2]), *steps[2:]])
    assert again.hook_edit.tensors.keys() == total.hook_edit.tensors.keys()
    assert all(torch.equal(again.hook_edit.tensors[name], tensor) for name, tensor in total.hook_edit.tensors.items())


# -- through edited_hf -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@each_editor
def test_single_stream_and_groups_through_the_harness(editor, model_path):
    """A stream of one edit is the single edit; both engines agree; the model is left as it was."""
    options = {"editor": editor, "editor_args": SETTINGS[editor]}
    lm = build(model_path, **options)
    before = snapshot(lm.model)
    single = answers(run(lm, BAKE, limit=1))
    after = snapshot(lm.model)
    before.pop("random state"), after.pop("random state")  # the harness seeds
    assert_same_state(before, after)
    assert all(answer.edit.editor == editor for answer in single)
    assert_same_answers(single, answers(run(build(model_path, engine="reference", **options), BAKE, limit=1)), 2e-3)
    stream = {"edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), **options}
    one = answers(run(build(model_path, mode="sequential", num_edits=1, **stream), ["bake_es"], limit=1))
    assert_same_answers(one, answers(run(build(model_path, **options), ["bake_es"], limit=1)))
    groups = build(model_path, mode="batch", group_size=2, num_edits=2, **stream)
    steps = build(model_path, mode="sequential", num_edits=2, **stream)
    assert_same_answers(answers(run(groups, ["bake_es"], limit=2)), answers(run(steps, ["bake_es"], limit=2)))
    with pytest.raises(EditingError, match="one request at a time"):
        build(model_path, mode="batch", **stream)


@each_editor
def test_a_stream_is_stored_resumed_and_answers_ordinary_tasks(editor, model_path, tmp_path, monkeypatch):
    options = {"editor": editor, "editor_args": SETTINGS[editor], "mode": "sequential", "num_edits": 3}
    options |= {"edits": "bake", "data": str(RECORDS / "bake_qa.jsonl")}
    lm = build(model_path, tmp_path, **options)
    first = answers(run(lm, ["bake_es"], limit=3))
    monkeypatch.setattr(editor_class(editor), "compute", lambda *a: pytest.fail("a stored step was made again"))
    again = build(model_path, tmp_path, **options)
    assert_same_answers(first, answers(run(again, ["bake_es"], limit=3)), 1e-6)
    request = lm.plan.groups[2][0]
    stock = again.loglikelihood([instance({}, request.text, f" {request.target_new}")])
    doc = {"edit_requests": [request.to_dict()], "ask_unedited": True, "case_id": "x"}
    (own,) = again.loglikelihood([instance(doc, request.text, f" {request.target_new}")])
    assert (
        stock[0][0] == pytest.approx(own.final.logprob, abs=1e-4) != pytest.approx(own.final.unedited.logprob, abs=1e-2)
    )
    settings = {"until": ["."], "max_gen_toks": 5}
    (text,) = again.generate_until([instance({}, request.text, dict(settings), "generate_until")])
    (told,) = again.generate_until([instance(doc, request.text, dict(settings), "generate_until")])
    assert text == told.final.raw.split(".")[0]
    saved = tmp_path / "sum.safetensors"
    Delta.summed(lm.session.stream.deltas).save(saved)
    kept = build(model_path, load_edit=str(saved), editor_args=None)
    (answer,) = kept.loglikelihood([instance(doc, request.text, f" {request.target_new}")])
    assert answer.final.logprob == pytest.approx(own.final.logprob, abs=1e-4)
    assert kept.get_model_info()["edited_hf"]["editor_writes"] == ["hooks"]


@each_editor
def test_a_context_on_top(editor, model_path):
    lm = build(model_path, editor=editor, editor_args=SETTINGS[editor], icl="fact")
    (answer,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    assert answer.final.context.facts == 1 and answer.edit.editor == f"{editor}+ice"
    assert lm.get_model_info()["edited_hf"]["editor_writes"] == ["hooks", "context"]


def test_two_memories_of_different_kinds_are_not_put_together():
    parts = [HookEdit("codebook", {}, {"module": "a"}), HookEdit("codebook", {}, {"module": "b"})]
    with pytest.raises(EditingError, match="cannot be put together"):
        HookEdit.combine(parts)


def test_passes_find_prompts_on_either_side_of_the_padding():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    now = ForwardContext.for_prefill(mask, torch.tensor([2, 3]))
    assert now.prompt_end_R.tolist() == [3, 2]
    assert now.prompt_RT.tolist() == [[False, False, True, True, False], [True, True, True, False, False]]
    with pytest.raises(EditingError, match="3 prompt lengths"):
        ForwardContext.for_prefill(mask, torch.tensor([1, 2, 3]))
    with pytest.raises(EditingError, match="longer than the rows"):
        ForwardContext.for_prefill(mask, torch.tensor([4, 4]))
