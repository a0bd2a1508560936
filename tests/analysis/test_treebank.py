"""CoNLL-U: the text is rebuilt character by character; what is damaged is refused with the place."""

from __future__ import annotations

import pytest

from saccade.analysis import read_treebank


def line(number, form, head="_", relation="_", misc="_", tag="_"):
    return "\t".join([str(number), form, "_", tag, "_", "_", str(head), relation, "_", misc])


def spelled(*forms):
    return [line(number, form) for number, form in enumerate(forms, 1)]


def write(tmp_path, *lines, name="bank.conllu"):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


DONT = (
    "# newdoc id = d",
    "# sent_id = s1",
    "# text = Don't give it (now).",
    line("1-2", "Don't"),
    line(1, "Do", 3, "aux", tag="AUX"),
    line(2, "n't", 3, "advmod", tag="PART"),
    line(3, "give", 0, "root", tag="VERB"),
    line("3.1", "gap"),
    line(4, "it", 3, "obj", tag="PRON"),
    line(5, "(", 6, "punct", "SpaceAfter=No", tag="PUNCT"),
    line(6, "now", 3, "advmod", "SpaceAfter=No|Gloss=x", tag="ADV"),
    line(7, ")", 6, "punct", "SpaceAfter=No", tag="PUNCT"),
    line(8, ".", 3, "punct", "SpaceAfter=No", tag="PUNCT"),
    "",
)


def test_words_and_their_characters(tmp_path):
    (sentence,) = read_treebank(write(tmp_path, *DONT))
    assert (sentence.name, sentence.text, sentence.new_document) == ("s1", "Don't give it (now).", True)
    assert [sentence.text[w.start : w.stop] for w in sentence.words] == [w.form for w in sentence.words]
    assert [w.form for w in sentence.words] == ["Do", "n't", "give", "it", "(", "now", ")", "."]
    assert [w.head for w in sentence.words] == [2, 2, -1, 2, 5, 2, 5, 2]
    assert [w.relation for w in sentence.words][:3] == ["aux", "advmod", "root"]
    assert sentence.words[3].tag == "PRON"
    assert sentence.words[5].misc == {"SpaceAfter": "No", "Gloss": "x"}


def test_words_that_do_not_spell_their_range_share_it(tmp_path):
    path = write(
        tmp_path,
        "# text = du pain",
        line("1-2", "du", misc="_"),
        line(1, "de", 3, "case"),
        line(2, "le", 3, "det"),
        line(3, "pain", 0, "root"),
        "",
    )
    (sentence,) = read_treebank(path)
    assert [(w.start, w.stop) for w in sentence.words] == [(0, 2), (0, 2), (3, 7)]
    assert sentence.name == f"{path}:1"


def test_space_after_a_range_is_the_ranges(tmp_path):
    lines = [line("1-2", "can't", misc="SpaceAfter=No"), line(1, "ca", 0, "root"), line(2, "n't", 1, "advmod")]
    (sentence,) = read_treebank(write(tmp_path, *lines, line(3, "!", 1, "punct")))
    assert sentence.text == "can't!"
    assert (sentence.words[1].start, sentence.words[1].stop) == (2, 5)


def test_several_sentences_and_line_ends(tmp_path):
    path = tmp_path / "bank.conllu"
    path.write_bytes(("\ufeff" + "\r\n".join([*DONT, line(1, "Yes", 0, "root"), ""])).encode())
    sentences = read_treebank(path)
    assert [sentence.text for sentence in sentences] == ["Don't give it (now).", "Yes"]
    assert sentences[1].name == f"{path}:15"
    assert not sentences[1].new_document


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["just a text"], r"bank.conllu:1: not CoNLL-U: 1 column between tabs, expected 10: 'just a text'"),
        ([DONT[3], "4\tx\tx"], r"bank.conllu:2: not CoNLL-U: 3 columns between tabs, expected 10"),
        ([line("one", "a")], r"bank.conllu:1: not CoNLL-U: .*'one' is not a valid ID"),
        ([line(1, "a", "x", "obj")], r"bank.conllu:1: not CoNLL-U: .*'head'"),
        (["# sent_id = s7", line(1, "a", 5, "obj")], r"sentence s7: the head of token 1 'a' is 5; there are 1 words"),
        (["# sent_id = s7", line(1, "a", 1, "obj")], r"sentence s7: token 1 'a' is its own head"),
        (["# sent_id = s7", line(2, "a", 0, "root")], r"sentence s7: token 'a' has number 2, expected 1"),
        (["# only a comment", ""], r"bank.conllu: no sentence in CoNLL-U"),
        ([""], r"bank.conllu: no sentence in CoNLL-U"),
        (
            ["# sent_id = s9", "# text = The cat sat", *spelled("The", "dog", "sat")],
            r"sentence s9: its tokens do not spell its text: from token 2 'dog' on they give 'dog sat', the text has "
            r"'cat sat'",
        ),
        (
            ["# sent_id = s9", "# text = The cat", *spelled("The", "cat", "sat")],
            r"sentence s9: .* from token 3 'sat' on they give",
        ),
    ],
)
def test_damaged_files_are_refused_with_the_place(tmp_path, lines, words):
    with pytest.raises(ValueError, match=words):
        read_treebank(write(tmp_path, *lines))


def test_not_even_text(tmp_path):
    path = tmp_path / "bank.conllu"
    path.write_bytes(b"1\t\xff")
    with pytest.raises(ValueError, match=r"not a text in UTF-8 \(position 2\)"):
        read_treebank(path)


def test_blanks_of_the_text_may_differ(tmp_path):
    (sentence,) = read_treebank(write(tmp_path, "# text = a  b", line(1, "a", 0, "root"), line(2, "b", 1, "obj")))
    assert sentence.text == "a b"
