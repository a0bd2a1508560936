"""Maps of the viewer: tiles, rows, columns and words against dense maps of `attention_weights` in float64."""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch

import saccade
from saccade.models import load
from saccade.viewer import maps
from saccade.viewer.maps import _head, _lse, _overview, _run
from saccade.viewer.maps._call import MapCall, checked
from saccade.viewer.maps._side import side_of_labels
from saccade.viewer.server import open_session
from saccade.viewer.server._session import _described_call

HQ, HKV, D = 6, 3, 11
NAMES = ["plain", "causal", "padded", "global window", "by head", "sink, softcap, scale", "bias", "alibi", "cross"]


def call_of(name: str) -> MapCall:
    """Two items of 6 heads over prime lengths."""
    torch.manual_seed(3)
    rows, keys = (131, 211) if name == "cross" else (211, 211)
    query, key = 2 * torch.randn(2, HQ, rows, D), torch.randn(2, HKV, keys, D)
    more = {
        "plain": {},
        "cross": {"mask": saccade.Padding(torch.tensor([200, 97]))},
        "causal": {"mask": saccade.Causal()},
        "padded": {"mask": saccade.Causal() & saccade.Padding(torch.tensor([199, 103]))},
        "global window": {"mask": saccade.Window(17, 17) | saccade.Global([0, 5])},
        "by head": {"mask": saccade.PerHead([saccade.Causal(), saccade.Window(3, 9)] * 3)},
        "sink, softcap, scale": {"sink": torch.randn(HQ), "softcap": 5.0, "scale": 0.5, "mask": saccade.Causal()},
        "bias": {"bias": torch.randn(1, HQ, rows, keys)},
        "alibi": {"bias": saccade.ALiBi(torch.rand(HQ) / 8), "mask": saccade.Causal()},
        "hidden first key": {"bias": torch.zeros(1, 1, rows, keys).index_fill_(3, torch.tensor([0, 1]), -torch.inf)},
        "bias with a place": {"bias": saccade.ALiBi(torch.rand(HQ) / 8).at(5), "mask": saccade.Padding([211, 97])},
        "rows without keys": {
            "mask": saccade.Window(3, 0) & saccade.Padding(torch.arange(211)[None] > 20 + torch.zeros(2, 1))
        },
    }[name]
    kind = "cross" if name == "cross" else "self"
    given = dict.fromkeys(("mask", "bias", "scale", "softcap", "sink")) | more
    return MapCall("0", "attention", 0, kind, "rows", "keys", checked(query, key, **given))


def dense(call: MapCall, item: int, head: int):
    """(weights, visible) of one head in float64."""
    whole = call.call
    given = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in whole.scoring().items()}
    bias = whole.bias
    given["bias"] = bias.parameter.double() if type(bias).__name__ == "TensorBias" else bias
    weights = saccade.attention_weights(whole.query.double(), whole.key.double(), **given)[item, head]
    shape = whole.batch, whole.heads, whole.length_q, whole.length_k
    visible = torch.ones(shape[2:], dtype=torch.bool)
    if whole.mask is not None:
        visible = whole.mask.dense(*shape[2:]).expand(shape)[item, head]
    return weights.numpy(), visible.numpy()


def pooled(weights, visible, size, pool):
    def over(numbers, reduce):
        for axis in (0, 1):
            numbers = reduce.reduceat(numbers, range(0, numbers.shape[axis], size), axis)
        return numbers

    count = over(visible.astype(int), np.add)
    if pool == "max":
        return np.where(count, over(np.where(visible, weights, -np.inf), np.maximum), np.nan)
    return np.where(count, over(np.where(visible, weights, 0.0), np.add), np.nan) / np.maximum(count, 1)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 x 16 bins and a pyramid from bins of 4 on: a map of 211 has what one of 100,000 has."""
    monkeypatch.setattr(_head, "SIDE", 16)
    monkeypatch.setattr(_head, "_BASE", 2)
    monkeypatch.setattr(_head, "_FEW", 100)
    monkeypatch.setattr(_head, "_PRECISE", 16 * 211)
    monkeypatch.setattr(_lse, "BLOCK", 10)
    monkeypatch.setattr(_lse, "GROUP", 5000)
    monkeypatch.setattr(_head, "GROUP", 5000)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_tile_is_what_the_dense_map_pools_to(name, small_tiles):
    call = call_of(name)
    item, head = 1, 4
    one = maps.HeadPyramid(call, item, head)
    weights, visible = dense(call, item, head)
    for level in range(9):
        for pool in ("max", "mean"):
            want = pooled(weights, visible, 1 << level, pool)
            lines = []
            for row in range(-(-want.shape[0] // 16)):
                line = [one.tile("weights", pool, level, row, key) for key in range(-(-want.shape[1] // 16))]
                assert not any(tile.sampled for tile in line)
                lines.append(np.concatenate([tile.values for tile in line], 1))
            found = np.concatenate(lines, 0)
            assert np.array_equal(np.isnan(found), np.isnan(want)), (level, pool)
            np.testing.assert_allclose(found, want, atol=1e-6, rtol=0)


def test_a_sampled_tile_is_exact_for_its_rows_and_says_so(small_tiles):
    call = call_of("padded")
    weights, visible = dense(call, 0, 1)
    one = maps.HeadPyramid(call, 0, 1)
    tile = one.tile("weights", "max", 3, 1, 0, exact=False)
    assert tile.sampled == 1
    rows = [start + min(8, 211 - start) // 2 for start in range(128, 211, 8)]
    want = np.concatenate([pooled(weights[[r]], visible[[r]], 8, "max")[:, :16] for r in rows])
    np.testing.assert_allclose(tile.values, want, atol=1e-6, rtol=0)
    fine = one.tile("weights", "mean", 1, 2, 1, exact=False)
    rows = range(65, 96, 2)
    want = np.concatenate([pooled(weights[[r]], visible[[r]], 2, "mean")[:, 16:32] for r in rows])
    np.testing.assert_allclose(fine.values, want, atol=1e-6, rtol=0)
    assert fine.sampled == 1 and one.tile("weights", "mean", 1, 2, 1).sampled == 0
    assert one.tile("weights", "mean", 1, 2, 1, exact=False).sampled == 0  # its rows are known now
    assert one.tile("weights", "mean", 1, 0, 0, exact=False).sampled == 1
    whole = one.tile("weights", "max", 3, 1, 0)
    assert whole.sampled == 0
    assert one.tile("weights", "max", 3, 1, 0, exact=False).sampled == 0  # it is there now
    assert one.tile("weights", "mean", 1, 0, 0, exact=False).sampled == 0


@pytest.mark.parametrize("name", ["bias", "alibi"])
def test_tiles_of_bias_and_logits(name, small_tiles, monkeypatch):
    monkeypatch.setattr(_head, "_FEW", 2**26)
    call = call_of(name)
    one = maps.HeadPyramid(call, 1, 2)
    _, visible = dense(call, 1, 2)
    bias = call.call.bias
    if name == "bias":
        scores = bias.parameter[0, 2].numpy()
    else:
        scores = -float(bias.parameter[2]) * np.abs(np.arange(211)[:, None] - np.arange(211))
    products = call.call.query[1, 2].double() @ call.call.key[1, 1].double().mT
    logits = products.numpy() / D**0.5 + scores
    for level in (0, 1, 2):
        for what, want in (("bias", scores), ("logits", logits)):
            found = one.tile(what, "max", level, 0, 0).values
            np.testing.assert_allclose(found, pooled(want, visible, 1 << level, "max")[:16, :16], atol=1e-5)
    monkeypatch.setattr(_head, "_FEW", 2**26)
    found = one.tile("bias", "mean", 3, 0, 0)
    np.testing.assert_allclose(found.values, pooled(scores, visible, 8, "mean")[:16, :16], atol=1e-5)
    assert found.sampled == 0
    monkeypatch.setattr(_head, "_FEW", 100)
    found = one.tile("bias", "max", 3, 0, 0)
    rows = [start + 4 for start in range(0, 128, 8)]
    want = np.concatenate([pooled(scores[[r]], visible[[r]], 8, "max")[:, :16] for r in rows])
    np.testing.assert_allclose(found.values, want, atol=1e-5)
    assert found.sampled == 1
    with pytest.raises(ValueError, match="no bias"):
        maps.HeadPyramid(call_of("plain"), 0, 0).tile("bias", "max", 0, 0, 0)


def run_of(name: str) -> maps.Run:
    call = call_of(name)
    sides = {id: maps.Side(id, id, length) for id, length in (("rows", call.shape[2]), ("keys", call.shape[3]))}
    return maps.Run("a model", "", sides, [call])


@pytest.mark.parametrize("name", NAMES)
def test_rows_columns_and_cells(name):
    run = run_of(name)
    item, head = 1, 3
    weights, visible = dense(run.calls[0], item, head)
    row = run.row("0", head, item, [101, 7], 5, 50, 4)
    want = weights[[101, 7]].mean(0)
    np.testing.assert_allclose(row.weights, want[5:50], atol=1e-6)
    order = np.argsort(-want, kind="stable")[:4]
    assert [key for key, _ in row.top] == order.tolist()
    np.testing.assert_allclose([weight for _, weight in row.top], want[order], atol=1e-6)
    some = weights[[101, 7]]
    entropy = -(some * np.log(np.where(some > 0, some, 1))).sum(1).mean()
    assert row.entropy == pytest.approx(entropy, abs=1e-5)
    column = run.column("0", head, item, [33, 34], 90, 131, 3)
    want = weights[:, [33, 34]].sum(1)
    np.testing.assert_allclose(column.weights, want[90:131], atol=1e-6)
    assert column.total == pytest.approx(want.sum(), rel=1e-5)
    for i, j in ((101, 33), (13, 97), (5, 5)):
        cell = run.cell("0", head, item, i, j)
        assert cell.visible == visible[i, j]
        assert cell.weight == pytest.approx(weights[i, j], abs=1e-6)
        assert cell.seen == visible[i].sum()
        if cell.visible:
            assert cell.rank == 1 + (weights[i] > weights[i, j]).sum()
        else:
            assert (cell.rank, cell.logit) == (0, None)


@pytest.mark.parametrize("name", ["padded", "by head", "alibi"])
def test_numbers_of_rows_are_those_of_statistics(name):
    run = run_of(name)
    call = run.calls[0].call
    want = saccade.statistics(call.query.double(), call.key.double(), **call.scoring())
    found = run.rows("0", 5, 1, 0, 211)
    counted = want.counted.expand(want.lse.shape)[1, 5].numpy()
    for ours in ("entropy", "largest", "self", "first"):
        theirs = f"mass.{ours}" if ours in want.mass else ours
        np.testing.assert_allclose(found[ours][counted], want.of(theirs)[1, 5].numpy()[counted], atol=1e-5)
        assert np.isnan(found[ours][~counted]).all()
    np.testing.assert_allclose(found["received"], want.received[1, 5].numpy(), atol=1e-4)


@pytest.mark.parametrize("name", [*NAMES, "hidden first key", "bias with a place"])
def test_overview_and_rows_agree_on_every_head(name):
    """Placements, masks by head and biases that hide: what "self" and "first" are must be one thing."""
    run = run_of(name)
    names = {"entropy", "largest", "distance", "self", "previous", "first", "sink"}
    for head, summary in enumerate(run.overview(1)):
        rows = run.rows("0", head, 1, 0, run.calls[0].shape[2])
        for what in names:
            counted = rows[what][~np.isnan(rows[what])]
            assert summary.numbers[what] == pytest.approx(counted.mean(), rel=1e-5, abs=2e-6), (head, what)


def test_rows_that_see_nothing_count_for_nothing():
    run = run_of("rows without keys")
    one = run.row("0", 1, 1, [120], 0, 211, 3)
    both = run.row("0", 1, 1, [120, 7], 0, 211, 3)  # row 7 sees no key
    assert (both.entropy, both.total, both.top) == (one.entropy, one.total, one.top) and one.total == pytest.approx(1)
    nothing = run.row("0", 1, 1, [7], 0, 211, 3)
    assert np.isnan(nothing.entropy) and nothing.top == [] and nothing.total == 0


def test_nan_is_shown_as_nan(small_tiles):
    call = call_of("causal")
    call.call.query[1, 3, 101, 2] = np.nan
    run = maps.Run("a model", "", {id: maps.Side(id, id, 211) for id in ("rows", "keys")}, [call])
    cell = run.cell("0", 3, 1, 101, 5)
    assert np.isnan([cell.weight, cell.logit, cell.product]).all() and cell.rank == 0 and cell.visible
    assert np.isnan(run.row("0", 3, 1, [101], 0, 9, 2).entropy)
    for what, pool in (("weights", "max"), ("weights", "mean"), ("logits", "max")):
        found = run.tile("0", 3, 1, what, pool, 0, 6, 0).values
        assert np.isnan(found[101 - 96]).all() and not np.isnan(found[101 - 96 + 1]).any()
    assert np.isnan(run.overview(1)[3].numbers["entropy"])
    assert not np.isnan(run.overview(1)[2].numbers["entropy"])


def test_many_rows_are_averaged_block_by_block(monkeypatch):
    run = run_of("sink, softcap, scale")
    tokens = [3, 50, 51, 52, 199, 13, 77]
    whole = run.row("0", 2, 0, tokens, 0, 211, 5)
    monkeypatch.setattr(_run, "_CELLS", 2 * 211)
    parts = run.row("0", 2, 0, tokens, 0, 211, 5)
    np.testing.assert_allclose(parts.weights, whole.weights, atol=1e-7)
    assert parts.entropy == pytest.approx(whole.entropy, abs=1e-7)
    weights, _ = dense(run.calls[0], 0, 2)
    np.testing.assert_allclose(parts.weights, weights[tokens].mean(0), atol=1e-6)


@pytest.mark.parametrize("where", [(13, 900), (500, 501), (1000, 1001)])
def test_one_pair_that_leaks_is_enough_to_be_no_causal_map(where):
    row, key = where
    seen = torch.ones(1, 1, 1009, 1009, dtype=torch.bool).tril()
    given = {"mask": saccade.FromTensor(seen.clone())} | dict.fromkeys(("bias", "scale", "softcap", "sink"))
    query, key_ = torch.randn(2, 1, 1, 1009, 3)
    assert MapCall("0", "", 0, "self", "t", "t", checked(query, key_, **given)).causal
    seen[..., row, key] = True
    given["mask"] = saccade.FromTensor(seen)
    assert not MapCall("0", "", 0, "self", "t", "t", checked(query, key_, **given)).causal


def test_items_that_stand_at_different_places_are_not_called_causal():
    call = call_of("causal").call
    placed = saccade.Causal().at(torch.tensor([0, 80]))
    given = dict.fromkeys(("bias", "scale", "softcap", "sink"))
    one = MapCall("0", "", 0, "self", "keys", "keys", checked(call.query[:, :, :131], call.key, mask=placed, **given))
    assert not one.causal and [one.placed_for(0), one.placed_for(1)] == [0, 80]
    assert _described_call(one)["rows"]["placed_by_item"] == [0, 80]
    call = checked(call.query[:1, :, :131], call.key[:1], mask=saccade.Causal().at(torch.tensor([80])), **given)
    assert MapCall("0", "", 0, "self", "keys", "keys", call).causal
    assert "placed_by_item" not in _described_call(MapCall("0", "", 0, "self", "keys", "keys", call))["rows"]


@pytest.mark.parametrize("rows", ["all", "some"])
def test_a_summary_is_what_its_rows_say(rows, monkeypatch):
    if rows == "some":
        monkeypatch.setattr(_overview, "_ALL", 100)
    run = run_of("padded")
    found = run.overview(1)
    assert len(found) == HQ and found[4].head == 4
    weights, visible = dense(run.calls[0], 1, 4)
    chosen = np.arange(211) if rows == "all" else _overview._chosen(211, 211).numpy()
    assert found[4].sampled == (0 if rows == "all" else len(chosen)) and len(chosen) >= 96
    seen = chosen[visible[chosen].any(1)]
    w = weights[seen]
    numbers = found[4].numbers
    assert numbers["entropy"] == pytest.approx(-(w * np.log(np.where(w > 0, w, 1))).sum(1).mean(), abs=1e-5)
    previous = [w[n, i - 1] if i else 0 for n, i in enumerate(seen)]
    assert numbers["previous"] == pytest.approx(np.mean(previous), abs=1e-6)
    distance = (w * np.abs(seen[:, None] - np.arange(211))).sum(1).mean()
    assert numbers["distance"] == pytest.approx(distance, rel=1e-4)
    of_row, of_key = (chosen * 48) // 211, (np.arange(211) * 48) // 211
    want = np.full((48, 48), np.nan)
    for i in range(48):
        for j in range(48):
            part = np.ix_(chosen[of_row == i], np.flatnonzero(of_key == j))
            if visible[part].any():
                want[i, j] = weights[part][visible[part]].max()
    np.testing.assert_allclose(found[4].thumbnail, want, atol=1e-6)


def test_what_was_not_used_for_longest_is_forgotten_and_computed_again(small_tiles, monkeypatch):
    monkeypatch.setattr(_run, "MOST_HELD", 1)
    run = run_of("causal")
    first = run.tile("0", 0, 0, "weights", "mean", 3, 0, 0).values
    one = run.head("0", 0, 0)
    run.tile("0", 1, 0, "weights", "mean", 3, 0, 0)
    run.head("0", 0, 2)
    assert run.head("0", 0, 0) is not one
    busy = run.head("0", 0, 3)
    run.tile("0", 3, 0, "weights", "mean", 3, 0, 0)
    with busy._locks["numbers"]:
        run.tile("0", 4, 0, "weights", "mean", 3, 0, 0)
        assert run.head("0", 0, 3) is busy
    np.testing.assert_array_equal(run.tile("0", 0, 0, "weights", "mean", 3, 0, 0).values, first)


def test_two_threads_that_wait_for_a_pyramid_share_it(small_tiles, monkeypatch):
    walks = []
    compute = _head._levels
    monkeypatch.setattr(_head, "_levels", lambda base: walks.append(1) or compute(base))
    one = maps.HeadPyramid(call_of("causal"), 0, 0)
    tiles = [None, None]
    threads = [
        threading.Thread(target=lambda n=n: tiles.__setitem__(n, one.tile("weights", "max", 4, 0, 0))) for n in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(walks) == 1
    np.testing.assert_array_equal(tiles[0].values, tiles[1].values)


def test_a_walk_ends_soon_after_its_run_is_closed(small_tiles, monkeypatch):
    run = run_of("causal")
    head, parts = run.head("0", 0, 0), []

    def watched(call, place, rows, **how):
        parts.append(rows)
        if len(parts) == 2:
            run.close()
        return row_lse(call, place, rows, **how)

    row_lse = _lse.row_lse
    monkeypatch.setattr(_lse, "row_lse", watched)
    with pytest.raises(maps.MapClosed):
        head.tile("weights", "max", 4, 0, 0)
    assert len(parts) == 2
    with pytest.raises(maps.MapClosed):
        run.head("0", 0, 1)


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda run: run.head("7", 0, 0), KeyError, "call: there is no '7'"),
        (lambda run: run.head("0", 2, 0), IndexError, "item: expected 0 to 1, got 2"),
        (lambda run: run.head("0", 0, 6), IndexError, "head: expected 0 to 5, got 6"),
        (lambda run: run.tile("0", 0, 0, "weights", "max", 0, 1, 0), IndexError, "outside of 211 x 211"),
        (lambda run: run.row("0", 0, 0, [211], 0, 1, 1), IndexError, "tokens: expected 0 to 210, got 211"),
        (lambda run: run.row("0", 0, 0, [], 0, 1, 1), ValueError, "tokens: expected at least one"),
        (lambda run: run.words("target", 0, 1), KeyError, "side: there is no 'target'; this run has rows, keys"),
    ],
)
def test_what_there_is_not_is_named(ask, error, message):
    with pytest.raises(error, match=message):
        ask(run_of("plain"))


# Texts


def test_a_text_is_kept_with_its_words_and_findings():
    text = "The cat saw a dog.\nThe cat ran, and the dog ran after it."
    language = load()
    run = maps.read_text(text, language)
    ids = torch.tensor([[language.tokenizer.start, *language.tokenizer.encode(text).ids]])
    calls = []
    language.model.eval()
    with torch.no_grad():
        language.model(ids, observe=lambda layer, call: calls.append(call))
    for layer, call in enumerate(calls):
        want = saccade.attention_weights(call.query, call.key, **call.scoring())[0].numpy()
        for head in (0, 7):
            found = run.tile(str(layer), head, 0, "weights", "max", 0, 0, 0).values
            assert np.array_equal(np.isnan(found), np.triu(np.ones_like(found), 1) > 0)
            np.testing.assert_allclose(np.nan_to_num(found), want[head], atol=1e-6)
    side = run.sides["text"]
    assert side.tokens == ids.shape[1] and run.calls[0].causal
    words = run.words("text", 0, side.tokens)
    assert "".join(word.gap + word.text for word in words if not word.special) == text
    assert [word.first for word in words[1:]] == [word.end for word in words[:-1]]
    assert all("".join(word.tokens).strip() == word.text.strip() for word in words if not word.special)
    sentences = [finding[0] for finding in run.findings]
    assert sentences and run.shown is not None
    assert run.role(run.calls[0], 4)["role"] == "previous"


def test_search_finds_words_by_their_characters():
    language = load()
    run = maps.read_text("One İstanbul. Two istanbul, (three) one.", language)
    total, found = run.search("text", "one", 9)
    assert total == 2 and [match.text for match in found] == ["One", "one"]
    assert run.search("text", "(three", 9)[1][0].before.endswith("istanbul, ")
    assert run.search("text", "stanbul", 1)[0] == 2 and len(run.search("text", "stanbul", 1)[1]) == 1
    first = found[0]
    assert run.words("text", first.first, first.end)[0].text == "One"
    assert run.search("text", "", 9) == (0, [])


@pytest.mark.parametrize(
    ("text", "query", "found"),
    [
        ("caf\u00e9 cafe\u0301.", "CAFE\u0301", ["caf\u00e9", "cafe\u0301"]),
        ("cafe\u0301 and tea", "cafe A", ["cafe\u0301 a"]),
        ("caf\u00e9", "\u0301", []),
        ("\u0130stanbul, istanbul", "\u0130", ["\u0130", "i"]),
        ("\u1f48\u03b4\u03c5\u03c3\u03c3\u03b5\u03cd\u03c2", "\u03c3\u03b5\u03a5\u03a3", ["\u03c3\u03b5\u03cd\u03c2"]),
        ("die Stra\u00dfe dort", "STRASSE D", ["Stra\u00dfe d"]),
        ("die Stra\u00dfe dort", "s", ["S", "\u00df"]),
    ],
)
def test_search_folds_query_and_text_alike(text, query, found):
    side = side_of_labels("text", text.split(" "))
    total, matches = side.search(query, 9)
    assert [match.text for match in matches] == found and total == len(found)
    for match in matches:
        assert match.before + match.text + match.after == text


def test_a_continued_text_says_where_it_begins():
    language = load()
    prompt = "The little girl went to the"
    run = maps.read_continued(prompt, language, 5)
    side = run.sides["text"]
    assert side.prompt == 1 + len(language.tokenizer.encode(prompt).ids)
    assert side.tokens == side.prompt + 5 and side.text.startswith(prompt)


@pytest.mark.slow
def test_a_budget_keeps_the_rest_in_files_or_says_what_is_needed(tmp_path):
    text = "The dog ran to the park. " * 8
    language = load()
    whole = maps.read_text(text, language)
    with pytest.raises(ValueError, match="about .* KiB for its queries and keys, .* 146 KiB left"):
        maps.read_text(text, language, budget=150_000)
    run = maps.read_text(text, language, budget=150_000, folder=tmp_path)
    assert run.kept.on_disk > 0 and run.kept.used <= 150_000
    if sys.platform == "linux":  # mapped, and without a name that a killed process would leave behind
        assert str(tmp_path) in Path("/proc/self/maps").read_text() and not list(tmp_path.rglob("*.bin"))
    for layer in "03":
        want = whole.tile(layer, 2, 0, "weights", "mean", 0, 0, 0).values
        np.testing.assert_array_equal(run.tile(layer, 2, 0, "weights", "mean", 0, 0, 0).values, want)
    run.close()
    assert not list(tmp_path.iterdir())


def test_what_a_watch_kept(tmp_path):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True).eval()
    with torch.no_grad(), saccade.watch(layer, keep=True) as watched:
        layer(torch.randn(2, 7, 12))
    watched.save(tmp_path / "run.watch")
    words = "a b c d e f g".split()
    for seen in (watched, saccade.monitoring.load(tmp_path / "run.watch")):
        run = maps.from_watch(seen, words)
        (call,) = run.calls
        want = seen.weights(call.name, head=2)[1].numpy()
        np.testing.assert_allclose(run.tile("0", 2, 1, "weights", "max", 0, 0, 0).values, want, atol=1e-6)
        assert [word.text for word in run.words(call.rows, 0, 7)] == words
    assert not maps.from_watch(watched).sides["tokens-7"].named
    with pytest.raises(ValueError, match=r"words: expected as many as a call has tokens \(7\), got 2"):
        maps.from_watch(watched, ["a", "b"])
    with torch.no_grad(), saccade.watch(layer) as watched:
        layer(torch.randn(1, 3, 12))
    with pytest.raises(ValueError, match="keep=True"):
        maps.from_watch(watched)


def test_cross_attention_is_known_by_its_name():
    words = "a b c d e f g".split()
    layer = torch.nn.TransformerDecoderLayer(12, 3, batch_first=True).eval()
    with torch.no_grad(), saccade.watch(layer, keep=True) as decoder:
        layer(torch.randn(2, 7, 12), torch.randn(2, 7, 12))
    itself, other = maps.from_watch(decoder, words).calls
    assert (itself.kind, itself.rows, itself.keys) == ("self", "tokens-7", "tokens-7")
    assert (other.kind, other.rows, other.keys) == ("cross", "tokens-7", "source-7")


class Decoding(torch.nn.Module):
    """Two rows against a cache of seven keys, then against five keys of something else."""

    def forward(self, query):
        saccade.attention(query, *torch.randn(2, 1, 2, 7, 4), mask=saccade.Causal())
        return saccade.attention(query, *torch.randn(2, 1, 2, 5, 4))


def test_rows_that_a_mask_places_among_more_keys_are_of_the_same_text():
    model = Decoding()
    with torch.no_grad(), saccade.watch(model, keep=True) as decoding:
        model(torch.randn(1, 2, 2, 4))
    words = "a b c d e f g".split()
    cached, across = maps.from_watch(decoding, words).calls
    assert (cached.kind, cached.rows, cached.keys, cached.placed) == ("self", "tokens-7", "tokens-7", 5)
    assert (across.kind, across.rows) == ("cross", "tokens-2")


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    def full(file, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    kept = maps.KeptTensors(0, tmp_path)
    with pytest.raises(ValueError, match="folder: no room for 2.00 MiB more in .* [(]No space left"):
        kept.take(torch.zeros(2**19))
    kept.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    checkpoints.t5(folder)
    return load(folder, head="conditional-generation")


def test_a_source_and_its_target_are_read_as_three_kinds_of_maps(translator):
    run = maps.read_pair("The cat sat on the mat.", "The dog sat.", translator)
    source, target = run.sides["source"], run.sides["target"]
    assert [call.id for call in run.calls] == [
        f"{kind}.{n}" for kind in ("encoder", "decoder", "cross") for n in (0, 1)
    ]
    assert [(call.rows, call.keys, call.kind) for call in run.calls[1::2]] == [
        ("source", "source", "self"),
        ("target", "target", "self"),
        ("target", "source", "cross"),
    ]
    assert "".join(w.gap + w.text for w in run.words("source", 0, source.tokens) if not w.special) == source.text
    assert source.pieces[-1] == "</s>" and target.pieces[0] == "<pad>"
    calls = []
    translator.eval()
    encode = translator.tokenizer.encode
    ids = torch.tensor([[*encode(source.text).ids, *translator.tokenizer.after]])
    start = torch.tensor([[translator.start, *encode(target.text).ids, *translator.tokenizer.after]])
    with torch.no_grad():
        translator(ids, None, start, observe=lambda layer, call: calls.append(call))
    (cross,) = (call for call in calls[-2:] if call.cross)
    want = saccade.attention_weights(cross.query, cross.key, **cross.scoring())[0, 1].numpy()
    np.testing.assert_allclose(run.tile("cross.1", 1, 0, "weights", "max", 0, 0, 0).values, want, atol=1e-6)
    assert run.call("decoder.0").causal and not run.call("encoder.0").causal and not run.call("cross.0").causal
    assert "RelativeBias" in repr(run.call("encoder.1").call.bias)


@pytest.mark.parametrize("most", [1, 5])
def test_a_target_that_the_model_writes_is_marked_as_written(translator, most):
    source = "The cat sat on the mat."
    [run] = open_session(source, generate=most, model=translator).runs
    target, tokenizer = run.sides["target"], translator.tokenizer
    ids = torch.tensor([[*tokenizer.encode(source).ids, *tokenizer.after]])
    found = translator.generate(ids, max_new_tokens=most).texts()[0][0]
    assert target.prompt == 1 and target.tokens == run.call("cross.0").shape[2] == 1 + len(found) <= 1 + most
    words = run.words("target", 0, target.tokens)
    assert words[0].first == 0 and words[-1].end == target.tokens


@pytest.mark.parametrize("part", ["encoder", "decoder", "cross"])
def test_steps_of_an_encoder_decoder_are_of_the_map_that_is_shown(translator, part):
    session = open_session("The cat sat on the mat.", target="The dog sat.", model=translator)
    [run] = session.runs
    place = {"run": "0", "call": f"{part}.1", "head": 2, "item": 0}
    reply = session.reply("step", {**place, "row": 3})
    assert reply.status == 200, reply.header
    want = run.tile(f"{part}.1", 2, 0, "weights", "max", 0, 0, 0).values[3]
    np.testing.assert_allclose(reply.header["weights"], np.nan_to_num(want), atol=1e-6)
    side = run.sides[run.call(f"{part}.1").keys]
    assert len(reply.header["labels"]) == side.tokens and reply.header["labels"][-1] == side.words[-1].label


def test_a_target_longer_than_the_model_writes_is_refused(translator, monkeypatch):
    monkeypatch.setattr(translator, "longest", 9)
    with pytest.raises(ValueError, match="^generate: expected at most 9 tokens for this model, got 10$"):
        maps.read_pair("The cat sat.", 10, translator)


def test_a_pair_that_fails_leaves_no_files(translator, tmp_path):
    def interrupted(done, total):
        assert sys.platform != "linux" or str(tmp_path) in Path("/proc/self/maps").read_text()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:  # it holds what was kept
        maps.read_pair("The cat sat.", "A dog.", translator, budget=1, folder=tmp_path, progress=interrupted)
    assert error.traceback and list(tmp_path.iterdir()) == []
