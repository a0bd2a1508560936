"""Caches as they are written: flags that switch them on, dicts and lists that are filled, and what stays undecided.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.verification import CacheReading, Finding, Inapplicable
from saccade.verification.checks.cache import _check as cache
from saccade.verification.subject.discovery._discover import discover

H, D = 3, 6
E = H * D
Pair = tuple[Tensor, Tensor]


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[..., None].to(x.dtype) * torch.tensor([1.0, 0.3, 0.1], dtype=x.dtype)
    angles = angles[:, None] if positions.dim() == 2 else angles
    one, two = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1)


class Base(nn.Module):
    """Causal self-attention over what was kept and what is new."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.num_heads, self.qkv, self.proj = H, nn.Linear(E, 3 * E), nn.Linear(E, E)

    def attend(self, x: Tensor, past: Any = None, positions: Tensor | None = None) -> tuple[Tensor, Pair]:
        q, k, v = (one.unflatten(-1, (H, D)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        if positions is not None:
            q, k = rotated(q, positions), rotated(k, positions)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, seen)
        return self.proj(out.transpose(1, 2).flatten(2)), (k, v)


class UseCache(Base):
    def forward(self, x, past_kv=None, use_cache=False):
        out, kept = self.attend(x, past_kv)
        return (out, kept) if use_cache else out


class Halved(Base):
    def forward(self, x, past_kv=None, use_cache=False):
        out, (k, v) = self.attend(x, past_kv)
        return (out, (k, v * 0.5)) if use_cache else out


class UseCacheByDefault(UseCache):
    def forward(self, x, past_key_values=None, use_cache=True):
        return super().forward(x, past_key_values, use_cache)


class ReturnCache(UseCache):
    def forward(self, x, cache=None, return_cache=False):
        return super().forward(x, cache, return_cache)


class ReturnKV(UseCache):
    def forward(self, x, layer_past=None, return_kv=False):
        return super().forward(x, layer_past, return_kv)


class OddFlag(UseCache):
    def forward(self, x, kv_cache=None, remember=False):
        return super().forward(x, kv_cache, remember)


class Flat(Base):
    def forward(self, x, past_key_value=None, return_present=False):
        out, kept = self.attend(x, past_key_value)
        return (out, *kept) if return_present else out


class EmptyTuple(Base):
    def forward(self, x, past=()):
        return self.attend(x, past if len(past) else None)


class Named(Base):
    def forward(self, x, past_kv=None, use_cache=False):
        out, kept = self.attend(x, past_kv)
        return {"out": out, "past_kv": kept} if use_cache else {"out": out}


class DictReturned(Base):
    def forward(self, x, cache=None, use_cache=False):
        out, (k, v) = self.attend(x, None if cache is None else (cache["k"], cache["v"]))
        return (out, {"k": k, "v": v}) if use_cache else out


class DictFilled(Base):
    def forward(self, x, cache=None):
        out, kept = self.attend(x, (cache["k"], cache["v"]) if cache else None)
        if cache is not None:
            cache["k"], cache["v"] = kept
        return out


class DictOfNone(Base):
    def forward(self, x, cache=None):
        past = None if cache is None or cache["k"] is None else (cache["k"], cache["v"])
        out, kept = self.attend(x, past)
        if cache is not None:
            cache["k"], cache["v"] = kept
        return out


class ListFilled(Base):
    def forward(self, x, kv_cache=None):
        out, kept = self.attend(x, kv_cache or None)
        if kv_cache is not None:
            kv_cache[:] = kept
        return out


class Kept(Base):
    """It keeps inside, and by default: a plain call would continue the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def forward(self, x, use_cache=True):
        out, kept = self.attend(x, self.past)
        if use_cache:
            self.past = kept
        return out

    def reset(self):
        self.past = None


class KeptByOddFlag(Kept):
    def forward(self, x, incremental=False):
        out, kept = self.attend(x, self.past if incremental else None)
        if incremental:
            self.past = kept
        return out


class PositionsOfTheCaller(Base):
    def forward(self, x, position_ids=None, past_kv=None, use_cache=False):
        position_ids = torch.arange(x.shape[1])[None] if position_ids is None else position_ids
        out, kept = self.attend(x, past_kv, position_ids)
        return (out, kept) if use_cache else out


class PositionsRequired(PositionsOfTheCaller):
    def forward(self, x, position_ids, past_kv=None, use_cache=False):
        return super().forward(x, position_ids, past_kv, use_cache)


class RequiredMask(Base):
    def forward(self, x, padding_mask, past_kv=None, use_cache=False):
        if padding_mask is not None and past_kv is not None and padding_mask.shape[1] not in (1, past_kv[0].shape[2]):
            raise ValueError("the mask is of all keys")
        out, kept = self.attend(x, past_kv)
        return (out, kept) if use_cache else out


NUMBERED = CacheReading("passed", "past_kv", 1, flag="use_cache", out=0, positions=("position_ids", "BL"))
RIGHT = {
    UseCache: CacheReading("passed", "past_kv", 1, flag="use_cache", out=0),
    UseCacheByDefault: CacheReading("passed", "past_key_values", 1, flag="use_cache", out=0),
    ReturnCache: CacheReading("passed", "cache", 1, flag="return_cache", out=0),
    ReturnKV: CacheReading("passed", "layer_past", 1, flag="return_kv", out=0),
    OddFlag: CacheReading("passed", "kv_cache", 1, flag="remember", out=0),
    Flat: CacheReading("passed", "past_key_value", (1, 2), flag="return_present", out=0),
    EmptyTuple: CacheReading("passed", "past", 1, out=0),
    Named: CacheReading("passed", "past_kv", "past_kv", flag="use_cache", out="out"),
    DictReturned: CacheReading("passed", "cache", 1, flag="use_cache", out=0),
    DictFilled: CacheReading("made", "cache"),
    DictOfNone: CacheReading("made", "cache"),
    ListFilled: CacheReading("made", "kv_cache"),
    Kept: CacheReading("inside", reset="reset", flag="use_cache"),
    KeptByOddFlag: CacheReading("inside", reset="reset", flag="incremental"),
    PositionsOfTheCaller: NUMBERED,
    PositionsRequired: NUMBERED,
    RequiredMask: CacheReading("passed", "past_kv", 1, flag="use_cache", out=0),
}


def found(kind: type[nn.Module]) -> list[Finding]:
    return list(cache.CHECK.run(discover(kind())))


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_a_right_cache_is_found_and_left_alone(kind: type[nn.Module]) -> None:
    reading = discover(kind()).reading.cache
    assert reading is not None
    for name, value in vars(RIGHT[kind]).items():
        assert name == "make" or getattr(reading, name) == value, name
    assert found(kind) == []


# --- broken ones


class NewestFirst(Base):
    def forward(self, x, cache=None):
        out, (k, v) = self.attend(x, (cache["k"], cache["v"]) if cache else None)
        if cache is not None:
            cache["k"], cache["v"] = k, v.flip(2)
        return out


class JoinedBehind(Base):
    def forward(self, x, past_kv=None, use_cache=False):
        q, k, v = (one.unflatten(-1, (H, D)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        if past_kv is not None:
            k, v = torch.cat([k, past_kv[0]], 2), torch.cat([v, past_kv[1]], 2)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        out = self.proj(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))
        return (out, (k, v)) if use_cache else out


class FallsInSteps(Base):
    def forward(self, x, past_kv=None, use_cache=False):
        past = None if past_kv is None else [one.transpose(1, 2) for one in past_kv]
        out, kept = self.attend(x, past)
        return (out, kept) if use_cache else out


class OnlyTheLast(Kept):
    def forward(self, x, use_cache=False):
        out, (k, v) = self.attend(x, self.past if use_cache else None)
        if use_cache:
            self.past = (k[:, :, -1:], v[:, :, -1:])
        return out


class NotEmptied(Kept):
    def __init__(self) -> None:
        Base.__init__(self)
        self.past_k = self.past_v = None

    def forward(self, x, use_cache=False):
        past = None if self.past_k is None or not use_cache else (self.past_k, self.past_v)
        out, kept = self.attend(x, past)
        if use_cache:
            self.past_k, self.past_v = kept
        return out

    def reset(self):
        self.past_k = self.past_k


@pytest.mark.parametrize(
    "kind, words, line",
    [
        (Halved, "they are 0.5 times those", "torch.cat([past[0], k]"),
        (NewestFirst, "its value at place 1", "torch.cat([past[0], k]"),
        (JoinedBehind, "comes later in the same piece", "torch.cat([k, past_kv[0]]"),
        (FallsInSteps, "positions end with RuntimeError", "k, v = torch.cat"),
        (OnlyTheLast, "it depends on positions", "self.past = (k[:, :, -1:], v[:, :, -1:])"),
        (NotEmptied, "this is a second sequence", "self.past_k = self.past_k"),
    ],
)
def test_a_broken_cache_is_named_with_its_line(kind: type[nn.Module], words: str, line: str) -> None:
    (finding,) = found(kind)
    assert finding.severity == "error" and words in finding.message
    assert finding.location is not None and line in finding.location.code


# --- what cannot be decided


class OneArgumentEach(Base):
    def forward(self, x, k_cache=None, v_cache=None, use_cache=False):
        out, kept = self.attend(x, None if k_cache is None else (k_cache, v_cache))
        return (out, *kept) if use_cache else out


class OfAnObject(Base):
    """What it returns beside the output is no cache; its cache is an object that nobody here can make."""

    def forward(self, x, kv_cache=None):
        out, (k, _) = self.attend(x, None if kv_cache is None else kv_cache.kept)
        return out, k


class MadeBeforehand(Base):
    def forward(self, x, kv_cache=None):
        out, _ = self.attend(x, None if kv_cache is None else kv_cache["k"][:, :, : kv_cache["length"]])
        return out


class GivenAway(Base):
    """Its keys and values are for others: it takes none."""

    def forward(self, x, return_kv=False):
        out, kept = self.attend(x)
        return (out, kept) if return_kv else out


class RotationsOfTheCaller(Base):
    def forward(self, x, cos, sin, past_kv=None, use_cache=False):
        out, kept = self.attend(x * cos.mean() + sin.mean(), past_kv)
        return (out, kept) if use_cache else out


@pytest.mark.parametrize(
    "kind, words",
    [
        (OneArgumentEach, "no way to use k_cache, v_cache, use_cache was found"),
        (OfAnObject, "no way to use kv_cache was found"),
        (MadeBeforehand, "--arg NAME=True"),
        (GivenAway, "no way to use return_kv was found"),
        (RotationsOfTheCaller, "which cos, sin a later step is given, only its caller knows"),
    ],
)
def test_what_is_not_found_is_told_and_accuses_nobody(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(Inapplicable, match=words):
        found(kind)


class WeightsStored(Base):
    """A flag that keeps something inside which is no cache."""

    def forward(self, x, store=False):
        out, kept = self.attend(x)
        if store:
            self.last = kept
        return out


class WholeAgain(Base):
    """With a cache it is given the whole sequence again, and computes what is new, as the stacks of x-transformers."""

    def forward(self, x, cache=None, return_hiddens=False):
        out, kept = self.attend(x if cache is None else x[:, -1:], cache)
        return (out, kept) if return_hiddens else out


def test_a_piece_that_gives_fewer_outputs_is_read_wrongly() -> None:
    assert discover(WholeAgain()).reading.cache is None


def test_what_is_kept_and_never_read_is_no_cache() -> None:
    assert discover(WeightsStored()).reading.cache is None


def test_outputs_in_another_place_than_the_reading_says_are_no_error_of_the_target() -> None:
    class Changes(Base):
        def forward(self, x, past_kv=None):
            out, kept = self.attend(x, past_kv)
            return (out, kept) if past_kv is None else {"out": out, "kept": kept}

    from saccade.verification import Promise, Reading
    from saccade.verification.subject._subject import Subject

    reading = Reading("self", "BLD", E, out=0, cache=CacheReading("passed", "past_kv", 1))
    with pytest.raises(Inapplicable, match="describe its cache in Python"):
        list(cache.CHECK.run(Subject(Changes().eval(), reading, Promise(causal=True))))
