"""The hooks by which MkDocs builds the site: generated pages, pages from outside docs/, and the parts of the navigation
that are lists of files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import commands
import mask_pages
import model_families
import notebooks
import outside
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify
from repository import DOCS

import saccade

_REFERENCE = {**reference.pages(), **commands.pages(), **mask_pages.pages(), **model_families.pages()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """`nav` in mkdocs.yml names groups of pages by a pattern, such as reference/saccade*; here they become lists."""
    written = sorted(file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md"))
    places = [place for place in (*written, *_REFERENCE, *outside.pages()) if not place.endswith("README.md")]
    config.nav = [_expanded(entry, places) for entry in config.nav or []]
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")  # anchors are those that GitHub makes
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    written = {**_REFERENCE, **outside.pages(), **outside.sources(), **notebooks.pages()}
    for place, text in written.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return outside.with_links_of_the_site(markdown, page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Remove what no page loads: source maps, and word segmentation for languages the site is not written in.

    The version is for `saccade docs`.
    """
    (Path(config.site_dir) / "version.txt").write_text(saccade.__version__, encoding="utf-8")
    assets = Path(config.site_dir) / "assets" / "javascripts"
    for file in assets.rglob("*.map"):
        file.unlink()
    shutil.rmtree(assets / "lunr")


def _expanded(entry: Any, places: list[str]) -> Any:
    if isinstance(entry, dict):
        return {title: _expanded(below, places) for title, below in entry.items()}
    if isinstance(entry, list):
        return [one for below in entry for one in _matching(below, places)]
    return entry


def _matching(entry: Any, places: list[str]) -> list[Any]:
    if isinstance(entry, str) and entry.endswith("*"):
        return [place for place in places if place.startswith(entry[:-1])]
    return [_expanded(entry, places)]
