"""Settings of input preprocessing, from preprocessor_config.json or a section of processor_config.json."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from .._shortened import shortened
from .reading import read_json
from .settings import CheckpointSettings

FILE, JOINT_FILE = "preprocessor_config.json", "processor_config.json"
_TYPES = ("image_processor_type", "feature_extractor_type")
_ENDINGS = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")


def processor_settings(folder: Path | None, part: str, kinds: Collection[str]) -> tuple[CheckpointSettings, str]:
    """The settings of a folder's processor, and its entry of `kinds`: "ViT" for a "ViTImageProcessor".

    Args:
        part: the section in a file of several processors: "image_processor" or "feature_extractor".
        kinds: the known ones; the first is the default if the file names no class.

    Raises:
        FileNotFoundError: no file. ValueError: the file is damaged, or of another kind.
    """
    if folder is None:
        raise FileNotFoundError(f"{FILE}: the model was made in memory, so its preprocessing settings are unknown")
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
        return CheckpointSettings(values, path), next(iter(kinds))
    ending = next((ending for ending in _ENDINGS if named.endswith(ending)), "")
    kind = named.removesuffix(ending)
    if not ending or kind not in kinds:
        raise ValueError(f"{path}: expected a processor of {' or '.join(kinds)}, got {shortened(named)}")
    return CheckpointSettings(values, path), kind
