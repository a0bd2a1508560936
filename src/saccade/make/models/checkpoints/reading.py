"""Reads weights of a folder: safetensors (one file, or several with an index) or PyTorch files without code.

Tensors are read one by one, so that loading needs little more memory than the weights.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import safetensors
import torch
from torch import Tensor, nn

from ....operator.nn import MultiHeadAttention
from ....operator.nn._initial import begin_anew
from .._shortened import shortened

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES |= {**_WHOLE, "BOOL": torch.bool}
_WRAPPERS = ("module.", "_orig_mod.")
_MAPPED = 16 * 2**20  # bytes read before a mapped file is reopened, which frees its pages


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in memory, in its stored dtype."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StoredWeights:
    """The tensors of a folder, listed by name and shape, and read on demand."""

    def __init__(self, tensors: dict[str, Stored]):
        self._prefix = _wrappers(tensors)
        self.tensors = {name.removeprefix(self._prefix): stored for name, stored in tensors.items()}

    def dtype(self) -> torch.dtype:
        """The floating dtype with the most bytes; float32 if there is none."""
        shares: dict[torch.dtype, int] = {}
        for stored in self.tensors.values():
            if stored.dtype.is_floating_point:
                shares[stored.dtype] = shares.get(stored.dtype, 0) + stored.bytes
        return max(shares, key=shares.__getitem__) if shares else torch.float32

    def dequantised(self, used: Collection[str]) -> tuple[str, ...]:
        """Which of the tensors that are used as floats are whole numbers in the files."""
        return ()

    def zero_biases(self) -> tuple[str, ...]:
        """Biases of zeros that quantisation may have added to layers without one."""
        return ()

    def read(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Read each tensor to the CPU. It is valid until the next one is read."""
        return ((name, tensor) for name, _, tensor in self._read(names, most=None))

    def read_parts(self, names: list[str]) -> Iterator[tuple[str, int, Tensor]]:
        """Read each tensor, large ones in parts: name, first row, and these rows (or the whole tensor)."""
        return self._read(names, most=_MAPPED)

    def _read(self, names: list[str], most: int | None) -> Iterator[tuple[str, int, Tensor]]:
        by_file: dict[Path, list[_TensorPart]] = {}
        for name in names:
            stored = self.tensors[name]
            by_file.setdefault(stored.file, []).extend(_parts(self._prefix + name, stored, most))
        for file, parts in by_file.items():
            for name, start, tensor in _safe(file, parts) if file.suffix == ".safetensors" else _pickled(file, parts):
                yield name.removeprefix(self._prefix), start, tensor
                del tensor


def _wrappers(names: Collection[str]) -> str:
    """The prefix of all names that `DataParallel` and `torch.compile` add to a wrapped model."""
    prefix = ""
    while more := next((w for w in _WRAPPERS if names and all(n.startswith(prefix + w) for n in names)), None):
        prefix += more
    return prefix


class _TensorPart(NamedTuple):
    name: str
    start: int
    stop: int | None  # None: to the end
    bytes: int


def _parts(name: str, stored: Stored, most: int | None) -> Iterator[_TensorPart]:
    if most is None or stored.bytes <= most:
        yield _TensorPart(name, 0, None, stored.bytes)
        return
    row = stored.bytes // stored.shape[0]
    step = max(1, most // row)
    for start in range(0, stored.shape[0], step):
        yield _TensorPart(name, start, min(start + step, stored.shape[0]), step * row)


def _safe(file: Path, parts: list[_TensorPart]) -> Iterator[tuple[str, int, Tensor]]:
    for group in _groups(parts):
        with safetensors.safe_open(file, "pt") as opened:
            for name, start, stop, _ in group:
                yield name, start, opened.get_tensor(name) if stop is None else opened.get_slice(name)[start:stop]


def _pickled(file: Path, parts: list[_TensorPart]) -> Iterator[tuple[str, int, Tensor]]:
    # Files of PyTorch's old format cannot be mapped: they are read whole, once.
    for group in _groups(parts) if _is_zipped(file) else [parts]:
        tensors = _unpickled(file)
        last = {part.name: n for n, part in enumerate(group)}
        for n, (name, start, stop, _) in enumerate(group):
            tensor = tensors.pop(name) if last[name] == n else tensors[name]
            yield name, start, tensor if stop is None else tensor[start:stop]
            del tensor


def _groups(parts: list[_TensorPart]) -> Iterator[list[_TensorPart]]:
    """Groups of parts to read before the file is reopened: closing it frees the mapped pages."""
    group: list[_TensorPart] = []
    for part in parts:
        group.append(part)
        if sum(member.bytes for member in group) >= _MAPPED:
            yield group
            group = []
    if group:
        yield group


def find_weights(folder: Path) -> StoredWeights:
    """The weights of a folder.

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


def weights_digest(weights: Path) -> str:
    """SHA-256 of the weights' files: of a model folder, or of one file. FileNotFoundError if a file is missing."""
    files = [weights]
    if weights.is_dir():
        for single, index in ((SAFE, SAFE_INDEX), (PICKLED, PICKLED_INDEX)):
            files = [weights / single]
            if not files[0].is_file() and (weights / index).is_file():
                files = [weights / name for name in sorted(set(read_json(weights / index)["weight_map"].values()))]
            if files[0].is_file():
                break
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(_MAPPED):
                digest.update(block)
    return digest.hexdigest()


def _sharded(index: Path) -> dict[str, Stored]:
    values = read_json(index)
    places = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{index}: damaged, expected weight_map, an object of tensor names and files")
    tensors: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: names {shortened(repr(name))}, expected a file of its own folder")
        shard = _tensors(index.parent / name)
        twice = sorted(tensors.keys() & shard.keys())
        if twice:
            raise ValueError(f"{index}: {shortened(twice[0])} is in both {name} and {tensors[twice[0]].file.name}")
        tensors |= shard
    differs = sorted(places.keys() ^ tensors.keys()) or [n for n, f in places.items() if tensors[n].file.name != f]
    if differs:
        raise ValueError(f"{index}: does not fit its files: {shortened(', '.join(differs[:3]))}")
    return tensors


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
    """The tensors of a .bin file. Code in it raises an error and is never run."""
    try:
        zipped = _is_zipped(file)
        if zipped and _is_compressed(file):
            raise ValueError("members are compressed, which torch.save never does")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle format, which errors below describe
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: missing from the model folder") from None
    except pickle.UnpicklingError as error:  # its message explains how to run the code: not repeated
        named = re.search(r"GLOBAL (\S+)", str(error))
        code = f"code or other objects than tensors ({named[1]:.80}), which are not loaded" if named else ""
        raise ValueError(f"{file}: holds {code or 'no tensors that PyTorch saved'}") from None
    except Exception as error:  # unpickling can raise any exception
        raise ValueError(f"{file}: damaged ({shortened(error)})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected a dictionary of tensors, got {type(values).__name__}")
    for name, tensor in values.items():
        if not isinstance(name, str):
            raise ValueError(f"{file}: expected strings as names of tensors, got {shortened(repr(name))}")
        if (kind := _odd(tensor)) is not None:
            raise ValueError(f"{file}: {shortened(name)}: expected a dense tensor of numbers, got {kind}")
    return values


def _odd(tensor: object) -> str | None:
    """The reason why an object is not a readable tensor; None if it is one."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    if tensor.is_nested or tensor.layout != torch.strided:
        return "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
    if tensor.is_meta:
        return "a tensor without values, on the meta device"
    return None if tensor.dtype in _DTYPES.values() else f"a tensor of {tensor.dtype}"


def _is_zipped(file: Path) -> bool:
    with file.open("rb") as opened:
        return bool(torch.serialization._is_zipfile(opened))


def _is_compressed(file: Path) -> bool:
    """Whether the archive is compressed: PyTorch maps the file and would read compressed bytes as numbers."""
    with zipfile.ZipFile(file) as archive:
        return any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist())


def read_json(path: Path) -> Any:
    """Read JSON of a model folder. Raises FileNotFoundError, or a one-line ValueError if the file is damaged."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file, got a folder or a device")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing from the model folder") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # JSON or UTF-8
        raise ValueError(f"{path}: damaged, not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{path}: damaged, its values are nested too deeply") from None


M = TypeVar("M", bound=nn.Module)


def materialised(model: M, dtype: torch.dtype, device: torch.device | str) -> M:
    """The model with uninitialised memory in place of meta tensors; values that are never stored are computed."""
    model = model.to(dtype).to_empty(device=device)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            begin_anew(module.mechanism)  # random features, which no file contains
        elif any(True for _ in module.buffers(recurse=False)):
            begin_anew(module)
    return model
