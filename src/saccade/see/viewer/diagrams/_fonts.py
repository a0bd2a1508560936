"""Widths of texts without reading a font.

Widths are those of Helvetica, which Arial, Liberation Sans and Arimo share: one of them is on nearly every machine, so
pictures name all four and embed no font. On other machines `textLength` in the SVG keeps the widths.
"""

from __future__ import annotations

import unicodedata

FAMILY = "Helvetica, Arial, 'Liberation Sans', Arimo, sans-serif"
FAMILIES = ("Helvetica", "Arial", "Liberation Sans", "Arimo")
ASCENT, DESCENT = 0.905, 0.212  # of the font size, above and below the baseline

# Thousandths of the font size. Characters from U+0020 to U+007E, then others by name.
_REGULAR = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278 "
    "278 584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611 722 "
    "667 944 667 667 611 278 278 278 469 556 333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 "
    "556 333 500 278 556 500 722 500 500 500 334 260 334 584"
)
_BOLD = (
    "278 333 474 556 556 889 722 238 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 333 "
    "333 584 584 584 611 975 722 722 722 722 667 611 778 722 278 556 722 611 833 722 778 667 778 722 667 611 722 "
    "667 944 667 667 611 333 278 333 584 556 333 556 611 556 611 556 333 611 611 278 278 556 278 889 611 611 611 "
    "611 389 556 333 611 556 778 556 556 500 389 280 389 584"
)
_OTHERS = {"‘": 278, "’": 278, "“": 500, "”": 500, "…": 1000, "–": 556, "—": 1000, "−": 584, "×": 584, "÷": 549}
_OTHERS |= {"·": 333, "√": 549, "∞": 713, "≈": 549, "≤": 549, "≥": 549, "→": 1000, "←": 1000, "↑": 500, "↓": 500}
_OTHERS |= {"φ": 680, "Σ": 618, "α": 600, "λ": 530, "σ": 650}
_WIDTHS = tuple({chr(32 + i): int(w) for i, w in enumerate(table.split())} | _OTHERS for table in (_REGULAR, _BOLD))
_LATIN, _WIDE = 620, 1000  # of letters outside the table


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """The width of ``text`` on one line, in the units of ``size``."""
    table = _WIDTHS[bold]
    return size / 1000 * sum(table.get(c) or _other(c, table) for c in text)


def fitted(text: str, size: float, room: float, *, bold: bool = False) -> str:
    """The text, or as much of its beginning as fits into ``room`` with three dots after it."""
    if width_of(text, size, bold=bold) <= room:
        return text
    while text and width_of(text + "…", size, bold=bold) > room:
        text = text[:-1]
    return text + "…"


def folded(text: str, size: float, room: float, *, bold: bool = False) -> list[str]:
    """The whole text on as many lines as ``room`` needs."""
    lines = [""]
    for c in text:
        if lines[-1] and not unicodedata.combining(c) and width_of(lines[-1] + c, size, bold=bold) > room:
            lines.append("")
        lines[-1] += c
    return lines


def _other(character: str, table: dict[str, int]) -> int:
    if unicodedata.combining(character):
        return 0
    if unicodedata.east_asian_width(character) in "WF":
        return _WIDE
    plain = unicodedata.normalize("NFD", character)[0]
    return table.get(plain, _LATIN)
