"""Reads and runs what the documentation shows, so that it stays true."""

from __future__ import annotations

import builtins
import datetime
import math
import os
import re
import shutil
import subprocess
import symtable
import sys
from pathlib import Path
from typing import NamedTuple

import soundfile
import warm
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIME = re.compile(r"\bin [\d.]+ s\b")
_SET = re.compile(r"\((?:avx512_bf16|avx512|avx2|neon_bf16|neon|baseline)\)")  # which instructions a processor has
_NUMBER = re.compile(r"-?\d*\.?\d+(?:e-?\d+)?")
# Training takes minutes: the pages' own commands run on a model of a few hundred weights (a later option wins).
_SMALLER = "--steps 4 --batch 2 --layers 1 --heads 2 --width 16 --context 32 --warmup 1"
# A viewer goes on until it is ended: it is, once it shows its address.
_SACCADE = f"""#!/bin/bash
if [ "$1" = view ]; then
    "{sys.executable}" -m saccade "$@" --no-browser >.viewed &
    until grep -qs "Ctrl-C ends it" .viewed; do kill -0 $! || exit 2; sleep 0.1; done
    kill $!; rm .viewed; exit 0
fi
if [ "$1 $2" = "train lm" ]; then set -- "$@" {_SMALLER}; fi
exec "${{0%/*}}/warm/saccade" "$@"
"""


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in _FENCE.finditer(text)]
    return [block for block in found if block.language == language]


def needed(code: str) -> set[str]:
    """The global names that `code` reads and does not make itself, nor Python."""
    table = symtable.symtable(code, "block", "exec")
    made = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    read: set[str] = set()
    tables = [table]
    while tables:
        scope = tables.pop()
        tables += scope.get_children()
        read |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and (scope is table or s.is_global())}
    return read - made - set(dir(builtins)) - {"__name__"}


def run_python(page: Path) -> int:
    """Run a page's Python blocks in one namespace, from top to bottom; the number of blocks."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    found = blocks(page, "python")
    for block in found:
        # Empty lines in front let a traceback name the page's own line.
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True), namespace)
    return len(found)


def save_python(page: Path, folder: Path) -> None:
    """The page's Python blocks as the file that its commands name, docs/a-page.md as a_page.py; and the examples."""
    text = "\n\n".join(block.text for block in blocks(page, "python"))
    (folder / f"{page.stem.replace('-', '_')}.py").write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples", dirs_exist_ok=True)


def run_shell(command: str, folder: Path) -> str:
    """Standard output of a `sh` block or of one command, run in `folder` with the `saccade` under test.

    `saccade verify` may end with 1, as it does when it has found something.
    """
    programs = folder / ".programs"
    (programs / "warm").mkdir(parents=True, exist_ok=True)
    warm.program(programs / "warm")
    (programs / "saccade").write_text(_SACCADE)
    (programs / "saccade").chmod(0o755)
    novel = folder / "my-novel.txt"
    if not novel.exists():
        novel.write_text((ROOT / "README.md").read_text(encoding="utf-8") * 4, encoding="utf-8")
        (folder / "my-other-novel.txt").write_text("It was a dark and stormy night.\n" * 40, encoding="utf-8")
        for name, count in (("my-reviews.csv", 90), ("unseen.csv", 30)):
            (folder / name).write_text(_reviews(count), encoding="utf-8")
        for name, first, count in (("my-series.csv", 0, 640), ("later.csv", 640, 480)):
            (folder / name).write_text(_series(first, count), encoding="utf-8")
        _write_graph(folder / "my-graph")
        _birds(folder)
        _spoken(folder)
        (folder / "my-corpus").mkdir()
        for name, count in (("train", 70), ("unseen", 7)):
            for language, words in (("de", "ein kleiner Hund schläft"), ("en", "a small dog sleeps")):
                text = "".join(f"{words} {n % 7}\n" for n in range(count))
                (folder / "my-corpus" / f"{name}.{language}").write_text(text, encoding="utf-8")
        for name, count in (("my-names.conll", 90), ("unseen.conll", 30)):
            (folder / name).write_text(_names(count), encoding="utf-8")
        for name, count in (("my-questions.jsonl", 90), ("unseen.jsonl", 30)):
            (folder / name).write_text(_questions(count), encoding="utf-8")
    path = f"{programs}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": warm.pythonpath(), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in ((0, 1) if command.startswith("saccade verify ") else (0,)), (
        f"{command}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def _reviews(count: int) -> str:
    """A table of texts, each with one word that tells its class."""
    rows = [
        ("a great film", "positive") if n % 2 else (f"a dull {'plot story scene'.split()[n % 3]}", "negative")
        for n in range(count)
    ]
    return "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows)


def _write_graph(folder: Path) -> None:
    """nodes.csv and edges.csv of two circles of nodes, each with a class; the last node has none."""
    nodes, edges = ["id,size,label,split"], ["source,target"]
    for n in range(60):
        label = "" if n == 59 else ("left", "right")[n % 2]
        split = ("train", "train", "validation", "validation", "test", "test")[n % 6] if label else ""
        nodes.append(f"n{n},{n % 2},{label},{split}")
        edges.append(f"n{n},n{(n + 2) % 60}")
    folder.mkdir()
    (folder / "nodes.csv").write_text("\n".join(nodes) + "\n", encoding="utf-8")
    (folder / "edges.csv").write_text("\n".join(edges) + "\n", encoding="utf-8")


def _birds(folder: Path) -> None:
    """Folders of images, one for each class: dark ones and bright ones."""
    for name, count in (("my-birds", 12), ("unseen-birds", 4)):
        for label, shade in (("crow", 40), ("swan", 200)):
            (folder / name / label).mkdir(parents=True)
            for n in range(count):
                Image.new("RGB", (19, 17), (shade, shade + n, shade)).save(folder / name / label / f"{n}.png")


def _spoken(folder: Path) -> None:
    """Folders of sounds, one for each class, low tones and high ones; and tables of them, with a text."""
    for name, count in (("my-sounds", 12), ("unseen-sounds", 4)):
        rows = ["file,text"]
        for label, hertz in (("cough", 300), ("whistle", 1200)):
            (folder / name / label).mkdir(parents=True)
            for n in range(count):
                wave = [0.3 * math.sin(2 * math.pi * (hertz + 9 * n) * t / 8000) for t in range(1600)]
                soundfile.write(folder / name / label / f"{n}.wav", wave, 8000)
                rows.append(f"{name}/{label}/{n}.wav,{label}")
        (folder / f"{name}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _names(count: int) -> str:
    """Sentences as columns, each with a name of one of two kinds."""
    names = ("Paris\tB-place", "Ada\tB-person")
    rows = [f"We\tO\nsaw\tO\n{names[n % 2]}\n.\tO\n" for n in range(count)]
    return "\n".join(rows)


def _questions(count: int) -> str:
    """Questions as JSON lines, whose answer is one of two places."""
    begin, line = "Ada went to the ", '{"question": "Where is Ada?", "context": "%s%s.", "answers": [%s]}\n'
    places = ["garden" if n % 2 else "park" for n in range(count)]
    answers = [f'{{"text": "{place}", "start": {len(begin)}}}' for place in places]
    return "".join(line % (begin, place, answer) for place, answer in zip(places, answers, strict=True))


def console(block: Block) -> tuple[str, str]:
    """The command and the output that a `console` block (`$ command`, then its output) shows."""
    command, _, output = block.text.partition("\n")
    assert command.startswith("$ "), f"a console block begins with '$ ': {command}"
    return command[2:], output


def same_output(shown: str, came: str, tolerance: float = 0.015) -> bool:
    """Equal words in equal places; numbers may differ in what the last digit of another processor changes."""
    shown, came = (_SET.sub("(set)", _TIME.sub("in some time", text)) for text in (shown, came))
    if _NUMBER.sub("#", shown).split() != _NUMBER.sub("#", came).split():
        return False
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(came), strict=True)
    # Equal ones first: a colour such as #7e5109 reads as an infinite number.
    return all(a == b or abs(float(a) - float(b)) <= tolerance * max(1.0, abs(float(a))) for a, b in pairs)


def _series(first: int, count: int) -> str:
    """A table of two series by the hour."""
    rows = [(n // 24, n % 24, math.sin(n / 4), n % 12) for n in range(first, first + count)]
    begin = datetime.date(2024, 1, 1)
    lines = [f"{begin + datetime.timedelta(days=day)} {hour:02}:00,{a:.3f},{b}" for day, hour, a, b in rows]
    return "\n".join(["date,tide,shift", *lines]) + "\n"
