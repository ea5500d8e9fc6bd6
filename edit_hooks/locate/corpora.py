"""TODO: say what is here."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import key_of

SELF = "self"


TEXT_SUFFIXES = (".txt", ".jsonl")


SHUFFLE_BUFFER = 10_000


# --- sources ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Corpus:
    """A source of text: what identifies it, and the documents (``None`` for text the model samples)."""

    identity: dict[str, Any]
    texts: tuple[str, ...] | None = None
    hub: tuple[str, str | None, str, int] | None = None

    @property
    def is_finite(self) -> bool:
        return self.texts is not None


def _corpus(source: str | os.PathLike[str] | Sequence[str], seed: int) -> _Corpus:
    if isinstance(source, (list, tuple)):
        return _texts_corpus(list(source))
    name = os.fspath(source)  # type: ignore[arg-type]
    if name == SELF:
        return _Corpus({"kind": SELF, "seed": seed})
    path = Path(name).expanduser()
    if path.exists():
        return _texts_corpus(_read_texts(path))
    if path.suffix in TEXT_SUFFIXES or name.startswith((".", "/", "~")) or not 1 <= name.count("/") <= 2:
        raise EditingError(
            f"second moments come from {name!r}, which is neither a file or folder here, nor 'self', nor a hub id "
            "like wikimedia/wikipedia/20231101.en."
        )
    return _hub_corpus(name, seed)


def _texts_corpus(texts: list[str]) -> _Corpus:
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise EditingError("second moments need text; the given source holds none.")
    digest = hashlib.sha256(json.dumps(texts, ensure_ascii=False).encode()).hexdigest()
    return _Corpus({"kind": "texts", "documents": len(texts), "sha256": digest}, tuple(texts))


def _read_texts(path: Path) -> list[str]:
    files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES) if path.is_dir() else [path]
    texts: list[str] = []
    for file in files:
        try:
            content = file.read_text(encoding="utf-8")
            if file.suffix == ".jsonl":
                texts += [str(json.loads(line)["text"]) for line in content.splitlines() if line.strip()]
            else:
                texts += content.split("\n\n")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EditingError(f"cannot read text from {file}: {error!r}; .txt or .jsonl with 'text' fits.") from None
    return texts


def _hub_corpus(name: str, seed: int) -> _Corpus:
    name, _, revision = name.partition("@")
    owner, _, rest = name.partition("/")
    dataset, _, config = rest.partition("/")
    repository = f"{owner}/{dataset}"
    try:
        from huggingface_hub import HfApi

        sha = HfApi().dataset_info(repository, revision=revision or None).sha
    except Exception as error:
        raise EditingError(
            f"cannot reach the corpus {repository!r} on the hub ({type(error).__name__}). Use second_moments='self', "
            "the path of a text file, or a safetensors file with a matrix per layer."
        ) from None
    identity: dict[str, Any] = {
        "kind": "hub",
        "dataset": repository,
        "config": config or None,
        "split": "train",
        "revision": sha,
    }
    identity |= {"seed": seed, "shuffle_buffer": SHUFFLE_BUFFER}
    return _Corpus(identity, hub=(repository, config or None, str(sha), seed))


def _hub_texts(repository: str, config: str | None, sha: str, seed: int) -> Iterator[str]:
    """Texts in an order drawn from the seed: shards at random, records through a buffer (dumps begin with old ones)."""
    from datasets import load_dataset

    try:
        records = load_dataset(repository, config, split="train", revision=sha, streaming=True)
        for record in records.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER):
            yield str(record["text"])
    except KeyError as error:
        raise EditingError(f"records of {repository!r} have no field {error}; a corpus needs 'text'.") from None
    except Exception as error:
        raise EditingError(
            f"cannot read the corpus {repository!r} ({type(error).__name__}: {error}). A text file, a folder of them, "
            "or 'self' need no network."
        ) from None


def digest_of(source: str | os.PathLike[str]) -> str | None:
    """SHA-256 (hex) over a file or all text files of a folder; ``None`` for what is not on this disk."""
    path = Path(source).expanduser()
    if not path.exists():
        return None
    files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES) if path.is_dir() else [path]
    return key_of([[file.name, _file_digest(file, file.stat().st_mtime_ns)] for file in files])


@functools.lru_cache
def _file_digest(file: Path, _modified: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(2**24):
            digest.update(part)
    return digest.hexdigest()
