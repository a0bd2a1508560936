"""Performer against the quadratic sum over pairs with the same features, and against softmax attention as they grow."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from looped import looped
from saccade import Causal, Padding, Window, attention
from saccade.benchmark.attention.memory import growth
from saccade.nn import AttentionConfig, MultiHeadAttention
from saccade.variants import (
    HeadSizes,
    PerformerAttention,
    PerformerConfig,
    PerformerState,
    draw_projection,
    performer_attention,
    random_features,
)
from saccade.variants._random_features import KINDS

B, HKV, GROUPS, D, DV, VECTORS = 2, 3, 2, 5, 7, 11
LENGTH = 149  # several chunks, and part of one
HEADS = HeadSizes(0, HKV * GROUPS, HKV, D, DV)


def inputs(Lq: int, Lk: int, *, size: float = 0.6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(Lq + 1000 * Lk)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    query, key = normal(B, HKV * GROUPS, Lq, D) * size, normal(B, HKV, Lk, D) * size
    return tuple(one.to(dtype).requires_grad_() for one in (query, key, normal(B, HKV, Lk, DV)))


def vectors(count: int = VECTORS, heads: int = HKV) -> Tensor:
    return draw_projection(count, D, heads=heads, generator=torch.Generator().manual_seed(3))


def dense(query: Tensor, key: Tensor, value: Tensor, mask, projection: Tensor, kind: str) -> Tensor:
    """Every pair, with the features of the formula: no chunks, no scales taken out."""
    root = query.shape[-1] ** -0.25
    spread = [one.repeat_interleave(GROUPS, 1) for one in (key, value)]
    projection = projection.repeat_interleave(GROUPS if len(projection) > 1 else 1, 0).to(query.dtype)
    pairs = random_features(query * root, projection, kind) @ random_features(spread[0] * root, projection, kind).mT
    shown = None if mask is None else mask.dense(query.shape[2], key.shape[2])
    pairs = pairs if shown is None else torch.where(shown, pairs, 0.0)
    total = pairs.sum(-1, keepdim=True)
    return (pairs @ spread[1]) / torch.where(total == 0, 1.0, total)


def close(ours: Tensor, theirs: Tensor, relative: float = 1e-12) -> None:
    """Equal up to a share of the largest element, or of 1: a gradient may be 0."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=relative * max(1.0, theirs.abs().max().item()))


PADDED = Padding(torch.tensor([LENGTH, 83]), torch.tensor([LENGTH, 83]))
MASKS = {"all": None, "causal": Causal(), "padded": PADDED, "both": Causal() & PADDED}


@pytest.mark.slow
@looped("kind", KINDS)
@looped("mask", MASKS.values())
@looped("heads", [1, HKV])
def test_it_is_the_sum_over_pairs_with_gradients(kind, mask, heads):
    tensors, projection = inputs(LENGTH, LENGTH, size=0.3), vectors(40, heads)
    out = performer_attention(*tensors, mask, projection=projection, kind=kind)
    expected = dense(*tensors, mask, projection, kind)
    close(out, expected)
    gradient = torch.randn(out.shape, dtype=out.dtype)
    for ours, theirs in zip(
        torch.autograd.grad(out, tensors, gradient), torch.autograd.grad(expected, tensors, gradient), strict=True
    ):
        close(ours, theirs)


@pytest.mark.slow
@looped("kind", KINDS)
@looped("lengths", [(1, 131), (67, 131), (131, 67), (131, 1), (1, 1), (64, 128), (131, 131)])
@looped("mask", [None, Causal()])
def test_queries_stand_bottom_right(kind, lengths, mask):
    tensors, projection = inputs(*lengths, size=0.3), vectors(40)
    out = performer_attention(*tensors, mask, projection=projection, kind=kind)
    expected = dense(*tensors, mask, projection, kind)
    close(out, expected)
    gradient = torch.randn(out.shape, dtype=out.dtype)
    for ours, theirs in zip(
        torch.autograd.grad(out, tensors, gradient), torch.autograd.grad(expected, tensors, gradient), strict=True
    ):
        close(ours, theirs)


@pytest.mark.parametrize("scale", [0.7, 0.0, -0.2])
def test_scale_is_that_of_the_logits(scale):
    query, key, value = inputs(13, 17)
    given = performer_attention(query, key, value, projection=vectors(), scale=scale)
    sign = math.copysign(1.0, scale)
    root = abs(scale) ** 0.5 * D**0.25
    close(given, performer_attention(sign * root * query, root * key, value, projection=vectors()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [None, Causal()], ids=["all", "causal"])
def test_it_approaches_softmax_attention_as_the_root_of_the_features(kind, mask):
    query, key, value = (one.detach() for one in inputs(23, 23, size=0.5))
    exact = attention(query, key, value, mask)
    counts = (32, 128, 512, 2048)
    errors = []
    for count in counts:
        off = [
            (performer_attention(query, key, value, mask, features=count, seed=seed, kind=kind) - exact).abs()
            for seed in range(8)
        ]
        errors.append(torch.stack(off).median().item())
    slope = math.log(errors[-1] / errors[0]) / math.log(counts[-1] / counts[0])
    assert -0.6 < slope < -0.4, errors
    assert errors[-1] < 0.02


def in_logarithms(query: Tensor, key: Tensor, value: Tensor, mask, projection: Tensor) -> Tensor:
    """The sum over pairs for positive features, every product as a logarithm: whatever the norms, nothing is lost."""
    root = query.shape[-1] ** -0.25
    x, y, w = query * root, key * root, projection.to(query.dtype)
    of_query = (x @ w.mT)[:, :, :, None]
    of_key = (y @ w.mT - y.square().sum(-1, keepdim=True) / 2)[:, :, None]
    pairs = torch.logsumexp(of_query + of_key, -1)
    pairs = pairs if mask is None else pairs.masked_fill(~mask.dense(query.shape[2], key.shape[2]), -torch.inf)
    return pairs.softmax(-1) @ value


@looped("size", [1, 5, 30, 100])
def test_no_row_underflows_where_all_keys_are_seen(size):
    # exp(-|y|^2 / 2) is 0 in float32 from |y| = 14 on; here norms reach 150.
    query, key, value = (one.detach() for one in inputs(37, 41, size=size, dtype=torch.float32))
    out = performer_attention(query[:, ::GROUPS], key, value, projection=vectors())
    expected = in_logarithms(*(one.double() for one in (query[:, ::GROUPS], key, value)), None, vectors())
    # Exponents up to size^2 D carry a rounding error of 2^-24 of that.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5 + 2e-6 * size**2)


def test_causally_norms_far_beyond_the_range_of_exp_are_right():
    # |y|^2 / 2 near 200 for the later keys: exp(-200) is 0 in float32.
    query, key, value = (one.detach() for one in inputs(149, 149, dtype=torch.float32))
    growing = torch.linspace(1, 20, 149)[:, None]
    query, key = query[:, ::GROUPS], key * growing
    out = performer_attention(query, key, value, Causal(), projection=vectors())
    expected = in_logarithms(*(one.double() for one in (query, key, value)), Causal(), vectors())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)
    # And where no key is small: from the first one on.
    out = performer_attention(query, key[:, :, 110:], value[:, :, 110:], projection=vectors())
    expected = in_logarithms(*(one.double() for one in (query, key[:, :, 110:], value[:, :, 110:])), None, vectors())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.slow
@looped("kind", KINDS)
@looped("size", [0.1, 1e2, 1e10, 1e30])
@looped("place", [1, 63, 64, 100, 148])
def test_later_keys_do_not_touch_a_row_by_a_bit(kind, size, place):
    query, key, value = (one.detach() for one in inputs(LENGTH, LENGTH, dtype=torch.float32))
    before = performer_attention(query, key, value, Causal(), projection=vectors(), kind=kind)
    key, value = key.clone(), value.clone()
    key[:, :, place:] = torch.randn_like(key[:, :, place:]) * size
    value[:, :, place:] *= 1e10
    after = performer_attention(query, key, value, Causal(), projection=vectors(), kind=kind)
    assert torch.equal(after[:, :, :place], before[:, :, :place])
    assert not torch.equal(after, before)


@pytest.mark.slow
@looped("kind", KINDS)
@looped("poison", [math.nan, -math.inf])
@looped("which", range(3))
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(kind, poison, which):
    place, item, head = 70, 1, 2
    clean = [one.detach() for one in inputs(LENGTH, LENGTH, dtype=torch.float32)]
    dirty = [one.clone() for one in clean]
    dirty[which][item, head, place, 1] = poison
    module = PerformerConfig(features=8, kind=kind).build(HEADS)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.requires_grad_() for one in tensors]
        out = module(*leaves, Causal())
        return out, *torch.autograd.grad(out[:, :, :place].sum(), leaves)

    (out, *gradients), (expected, *expected_gradients) = run(*dirty), run(*clean)
    touched = torch.zeros(out.shape[:3], dtype=torch.bool)
    if which == 0:
        touched[item, head, place] = True
    else:
        touched[item, GROUPS * head : GROUPS * (head + 1), place:] = True
    assert out[touched].isnan().all() and torch.equal(out[~touched], expected[~touched])
    assert all(torch.equal(one, two) for one, two in zip(gradients, expected_gradients, strict=True))
    _, state = module.step(*(one[:, :, : place + 1] for one in dirty))
    after, _ = module.step(*(one[:, :, place + 1 :] for one in dirty), state)
    assert torch.equal(after.isnan().all(-1), touched[:, :, place + 1 :])
    every = module(*dirty)
    assert torch.equal(every.isnan().any(-1), every.isnan().all(-1))
    assert every.isnan().any(-1).sum() == (1 if which == 0 else GROUPS * LENGTH)


@pytest.mark.slow
@looped("kind", KINDS)
@looped("causal", [False, True])
@looped("poison", [math.nan, math.inf, 1e30])
def test_padding_is_not_read_and_not_counted_in_any_scale(kind, causal, poison):
    lengths, real = torch.tensor([LENGTH, 83]), 83
    clean = [one.detach() for one in inputs(LENGTH, LENGTH, dtype=torch.float32)]
    mask = Padding(lengths, lengths) & Causal() if causal else Padding(lengths, lengths)

    def run(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        leaves = [one.requires_grad_() for one in (query, key, value)]
        out = performer_attention(*leaves, mask, projection=vectors(), kind=kind)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    dirty = [one.clone() for one in clean]
    for one in dirty:
        one[1, :, real:] = poison
    for ours, theirs in zip(run(*dirty), run(*clean), strict=True):
        assert torch.equal(ours, theirs)
        assert not ours[1, :, real:].any()
    alone = performer_attention(
        *(one[1:, :, :real] for one in clean), Causal() if causal else None, projection=vectors(), kind=kind
    )
    torch.testing.assert_close(run(*clean)[0][1:, :, :real], alone, rtol=0, atol=1e-5)


@looped("kind", ["positive", "hyperbolic"])
@looped("causal", [False, True])
def test_padding_has_no_part_in_what_is_taken_out_of_exponents(kind, causal):
    # Real keys are long: their exponents are near -400, those of padding, filled with 0, are 0.
    query, key, value = (one.detach() for one in inputs(LENGTH, LENGTH, dtype=torch.float32))
    key = key * 20 / key.norm(dim=-1, keepdim=True) * D**0.25 * 2**0.5
    kept = torch.ones(B, LENGTH, dtype=torch.bool)
    kept[1, :23] = False  # before the real ones, where a running maximum would meet it
    mask = Padding(kept, kept) & Causal() if causal else Padding(kept, kept)
    out = performer_attention(query, key, value, mask, projection=vectors(), kind=kind)
    alone = performer_attention(
        *(one[1:, :, 23:] for one in (query, key, value)), Causal() if causal else None, projection=vectors(), kind=kind
    )
    torch.testing.assert_close(out[1:, :, 23:], alone, rtol=0, atol=1e-3)
    assert alone.any(-1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [None, Causal()], ids=["all", "causal"])
@pytest.mark.parametrize("cached", [1, 12_000])
def test_blocks_are_the_whole(kind, mask, cached, monkeypatch):
    """1: rows of 64, of one head; 12,000 numbers: several heads at once, and a last run of fewer."""
    tensors, projection = inputs(LENGTH, LENGTH, size=0.3), vectors(20)

    def run() -> list[Tensor]:
        out = performer_attention(*tensors, mask, projection=projection, kind=kind)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    module = importlib.import_module("saccade.variants._random_features")
    monkeypatch.setattr(module, "_CACHED", 2**40)
    whole = run()
    monkeypatch.setattr(module, "_CACHED", cached)
    for ours, theirs in zip(run(), whole, strict=True):
        close(ours, theirs)


@pytest.mark.slow
@looped("kind", KINDS)
@looped("mask", [None, Causal()])
@looped("size", [0.0, 10.0, 1e3, 1e6, 1e19, 3e38])
@looped("dtype", [torch.float32, torch.bfloat16])
def test_extreme_norms_stay_finite(kind, mask, size, dtype):
    query, key, value = (one.detach() for one in inputs(97, 97, dtype=torch.float32))
    limit = torch.finfo(dtype).max
    leaves = [one.clamp(-limit, limit).to(dtype).requires_grad_() for one in (query * size, key * size, value)]
    out = performer_attention(*leaves, mask, projection=vectors(), kind=kind)
    assert out.isfinite().all()
    if kind != "trigonometric":
        assert (out.abs() <= value.abs().amax() * 1.01).all()
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert not gradient.isnan().any()
    assert leaves[2].grad is None


def test_a_row_whose_products_all_underflow_is_zero():
    # One vector of each sign: the query's weight is on the feature that the key does not have.
    projection = torch.tensor([[[1.0], [-1.0]]])
    query, value = torch.tensor([[[[30.0]]]]), torch.ones(1, 1, 1, 1)
    key = -query
    assert performer_attention(query, key, value, Causal(), projection=projection).item() == 1
    assert performer_attention(3 * query, 3 * key, value, Causal(), projection=projection).item() == 0
    assert performer_attention(3 * query, 3 * key, value, projection=projection).item() == 1  # never both ways


def test_sums_of_trigonometric_features_may_be_negative_or_zero():
    # cos(w (x - y)) at x = 0: -1 at y = 1, 0 at y = 1/2, up to rounding.
    projection = torch.full((1, 1, 1), math.pi)
    query, value = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), 5.0)
    for mask in (None, Causal()):
        read = [
            performer_attention(query, torch.full((1, 1, 1, 1), y), value, mask, projection=projection, kind=KINDS[1])
            for y in (1.0, 0.5)
        ]
        torch.testing.assert_close(read[0], value)
        assert read[1].item() == 0  # -4e-8 is the rounding error of cos


@looped("kind", KINDS)
@looped("mask", [None, Causal()])
@looped("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_summed_wide(kind, mask, dtype):
    narrow = [one.detach().to(dtype) for one in inputs(89, 89)]
    wide = performer_attention(*(one.float() for one in narrow), mask, projection=vectors(), kind=kind)
    out = performer_attention(*narrow, mask, projection=vectors(), kind=kind)
    assert out.dtype == dtype and torch.equal(out, wide.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = performer_attention(*(one.float() for one in narrow), mask, projection=vectors(), kind=kind)
    expected = [one.float().bfloat16() for one in narrow]
    assert torch.equal(cast, performer_attention(*expected, mask, projection=vectors(), kind=kind))


class Largest(TorchDispatchMode):
    """The most elements that any tensor made meanwhile has."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **(keywords or {}))
        for one in torch.utils._pytree.tree_leaves(made):
            if isinstance(one, Tensor):
                # A broadcast view takes no memory of its own.
                self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return made


@looped("kind", KINDS)
@looped("mask", [None, Causal()])
def test_nothing_is_as_large_as_pairs_or_as_features_times_width(kind, mask):
    length, features, width = 2048, 32, 8
    leaves = [torch.randn(1, 1, length, width, requires_grad=True) for _ in range(3)]
    with Largest() as largest:
        out = performer_attention(*leaves, mask, features=features, kind=kind)
        torch.autograd.grad(out.sum(), leaves)
    assert length * features <= largest.elements <= 2 * length * features
    assert 2 * length * features < min(length * features * width, length * length)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system tells no peak of memory")
@pytest.mark.parametrize("kind", KINDS)
def test_the_process_grows_by_no_more_than_a_few_features(kind):
    """By the compiled kernel too, whose memory PyTorch does not see."""
    length, features, width = 4096, 64, 32
    leaves = [torch.randn(1, 1, length, width, requires_grad=True) for _ in range(3)]

    def call(upto: int = length) -> tuple[Tensor, ...]:
        short = [one[:, :, :upto] for one in leaves]
        out = performer_attention(*short, Causal(), features=features, kind=kind)
        return torch.autograd.grad(out.sum(), leaves)

    call(64)
    bytes_needed, _ = growth(call)
    # 1 MiB of features of queries, keys and their gradients each; pairs would be 64 MiB, features x width 32.
    assert bytes_needed < 16 * length * features * 4 < length * features * width * 4


@pytest.mark.slow
@looped("kind", KINDS)
@looped("cuts", [[1, 2, 3], [64, 128], [1], [50, 51, 148], []])
def test_steps_are_the_parallel_form(kind, cuts):
    module = PerformerConfig(features=12, kind=kind).build(HEADS)
    tensors = inputs(LENGTH, LENGTH, size=0.3)
    whole = module(*tensors, Causal())
    state, parts = None, []
    for start, stop in itertools.pairwise([0, *cuts, LENGTH]):
        kept = state
        copies = None if state is None else [one.clone() for one in state]
        out, state = module.step(*(one[:, :, start:stop] for one in tensors), state)
        parts.append(out)
        assert kept is None or all(torch.equal(one, two) for one, two in zip(kept, copies, strict=True))
    joined = torch.cat(parts, 2)
    close(joined, whole, 1e-11 if kind == "trigonometric" else 1e-12)
    gradient = torch.randn(whole.shape, dtype=whole.dtype)
    for ours, theirs in zip(
        torch.autograd.grad(joined, tensors, gradient), torch.autograd.grad(whole, tensors, gradient), strict=True
    ):
        close(ours, theirs, 1e-10 if kind == "trigonometric" else 1e-12)


@looped("kind", KINDS)
@looped("cuts", [range(1, 13), [5]])
def test_padded_tokens_leave_no_trace_in_the_state(kind, cuts):
    length = 13
    module = PerformerConfig(features=12, kind=kind).build(HEADS)
    query, key, value = (one.detach() for one in inputs(length, length))
    kept = torch.ones(B, length, dtype=torch.bool)
    kept[0, :6] = kept[1, 3:9] = False  # on the left, and a hole
    for one in (query, key, value):
        one.masked_fill_(~kept[:, None, :, None], math.nan)
    state, parts = None, []
    for start, stop in itertools.pairwise([0, *cuts, length]):
        out, state = module.step(
            *(one[:, :, start:stop] for one in (query, key, value)), state, Padding(kept[:, start:stop])
        )
        parts.append(out)
    joined = torch.cat(parts, 2)
    assert not joined.masked_select(~kept[:, None, :, None]).any()
    for item in range(B):
        alone = [one[item : item + 1, :, kept[item]] for one in (query, key, value)]
        out, last = module.step(*alone)
        close(joined[item : item + 1, :, kept[item]], out, 1e-10)
        unit = (state.level - last.level[0])[item].exp()[:, None]
        close(state.weights[item] * unit, last.weights[0], 1e-10)
        close(state.sums[item] * unit[..., None], last.sums[0], 1e-10)


@looped("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
@looped("mask", [None, Causal()])
@looped("kind", KINDS)
def test_empty_sizes(sizes, mask, kind):
    batch, Lq, Lk = sizes
    leaves = [torch.randn(batch, 3, length, 5, requires_grad=True) for length in (Lq, Lk, Lk)]
    out = performer_attention(*leaves, mask, features=8, kind=kind)
    assert out.shape == (batch, 3, Lq, 5) and not out.any()
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert not gradient.any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_of_padding_alone_is_zero(kind):
    leaves = inputs(9, 9)
    for mask in (Padding(torch.tensor([9, 0])), Padding(torch.tensor([9, 0])) & Causal()):
        out = performer_attention(*leaves, mask, projection=vectors(), kind=kind)
        assert not out[1].any() and out[0].all()
        for gradient in torch.autograd.grad(out.sum(), leaves):
            assert gradient.isfinite().all() and not gradient[1].any()


def test_vectors_that_are_not_given_come_from_the_seed():
    query, key, value = inputs(5, 5)
    drawn = draw_projection(12, D, heads=HKV, generator=torch.Generator().manual_seed(8))
    out = performer_attention(query, key, value, features=12, seed=8)
    assert torch.equal(out, performer_attention(query, key, value, projection=drawn))
    assert not torch.equal(out, performer_attention(query, key, value, features=12, seed=9))


def passes(module: PerformerAttention, count: int) -> list[Tensor]:
    """The vectors that each of so many passes leaves in force."""
    seen = []
    for _ in range(count):
        module(*inputs(3, 3))
        seen.append(module.projection)
    return seen


def test_vectors_are_redrawn_in_training_alone():
    module = PerformerConfig(features=8, redraw_every=3).build(HEADS)
    first = module.projection.clone()
    seen = passes(module, 7)
    assert [torch.equal(one, first) for one in seen] == [True] * 3 + [False] * 4
    assert torch.equal(seen[3], seen[5]) and not torch.equal(seen[5], seen[6])
    module.eval()
    assert all(torch.equal(one, seen[6]) for one in passes(module, 5))
    module.train()
    module.step(*inputs(3, 3))
    assert torch.equal(module.projection, seen[6]) and module.passes == 7
    kept = PerformerConfig(features=8).build(HEADS)
    assert len({id(one) for one in passes(kept, 9)}) == 1


def test_vectors_of_one_length_estimate_their_own_kernel():
    """Over the sphere of radius R in three dimensions the mean of exp(w.z) is sinh(R |z|) / (R |z|)."""
    module = PerformerConfig(features=6007, vector_length=0.7).build(HeadSizes(3, 1, 1, 3, 3))
    radius, (x, y) = 0.7 * 3**0.5, torch.randn(2, 11, 3, dtype=torch.float64)
    vectors = module.projection[0].double()
    torch.testing.assert_close(vectors.norm(dim=1), torch.full((6007,), radius, dtype=torch.float64), rtol=1e-6, atol=0)
    found = (vectors @ (x + y).T).exp()
    far = radius * (x + y).norm(dim=1)
    # Five standard errors of independent vectors; those of a block err less.
    assert ((found.mean(0) - far.sinh() / far).abs() < 5 * found.std(0) / 6007**0.5).all()


def test_training_goes_on_from_a_checkpoint_with_the_same_vectors():
    module, other = (PerformerConfig(features=8, redraw_every=2).build(HEADS) for _ in range(2))
    assert not torch.equal(module.projection, other.projection)
    passes(module, 3)
    other.load_state_dict(module.state_dict())
    assert torch.equal(module.projection, other.projection)
    for one, two in zip(passes(module, 6), passes(other, 6), strict=True):
        assert torch.equal(one, two)


def test_the_seed_of_the_program_decides_the_vectors():
    torch.manual_seed(4)
    module = PerformerConfig(features=8).build(HEADS)
    torch.manual_seed(4)
    assert torch.equal(module.projection, PerformerConfig(features=8).build(HEADS).projection)
    before = module.projection
    module.reset_parameters()
    assert not torch.equal(module.projection, before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_in_backward_sees_the_same_vectors(reentrant):
    def run(again: bool) -> tuple[list[Tensor], Tensor, int]:
        torch.manual_seed(6)
        module = PerformerConfig(features=8, redraw_every=1).build(HEADS)
        leaves = inputs(7, 7)
        # Three passes, each with vectors of its own, before the first of them is computed again.
        outs = [checkpoint(module, *leaves, use_reentrant=reentrant) if again else module(*leaves) for _ in range(3)]
        torch.stack(outs).square().sum().backward()
        assert not torch.equal(outs[0], outs[1])
        return [one.grad for one in leaves], module.projection, int(module.passes)

    (plain, vectors_plain, counted), (again, vectors_again, counted_again) = run(False), run(True)
    for one, two in zip(plain, again, strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-12)
    assert torch.equal(vectors_plain, vectors_again)
    assert counted == counted_again == 3


def test_the_layer_holds_it_and_decodes():
    layer = MultiHeadAttention(AttentionConfig(width=12, heads=4, kv_heads=2, mechanism=PerformerConfig(features=8)))
    x = torch.randn(2, 11, 12)
    whole, cache = layer(x, Causal()), layer.cache()
    parts = [layer(x[:, start:stop], Causal(), cache=cache) for start, stop in ((0, 6), (6, 7), (7, 11))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=2e-5)
    assert "mechanism.projection" in layer.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_where_all_keys_are_seen(kind):
    query, key, value = (one.detach() for one in inputs(2, 3, size=0.3))
    tensors = [one.requires_grad_() for one in (query[:1, :GROUPS], key[:1, :1], value[:1, :1, :, :2])]
    projection = vectors(4, 1).double()
    assert torch.autograd.gradgradcheck(
        lambda *given: performer_attention(*given, projection=projection, kind=kind), tensors
    )


def test_no_second_derivative_where_causal():
    leaves = inputs(5, 5)
    out = performer_attention(*leaves, Causal(), projection=vectors())
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out.sum(), leaves[0], create_graph=True)


def test_refusals_of_the_function():
    query, key, value = inputs(5, 5)
    for arguments, error, words in (
        (dict(kind="relu"), ValueError, "kind: expected one of positive, trigonometric, hyperbolic; got 'relu'"),
        (
            dict(projection=torch.zeros(2, 4, 5)),
            ValueError,
            r"projection: expected shape \(3 or 1, at least 1, 5\), got",
        ),
        (dict(projection=torch.zeros(3, 4, 6)), ValueError, r"got \(3, 4, 6\)"),
        (dict(projection=torch.zeros(3, 0, 5)), ValueError, r"got \(3, 0, 5\)"),
        (dict(projection=torch.zeros(4, 5)), ValueError, r"got \(4, 5\)"),
        (
            dict(projection=torch.zeros(3, 4, 5).long()),
            TypeError,
            "expected a floating-point tensor .* got torch.int64",
        ),
        (dict(projection=7), TypeError, "got int"),
        (dict(projection=vectors(), features=4), ValueError, "features: the projection sets their number"),
        (dict(features=0), ValueError, "features must be at least 1, got 0"),
        (dict(features=2.0), TypeError, "features must be an int"),
        (dict(features=5, kind="hyperbolic"), ValueError, "come in pairs, expected an even number, got 5"),
        (
            dict(mask=Window(2, 2)),
            ValueError,
            "mask: performer takes .* since it forms no pairs that a mask could hide",
        ),
        (dict(mask=torch.ones(5, 5)), TypeError, "mask"),
        (dict(scale=math.nan), ValueError, "scale must be finite"),
    ):
        with pytest.raises(error, match=words):
            performer_attention(query, key, value, **arguments)


@looped(
    ("arguments", "error", "words"),
    [
        (dict(features=0), ValueError, "features must be at least 1, got 0"),
        (dict(features=True), TypeError, "features must be an int"),
        (dict(features=3, kind="trigonometric"), ValueError, "expected an even number, got 3"),
        (dict(kind="cosine"), ValueError, "kind: expected one of"),
        (dict(orthogonal=1), TypeError, "orthogonal: expected True or False, got int"),
        (dict(redraw_every=0), ValueError, "redraw_every must be at least 1, got 0"),
        (dict(redraw_every=0.5), TypeError, "redraw_every must be an int"),
        (dict(vector_length=0), ValueError, "vector_length: expected a positive number, got 0"),
        (dict(vector_length="1"), TypeError, "vector_length: expected a number or None, got str"),
    ],
)
def test_refusals_of_the_configuration(arguments, error, words):
    with pytest.raises(error, match=words):
        PerformerConfig(**arguments)


def test_refusals_of_a_step():
    module = PerformerConfig(features=8).build(HEADS)
    query, key, value = inputs(4, 4)
    _, state = module.step(query, key, value)
    for wrong, error, words in (
        (tuple(state), TypeError, "state: expected the PerformerState of an earlier step or None, got tuple"),
        (PerformerState(*(x[:1] for x in state)), ValueError, r"sums of shape \(2, 3, 8, 7\) .*, got \(1, 3, 8, 7"),
        (state._replace(level=state.level[:, :1]), ValueError, r"expected level of shape \(2, 3\) .*, got \(2, 1\)"),
        (state._replace(weights=state.sums), ValueError, r"state: expected weights of shape \(2, 3, 8\) "),
        (
            PerformerState(*(one.float() for one in state)),
            ValueError,
            "state: expected sums in torch.float64 .*, got torch.float32",
        ),
    ):
        with pytest.raises(error, match=words):
            module.step(query, key, value, wrong)
    with pytest.raises(ValueError, match="key has length .* 3, expected query's 4"):
        module.step(query, key[:, :, 1:], value[:, :, 1:])
    with pytest.raises(ValueError, match=r"mask: expected None or Padding\(...\), .*got Causal\(\)"):
        module.step(query, key, value, state, Causal())
    with pytest.raises(ValueError, match="projection: expected shape"):
        module.step(query[:, :4], key[:, :2], value[:, :2])
