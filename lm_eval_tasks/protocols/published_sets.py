"""Sets of records that several benchmarks have of one publication."""

from __future__ import annotations

from edit_hooks.utils.storage.pinned_file import PinnedFile

LOCFT_3K = "locft_3k"  # data=hub:locft_3k


def locft_file(name: str, sha256: str) -> PinnedFile:
    """The 3,000 records of a data set on which LocFT-BF and CrispEdit print their tables (2509.22072, 2602.15823)."""
    return PinnedFile(
        repository="ICT-STAR/LocFT",
        commit="51db7854feb3596085051e45bf8b3147bfb0ccb1",
        path=f"data/{name}/{name}_3k.json",
        sha256=sha256,
    )
