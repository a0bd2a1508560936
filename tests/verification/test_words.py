"""The line that says how a target is called is true of its arguments and their shapes."""

from __future__ import annotations

import pytest
from torch import nn

from saccade.verification import MaskReading, Reading
from saccade.verification.subject._subject import Subject
from saccade.verification.subject._words import call_in_words


class Cross(nn.Module):
    def forward(self, x, context, mask):
        return x


class Mixed(nn.Module):
    def forward(self, query, key, value):
        return query


@pytest.mark.parametrize(
    ("module", "reading", "expected"),
    [
        (Cross(), Reading("cross", "BLD", 24), "with x and context each (batch, length, 24)"),
        (
            Cross(),
            Reading("cross", "BLD", 24, context_width=20),
            "with x (batch, length, 24) and context (batch, length, 20)",
        ),
        (
            Mixed(),
            Reading("qkv", "LBD", 24, context_width=20),
            "with query (length, batch, 24) and key and value each (length, batch, 20)",
        ),
        (
            Mixed(),
            Reading("qkv", "BLD", 24, context_width=20, value_width=13),
            "with query (batch, length, 24) and key (batch, length, 20) and value (batch, length, 13)",
        ),
    ],
)
def test_widths(module, reading, expected):
    assert call_in_words(Subject(module, reading)).endswith(expected)


def test_an_argument_is_named_once():
    """A mask that must be given is None in calls that need none."""
    masks = (MaskReading("mask", "BK", "attend"),)
    reading = Reading("cross", "BLD", 24, masks=masks, constants={"mask": None})
    assert call_in_words(Subject(Cross(), reading)).startswith("forward(x, context, mask) with x and context each")
