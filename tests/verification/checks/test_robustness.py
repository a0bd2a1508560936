"""The same function for any sizes, strides, modes and calls before: right modules pass, each wrong one is named.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade
from saccade.verification import Reading
from saccade.verification.checks import _robustness as robustness
from saccade.verification.subject._subject import Subject
from slowly import slow_after

E, H = 33, 3
SELF = Reading("self", "BLD", E, heads=H)
HEADS = Reading("attention", "BHLD", 7, heads=3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, H, E // H).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, E))


class Buffered(Block):
    def __init__(self, longest: int, says: bool) -> None:
        super().__init__()
        self.says = says
        self.register_buffer("seen", torch.ones(longest, longest).tril().bool())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, longest = q.shape[-2], self.seen.shape[0]
        if self.says and length > longest:
            raise ValueError(f"at most {longest} tokens, got {length}")
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.masked_fill(~self.seen[:length, :length], -torch.inf).softmax(-1) @ v


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * torch.randn_like(x)


class FirstMask(Block):
    mask: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype)
        return F.scaled_dot_product_attention(q, k, v, self.mask)


class Writing(Block):
    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return super().forward(x)


class Squeezing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class TwoItems(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(2, -1, E))


class FixedView(Block):
    """Two items, written into a view that other numbers of them fit, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(x.shape) if x.shape[0] == 2 else x.flip(1))


class Averaging(Block):
    """Items influence each other, which mixing tells."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(0))


class Cutting(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :64])


class Viewing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, E).view(x.shape))


class ReadingMemory(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.as_strided(x, x.shape, (x.shape[1] * E, E, 1)))


class Mode(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if self.training else 0.9)


class Halving(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] < 100 else super().forward(x) / 0.0


def findings(target: Any, reading: Reading = SELF) -> list[Any]:
    subject = Subject(target.eval() if isinstance(target, nn.Module) else target, reading)
    return list(robustness.CHECK.run(subject))


class Normalised(Block):
    """Batch statistics: another function in train mode, by design."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(E)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.mT).mT)


@pytest.mark.parametrize(
    "target",
    [
        Block(),
        Normalised(),
        Averaging(),
        nn.TransformerEncoderLayer(E, H, 67, batch_first=True),
        saccade.nn.SelfAttention(E),
    ],
)
def test_right_modules_are_left_alone(target: nn.Module) -> None:
    assert findings(target) == []


def test_right_functions_are_left_alone() -> None:
    assert findings(F.scaled_dot_product_attention, HEADS) == []
    assert findings(saccade.attention, HEADS) == []
    mha = nn.MultiheadAttention(E, H, 0.1)
    assert findings(mha, Reading("qkv", "LBD", E, heads=H, out=0)) == []


WRONG = {
    "counts": (Counting(), "a call changes `calls`", "self.calls += 1"),
    "noise": (Noisy(), "draws random numbers (randn_like)", "torch.randn_like(x)"),
    "first mask": (FirstMask(), "After a call with 2 sequences of 7", "F.scaled_dot_product_attention"),
    "writes": (Writing(), "changes its own input x in place", "x *= 2"),
    "squeezes": (Squeezing(), "With 1 batch item", None),
    "two items": (TwoItems(), "With 1 batch item", None),
    "fixed view": (FixedView(), "in a batch of 1 than in a batch of 2", None),
    "cuts": (Cutting(), "With a length of 257 the output has the shape [2, 64, 33]", None),
    "view": (Viewing(), "not contiguous", "x.view(-1, E)"),
    "memory": (ReadingMemory(), "another order in memory", None),
    "mode": (Mode(), "train and eval mode differ", "self.training"),
    "long": (Halving(), "With a length of 257 the output holds NaN or Inf", None),
    "short buffer": (Buffered(12, False), "It takes at most 12 tokens", "masked_fill(~self.seen"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_module_is_named_once(name: str) -> None:
    module, words, code = WRONG[name]
    found = [finding for finding in findings(module) if finding.severity == "error"]
    assert len(found) == 1, found
    assert words in found[0].message
    assert code is None or code in found[0].location.code


@pytest.mark.parametrize("longest, says, severity", [(12, True, "note"), (64, True, "note"), (64, False, "warning")])
def test_a_limit_that_is_told_is_none_of_it(longest: int, says: bool, severity: str) -> None:
    (found,) = findings(Buffered(longest, says))
    assert found.severity == severity
    assert f"at most {longest} tokens; with {longest + 1}" in found.message


def test_a_known_limit_is_asked_one_beyond() -> None:
    reading = Reading("self", "BLD", E, heads=H, max_length=12)
    (found,) = findings(Buffered(12, False), reading)
    assert found.severity == "warning" and found.evidence["longest"] == 12
    (found,) = findings(Buffered(12, True), reading)
    assert found.severity == "note"


def turned(x: Tensor, qkv: nn.Linear) -> Tensor:
    return nn.functional.scaled_dot_product_attention(*qkv(x).chunk(3, -1))


class LearnedPositions(nn.Module):
    """A table of learned positions, cut to the length."""

    def __init__(self, longest: int = 8):
        super().__init__()
        self.places, self.qkv = nn.Parameter(torch.randn(1, longest, 24)), nn.Linear(24, 72)

    def forward(self, x):
        x = x + self.places[:, : x.shape[1]]
        return turned(x, self.qkv)


class AddedOnAnotherLine(LearnedPositions):
    def forward(self, x):
        rows = self.places[:, : x.shape[1]]
        x = x + rows
        return turned(x, self.qkv)


class OfZeros(LearnedPositions):
    def __init__(self, longest: int = 8):
        super().__init__(longest)
        nn.init.zeros_(self.places)


class TurnedFirst(LearnedPositions):
    """The whole table is turned, and then a part of it taken."""

    def forward(self, x):
        x = x + self.places.squeeze(0).data.unsqueeze(1).transpose(0, 1)[:, : x.shape[1]]
        return turned(x, self.qkv)


class Table(nn.Module):
    def __init__(self, longest: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(longest, 24))

    def forward(self, x):
        return x + self.weight[: x.shape[1]]


class InAPart(nn.Module):
    def __init__(self, longest: int = 8):
        super().__init__()
        self.places, self.qkv = Table(longest), nn.Linear(24, 72)

    def forward(self, x):
        return turned(self.places(x), self.qkv)


class OfTokens(nn.Module):
    def __init__(self, longest: int = 8):
        super().__init__()
        self.words, self.rows, self.qkv = nn.Embedding(41, 24), nn.Embedding(longest, 24), nn.Linear(24, 72)
        self.head = nn.Linear(24, 41)

    def forward(self, ids):
        x = self.words(ids) + self.rows(torch.arange(ids.shape[1]))
        return self.head(x + turned(x, self.qkv))


def with_positions_of_its_own(longest: int) -> Any:
    rows = nn.Parameter(torch.randn(longest, 16, generator=torch.Generator().manual_seed(0)))

    def attend(q, k, v):
        q, k = q + rows[: q.shape[-2]].to(q), k + rows[: k.shape[-2]].to(k)
        return nn.functional.scaled_dot_product_attention(q, k, v)

    return attend


@pytest.mark.parametrize(
    ("make", "longest"),
    slow_after(
        4,
        [
            *((LearnedPositions, longest) for longest in (8, 16, 64)),
            *((make, 16) for make in (AddedOnAnotherLine, OfZeros, TurnedFirst, InAPart, with_positions_of_its_own)),
            (OfTokens, 8),
        ],
    ),
)
def test_the_end_of_learned_positions_is_a_note(make: Any, longest: int):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = make(longest)
    report = saccade.verify(target, isolated=False, checks=[robustness.CHECK, "mixing"])
    assert report.ok, report
    (limit,) = [finding for finding in report.findings if f"takes at most {longest} tokens" in finding.message]
    assert limit.severity == "note"


def test_fewer_learned_positions_than_checks_need_are_told_as_that():
    (found,) = saccade.verify(LearnedPositions(6), isolated=False, checks=[robustness.CHECK]).errors
    assert "it takes at most 6, where its learned positions end" in found.message and "64" in found.fix


class Masked(nn.Module):
    """A mask is no table, though it is a parameter: what is too small for use stays an error."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.ones(12, 12).tril(), requires_grad=False)
        self.qkv = nn.Linear(24, 72)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = self.seen[: x.shape[1], : x.shape[1]]
        return (q @ k.mT / 24**0.5).masked_fill(seen == 0, -torch.inf).softmax(-1) @ v


def test_a_mask_that_is_a_parameter_is_no_table_of_positions():
    (found,) = saccade.verify(Masked(), isolated=False, checks=[robustness.CHECK]).errors
    assert "It takes at most 12 tokens" in found.message


class MaskedByNumbers(Masked):
    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.full((12, 12), -1e9).triu(1), requires_grad=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / 24**0.5 + self.seen[: x.shape[1], : x.shape[1]]).softmax(-1) @ v


class Sines(nn.Module):
    """Rows of tokens and segments are no positions: those are a buffer that is too short."""

    def __init__(self):
        super().__init__()
        self.words, self.segments, self.qkv = nn.Embedding(41, 24), nn.Embedding(2, 24), nn.Linear(24, 72)
        self.register_buffer("sines", torch.randn(12, 24))
        self.head = nn.Linear(24, 41)

    def forward(self, ids):
        x = self.words(ids) * 24**0.5 + self.sines[: ids.shape[1]]
        return self.head(x + turned(x, self.qkv))


class Segments(Sines):
    def forward(self, ids):
        x = self.segments(torch.zeros_like(ids)) + self.sines[: ids.shape[1]] + self.words(ids)
        return self.head(x + turned(x, self.qkv))


class Gained(nn.Module):
    """What a gain is multiplied with is no table."""

    def __init__(self):
        super().__init__()
        self.gain, self.qkv = nn.Parameter(torch.rand(24)), nn.Linear(24, 72)
        self.register_buffer("sines", torch.randn(12, 24))

    def forward(self, x):
        x = (self.gain * x)[:, :] + self.sines[: x.shape[1]]
        return turned(x, self.qkv)


@pytest.mark.parametrize("make", [MaskedByNumbers, Sines, Segments, Gained])
def test_what_is_no_table_of_positions_stays_an_error(make: Any):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = make()
    (found,) = saccade.verify(target, isolated=False, checks=[robustness.CHECK]).errors
    assert "It takes at most 12 tokens" in found.message
