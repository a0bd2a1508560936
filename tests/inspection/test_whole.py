"""Texts too long for a map: the statistics, links and parts against the whole matrix of weights, by other code."""

from __future__ import annotations

import re
import tracemalloc

import checkpoints
import numpy as np
import pytest
from pretend_lm import PretendText, at_ids, broad, following, itself, last, previous, repeat, sink
from pretend_random import KINDS, TEXTS, random_model

from recording import Largest
from saccade.inspection import _look as limits, collect, look, open_model, short_number
from saccade.inspection._collect import read
from saccade.inspection._models import weights_of
from saccade.inspection._token_map import look_again, survey
from slowly import slow_but

TEXT = " ".join(TEXTS[:3]) + " Old houses, dark mats: nobody sat there again."


def dense(model, text):
    """(layers, most heads, L, L) on tokens, and the words."""
    tokens, words = read(model, text)
    size = words[-1].last
    out = np.zeros((model.layers, max(model.heads), size, size))

    def keep(layer, call):
        weights = weights_of(call)
        out[layer, : weights.shape[1]] = weights[0].double().numpy()

    model.run(model.whole(tokens.ids), keep)
    return tokens, words, out


def habits_by_hand(w, words, causal):
    """One token after the other: what each average is over, spelled out."""
    word_of = [i for i, word in enumerate(words) for _ in range(word.first, word.last)]
    special = [words[i].special for i in word_of]
    size = len(word_of)
    delimiters = [j for j in range(size) if words[word_of[j]].is_delimiter]
    others = [j for j in range(1, size) if special[j]]
    rows = [i for i in range(size) if not special[i]]
    seen = (lambda i: range(i + 1)) if causal else (lambda i: range(size))

    def group(members):
        able = [i for i in rows if any(j != i for j in members if j in seen(i))]
        return [(i, members) for i in able]

    pairs = {
        "previous": [(i, [i - 1]) for i in rows if i and not special[i - 1]],
        "next": [(i, [i + 1]) for i in rows if i + 1 < size and not special[i + 1] and not causal],
        "self": [(i, [i]) for i in rows],
        "sink": [(i, [0]) for i in rows if i],
        "special": group(others),
        "delimiter": group(delimiters),
    }
    out = {
        name: np.mean([w[:, :, i, list(k)].sum(-1) for i, k in chosen], 0) if chosen else np.full(w.shape[:2], np.nan)
        for name, chosen in pairs.items()
    }
    entropy = -np.where(w > 0, w * np.log(np.where(w > 0, w, 1)), 0).sum(-1)
    out["entropy"] = entropy[:, :, rows].mean(-1)
    out["largest"] = w.max(-1)[:, :, rows].mean(-1)
    distance = abs(np.subtract.outer(np.arange(size), np.arange(size)))
    out["distance"] = (w * distance).sum(-1)[:, :, rows].mean(-1)
    able = [i for i in rows if len(seen(i)) > 1]
    out["broad"] = np.mean([entropy[:, :, i] / np.log(len(seen(i))) for i in able], 0)
    return out, word_of


def exists(model):
    return np.array([[head < heads for head in range(max(model.heads))] for heads in model.heads])


@pytest.mark.parametrize("size", [3, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_the_whole_matrix(kind, size):
    model = random_model(3, kind, size)
    tokens, words, w = dense(model, TEXT)
    whole = survey(model, TEXT, tokens.ids, words)
    expected, word_of = habits_by_hand(w, words, model.causal)
    there = exists(model)
    assert whole.habits.keys() == expected.keys()
    for name, values in expected.items():
        # float32 sums over fewer than 150 keys and rows; distances are up to 150 tokens.
        assert np.allclose(whole.habits[name][there], values[there], atol=3e-5 * 150, rtol=0, equal_nan=True), name
        assert name == "distance" or np.allclose(whole.habits[name][there], values[there], atol=3e-5, equal_nan=True), (
            name
        )
    received = np.bincount(word_of, w.sum((0, 1, 2))) / (there.sum() * len(word_of))
    assert np.allclose(whole.received, received, atol=1e-6) and abs(whole.received.sum() - 1) < 1e-5


@pytest.mark.parametrize("kind", ["ahead", "nothing"])
def test_what_a_head_gathers_at(kind):
    model = random_model(1, kind, 4)
    tokens, words, w = dense(model, TEXT)
    whole = survey(model, TEXT, tokens.ids, words)
    length = words[-1].last
    for layer, head in [(0, 0), (0, 7), (1, 4)]:
        best = (0.0, None)
        for k, word in enumerate(words):
            if word.special or word.last - word.first > 1 or k == 0:
                continue
            rows = [i for i in range(length) if (i > word.first if model.causal else i != word.first)]
            if len(rows) >= 8:
                best = max(best, (w[layer, head, rows, word.first].mean(), k))
        assert whole.gathers[0][layer, head] == best[1]
        assert abs(whole.gathers[1][layer, head] - best[0]) < 1e-5


@pytest.mark.parametrize("size", [3, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_rows_are_those_of_the_map(kind, size):
    model = random_model(2, kind, size)
    tokens, words = read(model, TEXT)
    whole = survey(model, TEXT, tokens.ids, words)
    full = collect(model, TEXT).weights
    columns = [0, 7, 8, 9, 30, 31, len(words) - 1]
    wanted = [(0, 1, 5), (1, 3, 29), (0, 1, 30)]
    part = look_again(model, tokens.ids, whole, columns, wanted, (1, 2))
    assert np.allclose(part.weights, full[:, :, columns][..., columns], atol=1e-6)
    assert [row[:3] for row in part.rows] == sorted(wanted)
    for row in part.rows:
        assert np.allclose(row.weights, full[row.layer, row.head, row.query], atol=1e-6)
    for query, key, value in part.outside:
        elsewhere = full[1, 2, query].copy()
        elsewhere[columns] = 0
        assert elsewhere.max() == pytest.approx(value, abs=1e-6) and elsewhere[key] == pytest.approx(value, abs=1e-6)
    assert sorted(query for query, _, _ in part.outside) == columns
    assert [value for *_, value in part.outside] == sorted((value for *_, value in part.outside), reverse=True)


def test_links_are_the_largest_weights_and_their_kinds():
    names = "cat dog hen fox owl bee ant elk emu yak cow pig rat bat eel".split()
    text = " ".join([*names, "mew", *names])  # the second time each looks at what followed it
    model = PretendText([[repeat, broad]], causal=True)
    tokens, words = read(model, text)
    whole = survey(model, text, tokens.ids, words)
    assert {(link.kind, link.head) for link in whole.links} == {("copy", 0)}
    assert {(link.query, link.key) for link in whole.links} == {(17 + i, 2 + i) for i in range(15)}


NAME = r"'(\S+)' \(word ([\d,]+)\)|'(\[\S+\]|</?s>)'"
NUMBER = r"(\.\d\d|1\.00)"


def number_of(name, seen):
    """The index of the word that a sentence names."""
    match = re.fullmatch(NAME, name)
    if match[3]:
        return next(i for i, word in enumerate(seen.words) if word.label == match[3])
    leading = int(seen.ordinary[0])
    at = int(match[2].replace(",", "")) + leading - 1
    assert seen.words[at].label == match[1]
    return at


def check(said, full, tokens, words, w, model):
    """``said`` against the map of all words ``full`` and the matrix of all tokens ``w``."""
    length = words[-1].last
    link = re.fullmatch(
        rf"('\S+' \(word \S+?\)) looks (mostly at|most at|back at|ahead at|at) ('\S+' \(word \S+?\)) \({NUMBER}\) "
        r"in layer (\d+) head (\d+)(?:, the word after (.*))?",
        said,
    )
    average = re.fullmatch(rf"Layer (\d+) head (\d+) (.*): {NUMBER} of its weight on average", said)
    gathers = re.fullmatch(rf"Layer (\d+) head (\d+) concentrates on (.*): {NUMBER} of the weight of the (.*)", said)
    rests = re.fullmatch(r"(\d+) of (\d+) heads puts? more than half of (?:its|their) weight on (.*)", said)
    most = re.fullmatch(rf"(.*?) gets {NUMBER} of the weight of all heads(?:, then .*)?", said)
    if link:
        q, k = number_of(link[1], full), number_of(link[3], full)
        value = full.weights[int(link[5]), int(link[6]), q, k]
        assert abs(value - float(link[4])) <= 0.00501
        if link[2].startswith("most"):
            assert full.weights[int(link[5]), int(link[6]), q].argmax() == k
            assert (link[2] == "most at") == (value < 0.495)
        if link[2] in ("back at", "ahead at"):
            assert words[q].text.casefold() == words[k].text.casefold() and (link[2] == "back at") == (k < q)
        if link[7]:
            assert number_of(link[7], full) == k - 1 and words[k - 1].text.casefold() == words[q].text.casefold()
    elif average:
        step = {"looks one token back": -1, "looks one token ahead": 1, "stays on the token itself": 0}[average[3]]
        rows = [i for i in range(length) if not special_at(words, i) and not special_at(words, i + step)]
        mean = np.mean([w[int(average[1]), int(average[2]), i, i + step] for i in rows])
        assert abs(mean - float(average[4])) <= 0.00501
    elif gathers:
        at = words[number_of(gathers[3], full)].first
        assert gathers[5] == ("tokens after it" if model.causal else "other tokens")
        rows = [i for i in range(length) if (i > at if model.causal else i != at)]
        assert abs(w[int(gathers[1]), int(gathers[2]), rows, at].mean() - float(gathers[4])) <= 0.00501
    elif rests:
        others = [i for i in range(1, length) if special_at(words, i)]
        targets = [0] if "first" in rests[3].split(":")[0] and "after" not in rests[3] else others
        rows = [i for i in range(1, length) if not special_at(words, i)]
        means = [w[i, j][rows][:, targets].sum(-1).mean() for i, j in full.places()]
        assert (int(rests[1]), int(rests[2])) == (sum(m > 0.5 for m in means), len(means))
    else:
        assert most, said
        mean = sum(w[i, j].sum(0) for i, j in full.places()) / (full.count * length)
        word = words[number_of(most[1], full)]
        assert abs(mean[word.first : word.last].sum() - float(most[2])) <= 0.00501


def special_at(words, token):
    return not any(word.first <= token < word.last and not word.special for word in words)


@pytest.mark.parametrize(
    ("kind", "seed"),
    slow_but([(kind, seed) for kind in KINDS for seed in range(3)], *list(zip(KINDS, (0, 1) * 2, strict=True))[::2]),
)
def test_every_claim_can_be_read_off_the_matrix(kind, seed, monkeypatch):
    monkeypatch.setattr(limits, "MOST_WORDS", 3)
    for text in (TEXT, TEXTS[4 * (seed % 2)]):
        model = random_model(seed, kind, size=3 if seed % 2 else 1000)
        tokens, words, w = dense(model, text)
        full = collect(model, text)
        found = look(model, text)
        assert found.whole is not None and found.findings
        for finding in found.findings:
            check(finding.sentence, full, tokens, words, w, model)
        for said in found.outside:
            query, key, value = re.fullmatch(rf"(.*\)|'.*') looks at (.*\)|'.*') {NUMBER}", said).groups()
            q, k = number_of(query, full), number_of(key, full)
            assert abs(full.weights[found.layer, found.head, q, k] - float(value)) <= 0.00501


@pytest.mark.slow
def test_habits_of_a_long_text_are_told(monkeypatch):
    monkeypatch.setattr(limits, "MOST_WORDS", 50)
    model = PretendText([[previous, following, itself, sink, last, broad], [broad] * 5 + [at_ids({-1})]])
    said = {f.kind: f.sentence for f in look(model, "cat dog hen fox owl " * 30).findings}
    assert said["previous"] == "Layer 0 head 0 looks one token back: 1.00 of its weight on average"
    assert said["next"] == "Layer 0 head 1 looks one token ahead: 1.00 of its weight on average"
    assert said["self"] == "Layer 0 head 2 stays on the token itself: 1.00 of its weight on average"
    assert said["sink"] == "2 of 12 heads put more than half of their weight on the first token, '[CLS]'"
    assert said["special"] == "1 of 12 heads puts more than half of its weight on '[SEP]'"
    assert (
        said["received"] == "'[CLS]' gets .17 of the weight of all heads, then '[SEP]' .09"
    )  # with the little that all others give


# The look


@pytest.mark.slow
def test_rows_of_a_short_text_in_its_context():
    model = random_model(0, "ahead")
    full = collect(model, TEXT)
    found = look(model, TEXT, (1, 2), rows=(4, 9))
    assert found.seen.at == (0, *range(4, 10), len(full.words) - 1) and (found.layer, found.head) == (1, 2)
    assert np.allclose(found.seen.weights, full.weights[:, :, list(found.seen.at)][..., list(found.seen.at)], atol=1e-6)
    assert [w.text for w in found.seen.words] == [full.words[i].text for i in found.seen.at]
    assert found.runs(range(8)) == [(4, 9)] and found.part(range(8)) == f"words 4 to 9 of {len(full.words) - 2}"
    assert found.words == len(full.words) - 2 and found.pieces == full.pieces
    for finding in found.findings:
        for at in (finding.query, finding.key):
            assert at is None or f"'{found.seen.words[at].label}'" in finding.sentence
    total = len(full.words) - 2
    for wrong in ((0, 3), (5, 4), (3, total + 1)):
        with pytest.raises(
            ValueError, match=rf"rows: {wrong[0]} to {wrong[1]} are not words of this text, which has 1 to {total}"
        ):
            look(model, TEXT, rows=wrong)


@pytest.mark.slow
def test_a_part_without_a_start_token_keeps_the_first_word():
    found = look(random_model(0, "nothing"), TEXT, rows=(20, 24))
    assert found.seen.at == (0, *range(19, 24))
    assert found.runs(range(6)) == [(1, 1), (20, 24)]
    assert found.part(range(6)) == f"words 1 and 20 to 24 of {found.words}"


def test_the_part_of_a_long_text_holds_both_ends_of_what_is_told_first(monkeypatch):
    monkeypatch.setattr(limits, "MOST_WORDS", 100)
    model = PretendText([[repeat, broad]], causal=True)
    names = [f"w{i}" for i in range(200)]
    found = look(model, " ".join([*names, "w37", "again"]), (0, 0))
    first = next(f for f in found.findings if f.kind == "copy")
    assert first.sentence.startswith("'w37' (word 201) looks at 'w38' (word 39) (1.00) in layer 0 head 0")
    assert [found.number(i) for i in (first.query, first.key)] == [201, 39] and found.query == first.query
    assert found.seen.weights[0, 0, first.query, first.key] == pytest.approx(1, abs=1e-6)
    assert found.runs(range(len(found.seen.words))) == [(29, 48), (191, 202)]
    with pytest.raises(ValueError, match=r"rows: 1 to 101 are 101 words; a map of this model holds 100"):
        look(model, " ".join(names), rows=(1, 101))


@pytest.mark.slow
def test_a_map_is_bounded_by_what_all_heads_take(monkeypatch):
    model = random_model(0, "ahead")
    size = len(collect(model, TEXT).words)
    monkeypatch.setattr(limits, "MOST_WEIGHTS", 13 * size**2)
    assert look(model, TEXT).whole is None
    monkeypatch.setattr(limits, "MOST_WEIGHTS", 13 * size**2 - 1)
    assert look(model, TEXT).whole is not None
    monkeypatch.setattr(limits, "MOST_WEIGHTS", 13 * 6**2)
    assert look(model, TEXT, rows=(3, 8)).whole is not None
    with pytest.raises(ValueError, match=r"rows: 3 to 9 are 7 words; a map of this model holds 6"):
        look(model, TEXT, rows=(3, 9))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_checkpoints_of_transformers(name, tmp_path, monkeypatch):
    model = open_model(getattr(checkpoints, name)(tmp_path / name, context=120))
    text = " ".join(checkpoints.LINES[:2])
    full = collect(model, text)
    tokens, words, w = dense(model, text)
    monkeypatch.setattr(limits, "MOST_WORDS", 3)
    found = look(model, text)
    assert np.allclose(found.seen.weights, full.weights[:, :, list(found.seen.at)][..., list(found.seen.at)], atol=1e-4)
    for finding in found.findings:
        check(finding.sentence, full, tokens, words, w, model)
    assert short_number(found.habits["self"][0, 0]) == short_number(
        habits_by_hand(w, words, model.causal)[0]["self"][0, 0]
    )


@pytest.mark.slow
def test_memory_is_linear_in_the_length(tmp_path):
    model = open_model(checkpoints.llama(tmp_path / "llama", context=9000, layers=1, heads=2, kv_heads=1))
    largest, peaks = [], []
    for length in (4000, 8000):
        text = " ".join(["sat on the mat"] * (length // 4))
        with Largest() as torch_side:
            tracemalloc.start()
            found = look(model, text)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        largest.append(torch_side.numel)
        assert found.whole.length > length
    # The MLP's (L, 29) is what grows; the rest (tiles) does not. A single row of weights of all heads would be L x L.
    assert largest[1] <= 2.1 * largest[0] and largest[1] < 4000 * 4000 / 8
    assert peaks[1] <= 2.2 * peaks[0]
