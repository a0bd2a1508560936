"""A copy of the tree into which one fault at a time is planted."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .fault import Fault

ROOT = Path(__file__).resolve().parents[2]
SITE = Path("tests/mutations/site")
# One instruction set, hardly optimised: whether a fault is caught does not depend on either.
BUILD = [f"-DSACCADE_COMPILES_{name}=OFF" for name in ("avx2", "avx512", "avx512_bf16", "neon", "neon_bf16")] + [
    "-DCMAKE_CXX_FLAGS_RELEASE=-O1"
]


def misfits(faults: Iterable[Fault], root: Path = ROOT) -> list[str]:
    """A line for each fault that cannot be planted: its text is not there exactly once, or a test of it is missing."""
    found = []
    for fault in faults:
        path = root / fault.path
        times = path.read_text().count(fault.old) if path.is_file() else 0
        if times != 1:
            found.append(f"{fault.name}: {fault.path} has its text {times} times: {fault.old!r}")
        found += [
            f"{fault.name}: there is no {test}" for test in fault.tests if not (root / test.split("::")[0]).exists()
        ]
    return found


class Copy:
    """The files of the tree, committed or not, in another folder, with the compiled module beside them."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.root = folder / "tree"
        self._note = folder / "first failure"
        self._planted = 0
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
            text=True,
        ).stdout.split("\0")
        modules = [path.relative_to(root).as_posix() for path in (root / "src/saccade").glob("*.so")]
        for name in filter(None, [*listed, *modules]):
            if (root / name).is_file():  # one that is deleted and not committed is listed, too
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target)
        paths = [self.root / SITE, self.root / "src"]
        given = [Path(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        paths += [path for path in given if path.resolve() != (root / "src").resolve()]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHON": sys.executable,
            "FIRST_FAILURE": str(self._note),
        }
        self._check_import()

    def _check_import(self) -> None:
        code = "import saccade; print(saccade.__file__)"
        told = self._run([sys.executable, "-c", code], None).stdout.strip()
        if not Path(told).is_relative_to(self.root):
            raise RuntimeError(f"the copy would test {told}")

    def build(self) -> None:
        """Compile the module of the copy; what did not change since the last time is kept."""
        built = self._run(["bash", "native/build_in_place.sh", *BUILD], None)
        if built.returncode:
            raise RuntimeError(f"the module does not compile:\n{built.stdout[-2000:]}{built.stderr[-2000:]}")

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The fault is in the copy, and in its compiled module, until the block ends. The module stays faulty."""
        path = self.root / fault.path
        whole, before = path.read_text(), path.stat()
        self._planted += 1
        wrong = whole.replace(fault.old, fault.new)
        if path.suffix == ".py":
            compile(wrong, path, "exec")  # what is no Python is caught by everything, and shows nothing
        path.write_text(wrong)
        if not fault.native:  # Python knows its compiled files by whole seconds and size: each fault has its own second
            os.utime(path, (before.st_atime, before.st_mtime - self._planted))
        try:
            if fault.native:
                self.build()
            yield
        finally:
            path.write_text(whole)
            if not fault.native:
                os.utime(path, (before.st_atime, before.st_mtime))

    def first_failure(self, arguments: Sequence[str], seconds: float, *, processes: int = 0) -> str:
        """The first test that fails, "" where none does. A run that takes longer than `seconds` has failed, too."""
        self._note.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "first_failure"]
        try:
            done = self._run([*command, "-n", str(processes), *arguments], seconds)
        except subprocess.TimeoutExpired:
            return f"(not done after {seconds:.0f} s)"
        if self._note.exists():
            return self._note.read_text()
        if done.returncode:
            return f"(pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip().splitlines()[-1]})"
        return ""

    def failures(self, tests: Sequence[str], seconds: float) -> set[str]:
        """Those of the tests that fail in the copy as it is."""
        failed = set()
        while tests:
            one = self.first_failure(tests, seconds)
            if not one:
                break
            failed.add(one)
            tests = [test for test in tests if test != one] if one in tests else []
        return failed

    def _run(self, command: Sequence[str], seconds: float | None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.root,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
        )
