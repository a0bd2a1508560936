"""What a transformers attention function is given, in Saccade's terms: the same attention as eager's, form by form."""

from __future__ import annotations

import pytest
import torch

import saccade
from integrations.transformers.families import BY_NAME, FAMILIES, batch, make
from integrations.transformers.judge import judging
from looped import looped
from saccade import Causal, Documents, Padding, Predicate, Window
from saccade.interception._hooks.transformers import MaskTensor, UnknownAttention, functions_wrapped_by, meaning_of

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 5, 11, 7, 13
NAMES = [family.name for family in FAMILIES]
# transformers has no softcap and no sinks in its sdpa.
IMPLEMENTED = [
    (name, how)
    for name in NAMES
    for how in ("eager", "sdpa", "judge")
    if how != "sdpa" or name not in ("gemma2", "gpt-oss")
]
LEAST = torch.finfo(torch.float32).min


class Attention(torch.nn.Module):
    """As much of an attention module as is looked at."""

    def __init__(self, is_causal=True, training=False, **more):
        super().__init__()
        self.is_causal = is_causal
        self.train(training)
        for name, value in more.items():
            setattr(self, name, value)


class CrossAttention(Attention):
    pass


def tensors(length_q=LQ, length_k=LK):
    return torch.randn(B, HQ, length_q, D), torch.randn(B, HKV, length_k, D), torch.randn(B, HKV, length_k, DV)


def meaning(mask, module=None, length_q=LQ, length_k=LK, **more):
    return meaning_of(module or Attention(), *tensors(length_q, length_k), mask, **more)


def observed(model, given):
    """(what eager or another computed, the weights it gave, what it was asked) for every call of a forward."""
    calls = []

    def wrap(function):
        def watching(module, query, key, value, attention_mask, **more):
            out, weights = function(module, query, key, value, attention_mask, **more)
            calls.append((out, weights, meaning_of(module, query, key, value, attention_mask, **more)))
            return out, weights

        return watching

    with torch.no_grad(), functions_wrapped_by(wrap):
        model(**given, output_attentions=True)
    return calls


@pytest.mark.slow
@looped("side", ["right", "left"])
@looped(("name", "how"), IMPLEMENTED)
def test_the_meaning_of_every_call_gives_what_the_model_got(name, how, side):
    family = BY_NAME[name]
    with judging():
        calls = observed(make(family, how), batch(family, side=side))
    assert len(calls) == (6 if family.encoder_decoder else 2)
    for out, weights, meant in calls:
        again = saccade.attention(meant.query, meant.key, meant.value, **meant.arguments(), backend="reference")
        seeing = rows_that_see(meant)
        torch.testing.assert_close(again.transpose(1, 2)[seeing], out[seeing], rtol=1e-4, atol=1e-4)
        if weights is not None:
            what = {key: x for key, x in meant.arguments().items() if key != "dropout"}
            ours = saccade.attention_weights(meant.query, meant.key, **what)
            torch.testing.assert_close(
                ours.transpose(1, 2)[seeing], weights.transpose(1, 2)[seeing], rtol=1e-4, atol=1e-5
            )


def rows_that_see(meant):
    """(B, Lq) bool: the rows that see some key; eager averages over all keys in the others."""
    batch_size, _, length_q, _ = meant.query.shape
    mask = (
        meant.mask
        if isinstance(meant.mask, torch.Tensor) or meant.mask is None
        else meant.mask.dense(length_q, meant.key.shape[2])
    )
    if mask is None:
        return torch.ones(batch_size, length_q, dtype=torch.bool)
    mask = mask if mask.dim() == 4 else mask[None, None]
    return mask.any(-1)[:, 0].expand(batch_size, -1)


@pytest.mark.slow
@looped("how", ["eager", "sdpa"])
@looped("name", ["bert", "llama", "t5", "whisper"])
def test_padded_queries_are_known_for_what_they_are(name, how):
    family = BY_NAME[name]
    given = batch(family)
    kinds = set()
    for _, _, meant in observed(make(family, how), given):
        if meant.real is None:
            kinds.add("not known")
            continue
        length = meant.query.shape[2]
        tokens = given["attention_mask" if length == 13 else "decoder_attention_mask"].bool()
        assert torch.equal(meant.real, tokens)
        counted = meant.counted_mask.dense(length, meant.key.shape[2])
        assert torch.equal(counted.any(-1)[:, 0], tokens)
        kinds.add("known")
    # Cross-attention never knows; nor does Whisper's encoder, which has no mask.
    assert kinds == {"bert": {"known"}, "llama": {"known"}}.get(name, {"known", "not known"})


class TestNoMask:
    def test_it_is_causal_where_the_module_is(self):
        assert meaning(None, length_k=LQ).mask == Causal()
        assert meaning(None, Attention(is_causal=False)).mask is None
        assert meaning(None, Attention(is_causal=False), length_k=LQ, is_causal=True).mask == Causal()
        assert meaning(None, is_causal=False, length_k=LQ).mask is None

    def test_a_module_that_does_not_say_is_causal(self):
        bare = torch.nn.Module()
        assert meaning(None, bare, length_k=LQ).mask == Causal()

    def test_one_query_sees_everything(self):
        given = meaning(None, length_q=1)
        assert given.mask is None and given.key.shape[2] == LK

    def test_the_unused_keys_of_a_static_cache_are_cut_off(self):
        bias = torch.randn(1, HQ, LQ, LK)
        given = meaning(None, position_bias=bias)
        assert given.key.shape[2] == given.value.shape[2] == LQ and given.mask == Causal()
        assert torch.equal(given.bias, bias[..., :LQ])

    def test_a_window(self):
        assert meaning(None, length_k=LQ, sliding_window=3).mask == Causal() & Window(2, None)
        assert meaning(None, length_k=LQ, sliding_window=LQ).mask == Causal()
        assert meaning(None, Attention(is_causal=False), sliding_window=LK).mask is None
        with pytest.raises(UnknownAttention, match="sliding_window: 3 keys of 11, without a mask and not causal"):
            meaning(None, Attention(is_causal=False), sliding_window=3)


class TestFourAxes:
    bits = (torch.rand(B, 1, LQ, LK, generator=torch.Generator().manual_seed(1)) < 0.5).index_fill(
        2, torch.tensor([2]), False
    )

    def test_booleans_are_what_is_seen(self):
        given = meaning(self.bits)
        assert torch.equal(given.mask, self.bits) and given.bias is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_the_least_number_and_minus_infinity_mean_masked(self, dtype):
        for least in (torch.finfo(dtype).min, float("-inf")):
            added = torch.zeros(B, 1, LQ, LK, dtype=dtype).masked_fill(~self.bits, least)
            given = meaning(added)
            assert torch.equal(given.mask, self.bits) and given.bias is None
        assert not given.mask[:, :, 2].any()  # also a row with nothing else: it sees nothing

    def test_other_numbers_are_added(self):
        scores = torch.randn(B, 1, LQ, LK)
        bias = torch.randn(1, HQ, LQ, LK)
        given = meaning(scores.masked_fill(~self.bits, LEAST), position_bias=bias)
        assert torch.equal(given.mask, self.bits)
        assert torch.equal(given.bias, bias + scores.masked_fill(~self.bits, 0.0))
        assert torch.equal(meaning(torch.full((B, 1, LQ, LK), -1e4)).bias, torch.full((B, 1, LQ, LK), -1e4))

    def test_a_mask_with_a_gradient_is_a_bias(self):
        scores = torch.randn(B, 1, LQ, LK, requires_grad=True)
        given = meaning(scores)
        assert (given.mask is None and given.bias is scores) or torch.equal(given.bias, scores)
        assert given.bias.requires_grad

    def test_a_mask_longer_than_the_keys_is_cut(self):
        longer = torch.cat([self.bits, ~self.bits], -1)
        assert torch.equal(meaning(longer).mask, self.bits)
        wrapped = MaskTensor(Causal().at(0), (B, 1, LQ, LK + 5), "cpu")
        assert torch.equal(meaning(wrapped).mask[0, 0], Causal().at(0).dense(LQ, LK + 5)[0, 0, :, :LK])

    @pytest.mark.parametrize("shape", [(LQ, LK - 2), (LQ - 1, LK), (1, LK)])
    def test_a_compact_mask_for_other_lengths_is_the_booleans_it_was_made_for(self, shape):
        """Its causality would otherwise be placed anew, and hide other keys than the model's mask does."""
        wrapped = MaskTensor(Causal(), (B, 1, *shape), "cpu")
        given = meaning(wrapped)
        assert torch.equal(given.mask, wrapped.dense())
        if shape != (1, LK):
            with pytest.raises(ValueError, match="mask"):
                saccade.attention(given.query, given.key, given.value, **given.arguments())

    def test_rows_of_a_square_whose_own_key_is_hidden_are_padding(self):
        kept = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool()
        seen = (Causal() & Padding(kept)).dense(LQ, LQ)
        assert torch.equal(meaning(seen, length_k=LQ).real, kept)
        for module in (
            CrossAttention(),
            Attention(is_causal=False, is_decoder=True),
            Attention(is_cross_attention=True),
        ):
            assert meaning(seen, module, length_k=LQ).real is None
        assert meaning(seen[:, :, :2]).real is None

    def test_other_kinds_are_refused(self):
        with pytest.raises(UnknownAttention, match="boolean or floating point, got torch.int64"):
            meaning(self.bits.long())
        with pytest.raises(UnknownAttention, match=r"\(B, 1, Lq, Lk\) or \(B, Lk\).*got a tensor \(2, 5, 11\)"):
            meaning(self.bits[:, 0])
        with pytest.raises(UnknownAttention, match="got str"):
            meaning("causal")


class TestTwoAxes:
    """As flash-attention's functions get them."""

    kept = torch.tensor([[1] * LQ, [1, 1, 1, 0, 0]])

    def test_padding_with_causality_on_top(self):
        given = meaning(self.kept, length_k=LQ)
        assert torch.equal(given.mask.dense(LQ, LQ), (Causal() & Padding(self.kept.bool())).dense(LQ, LQ))
        assert torch.equal(given.real, self.kept.bool())
        given = meaning(self.kept, Attention(is_causal=False), length_k=LQ)
        assert given.mask == Padding(self.kept.bool()) and given.real is None

    def test_a_window_on_top(self):
        given = meaning(self.kept, length_k=LQ, sliding_window=2)
        wanted = Causal() & Window(1, None) & Padding(self.kept.bool())
        assert torch.equal(given.mask.dense(LQ, LQ), wanted.dense(LQ, LQ))

    def test_one_query_after_a_cache(self):
        kept = torch.ones(B, LK, dtype=torch.int64)
        kept[1, :4] = 0
        given = meaning(kept, length_q=1, sliding_window=9)
        assert torch.equal(given.mask.dense(1, LK), (Window(8, None) & Padding(kept.bool())).dense(1, LK))

    def test_the_keys_of_a_static_cache_beyond_it_are_hidden(self):
        given = meaning(self.kept, Attention(is_causal=False))
        assert given.mask == Padding(torch.nn.functional.pad(self.kept.bool(), (0, LK - LQ)))


class TestBlockMasks:
    def block_mask(self, function):
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(function, B, None, LQ, LK, device="cpu", _compile=False)

    def test_transformers_own_is_read(self):
        from transformers import masking_utils as made

        kept = torch.ones(B, LK + 2, dtype=torch.bool)
        kept[1, :4] = False
        inside = made.and_masks(made.sliding_window_causal_mask_function(3), made.padding_mask_function(kept))
        mask = self.block_mask(made.add_offsets_to_mask_function(inside, LK - LQ + 2, 2))
        given = meaning(mask)
        assert "Predicate" not in repr(given.mask) and "Window(2, None)" in repr(given.mask)
        wanted = Causal() & Window(2, None) & Padding(kept[:, 2:])
        assert torch.equal(given.mask.dense(LQ, LK), wanted.dense(LQ, LK))

    def test_another_is_asked_pair_by_pair(self):
        def odd(b, h, q, k):
            return (q + k + b) % 2 == 0

        given = meaning(self.block_mask(odd))
        q, k = torch.arange(LQ)[:, None], torch.arange(LK)
        assert isinstance(given.mask.part, Predicate)
        assert torch.equal(given.mask.dense(LQ, LK)[1, 0], (q + k + 1) % 2 == 0)


def test_masks_of_saccade_are_taken_as_they_are():
    assert meaning(Window(3, 0)).mask == Window(3, 0)
    wrapped = MaskTensor(Window(3, 0), (B, 1, LQ, LK), "cpu", torch.ones(B, LQ, dtype=torch.bool))
    given = meaning(wrapped)
    assert given.mask == Window(3, 0) and given.real.all() and given.counted_mask == Window(3, 0)


def test_scale_softcap_and_sink():
    sinks = torch.randn(HQ)
    given = meaning(None, Attention(is_causal=False), scaling=0.3, softcap=5, s_aux=sinks.view(1, HQ, 1, 1))
    assert (given.scale, given.softcap) == (0.3, 5) and torch.equal(given.sink, sinks)
    assert meaning(None, scaling=None, length_k=LQ).scale is None
    with pytest.raises(UnknownAttention, match=r"one sink per query head \(6\), got \(5,\)"):
        meaning(None, s_aux=torch.randn(HQ - 1), length_k=LQ)


def test_a_learned_scale_goes_into_the_query():
    query, key, value = tensors()
    scale = torch.tensor(0.7, requires_grad=True)
    given = meaning_of(Attention(), query, key, value, None, scaling=scale, is_causal=False)
    assert given.scale == 1.0
    given.query.sum().backward()
    torch.testing.assert_close(scale.grad, query.sum())


def test_dropout_is_of_training_alone():
    assert meaning(None, Attention(training=True), dropout=0.4, length_k=LQ).dropout == 0.4
    assert meaning(None, Attention(), dropout=0.4, length_k=LQ).dropout == 0.0


def test_queries_learned_once_for_all_items():
    _, key, value = tensors()
    given = meaning_of(Attention(False), torch.randn(1, HQ, LQ, D), key, value, None)
    assert given.query.shape == (B, HQ, LQ, D)


def test_documents_as_flash_attention_is_told_of_them():
    query = torch.randn(1, HQ, LQ, D)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    given = meaning_of(Attention(), query, query, query, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    wanted = Causal() & Documents([0, 0, 1, 1, 1])
    assert torch.equal(given.mask.dense(LQ, LQ), wanted.dense(LQ, LQ))
    with pytest.raises(UnknownAttention, match="must come together, with one row"):
        meaning(None, length_k=LQ, cu_seq_lens_q=ends)
