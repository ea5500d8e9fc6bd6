"""Files of matrices per layer, here or on the hub: ``hf:owner/name@revision`` or ``hf:owner/name@revision/path``."""

from __future__ import annotations

import os
import re

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.logs import get_logger

log = get_logger(__name__)

HUB_PREFIX = "hf:"
DEFAULT_FILE = "second_moments.safetensors"
_ADDRESS = re.compile(r"hf:(?P<repository>[\w.-]+/[\w.-]+)@(?P<revision>[\w.-]+)(?:/(?P<path>[^\0]+))?")
_COMMIT = re.compile("[0-9a-f]{40}")


def is_hub_address(source: object) -> bool:
    """Whether a source is an address of this form."""
    return isinstance(source, str) and source.startswith(HUB_PREFIX)


def matrix_file(source: str | os.PathLike[str]) -> str:
    """The file on this machine: downloaded once for an address on the hub, else the path itself.

    The file is data alone: nothing of the repository is executed. HF_HUB_OFFLINE is respected.

    Raises:
        EditingError: for an address without a revision, and a file that cannot be reached.
    """
    if not is_hub_address(source):
        return os.fspath(source)
    found = _ADDRESS.fullmatch(str(source))
    if found is None:
        raise EditingError(
            f"{source!r} is no address on the hub; hf:owner/name@revision is needed, with /path behind it for another "
            f"file than {DEFAULT_FILE}. The revision is a commit, so that the numbers stay the same."
        )
    revision, path = found["revision"], found["path"] or DEFAULT_FILE
    if not _COMMIT.fullmatch(revision):
        log.warning(
            "revision %r of %s can change; the results record the SHA-256 of %s.", revision, found["repository"], path
        )
    try:
        from huggingface_hub import hf_hub_download

        return hf_hub_download(found["repository"], path, revision=revision)
    except Exception as error:  # the hub client raises errors of several libraries, httpx and OSError among them
        raise EditingError(
            f"{path} of {found['repository']} (revision {revision}) cannot be reached on the hub: {first_line(error)}. "
            "Download it where there is a network and give its path."
        ) from error
