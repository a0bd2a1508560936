"""All steps of one row of one head, as sentences and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ._after import AfterWeights
from ._before import BeforeScores
from ._inputs import HeadInputs
from ._parts import HeadNumbers
from ._result import Steps
from ._scores import checked_switches
from ._weighing import Weighing


def written_steps(
    inputs: HeadInputs,
    labels: Sequence[str],
    token: tuple[int, np.ndarray] | None,
    without: Iterable[str],
    notes: Sequence[str],
    *,
    names: Sequence[str] = (),
    query: str | None = None,
    digits: int = 3,
) -> Steps:
    """The steps of ``inputs``, whose keys are displayed as ``labels``.

    In sentences the keys are called ``names``, by default the labels in quotes, and the row ``query``, by default the
    name of its key. ``token`` is the row's token id and its row of the embedding, if they are known.
    """
    numbers, labels = HeadNumbers(inputs), tuple(labels)
    names = tuple(names) or tuple(f"'{label}'" for label in labels)
    left_out = checked_switches(without, numbers.scores)
    before = BeforeScores(numbers, names, digits, query, token)
    writers = before, Weighing(numbers, names, digits, query), AfterWeights(numbers, names, digits, query)
    written = tuple(step for writer in writers for step in writer.steps())
    of = "" if inputs.own is None else f" of {len(labels):,}"
    title = f"Head {inputs.place}: token {inputs.row}{of}, counted from 0"
    notes = tuple(notes)
    return Steps("", "", 1, title, labels, names, numbers, written, None, left_out, notes, digits, query=before.name)


def title_of(steps: Steps, label: str, tokens: int) -> str:
    """A title with the head and the query word."""
    of = " of the target" if steps.part in ("decoder", "cross") else ""
    return f"Head {steps.place}, '{label}' asks: token {steps.row} of {tokens:,}{of}, counted from 0"
