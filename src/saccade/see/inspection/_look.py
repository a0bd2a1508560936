"""`look`: attention weights, findings and roles for one text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from textwrap import shorten
from typing import Any

import numpy as np

from ...make.models import Model
from ...support._numbers import joined, short_number
from ...support._registered import picture
from ._chance import ChanceMean, above_chance
from ._collect import AttentionMap, collect, read
from ._findings import MapFinding, find
from ._models import SaccadeModel, TextModel, with_progress
from ._published import as_text_model
from ._scores import by_chance, here, telling
from ._token_map import TokenMap, look_again, survey
from ._token_map_findings import find_in_whole, name_in_whole
from ._words import about_tokens

MOST_WORDS = 1000  # a map of more words fits no screen and no page
MOST_WEIGHTS = 2**27  # of all heads together, half a gibibyte
LEAST_OUTSIDE, MOST_OUTSIDE = 0.1, 5  # least weight and number of reported words outside a part
PART = 40  # default number of words in the map of a longer text


@dataclass(frozen=True, eq=False)
class Look:
    """The attention of a model on one text: map, findings, roles of the heads, and the head that is shown large.

    ``roles`` is the result of ``measure_roles``, None if the roles of this model were not measured. ``query`` is the
    word that a viewer selects first. For a text too long for a map of all its words ``seen`` is the map of a part,
    ``whole`` holds the findings of the whole text, and ``outside`` the words outside the part that its words attend to.

    Example:
        >>> from saccade.inspection import look, open_model
        >>> found = look(open_model(), "The cat sat on the mat.")
        >>> found
        <Look at 'The cat sat on the mat.': 7 words, embedded model, 4 layers x 8 heads, 5 findings>
        >>> found.layer, found.head, found.seen.weights.shape
        (2, 1, (4, 8, 8, 8))
    """

    seen: AttentionMap
    findings: list[MapFinding]
    roles: dict[str, Any] | None
    layer: int
    head: int
    query: int
    model: str = "embedded model"
    source: str = ""
    whole: TokenMap | None = None
    outside: Sequence[str] = ()
    generates: bool = True  # whether `saccade generate` can continue the text
    other_layers: str = ""  # what the model's layers without attention are; "" where all have some
    roles_note: str = ""  # why the roles on disk are not used

    def __repr__(self) -> str:
        text = shorten(self.seen.text[:200], 40)
        model = f"{self.model}, {self.seen.size}"
        return f"<Look at {text!r}: {self.words:,} words, {model}, {len(self.findings)} findings>"

    def _repr_html_(self) -> str:
        return picture("framed", self)

    @cached_property
    def habits(self) -> dict[str, np.ndarray]:
        """(layers, heads) by name: the averages of `here`, over the map or, if that is partial, over the whole text."""
        return here(self.seen) if self.whole is None else self.whole.habits

    @cached_property
    def chance(self) -> dict[str, ChanceMean]:
        """The ``habits`` by chance, (layers, 1) by name."""
        return by_chance(self.seen) if self.whole is None else self.whole.chance

    @property
    def words(self) -> int:
        """The number of words in the text, without special tokens."""
        return len(self.seen.ordinary) if self.whole is None else len(self.whole.ordinary)

    @property
    def pieces(self) -> int:
        """The number of tokens in the text, without special ones."""
        return self.seen.pieces if self.whole is None else self.whole.pieces

    @cached_property
    def note(self) -> str:
        """A note on texts whose words have several tokens each; "" for other texts."""
        return about_tokens(self.seen.words if self.whole is None else self.whole.words)

    @cached_property
    def gain(self) -> np.ndarray:
        """(W, W): how surprising each weight of the shown head is."""
        return _gain(self.seen, self.layer, self.head)

    def measured(self, layer: int, head: int) -> dict[str, Any] | None:
        """The head's entry in ``heads.json``, None if its role was not measured."""
        heads = (self.roles or {}).get("heads", ())
        return next((h for h in heads if (h["layer"], h["head"]) == (layer, head)), None)

    def habit(self, name: str, layer: int, head: int) -> float | None:
        """The head's score ``name`` on this text, None if the text has no case of it (such as a repeated word)."""
        value = float(self.habits[name][layer, head]) if name in self.habits else np.nan
        return None if np.isnan(value) else value

    def above(self, name: str, layer: int, head: int) -> float | None:
        """The same score above chance, as for roles: 0 for chance and 1 for always."""
        value = self.habit(name, layer, head)
        if value is None or name not in self.chance:
            return value
        return float(above_chance(np.array(value), self.chance[name].value[layer, 0]))

    @staticmethod
    def deciding(role: dict[str, Any]) -> float:
        """The score above chance that decided the role of a ``measured`` head, rounded down to hundredths.

        Rounded down, no head shows the value of a threshold that it missed.
        """
        score = role.get("above_chance", {}).get(role["decided_by"], role["score"])
        return math.floor(score * 100 + 1e-9) / 100

    @cached_property
    def ends(self) -> tuple[int, int]:
        """The word that a viewer selects first, and the word it attends to in the finding, or else the word to which it
        attends most clearly."""
        keys = (f.key for f in self.findings if f.place == (self.layer, self.head) and f.query == self.query)
        key = next((key for key in keys if key is not None), None)
        if key is None:
            start, stop = self.seen.stretch
            key = start + int(self.gain[self.query, start:stop].argmax())
        return self.query, key

    def columns(self, size: int) -> list[int]:
        """The ``size`` words nearest to both ``ends``, with the first token and the special tokens around the text.

        Every viewer takes these, so a wide viewer shows everything that a narrow one shows.
        """
        low, high = self.seen.stretch
        around = [*range(low), 0, *range(high, len(self.seen.words))]
        numbers, ends = [self.number(i) for i in range(len(self.seen.words))], [self.number(i) for i in self.ends]
        inside = range(min(ends) + 1, max(ends))  # words between the two come first, so that there is no gap
        nearest = sorted(
            range(low, high), key=lambda i: (min(abs(numbers[i] - end) for end in ends), numbers[i] not in inside, i)
        )
        return sorted({*around, *nearest[:size]})

    def breaks(self, columns: Sequence[int]) -> list[int]:
        """Places in ``columns`` of words that do not follow the word before: a passage of the text ends there."""
        at = [self.seen.at[i] if self.seen.at else i for i in columns]
        return [i for i in range(1, len(at)) if at[i] != at[i - 1] + 1]

    def number(self, i: int) -> int:
        """The number of word ``i`` in the text, counted from 1; special tokens before the text are not counted."""
        leading = next(n for n, word in enumerate(self.seen.words) if not word.special)
        return (self.seen.at[i] if self.seen.at else i) - leading + 1

    def runs(self, columns: Sequence[int]) -> list[tuple[int, int]]:
        """(first, last) word numbers of each run of consecutive words, without special tokens."""
        start, stop = self.seen.stretch
        out: list[tuple[int, int]] = []
        for number in (self.number(i) for i in columns if start <= i < stop):
            if out and number == out[-1][1] + 1:
                out[-1] = (out[-1][0], number)
            else:
                out.append((number, number))
        return out

    def part(self, columns: Sequence[int]) -> str:
        """The words as text, such as ``words 1 to 20 and 2,164 to 2,183 of 3,024``."""
        runs = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in self.runs(columns)]
        return f"words {joined(runs)} of {self.words:,}"

    def is_all(self, columns: Sequence[int]) -> bool:
        """Whether `columns` are all words of the text."""
        return sum(last - first + 1 for first, last in self.runs(columns)) == self.words

    def looking(self, columns: Sequence[int]) -> list[int]:
        """The ``columns`` without a first token that sees only itself."""
        return [i for i in columns if not (i == 0 and self.seen.causal and self.seen.words[0].special)]


def look(
    model: TextModel | Model,
    text: str,
    head: tuple[int, int] | None = None,
    *,
    rows: tuple[int, int] | None = None,
    name: str = "embedded model",
    source: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Look:
    """Look at ``text`` through ``model``.

    A text of more than 1,000 words, or one whose map of every head would take half a gigabyte, gets no full map. Its
    findings come from statistics in linear memory: averages by kind of token, entropy, distance, the words with the
    largest total weight, and the strongest links. The map is that of a part.

    Args:
        head: (layer, head) to show large; None: the one of the first finding.
        rows: (first, last) words of the part, counted from 1. The model reads them with the whole text around them.
            Also allowed for a short text.
        name: the model's name in reports.
        source: where the text is from, for reports.
        progress: called as ``progress(done, total)`` after every layer of every pass over the text.

    Raises:
        ValueError: a text without words or too long for the model, or a head or words that do not exist.

    Example:
        >>> from saccade.inspection import look, open_model
        >>> found = look(open_model(), "The cat sat on the mat.")
        >>> print(found.findings[0].sentence)
        The second 'the' looks mostly at 'sat' (.85) in layer 2 head 1
    """
    model = as_text_model(model)
    generates = isinstance(model, SaccadeModel)
    check_head(model, head)
    tokens, words = read(model, text)
    whole = rows is None and len(words) <= MOST_WORDS and sum(model.heads) * len(words) ** 2 <= MOST_WEIGHTS
    if progress:
        model = with_progress(model, progress, passes=1 if whole else 3)
    if whole:
        result = _of_a_map(model, collect(model, text), head)
    else:
        result = _of_a_part(model, tokens.ids, survey(model, text, tokens.ids, words), head, rows)
    return replace(
        result,
        model=name,
        source=source,
        other_layers=model.other_layers,
        roles_note=model.roles_note,
        generates=generates,
    )


def _of_a_map(model: TextModel, attention: AttentionMap, head: tuple[int, int] | None) -> Look:
    findings = find(attention, model.roles)
    first = next((f for f in findings if f.layer is not None and head in (None, f.place)), None)
    layer, number = head or (first.place if first else (0, 0))
    query = first.query if first else None
    if query is None:
        query = _most_telling(attention, layer, number)
    return Look(attention, findings, model.roles, layer, number, query)


def _gain(attention: AttentionMap, layer: int, head: int) -> np.ndarray:
    return telling(attention.weights[layer, head], attention.causal, attention.alike[layer, 0])


def _most_telling(attention: AttentionMap, layer: int, head: int) -> int:
    gain = _gain(attention, layer, head).max(-1)[attention.ordinary]
    return int(attention.ordinary[gain.argmax()])


def _of_a_part(
    model: TextModel, ids: list[int], whole: TokenMap, head: tuple[int, int] | None, rows: tuple[int, int] | None
) -> Look:
    chosen = None if rows is None else _asked(whole, rows)
    links = [(link.layer, link.head, link.query) for link in whole.links]
    in_whole = find_in_whole(whole, look_again(model, ids, whole, (), links, (0, 0)), model.roles)
    (layer, number), ends = _shown(whole, in_whole, head)
    around = {0, *range(whole.leading), *range(int(whole.ordinary[-1]) + 1, len(whole.words))}
    columns = sorted({*around, *(chosen or _words_around(whole, ends))})
    part = look_again(model, ids, whole, columns, (), (layer, number))
    words = tuple(whole.words[i] for i in columns)
    by_layer = () if len(set(model.heads)) == 1 else model.heads
    map_ = AttentionMap(whole.text, words, part.weights, part.alike, model.causal, by_layer, tuple(columns))
    place = {at: i for i, at in enumerate(columns)}
    findings = [_placed(finding, place) for finding in in_whole]
    query = next((f.query for f in findings if f.query is not None and f.place == (layer, number)), None)
    if query is None:
        query = _most_telling(map_, layer, number)
    outside = [_elsewhere(whole, *link) for link in part.outside if link[2] >= LEAST_OUTSIDE]
    return Look(map_, findings, model.roles, layer, number, query, whole=whole, outside=outside[:MOST_OUTSIDE])


def _shown(
    whole: TokenMap, findings: list[MapFinding], head: tuple[int, int] | None
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """The head to show (one with a finding, unless `head` is given), and the two words in the middle of its map."""
    of_head = [f for f in findings if f.layer is not None and head in (None, f.place)]
    place = head or (of_head[0].place if of_head else (0, 0))
    for finding in of_head:
        if finding.query is not None and finding.key is not None and finding.place == place:
            return place, (finding.query, finding.key)
    link = next((link for link in whole.links if (link.layer, link.head) == place), None)
    return place, (link.query, link.key) if link else None


def _elsewhere(whole: TokenMap, query: int, key: int, value: float) -> str:
    return f"{name_in_whole(whole, query)} looks at {name_in_whole(whole, key)} {short_number(value)}"


def _asked(whole: TokenMap, rows: tuple[int, int]) -> Iterable[int]:
    total = len(whole.ordinary)
    first, last = rows
    if not 1 <= first <= last <= total:
        raise ValueError(f"rows: {first} to {last} are not words of this text, which has 1 to {total:,}")
    if last - first >= MOST_WORDS or whole.count * (last - first + 1) ** 2 > MOST_WEIGHTS:
        most = min(MOST_WORDS, int((MOST_WEIGHTS / whole.count) ** 0.5))
        raise ValueError(f"rows: {first} to {last} are {last - first + 1:,} words; a map of this model holds {most:,}")
    return range(first + whole.leading - 1, last + whole.leading)


def _words_around(whole: TokenMap, ends: tuple[int, int] | None) -> Iterable[int]:
    """The words around both ends of the finding; the first words if there are no ends."""
    low, stop = whole.leading, int(whole.ordinary[-1]) + 1
    if ends is None:
        return range(low, min(low + PART, stop))
    sides = (range(max(low, i - PART // 4), min(stop, i + PART // 4)) for i in ends)
    return {i for side in sides for i in side}


def _placed(finding: MapFinding, place: dict[int, int]) -> MapFinding:
    """The finding with its words as indices of the part; without them if the part lacks one."""
    words = [i for i in (finding.query, finding.key) if i is not None]
    if not all(i in place for i in words):
        return replace(finding, query=None, key=None)
    query, key = (None if i is None else place[i] for i in (finding.query, finding.key))
    return replace(finding, query=query, key=key)


def check_head(model: TextModel, head: tuple[int, int] | None) -> None:
    """ValueError for a head that ``model`` does not have."""
    if head is None or (0 <= head[0] < model.layers and 0 <= head[1] < model.heads[head[0]]):
        return
    few, many = min(model.heads), max(model.heads)
    each = f"each with the heads 0 to {many - 1}" if few == many else f"with {few} to {many} heads each, counted from 0"
    raise ValueError(
        f"head: {head[0]}.{head[1]} does not exist; this model has the layers 0 to {model.layers - 1}, {each}"
    )
