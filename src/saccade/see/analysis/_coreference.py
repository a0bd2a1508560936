"""Which head attends from a mention back to an earlier mention of the same entity (Clark et al. 2019, section 4.3).

An anaphor is a mention of an entity that was mentioned before. A head is right about it when the other word to which
the anaphor's head word attends most belongs to an earlier mention of the entity (an antecedent).

Shape legend: Hq query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...operator._call import ObservedCall
from ..inspection import TextModel
from ._alignment import AlignedText, UnmatchedWords, align, most_attended
from ._mentions import Document, Mention
from ._tally import AnswerShare, AnswerTally
from ._texts import fitting

EVERY = "all"
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Coreference:
    """How often each head attends from an anaphor to an antecedent. `study_coreference` returns it.

    The keys of ``tallies`` are the kinds of anaphora: "all", and "pronoun", "name" and "other" where tags are known.
    ``nearest`` is the share of right answers of the baseline "the nearest earlier mention", ``same_word`` that of "the
    nearest earlier mention with the same head word". ``out_of_reach`` counts anaphora whose antecedents are all in
    other pieces of a document that is longer than the model's context.

    Example:
        >>> from saccade.analysis import Document, Mention, study_coreference
        >>> from saccade.inspection import open_model
        >>> words = ((0, 3), (4, 8), (9, 12), (13, 17))
        >>> mentions = (Mention(0, 0, 0, "ann"), Mention(2, 2, 2, "ann"))
        >>> study = study_coreference(open_model(), [Document("1", "Ann said she left", words, mentions)])
        >>> study.tallies["all"].best_offset  # "she" is two words after "Ann"
        (-2, AnswerShare(right=1, cases=1))
        >>> study.nearest["all"]
        AnswerShare(right=1, cases=1)
    """

    model: str
    heads: tuple[int, ...]
    documents: int
    pieces: int
    words: int
    missing: int
    out_of_reach: int
    tallies: dict[str, AnswerTally]
    nearest: dict[str, AnswerShare]
    same_word: dict[str, AnswerShare]


def study_coreference(
    model: TextModel, documents: Sequence[Document], *, source: str = "coreference", progress: Progress | None = None
) -> Coreference:
    """Count for every head of `model` how often it attends from an anaphor to one of its antecedents.

    A text longer than the model's context is read in pieces. Anaphora without an antecedent in their piece are left
    out and counted.

    Source: Clark et al. 2019, "What Does BERT Look At?", section 4.3.

    Args:
        source: what error messages call the documents.
        progress: called as ``progress(done, total)`` after every piece of a document.

    Raises:
        ValueError: no anaphor has an antecedent within the model's context, or the words do not match its tokens.

    Example:
        >>> from saccade.analysis import Document, Mention, study_coreference
        >>> from saccade.inspection import open_model
        >>> words = ((0, 3), (4, 8), (9, 12), (13, 17))
        >>> mentions = (Mention(0, 0, 0, "ann"), Mention(2, 2, 2, "ann"))
        >>> study = study_coreference(open_model(), [Document("1", "Ann said she left", words, mentions)])
        >>> study.tallies["all"].total, study.words
        (1, 4)
        >>> layer, head = study.tallies["all"].best
        >>> study.tallies["all"].of_head(layer, head)
        AnswerShare(right=1, cases=1)
    """
    tallies = _AntecedentTallies(model)
    missing = UnmatchedWords(source, model.name)
    pieces = [piece for document in documents for piece in _document_parts(model, document)]
    for piece in pieces:
        missing.add(piece.name, [piece.text[start:stop] for start, stop in piece.words], piece.aligned)
    missing.check()
    for number, piece in enumerate(pieces):
        tallies.ask(number % 2, piece)
        if progress is not None:
            progress(number + 1, len(pieces))
    if not tallies.tallies:
        raise ValueError(f"{source}: no mention has an antecedent within the context of {model.name}")
    reach = sum(len(_anaphora(d.mentions)) for d in documents) - tallies.tallies[EVERY].total
    return Coreference(
        model.name,
        model.heads,
        len(documents),
        len(pieces),
        missing.words,
        missing.missing,
        reach,
        tallies.tallies,
        tallies.baseline("nearest"),
        tallies.baseline("same word"),
    )


class _DocumentPart(NamedTuple):
    """A document, or a piece of it that fits the model's context."""

    name: str
    text: str
    words: tuple[tuple[int, int], ...]
    mentions: tuple[Mention, ...]
    aligned: AlignedText


def _document_parts(model: TextModel, document: Document) -> Iterator[_DocumentPart]:
    words, first = document.words, 0
    while first < len(words):
        start = words[first][0]
        end = len(document.text)
        if model.context is not None:
            end = fitting(model, document.text, start, model.context)
        last = first
        while last < len(words) and words[last][1] <= end:
            last += 1
        if last == first:
            raise ValueError(f"{document.name}: a single word is longer than the context of {model.name}")
        own = tuple((a - start, b - start) for a, b in words[first:last])
        mentions = tuple(
            m._replace(first=m.first - first, last=m.last - first, head=m.head - first)
            for m in document.mentions
            if first <= m.first and m.last < last
        )
        text = document.text[start : words[last - 1][1]]
        yield _DocumentPart(document.name, text, own, mentions, align(model, text, own))
        first = last


def _anaphora(mentions: Sequence[Mention]) -> list[tuple[Mention, list[Mention]]]:
    """(anaphor, its antecedents): earlier mentions of the same entity that do not overlap it."""
    anaphora = []
    for mention in mentions:
        earlier = [m for m in mentions if m.entity == mention.entity and m.last < mention.first]
        if earlier:
            anaphora.append((mention, earlier))
    return anaphora


class _AntecedentCase(NamedTuple):
    kinds: tuple[str, ...]
    asks: int
    answers: frozenset[int]


class _AntecedentTallies:
    """Counts of right answers so far."""

    def __init__(self, model: TextModel):
        self.model = model
        self.tallies: dict[str, AnswerTally] = {}
        self._right: dict[tuple[str, str], int] = {}

    def ask(self, fold: int, piece: _DocumentPart) -> None:
        cases = [case for pair in _anaphora(piece.mentions) if (case := self._case(piece, *pair)) is not None]
        if not cases:
            return
        for case in cases:
            for kind in case.kinds:
                tally = self.tallies.setdefault(kind, AnswerTally(self.model.heads))
                tally.ask(fold, [answer - case.asks for answer in case.answers])
        queries = sorted({case.asks for case in cases})
        rows = [queries.index(case.asks) for case in cases]
        right_ones = np.zeros((len(cases), piece.aligned.units + 1), dtype=bool)  # the last: no answer (-1)
        for i, case in enumerate(cases):
            right_ones[i, list(case.answers)] = True

        def visit(layer: int, call: ObservedCall) -> None:
            looked_at = most_attended(call, piece.aligned, queries)[:, rows]
            right = right_ones[np.arange(len(cases)), looked_at]  # (Hq, cases)
            for i, case in enumerate(cases):
                for kind in case.kinds:
                    self.tallies[kind].answer(fold, layer, right[:, i])

        self.model.run(torch.tensor([piece.aligned.ids]), visit)

    def _case(self, piece: _DocumentPart, mention: Mention, antecedents: list[Mention]) -> _AntecedentCase | None:
        """The case of an anaphor, after its baselines are counted; None if no antecedent has tokens outside of the
        mention."""
        unit_of = piece.aligned.unit_of
        asks = unit_of[mention.head]
        own = {unit_of[word] for word in range(mention.first, mention.last + 1)}
        words = [word for m in antecedents for word in range(m.first, m.last + 1)]
        answers = frozenset(unit for word in words if (unit := unit_of[word]) is not None and unit not in own)
        if asks is None or not answers:
            return None
        kinds = (EVERY, mention.kind) if mention.kind else (EVERY,)
        before = [m for m in piece.mentions if m.last < mention.first]
        same = [m for m in before if _word(piece, m.head) == _word(piece, mention.head)]
        for kind in kinds:
            for name, nearest in (("nearest", before), ("same word", same)):
                right = bool(nearest) and max(nearest, key=lambda m: (m.last, m.first)).entity == mention.entity
                self._right[name, kind] = self._right.get((name, kind), 0) + right
        return _AntecedentCase(kinds, asks, answers)

    def baseline(self, name: str) -> dict[str, AnswerShare]:
        return {kind: AnswerShare(self._right[name, kind], tally.total) for kind, tally in self.tallies.items()}


def _word(piece: _DocumentPart, word: int) -> str:
    start, stop = piece.words[word]
    return piece.text[start:stop].casefold()
