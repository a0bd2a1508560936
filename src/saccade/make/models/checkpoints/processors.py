"""The settings of what makes a model's inputs: preprocessor_config.json, or a part of processor_config.json."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from .._shortened import shortened
from .reading import read_json
from .settings import Settings

FILE, JOINT_FILE = "preprocessor_config.json", "processor_config.json"
_TYPES = ("image_processor_type", "feature_extractor_type")
_ENDINGS = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")


def processor_settings(folder: Path | None, part: str, kinds: Collection[str]) -> tuple[Settings, str]:
    """What the file of a folder says, and which of `kinds` its class is: "ViT" of "ViTImageProcessor".

    Args:
        part: where it stands in a file of several processors: "image_processor" or "feature_extractor".
        kinds: those known; the first is meant where the file names no class.

    Raises:
        FileNotFoundError: no file. ValueError: a damaged one, or another kind.
    """
    if folder is None:
        raise FileNotFoundError(f"{FILE}: the model was made in memory, so nothing says how its inputs are made")
    path = folder / FILE
    joint = folder / JOINT_FILE
    if path.is_file() or not joint.is_file():
        values = read_json(path)
    else:
        path, values = joint, read_json(joint)
        values = values.get(part) if isinstance(values, dict) else None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged, expected an object of settings")
    named = next((str(values[key]) for key in _TYPES if values.get(key)), None)
    if named is None:
        return Settings(values, path), next(iter(kinds))
    ending = next((ending for ending in _ENDINGS if named.endswith(ending)), "")
    kind = named.removesuffix(ending)
    if not ending or kind not in kinds:
        raise ValueError(f"{path}: expected a processor of {' or '.join(kinds)}, got {shortened(named)}")
    return Settings(values, path), kind
