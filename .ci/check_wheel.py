"""Check a built wheel: model and client are inside, no test is, it stays small, its tag fits what is compiled, and for
which architecture.

A wheel with a compiled module must be one that `auditwheel repair` has made: it runs on other Linux machines than this
one and brings no library of this one along. A wheel for any platform must have no compiled module.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

LARGEST = 20 * 2**20
EMBEDDED = "saccade/make/models/embedded/"
COMPILED = ".so"
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of the ELF header
LEFT_BEHIND = {".pyc", COMPILED}  # among the sources, by Python and by native/build_in_place.sh


def check(path: Path) -> None:
    names = set(zipfile.ZipFile(path).namelist())
    expected = {EMBEDDED + name for name in ("config.json", "model.safetensors", "tokenizer.json", "heads.json")}
    expected.add("saccade/see/viewer/client.js")
    files = (path for path in Path("src/saccade").rglob("*") if path.is_file() and path.suffix not in LEFT_BEHIND)
    sources = {file.relative_to("src").as_posix() for file in files}
    missing = sorted((expected | sources) - names)
    strangers = sorted(name for name in names if not name.startswith(("saccade/", "saccade-")))
    size = path.stat().st_size
    if missing or strangers or size > LARGEST:
        sys.exit(f"{path.name}: missing {missing}, strangers {strangers}, {size / 2**20:.1f} MiB")
    print(f"{path.name}: {len(names)} files, {size / 2**20:.1f} MiB, the embedded model, {compiled(path, names)}")


def compiled(path: Path, names: set[str]) -> str:
    modules = sorted(name for name in names if name.endswith(COMPILED))
    platform = path.stem.rsplit("-", 1)[1]
    if platform == "any" and not modules:
        return "no compiled module"
    native = len(modules) == 1 and modules[0].startswith("saccade/_native.")
    heads = [zipfile.ZipFile(path).read(name)[:20] for name in modules]
    machines = [MACHINES.get(int.from_bytes(head[18:], "little"), "unknown") for head in heads]
    if not native or not platform.startswith("manylinux") or not platform.endswith(machines[0]):
        sys.exit(f"{path.name}: compiled modules {modules} for {machines}, platform {platform}")
    return f"saccade._native for {platform}"


check(Path(sys.argv[1]))
