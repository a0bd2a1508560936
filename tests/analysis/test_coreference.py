"""Mentions are read from both formats; heads that look at antecedents are found, beside what takes no model."""

from __future__ import annotations

import json

import pytest
from pretend import PretendModel, evenly, first, itself, looks_at, previous
from test_treebank import line, write

from saccade.analysis import Document, Mention, read_coreference, study_coreference

TEXT = "Ann met Bob . She gave him the old book that Bob wrote ."
#       0   1   2   3 4   5    6   7   8   9    10   11  12    13


def span(words, first, last=None):
    at = [0]
    for word in words:
        at.append(at[-1] + len(word) + 1)
    last = first if last is None else last
    return [at[first], at[last] + len(words[last])]


WORDS = TEXT.split()
CLUSTERS = [[span(WORDS, 0), span(WORDS, 4)], [span(WORDS, 11), span(WORDS, 2), span(WORDS, 6)], [span(WORDS, 7, 9)]]


def lines_of(tmp_path, *documents, name="coref.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_json_lines(tmp_path):
    path = lines_of(tmp_path, {"text": TEXT, "clusters": CLUSTERS})
    (document,) = read_coreference(path)
    assert document.name == f"{path}:1"
    assert [TEXT[a:b] for a, b in document.words] == WORDS
    found = [(m.first, m.last, m.head, m.entity) for m in document.mentions]
    assert found == [(0, 0, 0, "0"), (2, 2, 2, "1"), (4, 4, 4, "0"), (6, 6, 6, "1"), (7, 9, 9, "2"), (11, 11, 11, "1")]


def test_the_head_word_of_a_mention_may_be_given(tmp_path):
    whole = [*span(WORDS, 7, 12), *span(WORDS, 9)]  # "the old book that Bob wrote", of which "book" is the head
    (document,) = read_coreference(
        lines_of(tmp_path, {"text": TEXT, "clusters": [*CLUSTERS, [whole, span(WORDS, 13)]]})
    )
    assert Mention(7, 12, 9, "3") in document.mentions


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"coref.jsonl:1: not JSON"),
        ('{"text": "a b"}', r'coref.jsonl:1: expected \{"text": "...", "clusters": '),
        ('{"text": "a b", "clusters": [[[0, 9]]]}', r"cluster 0: a mention is \[start, stop\] .* 3 c.* got \[0, 9\]"),
        ('{"text": "a b", "clusters": [[0, 1]]}', r"cluster 0: a mention is .* got 0"),
        ('{"text": "a b", "clusters": [[[0, 1]], [[1, 2]]]}', r"cluster 1: ' ' \[1, 2\] holds no word of the text"),
        ('{"text": "a b", "clusters": [[[0, 1, 2, 3]]]}', r"cluster 0: 'a' .* holds no word of the text"),
        ('{"text": "a b", "clusters": [[[0, 1]], [[2, 3]]]}', r"no entity is mentioned twice"),
        ('{"text": "a b", "clusters": [[[0, true]]]}', r"a mention is"),
    ],
)
def test_damaged_lines_are_refused_with_the_place(tmp_path, content, words):
    path = tmp_path / "coref.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(ValueError, match=words):
        read_coreference(path)


COREFUD = [
    "# newdoc id = d1",
    "# global.Entity = eid-etype-head-other",
    "# sent_id = s1",
    line(1, "The", 2, "det", "Entity=(e1-person-2", tag="DET"),
    line(2, "wife", 5, "nsubj", tag="NOUN"),
    line(3, "of", 4, "case", tag="ADP"),
    line(4, "Bob", 2, "nmod", "Entity=(e2-person-1)e1)", tag="PROPN"),
    line(5, "left", 0, "root", "SpaceAfter=No", tag="VERB"),
    line(6, ".", 5, "punct", tag="PUNCT"),
    "",
    "# sent_id = s2",
    line(1, "She", 2, "nsubj", "Entity=(e1-person-1)", tag="PRON"),
    line(2, "missed", 0, "root", tag="VERB"),
    line(3, "Bob", 2, "obj", "Entity=(e2-person-1)", tag="PROPN"),
    "",
    "# newdoc id = d2",
    "# sent_id = s3",
    line(1, "Rain", 0, "root", "Entity=(e3[1/2]-x-1)", tag="NOUN"),
    "",
]


def test_corefud(tmp_path):
    documents = read_coreference(write(tmp_path, *COREFUD))
    assert [d.text for d in documents] == ["The wife of Bob left. She missed Bob", "Rain"]
    assert documents[0].mentions == (
        Mention(0, 3, 1, "e1", "other"),  # "wife" hangs outside of the mention
        Mention(3, 3, 3, "e2", "name"),
        Mention(6, 6, 6, "e1", "pronoun"),
        Mention(8, 8, 8, "e2", "name"),
    )
    assert documents[1].mentions[0].entity == "e3"
    assert all(documents[0].text[a:b] for a, b in documents[0].words)


@pytest.mark.parametrize(
    ("misc", "words"),
    [
        ("Entity=e1)", r"sentence s1: token 1 'a' closes 'e1', which is not open"),
        ("Entity=(e1-x-1", r"document from sentence s1 on: mention of 'e1' is never closed"),
        ("Entity=((e1", r"sentence s1: token 1 'a' has Entity=\(\(e1, which is not CorefUD's"),
    ],
)
def test_damaged_brackets_are_refused_with_the_place(tmp_path, misc, words):
    path = write(tmp_path, "# sent_id = s1", line(1, "a", 0, "root", misc), line(2, "b", 1, "dep"), "")
    with pytest.raises(ValueError, match=words):
        read_coreference(path)


def test_of_a_mention_in_parts_the_first_stands_for_it(tmp_path):
    path = write(
        tmp_path,
        line(1, "Ann", 0, "root", "Entity=(e1-x-1)"),
        line(2, "both", 1, "dep", "Entity=(e1[1/2]-x-1"),
        line(3, "of", 1, "dep", "Entity=e1[1/2])"),
        line(4, "it", 1, "dep"),
        line(5, "them", 1, "dep", "Entity=(e1[2/2]-x-1)"),
        line(6, "so", 1, "dep", "Entity=(e1[2/2]-x-1"),
        line(7, "on", 1, "dep", "Entity=e1[2/2])"),
        "",
    )
    (found,) = read_coreference(path)
    assert [(m.first, m.last) for m in found.mentions] == [(0, 0), (1, 2)]


def document(*, text=TEXT, mentions=None):
    words, at = [], 0
    for word in text.split():
        words.append((at, at + len(word)))
        at += len(word) + 1
    known = (
        Mention(0, 0, 0, "A", "name"),
        Mention(2, 2, 2, "B", "name"),
        Mention(4, 4, 4, "A", "pronoun"),
        Mention(6, 6, 6, "B", "pronoun"),
        Mention(7, 9, 9, "C", "other"),
        Mention(11, 11, 11, "B", "name"),
    )
    return Document("d", text, tuple(words), known if mentions is None else mentions)


def knowing(ids):
    """Tokens 1 to 14 are the words; each anaphor looks at its antecedent, "Bob" at "him"."""
    places = {5: 1, 7: 3, 12: 7}
    return [places.get(i, 0) for i in range(len(ids))]


def test_heads_and_baselines():
    found = study_coreference(PretendModel([[looks_at(knowing), previous, first, evenly]]), [document()])
    every = found.tallies["all"]
    assert every.total == 3  # She, him, Bob
    assert every.of_head(0, 0) == (3, 3)
    assert every.of_head(0, 1) == (0, 3)
    assert every.of_head(0, 2) == (0, 3)  # [CLS] is no answer
    assert every.of_head(0, 3) == (1, 3)  # of equal weights the first word: Ann, right for "She"
    assert found.tallies["pronoun"].of_head(0, 0) == (2, 2)
    assert found.tallies["name"].total == 1
    # Answers stand at She -4; him -4; Bob -9 and -5.
    assert every.best_offset == (-4, (2, 3))
    # The mention before: She <- Bob, him <- She, Bob <- the old book; with the same word: Bob <- Bob.
    assert found.nearest["all"] == (0, 3)
    assert found.same_word["all"] == (1, 3)
    assert found.same_word["name"] == (1, 1) and found.same_word["pronoun"] == (0, 2)
    assert (found.documents, found.pieces, found.out_of_reach) == (1, 1, 0)


def test_nearest_mention_is_right_where_it_is():
    mentions = (Mention(0, 0, 0, "A"), Mention(4, 4, 4, "A"), Mention(6, 6, 6, "A"))
    found = study_coreference(PretendModel([[itself]]), [document(mentions=mentions)])
    assert found.nearest["all"] == (2, 2)
    assert list(found.tallies) == ["all"]  # no tags, no kinds


def test_a_mention_within_its_antecedent_does_not_answer():
    # "the old book that Bob wrote" and, inside of it, nothing of C before: C's second mention is its own first.
    mentions = (Mention(7, 12, 9, "C"), Mention(9, 9, 9, "C"), Mention(0, 0, 0, "A"), Mention(4, 4, 4, "A"))
    found = study_coreference(PretendModel([[first]]), [document(mentions=tuple(sorted(mentions)))])
    assert found.tallies["all"].total == 1  # She alone


def test_overlapping_mentions_are_not_antecedents_of_each_other():
    mentions = (Mention(0, 0, 0, "A"), Mention(4, 4, 4, "A"), Mention(7, 9, 9, "C"), Mention(9, 12, 12, "C"))
    found = study_coreference(PretendModel([[first]]), [document(mentions=mentions)])
    assert found.tallies["all"].total == 1 and found.out_of_reach == 0


def test_mentions_in_one_token_cannot_be_told_apart():
    text, words = "Ann gimme it", ((0, 3), (4, 7), (7, 9), (10, 12))  # "gim" and "me" are one token
    mentions = (Mention(0, 0, 0, "A"), Mention(1, 1, 1, "B"), Mention(2, 2, 2, "B"), Mention(3, 3, 3, "A"))
    found = study_coreference(PretendModel([[first]]), [Document("d", text, words, mentions)])
    assert found.tallies["all"].total == 1  # "it" and "Ann" alone
    assert found.out_of_reach == 1


def test_documents_that_are_too_long_are_read_in_pieces():
    found = study_coreference(PretendModel([[looks_at(knowing)]], context=10), [document()])
    assert found.pieces == 2  # 8 words each
    assert found.tallies["all"].total == 2
    assert found.out_of_reach == 1  # the last Bob
    with pytest.raises(ValueError, match="x.jsonl: no mention has an antecedent within the context of pretend"):
        study_coreference(PretendModel([[previous]], context=5), [document()], source="x.jsonl")


def test_a_model_that_looks_back():
    found = study_coreference(PretendModel([[looks_at(knowing)]], causal=True), [document()])
    assert found.tallies["all"].of_head(0, 0) == (3, 3)
