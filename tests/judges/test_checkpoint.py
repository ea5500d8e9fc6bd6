"""What a local judge is: the commit of its repository, or the content of its folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from hub_server import serve_hub

from judges import checkpoint
from judges.settings import JudgeSettings

FIRST, SECOND = "a1" * 20, "b2" * 20


def judge(model: str, **settings: str) -> JudgeSettings:
    return JudgeSettings(backend="hf", model=model, **settings)


@pytest.fixture(autouse=True)
def _new_process() -> Iterator[None]:
    checkpoint.commit_of.cache_clear()
    yield
    checkpoint.commit_of.cache_clear()


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True)
    for name, content in {"config.json": b"{}", "model.safetensors": b"weights", **files}.items():
        (path / name).write_bytes(content)
    return path


def test_a_branch_is_the_commit_to_which_it_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored verdicts of the repository as it was are not those of the repository as it is."""
    cache = tmp_path / "hub"
    with serve_hub({"config.json": b"{}"}, "org/judge", FIRST, cache, monkeypatch, "main", kind="") as server:
        before = judge("org/judge")
        assert before.identity["revision"] == FIRST == before.loaded_revision
        assert judge("org/judge", revision="main").identity == judge("org/judge", revision=FIRST).identity
        assert before.identity == judge("org/judge").identity
        server.headers = {"X-Repo-Commit": SECOND}
        server.files["org/judge/resolve/main/config.json"] = b'{"a": 1}'
        assert judge("org/judge").identity == before.identity, "one process has one judge"
        checkpoint.commit_of.cache_clear()
        assert judge("org/judge").identity["revision"] == SECOND


def test_without_a_network_the_cached_commit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    with serve_hub({"config.json": b"{}"}, "org/judge", FIRST, cache, monkeypatch, "main", kind="") as server:
        online = judge("org/judge").identity
        checkpoint.commit_of.cache_clear()
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        requests = server.requests.total()
        assert judge("org/judge").identity == online and server.requests.total() == requests
        assert judge("org/unknown").identity["revision"] is None
        assert judge("org/unknown", revision="v1").identity["revision"] == "v1"
        assert judge("org/unknown", revision=SECOND).identity["revision"] == SECOND


def test_a_copy_of_a_folder_is_the_same_judge(tmp_path: Path) -> None:
    """Whatever its place and the times of its files; documents and hidden files change no reply."""
    given = folder(tmp_path / "a" / "judge")
    copied = folder(tmp_path / "b" / "judge", **{"README.md": b"about", ".gitattributes": b"x"})
    (copied / ".cache").mkdir()
    os.utime(copied / "config.json", (1, 1))
    assert judge(str(given)).identity == judge(str(copied)).identity
    assert judge(str(given)).identity["model"] == "judge"
    (link := tmp_path / "link").symlink_to(given, target_is_directory=True)
    assert judge(str(link)).identity == judge(str(given)).identity


def test_other_bytes_of_equal_size_are_another_judge(tmp_path: Path) -> None:
    given = folder(tmp_path / "a" / "judge")
    before = judge(str(given)).identity
    other = folder(tmp_path / "b" / "judge", **{"model.safetensors": b"WEIGHTS"})
    state = (given / "model.safetensors").stat()
    os.utime(other / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert judge(str(other)).identity != before
    (given / "model.safetensors").write_bytes(b"weightS")
    os.utime(given / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert judge(str(given)).identity != before
    shutil.move(given / "config.json", given / "other.json")
    assert judge(str(given)).identity != before


def test_large_files_are_read_once_by_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(path: Path) -> str:
        read.append(path.name)
        return "00"

    monkeypatch.setattr(checkpoint, "sha256_of", counted)
    given = folder(tmp_path / "judge")
    assert judge(str(given)).identity == judge(str(given)).identity
    assert sorted(read) == ["config.json", "model.safetensors"]
