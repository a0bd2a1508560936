"""The canvas of all pictures: rectangles, lines and measured text by role, written as SVG in any theme.

Units are pixels at the natural size; y grows downward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from ._fonts import ASCENT, DESCENT, FAMILY, width_of
from ._theme import DARK, LIGHT

MARGIN = 32
PREFIX = "saccade-"  # of CSS classes, to avoid a page's own styles
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not allowed in XML
_NUMBERS = re.compile(r"[\d.,−]*")
_SUBSCRIPT = 0.72  # of the font size
_MARKUP = re.compile(r"([_^])\{([^}]*)\}")


class TextRun(NamedTuple):
    """A part of a text: on the line, or a subscript (-1) or superscript (1)."""

    text: str
    place: int


def runs_of(markup: str) -> list[TextRun]:
    """``QK^{T}`` as runs; everything but ``_{}`` and ``^{}`` is text."""
    out, at = [], 0
    for match in _MARKUP.finditer(markup):
        out += [TextRun(markup[at : match.start()], 0), TextRun(match[2], 1 if match[1] == "^" else -1)]
        at = match.end()
    return [run for run in [*out, TextRun(markup[at:], 0)] if run.text]


def formula_width(markup: str, size: float, *, bold: bool = False) -> float:
    return sum(width_of(run.text, size * (_SUBSCRIPT if run.place else 1), bold=bold) for run in runs_of(markup))


class Canvas:
    """Collects shapes, and the extent of the picture."""

    def __init__(self, margin: int = MARGIN) -> None:
        self._margin = margin
        self._parts: list[str] = []
        self._left = self._top = float("inf")
        self._right = self._bottom = float("-inf")

    # --- drawing --------------------------------------------------------------------------------------------------

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str | None = None,
        stroke: str | None = None,
        line: float = 1.25,
        radius: float = 0,
        opacity: float | None = None,
        dash: str | None = None,
    ) -> None:
        self._reach(x, y, x + width, y + height)
        size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        round_ = f' rx="{_n(radius)}"' if radius else ""
        self._parts.append(f"<rect {size}{round_}{_paint(fill, stroke, line, opacity, dash)}/>")

    def circle(
        self,
        x: float,
        y: float,
        radius: float,
        *,
        fill: str | None = None,
        stroke: str | None = None,
        line: float = 1.25,
    ) -> None:
        self._reach(x - radius, y - radius, x + radius, y + radius)
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"{_paint(fill, stroke, line)}/>')

    def path(
        self,
        points: Sequence[tuple[float, float]],
        data: str,
        *,
        fill: str | None = None,
        stroke: str | None = None,
        line: float = 1.5,
        dash: str | None = None,
        opacity: float | None = None,
    ) -> None:
        """``data`` is an SVG path; ``points`` are its extreme corners; ``opacity`` is that of the stroke."""
        for x, y in points:
            self._reach(x, y, x, y)
        clear = f' stroke-opacity="{_n(opacity)}"' if opacity is not None else ""
        self._parts.append(f'<path d="{data}"{_paint(fill, stroke, line, dash=dash)}{clear}/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 14,
        fill: str = "ink",
        anchor: str = "start",
        bold: bool = False,
    ) -> float:
        """Plain text on one line with its baseline at ``y``; returns its width."""
        text = shown(text)
        width = width_of(text, size, bold=bold)
        self._place_text(x, y, width, size, anchor)
        held = "" if _NUMBERS.fullmatch(text) else _held(width)
        self._parts.append(f"<text{_at(x, y, size, fill, anchor, bold)}{held}>{escape(text)}</text>")
        return width

    def formula(
        self,
        x: float,
        y: float,
        markup: str,
        *,
        size: float = 14,
        fill: str = "ink",
        anchor: str = "start",
        bold: bool = False,
    ) -> float:
        """Text with ``_{subscripts}`` and ``^{superscripts}``; returns its width."""
        width = formula_width(markup, size, bold=bold)
        self._place_text(x, y, width, size, anchor)
        inner, level = [], 0.0
        for run in runs_of(markup):
            place = -0.34 * size if run.place > 0 else 0.2 * size if run.place < 0 else 0.0
            small = f' font-size="{_n(size * _SUBSCRIPT)}"' if run.place else ""
            moved = f' dy="{_n(place - level)}"' if place != level else ""
            inner.append(f"<tspan{moved}{small}>{escape(run.text)}</tspan>" if moved or small else escape(run.text))
            level = place
        self._parts.append(f"<text{_at(x, y, size, fill, anchor, bold)}{_held(width)}>{''.join(inner)}</text>")
        return width

    def lines(self, x: float, y: float, texts: Sequence[str], *, size: float, step: float, **how: object) -> None:
        """One text on several lines; screen readers and copying join its lines with blanks."""
        bold, fill, anchor = bool(how.get("bold")), str(how.get("fill", "ink")), str(how.get("anchor", "start"))
        spans = []
        for number, text in enumerate(texts):
            width = width_of(text, size, bold=bold)
            self._place_text(x, y + number * step, width, size, anchor)
            moved = f' dy="{_n(step)}"' if number else ""
            joined = escape(text) + ("" if number == len(texts) - 1 else " ")
            spans.append(f'<tspan x="{_n(x)}"{moved}>{joined}</tspan>')
        self._parts.append(f"<text{_at(x, y, size, fill, anchor, bold)}>{''.join(spans)}</text>")

    @contextmanager
    def group(self, title: str) -> Iterator[None]:
        """A group of shapes with a title for screen readers and tooltips."""
        self._parts.append(f"<g><title>{escape(shown(title))}</title>")
        yield
        self._parts.append("</g>")

    # --- written --------------------------------------------------------------------------------------------------

    @property
    def size(self) -> tuple[int, int]:
        """(width, height), margins included."""
        return (
            round(self._right - self._left + 2 * self._margin + 0.5),
            round(self._bottom - self._top + 2 * self._margin + 0.5),
        )

    def svg(self, theme: str, title: str, description: str, name: str) -> str:
        """The picture; ``auto`` is light, with dark colours in a style sheet for readers with a dark setting."""
        width, height = self.size
        left, top = self._left - self._margin, self._top - self._margin
        colours = DARK if theme == "dark" else LIGHT
        frame = f'<rect x="{_n(left)}" y="{_n(top)}" width="{width}" height="{height}"{_paint("paper", None, 0)}/>'
        drawing = re.sub(
            r'(fill|stroke)="@([\w-]+)"', lambda m: f'{m[1]}="{colours[m[2]]}"', frame + "\n".join(self._parts)
        )
        style = ""
        if theme == "auto":
            style = _dark_style(drawing)
        else:
            drawing = re.sub(r' class="[^"]*"', "", drawing)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" data-generator="Saccade" width="{width}" height="{height}" '
            f'viewBox="{_n(left)} {_n(top)} {width} {height}" role="img" aria-labelledby="{name}-title {name}-text" '
            f'font-family={quoteattr(FAMILY)} text-rendering="geometricPrecision" style="max-width:100%;height:auto">\n'
            f'<title id="{name}-title">{escape(shown(title))}</title>\n'
            f'<desc id="{name}-text">{escape(shown(description))}</desc>\n'
            f"{style}{drawing}\n</svg>\n"
        )

    def _reach(self, left: float, top: float, right: float, bottom: float) -> None:
        self._left, self._top = min(self._left, left), min(self._top, top)
        self._right, self._bottom = max(self._right, right), max(self._bottom, bottom)

    def _place_text(self, x: float, y: float, width: float, size: float, anchor: str) -> None:
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        self._reach(left, y - ASCENT * size, left + width, y + DESCENT * size)


def shown(text: str) -> str:
    """Text without characters that XML does not allow."""
    return _UNPRINTABLE.sub("\ufffd", text)


def _dark_style(drawing: str) -> str:
    used = sorted(set(re.findall(rf"{PREFIX}([fs])-([\w-]+)", drawing)))
    rules = "".join(
        f".{PREFIX}{kind}-{role}{{{'fill' if kind == 'f' else 'stroke'}:{DARK[role]}}}" for kind, role in used
    )
    return f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>\n"


def _paint(
    fill: str | None, stroke: str | None, line: float, opacity: float | None = None, dash: str | None = None
) -> str:
    classes = [f"{PREFIX}{kind}-{role}" for kind, role in (("f", fill), ("s", stroke)) if role]
    out = f' class="{" ".join(classes)}"' if classes else ""
    out += f' fill="@{fill}"' if fill else ' fill="none"'
    out += f' stroke="@{stroke}" stroke-width="{_n(line)}"' if stroke else ""
    out += f' fill-opacity="{_n(opacity)}"' if opacity is not None else ""
    return out + (f' stroke-dasharray="{dash}"' if dash else "")


def _at(x: float, y: float, size: float, fill: str, anchor: str, bold: bool) -> str:
    out = f' class="{PREFIX}f-{fill}" fill="@{fill}" x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"'
    out += "" if anchor == "start" else f' text-anchor="{anchor}"'
    return out + (' font-weight="700"' if bold else "")


def _held(width: float) -> str:
    return f' textLength="{_n(width)}" lengthAdjust="spacingAndGlyphs"' if width else ""


def _n(value: float) -> str:
    """The number with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"
