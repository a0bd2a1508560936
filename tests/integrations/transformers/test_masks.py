"""Masks of transformers as compact values: equal to its own booleans pair by pair, and never Lq x Lk where known."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    find_packed_sequence_indices,
    or_masks,
    packed_sequence_compatibility_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import saccade
from saccade import Causal
from saccade.integrations.transformers import register, unregister
from saccade.integrations.transformers._attention import saccade_mask
from saccade.interception._hooks.transformers import MaskTensor, UnknownAttention, _mask_functions as reading

BATCH = 3


@st.composite
def problems(draw):
    """Sizes as caches give them: the queries stand somewhere among the keys."""
    queries = draw(st.integers(1, 7))
    before, after = draw(st.integers(0, 11)), draw(st.sampled_from([0, 0, 5]))
    keys_from = draw(st.integers(0, before))
    return {
        "q_length": queries,
        "q_offset": before,
        "kv_offset": keys_from,
        "kv_length": before - keys_from + queries + after,
    }


@st.composite
def functions(draw, sizes):
    """One of the mask functions that transformers itself makes, for those sizes."""
    reach = sizes["kv_offset"] + sizes["kv_length"]
    width = draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["causal", "full", "window", "both ways", "chunks", "blocks", "union"]))
    padding = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=BATCH, max_size=BATCH)))
    ids = torch.tensor(draw(st.lists(st.integers(-1, 2), min_size=reach, max_size=reach))).expand(BATCH, -1)
    return {
        "causal": causal_mask_function,
        "full": bidirectional_mask_function,
        "window": sliding_window_causal_mask_function(width),
        "both ways": sliding_window_bidirectional_mask_function(width),
        "chunks": chunked_causal_mask_function(width, padding),
        "blocks": or_masks(sliding_window_causal_mask_function(width), blockwise_overlay(ids)),
        "union": or_masks(causal_mask_function, and_masks(bidirectional_mask_function, blockwise_overlay(ids))),
    }[kind]


@st.composite
def paddings(draw, sizes):
    """The 2-D mask of the tokens so far: all of them, or some; sometimes none of one item."""
    seen = sizes["q_offset"] + sizes["q_length"]
    if draw(st.booleans()):
        return None
    bits = draw(st.lists(st.booleans(), min_size=BATCH * seen, max_size=BATCH * seen))
    return torch.tensor(bits).view(BATCH, seen)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150)
def test_every_pair_is_as_transformers_says(data):
    sizes = data.draw(problems())
    function, padding = data.draw(functions(sizes)), data.draw(paddings(sizes))
    ours = saccade_mask(BATCH, mask_function=function, attention_mask=padding, **sizes)
    theirs = sdpa_mask(BATCH, mask_function=function, attention_mask=padding, allow_is_causal_skip=False, **sizes)
    assert type(ours) is MaskTensor and ours._dense is None
    assert torch.equal(ours.dense(), theirs.expand(BATCH, 1, sizes["q_length"], sizes["kv_length"]))
    assert "FromTensor" not in repr(ours)
    if ours.tokens is not None:
        end = sizes["q_offset"] + sizes["q_length"]
        assert torch.equal(ours.tokens, padding[:, sizes["q_offset"] : end])
    else:
        assert padding is None or padding[:, sizes["kv_offset"] :].all()


@given(st.lists(st.integers(1, 6), min_size=2, max_size=4), st.integers(1, 5))
def test_packed_rows(lengths, width):
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    total = positions.shape[1]
    for inside in (causal_mask_function, sliding_window_causal_mask_function(width)):
        packed = packed_sequence_compatibility_function(inside, positions, find_packed_sequence_indices(positions))
        ours = saccade_mask(1, total, total, mask_function=packed)
        assert torch.equal(ours.dense(), sdpa_mask(1, total, total, mask_function=packed, allow_is_causal_skip=False))
        assert "Documents" in repr(ours) and "FromTensor" not in repr(ours)


def test_packed_positions_that_do_not_rise_by_one_are_asked_pair_by_pair():
    positions = torch.tensor([[0, 2, 4, 0, 1, 2]])
    ids = find_packed_sequence_indices(positions)
    packed = packed_sequence_compatibility_function(sliding_window_causal_mask_function(2), positions, ids.clone() * 0)
    ours = saccade_mask(1, 6, 6, mask_function=packed)
    assert torch.equal(ours.dense(), sdpa_mask(1, 6, 6, mask_function=packed, allow_is_causal_skip=False))


def test_a_function_of_somebody_elses_becomes_the_booleans_it_means():
    def every_other(b, h, q, k):
        return (q - k) % 2 == 0

    function = and_masks(causal_mask_function, every_other)
    padding = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    for vmap in (False, True):
        ours = saccade_mask(2, 5, 5, mask_function=function, attention_mask=padding, use_vmap=vmap)
        theirs = sdpa_mask(2, 5, 5, mask_function=function, attention_mask=padding, use_vmap=vmap)
        assert "FromTensor" in repr(ours) and torch.equal(ours.dense(), theirs)
        assert torch.equal(ours.tokens, padding)


def test_all_of_transformers_own_mask_functions_are_known():
    """A new one in a later version is no error, but shows here."""
    names = {name for name in vars(masking_utils) if name[0] != "_"}  # compiled code leaves names there
    made = {name for name in names if name.endswith(("_overlay", "_masks", "padding_mask_function"))}
    known = {
        "and_masks",
        "or_masks",
        "sliding_window_overlay",
        "sliding_window_bidirectional_overlay",
        "chunked_overlay",
        "blockwise_overlay",
        "padding_mask_function",
    }
    assert made == known and len(reading._readers()) == len(known) + 2


def held_by(mask):
    """Bytes of the tensors that a mask is made of."""
    return (
        sum(t.nbytes for t in vars(mask).values() if isinstance(t, torch.Tensor))
        + sum(table.values.nbytes for table in mask.tables() if hasattr(table, "values"))
        + sum(held_by(part) for part in mask._children())
    )


def test_what_a_mask_holds_is_linear():
    held = []
    for length in (4096, 8192):
        padding = torch.ones(2, length, dtype=torch.bool)
        padding[1, :7] = False
        function = sliding_window_causal_mask_function(64)
        mask = saccade_mask(2, length, length, mask_function=function, attention_mask=padding)
        held.append(held_by(mask.mask))
        assert mask._dense is None
    assert held == [2 * 4096, 2 * 8192]  # a flag for each key of each item; dense, 2 x L x L flags


class TestMaskTensor:
    mask = MaskTensor(Causal(), (2, 1, 3, 5), "cpu")
    bits = torch.ones(3, 5, dtype=torch.bool).tril(2).expand(2, 1, 3, 5)

    def fresh(self):
        return MaskTensor(Causal(), (2, 1, 3, 5), "cpu")

    def test_what_it_says_of_itself(self):
        mask = self.fresh()
        assert (mask.shape, mask.dtype, mask.ndim, mask.device.type) == ((2, 1, 3, 5), torch.bool, 4, "cpu")
        assert repr(mask) == "MaskTensor(Causal(), shape=(2, 1, 3, 5))"
        assert mask._dense is None

    def test_any_operation_sees_the_booleans(self):
        assert torch.equal(self.fresh()[:, :, :2, :4], self.bits[:, :, :2, :4])
        assert torch.equal(~self.fresh(), ~self.bits)
        assert torch.equal(self.fresh() & self.bits, self.bits)
        assert torch.equal(torch.where(self.fresh(), 1.0, 0.0), self.bits.float())
        assert torch.equal(self.fresh().to(torch.float64), self.bits.double())
        assert torch.equal(torch.cat([self.fresh(), self.bits]), torch.cat([self.bits, self.bits]))
        assert type(self.fresh()[0]) is torch.Tensor

    def test_moving_it_where_it_is_and_copying_keep_it_compact(self):
        for mask in (self.fresh().to("cpu"), self.fresh().detach(), copy.deepcopy(self.fresh())):
            assert type(mask) is MaskTensor and mask._dense is None
        again = pickle.loads(pickle.dumps(self.fresh()))
        assert again.mask == Causal() and again.shape == (2, 1, 3, 5)

    def test_adding_it_to_scores_is_refused(self):
        scores = torch.randn(2, 4, 3, 5)
        for add in (lambda: scores + self.fresh(), lambda: scores.add_(self.fresh()), lambda: self.fresh() + scores):
            with pytest.raises(UnknownAttention, match='added to scores: this model does not use.*use "eager"'):
                add()


@pytest.mark.parametrize("kind", ["Bloom", "Mpt"])
def test_a_model_that_does_not_look_its_attention_up_is_refused(kind):
    """Bloom adds its mask to its scores, Mpt fills where it is True: with these booleans both would be wrong."""
    import transformers

    sizes = {
        "Bloom": {"hidden_size": 33, "n_head": 3, "n_layer": 1},
        "Mpt": {"d_model": 33, "n_heads": 3, "n_layers": 1},
    }
    register()
    try:
        config = getattr(transformers, f"{kind}Config")(vocab_size=61, attn_implementation="saccade", **sizes[kind])
        model = getattr(transformers, f"{kind}Model")(config)
        with pytest.raises(UnknownAttention, match=f'{kind}Config: models of this kind compute.*use "eager"'):
            model(input_ids=torch.randint(3, 58, (1, 7)))
    finally:
        unregister()


def test_the_mask_of_a_long_forward_is_not_dense(monkeypatch):
    """A whole Llama at 4096 and at 8192 tokens: what it holds at most grows with the length, not with its square."""
    from transformers import LlamaConfig, LlamaModel

    seen = []
    register()
    try:
        model = LlamaModel(
            LlamaConfig(
                vocab_size=61,
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                attn_implementation="saccade",
                max_position_embeddings=8192,
            )
        ).eval()
        monkeypatch.setattr(MaskTensor, "dense", lambda self: pytest.fail("a dense mask"))
        for length in (4096, 8192):
            kept = torch.ones(1, length, dtype=torch.int64)
            kept[0, :5] = 0
            with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
                model(input_ids=torch.zeros(1, length, dtype=torch.int64), attention_mask=kept, use_cache=False)
            seen.append(max(event.cpu_memory_usage for event in profile.events()))
    finally:
        unregister()
    assert seen[1] < 2.5 * seen[0] and seen[0] < 4096 * 4096 / 8
    assert saccade.attention is not None
