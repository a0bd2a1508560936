"""Run the core of the tests against the installed package, in a copy of tests/ with no source tree beside it.

python .ci/test_installed.py [TEST ...], in the environment in which Saccade and pytest are installed
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What a wheel can break: kernels, their calls from every part, files inside of the package, the command.
CORE = (
    "tests/masks",
    "tests/native",
    "tests/operator",
    "tests/positions",
    "tests/nn",
    "tests/cli/test_doctor.py",
    "tests/docs/test_public_api.py",
)
WHERE = "import saccade; print(saccade.__file__)"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tests", "native"):  # some tests read a header of the kernels
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)  # pytest's settings
        asked = [sys.executable, "-c", WHERE]
        found = Path(subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True).stdout.strip())
        if "site-packages" not in found.parts or ROOT in found.parents:
            sys.exit(f"expected the installed package, found {found}")
        print(f"testing {found.parent} with Python {sys.version.split()[0]}", flush=True)
        status = subprocess.run([sys.executable, "-m", "saccade", "doctor"], cwd=folder).returncode
        tests = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *(sys.argv[1:] or CORE)]
        return status or subprocess.run(tests, cwd=folder).returncode


sys.exit(main())
