"""The factor of the logits: every wrong one is named with its number and its line, and no right one is.

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

from saccade.verification import Finding, Inapplicable, Promise, Reading
from saccade.verification.checks import _scale as scale
from saccade.verification.subject._subject import Subject

H, D, E = textbook.HEADS, 7, textbook.WIDTH
DIVIDED = "scores / math.sqrt(self.d_k)"


def found(target: object, reading: Reading, promise: Promise | None = None) -> list[Finding]:
    torch.manual_seed(0)
    return list(scale.CHECK.run(Subject(target, reading, promise or Promise())))


def of_module(target: nn.Module, **promise: float) -> list[Finding]:
    return found(target, Reading("self", "BLD", E), Promise(**promise))  # type: ignore[arg-type]


def of_text(folder: Path, old: str = "", new: str = "") -> list[Finding]:
    torch.manual_seed(0)
    return found(textbook.module(folder, old, new), Reading("self", "BLD", E, out=0))


@pytest.mark.parametrize(
    ("new", "factor", "words"),
    [
        ("scores", 1.0, "not scaled at all"),
        ("scores * math.sqrt(self.d_k)", math.sqrt(D), "multiplied by sqrt(7) where they should be divided"),
        ("scores / self.d_k", 1 / D, "applied twice, or its square root is missing: 1/7"),
        ("scores / math.sqrt(x.size(-1))", E**-0.5, "root of the model width, 21, not of the head width, 7"),
        ("scores / math.sqrt(self.heads)", H**-0.5, "root of the number of heads, 3"),
        ("scores / math.sqrt(x.size(1))", 11**-0.5, "root of the number of keys, 11"),
        ("scores / math.sqrt(2 * self.d_k)", (2 * D) ** -0.5, "sqrt(2) too small"),
        ("scores / math.sqrt(self.d_k / 2)", (D / 2) ** -0.5, "sqrt(2) too large"),
        ("scores / 8", 0.125, "always divided by 8"),
        ("scores / 1.7", 1 / 1.7, "1.56 times the right factor"),
    ],
)
def test_a_wrong_factor_is_named_on_its_line(tmp_path: Path, new: str, factor: float, words: str):
    (finding,) = of_text(tmp_path, DIVIDED, new)
    assert finding.severity == "error"
    assert words in finding.message
    assert finding.evidence["factor"] == pytest.approx(factor, rel=1e-4)
    assert finding.evidence["expected"] == pytest.approx(D**-0.5)
    assert finding.fix == "scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])"
    assert finding.location is not None
    blamed = "scores = torch.matmul(q, k.transpose(-2, -1))" if new == "scores" else f"scores = {new}"
    assert finding.location.code == blamed


def test_the_right_module_has_no_finding(tmp_path: Path):
    assert of_text(tmp_path) == []


SPLIT = "q, k, v = self.split(self.q_proj(x)),"
SCALED = "q, k, v = self.split(self.q_proj(x)) * self.d_k**-0.5,"


def test_scaling_queries_and_scores_is_twice(tmp_path: Path):
    (finding,) = of_text(tmp_path, SPLIT, SCALED)
    assert "the scale is applied twice" in finding.message
    assert finding.evidence["factor"] == pytest.approx(1 / D, rel=1e-4)


def test_scaling_queries_in_place_of_scores_is_right():
    names: dict[str, object] = {}
    exec(textbook.TEXT.replace(SPLIT, SCALED).replace(DIVIDED, "scores"), names)
    assert found(names["MultiHeadAttention"]().eval(), Reading("self", "BLD", E, out=0)) == []  # type: ignore[operator]


def test_one_head_of_many_is_named(tmp_path: Path):
    wrong = "scores / (math.sqrt(self.d_k) * torch.tensor([1.0, 1.0, 1.1]).view(-1, 1, 1))"
    (finding,) = of_text(tmp_path, DIVIDED, wrong)
    assert "in head 2 of 3" in finding.message
    assert finding.evidence["heads"] == [2]
    assert finding.evidence["times_too_large"] == pytest.approx(1 / 1.1, rel=1e-4)


def test_half_the_heads_without_a_scale(tmp_path: Path):
    (finding,) = of_text(tmp_path, DIVIDED, "torch.cat([scores[:, :1] / math.sqrt(self.d_k), scores[:, 1:]], 1)")
    assert "in heads 1, 2 of 3: they are not scaled at all" in finding.message


def function(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Tensor:
    return (query @ key.mT * factor).softmax(-1) @ value


def unseen(query: Tensor, key: Tensor, value: Tensor, factor: float) -> Tensor:
    """Through memory that PyTorch does not see: only the outputs tell."""
    query, key = (torch.from_numpy(one.numpy().copy()) for one in (query, key))
    return (query @ key.mT * factor).softmax(-1) @ value


def by_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / math.sqrt(value.shape[-1])).softmax(-1) @ value


@pytest.mark.parametrize("target", [function, unseen])
def test_functions_are_measured_by_what_they_do(target: Callable[..., Tensor]):
    def with_factor(factor: float) -> list[Finding]:
        return found(lambda q, k, v: target(q, k, v, factor), Reading("attention", "BHLD", D, heads=H))

    assert with_factor(D**-0.5) == []
    (finding,) = with_factor(1.0)
    assert "not scaled at all" in finding.message
    assert finding.evidence["factor"] == pytest.approx(1.0, rel=1e-3)
    assert with_factor(D**-0.5 * 1.002) == []


def test_the_values_width_is_told_from_the_head_width():
    (finding,) = found(by_values, Reading("attention", "BHLD", D, heads=H))
    assert "the root of the values' width, 10" in finding.message


def test_a_promised_factor_is_the_right_one(tmp_path: Path):
    torch.manual_seed(0)
    module = textbook.module(tmp_path, DIVIDED, "scores")
    reading = Reading("self", "BLD", E, out=0)
    assert found(module, reading, Promise(scale=1.0)) == []
    (finding,) = found(module, reading, Promise(scale=0.5))
    assert "where 0.5 is expected (the declared scale)" in finding.message


def test_the_fused_call_is_told_its_own_mend():
    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * D**-0.5, k, v)

    (finding,) = found(twice, Reading("attention", "BHLD", D, heads=H))
    assert finding.fix.startswith("out = F.scaled_dot_product_attention(q, k, v)")
    assert finding.location is not None and "q * D**-0.5" in finding.location.code


class Variant(nn.Module):
    """Attention in which `logits(q, k)` makes the scores; the last of two layers is the one that differs."""

    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor], norm: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.qkv, self.logits, self.norm = nn.Linear(E, 3 * E), logits, norm or (lambda one: one)
        self.temperature = nn.Parameter(torch.full((H, 1, 1), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return (self.logits(self.norm(q), self.norm(k)).softmax(-1) @ v).transpose(1, 2).flatten(2) + x


def alibi(q: Tensor, k: Tensor) -> Tensor:
    at = torch.arange(q.shape[-2])
    slopes = torch.tensor([0.5, 0.25, 0.125]).view(H, 1, 1)
    return q @ k.mT * D**-0.5 - slopes * (at[:, None] - at).abs()


def capped(q: Tensor, k: Tensor) -> Tensor:
    return 3 * torch.tanh(q @ k.mT * D**-0.5 / 3)


def causal(q: Tensor, k: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.mT * D**-0.5).masked_fill(hidden, -1e9)


def causal_by_products(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * D**-0.5 * torch.ones(q.shape[-2], k.shape[-2]).tril()


def relative(q: Tensor, k: Tensor) -> Tensor:
    """Shaw et al.: a product of queries and distances is added."""
    table = torch.randn(2 * q.shape[-2] - 1, D, generator=torch.Generator().manual_seed(0))
    at = torch.arange(q.shape[-2])
    distances = table[at[:, None] - at + q.shape[-2] - 1]
    return (q @ k.mT + torch.einsum("bhqd,qkd->bhqk", q, distances)) * D**-0.5


@pytest.mark.parametrize("logits", [alibi, capped, causal, causal_by_products])
def test_biases_caps_and_masks_are_no_other_factor(logits: Callable[[Tensor, Tensor], Tensor]):
    assert of_module(Variant(logits)) == []


@pytest.mark.parametrize("logits", [alibi, capped, causal])
def test_and_hide_none(logits: Callable[[Tensor, Tensor], Tensor]):
    (finding,) = of_module(Variant(lambda q, k: logits(q * D**0.5, k)))
    assert "not scaled at all" in finding.message
    assert finding.evidence["factor"] == pytest.approx(1.0, rel=1e-2)


def test_where_logits_are_more_than_a_product_nothing_is_said():
    with pytest.raises(Inapplicable, match="logits are not proportional to q.k"):
        of_module(Variant(relative))
    with pytest.raises(Inapplicable, match="no product of queries and keys"):
        of_module(nn.Linear(E, E))


def test_cosine_attention_and_learned_temperatures_are_designs():
    def unit(one: Tensor) -> Tensor:
        return F.normalize(one, dim=-1)

    (finding,) = of_module(Variant(lambda q, k: 10 * q @ k.mT, unit))
    assert finding.severity == "note"
    assert "cosine attention" in finding.message
    module = Variant(lambda q, k: q @ k.mT)
    module.logits = lambda q, k: q @ k.mT * module.temperature
    (finding,) = of_module(module)
    assert finding.severity == "note"
    assert "a learned temperature" in finding.message


def test_a_factor_of_each_query_is_a_warning():
    def by_place(q: Tensor, k: Tensor) -> Tensor:
        return causal(q, k) * torch.arange(1, q.shape[-2] + 1).log1p()[:, None]

    (finding,) = of_module(Variant(by_place))
    assert finding.severity == "warning"
    assert "differs from query to query" in finding.message


def test_of_several_layers_those_that_are_wrong_are_counted():
    stack = nn.Sequential(Variant(causal), Variant(lambda q, k: q @ k.mT), Variant(causal))
    (finding,) = of_module(stack)
    assert "in 1 of 3 attention computations: they are not scaled at all" in finding.message


@pytest.mark.parametrize(
    ("target", "reading"),
    [
        (nn.MultiheadAttention(E, H, batch_first=True), Reading("qkv", "BLD", E, out=0)),
        (nn.TransformerEncoderLayer(E, H, 17, batch_first=True), Reading("self", "BLD", E)),
        (nn.TransformerDecoderLayer(E, H, 17), Reading("cross", "LBD", E)),
        (F.scaled_dot_product_attention, Reading("attention", "BHLD", D, heads=H)),
    ],
    ids=["MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer", "sdpa"],
)
def test_pytorchs_own_have_none(target: object, reading: Reading):
    assert found(target.eval() if isinstance(target, nn.Module) else target, reading) == []


# --- maps over the heads


class Talking(nn.Module):
    """Scores of heads are mixed by a learned map that begins as the identity, as in arXiv 2003.02436."""

    def __init__(self, mix: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.qkv, self.proj, self.mix = nn.Linear(E, 3 * E), nn.Linear(E, E), mix
        self.map = nn.Parameter(torch.eye(H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (H, D)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(D)
        return self.proj((self.mix(self, scores).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "mix",
    [
        lambda self, s: s + nn.functional.conv2d(s, self.map[:, :, None, None]),
        lambda self, s: s + torch.einsum("bhij,gh->bgij", s, self.map),
        lambda self, s: s + nn.functional.linear(s.movedim(1, -1), self.map).movedim(-1, 1),
    ],
)
def test_talking_heads_have_no_factor_of_their_own(mix: Callable[[nn.Module, Tensor], Tensor]) -> None:
    (finding,) = found(Talking(mix).eval(), Reading("self", "BLD", E))
    assert finding.severity == "note" and "talking heads" in finding.message
    assert "batch" not in finding.message


@pytest.mark.parametrize(
    "factor, named",
    [
        (lambda s: s * math.sqrt(D) / math.sqrt(s.shape[0]), True),
        (lambda s: s * math.sqrt(D / 2), False),
    ],
)
def test_the_size_of_the_batch_is_blamed_where_it_is_at_work(factor: Callable[[Tensor], Tensor], named: bool) -> None:
    (finding,) = found(Talking(lambda _, s: factor(s)).eval(), Reading("self", "BLD", E))
    assert finding.severity == "error"
    assert ("the root of the batch size" in finding.message) is named
