"""Nothing is told that chance gives: heads that look everywhere alike, and heads whose logits are random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pretend_lm import PretendLM, PretendText, broad, following
from pretend_random import KINDS

import saccade
from saccade.inspection import look, weights_of
from saccade.inspection._chance import LUCK, SHARED, SPREAD, UniformCalls, largest_mean, largest_weight, mean_of, uneven
from saccade.models import DecoderLM, LanguageModel, ModelConfig, load
from saccade.models.tokenizers.own import train_bpe
from saccade.operator._call import ObservedCall

WORDS = (
    "The cat sat on the mat, and the dog sat on the cat. When the rain came, the old house was dark; when the "
    "sun came, the old man was gone. I will go if you will go with me."
).split()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "ours"])
@pytest.mark.parametrize("size", [3, 1000])
def test_a_model_that_looks_everywhere_alike(kind, size):
    heads = [[broad] * 3] * 2
    model = PretendLM(heads, size=size) if kind == "ours" else PretendText(heads, size=size, **KINDS[kind])
    for count in (1, 2, 3, 20):
        text = " ".join(WORDS[:count])
        seen = look(model, text)
        assert np.allclose(seen.seen.weights, seen.seen.alike, atol=1e-6)
        assert [f.kind for f in seen.findings] == ["nothing"], seen.findings
        assert all(not seen.above(name, 1, 1) or seen.above(name, 1, 1) < 1e-5 for name in seen.chance)
        of_rows = look(model, text, rows=(1, count)).findings  # by statistics of tokens
        assert [f.kind for f in of_rows] == ["nothing"], of_rows
        if count > 1:
            assert "is above chance" in of_rows[0].sentence and "is above chance" in seen.findings[0].sentence


def test_alike_is_over_the_keys_that_a_mask_shows():
    one = torch.randn(1, 3, 7, 5)
    evens, bias = UniformCalls(), torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1) > 0, float("-inf"))
    seen = {"windowed": saccade.Causal() & saccade.Window(2, 0), "causal": saccade.Causal(), "by bias": None}
    for name, mask in seen.items():
        added = bias.expand(1, 3, 7, 7) if name == "by bias" else None
        call = ObservedCall(one, one, one, mask, added, 1.0, out=one, source=name)
        keys = [range(max(0, i - 2) if name == "windowed" else 0, i + 1) for i in range(7)]
        expected = torch.tensor([[(k in shown) / len(shown) for k in range(7)] for shown in keys])
        weights = weights_of(evens.of(call))
        torch.testing.assert_close(weights, expected.expand_as(weights))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "heads"), [(128, 8), (60, 3)])
def test_an_untrained_model(width, heads):
    torch.manual_seed(7)
    tokenizer = train_bpe([" ".join(WORDS) * 20], 400)
    config = ModelConfig(
        vocabulary=tokenizer.vocabulary, width=width, layers=3, heads=heads, kv_heads=heads, context=99
    )
    lm = LanguageModel(DecoderLM(config), tokenizer)
    for count in (2, 3, 4, 6, 10, 20, 37):
        for rows in (None, (1, 2)):
            (said,) = look(lm, " ".join(WORDS[:count]), rows=rows).findings
            assert "is above chance" in said.sentence, said


@pytest.mark.slow
@pytest.mark.parametrize(("width", "layers", "seed"), [(256, 6, 3), (256, 6, 5), (256, 6, 13), (64, 2, 21)])
def test_luck_that_rows_share_is_no_sink(width, layers, seed):
    """Deep rows of an untrained model are alike, so one key may please them all: found in 5 of 100 such short texts."""
    torch.manual_seed(seed)
    config = ModelConfig(load().tokenizer.vocabulary, width, layers, heads=4, context=128)
    (said,) = look(LanguageModel(DecoderLM(config), load().tokenizer), "One two three four five.").findings
    assert "is above chance" in said.sentence, said


def test_the_largest_of_averages_over_one_key():
    draw = np.random.default_rng(11)
    common = SPREAD * 0.45 * draw.standard_normal(100_000)  # a fifth of the variance of the key's logit, for all rows
    weights = []
    for keys in range(2, 8):
        own = common + SPREAD * 0.8**0.5 * draw.standard_normal(100_000)
        others = SPREAD * draw.standard_normal((100_000, keys - 1))
        weights.append(1 / (1 + np.exp(others - own[:, None]).sum(-1)))
    found, even = np.mean(weights, 0), 1 / np.arange(2, 8.0)
    assert LUCK / 8 < (found > largest_mean(mean_of(even), 1, 0, SHARED)).mean() < LUCK
    assert (found > largest_mean(mean_of(even), 1, 0)).mean() > 2 * LUCK


@pytest.mark.slow
def test_the_largest_of_random_weights():
    draw = np.random.default_rng(3)
    for keys in (2, 3, 8, 100):
        logits = SPREAD * draw.standard_normal((100_000, keys))
        first = 1 / (1 + np.exp(logits[:, 1:] - logits[:, :1]).sum(-1))
        for count in (1, 10):
            often = (first > largest_weight(np.array(1 / keys), count)).mean()
            assert LUCK / count / 8 < often < 2.5 * LUCK / count, (keys, count, often)


def test_the_largest_of_random_averages():
    draw = np.random.default_rng(5)
    weights = []
    for keys in range(2, 8):  # the word itself in a text of six words
        logits = SPREAD * draw.standard_normal((100_000, keys))
        weights.append(1 / (1 + np.exp(logits[:, 1:] - logits[:, :1]).sum(-1)))
    chance = mean_of(1 / np.arange(2, 8.0))
    found = np.mean(weights, 0)
    assert found.mean() == pytest.approx(chance.value, abs=0.01) and found.std() < chance.deviation < 1.3 * found.std()
    assert LUCK / 8 < (found > largest_mean(chance, 1, 0)).mean() < 2 * LUCK  # a normal tail of what is skewed


def test_random_heads_are_not_uneven_and_others_are():
    draw = np.random.default_rng(9)
    seen = np.tril(np.ones((9, 9), bool))[None]
    logits = SPREAD * draw.standard_normal((1000, 9, 9))
    weights = np.where(seen, np.exp(logits), 0)
    weights /= weights.sum(-1, keepdims=True)
    assert uneven(weights, seen, 1).mean() < 2 * LUCK and not uneven(weights, seen, 100_000).any()
    squared = weights**2 / (weights**2).sum(-1, keepdims=True)  # twice the logits
    assert uneven(squared, seen, 32).mean() > 0.9


def test_a_habit_is_told_where_chance_does_not_give_it():
    model = PretendText([[following, broad]])
    said = [f.sentence for f in look(model, " ".join(WORDS[:8])).findings]
    assert "Layer 0 head 0 looks one word ahead: 1.00 of its weight on average" in said


def test_a_head_below_a_threshold_never_shows_it():
    lm = PretendLM([[broad, following]])
    common = {"layer": 0, "decided_by": "previous"}
    near = {"head": 0, "role": "mixed", "score": 0.4069, "above_chance": {"previous": 0.3986}}
    over = {"head": 1, "role": "previous", "score": 0.4072, "above_chance": {"previous": 0.4001}}
    lm.heads = {"heads": [common | near, common | over]}
    seen = look(lm, "The cat sat.")
    assert [seen.deciding(seen.measured(0, head)) for head in (0, 1)] == [0.39, 0.40]
