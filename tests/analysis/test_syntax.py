"""Heads that follow a tree are found, with counts as by hand; heads that do not are beaten by the fixed offset."""

from __future__ import annotations

import pytest
import torch
from pretend import PretendModel, evenly, following, previous, randomly
from test_treebank import line, write

from saccade.analysis import read_treebank, study_syntax
from saccade.analysis._syntax import ALL, DIRECTIONS

UP, DOWN = DIRECTIONS
# (form, head counted from 1, relation)
TREES = [
    [
        ("the", 2, "det"),
        ("cat", 3, "nsubj"),
        ("saw", 0, "root"),
        ("a", 6, "det"),
        ("big", 6, "amod"),
        ("dog", 3, "obj"),
    ],
    [("dogs", 2, "nsubj"), ("bark", 0, "root"), (".", 2, "punct")],
    [
        ("the", 3, "det"),
        ("old", 3, "amod"),
        ("man", 4, "nsubj"),
        ("ate", 0, "root"),
        ("it", 4, "obj"),
        (".", 4, "punct"),
    ],
]


def bank(tmp_path, trees=TREES):
    lines = []
    for number, tree in enumerate(trees):
        lines.append(f"# sent_id = {number}")
        lines += [line(i, form, head, relation) for i, (form, head, relation) in enumerate(tree, 1)]
        lines.append("")
    return read_treebank(write(tmp_path, *lines))


class Knowing(PretendModel):
    """Heads get the tree of the sentence they are on, by its length."""

    def __init__(self, *kinds, trees=TREES, **more):
        super().__init__([[self._head(kind, trees) for kind in kinds]], **more)

    def _head(self, kind, trees):
        def head(ids):
            tree = next(t for t in trees if len(t) == len(ids) - len(self.before) - len(self.after))
            first = len(self.before)
            weights = torch.full((len(ids), len(ids)), 1e-3)
            for i, (_, parent, relation) in enumerate(tree):
                if parent and kind in ("up", relation):
                    weights[first + i, first + parent - 1] = 1
                if parent and kind == "down":
                    weights[first + parent - 1, first + i] = 1 + i
            return weights / weights.sum(-1, keepdim=True)

        return head


TREES_BY_LENGTH = [TREES[0], TREES[1]]  # 6 and 3 words


def test_a_head_that_looks_at_the_governor_is_always_right(tmp_path):
    model = Knowing("up", "down", "nsubj", trees=TREES_BY_LENGTH)
    found = study_syntax(model, bank(tmp_path, TREES_BY_LENGTH))
    assert found.sentences == 2
    assert found.words == 9
    for relation, cases in (("det", 2), ("nsubj", 2), ("obj", 1), ("amod", 1), ("punct", 1), (ALL, 6)):
        tally = found.tallies[relation, UP]
        assert tally.total == cases
        assert tally.of_head(0, 0) == (cases, cases)
        assert tally.best == (0, 0)
    # The third head knows subjects alone: elsewhere all is alike and the first other word is taken.
    assert found.tallies["nsubj", UP].of_head(0, 2) == (2, 2)
    assert found.tallies["obj", UP].of_head(0, 2).right == 0
    assert found.tallies["det", UP].of_head(0, 2).right == 1  # "the" is first, so "cat" is
    # From a governor, the second head looks at its last dependent.
    assert found.tallies["obj", DOWN].of_head(0, 1) == (1, 1)
    assert found.tallies["nsubj", DOWN].of_head(0, 1) == (0, 2)
    assert found.tallies["punct", DOWN].of_head(0, 1) == (1, 1)
    assert found.tallies["amod", DOWN].of_head(0, 1) == (1, 1)


def test_fixed_offsets(tmp_path):
    found = study_syntax(PretendModel([[previous, following]]), bank(tmp_path))
    det = found.tallies["det", UP]  # offsets +1, +2, +2
    assert det.best_offset == (2, (2, 3))
    assert det.of_head(0, 1) == (1, 3)  # the next word
    amod = found.tallies["amod", UP]  # +1, +1
    assert amod.best_offset == (1, (2, 2))
    assert amod.of_head(0, 1) == (2, 2)
    down = found.tallies["amod", DOWN]
    assert down.best_offset == (-1, (2, 2))
    assert down.of_head(0, 0) == (2, 2)
    assert down.best == (0, 0)
    assert found.tallies["obj", UP].best_offset == (-1, (1, 2))  # of -3 and -1 the nearer


def test_all_is_without_punctuation(tmp_path):
    found = study_syntax(PretendModel([[previous]]), bank(tmp_path))
    assert found.tallies[ALL, UP].total == 5 + 1 + 4
    assert found.relations()[0] == ALL
    assert found.relations(least=3) == [ALL, "det", "nsubj"]


def test_held_out_is_chosen_on_the_other_half(tmp_path):
    # Even sentences are of two words, odd ones of three; the relation stands one further in the odd ones.
    trees = [[("a", 2, "x"), ("b", 0, "root")], [("a", 3, "x"), ("c", 3, "y"), ("b", 0, "root")]] * 2
    model = PretendModel([[following, randomly(0)]])
    tally = study_syntax(model, bank(tmp_path, trees)).tallies["x", UP]
    assert tally.count.tolist() == [2, 2]
    assert tally.best_offset == (1, (2, 4))
    assert tally.held_out[1] == (0, 4)  # +1 from the even ones fails on the odd ones, and the other way around
    alone = study_syntax(model, bank(tmp_path, trees[:1])).tallies["x", UP]
    assert alone.held_out[0].cases == 0  # one half is empty


def test_a_model_that_looks_back_is_asked_about_what_is_behind(tmp_path):
    found = study_syntax(PretendModel([[previous]], causal=True), bank(tmp_path))
    assert found.causal
    assert (UP, DOWN) == ("dependent to head", "head to dependent")
    assert ("det", UP) not in found.tallies and found.ahead["det", UP] == 3
    assert found.tallies["det", DOWN].total == 3 and found.ahead["det", DOWN] == 0
    assert found.tallies["obj", UP].total == 2 and ("obj", DOWN) not in found.tallies
    assert found.tallies["obj", UP].of_head(0, 0) == (1, 2)
    assert found.tallies[ALL, UP].total + found.ahead[ALL, UP] == 10


def test_words_of_several_tokens(tmp_path):
    found = study_syntax(Knowing("up", trees=[TREES[1]]), bank(tmp_path, [TREES[1]]))
    pieces = study_syntax(PretendModel([[previous]], pieces=2), bank(tmp_path, [TREES[1]]))
    assert found.tallies["nsubj", UP].of_head(0, 0) == (1, 1)
    # "ba|rk": its first token looks at "gs", which is of "dogs"; its second at itself.
    assert pieces.tallies["nsubj", DOWN].of_head(0, 0) == (1, 1)


def test_words_that_share_tokens_are_left_out_and_counted(tmp_path):
    path = write(
        tmp_path, line("1-2", "du"), line(1, "de", 3, "case"), line(2, "le", 1, "fixed"), line(3, "pain", 0, "root"), ""
    )
    found = study_syntax(PretendModel([[following]]), read_treebank(path))
    assert found.together == 1
    assert ("fixed", UP) not in found.tallies
    assert found.tallies["case", UP].of_head(0, 0) == (1, 1)


def test_sentences_that_are_too_long_are_counted(tmp_path):
    found = study_syntax(PretendModel([[previous]], context=6), bank(tmp_path))
    assert (found.sentences, found.too_long) == (1, 2)
    with pytest.raises(ValueError, match=r"b.conllu: no relation that pretend can answer: 3 of 3 sentences"):
        study_syntax(PretendModel([[previous]], context=4), bank(tmp_path), source="b.conllu")


def test_a_treebank_without_relations_is_refused(tmp_path):
    path = write(tmp_path, line(1, "a"), line(2, "b"), "")
    with pytest.raises(ValueError, match="treebank: no relation that pretend can answer: there is none"):
        study_syntax(PretendModel([[previous]]), read_treebank(path))


def test_shares_of_an_even_head_are_no_better_than_luck(tmp_path):
    found = study_syntax(PretendModel([[evenly], [randomly(1), randomly(2)]]), bank(tmp_path))
    tally = found.tallies[ALL, UP]
    assert tally.right.shape == (2, 2, 2)
    first = [2 if i == 1 else 1 for tree in TREES for i in range(1, len(tree) + 1)]  # the first other word
    rows = [row for tree in TREES for row in tree]
    luck = sum(head == other for (_, head, kind), other in zip(rows, first, strict=True) if kind != "punct")
    assert tally.of_head(0, 0).right == luck == 2
    assert tally.of_head(0, 1).right == 0  # no such head


def test_progress_is_told(tmp_path):
    told = []
    study_syntax(PretendModel([[previous]]), bank(tmp_path), progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
