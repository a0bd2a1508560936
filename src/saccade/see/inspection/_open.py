"""Opening a model to inspect: Saccade's own folder, a transformers folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

from ...make.models import LanguageModel, ModelConfig
from ...make.models.checkpoints.hub import folder_of
from ...make.models.checkpoints.reading import read_json
from ...make.models.decoder_lm.checkpoint import CONFIG, TOKENIZER, WEIGHTS, load_own
from ...make.models.loading import is_known
from ...support._extras import installing
from ._models import SaccadeModel, TextModel, UnreadableCheckpoint
from ._published import open_published

FILES = "config.json, model.safetensors and tokenizer.json"
FORMS = (
    f"--model takes a folder of {FILES}, as `saccade train lm` or as save_pretrained of transformers writes them, "
    "or a name on the Hugging Face hub with its owner, such as openai-community/gpt2"
)
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def open_model(source: str | Path | None = None) -> TextModel:
    """Open a model to inspect: the one in the folder ``source``, or the one of this name on the Hugging Face hub.

    None opens the embedded model. A name is looked up on the hub only if it has the form ``org/name`` and is no local
    folder. A transformers folder has config.json, model.safetensors and tokenizer.json. BERT-like, GPT-like and
    Llama-like checkpoints work with the attention implementations eager, sdpa, flex_attention and saccade; sdpa
    replaces flash attention. For an encoder-decoder the encoder is used.

    Raises:
        FileNotFoundError: no such folder, or a file missing from it.
        ValueError: damaged or foreign files; a model without attention (Mamba), or with attention that cannot be
            observed (BLOOM, DeBERTa); weights that are missing, of another shape or not finite; a tokenizer without
            character positions; code that would be downloaded; an unreachable hub; transformers not installed.

    Example:
        >>> from saccade.inspection import open_model
        >>> model = open_model()
        >>> model.name, model.layers, model.context
        ('embedded', 4, 256)
    """
    if source is None:
        return SaccadeModel(load_own())
    folder = Path(source).expanduser()
    if folder.is_dir():
        return _from_folder(folder)
    if folder.exists():
        raise ValueError(f"{source}: is a file; {FORMS}")
    if not _HUB_ID.fullmatch(str(source)):
        raise FileNotFoundError(f"{source}: no such model folder; {FORMS}")
    return _from_hub(str(source))


def _from_folder(folder: Path) -> TextModel:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing from the model folder; {FORMS}")
    config = _settings(path)
    if config is None or "model_type" not in config:
        return SaccadeModel(_own(folder, config))
    if is_known(config["model_type"]):
        return open_published(folder)
    _require_transformers(str(folder))
    from ._transformers import read_checkpoint

    try:
        return read_checkpoint(str(folder), local=True)
    except UnreadableCheckpoint as error:
        missing = [name for name in (WEIGHTS, TOKENIZER) if not (folder / name).exists()]
        lacks = f"; {' and '.join(missing)}: missing from the model folder" if missing else ""
        raise ValueError(f"{folder}: {error}{lacks}") from None


def _own(folder: Path, config: dict[str, Any] | None) -> LanguageModel:
    if config is not None and not config.keys() & {field.name for field in dataclasses.fields(ModelConfig)}:
        raise ValueError(
            f"{folder / CONFIG}: neither the settings of a Saccade model nor a model_type of transformers; {FORMS}"
        )
    return load_own(folder)


def _settings(path: Path) -> dict[str, Any] | None:
    """The contents of config.json; None if it is damaged, which `load` reports."""
    try:
        config = read_json(path)
    except ValueError:
        return None
    return config if isinstance(config, dict) else None


def _from_hub(name: str) -> TextModel:
    if importlib.util.find_spec("transformers") is None:
        return _from_folder(folder_of(name))
    from ._transformers import read_checkpoint

    try:
        return read_checkpoint(name, local=False)
    except UnreadableCheckpoint as error:
        works = f"a folder works without the hub: {FILES}, copied to ./my-model, is --model ./my-model"
        raise ValueError(f"{name}: no folder here, and no model from the Hugging Face hub ({error}); {works}") from None


def _require_transformers(source: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{source}: this needs transformers, which is not installed: {installing('hf')}")
