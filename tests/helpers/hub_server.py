"""A hub of data sets or models on loopback, which the real client of the Hugging Face hub reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest
from file_server import FileServer, serve_files


@contextmanager
def serve_hub(
    files: dict[str, bytes],
    repository: str,
    commit: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    *revisions: str,
    kind: str = "datasets/",
) -> Iterator[FileServer]:
    """Serve the files of one repository at a commit, and at other revisions that resolve to it.

    Args:
        files: path in the repository -> content.
        cache: the client's cache, empty at first.
        kind: beginning of its addresses; "" for a model.
    """
    constants = huggingface_hub.constants
    served = {
        f"{kind}{repository}/resolve/{revision}/{path}": content
        for revision in (commit, *revisions)
        for path, content in files.items()
    }
    with serve_files(served) as server:
        server.headers = {"X-Repo-Commit": commit}
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template[template.index("/{repo_id}") :]
        )
        yield server
