"""``lm-edit cache``."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import dataclass

import pytest
from command_line import printed_lines

from edit_hooks import Delta
from edit_hooks.answers import GeneratedText
from edit_hooks.store.answer_cache import AnswerCache
from edit_hooks.store.layout import mark
from edit_hooks.store.store import Description, Store
from lm_edit.cli.main import main


@dataclass(frozen=True)
class Item:
    prompt: str


@pytest.fixture
def store(tmp_path):
    """A store with one file of each kind, and a file that another process is writing."""
    store = Store(tmp_path / "store")
    description = Description(what="test", model={"weights": "m"}, code="c", inputs={"number": 1})
    store.save_delta(description, Delta())
    store.save_json("verdicts", description, {"label": "yes"})
    answer = GeneratedText(raw="b", token_ids=(1,))
    AnswerCache(store.root, {}).get([Item("a")], [{}], lambda missing, finished: finished([0], [answer]))
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


FOREIGN = (
    "model.safetensors",
    "package.json",
    "out/results_2026.json",
    "deltas/ab/edit-0.safetensors",
    f"deltas/ab/{'c' * 64}.safetensors",  # not in the folder of its first two digits
    f"json/{'a' * 64}.json",
    "locks/poetry.lock",
    "verdicts.sqlite",
)


@pytest.mark.parametrize("marked", [True, False])
def test_other_files_are_never_removed(store, marked, capsys):
    for name in FOREIGN:
        (store.root / name).parent.mkdir(parents=True, exist_ok=True)
        (store.root / name).write_text("precious")
    arguments = ["cache", "prune", "--max-size", "0", "--store", str(store.root)]
    if not marked:
        (store.root / ".lm-edit-store").unlink()
        before = sorted(store.root.rglob("*"))
        assert main(arguments) == 2 and "has no marker .lm-edit-store" in capsys.readouterr().err
        assert sorted(store.root.rglob("*")) == before and not store.size()
        return
    assert main([*arguments, "--dry-run"]) == 0 and len(store.size()) == 3
    assert main(arguments) == 0 and not store.size()
    assert all((store.root / name).read_text() == "precious" for name in FOREIGN)


@pytest.mark.parametrize("content", [b"", b"no database", None])
def test_a_file_that_only_has_the_name_of_the_answers_stays(tmp_path, content):
    path = tmp_path / "answers.sqlite"
    if content is None:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("CREATE TABLE answers_of_the_quiz (text)")
        mark(tmp_path)
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    main(["cache", "prune", "--max-size", "0", "--store", str(tmp_path)])
    assert path.read_bytes() == before


def test_links_are_not_followed(store, tmp_path):
    """Neither a folder nor a file of another store is reached through a link."""
    (delta,) = store.root.rglob("*.safetensors")
    other = Store(tmp_path / "other")
    (other.root / "deltas").mkdir(parents=True)
    (other.root / "deltas" / delta.parent.name).symlink_to(delta.parent)
    (other.root / "json").symlink_to(store.root / "json")
    (other.root / "answers.sqlite").symlink_to(store.root / "answers.sqlite")
    mark(other.root)
    assert other.size() == {} and main(["cache", "prune", "--max-size", "0", "--store", str(other.root)]) == 0
    assert len(store.size()) == 3


def test_a_file_of_the_future_is_not_kept_for_ever(store):
    (delta,) = store.root.rglob("*.safetensors")
    os.utime(delta, (2**33, 2**33))
    assert store.to_prune(store_bytes(store) - 1)[0].path == delta


def store_bytes(store):
    return sum(size for _, size in store.size().values())
