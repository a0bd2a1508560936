"""Check a built wheel: the embedded model is inside, no test is, and it stays small."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

LARGEST = 20 * 2**20
EMBEDDED = "saccade/models/embedded/"


def check(path: Path) -> None:
    names = set(zipfile.ZipFile(path).namelist())
    expected = {EMBEDDED + name for name in ("config.json", "model.safetensors", "tokenizer.json", "heads.json")}
    files = (path for path in Path("src/saccade").rglob("*") if path.is_file() and path.suffix != ".pyc")
    sources = {file.relative_to("src").as_posix() for file in files}
    missing = sorted((expected | sources) - names)
    strangers = sorted(name for name in names if not name.startswith(("saccade/", "saccade-")))
    size = path.stat().st_size
    if missing or strangers or size > LARGEST:
        sys.exit(f"{path.name}: missing {missing}, strangers {strangers}, {size / 2**20:.1f} MiB")
    print(f"{path.name}: {len(names)} files, {size / 2**20:.1f} MiB, with the embedded model")


check(Path(sys.argv[1]))
