"""Hook editors: nested scopes, batches and decoding on every family, and runs through ``edited_hf``.

The checks of every editor are in ``edit_hooks.contract``.
"""

from __future__ import annotations

import functools

import pytest
import torch
from hook_edits import EDIT_REQUESTS, SETTINGS, generate_item, loaded, make, nll, score_item, stream_of, texts
from lm_runs import BAKE, answers, assert_same_answers, build, case, instance, run
from paths import RECORDS
from state import assert_same_state, assert_same_state_but_seeds

from edit_hooks import Delta, EditingError, edited
from edit_hooks.answers import ScoredContinuation
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, save_tiny
from edit_hooks.inference.items import Limits
from edit_hooks.inference.reference import generate_reference, score_reference
from edit_hooks.inference.scoring import score

HOOK_EDITORS = [name for name in EDITORS if "hooks" in editor_class(name).writes]
each_editor = pytest.mark.parametrize("editor", HOOK_EDITORS)
ALIKE = ("defer", "melo")  # a codebook and a router, as GRACE has
in_the_harness = pytest.mark.parametrize(
    "editor", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in HOOK_EDITORS]
)
each_model = pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)


@functools.cache
def deltas_of(editor: str, model_type: str) -> tuple[Delta, ...]:
    """Independent edits of the four requests."""
    return tuple(make(editor).edit(*loaded(model_type), EDIT_REQUESTS))


def logprobs(scored: list[ScoredContinuation]) -> list[tuple[float, ...]]:
    return [answer.token_logprobs for answer in scored]


@each_editor
def test_scopes_nest(editor):
    """An inner edit is gone when its scope ends; the outer one acts again."""
    model, tokenizer = loaded("llama")
    first, second, *_ = deltas_of(editor, "llama")
    before = snapshot(model, tokenizer)
    prompt = torch.tensor([tokenizer(EDIT_REQUESTS[0].text)["input_ids"]])
    with torch.no_grad():
        plain = model(prompt).logits
        with edited(model, first):
            once = model(prompt).logits
            with edited(model, second):
                model(prompt)
            assert torch.equal(model(prompt).logits, once)
    assert not torch.equal(once, plain)
    assert_same_state(before, snapshot(model, tokenizer))


@each_editor
@each_model
def test_batches_equal_single_forward_passes(editor, model_type):
    """Right-padded batches of several edits and none, against one forward pass and one ``generate`` per item."""
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
    items = [(generate_item(tokenizer, request.text), delta) for request, delta in zip(requests, deltas, strict=True)]
    slow = [list(answer.token_ids) for answer in generate_reference(model, tokenizer, items, lambda count: None)]
    assert texts(model, tokenizer, items) == slow


@each_editor
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_cached_and_uncached_decoding_agree(editor, model_type):
    """A left-padded batch through the model's own ``generate``, with and without a cache, and our decoding loop."""
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
    for tokens, theirs in zip(ours, written[0], strict=True):
        length = next((index + 1 for index, token in enumerate(theirs) if token in ends), len(theirs))
        assert tokens == theirs[:length]


@each_editor
def test_both_engines_make_the_same_edit(editor):
    """In float64, where cached lower blocks and a full forward pass differ by rounding only."""
    model, tokenizer = loaded("llama", torch.float64)
    fast, plain = (
        make(editor, engine=engine).edit(model, tokenizer, EDIT_REQUESTS[:2]) for engine in ("fast", "reference")
    )
    for ours, theirs in zip(fast, plain, strict=True):
        for name, tensor in ours.hook_edit.tensors.items():
            torch.testing.assert_close(tensor, theirs.hook_edit.tensors[name], atol=1e-8, rtol=1e-8)


@each_editor
@pytest.mark.parametrize("made, applied", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_an_edit_acts_on_a_model_of_another_precision(editor, made, applied):
    """As a saved edit that is loaded with another ``dtype``; 1e-4 nats is float32's rounding over four blocks."""
    request = EDIT_REQUESTS[0]
    (delta,) = make(editor).edit(*loaded("llama", made), [request])
    own, other = (nll(*loaded("llama", dtype), request, delta) for dtype in (made, applied))
    unedited = nll(*loaded("llama", applied), request, None)
    assert other == pytest.approx(own, abs=1e-4) and abs(other - unedited) > 0.1
    item = (generate_item(loaded("llama")[1], request.text), delta)
    assert texts(*loaded("llama", applied), [item]) == texts(*loaded("llama", made), [item])


@each_editor
def test_earlier_edits_of_a_stream_survive(editor):
    """The sum of the steps answers as the steps applied one after another, in any grouping."""
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


@each_editor
def test_edits_that_do_not_go_on_from_one_another_are_refused(editor):
    """Of two independent edits the second would silently replace the first; so would a stream that lacks a step."""
    model, tokenizer = loaded("llama")
    first, second, *_ = deltas_of(editor, "llama")
    steps = stream_of(editor, model, tokenizer, EDIT_REQUESTS[:3])
    before = snapshot(model, tokenizer)
    for wrong in ([first, second], [steps[0], steps[2]], [Delta.summed(steps[:2]), second]):
        with pytest.raises(EditingError, match=r"do not go on from one another.*mode=sequential"):
            Delta.summed(wrong)
        with pytest.raises(EditingError, match="do not go on from one another"), edited(model, *wrong):
            pass
    assert_same_state(before, snapshot(model, tokenizer))


# -- through edited_hf -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@in_the_harness
def test_single_stream_and_groups_through_the_harness(editor, model_path):
    """A stream of one edit equals the single edit, both engines agree, and the model is restored."""
    options = {"editor": editor, "editor_args": SETTINGS[editor]}
    lm = build(model_path, **options)
    before = snapshot(lm.model)
    single = answers(run(lm, BAKE, limit=1))
    after = snapshot(lm.model)
    assert_same_state_but_seeds(before, after)  # the harness seeds
    assert all(answer.edit.editor == editor for answer in single)
    assert_same_answers(single, answers(run(build(model_path, engine="reference", **options), BAKE, limit=1)), 2e-3)
    stream = {"edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), **options}
    one = answers(run(build(model_path, mode="sequential", num_edits=1, **stream), ["bake_es"], limit=1))
    assert_same_answers(one, answers(run(build(model_path, **options), ["bake_es"], limit=1)))
    groups = build(model_path, mode="batch", group_size=2, num_edits=2, **stream)
    steps = build(model_path, mode="sequential", num_edits=2, **stream)
    assert_same_answers(answers(run(groups, ["bake_es"], limit=2)), answers(run(steps, ["bake_es"], limit=2)))
    if not editor_class(editor).supports_joint:
        with pytest.raises(EditingError, match="one request at a time"):
            build(model_path, mode="batch", **stream)


@in_the_harness
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
    (answer,) = again.loglikelihood([instance(doc, request.text, f" {request.target_new}")])
    assert stock[0][0] == pytest.approx(answer.final.logprob, abs=1e-4)
    assert stock[0][0] != pytest.approx(answer.final.unedited.logprob, abs=1e-2)
    settings = {"until": ["."], "max_gen_toks": 5}
    (text,) = again.generate_until([instance({}, request.text, dict(settings), "generate_until")])
    (written,) = again.generate_until([instance(doc, request.text, dict(settings), "generate_until")])
    assert text == written.final.raw.split(".")[0]
    saved = tmp_path / "sum.safetensors"
    Delta.summed(lm.session.stream.deltas).save(saved)
    loaded_lm = build(model_path, load_edit=str(saved), editor_args=None)
    (again_scored,) = loaded_lm.loglikelihood([instance(doc, request.text, f" {request.target_new}")])
    assert again_scored.final.logprob == pytest.approx(answer.final.logprob, abs=1e-4)
    assert loaded_lm.get_model_info()["edited_hf"]["editor_writes"] == ["hooks"]


@each_editor
def test_a_context_is_combined_with_hooks(editor, model_path):
    lm = build(model_path, editor=editor, editor_args=SETTINGS[editor], icl="fact")
    (answer,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    assert answer.final.context.facts == 1 and answer.edit.editor == f"{editor}+ice"
    assert lm.get_model_info()["edited_hf"]["editor_writes"] == ["hooks", "context"]
