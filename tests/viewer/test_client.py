"""The viewer's client: its committed files are those of its sources, small, and right in its own tests."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "client"
VIEWER = ROOT / "src" / "saccade" / "see" / "viewer"
BUILT = (VIEWER / "client.js", VIEWER / "heads.js", VIEWER / "steps" / "step.js", CLIENT / "dev.js")


def test_the_committed_files_are_those_of_these_sources():
    """Fails for a source that changed after the build, and for a built file that somebody edited; needs no Node."""
    sources = [path for path in (CLIENT / "src").rglob("*") if path.is_file()]
    files = [*sources, CLIENT / "build.mjs", *BUILT]
    digest = hashlib.sha256()
    for name in sorted(Path(os.path.relpath(path, CLIENT)).as_posix() for path in files):
        digest.update(name.encode() + b"\0" + (CLIENT / name).read_bytes() + b"\0")
    assert (CLIENT / "built.sha256").read_text().strip() == digest.hexdigest(), "npm run build in client/"


def test_the_client_is_small_and_names_no_address():
    text = BUILT[0].read_text("utf8")
    assert len(text.encode()) < 130_000
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xhtml",
    }


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of `client/` as it stands in the repository, in which it is built."""
    if not shutil.which("node"):
        pytest.skip("the client is built by node, which is not here")
    folders = [CLIENT / "node_modules", *map(Path, filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep)))]
    modules = next((folder.resolve() for folder in folders if (folder / "esbuild").is_dir()), None)
    if modules is None:
        pytest.skip("there is no esbuild: npm install in client/, or NODE_PATH=the node_modules that has it")
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(CLIENT, root / "client", ignore=shutil.ignore_patterns("node_modules", "build"))
    (root / "client" / "node_modules").symlink_to(modules)
    (root / "src" / "saccade" / "see" / "viewer" / "steps").mkdir(parents=True)
    return root / "client"


def run(copy, *command):
    ran = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_the_committed_files_are_what_the_sources_build(copy):
    run(copy, "node", "build.mjs")
    for file in (*BUILT, CLIENT / "built.sha256"):
        made = copy.parent / file.relative_to(ROOT)
        assert made.read_bytes() == file.read_bytes(), f"{file.name}: npm run build in client/"


@pytest.mark.slow
def test_the_types_fit(copy):
    run(copy, "node", "node_modules/typescript/bin/tsc", "--noEmit", "-p", ".")


@pytest.mark.slow
def test_the_logic_passes_its_own_tests(copy):
    run(copy, "node", "build.mjs", "--test")
    run(copy, "node", "--test", *(str(path) for path in sorted((copy / "test").glob("*.test.mjs"))))
