"""Steps as text: coloured in a terminal, plain in a pipe; at most as wide as the console."""

from __future__ import annotations

import io
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from ....support._numbers import fixed
from ....support._terminal._console import Console as CleanedConsole

if TYPE_CHECKING:
    from ...inspection import Step, Steps

PART = 6  # most components shown of each vector
TERMS, HIDDEN_TERMS = 5, 2  # keys shown of each step, and of those that a later step hides; the rest is folded
LONGEST_LABEL, LONGEST_NAME = 16, 28
_BAR = 18  # cells of a weight of 1
_INDENT = 4
# As in the diagrams: queries blue, keys orange, values green, weights magenta, legible on dark and light.
_COLOURS = {"query": "#3d8bea", "key": "#d07a1f", "value": "#1f9d77", "weight": "#c9498f", "": ""}


def steps_as_text(steps: Steps, width: int = 80) -> str:
    """All steps as plain text. ``width`` is in characters.

    Example:
        >>> from saccade.inspection import example
        >>> from saccade.viewer import steps_as_text
        >>> print(steps_as_text(example()))
        Attention by hand: the query A = [1, 0] and two keys
        ...
    """
    out = io.StringIO()
    # In Jupyter rich would show every line as a separate output, whatever file it gets.
    console = CleanedConsole(
        file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False, highlight=False
    )
    print_steps(console, steps)
    return out.getvalue()


def print_steps(console: Console, steps: Steps) -> None:
    """Print all steps in a terminal, one after another."""
    _print_title(console, steps)
    for number, step in enumerate(steps, 1):
        console.print()
        _print_step(console, steps, number, step)
        if step.id == "softmax" and steps.without:
            _print_change(console, steps)
    console.print()
    _print_end(console, steps)


def _print_title(console: Console, steps: Steps) -> None:
    for line in Text(steps.title, style="bold").wrap(console, console.width):
        _print_line(console, line)
    shape = f", {steps.layers} layers" if steps.layers > 1 else ""
    text = [repr(shorten(" ".join(steps.text.split()), 200))] if steps.text else []
    _print_wrapped(console, ", ".join([*text, steps.model + shape]), "dim", 0)
    for note in steps.notes:
        _print_wrapped(console, f"Note: {note}.", "", 0)
    console.print()
    _print_wrapped(console, steps.summary, "", 0)


def _print_step(console: Console, steps: Steps, number: int, step: Step) -> None:
    heading = Text(f"{number:>2}  ", style="dim")
    heading.append(step.name, style="bold")
    console.print(heading, soft_wrap=True)
    _print_wrapped(console, step.formula, "bold #c9498f", _INDENT)
    _print_wrapped(console, step.shapes, "dim", _INDENT)
    _print_wrapped(console, step.says, "", _INDENT)
    _print_vectors(console, steps, step)
    if step.columns:
        for line in _terms(steps, step):
            _print_line(console, line)
    if step.facts:
        facts = ", ".join(f"{name} = {fixed(value, steps.digits)}" for name, value in step.facts)
        _print_wrapped(console, facts, "", _INDENT + 2)
    tried = f" Try it: --without {step.switch}" if step.switch in steps.switches and not steps.without else ""
    _print_wrapped(console, step.without + tried, "italic dim", _INDENT)


def _print_vectors(console: Console, steps: Steps, step: Step) -> None:
    """One line each; a long name has its own line."""
    names = [cell_len(vector.name) for vector in step.vectors]
    room = max((size for size in names if size <= LONGEST_NAME), default=0)
    for vector, size in zip(step.vectors, names, strict=True):
        line = Text(" " * (_INDENT + 2)).append(vector.name, style=_COLOURS[vector.kind])
        if size > room:
            _print_line(console, line)
            line = Text(" " * (_INDENT + 2 + room))
        else:
            line.append(" " * (room - size))
        line.append("  " + _vector(vector.values, steps.digits, console.width - _INDENT - 2 - room - 2))
        _print_line(console, line)


def _vector(values: np.ndarray, digits: int, width: int) -> str:
    """The first components that fit, the number of folded ones, and the norm of all."""
    norm = f"norm {fixed(float(np.linalg.norm(values)), 3)}"
    shown = min(PART, len(values))
    while shown:
        text = " ".join(fixed(value, digits).rjust(digits + 4) for value in values[:shown])
        folded = f"  and {len(values) - shown:,} more, {norm}" if shown < len(values) else ""
        if cell_len(text + folded) <= width or shown == 1:
            return text + folded
        shown -= 1
    return ""


def _terms(steps: Steps, step: Step) -> list[Text]:
    """The keys with the largest numbers of the last column, and the range of the others; keys hidden later at last."""
    last = step.columns[-1].values
    finite = [int(j) for j in np.argsort(-last, kind="stable") if np.isfinite(last[j])]
    later = _hidden_later(steps, step)
    visible, hidden = ([j for j in finite if (j in later) == is_later] for is_later in (False, True))
    shown = visible if len(last) <= TERMS + 1 else visible[:TERMS]
    pale = hidden if len(last) <= TERMS + 1 else hidden[:HIDDEN_TERMS]
    room = max((cell_len(_label(steps, j)) for j in (*shown, *pale)), default=3)
    cell = max(steps.digits + 6, *(cell_len(column.name) + 2 for column in step.columns))
    head = Text(" " * (_INDENT + 2) + "key".ljust(room), style="dim")
    for column in step.columns:
        head.append(column.name.rjust(cell))
    lines = [head, *(_term(steps, step, j, room, cell) for j in shown)]
    lines += _rest(step, visible[len(shown) :], steps.digits)
    if hidden:
        lines.append(Text(f"{' ' * (_INDENT + 2)}hidden by the mask in step {steps.hidden_in}:", style="dim"))
        lines += [_term(steps, step, j, room, cell) for j in pale]
        lines += _rest(step, hidden[len(pale) :], steps.digits)
    gone = int(np.isneginf(last).sum())
    if gone:
        lines.append(Text(f"{' ' * (_INDENT + 2)}{gone:,} hidden: −∞", style="dim"))
    return lines


def _hidden_later(steps: Steps, step: Step) -> set[int]:
    """Keys that a later step hides from this row."""
    visible = steps.scores.visible
    before = [each.id for each in steps][: (steps.hidden_in or 1) - 1]
    return set(np.flatnonzero(~visible).tolist()) if visible is not None and step.id in before else set()


def _term(steps: Steps, step: Step, j: int, room: int, cell: int) -> Text:
    """One key and its numbers; weights also have a bar."""
    line = Text(" " * (_INDENT + 2)).append(set_cell_size(_label(steps, j), room), style=_COLOURS["key"])
    for column in step.columns:
        line.append(fixed(float(column.values[j]), steps.digits).rjust(cell))
    if step.id == "softmax":
        line.append("  " + "█" * round(_BAR * float(step.columns[-1].values[j])), style=_COLOURS["weight"])
    return line


def _rest(step: Step, keys: list[int], digits: int) -> list[Text]:
    last = step.columns[-1].values
    return [Text(" " * (_INDENT + 2) + _folded(step, last[keys], digits), style="dim")] if keys else []


def _folded(step: Step, values: np.ndarray, digits: int) -> str:
    name = step.columns[-1].name
    more = f"{len(values):,} more"
    if step.id == "softmax":
        return f"{more}, together {fixed(float(values.sum()), digits)}"
    low, high = (fixed(float(value), digits) for value in (values.min(), values.max()))
    return f"{more}, {name} = {low}" if low == high else f"{more}, {name} from {low} to {high}"


def _print_change(console: Console, steps: Steps) -> None:
    """The weights as they are, and without the parts that are left out."""
    before, after = steps.weights, steps.weights_without
    left_out = " and ".join(steps.without)
    console.print()
    console.print(Text(f"    Weights without {left_out}", style="bold"), soft_wrap=True)
    if not np.isfinite(after).all():
        kind = str(steps.numbers.inputs.dtype).removeprefix("torch.")
        _print_wrapped(console, f"exp overflows in {kind}: the weights are NaN.", "", _INDENT)
    order = list(dict.fromkeys([*np.argsort(-np.nan_to_num(after), kind="stable")[:TERMS], int(before.argmax())]))
    room = max(cell_len(_label(steps, j)) for j in order)
    cell = max(steps.digits + 6, 9)
    _print_line(console, Text(f"      {'key'.ljust(room)}{'with'.rjust(cell)}{'without'.rjust(cell)}", style="dim"))
    for j in order:
        line = Text("      ").append(set_cell_size(_label(steps, j), room), style=_COLOURS["key"])
        for value in (before[j], after[j]):
            line.append(fixed(float(value), steps.digits).rjust(cell))
        if np.isfinite(after[j]):
            line.append("  " + "█" * round(_BAR * float(after[j])), style=_COLOURS["weight"])
        _print_line(console, line)
    out, changed = steps.output, steps.output_without
    if out is not None and changed is not None and np.isfinite(changed).all():
        moved = float(np.linalg.norm(changed - out))
        norm = float(np.linalg.norm(out))
        _print_wrapped(
            console,
            f"The output of the head changes by {fixed(moved, 3)}; its unchanged norm is {fixed(norm, 3)}.",
            "",
            _INDENT,
        )


def _print_end(console: Console, steps: Steps) -> None:
    largest = max(steps.differences.values(), default=0.0)
    whose = "the model" if steps.text else "the attention call"
    _print_wrapped(
        console,
        f"Recomputed in float64. Largest difference from the result of {whose}: {largest:.0e}.",
        "dim",
        0,
    )


def _label(steps: Steps, j: int) -> str:
    label = steps.labels[j]
    while cell_len(label) > LONGEST_LABEL:
        label = label[: max(1, min(LONGEST_LABEL - 1, len(label) - 2))] + "…"
    return label if len(steps.labels) < 3 else f"{j:>{len(str(len(steps.labels) - 1))}} {label}"


def _print_wrapped(console: Console, text: str, style: str, indent: int) -> None:
    if not text:
        return
    for line in Text(text).wrap(console, max(20, console.width - indent)):
        console.print(
            Text(" " * indent).append_text(Text(line.plain.rstrip(), style=style)), soft_wrap=True, highlight=False
        )


def _print_line(console: Console, line: Text) -> None:
    line.truncate(console.width)
    line.rstrip()
    console.print(line, soft_wrap=True, highlight=False)
