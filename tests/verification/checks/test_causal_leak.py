"""Leaks are found, described and located; causal and bidirectional attention is left alone.

Shape legend: B batch, H heads, L length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checks.masked import ATTENTION, MODULE, E, H, Layer, causal, hiding, only_error, run, softmax_where, triangle
from torch import Tensor, nn

from saccade.verification import Inapplicable, Reading
from saccade.verification.checks._causal_leak import CHECK
from slowly import slow_but


def ones(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool)


def sdpa(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


@pytest.mark.parametrize("promise", [True, None])
@pytest.mark.parametrize(
    "target",
    [
        hiding(triangle),
        hiding(triangle, -1e9),
        hiding(lambda length: triangle(length).triu(-3)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ],
)
def test_causal_attention_is_clean(target: Callable[..., Tensor], promise: bool | None) -> None:
    assert run(CHECK, target, causal=promise) == []


@pytest.mark.parametrize("promise", [True, None])
def test_a_fill_that_logits_reach_is_no_leak_but_a_warning(promise: bool | None) -> None:
    (found,) = run(CHECK, hiding(triangle, -1e4), causal=promise)
    assert found.severity == "warning" and found.evidence["fill"] == pytest.approx(-1e4, rel=1e-3)


def renormalised(kept: float) -> Callable[[Tensor, Tensor | None], Tensor]:
    """A softmax times a triangle, divided by what is left; later weights keep this part."""

    def weigh(scores: Tensor, _: Tensor | None) -> Tensor:
        weights = scores.softmax(-1) * ones(scores.shape[-1]).tril().to(scores).clamp_min(kept)
        return weights / weights.sum(-1, keepdim=True)

    return weigh


@pytest.mark.parametrize("promise", [True, None])
def test_the_rounding_of_a_sum_that_is_divided_out_again_is_no_leak(promise: bool | None) -> None:
    assert run(CHECK, Layer(renormalised(0.0)), MODULE, causal=promise) == []


@pytest.mark.parametrize("weight", [1e-5, 1e-6, 3e-7])
def test_a_mask_in_float32_rounds_nothing(weight: float) -> None:
    def weigh(scores: Tensor, _: Tensor | None) -> Tensor:
        seen = torch.tril(torch.ones(scores.shape[-2:]))  # float32, whatever the scores are
        return scores.masked_fill(seen == 0, math.log(weight)).softmax(-1)

    words = only_error(run(CHECK, Layer(weigh), MODULE)).message
    assert "Output 0 changes by" in words and "changes by 0 " not in words


def test_a_weight_too_faint_for_the_output_is_told_as_a_weight() -> None:
    def weigh(scores: Tensor, _: Tensor | None) -> Tensor:
        seen = ones(scores.shape[-1]).tril()
        return scores.masked_fill(~seen, math.log(3e-7)).softmax(-1, dtype=torch.float32).to(scores)

    words = only_error(run(CHECK, Layer(weigh), MODULE)).message
    assert "gives a weight of" in words and "changes by 0 " not in words


def test_later_weights_that_are_small_are_no_rounding() -> None:
    assert "Output" in only_error(run(CHECK, Layer(renormalised(1e-5)), MODULE, causal=True)).message


@pytest.mark.parametrize(
    "target", [sdpa, hiding(lambda length: ones(length).triu(-2).tril(2)), hiding(lambda length: ones(length))]
)
def test_bidirectional_attention_and_windows_to_both_sides_are_not_asked(target: Callable[..., Tensor]) -> None:
    with pytest.raises(Inapplicable, match="bidirectional"):
        run(CHECK, target)


def test_large_logits_hide_nothing() -> None:
    """Nearly all weight goes to one key, and changes of the others are lost in rounding."""
    with pytest.raises(Inapplicable, match="bidirectional"):
        run(CHECK, Layer(lambda scores, _: (300 * scores).softmax(-1)), MODULE)


def test_one_that_is_promised_bidirectional_is_not_asked() -> None:
    with pytest.raises(Inapplicable, match="it is declared bidirectional"):
        run(CHECK, sdpa, causal=False)


@pytest.mark.parametrize("layer", [Layer(causal), Layer(causal, nn.LayerNorm(E)), Layer(causal, nn.Dropout(0.5))])
def test_causal_modules_are_clean(layer: nn.Module) -> None:
    assert run(CHECK, layer.eval(), MODULE, causal=True) == []


def test_no_mask_at_all() -> None:
    error = only_error(run(CHECK, sdpa, causal=True))
    assert "Every output depends on every later input: nothing hides them." in error.message
    assert "which comes later" in error.message and error.evidence["how_many"] == 21
    assert "is_causal=True" in error.fix


@pytest.mark.parametrize("promise", slow_but([True, None], None))
@pytest.mark.parametrize(
    ("mask_of", "words"),
    [
        (lambda length: triangle(length, 1), "Each output sees 1 input too far"),
        (lambda length: triangle(length) | (torch.arange(length) == length - 1), "Only input 6 (the last) is seen"),
        (lambda length: triangle(length) | (torch.arange(length) == 0)[:, None], "Only output 0 of 7 leaks."),
        (lambda length: triangle(length) | (length % 2 == 0), "Not at length 3, 7."),
        (lambda length: triangle(length, 3 if length > 15 else 0), "Not at length 3, 6, 7."),
        (lambda length: triangle(length) | (torch.arange(length) > 31), "length 33"),
        (lambda length: torch.stack([triangle(length, int(h == 1)) for h in range(H)]), "Only head 1 of 3."),
    ],
)
def test_what_leaks_in_part_is_told_with_and_without_a_promise(
    mask_of: Callable[[int], Tensor], words: str, promise: bool | None
) -> None:
    assert words in only_error(run(CHECK, hiding(mask_of), causal=promise)).message


@pytest.mark.parametrize("promise", [True, None])
def test_an_inverted_mask_is_called_so(promise: bool | None) -> None:
    error = only_error(run(CHECK, hiding(lambda length: ones(length).triu()), causal=promise))
    assert "It sees only later inputs and no earlier ones: its causal mask is inverted." in error.message


def test_one_batch_item() -> None:
    def second_sees_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([sdpa(query[:1], key[:1], value[:1], True), sdpa(query[1:], key[1:], value[1:])])

    assert "Only batch item 1." in only_error(run(CHECK, second_sees_all)).message


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (0.0, "All later scores are 0 instead of -inf before the softmax, so they keep weight. exp(0) is 1, not 0."),
        (-10.0, "All later scores are -10 instead of -inf"),
        (-50.0, "too small to hide them"),
    ],
)
def test_fills_that_do_not_hide(fill: float, words: str) -> None:
    layer = Layer(lambda scores, _: scores.masked_fill(~triangle(scores.shape[-1]), fill).softmax(-1))
    assert words in only_error(run(CHECK, layer, MODULE, causal=True)).message


def test_a_fill_of_zero_is_found_without_a_promise() -> None:
    layer = Layer(lambda scores, _: scores.masked_fill(~triangle(scores.shape[-1]), 0.0).softmax(-1))
    assert "0 instead of -inf" in only_error(run(CHECK, layer, MODULE)).message


@pytest.mark.parametrize("promise", [True, None])
def test_weights_that_are_hidden_after_the_softmax(promise: bool | None) -> None:
    layer = Layer(lambda scores, _: scores.softmax(-1).tril())
    assert "after the softmax" in only_error(run(CHECK, layer, MODULE, causal=promise)).message


@pytest.mark.parametrize("promise", [True, None])
def test_one_head_of_a_module(promise: bool | None) -> None:
    def one_head_sees_all(scores: Tensor, mask: Tensor | None) -> Tensor:
        hidden = ~triangle(scores.shape[-1]).repeat(H, 1, 1)
        hidden[2] = False
        return scores.masked_fill(hidden, float("-inf")).softmax(-1)

    error = only_error(run(CHECK, Layer(one_head_sees_all), MODULE, causal=promise))
    assert "head 2 of 3" in error.message
    assert error.location is not None and "masked_fill" in error.location.code


def test_only_in_train_mode() -> None:
    class Trained(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            out = super().forward(x)
            return out - out.mean(1, keepdim=True) if self.training else out

    error = only_error(run(CHECK, Trained(causal), MODULE, causal=True))
    assert "Only in train mode." in error.message and error.evidence["ways"] == ["train mode"]


def test_batch_normalisation_leaks_in_train_mode() -> None:
    class Normalised(Layer):
        def __init__(self) -> None:
            super().__init__(causal)
            self.norm = nn.BatchNorm1d(E).eval()

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.norm(super().forward(x).mT).mT

    error = only_error(run(CHECK, Normalised(), MODULE, causal=True))
    assert error.evidence["ways"] == ["train mode"]


def test_only_through_the_gradient() -> None:
    layer = Layer(causal, lambda x: x + (x.sum(1, keepdim=True) - x.sum(1, keepdim=True).detach()))
    error = only_error(run(CHECK, layer, MODULE, causal=True))
    assert "Only through the gradient" in error.message and error.evidence["ways"] == ["gradient"]


def test_a_normalisation_over_the_sequence_is_located() -> None:
    layer = Layer(causal, lambda x: x - x.mean(dim=1, keepdim=True))
    error = only_error(run(CHECK, layer, MODULE, causal=True))
    assert "something around it that joins positions" in error.message
    assert error.location is not None and "x.mean(dim=1" in error.location.code


def test_a_causal_flag_is_a_promise() -> None:
    reading = replace(ATTENTION, causal_flag="is_causal")
    assert run(CHECK, sdpa, reading) == []
    error = only_error(run(CHECK, lambda q, k, v, is_causal=False: sdpa(q, k, v), reading))
    assert error.message.startswith("With is_causal=True: Output")


def test_a_strict_triangle_that_averages_in_its_first_row_is_a_note() -> None:
    (finding,) = run(CHECK, hiding(lambda length: triangle(length, -1), -1e9), causal=True)
    assert finding.severity == "note" and "may not even see itself" in finding.message


def test_a_softmax_over_queries_is_another_promise() -> None:
    layer = Layer(lambda scores, _: scores.masked_fill(~triangle(scores.shape[-1]), float("-inf")).softmax(-2))
    (finding,) = run(CHECK, layer, MODULE, causal=True)
    assert finding.severity == "note" and "over the query axis" in finding.message


def test_the_line_of_the_mask_is_told() -> None:
    layer = Layer(lambda scores, _: softmax_where(scores, torch.ones_like(scores, dtype=torch.bool).tril(1)))
    error = only_error(run(CHECK, layer, MODULE, causal=True))
    assert error.location is not None and ".tril(1)" in error.location.code


def test_decoder_layers() -> None:
    class Decoder(nn.Module):
        def __init__(self, masked: bool) -> None:
            super().__init__()
            self.layer, self.masked = nn.TransformerDecoderLayer(E, H, E, batch_first=True), masked

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            hidden = ~triangle(x.shape[1]) if self.masked else None
            return self.layer(x, memory, tgt_mask=hidden)

    reading = Reading("cross", "BLD", E)
    assert run(CHECK, Decoder(True).eval(), reading, causal=True) == []
    assert "nothing hides them" in only_error(run(CHECK, Decoder(False).eval(), reading, causal=True)).message


def test_lengths_that_it_does_not_take_are_another_promise() -> None:
    def short(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[-2] > 9:
            raise RuntimeError("at most 9")
        return sdpa(query, key, value, True)

    assert run(CHECK, short, causal=True) == []
