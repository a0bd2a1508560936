"""Sound preprocessing by preprocessor_config.json: `input_values` from files and arrays.

Shape legend: B batch, S samples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....support._extras import installing
from ..checkpoints.settings import processor_settings

Samples = np.ndarray[Any, np.dtype[np.float32]]

FORMATS = "WAV, W64, FLAC, OGG, AIFF, AU, CAF, MP3"
"""Accepted formats, independent of the file's name. libsndfile has two dozen others, each with a parser."""
_BEGINNING = re.compile(rb"RIF[FX]|RF64|riff|fLaC|OggS|FORM.{4}AIF[FC]|\.snd|dns\.|caff|ID3|\xff[\xe0-\xff]", re.DOTALL)
MOST = 2**31  # maximum size of a decoded file: 9 hours of one channel at 16,000 samples a second


class Sound(NamedTuple):
    """Samples (S,) averaged over channels, sample rate, and number of channels of the file."""

    samples: Samples
    rate: int
    channels: int


@dataclass(frozen=True)
class SoundInputs:
    """Preprocessing of sounds to a batch: checks the sample rate, pads on the right and normalises.

    Equal to transformers' Wav2Vec2FeatureExtractor. As there, for a model without an attention mask, mean and variance
    include the padding, so that a padded sound gives other results than the sound alone.

    Attributes:
        rate: the model's sample rate. Sounds with another rate raise an error; they are not resampled.
        normal: whether to normalise to mean 0 and variance 1.
        masked: whether the model uses an attention mask.
        padding: the value of padding.
    """

    rate: int = 16000
    normal: bool = True
    masked: bool = False
    padding: float = 0.0

    @classmethod
    def of_folder(cls, folder: Path | None) -> SoundInputs:
        """Read the processor's settings from a model's folder.

        Raises:
            FileNotFoundError: no such file. ValueError: another kind of processor, or unsupported settings.
        """
        settings, _ = processor_settings(folder, "feature_extractor", ("Wav2Vec2",))
        settings.only("feature_size", 1)
        settings.only("padding_side", "right")
        return cls(
            settings.count("sampling_rate", 16000),
            settings.flag("do_normalize", True),
            settings.flag("return_attention_mask", False),
            settings.number("padding_value", 0.0),
        )

    def __call__(self, sounds: Any, rate: int | None = None) -> dict[str, Tensor]:
        """`input_values` float32 (B, S), and `attention_mask` int64 (B, S) if the model uses one.

        Args:
            sounds: a path, or an array or tensor (S,) of floats; or a list of these; an array (B, S) is a batch.
                Channels of a file are averaged.
            rate: sample rate of the arrays; None: the model's.

        Raises:
            ImportError: without soundfile. FileNotFoundError: no such file. TypeError: not sounds, or arrays of ints.
            ValueError: damaged files, another rate, an empty list or sound, several channels in an array, NaN.
        """
        if rate is not None:
            self._check_rate("sounds", rate)
        sounds_read = [self._one(sound, f"sounds[{n}]") for n, sound in enumerate(each_sound(sounds))]
        lengths, longest = [len(samples) for samples in sounds_read], max(map(len, sounds_read))
        rows = [np.pad(samples, (0, longest - len(samples)), constant_values=self.padding) for samples in sounds_read]
        if self.normal:
            rows = [self._normal(row, n if self.masked else longest) for row, n in zip(rows, lengths, strict=True)]
        batch = {"input_values": torch.from_numpy(np.stack(rows))}
        if self.masked:
            batch["attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
        return batch

    def _normal(self, row: Samples, length: int) -> Samples:
        real = row[:length]
        row = (row - real.mean()) / np.sqrt(real.var() + 1e-7)
        row[length:] = self.padding
        return row

    def _one(self, source: Any, name: str) -> Samples:
        if isinstance(source, (str, Path)):
            samples, rate, _ = read_sound(Path(source))
            self._check_rate(str(source), rate)
        elif isinstance(source, (np.ndarray, Tensor)):
            samples = source.detach().cpu().numpy() if isinstance(source, Tensor) else source
        else:
            raise TypeError(f"{name}: expected a path or an array of samples, got {type(source).__name__}")
        if not np.issubdtype(samples.dtype, np.floating):
            raise TypeError(f"{name}: expected floats from -1 to 1, got {samples.dtype}")
        if samples.ndim != 1:
            raise ValueError(f"{name}: expected one channel of samples, shape (S,), got {samples.shape}")
        if not samples.size:
            raise ValueError(f"{name}: expected at least one sample, got none")
        if not np.isfinite(samples).all():
            raise ValueError(f"{name}: contains NaN or infinity")
        return samples.astype(np.float32)

    def _check_rate(self, name: str, rate: int) -> None:
        if rate != self.rate:
            raise ValueError(
                f"{name}: {rate} samples a second, expected the model's rate of {self.rate}; resample it first, for "
                f"example with scipy.signal.resample_poly(samples, {self.rate}, {rate})"
            )


def each_sound(sounds: Any) -> list[Any]:
    """The sounds as a list; ValueError if there are none."""
    if not isinstance(sounds, (list, tuple)):
        sounds = list(sounds) if isinstance(sounds, (np.ndarray, Tensor)) and sounds.ndim == 2 else [sounds]
    if not len(sounds):
        raise ValueError("sounds: empty, expected at least one sound")
    return list(sounds)


def read_sound(path: Path) -> Sound:
    """Read a sound file with soundfile.

    Raises:
        ImportError: without soundfile. FileNotFoundError: no such file. ValueError: a damaged file, another format than
            `FORMATS`, more than `MOST` bytes.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise ImportError(f"sounds: reading files needs soundfile: {installing('models')} ({error})") from None
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such sound file")
    with path.open("rb") as opened:
        known = _BEGINNING.match(opened.read(12))
    if not known:
        raise ValueError(f"{path}: no sound of a known format; expected one of {FORMATS}")
    try:
        with soundfile.SoundFile(path) as file:
            expected, rate, channels = file.frames, file.samplerate, file.channels
            if 4 * expected * channels > MOST:
                raise ValueError(f"its header gives {expected:,} samples of {channels} channels, more than 2 GiB")
            samples = file.read(dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, ValueError, TypeError) as error:  # TypeError: a name that ends in .raw
        raise ValueError(f"{path}: damaged, or not a sound that soundfile can read ({error})") from None
    if len(samples) != expected or _cut(path):
        raise ValueError(f"{path}: damaged, the file is shorter than its header says")
    return Sound(samples.mean(1), rate, samples.shape[1])


def _cut(path: Path) -> bool:
    """Whether a WAV file is shorter than its header says; libsndfile reads it without an error."""
    with path.open("rb") as file:
        start = file.read(8)
    size = int.from_bytes(start[4:8], "little")
    streamed = size in (0, 0xFFFFFFFF)  # written by a program that did not know the length
    return start[:4] == b"RIFF" and not streamed and path.stat().st_size < size + 8
