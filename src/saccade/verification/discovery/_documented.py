"""What a target's documentation says of the meaning of a mask."""

from __future__ import annotations

import re

from .._reading import Meaning
from ._source import Source, comments, docstrings

_ON = r"(?:\b(?:true|ones?|non-?zero|1s?)\b|(?<![\w.])1\.0)"
_OFF = r"(?:\b(?:false|zeros?|0s?)\b|(?<![\w.])0\.0)"
_GAP = r"[^.;,\n]{0,40}?"
_SEEN = r"(?:\bkeep|\bkept|\battend|\bvisible|\bvalid|\breal\b|\bseen?\b|\ballow|\bparticipat|\bunmask|\bused\b|\binclude" \
        r"|\bnot mask|\bmay look|\bpresent|\bactual|\bcan look|\bactive)"  # fmt: skip
_HIDDEN = r"(?:\bmask(?:ed)?\b|\bignor|\bpad|\bhidden|\bhide|\bblock|\bexclu|\bdisallow|\bprevent|\bnot(?: be)? (?:\w+ )?(?:attend" \
          r"|see|look|allow)|\bdrop|\binvisible|\bremove|\bforbid|\bforbidden)"  # fmt: skip


def documented(source: Source, argument: str) -> tuple[Meaning | None, str]:
    """The meaning that words beside the argument's name give it, and the words; None where they give none, or two."""
    said: dict[Meaning, str] = {}
    for line in _lines(source, argument):
        meaning = meaning_of(line)
        if meaning is not None:
            said.setdefault(meaning, " ".join(line.split())[:160])
    return next(iter(said.items())) if len(said) == 1 else (None, "")


def meaning_of(line: str) -> Meaning | None:
    """What a sentence says of True: "1 = keep", "True where padded", "0 for masked", "added to the scores"."""
    lowered = line.lower()
    votes = {_vote(lowered, word, on) for word, on in ((_ON, True), (_OFF, False))} - {None}
    if len(votes) == 1:
        return votes.pop()
    if not votes and re.search(r"additive|added to|-inf|float\(.-inf|0 or -|large negative", lowered):
        return "additive"
    return None


def _vote(line: str, word: str, on: bool) -> Meaning | None:
    for hidden, pattern in ((True, _HIDDEN), (False, _SEEN)):
        match = re.search(
            rf"{word}\s*(?:=|:|->|means?|marks?|is|are|for|where|at|indicates?|to|-|in|\(|on|positions?|entries|if)?{_GAP}{pattern}",
            line,
        )
        other = re.search(rf"{word}{_GAP}{_SEEN if hidden else _HIDDEN}", line)
        if match and not (other and len(other[0]) < len(match[0])):
            return "ignore" if hidden == on else "attend"
    return None


def _lines(source: Source, argument: str) -> list[str]:
    """Sentences of the documentation and comments that name the argument, with the line that follows its entry."""
    found = []
    name = rf"(?<!\w){re.escape(argument)}(?!\w)"
    for text in dict.fromkeys([*docstrings(source.text), *docstrings(source.whole)]):
        lines = text.splitlines()
        for at, line in enumerate(lines):
            if re.search(name, line):
                entry = re.match(rf"\s*:?(?:param )?{name}.{{0,40}}:", line)
                found += _sentences(" ".join([line, *_indented(lines, at)]) if entry else line)
    code = source.whole.splitlines()
    found += [comments(line)[0] for line in code if "#" in line and re.search(name, line) and comments(line)]
    return found


def _indented(lines: list[str], at: int) -> list[str]:
    """The lines of an entry after its first: those indented deeper."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    taken = []
    for line in lines[at + 1 :]:
        if not line.strip() or indent(line) <= indent(lines[at]):
            break
        taken.append(line.strip())
    return taken


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.;])\s+", text)
