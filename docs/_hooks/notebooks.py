"""Notebooks as pages: their text, code and stored outputs."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from repository import DOCS


@functools.cache
def pages() -> dict[str, str]:
    """Markdown by its place on the site, of each notebook that is not also a page of docs/."""
    files = [file for file in (DOCS / "notebooks").glob("*.ipynb") if not (DOCS / f"{file.stem}.md").exists()]
    return {f"notebooks/{file.stem}.md": _page(file.name, json.loads(file.read_text("utf-8"))) for file in files}


def _page(name: str, notebook: dict[str, Any]) -> str:
    parts = [part for cell in notebook["cells"] for part in _parts(cell)]
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}\n\n[This page as a notebook]({name})\n{rest}\n"


def _parts(cell: dict[str, Any]) -> Iterator[str]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield text
        return
    yield f"```python\n{text}\n```"
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "image/svg+xml" in data:
            yield f'<div class="drawing">{"".join(data["image/svg+xml"])}</div>'.replace("\n\n", "\n")
        else:
            shown = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
            yield f"```text\n{shown}\n```"
