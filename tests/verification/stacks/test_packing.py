"""Packing: faults that are known by construction are named, with the smallest pack; the right pack is silent."""

from __future__ import annotations

import pytest
import torch
from stacks.dense import WIDTH, Dense, packed
from torch import nn

import saccade


def without(*names):
    return lambda documents: {name: value for name, value in packed(documents).items() if name not in names}


def test_a_right_pack_is_silent():
    report = saccade.verify_stack(Dense(), pack=packed)
    assert report.ok, report
    assert {outcome.name: outcome.status for outcome in report.outcomes}["packing"] == "passed"


def test_documents_that_see_each_other_are_shown_by_two_tokens():
    report = saccade.verify_stack(Dense(), pack=without("attention_mask"))
    [finding] = report.findings
    assert finding.probe == "packing"
    assert "Document 1 attends to document 0" in finding.message
    assert [len(document) for document in finding.example] == [1, 1]
    assert finding.where == "attention_mask"


def test_positions_that_do_not_restart_are_told_from_a_leak():
    report = saccade.verify_stack(Dense(), pack=without("position_ids"))
    [finding] = report.findings
    assert "positions do not restart" in finding.message
    assert "attends to" not in finding.message
    assert finding.where == "position_ids"


def test_labels_that_cross_the_seam():
    def pack(documents):
        return {**packed(documents), "labels": packed(documents)["input_ids"].clone()}

    [finding] = saccade.verify_stack(Dense(), pack=pack).findings
    assert finding.where == "labels"
    assert [len(document) for document in finding.example] == [1, 1]


def test_the_model_is_as_before():
    model = Dense().train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    saccade.verify_stack(model, pack=packed)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(part.training for part in model.modules())


def test_a_gradient_of_rounding_alone_is_silent():
    """Softmax cancels the bias of keys: its gradient is 0, and what is computed differs by more than its own size."""
    model = Dense()
    model.bias = nn.Parameter(torch.randn(WIDTH))
    model.qkv.register_forward_hook(
        lambda part, given, out: out + torch.cat([torch.zeros(WIDTH), model.bias, torch.zeros(WIDTH)]).to(out)
    )
    report = saccade.verify_stack(model, pack=packed)
    assert report.ok, report


class Large(Dense):
    """With a vocabulary that is large enough for long packs of distinct tokens."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(113, WIDTH)


@pytest.mark.slow
def test_long_packs_and_packs_of_many_documents():
    """Fails where four short documents are all that is packed."""

    def pack(documents):
        made = packed(documents)
        return made if len(documents) < 6 else {**made, "attention_mask": torch.ones_like(made["attention_mask"])}

    [finding] = saccade.verify_stack(Large(), pack=pack).findings
    assert "attends to document" in finding.message
    assert len(finding.example) == 6
    assert saccade.verify_stack(Large(), pack=packed).ok
