"""A language model on disk: a folder of config.json, model.safetensors, tokenizer.json, and what was learned about it.

config.json        the fields of `ModelConfig`
model.safetensors  the weights, bfloat16; what a mechanism drew once, as it is
tokenizer.json     of the `tokenizers` library
heads.json         what each attention head does, with scores (may be absent)
README.md          the model card (may be absent)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from .config import ModelConfig
from .language_model import DecoderLM
from .tokenizer import Tokenizer

EMBEDDED = Path(__file__).parent / "embedded"
CONFIG, WEIGHTS, TOKENIZER, HEADS, CARD = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "heads.json",
    "README.md",
)


@dataclasses.dataclass
class LanguageModel:
    """A model, the tokenizer it was trained with, and what is known of its heads (`heads.json`, None if unmeasured)."""

    model: DecoderLM
    tokenizer: Tokenizer
    heads: dict[str, Any] | None = None
    name: str = "unnamed"


def load(path: str | Path | None = None) -> LanguageModel:
    """The language model in the folder `path`, in evaluation mode, float32, on the CPU; None is the embedded one.

    Raises FileNotFoundError or ValueError, in one line that names the file, when a file is missing, damaged, or does
    not fit the configuration.
    """
    folder = EMBEDDED if path is None else Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder (expected a folder with {CONFIG} and {WEIGHTS})")
    config = _read_config(folder / CONFIG)
    tokenizer = _read_tokenizer(folder / TOKENIZER, config)
    model = DecoderLM(config)
    _load_weights(model, folder / WEIGHTS)
    heads = _read_json(folder / HEADS) if (folder / HEADS).exists() else None
    return LanguageModel(model.eval(), tokenizer, heads, "embedded" if path is None else str(folder))


def save(lm: LanguageModel, path: str | Path, *, weights: str = WEIGHTS) -> None:
    """Write the model into the folder `path`; each file appears whole or not at all.

    An unfinished write (a full disk, a kill) leaves the file that was there before.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, json.dumps(lm.model.config.to_dict(), indent=2) + "\n")
    write_text(folder / TOKENIZER, lm.tokenizer.to_json())
    if lm.heads is not None:
        write_text(folder / HEADS, json.dumps(lm.heads, indent=1) + "\n")
    tensors = as_stored(lm.model, lm.model.state_dict())
    with whole_file(folder / weights) as temporary:
        safetensors.torch.save_file(tensors, temporary)


def as_stored(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of `weights`, its state, as files hold it: on the CPU, what is learned in bfloat16.

    What is not learned stays as it is: it may be exact (a seed), or drawn with care (vectors of random features).
    """
    kept = {name for name, _ in model.named_buffers()}
    return {
        name: tensor.detach().to("cpu", tensor.dtype if name in kept else torch.bfloat16, copy=True).contiguous()
        for name, tensor in weights.items()
    }


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which takes its place once the block has ended without an error."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read_config(path: Path) -> ModelConfig:
    values = _read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged, expected an object of model settings")
    try:
        return ModelConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing from the model folder") from None
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{path}: damaged, not JSON ({error})") from None


def _read_tokenizer(path: Path, config: ModelConfig) -> Tokenizer:
    try:
        tokenizer = Tokenizer.load(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing from the model folder") from None
    except ValueError as error:
        raise ValueError(f"{path}: damaged, {error}") from None
    if tokenizer.vocabulary != config.vocabulary:
        raise ValueError(
            f"{path}: has {tokenizer.vocabulary} tokens, but the model's configuration says {config.vocabulary}"
        )
    return tokenizer


def _load_weights(model: DecoderLM, path: Path) -> None:
    try:
        tensors = safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing from the model folder") from None
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: damaged, not a safetensors file ({error})") from None
    expected = model.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is not part of the model" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"{path}: does not fit the configuration: {'; '.join(problems[:3])}{more}")
    spoilt = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if spoilt:
        raise ValueError(f"{path}: damaged, {', '.join(spoilt[:3])} holds weights that are not finite numbers")
    model.load_state_dict(tensors)
