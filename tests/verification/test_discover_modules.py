"""Modules of many styles: form, layout, width, heads, what they return and what they take besides.

A module is read rightly when one call in the reading's layout is what a call by hand gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from saccade.verification import TargetError, Undecided
from saccade.verification.subject._reading import Hints
from saccade.verification.subject.discovery._discover import discover


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attended(q, k, v, heads, causal=False):
    out = F.scaled_dot_product_attention(heads_of(q, heads), heads_of(k, heads), heads_of(v, heads), is_causal=causal)
    return out.transpose(1, 2).flatten(2)


class SingleHead(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=False) for _ in range(3))

    def forward(self, x):
        queries, keys, values = self.W_query(x), self.W_key(x), self.W_value(x)
        return torch.softmax(queries @ keys.transpose(1, 2) / keys.shape[-1] ** 0.5, dim=-1) @ values


class OneSequence(nn.Module):
    """As the first chapters of books have it: no batch yet."""

    def __init__(self, d_in=6, d_out=4):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Parameter(torch.rand(d_in, d_out)) for _ in range(3))

    def forward(self, x):
        keys, queries, values = x @ self.W_key, x @ self.W_query, x @ self.W_value
        return torch.softmax(queries @ keys.T / keys.shape[-1] ** 0.5, dim=-1) @ values


class Fused(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x, return_attn=False):
        q, k, v = (heads_of(one, self.num_heads) for one in self.qkv(x).chunk(3, -1))
        attn = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        out = self.out((attn @ v).transpose(1, 2).flatten(2))
        return (out, attn) if return_attn else out


@dataclass
class Config:
    n_embd: int
    n_head: int = 4
    block_size: int = 16
    dropout: float = 0.0


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fused, self.n_head = nn.Linear(config.n_embd, 3 * config.n_embd), config.n_head
        self.register_buffer("bias", torch.ones(config.block_size, config.block_size).tril())

    def forward(self, x):
        q, k, v = self.fused(x).chunk(3, -1)
        return attended(q, k, v, self.n_head, causal=True)


class Loose(nn.Module):
    """Its configuration is a dictionary."""

    def __init__(self, cfg):
        super().__init__()
        self.att = Fused(cfg["emb_dim"], num_heads=cfg["n_heads"])
        self.norm = nn.LayerNorm(cfg["emb_dim"])

    def forward(self, x):
        return x + self.att(self.norm(x))


class SequenceFirst(nn.Module):
    def __init__(self, embed_dim=20, num_heads=4):
        super().__init__()
        self.inner = nn.MultiheadAttention(embed_dim, num_heads)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class Cross(nn.Module):
    def __init__(self, query_dim=20, context_dim=12, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(query_dim, query_dim), nn.Linear(context_dim, 2 * query_dim)

    def forward(self, x, context):
        return attended(self.to_q(x), *self.to_kv(context).chunk(2, -1), self.heads)


class Optional(Cross):
    def __init__(self):
        super().__init__(20, 20)

    def forward(self, x, context=None):
        return super().forward(x, x if context is None else context)


class Unnamed(Cross):
    def forward(self, a, b):
        return super().forward(a, b)


class Projected(nn.Module):
    def __init__(self, d_model=24, h=3):
        super().__init__()
        self.h = h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value):
        q, k, v = (one(x) for one, x in zip(self.linears[:3], (query, key, value), strict=True))
        return self.linears[3](attended(q, k, v, self.h))


class Proper(nn.Module):
    def __init__(self, temperature, attn_dropout=0.1):
        super().__init__()
        self.temperature, self.dropout = temperature, nn.Dropout(attn_dropout)

    def forward(self, q, k, v, mask=None):
        attn = torch.matmul(q / self.temperature, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask == 0, -1e9)
        attn = self.dropout(F.softmax(attn, dim=-1))
        return torch.matmul(attn, v), attn


class Rotary(nn.Module):
    """Rotated by complex numbers from outside, as in Llama's own code."""

    def __init__(self, dim=32, n_heads=4):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.wqkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, start_pos, freqs_cis, mask=None):
        q, k, v = (one.unflatten(-1, (self.n_heads, -1)) for one in self.wqkv(x).chunk(3, -1))
        q, k = (self.rotated(one, freqs_cis) for one in (q, k))
        return attended(q.flatten(2), k.flatten(2), v.flatten(2), self.n_heads)

    def rotated(self, x, freqs_cis):
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs_cis[:, None]
        return torch.view_as_real(turned).flatten(-2)


CALLS = [
    (lambda: SingleHead(10, 6), "self", "BLD", 10),
    (OneSequence, "self", "LD", 6),
    (lambda: Fused(24, 4), "self", "BLD", 24),
    (lambda: Configured(Config(32)), "self", "BLD", 32),
    (SequenceFirst, "self", "LBD", 20),
    (Cross, "cross", "BLD", 20),
    (Optional, "self", "BLD", 20),
    (Projected, "qkv", "BLD", 24),
    (lambda: nn.MultiheadAttention(20, 4, batch_first=True), "qkv", "BLD", 20),
    (lambda: nn.MultiheadAttention(20, 4), "qkv", "LBD", 20),
    (lambda: nn.TransformerEncoderLayer(20, 4, 32, batch_first=True), "self", "BLD", 20),
    (lambda: nn.TransformerEncoderLayer(20, 4, 32), "self", "LBD", 20),
    (lambda: nn.TransformerDecoderLayer(20, 4, 32, batch_first=True), "cross", "BLD", 20),
    (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(20, 4, 32, batch_first=True), 2), "self", "BLD", 20),
    (lambda: nn.Transformer(20, 4, 1, 1, 32, batch_first=True), "cross", "BLD", 20),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "form", "layout", "width"), CALLS)
def test_modules_are_called_as_by_hand(make, form, layout, width):
    module = make().eval()
    subject = discover(module)
    reading = subject.reading
    assert (reading.form, reading.layout, reading.width) == (form, layout, width)
    inputs = subject.inputs(1 if "B" not in layout else 3, 5)
    native = [
        tensor.transpose(0, 1) if layout == "LBD" else tensor[0] if layout == "LD" else tensor
        for tensor in inputs.tensors.values()
    ]
    if form == "cross" and isinstance(module, nn.Transformer):
        native.reverse()  # forward(src, tgt): tgt attends to src
    with torch.no_grad():
        out = module(*native)
    out = out[0] if isinstance(out, tuple) else out
    out = out.transpose(0, 1) if layout == "LBD" else out[None] if layout == "LD" else out
    torch.testing.assert_close(subject(inputs).out, out)


def test_a_context_may_have_its_own_width():
    assert discover(Cross()).reading.context_width == 12


def test_an_optional_context_is_left_out_unless_told():
    assert discover(Optional()).reading.form == "self"
    assert discover(Optional(), Hints(form="cross")).reading.form == "cross"


def test_unnamed_arguments_are_tried():
    subject = discover(Unnamed())
    assert (subject.form, subject.reading.names) == ("cross", ("a", "b"))
    assert any("b is the context" in one for one in subject.reading.assumed)


@pytest.mark.slow
def test_two_ways_that_both_work_are_listed_and_none_is_taken():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(24, 24)

        def forward(self, x, other):
            scores = x @ x.mT / 24**0.5
            if other.shape[-1] != 24:
                scores = scores.masked_fill(other == 0, -1e9)
            elif other.shape[1] == x.shape[1]:
                scores = x @ other.mT / 24**0.5
            return self.proj(scores.softmax(-1) @ x)

    class Renamed(Either):
        def forward(self, x, thing):
            return super().forward(x, thing)

    with pytest.raises(Undecided, match="what thing is cannot be inferred from the signature") as raised:
        discover(Renamed())
    assert {option for _, option in raised.value.candidates} == {"--form cross", "--mask thing"}
    assert discover(Renamed(), Hints(mask="thing")).reading.masks
    assert discover(Renamed(), Hints(form="cross")).reading.form == "cross"


def test_weights_are_asked_for_where_they_are_not_given():
    subject = discover(Fused(24, 4))
    result = subject(subject.inputs(2, 5))
    assert result.weights.shape == (2, 4, 5, 5)
    assert subject.reading.heads == 4
    assert discover(nn.MultiheadAttention(20, 4)).reading.weights_axes == "BHQK"


def test_the_width_of_heads_is_what_the_module_divides_by():
    subject = discover(Proper(math.sqrt(20)))
    assert (subject.form, subject.reading.layout, subject.reading.width) == ("attention", "BHLD", 20)
    assert subject.reading.weights == 1


def test_buffers_tell_the_longest_input():
    assert discover(Configured(Config(32))).reading.max_length == 16
    assert discover(Fused(24, 4)).reading.max_length is None


@pytest.mark.slow
def test_rotations_from_outside_are_made_for_the_positions():
    module = Rotary()
    subject = discover(module)
    inputs = subject.inputs(2, 5)
    angles = torch.outer(torch.arange(5.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8))
    by_hand = module(inputs["x"], 0, torch.polar(torch.ones_like(angles), angles))
    torch.testing.assert_close(subject(inputs).out, by_hand)


def test_a_module_is_not_changed():
    module = nn.TransformerEncoderLayer(20, 4, 32, batch_first=True).train()
    subject = discover(module)
    assert module.training
    assert not subject.module.training
    assert subject.module is not module


def test_what_raises_however_it_is_called_is_the_targets_error():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, x):
            return self.proj(x) + self.missing

    with pytest.raises(TargetError, match="'Broken' object has no attribute 'missing'") as raised:
        discover(Broken())
    assert raised.value.location.code == "return self.proj(x) + self.missing"


class SharedBatch(Fused):
    def forward(self, x):
        return super().forward(x) + x.mean(0, keepdim=True)


class OverTheBatch(SingleHead):
    def forward(self, x):
        scores = self.W_query(x) @ self.W_key(x).transpose(1, 2)
        return torch.softmax(scores, dim=0) @ self.W_value(x)


class SeenAsSequenceFirst(SequenceFirst):
    """Takes (B, T, C) and hands it to a module that is not batch-first."""

    def forward(self, x):
        B, T, C = x.shape
        return self.inner(x, x, x)[0].view(B, T, C)


@pytest.mark.parametrize("module", [SharedBatch(24, 4), OverTheBatch(10, 6), SeenAsSequenceFirst()])
def test_broken_modules_are_read_as_they_were_meant(module):
    assert discover(module).reading.layout == "BLD"


class Passing(nn.Module):
    def __init__(self, dim=24, heads=4):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)

    def forward(self, x, past_key_value=None, use_cache=False):
        q, k, v = (heads_of(one, self.heads) for one in self.qkv(x).chunk(3, -1))
        if past_key_value is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past_key_value, (k, v), strict=True))
        rows = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
        seen = torch.arange(k.shape[2]) <= rows
        out = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        return out, ((k, v) if use_cache else None)


class KVCache:
    def __init__(self):
        self.kept = None


class Changing(Passing):
    def forward(self, x, kv_cache=None):
        out, kept = super().forward(x, kv_cache.kept if kv_cache else None, use_cache=True)
        if kv_cache is not None:
            kv_cache.kept = kept
        return out


class Keeping(Passing):
    kept = None

    def reset_cache(self):
        self.kept = None

    def forward(self, x, use_cache=False):
        out, kept = super().forward(x, self.kept if use_cache else None, use_cache=True)
        self.kept = kept if use_cache else None
        return out


@pytest.mark.parametrize(
    ("module", "kind", "argument", "returned", "reset", "flag"),
    [
        (Passing(), "passed", "past_key_value", 1, None, "use_cache"),
        (Changing(), "made", "kv_cache", None, None, None),
        (Keeping(), "inside", None, None, "reset_cache", "use_cache"),
    ],
)
def test_caches_are_found(module, kind, argument, returned, reset, flag):
    from saccade.verification.subject._decoder import CachedDecoder, in_pieces

    subject = discover(module)
    cache = subject.reading.cache
    assert (cache.kind, cache.argument, cache.returned, cache.reset, cache.flag) == (
        kind,
        argument,
        returned,
        reset,
        flag,
    )
    inputs = subject.inputs(2, 5)
    torch.testing.assert_close(in_pieces(CachedDecoder(subject), inputs, (1, 2, 1, 1)), subject(inputs).out)


@pytest.mark.slow
def test_classes_are_made_first():
    reading = discover(Fused, arguments={"embed_dim": 30, "num_heads": 5}).reading
    assert (reading.width, reading.heads) == (30, 5)
    assert discover(Fused).reading.heads == 4
    assert discover(SingleHead).reading.form == "self"
    assert discover(Configured).reading.max_length == 16  # its dataclass says so
    assert discover(Loose).reading.form == "self"


def test_an_adapter_for_a_module():
    def adapter(target, x, context, mask=None):
        return target(x, context)

    subject = discover(Cross(), how=adapter)
    assert (subject.form, subject.reading.width, subject.reading.context_width) == ("cross", 20, 12)
    assert subject(subject.inputs(2, 5, 7)).out.shape == (2, 5, 20)
