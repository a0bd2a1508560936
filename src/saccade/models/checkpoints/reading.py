"""Weights in a folder: safetensors, one file or several with an index, or PyTorch's own files without code.

Tensors are read piece by piece, so that loading costs little more memory than the weights.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from .._shortened import shortened

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES |= {**_WHOLE, "BOOL": torch.bool}
_MAPPED = 32 * 2**20  # bytes read before a file is opened anew, so that what was read of it leaves the memory


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StoredWeights:
    """The tensors of a folder: known by name and shape, read one after another."""

    def __init__(self, tensors: dict[str, Stored]):
        self.tensors = tensors

    def dtype(self) -> torch.dtype:
        """The floating dtype that most bytes are stored in; float32 where there is none."""
        shares: dict[torch.dtype, int] = {}
        for stored in self.tensors.values():
            if stored.dtype.is_floating_point:
                shares[stored.dtype] = shares.get(stored.dtype, 0) + stored.bytes
        return max(shares, key=shares.__getitem__) if shares else torch.float32

    def read(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor in turn, on the CPU. It is the caller's until the next one is asked for."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, wanted in by_file.items():
            reader = self._safe if file.suffix == ".safetensors" else _pickled
            yield from reader(file, wanted)

    def _safe(self, file: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        waiting = list(reversed(names))
        while waiting:
            mapped = 0
            with safetensors.safe_open(file, "pt") as opened:
                while waiting and mapped < _MAPPED:
                    mapped += self.tensors[waiting[-1]].bytes
                    yield waiting[-1], opened.get_tensor(waiting[-1])
                    waiting.pop()


def find_weights(folder: Path) -> StoredWeights:
    """What the weights' files of a folder hold.

    Raises:
        FileNotFoundError: no weights, or a shard is missing.
        ValueError: a file is damaged, holds code, or differs from its index.
    """
    for single, index in ((SAFE, SAFE_INDEX), (PICKLED, PICKLED_INDEX)):
        if (folder / single).is_file():
            return StoredWeights(_tensors(folder / single))
        if (folder / index).is_file():
            return StoredWeights(_sharded(folder / index))
    raise FileNotFoundError(
        f"{folder}: no weights; expected {SAFE}, {SAFE_INDEX} with its files, {PICKLED}, or {PICKLED_INDEX} with its "
        "files"
    )


def _sharded(index: Path) -> dict[str, Stored]:
    values = read_json(index)
    places = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{index}: damaged, expected weight_map, an object of tensor names and files")
    found: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: names {shortened(repr(name))}, expected a file of its own folder")
        shard = _tensors(index.parent / name)
        twice = sorted(found.keys() & shard.keys())
        if twice:
            raise ValueError(f"{index}: {shortened(twice[0])} is in {name} and in {found[twice[0]].file.name}")
        found |= shard
    differs = sorted(places.keys() ^ found.keys()) or [n for n, f in places.items() if found[n].file.name != f]
    if differs:
        raise ValueError(f"{index}: does not fit its files: {shortened(', '.join(differs[:3]))}")
    return found


def _tensors(file: Path) -> dict[str, Stored]:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing from the model folder")
    if file.suffix != ".safetensors":
        return {name: Stored(file, tuple(tensor.shape), tensor.dtype) for name, tensor in _unpickled(file).items()}
    try:
        with safetensors.safe_open(file, "pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            kinds = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file}: damaged, not a safetensors file ({shortened(error)})") from None
    foreign = {kind for _, kind in kinds.values()} - _DTYPES.keys()
    if foreign:
        raise ValueError(f"{file}: holds {', '.join(sorted(foreign))}, expected one of {', '.join(_DTYPES)}")
    return {name: Stored(file, shape, _DTYPES[kind]) for name, (shape, kind) in kinds.items()}


def _unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a .bin; code in it is refused, never run."""
    try:
        with file.open("rb") as opened:
            zipped = torch.serialization._is_zipfile(opened)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says of the way a foreign file was pickled, the error says
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: missing from the model folder") from None
    except pickle.UnpicklingError as error:  # its message tells how to run the code: not repeated
        named = re.search(r"GLOBAL (\S+)", str(error))
        code = f"code or other objects than tensors ({named[1]:.80}), which are not loaded" if named else ""
        raise ValueError(f"{file}: holds {code or 'no tensors that PyTorch saved'}") from None
    except Exception as error:  # unpickling raises whatever its stream makes it raise
        raise ValueError(f"{file}: damaged ({shortened(error)})") from None
    if not isinstance(values, dict) or not all(isinstance(tensor, Tensor) for tensor in values.values()):
        raise ValueError(f"{file}: expected names and tensors, got {type(values).__name__}")
    return values


def _pickled(file: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    tensors = _unpickled(file)
    for name in names:
        yield name, tensors.pop(name)


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
