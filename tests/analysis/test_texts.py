"""Files are read or refused by name; pieces fit every model, end where words do, and cover what there is."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from pretend import PretendModel, evenly

from saccade.analysis import Text, _texts as texts, cut, read_files
from saccade.analysis._texts import fitting


def model(**more):
    return PretendModel([[evenly]], **more)


def test_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_bytes("\ufeffOne\r\ntwo \n".encode())
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("three")
    (tmp_path / "deep" / "other.md").write_text("four")
    found = read_files([tmp_path / "deep" / "other.md", tmp_path])
    assert [text for _, text in found] == ["four", "One\ntwo", "three"]
    assert found[1].name == str(tmp_path / "b.txt")


def test_what_is_no_text_is_refused(tmp_path):
    def refused(name, content, words, kind=ValueError):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(kind, match=words):
            read_files([path])

    refused("bad.txt", b"ok \xff", r"bad.txt: not a text in UTF-8 \(byte 0xff at position 3\)")
    refused("zero.txt", b"ok \0", "zero.txt: a binary file, not a text")
    refused("blank.txt", b" \n", "blank.txt: expected texts, got only blanks")
    refused("missing.txt", None, "missing.txt", FileNotFoundError)
    (tmp_path / "empty").mkdir()
    refused("empty", None, "empty: the folder holds no .txt file", FileNotFoundError)


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LARGEST_FILE", 2**20)
    (tmp_path / "large.txt").write_bytes(b"a" * (2**20 + 1))
    with pytest.raises(ValueError, match="large.txt: expected at most 1 MiB"):
        read_files([tmp_path / "large.txt"])


WORDS = st.lists(st.text("abcde,\n", min_size=1, max_size=9), min_size=1, max_size=60)


@given(words=WORDS, tokens=st.integers(3, 23), most=st.integers(1, 9), context=st.sampled_from([None, 5, 11]))
def test_pieces_fit_and_keep_their_order(words, tokens, most, context):
    text = " ".join(words).strip()
    models = [model(), model(context=context, pieces=2)]
    pieces = cut([Text("t", text)], models, tokens=tokens, most=most) if text else []
    assert len(pieces) <= most
    end = 0
    for name, piece in pieces:
        start = int(name.removeprefix("t:"))
        assert text[start : start + len(piece)] == piece == piece.strip()
        assert piece
        assert start >= end
        end = start + len(piece)
        for each in models:
            whole = len(each.before) + len(each.encode(piece).ids) + len(each.after)
            assert whole <= min(tokens, each.context or tokens)


@given(words=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=50), tokens=st.integers(3, 19))
def test_pieces_cover_a_text_that_is_short_enough_and_end_at_words(words, tokens):
    text = " ".join(words)
    pieces = cut([Text("t", text)], [model()], tokens=tokens, most=len(words))
    assert " ".join(piece for _, piece in pieces).split() == words
    assert all(len(piece.split()) == tokens - 2 for _, piece in pieces[:-1])  # as long as possible


def test_pieces_are_spread_over_documents_and_over_each():
    documents = [Text("a", "one two " * 300), Text("b", "three four " * 100)]
    pieces = cut(documents, [model()], tokens=12, most=8)
    starts = {"a": [], "b": []}
    for name, _ in pieces:
        file, _, start = name.partition(":")
        starts[file].append(int(start))
    assert len(starts["a"]) in (5, 6) and len(starts["b"]) in (2, 3)  # 2400 and 1100 characters
    assert starts["a"][0] == 0 and starts["a"][-1] > 1800


def test_a_long_document_beside_many_short_ones_takes_what_they_leave():
    documents = [*(Text(f"{i}", "one two") for i in range(20)), Text("long", "three four " * 300)]
    names = [name.partition(":")[0] for name, _ in cut(documents, [model()], tokens=12, most=30)]
    assert len(names) <= 30 and set(names) == {text.name for text in documents}
    assert names.count("long") >= 9


def test_more_documents_than_pieces():
    documents = [Text(f"{i}", f"word {i}") for i in range(10)]
    assert [name for name, _ in cut(documents, [model()], tokens=9, most=3)] == ["0:0", "3:0", "6:0"]


def test_a_word_longer_than_what_fits_is_cut():
    pieces = cut([Text("t", "abcdefghij klm")], [model(pieces=2)], tokens=5, most=9)
    assert [piece for _, piece in pieces] == ["abcdef", "ghij", "klm"]


def test_a_script_without_blanks_is_spread_over_too():
    text = "abcdefgh" * 200
    pieces = cut([Text("t", text)], [model(pieces=2)], tokens=7, most=4)
    assert [name for name, _ in pieces] == ["t:0", "t:400", "t:800", "t:1200"]
    assert {len(piece) for _, piece in pieces} == {10}


def test_nothing_fits_in_no_room():
    assert fitting(model(), "one two", 0, 2) == 0
    assert cut([Text("t", "one two")], [model()], tokens=2, most=9) == []
