"""Versions that are not supported are named before anything is imported."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import pytest
from command_line import run_verb

import edit_hooks.lm
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.requirements import CHECKED, require_versions

REAL = metadata.version


@pytest.fixture(autouse=True)
def _checked_again() -> Iterator[None]:
    require_versions.cache_clear()
    yield
    require_versions.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version if name == package else REAL(name))


def test_the_checked_packages_have_bounds() -> None:
    bounds = [text for text in metadata.requires("lm-eval-editing") or () if ";" not in text]
    assert all(any(text.startswith((f"{name}>", f"{name}<")) for text in bounds) for name in CHECKED)
    require_versions()


@pytest.mark.parametrize(
    ("package", "version"),
    [("transformers", "4.57.1"), ("torch", "2.3.1+cu121"), ("lm-eval", "0.5.0"), ("lm-eval", "0.4.9")],
)
def test_a_version_out_of_bounds_is_named_with_the_command(
    package: str, version: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, package, version)
    wanted = f"{package} {version} is installed, but lm-eval-editing needs {package}"
    with pytest.raises(EditingError, match=r"Run: pip install '") as caught:
        _ = edit_hooks.lm.EditedHFLM  # as lm-eval's registry reads it
    assert wanted in str(caught.value) and "\n" not in str(caught.value)
    assert run_verb(["editors"]) == 2
    assert capsys.readouterr().err.startswith(f"lm-edit editors: {wanted}")


@pytest.mark.parametrize("version", ["2.4.0a0+07cecf4168.nv24.05", "2.99.0.dev20270101", "a-build-of-mine"])
def test_builds_of_vendors_and_of_ones_own_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "torch", version)
    require_versions()
    assert edit_hooks.lm.EditedHFLM.__name__ == "EditedHFLM"
