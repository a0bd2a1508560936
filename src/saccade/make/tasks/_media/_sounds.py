"""Sounds from files: checked, mixed to one channel, resampled, and kept as the model reads them.

Shape legend: S samples.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ...models.signals.sound import Samples, read_sound
from ._files import Media

SOUNDS = Media("a sound", tuple(".wav .flac .ogg .oga .opus .mp3 .aiff .aif .au .caf .w64".split()))
MEMORY = 2**31  # bytes of decoded sounds that are kept; of more, each batch is read anew
FASTEST = 16000  # samples a second of a new model, at most: speech has little above 8 kHz


@dataclasses.dataclass(frozen=True)
class SoundExample:
    """A sound with its class or its text, not decoded.

    Args:
        label, text: None if unknown.
        place: for messages: `words.csv: line 7`, or the file.
        samples, rate, channels: of the file; samples of one channel.
    """

    path: Path
    label: str | None
    text: str | None
    place: str
    samples: int
    rate: int
    channels: int

    @property
    def seconds(self) -> float:
        return self.samples / self.rate

    @property
    def where(self) -> str:
        """The place and the file, for messages."""
        return self.place if self.place == str(self.path) else f"{self.place}: {self.path}"


def read_example(path: Path, label: str | None, text: str | None, place: str, longest: float) -> SoundExample:
    """A sound, decoded once, so that a broken one is found before anything is trained.

    Raises:
        FileNotFoundError: no such file. ValueError: damaged, without samples, silent, longer than so many seconds.
    """
    sound = read_sound(path)
    example = SoundExample(path, label, text, place, len(sound.samples), sound.rate, sound.channels)
    if not example.samples:
        raise ValueError(f"{path}: holds no samples")
    if not np.isfinite(sound.samples).all():
        raise ValueError(f"{path}: holds NaN or infinity")
    if np.ptp(sound.samples) == 0:
        raise ValueError(f"{path}: is silent, all its samples are equal")
    if example.seconds > longest:
        raise ValueError(f"{path}: lasts {example.seconds:.1f} s, more than longest={longest:g}")
    return example


def usual_rate(examples: Sequence[SoundExample]) -> int:
    """The most common sampling rate in Hz, at most `FASTEST`."""
    counts = Counter(example.rate for example in examples)
    return min(max(counts, key=lambda rate: (counts[rate], rate)), FASTEST)


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """The samples at another rate, by a polyphase filter; `resampled_length` of them."""
    if rate == wanted:
        return samples
    from scipy.signal import resample_poly

    shared = math.gcd(rate, wanted)
    return np.asarray(resample_poly(samples, wanted // shared, rate // shared), np.float32)


def resampled_length(samples: int, rate: int, wanted: int) -> int:
    return -(-samples * wanted // rate)


def warn_of_changes(examples: Sequence[SoundExample], rate: int) -> None:
    """Warn of sounds that are mixed or resampled, with their number."""
    others = Counter(example.rate for example in examples if example.rate != rate)
    mixed = sum(example.channels > 1 for example in examples)
    told = []
    if others:
        listed = ", ".join(f"{each:,}" for each in sorted(others))
        told.append(f"{others.total()} resampled to {rate:,} samples a second (from {listed})")
    if mixed:
        told.append(f"{mixed} averaged over its channels")
    if told:
        warnings.warn(f"sounds changed, of {len(examples)}: {', '.join(told)}", stacklevel=2)


class SoundStore:
    """Sounds as a model reads them: decoded once and kept where they fit into memory.

    Args:
        rate: samples a second.
        least: samples that a model needs at least; silence fills shorter sounds.
        memory: bytes that may be kept.

    Attributes:
        lengths: samples of each.
    """

    def __init__(self, examples: Sequence[SoundExample], rate: int, least: int = 1, memory: int = MEMORY):
        self.rate, self._examples = rate, examples
        self.lengths = [max(resampled_length(one.samples, one.rate, rate), least) for one in examples]
        self._kept: list[Samples] | None = None
        if 4 * sum(self.lengths) <= memory:
            self._kept = [self._read(n) for n in range(len(examples))]

    def samples(self, number: int) -> Samples:
        """float32 (S,) of the sound with this number."""
        return self._read(number) if self._kept is None else self._kept[number]

    def __iter__(self) -> Iterator[Samples]:
        return (self.samples(n) for n in range(len(self._examples)))

    def _read(self, number: int) -> Samples:
        example = self._examples[number]
        found = resampled(read_sound(example.path).samples, example.rate, self.rate)
        if len(found) > self.lengths[number]:
            raise ValueError(f"{example.path}: has changed since it was first read")
        return np.pad(found, (0, self.lengths[number] - len(found)))
