"""Every claim of every sentence is recomputed here from the map, by other code than the one that made it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from pretend_lm import PretendLM, at_ids, broad, duplicate, itself, previous, repeat, sink

from saccade.inspection import AttentionMap, collect, find, look, measure_roles, name_of, short_number
from saccade.inspection._findings import _ordinal

TEXTS = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "When the rain came, the old house was dark; when the sun came, the old man was gone.",
    "a b a b a c a b.",
    "Nobody!",
    "Well, well,\nwell: 'tis Anne, Anne's Anne.",
]
NUMBER = r"(\.\d\d|1\.00)"
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]


def random_lm(seed, size=1000):
    """Heads with a habit and a lot of noise, so that links, copies and habits all occur."""

    def noisy(habit, strength, number):
        def pattern(tokens):
            draw = torch.Generator().manual_seed(1000 * seed + number)
            return habit(tokens) / 60 * strength + 3 * torch.randn(len(tokens), len(tokens), generator=draw)

        return pattern

    habits = [previous, itself, sink, broad, duplicate, repeat, previous]
    heads = [noisy(h, 4 + i, i) for i, h in enumerate(habits)]
    return PretendLM([heads, [noisy(h, 9, 50 + i) for i, h in enumerate(habits)]], size=size)


def word_number(seen: AttentionMap, name: str) -> int:
    """The word that "'cat'" or "the second 'cat'" names."""
    match = re.fullmatch(r"(?:[Tt]he (\w+) )?'(.*)'", name, re.DOTALL)
    alike = [i for i, w in enumerate(seen.words) if w.label.casefold() == match[2].casefold()]
    if match[1] is None:
        assert len(alike) == 1, name
        return alike[0]
    found = alike[ORDINALS.index(match[1])]
    assert seen.words[found].label == match[2]
    return found


NAME = r"((?:[Tt]he \w+ )?'[^ ]+')"
LINK = re.compile(rf"{NAME} looks (?:mostly at|most at|back at|at) {NAME} \({NUMBER}\)(?: in layer (\d+) head (\d+))?")
AVERAGE = re.compile(
    rf"Layer (\d+) head (\d+) (looks one word back|stays on the word itself): {NUMBER} of its weight on average"
)
GATHERS = re.compile(rf"Layer (\d+) head (\d+) concentrates on {NAME}: {NUMBER} of the weight of the words after it")
SINKS = re.compile(
    r"(\d+) of (\d+) heads puts? more than (half|\.\d\d) of (?:its|their) weight on the first token, '<s>'"
)


def check(seen: AttentionMap, finding, roles) -> None:
    said = finding.sentence
    w = seen.weights
    if match := SINKS.fullmatch(said):
        means = [
            np.mean([w[i, j, q, 0] for q in range(1, len(seen.words))])
            for i in range(seen.layers)
            for j in range(seen.heads)
        ]
        assert (int(match[1]), int(match[2])) == (
            sum(m > (0.5 if match[3] == "half" else float(match[3])) for m in means),
            len(means),
        )
    elif match := AVERAGE.fullmatch(said):
        step = 1 if "back" in match[3] else 0
        values = [w[int(match[1]), int(match[2]), q, q - step] for q in range(1 + step, len(seen.words))]
        assert short_number(np.mean(values)) == match[4]
    elif match := GATHERS.fullmatch(said):
        k = word_number(seen, match[3])
        assert short_number(np.mean(w[int(match[1]), int(match[2]), k + 1 :, k])) == match[4]
    elif finding.kind == "nothing":
        assert finding.layer is None
    else:
        check_link(seen, finding, roles)


def check_link(seen: AttentionMap, finding, roles) -> None:
    match = LINK.search(finding.sentence)
    copying = re.match(r"Head (\d+)\.(\d+) copies what followed an earlier occurrence: ", finding.sentence)
    layer, head = (int(copying[1]), int(copying[2])) if copying else (int(match[4]), int(match[5]))
    q, k = word_number(seen, match[1]), word_number(seen, match[2])
    row = seen.weights[layer, head, q]
    assert (layer, head, q, k) == (finding.layer, finding.head, finding.query, finding.key)
    assert short_number(row[k]) == match[3] and finding.value == row[k]
    if "mostly" in finding.sentence:
        assert row[k] >= 0.495 and row.argmax() == k
    if "most at" in finding.sentence:
        assert row.argmax() == k
    if "back at" in finding.sentence:
        assert seen.words[q].text.casefold() == seen.words[k].text.casefold()
    if finding.kind == "copy":
        assert seen.words[k - 1].text.casefold() == seen.words[q].text.casefold() and k < q
    if copying:
        assert roles["heads"][layer * seen.heads + head]["role"] == "repeat"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_every_claim_can_be_read_off_the_map(text, seed):
    lm = random_lm(seed, size=3 if seed % 2 else 1000)
    seen = collect(lm, text)
    heads = [{"layer": i, "head": j, "role": "repeat" if j == 5 else "mixed"} for i in range(2) for j in range(7)]
    for roles in (None, {"heads": heads}):
        found = find(seen, roles, limit=7)
        assert 1 <= len(found) <= 7
        for finding in found:
            check(seen, finding, roles)


@pytest.mark.slow
def test_the_random_models_reach_every_kind_of_sentence():
    kinds = {f.kind for seed in range(5) for text in TEXTS for f in find(collect(random_lm(seed), text), limit=9)}
    assert kinds >= {"look", "copy", "same", "previous", "self", "sink", "nothing"}


def test_a_head_that_gathers_at_a_comma():
    lm = PretendLM([[broad, broad]])
    lm.tokenizer.encode(TEXTS[0])
    lm.model.patterns = [[at_ids({lm.tokenizer.table[","]}), broad]]
    seen = collect(lm, TEXTS[0])
    (said,) = (f for f in find(seen) if f.kind == "delimiter")
    assert said.sentence == "Layer 0 head 0 concentrates on ',': 1.00 of the weight of the words after it"
    check(seen, said, None)


@pytest.mark.slow
def test_sentences_differ_in_kind_and_head():
    for seed, text in itertools.product(range(5), TEXTS):
        found = find(collect(random_lm(seed), text), limit=9)
        looks = [f for f in found if f.kind == "look"]
        others = [f.kind for f in found if f.kind != "look"]
        assert len(others) == len(set(others)) and len(looks) <= 2
        assert len({f.place for f in looks}) == len({f.query for f in looks}) == len(looks)


def test_only_a_measured_head_is_said_to_copy():
    lm = PretendLM([[repeat, sink, previous]])
    text = "Mary met John, and then Mary met Anne."
    assert not any("copies" in f.sentence for f in look(lm, text).findings)
    words = " ".join(f"w{i}" for i in range(60))
    lm.heads = measure_roles(lm, words)
    said = look(lm, text).findings[0]
    assert (
        said.sentence
        == "Head 0.0 copies what followed an earlier occurrence: the second 'Mary' looks at the first 'met' (1.00)"
    )


def test_one_word_is_nothing_to_tell():
    (said,) = find(collect(random_lm(0), "Nobody"))
    assert said.kind == "nothing" and said.sentence.startswith("Nothing to report: 'Nobody' can look only at itself")


def test_heads_that_do_what_is_expected_are_not_made_interesting():
    (said,) = find(collect(PretendLM([[broad, broad], [broad, broad]]), TEXTS[1]))
    assert said.kind == "nothing" and "is above chance" in said.sentence


def test_a_chosen_head_is_shown_and_its_word_is_telling():
    lm = random_lm(1)
    seen = look(lm, TEXTS[0], (1, 3))
    assert (seen.layer, seen.head) == (1, 3)
    assert seen.query == seen.gain.max(-1).argmax() or any(f.place == (1, 3) for f in seen.findings)
    with pytest.raises(
        ValueError, match=r"head: 2\.0 does not exist; this model has the layers 0 to 1, .* heads 0 to 6"
    ):
        look(lm, TEXTS[0], (2, 0))


@pytest.mark.parametrize(
    "heads",
    [
        [],
        {},
        {"heads": [{"layer": 0}]},
        {"heads": [{"layer": 0, "head": 0, "role": "x", "decided_by": "x", "score": 1}]},
    ],
)
def test_damaged_roles_are_named(heads):
    lm = random_lm(0)
    lm.heads, lm.name = heads, "runs/mine"
    with pytest.raises(ValueError, match="model: the heads of runs/mine are damaged"):
        look(lm, TEXTS[0])


def test_columns_hold_both_ends_of_what_tells_most_and_narrow_ones_are_among_wide_ones():
    lm = PretendLM([[sink]])
    seen = replace(look(lm, " ".join(f"w{i}" for i in range(40))), query=31)
    seen.gain[:] = 0
    seen.gain[31, 27] = 1
    assert seen.ends == (31, 27) and seen.columns(7) == [0, *range(26, 33)] and seen.breaks(seen.columns(7)) == [1]
    assert seen.columns(40) == seen.columns(99) == list(range(41)) and seen.breaks(seen.columns(99)) == []
    for size in range(1, 40):
        assert len(seen.columns(size)) == size + 1 and set(seen.columns(size)) < set(seen.columns(size + 1))


def test_names_of_repeated_words_and_ordinals():
    seen = collect(PretendLM([[broad]]), "The hen saw the owl.")
    assert [name_of(seen, i) for i in (0, 1, 2, 4)] == ["'<s>'", "the first 'The'", "'hen'", "the second 'the'"]
    assert [_ordinal(n) for n in (1, 10, 11, 12, 13, 21, 22, 23, 111, 121)] == [
        "first",
        "tenth",
        "11th",
        "12th",
        "13th",
        "21st",
        "22nd",
        "23rd",
        "111th",
        "121st",
    ]
