"""Check the compiled module of a wheel: no function uses instructions above the set it belongs to.

Inline functions of the C++ library are compiled once per instruction set, and the linker keeps one copy of each for all
of them. A copy with AVX-512 in it would end every process on a processor without. Needs the symbols and objdump, for an
ARM wheel that of binutils-aarch64-linux-gnu unless it runs on ARM.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter

TILES = 3  # AMX, which no set has: functions that are called where the processor has it
LEVELS = {"baseline": 0, "avx2": 1, "avx512": 2, "avx512_bf16": 2, "neon": 0, "neon_bf16": 1}
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
HOME = re.compile(r"saccade::(baseline|avx2|avx512_bf16|avx512|neon_bf16|neon)::")
CHOOSING = re.compile(r"__aarch64_\w+")  # libgcc's atomics, which ask the processor themselves
TILED = re.compile(r"%tmm|^tile|^(ld|st)tilecfg")
WIDE = re.compile(r"%zmm|%k[0-7]|%[xy]mm(?:1[6-9]|2\d|3[01])\b")
# bfloat16, dot products, atomics in one instruction, and what else came with ARMv8.1 and 8.2
ARM_LATER = re.compile(
    r"bf(dot|mmla|mlal|cvt)|[su]dot|sqrdml|crc32|casp?[abhl]*\b|swp|(ld|st)(add|clr|set|eor|[su]max|[su]min)[abhl]*\b"
)


def arm_level(instruction: str) -> int:
    """0 for ARMv8.0 with NEON, 1 for later ones."""
    return int(bool(ARM_LATER.match(instruction)))


def x86_level(instruction: str) -> int:
    """0 for SSE2 and less, 1 for AVX and AVX2, 2 for AVX-512, `TILES` for AMX."""
    if TILED.search(instruction):
        return TILES
    if WIDE.search(instruction):
        return 2
    return int("%ymm" in instruction or (instruction.startswith("v") and not instruction.startswith("ver")))


def check(module: str, arm: bool) -> None:
    objdump = "aarch64-linux-gnu-objdump" if arm and platform.machine() != "aarch64" else "objdump"
    level, levels = (arm_level, {"0", "1"}) if arm else (x86_level, {"0", "1", "2"})
    command = [objdump, "--disassemble", "--demangle", "--no-show-raw-insn", module]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    counts: Counter[str] = Counter()
    function, allowed, above = "", 0, set()
    for line in lines:
        if found := FUNCTION.match(line):
            function = found[1]
            home = HOME.search(function)
            allowed = LEVELS[home[1]] if home else int(bool(CHOOSING.match(function)))
            if allowed == 2 and "::Tiles" in function:
                allowed = TILES
        elif "\t" in line:
            needed = level(line.split("\t")[1])
            counts[f"{needed}"] += 1
            if needed > allowed:
                above.add(function)
    if above or counts.keys() - {f"{TILES}"} != levels:
        sys.exit(f"instructions above their set in {sorted(above)}; instructions by level {dict(counts)}")
    print(f"{sum(counts.values())} instructions, each in a set that has it")


with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = (name for name in wheel.namelist() if name.endswith(".so"))
    check(wheel.extract(name, folder), arm=sys.argv[1].endswith("aarch64.whl"))
