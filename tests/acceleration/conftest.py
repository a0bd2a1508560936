"""Calls of tests are small, and small calls are PyTorch's: here all sizes are taken."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from saccade.acceleration import _rules

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture
def every_size(monkeypatch):
    monkeypatch.setattr(_rules, "small", lambda call: _rules.EMPTY if 0 in call.query.shape else None)
    monkeypatch.setattr(_rules, "_biased", lambda meaning: None)


@pytest.fixture(autouse=True)
def everything_is_put_back():
    before = F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
    yield
    assert F.scaled_dot_product_attention is ORIGINAL
    assert (F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()) == before
