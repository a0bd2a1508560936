"""Weights that are no distribution over the keys are named, with the line; designs and other families' faults are not.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import textbook
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade.nn
from saccade.verification import Finding, Inapplicable, Reading
from saccade.verification.checks import _softmax as softmax
from saccade.verification.subject._subject import Subject

H, D, E = textbook.HEADS, 7, textbook.WIDTH
RIGHT = "torch.softmax(scores, dim=-1)"


def found(target: object, reading: Reading) -> list[Finding]:
    torch.manual_seed(0)
    return list(softmax.CHECK.run(Subject(target, reading)))


def of_module(target: nn.Module) -> list[Finding]:
    return found(target.eval(), Reading("self", "BLD", E))


def of_text(folder: Path, new: str = "", old: str = RIGHT) -> list[Finding]:
    torch.manual_seed(0)
    return found(textbook.module(folder, old if new else "", new), Reading("self", "BLD", E, out=0))


def of_function(target: Callable[..., Tensor]) -> list[Finding]:
    return found(target, Reading("attention", "BHLD", D, heads=H))


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ("torch.softmax(scores, dim=-2)", "runs over the queries, not over the keys"),
        ("torch.softmax(scores, dim=1)", "runs over the heads, not over the keys"),
        ("torch.softmax(scores, dim=0)", "runs over the batch items, not over the keys"),
        ("torch.softmax(scores, dim=-1).softmax(-1)", "the softmax of a softmax"),
        ("torch.softmax(scores, dim=-1).mT", "runs over the queries, not over the keys"),
        ("torch.sigmoid(scores)", "No softmax was seen between the scores and their product"),
        ("scores.relu()", "No softmax was seen between the scores and their product"),
        ("scores.exp()", "where 1 is expected"),
        ("0.5 * torch.softmax(scores, dim=-1)", "sum to 0.5 over its 7 keys, where 1 is expected"),
        ("torch.softmax(scores, dim=-1).tril()", "of its weights are set to 0 after it"),
        ("scores.exp() / scores.exp().sum(2, keepdim=True)", "runs over the queries, not over the keys"),
        ("scores.exp() / scores.exp().sum(-1, keepdim=True)", "the exponential overflows"),
        ("(scores - scores.max()).exp() / (scores - scores.max()).exp().sum(-1, keepdim=True)", "0 / 0 is NaN"),
        ("torch.exp(scores) / (torch.exp(scores - 9).sum(-1, keepdim=True))", "where 1 is expected"),
    ],
)
def test_each_is_named_once_on_its_line(tmp_path: Path, new: str, words: str):
    (finding,) = of_text(tmp_path, new)
    assert (finding.family, finding.severity) == ("softmax", "error")
    assert words in finding.message
    assert "torch.softmax(scores, dim=-1)" in finding.fix or "masked_fill" in finding.fix
    assert finding.location is not None
    assert finding.location.code == f"weights = {new}"


@pytest.mark.parametrize(
    "new",
    [
        "",
        "torch.exp(scores - scores.amax(-1, keepdim=True)) / torch.exp(scores - scores.amax(-1, keepdim=True)).sum(-1, keepdim=True)",  # noqa: E501
        "torch.log_softmax(scores, -1).exp()",
        "torch.exp(scores - scores.logsumexp(-1, keepdim=True))",
        "torch.softmax(scores.mT, -2).mT",
        "torch.softmax(scores.double(), -1).to(v.dtype)",
        "torch.softmax(scores.bfloat16(), -1).to(v.dtype)",
        "torch.softmax(scores + torch.full_like(scores, -1e9).triu(1), dim=-1)",
    ],
)
def test_right_ones_however_written_have_none(tmp_path: Path, new: str):
    assert of_text(tmp_path, new) == []


def test_an_overflow_says_the_logits(tmp_path: Path):
    (finding,) = of_text(tmp_path, "scores.exp() / scores.exp().sum(-1, keepdim=True)")
    assert finding.evidence["largest_logit"] > 88.7  # type: ignore[operator]
    assert finding.evidence["not_finite"] > 0  # type: ignore[operator]


def test_sinks_are_a_note(tmp_path: Path):
    plus_one = "torch.exp(scores) / (1 + torch.exp(scores).sum(-1, keepdim=True))"
    shifted = "torch.softmax(torch.cat([scores, torch.full_like(scores[..., :1], 0.7)], -1), -1)[..., :-1]"
    for new, sink in ((shifted, 0.7), (plus_one, 0.0)):
        (finding,) = [one for one in of_text(tmp_path, new) if one.severity != "error"] or [None]
        if new is plus_one:
            assert finding is None  # what overflows is told instead
            continue
        assert finding is not None and finding.severity == "note"
        assert "a sink" in finding.message
        assert finding.evidence["sink"] == pytest.approx([sink] * H, abs=1e-3)


def test_a_sink_of_each_query_is_a_note_and_a_score_left_out_is_none(tmp_path: Path):
    """Inkling's: one more column, a map of the query. A column that is a score again takes weight from the keys."""
    joined = "torch.softmax(torch.cat([scores, {}], -1), -1)[..., :-1]"
    (finding,) = of_text(tmp_path, joined.format("1.5 * q.mean(-1, keepdim=True)"))
    assert finding.severity == "note"
    assert "a number of each query's own" in finding.message
    (finding,) = of_text(tmp_path, joined.format("scores[..., :1]"))
    assert finding.severity == "error"


def test_a_sink_that_moves_with_the_maximum_is_none(tmp_path: Path):
    """exp(s - max) / (1 + sum exp(s - max)): the added one is another number in every row."""
    raised = "torch.exp(scores - scores.amax(-1, keepdim=True))"
    (finding,) = of_text(tmp_path, f"{raised} / (1 + {raised}.sum(-1, keepdim=True))")
    assert finding.severity == "error"
    assert "where 1 is expected" in finding.message


def test_dropout_and_empty_rows_are_left_to_their_families(tmp_path: Path):
    assert of_text(tmp_path, "nn.functional.dropout(weights, 0.5)", "self.dropout(weights)") == []
    strict = 'scores.masked_fill(torch.ones_like(scores).triu().bool(), float("-inf")).softmax(-1)'
    assert of_text(tmp_path, strict) == []


def sums(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value * 0.9


def unseen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key = (torch.from_numpy(one.numpy().copy()) for one in (query, key))
    return (query @ key.mT).softmax(-2) @ value


def bent(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Not linear in the values, and seen by nobody: only equal values tell."""
    query, key, held = (torch.from_numpy(one.numpy().copy()) for one in (query, key, value))
    return torch.tanh((query @ key.mT).softmax(-1) @ held)


def test_functions_are_judged_by_their_outputs():
    (finding,) = of_function(sums)
    assert "sum to 0.9 over its 11 keys" in finding.message
    (finding,) = of_function(unseen)
    assert "the weights of query 0 (head 0, item 0) sum to" in finding.message
    assert "runs over the queries" in finding.message
    (finding,) = of_function(bent)
    assert finding.message.startswith("With every value equal to 1, output")
    assert f"is {math.tanh(1):.3g}" in finding.message
    assert of_function(lambda q, k, v: (q @ k.mT).softmax(-1) @ v) == []


def test_what_cannot_be_followed_is_said():
    with pytest.raises(Inapplicable, match="no product of queries and keys"):
        of_module(nn.Linear(E, E))

    def refuses(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise RuntimeError("no such size")

    with pytest.raises(Inapplicable, match="a call of it raised RuntimeError: no such size"):
        of_function(refuses)


@pytest.mark.parametrize(
    ("target", "reading"),
    [
        (nn.MultiheadAttention(E, H, batch_first=True), Reading("qkv", "BLD", E, out=0)),
        (nn.TransformerEncoderLayer(E, H, 17, batch_first=True), Reading("self", "BLD", E)),
        (nn.TransformerDecoderLayer(E, H, 17), Reading("cross", "LBD", E)),
        (F.scaled_dot_product_attention, Reading("attention", "BHLD", D, heads=H)),
        (saccade.attention, Reading("attention", "BHLD", D, heads=H)),
        (saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(E, H, sink=True)), Reading("self", "BLD", E)),
    ],
    ids=["MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer", "sdpa", "saccade", "sink"],
)
def test_right_ones_have_no_error(target: object, reading: Reading):
    own = found(target.eval() if isinstance(target, nn.Module) else target, reading)
    assert [finding.severity for finding in own] == ["note"] * len(own)
