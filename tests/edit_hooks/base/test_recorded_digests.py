"""Checksums among recorded settings, given back: files that have changed since are refused before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_runs import build
from safetensors.torch import save_file

import edit_hooks.editors.mend
from edit_hooks import EditingError, load_editor
from edit_hooks.editors.bird import BIRD

OTHER = "0" * 64


def texts(path: Path) -> None:
    path.write_text("Port Elna lies on Lake Odra.\n\nMarsk is the capital of Tolmeria.", encoding="utf-8")


def matrices(path: Path) -> None:
    save_file({"1": torch.eye(4)}, path)


def pool(path: Path) -> None:
    answers = {"target_new": {"str": "Tolmeria"}, "target_true": {"str": "Dravonia"}}
    record: dict[str, Any] = {"requested_rewrite": {"prompt": "{} lies in", "subject": "Marsk", **answers}}
    record |= {"case_id": 0, "paraphrase_prompts": ["Marsk is in"], "neighborhood_prompts": ["Port Elna lies in"]}
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")


def folder(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}", encoding="utf-8")


def network(path: Path) -> None:
    save_file({"a": torch.zeros(1)}, path, {"digest": "1" * 64})


# editor, its other settings, the setting that names a file, what writes it, its name, the checksum
FILES = [
    ("memit", {}, "second_moments", texts, "texts.txt", "moment_digest"),
    ("alphaedit", {}, "projectors", matrices, "p.safetensors", "projectors_digest"),
    ("ike", {"embedder": "words"}, "pool", pool, "pool.jsonl", "pool_digest"),
    ("ice", {}, "embedder", folder, "embedder", "embedder_digest"),
    ("serac", {"artifact": "identity"}, "classifier", folder, "classifier", "artifact_digest"),
    ("mend", {}, "artifact", network, "mend.safetensors", "artifact_digest"),
]


@pytest.mark.parametrize(("editor", "others", "setting", "write", "name", "digest"), FILES)
def test_a_file_with_another_checksum_than_the_recorded_one_is_refused(
    editor: str,
    others: dict[str, Any],
    setting: str,
    write: Callable[[Path], None],
    name: str,
    digest: str,
    tiny_model: Callable[..., torch.nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(edit_hooks.editors.mend, "read_manifest", lambda path: {"editor": {}})
    path = tmp_path / name
    write(path)
    given, model = {**others, setting: str(path)}, tiny_model("llama")
    recorded = getattr(load_editor(editor, given).default_config(model), digest)
    assert recorded not in (None, OTHER)
    again = load_editor(editor, {**given, digest: recorded}).default_config(model)
    assert getattr(again, digest) == recorded
    with pytest.raises(EditingError, match=rf"{digest}' is {OTHER}, but {setting}=.*{recorded}.*drop '{digest}'"):
        load_editor(editor, {**given, digest: OTHER}).default_config(model)


@pytest.mark.parametrize(
    ("editor", "settings"),
    [
        ("memit", {"second_moments": "self", "moment_digest": OTHER}),
        ("memit", {"moment_digest": OTHER}),
        ("serac", {"artifact": "identity", "classifier": "words", "artifact_digest": OTHER}),
        ("mend", {"artifact": "identity", "artifact_digest": OTHER}),
    ],
)
def test_a_checksum_of_no_file_is_refused(
    editor: str, settings: dict[str, Any], tiny_model: Callable[..., torch.nn.Module]
) -> None:
    with pytest.raises(EditingError, match=f"is {OTHER}, but .* names no file"):
        load_editor(editor, settings).default_config(tiny_model("llama"))


def test_tables_that_are_no_file_and_editors_inside_others_count_as_well(
    tiny_model: Callable[..., torch.nn.Module], tiny_path: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(EditingError, match=f"phrase_table_digest' is {OTHER}, but wording='own' has the checksum"):
        BIRD({"phrase_table_digest": OTHER}).default_config(tiny_model("llama"))
    texts(path := tmp_path / "texts.txt")
    inner = {"second_moments": str(path), "moment_digest": OTHER}
    with pytest.raises(EditingError, match=f"moment_digest' is {OTHER}"):  # in the constructor, without weights
        build(str(tiny_path("llama")), editor="rect", editor_args={"base": "memit", "base_settings": inner})
