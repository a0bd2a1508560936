"""The built pages of the documentation that belong to this version.

A wheel has them in `saccade/_site` when they were built before it was. A source checkout builds them on request.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .._extras import NotInstalled

PACKAGE = Path(__file__).parents[1]
SITE = PACKAGE / "_site"
CHECKOUT = PACKAGE.parents[1]


def built_site(version: str, *, anew: bool = False, begin: Callable[[], object] = lambda: None) -> Path:
    """The folder of the built pages; a source checkout that has none of this version builds them.

    `begin` is called before a build.

    Raises:
        NotInstalled: they have to be built, and MkDocs is missing.
        FileNotFoundError: this is an installation without the pages.
        RuntimeError: the build fails.
    """
    checkout = (CHECKOUT / "mkdocs.yml").is_file()
    if _version(SITE) == version and not (anew and checkout):
        return SITE
    if not checkout:
        raise FileNotFoundError(
            "this installation of Saccade has no built pages; they come with it after these commands in the folder of "
            'Saccade: pip install -c constraints.txt ".[docs]" && .ci/site src/saccade/_site && pip install .'
        )
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise NotInstalled("saccade docs", module, "docs")
    begin()
    _build(SITE)
    return SITE


def _version(site: Path) -> str | None:
    file = site / "version.txt"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _build(site: Path) -> None:
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the pages cannot be built:\n{done.stderr or done.stdout}")
