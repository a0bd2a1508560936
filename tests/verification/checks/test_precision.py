"""Half precision that is finite and near is left alone; overflow, coarse sums and rounding inside are named once.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade
from saccade.verification import Inapplicable, MaskReading, Reading
from saccade.verification.checks import _precision as precision
from saccade.verification.subject._subject import Subject
from slowly import slow_but

HEADS = Reading("attention", "BHLD", 7, heads=3)
MASKED = Reading("attention", "BHLD", 7, heads=3, masks=(MaskReading("mask", "QK", "attend"),))


def attention(weights: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return weights(scores) @ v

    return attend


def by_hand(scores: Tensor) -> Tensor:
    shifted = (scores - scores.amax(-1, keepdim=True)).exp()
    return shifted / shifted.sum(-1, keepdim=True)


def one_after_the_other(scores: Tensor) -> Tensor:
    """The sum kept in the scores' own dtype: in bfloat16 256 + 1 is 256."""
    shifted = (scores - scores.amax(-1, keepdim=True)).exp()
    total = torch.zeros_like(shifted[..., :1])
    for at in range(shifted.shape[-1]):
        total = total + shifted[..., at : at + 1]
    return shifted / total


def findings(target: Any, reading: Reading = HEADS) -> list[Any]:
    return list(precision.CHECK.run(Subject(target, reading)))


RIGHT = {
    "softmax": attention(lambda s: s.softmax(-1)),
    "by hand": attention(by_hand),
    "in float32": attention(lambda s: s.softmax(-1, dtype=torch.float32).to(s.dtype)),
    "without a softmax": attention(lambda s: s.relu() / s.shape[-1]),
    "sdpa": F.scaled_dot_product_attention,
    "saccade": saccade.attention,
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_functions_are_left_alone(name: str) -> None:
    assert findings(RIGHT[name]) == []
    if name not in ("sdpa", "saccade"):
        assert findings(RIGHT[name], MASKED) == []


@pytest.mark.parametrize("first", slow_but([False, True], False))
def test_right_modules_are_left_alone(first: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 67, batch_first=True, norm_first=first).eval()
    stack = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    assert findings(stack, Reading("self", "BLD", 32)) == []
    mha = nn.MultiheadAttention(33, 3, batch_first=True).eval()
    padding = MaskReading("key_padding_mask", "BK", "ignore")
    assert findings(mha, Reading("qkv", "BLD", 33, out=0, masks=(padding,))) == []


def halved(scores: Tensor) -> Tensor:
    return scores.to(torch.bfloat16).softmax(-1).to(scores.dtype)


def unshifted(scores: Tensor) -> Tensor:
    return scores.exp() / scores.exp().sum(-1, keepdim=True)


def in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = RIGHT["softmax"](q.half(), k.half(), v.half())
    return out.to(q.dtype)


@pytest.mark.parametrize(
    "target, words, code",
    [
        (attention(halved), "jumps", "bfloat16"),
        (in_half, "jumps", "half()"),
        (attention(one_after_the_other), "off by", None),
        (attention(unshifted), "is NaN or Inf", "exp()"),
    ],
)
def test_each_wrong_function_is_named_once(target: Any, words: str, code: str | None) -> None:
    (found,) = findings(target)
    assert found.severity == "error" and words in found.message
    assert code is None or code in found.location.code


@pytest.mark.parametrize("fill", [-1e9, -1e20])
def test_a_constant_that_half_cannot_hold(fill: float) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, fill)
        return scores.softmax(-1) @ v

    (found,) = findings(attend, MASKED)
    assert found.severity == "error" and "a constant is beyond 6.55e+04" in found.message
    assert "masked_fill(~mask, fill)" in found.location.code
    assert findings(attend) == []


def test_scores_that_are_scaled_too_late_are_a_warning() -> None:
    def late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v

    (found,) = findings(late, Reading("attention", "BHLD", 67, heads=3))
    assert found.severity == "warning" and "(q * D ** -0.5)" in found.fix
    assert found.location.code.startswith("return (q @ k")
    assert findings(RIGHT["softmax"], Reading("attention", "BHLD", 67, heads=3)) == []


def test_the_tolerance_is_what_rounding_does() -> None:
    """An error of a fifth of the largest output does not hide in bfloat16, whose unit is 0.008."""

    def coarse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = RIGHT["softmax"](q, k, v)
        return out + 0.2 * out.abs().amax() if out.dtype == torch.bfloat16 else out

    (found,) = findings(coarse)
    assert found.evidence["dtype"] == "bfloat16"
    assert found.evidence["error"] > precision.ALLOWED[torch.bfloat16] * found.evidence["rounding"] > 0


def test_outputs_that_are_never_finite_are_an_error() -> None:
    (found,) = findings(attention(lambda scores: scores.softmax(-1) * float("nan")))
    assert (found.severity, found.family) == ("error", "precision")
    assert found.message.startswith("No number of its output is finite, in float32")


def test_a_target_that_draws_cannot_be_compared() -> None:
    with pytest.raises(Inapplicable, match="two calls"):
        findings(lambda q, k, v: F.dropout(RIGHT["softmax"](q, k, v)))


def test_what_raises_in_half_precision_is_told_elsewhere() -> None:
    def mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + torch.zeros(k.shape[-2])).float().softmax(-1).to(torch.float32) @ v

    with pytest.raises(Inapplicable, match="float16"):
        findings(mixed)
