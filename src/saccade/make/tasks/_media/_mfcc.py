"""The baseline of sounds: mel-frequency cepstral coefficients and logistic regression.

Shape legend: N sounds, S samples, F frames, M mel bands, C coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...models.signals.sound import Samples
from .._baselines import strongest_regression
from ._sounds import SoundExample, SoundStore, usual_rate

WINDOW, HOP = 0.025, 0.01  # seconds
BANDS, COEFFICIENTS = 40, 20
QUIETEST = 1e-8  # below the loudest power; what is below is not told apart


def mel(hertz: Any) -> Any:
    """O'Shaughnessy (1987): 1127 ln(1 + f / 700)."""
    return 1127 * np.log1p(np.asarray(hertz) / 700)


def mel_filters(rate: int, size: int, bands: int = BANDS) -> np.ndarray:
    """(M, size / 2 + 1): triangles over the frequencies of a Fourier transform, their corners evenly spaced in mel."""
    corners = 700 * np.expm1(np.linspace(0, mel(rate / 2), bands + 2) / 1127)
    low, middle, high = (corners[n : n + bands, None] for n in range(3))
    frequencies = np.arange(size // 2 + 1) * rate / size
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return np.clip(np.minimum(rising, falling), 0, None)


def log_mel(samples: Samples, rate: int, bands: int = BANDS) -> np.ndarray:
    """(M, F): the log of the power of each band, in frames of 25 ms every 10 ms under a Hann window."""
    window, hop = round(WINDOW * rate), max(round(HOP * rate), 1)
    size = 1 << (window - 1).bit_length()
    padded = np.pad(samples.astype(np.float64), (0, max(window - len(samples), 0)))
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop] * np.hanning(window)
    power = mel_filters(rate, size, bands) @ (np.abs(np.fft.rfft(frames, size)) ** 2).T
    return np.log(np.maximum(power, QUIETEST * max(float(power.max()), 1e-30)))


def mfcc_statistics(store: SoundStore) -> np.ndarray:
    """(N, 2 C): mean and deviation of each coefficient over the frames of a sound (Davis and Mermelstein 1980)."""
    from scipy.fft import dct

    rows = [dct(log_mel(samples, store.rate), axis=0, norm="ortho")[:COEFFICIENTS] for samples in store]
    return np.stack([np.concatenate([row.mean(1), row.std(1)]) for row in rows])


def mfcc_regression(
    training: Sequence[SoundExample],
    validation: Sequence[SoundExample],
    tested: Sequence[SoundExample],
    classes: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, str]:
    """Logistic regression on means and deviations; C is chosen on the validation sounds.

    Args:
        classes: numbers of the training and of the validation sounds' classes.

    Returns:
        Probabilities (N, K) of those tested, and what it is in a few words.
    """
    rate = usual_rate(training)
    known, judged, asked = (mfcc_statistics(SoundStore(part, rate)) for part in (training, validation, tested))
    mean, deviation = known.mean(0), np.maximum(known.std(0), 1e-8)
    known, judged, asked = ((part - mean) / deviation for part in (known, judged, asked))
    outputs, strength = strongest_regression((known, classes[0]), (judged, classes[1]), asked)
    return outputs, f"MFCC with logistic regression (C = {strength:g})"
