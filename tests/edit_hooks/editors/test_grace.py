"""GRACE's own rules: which entries an edit adds or changes, where values go, and when an edit is found again."""

from __future__ import annotations

import pytest
import torch
from hook_edits import generate_item, loaded, nll, score_item, stream_of, texts

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.editors.grace import Codebook, Entry, GRACEConfig, add_edit
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.tokens import split_continuation

CONFIG = {"layers": [1], "num_steps": 40, "lr": 1.0, "value_init": "warm"}
REQUEST = EditRequest(prompt="The mother tongue of Elena Marković is", target_new="French")
ONE_TOKEN = EditRequest(prompt=REQUEST.text, target_new="the")  # one vector of a random model writes no long answer
OTHER = "The headquarters of the bank are in"


def edit(model_type: str, *requests: EditRequest, **overrides) -> tuple[Delta, ...]:
    model, tokenizer = loaded(model_type)
    editor = load_editor("grace", {**CONFIG, **overrides})
    return tuple(editor.edit(model, tokenizer, list(requests or [REQUEST])))


# -- the rules -------------------------------------------------------------------------------------------------------


def entry(*key: float, label: int = 0, radius: float = 1.0) -> Entry:
    return Entry(torch.tensor(key), torch.zeros(2), radius, [label])


def codebook(book: list[Entry]) -> Codebook:
    if not book:
        return Codebook(None)
    tensors = {
        "keys": torch.stack([one.key_F for one in book]),
        "values": torch.stack([one.value_D for one in book]),
        "radii": torch.tensor([one.radius for one in book]),
    }
    return Codebook(HookEdit("codebook", tensors, {"labels": [one.label for one in book]}))


def change(book, *query: float, label: int = 0, rounding: float = 0.0, **settings):
    config = GRACEConfig(radius=1.0, **settings)
    return add_edit(codebook(book), torch.tensor(query), torch.ones(2), [label], config, config.same_key, rounding)


def test_edit_far_from_every_key_adds_an_entry():
    for book in ([], [entry(0.0, 0.0)], [entry(0.0, 0.0), entry(9.0, 0.0)]):
        made = change(book, 0.0, 2.1)
        assert list(made.entries) == [len(book)] == [made.trained]
        assert made.entries[len(book)].radius == 1.0 and made.reason == ("new" if book else "first")


def test_other_target_nearby_splits_the_distance():
    book = [entry(9.0, 0.0), entry(0.0, 0.0, label=3)]
    made = change(book, 0.0, 1.5, label=4)
    assert made.reason == "split" and made.trained == 2 and sorted(made.entries) == [1, 2]
    assert made.entries[1].radius == pytest.approx(0.75 - 1e-5) and made.entries[2].radius == 0.75
    assert made.entries[1].label == [3] and torch.equal(made.entries[1].value_D, book[1].value_D)


def test_same_target_nearby_widens_the_key():
    book = [entry(0.0, 0.0, label=3)]
    made = change(book, 0.0, 1.5, label=3)
    assert made.reason == "expanded" and made.trained == 0 and made.entries[0].radius == 1.5
    assert torch.equal(made.entries[0].key_F, book[0].key_F) and torch.equal(made.entries[0].value_D, book[0].value_D)
    inside = change(book, 0.0, 0.5, label=3)
    assert inside.entries[0].radius == 1.0
    # The edit's own prompt, on the edge, is a hit in another batch, too.
    assert change(book, 0.0, 1.5, label=3, rounding=0.1).entries[0].radius == pytest.approx(1.65)
    moved = change(book, 0.0, 1.5, label=3, expand="moving_average")
    assert moved.entries[0].key_F.tolist() == [0.0, 0.75] and moved.entries[0].radius == 1.5


def test_same_prompt_with_another_target_overwrites_the_value():
    """A split of a distance of zero would leave radii of zero or less, and rounding would decide."""
    made = change([entry(4.0, 0.0, label=3)], 4.0, 1e-6, label=4)
    assert made.reason == "overwritten" and list(made.entries) == [0] == [made.trained]
    assert made.entries[0].label == [4] and made.entries[0].radius == 1.0
    assert torch.equal(made.entries[0].value_D, torch.ones(2))


def test_nearest_key_is_compared():
    book = [entry(0.0, 0.0, label=1), entry(1.2, 0.0, label=2), entry(5.0, 0.0, label=1)]
    assert change(book, 1.0, 0.0, label=2).reason == "expanded"
    assert sorted(change(book, 1.0, 0.0, label=1).entries) == [1, 3]


# -- on models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", ["replace_last", "replace_prompt", "replace_all"])
@pytest.mark.parametrize("radius", [1.0, 50.0, 1e4])
def test_cached_and_uncached_text_are_the_same_for_any_radius(radius, replacement):
    """Where a radius takes in every activation, a look-up at each token would write the value over and over."""
    model, tokenizer = loaded("llama")
    (delta,) = edit("llama", radius=radius, replacement=replacement, num_steps=5)
    ids = tokenizer(REQUEST.text)["input_ids"]
    written = []
    for use_cache in (True, False):
        with edited(model, delta, prompt_lengths=[len(ids)]):
            output = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=10,
                use_cache=use_cache,
                eos_token_id=None,
                pad_token_id=0,
            )
        written.append(output[0, len(ids) :].tolist())
    assert written[0] == written[1]


def test_query_every_token_looks_up_generated_tokens():
    """Teacher forcing of the decoded text gives the decoded tokens; with a huge radius every token is replaced."""
    model, tokenizer = loaded("llama")
    (stepwise,), (once,) = (edit("llama", radius=1e4, query=query) for query in ("every_step", "prefill"))
    item = generate_item(tokenizer, REQUEST.text, 10)
    (text,), (calm,) = texts(model, tokenizer, [(item, stepwise)]), texts(model, tokenizer, [(item, once)])
    assert text != calm and len(set(text)) < len(set(calm))  # it repeats itself, the known collapse
    (answer,) = score(model, [(ScoreItem(item.context, tuple(text)), stepwise)], Limits(), lambda count: None)
    assert answer.is_greedy
    # With a small radius the new tokens are far from the key, and both switches write the same.
    (near,), (plain,) = (edit("llama", radius=0.1, query=query) for query in ("every_step", "prefill"))
    assert texts(model, tokenizer, [(item, near)]) == texts(model, tokenizer, [(item, plain)])


def test_the_edited_prompt_is_answered_and_an_unrelated_one_is_bit_identical():
    model, tokenizer = loaded("llama")
    (delta,) = edit("llama", ONE_TOKEN, num_steps=100)
    (text,) = texts(model, tokenizer, [(generate_item(tokenizer, REQUEST.text), delta)])
    assert tokenizer.decode(text).startswith(" the")
    ids = torch.tensor([tokenizer(OTHER)["input_ids"]])
    with torch.no_grad():
        plain = model(ids).logits
        with edited(model, delta):
            assert torch.equal(model(ids).logits, plain)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_text_before_the_prompt_makes_the_edit_miss(model_type):
    """What the collapse under a changed prefix in "The Mirage of Model Editing" is made of."""
    model, tokenizer = loaded(model_type)
    (delta,) = edit(model_type, radius=0.2)
    assert nll(model, tokenizer, REQUEST, delta) < nll(model, tokenizer, REQUEST, None) - 0.5
    prefixed = f"Please answer the question. {REQUEST.text}"
    assert nll(model, tokenizer, REQUEST, delta, prefixed) == nll(model, tokenizer, REQUEST, None, prefixed)


def test_keys_values_and_labels_stay_aligned_over_three_edits():
    model, tokenizer = loaded("llama")
    targets = ["French", "Rome", "Hamburg"]
    prompts = [REQUEST.text, OTHER, "The opera was first performed in"]
    requests = [EditRequest(prompt=p, target_new=t) for p, t in zip(prompts, targets, strict=True)]
    steps = stream_of("grace", model, tokenizer, requests, **CONFIG, radius=0.2)
    book = Delta.summed(steps).hook_edit
    assert book.tensors["index"].tolist() == [0, 1, 2]
    assert book.settings["labels"] == [
        split_continuation(tokenizer, p, f" {t}")[1] for p, t in zip(prompts, targets, strict=True)
    ]
    alone = edit("llama", *requests, radius=0.2)
    for number, delta in enumerate(alone):
        torch.testing.assert_close(
            book.tensors["keys"][number], delta.hook_edit.tensors["keys"][0], atol=1e-5, rtol=1e-5
        )
        (answer,) = texts(model, tokenizer, [(generate_item(tokenizer, prompts[number]), Delta.summed(steps))])
        (expected,) = texts(model, tokenizer, [(generate_item(tokenizer, prompts[number]), delta)])
        assert answer == expected
    assert [step.diagnostics["num_entries"] for step in steps] == [1, 2, 3]


def test_the_same_prompt_with_a_new_target_gives_the_new_target():
    model, tokenizer = loaded("llama")
    again = EditRequest(prompt=REQUEST.text, target_new="and")
    steps = stream_of("grace", model, tokenizer, [ONE_TOKEN, again], **{**CONFIG, "num_steps": 100})
    (text,) = texts(model, tokenizer, [(generate_item(tokenizer, REQUEST.text), Delta.summed(steps))])
    assert tokenizer.decode(text).startswith(" and")
    assert steps[1].diagnostics["entry"] == "overwritten" and len(Delta.summed(steps).hook_edit.settings["labels"]) == 1


def test_prompts_of_any_length_share_a_batch_with_their_own_positions():
    """One codebook, prompts in and out of reach: each as if it were alone."""
    model, tokenizer = loaded("gpt2")
    (delta,) = edit("gpt2", radius=0.2)
    questions = [REQUEST.text, OTHER, f"Please answer. {REQUEST.text}", "Lake"]
    jobs = [(score_item(tokenizer, REQUEST, text), delta) for text in questions]
    together = score(model, jobs, Limits(), lambda count: None)
    for job, answer in zip(jobs, together, strict=True):
        (alone,) = score(model, [job], Limits(), lambda count: None)
        assert answer.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-4)


def test_append_eos_trains_the_end_of_text():
    _, tokenizer = loaded("llama")
    (delta,) = edit("llama", append_eos=True)
    assert delta.hook_edit.settings["labels"][0][-1] == tokenizer.eos_token_id
    assert len(delta.hook_edit.settings["labels"][0]) == len(edit("llama")[0].hook_edit.settings["labels"][0]) + 1


def test_module_mlp_in_needs_a_single_input_projection():
    model, tokenizer = loaded("gpt2")
    (delta,) = edit("gpt2", module="mlp_in")
    assert delta.hook_edit.settings["module"].endswith("c_fc") and delta.hook_edit.tensors["values"].shape == (1, 128)
    assert nll(model, tokenizer, REQUEST, delta) < nll(model, tokenizer, REQUEST, None) - 0.5
    with pytest.raises(EditingError, match="gated"):
        edit("llama", module="mlp_in")


def test_history_of_another_module_is_refused():
    model, tokenizer = loaded("gpt2")
    (first,) = edit("gpt2")
    with pytest.raises(EditingError, match="not a codebook at"):
        load_editor("grace", {**CONFIG, "module": "mlp_in"}).edit(model, tokenizer, [REQUEST], history=[first])
    with pytest.raises(EditingError, match="positive number"):
        load_editor("grace", {"radius": 0})
    with pytest.raises(EditingError, match="one layer"):
        load_editor("grace", {"layers": [0, 1]})


def test_generation_stops_and_rows_leave_while_others_keep_their_values():
    """Rows of different edits and lengths; some stop early, the others' looked-up values stay with them."""
    model, tokenizer = loaded("llama")
    first, second = edit("llama", REQUEST, EditRequest(prompt=OTHER, target_new="Rome"), replacement="replace_all")
    items = [
        (GenerateItem(generate_item(tokenizer, REQUEST.text).context, (), 2), first),
        (generate_item(tokenizer, OTHER, 9), second),
        (generate_item(tokenizer, REQUEST.text, 6), None),
        (generate_item(tokenizer, REQUEST.text, 9), first),
    ]
    together = texts(model, tokenizer, items)
    assert together == [texts(model, tokenizer, [item])[0] for item in items]
