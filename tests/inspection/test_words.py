from __future__ import annotations

import pytest
from pretend_lm import Pieces

from saccade.inspection import Word, group, split_words
from saccade.inspection._steps._chosen_word import asking
from saccade.inspection._words import about_tokens


def words(text):
    return [text[a:b] for a, b in split_words(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat sat.", ["The", "cat", "sat", "."]),
        ("don't, Anne\u2019s 'tis", ["don't", ",", "Anne\u2019s", "'", "tis"]),
        ("a--b...", ["a", "-", "-", "b", ".", ".", "."]),
        ("_very_ 3rd", ["_", "very", "_", "3rd"]),
        ("one\n\ntwo \n three", ["one", "\n\n", "two", "\n", "three"]),
        ("na\u00efve caf\u0065\u0301!", ["na\u00efve", "caf\u0065\u0301", "!"]),
        ("\u732b\u304c\u5ea7\u308b cat", ["\u732b", "\u304c", "\u5ea7", "\u308b", "cat"]),
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u0627\u0644\u0642\u0637\u0629",
            ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u0627\u0644\u0642\u0637\u0629"],
        ),
        (
            "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",
            ["\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u2764\ufe0f"],
        ),
        # Thai, Lao, Khmer, Burmese: a letter with its vowels, before and after it, its marks and what stands below it
        (
            "\u0e40\u0e17\u0e28\u0e23\u0e31\u0e01\u0e41\u0e25\u0e30 12",
            ["\u0e40\u0e17", "\u0e28", "\u0e23\u0e31", "\u0e01", "\u0e41\u0e25\u0e30", "12"],
        ),
        ("\u0ea5\u0eb2\u0ea7owl", ["\u0ea5\u0eb2", "\u0ea7", "owl"]),
        ("\u1781\u17d2\u1789\u17bb\u17c6\u179a", ["\u1781\u17d2\u1789\u17bb\u17c6", "\u179a"]),
        ("\u1019\u1014\u1039\u1010\u1031", ["\u1019", "\u1014\u1039\u1010\u1031"]),
        ("  \t ", []),
        ("$5 & <b>", ["$", "5", "&", "<", "b", ">"]),
    ],
)
def test_words_of_a_text(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_every_piece_belongs_to_exactly_one_word(size):
    text = "The  cat, don't sit\non 3 m\u00e4ts \u732b!  "
    spans = Pieces(size).encode(text).spans
    found = group(text, spans)
    assert found[0] == Word("<s>", 0, 0, 0, 1, special=True)
    assert [w.text for w in found[1:]] == words(text)
    pieces = [i for w in found for i in range(w.first, w.last)]
    assert pieces == list(range(len(spans) + 1))


def test_blank_pieces_belong_to_the_word_after_them_and_the_last_to_the_last():
    text = "a b "
    assert [(w.text, w.first, w.last) for w in group(text, [(0, 1), (1, 2), (2, 3), (3, 4)])] == [
        ("<s>", 0, 1),
        ("a", 1, 2),
        ("b", 2, 5),
    ]


def test_a_piece_over_several_words_joins_them():
    text = 'cat." sat'
    found = group(text, [(0, 3), (3, 5), (5, 9)])
    assert [w.text for w in found] == ["<s>", "cat", '."', "sat"]
    crossing = group("on it", [(0, 1), (1, 4), (4, 5)])
    assert [(w.text, w.first, w.last) for w in crossing] == [("<s>", 0, 1), ("on it", 1, 4)]


def test_bytes_of_one_character_are_one_word():
    assert [(w.text, w.last - w.first) for w in group("\u732b.", [(0, 1), (0, 1), (0, 1), (1, 2)])] == [
        ("<s>", 1),
        ("\u732b", 3),
        (".", 1),
    ]


def test_labels_never_break_a_line_or_control_a_terminal():
    assert Word("\n\n", 0, 2, 1, 2).label == "\u23ce"
    assert Word("\x1b[31m", 0, 5, 1, 2).label == "\ufffd[31m"
    assert Word("cat", 0, 3, 1, 2).label == "cat"
    assert Word(",", 0, 1, 1, 2).is_delimiter and Word("\n", 0, 1, 1, 2).is_delimiter
    assert not Word("<s>", 0, 0, 0, 1, special=True).is_delimiter and not Word("3", 0, 1, 1, 2).is_delimiter


def test_words_of_two_or_more_tokens_are_counted_without_marks():
    """ "owl" and " ab" of three tokens each, "," of one; then three words of 3, 1 and 1."""
    letters = [(i, i + 1) for i in range(7)]
    assert about_tokens(group("owl, ab", letters)).startswith("this tokenizer cuts a word of this text into 3.0 ")
    assert not about_tokens(group("owl a b", [*letters[:3], (3, 5), (5, 7)]))


def test_a_word_of_few_tokens_is_asked_where_most_have_several():
    words = group("owlet cat hatch", [(i, i + 1) for i in range(5)] + [(5, 9)] + [(i, i + 1) for i in range(9, 15)])
    chosen, notes = asking(words, None, None)
    assert chosen.text == "cat" and "no word was given: 'cat', the last of 1 token, is used" in notes
    assert asking(words, "hatch", None)[0].text == "hatch"
    chosen, notes = asking(group("owl hat", [(0, 1), (1, 3), (3, 6), (6, 7)]), None, None)
    assert chosen.text == "hat" and notes[-1] == "'hat' has 2 tokens: the query is the last of them"
