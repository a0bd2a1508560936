"""Runs on disk, in tables, in a sentence and in a figure."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from looped import looped
from saccade.benchmark.tasks import (
    TASKS as ALL,
    FinishedRun,
    Induction,
    ModelShape,
    Recall,
    TrainingBudget,
    TrainingCase,
    TrainingOutcome,
    append,
    as_dict,
    cases,
    figure,
    go_through,
    load,
    measure,
    missing,
    tables,
)
from saccade.support._numbers import percent_rounded_down

BUDGET = TrainingBudget(steps=3, batch=4, rates=(1e-2,), every=3, held=8)
TASKS = [Induction(symbols=3, length=5), Recall(vocabulary=12, length=8, pairs=(1, 2))]
SHAPE = ModelShape(width=8, layers=1)


def row(name: str, right: float, *, kept=100, a_token=0, task=TASKS[1], seed=0, groups=(0.5, 0.25)) -> FinishedRun:
    case = TrainingCase(task, name, seed, SHAPE, BUDGET).described()
    outcome = TrainingOutcome(right, groups[: len(task.groups)], 1e-2, 3, 1234, 2.0, 1.5)
    return FinishedRun(case, task.groups, task.chance, kept, a_token, outcome)


ROWS = [
    row("exact", 0.9999, kept=800, a_token=100),
    row("sigmoid", 0.42, kept=800, a_token=100),
    row("linear", 0.995, kept=900),
    row("linear:head=2", 0.61, kept=20),
    row("GRU", 0.3, kept=8),
]


def test_runs_come_back_from_disk_and_are_not_repeated(tmp_path):
    path, wanted = tmp_path / "runs.jsonl", cases(TASKS, ["exact", "linear"], 2, SHAPE, BUDGET)
    assert load(path) == []
    begun, done = [], []
    go_through(wanted[:3], begun.append, lambda row: (done.append(row), append(path, row)))
    assert begun == wanted[:3]
    assert [row.case for row in done] == [case.described() for case in wanted[:3]]
    read = load(path)
    assert [json.dumps(as_dict(row)) for row in read] == path.read_text().splitlines()
    assert [(row.task, row.mechanism, row.case["seed"], row.outcome.right) for row in read] == [
        (row.task, row.mechanism, row.case["seed"], pytest.approx(row.outcome.right, rel=1e-5)) for row in done
    ]
    assert missing(wanted, read) == wanted[3:]
    longer = [dataclasses.replace(case, budget=dataclasses.replace(BUDGET, steps=4)) for case in wanted]
    assert missing(longer, read) == longer


def test_all_tasks_with_one_seed_come_before_the_next():
    found = [(case.seed, case.task, case.name) for case in cases(TASKS, ["exact", "GRU"], 2, SHAPE, BUDGET)]
    assert found == [(seed, task, name) for seed in (0, 1) for task in TASKS for name in ("exact", "GRU")]


def test_threads_are_as_they_were_also_after_an_interrupt():
    before, seen = torch.get_num_threads(), []

    def stop(case):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_through(cases(TASKS, ["exact"], 1, SHAPE, BUDGET), stop, id, threads=before + 1)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_the_generator_is_left_as_it_was():
    before = torch.get_rng_state()
    for case in cases(TASKS[:1], ["performer:features=4"], 1, SHAPE, BUDGET):
        measure(case)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_width_that_a_mechanism_cannot_have_is_refused_before_any_run():
    with pytest.raises(ValueError, match="5"):
        cases(TASKS, ["exact", "differential"], 1, ModelShape(width=5), BUDGET)


def test_a_row_says_what_its_contender_keeps():
    found = {
        name: measure(TrainingCase(TASKS[0], name, 0, SHAPE, BUDGET))
        for name in ("exact", "window:size=3", "linear", "GRU")
    }
    assert {name: (row.remembers, row.a_token) for name, row in found.items()} == {
        "exact": (5 * 16, 16),
        "window:size=3": (3 * 16, 0),
        "linear": (8 * 9, 0),
        "GRU": (8, 0),
    }


@pytest.mark.parametrize("line", ["no JSON", "[]", '{"task": "copy"}'])
def test_what_is_no_run_is_named(tmp_path, line):
    path = tmp_path / "runs.jsonl"
    append(path, ROWS[0])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}, line 2: not a run of `saccade compare --task`"):
        load(path)


@pytest.mark.parametrize(
    ("seeds", "names", "message"),
    [
        (0, None, "seeds: must be at least 1, got 0"),
        (1, ["no"], "mechanism: expected one of"),
        (1, ["exact", "nystrom"], "mechanism: nystrom cannot read in order"),
    ],
)
def test_cases_that_cannot_be_are_refused_before_any_is_run(seeds, names, message):
    with pytest.raises(ValueError, match=message):
        cases(TASKS, names, seeds, SHAPE, BUDGET)


def test_a_task_stands_from_small_states_to_large_ones_and_then_what_grows():
    lines = tables.detail(tables.lines(ROWS), "recall")
    assert lines[0] == "| mechanism | numbers kept | parameters | right | 1 pairs | 2 pairs | steps | CPU s |"
    assert [line.split(" | ")[:4] for line in lines[2:]] == [
        ["| GRU", "8", "1,234", "30 %"],
        ["| linear:head=2", "20", "1,234", "61 %"],
        ["| linear", "900", "1,234", "**99.5 %**"],
        ["| exact", "100 a token", "1,234", "**99.9 %**"],
        ["| sigmoid", "100 a token", "1,234", "42 %"],
    ]
    assert lines[2].endswith("| 50 % | 25 % | 3 | 2 |")


def test_the_sentence_follows_from_the_table():
    (said,) = tables.verdict(tables.lines(ROWS), "recall")
    assert said == (
        "Guessing is right 66.6 % of the time. Solved by mechanisms that keep every token: exact. Not solved, although "
        "every token is kept: sigmoid. Solved with a state of fixed size: linear; the smallest has 900 numbers "
        "(linear). Not solved with: GRU, linear:head=2."
    )
    (said,) = tables.verdict(tables.lines(ROWS[3:]), "recall")
    assert "Solved with a state of fixed size: nothing." in said
    assert "every token" not in said


def test_seeds_are_a_median_and_solved_means_all_of_them():
    rows = [row("linear", right, seed=seed) for seed, right in enumerate((1.0, 0.97, 0.995))]
    (line,) = tables.lines(rows)
    assert (line.right, line.least, line.solved) == (0.995, 0.97, False)
    assert "| 99.5 % (at least 97 %) |" in tables.detail([line], "recall")[2]


def test_the_summary_has_those_that_were_tried_on_several_tasks():
    rows = [row("exact", 1.0, task=TASKS[0]), row("GRU", 0.99, task=TASKS[0]), *ROWS]
    assert tables.summary(tables.lines(rows)) == [
        "| mechanism | recall | induction |",
        "|---|---|---|",
        "| exact | **99.9 %** | **100 %** |",
        "| GRU | 30 % | **99 %** |",
        "| guessing | 66.6 % | 33.3 % |",
    ]
    page = tables.page(rows, {"nystrom": "its landmarks are means"})
    assert page[0] == "| mechanism | recall | induction |"
    assert [line for line in page if line.startswith("#")] == ["## recall", "## induction"]
    assert page[-1] == "- nystrom: its landmarks are means."
    assert tables.page(ROWS, {})[0] == "## recall"


def test_the_page_says_what_all_had():
    head = tables.head([*ROWS, row("exact", 1.0, seed=1)])
    assert head[0] == "# What each mechanism solves"
    assert head[2] == "    saccade compare --task recall --seeds 2 --steps 3 --rates 0.01"
    text = " ".join(head)
    assert "1 layer, 8 wide, without feed-forward layers" in text and "a short convolution over 2 tokens" in text
    assert "at most 3 steps of Adam, each with 4 new examples, at a rate that rises to 0.01 and falls" in text
    assert "1 to 2 seeds each." in text and "does not solve" not in text
    two = dataclasses.replace(ROWS[0], case={**ROWS[0].case, "budget": {**ROWS[0].case["budget"], "rates": [0.1, 0.2]}})
    assert "1 seed each." in " ".join(tables.head(ROWS))
    assert "A mechanism that does not solve a task at a rate of 0.1 is trained again at 0.2." in " ".join(
        tables.head([two])
    )
    assert tables.page(ROWS, {})[2] == (
        "Multi-query associative recall (Arora et al., Zoology (2023), section 3.1): vocabulary 12, length 8, "
        "pairs 1/2, power 0.01."
    )


def test_what_is_as_usual_need_not_be_said():
    rows = [
        dataclasses.replace(ROWS[0], case=TrainingCase(kind(), "exact", 0, ModelShape(), TrainingBudget()).described())
        for kind in ALL
    ]
    assert tables.command(rows) == "saccade compare --task all"
    other = dataclasses.replace(
        rows[0], case=TrainingCase(ALL[0](), "exact", 0, ModelShape(taps=0), TrainingBudget()).described()
    )
    assert tables.command([other]) == "python benchmarks/compare_tasks.py --task copy --taps 0"


def test_runs_under_different_budgets_do_not_stand_together():
    other = dataclasses.replace(ROWS[0], case={**ROWS[0].case, "budget": {"steps": 4}})
    with pytest.raises(ValueError, match="runs of recall cannot be compared: their sizes, models or budgets differ"):
        tables.lines([*ROWS, other])


@looped(
    ("share", "text"),
    [(1.0, "100 %"), (0.99999, "99.9 %"), (0.99, "99 %"), (0.29, "29 %"), (0.0, "0 %"), (0.1234, "12.3 %")],
)
def test_only_all_is_100_percent(share, text):
    assert percent_rounded_down(share) == text


@pytest.mark.slow
def test_the_figure_is_drawn_the_same_each_time_with_a_line_for_each_family():
    drawn = figure.draw(ROWS, "recall", "svg")
    assert drawn == figure.draw(ROWS, "recall", "svg")
    assert drawn != figure.draw([*ROWS[:4], row("GRU", 0.3, kept=8, groups=(0.9, 0.8))], "recall", "svg")
    assert drawn.startswith(b"<?xml") and figure.draw(ROWS, "recall", "png").startswith(b"\x89PNG")
    assert figure.family("linear:feature_map=taylor,head=8") == "linear, taylor"
    assert figure.family("performer:features=16") == "performer"
    with pytest.raises(ValueError, match="a plot needs runs of recall by something with a state of fixed size"):
        figure.draw(ROWS[:2], "recall", "svg")
