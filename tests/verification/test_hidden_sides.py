"""Faults that show on one side alone: under a mask, at other sizes, in one flag; and the words that tell them.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import saccade
from saccade.verification import Report
from saccade.verification.findings._finding import Finding
from saccade.verification.subject.discovery._discover import discover

E, H = 24, 4


def verified(target: object, *checks: str) -> Report:
    return saccade.verify(target, checks=list(checks), isolated=False)


def only_error(report: Report, family: str) -> Finding:
    (error,) = report.errors
    assert error.family == family
    return error


class Base(nn.Module):
    def __init__(self, embed_dim: int = E, num_heads: int = H):
        super().__init__()
        self.heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def joined(self, scores: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.joined(q @ k.mT / math.sqrt(q.shape[-1]), v)


def axis_under_a_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is not None:
        return scores.masked_fill(~mask, -math.inf).softmax(1) @ value
    return scores.softmax(-1) @ value


def test_a_softmax_that_goes_wrong_only_where_a_mask_is_given() -> None:
    error = only_error(verified(axis_under_a_mask, "softmax"), "softmax")
    assert error.message.startswith("Where a mask is given, the softmax runs over the heads, not over the keys")
    assert error.location is not None and "softmax(1)" in error.location.code


def drops_unless_told(query: Tensor, key: Tensor, value: Tensor, p: float = 0.1) -> Tensor:
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
    return nn.functional.dropout(weights, p) @ value


def drops_in_training(query: Tensor, key: Tensor, value: Tensor, p: float = 0.1, training: bool = True) -> Tensor:
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
    return nn.functional.dropout(weights, p, training) @ value


def test_a_function_that_drops_by_default_and_knows_no_training() -> None:
    error = only_error(verified(drops_unless_told, "dropout", "causal-blindness"), "dropout")
    assert "without dropout being asked for" in error.message
    assert verified(drops_in_training, "dropout", "causal-blindness").ok


class DropsUnderAMask(Base):
    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """attn_mask: (L, L), True = may attend."""
        q, k, v = self.split(x)
        weights = q @ k.mT / math.sqrt(q.shape[-1])
        if attn_mask is not None:
            weights = weights.masked_fill(~attn_mask, -math.inf)
        weights = weights.softmax(-1)
        if attn_mask is not None:
            weights = nn.functional.dropout(weights, 0.2)
        out: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return out


def test_dropout_that_stays_active_only_where_a_mask_is_given() -> None:
    error = only_error(verified(DropsUnderAMask(), "dropout", "padding"), "dropout")
    assert "with the same input and a mask differ" in error.message


class SmallBuffer(Base):
    def __init__(self, embed_dim: int = E, num_heads: int = H):
        super().__init__(embed_dim, num_heads)
        width = embed_dim // num_heads
        self.register_buffer("tril", torch.ones(width, width).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        length = x.shape[1]
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return self.joined(scores.masked_fill(self.tril[:length, :length] == 0, -math.inf), v)


class OneBatch(Base):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(self.batch_size, -1, E))


@pytest.mark.parametrize(
    ("target", "told", "fix"),
    [
        (SmallBuffer(), "with 7 positions: it takes at most 6", "torch.ones(L, L"),
        (OneBatch(), "it takes a batch of 4 alone", "x.shape"),
    ],
)
def test_sizes_that_are_built_in_are_told_not_undecided(target: nn.Module, told: str, fix: str) -> None:
    error = only_error(verified(target, "scale"), "robustness")
    assert told in error.message
    assert fix in error.fix and error.location is not None


def late(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = True) -> Tensor:
    length = query.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    hidden[max(length - 2, 0), length - 1] = False
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return (scores.masked_fill(hidden, -math.inf) if is_causal else scores).softmax(-1) @ value


def test_a_flag_that_is_set_by_default_gives_one_finding() -> None:
    assert (
        "Only input 6 (the last) is seen too early" in only_error(verified(late, "causal-leak"), "causal-leak").message
    )


def test_what_a_first_output_sees_is_told_as_it_is() -> None:
    def strict(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        hidden = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool, device=query.device).triu()
        hidden[0, 0] = False
        return (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1) @ value

    error = only_error(verified(strict, "causal-blindness"), "causal-blindness")
    assert "its own position" in error.message and "Output 0" not in error.message


class Numbered(Base):
    def __init__(self, count: bool):
        super().__init__()
        self.position_embedding, self.count = nn.Embedding(64, E), count

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        return super().forward(x + self.position_embedding(at if self.count else torch.zeros_like(at)))


def test_a_table_of_positions_without_effect() -> None:
    error = only_error(verified(Numbered(count=False), "order"), "order")
    assert "It has positions, `position_embedding`, and they have no effect" in error.message
    assert verified(Numbered(count=True), "order").ok


def counted(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None) -> Tensor:
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if lengths is not None:
        hidden = torch.arange(key.shape[-2], device=key.device) >= lengths[:, None, None]
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ value


@pytest.mark.slow
def test_lengths_are_given_where_the_input_is() -> None:
    assert verified(counted, "robustness").ok


class Repeated(Base):
    """Heads before items in the scores, items before heads in the mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (one.transpose(0, 1).flatten(0, 1) for one in self.split(x))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask.repeat_interleave(self.heads, 0), -math.inf)
        out: Tensor = (scores.softmax(-1) @ v).unflatten(0, (self.heads, -1)).permute(1, 2, 0, 3).flatten(2)
        return self.out(out)  # type: ignore[no-any-return]


def test_masks_repeated_for_another_order_of_heads_and_items() -> None:
    error = only_error(verified(Repeated(), "mask-meaning"), "mask-meaning")
    assert "(B, H) for scores of (H, B)" in error.message and "mask.repeat(num_heads, 1, 1)" in error.fix


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out.view(batch, length, width)


def test_attention_over_the_batch_is_mixing_and_no_window() -> None:
    only_error(verified(SequenceFirst(), "mixing", "causal-blindness"), "mixing")


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            q = self.q(x).unflatten(-1, (H, -1)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (self.k, self.v))
        out: Tensor = self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def test_mixing_is_judged_where_a_projection_has_no_gradient() -> None:
    report = verified(WithoutGradient(), "mixing")
    assert report.ok and not any("broke off" in finding.message for finding in report.findings)


def test_guessed_arguments_are_named() -> None:
    class Head(nn.Module):
        def __init__(self, n_embd: int, head_size: int):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(n_embd, head_size) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = (self.q(x) @ self.k(x).mT * self.q.out_features**-0.5).softmax(-1) @ self.v(x)
            return out

    told = discover(Head).reading.assumed[0]
    assert told == "it is made as Head(n_embd=24, head_size=6) (otherwise --arg NAME=VALUE)"
    some = discover(Head, arguments={"n_embd": 32}).reading.assumed[0]
    assert some == "it is made as Head(head_size=8) (otherwise --arg NAME=VALUE)"


class ZeroAtPadding(Base):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """attention_mask: (B, L), 1 = real; outputs at padding are zeros."""
        if attention_mask is None:
            return super().forward(x)
        q, k, v = self.split(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        real = attention_mask.bool()
        return self.joined(scores.masked_fill(~real[:, None, None], -math.inf), v) * real[..., None]


def test_what_is_given_at_padding_is_no_fault_of_the_mask() -> None:
    assert verified(ZeroAtPadding(), "mask-meaning").ok
