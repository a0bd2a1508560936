"""Dropout that is right is left alone however it is written; each way to break it is named, once.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.verification import Inapplicable, Reading
from saccade.verification.checks import _dropout as dropout
from saccade.verification.subject._subject import Subject

E, H = 33, 3


def right(weights: Tensor, self: Block) -> Tensor:
    return self.dropout(weights)


def nothing(tensor: Tensor, self: Block) -> Tensor:
    return tensor


class Block(nn.Module):
    """Self-attention with a place for dropout everywhere one may be put."""

    def __init__(
        self,
        on_weights: Callable[..., Tensor] = right,
        *,
        on_scores: Callable[..., Tensor] = nothing,
        on_query: Callable[..., Tensor] = nothing,
        on_value: Callable[..., Tensor] = nothing,
        on_out: Callable[..., Tensor] = nothing,
        on_input: Callable[..., Tensor] = nothing,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.dropout = nn.Dropout(0.1)
        self.hooks = (on_input, on_query, on_scores, on_weights, on_value, on_out)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        on_input, on_query, on_scores, on_weights, on_value, on_out = self.hooks
        batch, length, _ = x.shape
        q, k, v = self.qkv(on_input(x, self)).view(batch, length, 3, H, E // H).permute(2, 0, 3, 1, 4)
        scores = on_query(q, self) @ k.transpose(-2, -1) / (E // H) ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        weights = on_weights(on_scores(scores, self).softmax(-1), self)
        out = (weights @ on_value(v, self)).transpose(1, 2).reshape(batch, length, E)
        return on_out(self.proj(out), self)


def findings(module: nn.Module, **reading: Any) -> list[Any]:
    subject = Subject(module.eval(), Reading("self", "BLD", E, heads=H, **reading))
    return list(dropout.CHECK.run(subject))


def by_hand(weights: Tensor, self: Block) -> Tensor:
    if not self.training:
        return weights
    p = self.dropout.p
    return weights * (torch.rand_like(weights) > p) / (1 - p)


def classic(weights: Tensor, self: Block) -> Tensor:
    """Scaled in eval mode and not in training: right on average, too."""
    p = self.dropout.p
    return weights * (torch.rand_like(weights) > p) if self.training else weights * (1 - p)


RIGHT = {
    "weights": Block(),
    "causal": Block(causal=True),
    "by hand": Block(by_hand),
    "classic": Block(classic),
    "functional": Block(lambda w, self: F.dropout(w, self.dropout.p, self.training)),
    "hard coded": Block(lambda w, self: F.dropout(w, 0.3, self.training)),
    "residual, too": Block(on_out=right),
    "residual alone": Block(nothing, on_out=right),
    "input alone": Block(nothing, on_input=right),
    "value, too": Block(on_value=right),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_dropout_is_left_alone(name: str) -> None:
    assert findings(RIGHT[name]) == []


def unscaled(weights: Tensor, self: Block) -> Tensor:
    return weights * (torch.rand_like(weights) > self.dropout.p) if self.training else weights


def scaled_by_p(weights: Tensor, self: Block) -> Tensor:
    p = self.dropout.p
    return weights * (torch.rand_like(weights) > p) / p if self.training else weights


def keeps_p(weights: Tensor, self: Block) -> Tensor:
    p = self.dropout.p
    return weights * (torch.rand_like(weights) < p) / (1 - p) if self.training else weights


def scaled_twice(weights: Tensor, self: Block) -> Tensor:
    return self.dropout(weights) / (1 - self.dropout.p) if self.training else weights


def renormalised(weights: Tensor, self: Block) -> Tensor:
    weights = self.dropout(weights)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)


def whole_keys(weights: Tensor, self: Block) -> Tensor:
    return weights * F.dropout(torch.ones(weights.shape[0], H, 1, weights.shape[-1]), self.dropout.p, self.training)


def whole_heads(weights: Tensor, self: Block) -> Tensor:
    return F.dropout2d(weights, self.dropout.p, self.training)


def inverted(weights: Tensor, self: Block) -> Tensor:
    return F.dropout(weights, self.dropout.p, not self.training)


def never(weights: Tensor, self: Block) -> Tensor:
    return F.dropout(weights, self.dropout.p, False)


WRONG = {
    "active in eval": (Block(lambda w, self: F.dropout(w, self.dropout.p)), "stays active"),
    "made in the forward": (Block(lambda w, self: nn.Dropout(0.1)(w)), "stays active"),
    "inverted": (Block(inverted), "stays active"),
    "never called": (Block(nothing), "changes nothing"),
    "never trained": (Block(never), "changes nothing"),
    "scores": (Block(nothing, on_scores=right), "acts on the scores"),
    "query": (Block(nothing, on_query=right), "acts on the queries or keys"),
    "query, too": (Block(on_query=right), "acts on the queries or keys"),
    "values": (Block(nothing, on_value=right), "acts on the values"),
    "unscaled": (Block(unscaled), "multiplied by 1, where 1 / (1 - 0.2"),
    "scaled by p": (Block(scaled_by_p), "multiplied by 4, where"),
    "keeps p": (Block(keeps_p), "p and 1 - p are swapped"),
    "swapped": (Block(lambda w, self: F.dropout(w, 1 - self.dropout.p, self.training)), "p and 1 - p are swapped"),
    "scaled twice": (Block(scaled_twice), "multiplied by 1.78, where"),
    "renormalised": (Block(renormalised), "by another factor in each row"),
    "whole keys": (Block(whole_keys), "whole keys"),
    "whole heads": (Block(whole_heads), "whole heads"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_dropout_is_named_once(name: str) -> None:
    module, words = WRONG[name]
    found = findings(module)
    assert [finding.severity for finding in found] == ["error"]
    assert words in found[0].message
    assert found[0].location is not None and found[0].location.path == __file__


def test_the_line_is_where_dropout_acts() -> None:
    (found,) = findings(Block(unscaled))
    assert "rand_like" in found.location.code and found.location.function == "unscaled"


def test_a_module_that_is_never_called_is_named_where_it_is_declared() -> None:
    (found,) = findings(Block(nothing))
    assert found.location.code == "self.dropout = nn.Dropout(0.1)"


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_pytorch_own_modules(rate: float) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 47, rate, batch_first=True)
    assert findings(layer) == []
    subject = Subject(
        nn.MultiheadAttention(E, H, rate, batch_first=True).eval(), Reading("qkv", "BLD", E, heads=H, out=0)
    )
    assert list(dropout.CHECK.run(subject)) == []


class WithSdpa(nn.Module):
    """nanoGPT's way: a rate for the fused call, and a module for the other, which is not used here."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.attn_dropout, self.resid_dropout, self.dropout = nn.Dropout(0.1), nn.Dropout(0.1), 0.1
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training or self.always else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        return self.resid_dropout(out.transpose(1, 2).flatten(2))


def test_dropout_p_of_the_fused_call() -> None:
    assert findings(WithSdpa(False)) == []
    (found,) = findings(WithSdpa(True))
    assert "stays active" in found.message and "scaled_dot_product_attention" in found.location.code


def test_a_dropout_for_the_weights_that_is_left_out_beside_one_that_acts() -> None:
    block = Block(nothing, on_out=lambda x, self: self.resid(x))
    block.resid = nn.Dropout(0.1)
    (found,) = findings(block)
    assert found.message.startswith("`dropout` is declared") and "The weights are never dropped" in found.message


def test_nothing_to_ask() -> None:
    block = Block(nothing)
    block.dropout = nn.Identity()
    with pytest.raises(Inapplicable, match="no dropout"):
        findings(block)


def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    return F.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), dropout_p) @ v


def dropped_by_default(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), 0.1) @ v


def not_told(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.1, training: bool = False) -> Tensor:
    return F.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), dropout_p) @ v


def told(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.1, training: bool = False) -> Tensor:
    return F.dropout((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1), dropout_p, training) @ v


def annotated(q: Tensor, k: Tensor, v: Tensor, dropout: nn.Module | None = None) -> Tensor:
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weights if dropout is None else dropout(weights)) @ v


def on_scores(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0) -> Tensor:
    return F.dropout(q @ k.mT / q.shape[-1] ** 0.5, p).softmax(-1) @ v


@pytest.mark.parametrize(
    "function, words",
    [
        (attention, None),
        (told, None),
        (annotated, None),
        (dropped_by_default, "stays active"),
        (not_told, "stays active"),
        (on_scores, "acts on the scores"),
    ],
)
def test_functions(function: Callable[..., Tensor], words: str | None) -> None:
    found = list(dropout.CHECK.run(Subject(function, Reading("attention", "BHLD", 7, heads=3))))
    assert [finding.severity for finding in found] == ([] if words is None else ["error"])
    assert words is None or words in found[0].message


def test_the_generator_is_as_it_was() -> None:
    block = Block()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    findings(block)
    assert torch.equal(torch.get_rng_state(), before)


class Strange(nn.Module):
    """A dropout rate of zero that nothing reads: no promise was made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = Block(nothing), 0.0
        self.inner.dropout = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_rate_of_zero_that_is_not_read_is_no_error() -> None:
    assert findings(Strange()) == []


def test_layers_that_are_left_out_at_random() -> None:
    """Layerdrop of published encoder-decoders: products of other lengths stand in each other's places."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.layers = nn.ModuleList([nn.MultiheadAttention(24, 3, 0.1, batch_first=True) for _ in range(2)])
            self.register_buffer("source", torch.randn(1, 6, 24))

        def forward(self, x: Tensor) -> Tensor:
            if not self.training or torch.rand(()) < 0.5:
                x = x + self.layers[0](x, *[self.source.expand(len(x), -1, -1)] * 2)[0]
            return x + self.layers[1](x, x, x)[0]

    reading = Reading("self", "BLD", 24, heads=3)
    found = list(dropout.CHECK.run(Subject(Skipping().eval(), reading)))
    assert not any(finding.severity == "error" for finding in found), found


@pytest.mark.parametrize(
    "gate",
    [
        lambda y, self: y * (y - torch.empty_like(y).exponential_().log() if self.training else y).softmax(-1),
        lambda y, self: y * F.dropout(y, 0.1, self.training).softmax(-1),
    ],
    ids=["router of PhiMoE", "gate with dropout"],
)
def test_a_softmax_that_weighs_no_values_has_no_scores(gate: Callable[..., Tensor]) -> None:
    assert not findings(Block(on_out=gate))


def test_noise_that_chooses_among_keys_is_no_dropout_of_scores() -> None:
    """Gumbel noise before the softmax draws a key; nothing is set to 0."""

    def gumbel(scores: Tensor, self: Block) -> Tensor:
        return scores - torch.empty_like(scores).exponential_().log() if self.training else scores

    assert not findings(Block(on_scores=gumbel))
