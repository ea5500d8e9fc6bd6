"""Order and random choices of training edits."""

from __future__ import annotations

from mend_runs import examples

from edit_hooks.training.edit_data import draw_index, training_batch

EXAMPLES = examples(0, 7)


def test_every_epoch_holds_every_example_once_in_its_own_order():
    drawn = [item for batch in range(7) for item in training_batch(EXAMPLES, 2, seed=0, batch=batch)]
    assert [item.number for item in drawn] == list(range(14))
    first, second = ([item.example.prompt for item in drawn[start : start + 7]] for start in (0, 7))
    assert sorted(first) == sorted(second) == sorted(example.prompt for example in EXAMPLES)
    assert first != second


def test_a_batch_does_not_depend_on_the_batches_before_it():
    in_order = [training_batch(EXAMPLES, 2, seed=0, batch=batch) for batch in range(8)]
    backwards = [training_batch(EXAMPLES, 2, seed=0, batch=batch) for batch in reversed(range(8))]
    assert in_order == backwards[::-1]
    assert in_order != [training_batch(EXAMPLES, 2, seed=1, batch=batch) for batch in range(8)]


def test_indices_depend_on_seed_number_and_purpose():
    draws = [draw_index(10**6, seed, number, purpose) for seed in (0, 1) for number in (0, 1) for purpose in (1, 2)]
    assert len(set(draws)) == len(draws) and all(0 <= index < 10**6 for index in draws)
    assert draw_index(10**6, 0, 0, 1) == draws[0]
