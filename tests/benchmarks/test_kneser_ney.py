"""The trigram that the language model is measured by, and how words are scored."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from looped import looped
from saccade.models import DecoderLM, LanguageModel, ModelConfig
from saccade.models.tokenizers.own import train_bpe

PATH = Path(__file__).parents[2] / "benchmarks" / "kneser_ney.py"
spec = importlib.util.spec_from_file_location("kneser_ney", PATH)
kneser_ney = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kneser_ney)

SEQUENCES = [list("abracadabra"), list("cabbage"), list("bad cab a bad cad"), list("a")]
ALPHABET = sorted(set("".join(map("".join, SEQUENCES))))


@pytest.mark.parametrize("order", [2, 3, 4])
def test_probabilities_sum_to_one_after_every_history(order):
    model = kneser_ney.KneserNey(SEQUENCES, order, lambda _: 1 / len(ALPHABET))
    for history in ("", "a", "ab", "zz", "cab", "ra", "bad ca", "q"):
        total = math.fsum(model.probability(symbol, history) for symbol in ALPHABET)
        assert total == pytest.approx(1.0, abs=1e-12)


def test_bigram_by_hand():
    """Chen and Goodman's formula written out for order 2, from plain counts."""
    model = kneser_ney.KneserNey(SEQUENCES, 2, lambda _: 1 / len(ALPHABET))
    pairs = Counter(pair for s in SEQUENCES for pair in zip(["", *s], s, strict=False))
    before = Counter(symbol for _, symbol in pairs)  # how many different symbols stand before it

    def discounted(counts, symbol):
        seen = Counter(counts.values())
        n1, n2, n3, n4 = (max(seen[i], 1) for i in range(1, 5))
        y = n1 / (n1 + 2 * n2)
        d = [0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
        return [min(max(x, 0.01), i - 0.01) if i else 0 for i, x in enumerate(d)]

    d1, d2 = discounted(before, None), discounted(pairs, None)
    for context in ("", "a", "b", "c"):
        after = {symbol: count for (first, symbol), count in pairs.items() if first == context}
        for symbol in ALPHABET:
            total = sum(before.values())
            low = (before[symbol] - d1[min(before[symbol], 3)]) / total
            low += sum(d1[min(count, 3)] for count in before.values()) / total / len(ALPHABET)
            c, total = after.get(symbol, 0), sum(after.values())
            left = sum(d2[min(count, 3)] for count in after.values()) / total
            expected = (c - d2[min(c, 3)]) / total + left * low
            assert model.probability(symbol, context) == pytest.approx(expected, rel=1e-12)


def test_a_word_is():
    text = "\"Don't,\" said _he_ -- 42 o'clock.\n\nOh!"
    assert kneser_ney.words_of(text) == [
        '"',
        "Don't",
        ',"',
        "said",
        "_",
        "he",
        "_",
        "--",
        "42",
        "o'clock",
        ".",
        "\n",
        "\n",
        "Oh",
        "!",
    ]


def test_unknown_words_have_a_probability_only_where_words_are_spelled():
    losses = kneser_ney.trigram_losses(["the cat sat on the mat\n" * 9, "a dog ran"], ["the cow sat"])
    assert [math.isfinite(loss) for loss in losses["closed"]] == [True, False, True]
    assert all(math.isfinite(loss) for loss in losses["open"])
    assert losses["open"][1] > losses["open"][0]


@pytest.fixture
def lm():
    text = "the cat sat on the mat, and the dog -- 'tis said -- sat on the cat's mat.\n"
    tokenizer = train_bpe([text * 3], 280)
    model = DecoderLM(ModelConfig(tokenizer.vocabulary, width=12, layers=1, heads=2, hidden=8, context=10)).eval()
    return LanguageModel(model, tokenizer)


@pytest.mark.slow
@looped("length", [1, 4, 5, 9, 10, 11, 14, 15, 16, 37])
def test_each_token_is_scored_once_from_at_least_half_a_context(lm, length):
    ids = torch.randint(1, lm.tokenizer.vocabulary, (length,)).tolist()
    losses = kneser_ney.token_losses(lm, ids, batch=2)
    for i, loss in enumerate(losses):
        expected = set()
        for start in range(0, max(i, 1), 5) if i else [0]:
            if i < start + 10 and (start == 0 or i >= start + 5):
                tokens = torch.tensor([[lm.tokenizer.start, *ids[start : i + 1]]])
                logits = lm.model(tokens[:, :-1])[0, -1]
                expected.add(round(F.cross_entropy(logits, tokens[0, -1]).item(), 4))
        assert round(loss, 4) in expected or any(abs(loss - e) < 2e-4 for e in expected)


def test_words_share_out_all_of_the_loss(lm):
    text = "the cow's mat, 'tis 42\nsat -- on the cat.\n"
    losses = kneser_ney.language_model_losses(lm, text)
    assert len(losses) == len(kneser_ney.words_of(text))
    assert sum(losses) == pytest.approx(sum(kneser_ney.token_losses(lm, lm.tokenizer.encode(text).ids)), rel=1e-6)
    assert min(losses) > 0
