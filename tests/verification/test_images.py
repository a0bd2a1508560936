"""Attention over images asks for an adapter, and the adapter that it names works."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn

import saccade
from saccade.cli import main
from saccade.verification import Undecided

SOURCE = '''
import torch
from torch import nn


class SelfAttention(nn.Module):
    """Of generative adversarial networks: (batch, channels, height, width), no scale."""

    def __init__(self, in_dim=24):
        super().__init__()
        self.query, self.key = (nn.Conv2d(in_dim, in_dim // 8, 1) for _ in range(2))
        self.value = nn.Conv2d(in_dim, in_dim, 1)
        self.gamma = nn.Parameter(torch.ones(1))

    def forward(self, x):
        batch, channels, height, width = x.size()
        query, key, value = (one(x).flatten(2) for one in (self.query, self.key, self.value))
        weights = torch.softmax(query.mT @ key, -1)
        out = (value @ weights.mT).view(batch, channels, height, width)
        return self.gamma * out + x, weights
'''


def module():
    space = {"__name__": "images"}
    exec(SOURCE, space)
    torch.manual_seed(0)
    return space["SelfAttention"]()


def adapter_in(message):
    """The code that the message holds."""
    lines = message.splitlines()
    start = next(at for at, line in enumerate(lines) if line.strip().startswith("def call"))
    code = [line for line in lines[start:] if line.startswith("    ")]
    return textwrap.dedent("\n".join(code))


def test_the_adapter_that_is_named_works():
    with pytest.raises(Undecided, match=r"images \(batch, channels, height, width\)") as raised:
        saccade.verify(module(), isolated=False, checks=["scale"])
    assert raised.value.candidates == (("the adapter", "--adapter FILE.py:call"),)
    space = {}
    exec(adapter_in(raised.value.message), space)
    report = saccade.verify(module(), how=space["call"], isolated=False, checks=["scale", "softmax"])
    assert "x (batch, length, 24)" in report.called
    assert [finding.family for finding in report.errors] == ["scale"]


@pytest.mark.slow
def test_the_commands_of_the_message_lead_to_a_report(tmp_path, capsys):
    target = tmp_path / "images.py"
    target.write_text(SOURCE)
    assert main(["verify", f"{target}:SelfAttention", "--only", "scale"]) == 2
    told = capsys.readouterr().err
    assert "--adapter FILE.py:call" in told
    (tmp_path / "adapting.py").write_text(adapter_in(told))
    asked = ["--adapter", f"{tmp_path / 'adapting.py'}:call", "--only", "scale"]
    assert main(["verify", f"{target}:SelfAttention", *asked]) == 1
    assert "scale" in capsys.readouterr().out


def test_what_takes_sequences_is_no_image():
    assert saccade.verify(nn.MultiheadAttention(24, 4, batch_first=True), isolated=False, checks=["scale"]).ok
