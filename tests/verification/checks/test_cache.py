"""Decoding in pieces against the whole sequence: what differs is named, with why and where.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.verification import CacheReading, Finding, Inapplicable, MaskReading, Promise, Reading
from saccade.verification.checks.cache import _check as cache
from saccade.verification.subject._decoder import CachedDecoder, in_pieces
from saccade.verification.subject._steady import exact
from saccade.verification.subject._subject import Subject

H, D = 3, 6
E = H * D
PASSED = Reading("self", "BLD", E, out=0, cache=CacheReading("passed", "past", returned=1))


def turned(x: Tensor, start: int) -> Tensor:
    """Rotary positions from `start` on."""
    place = torch.arange(start, start + x.shape[-2], dtype=x.dtype)[:, None]
    angle = place * torch.tensor([1.0, 0.3, 0.1], dtype=x.dtype)
    one, two = x.chunk(2, -1)
    return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)


def keep(past: Tensor, new: Tensor) -> Tensor:
    return torch.cat([past, new], -2)


def same(x: Any) -> Any:
    return x


def bottom_right(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys).tril(keys - queries).bool()


class Attention(nn.Module):
    """Causal self-attention that is given what it returned before; a place to break it at each step."""

    def __init__(
        self,
        *,
        start: Callable[[int], int] = same,
        keys: Callable[[Tensor, Tensor], Tensor] = keep,
        values: Callable[[Tensor, Tensor], Tensor] = keep,
        returned: Callable[[Tensor], Tensor] = same,
        mask: Callable[[int, int], Tensor] = bottom_right,
        rotary: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.start, self.keys, self.values, self.returned = start, keys, values, returned
        self.mask, self.rotary = mask, rotary

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor, int] | None = None) -> tuple[Tensor, Any]:
        q, k, v = (one.view(*x.shape[:2], H, D).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        seen = 0 if past is None else past[2]
        start = 0 if past is None else self.start(seen)
        if self.rotary:
            q, k = turned(q, start), turned(k, start)
        if past is not None:
            k, v = self.keys(past[0], k), self.values(past[1], v)
        scores = q @ k.mT / math.sqrt(D)
        scores = scores.masked_fill(~self.mask(q.shape[-2], k.shape[-2]), -torch.inf)
        out = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out, (self.returned(k), v, seen + x.shape[1])


def found(target: nn.Module, reading: Reading = PASSED, **promise: Any) -> list[Finding]:
    return list(cache.CHECK.run(Subject(target.eval(), reading, Promise(**promise))))


def only_error(target: nn.Module, reading: Reading = PASSED, family: str = "cache", **promise: Any) -> Finding:
    (finding,) = found(target, reading, **promise)
    assert (finding.severity, finding.family) == ("error", family)
    return finding


def code(finding: Finding) -> str:
    return "" if finding.location is None else finding.location.code


def test_the_pieces_are_those_of_the_whole() -> None:
    subject = exact(Subject(Attention().eval(), PASSED, Promise(causal=True)))
    inputs = subject.inputs(2, 7)
    with torch.no_grad():
        whole = subject(inputs).out
    for sizes in ((7,), (1,) * 7, (3, 3, 1), (4, 1, 1, 1)):
        torch.testing.assert_close(in_pieces(CachedDecoder(subject), inputs, sizes), whole)


@pytest.mark.parametrize("rotary", [False, True])
def test_a_right_one_is_left_alone(rotary: bool) -> None:
    assert found(Attention(rotary=rotary)) == []


@pytest.mark.parametrize("start", [lambda _: 0, lambda seen: seen + 1, lambda seen: seen - 1])
def test_positions_that_do_not_go_on(start: Callable[[int], int]) -> None:
    finding = only_error(Attention(start=start), family="order")
    assert "the query of position 1 is as long, but turned otherwise" in finding.message
    assert code(finding).startswith("place = torch.arange(")
    assert found(Attention(start=start, rotary=False)) == []  # where there are none, none can be wrong


@pytest.mark.parametrize(
    "broken, words, line",
    [
        (
            {"values": lambda past, new: torch.cat([torch.zeros_like(past), new], -2)},
            "the values kept of position 0 are not those of the whole: there are zeros",
            "torch.zeros_like(past)",
        ),
        (
            {"keys": lambda past, new: torch.cat([past.flip(0), new], -2)},
            "the keys kept of position 0 are not those of the whole",
            "past.flip(0)",
        ),
        (
            {"keys": lambda past, new: torch.cat([past[:1].expand_as(past), new], -2)},
            "batch item 1 has those of item 0",
            "past[:1].expand_as(past)",
        ),
        (
            {"keys": lambda past, new: torch.cat([new, past], -2)},
            "the key of position 0 stands at place 1 of the cache and its value at place 0",
            "torch.cat([new, past], -2)",
        ),
        ({"returned": lambda k: k * 0.5}, "they are 0.5 times those", ""),
        ({"returned": lambda k: turned(k, 1)}, "as long but turned otherwise", ""),
        ({"keys": lambda _, new: new, "values": lambda _, new: new}, "nothing of the 1 positions before", ""),
        ({"mask": lambda q, k: torch.ones(q, k).tril().bool()}, "aligned at the top left", ".tril().bool()"),
    ],
)
def test_what_is_wrong_is_named(broken: dict[str, Any], words: str, line: str) -> None:
    finding = only_error(Attention(**broken))
    assert words in finding.message
    assert line in code(finding)
    assert finding.message.startswith("Given one position at a time, output ")


def test_what_a_piece_may_see_of_itself() -> None:
    def unmasked(queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys).bool() if keys > queries else bottom_right(queries, keys)

    finding = only_error(Attention(mask=unmasked))
    assert finding.message.startswith("Given three positions at a time, output 3 ")
    assert "position 4, which comes later in the same piece" in finding.message


def test_a_step_that_raises_where_the_whole_works() -> None:
    def square(queries: int, keys: int) -> Tensor:
        return torch.ones(queries, queries).tril().bool().expand(queries, -1)[:, : min(keys, 2)]

    finding = only_error(
        Attention(
            mask=lambda q, k: square(q, k) if k > 2 and q == 1 else bottom_right(q, k),
            keys=lambda past, new: keep(past, new)[..., :4, :],
        )
    )
    assert "The whole sequence works" in finding.message and "RuntimeError" in finding.message


# --- windows


class Windowed(nn.Module):
    """Each position sees itself and `window` before it; a ring of slots is kept inside."""

    def __init__(self, window: int = 4, slot: Callable[[int, int], int] = lambda n, size: n % size) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.window, self.slot = window, slot
        self.reset()

    def reset(self) -> None:
        self.ring: list[Tensor] = []
        self.seen = 0

    def forward(self, x: Tensor, decode: bool = False) -> Tensor:
        q, k, v = (one.view(*x.shape[:2], H, D).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        out = self.stepped(q, k, v) if decode else self.whole(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))

    def whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], q.shape[-2]).tril().triu(-self.window).bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def stepped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size, outs = self.window + 1, []
        if not self.ring:
            self.ring = [k.new_zeros(*k.shape[:2], size, D) for _ in range(2)]
        for at in range(q.shape[-2]):
            slot = self.slot(self.seen, size)
            self.ring[0][:, :, slot] = k[:, :, at]
            self.ring[1][:, :, slot] = v[:, :, at]
            self.seen += 1
            filled = min(self.seen, size)
            kept = (one[:, :, :filled] for one in self.ring)
            outs.append(F.scaled_dot_product_attention(q[:, :, at : at + 1], *kept))
        return torch.cat(outs, -2)


INSIDE = Reading("self", "BLD", E, cache=CacheReading("inside", reset="reset", flag="decode"))


@pytest.mark.parametrize("window", [4, 13])
def test_a_ring_past_its_wrap(window: int) -> None:
    assert found(Windowed(window), INSIDE) == []


@pytest.mark.parametrize("window", [4, 13])
def test_a_ring_that_wraps_to_the_wrong_slot(window: int) -> None:
    finding = only_error(Windowed(window, lambda n, size: min(n, size - 1)), INSIDE)
    # slots 0 to window - 1 stay as they are: the first wrong output is the second after the ring is full
    assert finding.evidence["position"] == window + 1 or finding.evidence["position"] == window + 2
    assert "self.ring[" in code(finding)


def test_what_outlives_a_reset() -> None:
    class Stale(Windowed):
        def reset(self) -> None:
            self.ring = getattr(self, "ring", [])
            self.seen = getattr(self, "seen", 0)

    finding = only_error(Stale(), INSIDE)
    assert "this is a second sequence" in finding.message


def test_a_cache_inside_that_cannot_be_emptied() -> None:
    reading = Reading("self", "BLD", E, cache=CacheReading("inside", flag="decode"))
    (finding,) = found(Windowed(), reading)
    assert finding.severity == "warning" and "cannot be emptied" in finding.message


# --- other ways to keep


class Made(Attention):
    """The cache is a list that is given and written to."""

    def forward(self, x: Tensor, store: list[Any] | None = None) -> Any:  # type: ignore[override]
        out, kept = super().forward(x, store[0] if store else None)
        if store is not None:
            store[:] = [kept]
        return out


class Slots(Attention):
    """Buffers of 32 positions, written from `start_pos` on."""

    def __init__(self, **broken: Any) -> None:
        super().__init__(**broken)
        for name in ("cached_k", "cached_v"):
            self.register_buffer(name, torch.zeros(3, H, 32, D), persistent=False)

    def forward(self, x: Tensor, start_pos: int = 0) -> Any:  # type: ignore[override]
        kept = (self.cached_k[: len(x), :, :start_pos], self.cached_v[: len(x), :, :start_pos], start_pos)
        out, (k, v, end) = super().forward(x, kept if start_pos else None)
        with torch.no_grad():
            self.cached_k[: len(x), :, :end] = k
            self.cached_v[: len(x), :, :end] = v
        return out


MADE = Reading("self", "BLD", E, cache=CacheReading("made", "store", make=list))
SLOTS = Reading("self", "BLD", E, cache=CacheReading("inside", position="start_pos"), max_length=32)


@pytest.mark.parametrize("kind, reading", [(Made, MADE), (Slots, SLOTS)])
def test_caches_that_are_made_or_inside(kind: Any, reading: Reading) -> None:
    assert found(kind(), reading) == []
    assert "turned otherwise" in only_error(kind(start=lambda _: 0), reading, "order").message


def test_a_place_among_the_arguments() -> None:
    reading = Reading("self", "BLD", E, out=0, cache=CacheReading("passed", 1, returned=1))
    assert found(Attention(), reading) == []


class Asked(Attention):
    """Not causal by itself: it takes a mask for the whole, and sees all that it has in steps."""

    def forward(self, x: Tensor, past: Any = None, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        self.mask = lambda q, k: torch.ones(q, k).bool() if mask is None else mask
        return super().forward(x, past)


def test_a_whole_that_needs_its_mask() -> None:
    reading = Reading("self", "BLD", E, out=0, cache=PASSED.cache, masks=(MaskReading("mask", "QK", "attend"),))
    assert found(Asked(), reading) == []
    forgets = Asked(values=lambda past, new: torch.cat([torch.zeros_like(past), new], -2))
    assert "zeros" in only_error(forgets, reading).message


def test_without_a_cache_or_causality_it_cannot_be_asked() -> None:
    with pytest.raises(Inapplicable, match="no cache"):
        found(Attention(), Reading("self", "BLD", E, out=0))
    full = Attention(mask=lambda q, k: torch.ones(q, k).bool())
    with pytest.raises(Inapplicable, match="not causal"):
        found(full)
