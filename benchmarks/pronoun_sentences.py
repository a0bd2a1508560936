"""The sentences of `pronouns.py`: two nouns, a place for each, and a word that decides which of them is meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from saccade.inspection import TextModel


@dataclass(frozen=True)
class Kind:
    """Pairs of nouns, the two words that decide between them, and sentences with {a}, {b} (nouns) and {d} (decides).

    There are as many ``deciders`` as pairs, or as frames. ``spots`` are the tokens that look: the deciding word
    ("pronoun", "decides", "noun": its last token), the one "after" it, "it", and the "end". They look at the nouns, or
    at the tokens ``behind`` them.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    deciders: tuple[tuple[str, str], ...]
    frames: tuple[str, ...]
    spots: tuple[str, ...]
    behind: bool = False

    @property
    def by_pronoun(self) -> bool:
        return self.spots[0] == "pronoun"

    def words(self, pair: int, frame: int) -> tuple[str, str]:
        return self.deciders[pair if len(self.deciders) == len(self.pairs) else frame]


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    return tuple(tuple(words.split("/")) for words in text.split())  # type: ignore[misc]


FRAMES = (
    "The {a} stood near the {b} because {d} could not be moved.",
    "The {a} had come with the {b}, and {d} would be needed soon.",
    "The {a} lay beside the {b} all through the night, for {d} had been forgotten.",
    "The {a} fell upon the {b} when {d} came too near.",
    "The {a} remained behind the {b}, but {d} could be seen from far away.",
    "The {a} went before the {b}, so {d} must have come first.",
    "When the {a} came back with the {b}, {d} had been much changed.",
    "At last the {a} came to the {b}, and then {d} would not move.",
)
MEANING = (
    "The {a} stood near the {b} because it was {d}.",
    "The {a} was put by the {b}, for it was {d}.",
    "The {a} was as far as the {b}, and it was {d}.",
    "When the {a} came to the {b}, it was {d}.",
    "The {a} was left with the {b}, but it was {d}.",
    "At last the {a} fell on the {b}, and it was {d}.",
)
PRONOUN = ("pronoun", "after", "end")
_HE_SHE = _pairs(
    "man/woman boy/girl gentleman/lady father/mother brother/sister husband/wife son/daughter uncle/aunt "
    "king/queen prince/princess master/maid soldier/nurse duke/countess nephew/niece host/hostess priest/widow"
)
KINDS = (
    Kind(
        "he or she",
        _HE_SHE,
        (("he", "she"),) * 16,
        FRAMES,
        PRONOUN,
    ),
    Kind(
        "he or she, or it",
        _pairs(
            "man/door boy/table gentleman/carriage father/letter brother/house husband/window king/chair soldier/wall "
            "woman/bed girl/book lady/paper mother/fire sister/lamp wife/box queen/tree nurse/boat"
        ),
        (("he", "it"),) * 8 + (("she", "it"),) * 8,
        FRAMES,
        PRONOUN,
    ),
    Kind(
        "they, or one",
        _pairs(
            "men/lady boys/mother soldiers/woman sisters/man girls/father servants/queen women/king children/nurse "
            "friends/gentleman ladies/boy trees/house horses/carriage letters/table books/chair birds/window dogs/door"
        ),
        (
            *(("they", one) for one in "she she she he he she he she he he".split()),
            *(("they", "it"),) * 6,
        ),
        FRAMES,
        PRONOUN,
    ),
    Kind(
        "it, by the meaning",
        _pairs(
            "cat/mat dog/chair horse/carriage bird/window baby/bed wolf/door lamb/table rabbit/box bear/wall "
            "mouse/book pony/gate fox/letter"
        ),
        (
            ("tired", "soft"),
            ("hungry", "broken"),
            ("afraid", "made of wood"),
            ("asleep", "open"),
            ("angry", "painted"),
            ("alive", "made of paper"),
        ),
        MEANING,
        ("it", "decides", "end"),
    ),
    # What the study must find if it works: heads that copy look from a noun to what followed it last time.
    Kind(
        "the noun again",
        _HE_SHE,
        tuple((f"the {he}", f"the {she}") for he, she in _HE_SHE),
        FRAMES,
        ("noun",),
        behind=True,
    ),
)


class Sentence(NamedTuple):
    """Tokens of one sentence, which of them are the two nouns, and those that look."""

    ids: list[int]
    nouns: tuple[list[int], list[int]]  # of the pair's first noun and of its second, wherever they stand
    looks: list[int]


def sentence(
    model: TextModel, kind: Kind, frame: str, nouns: Sequence[str], decides: str, first: int, it: str = "it"
) -> Sentence:
    """``frame`` with ``nouns[first]`` for {a}, the other one for {b}, and ``it`` for "it"."""
    text, at = "", {}
    for part in re.split(r"(\{\w\}|\bit\b)", frame):
        word = {"{a}": nouns[first], "{b}": nouns[1 - first], "{d}": decides, "it": it}.get(part, part)
        at[part] = (len(text), len(text) + len(word))
        text += word
    tokens = model.encode(text)
    skip = len(model.before)

    def of(part: str) -> list[int]:
        start, stop = at[part]
        return [i + skip for i, (a, b) in enumerate(tokens.spans) if a < stop and b > start]

    last = of("{d}")[-1]
    looks = {"pronoun": last, "decides": last, "noun": last, "after": last + 1, "end": skip + len(tokens.ids) - 1}
    if "it" in at:
        looks["it"] = of("it")[-1]
    slots = (of("{a}"), of("{b}"))
    if kind.behind:
        slots = ([slots[0][-1] + 1], [slots[1][-1] + 1])
    return Sentence(
        [*model.before, *tokens.ids, *model.after],
        (slots[first], slots[1 - first]),
        [looks[spot] for spot in kind.spots],
    )


def sentences(model: TextModel, kind: Kind) -> dict[tuple[int, int, int, int], Sentence]:
    """Sentences by (pair, frame, which noun comes first, which noun is meant)."""
    return {
        (n, f, first, meant): sentence(model, kind, frame, nouns, kind.words(n, f)[meant], first)
        for n, nouns in enumerate(kind.pairs)
        for f, frame in enumerate(kind.frames)
        for first in (0, 1)
        for meant in (0, 1)
    }
