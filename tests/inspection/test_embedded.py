"""The sentence of the README keeps its promise on the model that comes with the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from saccade.inspection import look
from saccade.models import load

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def seen():
    (sentence,) = re.findall(r'pip install .* && saccade look "(.*)"', README.read_text(encoding="utf-8"))
    return look(load(), sentence)


def test_it_shows_a_head_that_looks_back_one_that_copies_and_one_that_rests(seen):
    told = {f.kind: f for f in seen.findings}
    assert {"previous", "copy", "sink"} <= told.keys()
    assert told["copy"].sentence.startswith("Head ")  # by a head that is measured to copy
    assert told["previous"].value > 0.7 and told["copy"].value > 0.7 and told["sink"].value >= 1


def test_its_words_come_first_and_its_map_has_digits_in_a_narrow_terminal(seen):
    assert seen.findings[0].query is not None
    labels = [w.label for w in seen.seen.words]
    assert 1 + max(map(len, labels)) + 4 * len(labels) <= 80


def test_every_head_of_the_model_was_measured(seen):
    roles = [seen.measured(i, j)["role"] for i in range(seen.seen.layers) for j in range(seen.seen.heads)]
    assert {"previous", "repeat"} <= set(roles)


@pytest.mark.parametrize("rows", [None, (2, 4)], ids=["a map", "a part"])
def test_a_model_whose_numbers_overflow_is_told_by_one_line(rows):
    model = load()
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.fill_(1e38)
    with pytest.raises(ValueError, match="layer 0: the attention weights are not finite"):
        look(model, "The cat sat on the mat because it was tired.", rows=rows)
