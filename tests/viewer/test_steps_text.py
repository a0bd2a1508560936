"""Steps as text: nothing wider than the terminal, plain where it is piped, every number one that was computed."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import saccade
from saccade.inspection import example, step_of_call
from saccade.operator._call import AttentionCall
from saccade.viewer import print_steps, steps_as_text

TEXT = "The cat sat on the mat because it was soft."
NASTY = "<b>cat</b> " + 10 * "\u732b" + " saw [bold]it[/bold] $x$ and it was uncharacteristically soft."


@pytest.fixture(scope="module")
def steps():
    return saccade.step(TEXT, (1, 4), "it", without=["scale", "mask"])


@pytest.mark.parametrize("text", [TEXT, NASTY])
def test_no_line_is_wider_than_the_terminal(text):
    steps = saccade.step(text, (2, 5), "it", without="mask")
    for width in (40, 80, 120):
        found = steps_as_text(steps, width)
        lines = found.splitlines()
        assert max(cell_len(line) for line in lines) <= width and "\x1b" not in found
        assert "[bold]" not in found or "[bold]" in text  # rich reads no markup in a text
        assert all(line == line.rstrip() for line in lines)


def test_in_a_terminal_there_are_colours():
    out = io.StringIO()
    print_steps(Console(file=out, width=80, force_terminal=True, color_system="truecolor"), example())
    assert "\x1b[38;2;61;139;234mq" in out.getvalue()
    plain = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert plain.split() == str(example()).split()


def test_every_step_says_what_it_is(steps):
    text = str(steps)
    flat = " ".join(text.split())
    for number, step in enumerate(steps, 1):
        assert f"{number:>2}  {step.name}" in text
        for said in (step.formula, step.shapes, step.says, step.without):
            assert " ".join(said.split()) in flat
    assert flat.startswith("Head 1.4, 'it' asks: token 9 of 13, counted from 0 'The cat sat")


def test_the_numbers_shown_are_the_numbers(steps):
    text = str(steps)
    assert f"more, norm {np.linalg.norm(steps.output):.3f}" in text and "length" not in text
    after = text[text.index("Weights without scale and mask") :]
    rows = re.findall(r"^ +(\d+) \S+ +([\d.]+) +([\d.]+)(?:  █*)?$", after, re.MULTILINE)[:5]
    assert len(rows) == 5
    for key, before, without in rows:
        assert float(before) == pytest.approx(steps.weights[int(key)], abs=5e-4)
        assert float(without) == pytest.approx(steps.weights_without[int(key)], abs=5e-4)
    assert int(rows[0][0]) == steps.weights_without.argmax()
    softmax = text[text.index(" Softmax") :]
    folded = float(re.search(r"8 more, together ([\d.]+)", softmax)[1])
    assert folded == pytest.approx(np.sort(steps.weights)[:8].sum(), abs=5e-4)


def test_keys_that_the_mask_will_hide_stand_apart():
    steps = saccade.step(TEXT, (1, 4), "it")
    text = str(steps)
    assert " ".join(steps.summary.split()) in " ".join(text.split())
    assert steps.summary.startswith("In this head 'it' looks most at 'sat' (.79), then 'at' in 'cat' (.13)")
    hidden = [j for j, seen in enumerate(steps.scores.visible) if not seen]
    parts = re.split(r"\n\n(?= *\d+  )", text)
    for number, (step, part) in enumerate(zip(steps, parts[1:], strict=True), 1):
        rows = [int(j) for j in re.findall(r"^      +(\d+) \S+(?: +-?\d+\.\d+)+", part, re.MULTILINE)]
        _, line, after = part.partition(f"hidden by the mask in step {steps.hidden_in}:")
        assert bool(line) == (step.id in ("dot", "scale"))
        if line:
            assert number < steps.hidden_in and len(rows) == 7 and set(rows[5:]) <= set(hidden)
            assert not set(rows[:5]) & set(hidden) and "1 more" in after
            kept = [j for j in np.argsort(-step.columns[-1].values) if j not in hidden][:5]
            assert rows[:5] == kept
    assert "hidden by the mask" not in str(example())


def test_each_part_that_can_be_left_out_says_how():
    text = " ".join(str(saccade.step(TEXT, (1, 4), "it")).split())
    assert re.findall(r"Try it: --without (\w+)", text) == ["position", "scale", "mask", "shift"]
    assert "Try it" not in str(saccade.step(TEXT, (1, 4), "it", without=["mask"]))


def test_an_overflow_is_shown_as_it_is():
    assert "NaN" not in str(example(without="shift"))  # in float64
    one = torch.tensor([[[[4.0]]]], dtype=torch.float16)
    keys = torch.tensor([[[[4.0], [1.0]]]], dtype=torch.float16)
    call = AttentionCall(one, keys, keys, scale=1.0).observed(saccade.attention(one, keys, keys, scale=1.0), "by hand")
    text = str(step_of_call(call, 0, 0, labels=["a", "b"], without="shift"))
    assert "exp overflows in float16: the weights are NaN." in text


def test_in_jupyter_the_text_is_returned_and_nothing_is_shown(monkeypatch):
    """rich shows every line as an output of its own there, whatever file it is given."""
    expected = steps_as_text(example())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert steps_as_text(example()) == expected and "0.669762" in expected
