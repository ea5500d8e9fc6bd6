"""Edits of editors outside the package: the store tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tuning_cases import CASES, tune

from edit_hooks import Delta, load_editor
from edit_hooks.base.config import config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.contract.tiny_models import EDIT_LAYER, build_model, build_tokenizer
from edit_hooks.editors.ft_m import FTM, FTConfig
from edit_hooks.in_context.combined import EditorWithContext
from edit_hooks.lm.editing.independent import IndependentEdits
from edit_hooks.lm.editing.stream import EditStream, Guard
from edit_hooks.lm.options.plan import EditPlan
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.store.store import Store

SETTINGS = {"layers": [EDIT_LAYER], "num_steps": 3, "lr": 0.01}


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return build_model("llama"), build_tokenizer("byte_bpe_bos")


class Mild(FTM):
    """Fine-tuning whose update is multiplied by a factor, here 1."""

    name = "varied"
    factor: ClassVar[float] = 1.0

    def compute(self, job: Any) -> list[Delta]:
        deltas = super().compute(job)
        for delta in deltas:
            delta.dense = {name: update * self.factor for name, update in delta.dense.items()}
        return deltas


class Bold(Mild):
    """The same under the same name with another factor."""

    name = "varied"
    factor = 5.0


class Unnamed(Mild):
    """The same without a name of its own."""

    factor = 3.0


@dataclass(kw_only=True)
class FiledConfig(FTConfig):
    """Settings with files."""

    factors: str | list[str] | None = config_field("files with factors", default=None, file=True)


class Filed(FTM):
    """Fine-tuning whose update is multiplied by the number in a file."""

    name = "filed"
    config_class = FiledConfig

    def compute(self, job: Any) -> list[Delta]:
        deltas = super().compute(job)
        for delta in deltas:
            factor = float(Path(job.config.factors).read_text())
            delta.dense = {name: update * factor for name, update in delta.dense.items()}
        return deltas


MILD, BOLD, UNNAMED = (f"{__name__}:{editor.__name__}" for editor in (Mild, Bold, Unnamed))
CASE = CASES[1]


def independent(tiny: Any, editor: Editor[Any], store: Store | None) -> Delta:
    edits = IndependentEdits(*tiny, editor, store, model_identity(*tiny), quiet=True, measure_edits=False)
    (edit,) = edits.in_order([(CASE.request,)])
    assert isinstance(edit, Delta)
    return edit


def with_context(tiny: Any, editor: Editor[Any], store: Store | None) -> Delta:
    return independent(tiny, EditorWithContext(editor, load_editor("ice")), store)


def stream_step(tiny: Any, editor: Editor[Any], store: Store | None) -> Delta:
    plan = EditPlan([((CASE.request,),)], cumulative=True)
    stream = EditStream(*tiny, editor, plan, store, model_identity(*tiny), Guard(), quiet=True)
    stream.make()
    return stream.deltas[0]


@pytest.mark.parametrize("make", [independent, with_context, stream_step])
def test_two_classes_of_one_name_have_edits_of_their_own(make: Callable[..., Delta], tiny: Any, tmp_path: Path) -> None:
    def checksums(store: Store | None) -> list[str]:
        return [make(tiny, load_editor(editor, SETTINGS), store).checksum() for editor in (MILD, BOLD)]

    fresh = checksums(None)
    assert fresh[0] != fresh[1], "the factor has no effect"
    store = Store(tmp_path)
    for _ in range(2):
        assert checksums(store) == fresh and store.size()["deltas"][0] == 2


def identity(editor: Editor[Any]) -> str:
    """The identity of an editor in a key, without the name of this module."""
    return editor.key_identity.replace(f"{__name__}:", "")


def test_classes_of_other_packages_are_in_the_keys_of_editors_and_of_those_that_wrap_them() -> None:
    assert identity(load_editor(MILD, SETTINGS)) == "varied (Mild)"
    for name in ("rect", "prune", "simie"):
        assert identity(load_editor(name, {"base": BOLD})) == f"{name} (Bold)"
    assert identity(EditorWithContext(load_editor(BOLD), load_editor("ice"))) == "varied+ice (Bold)"


@pytest.mark.parametrize("name", EDITORS)
def test_the_keys_of_built_in_editors_hold_the_name_alone(name: str) -> None:
    """As in the stores of earlier releases."""
    editor = load_editor(name)
    assert editor.key_identity == name
    assert EditorWithContext(editor, load_editor("ice")).key_identity == f"{name}+ice"


def test_a_class_without_a_name_of_its_own_is_named_by_its_class(tiny: Any) -> None:
    assert (Mild.name, Bold.name, Unnamed.name, FTM.name) == ("varied", "varied", "Unnamed", "ft_m")
    (delta,) = load_editor(UNNAMED, SETTINGS).edit(*tiny, [CASE.request])
    assert delta.meta["editor"] == "Unnamed"


def test_the_trials_of_two_classes_of_one_name_are_two(tiny: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    for editor in (MILD, BOLD, MILD):
        tune(tiny, editor, [SETTINGS], [CASE], store)
    assert store.size()["trials"][0] == 2


@pytest.mark.parametrize("base", ["alone", "rect", "icl"])
def test_the_content_of_a_file_that_a_setting_names_is_in_the_keys(base: str, tiny: Any, tmp_path: Path) -> None:
    file, store = tmp_path / "factor.txt", Store(tmp_path / "store")
    settings = {**SETTINGS, "factors": str(file)}

    def checksum(store: Store | None) -> str:
        editor = load_editor(f"{__name__}:Filed", settings)
        if base == "rect":
            editor = load_editor("rect", {"base": f"{__name__}:Filed", "base_settings": settings})
        return (with_context if base == "icl" else independent)(tiny, editor, store).checksum()

    seen = []
    for factor in ("1", "10"):
        file.write_text(factor)
        seen.append(checksum(None))
        assert [checksum(store), checksum(store)] == [seen[-1]] * 2
    assert seen[0] != seen[1] and store.size()["deltas"][0] == 2
    file.write_text("1")
    assert checksum(store) == seen[0] and store.size()["deltas"][0] == 2


def test_files_in_lists_count_and_settings_without_files_have_no_digests(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    config = FiledConfig(factors=[str(tmp_path / "a"), str(tmp_path / "b")])
    assert config.to_dict()["file_digests"]["factors"][str(tmp_path / "b")] is None
    assert len(config.to_dict()["file_digests"]["factors"][str(tmp_path / "a")]) == 64
    assert "file_digests" not in FiledConfig().to_dict()
    for name in EDITORS:
        config_class = editor_class(name).config_class
        assert config_class().to_dict().keys() == {item.name for item in fields(config_class)}
