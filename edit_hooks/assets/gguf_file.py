"""A GGUF file as an ordinary model folder: its weights de-quantized, its tokenizer beside them.

The folder is written once into the user's cache, under a temporary name, and found by the file's hash, the dtype and
the release of transformers that reads the format. It has the file's name, by which results name the model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import uuid
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import cache_root, sha256_of
from edit_hooks.utils.storage.locks import locked

log = get_logger("lm_eval.edited_hf")

DTYPES = ("float32", "bfloat16", "float16")
MAGIC = b"GGUF"


def is_gguf_file(pretrained: object) -> bool:
    """Whether a name is that of a GGUF file on this machine."""
    return isinstance(pretrained, str) and pretrained.endswith(".gguf") and Path(pretrained).expanduser().is_file()


def config_source(pretrained: str) -> dict[str, str]:
    """Arguments of ``AutoConfig.from_pretrained`` for a folder, a hub id, or a GGUF file, whose header is read."""
    if not is_gguf_file(pretrained):
        return {"pretrained_model_name_or_path": pretrained}
    path = Path(pretrained).expanduser()
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def gguf_model_path(pretrained: str, dtype: Any = None) -> Path:
    """Return the folder of a GGUF file's model, converting it first when the cache has none.

    Args:
        pretrained: the file.
        dtype: precision of the stored weights; float32, in which they are de-quantized, unless another is named.

    Raises:
        EditingError: the file is no GGUF file or of an architecture that transformers does not read, the package gguf
            is missing, or the cache cannot be written.
    """
    path, name = Path(pretrained).expanduser(), str(dtype or "float32").removeprefix("torch.")
    name = "float32" if name == "auto" else name
    if name not in DTYPES:
        raise EditingError(f"dtype={name} of a GGUF file. Accepted: auto, {', '.join(DTYPES)}.")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise EditingError(f"pretrained={pretrained} does not begin as a GGUF file; is the download complete?")
    if importlib.util.find_spec("gguf") is None:
        raise EditingError(
            f"pretrained={pretrained} is a GGUF file; reading it needs the package gguf: pip install gguf."
        )
    release = importlib.metadata.version("transformers")
    home = cache_root() / "gguf"
    folder = home / f"{sha256_of(path)[:32]}-{name}-{release}" / path.stem
    if folder.is_dir():
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        waiting = f"{path.name}: waiting for another process that is converting a GGUF file in {home}"
        with locked(home / ".conversion.lock", waiting):
            for leftover in home.glob(".tmp-*"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            if not folder.is_dir():
                log.warning("%s: de-quantizing it to %s in %s, once", path.name, name, folder)
                _convert(path, folder, name)
    except OSError as error:
        raise EditingError(
            f"pretrained={pretrained}: its model cannot be written to the cache folder {home} ({error}). Free "
            "some space there, or name another folder in the environment variable LM_EDIT_CACHE."
        ) from error
    return folder


def _convert(path: Path, folder: Path, dtype: str) -> None:
    """Write the model of a file; the folder is complete or absent."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from edit_hooks.utils.storage.outputs import disk_errors

    work = folder.parents[1] / f".tmp-{uuid.uuid4().hex}"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        )
        with disk_errors(folder):
            model.save_pretrained(work)
            tokenizer.save_pretrained(work)
        folder.parent.mkdir(exist_ok=True)
        work.rename(folder)
    except (OSError, EditingError):
        raise
    except Exception as error:  # transformers and gguf raise whatever their parsing does
        raise EditingError(
            f"pretrained={path} cannot be read as a model: {first_line(error)} transformers reads GGUF files of some "
            "architectures; name the folder of the original model instead."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
