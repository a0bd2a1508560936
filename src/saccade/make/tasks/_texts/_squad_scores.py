"""How good an answer is: exact match and F1 as of SQuAD (Rajpurkar et al. 2016, 2018)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_SIGNS = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> list[str]:
    """The words of an answer in lower case, without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_SIGNS)).split()


def exact_match(found: str, expected: Sequence[str]) -> float:
    """1 if it is one of the right answers, once both are normalised."""
    return float(any(normalised(found) == normalised(one) for one in expected))


def word_f1(found: str, expected: Sequence[str]) -> float:
    """The largest F1 of its words over the right answers; of an empty one, 1 if both are."""
    return max(_f1(normalised(found), normalised(one)) for one in expected)


def _f1(found: list[str], expected: list[str]) -> float:
    if not found or not expected:
        return float(found == expected)
    common = (Counter(found) & Counter(expected)).total()
    return 2 * common / (len(found) + len(expected))
