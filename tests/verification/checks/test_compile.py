"""torch.compile: what computes something else when captured is an error, what breaks the graph a note.

Shape legend: B batch, L length, D head width.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.verification import Inapplicable, Reading
from saccade.verification.checks import _compile as compiling
from saccade.verification.subject._subject import Subject

HEADS = Reading("attention", "BHLD", 7, heads=3)


def findings(target: Any, reading: Reading = HEADS) -> list[Any]:
    return list(compiling.CHECK.run(Subject(target, reading)))


def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def looks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return textbook(q, k, v) if q.sum().item() < 1e9 else v


def differs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=torch.compiler.is_compiling())


@pytest.mark.slow
def test_right_ones_are_left_alone() -> None:
    assert findings(textbook) == []
    layer = nn.TransformerEncoderLayer(33, 3, 67, batch_first=True).eval()
    assert findings(layer, Reading("self", "BLD", 33)) == []


def test_what_drops_in_eval_draws_the_same_compiled() -> None:
    assert findings(lambda q, k, v: F.dropout(textbook(q, k, v), 0.3)) == []


def test_another_output_is_an_error() -> None:
    (found,) = findings(differs)
    assert found.severity == "error" and "Under torch.compile the output differs" in found.message
    assert "is_compiling" in found.location.code


def test_a_break_is_a_note() -> None:
    before = logging.root.manager.disable
    (found,) = findings(looks)
    assert found.severity == "note" and found.evidence["graphs"] == 2
    assert logging.root.manager.disable == before


def test_what_is_not_finite_is_told_elsewhere() -> None:
    with pytest.raises(Inapplicable, match="not finite"):
        findings(lambda q, k, v: v * torch.nan)


@pytest.mark.slow
def test_what_the_caller_has_compiled_stays() -> None:
    """However often it is verified: more often than PyTorch captures one function again."""
    captures = 0

    def backend(graph: Any, example: Any) -> Any:
        nonlocal captures
        captures += 1
        return graph.forward

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return textbook(q, k, v)

    mine = torch.compile(attend, backend=backend)
    q = torch.randn(2, 3, 5, 7)
    torch.testing.assert_close(mine(q, q, q), textbook(q, q, q))
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            assert findings(attend) == []
        mine(q, q, q)
        assert captures == 1
        mine(q.double(), q.double(), q.double())
        assert captures == 2
