from __future__ import annotations

import dataclasses
import json

import pytest
from pretend_lm import (
    PretendLM,
    PretendText,
    at_ids,
    broad,
    duplicate,
    following,
    itself,
    last,
    previous,
    repeat,
    sink,
)

import saccade
from saccade import prune
from saccade.inspection import RULES, measure_roles, role_of
from saccade.models import load

WORDS = "cat dog hen fox owl bee ant elk emu yak cow pig rat bat eel cod asp ape kid doe ewe ram hog koi".split()


def ordinary_text(n=240):
    # A walk over the words by a step prime to their number: no word comes twice within 24.
    text = " ".join(WORDS[7 * i % len(WORDS)] + ("," if i % 5 == 4 else "") for i in range(n))
    return text + "."


def with_patterns(*patterns, **options):
    lm = PretendLM([list(patterns)], **options)
    lm.tokenizer.encode(ordinary_text())
    return lm


def roles(lm):
    return [head["role"] for head in measure_roles(lm, ordinary_text())["heads"]]


def test_heads_that_follow_a_pattern_get_its_name():
    lm = with_patterns(previous, itself, sink, duplicate, repeat, broad)
    assert roles(lm) == ["previous", "self", "sink", "duplicate", "repeat", "broad"]


def test_a_head_that_gathers_at_punctuation_is_a_delimiter_head():
    lm = with_patterns(broad, broad)
    marks = {lm.tokenizer.table[","], lm.tokenizer.table["."]}
    lm.model.patterns = [[at_ids(marks), at_ids({-1})]]
    assert roles(lm) == ["delimiter", "sink"]


def test_scores_of_known_patterns_and_of_chance():
    report = measure_roles(with_patterns(previous, broad, repeat), ordinary_text())
    first, uniform, copying = report["heads"]
    assert first["scores"]["previous"] == first["above_chance"]["previous"] == first["score"] == 1
    assert first["scores"]["broad"] == 0 and first["decided_by"] == "previous"
    for name in ("previous", "self", "sink", "delimiter", "repeat", "duplicate"):
        # A head that looks everywhere alike scores exactly what is called chance, up to the rounding to 4 decimals.
        assert abs(uniform["scores"][name] - report["chance"][name]) < 2e-4
        assert uniform["above_chance"][name] < 2e-4
    assert uniform["scores"]["broad"] == 1
    assert copying["scores"]["repeat"] == 1 and copying["scores"]["duplicate"] == 0


def test_the_description_is_json_repeatable_and_follows_the_seed():
    lm = with_patterns(repeat, broad)
    report = measure_roles(lm, ordinary_text(), seed=3)
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(measure_roles(lm, ordinary_text(), seed=3)))
    assert report["seed"] == 3 and report["format"] == 1
    assert [(h["layer"], h["head"]) for h in report["heads"]] == [(0, 0), (0, 1)]
    assert {r["measured_on"] for r in report["rules"]} == {"held-out text", "repeated random tokens"}


def test_rules_are_asked_in_order_and_thresholds_count():
    nothing = dict.fromkeys(("previous", "self", "sink", "delimiter", "repeat", "duplicate", "broad"), 0.0)
    for rule in RULES:
        for name in rule.roles:
            assert role_of(nothing | {name: rule.at_least}) == (name, name)
            below = role_of(nothing | {name: rule.at_least - 0.01})
            assert below[0] == "mixed" and (below[1] == name or name == "broad")
    assert role_of(nothing | {"sink": 0.9, "repeat": 0.3}) == ("repeat", "repeat")
    assert role_of(nothing | {"sink": 0.5, "previous": 0.6}) == ("previous", "previous")


@pytest.mark.parametrize("context", [17, 61, 257])
def test_short_contexts_and_texts_of_more_than_one_window(context):
    assert roles(with_patterns(previous, repeat, sink, context=context)) == ["previous", "repeat", "sink"]


@pytest.mark.slow
def test_layers_may_have_different_numbers_of_heads():
    """What is left of layer 0 sees what it saw: its scores are those of the whole model, in the order they had."""
    text = ordinary_text()
    whole = measure_roles(load(), text)["heads"]
    pruned = load()
    prune(pruned, {0: [1, 6], 3: [0]})
    found = measure_roles(pruned, text)["heads"]
    assert [sum(one["layer"] == layer for one in found) for layer in range(4)] == [6, 8, 8, 7]
    expected = [one["scores"] for one in whole if one["layer"] == 0 and one["head"] not in (1, 6)]
    assert [one["scores"] for one in found if one["layer"] == 0] == expected


def test_too_little_text_is_refused():
    lm = with_patterns(broad)
    with pytest.raises(ValueError, match="text: expected at least 16 tokens to measure roles, got 3"):
        measure_roles(lm, "one two three")
    with pytest.raises(ValueError, match="two different tokens"):
        measure_roles(lm, "cat " * 20)


def test_heads_that_look_both_ways_have_two_more_roles():
    heads = [previous, following, itself, sink, last, broad, duplicate]
    report = measure_roles(PretendText([heads]), ordinary_text())
    names = ["previous", "next", "self", "sink", "special", "broad", "duplicate"]
    assert [head["role"] for head in report["heads"]] == names
    without = measure_roles(PretendText([heads[:3]], before=(), after=()), ordinary_text())
    assert [head["role"] for head in without["heads"]] == names[:3] and without["text"]["tokens"] == 256
    assert report["text"]["tokens"] == 254


def test_equal_weights_are_chance_in_each_layer_also_in_windows():
    class Windows(PretendText):
        def _forward(self, tokens, observe):
            masks = iter([saccade.Causal(), saccade.Window(left=10, right=0)])
            super()._forward(tokens, lambda layer, call: observe(layer, dataclasses.replace(call, mask=next(masks))))

    report = measure_roles(Windows([[broad], [broad]], causal=True, after=()), ordinary_text())
    for layer, head in enumerate(report["heads"]):
        assert head["role"] == "broad" and head["scores"]["broad"] == 1
        for name in ("previous", "self", "sink", "delimiter", "repeat", "duplicate"):
            chance = report["chance"][name]
            assert head["scores"][name] == (chance[layer] if isinstance(chance, list) else chance)
    assert report["chance"]["self"][1] == pytest.approx((1 / 9 + 1 / 10 + 246 / 11) / 248, abs=1e-4)
    assert report["chance"]["duplicate"][1] == 0  # 24 words ago
