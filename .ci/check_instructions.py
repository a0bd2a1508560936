"""Check the compiled module of a wheel: no function uses instructions above the set it belongs to.

Inline functions of the C++ library are compiled once per instruction set, and the linker keeps one copy of each for all
of them. A copy with AVX-512 in it would end every process on a processor without. Needs objdump and the symbols.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter

LEVELS = {"baseline": 0, "avx2": 1, "avx512": 2, "avx512_bf16": 2}
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
HOME = re.compile(r"saccade::(baseline|avx2|avx512_bf16|avx512)::")
WIDE = re.compile(r"%zmm|%k[0-7]|%[xy]mm(?:1[6-9]|2\d|3[01])\b")


def level(instruction: str) -> int:
    """0 for SSE2 and less, 1 for AVX and AVX2, 2 for AVX-512."""
    if WIDE.search(instruction):
        return 2
    return int("%ymm" in instruction or (instruction.startswith("v") and not instruction.startswith("ver")))


def check(module: str) -> None:
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", module]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    counts: Counter[str] = Counter()
    function, allowed, above = "", 0, set()
    for line in lines:
        if found := FUNCTION.match(line):
            function = found[1]
            home = HOME.search(function)
            allowed = LEVELS[home[1]] if home else 0
        elif "\t" in line:
            needed = level(line.split("\t")[1])
            counts[f"{needed}"] += 1
            if needed > allowed:
                above.add(function)
    if above or not (counts["1"] and counts["2"]):
        sys.exit(f"instructions above their set in {sorted(above)}; instructions by level {dict(counts)}")
    print(f"{sum(counts.values())} instructions, each in a set that has it")


with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = (name for name in wheel.namelist() if name.endswith(".so"))
    check(wheel.extract(name, folder))
