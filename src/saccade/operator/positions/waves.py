"""cos and sin of positions, from which sinusoidal and rotary positions are computed.

Shape legend: B batch, L length, n frequencies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._derived import state
from .offsets import Offset, checked, eager, extremes, places
from .scaling import Scaling, check_number, frequencies

_REMEMBERED = 1 << 14  # tokens of a call whose waves are kept for the next one
LONGEST = 1 << 20  # positions in a table; beyond, angles are computed for the positions of the call alone


class _Latest(NamedTuple):
    """The waves of the last eager call, and the arguments of that call."""

    offset: Offset
    state: Any  # of an offset that is a tensor: what is written into it changes that
    length: int
    batch: int
    dtype: torch.dtype
    waves: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls, offset: Offset, length: int, batch: int, dtype: torch.dtype, waves: tuple[Tensor, Tensor]
    ) -> _Latest | None:
        # Of others nobody could see that they have changed; and long ones are not to outlive their call.
        if not isinstance(offset, Tensor):
            return cls(offset, None, length, batch, dtype, waves)
        if not eager(offset) or batch * length > _REMEMBERED:
            return None
        known = state(offset)
        return None if known is None else cls(offset, known, length, batch, dtype, waves)

    def serves(self, offset: Offset, length: int, batch: int, dtype: torch.dtype, device: torch.device) -> bool:
        known = self.offset
        if isinstance(known, Tensor):
            if known is not offset or batch != self.batch or state(known) != self.state:
                return False
        elif type(offset) is not int or offset != known:
            return False
        return length == self.length and dtype is self.dtype and self.waves[0].device == device


class Waves:
    """cos and sin of `position * frequency`, times the scaling's attention factor.

    Angles are computed in float64: `position * frequency` loses its fraction in float32 once the position is large.
    Every layer asks for the same ones, so tables are kept between calls. They cannot be where tensors are traced or
    transformed, and how far they must reach is not known where reading a tensor's largest position would halt a
    device; there, the angles are computed anew, by the same formula.
    """

    _cos: Tensor | None = None
    _sin: Tensor | None = None
    _steps: Tensor | None = None
    _latest: _Latest | None = None  # queries and keys of every layer ask for the same

    def __init__(self, width: int, base: float, scaling: Scaling | None = None):
        if check_number("base", base) <= 1.0:
            raise ValueError(f"base: must be greater than 1, got {base}")
        self.width, self.base, self.scaling = width, float(base), scaling
        self._frequencies("cpu")  # a scaling that does not fit the width raises here

    def of(self, x: Tensor, offset: Offset) -> tuple[Tensor, Tensor]:
        """cos and sin for the tokens of `x (B, ..., L, E)`: each (L, n), or (B, L, n) if the offset is a tensor.
        float32, or float64 if x is."""
        length, batch = x.shape[-2], x.shape[0]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        at_once = eager(x)
        latest = self._latest if at_once else None
        if latest is not None and latest.serves(offset, length, batch, dtype, x.device):
            return latest.waves
        offset = checked(offset, length, batch)
        waves = self._of(x, offset, length, batch, dtype)
        self._latest = _Latest.of(offset, length, batch, dtype, waves) if at_once else None
        return waves

    def _of(self, x: Tensor, offset: Offset, length: int, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if not isinstance(offset, Tensor) and eager(x) and offset + length <= LONGEST:
            cos, sin = self._tables(offset + length, x.device, dtype)
            return cos[offset : offset + length], sin[offset : offset + length]
        positions = places(offset, length, x.device, batch)
        seen = extremes(positions) if eager(x) else None
        if seen is None or max(seen[1], -seen[0]) >= LONGEST:
            return self.at(positions, dtype)
        cos, sin = self._tables(max(seen[1], -seen[0]) + 1, x.device, dtype)
        if seen[0] >= 0:
            return F.embedding(positions, cos), F.embedding(positions, sin)
        distance = positions.abs()  # cos(-a) = cos(a), sin(-a) = -sin(a)
        return F.embedding(distance, cos), F.embedding(distance, sin) * positions.sign()[..., None]

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin (..., n) in `dtype` for any positions (...,)."""
        angles = positions.to(torch.float64)[..., None] * self._frequencies_on(positions)
        factor = 1.0 if self.scaling is None else self.scaling.attention
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)

    def _frequencies(self, device: torch.device | str) -> Tensor:
        make = frequencies if self.scaling is None else self.scaling.frequencies
        return make(self.width, self.base, device)

    def _frequencies_on(self, positions: Tensor) -> Tensor:
        if not eager(positions):
            return self._frequencies(positions.device)
        if self._steps is None or self._steps.device != positions.device:
            self._steps = self._frequencies(positions.device)
        return self._steps

    def _tables(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0, 1, ...: each (at least `length`, n)."""
        known = self._cos
        if known is None or known.shape[0] < length or known.device != device or known.dtype != dtype:
            # Tables made in inference mode could not be used for training later.
            with torch.inference_mode(False):
                positions = torch.arange(_round_up(length), device=device)
                self._cos, self._sin = self.at(positions, dtype)
        assert self._cos is not None and self._sin is not None
        return self._cos, self._sin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cos": None, "_sin": None, "_steps": None, "_latest": None}


class StoredWaves(Waves):
    """`Waves` of given frequencies, which `hold` takes before every call."""

    _held: Tensor | None = None
    _state: Any = None

    def hold(self, frequencies: Tensor) -> None:
        """Use `frequencies` (n,); tables of others are forgotten."""
        if not eager(frequencies):
            self._held, self._latest = frequencies, None
            return
        now = state(frequencies)
        if frequencies is not self._held or now is None or now != self._state:
            self._cos = self._sin = self._steps = self._latest = None
            self._held, self._state = frequencies, now

    def _frequencies(self, device: torch.device | str) -> Tensor:
        return super()._frequencies(device) if self._held is None else self._held.to(device, torch.float64)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_held": None}


def _round_up(length: int) -> int:
    """The next power of two, so that decoding token by token rebuilds the tables a few times only."""
    return 1 << max(length - 1, 63).bit_length()
