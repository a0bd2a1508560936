"""Folders of a tokenizer's files that live as long as the model that reads them."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch

from ..models import Model
from ..models.checkpoints.reading import materialised
from ..models.checkpoints.settings import CONFIG
from ..models.loading import without_weights
from ..models.model import COMPANIONS

STORED = "stored.json"  # names of the tensors that the model's files had: some models are built by what they carry


def temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="saccade-"))


def kept_while_used(model: Model, folder: Path) -> Model:
    """The model; its folder is removed when the model is."""
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def small_files(model: Model) -> dict[str, bytes]:
    """The model's files except the weights: config.json, the tokenizer's files, and `STORED`."""
    files = {} if model.folder is None else {name: model.folder / name for name in COMPANIONS}
    found = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
    stored = json.dumps(sorted(model.settings.stored))
    return {CONFIG: model.config_json().encode(), STORED: stored.encode(), **found}


def from_small_files(files: Mapping[str, bytes], *, empty: bool = False) -> Model:
    """The model that the files describe, with uninitialised weights, or on the meta device if `empty`."""
    folder = temporary_folder()
    for name in files.keys() - {STORED}:
        (folder / name).write_bytes(files[name])
    model = without_weights(folder, json.loads(files.get(STORED, b"[]")))
    return kept_while_used(model if empty else materialised(model, torch.float32, "cpu"), folder)
