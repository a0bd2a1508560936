"""Which head finds which grammatical relation (Clark et al. 2019, "What Does BERT Look At?", section 4).

A head is used as a classifier without training: its answer for a word is the other word to which that word attends
most. For the relation "dobj" it is right about a dependent when the answer is the dependent's head, and about a head
when the answer is its dependent. The baseline is the best fixed offset: "the word k further on", with the best k.

Shape legend: Hq query heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...operator._call import ObservedCall
from ..inspection import TextModel
from ._alignment import AlignedText, align_all, most_attended
from ._tally import AnswerTally
from ._treebank import Sentence

DIRECTIONS = ("dependent to head", "head to dependent")
ALL = "all"  # all relations but "punct"
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Syntax:
    """How often each head attends along a relation of a treebank. `study_syntax` returns it.

    The keys of ``tallies`` are (relation, direction). The relation "all" sums all but "punct". The directions are
    "dependent to head" and "head to dependent".

    Example:
        >>> from saccade.analysis import Sentence, TreebankWord, study_syntax
        >>> from saccade.inspection import open_model
        >>> owls = TreebankWord("owls", 0, 4, head=1, relation="nsubj", tag="NOUN", misc={})
        >>> fly = TreebankWord("fly", 5, 8, head=-1, relation="root", tag="VERB", misc={})
        >>> sentence = Sentence("1", "owls fly", (owls, fly), new_document=False, metadata={})
        >>> study = study_syntax(open_model(), [sentence])
        >>> study.relations(), study.total("nsubj", "head to dependent")
        (['all', 'nsubj'], 1)
        >>> study.ahead["nsubj", "dependent to head"]  # the head is ahead, and this model only looks back
        1
    """

    model: str
    causal: bool  # no word attends to a later one: cases whose answer is later are left out and counted in `ahead`
    heads: tuple[int, ...]
    sentences: int
    too_long: int
    words: int
    missing: int  # words without a token
    together: int  # cases whose two words share tokens
    tallies: dict[tuple[str, str], AnswerTally]
    ahead: Counter[tuple[str, str]]

    def relations(self, least: int = 1) -> list[str]:
        """The relations with at least so many cases in one direction, the most frequent first, `ALL` before all."""
        cases = {name: max(self.total(name, way) for way in DIRECTIONS) for name, _ in self.tallies}
        return sorted((n for n, c in cases.items() if c >= least), key=lambda n: (n != ALL, -cases[n], n))

    def total(self, relation: str, direction: str) -> int:
        tally = self.tallies.get((relation, direction))
        return 0 if tally is None else tally.total


def study_syntax(
    model: TextModel, sentences: Sequence[Sentence], *, source: str = "treebank", progress: Progress | None = None
) -> Syntax:
    """Count for every head of `model` how often it attends along each relation of the treebank.

    A head's answer for a word is the other word to which it attends most, special tokens left out. Words are matched to
    tokens by characters. Left out and counted: for a causal model cases whose answer comes later, sentences longer than
    the context, words without a token, and pairs of words in the same tokens.

    Source: Clark et al. 2019, "What Does BERT Look At?", section 4.

    Args:
        source: what error messages call the sentences.
        progress: called as ``progress(done, total)`` after every sentence.

    Raises:
        ValueError: no sentence with a relation that the model can read, or words that do not match its tokens: more
            than 5 in 100 have no token.

    Example:
        >>> from saccade.analysis import Sentence, TreebankWord, study_syntax
        >>> from saccade.inspection import open_model
        >>> owls = TreebankWord("owls", 0, 4, head=1, relation="nsubj", tag="NOUN", misc={})
        >>> fly = TreebankWord("fly", 5, 8, head=-1, relation="root", tag="VERB", misc={})
        >>> sentence = Sentence("1", "owls fly", (owls, fly), new_document=False, metadata={})
        >>> tally = study_syntax(open_model(), [sentence]).tallies["nsubj", "head to dependent"]
        >>> tally.best_offset  # the subject is the word before its verb
        (-1, AnswerShare(right=1, cases=1))
    """
    texts = (
        (each.name, each.text, [(word.start, word.stop) for word in each.words], [word.form for word in each.words])
        for each in sentences
    )
    aligned, missing = align_all(model, texts, source)
    tallies = _RelationTallies(model)
    for number, (sentence, its) in enumerate(zip(sentences, aligned, strict=True)):
        if model.context is not None and len(its.ids) > model.context:
            tallies.too_long += 1
        else:
            tallies.ask(number, sentence, its)
        if progress is not None:
            progress(number + 1, len(sentences))
    if not tallies.tallies:
        why = (
            f"{tallies.too_long} of {len(sentences)} sentences are too long for it"
            if tallies.too_long
            else "there is none"
        )
        raise ValueError(f"{source}: no relation that {model.name} can answer: {why}")
    return Syntax(
        model.name,
        model.causal,
        model.heads,
        len(sentences) - tallies.too_long,
        tallies.too_long,
        missing.words,
        missing.missing,
        tallies.together,
        tallies.tallies,
        tallies.ahead,
    )


class _RelationTallies:
    """Counts of right answers so far."""

    def __init__(self, model: TextModel):
        self.model = model
        self.tallies: dict[tuple[str, str], AnswerTally] = {}
        self.ahead: Counter[tuple[str, str]] = Counter()
        self.too_long = self.together = 0

    def ask(self, number: int, sentence: Sentence, aligned: AlignedText) -> None:
        cases = self._cases(sentence, aligned)
        if not cases:
            return
        queries = sorted({case.asks for case in cases})
        place = {unit: i for i, unit in enumerate(queries)}
        rows = torch.tensor([place[case.asks] for case in cases]).numpy()
        wanted = np.array([case.answer for case in cases])
        fold = number % 2
        tallies = [self._tally(relation, case.direction) for case in cases for relation in _kinds(case.relation)]
        of_case = [i for i, case in enumerate(cases) for _ in _kinds(case.relation)]
        for tally, i in zip(tallies, of_case, strict=True):
            tally.ask(fold, [cases[i].answer - cases[i].asks])

        def visit(layer: int, call: ObservedCall) -> None:
            right = most_attended(call, aligned, queries)[:, rows] == wanted  # (Hq, cases)
            for tally, i in zip(tallies, of_case, strict=True):
                tally.answer(fold, layer, right[:, i])

        self.model.run(torch.tensor([aligned.ids]), visit)

    def _cases(self, sentence: Sentence, aligned: AlignedText) -> list[_RelationCase]:
        cases = []
        for word, unit in zip(sentence.words, aligned.unit_of, strict=True):
            if word.head is None or word.head < 0 or not word.relation:
                continue
            other = aligned.unit_of[word.head]
            if unit is None or other is None:
                continue
            if unit == other:
                self.together += 1
                continue
            for direction, asks, answer in ((DIRECTIONS[0], unit, other), (DIRECTIONS[1], other, unit)):
                if self.model.causal and answer > asks:
                    self.ahead.update((kind, direction) for kind in _kinds(word.relation))
                else:
                    cases.append(_RelationCase(word.relation, direction, asks, answer))
        return cases

    def _tally(self, relation: str, direction: str) -> AnswerTally:
        return self.tallies.setdefault((relation, direction), AnswerTally(self.model.heads))


class _RelationCase(NamedTuple):
    relation: str
    direction: str
    asks: int  # the unit that looks
    answer: int  # the unit that is right


def _kinds(relation: str) -> tuple[str, ...]:
    return (relation,) if relation.split(":")[0] == "punct" else (relation, ALL)
