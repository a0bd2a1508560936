"""Whether order matters is found, told, and held against what is promised.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.verification import Finding, Inapplicable, Promise, Reading
from saccade.verification.checks import _order as order
from saccade.verification.subject._subject import Subject
from slowly import diagonal

E = 15
SELF = Reading("self", "BLD", E)
PROPER = Reading("attention", "BHLD", 5, heads=3)


class Attention(nn.Module):
    def __init__(self, positions: str = "", causal: bool = False, small: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.positions, self.causal = positions, causal
        if small:
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        place = torch.arange(length, dtype=x.dtype)
        if self.positions == "added":
            x = x + 0.1 * place[:, None]
        if self.positions == "clamped":
            x = x + 0.1 * place.clamp(max=11)[:, None]
        q, k, v = (one.view(*x.shape[:2], 3, 5).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / 5**0.5
        if self.positions == "bias":
            scores = scores - 0.1 * (place[:, None] - place).abs()
        if self.positions == "shifted":
            scores = scores.roll(1, -1)
        if self.causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def found(target: Any, reading: Reading = SELF, **promise: Any) -> list[Finding]:
    target = target.eval() if isinstance(target, nn.Module) else target
    return list(order.CHECK.run(Subject(target, reading, Promise(**promise))))


@pytest.mark.parametrize(
    ("causal", "small", "positions"), diagonal([False, True], [False, True], ["", "added", "bias"])
)
def test_it_is_found_and_told(positions: str, causal: bool, small: bool) -> None:
    target = Attention(positions, causal, small)
    (told,) = found(target)
    assert told.severity == "note"
    ignorant = "It has no positions of its own" if causal else "It does not use the order"
    assert told.message.startswith("It uses the order" if positions else ignorant)
    assert found(target, positions=bool(positions)) == []
    (broken,) = found(target, positions=not positions)
    assert (broken.severity, broken.family) == ("error", "order")
    assert ("no effect" in broken.message) == (not positions)


def test_keys_one_off_from_their_values() -> None:
    (finding,) = found(Attention("shifted"), positions=False)
    assert finding.severity == "error"
    assert float(finding.evidence["ratio"]) > 1


def test_attention_proper() -> None:
    (told,) = found(F.scaled_dot_product_attention, PROPER)
    assert told.message.startswith("It does not use the order")

    def reversed_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v.flip(-2))

    assert found(reversed_values, PROPER, positions=False)[0].severity == "error"

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert found(causal, PROPER, positions=False) == []


def test_two_sequences() -> None:
    mha = nn.MultiheadAttention(E, 3, batch_first=True)
    assert found(mha, Reading("qkv", "BLD", E, out=0), positions=False) == []
    decoder = nn.TransformerDecoderLayer(E, 3, 19, batch_first=True)
    assert found(decoder, Reading("cross", "BLD", E), positions=False) == []


def test_random_outputs_are_not_compared() -> None:
    with pytest.raises(Inapplicable, match="random"):
        found(lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.3) @ v, Reading("attention", "BHLD", 5, heads=3))


def test_neither_causal_nor_bidirectional_is_not_judged() -> None:
    class Half(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x)[:, :3], x[:, 3:]], 1)

    with pytest.raises(Inapplicable, match="some outputs see later inputs"):
        found(Half())


def test_positions_that_stop_counting_are_an_error():
    (error,) = [finding for finding in found(Attention("clamped")) if finding.severity == "error"]
    assert "Swapping inputs 31 and 32 of 33 swaps their outputs" in error.message
    assert error.location is not None and "clamp(max=11)" in error.location.code


@pytest.mark.parametrize("positions", ["", "added", "bias"])
def test_positions_that_count_everywhere_or_nowhere_are_none(positions: str):
    assert not [finding for finding in found(Attention(positions)) if finding.severity == "error"]
