"""Finds a model's folder: a local one, or a snapshot from the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from ....support._extras import installing

_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "pytorch_model*.bin", "*.txt", "*.model", "*.spm"]
_WORKS = "a folder works without the hub: config.json, the weights and the tokenizer's files, copied to ./my-model"


def is_hub_name(source: str) -> bool:
    """Whether a text has the form of a name on the hub, with its owner."""
    return _ID.fullmatch(source) is not None


def folder_of(source: str | Path) -> Path:
    """The folder itself, or the local snapshot of a hub name, downloaded if necessary.

    Raises:
        FileNotFoundError: no such folder or hub name, or the hub cannot be reached.
        ValueError: `source` is a file, or `huggingface_hub` is not installed.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{source}: is a file; expected a model folder, or a name on the Hugging Face hub")
    if not is_hub_name(str(source)):
        raise FileNotFoundError(
            f"{source}: no such model folder (expected a folder with config.json and weights, or a name on the "
            "Hugging Face hub with its owner, such as openai-community/gpt2)"
        )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError(
            f"{source}: no folder here; names on the hub need huggingface_hub, which is not installed: "
            f"{installing('models')}; {_WORKS}"
        )
    return _snapshot(str(source))


def _snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        files = _without_doubles(name)
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # network, hub and cache have unrelated exception classes
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except Exception:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise FileNotFoundError(
                f"{name}: no folder here, and it cannot be fetched from the hub ({reason[:200]}); {_WORKS}"
            ) from None


def _without_doubles(name: str) -> list[str]:
    """Patterns of the files to download: `pytorch_model*.bin` only if there are no safetensors files."""
    from huggingface_hub import HfApi

    # `list_repo_files` would retry for half a minute without a network.
    there = [file.rfilename for file in HfApi().model_info(name).siblings or ()]
    safe = any(file.endswith(".safetensors") for file in there)
    return [pattern for pattern in _FILES if not (safe and pattern.endswith(".bin"))]
