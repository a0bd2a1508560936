"""Executes the notebooks, and tells what they print."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import nbformat
from nbclient import NotebookClient
from pages import ROOT
from warm import pythonpath


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs, of which only text is kept: small, and readable wherever it is shown."""
    notebook = nbformat.read(path, as_version=4)
    with mock.patch.dict(os.environ, PYTHONPATH=pythonpath(), COLUMNS="80"):
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
        for output in cell.get("outputs", ()):
            if "data" in output:
                output.data = nbformat.NotebookNode({"text/plain": output.data["text/plain"]})
    notebook.metadata.language_info = nbformat.NotebookNode(name="python")
    return notebook


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell prints or shows, as text."""
    return [
        "".join(output["text"] if "text" in output else output["data"]["text/plain"] for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def stored(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
