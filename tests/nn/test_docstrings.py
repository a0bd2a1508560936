"""Every public module says its formula, its shapes and where it comes from."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import saccade.models
import saccade.nn
import saccade.positions


def modules():
    for package in (saccade.nn, saccade.positions, saccade.models):
        for name in package.__all__:
            member = getattr(package, name)
            module = inspect.isclass(member) and issubclass(member, torch.nn.Module)
            if module and not issubclass(member, saccade.models.Model):  # a family's own file has that
                yield pytest.param(member, id=name)


@pytest.mark.parametrize("module", list(modules()))
def test_formula_shapes_and_source(module):
    told = inspect.cleandoc(module.__doc__ or "") + "\n" + inspect.cleandoc(module.forward.__doc__ or "")
    assert re.search(r"[(]B, \w+", told) or "forward(self) ->" in inspect.getsource(module), "no shapes"
    assert re.search(r"\b(19|20)\d\d\b", told), "no paper"
    assert re.search(r"\w = \w|`[^`]*[(*+\[][^`]*`", told), "no formula"
