"""The measured page on watching: its checks and its tables, on sizes of a few milliseconds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import saccade

PATH = Path(__file__).parents[2] / "benchmarks" / "watch.py"
spec = importlib.util.spec_from_file_location("watch_benchmark", PATH)
benchmark = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = benchmark
spec.loader.exec_module(benchmark)

TINY = {"LAYERS": 2, "WIDTH": 24, "HEADS": 3, "ITEMS": 2, "LENGTH": 17, "EVERY": 3}


@pytest.fixture
def tiny(monkeypatch):
    for name, value in TINY.items():
        monkeypatch.setattr(benchmark, name, value)


@pytest.mark.parametrize("name", benchmark.MODELS)
def test_watched_models_give_the_same(tiny, name):
    if "transformers" in name:
        pytest.importorskip("transformers")
    model, run = benchmark.MODELS[name]()
    benchmark.check(benchmark.without_dropout(model.train()), run, torch.randn(2, 17, 24))


def test_the_check_notices_a_model_that_changes(tiny):
    model, _ = benchmark.decoder()
    drawn = iter(range(9))
    with pytest.raises(AssertionError):
        benchmark.check(model, lambda x: model(x) + next(drawn), torch.randn(2, 17, 24))


def test_ratios_are_those_of_the_rounds():
    taken = {"not watched": [1.0, 2.0, 4.0], "every step": [1.5, 2.2, 8.0]}
    assert list(benchmark.ratios(taken)) == [("not watched", 2.0, 1.0), ("every step", 2.2, 1.5)]
    lines = benchmark.table("forward", {"a model": taken})
    assert lines[3] == "| a model | every step | 2200.0 ms | 1.500 |"


def test_ways_take_turns_and_their_first_steps_are_not_timed(tiny):
    model, _ = benchmark.decoder()
    done, clock = [], iter(range(1000))
    work = lambda: done.append(None)  # noqa: E731
    taken = benchmark.measured(model, benchmark.TRAININGS, work, 1, 2, lambda: next(clock))
    assert taken == {way: [1, 1] for way in benchmark.TRAININGS}
    assert len(done) == 1 + 2 * 3 * 2


def test_two_numbers_explain_what_calls_take_more():
    amounts = [benchmark.pairs(*shape) for shape in benchmark.SHAPES]
    assert benchmark.pairs(3, 5, 128) == 3 * 2 * 15
    found = benchmark.two_numbers(amounts, [7e-4 + 3e-9 * amount for amount in amounts])
    assert found == (pytest.approx(7e-4), pytest.approx(3e-9))
    assert benchmark.two_numbers([1, 2, 3], [3.0, 2.0, 1.0])[1] == 0.0  # noise: more pairs take no less


def test_the_page_of_parts_tells_them(tiny, monkeypatch):
    monkeypatch.setattr(benchmark, "SHAPES", ((1, 5, 24), (2, 7, 24), (1, 9, 48)))

    def taken(model, ways, work, before, rounds, clock):
        with saccade.watch(model, keep=True) as seen:
            work()
        batch, heads, length, _ = next(iter(seen.kept.values())).query.shape
        extra = benchmark.LAYERS * (1e-3 + 2e-6 * (batch * heads * length * (length + 1) // 2))
        return {"not watched": [0.01] * rounds} | {way: [0.01 + extra] * rounds for way in list(ways)[1:]}

    monkeypatch.setattr(benchmark, "measured", taken)
    page = benchmark.parts_page(3, None, True)
    assert page.count("a call takes 1.00 ms more, and 2000.00 ns more for each pair.") == 2
    assert "| 2 | 7 | 24 | 10.0 ms | 12.7 ms | 1.27 | 1.27 |" in page


def test_a_run_is_made_of_the_steps_that_are_observed_and_passed_over(tiny):
    taken = {"not watched": [2.0, 4.0], "passed over": [2.2, 4.0], "observed, with gradients": [3.0, 6.0]}
    (line,) = benchmark.overall({"a model": taken})
    assert line == "- a model: 1.200 times an unwatched one"  # (2 * 1.05 + 1.5) / 3
