"""A pattern's faces agree: its ranges, its booleans, its mask value and its rule, and all with the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from looped import looped
from saccade.benchmark.attention.patterns import MaskPattern, PatternSizes

DEFINITIONS = {
    "causal": lambda i, j, sizes: j <= i,
    "window:5": lambda i, j, sizes: 0 <= i - j < 5,
    "prefix:3": lambda i, j, sizes: j < 3 or j <= i,
}

TERMS = ["full", "causal", "window:1", "window:5", "window:400", "prefix:3", "documents:1", "documents:3"]
TERMS += ["padding:half", "padding:0.25", "padding:1"]


def by_definition(text, sizes):
    rule = DEFINITIONS[text]
    return torch.tensor(
        [[rule(i + sizes.offset, j, sizes) for j in range(sizes.length_k)] for i in range(sizes.length_q)]
    )


@looped("text", DEFINITIONS)
@looped("lengths", [(11, 11), (3, 11), (1, 7)])
def test_terms_are_what_they_say(text, lengths):
    sizes = PatternSizes(2, *lengths)
    assert torch.equal(MaskPattern.parse(text).dense(sizes)[0, 0], by_definition(text, sizes))


def test_documents_share_the_tokens_out():
    seen = MaskPattern.parse("documents:3").dense(PatternSizes(1, 40, 40))[0, 0]
    counts = seen.sum(-1)
    starts = [0, 13, 27]  # thirds, made odd
    for start, stop in zip(starts, [*starts[1:], 40], strict=True):
        assert seen[start:stop, start:stop].all()
        assert (counts[start:stop] == stop - start).all()


def test_padding_leaves_its_share_in_unequal_lengths():
    sizes = PatternSizes(4, 16, 960)
    seen = MaskPattern.parse("padding:half").dense(sizes)
    lengths = seen[:, 0, 0].sum(-1)
    assert len(set(lengths.tolist())) == 4
    assert abs(float(seen.float().mean()) - 0.5) < 0.002
    assert torch.equal(seen, seen[:, :, :1].expand_as(seen))


def test_one_padded_item_is_half_full():
    assert MaskPattern.parse("padding").pairs(PatternSizes(1, 10, 100)) == 10 * 51


@given(
    terms=st.lists(st.sampled_from(TERMS), min_size=1, max_size=3),
    batch=st.integers(1, 3),
    rows=st.integers(1, 13),
    more=st.integers(0, 9),
)
def test_every_face_states_the_same(terms, batch, rows, more):
    pattern, sizes = MaskPattern.parse("+".join(terms)), PatternSizes(batch, rows, rows + more)
    shape = (batch, 1, sizes.length_q, sizes.length_k)
    seen = pattern.dense(sizes)
    whole = torch.ones(shape, dtype=torch.bool) if seen is None else seen.expand(shape)
    mask = pattern.mask(sizes)()
    assert (mask is None) == (seen is None) == (set(terms) == {"full"})
    if mask is not None:
        assert torch.equal(mask.dense(sizes.length_q, sizes.length_k).expand(shape), whole)
        indices = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij")
        assert torch.equal(pattern.rule(sizes)(*indices).expand(shape), whole)
    assert pattern.pairs(sizes) == int(whole.sum())


def test_a_mask_is_a_fresh_value_each_time():
    make = MaskPattern.parse("causal+documents:2").mask(PatternSizes(1, 8, 8))
    assert make() == make()
    assert make() is not make()


def test_long_sequences_are_counted_without_forming_pairs():
    length = 1 << 20
    assert MaskPattern.parse("causal").pairs(PatternSizes(1, length, length)) == length * (length + 1) // 2
    assert MaskPattern.parse("window:256").pairs(PatternSizes(3, length, length)) == 3 * (256 * length - 256 * 255 // 2)


@looped("text", ["", "casual", "causal:3", "window", "window:0", "window:x", "documents:-1", "full+"])
def test_what_is_no_pattern_is_refused(text):
    with pytest.raises(ValueError, match="mask: expected full, causal, window:W"):
        MaskPattern.parse(text)


@looped("text", ["padding:0", "padding:2", "padding:x", "padding:nan"])
def test_a_share_is_a_share(text):
    with pytest.raises(ValueError, match="padding must be a share in"):
        MaskPattern.parse(text)


def test_one_bias_at_most():
    assert MaskPattern.parse("causal+alibi").bias == "alibi"
    with pytest.raises(ValueError, match="has two biases"):
        MaskPattern.parse("alibi+bias")
