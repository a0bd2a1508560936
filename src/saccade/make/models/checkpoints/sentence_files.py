"""Sentence vectors: the files that sentence-transformers stores besides a model.

modules.json lists the steps: the model, pooling, optional dense layers, normalisation. 1_Pooling/config.json has the
pooling, sentence_bert_config.json (or sentence_roberta_config.json etc.) the maximum number of tokens. 2_Normalize
scales vectors to length 1, 2_Dense is a linear layer. config_sentence_transformers.json has the default prompt. Reimers
and Gurevych, "Sentence-BERT" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._shortened import shortened
from .reading import find_weights, read_json

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
# Names for any model; the first existing file is used.
TRANSFORMERS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# In the order in which several poolings are concatenated.
POOLINGS = {
    "first": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean-sqrt": "mean_sqrt_len_tokens",
    "weighted-mean": "weightedmean_tokens",
    "last": "lasttoken",
}
_WRITTEN = {"cls": "first", "mean_sqrt_len_tokens": "mean-sqrt", "weightedmean": "weighted-mean", "lasttoken": "last"}
DENSE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_ACTIVATIONS = {"Identity": None, "Tanh": torch.tanh, "ReLU": torch.relu, "GELU": torch.nn.functional.gelu}


@dataclass(frozen=True)
class Dense:
    """`activation(W x + b)`."""

    weight: Tensor
    bias: Tensor | None
    activation: str


@dataclass(frozen=True)
class SentenceFiles:
    """Settings of a folder's sentence vectors.

    Attributes:
        pooling: names in `POOLINGS`, whose vectors are concatenated.
        dense: layers after pooling.
        normalize: whether vectors have length 1.
        longest: maximum number of tokens of a text, special ones included; None is the model's own limit.
        lower: whether to lowercase texts, including the prompt.
        prompt: put before every text.
    """

    pooling: tuple[str, ...] = ("mean",)
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    longest: int | None = None
    lower: bool = False
    prompt: str = ""


def read_sentence_files(folder: Path) -> SentenceFiles:
    """The settings of a folder; without these files, the mean over all tokens.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, or has an unsupported step.
    """
    if not (folder / MODULES).is_file():
        return SentenceFiles()
    pooling: tuple[str, ...] = ("mean",)
    dense: list[Dense] = []
    normalize = False
    for number, step in enumerate(_steps(folder / MODULES)):
        kind, part = step["type"].rpartition(".")[2], folder / step["path"]
        if kind == "Transformer" and not number:
            continue
        if kind == "Pooling" and number and not dense:
            pooling = _pooling(part / "config.json")
        elif kind == "Dense" and number and not normalize:
            dense.append(_dense(part))
        elif kind == "Normalize" and number and not normalize:
            normalize = True
        else:
            raise ValueError(
                f"{folder / MODULES}: step {number} is {shortened(repr(step['type']))}; expected Transformer, Pooling, "
                "then Dense layers, then Normalize: other steps are not supported"
            )
    path = next((folder / name for name in TRANSFORMERS if (folder / name).is_file()), folder / TRANSFORMERS[0])
    values = _settings(path)
    longest = values.get("max_seq_length")
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int) or longest < 1):
        raise ValueError(f"{path}: max_seq_length: expected an int above 0, got {longest!r:.40}")
    lower = bool(values.get("do_lower_case", False))
    return SentenceFiles(pooling, tuple(dense), normalize, longest, lower, _prompt(folder / PROMPTS))


def sentence_file_names(folder: Path) -> list[str]:
    """The files that `read_sentence_files` reads, relative to the folder; [] if modules.json is damaged."""
    try:
        steps = _steps(folder / MODULES)
    except (FileNotFoundError, ValueError):
        steps = []
    of_steps = [f"{step['path']}/{name}" for step in steps if step["path"] for name in ("config.json", *DENSE_WEIGHTS)]
    return [name for name in (MODULES, PROMPTS, *TRANSFORMERS, *of_steps) if (folder / name).is_file()]


def _settings(path: Path) -> dict[str, Any]:
    values = read_json(path) if path.is_file() else {}
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged, expected an object")
    return values


def _steps(path: Path) -> list[dict[str, str]]:
    steps = read_json(path)
    fields = ("type", "path")
    if not isinstance(steps, list) or not all(
        isinstance(step, dict) and all(isinstance(step.get(name), str) for name in fields) for step in steps
    ):
        raise ValueError(f"{path}: damaged, expected a list of steps with type and path")
    for step in steps:
        if Path(step["path"]).is_absolute() or ".." in Path(step["path"]).parts:
            raise ValueError(f"{path}: names {shortened(repr(step['path']))}, expected a folder inside the model's")
    return steps


def _pooling(path: Path) -> tuple[str, ...]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged, expected an object")
    if values.get("include_prompt") is False:
        raise ValueError(f"{path}: include_prompt: expected true, got false: leaving out the prompt is not supported")
    written = values.get("pooling_mode")
    if isinstance(written, str):
        names = [_WRITTEN.get(written, written)]
    else:
        names = [name for name, published in POOLINGS.items() if values.get(f"pooling_mode_{published}") is True]
    if not names or not set(names) <= POOLINGS.keys():
        raise ValueError(f"{path}: expected a pooling_mode, one of {', '.join(POOLINGS)}, got {shortened(written)}")
    return tuple(names)


def _dense(folder: Path) -> Dense:
    values = read_json(folder / "config.json")
    values = values if isinstance(values, dict) else {}
    activation = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{folder / 'config.json'}: activation_function: expected one of {', '.join(_ACTIVATIONS)}, got "
            f"{shortened(repr(activation))}"
        )
    stored = find_weights(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.tensors.items()}
    expected: dict[str, tuple[object, ...]] = {"linear.weight": (values.get("out_features"), values.get("in_features"))}
    if values.get("bias", True):
        expected["linear.bias"] = (values.get("out_features"),)
    if shapes != expected:
        raise ValueError(f"{folder}: expected weights of shapes {expected} by its config.json, got {shapes}")
    tensors = {name: tensor.to(torch.float32, copy=True) for name, tensor in stored.read(list(shapes))}
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), activation)


def apply_dense(dense: Dense, vectors: Tensor) -> Tensor:
    """Apply a dense layer: (N, E) to (N, F)."""
    bias = None if dense.bias is None else dense.bias.to(vectors)
    made = torch.nn.functional.linear(vectors, dense.weight.to(vectors), bias)
    activation = _ACTIVATIONS[dense.activation]
    return made if activation is None else activation(made)


def _prompt(path: Path) -> str:
    values = _settings(path)
    name, prompts = values.get("default_prompt_name"), values.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(prompts, dict) or not isinstance(name, str) or not isinstance(prompts.get(name), str):
        raise ValueError(f"{path}: default_prompt_name: {shortened(repr(name))} is not among its prompts")
    return prompts[name]
