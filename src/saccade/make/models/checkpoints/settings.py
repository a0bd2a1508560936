"""Settings of a published model, read with checks: config.json, and those of preprocessing and of generation."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .._shortened import shortened
from .reading import read_json

CONFIG = "config.json"
T = TypeVar("T")
_MOST = 2**31 - 1  # larger tables cannot be allocated
PROCESSOR, PROCESSORS = "preprocessor_config.json", "processor_config.json"
_TYPES = ("image_processor_type", "feature_extractor_type")
_ENDINGS = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")
GENERATION = "generation_config.json"
TOKENS = ("eos_token_id", "pad_token_id", "decoder_start_token_id")

# Settings that change the generated tokens and are not supported, with the values that have no effect.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": (),
    "force_words_ids": (),
    "stop_strings": ([],),
    "watermarking_config": (),
    "token_healing": (False,),
    "dola_layers": (),
    "max_time": (),
}
# The same for sampling.
NEUTRAL_DRAWING: dict[str, tuple[object, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_p": (0,),
    "top_h": (1,),
}


class CheckpointSettings:
    """Contents of config.json. Readers raise ValueError with the file, the setting, its value and the known values.

    Attributes:
        values: the whole file.
        stored: names of the tensors in the weights' files, for settings that depend on them.
        left_out: settings without a counterpart here, and their values.
        anew: whether the model is new and has no stored weights.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, stored: Collection[str] = ()):
        self.values, self.path, self.stored, self.anew = dict(values), path, frozenset(stored), False
        self.left_out: dict[str, object] = {}

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; null counts as absent."""
        value = self.values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An int of at least `least`; without a default the setting is required."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise self.error(name, f"an int from {least} to {_MOST}")
        return value

    def token(self, name: str, default: int, vocabulary: int) -> int:
        """A token's id."""
        value = self.count(name, default, least=0)
        if value >= vocabulary:
            raise self.error(name, f"a token's id, from 0 to {vocabulary - 1}")
        return value

    def layers(self, name: str, default: int | None = None) -> int:
        """A number of layers. At most the number of stored tensors, since every layer has tensors."""
        layers = self.count(name, default)
        if layers > len(self.stored) and not self.anew:
            raise self.error(name, f"at most {len(self.stored)}, as many as there are tensors")
        return layers

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(name, "a finite number")
        return float(value)

    def eps(self, name: str, default: float) -> float:
        """The epsilon of a norm, a positive number."""
        value = self.number(name, default)
        if value <= 0.0:
            raise self.error(name, "a positive number")
        return value

    def theta(self, name: str, default: float | None = None) -> float:
        """The base of rotary frequencies, a number above 1."""
        value = self.number(name, default)
        if value <= 1.0:
            raise self.error(name, "a number above 1")
        return value

    def share(self, name: str, default: float | None = None) -> float:
        """A probability below 1."""
        value = self.number(name, default)
        if not 0.0 <= value < 1.0:
            raise self.error(name, "a number in [0, 1)")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, choices: Mapping[Any, T], default: Any = None) -> T:
        """The value that `choices` has for the published value."""
        value = self._given(name, default)
        if not isinstance(value, (str, int, bool)) or value not in choices:
            raise self.error(name, f"one of {', '.join(map(repr, choices))}")
        return choices[value]

    def only(self, name: str, *allowed: object) -> None:
        """ValueError unless the setting is absent or has an allowed value."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise self.error(name, f"{' or '.join(map(repr, allowed))}: other values are not supported")

    def rename(self, aliases: Mapping[str, str]) -> None:
        """Rename settings from their aliases; ValueError if both names are there with different values."""
        for alias, name in aliases.items():
            if alias not in self.values:
                continue
            value = self.values.pop(alias)
            if name in self.values and self.values[name] != value:
                raise self.error(name, f"{shortened(repr(value))}, as {alias} says, which names the same setting")
            self.values[name] = value

    def error(self, name: str, expected: str) -> ValueError:
        """The error about a setting."""
        return ValueError(f"{self.path}: {name}: expected {expected}, got {shortened(repr(self.values.get(name)))}")

    def _given(self, name: str, default: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ValueError(f"{self.path}: {name}: missing")
        return value


def read_settings(folder: Path) -> CheckpointSettings:
    """config.json of a folder. Raises a one-line FileNotFoundError or ValueError if it is missing or damaged."""
    path = folder / CONFIG
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged, expected an object of model settings")
    return CheckpointSettings(values, path)


def processor_settings(folder: Path | None, part: str, kinds: Collection[str]) -> tuple[CheckpointSettings, str]:
    """The settings of a folder's processor, and its entry of `kinds`: "ViT" for a "ViTImageProcessor".

    Args:
        part: the section in a file of several processors: "image_processor" or "feature_extractor".
        kinds: the known ones; the first is the default if the file names no class.

    Raises:
        FileNotFoundError: no file. ValueError: the file is damaged, or of another kind.
    """
    if folder is None:
        raise FileNotFoundError(f"{PROCESSOR}: the model was made in memory, so its preprocessing settings are unknown")
    path = folder / PROCESSOR
    joint = folder / PROCESSORS
    if path.is_file() or not joint.is_file():
        values = read_json(path)
    else:
        path, values = joint, read_json(joint)
        values = values.get(part) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged, expected an object of settings")
    named = next((str(values[key]) for key in _TYPES if values.get(key)), None)
    if named is None:
        return CheckpointSettings(values, path), next(iter(kinds))
    ending = next((ending for ending in _ENDINGS if named.endswith(ending)), "")
    kind = named.removesuffix(ending)
    if not ending or kind not in kinds:
        raise ValueError(f"{path}: expected a processor of {' or '.join(kinds)}, got {shortened(named)}")
    return CheckpointSettings(values, path), kind


def generation_settings(folder: Path | None, settings: CheckpointSettings) -> CheckpointSettings:
    """Generation settings of a folder. With generation_config.json, config.json gives only the special tokens.

    Raises:
        ValueError: the file is damaged.
    """
    if folder is None or not (folder / GENERATION).is_file():
        return settings
    given = read_json(folder / GENERATION)
    if not isinstance(given, dict):
        raise ValueError(f"{folder / GENERATION}: damaged, expected an object of settings")
    tokens = {name: settings.get(name) for name in TOKENS}
    return CheckpointSettings(tokens | {n: v for n, v in given.items() if v is not None}, folder / GENERATION)


def check_computed(settings: CheckpointSettings, *, drawn: bool = False) -> None:
    """ValueError if the settings use unsupported features; `drawn`: also check those of sampling."""
    for name, neutral in (NEUTRAL | NEUTRAL_DRAWING if drawn else NEUTRAL).items():
        settings.only(name, *(neutral or (None,)))
