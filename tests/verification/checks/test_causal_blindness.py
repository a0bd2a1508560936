"""Queries that are kept from what they should see; windows, promised, named and not.

Shape legend: B batch, H heads, L length.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks.masked import ATTENTION, MODULE, E, H, Layer, causal, hiding, only_error, run, softmax_where, triangle
from torch import Tensor, nn

from saccade.verification import Inapplicable, Reading
from saccade.verification.checks._causal_blindness import CHECK


def ones(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool)


def window(before: int) -> Callable[[int], Tensor]:
    return lambda length: triangle(length).triu(-before)


def layer_of(mask_of: Callable[[int], Tensor], fill: float = float("-inf")) -> Layer:
    return Layer(lambda scores, _: scores.masked_fill(~mask_of(scores.shape[-1]), fill).softmax(-1))


@pytest.mark.parametrize("promise", [True, None])
def test_what_sees_all_before_it_is_clean(promise: bool | None) -> None:
    assert run(CHECK, hiding(triangle), causal=promise) == []
    assert run(CHECK, hiding(triangle, -1e9), causal=promise) == []
    assert run(CHECK, Layer(causal), MODULE, causal=promise) == []


@pytest.mark.parametrize("promise", [False, None])
def test_what_sees_all_is_clean(promise: bool | None) -> None:
    assert run(CHECK, hiding(ones), causal=promise) == []
    assert run(CHECK, Layer(softmax_where), MODULE, causal=promise) == []


@pytest.mark.parametrize("mask_of", [ones, triangle])
def test_weights_that_underflow_are_not_hidden(mask_of: Callable[[int], Tensor]) -> None:
    layer = Layer(lambda scores, _: softmax_where(300 * scores, mask_of(scores.shape[-1])))
    assert run(CHECK, layer, MODULE) == []


@pytest.mark.parametrize("fill", [float("-inf"), -1e9])
def test_an_inverted_triangle(fill: float) -> None:
    error = only_error(run(CHECK, hiding(lambda length: ~triangle(length), fill)))
    assert "All outputs but the last see only later inputs: its causal mask is inverted." in error.message
    assert "It is neither causal" not in error.message and "device=scores.device" in error.fix


@pytest.mark.parametrize("fill", [float("-inf"), -1e9])
@pytest.mark.parametrize("make", [hiding, layer_of])
def test_a_strict_triangle(make: Callable[..., Callable[..., Tensor]], fill: float) -> None:
    target = make(lambda length: triangle(length, -1), fill)
    error = only_error(run(CHECK, target, ATTENTION if make is hiding else MODULE, causal=True))
    assert "gives weight exactly 0 to input 6, its own position" in error.message
    assert "leaves out its diagonal" in error.message and "tril()" in error.fix


def test_the_diagonal_of_one_head_of_a_module() -> None:
    def masks(length: int) -> Tensor:
        mask = triangle(length).repeat(H, 1, 1)
        mask[1, 1:] &= ~torch.eye(length, dtype=torch.bool)[1:]
        return mask

    assert "(head 1 of 3, length 7)" in only_error(run(CHECK, layer_of(masks), MODULE, causal=True)).message


def strictly(scores: Tensor, _: Tensor | None) -> Tensor:
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-1)
    return softmax_where(scores, seen)


def strictly_by_comparison(scores: Tensor, _: Tensor | None) -> Tensor:
    at = torch.arange(scores.shape[-1])
    seen = at[:, None] > at
    return softmax_where(scores, seen)


@pytest.mark.parametrize(("weigh", "code"), [(strictly, "tril(-1)"), (strictly_by_comparison, "at[:, None] > at")])
def test_the_line_that_makes_the_pattern_is_told(weigh: Callable[..., Tensor], code: str) -> None:
    error = only_error(run(CHECK, Layer(weigh), MODULE, causal=True))
    assert error.location is not None and code in error.location.code


def test_the_line_that_hides_is_told_where_one_head_alone_is_kept_from_itself() -> None:
    def weigh(scores: Tensor, _: Tensor | None) -> Tensor:
        seen = triangle(scores.shape[-1]).repeat(H, 1, 1)
        seen[1, 1:] &= ~torch.eye(scores.shape[-1], dtype=torch.bool)[1:]
        return softmax_where(scores, seen)

    error = only_error(run(CHECK, Layer(weigh), MODULE, causal=True))
    assert error.location is not None and "masked_fill" in error.location.code


def test_not_the_one_before() -> None:
    target = hiding(lambda length: triangle(length) & ~triangle(length, -1).triu(-1))
    assert "does not see input" in only_error(run(CHECK, target)).message


def test_a_mask_built_for_another_length() -> None:
    target = hiding(lambda length: (triangle(length) & (torch.arange(length) < 16)) | torch.eye(length).bool())
    error = only_error(run(CHECK, target))
    assert (
        "built for another length" in error.message and "At length 2, 3, 6, 7, 17 it sees everything." in error.message
    )


def test_a_window_that_grows_with_the_length_is_an_error() -> None:
    target = hiding(lambda length: triangle(length).triu(-max(1, length // 2)))
    assert only_error(run(CHECK, target, window=3)).evidence["told"] == 3


@pytest.mark.parametrize("promised", [3, 20])
def test_a_promised_window_is_clean(promised: int) -> None:
    assert run(CHECK, hiding(window(promised)), window=promised) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (2, "does not see input {0}, 3 before it"),
        (4, "sees input {1}, 4 before it"),
        (99, "sees input 0, 32 before it"),
    ],
)
def test_a_window_that_is_not_the_promised_one(found: int, words: str) -> None:
    error = only_error(run(CHECK, hiding(window(found)), causal=True, window=3))
    assert words.format(29, 28) in error.message and "a window of 3 inputs before its own" in error.message
    assert ("shorter" if found < 3 else "longer") in error.message


def test_counting_oneself_is_told() -> None:
    assert "Counted with its own position" in only_error(run(CHECK, hiding(window(2)), window=3)).message
    assert "Counted" not in only_error(run(CHECK, hiding(window(1)), window=3)).message


def test_a_window_of_which_its_source_speaks_is_a_warning() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return hiding(window(3))(query, key, value)

    (finding,) = run(CHECK, attention)
    assert finding.severity == "warning" and "Promise(window=3)" in finding.fix


def test_a_window_of_which_nobody_speaks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "short.py"
    path.write_text(
        "import torch\n"
        "def attend(q, k, v):\n"
        "    scores = q @ k.mT / q.shape[-1] ** 0.5\n"
        "    seen = torch.ones_like(scores, dtype=torch.bool).tril().triu(-11)\n"
        '    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v\n'
    )
    spec = importlib.util.spec_from_file_location("short_for_a_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, spec.name, module)
    error = only_error(run(CHECK, module.attend, causal=True))
    assert (
        "a window of 11 inputs before its own" in error.message and "Its source does not mention one" in error.message
    )


@pytest.mark.parametrize(("named", "errors"), [(3, 0), (4, 0), (5, 1), (2, 1)])
def test_a_window_that_the_target_names(named: int, errors: int) -> None:
    """Three before its own: some count the query's own position, too."""
    layer = layer_of(window(3))
    layer.sliding_window = named
    found = run(CHECK, layer, MODULE, causal=True)
    assert sum(finding.severity == "error" for finding in found) == errors
    assert not errors or "its `sliding_window` says" in found[0].message


def test_sparse_patterns_are_a_warning() -> None:
    def strided(length: int) -> Tensor:
        rows, columns = torch.arange(length)[:, None], torch.arange(length)
        return triangle(length) & ((rows - columns <= 2) | (columns % 4 == 3))

    (finding,) = run(CHECK, hiding(strided), causal=True)
    assert finding.severity == "warning" and "sparse pattern" in finding.message


def test_a_bidirectional_promise_that_is_causal() -> None:
    error = only_error(run(CHECK, hiding(triangle), causal=False))
    assert "and no other output sees a later one" in error.message and "is_causal=False" in error.fix


def test_neither_causal_nor_bidirectional() -> None:
    target = hiding(lambda length: (torch.arange(length) < length - 1) | torch.eye(length, dtype=torch.bool))
    assert "neither causal nor" in only_error(run(CHECK, target)).message


def test_windows_to_both_sides() -> None:
    target = hiding(lambda length: ones(length).triu(-2).tril(2))
    (finding,) = run(CHECK, target)
    assert finding.severity == "note" and "2 inputs to each side" in finding.message
    assert run(CHECK, target, causal=False, window=2) == []
    assert "longer by 1" in only_error(run(CHECK, target, causal=False, window=1)).message


def test_a_causal_flag() -> None:
    def flagged(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        return (hiding(lambda length: triangle(length, -1)) if is_causal else hiding(ones))(query, key, value)

    assert "its own position" in only_error(run(CHECK, flagged, replace(ATTENTION, causal_flag="is_causal"))).message


def test_what_does_not_attend_is_not_asked() -> None:
    with pytest.raises(Inapplicable, match="no output depends on another position"):
        run(CHECK, nn.Linear(E, E), MODULE)


def test_blocks_of_pytorch() -> None:
    block = nn.TransformerEncoderLayer(E, H, E, batch_first=True).eval()
    assert run(CHECK, block, Reading("self", "BLD", E)) == []
    fused = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    assert run(CHECK, fused, causal=True) == []
