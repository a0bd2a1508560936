"""The result of `saccade.diagram`: a picture that can be shown, read aloud and saved."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ....support._extras import installing
from .._files import check_target, write_whole
from ._canvas import Canvas
from ._fonts import FAMILIES
from ._theme import THEMES

FORMATS = (".svg", ".png", ".html", ".htm")
_DOTS = 2.0  # pixels of a PNG for each unit of the picture
_LEAST = 0.8  # pixels of a page for each unit, so that the smallest letters have 10; narrower screens scroll
_PAGE = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="Saccade">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
    "<style>html{{color-scheme:{scheme}}}body{{margin:0;background:{paper}}}"
    "@media(prefers-color-scheme:dark){{body{{background:{dark}}}}}"
    "figure{{margin:0 auto;padding:2vmin;max-width:{width}px;overflow-x:auto}}"
    "svg{{display:block;width:100%;min-width:{least}px;height:auto}}</style>\n"
    '</head><body><figure tabindex="0" aria-labelledby="{name}-title">\n{svg}</figure></body></html>\n'
)


@dataclass(frozen=True, eq=False)
class Diagram:
    """A picture of one kind, with a title and a description of its content.

    Attributes:
        kind: "attention", "multi-head", "block", "transformer", "decoder-step" or "variants".
        title: one line.
        description: the text alternative for readers who do not see the picture, with its numbers.
        theme: "auto" follows the reader's setting, "light" and "dark" do not.
        facts: the numbers in the picture, by name, which tests compare with the model.
    """

    kind: str
    title: str
    description: str
    theme: str
    facts: dict[str, Any]
    canvas: Canvas

    def __repr__(self) -> str:
        return f"<Diagram {self.kind}: {self.title}>"

    def _repr_html_(self) -> str:
        return self.svg

    @property
    def svg(self) -> str:
        """The picture as SVG; equal pictures are equal strings."""
        return self._svg(self.theme)

    @property
    def html(self) -> str:
        """A self-contained page with the picture."""
        from ._theme import DARK, LIGHT

        light, dark = (DARK if self.theme == "dark" else LIGHT), (LIGHT if self.theme == "light" else DARK)
        return _PAGE.format(
            title=escape(self.title),
            scheme="light dark" if self.theme == "auto" else self.theme,
            paper=light["paper"],
            dark=dark["paper"],
            width=round(self.canvas.size[0] * 1.5),
            least=round(self.canvas.size[0] * _LEAST),
            name=self._name,
            svg=self.svg,
        )

    def png(self, scale: float = _DOTS) -> bytes:
        """The picture as PNG, light unless the theme is dark. ValueError if no renderer is installed."""
        require_renderer()
        import resvg_py

        # resvg would stretch only the first part of a text with subscripts to the length of the whole.
        picture = _FORMULA_LENGTH.sub(r"\1", self._svg("dark" if self.theme == "dark" else "light"))
        from_matplotlib = _fonts_of_matplotlib()
        png = resvg_py.svg_to_bytes(
            svg_string=picture.replace(f"{FAMILIES[0]}, ", "", 1),
            zoom=scale,
            font_files=from_matplotlib,
            sans_serif_family="DejaVu Sans" if from_matplotlib else None,
        )
        return _with_software(bytes(png))

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the picture whole or not at all; the ending of the name chooses the format: .svg, .png or .html.

        Raises:
            ValueError: another ending, a folder that does not exist, a file that Saccade did not make (``force``
                replaces it), no renderer for PNG.
        """
        ending = Path(path).suffix.lower()
        if ending not in FORMATS:
            raise ValueError(f"{path}: a diagram is written as .svg, .png or .html")
        target = check_target(path, force=force)
        content = self.png() if ending == ".png" else (self.svg if ending == ".svg" else self.html).encode("utf-8")
        write_whole(target, content)
        return target

    def _svg(self, theme: str) -> str:
        return self.canvas.svg(theme, self.title, self.description, self._name)

    @property
    def _name(self) -> str:
        """A prefix for element ids, so that several pictures can be in one page."""
        return "saccade-" + hashlib.sha256(f"{self.title}\n{self.description}".encode()).hexdigest()[:8]


_FORMULA_LENGTH = re.compile(r'(<text[^>]*?) textLength="[^"]*" lengthAdjust="spacingAndGlyphs"(?=[^>]*>[^<]*<tspan)')


def check_theme(theme: str) -> None:
    if theme not in THEMES:
        raise ValueError(f"theme: expected one of {', '.join(map(repr, THEMES))}, got {theme!r}")


def require_renderer() -> None:
    if importlib.util.find_spec("resvg_py") is None:
        raise ValueError(f"a PNG needs resvg-py, which is not installed: {installing('plot')}; SVG needs nothing")


def _fonts_of_matplotlib() -> list[str] | None:
    """matplotlib's fonts, for machines without the usual ones."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib import get_data_path

    fonts = Path(get_data_path()) / "fonts" / "ttf"
    return [str(fonts / name) for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")]


def _with_software(png: bytes) -> bytes:
    """The PNG with Saccade's mark after the header chunk, by which Saccade recognises its own files."""
    import struct
    import zlib

    kind, text = b"tEXt", b"Software\0Saccade"
    chunk = struct.pack(">I", len(text)) + kind + text + struct.pack(">I", zlib.crc32(kind + text))
    return png[:33] + chunk + png[33:]
