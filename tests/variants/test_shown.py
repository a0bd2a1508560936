"""A mask taken apart for mechanisms that form no pairs."""

from __future__ import annotations

import itertools

import torch

from saccade import Causal, Padding
from saccade.variants import causal_padding_of


def test_what_several_say_holds_together_in_any_order():
    parts = Padding([3], queries=[2]), Padding([[False, True, True, True, True]]), Causal()
    for first, second, third in itertools.permutations(parts):
        says = causal_padding_of(first & second & third, 1, 5, 5, torch.device("cpu"), "this", "it forms no pairs")
        assert says.causal
        assert says.keys.tolist() == [[False, True, True, False, False]]
        assert says.rows.tolist() == [[True, True, False, False, False]]
