"""``lm-edit cache``."""

from __future__ import annotations

import pytest
from command_line import printed_lines

from edit_hooks import Delta
from edit_hooks.store.store import Description, Store
from lm_edit.cli.main import main


@pytest.fixture
def store(tmp_path):
    """A store with one file of each kind, and a file that another process is writing."""
    store = Store(tmp_path / "store")
    description = Description(what="test", model="m", code="c", inputs={"number": 1})
    store.save_delta(description, Delta())
    store.save_json("verdicts", description, {"label": "yes"})
    (store.root / "answers.sqlite").write_bytes(b"x" * 100)
    (store.root / "deltas" / ".half.safetensors.tmp").write_text("being written")
    return store


def test_the_store_is_shown_by_kind(store, capsys):
    assert main(["cache", "--store", str(store.root)]) == 0
    rows = [line.split()[:2] for line in printed_lines(capsys)[2:]]
    assert rows == [["answers", "1"], ["deltas", "1"], ["verdicts", "1"], ["total", "3"]]


def test_pruning_needs_a_size(store, capsys):
    assert main(["cache", "prune", "--store", str(store.root)]) == 2
    assert "--max-size" in capsys.readouterr().err


def test_pruning_removes_stored_files_only(store):
    assert main(["cache", "prune", "--max-size", "1MB", "--store", str(store.root)]) == 0 and len(store.size()) == 3
    assert main(["cache", "prune", "--max-size", "0", "--store", str(store.root)]) == 0 and not store.size()
    assert (store.root / "deltas" / ".half.safetensors.tmp").exists()
