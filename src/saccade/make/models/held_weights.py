"""The argument `weights` of `load`: its forms, the dtypes beside them, and a checkpoint's own quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...operator._backends.native import _kernels
from ...operator.nn._rounded import FORMS, RoundedLinear
from ._shortened import shortened
from .checkpoints.quantised import HELD_TYPES, QuantisedWeights, method_of
from .checkpoints.reading import StoredWeights

STORED = "stored"


def check_weights(weights: str | None, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
    """ValueError if linear layers cannot hold their weights so."""
    if weights is None:
        return
    if weights not in FORMS and weights != STORED:
        known = ", ".join(map(repr, (*FORMS, STORED)))
        raise ValueError(f"weights: expected None or one of {known}, got {weights!r}")
    if _kernels.module is None:
        raise ValueError(f"weights: {weights!r} needs the native kernels: {_kernels.missing}")
    if torch.device(device or "cpu").type != "cpu":
        raise ValueError(f"device: weights={weights!r} runs on the CPU, got {str(device)!r}")
    dtypes = dtypes_beside(weights)
    if dtype is not None and dtype not in dtypes:
        raise ValueError(f"dtype: expected {' or '.join(map(str, dtypes))} beside weights={weights!r}, got {dtype}")


def dtypes_beside(weights: str) -> tuple[torch.dtype, ...]:
    """Dtypes that the rest of a model may have beside linear layers of this form."""
    return (torch.float32,) if weights == "bfloat16" else (torch.float32, torch.bfloat16)


def dtype_beside(weights: str | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the rest of a model that is stored in `dtype`."""
    return dtype if weights is None or dtype in dtypes_beside(weights) else torch.float32


def check_floats(model: torch.nn.Module) -> None:
    """ValueError if linear layers of a `LanguageModel` hold their weights in few bits: its own format has floats."""
    for name, module in model.named_modules():
        if isinstance(module, RoundedLinear):
            raise ValueError(
                f"save: {name} holds its weight in {module.form}, and Saccade's own language models are saved in "
                "floats; load the model without weights= to save it"
            )


def check_stored(model: torch.nn.Module, source: object, dequantised: Sequence[str] = ()) -> None:
    """ValueError if no linear layer holds the numbers of its checkpoint."""
    if not any(isinstance(module, RoundedLinear) for module in model.modules()):
        there = f"it has {shortened(', '.join(dequantised[:2]))}" if dequantised else "it holds floats"
        raise ValueError(
            f"weights: {STORED!r} found no linear layer of 32,768 weights and more in {source} to hold as it is: "
            f"{there}; expected a checkpoint of GPTQ, AWQ or torchao, or a GGUF file with {', '.join(HELD_TYPES)}"
        )


def check_method(settings: Any, where: object) -> None:
    """ValueError for a `quantization_config` of a method that is not read."""
    if method_of(settings) is None:
        raise ValueError(
            f"{where}: quantization_config: the weights are quantised already ({quantisation(settings)}), which is not "
            "supported; expected floats, gptq with 4 or 8 bits (checkpoint_format gptq or gptq_v2), awq with 4 bits "
            "(version gemm), torchao in safetensors, or a GGUF file"
        )


def readable(stored: StoredWeights, settings: Any) -> StoredWeights:
    """The tensors of a folder, those of the method that `quantization_config` names as floats. ValueError as of
    `QuantisedWeights`."""
    method = method_of(settings)
    return stored if method is None else QuantisedWeights(stored, method)


def quantisation(settings: Any) -> str:
    """The method and bits that `quantization_config` of config.json names: "gptq, 4 bits"."""
    if not isinstance(settings, dict):
        return shortened(repr(settings))
    method, bits = settings.get("quant_method"), settings.get("bits")
    if bits is None:
        bits = next((n for n in (4, 8) if settings.get(f"load_in_{n}bit")), None)
    return shortened(f"{method or 'an unknown method'}" + ("" if bits is None else f", {bits} bits"))
