"""Checks the English of the documentation: phrases to avoid, long sentences, long guides, missing introductions.
Docstrings and messages of the library and of benchmarks are searched for phrases only, its signatures for vague names,
its docstrings for a beginning that names nothing.

`python .ci/prose.py` prints `file:line: words: advice` for each violation and exits with 1 if there is one.
`python .ci/prose.py --readability` prints, for each page, its words of prose, mean sentence length and reading ease.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LONGEST_SENTENCE, LONGEST_GUIDE = 35, 900  # words
_READER = re.compile(
    r"^For |\b(?:who|you|your|readers?)\b", re.IGNORECASE
)  # in a sentence that says whom a page is for

# References are looked up, not read through: they may be longer than a guide.
REFERENCES = {
    "README.md",
    "CHANGELOG.md",
    "docs/README.md",
    "docs/architecture.md",
    "docs/contract.md",
    "docs/corrections.md",
    "docs/self-attention-in-an-hour.md",
    "docs/tasks/figures.md",
    "docs/variants-table.md",
    "docs/explained-models.md",
    "docs/verify-faults.md",
}

# Pages that need no "For people who ...".
FRONT = {"README.md", "CHANGELOG.md"}

ADVICE = {
    r"\brefus(?:es?|ed|ing|als?)\b": 'write "raises an error" or "is not supported"',
    r"\bwhat (?:\w+ )?(?:is|was|are|were) (?:not )?(?:said|told|asked|found|refused)\b": "name the thing: an option,"
    " a setting",
    r"\b(?:is|are|was|were|be|been|being) told\b(?! apart)": "say who sets it: you pass, the option sets",
    r"\bfor who\b": 'write "for people who" or "if you"',
    r"\b(?:nobody|no one) (?:brought|asked|says|said|told|named|chose|publishes|wants)\b": "use the passive or drop it",
    r"\bwithout end\b": 'write "unbounded" or "endlessly"',
    r"\blikeliest\b": 'write "most likely" or "most probable"',
    r"\bat no (?:size|length|place|time|cost)\b": 'write "never", "at every size", "free"',
    r"\bwhat (?:came|comes) of (?:it|them)\b|\bwhat came\b": 'write "the results"',
    r"\bhas how to\b": 'write "shows how to"',
    r"\bdraws? other\b": 'write "differ from"',
    r"\bnamed and counted\b": 'write "counted, with the reason"',
    r"\bwash(?:es)? .{1,40}\bout\b": 'write "hides"',
    r"\b(?:is|are) for (?:its|their) .{1,40}\balone\b": 'write "is used only for"',
    r"(?:^|[,;] )nor (?:does|do|is|are|was|were|has|have|can|will)\b": "no inversion: subject first, then the verb",
    r"\bmends?\b": 'write "fix"',
    r"\b(?:in|into) vain\b": 'write "without effect"',
    r"\bbegins? anew\b": 'write "starts with random weights" or "restarts"',
    r"\b(?:it|code|library|check|command|model|operator) (?:wants|wishes|believes)\b": 'write "needs" or "requires"',
    r"\bthose who carry on\b": 'write "contributors"',
    r"\bin the place of\b": 'write "instead of"',
    r"\bof equal(?:s| ones)\b": 'write "in a tie"',
    r"\bother ones\b": 'name the noun: "different keys"',
    r"(?<!there )\b(?:is|are) no (?:\w+ ){1,2}(?:that|which)\b": 'write "is not a ... that"',
    r"\bNone: (?:none|nowhere)\b": 'write "None if there are none"',
    r"\bsays? the same\b": 'write "is equivalent" or "agrees"',
}

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_`\[]*[A-Z0-9`])")
_ABBREVIATION = re.compile(r"(?:\be\.g|\bi\.e|\bet al|\bvs|\bcf|\bFig|\bSec|\bapprox)\.\"?$")
_LIST_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
_VALUES = re.compile(r"\brefuse\b|\.refused\b|\brefus(?:ed|al):")  # of --long; attributes of plans and layers
_NO_PARAGRAPH = re.compile(r"[#|<]|!\[|```|~~~|[-*+] |\d+\. ")
_WORD = re.compile(r"[^\W\d_][\w'-]*")


class Paragraph(NamedTuple):
    """Text of one paragraph, list item, heading or table cell, and the line on which it starts."""

    line: int
    kind: str  # "heading", "text", "item" or "cell"
    text: str


class Violation(NamedTuple):
    line: int
    words: str
    advice: str


def plain(text: str) -> str:
    """Markdown as it is read: links are their words, pictures are nothing, code is one word."""
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"``.+?``|`[^`]*`", "`code`", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"<[^>]+>", "", text)


def paragraphs(page: str) -> Iterator[Paragraph]:
    """The prose of a page: without fences, indented code, comments and the rules of tables."""
    page = re.sub(r"<!--.*?-->", lambda found: "\n" * found[0].count("\n"), page, flags=re.DOTALL)
    start, kind, held, fence, after_blank = 0, "", [], "", True
    for number, line in enumerate([*page.splitlines(), ""], 1):
        mark = re.match(r"^\s*(```+|~~~+)", line)
        if fence or mark:
            if held:
                yield Paragraph(start, kind, plain(" ".join(held)))
                held = []
            if mark and (not fence or mark[1].startswith(fence)):
                fence = "" if fence else mark[1]
            continue
        if not fence and line.startswith("    ") and after_blank and kind != "item":
            continue
        begins = line.startswith("#") or line.startswith("|") or _LIST_ITEM.match(line) or not line.strip()
        if begins and held:
            yield Paragraph(start, kind, plain(" ".join(held)))
            held = []
        after_blank = not line.strip()
        if line.startswith("#"):
            yield Paragraph(number, "heading", plain(line.lstrip("# ")))
            kind = "heading"
        elif line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", plain(line).strip().strip("|"))
            yield from (Paragraph(number, "cell", cell.strip()) for cell in cells if _WORD.search(cell))
            kind = "cell"
        elif line.strip():
            if not held:
                start = number
                kind = "item" if _LIST_ITEM.match(line) else "text"
            held.append(_LIST_ITEM.sub("", line).strip())


def sentences(text: str) -> list[str]:
    found: list[str] = []
    for part in _SENTENCE_END.split(text):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += " " + part
        else:
            found.append(part)
    return [sentence for sentence in found if words(sentence)]


def words(text: str) -> list[str]:
    return _WORD.findall(text)


def strings(code: str) -> Iterator[Paragraph]:
    """The docstrings and messages of a Python file; what an f-string inserts is one word."""
    nodes = list(ast.walk(ast.parse(code)))
    pieces = {id(piece) for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [str(piece.value) if isinstance(piece, ast.Constant) else "`code`" for piece in node.values]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            parts = [node.value]
        else:
            continue
        text = " ".join("".join(parts).split())
        if " " in text:
            yield Paragraph(node.lineno, "text", _VALUES.sub("", plain(text)))


VAGUE = {"found", "one", "seen", "told"}  # names of parameters that say nothing of what is passed
RIDDLES = {
    *("That", "Those", "What", "Who", "Whoever"),
    *("By", "From", "Of", "Over", "With", "Without"),
}  # first words of docstrings; a heading of options may have them
PRONOUNS = {"it", "them", "they"}  # as second words, when no noun came before


def signatures(code: str) -> Iterator[Violation]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                if parameter.arg in VAGUE:
                    yield Violation(parameter.lineno, parameter.arg, "name the parameter by its noun")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.endswith(
            "Options"
        ):
            begin = (ast.get_docstring(node) or "").split(None, 2)[:2]
            if begin and begin[0] in RIDDLES:
                advice = "begin with the noun that is returned, or the verb"
                yield Violation(node.body[0].lineno, f"{node.name}: {begin[0]} ...", advice)
            elif begin[1:] and begin[1].rstrip(",;.") in PRONOUNS:
                yield Violation(node.body[0].lineno, f"{node.name}: {' '.join(begin)} ...", "name the noun")


def phrases(parts: Iterable[Paragraph]) -> Iterator[Violation]:
    for paragraph in parts:
        for pattern, advice in ADVICE.items():
            for found in re.finditer(pattern, paragraph.text, re.IGNORECASE):
                yield Violation(paragraph.line, found[0].strip(" ,;"), advice)


def lengths(page: str) -> Iterator[Violation]:
    for paragraph in paragraphs(page):
        for sentence in sentences(paragraph.text):
            count = len(words(sentence))
            if count > LONGEST_SENTENCE:
                begin = " ".join(sentence.split()[:6])
                yield Violation(paragraph.line, f"{begin} ...", f"{count} words: split the sentence")


def whole_page(page: str, name: str) -> Iterator[Violation]:
    parts = list(paragraphs(page))
    count = sum(len(words(part.text)) for part in parts)
    if name not in REFERENCES and count > LONGEST_GUIDE:
        yield Violation(1, f"{count} words", f"a guide has at most {LONGEST_GUIDE}: shorten it or split it")
    title, _, rest = page.partition("\n")
    first = rest.strip().splitlines()[:1]
    if not title.startswith("# ") or not first or _NO_PARAGRAPH.match(first[0]):
        yield Violation(1, title, "after the title, say in a paragraph whom the page is for and what it answers")
    elif name not in FRONT and not _READER.search(sentences(plain(rest.strip().partition("\n\n")[0]))[0]):
        yield Violation(1, title, "the first sentence says whom the page is for: For people who ..., If you ...")


def violations(page: str, name: str) -> list[Violation]:
    """All that is wrong with a page or a file; code and pages of decisions are only searched for phrases."""
    if name.endswith(".py"):
        return sorted([*phrases(strings(page)), *signatures(page)])
    found = list(phrases(paragraphs(page)))
    if not name.startswith("docs/decisions/"):
        found += [*lengths(page), *whole_page(page, name)]
    return sorted(found)


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield ROOT / "CHANGELOG.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def modules() -> Iterator[Path]:
    for top in ("src", "benchmarks"):
        yield from sorted((ROOT / top).rglob("*.py"))


def syllables(word: str) -> int:
    """Groups of vowels, without a silent e."""
    count = len(re.findall(r"[aeiouy]+", word.lower()))
    silent = re.search(r"[^aeiouyl]es?$|[^aeioutd]ed$", word.lower())
    return max(1, count - bool(silent))


def readability(page: str) -> tuple[int, float, float]:
    """Words of prose, words in a mean sentence, and Flesch's reading ease (Flesch 1948) of the running text."""
    parts = list(paragraphs(page))
    count = sum(len(words(part.text)) for part in parts)
    running = [s for part in parts if part.kind in ("text", "item") for s in sentences(part.text)]
    inside = [word for sentence in running for word in words(sentence)]
    if not inside:
        return count, 0.0, 0.0
    mean = len(inside) / len(running)
    return count, mean, 206.835 - 1.015 * mean - 84.6 * sum(map(syllables, inside)) / len(inside)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="pages and Python files to check (default: all)")
    parser.add_argument("--readability", action="store_true", help="print a table of the pages, and check nothing")
    options = parser.parse_args()
    failed = False
    if options.readability:
        print(f"{'words':>6} {'mean':>5} {'ease':>5}  page")
    every = pages() if options.readability else (*pages(), *modules())
    for path in [page.resolve() for page in options.pages] or every:
        name, page = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        if options.readability:
            count, mean, ease = readability(page)
            print(f"{count:6} {mean:5.1f} {ease:5.1f}  {name}")
            continue
        for line, found, advice in violations(page, name):
            print(f"{name}:{line}: {found}: {advice}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
