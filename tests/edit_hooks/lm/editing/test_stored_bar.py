"""The progress bar counts the edits that a kill does not lose."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.base.registry import EDITORS
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.lm.editing import independent, stored_bar
from edit_hooks.lm.editing.independent import FailedEdit, IndependentEdits
from edit_hooks.lm.editing.stream import EditStream, Guard
from edit_hooks.lm.options.plan import EditPlan, chunked
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.store.store import Store
from edit_hooks.utils.progress import Rounds

NAMES = ("Amelin", "Brisk", "Corvo", "Delmar", "Estra")
EDITS = [EditRequest(prompt="{} is the capital of", subject=f"Port {name}", target_new="Dravonia") for name in NAMES]


class Recorded:
    """A bar of tqdm that keeps what it shows."""

    shown: list[tuple[int, str]]

    def __init__(self, total: int, **_named: object) -> None:
        self.total, self.n, self.note = total, 0, ""
        type(self).shown = []

    def _show(self) -> None:
        type(self).shown.append((self.n, self.note))

    def update(self, count: int) -> None:
        self.n += count
        self._show()

    def set_postfix_str(self, note: str) -> None:
        self.note = note
        self._show()

    def close(self) -> None: ...


@pytest.fixture
def edits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> IndependentEdits:
    """Batches of two, and a store."""
    monkeypatch.setattr(stored_bar, "tqdm", Recorded)
    seconds = itertools.count(step=10)  # the clock is read once per computed edit
    monkeypatch.setattr(stored_bar, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(independent, "BATCH", 2)
    tiny = build_model("llama"), build_tokenizer("byte_bpe_bos")
    editor = load_editor("ft_m", {"layers": [1], "num_steps": 2})
    return IndependentEdits(*tiny, editor, Store(tmp_path), model_identity(*tiny), measure_edits=False)


def saved(edits: IndependentEdits) -> int:
    assert edits.store is not None
    return sum(edits.store.has_delta(edits._description((request,))) for request in EDITS)


def test_it_counts_what_is_stored(edits: IndependentEdits, monkeypatch: pytest.MonkeyPatch) -> None:
    show, counted = Recorded._show, []
    monkeypatch.setattr(Recorded, "_show", lambda self: show(self) or counted.append((self.n, saved(edits))))
    list(edits.in_order([(request,) for request in EDITS]))
    assert counted[-1] == (5, 5) and all(shown == stored for shown, stored in counted)
    first = Recorded.shown[: Recorded.shown.index((2, ""))]
    notes = ["1 more computed in this batch; 40 s left", "2 more computed in this batch; 30 s left"]
    assert first == [(0, notes[0]), (0, notes[1]), (1, notes[1]), (2, notes[1])]


def test_a_kill_loses_what_stands_beside_it(edits: IndependentEdits, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = stored_bar.StoredBar.computed

    def killed(self: stored_bar.StoredBar, count: int) -> None:
        computed(self, count)
        if self._bar.n == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(stored_bar.StoredBar, "computed", killed)
    with pytest.raises(KeyboardInterrupt):
        list(edits.in_order([(request,) for request in EDITS]))
    assert Recorded.shown[-1] == (2, "1 more computed in this batch; 20 s left") and saved(edits) == 2


def test_failed_edits_are_finished(edits: IndependentEdits, monkeypatch: pytest.MonkeyPatch) -> None:
    """And tried once in their batch and once alone."""
    compute, tried = edits.editor.compute, []

    def fail_for_one(job: Any) -> list[Delta]:
        tried.append(EDITS[1] in job.requests)
        if EDITS[1] in job.requests:
            raise independent.EditingError("no")
        return compute(job)

    monkeypatch.setattr(edits.editor, "compute", fail_for_one)
    made = list(edits.in_order([(request,) for request in EDITS]))
    assert [isinstance(edit, FailedEdit) for edit in made] == [False, True, False, False, False]
    assert Recorded.shown[-1] == (5, "") and sum(tried) == 2


@pytest.mark.parametrize(("early_stop_loss", "shown"), [(0.0, 5), (1e9, 2)])
def test_a_joint_edit_shows_its_share(early_stop_loss: float, shown: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of hundreds in one edit takes minutes, in which the bar moves by the passes that are done."""
    monkeypatch.setattr(stored_bar, "tqdm", Recorded)
    tiny = build_model("llama"), build_tokenizer("byte_bpe_bos")
    editor = load_editor("ft_m", {"layers": [1], "num_steps": 5, "batch_size": 2, "early_stop_loss": early_stop_loss})
    plan = EditPlan(chunked([(request,) for request in EDITS], len(EDITS), cumulative=True), cumulative=True)
    stream = EditStream(*tiny, editor, plan, None, model_identity(*tiny), Guard(), measure_edits=False)
    stream.make()
    computed = [int(note.split()[0]) for _, note in Recorded.shown if note]
    assert Recorded.shown[-1] == (5, "") and computed[-2:] == [5, 5]
    assert len(set(computed)) == shown and computed == sorted(computed)


def test_rounds_that_end_early_report_the_rest() -> None:
    reported: list[int] = []
    rounds = Rounds(7, 3, reported.append)
    rounds.next()
    rounds.next()
    rounds.end()
    assert reported == [2, 2, 3]
    rounds.end()
    assert sum(reported) == 7


@pytest.mark.parametrize("editor", EDITORS)
def test_the_bar_counts_the_edits_of_every_editor(editor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the steps of the contract: a report of no finished edit divided by zero."""
    monkeypatch.setattr(stored_bar, "tqdm", Recorded)
    subject = Subject(editor, "llama")
    tiny = subject.model, subject.tokenizer
    made = IndependentEdits(*tiny, subject.make(), None, model_identity(*tiny), measure_edits=False)
    assert all(isinstance(edit, Delta) for edit in made.in_order([(request,) for request in EDIT_REQUESTS[:2]]))
    assert Recorded.shown[-1] == (2, "")
