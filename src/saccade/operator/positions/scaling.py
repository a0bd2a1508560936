"""Frequencies of rotary positions, and ways of stretching them over a longer context than was trained.

Shape legend: D turned features, n = D / 2 pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._masks._data import describe, whole


def frequencies(width: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """`base ** (-2 i / width)` for i = 0 ... ceil(width / 2) - 1, radians a token: float64 (ceil(width / 2),)."""
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float64) / width
    return base**-exponents


@dataclass(frozen=True)
class _ByFactor:
    """Scalings with only a factor, which leave the size of logits unchanged."""

    factor: float

    def __post_init__(self) -> None:
        _at_least_one("factor", self.factor)

    @property
    def attention(self) -> float:
        """The factor on cos and sin."""
        return 1.0


@dataclass(frozen=True)
class LinearScaling(_ByFactor):
    """Position interpolation: every position is divided by `factor`, `angle = m / factor * base ** (-2 i / D)`.

    A model trained on L tokens then gets known angles on `factor * L` tokens. Neighbours become harder to tell apart,
    so it needs some fine-tuning. Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation" (2023), equation 3.

    Args:
        factor: how many times longer the context becomes; finite, at least 1.

    Example:
        >>> import torch, saccade
        >>> scaled = saccade.positions.Rotary(16, scaling=saccade.positions.LinearScaling(4.0))
        >>> x = torch.randn(1, 1, 1, 16)
        >>> torch.allclose(scaled(x, offset=400), saccade.positions.Rotary(16)(x, offset=100), atol=1e-5)
        True
    """

    def frequencies(self, width: int, base: float, device: torch.device | str | None = None) -> Tensor:
        """Radians a token, float64 (width / 2,)."""
        return frequencies(width, base, device) / self.factor


@dataclass(frozen=True)
class NTKScaling(_ByFactor):
    """A larger base: `base' = base * factor ** (D / (D - 2))`. Widths of at least 4.

    The slowest pair is slowed by exactly `factor`, the fastest not at all, so neighbours stay apart. It works without
    fine-tuning up to somewhat less than `factor` times the context. bloc97, "NTK-Aware Scaled RoPE" (2023); Peng et
    al., "YaRN" (2023), section 3.1.

    The base is fixed when the module is made. It does not follow the length of the text: a cache holds keys that are
    already turned, and queries turned with another base would not fit them.

    Args:
        factor: finite, at least 1.

    Example:
        >>> from saccade.positions import LinearScaling, NTKScaling
        >>> NTKScaling(4.0).frequencies(8, 10000.0) / LinearScaling(1.0).frequencies(8, 10000.0)  # slowed by up to 4
        tensor([1.0000, 0.6300, 0.3969, 0.2500], dtype=torch.float64)
    """

    def frequencies(self, width: int, base: float, device: torch.device | str | None = None) -> Tensor:
        """Radians a token, float64 (width / 2,)."""
        if width < 4:
            raise ValueError(f"scaling: NTKScaling needs at least 4 turned features, got {width}")
        return frequencies(width, base * self.factor ** (width / (width - 2)), device)


@dataclass(frozen=True)
class YaRNScaling:
    """Fast pairs stay unchanged, slow pairs are interpolated, and the pairs between are mixed; logits grow a little.

    `frequency_i = (1 - ramp(i)) * theta_i + ramp(i) * theta_i / factor` with `theta_i = base ** (-2 i / D)`. Pairs that
    turn at least `beta_fast` times within the original length have ramp 0, those that turn at most `beta_slow` times
    have ramp 1. Between them the ramp is linear in i, from the last of the first kind to the first of the second, as in
    the authors' code and in transformers (the paper's equation 18 has it linear in the number of turns). cos and sin
    are multiplied by `attention_factor`, so logits of turned features by its square: 0.1 ln(factor) + 1 unless given.
    Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), sections 3.2 to 3.4.

    Args:
        factor: how many times longer the context becomes; finite, at least 1.
        original_length: tokens the model was trained on; more than `2 pi beta_slow`, or no pair would turn enough.
        beta_fast: pairs with at least so many turns stay as they are; more than `beta_slow`.
        beta_slow: pairs with at most so many turns are interpolated; more than 0.
        attention_factor: a positive number; None is the paper's.

    Example:
        >>> import saccade
        >>> scaling = saccade.positions.YaRNScaling(4.0, original_length=4096)
        >>> round(scaling.attention, 4)
        1.1386
        >>> scaling.frequencies(8, 10000.0) / saccade.positions.LinearScaling(1.0).frequencies(8, 10000.0)
        tensor([1.0000, 1.0000, 0.6250, 0.2500], dtype=torch.float64)
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _at_least_one("factor", self.factor)
        for name in ("beta_fast", "beta_slow"):
            _positive(name, getattr(self, name))
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast: must be greater than beta_slow, got beta_fast={self.beta_fast} and "
                f"beta_slow={self.beta_slow}"
            )
        least = 2 * math.pi * self.beta_slow
        if whole(self.original_length, "original_length") <= least:
            raise ValueError(
                f"original_length: must be more than 2 pi beta_slow = {least:.4g} tokens, got {self.original_length}"
            )
        if self.attention_factor is not None:
            _positive("attention_factor", self.attention_factor)

    @property
    def attention(self) -> float:
        """The factor on cos and sin."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else float(self.attention_factor)

    def frequencies(self, width: int, base: float, device: torch.device | str | None = None) -> Tensor:
        """Radians a token, float64 (width / 2,)."""
        plain = frequencies(width, base, device)
        low, high = self._pair(self.beta_fast, width, base), self._pair(self.beta_slow, width, base)
        # The authors' code ends at feature width - 1 although pairs end at half of it, and so do models made with it.
        first, last = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        steps = torch.arange(width // 2, device=device, dtype=torch.float64) - first
        ramp = (steps / max(last - first, 1)).clamp(0.0, 1.0)  # first >= last: every pair comes before first
        return plain * (1.0 - ramp) + plain / self.factor * ramp

    def _pair(self, turns: float, width: int, base: float) -> float:
        """The pair, as a real number, that turns so many times within the original length."""
        return width * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3Scaling:
    """Fast pairs stay unchanged, slow pairs are interpolated, and the pairs between are mixed by how often they turn.

    `frequency_i = s_i * theta_i + (1 - s_i) * theta_i / factor` with `theta_i = base ** (-2 i / D)`,
    `t_i = original_length * theta_i / (2 pi)` turns within the original length, and
    `s_i = (t_i - low_turns) / (high_turns - low_turns)`, at least 0 and at most 1. The size of logits stays as it is.
    Dubey et al., "The Llama 3 Herd of Models" (2024), section 3.4.2, and `apply_scaling` in Meta's llama-models, whose
    `low_freq_factor` and `high_freq_factor` are `low_turns` and `high_turns` here.

    Args:
        factor: how many times longer the context becomes; finite, at least 1.
        original_length: tokens the model was trained on.
        low_turns: pairs with at most so many turns are interpolated; more than 0.
        high_turns: pairs with at least so many turns stay as they are; more than `low_turns`.

    Example:
        >>> import saccade
        >>> scaling = saccade.positions.Llama3Scaling(8.0, original_length=8192)
        >>> scaling.frequencies(8, 500000.0) / saccade.positions.LinearScaling(1.0).frequencies(8, 500000.0)
        tensor([1.0000, 1.0000, 0.3711, 0.1250], dtype=torch.float64)
    """

    factor: float
    original_length: int
    low_turns: float = 1.0
    high_turns: float = 4.0

    def __post_init__(self) -> None:
        _at_least_one("factor", self.factor)
        whole(self.original_length, "original_length", least=1)
        for name in ("low_turns", "high_turns"):
            _positive(name, getattr(self, name))
        if self.high_turns <= self.low_turns:
            raise ValueError(
                f"high_turns: must be greater than low_turns, got high_turns={self.high_turns} and "
                f"low_turns={self.low_turns}"
            )

    @property
    def attention(self) -> float:
        """The factor on cos and sin."""
        return 1.0

    def frequencies(self, width: int, base: float, device: torch.device | str | None = None) -> Tensor:
        """Radians a token, float64 (width / 2,)."""
        plain = frequencies(width, base, device)
        turns = plain * (self.original_length / (2 * math.pi))
        share = ((turns - self.low_turns) / (self.high_turns - self.low_turns)).clamp(0.0, 1.0)
        return plain * share + plain / self.factor * (1.0 - share)


Scaling = LinearScaling | NTKScaling | YaRNScaling | Llama3Scaling


def check_number(name: str, value: object) -> float:
    """TypeError unless it is a real number, ValueError unless it is finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: must be a number, got {describe(value)}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name}: must be finite, got a whole number too large for a float") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: must be finite, got {value}")
    return number


def _at_least_one(name: str, value: object) -> None:
    if check_number(name, value) < 1.0:
        raise ValueError(f"{name}: must be at least 1 (contexts are stretched, not shrunk), got {value}")


def _positive(name: str, value: object) -> None:
    if check_number(name, value) <= 0.0:
        raise ValueError(f"{name}: must be positive, got {value}")
