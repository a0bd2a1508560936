"""Models that look ahead, and models without a start token: every rule, every claim, recomputed by other code."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from pretend_lm import PretendText, at_ids, broad, following, itself, last, previous, sink
from pretend_random import KINDS, TEXTS, random_model

from saccade.inspection import collect, find, here, look, name_of, short_number, telling
from slowly import slow_but

NAME = r"((?:[Tt]he \S+ )?'[^ ]+')"
NUMBER = r"(\.\d\d|1\.00)"
LINK = re.compile(
    rf"{NAME} looks (mostly at|most at|back at|ahead at|at) {NAME} \({NUMBER}\) in layer (\d+) head (\d+)"
)
AVERAGE = re.compile(rf"Layer (\d+) head (\d+) (.*): {NUMBER} of its weight on average")
GATHERS = re.compile(
    rf"Layer (\d+) head (\d+) concentrates on {NAME}: {NUMBER} of the weight of the (words after it|other words)"
)
RESTS = re.compile(r"(\d+) of (\d+) heads puts? more than (half|\.\d\d) of (?:its|their) weight on (.*)")
STEPS = {"looks one word back": -1, "looks one word ahead": 1, "stays on the word itself": 0}


def check(seen, finding):
    w, words, said = seen.weights, seen.words, finding.sentence
    text = [i for i, word in enumerate(words) if not word.special]
    if match := LINK.match(said):
        layer, head, q, k = finding.layer, finding.head, finding.query, finding.key
        assert (layer, head) == (int(match[5]), int(match[6])) and short_number(w[layer, head, q, k]) == match[4]
        assert [name.lower() for name in (match[1], match[3])] == [name_of(seen, i).lower() for i in (q, k)]
        if match[2].startswith("most"):
            assert w[layer, head, q].argmax() == k and (match[2] == "most at") == (w[layer, head, q, k] < 0.495)
        if match[2] in ("back at", "ahead at"):
            assert words[q].text.casefold() == words[k].text.casefold() and (k < q) == (match[2] == "back at")
        if finding.kind == "copy":
            assert words[k - 1].text.casefold() == words[q].text.casefold() and k - 1 != q and not words[k - 1].special
            assert said.endswith(f"the word after {name_of(seen, k - 1)}")
    elif match := AVERAGE.fullmatch(said):
        step = STEPS[match[3]]
        pairs = [(q, q + step) for q in text if q + step in text]
        assert short_number(np.mean([w[int(match[1]), int(match[2]), q, k] for q, k in pairs])) == match[4]
    elif match := GATHERS.fullmatch(said):
        k = finding.key
        assert name_of(seen, k) == match[3] and (match[5] == "words after it") == seen.causal
        rows = [q for q in text if (q > k if seen.causal else q != k)]
        assert short_number(np.mean(w[int(match[1]), int(match[2]), rows, k])) == match[4]
    elif match := RESTS.fullmatch(said):
        others = [i for i, word in enumerate(words) if word.special and i]
        targets = others if finding.kind == "special" else [0]
        means = [w[i, j][[q for q in text if q]][:, targets].sum(-1).mean() for i, j in seen.places()]
        least = 0.5 if match[3] == "half" else float(match[3])
        assert (int(match[1]), int(match[2])) == (sum(m > least for m in means), len(means)) == (finding.value, 13)
    else:
        assert finding.kind == "nothing", said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", slow_but(range(4), 0, 1))
def test_every_claim_can_be_read_off_the_map(kind, seed):
    for text in TEXTS:
        seen = collect(random_model(seed, kind, size=3 if seed % 2 else 1000), text)
        for finding in find(seen, limit=9):
            check(seen, finding)


@pytest.mark.slow
def test_the_random_models_reach_every_kind_of_sentence():
    found = {
        kind: [f for s in range(4) for text in TEXTS for f in find(collect(random_model(s, kind), text), limit=9)]
        for kind in ("ahead", "nothing")
    }
    kinds = {kind: {f.kind for f in all_found} for kind, all_found in found.items()}
    every = {"look", "copy", "same", "previous", "self", "sink", "nothing"}
    assert kinds["ahead"] >= every | {"next", "special"}
    assert kinds["nothing"] >= every | {"delimiter"} and not {"next", "special"} & kinds["nothing"]
    assert any("looks ahead at" in f.sentence for f in found["ahead"])
    assert not any("looks ahead at" in f.sentence for f in found["nothing"])


def test_a_head_that_gathers_at_a_comma():
    model = PretendText([[broad, broad]])
    model.encode(TEXTS[0])
    model.patterns = [[at_ids({model.pieces.table[","]}), broad]]
    (said,) = find(collect(model, TEXTS[0]))
    assert said.sentence == "Layer 0 head 0 concentrates on ',': 1.00 of the weight of the other words"


def test_habits_of_patterns_that_look_ahead():
    heads = [previous, following, itself, sink, last, broad]
    seen = collect(PretendText([heads]), "the dog, the cat.")
    habits = {name: values[0] for name, values in here(seen).items()}
    for i, name in enumerate(["previous", "next", "self", "sink", "special"]):
        # The first word has no word before it, the last none after it: their rows do not count there.
        assert math.isclose(habits[name][i], 1, abs_tol=1e-6), name
    assert math.isclose(habits["broad"][5], 1, rel_tol=1e-6)
    assert math.isclose(habits["entropy"][5], math.log(8), rel_tol=1e-6)
    size = 8  # [CLS] the dog , the cat . [SEP]
    for name, share in {"previous": 1, "next": 1, "self": 1, "sink": 1, "special": 1, "delimiter": 2}.items():
        assert math.isclose(habits[name][5], share / size, rel_tol=1e-5), name
    assert math.isclose(habits["duplicate"][5], 1 / size, rel_tol=1e-5)  # each "the" on the other one
    assert math.isclose(habits["repeat"][5], 1 / size, rel_tol=1e-5)  # ... and on what followed it


def test_habits_without_a_start_token():
    seen = collect(PretendText([[sink, broad, previous]], **KINDS["nothing"]), "the dog saw the cat")
    habits = {name: values[0] for name, values in here(seen).items()}
    assert [w.text for w in seen.words] == ["the", "dog", "saw", "the", "cat"] and seen.words[0].first == 0
    assert math.isclose(habits["sink"][0], 1, rel_tol=1e-6)
    assert math.isclose(habits["sink"][1], np.mean([1 / n for n in range(2, 6)]), rel_tol=1e-6)
    assert math.isclose(habits["previous"][2], 1, rel_tol=1e-6) and math.isclose(habits["broad"][1], 1, rel_tol=1e-6)
    assert np.isnan(habits["next"]).all() and np.isnan(habits["special"]).all()
    said = [f.sentence for f in find(seen) if f.kind == "sink"]
    assert said == [
        "1 of 3 heads puts more than .70 of its weight on the first word, the first 'the'"
    ]  # chance gives .32 here, and often .6; two of the five words are the same


def test_resting_on_sep():
    model = PretendText([[last, last, broad]])
    said = [f.sentence for f in look(model, TEXTS[1]).findings]
    assert said == ["2 of 3 heads put more than half of their weight on '[SEP]'"]
    model = PretendText([[at_ids({PretendText.SPECIAL + 1}), broad]], after=("[SEP]", "[SEP]"))
    said = [f.sentence for f in look(model, TEXTS[1]).findings]
    assert said == ["1 of 2 heads puts more than half of its weight on the special tokens after the first"]


def test_one_word_is_nothing_to_tell():
    for kind, others in {"ahead": " and at '[CLS]' and '[SEP]'", "nothing": "", "ending": " and at '</s>'"}.items():
        (said,) = find(collect(random_model(0, kind), "Nobody"))
        assert said.sentence == f"Nothing to report: 'Nobody' can look only at itself{others}"
        assert look(random_model(0, kind), "Nobody").query == (1 if kind == "ahead" else 0)


def test_telling_in_a_square():
    same = np.full((7, 7), 1 / 7)
    assert np.allclose(telling(same, causal=False), 0)
    one = np.zeros((7, 7))
    one[:, 0] = 1
    one[2, 0], one[2, 5] = 0, 1
    # Nothing else falls three words ahead, and no other row looks at word 5: a seventh is what chance would give.
    assert math.isclose(telling(one, causal=False)[2, 5], math.log(7))
    others = np.delete(telling(one, causal=False), 2, 0)
    assert np.allclose(others[:, 0], math.log(6 / 5)) and np.allclose(others[:, 1:], 0)  # five of the six others do so
    ahead = np.diag(np.ones(6), 1)
    ahead[6, 0] = 1
    assert np.allclose(telling(ahead, causal=False)[:6], 0)  # a habit of distance, ahead as well as back


def test_layers_with_different_heads():
    model = random_model(0, "ahead")
    seen = collect(model, TEXTS[0])
    assert (seen.layers, seen.heads, seen.count) == (2, 8, 13)
    assert not seen.weights[1, 5:].any() and np.allclose(seen.weights[1, :5].sum(-1), 1, atol=1e-5)
    assert look(model, TEXTS[0], (0, 7)).head == 7
    with pytest.raises(ValueError, match=r"head: 1\.5 does not exist; .* the layers 0 to 1, with 5 to 8 heads each"):
        look(model, TEXTS[0], (1, 5))


def test_what_follows_the_last_word_is_no_copy():
    seen = collect(PretendText([[last, broad]]), "the dog saw the")
    assert here(seen)["repeat"][0, 0] < 1e-6  # [SEP] follows the second "the", and is nothing to copy
