"""Causality of models in which some tokens see later ones by design."""

from __future__ import annotations

import pytest
import torch
from stacks.dense import Dense

import saccade
from slowly import slow_after


def causality(report):
    [outcome] = [outcome for outcome in report.outcomes if outcome.name == "causality"]
    return outcome


class Pattern(Dense):
    """Sees the pairs of `pattern` among real tokens."""

    def __init__(self, pattern):
        super().__init__()
        self.pattern = pattern

    def pairs(self, length, attention_mask):
        behind = torch.arange(length)[:, None] - torch.arange(length)
        allowed = self.pattern(behind, torch.arange(length))
        return allowed if attention_mask is None else allowed & attention_mask[:, None, None].bool()


@pytest.mark.parametrize(
    ("pattern", "words"),
    slow_after(
        2,
        [
            (lambda behind, key: (behind >= 0) | ((key[:, None] < 3) & (key < 3)), "its first 3 tokens are a prefix"),
            (lambda behind, key: (behind >= 0) | (key[:, None] // 4 == key // 4), "in blocks of 4, 3"),
            (lambda behind, key: behind.abs() <= 2, "within a distance"),
            (lambda behind, key: behind >= -1, "output 0 depends on tokens up to 1"),
        ],
    ),
)
def test_a_pattern_that_nothing_promises_is_said_and_not_accused(pattern, words):
    """Fails where whatever is not bidirectional is held to be causal."""
    report = saccade.verify_stack(Pattern(pattern))
    assert "causality" not in [finding.probe for finding in report.findings]
    assert causality(report).status == "n/a"
    assert words in causality(report).reason
    assert causality(saccade.verify_stack(Pattern(pattern), causal=True)).status == "failed"


class Typed(Dense):
    """Tokens of type 0 are a prefix; `leaks`: from 65 tokens on, so are all others."""

    def __init__(self, leaks=False):
        super().__init__()
        self.leaks = leaks

    def forward(self, input_ids, attention_mask=None, position_ids=None, token_type_ids=None):
        length = input_ids.shape[1]
        prefix = token_type_ids == 0 if token_type_ids is not None else torch.zeros_like(input_ids).bool()
        prefix = torch.ones_like(prefix) if self.leaks and length > 64 else prefix
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        both = (prefix[:, :, None] & prefix[:, None])[:, None] | self.pairs(length, None)
        return super().forward(input_ids, both & real[:, None, None].bool(), position_ids)

    def pairs(self, length, attention_mask):
        return super().pairs(length, None) if attention_mask is None else attention_mask


def with_prefix(documents):
    width = max(map(len, documents))
    rows = [[*document, *[0] * (width - len(document))] for document in documents]
    real = [[*[1] * len(document), *[0] * (width - len(document))] for document in documents]
    types = [[0] * min(3, len(document)) + [1] * (width - min(3, len(document))) for document in documents]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor(real),
        "token_type_ids": torch.tensor(types),
    }


@pytest.mark.slow
def test_a_prefix_that_the_inputs_mark_is_no_leak_and_hides_none():
    report = saccade.verify_stack(Typed(), batch=with_prefix, causal=True)
    assert report.ok, report
    assert causality(report).status == "passed"
    assert causality(saccade.verify_stack(Typed(leaks=True), batch=with_prefix, causal=True)).status == "failed"
