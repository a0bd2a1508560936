"""The sizes that a target takes, out of several."""

from __future__ import annotations

import pytest
import torch

from saccade.verification import Inapplicable, Reading
from saccade.verification.subject._steady import first_taken
from saccade.verification.subject._subject import Subject


def seven(x):
    """Takes seven positions and no other number."""
    if x.shape[1] != 7:
        raise RuntimeError(f"got {x.shape[1]}")
    return x


SEVEN = Subject(seven, Reading("self", "BLD", 5))


def test_the_first_that_is_taken():
    subject, inputs = first_taken([(SEVEN, 11, None), (SEVEN, 7, 13), (SEVEN, 7, None), (SEVEN, 3, None)])
    assert inputs["x"].shape == (2, 7, 5)
    assert torch.equal(subject(inputs).out, inputs["x"])


@pytest.mark.parametrize(
    ("tries", "words"),
    [
        ([(SEVEN, 7, 13)], "queries and keys are of one sequence"),  # no call raised: it cannot be said
        ([(SEVEN, 7, 13), (SEVEN, 11, None)], "RuntimeError: got 11"),
    ],
)
def test_none_is_taken(tries, words):
    with pytest.raises(Inapplicable, match=words):
        first_taken(tries)
