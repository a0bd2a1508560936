"""Plans: who holds which rows, how even that is, and shards of tensors."""

from __future__ import annotations

import pytest
import torch
from shared_calls import planned, resharded

from saccade import Causal, Documents, Padding, Prefix, Window, distributed

LENGTH = 3001


def documents():
    sizes = torch.randint(20, 700, (40,), generator=torch.Generator().manual_seed(3))
    return Causal() & Documents(torch.repeat_interleave(torch.arange(40), sizes)[:LENGTH])


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mask",
    [None, Causal(), documents(), Prefix(700), Causal() & Padding([3001, 1500])],
    ids=["none", "causal", "documents", "prefix", "padding"],
)
def test_ranks_compute_equally_many_pairs(ranks, size, mask):
    """Counted in the dense mask, averaged over items; rows of a rank, too, are no more than 10 % above the mean."""
    answers = ranks(size).run(planned, mask, LENGTH)
    rows, said, _, _ = answers[0]
    assert all(answer[0] == rows for answer in answers)
    pairs = torch.ones(LENGTH).mul(LENGTH) if mask is None else mask.dense(LENGTH, LENGTH).float().mean((0, 1)).sum(-1)
    held = [torch.cat([torch.arange(*span) for span in spans]) for spans in rows]
    assert torch.cat(held).sort().values.equal(torch.arange(LENGTH))
    work = torch.stack([pairs[of].sum() for of in held])
    imbalance = float(work.max() / work.mean() - 1)
    assert imbalance < 0.03 and imbalance == pytest.approx(said, abs=1e-5)
    assert max(len(of) for of in held) <= 1.1 * LENGTH / size


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_window_is_dealt_in_consecutive_parts(ranks, size):
    """The first rows see fewer keys, so that parts of equal rows are not quite even; chunks would send far more."""
    rows, said, _, _ = ranks(size).run(planned, Window(100, 0), LENGTH)[0]
    assert [len(spans) for spans in rows] == [1] * size and said < 0.06


def test_edges_move_until_a_window_is_even(ranks):
    """Two parts of equal rows are 14 % apart, and parts of equal work have 12 % more rows than others."""
    rows, said, _, _ = ranks(2).run(planned, Window(1023, 0), 4096)[0]
    assert [len(spans) for spans in rows] == [1, 1] and said < 0.06


def test_causal_is_dealt_in_zigzag(ranks):
    assert ranks(2).run(planned, Causal(), 4096)[0][0] == (((0, 1024), (3072, 4096)), ((1024, 3072),))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_fewer_rows_than_ranks(ranks, length):
    rows = ranks(4).run(planned, Causal(), length)[0][0]
    assert sorted(span for spans in rows for span in spans) == [(at, at + 1) for at in range(length)]


def test_shards_and_their_gradients(ranks):
    """Each rank's loss weighs the whole by its own number: unshard sums these; shard gives its rows alone."""
    for rank, answer in enumerate(ranks(3).run(resharded, 97)):
        whole = torch.arange(97 * 5.0).view(97, 5)
        rows = torch.cat([torch.arange(*span) for span in answer["rows"][rank]])
        assert answer["whole"].equal(whole) and answer["shard"].equal(whole[rows])
        expected = torch.zeros(97, 5)
        expected[rows] = (1.0 + 2.0 + 3.0) * whole[rows]  # d/dx of sum over ranks of (rank + 1) / 2 * whole^2
        assert answer["gradient"].equal(expected)


def test_explain(ranks):
    _, _, layout, text = ranks(2).run(planned, Causal(), 4096, "ring")[1]
    assert layout == "ring" and text.startswith("layout ring: named by the caller\n4096 rows in blocks of 16")
    assert "rank 0: rows 0:1024, 3072:4096 (2048); 50.0% of the pairs; receives 2048 keys" in text
    assert "rank 1: rows 1024:3072 (2048); 50.0% of the pairs; receives 1024 keys" in text


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"there is no process group: call torch.distributed.init_process_group"):
        distributed.plan(Causal(), 97)
