"""The content-addressed store: keys, damaged entries, pruning, locks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.store.store import Description, Store, sizes_outside_store


def description(**inputs: object) -> Description:
    return Description(what="test", model={"weights": "m"}, code="c", inputs=inputs)


def delta(value: float) -> Delta:
    return Delta(factors={"layer.weight": Factor(torch.full((2, 1), value), torch.ones(3, 1))})


def test_results_are_stored_by_their_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    assert store.load_delta(description(a=1)) is None and store.load_json("kind", description(a=1)) is None
    store.save_delta(description(a=1), delta(2.0))
    store.save_json("kind", description(a=1), {"x": [1.5, None]})
    stored = store.load_delta(description(a=1))
    assert stored is not None and stored.checksum() == delta(2.0).checksum()
    assert store.load_json("kind", description(a=1)) == {"x": [1.5, None]}
    others = [description(a=2), Description(what="test", model={"weights": "m"}, code="d", inputs={"a": 1})]
    assert [store.load_delta(other) for other in others] == [None, None]
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert Store(f"~/{tmp_path.name}").load_json("kind", description(a=1)) is not None


@pytest.mark.parametrize("damage", ["truncated", "header", "other description", "empty"])
def test_a_damaged_edit_counts_as_missing_and_is_removed(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    store.save_delta(description(a=1), delta(2.0))
    (path,) = tmp_path.rglob("*.safetensors")
    content = path.read_bytes()
    if damage == "other description":
        store.save_delta(description(a=2), delta(3.0))
        (other,) = set(tmp_path.rglob("*.safetensors")) - {path}
        other.replace(path)
    else:
        header = content.replace(b"diagnostics", b"diagnosticz").replace(b'"meta"', b'"mata"')
        path.write_bytes({"truncated": content[:-3], "header": header, "empty": b""}[damage])
    assert store.load_delta(description(a=1)) is None
    assert not path.exists() and "computed again" in caplog.text


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"content": 1}', '{"content": 1, "checksum": 1, "description": 1}']
)
def test_damaged_json_counts_as_missing_and_is_removed(content: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save_json("kind", description(a=1), 1)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(content)
    assert store.load_json("kind", description(a=1)) is None and not path.exists()


def test_pruning_removes_the_least_recently_used(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(3):
        store.save_json("kind", description(a=number), number)
        (path,) = [path for path in tmp_path.rglob("*.json") if path.stat().st_mtime > 1e6]
        os.utime(path, (number, number))
    assert store.size() == {"kind": (3, sum(path.stat().st_size for path in tmp_path.rglob("*.json")))}
    assert store.load_json("kind", description(a=0)) == 0  # now the most recently used
    largest = max(path.stat().st_size for path in tmp_path.rglob("*.json"))
    assert store.prune(largest) == 2
    assert [store.load_json("kind", description(a=number)) for number in range(3)] == [0, None, None]
    assert store.prune() == 1 and store.size() == {} == Store(tmp_path / "nowhere").size()


def test_other_caches_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    store = Store()
    store.save_json("kind", description(), 1)
    (tmp_path / "stats").mkdir()
    (tmp_path / "stats" / "file").write_bytes(b"123")
    assert store.root == tmp_path / "store"
    assert sizes_outside_store(store) == {str(tmp_path / "stats"): (1, 3)}
