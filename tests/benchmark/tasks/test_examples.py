"""The tasks are what they say: an independent solver, which reads nothing but the tokens, is always right."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from looped import looped
from saccade.benchmark.tasks import TASKS, UNASKED, Copy, Duplication, Induction, Needle, Recall
from saccade.benchmark.tasks.examples import digests, distinct, never_seen

COUNT = 997
SMALL = [
    Copy(symbols=11, least=2, most=7),
    Duplication(symbols=5, word=13),
    Recall(vocabulary=26, length=46, pairs=(1, 3, 11), power=0.1),
    Induction(symbols=7, length=19),
    Needle(kinds=3, noise=5, length=41, distances=(3, 11, 40)),
]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def solve_copy(task, tokens):
    word = tokens[: tokens.index(1)]
    return {len(word) + place: symbol for place, symbol in enumerate(word)}


def solve_duplication(task, tokens):
    second = tokens.index(0, 1)
    return {second + place: symbol for place, symbol in enumerate(tokens[1:second])}


def solve_recall(task, tokens):
    values: dict[int, int] = {}
    found = {}
    pairs = next(
        place for place in range(0, len(tokens), 2) if tokens[place] in values or not add(tokens, place, values)
    )
    for place in range(pairs, len(tokens)):
        if tokens[place]:
            found[place] = values[tokens[place]]
    return found


def add(tokens, place, values) -> bool:
    """Whether a pair stands at this place, which is then remembered."""
    if tokens[place] == 0:
        return False
    values[tokens[place]] = tokens[place + 1]
    return True


def solve_induction(task, tokens):
    return {len(tokens) - 1: tokens[tokens.index(0) + 1]}


def solve_needle(task, tokens):
    return {len(tokens) - 1: tokens[tokens.index(tokens[-1]) + 1]}


SOLVERS = {
    "copy": solve_copy,
    "duplication": solve_duplication,
    "recall": solve_recall,
    "induction": solve_induction,
    "needle": solve_needle,
}


@looped("task", [*SMALL, *(kind() for kind in TASKS)])
def test_a_solver_that_reads_the_tokens_is_always_right(task):
    tokens, targets, _ = task.draw(COUNT, seeded(3))
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        asked = {place: token for place, token in enumerate(wanted) if token != UNASKED}
        assert asked
        assert SOLVERS[task.name](task, row) == asked


@looped("task", SMALL)
def test_shapes_kinds_and_repetition(task):
    tokens, targets, groups = task.draw(COUNT, seeded(5))
    assert tokens.shape == targets.shape == (COUNT, task.length)
    assert groups.shape == (COUNT,)
    assert tokens.dtype == targets.dtype == groups.dtype == torch.int64
    assert tokens.unique().tolist() == list(range(task.vocabulary))
    assert sorted(set(groups.tolist())) == list(range(len(task.groups)))
    again = task.draw(COUNT, seeded(5))
    assert all(map(torch.equal, again, (tokens, targets, groups)))
    assert not torch.equal(task.draw(COUNT, seeded(6)).tokens, tokens)


@looped("task", SMALL)
def test_no_example_is_drawn_of_none(task):
    assert [tuple(part.shape) for part in task.draw(0, seeded(0))] == [(0, task.length), (0, task.length), (0,)]


def uniform(counts: Counter, choices: int) -> None:
    """Each choice has its share, within 5 standard errors of a binomial; all together by chi squared, likewise."""
    total, share = sum(counts.values()), 1 / choices
    error = math.sqrt(total * share * (1 - share))
    assert len(counts) == choices
    assert all(abs(count - total * share) < 5 * error for count in counts.values())
    squared = sum((count - total * share) ** 2 / (total * share) for count in counts.values())
    assert abs(squared - (choices - 1)) < 5 * math.sqrt(2 * (choices - 1))


def test_distinct_numbers_are_uniform_and_never_twice():
    drawn = distinct(60_000, 5, 3, seeded(1))
    assert all(len(set(row)) == 3 for row in drawn[:500].tolist())
    uniform(Counter(map(tuple, drawn.tolist())), 5 * 4 * 3)


def test_words_to_copy_have_every_length_and_no_symbol_twice():
    task = Copy(symbols=11, least=2, most=7)
    tokens = task.draw(30_000, seeded(2)).tokens
    lengths = (tokens == 1).int().argmax(1)
    uniform(Counter(lengths.tolist()), 6)
    uniform(Counter(tokens[:, 0].tolist()), 11)
    words = [row[:length] for row, length in zip(tokens[:500].tolist(), lengths[:500].tolist(), strict=True)]
    assert all(len(set(word)) == len(word) and min(word) >= 2 for word in words)


def test_duplicated_words_are_independent_uniform_symbols():
    tokens = Duplication(symbols=5, word=13).draw(30_000, seeded(2)).tokens
    uniform(Counter(tokens[:, 7].tolist()), 5)
    uniform(Counter(map(tuple, tokens[:, 3:5].tolist())), 25)


def test_recall_follows_its_definition():
    task = Recall(vocabulary=26, length=46, pairs=(1, 3, 11))
    tokens, targets, groups = task.draw(9_000, seeded(4))
    uniform(Counter(groups.tolist()), 3)
    for group, pairs in enumerate(task.pairs):
        rows, answers = tokens[groups == group], targets[groups == group]
        keys, values = rows[:, : 2 * pairs : 2], rows[:, 1 : 2 * pairs : 2]
        assert keys.min() >= 1 and keys.max() < 13 <= values.min()
        for part in (keys, values):
            assert all(len(set(row)) == pairs for row in part[:300].tolist())
        asked = answers != UNASKED
        assert (asked.sum(1) == pairs).all()
        assert not asked[:, : 2 * pairs].any()
        assert not asked[:, 2 * pairs + 1 :: 2].any()  # queries stand at even places
        assert torch.equal(rows[asked].unflatten(0, (-1, pairs)).sort(1).values, keys.sort(1).values)
        assert not rows[:, 2 * pairs :][~asked[:, 2 * pairs :]].any()  # filler


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_of_recall_are_a_power_law(power):
    """With one pair there is nothing to draw without replacement: P(slot g) is g^(power - 1) over their sum."""
    task = Recall(vocabulary=8, length=24, pairs=(1,), power=power)
    targets = task.draw(40_000, seeded(7)).targets
    slots = ((targets != UNASKED).int().argmax(1) - 2) // 2
    expected = torch.arange(1, 12, dtype=torch.float64) ** (power - 1)
    expected /= expected.sum()
    for slot, share in enumerate(expected.tolist()):
        seen = float((slots == slot).double().mean())
        assert abs(seen - share) < 5 * math.sqrt(share * (1 - share) / 40_000)


def test_later_queries_are_drawn_without_those_before():
    """Two pairs on two slots of weights 1 and 1/2 (power 0): the first key takes the first with probability 2/3."""
    task = Recall(vocabulary=8, length=8, pairs=(2,), power=0.0)
    tokens = task.draw(30_000, seeded(8)).tokens
    first = float((tokens[:, 4] == tokens[:, 0]).double().mean())
    assert abs(first - 2 / 3) < 5 * math.sqrt(2 / 9 / 30_000)


def test_the_special_token_stands_anywhere_once_and_at_the_end():
    tokens = Induction(symbols=7, length=19).draw(30_000, seeded(9)).tokens
    assert ((tokens == 0).sum(1) == 2).all() and (tokens[:, -1] == 0).all()
    uniform(Counter((tokens == 0).int().argmax(1).tolist()), 17)


def test_needles_lie_at_every_distance_of_their_group():
    task = Needle(kinds=3, noise=5, length=41, distances=(3, 11, 40))
    assert task.groups == ("2 to 3 back", "4 to 11 back", "12 to 40 back")
    tokens, targets, groups = task.draw(60_000, seeded(10))
    distances = 40 - (tokens >= 5).int().argmax(1)
    uniform(Counter(groups.tolist()), 3)
    for group, (low, high) in enumerate(((2, 3), (4, 11), (12, 40))):
        uniform(Counter(distances[groups == group].tolist()), high - low + 1)
    assert torch.equal(targets[:, -1], tokens.gather(1, (41 - distances)[:, None])[:, 0])
    keys, values = tokens[:, -1] - 5, targets[:, -1] - 8
    uniform(Counter(zip(keys.tolist(), values.tolist(), strict=True)), 9)
    assert ((tokens >= 5).sum(1) == 3).all()


@looped("task", SMALL)
def test_guessing_is_right_as_often_as_said(task):
    """The guesser knows the form of a task and, in copying, which symbols are left, but not their order."""
    targets = task.draw(20_000, seeded(11)).targets
    asked = targets != UNASKED
    if isinstance(task, Copy):
        places = asked.cumsum(1)
        left = (asked.sum(1, keepdim=True) - places + 1)[asked].double()
        shares = 1 / left
    elif isinstance(task, Recall):
        shares = (1 / asked.sum(1, keepdim=True).expand_as(asked)[asked]).double()
    else:
        shares = (targets[asked] == targets[asked].roll(1)).double()  # another example's answer
    error = float(shares.std()) / math.sqrt(len(shares) / max(task.length, 1))
    assert abs(float(shares.mean()) - task.chance) < 5 * error + 1e-12


def test_equal_rows_have_equal_digests_and_others_do_not():
    tokens = torch.randint(3, (20_000, 11), generator=seeded(12))
    kinds = len({tuple(row) for row in tokens.tolist()})
    assert len(set(digests(tokens).tolist())) == kinds < 20_000
    assert torch.equal(digests(tokens), digests(tokens.clone()))
    swapped = tokens[:, [1, 0, *range(2, 11)]]
    different = (tokens != swapped).any(1)
    assert (digests(tokens)[different] != digests(swapped)[different]).all()


def test_nothing_is_asked_of_examples_that_are_held_out():
    """A task of 4 different words: whatever is held out is never trained on, and all else is."""
    task = Copy(symbols=4, least=1, most=1)
    held = task.draw(2, seeded(0))
    drawn = task.draw(200, seeded(1))
    kept = never_seen(drawn, digests(held.tokens))
    known = {tuple(row) for row in held.tokens.tolist()}
    for row, before, after in zip(drawn.tokens.tolist(), drawn.targets, kept.targets, strict=True):
        assert torch.equal(after, torch.full_like(after, UNASKED) if tuple(row) in known else before)
    assert 0 < int((kept.targets != UNASKED).sum()) < int((drawn.targets != UNASKED).sum())


@looped(
    ("make", "message"),
    [
        (lambda: Copy(symbols=5, most=6), "least: expected 1 <= least <= most <= symbols, got 4, 6 and 5"),
        (lambda: Copy(least=0), "least: expected 1 <= least"),
        (lambda: Duplication(word=0), "word: expected symbols and word of at least 1, got 31 and 0"),
        (lambda: Recall(length=65), r"length: expected an even number of at least 4 \* 16 for .*, got 65"),
        (lambda: Recall(length=34, pairs=(9,)), r"length: .* at least 4 \* 9 for pairs=\(9,\), got 34"),
        (lambda: Recall(pairs=()), "length: expected"),
        (lambda: Recall(vocabulary=32), r"vocabulary: expected an even number above 2 \* 16, got 32"),
        (lambda: Recall(vocabulary=63), "vocabulary: expected an even number"),
        (lambda: Induction(length=2), "length: expected at least 3, and a symbol, got 2 and 31"),
        (lambda: Needle(length=32), "distances: expected ascending distances from 2, the last of length - 1 = 31"),
        (lambda: Needle(distances=(7, 7, 63)), "distances: expected ascending"),
        (lambda: Needle(noise=0), "kinds, noise: expected at least 1 each, got kinds=16 and noise=0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_every_task_says_where_it_comes_from():
    assert [kind.name for kind in TASKS] == ["copy", "duplication", "recall", "induction", "needle"]
    for kind in TASKS:
        assert kind.title and any(character.isdigit() for character in kind.source)
        assert kind() == replace(kind())
