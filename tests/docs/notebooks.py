"""Executes the notebooks, tells what they print and draw, and writes one of them as a page."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

import nbformat
from nbclient import NotebookClient
from pages import ROOT
from warm import pythonpath

SVG = "image/svg+xml"
# Figures as SVG that is the same every time: no date, identifiers from a fixed seed, letters as letters.
_FIGURES = [
    "--InlineBackend.figure_formats=svg",
    "--InlineBackend.rc={'svg.hashsalt': 'saccade', 'svg.fonttype': 'none'}",
]
_PIXELS = re.compile(r"data:image/png;base64,[\w\s+/=]*|image[0-9a-f]{10}(?=\")")  # and names made from them
_ENVIRONMENT = {"COLUMNS": "80", "SOURCE_DATE_EPOCH": "0"}
FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
HOUR = FOLDER / "self-attention-in-an-hour.ipynb"
PAGE = ROOT / "docs" / "self-attention-in-an-hour.md"
PICTURES = ROOT / "docs" / "figures" / "self-attention-in-an-hour"


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs, of which text and SVG are kept: small, and readable wherever they are shown."""
    notebook = nbformat.read(path, as_version=4)
    with mock.patch.dict(os.environ, _ENVIRONMENT, PYTHONPATH=pythonpath()):
        NotebookClient(
            notebook,
            timeout=300,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            extra_arguments=_FIGURES,
            coalesce_streams=True,
        ).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
        for output in cell.get("outputs", ()):
            if "data" in output:
                output.data = _kept(output.data)
                output.metadata = nbformat.NotebookNode()
    notebook.metadata.language_info = nbformat.NotebookNode(name="python")
    return notebook


def _kept(data: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Text and SVG, also where it is shown as HTML; nothing that needs a script."""
    kept = {kind: data[kind] for kind in ("text/plain", SVG) if kind in data}
    if data.get("text/html", "").lstrip().startswith("<svg"):
        kept[SVG] = data["text/html"]
    return nbformat.NotebookNode(kept)


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell prints, shows as text, and draws; not the pixels in a drawing, which differ by renderer."""
    return [
        without_pixels("\n".join(text for o in cell.outputs for text in (_text(o), _picture(o)) if text))
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def without_pixels(svg: str) -> str:
    """An SVG without those of the images in it."""
    return _PIXELS.sub("(pixels)", svg)


def pictures(notebook: nbformat.NotebookNode) -> list[str]:
    """The SVG of every picture, in order."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [picture for cell in cells for output in cell.outputs if (picture := _picture(output))]


def as_page(notebook: nbformat.NotebookNode) -> str:
    """The notebook as a page of docs/: what is printed stands below its code, and pictures lie in `PICTURES`."""
    parts, drawn = [], 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source.replace("](../", "]("))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if svg := _picture(output):
                title = re.search(r"<title[^>]*>(.*?)</title>", svg, re.DOTALL)
                file = f"{os.path.relpath(PICTURES, PAGE.parent)}/{drawn}.svg"
                parts.append(f"![{title[1] if title else 'What this cell draws'}]({file})")
                drawn += 1
            else:
                parts.append(f"```text\n{_text(output).rstrip()}\n```")
    title, introduction, rest = "\n\n".join(parts).split("\n\n", 2)
    place = os.path.relpath(HOUR, PAGE.parent)
    link = f"This page is a notebook: [open it]({place}), change numbers and run the cells."
    return f"{title}\n\n{introduction}\n\n{link}\n\n{rest}\n"


def write_page(notebook: nbformat.NotebookNode) -> None:
    """`PAGE` and its pictures, and no others beside them."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob("*.svg"):
        old.unlink()
    for number, svg in enumerate(pictures(notebook)):
        (PICTURES / f"{number}.svg").write_text(svg, encoding="utf-8")
    PAGE.write_text(as_page(notebook), encoding="utf-8")


def stored(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def _text(output: nbformat.NotebookNode) -> str:
    return output["text"] if "text" in output else output["data"].get("text/plain", "")


def _picture(output: nbformat.NotebookNode) -> str:
    return output["data"].get(SVG, "") if "data" in output else ""
