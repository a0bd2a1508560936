"""Text to tokens and back."""

from __future__ import annotations

import pytest

from saccade.models import Tokenizer
from saccade.models.tokenizers.byte_pairs import learn_byte_pairs, short_words
from saccade.models.tokenizers.own import train_bpe, train_characters

ODD = "Zoë said: “naïve” — \t漢字 🙂\n\n <s> </s> <unk> end"


@pytest.fixture
def bpe(text):
    return train_bpe([text], 283)


def test_bpe_keeps_every_text(bpe, text):
    assert bpe.vocabulary == 283
    for sample in (text, ODD, "", " ", "\n"):
        assert bpe.decode(bpe.encode(sample).ids) == sample


def test_spans_are_the_characters_a_token_stands_for(bpe):
    for sample in ("the cat sat", ODD):
        encoding = bpe.encode(sample)
        assert len(encoding.ids) == len(encoding.spans)
        covered = set()
        for token, (start, stop) in zip(encoding.ids, encoding.spans, strict=True):
            covered |= set(range(start, stop))
            piece = bpe.decode([token])
            if "\ufffd" not in piece:
                assert piece == sample[start:stop]
        assert covered == set(range(len(sample)))


def test_merges_are_learned(bpe):
    assert len(bpe.encode("the cat sat on the mat").ids) < 12


@pytest.mark.parametrize("make", [lambda text: train_bpe([text], 283), lambda text: train_characters([text])])
def test_special_tokens_in_a_text_are_text(make, text):
    tokenizer = make(text)
    assert tokenizer.start not in tokenizer.encode("a <s> b").ids
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.start == tokenizer.start
    assert again.encode("a <s> b").ids == tokenizer.encode("a <s> b").ids
    assert tokenizer.decode([tokenizer.start, *tokenizer.encode("cat").ids]) == "cat"


def test_characters(text):
    tokenizer = train_characters([text, "xyz\n"])
    assert tokenizer.vocabulary == len(set(text) | set("xyz\n")) + 2
    encoding = tokenizer.encode("the\ncat\n\n")
    assert encoding.spans == [(i, i + 1) for i in range(9)]
    assert tokenizer.decode(encoding.ids) == "the\ncat\n\n"
    unknown = tokenizer.encode("t☃t").ids
    assert len(unknown) == 3
    assert tokenizer.decode(unknown) == "tt"


def test_encoding_in_parallel_is_encoding(bpe, text):
    lines = text.splitlines(keepends=True)
    assert bpe.encode_many(lines) == [bpe.encode(line).ids for line in lines]


def test_stream_gives_whole_characters(bpe):
    ids = bpe.encode(ODD).ids
    pieces = list(bpe.stream(ids))
    assert "".join(pieces) == ODD
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) < len(ids)


def test_stream_does_not_wait_forever_for_bytes_that_form_no_character(bpe):
    lone = bpe.encode("🙂").ids[0]
    pieces = list(bpe.stream([lone] * 9 + bpe.encode("ok").ids))
    assert "".join(pieces).endswith("ok")
    assert len(pieces) >= 3


def test_bad_input(text):
    with pytest.raises(ValueError, match="vocabulary: .* need at least 257, got 256"):
        train_bpe([text], 256)
    with pytest.raises(ValueError, match="not a tokenizer: "):
        Tokenizer.from_json("{}")


def test_no_word_makes_learning_quadratic():
    """The library's trainers take time by the square of a word's length: a cell of a megabyte took minutes."""
    texts = ["x" * 3011, "a  good\nfilm " * 7, "", "y" * 1000 + " z"]
    parts = list(short_words(texts))
    assert "".join(parts) == "".join(texts) and max(len(word) for part in parts for word in part.split()) == 1000
    assert max(map(len, learn_byte_pairs(texts[:2], 290, ["<s>"]).get_vocab())) == 1000
