"""Names that `judges` exports, and renamed ones."""

from __future__ import annotations

import pytest

import judges


def test_every_exported_name_exists() -> None:
    assert all(hasattr(judges, name) for name in judges.__all__)


def test_a_renamed_function_warns() -> None:
    with pytest.warns(FutureWarning, match=r"'judges\.normalise' is now called 'judges\.normalize'"):
        from judges import normalise
    assert normalise is judges.normalize
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        judges.unknown  # noqa: B018
