"""Every operation of the viewer against dense weights, and whatever may be wrong with a request as one sentence."""

from __future__ import annotations

import json
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import saccade
from saccade.inspection import open_model, weights_of
from saccade.inspection._models import SaccadeModel
from saccade.models import DecoderLM, LanguageModel, ModelConfig
from saccade.models.tokenizers.own import train_bpe
from saccade.viewer.server import _heads, _steps
from saccade.viewer.server._params import ParameterError, Params
from saccade.viewer.server._session import _OPERATIONS
from saccade.viewer.server._view import open_session

TEXT = "The <b>hen</b> met the fox, and the fox met the owl; the owl sat on the hen."
LAYERS, HEADS, WIDTH = 3, 5, 40


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(7)
    tokenizer = train_bpe([TEXT] * 3, 290)
    config = ModelConfig(
        vocabulary=tokenizer.vocabulary, width=WIDTH, layers=LAYERS, heads=HEADS, kv_heads=1, context=211
    )
    lm = DecoderLM(config)
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # peaked rows: a swapped axis cannot pass
    return SaccadeModel(LanguageModel(lm, tokenizer))


@pytest.fixture(scope="module")
def session(model):
    return open_session(TEXT, model=model, head=(1, 2))


@pytest.fixture(scope="module")
def dense(model):
    """(layer, head, row, key) in float64."""
    out = {}
    tokens = model.whole(model.encode(TEXT).ids)
    model.run(tokens, lambda layer, call: out.__setitem__(layer, weights_of(call)[0].double().numpy()))
    return np.stack([out[layer] for layer in sorted(out)])


def answer(session, op, **params):
    """Header and float32 numbers, by way of JSON."""
    reply = session.reply(op, json.loads(json.dumps(params)))
    assert reply.status == 200, reply.header
    header = json.loads(json.dumps(reply.header, allow_nan=False))
    return header, [np.frombuffer(buffer, "<f4") for buffer in reply.buffers]


PLACE = {"run": "0", "call": "1", "head": 2, "item": 0}


def test_texts_that_begin_alike_have_other_digests(model):
    texts = [TEXT * 4, TEXT * 4 + " Yes.", TEXT * 4]
    runs = [answer(open_session(text, model=model), "open")[0]["runs"][0] for text in texts]
    assert len({run["text"] for run in runs}) == 1
    assert [run["digest"] == runs[0]["digest"] for run in runs] == [True, False, True]


def test_what_there_is_to_see(session, dense):
    header, buffers = answer(session, "open")
    [run] = header["runs"]
    [side] = run["sides"]
    assert (header["version"], header["saccade"], buffers) == (1, saccade.__version__, [])
    assert header["shown"] == PLACE and header["step"]
    assert run["text"] == TEXT and side["tokens"] == dense.shape[-1] and side["named"]
    assert [(c["layer"], c["heads"], c["kv_heads"], c["width"], c["causal"]) for c in run["calls"]] == [
        (layer, HEADS, 1, WIDTH // HEADS, True) for layer in range(LAYERS)
    ]


def test_words_cover_the_tokens_and_join_to_the_text(session):
    side = answer(session, "open")[0]["runs"][0]["sides"][0]
    words = answer(session, "words", run="0", side="text", start=0, stop=side["tokens"])[0]["words"]
    assert [first for _, _, first, *_ in words[1:]] == [end for _, _, _, end, *_ in words[:-1]]
    assert words[0][4] == 1 and words[-1][3] == side["tokens"] and len(words) == side["words"]
    assert "".join(gap + text for text, _, _, _, special, gap, _ in words if not special) == TEXT
    middle = answer(session, "words", run="0", side="text", start=words[3][2], stop=words[3][2] + 1)[0]["words"]
    assert middle == [words[3]]


def test_a_tile_is_the_weights_and_a_coarser_one_their_pool(session, dense):
    exact = dense[1, 2]
    size = len(exact)
    header, [values] = answer(session, "tile", **PLACE, what="weights", pool="max", level=0, row=0, key=0, exact=True)
    hidden = np.triu(np.ones((size, size), bool), 1)
    assert (header["rows"], header["keys"], header["sampled"]) == (size, size, 0)
    np.testing.assert_array_equal(np.isnan(values.reshape(size, size)), hidden)
    np.testing.assert_allclose(values.reshape(size, size)[~hidden], exact[~hidden], atol=1e-6)
    header, [values] = answer(session, "tile", **PLACE, what="weights", pool="mean", level=2, row=0, key=0, exact=True)
    for n, line in enumerate(values.reshape(header["rows"], header["keys"])):
        for m, value in enumerate(line):
            part = exact[4 * n : 4 * n + 4, 4 * m : 4 * m + 4][~hidden[4 * n : 4 * n + 4, 4 * m : 4 * m + 4]]
            assert (np.isnan(value) and not part.size) or abs(value - part.mean()) < 1e-6


def test_rows_and_columns_of_several_words(session, dense):
    exact = dense[1, 2]
    header, [values] = answer(session, "row", **PLACE, tokens=[9, 4, 9], start=2, stop=7, top=3)
    mean = exact[[4, 9]].mean(0)
    np.testing.assert_allclose(values, mean[2:7], atol=1e-6)
    assert [key for key, _ in header["top"]] == list(np.argsort(-mean, kind="stable")[:3])
    header, [values] = answer(session, "column", **PLACE, tokens=[1, 4], start=0, stop=len(exact), top=2)
    np.testing.assert_allclose(values, exact[:, [1, 4]].sum(1), atol=1e-6)
    assert header["received"] == pytest.approx(exact[:, [1, 4]].sum(), abs=1e-5)


def test_one_pair(session, dense):
    row = dense[1, 2, 8]
    header, _ = answer(session, "cell", **PLACE, row=8, key=3)
    assert header["weight"] == pytest.approx(row[3], abs=1e-6)
    assert (header["seen"], header["visible"], header["bias"]) == (9, True, None)
    assert header["rank"] == 1 + (row > row[3]).sum()
    assert header["logit"] == pytest.approx(header["product"] / (WIDTH // HEADS) ** 0.5, rel=1e-5)
    hidden, _ = answer(session, "cell", **PLACE, row=3, key=8)
    assert (hidden["visible"], hidden["weight"], hidden["logit"]) == (False, 0, None)


def test_statistics_of_rows_and_heads(session, dense):
    exact = dense[1, 2]
    header, [values] = answer(session, "rows", **PLACE, start=3, stop=11)
    found = dict(zip(header["names"], values.reshape(len(header["names"]), 8), strict=True))
    entropy = -np.where(exact > 0, exact * np.log(np.where(exact > 0, exact, 1)), 0).sum(1)
    np.testing.assert_allclose(found["entropy"], entropy[3:11], atol=1e-5)
    np.testing.assert_allclose(found["received"], exact.sum(0)[3:11], atol=1e-5)
    header, [values] = answer(session, "overview", run="0", item=0)
    maps = values.reshape(LAYERS * HEADS, 48, 48)
    head = header["heads"][HEADS + 2]
    assert (head["call"], head["head"], header["side"]) == ("1", 2, 48)
    assert head["entropy"] == pytest.approx(entropy.mean(), abs=1e-5)
    assert np.nanmax(maps[HEADS + 2]) == pytest.approx(exact.max(), abs=1e-6)
    assert np.isnan(maps[:, 0, -1]).all() and not np.isnan(maps[:, -1, 0]).any()


@pytest.mark.parametrize(("rows", "keys"), [(7, 19), (19, 7), (7, 7)])
def test_keys_that_are_no_rows_have_places_of_their_own(rows, keys):
    attend = torch.nn.Module()
    query, key = torch.randn(1, 2, rows, 4), torch.randn(1, 2, keys, 4)
    attend.forward = lambda: saccade.attention(query, key, key)
    with saccade.watch(attend, keep=True) as seen:
        attend()
    session = open_session(seen)
    received = saccade.attention_weights(query.double(), key.double())[0, 1].sum(0).numpy()
    stop = max(rows, keys)
    header, buffers = answer(session, "rows", run="0", call="0", head=1, item=0, start=2, stop=stop)
    assert header["received"] and len(buffers[0]) == len(header["names"]) * (rows - 2)
    if rows == keys:
        assert header["names"][-1] == "received" and "received_keys" not in header
        found = buffers[0].reshape(-1, rows - 2)[-1]
    else:
        assert "received" not in header["names"] and header["received_keys"] == keys
        found = buffers[1]
    np.testing.assert_allclose(found, received[2:stop], atol=1e-5)


def test_the_steps_of_a_row(session, dense):
    header, _ = answer(session, "step", **PLACE, row=8)
    assert (header["layer"], header["head"], header["row"], header["text"]) == (1, 2, 8, TEXT)
    np.testing.assert_allclose(header["weights"], dense[1, 2, 8], atol=1e-6)
    [side] = answer(session, "open")[0]["runs"][0]["sides"]
    words = answer(session, "words", run="0", side="text", start=0, stop=side["tokens"])[0]["words"]
    for text, _, first, end, *_ in words:
        assert end - first > 1 or header["labels"][first] == text


def at_once(*work):
    """Each on a thread of its own, with as many switches between them as can be."""
    interval, threads = sys.getswitchinterval(), [threading.Thread(target=one) for one in work]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.slow
def test_steps_of_two_texts_at_once_are_each_ones_own(model):
    """Both are read by one model, whose modules are observed meanwhile."""
    session = open_session([TEXT, TEXT.replace("owl", "bee")], model=model)
    alone = [answer(session, "step", **{**PLACE, "run": run}, row=8) for run in "01"]
    found = [[], []]

    def ask(run):
        found[run].extend(answer(session, "step", **{**PLACE, "run": str(run)}, row=8) for _ in range(9))

    at_once(lambda: ask(0), lambda: ask(1))
    assert [[one == alone[run] for one in found[run]] for run in (0, 1)] == [[True] * 9] * 2


def test_a_model_that_is_used_meanwhile_changes_no_steps(session, model):
    """As by the next cell of a notebook."""
    alone = answer(session, "step", **PLACE, row=8)
    found, done = [], threading.Event()

    def ask():
        try:
            found.extend(answer(session, "step", **PLACE, row=8) for _ in range(9))
        finally:
            done.set()

    def use():
        with torch.no_grad():
            while not done.is_set():
                model.module(model.whole([5, 6, 7, 8] * 5))

    at_once(ask, use)
    assert [one == alone for one in found] == [True] * 9


def test_what_watch_kept_has_no_steps(session):
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with torch.no_grad(), saccade.watch(layer, keep=True) as seen:
        layer(torch.randn(2, 9, 8))
    watched = open_session(seen)
    opened = watched.reply("open", {}).header
    assert not opened["step"] and "kept calls of a watch have none" in opened["why_not"]
    reply = watched.reply("step", {**PLACE, "call": "0", "head": 0, "row": 3})
    assert reply.status == 400 and reply.header["error"].startswith("step: ")


def test_a_text_above_the_limit_says_how_long_it_is_and_what_to_do(session, monkeypatch):
    """It named the limit alone, in a tab, and spoke of a saved page."""
    tokens = session.runs[0].sides["text"].tokens
    assert answer(session, "open")[0]["why_not"] is None
    monkeypatch.setattr(_steps, "MOST_STEPS", tokens - 1)
    del session.opened
    why = answer(session, "open")[0]["why_not"]
    assert f"at most {tokens - 1:,} tokens, and this has {tokens:,}" in why and "--to" in why
    for op, more in (("step", {**PLACE, "row": 3}), ("heads", {"run": "0", "off": [], "row": None})):
        assert session.reply(op, more).header["error"] == f"{op}: {why}"
    monkeypatch.undo()
    del session.opened


def test_progress_is_told_while_heads_are_patched_and_not_after(session, monkeypatch):
    """A page had nothing to show for minutes."""
    seen = []

    def patched(*given, progress, **how):
        progress(3, 32)
        seen.append(answer(session, "progress")[0])
        raise ValueError("other: enough")

    monkeypatch.setattr(_heads, "patch_texts", patched)
    params = {"run": "0", "other": "a", "target": "", "positions": "", "by": "exact"}
    assert session.reply("patching", params).status == 400
    assert [(one["done"], one["total"]) for one in seen] == [(3, 32)]
    assert answer(session, "progress")[0] == {}


@pytest.mark.slow
def test_a_long_text_and_a_watch_open_at_a_clear_head():
    """They opened at head 0.0, which may be the most diffuse."""
    attend = torch.nn.Module()
    query, key = torch.randn(1, 3, 11, 4), torch.randn(1, 3, 11, 4)
    query[:, 1], key[:, 1] = 40 * torch.eye(11, 4), torch.eye(11, 4)
    query[:, 2], key[:, 2, 1:] = 1.0, -40.0  # rests on the first key, which is no pattern
    attend.forward = lambda: saccade.attention(query, key, key)
    with saccade.watch(attend, keep=True) as seen:
        attend()
    assert open_session(seen).shown.head == 1
    long = open_session("The owl sat, and the fox met it. " * 60, model=open_model(None).with_context(2048))
    run = long.runs[0]
    evenness = {(h.call, h.head): h.numbers["evenness"] for h in run.overview(0)}
    assert evenness[long.shown.call, long.shown.head] < np.median(list(evenness.values()))


def test_a_search_shows_the_text_around(session):
    header, _ = answer(session, "search", run="0", side="text", query="THE FOX", limit=1)
    [[_, first, end, before, text, after]] = header["found"]
    assert header["total"] == 2 and text == "the fox" and end > first
    assert (before + text + after) in TEXT


GOOD = {
    "open": {},
    "alive": {},
    "words": {"run": "0", "side": "text", "start": 0, "stop": 5},
    "overview": {"run": "0", "item": 0},
    "tile": {**PLACE, "what": "weights", "pool": "max", "level": 0, "row": 0, "key": 0, "exact": True},
    "row": {**PLACE, "tokens": [3], "start": 0, "stop": 5, "top": 3},
    "column": {**PLACE, "tokens": [3], "start": 0, "stop": 5, "top": 3},
    "cell": {**PLACE, "row": 3, "key": 1},
    "rows": {**PLACE, "start": 0, "stop": 4},
    "search": {"run": "0", "side": "text", "query": "hen", "limit": 5},
    "progress": {},
    "step": {**PLACE, "row": 8},
    "heads": {"run": "0", "off": [["1", 2], ["0", 4]], "row": 8},
    "importance": {"run": "0"},
    "patching": {"run": "0", "other": TEXT.replace("owl", "fox"), "target": "", "positions": "", "by": "gradient"},
    "script": {"name": "heads"},
}
WRONG = {
    "run": ["1", 0, None, "../0"],
    "side": ["target", []],
    "call": ["9", 1],
    "head": [-1, 5, 1.5, "2", True, 10**5000],
    "item": [1, -1],
    "start": [-1, 2**70, "0"],
    "stop": [10**6, -1],
    "what": ["scores", "bias", {}],  # these calls have no bias
    "pool": ["min"],
    "level": [7, -1],  # 54 tokens: beyond 6 there is nothing more to pool
    "row": [10**6],
    "key": [10**6],
    "exact": [1, "yes"],
    "tokens": [[], [-1], [10**6], 3, ["3"], [True], list(range(20_001))],
    "top": [1001, -1],
    "query": [3, "x" * 1001],
    "limit": [1001],
    "off": [None, "1", [["9", 0]], [["1", HEADS]], [["1"]], [[1, 2]], [["1", "2"]], [["1", 2]] * (LAYERS * HEADS + 1)],
    "other": [None, "", TEXT, "x" * 100_001],
    "target": [3, "x" * 201],
    "positions": [3, "x" * 201],
    "by": ["ablation", None],
    "name": ["client", "../client", 3],
}


def test_whatever_is_wrong_is_one_sentence_that_names_the_parameter(session):
    for op, good in GOOD.items():
        assert session.reply(op, good).status == 200
        for name in good:
            cases = [{**good, name: wrong} for wrong in WRONG[name]]
            for params in [*cases, {key: value for key, value in good.items() if key != name}]:
                reply = session.reply(op, params)
                assert (reply.status, reply.buffers) == (400, ())
                assert reply.header["error"].startswith(f"{name}: ") and len(reply.header["error"]) < 400
    assert set(GOOD) == set(_OPERATIONS)


def test_there_is_no_tile_beyond_the_last():
    """256 tokens are one tile exactly, and 257 are two."""
    for length, tiles in ((256, 1), (257, 2)):
        query = torch.randn(1, 1, length, 4)
        attend = torch.nn.Module()
        attend.forward = lambda query=query: saccade.attention(query, query, query)
        with saccade.watch(attend, keep=True) as seen:
            attend()
        session = open_session(seen)
        place = {**GOOD["tile"], **PLACE, "call": "0", "head": 0}
        assert session.reply("tile", {**place, "row": tiles - 1, "key": tiles - 1}).status == 200
        for wrong in ({"row": tiles}, {"key": tiles}):
            assert session.reply("tile", {**place, **wrong}).status == 400


def test_a_range_of_too_many_tokens_is_refused():
    with pytest.raises(ParameterError, match="stop: expected a whole number from 7 to 10, got 3"):
        Params({"start": 7, "stop": 3}).span(10)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
names = sorted({name for params in GOOD.values() for name in params})


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(op=st.sampled_from(sorted(GOOD)) | json_values, params=st.dictionaries(st.sampled_from(names), json_values))
def test_no_request_can_break_it(session, op, params):
    """Some parameters of each request are right and some are anything."""
    good = GOOD.get(op, {}) if isinstance(op, str) else {}
    for given_params in ({**good, **params}, params, list(params)):
        reply = session.reply(op, given_params)
        assert reply.status in (200, 400, 404)
        json.dumps(reply.header, allow_nan=False)


def test_an_error_of_ours_stays_where_saccade_runs(session, monkeypatch, caplog):
    def broken(*_, **__):
        raise IndexError("/home/someone/secret.py")

    monkeypatch.setattr(session.runs[0], "tile", broken)
    reply = session.reply("tile", GOOD["tile"])
    assert reply.status == 500 and "secret" not in reply.header["error"]
    assert "secret" in caplog.text


def test_what_json_has_no_number_for_is_null(session, monkeypatch):
    cell = session.runs[0].cell("1", 2, 0, 3, 1)
    monkeypatch.setattr(session.runs[0], "cell", lambda *_: cell._replace(weight=float("nan"), logit=float("-inf")))
    header, _ = answer(session, "cell", **GOOD["cell"])
    assert header["weight"] is None and header["logit"] is None and header["seen"] == cell.seen


def test_two_viewers_at_once(model, dense):
    """A session that nobody has asked yet, asked by four threads for the same and for other things."""
    session = open_session(TEXT, model=model)
    found, start = [], threading.Barrier(4)

    def ask(order):
        start.wait()
        for head in order:
            place = {"run": "0", "call": "2", "head": head, "item": 0}
            _, [rows] = answer(session, "rows", **place, start=0, stop=dense.shape[-1])
            _, [tile] = answer(session, "tile", **{**GOOD["tile"], **place})
            found.append((head, rows.tobytes(), tile.tobytes()))

    threads = [threading.Thread(target=ask, args=(order,)) for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [0, 1, 2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and len(set(found)) == 3
