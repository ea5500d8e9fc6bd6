"""The generated blocks by name; each is a function of one argument, the word behind the name in the comment."""

from __future__ import annotations

from collections.abc import Callable

from block import ROOT, Block
from blocks_benchmarks import BENCHMARK_BLOCKS
from blocks_editors import EDITOR_BLOCKS
from blocks_field import FIELD_BLOCKS
from blocks_gallery import GALLERY_BLOCKS
from blocks_judged import JUDGED_BLOCKS
from blocks_measured import MEASURED_BLOCKS
from blocks_options import OPTION_BLOCKS
from blocks_reference import REFERENCE_BLOCKS
from blocks_reverse import REVERSE_BLOCKS

TITLE = "# "


def copied(path: str) -> Block:
    """A file of the repository without its title, which the page has."""
    text = (ROOT / path).read_text(encoding="utf-8")
    title, _, rest = text.partition("\n")
    if not title.startswith(TITLE):
        raise ValueError(f"{path} begins with {title!r} and not with a title")
    return Block(rest.strip("\n"), source=path)


BLOCKS: dict[str, Callable[[str], Block]] = {
    "copy": copied,
    **EDITOR_BLOCKS,
    **MEASURED_BLOCKS,
    **REVERSE_BLOCKS,
    **FIELD_BLOCKS,
    **JUDGED_BLOCKS,
    **BENCHMARK_BLOCKS,
    **GALLERY_BLOCKS,
    **OPTION_BLOCKS,
    **REFERENCE_BLOCKS,
}
