"""Where positions are made, used, lost and thrown away, as `order` blames it.

Shape legend: B batch, L length, E model width.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from saccade.verification import Promise, Reading
from saccade.verification.checks import _order as order
from saccade.verification.subject._source import thrown_away
from saccade.verification.subject._subject import Subject
from saccade.verification.tracing._positions import positions

E = 12
READING = Reading("self", "BLD", E)


def counted(length: int) -> Tensor:
    return torch.arange(length).float()


class Places(nn.Module):
    """Attention of one head, with positions as `place` puts them in."""

    def __init__(self, place: Callable[[Places, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.qkv, self.table, self.place = nn.Linear(E, 3 * E), nn.Embedding(40, E), place
        self.register_buffer("waves", torch.randn(40, E))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.place(self, x)).chunk(3, -1)
        return (q @ k.mT / E**0.5).softmax(-1) @ v


def of_table(module: Places, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return x + module.table(at)


def of_one_row(module: Places, x: Tensor) -> Tensor:
    at = torch.arange(x.shape[1])
    return x + module.table(torch.zeros_like(at))


def of_the_mean(module: Places, x: Tensor) -> Tensor:
    at = counted(x.shape[1])
    middle = at.mean()
    return x + 0.1 * middle


def of_the_batch(module: Places, x: Tensor) -> Tensor:
    waves = module.waves[: x.shape[0], None]
    return x + waves


def subject_of(place: Callable[[Places, Tensor], Tensor], promised: bool | None = None) -> Subject:
    return Subject(Places(place), READING, Promise(positions=promised))


def codes(lines: list) -> list[str]:
    return [line.code for line in lines]


def test_lines_are_told_apart() -> None:
    subject = subject_of(of_table)
    found = positions(subject, subject.inputs(2, 7))
    assert codes(found.made) == ["q, k, v = self.qkv(self.place(self, x)).chunk(3, -1)"]  # the module's own line
    assert codes(found.used) == ["return x + module.table(at)"]
    assert not found.lost


def test_a_helper_is_left_for_the_module_that_asks_it() -> None:
    class Asks(Places):
        def forward(self, x: Tensor) -> Tensor:
            at = counted(x.shape[1])
            return super().forward(x) + at[:, None]

    subject = Subject(Asks(lambda _, x: x), READING)
    assert codes(positions(subject, subject.inputs(2, 7)).made) == ["at = counted(x.shape[1])"]


@pytest.mark.parametrize(
    ("place", "code"),
    [
        (of_one_row, "return x + module.table(torch.zeros_like(at))"),
        (of_the_mean, "middle = at.mean()"),
        (of_the_batch, "return x + waves"),
    ],
)
def test_the_line_that_loses_positions_is_blamed(place: Callable[[Places, Tensor], Tensor], code: str) -> None:
    (error,) = [finding for finding in order.CHECK.run(subject_of(place, True)) if finding.severity == "error"]
    assert error.location is not None and error.location.code == code


def test_the_line_that_brings_positions_in_is_blamed() -> None:
    (error,) = [finding for finding in order.CHECK.run(subject_of(of_table, False)) if finding.severity == "error"]
    assert error.location is not None and error.location.code == "return x + module.table(at)"


def test_what_is_turned_along_the_sequence_is_blamed_where_there_are_no_positions() -> None:
    def turned(module: Places, x: Tensor) -> Tensor:
        return x + 0.5 * x.flip(1)

    (error,) = [finding for finding in order.CHECK.run(subject_of(turned, False)) if finding.severity == "error"]
    assert error.location is not None and "x.flip(1)" in error.location.code


class ThrowsAway(Places):
    def forward(self, x: Tensor) -> Tensor:
        """Calls its table for nothing."""
        self.table(torch.arange(x.shape[1]))
        return super().forward(x)


def test_what_is_computed_and_thrown_away_is_blamed() -> None:
    subject = Subject(ThrowsAway(lambda _, x: x), READING, Promise(positions=True))
    (error,) = [finding for finding in order.CHECK.run(subject) if finding.severity == "error"]
    assert error.location is not None and error.location.code == "self.table(torch.arange(x.shape[1]))"


def test_calls_that_do_something_are_not_thrown_away() -> None:
    def kept(module: Places, x: Tensor) -> Tensor:
        module.eval()
        module.table.to(torch.float32)
        seen = set()
        seen.add(1)
        out = x.clone()
        out.add_(1.0)
        return out

    assert thrown_away(subject_of(kept)) is None


def test_a_mask_is_no_position() -> None:
    def masked(module: Places, x: Tensor) -> Tensor:
        later = counted(x.shape[1])[:, None] < counted(x.shape[1])
        return x.masked_fill(later[:, :1], 0.0) + torch.full(later.shape, -torch.inf).triu(1).exp()[:, :1] * 0

    subject = subject_of(masked)
    assert not positions(subject, subject.inputs(2, 7)).used
