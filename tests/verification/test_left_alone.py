"""A report on a target without a mask names the arguments that may have been one."""

from __future__ import annotations

import pytest
import torch

from saccade.verification import Hints, verify
from saccade.verification.subject._reading import Reading
from saccade.verification.subject._subject import Subject
from saccade.verification.subject._words import no_mask


def attend(q, k, v, keep=None):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, -torch.inf)
    return scores.softmax(-1) @ v


def twice(q, k, v, keep=None, extra=None):
    return attend(q, k, v, keep)


def plain(q, k, v, scale=None):
    return attend(q, k, v)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (plain, "it takes no mask"),
        (
            attend,
            "it takes no mask that was recognised: the argument keep was left out; if one is a mask, say --mask keep",
        ),
        (
            twice,
            "it takes no mask that was recognised: the arguments keep, extra were left out; if one is a mask, say "
            "--mask keep",
        ),
    ],
)
def test_names_what_was_left_out(target, said):
    assert no_mask(Subject(target, Reading("attention", "BHLD", 8))) == said


def test_the_advice_works():
    checks = ["mask-meaning"]
    (unnamed,) = verify(attend, isolated=False, checks=checks).outcomes
    (named,) = verify(attend, how=Hints(mask="keep"), isolated=False, checks=checks).outcomes
    assert unnamed.status == "n/a" and "--mask keep" in unnamed.reason
    assert named.status == "passed"
