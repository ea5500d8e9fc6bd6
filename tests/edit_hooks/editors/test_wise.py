"""WISE's own rules: what an edit may change, who is routed where, when memories are stored and merged."""

from __future__ import annotations

import contextlib
import functools
import json

import pytest
import torch
from hook_edits import EDIT_REQUESTS, SETTINGS, loaded, nll, prompt_distance, score_item, stream_of, weight_of
from model_shapes import MODELS, model_like

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import NUM_LAYERS
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.editors.wise import WISEConfig, training_rows
from edit_hooks.inference.items import Limits
from edit_hooks.inference.scoring import score
from edit_hooks.locate.context_templates import sample_templates
from edit_hooks.memory import side_memory
from edit_hooks.memory.replay import mean_positive
from edit_hooks.memory.side_memory import Memory, MemoryBank
from edit_hooks.prompt_context import qa_context

FAR = "Water freezes at zero degrees and boils at"
CONFIG = SETTINGS["wise"]


@functools.cache
def single(model_type: str, **overrides) -> Delta:
    model, tokenizer = loaded(model_type)
    (delta,) = load_editor("wise", {**CONFIG, **overrides}).edit(model, tokenizer, EDIT_REQUESTS[:1])
    return delta


def forced(model, delta: Delta, memory: Memory | None, stored: list[Memory] = ()) -> Delta:
    """A delta with given memories and otherwise the settings of another one."""
    bank = MemoryBank(memory, list(stored), 1, 9)
    numbers = {memory.number for memory in bank.memories}
    return Delta(hook_edit=bank.to_hook_edit(delta.hook_edit.settings, numbers))


# -- what an edit changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "llama"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_gradient_changes_entries_of_the_mask_only_and_all_stay_in_the_ball(model_type, weight_decay):
    model, _ = loaded(model_type)
    radius = 0.01
    delta = single(model_type, norm_constraint=radius, num_steps=4, weight_decay=weight_decay)
    weight = weight_of(model, delta)
    memory = MemoryBank.from_hook_edit(delta.hook_edit, weight).current
    shrunk = (-weight * (1 - (1 - 0.3 * weight_decay) ** 4)).clamp(-radius, radius)  # lr 0.3
    torch.testing.assert_close(memory.change[~memory.mask], shrunk[~memory.mask])
    assert bool((shrunk.abs() == radius).any()) == bool(weight_decay)
    assert 0 < float(memory.change.abs().max()) <= radius
    assert 0.4 < float(memory.mask.float().mean()) < 0.6  # mask_ratio 0.5


def test_the_mask_has_the_given_share_of_the_entries():
    model, _ = loaded("llama")
    delta = single("llama", mask_ratio=0.2, weight_decay=0.0)
    memory = MemoryBank.from_hook_edit(delta.hook_edit, weight_of(model, delta)).current
    assert 0.17 < float(memory.mask.float().mean()) < 0.23
    assert 0 < torch.count_nonzero(memory.change) <= torch.count_nonzero(memory.mask)


@pytest.mark.parametrize("decayed", ["all", "trained"])
def test_weight_decay_shrinks_every_entry_as_released_or_the_trained_ones(decayed):
    model, _ = loaded("llama")
    settings = {"num_steps": 1, "decayed_entries": decayed}
    shrunk, plain = (single("llama", weight_decay=decay, **settings) for decay in (0.1, 0.0))
    first, second = (MemoryBank.from_hook_edit(d.hook_edit, weight_of(model, d)).current for d in (shrunk, plain))
    expected = -0.3 * 0.1 * weight_of(model, plain) * (first.mask if decayed == "trained" else 1)  # lr 0.3
    torch.testing.assert_close(first.change - second.change, expected, atol=1e-5, rtol=1e-4)


def test_weight_decay_continues_in_the_next_edit_and_restarts_in_the_next_memory():
    model, tokenizer = loaded("llama")
    settings = {**CONFIG, "num_steps": 2, "weight_decay": 0.01, "save_every": 2, "merge_every": 100}
    steps = stream_of("wise", model, tokenizer, EDIT_REQUESTS[:3], **settings)
    for delta, num_steps in zip(steps, (2, 4, 2), strict=True):
        combined = HookEdit.combine([step.hook_edit for step in steps[: steps.index(delta) + 1]])
        memory = MemoryBank.from_hook_edit(combined, weight_of(model, delta)).memories[0]
        assert memory.shrink == pytest.approx(1 - (1 - 0.3 * 0.01) ** num_steps)


def test_a_run_makes_one_step_after_two_small_losses_that_hardly_differ(monkeypatch):
    """The release stops on the losses that a step followed, so the evaluation at the stop is a third one."""
    monkeypatch.setattr("edit_hooks.editors.wise.STOP_LOSS", 1e3)
    monkeypatch.setattr("edit_hooks.editors.wise.STOP_CHANGE", 1e3)
    model, tokenizer = loaded("llama")
    (delta,) = load_editor("wise", CONFIG).edit(model, tokenizer, EDIT_REQUESTS[:1])
    assert (len(delta.diagnostics["losses"]), delta.diagnostics["steps"]) == (3, 2)
    assert delta.diagnostics["stop_reason"] == "loss"


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_the_fast_engine_makes_the_same_edit_in_every_block(layer):
    """Also in the last one, where labels need few positions but distances all of them."""
    model, tokenizer = loaded("llama")
    settings = {**CONFIG, "layers": [layer]}
    (fast,), (plain,) = (
        load_editor("wise", {**settings, "engine": engine}).edit(model, tokenizer, EDIT_REQUESTS[:1])
        for engine in ("fast", "reference")
    )
    for name in ("distance_in", "distance_out", "final_loss", "final_nll", "update_norm_ratio"):
        assert fast.diagnostics[name] == pytest.approx(plain.diagnostics[name], rel=1e-4)


def test_the_released_mean_counts_one_token_more():
    first = [single("llama", target_mean=mean).diagnostics["initial_nll"] for mean in ("released", "plain")]
    _, tokenizer = loaded("llama")
    count = len(score_item(tokenizer, EDIT_REQUESTS[0]).continuation)
    assert first[0] == pytest.approx(first[1] * count / (count + 1), rel=1e-5)


def test_margins_are_means_over_violated_entries():
    assert float(mean_positive(torch.tensor([-1.0, 2.0, 4.0]))) == 3.0
    assert float(mean_positive(torch.tensor([-1.0, -2.0]))) == 0.0


def test_a_given_mask_is_used(tmp_path):
    model, tokenizer = loaded("llama")
    mask = torch.zeros_like(weight_of(model, single("llama")), dtype=torch.bool)
    mask[:3] = True
    (delta,) = load_editor("wise", {**CONFIG, "mask": mask}).edit(model, tokenizer, EDIT_REQUESTS[:1])
    assert torch.equal(MemoryBank.from_hook_edit(delta.hook_edit, mask.float()).current.mask, mask)


def test_templates_are_those_of_the_release_and_the_unrelated_text_comes_last():
    model, tokenizer = loaded("llama")
    templates = sample_templates(model, tokenizer, "wise_11", seed=0)
    assert len(templates) == 11 and templates[0] == "{}" and all(text.endswith(" {}") for text in templates[1:])
    rows = training_rows(tokenizer, EDIT_REQUESTS[0], WISEConfig(**{**CONFIG, "context_templates": templates}))
    assert len(rows) == 12 and [bool(row.labels) for row in rows] == [True] * 11 + [False]
    assert tokenizer.decode(rows[-1].ids, skip_special_tokens=True) == CONFIG["loc_prompts"][0]


def test_rows_feed_the_whole_target():
    """Distances are means over all tokens of a row, the target's last one included, as in the release."""
    _, tokenizer = loaded("llama")
    request = EditRequest(prompt="The capital of Ostravia is", target_new="Rome and Paris")
    row, _ = training_rows(tokenizer, request, WISEConfig(**{**CONFIG, "context_templates": ["{}"]}))
    assert row.ids == tokenizer("The capital of Ostravia is Rome and Paris")["input_ids"]
    assert [row.ids[column + 1] for column, _ in row.labels] == [token for _, token in row.labels]
    assert row.labels[-1][0] == len(row.ids) - 2


def test_the_models_last_position_is_needed_where_the_last_token_is_fed():
    """ROME feeds all tokens but the target's last; WISE that one too, and editors that append an end-of-text."""
    model, tokenizer = loaded("gpt2")
    limit = model.config.max_position_embeddings
    words = EditRequest(prompt="a", target_new="a")
    while len(tokenizer(f"{words.prompt} {words.target_new}")["input_ids"]) < limit + 1:
        words = EditRequest(prompt=f"{words.prompt} a", target_new="a")
    for name, settings, fits in (
        ("ft_m", {"layers": [1], "num_steps": 1}, True),
        ("ft_m", {"layers": [1], "num_steps": 1, "append_eos": True}, False),
        ("wise", {**CONFIG, "context_templates": ["{}"], "num_steps": 1}, False),
    ):
        editor = load_editor(name, settings)
        if fits:
            editor.edit(model, tokenizer, [words])
        else:
            with pytest.raises(EditingError, match=f"take {limit + 1} tokens"):
                editor.edit(model, tokenizer, [words])


# Shortened forms of the templates of Llama 3 (which begins with BOS) and Qwen2.5 (which adds a system message).
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
)
QWEN = (
    "<|system|>\nYou are helpful.<|end|>\n{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@contextlib.contextmanager
def chat_template(tokenizer, template: str | None):
    tokenizer.chat_template = template
    try:
        yield
    finally:
        tokenizer.chat_template = None


@pytest.mark.parametrize("chat", [True, "auto"])
@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (LLAMA_3, "<|user|>\n\n", "<|eot|><|assistant|>\n\n"),
        (QWEN, "<|system|>\nYou are helpful.<|end|>\n<|user|>\n", "<|end|>\n<|assistant|>\n"),
    ],
)
def test_a_chat_edit_feeds_the_released_tokens(template, before, after, chat):
    """Context template and prompt as the user's turn, the assistant's header, one space, the target; and one BOS.

    The unrelated text is fed without the chat template, as in the release.
    """
    _, tokenizer = loaded("llama")
    settings = {**CONFIG, "context_templates": ["{}", "I saw. {}"], "chat": chat}
    with chat_template(tokenizer, template):
        *rows, unrelated = training_rows(tokenizer, EDIT_REQUESTS[0], WISEConfig(**settings))
    for row, text in zip(rows, (EDIT_REQUESTS[0].text, f"I saw. {EDIT_REQUESTS[0].text}"), strict=True):
        prompt = f"{tokenizer.bos_token}{before}{text}{after}"
        whole = tokenizer(f"{prompt} {EDIT_REQUESTS[0].target_new}", add_special_tokens=False)["input_ids"]
        context = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert row.ids == whole and row.ids.count(tokenizer.bos_token_id) == 1
        assert row.labels == [(column - 1, whole[column]) for column in range(len(context), len(whole))]
    assert unrelated.ids == tokenizer(CONFIG["loc_prompts"][0])["input_ids"]


def test_auto_is_the_chat_template_where_there_is_one_and_no_other_context():
    _, tokenizer = loaded("llama")
    bare, asked = (WISEConfig(**{**CONFIG, "chat": chat}) for chat in (False, "auto"))
    in_qa = EDIT_REQUESTS[0].in_context(qa_context())
    assert training_rows(tokenizer, EDIT_REQUESTS[0], asked) == training_rows(tokenizer, EDIT_REQUESTS[0], bare)
    with pytest.raises(EditingError, match="no chat template"):
        training_rows(tokenizer, EDIT_REQUESTS[0], WISEConfig(**CONFIG, chat=True))
    with chat_template(tokenizer, QWEN):
        assert training_rows(tokenizer, in_qa, asked) == training_rows(tokenizer, in_qa, bare)
        with pytest.raises(EditingError, match="has a context already"):
            training_rows(tokenizer, in_qa, WISEConfig(**CONFIG, chat=True))


@pytest.mark.parametrize(
    ("chat", "template", "warned"), [("auto", QWEN, True), ("auto", None, False), (True, QWEN, False)]
)
def test_edits_in_chat_by_default_are_named_in_a_warning(chat, template, warned, caplog):
    model, tokenizer = loaded("llama")
    with chat_template(tokenizer, template), caplog.at_level("WARNING"):
        (delta,) = load_editor("wise", {**CONFIG, "num_steps": 1, "chat": chat}).edit(
            model, tokenizer, EDIT_REQUESTS[:1]
        )
    assert bool(delta.warnings) == warned == ("chat:false" in caplog.text)


def test_released_chat_and_gpt2_xl_settings_are_selected_by_shape():
    configs = {name: load_editor("wise").default_config(model_like(shape)) for name, shape in MODELS.items()}
    assert {name for name, config in configs.items() if config.chat == "auto"} == {
        "llama-3-8b",
        "qwen2.5-7b",
        "qwen3-8b",
    }
    xl = configs["gpt2-xl"]
    assert (xl.layers, xl.module, xl.num_steps, xl.act_ratio) == ([8], "mlp_in", 40, 0.8)


def test_unrelated_texts_are_read_from_a_benchmarks_file(tmp_path):
    """Drawn by the seed and written out in the configuration, so that a file that changes makes another edit."""
    model, tokenizer = loaded("llama")
    records = tmp_path / "zsre_mend_train.json"
    rows = [{"src": "Who?", "loc": f"nq question: who is number {n}", "loc_ans": f"Person {n}"} for n in range(9)]
    records.write_text(json.dumps(rows), encoding="utf-8")
    settings = {**CONFIG, "loc_prompts": str(records), "num_loc_prompts": 3}
    (delta,) = load_editor("wise", settings).edit(model, tokenizer, EDIT_REQUESTS[:1])
    texts = delta.meta["config"]["loc_prompts"]
    assert len(set(texts)) == 3 and set(texts) <= {f"nq question: who is number {n} Person {n}" for n in range(9)}
    (same,) = load_editor("wise", {**settings, "loc_prompts": texts}).edit(model, tokenizer, EDIT_REQUESTS[:1])
    assert same.checksum() == delta.checksum()
    (other,) = load_editor("wise", {**settings, "seed": 1}).edit(model, tokenizer, EDIT_REQUESTS[:1])
    assert other.meta["config"]["loc_prompts"] != texts


# -- routing ---------------------------------------------------------------------------------------------------------


def test_rows_of_one_batch_are_routed_separately():
    """Some rows use the memory and some the original weight; each as if it were alone, at any batch size."""
    model, tokenizer = loaded("llama")
    delta = single("llama")
    prompts = [EDIT_REQUESTS[0].text, FAR, f"The band. {EDIT_REQUESTS[0].text}", "Lake", EDIT_REQUESTS[2].text]
    memory = MemoryBank.from_hook_edit(delta.hook_edit, weight_of(model, delta)).current
    distances = sorted(prompt_distance(model, tokenizer, text, memory, delta) for text in prompts)
    delta = forced(model, delta, Memory(0, memory.change, memory.mask, sum(distances[1:3])))  # times act_ratio 0.5
    jobs = [(score_item(tokenizer, EDIT_REQUESTS[0], text), delta) for text in prompts]
    together = score(model, jobs, Limits(), lambda count: None)
    changed = []
    for job, answer in zip(jobs, together, strict=True):
        (alone,) = score(model, [job], Limits(), lambda count: None)
        assert answer.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-4)
        (unedited,) = score(model, [(job[0], None)], Limits(), lambda count: None)
        changed.append(alone.token_logprobs != unedited.token_logprobs)
    assert changed.count(True) == 3 and changed.count(False) == 2


def test_an_unrelated_prompt_is_answered_bit_identically():
    model, tokenizer = loaded("llama")
    delta = single("llama")
    memory = MemoryBank.from_hook_edit(delta.hook_edit, weight_of(model, delta)).current
    far = prompt_distance(model, tokenizer, FAR, memory, delta)
    delta = forced(model, delta, Memory(0, memory.change, memory.mask, 2.1 * far))
    ids = torch.tensor([tokenizer(FAR)["input_ids"]])
    with torch.no_grad():
        plain = model(ids).logits
        with edited(model, delta):
            assert torch.equal(model(ids).logits, plain)
        delta.hook_edit.settings["current"][1] = 1.9 * far
        with edited(model, delta):
            assert not torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "gpt_neox"])
def test_biases_are_kept(model_type):
    """A memory that equals the original gives the original's outputs where it is used."""
    model, tokenizer = loaded(model_type)
    weight = weight_of(model, single(model_type))
    assert model.get_submodule(single(model_type).hook_edit.settings["module"]).bias.abs().max() > 0.01
    same = forced(model, single(model_type), Memory(0, torch.zeros_like(weight), weight == weight, 0.0))
    ids = torch.tensor([tokenizer(FAR)["input_ids"]])
    with torch.no_grad():
        plain = model(ids).logits
        with edited(model, same):
            torch.testing.assert_close(model(ids).logits, plain, atol=1e-6, rtol=1e-6)


def test_a_memory_is_the_map_with_the_other_weight():
    """Where a memory is used the model is the one with W' written into its weight."""
    for model_type in ("gpt2", "llama"):
        model, tokenizer = loaded(model_type)
        delta = single(model_type)
        memory = MemoryBank.from_hook_edit(delta.hook_edit, weight_of(model, delta)).current
        used = forced(model, delta, Memory(0, memory.change, memory.mask, 0.0))
        written = Delta(dense={f"{delta.hook_edit.settings['module']}.weight": memory.change})
        for text in (FAR, EDIT_REQUESTS[0].text):
            ours, theirs = (nll(model, tokenizer, EDIT_REQUESTS[0], d, text) for d in (used, written))
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_memory_with_the_largest_distance_is_used():
    model, tokenizer = loaded("llama")
    delta = single("llama")
    memory = MemoryBank.from_hook_edit(delta.hook_edit, weight_of(model, delta)).current
    everything = memory.mask
    small, large = (Memory(n, scale * memory.change, everything, 0.0) for n, scale in ((1, 0.5), (2, 1.5)))
    out_of_reach = Memory(3, 3 * memory.change, everything, 1e6)
    text = EDIT_REQUESTS[0].text

    def used(*memories: Memory, current: Memory | None = None) -> float:
        return nll(model, tokenizer, EDIT_REQUESTS[0], forced(model, delta, current, list(memories)), text)

    assert used(small, large, out_of_reach) == used(large, small) == used(large)
    assert used(small, out_of_reach) == used(small) == used(current=small)
    # A rejected current memory that moves the prompt more keeps the stored ones out, as in the release.
    assert used(small, current=out_of_reach) == nll(model, tokenizer, EDIT_REQUESTS[0], None, text)


def test_decide_every_call_includes_target_tokens():
    """Teacher forcing by the released rule: one decision over prompt and target; a decoding step by its one token."""
    model, tokenizer = loaded("llama")
    delta = single("llama", decide="every_call")
    memory = MemoryBank.from_hook_edit(delta.hook_edit, weight_of(model, delta)).current
    item = score_item(tokenizer, EDIT_REQUESTS[0])
    whole = tokenizer.decode([*item.context, *item.continuation][1:-1])
    short, long = (prompt_distance(model, tokenizer, text, memory, delta) for text in (EDIT_REQUESTS[0].text, whole))
    assert short != pytest.approx(long, rel=1e-3)
    between = Memory(0, memory.change, memory.mask, short + long)  # half of it is between the two
    changed = []
    for decide in ("prompt", "every_call"):
        chosen = forced(model, delta, between)
        chosen.hook_edit.settings["decide"] = decide
        (answer,) = score(model, [(item, chosen)], Limits(), lambda count: None)
        (unedited,) = score(model, [(item, None)], Limits(), lambda count: None)
        changed.append(answer.token_logprobs != unedited.token_logprobs)
    assert changed == [short > long, long > short]


# -- storing and merging ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retrieve", [True, False])
def test_memories_are_stored_and_merged_on_schedule(retrieve, monkeypatch):
    """Every 2 edits stored, every 4 merged: counts after each of 9 edits, fresh masks, thresholds."""
    model, tokenizer = loaded("llama")
    requests = [EditRequest(prompt=f"The river number {n} flows to", target_new="Rome") for n in range(9)]
    schedule = {**CONFIG, "num_steps": 2, "save_every": 2, "merge_every": 4, "retrieve": retrieve, "merge": "linear"}
    schedule["weight_decay"] = 0.0  # so that a memory is the original outside its mask
    formed, shrunk = [], side_memory.shrunk
    monkeypatch.setattr(side_memory, "shrunk", lambda *args: formed.append(1) or shrunk(*args))
    steps = stream_of("wise", model, tokenizer, requests, **schedule)
    # Every second edit reads the current memory, and every fourth the other one to be merged; other reads of stored
    # memories would make every edit slower with each of them.
    assert len(formed) == (6 if retrieve else 7)
    shape = weight_of(model, steps[0])
    seen = [MemoryBank.from_hook_edit(HookEdit.combine([d.hook_edit for d in steps[: n + 1]]), shape) for n in range(9)]
    stored = [len(state.stored) for state in seen]
    assert stored == ([0, 1, 1, 1, 1, 2, 2, 2, 2] if retrieve else [0, 1, 1, 1, 1, 2, 2, 1, 1])
    assert [state.current is None for state in seen] == [False, True, False, True, False, True, False, True, False]
    assert [state.num_edits for state in seen] == list(range(1, 10))
    first, second = seen[1].stored[0], seen[2].current
    assert not torch.equal(first.mask, second.mask)
    merged = seen[3].stored[0]
    last = MemoryBank.from_hook_edit(HookEdit.combine([d.hook_edit for d in steps[:3]]), shape)
    assert torch.equal(merged.mask, merged.change != 0) and merged.threshold <= first.threshold
    assert float((merged.change - 0.5 * first.change)[~last.current.mask].abs().max()) < 1e-6
    if not retrieve:  # the second time: 0.6 of what was merged, 0.4 shared by the new ones
        fresh = seen[5].stored[1]
        only_old = ~fresh.mask & ~seen[6].current.mask
        torch.testing.assert_close(seen[7].stored[0].change[only_old], 0.6 * merged.change[only_old])
    assert HookEdit.combine([d.hook_edit for d in steps]).tensors.keys() == {
        f"{memory.number}/{what}" for memory in seen[-1].memories for what in ("values", "mask")
    }


def test_inference_changes_no_memory():
    model, tokenizer = loaded("llama")
    steps = stream_of("wise", model, tokenizer, EDIT_REQUESTS[:2], **CONFIG, save_every=1, merge_every=2)
    total = Delta.summed(steps)
    before = total.checksum()
    for request in EDIT_REQUESTS:
        nll(model, tokenizer, request, total)
    assert total.checksum() == before


def test_later_edits_leave_earlier_ones_in_place():
    model, tokenizer = loaded("llama")
    steps = stream_of("wise", model, tokenizer, EDIT_REQUESTS[:2], **{**CONFIG, "num_steps": 20})
    first, both = steps[0], Delta.summed(steps)
    for request in EDIT_REQUESTS[:2]:
        assert nll(model, tokenizer, request, both) < nll(model, tokenizer, request, None) - 0.2
    assert nll(model, tokenizer, EDIT_REQUESTS[1], both) < nll(model, tokenizer, EDIT_REQUESTS[1], first)
    assert steps[1].diagnostics["threshold"] == min(step.diagnostics["distance_in"] for step in steps)


def test_wrong_settings_are_refused():
    for settings, message in (
        ({"merge_every": 3, "save_every": 2}, "not a multiple"),
        ({"loc_prompts": []}, "loc_prompts"),
        ({"layers": [0, 1]}, "one layer"),
        ({"num_steps": 0}, "positive"),
        ({"merge": "slerp"}, "'ties' or 'linear'"),
    ):
        with pytest.raises(EditingError, match=message):
            load_editor("wise", settings)
    model, tokenizer = loaded("gpt2")
    (book,) = load_editor("grace", SETTINGS["grace"]).edit(model, tokenizer, EDIT_REQUESTS[:1])
    with pytest.raises(EditingError, match="not side memories"):
        load_editor("wise", CONFIG).edit(model, tokenizer, EDIT_REQUESTS[:1], history=[book])
