"""What a target's documentation says of a mask: its meaning and its axes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .._reading import Meaning
from ._source import Source, comments, docstrings, letter

_TRUE = r"true|ones?|non-?zeros?|1s?|1\.0"
_FALSE = r"false|zeros?|0s?|0\.0"
_VALUE = re.compile(rf"(?<![\w.=!])(?:(?P<on>{_TRUE})|(?P<off>{_FALSE}))(?![\w.])")
_SEEN = re.compile(
    r"\bke(?:ep|pt)|\battend|\bvisible|\bvalid|\breal\b|\bseen?\b|\ballow|\bparticipat|\bunmask|\bused?\b|\binclud|\bpresent\b"
    r"|\b(?:not|un|non)-?(?: be)? ?(?:mask|pad|ignor)|\b(?:may|can) (?:be )?(?:look|see)|\bactual|\btakes? part"
    r"|\bto look|\bopen\b"
)
_HIDDEN = re.compile(
    r"\bmasked\b|\bmask(?:s|ing)? (?:out|it|them|that)\b|^\s*(?:=|means?|:|->)\s*mask\b|\bignor|\bpadd?(?:ed"
    r"|ing)?\b|\bhid(?:den|es?|ing)|\bblock"
    r"|\bexclud|\bdisallow|\bprevent|\bdrop|\binvisible|\bforbid|\bremoved?|\bdiscard|\bsuppress|\binvalid"
    r"|\b(?:not|never|no|cannot|can't|mustn't)(?: (?:be|to|may|allowed|let|should|any))* ?(?:attend|see|look"
    r"|allow|visible|valid|real|used?|included?)"
)
_ADDED = re.compile(
    r"\badditive|\badded (?:on)?to\b|\badds? to the (?:scores|logits)|\b0(?:\.0)?\b[^.;]{0,40}(?:-inf|-1e"
    r"|negative|minus inf|finfo)"
    r"|\b(?:large )?negative (?:number|value)s?\b|\bfloat mask"
)


def documented(source: Source, argument: str, others: Sequence[str] = ()) -> tuple[Meaning | None, str]:
    """The meaning that words beside the argument's name give it, and the words; None where they give none, or two.

    `others` are the other arguments' names: what follows one of them is said of it.
    """
    said: dict[Meaning, str] = {}
    for words in passages(source, argument, others):
        meaning = meaning_of(words)
        if meaning is not None:
            said.setdefault(meaning, words)
    return next(iter(said.items())) if len(said) == 1 else (None, "")


def documented_axes(source: Source, argument: str, others: Sequence[str] = ()) -> str | None:
    """ "(batch, q_len, k_len)" -> "BQK", "(b, m)" -> "BK"; None where no shape is told, or any that broadcasts."""
    for words in passages(source, argument, others):
        if "broadcast" in words.lower():
            return None
        found = re.search(r"[\(\[]\s*((?:[A-Za-z_]\w*|1)(?:\s*[,x]\s*(?:[A-Za-z_]\w*|1))+)\s*,?\s*[\)\]]", words)
        if found is None:
            continue
        names = re.split(r"\s*,\s*|\s+x\s+", found[1])
        axes = _mask_axes(names)
        if axes is not None:
            return axes
    return None


def _mask_axes(names: list[str]) -> str | None:
    plain = ["1" if name == "1" else letter(name, at, names) for at, name in enumerate(names)]
    lengths = [at for at, one in enumerate(plain) if one == "L"]
    if None in plain or not 1 <= len(lengths) <= 2:
        return None
    for at, one in zip(lengths, "QK" if len(lengths) == 2 else "K", strict=True):
        plain[at] = one
    axes = "".join(map(str, plain))
    return axes if "D" not in axes and len(set(axes.replace("1", ""))) == len(axes.replace("1", "")) else None


def meaning_of(words: str) -> Meaning | None:
    """What words say of True: "1 = keep", "True where padded", "0 for masked", "added to the scores"."""
    lowered = re.sub(r"[\(\[][^)\]]*,[^)\]]*[\)\]]", " ", words.lower())
    if _ADDED.search(lowered) and "bool" not in lowered:
        return "additive"
    votes = {vote for vote in _votes(lowered) if vote is not None}
    return votes.pop() if len(votes) == 1 else None


def _votes(words: str) -> Iterator[Meaning | None]:
    values = list(_VALUE.finditer(words))
    for at, value in enumerate(values):
        end = values[at + 1].start() if at + 1 < len(values) else len(words)
        after = re.split(r"[.;](?:\s|$)", words[value.end() : end])[0][:70]
        before = re.split(r"[.;](?:\s|$)", words[values[at - 1].end() if at else 0 : value.start()])[-1]
        hidden = _is_hidden(after)
        if hidden is None and re.search(r"\b(?:where|if|when|are|is|by|with|=|:)\s*$", before):
            hidden = _is_hidden(before)
        if hidden is not None:
            yield "ignore" if hidden == (value["on"] is not None) else "attend"


def _is_hidden(words: str) -> bool | None:
    """Whether the first word that says anything says hidden; of two that begin together the longer."""
    found = [(match.start(), -len(match[0]), hidden) for hidden, pattern in ((True, _HIDDEN), (False, _SEEN))
             if (match := pattern.search(words))]  # fmt: skip
    return min(found)[2] if found else None


def passages(source: Source, argument: str, others: Sequence[str]) -> Iterator[str]:
    """What docstrings and comments say after the argument's name, up to the next argument's."""
    for text in dict.fromkeys([*docstrings(source.text), *docstrings(source.whole)]):
        yield from _entries(text, argument, others)
    for line in dict.fromkeys(source.whole.splitlines()):
        code, sign, comment = line.partition("#")
        if sign and re.match(rf"\s*{re.escape(argument)}\s*[:=,)]", code):
            yield f"{argument}: {comment.strip()}"
        elif sign:
            yield from _entries(comments(line)[0] if comments(line) else "", argument, others)


def _entries(text: str, argument: str, others: Sequence[str]) -> Iterator[str]:
    name = re.compile(rf"(?<![\w.]){re.escape(argument)}(?!\w)")
    others = [re.escape(one) for one in others if one != argument]
    next_entry = re.compile(rf"(?<![\w.])(?:{'|'.join(others)})`*\s*(?:\([^()\n]*\)\s*)?:") if others else None
    lines = text.splitlines()
    for at, line in enumerate(lines):
        for match in name.finditer(line):
            words = line[match.start() :]
            if re.match(rf"\W*(?:param\s+)?{re.escape(argument)}\W", line.strip() + " "):
                words = " ".join([words, *_deeper(lines, at)])
            end = next_entry.search(words, len(argument)) if next_entry else None
            yield " ".join(words[: end.start() if end else 400].split()).rstrip(",; ")


def _deeper(lines: list[str], at: int) -> list[str]:
    """The lines of an entry after its first: those indented deeper."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    taken = []
    for line in lines[at + 1 :]:
        if not line.strip() or indent(line) <= indent(lines[at]):
            break
        taken.append(line.strip())
    return taken
