"""Gradients that are missing, wrong or not finite are named, with the line; right modules are left alone.

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
from saccade.verification import Inapplicable, Reading
from saccade.verification.checks import _gradients as gradients
from saccade.verification.subject._subject import Subject

E, H = 33, 3


def same(tensor: Tensor) -> Tensor:
    return tensor


class Block(nn.Module):
    """Causal self-attention with a place to break it at each step."""

    def __init__(
        self,
        *,
        query: Callable[..., Tensor] = same,
        value: Callable[..., Tensor] = same,
        weights: Callable[..., Tensor] = lambda s: s.softmax(-1),
        out: Callable[..., Tensor] = same,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.steps = (query, value, weights, out)

    def forward(self, x: Tensor) -> Tensor:
        query, value, weights, finish = self.steps
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, H, E // H).permute(2, 0, 3, 1, 4)
        scores = query(q) @ k.transpose(-2, -1) / (E // H) ** 0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        out = (weights(scores) @ value(v)).transpose(1, 2).reshape(batch, length, E)
        return finish(self.proj(out))


def findings(module: Any, **reading: Any) -> list[Any]:
    reading = {"form": "self", "layout": "BLD", "width": E, "heads": H} | reading
    return list(
        gradients.CHECK.run(Subject(module.eval() if isinstance(module, nn.Module) else module, Reading(**reading)))
    )


def stable_by_hand(scores: Tensor) -> Tensor:
    shifted = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return shifted / shifted.sum(-1, keepdim=True)


def in_float32(scores: Tensor) -> Tensor:
    return F.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)


class RightSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        return weights * (grad - (weights * grad).sum(-1, keepdim=True))


class WrongSoftmax(RightSoftmax):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        return weights * (1 - weights) * grad


def frozen() -> Block:
    block = Block()
    block.qkv.weight.requires_grad_(False)
    return block


def zero_initialised() -> Block:
    block = Block()
    nn.init.zeros_(block.proj.weight)
    return block


class Relu(nn.Module):
    """Of whose hidden units half are off for most inputs: for all of 14 positions, hardly for all of 448."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.up, self.down = nn.LayerNorm(E), nn.Linear(E, 40), nn.Linear(40, E)
        with torch.no_grad():
            self.up.bias[:20] = -2.0 * self.up.weight[:20].norm(dim=1)  # 2 standard deviations: on at 2% of positions

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


def tiny_weights() -> Block:
    block = Block()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


RIGHT = {
    "textbook": Block(),
    "softmax by hand": Block(weights=stable_by_hand),
    "softmax in float32": Block(weights=in_float32),
    "own backward": Block(weights=RightSoftmax.apply),
    "relu": Block(weights=lambda s: s.relu(), out=F.relu),
    "hard-coded dropout": Block(weights=lambda s: F.dropout(s.softmax(-1), 0.3)),
    "units that are mostly off": Relu(),
    "frozen": frozen(),
    "zero-initialised": zero_initialised(),
    "tiny weights": tiny_weights(),
    "encoder layer": nn.TransformerEncoderLayer(E, H, 67, batch_first=True),
    "pre-norm": nn.TransformerEncoderLayer(E, H, 67, batch_first=True, norm_first=True),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_gradients_are_left_alone(name: str) -> None:
    assert findings(RIGHT[name]) == []


def test_other_forms() -> None:
    mha = nn.MultiheadAttention(E, H, batch_first=True)
    assert findings(mha, form="qkv", out=0) == []
    assert findings(F.scaled_dot_product_attention, form="attention", layout="BHLD", width=7) == []
    assert findings(saccade.attention, form="attention", layout="BHLD", width=7) == []
    assert findings(saccade.nn.SelfAttention(E)) == []


def test_a_forward_that_is_for_inference_alone() -> None:
    """As the published reference of Llama has it."""

    class Served(Block):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    (finding,) = findings(Served())
    assert finding.severity == "warning" and "torch.inference_mode" in finding.message


def no_grad(scores: Tensor) -> Tensor:
    with torch.no_grad():
        return scores.softmax(-1)


def by_item(scores: Tensor) -> Tensor:
    return torch.tensor(scores.softmax(-1).tolist(), dtype=scores.dtype)


def hard(scores: Tensor) -> Tensor:
    return F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)


def one_head(query: Tensor) -> Tensor:
    return torch.cat([query[:, :1].detach(), query[:, 1:]], 1)


def in_place(scores: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    weights.masked_fill_(weights < 0.01, 0.0)
    return weights


WRONG = {
    "query detached": (Block(query=Tensor.detach), "qkv.weight", None),
    "query of one head": (Block(query=one_head), "qkv.weight", ".detach()"),
    "value detached": (Block(value=Tensor.detach), "qkv.weight", None),
    "data": (Block(query=lambda q: q.data), "zero in part", ".data"),
    "no_grad": (Block(weights=no_grad), "zero in part", "scores.softmax(-1)"),
    "lists": (Block(weights=by_item), "zero in part", "tolist"),
    "argmax": (Block(weights=hard), "zero in part", None),
    "all cut": (Block(out=Tensor.detach), "no gradient", None),
    "wrong backward": (Block(weights=WrongSoftmax.apply), "is wrong", "def backward("),
    "in place": (Block(weights=in_place), "modified by an inplace operation", "masked_fill_"),
    "not finite": (Block(out=lambda x: (x - x.amin(-1, keepdim=True)).sqrt()), "NaN or Inf", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_gradient_is_named_once(name: str) -> None:
    module, words, code = WRONG[name]
    found = findings(module)
    assert [finding.severity for finding in found] == ["error"], found
    assert words in found[0].message
    assert code is None or code in found[0].location.code


def test_the_bias_of_the_keys_is_none_of_it() -> None:
    """Of qkv.bias a third has no gradient by right; with the queries cut only theirs is told."""
    (found,) = findings(Block(query=Tensor.detach))
    assert found.evidence["without_gradient"] == ["qkv.weight", "qkv.bias"]
    block = Block()
    out = block(torch.randn(2, 5, E)).square().sum()
    bias = torch.autograd.grad(out, block.qkv.bias)[0].view(3, E)
    assert bias[1].abs().max() < 1e-4 * bias[2].abs().max()
    assert findings(block) == []


def test_a_hook_that_halves_the_gradient() -> None:
    def halved(q: Tensor) -> Tensor:
        q = q * 1
        if q.requires_grad:
            q.register_hook(lambda grad: grad / 2)
        return q

    (found,) = findings(Block(query=halved))
    assert "is wrong" in found.message
    assert "qkv.weight" in found.evidence["wrong"] and "proj.weight" not in found.evidence["wrong"]


def test_what_draws_has_no_derivative() -> None:
    calls = iter(range(1000))
    with pytest.raises(Inapplicable, match="two calls"):
        findings(Block(out=lambda x: x + next(calls)))


def test_what_is_not_finite_is_told_elsewhere() -> None:
    with pytest.raises(Inapplicable, match="not finite"):
        findings(Block(out=lambda x: x * torch.nan))


def test_nothing_of_the_target_changes() -> None:
    block = Block()
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    findings(block)
    assert all(torch.equal(one, before[name]) for name, one in block.state_dict().items())
    assert all(parameter.grad is None for parameter in block.parameters()) and not block.training


class WithoutGradients(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / E**0.5
        with torch.no_grad():
            scores = scores.softmax(-1)
        return self.proj(scores @ v)


class Rounded(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT * 1e4).round() / 1e4
        return self.proj(scores.softmax(-1) @ v)


class LogOfZero(Block):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf).softmax(-1)
        weights = torch.where(weights > 0, weights.log().exp(), 0.0)
        return self.proj(weights @ v)


@pytest.mark.parametrize(
    ("module", "code"),
    [(WithoutGradients, "with torch.no_grad():"), (Rounded, ".round()"), (LogOfZero, "weights.log().exp()")],
)
def test_the_line_where_the_gradient_ends_or_breaks(module: type[Block], code: str) -> None:
    (error,) = [finding for finding in findings(module()) if finding.severity == "error"]
    assert error.location is not None and code in error.location.code


def test_curvature_that_rounding_leaves_to_large_steps_is_no_wrong_gradient() -> None:
    """As in T5, whose norms are float32 in a float64 copy: of the steps only the largest is above their rounding."""
    assert not findings(Block(out=lambda y: (torch.sin(1000 * y) + 1e3).float().to(y.dtype)))


def test_a_parameter_without_elements_has_no_wrong_gradient() -> None:
    block = Block()
    block.extra = nn.Parameter(torch.empty(0, E))  # MobileBERT's, where embeddings are as wide as the model
    assert not findings(block)


def test_a_mask_of_the_least_float64_before_a_float32_softmax_has_gradients_in_its_own_dtype() -> None:
    """As in Longformer: a row that sees nothing is NaN in a float64 copy alone, and is left out after the softmax."""

    def weights(scores: Tensor) -> Tensor:
        empty = torch.zeros_like(scores, dtype=torch.bool)
        empty[..., -1, :] = True
        hidden = scores.masked_fill(empty, torch.finfo(scores.dtype).min)
        return hidden.softmax(-1, dtype=torch.float32).to(scores.dtype).masked_fill(empty, 0.0)

    assert not findings(Block(weights=weights))
