"""Solved values in a store: found by a resumed run and by editors of the family, and for nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from value_problems import SETTINGS as VALUE_SETTINGS

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.inference.effects.edit_effects import EditEffects
from edit_hooks.lm.editing.independent import IndependentEdits
from edit_hooks.lm.editing.stored_values import StoredValues
from edit_hooks.lm.editing.stream import EditStream, Guard
from edit_hooks.lm.options.plan import EditPlan, chunked
from edit_hooks.locate.values import value_optimization
from edit_hooks.locate.values.kept_values import KeptValues, values_kept_in
from edit_hooks.locate.values.rows import kl_row, rewriting_row
from edit_hooks.locate.values.suffix_forward import SuffixForward
from edit_hooks.locate.values.value_batch import ValueBatch
from edit_hooks.locate.values.value_steps import initial_values
from edit_hooks.modeling.fingerprint.identity import ModelIdentity, model_identity
from edit_hooks.modeling.fingerprint.tensor_hash import sampled_digest
from edit_hooks.store.store import Store

NAMES = ("Amelin", "Brisk", "Corvo", "Delmar", "Estra", "Fern")
FACTS = [EditRequest(prompt="{} is the capital of", subject=f"Port {name}", target_new="Dravonia") for name in NAMES]
SETTINGS = {"layers": [0, 1], "num_steps": 3, "second_moments": None, "context_templates": ["{}"]}
WRAPPED = {"base": "memit", "base_settings": SETTINGS}


class Solved:
    """Counts the edits that are solved; may be killed before a batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_edits, self.most = 0, 1000
        solve = value_optimization._solve
        split = value_optimization.split_problems

        def counted(forward: Any, *rest: Any) -> Any:
            if self.num_edits >= self.most:
                raise KeyboardInterrupt
            self.num_edits += len(forward.batch.kl_row_E)
            return solve(forward, *rest)

        def in_pairs(problems: Any, limits: Any) -> list[list[int]]:
            return [chunk[start : start + 2] for chunk in split(problems, limits) for start in range(0, len(chunk), 2)]

        monkeypatch.setattr(value_optimization, "_solve", counted)
        monkeypatch.setattr(value_optimization, "split_problems", in_pairs)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Solved:
    return Solved(monkeypatch)


@pytest.fixture
def model() -> nn.Module:
    return build_model("llama")


def joint(
    model: nn.Module,
    store: Path | None,
    name: str = "memit",
    facts: list[EditRequest] = FACTS,
    identity: ModelIdentity | None = None,
    **settings: object,
) -> Delta:
    """One joint edit of all facts.

    Args:
        identity: of the unedited model, which a stream has of edited weights, too.
    """
    tokenizer = build_tokenizer("byte_bpe_bos")
    editor = load_editor(name, WRAPPED if name == "rect" else {**SETTINGS, **settings})
    plan = EditPlan(chunked([(fact,) for fact in facts], len(facts), cumulative=True), cumulative=True)
    place = Store(store) if store else None
    stream = EditStream(
        model, tokenizer, editor, plan, place, identity or model_identity(model, tokenizer), Guard(), quiet=True
    )
    stream.make()
    return stream.whole(0)


def single(model: nn.Module, store: Path, name: str, facts: list[EditRequest] = FACTS) -> list[Any]:
    tokenizer = build_tokenizer("byte_bpe_bos")
    settings = {"rect": WRAPPED, "bird": {"layers": [1], "num_steps": 2}}
    editor = load_editor(name, settings.get(name, SETTINGS))
    edits = IndependentEdits(model, tokenizer, editor, Store(store), model_identity(model, tokenizer), quiet=True)
    return list(edits.in_order([(fact,) for fact in facts]))


def same(first: Delta, second: Delta) -> bool:
    """The same update, bit for bit, with the same record of how it came about."""
    names = first.factors.keys()
    factors = zip(first.factors.values(), second.factors.values(), strict=True)
    updates = all(torch.equal(one.left, other.left) and torch.equal(one.right, other.right) for one, other in factors)
    return bool(names) and names == second.factors.keys() and updates and first.diagnostics == second.diagnostics


def test_a_joint_edit_goes_on_where_it_was_killed(solved: Solved, model: nn.Module, tmp_path: Path) -> None:
    whole = joint(model, tmp_path / "whole")
    assert solved.num_edits == 6
    solved.num_edits, solved.most = 0, 4
    with pytest.raises(KeyboardInterrupt):
        joint(model, tmp_path / "killed")
    solved.num_edits, solved.most = 0, 1000
    assert same(joint(model, tmp_path / "killed"), whole) and solved.num_edits == 2


def test_an_editor_of_the_family_finds_them(solved: Solved, model: nn.Module, tmp_path: Path) -> None:
    alone = joint(model, None, "rect")
    first = joint(model, tmp_path)
    solved.num_edits = 0
    second = joint(model, tmp_path, "rect")
    assert solved.num_edits == 0 and same(second, alone)
    # an edit costs what it would have without the other row of the table
    assert second.cost.seconds is not None and first.cost.seconds is not None
    entries = [Store(tmp_path)._read(path, path.read_text) for path in (tmp_path / "json" / "values").iterdir()]
    assert len(entries) == 3 and second.cost.seconds > 0.5 * first.cost.seconds


def test_single_edits_find_those_of_their_batch(solved: Solved, model: nn.Module, tmp_path: Path) -> None:
    single(model, tmp_path, "memit")
    assert solved.num_edits == 6
    single(model, tmp_path, "emmet")
    assert solved.num_edits == 6
    single(model, tmp_path, "rect", FACTS[1:5])  # other pairs, and with them other last bits
    assert solved.num_edits == 10


def test_a_batch_that_was_stored_in_part_is_measured_whole(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bits of an edit's effects depend on the edits that are measured with it."""
    save, of_independent, num_saved = Store.save_delta, EditEffects.of_independent, 0
    measured: list[int] = []

    def killed(self: Store, *rest: Any) -> None:
        nonlocal num_saved
        num_saved += 1
        if num_saved == 3:
            raise KeyboardInterrupt
        save(self, *rest)

    def counted(self: EditEffects, edits: Any) -> Any:
        measured.append(len(edits))
        return of_independent(self, edits)

    monkeypatch.setattr(EditEffects, "of_independent", counted)
    monkeypatch.setattr(Store, "save_delta", killed)
    with pytest.raises(KeyboardInterrupt):
        single(model, tmp_path / "killed", "memit")
    resumed = single(model, tmp_path / "killed", "memit")
    assert measured == [6, 6] and num_saved == 3 + 4
    whole = single(model, tmp_path / "whole", "memit")
    assert [one.effects for one in resumed] == [one.effects for one in whole]


def edit_block(model: Any) -> None:
    model.model.layers[-1].mlp.down_proj.weight.data[:, 1:] += 0.01  # above the layer whose output is optimized


def add_hook(model: Any) -> None:
    model.model.layers[-1].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "settings", "facts"),
    [
        (edit_block, {}, FACTS),
        (add_hook, {}, FACTS),
        (lambda model: None, {"lr": 0.1}, FACTS),
        (lambda model: None, {"engine": "reference"}, FACTS),
        (lambda model: None, {"context_templates": ["{}", "So. {}"]}, FACTS),
        (lambda model: None, {}, [FACTS[0], *FACTS[2:], FACTS[1]][::-1]),
        (lambda model: None, {}, [replace(fact, target_new="Dravonio") for fact in FACTS]),
    ],
    ids=["weights above", "a hook", "the rate", "the engine", "templates", "neighbors in the batch", "the target"],
)
def test_nothing_else_finds_them(
    change: Callable[[Any], None],
    settings: dict[str, object],
    facts: list[EditRequest],
    solved: Solved,
    model: nn.Module,
    tmp_path: Path,
) -> None:
    kept = {"layers": [0]}
    identity = model_identity(model, build_tokenizer("byte_bpe_bos"))
    joint(model, tmp_path, identity=identity, **kept)
    solved.num_edits = 0
    change(model)
    (tmp_path / "deltas").rename(tmp_path / "gone")  # the edit itself would be found
    joint(model, tmp_path, facts=facts, identity=identity, **(kept | settings))
    assert solved.num_edits == 6


def test_shapes_that_are_rounded_up_have_an_entry_of_their_own(model: nn.Module, tmp_path: Path) -> None:
    """Whether they are depends on the process: recording may be off there, or may have failed."""
    tokenizer = build_tokenizer("byte_bpe_bos")
    problems = [([rewriting_row(tokenizer, fact, "{}")], kl_row(tokenizer, fact)) for fact in FACTS[:2]]
    forward = SuffixForward(model, ValueBatch.of(problems, torch.device("cpu")), 0, "mlp")
    with values_kept_in(StoredValues(Store(tmp_path), model_identity(model, tokenizer))):
        kept = KeptValues.of(model, VALUE_SETTINGS, "fast", 2**24)
    assert kept is not None
    entry = kept.of_batch(forward)
    entry.save(initial_values(forward.activations, forward.batch), 1.0)
    assert kept.of_batch(forward).load(forward) is not None
    forward.in_buckets = True
    assert kept.of_batch(forward).load(forward) is None


def test_a_damaged_entry_is_solved_again(
    solved: Solved, model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    joint(model, tmp_path)
    path = next((tmp_path / "json" / "values").iterdir())
    path.write_text(path.read_text().replace("delta", "alpha", 1))
    solved.num_edits = 0
    with caplog.at_level(logging.WARNING):
        joint(model, tmp_path, "rect")
    assert solved.num_edits == 2 and "computed again" in caplog.text


def test_what_is_not_kept(solved: Solved, model: nn.Module, tmp_path: Path) -> None:
    single(model, tmp_path, "memit", FACTS[:1])  # its delta is stored
    single(model, tmp_path, "bird")  # terms of its own
    assert solved.num_edits > 0 and not (tmp_path / "json" / "values").exists()


def test_a_sample_reads_more_than_one_column(model: Any) -> None:
    """Rows of a power of two: an even distance between entries would be a multiple of their length."""
    matrix = nn.Module()
    matrix.weight = nn.Parameter(torch.zeros(512, 512))
    before = sampled_digest(matrix)
    matrix.weight.data[:, 1:] = 1.0
    assert sampled_digest(matrix) != before
