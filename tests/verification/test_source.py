"""What a target's source says: its own lines, words and returns, however it was made.

Shape legend: B batch, L length, E width.
"""

from __future__ import annotations

import functools
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.verification import Location, Reading
from saccade.verification.subject._source import (
    line_with,
    return_after,
    return_of_several,
    sources,
)
from saccade.verification.subject._subject import Subject

HERE = Path(__file__)


class Base(nn.Module):
    """True means attend here."""

    def scores(self, q: Tensor) -> Tensor:
        """softmax( stands in these words only."""
        # masked_fill( stands in this comment only
        return torch.einsum(
            "ble,bme->blm",
            q,
            q,
        )


class Attention(Base):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(7, 7)

    def forward(self, x: Tensor, weights: bool = False) -> Any:
        w = F.softmax(self.scores(x), -1)

        def inner(v: Tensor) -> Tensor:
            return w @ v

        out = inner(self.proj(x))
        if weights:
            return out, w
        return out


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain."""
    return (q @ k.mT).softmax(-1) @ v


@functools.wraps(function)
def wrapped(*args: Tensor) -> Tensor:
    return function(*args)


def subject_of(target: Any) -> Subject:
    return Subject(target, Reading("self", "BLD", 7))


def line_of(code: str) -> int:
    """Where a line that is written once stands in this file."""
    (at,) = [at for at, line in enumerate(HERE.read_text(encoding="utf-8").splitlines(), 1) if line.strip() == code]
    return at


def assert_at(found: Location | None, code: str) -> None:
    assert found is not None and found.code == code
    assert (found.path, found.line) == (str(HERE), line_of(code))


def test_the_classes_of_a_module_and_of_its_parts():
    assert [source.name for source in sources(Whole())] == ["Whole", "Attention", "Base"]
    assert [source.name for source in sources(Attention)] == ["Attention", "Base"]
    assert sources(nn.Linear(3, 5)) == () and sources(F.softmax) == () and sources(torch.matmul) == ()


@pytest.mark.parametrize("target", [function, functools.partial(function), wrapped, torch.no_grad()(function)])
def test_functions_under_what_is_wrapped_around_them(target):
    (one,) = sources(target)
    assert one.name == "function" and one.lines[0].startswith("def function(")


def test_a_bound_method_is_a_function():
    (one,) = sources(Attention().scores)
    assert one.name == "Base.scores"


def test_only_code_is_looked_through():
    assert line_with(subject_of(Whole()), r"masked_fill\(") is None
    assert_at(line_with(subject_of(Whole()), r"softmax\("), "w = F.softmax(self.scores(x), -1)")
    assert_at(line_with(subject_of(Whole()), r"ble,bme"), '"ble,bme->blm",')
    assert line_with(subject_of(nn.Linear(3, 5)), "linear") is None


def test_returns():
    assert_at(return_of_several(subject_of(Whole())), "return out, w")
    assert return_of_several(subject_of(function)) is None
    for at, after in (("w = F.softmax(self.scores(x), -1)", "return out, w"), ("return w @ v", "return w @ v")):
        where = Location(str(HERE), line_of(at), at)
        assert_at(return_after(subject_of(Attention()), where), after)
    assert return_after(subject_of(Attention()), Location("elsewhere.py", 3, "")) is None


def test_what_was_typed_in_a_notebook():
    name = "<ipython-input-7-abc>"
    text = "def typed(q, k, v):\n    # said in a cell\n    return (q @ k.mT).softmax(-1) @ v\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    try:
        names: dict[str, Any] = {}
        exec(compile(text, name, "exec"), names)
        found = line_with(subject_of(names["typed"]), "softmax")
        assert found is not None and (found.path, found.line) == (name, 3)
    finally:
        del linecache.cache[name]


def test_what_has_no_source():
    names: dict[str, Any] = {}
    exec("def made(q, k, v):\n    return v", names)
    assert sources(names["made"]) == ()
