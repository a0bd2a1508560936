"""What can be no target is refused with what is expected; what PyTorch wrapped is found inside."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

import saccade
from saccade.models import load
from saccade.verification.subject._kinds import check, name_of, unwrapped
from saccade.verification.subject.discovery._discover import discover


def attention(q, k, v, mask=None, *, factor=1.0):
    scores = factor * q @ k.mT / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1) @ v


@torch.jit.script
def scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


class Holder:
    def __call__(self, q, k, v, mask=None):
        return attention(q, k, v, mask)

    def attend(self, q, k, v, mask=None):
        return attention(q, k, v, mask)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x, mask=None):
        return attention(*self.project(x).chunk(3, -1), mask)


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (3, "an int cannot be called"),
        (None, "None cannot be called"),
        (math, "the Python module 'math' cannot"),
        (torch.zeros(3, 4), "a tensor of shape [3, 4] cannot"),
        ([attention], "a list cannot"),
        (int, "instances of the class int cannot be called"),
    ],
)
def test_what_cannot_be_called_is_refused(target, what):
    with pytest.raises(TypeError) as raised:
        saccade.verify(target)
    assert what in str(raised.value)
    assert "expected a function (q, k, v[, mask]), an nn.Module or its class" in str(raised.value)


def test_a_list_of_modules_has_no_forward():
    with pytest.raises(TypeError, match="a ModuleList has no forward"):
        saccade.verify(nn.ModuleList([Layer()]))


@pytest.mark.parametrize(
    "target", [attention, Holder(), Holder, Layer, Layer(), functools.partial(attention), scripted]
)
def test_what_can_be_called_passes(target):
    assert check(target) is None


@pytest.mark.parametrize(
    ("target", "name", "call"),
    [
        (functools.partial(attention, factor=1.0), "attention", "attention(q, k, v, mask)"),
        (Holder().attend, "Holder.attend", "attend(q, k, v, mask)"),
        (Holder(), "Holder", "Holder(q, k, v, mask)"),
        (scripted, "scripted", "scripted(q, k, v)"),
        (nn.DataParallel(Layer()), "Layer", "forward(x, mask)"),
        (torch.compile(Layer()), "Layer", "forward(x, mask)"),
        (torch.compile(attention), "attention", "attention(q, k, v, mask)"),
    ],
)
def test_callables_are_named_and_read_as_what_they_hold(target, name, call):
    report = saccade.verify(target, isolated=False, checks=["scale"])
    assert report.ok
    assert report.outcomes[0].status == "passed"
    assert (report.target, report.called.partition(" with ")[0]) == (name, call)


def test_the_report_says_what_was_taken_out():
    assert unwrapped(attention) == (attention, ())
    layer = Layer()
    inner, said = unwrapped(nn.DataParallel(torch.compile(layer)))
    assert inner is layer
    assert [words.partition(" ")[2] for words in said] == [
        "is checked is the module inside DataParallel",
        "is checked is what torch.compile was given; the compile check compiles it",
    ]
    assert discover(nn.DataParallel(layer)).reading.assumed[0] == said[0]
    assert name_of(nn.DataParallel(layer)) == "Layer"


def test_a_language_model_of_ours_is_verified_as_its_decoder():
    model = load()
    check(model)
    subject = discover(model)
    assert (subject.reading.form, subject.promise.causal) == ("tokens", True)
    assert subject.reading.vocabulary == model.vocabulary
    inputs = subject.inputs(2, 7)
    assert torch.equal(subject(inputs).out, model(*inputs.tensors.values()).logits)
