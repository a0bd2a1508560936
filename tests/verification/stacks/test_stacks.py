"""How stacks are opened, cast and kept: what a verification changes, draws and finds by itself."""

from __future__ import annotations

import types

import pytest
import torch
from stacks.dense import VOCABULARY, Dense, packed
from torch import nn
from torch.nn.functional import dropout

import saccade
from saccade.verification.stacks._documents import located
from saccade.verification.stacks._shrink import smallest


def probes_of(report) -> list[str]:
    return [finding.probe for finding in report.findings]


class DropsAlways(Dense):
    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return dropout(super().forward(input_ids, attention_mask, position_ids), 0.1)


@pytest.mark.slow
def test_dropout_in_eval_mode_is_named_and_hides_no_other_fault():
    """Fails where random numbers become findings of other probes, or widen the bound until a leak is within it."""
    report = saccade.verify_stack(DropsAlways(), pack=lambda documents: packed(documents)["input_ids"])
    assert probes_of(report) == ["determinism", "packing"]
    assert saccade.verify_stack(DropsAlways(), pack=packed).findings[0].probe == "determinism"


class Remembers(Dense):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        self.calls += 1
        return super().forward(input_ids, attention_mask, position_ids) + self.calls


def test_state_between_calls_is_told_from_random_numbers():
    finding = saccade.verify_stack(Remembers()).findings[0]
    assert (finding.probe, finding.evidence["what_moves"]) == ("determinism", "state")


class LeaksBeyond64(Dense):
    def pairs(self, length, attention_mask):
        allowed = super().pairs(length, attention_mask)
        return torch.ones_like(allowed) if length > 64 else allowed


def test_a_triangle_that_long_inputs_lose():
    """Fails where causality is tried at short lengths only."""
    report = saccade.verify_stack(LeaksBeyond64())
    assert probes_of(report) == ["causality", "batch"]  # a short row is padded beyond 64, too
    finding = report.findings[0]
    assert [len(document) for document in finding.example] == [65]


class FloatOnly(Dense):
    def forward(self, input_ids, attention_mask=None, position_ids=None):
        assert self.head.weight.dtype == torch.float32
        return super().forward(input_ids, attention_mask, position_ids)


def test_a_model_that_takes_float32_alone_is_verified_in_it():
    assert saccade.verify_stack(FloatOnly(), pack=packed).ok
    assert not saccade.verify_stack(FloatOnly(), pack=lambda documents: packed(documents)["input_ids"]).ok


def test_a_function_that_raises_is_a_finding_and_the_other_probes_go_on():
    def pack(documents):
        raise KeyError("cu_seqlens")

    report = saccade.verify_stack(Dense(), pack=pack)
    [finding] = report.findings
    assert (finding.probe, finding.location.function) == ("packing", "pack")
    assert {outcome.name: outcome.status for outcome in report.outcomes}["batch"] == "passed"


def test_a_bidirectional_model_without_a_mask_is_not_padded():
    layer = nn.TransformerEncoderLayer(24, 3, 37, batch_first=True)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 24), layer)
    assert saccade.verify_stack(model).ok


def test_a_collator_of_a_trainer_that_flattens_is_its_packing():
    def collator(features):
        return packed([feature["input_ids"] for feature in features])

    trainer = types.SimpleNamespace(model=Dense(), data_collator=collator)
    report = saccade.verify_stack(trainer)
    assert report.ok, report
    assert {outcome.name: outcome.status for outcome in report.outcomes}["packing"] == "passed"


def test_documents_are_found_wherever_they_stand():
    inputs = {"input_ids": torch.tensor([[0, 5, 6, 7, 9], [0, 0, 6, 7, 9]])}
    places = located(inputs, [[6, 7], [5, 6]][:1])
    assert [(place.row, place.start) for place in places] == [(0, 2)]


def test_the_smallest_documents_are_minimal():
    documents = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5]]

    def shows(given):
        return given if any(4 in one for one in given) and any(2 in one for one in given) else None

    assert smallest(documents, shows, documents) == ([[4], [2]], [[4], [2]])


@pytest.mark.parametrize(("name", "value"), [("window", 0), ("batch", 3)])
def test_arguments_are_checked(name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name}: expected"):
        saccade.verify_stack(Dense(), **{name: value})


class ReadsImages(nn.Module):
    main_input_name = "pixel_values"

    def forward(self, pixel_values):
        return pixel_values


def test_a_model_of_images_is_refused_by_its_input():
    with pytest.raises(TypeError, match="expected a model of token ids, got ReadsImages, which reads pixel_values"):
        saccade.verify_stack(ReadsImages())


class BeginsAtZero(Dense):
    """Its output projection is 0 before the first step, so that no output depends on another token."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.out.weight)


@pytest.mark.slow
def test_projections_that_begin_at_zero_hide_no_fault():
    """Fails where a model is tested as it begins: documents that see each other have no effect yet."""
    assert saccade.verify_stack(BeginsAtZero(), pack=packed, causal=True).ok
    model = BeginsAtZero()
    report = saccade.verify_stack(model, pack=lambda documents: packed(documents)["input_ids"], causal=True)
    assert "packing" in [finding.probe for finding in report.errors]
    assert not model.out.weight.any()
