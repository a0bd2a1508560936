"""Each way of misusing a mask is called by its name; masks that mean what they say are left alone.

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
    D,
    E,
    H,
    Layer,
    only_error,
    run,
    softmax_where,
    triangle,
    weighing,
    with_mask,
)
from torch import Tensor, nn

from saccade.verification import Finding, Inapplicable, MaskReading, Reading
from saccade.verification.checks.mask_meaning._check import CHECK

Weigh = Callable[[Tensor, Tensor], Tensor]


def judged(weigh: Weigh, axes: str = "B1QK", meaning: str = "attend", **fields: str) -> list[Finding]:
    """Of attention proper whose weights are made by `weigh`."""
    target = weighing(lambda scores, mask: scores.softmax(-1) if mask is None else weigh(scores, mask))
    return run(CHECK, target, replace(ATTENTION, masks=(with_mask(axes, meaning, **fields),)))


AVERAGES = [("note", {"averages": True})]  # all that is said of a finite fill: a row of hidden keys is their mean


def said(findings: list[Finding]) -> list[tuple[str, object]]:
    return [(finding.severity, finding.evidence) for finding in findings]


@pytest.mark.parametrize("axes", ["QK", "11QK", "B1QK", "BHQK", "B11K"])
def test_masks_that_are_kept_are_clean(axes: str) -> None:
    assert judged(softmax_where, axes) == []
    filled = judged(lambda s, m: s.masked_fill(~m, -1e9).softmax(-1), axes)
    assert said(filled) == ([] if axes == "B11K" else AVERAGES)


def test_additive_masks_are_clean() -> None:
    assert judged(lambda s, m: (s + m).softmax(-1), meaning="additive") == []
    assert said(judged(lambda s, m: (s + (1 - m) * -1e9).softmax(-1), dtype="float32")) == AVERAGES


def test_finite_values_that_are_scaled_with_the_scores_are_told() -> None:
    """-inf is as before, a bias of relative positions is not."""
    (finding,) = judged(lambda s, m: (s + m * s.new_tensor(D).rsqrt()).softmax(-1), meaning="additive")
    assert finding.severity == "warning" and "it is added before logits are scaled" in finding.message
    assert finding.evidence["times"] == pytest.approx(D**-0.5, abs=1e-3)


def test_modules_of_pytorch_are_clean() -> None:
    masks = (
        MaskReading("key_padding_mask", "BK", "ignore", documented="ignore"),
        MaskReading("attn_mask", "QK", "ignore", documented="ignore"),
    )
    attention = nn.MultiheadAttention(E, H, batch_first=True).eval()
    assert run(CHECK, attention, Reading("qkv", "BLD", E, heads=H, out=0, masks=masks)) == []
    masks = tuple(
        replace(mask, argument=name) for mask, name in zip(masks, ("src_key_padding_mask", "src_mask"), strict=True)
    )
    layer = nn.TransformerEncoderLayer(E, H, E, batch_first=True).eval()
    assert run(CHECK, layer, replace(MODULE, masks=masks)) == []


def test_weights_that_underflow_are_not_hidden() -> None:
    layer = Layer(lambda s, m: softmax_where(300 * s, None if m is None else m[:, None, None]))
    assert run(CHECK, layer, replace(MODULE, masks=(with_mask("BK"),))) == []


def test_a_softmax_over_queries_is_another_promise() -> None:
    layer = Layer(lambda s, m: (s if m is None else s.masked_fill(~m[:, None, None], -1e9)).softmax(-2))
    found = run(CHECK, layer, replace(MODULE, masks=(with_mask("BK"),)))
    assert [finding.severity for finding in found] == ["note"] and "over the query axis" in found[0].message


def test_a_causal_target_keeps_its_own_mask_too() -> None:
    def both(scores: Tensor, mask: Tensor) -> Tensor:
        return softmax_where(scores, mask & triangle(scores.shape[-1]))

    target = weighing(lambda scores, mask: both(scores, torch.tensor(True) if mask is None else mask))
    for axes in ("B1QK", "B11K"):
        assert run(CHECK, target, replace(ATTENTION, masks=(with_mask(axes),)), causal=True) == []


@pytest.mark.parametrize(
    ("weigh", "axes", "words"),
    [
        (lambda s, m: s.masked_fill(m, INF).softmax(-1), "B1QK", "The polarity is inverted"),
        (lambda s, m: s.masked_fill(m, -1e9).softmax(-1), "B11K", "The polarity is inverted"),
        (lambda s, m: (s * m).softmax(-1), "B1QK", "Hidden scores are 0 instead of -inf"),
        (lambda s, m: s.masked_fill(~m, 0.0).softmax(-1), "B11K", "Hidden scores are 0 instead of -inf"),
        (lambda s, m: s.masked_fill(~m, -10.0).softmax(-1), "B1QK", "Hidden scores are set to -10 instead of -inf"),
        (lambda s, m: (s - 3.0 * ~m).softmax(-1), "QK", "of their weight: what is added to their scores is too small"),
        (lambda s, m: s.softmax(-1) * m, "QK", "set to 0 after the softmax"),
        (lambda s, m: s.softmax(-1), "B1QK", "`mask` hides nothing: it is not used."),
        (lambda s, m: softmax_where(s, m.mT), "QK", "applied transposed"),
        (lambda s, m: softmax_where(s, m[:1]), "B1QK", "The mask of batch item 0 is applied to every batch item."),
        (lambda s, m: softmax_where(s, m.roll(1, 0)), "B1QK", "batch item 1 has that of batch item 0"),
        (lambda s, m: softmax_where(s, m[:, :1]), "BHQK", "The mask of head 0 is applied to every head."),
        (lambda s, m: softmax_where(s, m.roll(1, 1)), "BHQK", "head 1 has that of head 0"),
        (
            lambda s, m: s.masked_fill(~m[:, None, :, None], -1e9).softmax(-1),
            "BK",
            "it hides queries where it should hide keys",
        ),
        (lambda s, m: softmax_where(s, m.repeat(H, 1, 1).unflatten(0, (-1, H))), "BQK", "in the wrong order"),
        (lambda s, m: softmax_where(s, m), "BQK", "in the wrong order"),
        (lambda s, m: softmax_where(s, m | (torch.arange(m.shape[-1]) == 2)), "B1QK", "fit no reading of `mask`"),
    ],
)
def test_each_misuse_is_named(weigh: Weigh, axes: str, words: str) -> None:
    error = only_error(judged(weigh, axes))
    assert words in error.message and "Under a random mask output" in error.message
    assert error.evidence["how_many"] > 0


def test_the_line_and_a_pair_are_told() -> None:
    error = only_error(judged(lambda s, m: s.masked_fill(~m, 0.0).softmax(-1)))
    assert error.location is not None and "masked_fill(~m, 0.0)" in error.location.code
    assert len(error.evidence["pairs"][0]) == 2


def test_inverted_against_its_documentation_or_a_promise() -> None:
    target = weighing(lambda s, m: s.softmax(-1) if m is None else s.masked_fill(m, INF).softmax(-1))
    documented = with_mask("B1QK", documented="attend", words="True where attention is allowed", behaves="ignore")
    error = only_error(run(CHECK, target, replace(ATTENTION, masks=(documented,))))
    assert 'its documentation ("True where attention is allowed") says True = attend' in error.message
    promised = replace(ATTENTION, masks=(with_mask("B1QK"),))
    assert "its promise says True = attend" in only_error(run(CHECK, target, promised, mask="attend")).message


def test_an_argument_with_several_shapes_is_told_once() -> None:
    target = weighing(lambda s, m: s.softmax(-1) if m is None else s.masked_fill(m, INF).softmax(-1))
    reading = replace(ATTENTION, masks=tuple(with_mask(axes) for axes in ("QK", "B1QK", "BHQK", "B11K")))
    assert len(run(CHECK, target, reading)) == 1


@pytest.mark.parametrize(
    ("axes", "shown"), [("BK", "~mask[:, None, None, :]"), ("BQK", "~mask[:, None]"), ("B1QK", "~mask")]
)
def test_the_fix_takes_the_mask_as_it_comes(axes: str, shown: str) -> None:
    error = only_error(judged(lambda s, m: s.softmax(-1) + 0 * m.sum(), axes))
    assert f'scores.masked_fill({shown}, float("-inf"))  # True = attend' in error.fix


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """PyTorch's kernel, given a mask of keys as it comes."""
    shown = None if mask is None else mask[:, None, None]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=shown)


def test_an_inverted_mask_of_a_kernel() -> None:
    """Where nothing is to be seen, its weights are 0, and not NaN."""
    ignore = with_mask("BK", "ignore", documented="ignore", behaves="attend", required=True)
    error = only_error(run(CHECK, fused, replace(ATTENTION, masks=(ignore,))))
    assert "The polarity is inverted" in error.message and error.evidence["hides_all"]
    assert error.location is not None and "F.scaled_dot_product_attention(query" in error.location.code
    assert error.fix == "attn_mask = ~mask[:, None, None, :]  # F.scaled_dot_product_attention: True = attend"


def test_a_causal_mask_beside_it_takes_no_blame() -> None:
    def target(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if mask is not None:
            scores = scores * mask[:, None, None]
        scores = scores.masked_fill(~triangle(scores.shape[-1]), INF)
        return scores.softmax(-1) @ value

    error = only_error(run(CHECK, target, replace(ATTENTION, masks=(with_mask("BK"),)), causal=True))
    assert "Hidden scores are 0 instead of -inf" in error.message
    assert error.location is not None and error.location.code == "scores = scores * mask[:, None, None]"


@pytest.mark.parametrize(("fields", "severities"), [({}, ["warning"]), ({"documented": "attend"}, [])])
def test_true_means_attend_under_a_name_of_the_opposite(fields: dict[str, str], severities: list[str]) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return fused(query, key, value, key_padding_mask)

    mask = replace(with_mask("BK", **fields), argument="key_padding_mask")
    found = run(CHECK, attention, replace(ATTENTION, masks=(mask,)))
    assert [finding.severity for finding in found] == severities
    assert all("nn.MultiheadAttention's key_padding_mask is True = ignore" in finding.message for finding in found)


@pytest.mark.parametrize(
    ("name", "fields", "severities"),
    [
        ("mask", {}, ["warning"]),
        ("key_padding_mask", {}, ["note"]),
        ("mask", {"documented": "ignore"}, []),
    ],
)
def test_true_means_ignore(name: str, fields: dict[str, str], severities: list[str]) -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor, **masks: Tensor) -> Tensor:
        hidden = masks[name][:, None, None] if masks else torch.tensor(False)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden)

    reading = replace(ATTENTION, masks=(MaskReading(name, "BK", "ignore", **fields),))  # type: ignore[arg-type]
    found = run(CHECK, attention, reading)
    assert [finding.severity for finding in found] == severities
    assert all("F.scaled_dot_product_attention expects True = attend" in finding.message for finding in found)


def test_two_arguments_of_opposite_meaning() -> None:
    def attention(
        query: Tensor, key: Tensor, value: Tensor, causal_mask: Tensor | None = None, pad: Tensor | None = None
    ) -> Tensor:
        seen = torch.tensor(True) if causal_mask is None else causal_mask
        seen = seen if pad is None else seen & ~pad[:, None, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    masks = (MaskReading("causal_mask", "QK", "attend"), MaskReading("pad", "BK", "ignore"))
    error = only_error(run(CHECK, attention, replace(ATTENTION, masks=masks)))
    assert "True in `causal_mask` means attend, and True in `pad` means ignore." in error.message
    said = tuple(replace(mask, documented=mask.meaning) for mask in masks)
    assert [finding.severity for finding in run(CHECK, attention, replace(ATTENTION, masks=said))] == ["warning"]


def test_one_head_of_a_module_is_seen_in_its_weights() -> None:
    def last_head_sees_all(scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return scores.softmax(-1)
        return torch.cat([softmax_where(scores[:, :-1], mask[:, None, None]), scores[:, -1:].softmax(-1)], 1)

    reading = replace(MODULE, masks=(with_mask("BK"),))
    only_error(run(CHECK, Layer(last_head_sees_all), reading))
    assert run(CHECK, Layer(lambda s, m: softmax_where(s, None if m is None else m[:, None, None])), reading) == []


def test_what_joins_positions_around_the_attention_is_another_promise() -> None:
    layer = Layer(lambda s, m: softmax_where(s, None if m is None else m[:, None, None]), lambda x: x - x.mean(1, True))
    assert run(CHECK, layer, replace(MODULE, masks=(with_mask("BK"),))) == []


def test_without_a_mask_there_is_nothing_to_ask() -> None:
    with pytest.raises(Inapplicable, match="it takes no mask"):
        run(CHECK, weighing(softmax_where))


def test_a_mask_of_something_that_sees_no_other_position_is_not_measured() -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x * 2

    with pytest.raises(Inapplicable, match="no output depends on another position's input"):
        run(CHECK, Alone(), replace(MODULE, masks=(with_mask("B1QK", "attend"),)))
