"""A browser, and the viewer's client in a page: as it is built, on the synthetic numbers of `client/src/fake.ts`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium; the test is skipped where it or playwright is missing."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def page_file(tmp_path_factory):
    """`client/dev.html` with the two committed files, which `test_client.py` holds to their sources."""
    page = (ROOT / "client" / "dev.html").read_text("utf8")
    for place, path in (("client", ROOT / "src/saccade/see/viewer/client.js"), ("dev", ROOT / "client/dev.js")):
        code = path.read_text("utf8").replace("</script", "<\\/script")
        assert page.count(f"/* {place} */") == 1
        page = page.replace(f"/* {place} */", code)
    file = tmp_path_factory.mktemp("client") / "dev.html"
    file.write_text(page, "utf8")
    return file
