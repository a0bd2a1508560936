"""Two checkpoints on the same texts: which scores changed, and how certain the change is.

Differences are taken text by text and averaged (paired), so that what both models share on a text cancels.
Shape legend: T texts, layers, heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...support._uncertainty import LEVEL, half_width
from ._corpus import CorpusScores, deviation, mean
from ._scores import SCORES


class ScoreChange(NamedTuple):
    """The score of one head in two models, and their difference with its uncertainty.

    Example:
        >>> from saccade.analysis import Text, compare, study_corpus
        >>> from saccade.inspection import open_model
        >>> words = "The owl sat in the old oak. It saw a mouse near the barn, and it flew down."
        >>> scores = study_corpus(open_model(), [Text("owl", words)])
        >>> change = compare(scores, scores).changes()[0]
        >>> change.layer, change.head, change.score, change.difference
        (0, 0, 'broad', 0.0)
    """

    layer: int
    head: int
    score: str
    before: float
    after: float
    difference: float
    half_width: float  # difference -+ this: the 95 % interval
    certain: bool  # not 0 with 95 % confidence for all comparisons at once (Bonferroni)


@dataclass(frozen=True, eq=False)
class ModelComparison:
    """The scores of ``after`` minus those of ``before``, text by text. `compare` returns it.

    ``by_head`` says whether heads are compared one by one; this needs the same layers and heads in both. Thirds of the
    layers are always compared.

    Example:
        >>> from saccade.analysis import Text, compare, study_corpus
        >>> from saccade.inspection import open_model
        >>> words = "The owl sat in the old oak. It saw a mouse near the barn, and it flew down."
        >>> before = study_corpus(open_model(), [Text("owl", words)], seed=0)
        >>> comparison = compare(before, study_corpus(open_model(), [Text("owl", words)], seed=1))
        >>> comparison.by_head, comparison.differences("previous").shape
        (True, (1, 4, 8))
        >>> change = comparison.changes()[0]  # the largest one: only scores on random tokens depend on the seed
        >>> change.score
        'repeat induction'
    """

    before: CorpusScores
    after: CorpusScores

    @property
    def by_head(self) -> bool:
        return self.before.heads == self.after.heads

    def differences(self, name: str) -> np.ndarray:
        """(T, layers, heads)."""
        if not self.by_head:
            shapes = f"{_shape(self.before)} and {_shape(self.after)}"
            raise ValueError(f"heads cannot be compared one by one between {shapes}; thirds of the layers can")
        return np.asarray(self.after.scores[name] - self.before.scores[name])

    def changes(self) -> list[ScoreChange]:
        """Every head and score that both models have, the largest differences first."""
        changes = []
        for name in SCORES:
            difference = self.differences(name)
            average, wide, strict = _with_widths(difference, self._comparisons)
            known = np.isfinite(average)
            before, after = mean(self.before.scores[name]), mean(self.after.scores[name])
            for layer, head in zip(*(axis.tolist() for axis in np.nonzero(known)), strict=True):
                at = layer, head
                first, second, change, width = (float(values[at]) for values in (before, after, average, wide))
                certain = bool(abs(average[at]) > strict[at])
                changes.append(ScoreChange(layer, head, name, first, second, change, width, certain))
        return sorted(changes, key=lambda change: (-abs(change.difference), change[:3]))

    def thirds(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """((3,), (3,)): the difference of the early, middle and late layers, and half of its 95 % interval."""
        average, wide, _ = _with_widths(self.after.thirds(name) - self.before.thirds(name), 1)
        return average, wide

    @property
    def _comparisons(self) -> int:
        return sum(int(np.isfinite(mean(self.differences(name))).sum()) for name in SCORES)


def compare(before: CorpusScores, after: CorpusScores) -> ModelComparison:
    """Pair the texts of two studies. Texts that only one of them has are left out.

    Raises:
        ValueError: the two share no text.

    Example:
        >>> from saccade.analysis import Text, compare, study_corpus
        >>> from saccade.inspection import open_model
        >>> words = "The owl sat in the old oak. It saw a mouse near the barn, and it flew down."
        >>> before = study_corpus(open_model(), [Text("owl", words), Text("barn", words[28:])])
        >>> compare(before, study_corpus(open_model(), [Text("owl", words)])).before.texts
        ('owl',)
    """
    if before.texts == after.texts:
        return ModelComparison(before, after)
    shared = [name for name in before.texts if name in after.texts]
    if not shared:
        raise ValueError(f"{before.model} and {after.model} were studied on different texts; none is shared")
    return ModelComparison(_restricted_to(before, shared), _restricted_to(after, shared))


def _restricted_to(study: CorpusScores, names: list[str]) -> CorpusScores:
    """The study with these texts only; the others are listed as skipped."""
    kept = [study.texts.index(name) for name in names]
    left_out = tuple(name for name in study.texts if name not in names)
    return replace(
        study,
        texts=tuple(names),
        tokens=tuple(study.tokens[i] for i in kept),
        scores={name: scores[kept] for name, scores in study.scores.items()},
        chance={name: chance[kept] for name, chance in study.chance.items()},
        skipped=(*study.skipped, *left_out),
    )


def _with_widths(difference: np.ndarray, comparisons: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean over texts, half of its 95 % interval, half of the interval for so many comparisons at once)."""
    count, spread = np.isfinite(difference).sum(0), deviation(difference)
    strict = 1 - (1 - LEVEL) / max(comparisons, 1)
    return mean(difference), half_width(spread, count), half_width(spread, count, strict)


def _shape(study: CorpusScores) -> str:
    heads = sorted(set(study.heads))
    return f"{study.layers} layers x {heads[0] if len(heads) == 1 else f'{heads[0]} to {heads[-1]}'} heads"
