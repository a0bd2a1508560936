"""Renews what the documentation shows: `python tests/docs/refresh.py [FILE ...]`. Read the diff before committing."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import diagrams
import drawings
import nbformat
from notebooks import HOUR, NOTEBOOKS, execute, write_page
from pages import PAGES, blocks, console, run_shell, save_python


def refresh_page(page: Path, folder: Path) -> None:
    text = page.read_text(encoding="utf-8")
    save_python(page, folder)
    for block in blocks(page, "console"):
        command, _ = console(block)
        lines = [f"$ {command}", *(line.rstrip() for line in run_shell(command, folder).splitlines())]
        text = text.replace(block.text, "\n".join(lines) + "\n")
    page.write_text(text, encoding="utf-8")


def refresh_notebook(path: Path, folder: Path) -> None:
    notebook = execute(path, folder)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    if path == HOUR:
        write_page(notebook)


if __name__ == "__main__":
    wanted = [Path(name).resolve() for name in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        for page in PAGES:
            if not wanted or page in wanted:
                refresh_page(page, Path(folder))
        for path in NOTEBOOKS:
            if not wanted or path in wanted:
                refresh_notebook(path, Path(folder))
        if not wanted or drawings.PAGE in wanted:
            for name, picture in drawings.draw_all(Path(folder)).items():
                drawings.path_of(name).write_text(picture, encoding="utf-8")
    for name in diagrams.DIAGRAMS:
        if not wanted or diagrams.path_of(name) in wanted:
            diagrams.draw(name, diagrams.path_of(name))
