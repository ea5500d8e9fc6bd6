"""A corpus with the layout of a hub repository, read from the disk instead of the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from edit_hooks.contract.tiny_models import SENTENCES

REVISION = "0123456789abcdef"


@dataclass
class HubCorpus:
    """The corpus file, and the calls of the hub client so far."""

    shard: Path
    calls: list[tuple[Any, ...]] = field(default_factory=list)


def serve_corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> HubCorpus:
    """Write a corpus of the sentences of the tiny models and replace the hub client by one that reads it."""
    corpus = HubCorpus(folder / "data" / "train-00000.jsonl")
    corpus.shard.parent.mkdir(parents=True)
    records = [json.dumps({"id": number, "text": text}) for number, text in enumerate(SENTENCES)]
    corpus.shard.write_text("\n".join(records), encoding="utf-8")
    load_dataset = datasets.load_dataset

    class Info:
        sha = REVISION

    def dataset_info(_self: Any, repository: str, revision: str | None = None) -> type[Info]:
        corpus.calls.append(("info", repository, revision))
        return Info

    def load(repository: str, config: str | None, *, split: str, revision: str, streaming: bool = False) -> Any:
        corpus.calls.append(("load", repository, config, split, revision, streaming))
        return load_dataset("json", data_files=str(corpus.shard), split=split, streaming=streaming)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return corpus
