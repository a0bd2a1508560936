"""Opening a model to inspect: Saccade's own folder, a transformers folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ...make.models import LanguageModel, ModelConfig
from ...make.models.checkpoints.gguf import SUFFIX
from ...make.models.checkpoints.hub import folder_of, is_hub_name
from ...make.models.checkpoints.kept_roles import KeptRoles
from ...make.models.checkpoints.reading import read_json
from ...make.models.checkpoints.transformers_reading import UnreadableCheckpoint, require_transformers
from ...make.models.decoder_lm.checkpoint import CONFIG, TOKENIZER, WEIGHTS, load_own
from ...make.models.loading import is_known, load
from ._models import SaccadeModel, TextModel
from ._published import as_text_model, open_published

FILES = "config.json, model.safetensors and tokenizer.json"
FORMS = (
    f"--model takes a folder of {FILES}, as `saccade train lm` or as save_pretrained of transformers writes them, "
    "or a name on the Hugging Face hub with its owner, such as openai-community/gpt2"
)


def open_model(source: str | Path | None = None, *, weights: str | None = None) -> TextModel:
    """Open a model to inspect: the one in the folder ``source``, or the one of this name on the Hugging Face hub.

    None opens the embedded model. A name is looked up on the hub only if it has the form ``org/name`` and is no local
    folder. A transformers folder has config.json, model.safetensors and tokenizer.json; a GGUF file is dequantised.
    BERT-like, GPT-like and Llama-like checkpoints work with the attention implementations eager, sdpa, flex_attention
    and saccade; sdpa replaces flash attention. For an encoder-decoder the encoder is used.

    Args:
        weights: what linear layers hold, as in `saccade.models.load`; the name says it.

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
    if weights is not None:
        try:
            few = as_text_model(load(source, weights=weights))
        except TypeError as error:
            raise ValueError(f"{source}: {error}") from None
        few.name = f"{'embedded' if source is None else source}, {weights}"
        return few
    if source is None:
        return SaccadeModel(load_own())
    path = Path(source).expanduser()
    if path.suffix == SUFFIX and path.is_file():
        require_transformers(str(source))
        return _keeping_roles(_with_transformers(path.parent, path.name), KeptRoles(path, str(source)))
    if path.is_dir():
        return _from_folder(path, str(source))
    if path.exists():
        raise ValueError(f"{source}: is a file; {FORMS}")
    if not is_hub_name(str(source)):
        raise FileNotFoundError(f"{source}: no such model folder; {FORMS}")
    found = _from_folder(folder_of(str(source)), str(source), fetched=True)
    found.name = str(source)
    return found


def _keeping_roles(model: TextModel, place: KeptRoles) -> TextModel:
    model.kept_roles = place
    return model


def _from_folder(folder: Path, source: str, *, fetched: bool = False) -> TextModel:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing from the model folder; {FORMS}")
    config = _settings(path)
    if config is None or "model_type" not in config:
        place = KeptRoles(folder, source, own=True, fetched=fetched)
        return _keeping_roles(SaccadeModel(_own(folder, config, place)), place)
    place = KeptRoles(folder, source, fetched=fetched)
    if is_known(config["model_type"]):
        return _keeping_roles(open_published(folder), place)
    require_transformers(str(folder))
    return _keeping_roles(_with_transformers(folder), place)


def _with_transformers(folder: Path, gguf: str | None = None) -> TextModel:
    from ._transformers import read_checkpoint

    try:
        return read_checkpoint(folder, gguf)
    except UnreadableCheckpoint as error:
        missing = [name for name in (WEIGHTS, TOKENIZER) if gguf is None and not (folder / name).exists()]
        lacks = f"; {' and '.join(missing)}: missing from the model folder" if missing else ""
        raise ValueError(f"{folder if gguf is None else folder / gguf}: {error}{lacks}") from None


def _own(folder: Path, config: dict[str, Any] | None, roles: KeptRoles) -> LanguageModel:
    if config is not None and not config.keys() & {field.name for field in dataclasses.fields(ModelConfig)}:
        raise ValueError(
            f"{folder / CONFIG}: neither the settings of a Saccade model nor a model_type of transformers; {FORMS}"
        )
    return load_own(folder, roles=roles)


def _settings(path: Path) -> dict[str, Any] | None:
    """The contents of config.json; None if it is damaged, which `load` reports."""
    try:
        config = read_json(path)
    except ValueError:
        return None
    return config if isinstance(config, dict) else None
