"""Linear layers of 8 bits as torchao stores them: `save` of a model that was loaded with `weights="int8"`.

transformers reads such a folder where torchao is installed. An `IntxUnpackedToInt8Tensor` has whole numbers, and a
scale for each block of 128 entries of a row, as `Int8Weight` has.

Shape legend: F features, E width, N blocks of E.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from ....operator._int8 import BLOCK, Int8Weight
from ....operator.nn._rounded import RoundedLinear
from .reading import SAFE
from .settings import CONFIG

_KIND = "IntxUnpackedToInt8Tensor"


class EightBits(NamedTuple):
    """The tensors of a model whose linear layers are saved in 8 bits, by the model's names.

    Attributes:
        tensors: the state of the model, with a `weight` (F, E) for each layer that is held in few bits: int8, or floats
            where its width is no multiple of 128.
        scales: (F, N) of those in int8, by the name of the weight.
        held: whether any layer is held in few bits.
    """

    tensors: dict[str, Tensor]
    scales: dict[str, Tensor]
    held: bool

    def as_floats(self, names: Collection[str], dtype: torch.dtype) -> None:
        """Have the weights of these names saved as floats after all."""
        for name in self.scales.keys() & set(names):
            self.tensors[name] = self.tensors[name] * self.scales.pop(name).repeat_interleave(BLOCK, 1)
            self.tensors[name] = self.tensors[name].to(dtype)


def in_eight_bits(model: nn.Module, left_out: str | None = None) -> EightBits:
    """The tensors to save of a model that holds linear layers in 8 bits.

    Args:
        left_out: the name of a layer that is not saved, such as the copy of an embedding.

    Raises:
        ValueError: names a layer that holds its weight in another form.
    """
    tensors, scales = dict(model.state_dict()), {}
    layers = {name: part for name, part in model.named_modules() if isinstance(part, RoundedLinear)}
    for name, layer in layers.items():
        weight = layer.rounded()
        if not isinstance(weight, Int8Weight):
            raise ValueError(
                f"save: {name} holds its weight in {layer.form}, and checkpoints are saved in floats or int8; load the "
                "model without weights=, or with weights='int8', to save it"
            )
        for buffer in dict(layer.named_buffers()):
            tensors.pop(f"{name}.{buffer}", None)
        if name == left_out:
            tensors.pop(f"{name}.bias", None)
            continue
        own = f"{name}.weight"
        if weight.width % BLOCK:
            tensors[own] = layer.dense()
        else:
            tensors[own], scales[own] = weight.integers(), weight.block_scales()
    return EightBits(tensors, scales, bool(layers))


def as_torchao(
    tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata, by which transformers finds torchao's tensors.

    Args:
        tensors: by published name, those of 8 bits (F, E).
        scales: (F, N) of those.
        dtype: of the model.
    """
    stored: dict[str, Tensor] = {}
    kinds: dict[str, Any] = {}
    for name, tensor in tensors.items():
        scale = scales.get(name)
        if scale is None:
            stored[name], kinds[name] = tensor.contiguous(), {"_type": "Tensor"}
            continue
        base = f"{name.removesuffix('weight')}_weight_"
        zeros = torch.zeros(scale.shape, dtype=torch.int8)
        stored |= {f"{base}qdata": tensor.contiguous(), f"{base}scale": scale.contiguous(), f"{base}zero_point": zeros}
        data = {"target_dtype": _dtype(torch.int8), "block_size": [1, BLOCK], "dtype": _dtype(dtype)}
        kinds[name] = {
            "_type": _KIND,
            "_data": data | {"activation_quantization": None},
            "_tensor_data_names": ["qdata", "scale", "zero_point"],
        }
    named = {name: json.dumps(kind) for name, kind in kinds.items()}
    return stored, {**named, "tensor_names": json.dumps([*tensors]), "format": "pt"}


def write_eight_bits(folder: Path, eight: EightBits, dtype: torch.dtype) -> None:
    """Write the weights of a model of transformers beside its configuration, under the names that its modules have:
    transformers finds torchao's tensors by these, also where its own files have others."""
    places: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in eight.tensors.items():
        places.setdefault((tensor.data_ptr(), tensor.shape) if tensor.numel() else (id(tensor), tensor.shape), name)
    tensors = {name: eight.tensors[name] for name in places.values()}  # tied ones once
    stored, metadata = as_torchao(tensors, eight.scales, dtype)
    safetensors.torch.save_file(stored, folder / SAFE, metadata=metadata)
    if not eight.scales:
        return
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    settings["quantization_config"] = quantization_config()
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def quantization_config() -> dict[str, Any]:
    """The entry of config.json by which transformers reads such a file."""
    options: dict[str, Any] = {
        "weight_dtype": _dtype(torch.int8),
        "granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": BLOCK}},
        "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
        "scale_dtype": None,
        "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
        "intx_choose_qparams_algorithm": {"_type": "IntxChooseQParamsAlgorithm", "_data": "AFFINE"},
    }
    kind = {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": options}
    return {"quant_method": "torchao", "quant_type": {"default": kind}, "modules_to_not_convert": None}


def _dtype(dtype: torch.dtype) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}
