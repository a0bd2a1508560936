"""Padding that reaches what is real, by contents, by length, by gradient; conventions are told as such.

Shape legend: B batch, H heads, L length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checks.masked import (
    ATTENTION,
    INF,
    MODULE,
    E,
    H,
    Layer,
    Weigh,
    only_error,
    run,
    softmax_where,
    weighing,
    with_mask,
)
from torch import Tensor, nn

from saccade.verification import Finding, Inapplicable, MaskReading, Reading
from saccade.verification.checks._padding import CHECK

READING = replace(MODULE, masks=(with_mask("BK"),))
PROPER = replace(ATTENTION, masks=(with_mask("B11K"),))


def padded(scores: Tensor, mask: Tensor | None) -> Tensor:
    """As it should be."""
    return softmax_where(scores, None if mask is None else mask[:, None, None])


def severities(findings: list[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


def selecting(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention proper that never computes with what is hidden, and gives 0 where nothing is seen."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if mask is None:
        return scores.softmax(-1) @ value
    weights = scores.masked_fill(~mask, INF).softmax(-1).masked_fill(~mask, 0.0)
    return weights @ value.masked_fill(~mask[:, 0, 0][:, None, :, None], 0.0)


def test_what_never_computes_with_padding_has_nothing_to_be_told() -> None:
    assert run(CHECK, selecting, PROPER) == []


@pytest.mark.parametrize("meaning", ["attend", "additive"])
def test_attention_of_pytorch_has_notes_alone(meaning: str) -> None:
    def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    found = run(CHECK, fused, replace(ATTENTION, masks=(with_mask("B11K", meaning),)))
    assert severities(found) == ["note"] and "0 times NaN is NaN" in found[0].message


def test_modules_of_pytorch_have_conventions_alone() -> None:
    ignore = MaskReading("key_padding_mask", "BK", "ignore")
    attention = nn.MultiheadAttention(E, H, batch_first=True).eval()
    found = run(CHECK, attention, Reading("qkv", "BLD", E, heads=H, out=0, masks=(ignore,)))
    assert severities(found) == ["warning"] and "all padding gives NaN" in found[0].message
    assert "a weight of 0 times NaN is NaN" in found[0].message  # one finding for both
    decoder = nn.TransformerDecoderLayer(E, H, E, batch_first=True).eval()
    memory = replace(ignore, argument="memory_key_padding_mask")
    assert "error" not in severities(run(CHECK, decoder, Reading("cross", "BLD", E, masks=(memory,))))


def test_padding_said_by_pairs_of_one_mask_for_all_items() -> None:
    layer = Layer(softmax_where)
    assert "error" not in severities(run(CHECK, layer, replace(MODULE, masks=(with_mask("QK"),))))
    ignored = Layer(lambda scores, mask: scores.softmax(-1))
    assert only_error(run(CHECK, ignored, replace(MODULE, masks=(with_mask("QK"),))))


@pytest.mark.parametrize(
    "weigh",
    [
        lambda s, m: s.softmax(-1),
        lambda s, m: s.softmax(-1) if m is None else s.masked_fill(~m[:, None, None], -4.0).softmax(-1),
        lambda s, m: s.softmax(-1) if m is None else softmax_where(s, (m | m.roll(1, 1))[:, None, None]),
        lambda s, m: s.softmax(-1) if m is None else softmax_where(s, m[:1, None, None]),
    ],
)
def test_contents_that_reach_what_is_real(weigh: Weigh) -> None:
    error = only_error(run(CHECK, Layer(weigh), READING))
    assert "right padding of that item" in error.message and "holds other random numbers" in error.message
    item, row = error.evidence["item"], error.evidence["output"]
    assert row < (7, 4, 5)[item] == error.evidence["real"]


def renormalised(kept: float = 0.0, dtype: torch.dtype | None = None) -> Weigh:
    """A softmax times a mask, divided by what is left; hidden weights keep this part."""

    def weigh(scores: Tensor, mask: Tensor | None) -> Tensor:
        weights = scores.softmax(-1, dtype=dtype)
        if mask is not None:
            weights = weights * mask[:, None, None].to(weights).clamp_min(kept)
        return (weights / weights.sum(-1, keepdim=True)).to(scores)

    return weigh


def by_hand(scores: Tensor, mask: Tensor | None) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    weights = weights if mask is None else weights * mask[:, None, None]
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("weigh", [renormalised(), renormalised(dtype=torch.float32), by_hand])
def test_the_rounding_of_a_sum_that_is_divided_out_again_is_none(weigh: Weigh) -> None:
    assert "error" not in severities(run(CHECK, Layer(weigh), READING))


def test_the_rounding_of_float64_is_none() -> None:
    assert "error" not in severities(run(CHECK, Layer(by_hand).double(), READING))


@pytest.mark.parametrize("kept", [1e-4, 1e-5, 1e-6])
def test_weights_of_padding_that_are_small_are_no_rounding(kept: float) -> None:
    error = only_error(run(CHECK, Layer(renormalised(kept)), READING))
    assert "holds other random numbers" in error.message and error.evidence["change"] < 10 * kept


def test_only_padding_on_the_left() -> None:
    def first_is_seen(scores: Tensor, mask: Tensor | None) -> Tensor:
        return padded(scores, None if mask is None else mask | (torch.arange(mask.shape[1]) == 0))

    assert "left padding" in only_error(run(CHECK, Layer(first_is_seen), READING)).message


@pytest.mark.parametrize(
    "around", [lambda x: x + x.mean(dim=1, keepdim=True), lambda x: x / x.std(dim=1, keepdim=True)]
)
def test_what_joins_positions_around_the_attention_is_located(around: Callable[[Tensor], Tensor]) -> None:
    error = only_error(run(CHECK, Layer(padded, around), READING))
    assert "The weights of padded keys are exactly 0" in error.message
    assert error.location is not None and "dim=1" in error.location.code


def test_the_padded_length() -> None:
    def by_length(scores: Tensor, mask: Tensor | None) -> Tensor:
        return padded(scores * scores.shape[-1] ** 0.5, mask)

    error = only_error(run(CHECK, Layer(by_length), READING))
    assert "when its 4 real positions are padded to 7 instead of 4" in error.message


def test_an_output_for_each_key_has_the_length_that_it_is_given() -> None:
    """A pointer network: log-probabilities of the places in its source."""

    class Pointer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(E, E), nn.Linear(E, E)

        def forward(self, state: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
            scores = self.q(state) @ self.k(source).mT / E**0.5
            return (scores if mask is None else scores.masked_fill(~mask[:, None], -1e4)).softmax(-1)

    found = run(CHECK, Pointer().eval(), Reading("cross", "BLD", E, masks=(with_mask("BK"),)))
    assert "error" not in severities(found)


def test_the_gradient_to_padding() -> None:
    layer = Layer(padded, lambda x: x + (x.sum(1, keepdim=True) - x.sum(1, keepdim=True).detach()))
    error = only_error(run(CHECK, layer, READING))
    assert "`x` in the padding, though their values do not change" in error.message


def test_an_empty_item_that_spoils_the_others() -> None:
    class Spoiling(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            out = super().forward(x, mask)
            return out + 0 * out[:, :, :1].mean() if mask is not None and not mask.any(1).all() else out

    error = only_error(run(CHECK, Spoiling(padded), READING))
    assert "all padding makes batch item 0 NaN" in error.message


def test_nan_in_padding_that_spoils_other_items() -> None:
    def mixed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return selecting(query, key, value, mask) + 0 * value[..., :1].mean()

    error = only_error(run(CHECK, mixed, PROPER))
    assert "NaN in the padding of other batch items reaches item 0" in error.message


def test_contents_that_are_merely_large_are_a_warning() -> None:
    """-1e4 hides scores of plausible size and not those of 1e4."""

    def faint(scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores.softmax(-1) if mask is None else (scores + -1e4 * ~mask).softmax(-1)

    found = run(CHECK, weighing(faint), PROPER)
    assert "error" not in severities(found)
    assert found[0].severity == "warning" and "numbers of size 10000" in found[0].message


@pytest.mark.parametrize(
    ("meaning", "rows"),
    [
        ("attend", "~mask[:, None, None, :].any(-1, keepdim=True)"),
        ("ignore", "mask[:, None, None, :].all(-1, keepdim=True)"),
    ],
)
def test_nan_of_all_padding_is_told_as_a_convention(meaning: str, rows: str) -> None:
    def weigh(scores: Tensor, mask: Tensor | None) -> Tensor:
        return padded(scores, mask if mask is None or meaning == "attend" else ~mask)

    found = run(CHECK, Layer(weigh), replace(MODULE, masks=(with_mask("BK", meaning),)))
    assert severities(found) == ["warning"] and "PyTorch's own modules do the same" in found[0].message
    assert found[0].fix == f"weights = scores.softmax(-1).masked_fill({rows}, 0.0)"


def test_without_a_mask_there_is_nothing_to_ask() -> None:
    with pytest.raises(Inapplicable, match="it takes no mask"):
        run(CHECK, Layer(padded), MODULE)
