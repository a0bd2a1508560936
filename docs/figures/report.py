"""Draws report-light.png and report-dark.png: the report that `saccade look` writes, as a browser shows it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

TEXT = "I will go if you will go with me."
SIZE = {"width": 1000, "height": 620}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        report = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "saccade", "look", TEXT, "--out", str(report)], check=True)
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SIZE, color_scheme=scheme)
            page.goto(report.as_uri())
            page.screenshot(path=Path(__file__).parent / f"report-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
