"""Models from a folder or from the local cache of the Hugging Face hub's library: nothing is fetched.

Weights are read as safetensors, else with `weights_only`; code that comes with a model is never run.
"""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import torch

from ...make.models import load as load_published
from ...make.models._shortened import shortened
from ...make.models.checkpoints.reading import PICKLED, PICKLED_INDEX, SAFE, SAFE_INDEX, read_json
from ...make.models.checkpoints.transformers_reading import (
    check_sizes,
    class_of,
    contained,
    read_configuration,
    read_weights,
)
from ...make.models.decoder_lm.checkpoint import load_own
from ...make.models.loading import is_known
from ...support._extras import installing
from ...support._restored import seeded

Opened = tuple[Any, tuple[str, ...]]  # (the model, what the report says of it)

_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_SAFE, _PICKLED = (SAFE, SAFE_INDEX), (PICKLED, PICKLED_INDEX)


def load(named: str) -> Opened:
    """The model in a folder (config.json, weights), or of this name in the local cache, in float32 and eval mode.

    A folder with a configuration alone gives a model of random weights, and the report says so.

    Raises:
        ValueError: no such folder or name, files that are damaged or missing, transformers not installed, or a model
            that needs code of its own.
    """
    folder = _folder(named)
    config = _settings(folder / "config.json")
    if "model_type" not in config:
        return load_own(folder), ()
    if importlib.util.find_spec("transformers") is None:
        if is_known(config["model_type"]):
            return load_published(folder), ("Saccade's own model of these weights is tested",)
        raise ValueError(f"hf:{named}: this needs transformers, which is not installed: {installing('hf')}")
    try:
        with contained():
            return _opened(folder)
    except ValueError as error:
        raise ValueError(f"hf:{named}: {error}") from None


def size_of_weights(named: str) -> int:
    """The bytes of a folder's weights as float32, in which they are tested, at the most; 0 where there are none."""
    try:
        folder = _folder(named)
    except ValueError:  # which loading says
        return 0
    kinds = ("*.safetensors", "pytorch_model*.bin")
    return 2 * max(sum(path.stat().st_size for path in folder.glob(kind)) for kind in kinds)


def _folder(named: str) -> Path:
    folder = Path(named).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"hf:{named}: config.json is missing from the folder")
        return folder
    if folder.exists():
        raise ValueError(f"hf:{named}: is a file; expected the folder of a model")
    if not _ID.fullmatch(named):
        raise ValueError(f"hf:{named}: no such folder, and no name of a model such as org/name")
    kept = _kept(named)
    if kept is None or not (kept / "config.json").is_file():
        raise ValueError(
            f"hf:{named}: no such folder, and no model of this name in the local cache; nothing is fetched here: "
            f"`hf download {named}` gets it"
        )
    return kept


def _kept(named: str) -> Path | None:
    """The folder of this model in the hub library's cache on this machine."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(named, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _settings(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: damaged, expected an object of model settings")
    return config


def _opened(folder: Path) -> Opened:
    config = read_configuration(folder)
    kind = class_of(config)
    if not any((folder / name).is_file() for name in (*_SAFE, *_PICKLED)):
        check_sizes(config, (), kind)
        try:
            model = _random(kind, config)
        except Exception as error:  # of several libraries below, some of which raise bare Exception
            raise ValueError(f"configuration: {shortened(error)}") from None
        return model, ("its folder holds no weights: random ones are tested",)
    model = read_weights(kind, config, folder, dtype=torch.float32).module
    if any((folder / name).is_file() for name in _SAFE):
        return model, ()
    pickled = next(name for name in _PICKLED if (folder / name).is_file())
    return model, (f"its weights are read from {pickled} with weights_only, which runs no code of it",)


def _random(kind: Any, config: Any) -> Any:
    # Of variance 1 / width, so that what attention does is no small part of the output, as it is with 0.02.
    if hasattr(config, "initializer_range"):
        config.initializer_range = 1 / math.sqrt(config.hidden_size)
    with seeded(0):
        return kind(config).eval()
