"""Words on tokens, and the word looked at most: against sums written out on the dense matrix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from checkpoints import bert, gpt2, llama
from hypothesis import given, strategies as st
from pretend import PretendModel, evenly, first, itself, randomly

from saccade.analysis import _alignment as alignment
from saccade.analysis._alignment import UnmatchedWords, align, most_attended
from saccade.inspection import open_model, split_words, weights_of
from saccade.inspection._models import Tokens


def tokens_of(aligned, unit):
    return list(range(aligned.starts[unit], aligned.starts[unit + 1]))


def test_words_of_several_tokens():
    text = "abcde fg h"
    aligned = align(PretendModel([[evenly]], pieces=2), text, split_words(text))
    assert aligned.unit_of == (0, 1, 2)
    assert [tokens_of(aligned, u) for u in range(3)] == [[1, 2, 3], [4], [5]]  # 0 is [CLS], 6 is [SEP]
    assert len(aligned.ids) == 7


def test_words_in_one_token_are_one_unit():
    aligned = align(PretendModel([[evenly]]), "cannot go", [(0, 3), (3, 6), (7, 9)])
    assert aligned.unit_of == (0, 0, 1)
    assert aligned.units == 2


def test_words_that_overlap_in_tokens_are_chained():
    # tokens ab|cd|e; words abc and de share the token cd
    aligned = align(PretendModel([[evenly]], pieces=2), "abcde fg", [(0, 3), (3, 5), (6, 8)])
    assert aligned.unit_of == (0, 0, 1)
    assert tokens_of(aligned, 0) == [1, 2, 3]


def test_words_of_the_same_characters_are_one_unit():
    aligned = align(PretendModel([[evenly]]), "du pain", [(0, 2), (0, 2), (3, 7)])
    assert aligned.unit_of == (0, 0, 1)


class Deaf(PretendModel):
    """Its tokenizer drops what is no letter, and makes tokens of blanks."""

    def encode(self, text):
        ids, spans = super().encode(text)
        kept = [(i, s) for i, s in zip(ids, spans, strict=True) if text[s[0]].isalpha()]
        kept += [(99, (k, k + 1)) for k, c in enumerate(text) if c == " "]
        kept.sort(key=lambda entry: entry[1])
        return Tokens([i for i, _ in kept], [s for _, s in kept])


def test_words_without_a_token_and_tokens_without_a_word():
    aligned = align(Deaf([[evenly]]), "one ! two", split_words("one ! two"))
    assert aligned.unit_of == (0, None, 1)
    assert [tokens_of(aligned, u) for u in range(2)] == [[1], [2, 3, 4]]  # blanks belong to the word after them
    assert aligned.missing == 1


def test_a_file_that_does_not_match_is_refused():
    missing = UnmatchedWords("bank.conllu", "deaf")
    text = "one ! two ?"
    missing.add(
        "s1", ["one"] * 70, align(Deaf([[evenly]]), " ".join(["one"] * 70), split_words(" ".join(["one"] * 70)))
    )
    missing.add("s2", ["one", "!", "two", "?"], align(Deaf([[evenly]]), text, split_words(text)))
    missing.check()  # 2 of 74
    missing.add("s3", ["one", "!", "two", "?"], align(Deaf([[evenly]]), text, split_words(text)))
    with pytest.raises(
        ValueError,
        match=r"bank.conllu: does not match the tokens of deaf: 4 of 78 words have no "
        r"token, the first is sentence s2, token 2 '!'",
    ):
        missing.check()


@pytest.mark.parametrize("kind", [bert, gpt2, llama, None])
def test_every_word_has_its_own_characters_in_real_tokenizers(kind, tmp_path):
    model = open_model(None if kind is None else kind(tmp_path))
    text = "The cat isn't on the mat; nobody knows catalogues."
    words = split_words(text)
    aligned = align(model, text, words)
    assert aligned.missing is None
    spans = model.encode(text).spans
    for word, unit in enumerate(aligned.unit_of):
        pieces = [spans[i - len(model.before)] for i in tokens_of(aligned, unit)]
        start, stop = words[word]
        assert min(a for a, _ in pieces) <= start and max(b for _, b in pieces) >= stop
    inside = range(len(model.before), len(aligned.ids) - len(model.after))
    assert [i for u in range(aligned.units) for i in tokens_of(aligned, u)] == list(inside)


def looked_at(weights, aligned, asked):
    """By the definition: sums over the key's tokens, averages over the query's."""
    found = np.zeros((weights.shape[0], len(asked)), dtype=int)
    for (h, w), (n, q) in itertools.product(enumerate(weights), enumerate(asked)):
        to = [
            np.mean([sum(w[i, j] for j in tokens_of(aligned, k)) for i in tokens_of(aligned, q)]) if k != q else 0.0
            for k in range(aligned.units)
        ]
        found[h, n] = int(np.argmax(to)) if max(to) > 0 else -1
    return found


def asked_of(model, aligned, asked):
    found = []
    model.run(torch.tensor([aligned.ids]), lambda layer, call: found.append(most_attended(call, aligned, asked)))
    return found


@given(lengths=st.lists(st.integers(1, 7), min_size=2, max_size=11), seed=st.integers(0, 5), causal=st.booleans())
def test_most_attended_is_the_definition(lengths, seed, causal):
    text = " ".join("abcdefg"[:n] for n in lengths)
    heads = [randomly(seed), randomly(seed + 7)]
    model = PretendModel([heads], pieces=2, causal=causal)
    aligned = align(model, text, split_words(text))
    asked = list(range(aligned.units))[::2]
    (found,) = asked_of(model, aligned, asked)
    dense = torch.stack([head(aligned.ids) for head in heads]).double()
    if causal:
        dense = dense.tril() / dense.tril().sum(-1, keepdim=True)
    assert np.array_equal(found, looked_at(dense.numpy(), aligned, asked))


@pytest.mark.parametrize("kind", [bert, gpt2, llama])
def test_checkpoints_answer_as_their_dense_weights_say(kind, tmp_path):
    model = open_model(kind(tmp_path))
    text = "The old man isn't on the catalogues."
    aligned = align(model, text, split_words(text))
    asked = list(range(aligned.units))
    dense = []
    model.run(torch.tensor([aligned.ids]), lambda layer, call: dense.append(weights_of(call)[0].double().numpy()))
    for found, weights in zip(asked_of(model, aligned, asked), dense, strict=True):
        assert np.array_equal(found, looked_at(weights, aligned, asked))


def test_itself_and_special_tokens_are_left_out():
    text = "one two three"
    model = PretendModel([[itself, first, evenly]])
    aligned = align(model, text, split_words(text))
    (found,) = asked_of(model, aligned, [0, 2])
    assert found.tolist() == [[-1, -1], [-1, -1], [1, 0]]  # of equal weights the first


def test_blocks_give_the_same(monkeypatch):
    text = "abcdefg bcdef abc cdefg de"
    model = PretendModel([[randomly(3)]], pieces=2)
    aligned = align(model, text, split_words(text))
    whole = asked_of(model, aligned, [0, 1, 2, 3, 4])[0]
    monkeypatch.setattr(alignment, "_ENTRIES", 50)
    assert np.array_equal(asked_of(model, aligned, [0, 1, 2, 3, 4])[0], whole)
