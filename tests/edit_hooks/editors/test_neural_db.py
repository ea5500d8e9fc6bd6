"""The table of NeuralDB: added, changed, replaced and deleted facts, streams and joint edits."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from hook_edits import EDIT_REQUESTS, loaded, make, nll, stream_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from edit_hooks import Delta, EditingError, edited
from edit_hooks.contract.tiny_models import build_model, build_tokenizer, natural_tokenizer
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.editors import neural_db
from edit_hooks.editors.neural_db import REPLACED_WARNING, FactColumn, KnownFacts, added
from edit_hooks.locate.values.rows import rewriting_row
from edit_hooks.modeling.hooks import hooks, on_input, record_at
from edit_hooks.request import EditRequest
from edit_hooks.self_check.run import checked

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


def table_of(entries: dict[int, FactColumn]) -> KnownFacts:
    """A table of some entries."""
    if not entries:
        return KnownFacts(None)
    keys, facts = torch.stack([entry.key_F for entry in entries.values()]), [entry.fact for entry in entries.values()]
    tensors = {"keys": keys, "residuals": keys, "index": torch.tensor(list(entries))}
    return KnownFacts(HookEdit("residual_table", tensors, {"facts": facts}))


def test_numbers_go_on_behind_removed_ones():
    keys = torch.eye(4)
    entries = [FactColumn(keys[number], keys[number], f"fact{number}") for number in range(4)]
    step, replaced = added(
        table_of({0: entries[0], 5: entries[1]}), [entries[2], entries[3]._replace(fact="fact2")], 0.9
    )
    assert (list(step), replaced) == ([6], 0)  # the second is a change of the first
    assert torch.equal(step[6].key_F, keys[3])
    step, replaced = added(KnownFacts(None), [entries[0], entries[0]._replace(fact="other"), entries[1]], 0.9)
    assert ({number: entry.fact for number, entry in step.items()}, replaced) == ({0: "other", 1: "fact1"}, 1)


DRAWS = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 4)), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(DRAWS, st.integers(0, 6), st.integers(1, 3))
def test_entries_are_those_of_one_fact_after_another(draws, num_old, rows_at_once):
    """Facts that come again, with their key or another, and keys that are the same up to rounding."""
    basis = torch.eye(4)
    entries = []
    for axis, is_rounded, fact in draws:
        key = nn.functional.normalize(basis[axis] + (1e-4 * basis[(axis + 1) % 4] if is_rounded else 0), dim=0)
        entries.append(FactColumn(key, key, f"fact{fact}"))

    def one_by_one(table, new):
        table, step, num_replaced = dict(table), {}, 0
        for entry in new:
            same = [number for number, known in table.items() if known.fact == entry.fact]
            if not same:
                same = [number for number, known in table.items() if float(known.key_F @ entry.key_F) >= 0.999]
                num_replaced += bool(same)
            number = max(same, key=lambda number: float(table[number].key_F @ entry.key_F), default=len(table))
            table[number] = step[number] = entry
        return table, step, num_replaced

    old, _, _ = one_by_one({}, entries[:num_old])
    _, expected, expected_replaced = one_by_one(old, entries[num_old:])
    if entries[num_old:]:
        with mock.patch.object(neural_db, "MAX_COSINES", rows_at_once * (len(old) + len(entries[num_old:]))):
            step, num_replaced = added(table_of(old), entries[num_old:], 0.999)
        assert {number: entry.fact for number, entry in step.items()} == {n: one.fact for n, one in expected.items()}
        assert all(entry.key_F is expected[number].key_F for number, entry in step.items())
        assert num_replaced == expected_replaced


def test_the_number_of_a_removed_entry_is_used_again():
    model, tokenizer = loaded("llama")
    steps = [joint([FIRST, SECOND])]
    steps.append(make("neural_db").remove(model, tokenizer, [SECOND], steps))
    steps.append(joint([THIRD], steps))
    assert steps[2].hook_edit.tensors["index"].tolist() == [1]
    for total in (Delta.summed(steps), Delta.summed([steps[0], Delta.summed(steps[1:])])):
        assert_same_table(total, joint([FIRST, THIRD]))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite"])
def test_the_edited_model_has_the_loss_that_the_value_was_optimized_to(model_type):
    """Gemma normalizes the MLP's output behind the table, Granite scales it."""
    model, tokenizer = build_model(model_type), build_tokenizer(natural_tokenizer(model_type))
    checked(model)
    editor = make("neural_db", context_templates=["{}"], threshold=0.99)
    (delta,) = editor.edit(model, tokenizer, [FIRST], measure=False)
    assert delta.diagnostics["initial_nll"] - delta.diagnostics["final_nll"] > 0.05
    assert nll(model, tokenizer, FIRST, delta) == pytest.approx(delta.diagnostics["final_nll"], abs=1e-4)


@torch.no_grad()
def test_a_mean_key_is_half_of_the_bare_prompt_and_half_of_the_others():
    model, tokenizer = loaded("llama")
    templates = ["{}", "The train leaves. {}", "You can see it. {}"]
    editor = make("neural_db", key="mean", context_templates=templates)
    (delta,) = editor.edit(model, tokenizer, [FIRST], measure=False)
    records = {}
    for template in templates:
        row = rewriting_row(tokenizer, FIRST, template)
        module = model.get_submodule(delta.hook_edit.settings["module"])
        with hooks(on_input(module, record_at(records, template, torch.tensor([row.position])))):
            model(torch.tensor([row.ids]))
    bare, *others = (records[template][0] for template in templates)
    mean = nn.functional.normalize(bare / 2 + sum(others) / 4, dim=0)
    torch.testing.assert_close(delta.hook_edit.tensors["keys"][0], mean, rtol=1e-4, atol=1e-5)
    assert (mean - nn.functional.normalize(bare, dim=0)).norm() > 1e-3


def test_two_layers_are_refused():
    with pytest.raises(EditingError, match="a single table"):
        make("neural_db", layers=[0, 1])
