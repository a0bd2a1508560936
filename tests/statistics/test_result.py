"""What comes back: averages, what is said of it, what can be done with it."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
from xml.etree import ElementTree

import pytest
import torch

import dense_statistics
import problems
import saccade


@pytest.fixture
def everything():
    """(statistics, the judge) of the case with padding, placement, bias, softcap and sink; float64."""
    problem = problems.CASES["everything"]()
    tensors = problem.tensors
    got = saccade.statistics(
        tensors["query"],
        tensors["key"],
        problem.mask,
        value=tensors["value"],
        bias=problem.to_bias(tensors),
        sink=tensors["sink"],
        groups={"odd": torch.arange(13) % 2 == 1},
        top=2,
        histograms=True,
        **problem.options,
    )
    return got, dense_statistics.of_case(problem, [1, -2])


def test_a_notebook_shows_the_table():
    query = torch.randn(2, 70, 5, 4)
    got = saccade.statistics(query, query, groups={"<b>&": torch.arange(5) % 2 == 1})
    root = ElementTree.fromstring(f"<all>{got._repr_html_()}</all>")
    lines = repr(got).splitlines()
    assert [p.text for p in root.iter("p")] == [lines[0], lines[-1]]
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    assert rows == [line.split() if i else re.split(" {2,}", line) for i, line in enumerate(lines[1:-1])]
    assert "<b>&" in rows[0] and not {"style", "script"} & {element.tag for element in root.iter()}


def test_means_are_over_counted_rows(everything):
    got, judge = everything
    assert not judge.counted.all()
    rows = {
        "lse": judge.lse,
        "entropy": judge.entropy,
        "largest": judge.largest,
        "distance": judge.distance,
        "keys_seen": judge.keys_seen.double(),
        "mass.self": judge.beside(0),
        "mass.previous": judge.beside(-1),
        "mass.next": judge.beside(1),
        "mass.first": judge.first,
        "mass.sink": judge.sink,
        "mass.odd": judge.on(torch.arange(13) % 2 == 1),
    }
    assert set(got.names) == {*rows, "evenness"}
    for name, want in rows.items():
        assert got.mean(name).tolist() == pytest.approx(judge.mean(want), abs=1e-12), name


def test_evenness_is_entropy_among_the_keys_over_its_most(everything):
    got, judge = everything
    among = judge.p / judge.p.sum(-1, keepdim=True)
    several = judge.keys_seen > 1
    want = (-torch.special.xlogy(among, among).sum(-1) / judge.keys_seen.double().log())[several]
    torch.testing.assert_close(got.evenness[several], want, rtol=0, atol=1e-12)
    assert (got.evenness[~several] == 0).all()
    means = [want[several.nonzero()[:, 1] == h].mean().item() for h in range(6)]
    assert got.mean("evenness").tolist() == pytest.approx(means, abs=1e-12)


def test_evenness_of_rows_that_see_one_key_is_not_averaged():
    named = problems.tensors(rows=13)
    got = saccade.statistics(torch.zeros_like(named["query"]), named["key"], saccade.Causal())
    assert (got.evenness[:, :, 0] == 0).all() and got.counted[:, :, 0].all()
    assert got.mean("evenness").tolist() == pytest.approx([1.0] * 6)


def test_results_share_no_numbers():
    """What rows see without a mask is worked out once for all calls."""
    query = torch.randn(1, 1, 3, 8)
    first = saccade.statistics(query, query)
    first.keys_seen.add_(7)
    assert torch.equal(saccade.statistics(query, query).keys_seen.flatten(), torch.full((first.keys_seen.numel(),), 3))


def test_rows_are_padded_empty_or_counted():
    named = problems.tensors(rows=13)
    # item 0: rows 0 ... 4 are tokens, key 0 is hidden, so that row 0 sees nothing
    kept = torch.ones(2, 13, dtype=torch.bool)
    kept[0, 0] = False
    mask = saccade.Causal() & saccade.Padding(kept, queries=[5, 13])
    got = saccade.statistics(named["query"], named["key"], mask)
    assert (got.rows_counted, got.rows_empty, got.rows_padded) == (6 * (4 + 13), 6, 6 * 8)
    assert got.padded.expand(2, 6, 13)[0, :, 5:].all() and not got.padded.expand(2, 6, 13)[1].any()
    assert got.counted[0, :, 1:5].all() and not got.counted[0, :, 0].any()


def test_padded_rows_of_a_slice_are_those_of_its_rows():
    named = problems.tensors(rows=5, keys=11)
    whole = saccade.Causal() & saccade.Padding([13, 7], queries=[13, 7])
    got = saccade.statistics(named["query"], named["key"], whole.slice((4, 9), (0, 11), lengths=(13, 13)))
    assert got.padded.expand(2, 6, 5)[:, 0].tolist() == [[False] * 5, [False, False, False, True, True]]
    assert got.rows_padded == 12


def test_unknown_names_are_refused(everything):
    for name in ("nothing", "mass", "mass.even", "self", "counted"):
        with pytest.raises(ValueError, match=r"name must be one of lse, entropy, .*mass\.odd; got"):
            everything[0].mean(name)


def test_a_summary_is_plain_and_complete(everything):
    got, judge = everything
    summary = json.loads(json.dumps(got.summary(), allow_nan=False))
    assert (summary["items"], summary["heads"], summary["queries"], summary["keys"]) == judge.p.shape
    assert summary["rows"] == {"counted": int(judge.counted.sum()), "empty": got.rows_empty, "padded": got.rows_padded}
    assert summary["mean"]["entropy"] == pytest.approx(judge.mean(judge.entropy))
    assert set(summary["mean"]) == set(got.names)
    assert summary["per_head"]["query"]["max"] == pytest.approx(got.heads["query"]["max"].tolist())
    assert sum(summary["per_head"]["logits"]["counts"][0]) == int(judge.seen[:, 0].sum())


def test_what_is_not_finite_is_none_in_a_summary():
    named = problems.tensors()
    named["query"][0, 2, 3] = math.nan
    summary = saccade.statistics(named["query"], named["key"]).summary()
    assert summary["mean"]["entropy"][2] is None and summary["mean"]["entropy"][1] is not None
    json.dumps(summary, allow_nan=False)


def test_its_repr_is_a_table_of_heads(everything):
    got, judge = everything
    first, header, *lines = repr(got).splitlines()
    assert "2 items, 6 heads, 11 queries, 13 keys" in first
    assert f"{int(judge.counted.sum())} counted" in first and f"{got.rows_padded} padded" in first
    assert header.split()[:4] == ["head", "entropy", "evenness", "largest"] and "odd" in header.split()
    assert [line.split()[0] for line in lines] == [str(h) for h in range(6)]
    assert lines[3].split()[1] == f"{judge.mean(judge.entropy)[3]:.3f}"
    assert max(map(len, [header, *lines])) < 120


def test_its_repr_stops_after_many_heads():
    query = torch.randn(1, 67, 2, 3)
    lines = repr(saccade.statistics(query, query)).splitlines()
    assert len(lines) == 2 + 64 + 1 and lines[-1] == "and 3 heads more"


def test_it_moves_and_pickles(everything):
    got, _ = everything
    for copy in (got.to("cpu"), pickle.loads(pickle.dumps(got))):
        assert copy is not got and repr(copy) == repr(got)
        assert torch.equal(copy.received, got.received)
        assert torch.equal(copy.heads["weights"]["counts"], got.heads["weights"]["counts"])
    meta = got.to("meta")
    assert meta.entropy.device.type == meta.mass["odd"].device.type == meta.heads["key"]["min"].device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # by the kernels, and not
def test_a_pickle_is_as_large_as_what_it_holds(dtype):
    named = problems.tensors(rows=257, keys=263, dtype=dtype)
    got = saccade.statistics(named["query"], named["key"], saccade.Causal(), top=2)
    held = [got.lse, got.entropy, got.largest, got.distance, got.largest_at, got.top_weights, got.top_keys]
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*held, *got.mass.values(), got.received))
    assert size < len(pickle.dumps(got)) < 1.2 * size


def test_it_cannot_be_changed(everything):
    with pytest.raises(dataclasses.FrozenInstanceError):
        everything[0].entropy = None
