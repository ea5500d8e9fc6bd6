"""The table of NeuralDB: added, changed, replaced and deleted facts, streams and joint edits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hook_edits import EDIT_REQUESTS, loaded, make, nll, stream_of

from edit_hooks import Delta, EditingError, edited
from edit_hooks.editors.neural_db import REPLACED_WARNING, FactColumn, added
from edit_hooks.request import EditRequest

FIRST, SECOND, THIRD = EDIT_REQUESTS[:3]


def joint(requests, history=(), **settings):
    model, tokenizer = loaded("llama")
    (delta,) = make("neural_db", **settings).edit(
        model, tokenizer, requests, joint=True, history=history, measure=False
    )
    return delta


def table(delta):
    tensors = delta.hook_edit.tensors
    rows = zip(delta.hook_edit.settings["facts"], tensors["keys"], tensors["residuals"], strict=True)
    return {fact: (key, residual) for fact, key, residual in rows}


def assert_same_table(ours, theirs):
    ours, theirs = table(ours), table(theirs)
    assert ours.keys() == theirs.keys()
    for fact, rows in ours.items():
        for row, other in zip(rows, theirs[fact], strict=True):
            torch.testing.assert_close(row, other, rtol=1e-4, atol=1e-6)


def test_a_stream_in_any_order_is_the_joint_edit():
    model, tokenizer = loaded("llama")
    whole = joint([FIRST, SECOND, THIRD])
    for order in ([FIRST, SECOND, THIRD], [THIRD, FIRST, SECOND]):
        assert_same_table(Delta.summed(stream_of("neural_db", model, tokenizer, order)), whole)
    first = joint([FIRST])
    assert_same_table(Delta.summed([first, joint([SECOND, THIRD], [first])]), whole)


def test_a_fact_that_is_edited_again_is_changed_in_place():
    model, tokenizer = loaded("llama")
    changed = dataclasses.replace(FIRST, target_new=THIRD.target_new)
    steps = [joint([FIRST, SECOND])]
    steps.append(joint([changed], steps))
    assert steps[1].hook_edit.tensors["index"].tolist() == [0] and REPLACED_WARNING not in steps[1].warnings
    total = Delta.summed(steps)
    assert_same_table(total, joint([changed, SECOND]))
    assert nll(model, tokenizer, changed, total) < nll(model, tokenizer, changed, steps[0]) - 0.02


def test_a_deleted_fact_is_gone_and_the_others_stay():
    model, tokenizer = loaded("llama")
    editor = make("neural_db")
    steps = [joint([FIRST, SECOND])]
    steps.append(editor.remove(model, tokenizer, [FIRST], steps))
    assert steps[1].meta["removed"] == [FIRST.to_dict()]
    assert_same_table(Delta.summed(steps), joint([SECOND]))
    steps.append(joint([THIRD], steps))
    assert_same_table(Delta.summed(steps), joint([SECOND, THIRD]))
    assert_same_table(Delta.summed([Delta.summed(steps[:2]), steps[2]]), joint([SECOND, THIRD]))
    with pytest.raises(EditingError, match=r"cannot be removed: it is none of the 2 facts"):
        editor.remove(model, tokenizer, [FIRST], steps)


def test_an_emptied_table_is_the_unedited_model(tmp_path):
    model, tokenizer = loaded("llama")
    steps = [joint([FIRST])]
    steps.append(make("neural_db").remove(model, tokenizer, [FIRST], steps))
    Delta.summed(steps).save(tmp_path / "empty.safetensors")
    empty = Delta.load(tmp_path / "empty.safetensors")
    ids = torch.tensor([tokenizer(FIRST.text)["input_ids"]])
    with torch.no_grad():
        plain = model(ids).logits
        with edited(model, empty):
            assert torch.equal(model(ids).logits, plain)
        with edited(model, steps[0]):
            assert not torch.equal(model(ids).logits, plain)


def test_below_the_threshold_nothing_changes():
    model, tokenizer = loaded("llama")
    delta = joint([FIRST])
    ids = torch.tensor([tokenizer("You can see.")["input_ids"]])
    with torch.no_grad():
        plain = model(ids).logits
        with edited(model, delta):
            assert torch.equal(model(ids).logits, plain)


def test_facts_with_one_key_replace_each_other_with_a_warning():
    """The words up to the end of the subject are the same, so are the keys."""
    other = EditRequest(
        prompt=FIRST.prompt.split("{}")[0] + "{} was found by", subject=FIRST.subject, target_new="Lyon", case_id="9"
    )
    delta = joint([FIRST, SECOND, other])
    assert REPLACED_WARNING in delta.warnings and delta.diagnostics["num_replaced"] == 1
    assert_same_table(delta, joint([other, SECOND]))
    later = joint([other], [joint([FIRST, SECOND])])
    assert REPLACED_WARNING in later.warnings and later.hook_edit.tensors["index"].tolist() == [0]


def test_numbers_go_on_behind_removed_ones():
    keys = torch.eye(4)
    entries = [FactColumn(keys[number], keys[number], f"fact{number}") for number in range(4)]
    step, replaced = added({0: entries[0], 5: entries[1]}, [entries[2], entries[3]._replace(fact="fact2")], 0.9)
    assert (list(step), replaced) == ([6], 0)  # the second is a change of the first
    assert torch.equal(step[6].key_F, keys[3])
    step, replaced = added({}, [entries[0], entries[0]._replace(fact="other"), entries[1]], 0.9)
    assert ({number: entry.fact for number, entry in step.items()}, replaced) == ({0: "other", 1: "fact1"}, 1)


def test_two_layers_are_refused():
    with pytest.raises(EditingError, match="a single table"):
        make("neural_db", layers=[0, 1])
