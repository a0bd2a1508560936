"""A language model on disk: a folder of config.json, model.safetensors, tokenizer.json, and what was learned about it.

config.json        the fields of `ModelConfig`
model.safetensors  the weights, bfloat16; what a mechanism drew once, as it is
tokenizer.json     of the `tokenizers` library
heads.json         what each attention head does, with scores (may be absent)
README.md          the model card (may be absent)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from .._whole_file import whole_file
from ._shortened import shortened
from .config import ModelConfig
from .language_model import DecoderLM
from .tokenizer import Tokenizer

EMBEDDED = Path(__file__).parent / "embedded"
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
HEADS, CARD = "heads.json", "README.md"


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
    _check_shapes(config, folder / WEIGHTS)
    model = DecoderLM(config)
    _load_weights(model, folder / WEIGHTS)
    heads = read_json(folder / HEADS) if (folder / HEADS).exists() else None
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


def read_json(path: Path) -> Any:
    """What a file of a model folder holds; FileNotFoundError, or ValueError in one line where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing from the model folder") from None
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{path}: damaged, not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{path}: damaged, its values are nested too deeply") from None


def _read_config(path: Path) -> ModelConfig:
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged, expected an object of model settings")
    if "model_type" in values:
        raise ValueError(
            f"{path.parent}: a checkpoint of transformers (model_type {_short(values['model_type'])}), expected a "
            "folder that `saccade train lm` wrote; `saccade look --model`, `saccade verify hf:` and "
            "`transformers.AutoModel.from_pretrained` open it"
        )
    try:
        return ModelConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _short(value: object) -> str:
    return repr(value) if isinstance(value, str) and len(value) < 60 else "unknown"


def _read_tokenizer(path: Path, config: ModelConfig) -> Tokenizer:
    try:
        tokenizer = Tokenizer.load(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing from the model folder") from None
    except ValueError as error:
        raise ValueError(f"{path}: damaged, {shortened(error)}") from None
    if tokenizer.vocabulary != config.vocabulary:
        raise ValueError(
            f"{path}: has {tokenizer.vocabulary} tokens, but the model's configuration says {config.vocabulary}"
        )
    return tokenizer


def _check_shapes(config: ModelConfig, path: Path) -> None:
    """ValueError unless the file has the names and shapes of such a model; nothing large is made to find out."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            given = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing from the model folder") from None
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: damaged, not a safetensors file ({shortened(error)})") from None
    told = f"{path}: does not fit the configuration"
    if config.layers > len(given):  # even modules without memory take time
        raise ValueError(f"{told}: layers is {config.layers}, and it holds {len(given)} tensors")
    try:
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in DecoderLM(config).state_dict().items()}
    except (RuntimeError, OverflowError, TypeError) as error:  # TypeError: a size that no int64 holds
        raise ValueError(f"{told}: {shortened(error)}") from None
    problems = [f"{name} is missing" for name in expected if name not in given]
    problems += [f"{name} is not part of the model" for name in given if name not in expected]
    problems += [
        f"{name} has shape {given[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
        raise ValueError(f"{told}: {shortened('; '.join(problems[:2]))}{more}")


def _load_weights(model: DecoderLM, path: Path) -> None:
    tensors = safetensors.torch.load_file(path)
    spoilt = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if spoilt:
        raise ValueError(
            f"{path}: damaged, {shortened(', '.join(spoilt[:3]))} holds weights that are not finite numbers"
        )
    model.load_state_dict(tensors)
