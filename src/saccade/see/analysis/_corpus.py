"""Head scores over many texts: means, their spread, roles, and thirds of the layers.

Shape legend: T texts, layers, heads (the most of any layer; NaN where a layer has fewer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...support._uncertainty import half_width
from ..inspection import RULES, TextModel, role_of
from ..inspection._chance import above_chance
from ._scores import FEW, SCORES, mark, measure_text
from ._texts import Text

SHORTEST = 2 * FEW  # tokens of a text: in shorter ones too few rows see more than FEW keys
THIRDS = ("early", "middle", "late")
# The roles and thresholds of `saccade.inspection`; its delimiters include line ends and separators only.
_AS = {
    "repeat": ("repeat induction",),
    "duplicate": ("repeat duplicate",),
    "sink": ("first",),
    "delimiter": ("delimiter", "punctuation"),
    "previous": ("previous", "next"),
}
ROLES = tuple(
    rule._replace(roles=tuple(name for role in rule.roles for name in _AS.get(role, (role,)))) for rule in RULES
)
"""The rules of `saccade.inspection.RULES`, with the scores of a study in place of those of one text."""
Progress = Callable[[int, int], None]  # called with (done, total)


@dataclass(frozen=True, eq=False)
class CorpusScores:
    """Every score of every head on every text. `study_corpus` returns it.

    ``scores[name]`` and ``chance[name]`` are (T, layers, heads). A value is NaN where the text has no case of it (such
    as no repeated token), or where there is no such head. ``skipped`` names the texts that are too short.

    Example:
        >>> from saccade.analysis import Text, study_corpus
        >>> from saccade.inspection import open_model
        >>> words = "The owl sat in the old oak. It saw a mouse near the barn, and it flew down."
        >>> scores = study_corpus(open_model(), [Text("owl", words)])
        >>> scores.mean("previous").round(1)[0]  # the heads of layer 0
        array([0.5, 0.4, 0.2, 0. , 0.9, 0.9, 0.2, 0.1])
        >>> scores.role(0, 5)
        ('previous', 'previous')
    """

    model: str
    heads: tuple[int, ...]
    texts: tuple[str, ...]
    tokens: tuple[int, ...]
    scores: dict[str, np.ndarray]
    chance: dict[str, np.ndarray]
    skipped: tuple[str, ...]

    @property
    def layers(self) -> int:
        return len(self.heads)

    def counts(self, name: str) -> np.ndarray:
        """(layers, heads): the number of texts with a value."""
        return np.asarray(np.isfinite(self.scores[name]).sum(0))

    def mean(self, name: str) -> np.ndarray:
        """(layers, heads): the mean over texts."""
        return mean(self.scores[name])

    def deviation(self, name: str) -> np.ndarray:
        """(layers, heads): the standard deviation over texts, NaN with fewer than two."""
        return deviation(self.scores[name])

    def half_width(self, name: str) -> np.ndarray:
        """(layers, heads): mean -+ this is the 95 % interval of the mean (Student's, texts independent)."""
        return half_width(self.deviation(name), self.counts(name))

    def quantiles(self, name: str, shares: Sequence[float] = (0.1, 0.5, 0.9)) -> np.ndarray:
        """(shares, layers, heads): quantiles over texts."""
        scores = self.scores[name]
        known = np.isfinite(scores).any(0)
        out = np.full((len(shares), *known.shape), np.nan)
        out[:, known] = np.nanquantile(scores[:, known], shares, axis=0)
        return out

    def by_chance(self, name: str) -> np.ndarray:
        """(layers, heads): the score of a head with equal weights, averaged over texts."""
        return mean(self.chance[name])

    def above(self, name: str) -> np.ndarray:
        """(layers, heads): (mean - chance) / (1 - chance), at least 0."""
        return above_chance(self.mean(name), self.by_chance(name))

    def thirds(self, name: str) -> np.ndarray:
        """(T, 3): the mean over the heads of the early, middle and late layers, for each text."""
        return by_thirds(self.scores[name])

    def role(self, layer: int, head: int) -> tuple[str, str]:
        """(role, the score that decided it), by the thresholds of `saccade.analysis.ROLES`."""
        return role_of({name: float(above[layer, head]) for name, above in self._known.items()}, ROLES)

    @cached_property
    def _known(self) -> dict[str, np.ndarray]:
        """(layers, heads): the difference of each score from chance, which decides roles; 0 where it is NaN."""
        return {name: np.nan_to_num(self.above(name)) for rule in ROLES for name in rule.roles}


def study_corpus(
    model: TextModel, texts: Sequence[Text], *, seed: int = 0, progress: Progress | None = None
) -> CorpusScores:
    """Score every head of ``model`` on every text.

    The same texts and seed give the same numbers. Memory is linear in a text's length. A score is an average weight.
    Rows count if their token is not special, sees more than 8 keys, and sees a target. With p_ij the weight of key j in
    row i, and T_i the targets of row i:

        score = mean_i sum_(j in T_i) p_ij        chance = mean_i |T_i| / (keys that row i sees)

    | score | targets of row i, or formula | source |
    |---|---|---|
    | previous, next, self | token i - 1, i + 1, i | Clark et al. 2019, 3.1; Voita et al. 2019 |
    | first | the first token (`<s>`, `[CLS]`, or the text's own) | Xiao et al. 2023 |
    | delimiter | line breaks, and special tokens but the first | Clark et al. 2019, 3.2 |
    | punctuation | other tokens without a letter or digit that are not blank | Clark et al. 2019, 3.2 |
    | duplicate | earlier occurrences of the same token, if it has a letter or digit | Wang et al. 2023 |
    | induction | the tokens right after those, before i | Olsson et al. 2022 |
    | repeat induction, repeat duplicate | the same in the second copy of shuffled tokens | Olsson et al. 2022 |
    | broad | entropy of the row over the log of its number of keys | Clark et al. 2019, 3.3 |
    | dormant | share of tokens with a small head output | Sandoval-Segura et al. 2025; Guo et al. 2024 |

    The shuffled tokens are up to 48 of the text, written twice: word order cannot help a copying head there. An output
    is small if its norm, before the output projection, is below 0.2 of the mean of its layer's heads.

    Args:
        seed: of the repeated random tokens.
        progress: called as ``progress(done, total)`` after every text.

    Raises:
        ValueError: a text longer than the model's context, or no text that is long enough.

    Example:
        >>> from saccade.analysis import Text, study_corpus
        >>> from saccade.inspection import open_model
        >>> words = "The owl sat in the old oak. It saw a mouse near the barn, and it flew down."
        >>> scores = study_corpus(open_model(), [Text("owl", words), Text("short", "An owl.")])
        >>> scores.texts, scores.skipped, scores.scores["previous"].shape
        (('owl',), ('short',), (1, 4, 8))
    """
    used, skipped, measured = [], [], []
    for number, text in enumerate(texts):
        tokens = mark(model, text.text)
        length = int(tokens.is_text.sum())
        if model.context is not None and len(tokens.ids) > model.context:
            limit = f"expected at most {model.context} tokens, the context of {model.name}"
            raise ValueError(f"{text.name}: {limit}, got {len(tokens.ids)}")
        if length < SHORTEST:
            skipped.append(text.name)
        else:
            used.append((text.name, length))
            measured.append(measure_text(model, tokens, np.random.default_rng([seed, number])))
        if progress is not None:
            progress(number + 1, len(texts))
    if not measured:
        raise ValueError(f"corpus: none of the {len(texts)} texts has {SHORTEST} tokens or more")
    return CorpusScores(
        model.name,
        model.heads,
        tuple(name for name, _ in used),
        tuple(length for _, length in used),
        {name: np.stack([m.scores[name] for m in measured]) for name in SCORES},
        {name: np.stack([m.chance[name] for m in measured]) for name in SCORES},
        tuple(skipped),
    )


def third_of(layer: int, layers: int) -> int:
    """The third of the stack (0, 1 or 2) in which the middle of the layer lies."""
    return min(2, int(3 * (layer + 0.5) / layers))


def by_thirds(scores: np.ndarray) -> np.ndarray:
    """(..., layers, heads) to (..., 3): the mean over the heads of each third, NaN for a third without layers."""
    layers = scores.shape[-2]
    which = np.array([third_of(layer, layers) for layer in range(layers)])
    parts = [scores[..., which == k, :].reshape(*scores.shape[:-2], -1) for k in range(3)]
    return np.stack([mean(np.moveaxis(part, -1, 0)) for part in parts], -1)


def mean(values: np.ndarray) -> np.ndarray:
    """The mean over the first axis, without NaN; NaN where all are."""
    known = np.isfinite(values)
    count = known.sum(0)
    return np.asarray(np.where(count > 0, np.where(known, values, 0).sum(0) / np.maximum(count, 1), np.nan))


def deviation(values: np.ndarray) -> np.ndarray:
    """The standard deviation over the first axis (n - 1), without NaN; NaN with fewer than two values."""
    known = np.isfinite(values)
    count = known.sum(0)
    squares = np.where(known, values - mean(values), 0) ** 2
    return np.asarray(np.where(count > 1, np.sqrt(squares.sum(0) / np.maximum(count - 1, 1)), np.nan))
