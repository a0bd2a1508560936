"""The benchmark of score and mask functions: its cases run, and its page has the last reading of each."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import saccade

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTH = 67


@pytest.fixture(scope="module")
def flex():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("benchmark_flex", BENCHMARKS / "flex.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_there_are_twenty_functions_and_each_runs_with_gradients(flex):
    functions = flex.score_functions(LENGTH)
    assert len(functions) == 20 and set(functions) > flex.SHORT
    inputs = flex.inputs_of(LENGTH)
    for name, function in functions.items():
        found = saccade.flex_attention(*inputs, function)
        torch.testing.assert_close(found, flex.dense(*inputs, function), rtol=1e-4, atol=1e-4, msg=name)
        found.sum().backward()


def test_mask_values_say_what_the_functions_say(flex):
    row, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    for name, function in flex.mask_functions(LENGTH).items():
        mask = flex.own_masks(LENGTH)[name]
        assert torch.equal(mask.dense(LENGTH, LENGTH)[0, 0], function(0, 0, row, key)), name


def test_the_page_has_the_last_reading_of_each_case(flex):
    calls = {"forward": lambda: None, "plain forward": lambda: None, "both": lambda: None, "plain both": lambda: None}
    calls["fails"] = lambda: 1 / 0
    row = flex.record("program", "ten operations", 512, calls, 3)
    assert row["errors"] == {"fails": "ZeroDivisionError: division by zero"} and "fails" not in row["seconds"]
    first, last = (
        {**row, "ratios": {"forward / plain forward": value, "both / plain both": 2.0}} for value in (1.25, 1.5)
    )
    text = flex.page([first, last])
    assert "| ten operations | 512 | 1.50 | 2.00 |" in text and "1.25" not in text
    assert "division by zero" in text
