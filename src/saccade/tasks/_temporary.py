"""Folders of a tokenizer's files that live as long as the model that reads them."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from ..models import Model
from ..models.checkpoints.materialised import materialised
from ..models.checkpoints.settings import CONFIG
from ..models.loading import without_weights
from ..models.model import COMPANIONS


def temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="saccade-"))


def kept_while_used(model: Model, folder: Path) -> Model:
    """The model, with whose end the folder goes."""
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def small_files(model: Model) -> dict[str, bytes]:
    """Everything beside the weights that its folder will have: config.json and the tokenizer's files."""
    files = {} if model.folder is None else {name: model.folder / name for name in COMPANIONS}
    found = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
    return {CONFIG: model.config_json().encode(), **found}


def from_small_files(files: Mapping[str, bytes], *, empty: bool = False) -> Model:
    """The model that the files describe, with weights that mean nothing yet, or with `empty` none at all."""
    folder = temporary_folder()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    model = without_weights(folder)
    return kept_while_used(model if empty else materialised(model, torch.float32, "cpu"), folder)
