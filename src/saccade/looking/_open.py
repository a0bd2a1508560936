"""Opening a model to look through: Saccade's own folder, a transformers folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from ..models import load
from ._models import OwnModel, TextModel

FORMS = (
    "a folder with config.json, model.safetensors and tokenizer.json works, of Saccade's or of transformers, "
    "or a name on the Hugging Face hub such as org/name"
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def open_model(source: str | Path | None = None) -> TextModel:
    """The model in the folder ``source``, else that of this name on the hub; None is the embedded one.

    Only a name of the form ``org/name`` that is no folder here is looked up on the hub.

    Raises:
        FileNotFoundError: no such folder, or a file missing from it. ValueError: damaged or foreign files, a model
            without attention that can be seen, a hub that cannot be reached, transformers not installed.
    """
    if source is None:
        return OwnModel(load())
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _from_folder(folder)
    if folder.exists():
        raise ValueError(f"{source}: is a file; {FORMS}")
    if not _HUB_ID.fullmatch(str(source)) or str(source).startswith("."):
        raise FileNotFoundError(f"{source}: no such model folder; {FORMS}")
    return _from_hub(str(source))


def _from_folder(folder: Path) -> TextModel:
    if not _is_of_transformers(folder):
        return OwnModel(load(folder))
    return _read(str(folder), local=True)


def _is_of_transformers(folder: Path) -> bool:
    """Its config.json names a `model_type`; Saccade's own does not."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing from the model folder; {FORMS}")
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(config, dict) and "model_type" in config


def _from_hub(name: str) -> TextModel:
    return _read(name, local=False)


def _read(source: str, *, local: bool) -> TextModel:
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f'{source}: this needs transformers, which is not installed: pip install "saccade[hf]"')
    from ._transformers import read_checkpoint

    return read_checkpoint(source, source, local=local)
