"""Rounding in half precision, where no wider copy is made: faults larger than it are named, and no more is passed."""

from __future__ import annotations

import pytest
import torch
from stacks.dense import Dense, packed

import saccade
from saccade.verification.stacks import _bounds
from slowly import slow_after


def unpacked(documents):
    return {name: value for name, value in packed(documents).items() if name != "attention_mask"}


class Faint(Dense):
    """Other tokens have a thousandth of the effect that they have in `Dense`."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.out.weight.mul_(1e-3)


@pytest.fixture
def no_copy(monkeypatch):
    monkeypatch.setattr(_bounds, "LARGEST", 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_after(1, [torch.bfloat16, torch.float16]))
def test_a_leak_in_half_precision_is_named_and_a_right_pack_is_not(dtype, no_copy):
    """Fails where the bound is as wide as the effect of a token, or narrower than rounding."""
    report = saccade.verify_stack(Dense().to(dtype), pack=packed)
    assert report.ok, report
    assert "packing" in [finding.probe for finding in saccade.verify_stack(Dense().to(dtype), pack=unpacked).findings]


def test_what_rounding_hides_is_not_passed(no_copy):
    outcomes = {outcome.name: outcome for outcome in saccade.verify_stack(Faint().bfloat16()).outcomes}
    assert (outcomes["batch"].status, outcomes["batch"].measured) == ("n/a", False)
    assert "rounding in bfloat16 may hide faults" in outcomes["batch"].reason
    assert outcomes["determinism"].status == "passed"


def test_half_precision_is_verified_in_a_wider_dtype_that_fits(monkeypatch):
    """Fails where a model whose float64 copy is too large is verified as it is, though float32 fits."""
    model = Faint().bfloat16()
    monkeypatch.setattr(_bounds, "LARGEST", 4 * sum(own.numel() for own in model.parameters()))
    assert [finding.probe for finding in saccade.verify_stack(model, pack=unpacked).findings] == ["packing"]


class Rounded(torch.nn.Module):
    """The same model outside of PyTorch: numbers of its own dtype."""

    def __init__(self, model):
        super().__init__()
        self.inner = [model.float()]

    def forward(self, input_ids):
        return self.inner[0](input_ids).float()


def test_a_second_stack_has_its_own_rounding():
    """Fails where an implementation in float32 is held to the bound of float64."""
    noisy = Dense()
    with torch.no_grad():
        noisy.head.weight.mul_(1 + 3e-5)
    report = saccade.verify_stack(Dense(), second=Rounded(noisy))
    assert report.ok, report


class Noisy(Dense):
    """Noise as large as its outputs, in eval mode, too, and pairs of later tokens."""

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        out = super().forward(input_ids, attention_mask, position_ids)
        return out + torch.randn_like(out) * out.std()

    def pairs(self, length, attention_mask):
        return torch.ones(length, length, dtype=torch.bool)


def test_what_noise_hides_is_not_passed():
    """Fails where a bound that is wider than all outputs lets every probe pass."""
    report = saccade.verify_stack(Noisy(), causal=True)
    statuses = {outcome.name: outcome.status for outcome in report.outcomes}
    assert statuses["determinism"] == "failed" and statuses["causality"] == statuses["batch"] == "n/a"
