"""The pages of this version: where they are (`_site.py`), and which of them answers some words (`_search.py`)."""

from __future__ import annotations

from ._search import Found, search
from ._site import built_site

__all__ = ["Found", "built_site", "search"]
