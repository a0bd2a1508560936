"""Tracing: scores, softmax and weights are found in whatever way attention is written out.

Shape legend: B = 2, H = 3, L = 5, D = 7, E = 21.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade.nn
from saccade.verification import Inapplicable, Reading
from saccade.verification.subject._subject import Subject
from saccade.verification.tracing._trace import TracedAttention, measured, traced

B, H, L, D = 2, 3, 5, 7
E = H * D
ROOT = math.sqrt(D)
LATER = torch.ones(L, L, dtype=torch.bool).triu(1)
Core = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, L, H, D) each, to (B, L, E)


class Projected(nn.Module):
    """x to queries, keys and values of H heads, what `core` makes of them, and an output projection."""

    def __init__(self, core: Core):
        super().__init__()
        self.qkv, self.out, self.core = nn.Linear(E, 3 * E), nn.Linear(E, E), core

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (part.unflatten(-1, (H, D)) for part in self.qkv(x).chunk(3, -1))
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.core(*self.parts(x)))


def expected(query: Tensor, key: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Logits and weights (B, H, L, L) of queries and keys (B, L, H, D), by the formula alone."""
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) / ROOT
    return logits, (logits.masked_fill(LATER, -math.inf) if causal else logits).softmax(-1)


def seen_in(core: Core) -> tuple[TracedAttention, Projected, Tensor]:
    torch.manual_seed(0)
    module = Projected(core).eval()
    subject = Subject(module, Reading("self", "BLD", E))
    inputs = subject.inputs(B, L)
    with torch.no_grad():
        (seen,) = traced(subject, inputs).attentions
    return seen, module, inputs["x"]


def heads(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)


def merged(out: Tensor) -> Tensor:
    return out.transpose(1, 2).reshape(B, L, E)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads(q), heads(k), heads(v)
    return merged((q @ k.transpose(-2, -1) / ROOT).softmax(-1) @ v)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).div(ROOT).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, L, E)


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bijh", q, k) / ROOT
    weights = torch.softmax(scores, dim=2)
    return torch.einsum("bijh,bjhd->bihd", weights, v).flatten(2)


def with_dots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(torch.einsum("...id,...jd->...ij", heads(q), heads(k)) / ROOT, dim=-1)
    return merged(torch.einsum("...ij,...jd", weights, heads(v)))


def flat_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (heads(t).reshape(B * H, L, D) for t in (q, k, v))
    weights = F.softmax(torch.bmm(q / ROOT, k.transpose(1, 2)), dim=2)
    return merged(torch.bmm(weights, v).view(B, H, L, D))


def heads_before_items(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (torch.cat(t.unbind(2)) for t in (q, k, v))
    weights = torch.matmul(q, k.mT).mul(1 / ROOT).softmax(-1)
    return torch.cat(torch.matmul(weights, v).chunk(H), dim=-1)


def added_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (heads(t).flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(torch.zeros(1, 1, 1), q, k.mT, beta=0, alpha=1 / ROOT)
    return merged(torch.bmm(scores.softmax(-1), v).unflatten(0, (B, H)))


def by_elements(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads(q), heads(k), heads(v)
    weights = ((q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) / ROOT).softmax(-1)
    return merged((weights.unsqueeze(-1) * v.unsqueeze(2)).sum(3))


def loop_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = []
    for head in range(H):
        scores = q[:, :, head] @ k[:, :, head].transpose(1, 2)
        outs.append(F.softmax(scores / ROOT, dim=-1) @ v[:, :, head])
    return torch.cat(outs, dim=-1)


def loop_of_items(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = []
    for one, other, third in zip(heads(q), heads(k), heads(v), strict=True):
        outs.append((one @ other.mT / ROOT).softmax(-1) @ third)
    return merged(torch.stack(outs))


def loop_of_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty(B, L, H, D)
    for item in range(B):
        for head in range(H):
            weights = (torch.mm(q[item, :, head], k[item, :, head].T) / ROOT).softmax(1)
            out[item, :, head] = weights.mm(v[item, :, head])
    return out.view(B, L, E)


def loop_into_a_buffer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.zeros(B, H, L, L)
    for head in range(H):
        scores[:, head] = q[:, :, head] @ k[:, :, head].mT / ROOT
    return merged(scores.softmax(-1) @ heads(v))


def loop_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = []
    for at in range(L):
        weights = (torch.einsum("bhd,bkhd->bhk", q[:, at], k) / ROOT).softmax(-1)
        rows.append(torch.einsum("bhk,bkhd->bhd", weights, v))
    return torch.stack(rows, 1).reshape(B, L, E)


def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).mT / ROOT
    raised = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return merged((raised / raised.sum(dim=-1, keepdim=True)) @ heads(v))


def softmax_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).mT
    scores /= ROOT
    scores.exp_()
    scores /= scores.sum(-1, keepdim=True)
    return merged(scores @ heads(v))


def by_logarithms(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).mT / ROOT
    return merged(F.log_softmax(scores, dim=-1).exp() @ heads(v))


def by_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).mT / ROOT
    return merged((scores - torch.logsumexp(scores, -1, keepdim=True)).exp() @ heads(v))


def by_tensordot(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = [
        torch.tensordot(
            (torch.tensordot(q[item, :, head], k[item, :, head], ([1], [1])) / ROOT).softmax(-1), v[item, :, head], 1
        )
        for item in range(B)
        for head in range(H)
    ]
    return merged(torch.stack(rows).view(B, H, L, D))


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = heads(k) @ heads(q).mT / ROOT  # (B, H, keys, queries)
    return merged(scores.softmax(-2).mT @ heads(v))


def by_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = [
        F.linear((F.linear(q[b, :, h], k[b, :, h]) / ROOT).softmax(-1), v[b, :, h].T)
        for b in range(B)
        for h in range(H)
    ]
    return merged(torch.stack(outs).view(B, H, L, D))


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged(F.scaled_dot_product_attention(heads(q), heads(k), heads(v)))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqghd,bkhd->bghqk", q.unsqueeze(2), k) / ROOT
    return torch.einsum("bghqk,bkhd->bqghd", scores.softmax(-1), v).reshape(B, L, E)


def stacked_by_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    both = torch.stack([heads(q), heads(k)])
    q, k = both.permute(0, 2, 1, 3, 4)[:, torch.arange(H)].unbind(0)
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) * D**-0.5
    weights = F.dropout(F.softmax(scores.double(), -1).type_as(q), 0.1, training=False)  # (H, B, L, L)
    return merged((weights @ heads(v).transpose(0, 1)).transpose(0, 1))


RIGHT = [
    plain,
    by_einsum,
    heads_last,
    with_dots,
    flat_heads,
    heads_before_items,
    added_product,
    by_elements,
    loop_of_heads,
    loop_of_items,
    loop_of_both,
    loop_into_a_buffer,
    loop_of_queries,
    softmax_by_hand,
    softmax_in_place,
    by_logarithms,
    by_logsumexp,
    by_tensordot,
    keys_first,
    by_linear,
    fused,
    grouped,
    stacked_by_view,
]


@pytest.mark.parametrize("core", RIGHT, ids=lambda core: core.__name__)
def test_every_way_to_write_it_is_seen_as_what_it_is(core: Core):
    seen, module, x = seen_in(core)
    query, key, value = module.parts(x)
    logits, weights = expected(query, key)
    assert seen.weights.shape == (B, H, L, L)
    torch.testing.assert_close(seen.weights, weights)
    torch.testing.assert_close(seen.value, heads(value))
    assert seen.logits is not None
    own = seen.logits.float()
    torch.testing.assert_close(  # up to a constant for each query
        own - own.mean(-1, keepdim=True), logits - logits.mean(-1, keepdim=True)
    )
    factor = ROOT if core is flat_heads else 1.0
    torch.testing.assert_close(seen.query * factor, heads(query))
    torch.testing.assert_close(seen.key, heads(key))
    assert seen.normalised == "key"


def wrong_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged((heads(q) @ heads(k).mT / ROOT).softmax(-2) @ heads(v))


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged((heads(q) @ heads(k).mT / ROOT).softmax(1) @ heads(v))


def over_items(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged(F.softmax(heads(q) @ heads(k).mT / ROOT, dim=0) @ heads(v))


def chosen_by_pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says itself that the implicit axis is deprecated
        flat = F.softmax((heads(q) @ heads(k).mT / ROOT).flatten(0, 1))
    return merged(flat.unflatten(0, (B, H)) @ heads(v))


def over_keys_and_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged((heads(q) @ heads(k).mT / ROOT).flatten(2).softmax(-1).unflatten(2, (L, L)) @ heads(v))


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged((heads(q) @ heads(k).mT / ROOT).softmax(-1).transpose(-2, -1) @ heads(v))


def wrong_axis_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raised = torch.exp(heads(q) @ heads(k).mT / ROOT)
    return merged(raised / raised.sum(2, keepdim=True) @ heads(v))


def none_at_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged(heads(q) @ heads(k).mT / ROOT @ heads(v))


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged((heads(q) @ heads(k).mT / ROOT).sigmoid() @ heads(v))


AXES = {
    wrong_axis: "query",
    over_heads: "head",
    over_items: "batch",
    chosen_by_pytorch: "head",
    over_keys_and_queries: "unknown",
    turned: "query",
    wrong_axis_by_hand: "query",
    none_at_all: "none",
    sigmoid: "none",
}


@pytest.mark.parametrize("core", AXES, ids=lambda core: core.__name__)
def test_the_axis_of_the_softmax_is_told(core: Core):
    seen, module, x = seen_in(core)
    query, key, value = module.parts(x)
    assert seen.normalised == ("batch" if core is chosen_by_pytorch and B * H == 1 else AXES[core])
    torch.testing.assert_close(merged(seen.weights @ heads(value)), core(query, key, value))


class Performer(nn.Module):
    """Random features in place of the softmax, as in arXiv 2009.14794."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.register_buffer("projection", torch.randn(10, 12))

    def features(self, x: Tensor) -> Tensor:
        projected = x @ self.projection.mT
        shifted = projected - x.square().sum(-1, keepdim=True) / 2 - projected.amax(-1, keepdim=True)
        return 10**-0.5 * (shifted.exp() + 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.features(self.q(x)), self.features(self.k(x)), self.v(x)
        return q @ (k.mT @ v) / (q @ k.sum(1)[..., None])


def test_random_features_are_no_softmax():
    subject = Subject(Performer(), Reading("self", "BLD", 12))
    with pytest.raises(Inapplicable, match="no product of queries and keys with a softmax after it"):
        measured(subject, subject.inputs(2, 7))


def masked_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (heads(q) @ heads(k).mT / ROOT).softmax(-1)
    return merged(weights.masked_fill(LATER, 0.0) @ heads(v))


def renormalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (heads(q) @ heads(k).mT / ROOT).softmax(-1) * ~LATER
    weights = weights / weights.sum(-1, keepdim=True)
    return merged(weights @ heads(v))


def masked_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = heads(q) @ heads(k).mT / ROOT
    scores[:, :, LATER] = float("-inf")
    return merged(scores.softmax(-1) @ heads(v))


def multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tril(heads(q) @ heads(k).mT / ROOT)
    return merged(scores.softmax(-1) @ heads(v))


def test_masks_are_seen_where_they_stand():
    for core in (masked_after, renormalised, masked_before, multiplied):
        seen, module, x = seen_in(core)
        query, key, _ = module.parts(x)
        logits, causal = expected(query, key, causal=True)
        full = logits.softmax(-1)
        right = {masked_after: full.masked_fill(LATER, 0), multiplied: logits.tril().softmax(-1)}
        torch.testing.assert_close(seen.weights, right.get(core, causal))
        assert seen.logits is not None
        hidden = {masked_before: -math.inf, multiplied: 0.0}
        filled = logits.masked_fill(LATER, hidden[core]) if core in hidden else logits
        torch.testing.assert_close(seen.logits, filled)
        assert seen.normalised == "key"
        mark = {
            masked_after: "masked_fill",
            renormalised: "~LATER",
            masked_before: "[:, :, LATER]",
            multiplied: "torch.tril",
        }
        assert mark[core] in seen.lines["mask"].code


def test_the_lines_are_those_that_a_reader_would_point_at():
    seen, _, _ = seen_in(softmax_by_hand)
    assert seen.lines["scores"].code == "scores = heads(q) @ heads(k).mT / ROOT"
    assert seen.lines["scale"] == seen.lines["scores"]
    assert seen.lines["softmax"].code.startswith("raised = torch.exp(")
    assert seen.lines["values"].code.startswith("return merged((raised /")
    assert seen.lines["values"].function == "softmax_by_hand"
    assert seen.lines["values"].path == __file__


def tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax of two tiles of keys, the second going on where the first ended."""
    q, k, v = heads(q), heads(k), heads(v)
    top = torch.full((B, H, L, 1), -math.inf)
    total, out = torch.zeros(B, H, L, 1), torch.zeros(B, H, L, D)
    for start in (0, 3):
        scores = q @ k[:, :, start : start + 3].mT / ROOT
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        raised, old = (scores - new).exp(), (top - new).exp()
        total, out = total * old + raised.sum(-1, keepdim=True), out * old + raised @ v[:, :, start : start + 3]
        top = new
    return merged(out / total)


def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each block of rows sees its own block of keys."""
    outs = []
    for start, stop in ((0, 2), (2, L)):
        one, other, third = (heads(t)[:, :, start:stop] for t in (q, k, v))
        outs.append((one @ other.mT / ROOT).softmax(-1) @ third)
    return merged(torch.cat(outs, 2))


def strided_otherwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As fairseq has it: (L, B, E), and views that only its own strides allow."""
    q, k, v = (t.flatten(2).transpose(0, 1).contiguous().view(L, B * H, D).transpose(0, 1) for t in (q / ROOT, k, v))
    out = torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v)
    return out.transpose(0, 1).contiguous().view(L, B, E).transpose(0, 1)


def test_views_are_followed_whatever_their_strides():
    seen, module, x = seen_in(strided_otherwise)
    query, key, _ = module.parts(x)
    torch.testing.assert_close(seen.weights, expected(query, key)[1])
    assert seen.scaled == pytest.approx(1 / ROOT)


def test_parts_of_a_matrix_are_put_together():
    seen, module, x = seen_in(tiles)
    query, key, value = module.parts(x)
    logits, weights = expected(query, key)
    torch.testing.assert_close(seen.logits, logits)
    torch.testing.assert_close(seen.weights, weights)
    torch.testing.assert_close(seen.value, heads(value))
    assert seen.normalised == "unknown"  # nobody saw the weights
    seen, module, x = seen_in(blocks)
    query, key, value = module.parts(x)
    apart = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)) == 0
    logits = expected(query, key)[0].masked_fill(apart, -math.inf)
    torch.testing.assert_close(seen.logits, logits)
    torch.testing.assert_close(seen.weights, logits.softmax(-1))
    assert seen.normalised == "key"


def scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q * D**-0.25
    k = k / torch.tensor(float(D)).sqrt().sqrt()
    return merged((heads(q) @ heads(k).mT).softmax(-1) @ heads(v))


def test_what_queries_and_keys_were_multiplied_by_is_known():
    seen, module, x = seen_in(scaled_before)
    assert seen.scaled == pytest.approx(D**-0.5, rel=1e-6)
    assert not seen.learned
    assert "D**-0.25" in seen.lines["scale"].code
    query, key, _ = module.parts(x)
    torch.testing.assert_close(seen.logits, seen.query @ seen.key.mT)
    torch.testing.assert_close(seen.logits, expected(query, key)[0])
    assert seen_in(plain)[0].scaled == 1.0


class Tempered(nn.Module):
    """Cosine attention with a learned temperature for each head."""

    def __init__(self):
        super().__init__()
        self.qkv, self.temperature = nn.Linear(E, 3 * E), nn.Parameter(torch.full((H, 1, 1), 2.3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part.unflatten(-1, (H, D))) for part in self.qkv(x).chunk(3, -1))
        scores = F.normalize(7 * q, dim=-1) @ F.normalize(k, dim=-1).mT
        return merged((scores * self.temperature.exp()).softmax(-1) @ v)


def test_a_learned_factor_is_known_as_learned():
    subject = Subject(Tempered().eval(), Reading("self", "BLD", E))
    with torch.no_grad():
        (seen,) = traced(subject, subject.inputs(B, L)).attentions
    assert seen.learned
    assert seen.scaled == 1.0  # a normalised query has forgotten its factor
    assert seen.lines["scale"].code == "return merged((scores * self.temperature.exp()).softmax(-1) @ v)"
    assert not seen_in(plain)[0].learned


def subject_of(target: object, reading: Reading) -> Subject:
    torch.manual_seed(0)
    return Subject(target.eval() if isinstance(target, nn.Module) else target, reading)


def test_pytorchs_own_layers_are_seen_inside():
    mha = nn.MultiheadAttention(E, H, batch_first=True)
    subject = subject_of(mha, Reading("qkv", "BLD", E, out=0, weights=1, weights_axes="BQK"))
    inputs = subject.inputs(B, L, 11)
    looked = traced(subject, inputs)
    (seen,) = looked.attentions
    assert seen.weights.shape == (B, H, L, 11)
    torch.testing.assert_close(seen.weights.mean(1, keepdim=True), looked.result.weights)
    assert seen.scaled == pytest.approx(1 / ROOT, rel=1e-6)
    layer = nn.TransformerDecoderLayer(E, H, 17, batch_first=True)
    subject = subject_of(layer, Reading("cross", "BLD", E))
    own, crossed = traced(subject, subject.inputs(B, L, 11)).attentions
    assert (own.weights.shape, crossed.weights.shape) == ((B, H, L, L), (B, H, L, 11))


def test_a_stack_gives_each_layer_its_own():
    stack = nn.Sequential(*(Projected(plain) for _ in range(3)))
    subject = subject_of(stack, Reading("self", "BLD", E))
    inputs = subject.inputs(B, L)
    found = traced(subject, inputs).attentions
    x = inputs["x"]
    assert len(found) == 3
    for seen, layer in zip(found, stack, strict=True):
        query, key, _ = layer.parts(x)
        torch.testing.assert_close(seen.weights, expected(query, key)[1])
        x = layer(x)


def test_saccades_own_attention_tells_itself():
    subject = subject_of(saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(E, H)), Reading("self", "BLD", E))
    found = traced(subject, subject.inputs(B, L)).attentions
    assert [seen.weights.shape for seen in found] == [(B, H, L, L)]
    torch.testing.assert_close(found[0].weights, (found[0].query @ found[0].key.mT / ROOT).softmax(-1))


def shared_keys(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    return (query @ key.mT / ROOT).softmax(-1) @ value


def test_attention_proper_is_read_from_its_outputs():
    subject = subject_of(shared_keys, Reading("attention", "BHLD", D, heads=6, kv_heads=3, value_width=2))
    inputs = subject.inputs(B, L, 11)
    (seen,) = measured(subject, inputs)
    key = inputs["key"].repeat_interleave(2, 1)
    logits = inputs["query"] @ key.mT / ROOT
    assert seen.source == "probed"
    torch.testing.assert_close(seen.weights, logits.softmax(-1))
    torch.testing.assert_close(seen.key, key)
    assert seen.normalised == "key"
    assert seen.lines["softmax"].code == "return (query @ key.mT / ROOT).softmax(-1) @ value"


def hidden(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Through memory that PyTorch does not see."""
    query, key = (torch.from_numpy(tensor.detach().numpy().copy()) for tensor in (query, key))
    return (query @ key.mT / ROOT).softmax(-1) @ value


def test_what_cannot_be_followed_is_measured_all_the_same_or_said():
    subject = subject_of(hidden, Reading("attention", "BHLD", D, heads=3))
    inputs = subject.inputs(B, L)
    assert traced(subject, inputs).attentions == ()
    (seen,) = measured(subject, inputs)
    weights = (inputs["query"] @ inputs["key"].mT / ROOT).softmax(-1)
    torch.testing.assert_close(seen.weights, weights)
    torch.testing.assert_close(seen.logits, weights.log())
    assert seen.lines == {}
    subject = subject_of(nn.Linear(E, E), Reading("self", "BLD", E))
    with pytest.raises(Inapplicable, match="no product of queries and keys with a softmax"):
        measured(subject, subject.inputs(B, L))


def test_a_target_is_not_changed_by_being_looked_at():
    for core in (softmax_in_place, loop_into_a_buffer, tiles):
        subject = subject_of(Projected(core), Reading("self", "BLD", E))
        inputs = subject.inputs(B, L)
        kept = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
        alone = subject(inputs).out
        looked = traced(subject, inputs).result.out
        assert torch.equal(alone, looked)
        assert all(torch.equal(kept[name], tensor) for name, tensor in inputs.tensors.items())
