"""Longformer's module: against its formula row by row, against transformers' own, and what it does with masks.

Shape legend: B batch, HQ / HKV query and key-value heads, L length, D key width, DV value width, E model width.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from looped import looped
from saccade import ALiBi, Causal, Global, Padding, Window
from saccade.nn import AttentionConfig, BlockConfig, Encoder, GrowingLayer, MultiHeadAttention
from saccade.variants import HeadSizes, LongformerConfig
from saccade.variants.patterns import longformer

B, HQ, HKV, D, DV, E = 2, 4, 2, 5, 3, 13
EXACT = dict(rtol=1e-10, atol=1e-11)  # float64, at most 61 products of order 1 in another order


def inputs(length, batch=B, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (HQ, length, D), (HKV, length, D), (HKV, length, DV), (length, E)
    return [torch.randn(batch, *size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def build(config) -> torch.nn.Module:
    torch.manual_seed(3)
    module = config.build(HeadSizes(E, HQ, HKV, D, DV)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def by_rows(
    module, query, key, value, tokens, chosen: list[set[int]], real: list[list[int]], scores=None, causal=False
):
    """(B, HQ, L, DV), one row of one head at a time: the keys are a Python set, the softmax is written out."""
    config = module.config
    own = {
        name: layer(tokens).unflatten(-1, (-1, width)).transpose(1, 2)
        for name, layer, width in (
            ("query", module.global_query, D),
            ("key", module.global_key, D),
            ("value", module.global_value, DV),
        )
    }
    rows = []
    for item in range(query.shape[0]):
        for head in range(HQ):
            step = config.dilation[head] if isinstance(config.dilation, tuple) else config.dilation
            near = {n * step for n in range(-config.window // 2, config.window // 2 + 1)}
            for row in range(query.shape[2]):
                if row not in real[item]:
                    rows.append(query.new_zeros(DV))
                    continue
                everything = row in chosen[item]
                seen = [j for j in real[item] if everything or j - row in near or j in chosen[item]]
                seen = [j for j in seen if j <= row or not causal]
                q, k, v = (own["query"], own["key"], own["value"]) if everything else (query, key, value)
                group = head // (HQ // HKV)
                logits = k[item, group, seen] @ q[item, head, row] / D**0.5
                if scores is not None:
                    logits = logits + scores(head, torch.tensor(seen) - row)
                weights = (logits - logits.max()).exp()
                rows.append(weights @ v[item, group, seen] / weights.sum())
    return torch.stack(rows).unflatten(0, (query.shape[0], HQ, query.shape[2]))


def same(out: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(out, expected, **EXACT)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    ours = torch.autograd.grad(out, leaves, cotangent)
    for mine, its in zip(ours, torch.autograd.grad(expected, leaves, cotangent), strict=True):
        assert its.abs().max() > 0
        torch.testing.assert_close(mine, its, **EXACT)


CONFIGS = [
    LongformerConfig(6, global_tokens=(0, 7)),
    LongformerConfig(4, dilation=3, global_tokens=(2, 19)),
    LongformerConfig(2, dilation=(1, 2, 1, 5), global_tokens=(0, 1, 30)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_formula(config, causal):
    module, leaves = build(config), inputs(31)
    whole = [list(range(31))] * B
    out = module(*leaves[:3], Causal() if causal else None, tokens=leaves[3])
    expected = by_rows(module, *leaves, [set(config.global_tokens)] * B, whole, causal=causal)
    same(out, expected, [*leaves, *module.parameters()])


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_count_real_tokens(side):
    config, lengths = LongformerConfig(4, global_tokens=(0, 3)), [17, 9]
    module, leaves = build(config), inputs(17)
    real = [list(range(17 - n, 17)) if side == "left" else list(range(n)) for n in lengths]
    flags = torch.tensor([[j in row for j in range(17)] for row in real])
    chosen = [{row[0], row[3]} for row in real]
    out = module(*leaves[:3], Padding(flags, queries=flags), tokens=leaves[3])
    same(out, by_rows(module, *leaves, chosen, real), [*leaves, *module.parameters()])


@pytest.mark.slow
def test_a_call_names_global_tokens():
    module, leaves = build(LongformerConfig(4)), inputs(23)
    flags = torch.zeros(B, 23, dtype=torch.bool)
    flags[0, [2, 3, 7]] = flags[1, 11] = True
    question = longformer(4, global_tokens=flags)
    whole = [list(range(23))] * B
    # What is seen is what both show: position 0, global in the configuration alone, reads and is read in the mask's
    # window only.
    alone = build(LongformerConfig(4, global_tokens=()))
    alone.load_state_dict(module.state_dict())
    out = alone(*leaves[:3], question, tokens=leaves[3])
    same(out, by_rows(alone, *leaves, [{2, 3, 7}, {11}], whole), [*leaves, *alone.parameters()])
    out = module(*leaves[:3], Window(None, None) & Window(None, None) | Global(flags), tokens=leaves[3])
    same(out, by_rows(module, *leaves, [{0, 2, 3, 7}, {0, 11}], whole), [*leaves, *module.parameters()])


def test_what_the_mask_hides_stays_hidden():
    module, leaves = build(LongformerConfig(6, global_tokens=(0,))), inputs(19, batch=1)
    out = module(*leaves[:3], longformer(2, global_tokens=[0]) & Causal(), tokens=leaves[3])
    narrow = build(LongformerConfig(2, global_tokens=(0,)))
    narrow.load_state_dict(module.state_dict())
    torch.testing.assert_close(out, narrow(*leaves[:3], Causal(), tokens=leaves[3]), **EXACT)


def test_bias_scale_sink_and_softcap_reach_all_rows():
    module, leaves = build(LongformerConfig(4, global_tokens=(0, 5))), inputs(13)
    slopes = ALiBi.slopes(HQ).double()
    whole = [list(range(13))] * B
    out = module(*leaves[:3], tokens=leaves[3], bias=ALiBi(slopes))
    expected = by_rows(module, *leaves, [{0, 5}] * B, whole, lambda head, distance: -slopes[head] * distance.abs())
    same(out, expected, [*leaves, *module.parameters()])
    sink = torch.full((HQ,), 1000.0, dtype=torch.float64)
    assert module(*leaves[:3], tokens=leaves[3], sink=sink).abs().max() < 1e-20
    flat = module(*leaves[:3], tokens=leaves[3], scale=0.0)
    for row in (0, 5):
        torch.testing.assert_close(
            flat[:, :, row],
            module.global_value(leaves[3]).mean(1).unflatten(-1, (HKV, DV)).repeat_interleave(HQ // HKV, 1),
            **EXACT,
        )
    capped = module(*leaves[:3], tokens=leaves[3], softcap=1e-9)
    torch.testing.assert_close(capped, flat, rtol=1e-6, atol=1e-7)


def test_tokens_of_padding_are_not_read():
    module, leaves = build(LongformerConfig(4)), inputs(11)
    poisoned = [leaf.detach().clone() for leaf in leaves]
    for leaf in poisoned:
        (leaf if leaf.ndim == 3 else leaf.transpose(1, 2))[0, 7:] = float("nan")
        leaf.requires_grad_()
    padding = Padding([7, 11], queries=[7, 11])
    outs = [module(*some[:3], padding, tokens=some[3]) for some in (leaves, poisoned)]
    assert torch.equal(*outs)
    outs[1].sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())
    assert all(torch.isfinite(leaf.grad).all() for leaf in poisoned)


# --- in the modules ---------------------------------------------------------------------------------------------------


@looped("fused", [True, False])
@looped("bias", [True, False])
def test_projections_begin_as_copies_of_the_ordinary_ones(fused, bias):
    config = AttentionConfig(24, 4, 2, mechanism=LongformerConfig(4, global_tokens=(0, 2)), bias=bias, fused=fused)
    module = MultiHeadAttention(config).double()
    if bias:
        with torch.no_grad():
            for _, part in module.matrices():
                part.normal_()
        module.mechanism.begin_from(module.matrices())
    own = [module.mechanism.global_query, module.mechanism.global_key, module.mechanism.global_value]
    for layer, (weight, ordinary) in zip(own, module.matrices(), strict=True):
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layer.bias, torch.zeros_like(layer.bias) if ordinary is None else ordinary)
    # So at first it is ordinary attention with the pattern as a mask.
    plain = MultiHeadAttention(AttentionConfig(24, 4, 2, bias=bias, fused=fused)).double()
    plain.load_state_dict({n: t for n, t in module.state_dict().items() if not n.startswith("mechanism")})
    x = torch.randn(2, 29, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(module(x), plain(x, longformer(4, global_tokens=[0, 2])), **EXACT)
    module.reset_parameters()
    assert torch.equal(own[0].weight, module.matrices()[0][0])


def test_question_answering_in_an_encoder():
    torch.manual_seed(2)
    attention = AttentionConfig(24, 4, mechanism=LongformerConfig(4, global_tokens=()))
    encoder = Encoder(BlockConfig(attention, hidden=16), 2).double()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 23, 24, dtype=torch.float64)
    flags = torch.zeros(2, 23, dtype=torch.bool)
    flags[0, :5] = flags[1, :3] = True
    out = encoder(x, longformer(4, global_tokens=flags), padding=Padding([23, 17]))
    for item, (length, question) in enumerate(((23, 5), (17, 3))):
        alone = encoder(x[item : item + 1, :length], longformer(4, global_tokens=range(question)))
        torch.testing.assert_close(out[item, :length], alone[0], **EXACT)


def test_a_prompt_must_hold_all_global_tokens():
    torch.manual_seed(2)
    config = AttentionConfig(24, 4, mechanism=LongformerConfig(4, global_tokens=(0, 6)))
    module = MultiHeadAttention(config).double()
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    with torch.no_grad():
        whole, cache = module(x, Causal()), GrowingLayer()
        parts = [module(part, Causal(), cache=cache) for part in x.split([7, 1, 3, 2], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, **EXACT)
        cache = GrowingLayer()
        module(x[:, :6], Causal(), cache=cache)
        with pytest.raises(ValueError, match="pass all global tokens in the first call of a cache"):
            module(x[:, 6:7], Causal(), cache=cache)


@pytest.mark.parametrize("padded", [False, True])
def test_it_is_what_transformers_has(padded):
    transformers = pytest.importorskip("transformers")
    longformer_model = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    heads, width, length, window = 4, 24, 32, 8
    settings = transformers.LongformerConfig(
        hidden_size=width,
        num_attention_heads=heads,
        attention_window=[window],
        num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(4)
    theirs = longformer_model.LongformerSelfAttention(settings, 0).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = LongformerConfig(window, global_tokens=(0, 13)).build(
        HeadSizes(width, heads, heads, width // heads, width // heads)
    )
    ours = ours.double()
    with torch.no_grad():
        for name in ("query", "key", "value"):
            getattr(ours, f"global_{name}").load_state_dict(getattr(theirs, f"{name}_global").state_dict())
    x = torch.randn(2, length, width, dtype=torch.float64)
    lengths = [length, 21] if padded else [length, length]
    # As its model calls it: negative is padding, 0 local, positive global.
    said = torch.zeros(2, length, dtype=torch.float64)
    said[:, [0, 13]] = 10000.0
    for item, real in enumerate(lengths):
        said[item, real:] = -10000.0
    with torch.no_grad():
        expected = theirs(
            x, attention_mask=said, is_index_masked=said < 0, is_index_global_attn=said > 0, is_global_attn=True
        )[0]
        query, key, value = (
            getattr(theirs, name)(x).unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("query", "key", "value")
        )
        out = ours(query, key, value, Padding(lengths, queries=lengths), tokens=x).transpose(1, 2).flatten(2)
    # Its softmax is in float32: logits of a size of 10 or so are rounded, and with them the weights.
    bound = 64 * 2**-24 * float(value.abs().max())
    for item, real in enumerate(lengths):
        torch.testing.assert_close(out[item, :real], expected[item, :real], rtol=0, atol=bound)


# --- words ------------------------------------------------------------------------------------------------------------


@looped(
    "error, words, make",
    [
        (
            ValueError,
            "window: half of it lies on each side of the query, so it must be even, got 5",
            lambda: LongformerConfig(5),
        ),
        (ValueError, "window must be at least 2, got 0", lambda: LongformerConfig(0)),
        (ValueError, "dilation must be at least 1, got 0", lambda: LongformerConfig(4, dilation=0)),
        (ValueError, "global_tokens must be at least 0, got -1", lambda: LongformerConfig(4, global_tokens=(-1,))),
        (
            TypeError,
            "global_tokens: expected positions, a tuple of ints, got 3",
            lambda: LongformerConfig(4, global_tokens=3),
        ),
        (
            ValueError,
            "dilation: 3 of them, but there are 4 query heads",
            lambda: LongformerConfig(4, dilation=(1, 2, 3)).build(HeadSizes(E, HQ, HKV, D, DV)),
        ),
    ],
)
def test_parameters_without_sense_are_refused_by_name(error, words, make):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        make()


def test_calls_that_do_not_fit_are_refused():
    module, (query, key, value, tokens) = build(LongformerConfig(4)), inputs(11)
    with pytest.raises(ValueError, match="who sees whom is its own pattern, .* got Window"):
        module(query, key, value, Window(3, 3), tokens=tokens)
    with pytest.raises(ValueError, match="mask: longformer takes none that is placed by .at or .slice"):
        module(query, key, value, Causal().at(2), tokens=tokens)
    with pytest.raises(ValueError, match=r"tokens: expected .* projected, \(2, 11, 13\), got None"):
        module(query, key, value)
    with pytest.raises(ValueError, match=r"tokens: expected .* got \(2, 7, 13\)"):
        module(query, key, value, tokens=tokens[:, :7])


def test_it_is_a_value_that_json_knows():
    config = LongformerConfig(4, dilation=(1, 2), global_tokens=(0, 7))
    fields = json.loads(json.dumps(vars(config)))
    assert LongformerConfig(**fields) == config and hash(LongformerConfig(**fields)) == hash(config)
