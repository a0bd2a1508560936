"""GPTQ, AWQ and torchao checkpoints, written number by number from their definitions, and what they stand for.

A weight (F, E) is scale (q - zero), with a scale and a zero for each group of columns of a feature.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the features in a number of 32 bits, the lowest bits first


def packed(whole: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Whole numbers (A, B) in numbers of 32 bits (A, B * bits / 32)."""
    per = 32 // bits
    each = whole.astype(np.uint64).reshape(len(whole), -1, per)[:, :, list(order or range(per))]
    numbers = (each << (np.arange(per, dtype=np.uint64) * bits)).sum(2).astype(np.uint32)
    return np.ascontiguousarray(numbers).view(np.int32)


def quantised(
    rng: np.random.Generator, shape: tuple[int, int], method: dict[str, Any], order: np.ndarray | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The packed tensors of a random weight (F, E), and the weight, float64.

    Args:
        method: `quantization_config`.
        order: (E,): the columns in the order in which their groups were formed.
    """
    if method["quant_method"] == "torchao":
        return of_torchao(rng, shape, **method["quant_type"]["default"])
    (features, width), bits = shape, method["bits"]
    group = width if method["group_size"] == -1 else method["group_size"]
    groups, most = -(-width // group), 2**bits - 1
    q = rng.integers(0, most + 1, shape)
    zeros = rng.integers(0, most + 1, (groups, features))
    if method.get("sym"):
        zeros[:] = 2 ** (bits - 1)
    scales = rng.uniform(0.02, 0.06, (groups, features)).astype(np.float16) / np.float16(2 ** (bits - 4))
    index = np.arange(width) // group
    if order is not None:
        index[order] = np.arange(width) // group
    weight = scales.astype(np.float64).T[:, index] * (q - zeros.T[:, index])
    if method["quant_method"] == "awq":
        tensors = {"qweight": packed(q.T, bits, AWQ_ORDER), "qzeros": packed(zeros, bits, AWQ_ORDER)}
        return tensors | {"scales": scales}, weight
    below = method.get("checkpoint_format", "gptq") == "gptq"  # version 1 holds zeros less one, modulo 2^bits
    tensors = {"qweight": packed(q, bits).T.copy(), "qzeros": packed((zeros - below) & most, bits)}
    return tensors | {"scales": scales, "g_idx": index.astype(np.int32)}, weight


def of_torchao(
    rng: np.random.Generator, shape: tuple[int, int], bits: int, group: int | None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """As `IntxUnpackedToInt8Tensor` with zeros in groups, or `Int8Tensor` without, one group for a row."""
    least, groups = -(2 ** (bits - 1)), 1 if group is None else shape[1] // group
    q = rng.integers(least, -least, shape).astype(np.int8)
    zeros = rng.integers(least, -least, (shape[0], groups)).astype(np.int8) * (group is not None)
    scales = rng.uniform(0.02, 0.06, (shape[0], groups)).astype(np.float16) / np.float16(2 ** (bits - 4))
    index = np.arange(shape[1]) * groups // shape[1]
    weight = scales.astype(np.float64)[:, index] * (q.astype(int) - zeros[:, index])
    parts = {"_weight_qdata": q, "_weight_scale": scales}
    return parts | ({} if group is None else {"_weight_zero_point": zeros}), weight


def write(folder: Path, module: Any, method: dict[str, Any], *, shuffled: bool = False) -> Any:
    """Save a model of transformers with its linear layers, except the output layer, quantised; it has their values
    afterwards, in float32. `shuffled`: groups are formed in another order of columns, as by `desc_act`."""
    rng, tensors, orders = np.random.default_rng(3), {}, {}
    kinds = {}
    module.save_pretrained(folder)
    linear = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        if name not in linear or name.startswith(("lm_head", "embed_out")):
            tensors[name] = tensor
            continue
        width = tensor.shape[1]
        order = orders.setdefault(width, rng.permutation(width)) if shuffled else None
        parts, weight = quantised(rng, tuple(tensor.shape), method, order)
        kinds[name] = "IntxUnpackedToInt8Tensor" if "_weight_zero_point" in parts else "Int8Tensor"
        tensors |= {name.removesuffix("weight") + part: torch.from_numpy(x) for part, x in parts.items()}
        if method.get("sym"):  # as older AutoGPTQ writes, also where there is no bias
            tensors.setdefault(name.removesuffix("weight") + "bias", torch.zeros(tensor.shape[0]))
        module.get_parameter(name).data.copy_(torch.from_numpy(weight))
    described = {name: json.dumps({"_type": kind}) for name, kind in kinds.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"} | described)
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(values))
    return module
