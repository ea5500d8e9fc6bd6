"""Text corpora for second moments: sampled text, files, hub data sets, lists.

A source is one of

- ``self``: text that the model samples at temperature 1 from its start token; nothing has to be downloaded and the
  statistics fit the model;
- ``published``: the text of ROME's and MEMIT's releases and what followed them, 100,000 articles of the English
  Wikipedia, each up to the model's context; a download of about 12 GB, and up to a hundred million tokens to read;
- a path: a ``.txt`` file (documents are separated by empty lines), a ``.jsonl`` file (field ``text``), or a folder of
  such files;
- a hub id, ``owner/name`` or ``owner/name/config``, optionally ``@revision``: field ``text`` of the training split;
- in Python also a list of texts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from edit_hooks.locate.moments.matrix_files import is_hub_address
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import read_text, sha256_of, user_path
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.json_io import read_rows

SELF = "self"


SAMPLER = 2  # version of the draws behind ``self``: another number if a seed draws other text


PUBLISHED = "published"


TEXT_SUFFIXES = (".txt", ".jsonl")


SHUFFLE_BUFFER = 10_000


Source = str | os.PathLike[str] | Sequence[str]
ACCEPTED_SOURCES = (
    "'self' (text of the model), 'published', the path of a text file or of a folder with some, a hub id like "
    "wikimedia/wikipedia/20231101.en, or a list of texts"
)


class HubDataset(NamedTuple):
    """A data set on the hub, pinned to a revision.

    Attributes:
        seed: of the order in which it is read.
        num_documents: records drawn uniformly from the whole data set, which is downloaded; ``None``: the data set is
            streamed, shuffled through a buffer, as far as needed.
    """

    repository: str
    config: str | None
    revision: str
    seed: int
    num_documents: int | None = None


# The releases of ROME, MEMIT and AlphaEdit read wikipedia 20200501.en, which is no longer offered; EasyEdit and later
# versions of AlphaEdit read this dump. They draw the articles with a fixed seed, so the edits' seed has no part in it.
PUBLISHED_DATASET = HubDataset(
    "wikimedia/wikipedia", "20231101.en", "b04c8d1ceb2f5cd4588862100d08de323dccfbaa", seed=0, num_documents=100_000
)


@dataclass(frozen=True)
class Corpus:
    """A source of text.

    Attributes:
        identity: what identifies the text (JSON-able), part of the key of stored second moments.
        texts: documents of a file, folder or list. hub: the data set of a hub corpus. With neither, the model samples.
        has_full_context: documents are cut at the model's context unless another length is set.
    """

    identity: dict[str, Any]
    texts: tuple[str, ...] | None = None
    hub: HubDataset | None = None
    has_full_context: bool = False

    @property
    def num_documents(self) -> int | None:
        """Number of documents if it is known ahead of reading them."""
        if self.texts is not None:
            return len(self.texts)
        return None if self.hub is None else self.hub.num_documents

    @property
    def is_finite(self) -> bool:
        """Whether the corpus is read to its end if no number of tokens is set."""
        return self.num_documents is not None

    @property
    def is_sampled(self) -> bool:
        return self.texts is None and self.hub is None

    def documents(self) -> Iterator[str]:
        """The documents of a corpus that is not sampled."""
        if self.texts is not None:
            return iter(self.texts)
        assert self.hub is not None
        return _read_hub(self.hub)


def is_text_source(source: object) -> TypeGuard[Source]:
    """Whether second moments are collected from text, rather than read from a file of matrices or a mapping."""
    return isinstance(source, (list, tuple)) or (
        isinstance(source, (str, os.PathLike)) and Path(source).suffix != ".safetensors" and not is_hub_address(source)
    )


def check_source(source: Source) -> None:
    """Refuse a source that cannot be read, without the network: a hub id is resolved when its text is needed.

    Raises:
        EditingError: as :func:`open_corpus`.
    """
    _require_text(source)
    if not isinstance(source, (str, os.PathLike)) or not _is_hub_id(os.fspath(source)):
        open_corpus(source, seed=0)


def _require_text(source: object) -> None:
    """Refuse what is no source of text, as a file of matrices, whose bytes or names would pass for text."""
    if isinstance(source, (list, tuple)):
        other = [type(text).__name__ for text in source if not isinstance(text, str)]
        if not other:
            return
        shown = f"a list with {other[0]} in it"
    elif isinstance(source, (str, os.PathLike)):
        if source and is_text_source(source):
            return
        shown = repr(os.fspath(source))
    else:
        shown = f"an object of type {type(source).__name__}"
    raise EditingError(f"{shown} is no source of text. Accepted: {ACCEPTED_SOURCES}.")


def open_corpus(source: Source, seed: int) -> Corpus:
    """Read a source, or resolve it on the hub.

    Args:
        seed: of sampled text, and of the order in which a hub corpus is read.

    Raises:
        EditingError: for sources that are unknown, unreadable, unreachable or empty.
    """
    _require_text(source)
    if not isinstance(source, (str, os.PathLike)):
        return _from_texts(source)
    name = os.fspath(source)
    if name == SELF:
        return Corpus({"kind": SELF, "seed": seed, "sampler": SAMPLER})
    if name == PUBLISHED:
        return Corpus(_hub_identity(PUBLISHED_DATASET), hub=PUBLISHED_DATASET, has_full_context=True)
    path = user_path(name, "corpus")
    if path.exists():
        return _from_texts(_read_texts(path))
    if not _is_hub_id(name):
        raise EditingError(f"there is no file or folder {name!r} to read text from. Accepted: {ACCEPTED_SOURCES}.")
    return _from_hub(name, seed)


def _is_hub_id(name: str) -> bool:
    path = user_path(name, "corpus")
    looks_local = path.suffix in TEXT_SUFFIXES or name.startswith((".", "/", "~"))
    return not path.exists() and not looks_local and 1 <= name.count("/") <= 2


def _from_texts(texts: Sequence[str]) -> Corpus:
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise EditingError("the given source is empty; statistics need text.")
    digest = hashlib.sha256(json.dumps(texts, ensure_ascii=False).encode()).hexdigest()
    return Corpus({"kind": "texts", "documents": len(texts), "sha256": digest}, texts=tuple(texts))


def _text_files(path: Path) -> list[Path]:
    """The file itself, or all text files of a folder."""
    return sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES) if path.is_dir() else [path]


def _read_texts(path: Path) -> list[str]:
    texts: list[str] = []
    for file in _text_files(path):
        if file.suffix == ".jsonl":
            texts += [_text_of(row, where) for where, row in read_rows(file, "corpus")]
        else:
            texts += read_text(file, "corpus").split("\n\n")
    return texts


def _text_of(row: object, where: str) -> str:
    if not isinstance(row, Mapping) or not isinstance(row.get("text"), str):
        raise EditingError(f"cannot read text from {where}: the field 'text' with a text is needed in every line.")
    return str(row["text"])


def _from_hub(name: str, seed: int) -> Corpus:
    name, _, revision = name.partition("@")
    owner, _, rest = name.partition("/")
    dataset, _, config = rest.partition("/")
    repository = f"{owner}/{dataset}"
    try:
        from huggingface_hub import HfApi

        sha = HfApi().dataset_info(repository, revision=revision or None).sha
    except Exception as error:
        raise EditingError(
            f"cannot reach the corpus {repository!r} on the hub ({type(error).__name__}). 'self', text of the model, "
            "and text files need no network."
        ) from None
    hub = HubDataset(repository, config or None, str(sha), seed)
    return Corpus(_hub_identity(hub), hub=hub)


def _hub_identity(hub: HubDataset) -> dict[str, Any]:
    """What identifies the text of a hub corpus."""
    identity = {
        "kind": "hub",
        "dataset": hub.repository,
        "config": hub.config,
        "split": "train",
        "revision": hub.revision,
        "seed": hub.seed,
    }
    drawn = {"documents": hub.num_documents} if hub.num_documents else {"shuffle_buffer": SHUFFLE_BUFFER}
    return {**identity, **drawn}


def _read_hub(hub: HubDataset) -> Iterator[str]:
    """Texts of a hub corpus, with users' errors.

    Raises:
        EditingError: for records without text, and for a corpus that cannot be reached.
    """
    try:
        for record in _draw_records(hub) if hub.num_documents else _stream_records(hub):
            yield str(record["text"])
    except KeyError as error:
        raise EditingError(f"records of {hub.repository!r} have no field {error}; a corpus needs 'text'.") from None
    except Exception as error:
        advice = "A text file, a folder of them, or 'self' need no network."
        if hub == PUBLISHED_DATASET:
            advice = (
                "second_moments=published needs it once per model (about 12 GB, 20 GB unpacked): run `lm-edit stats "
                "--source published` with the model's options where the hub can be reached and keep its folder, or use "
                "second_moments=self, text of the model, which needs no network."
            )
        raise EditingError(
            f"cannot read the corpus {hub.repository!r} ({type(error).__name__}: {error}). {advice}"
        ) from None


def _stream_records(hub: HubDataset) -> Iterator[Mapping[str, Any]]:
    """Stream records in an order drawn from the seed.

    Shards are read at random, records through a buffer, because dumps begin with old records.
    """
    from datasets import load_dataset

    records = load_dataset(hub.repository, hub.config, split="train", revision=hub.revision, streaming=True)
    yield from records.shuffle(seed=hub.seed, buffer_size=SHUFFLE_BUFFER)


def _draw_records(hub: HubDataset) -> Iterator[Mapping[str, Any]]:
    """Draw records uniformly from the whole data set.

    A stream would give neighbors of a single shard of a dump that is sorted by age.
    """
    from datasets import load_dataset

    assert hub.num_documents is not None
    records = load_dataset(hub.repository, hub.config, split="train", revision=hub.revision)
    drawn = random.Random(hub.seed).sample(range(len(records)), min(hub.num_documents, len(records)))
    for index in drawn:
        yield records[index]


def digest_of(source: str | os.PathLike[str]) -> str | None:
    """SHA-256 (hex) of a file, or of all text files of a folder.

    ``None`` for a path that does not exist.
    """
    path = Path(source).expanduser()
    if not path.exists():
        return None
    return key_of([[file.name, _file_digest(file, file.stat().st_mtime_ns)] for file in _text_files(path)])


@functools.lru_cache
def _file_digest(file: Path, _modified_ns: int) -> str:
    """SHA-256 (hex) of a file, cached until its modification time changes."""
    return sha256_of(file)
