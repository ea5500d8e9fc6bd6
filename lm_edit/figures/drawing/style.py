"""How figures look, whatever they show: colors of the series, font, size, and texts around the panels."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError, near_misses

FONT_SIZE = 7.5  # points
# Okabe and Ito's colors, which are distinct with color vision deficiencies, too; without yellow, for white paper.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#6E4B1F", "#222222")
# Lighter than the palette where that is dark; the same hues, so that texts about the colors hold.
DARK_PALETTE = ("#4FA8E8", "#E69F00", "#2BC29A", "#F07F3A", "#D98FB8", "#7CC7F2", "#B98A5A", "#BBBBBB")
PALETTES = {
    "okabe-ito": PALETTE,
    "tol-bright": ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB"),  # Paul Tol's
    "gray": ("#222222", "#888888", "#555555", "#BBBBBB"),
}
_COLOR = re.compile(r"#[0-9A-Fa-f]{6}")


class Style(NamedTuple):
    """A style.

    Attributes:
        dark: for a dark page.
        palette: colors of the series; none: those of the page.
        font: a family that is installed; "": the one that comes with matplotlib.
        font_size: of plain text, in points; other sizes follow.
        width, height: of the figure, in inches; ``None``: as its content needs.
        title, caption: whether they are in the figure.
    """

    dark: bool = False
    palette: tuple[str, ...] = ()
    font: str = ""
    font_size: float = FONT_SIZE
    width: float | None = None
    height: float | None = None
    title: bool = True
    caption: bool = True

    @property
    def colors(self) -> tuple[str, ...]:
        """Colors of the series."""
        return self.palette or (DARK_PALETTE if self.dark else PALETTE)

    @property
    def scale(self) -> float:
        """Size of texts relative to the usual one."""
        return self.font_size / FONT_SIZE

    def needing_matplotlib(self) -> str:
        """The first option of the command line that only matplotlib draws; "" without any."""
        usual = Style()
        options = {"--dark": "dark", "--font": "font", "--font-size": "font_size", "--width": "width"}
        options |= {"--height": "height", "--no-title": "title", "--no-caption": "caption"}
        return next((name for name, part in options.items() if getattr(self, part) != getattr(usual, part)), "")


USUAL = Style()
_style: ContextVar[Style] = ContextVar("style", default=USUAL)


def style() -> Style:
    """The style of the figure that is being drawn."""
    return _style.get()


@contextlib.contextmanager
def drawn_in(chosen: Style) -> Iterator[None]:
    """Scope in which figures are drawn in a style."""
    token = _style.set(chosen)
    try:
        yield
    finally:
        _style.reset(token)


def points(size: float) -> float:
    """A size of text at the usual font size, in points of this style."""
    return size * style().scale


def read_palette(text: str) -> tuple[str, ...]:
    """The colors of ``okabe-ito``, ``tol-bright`` or ``gray``, or those of a list ``#rrggbb,#rrggbb``.

    Raises:
        EditingError: for another text.
    """
    if text in PALETTES:
        return PALETTES[text]
    colors = tuple(part.strip() for part in text.split(","))
    if not all(map(_COLOR.fullmatch, colors)):
        raise EditingError(
            f"--palette {text}: give {', '.join(PALETTES)}, or colors as #0072B2,#E69F00.{near_misses(text, PALETTES)}"
        )
    return colors


def check_font(name: str) -> None:
    """Raise EditingError for a font that matplotlib does not find, which it would replace."""
    from matplotlib import font_manager

    known = font_manager.get_font_names()
    if name and name not in known:
        raise EditingError(f"--font {name}: not installed here.{near_misses(name, known)} Installed: {_some(known)}.")


def _some(names: list[str]) -> str:
    shown = sorted(names)[:12]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
