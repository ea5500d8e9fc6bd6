"""Artifacts of a training: weights, a manifest and digests of the training edits in one safetensors file.

The header of the file holds the manifest as JSON, a checksum over manifest and tensors, and the digest that identifies
the artifact; ``manifest.json`` is a readable copy. The manifest's section ``editor`` holds the settings that apply to
every edit made with the artifact.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from edit_hooks.base.config import EditorConfig
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.modeling.tensors import write_tensors
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.storage.files import user_path, write_atomically
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.json_io import parse_json
from edit_hooks.utils.text.readable import readable

MANIFEST_NAME = "manifest.json"
TRAINED_ON = "trained_on"  # the tensor that holds the digests of the training edits
# Sections of the manifest about the run that made the artifact: places, losses, and settings that no edit reads.
RUN_SECTIONS = frozenset({"model_name", "data", "training", "step", "losses", "skipped_steps", "imported"})


def edit_digest(prompt: str, target: str) -> int:
    """63 bits of the SHA-256 of an edit's two texts, by which an artifact records its training edits."""
    text = json.dumps([prompt.strip(), target.strip()], ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
@readable
class ArtifactKind:
    """The artifacts of one training.

    Attributes:
        format: name and version of the file's layout.
        weights_name: name of the file in its folder.
        what: the trained part, for messages, as in ``hyper-network``.
        command: the command that trains it.
    """

    format: str
    weights_name: str
    what: str
    command: str

    def file(self, path: str | Path) -> Path:
        """The weights file of an artifact, which may be named by its folder or by that file."""
        file = user_path(path, f"trained {self.what}")
        if file.is_dir():
            file = file / self.weights_name
        if not file.is_file():
            raise EditingError(f"no trained {self.what} at {path}; give a folder written by {self.command}.")
        return file

    def digest(self, path: str | Path) -> str:
        """SHA-256 (hex) over what an edit reads of an artifact: tensors, and manifest without facts of its run.

        Raises:
            EditingError: there is no artifact at ``path``, or a file without a digest.
        """
        file = self.file(path)
        if (digest := self._read_header(file).get("digest")) is None:
            raise EditingError(f"{file} is no trained {self.what}: its header has no digest.")
        return digest

    def save(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        manifest: Mapping[str, Any],
        training_digests: Collection[int] = (),
    ) -> None:
        """Write an artifact: a safetensors file with weights and manifest, and a readable copy of the manifest.

        Args:
            training_digests: :func:`edit_digest` of every training edit.
        """
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(manifest, indent=1)
        tensors = {**tensors, TRAINED_ON: torch.tensor(sorted(training_digests), dtype=torch.int64)}
        digests = _tensor_digests(tensors)
        header = {
            "format": self.format,
            "manifest": text,
            "checksum": key_of([text, digests]),
            "digest": _content_digest(text, digests),
        }
        write_tensors(folder / self.weights_name, tensors, header)
        write_atomically(folder / MANIFEST_NAME, text + "\n")

    def read_manifest(self, path: str | Path) -> dict[str, Any]:
        """The manifest of an artifact.

        Raises:
            EditingError: there is no artifact at ``path``, or the file is damaged or of another kind.
        """
        file = self.file(path)
        header = self._read_header(file)
        if header.get("format") != self.format:
            raise EditingError(
                f"{file} is no trained {self.what} (format {header.get('format')!r}, want {self.format!r})."
            )
        manifest = parse_json(header.get("manifest", ""), f"manifest of {file}", finite=False)
        sections = ("editor", "training", "network")
        if not isinstance(manifest, dict) or not all(isinstance(manifest.get(name, {}), dict) for name in sections):
            raise EditingError(f"the {self.what} in {file} is damaged: its manifest is no mapping of mappings.")
        return manifest

    def _read_header(self, file: Path) -> dict[str, str]:
        try:
            with safe_open(file, framework="pt") as tensors:
                return tensors.metadata() or {}
        except Exception as error:
            raise EditingError(f"cannot read the {self.what} in {file}: {first_line(error)}.") from error

    def load(self, path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The weights of an artifact and its manifest.

        Raises:
            EditingError: see :meth:`read_manifest`.
        """
        manifest = self.read_manifest(path)
        with safe_open(self.file(path), framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digests = _tensor_digests(tensors)
        wanted = {
            "checksum": key_of([header["manifest"], digests]),
            "digest": _content_digest(header["manifest"], digests),
        }
        if any(header.get(name) != value for name, value in wanted.items()):
            raise EditingError(f"the {self.what} in {self.file(path)} is damaged (checksum differs); train it again.")
        tensors.pop(TRAINED_ON, None)
        return tensors, manifest

    def read_training_digests(self, path: str | Path) -> frozenset[int]:
        """:func:`edit_digest` of every edit that an artifact was trained on."""
        with safe_open(self.file(path), framework="pt") as file:
            return frozenset(file.get_tensor(TRAINED_ON).tolist() if TRAINED_ON in file.keys() else ())  # noqa: SIM118

    def apply_settings(
        self, config: EditorConfig, given: Mapping[str, Any], path: str, manifest: Mapping[str, Any]
    ) -> None:
        """Set the settings that an artifact fixes.

        Args:
            given: the user's settings.

        Raises:
            EditingError: the user chose another value for one of them.
        """
        for name, value in manifest["editor"].items():
            if name in given and getattr(config, name) != value:
                raise EditingError(
                    f"editor setting {name!r} is {getattr(config, name)!r}, but the {self.what} in "
                    f"{path} was trained with {value!r}; drop the setting or train another one."
                )
            setattr(config, name, value)


class TrainingEdits:
    """The edits that artifacts were trained on, by digest; each artifact is read once.

    Args:
        kind: of the artifacts.
    """

    def __init__(self, kind: ArtifactKind) -> None:
        self._kind = kind
        self._digests: dict[str | None, frozenset[int]] = {}

    def warnings(self, path: str, digest: str | None, requests: Sequence[EditRequest]) -> list[str]:
        """The warning if the artifact at ``path``, with the checksum ``digest``, was trained on one of the requests."""
        if digest not in self._digests:
            self._digests[digest] = self._kind.read_training_digests(path)
        if not any(edit_digest(one.bare_text, one.target_new) in self._digests[digest] for one in requests):
            return []
        return [
            f"the artifact ({self._kind.what}) was trained on this very edit, so its scores do not carry over to "
            "unseen edits; evaluate on others."
        ]


def _tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: [list(t.shape), str(t.dtype), tensor_digest(t)] for name, t in tensors.items()}


def _content_digest(manifest: str, tensor_digests: Mapping[str, Any]) -> str:
    parts = {name: part for name, part in json.loads(manifest).items() if name not in RUN_SECTIONS}
    return key_of([parts, tensor_digests])
