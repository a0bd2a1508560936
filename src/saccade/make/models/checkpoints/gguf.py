"""The header of a GGUF file, llama.cpp's format: checked before transformers reads the file.

A file is the magic number, a version, the counts of tensors and of metadata entries, the metadata, a table of tensors,
and their numbers from the next multiple of `general.alignment`. Source: the specification at
github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import math
import mmap
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....support._extras import NotInstalled
from .._shortened import shortened

SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
# Type of a tensor: (name, numbers of a block, bytes of a block). Source: ggml.h and the blocks of ggml-common.h.
_TYPES = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8)},
    **{24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34)},
    **{9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144)},
    **{13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66)},
    **{17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18)},
    **{21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56)},
    **{34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17)},
}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_UNUSED = ("tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class GgufHeader:
    """The metadata and the tensors of a GGUF file, without their numbers.

    Attributes:
        metadata: entries by name; of arrays only the length.
        types: the type of each tensor by name, such as "Q4_K".
        counts: the number of elements of each tensor.
        places: of each tensor where it begins in the file, and its shape.
    """

    metadata: dict[str, Any]
    types: dict[str, str]
    counts: tuple[int, ...]
    places: dict[str, tuple[int, tuple[int, ...]]]

    @property
    def quantised(self) -> tuple[str, ...]:
        """Tensors that are stored in fewer bits than floats, each with its type."""
        return tuple(f"{name} ({kind})" for name, kind in self.types.items() if kind not in _FLOATS)

    @property
    def dtype(self) -> torch.dtype:
        """The half-precision dtype among the tensors' dtypes (norms are stored in float32), else float32."""
        return next((_FLOATS[kind] for kind in ("BF16", "F16") if kind in self.types.values()), torch.float32)

    @property
    def unread(self) -> tuple[str, ...]:
        """Tensors that transformers does not read: factors of rotary frequencies, which lengthen the context."""
        return tuple(name for name in _ROTARY if name in self.types)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Entries about the architecture that transformers does not read, such as a scaling of rotary frequencies."""
        from transformers import modeling_gguf_pytorch_utils as legacy

        name = str(self.metadata.get("general.architecture"))
        read: Any = legacy.GGUF_TO_TRANSFORMERS_MAPPING["config"]
        known = read.get(_SPELLED.get(name, name))
        entries = {key.removeprefix(f"{name}."): key for key in self.metadata if key.startswith(f"{name}.")}
        if known is None or name in _own_architectures():
            return ()
        return tuple(f"{key}={self.metadata[key]}" for entry, key in entries.items() if entry not in known)


def read_header(path: Path) -> GgufHeader:
    """The header of a GGUF file.

    Raises:
        ValueError: not a GGUF file, of another version or byte order, truncated, one part of several, or of an
            architecture that transformers does not read.
    """
    state = path.stat()
    return _read(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=1)  # a vocabulary of 256,000 tokens takes a third of a second
def _read(path: Path, size: int, changed: int) -> GgufHeader:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file, or truncated: it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(_GgufReader(data, path))
            except (struct.error, UnicodeDecodeError, OverflowError, MemoryError):
                raise ValueError(f"{path}: truncated or damaged: its header does not end") from None


class _GgufReader:
    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.place = data, path, 4

    def number(self, form: str) -> Any:
        value = struct.unpack_from(form, self.data, self.place)[0]
        self.place += struct.calcsize(form)
        return value

    def text(self) -> str:
        length = self.number("<Q")
        self.skip(length)
        return self.data[self.place - length : self.place].decode("utf-8")

    def skip(self, length: int) -> None:
        if length > len(self.data) - self.place:
            raise struct.error
        self.place += length

    def value(self, kind: int) -> Any:
        """A value of the metadata; the length of an array."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            if kind not in _NUMBERS:
                raise ValueError(f"{self.path}: damaged: metadata of the unknown type {kind}")
            return self.number(_NUMBERS[kind])
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _NUMBERS:
            self.skip(count * struct.calcsize(_NUMBERS[inner]))
        else:
            for _ in range(count):
                self.value(inner)
        return count


def _header(reader: _GgufReader) -> GgufHeader:
    path, version = reader.path, reader.number("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        what = "written for big-endian machines" if swapped else f"GGUF of version {version}"
        raise ValueError(f"{path}: {what}; expected version 2 or 3, little-endian")
    tensors, entries = reader.number("<Q"), reader.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        name = reader.text()
        metadata[name] = reader.value(reader.number("<I"))
    parts = metadata.get("split.count", 1)
    if parts > 1:
        part = metadata.get("split.no", 0) + 1
        raise ValueError(
            f"{path}: part {part} of {parts}; join the parts with llama.cpp first: llama-gguf-split --merge FIRST OUT"
        )
    types: dict[str, str] = {}
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    counts, end = [], 0
    for _ in range(tensors):
        name = reader.text()
        shape = [reader.number("<Q") for _ in range(reader.number("<I"))]
        kind, offset = reader.number("<I"), reader.number("<Q")
        if kind not in _TYPES:
            raise ValueError(f"{path}: {shortened(name)}: tensor of the unknown type {kind}")
        types[name], block, size = _TYPES[kind]
        counts.append(math.prod(shape))
        places[name] = offset, tuple(reversed(shape))
        end = max(end, offset + counts[-1] // block * size)
    alignment = max(int(metadata.get("general.alignment", 32)), 1)
    data = -(-reader.place // alignment) * alignment
    needed = data + end
    if needed > len(reader.data):
        raise ValueError(f"{path}: truncated: {len(reader.data):,} bytes of {needed:,}")
    placed = {name: (data + offset, shape) for name, (offset, shape) in places.items()}
    header = GgufHeader(metadata, types, tuple(counts), placed)
    _check_architecture(header, path)
    return header


def processor_of(header: GgufHeader, path: Path) -> Any:
    """The part of transformers that rearranges tensors of files read with the package gguf; otherwise None."""
    from transformers import modeling_gguf_pytorch_utils as legacy

    name = header.metadata["general.architecture"]
    if name in _own_architectures():
        return None
    kind: Any = legacy.TENSOR_PROCESSORS.get(name, legacy.TensorProcessor)
    return kind(config=legacy.load_gguf_checkpoint(str(path))["config"])


def model_names(module: nn.Module, header: GgufHeader, processor: Any) -> dict[str, str]:
    """The tensors of a file that become one of a module each, by their names there."""
    if processor is not None:
        from transformers import modeling_gguf_pytorch_utils as legacy

        with _named_once():
            found = legacy.get_gguf_hf_weights_map(module, processor)
        return {own: source for source, own in found.items() if source in header.types}
    from transformers.core_model_loading import WeightConverter

    mapping: Any = importlib.import_module("transformers.integrations.gguf.utils").get_gguf_conversion_mapping
    names = {}
    for source in header.types:
        own, converted = source, False
        for entry in mapping(header.metadata["general.architecture"], module.config):
            own, pattern = entry.rename_source_key(own)
            converted |= isinstance(entry, WeightConverter) and pattern is not None
        if not converted:
            names[own] = source
    return names


def row_order(linear: nn.Module, source: str, shape: tuple[int, ...], processor: Any) -> Tensor | None:
    """The row of a file's matrix (F, E) that each row of a linear layer's weight is. ValueError: it is none."""
    rows = torch.arange(shape[0], dtype=torch.int32)[:, None].expand(shape).numpy()
    if processor is None:
        return None
    try:
        moved = processor.process(rows, source, tensor_key_mapping={}, parsed_parameters={}).weights
    except Exception:  # of a rearrangement that needs floats
        moved = None
    is_conv = not isinstance(linear, nn.Linear)  # transformers' Conv1D, which holds the transposed matrix
    if moved is rows and not is_conv:
        return None
    if moved is not None:
        order = torch.from_numpy((moved.T if is_conv else moved).copy())
        if order.shape == shape and bool((order == order[:, :1]).all()):
            order = order[:, 0].long()
            if torch.equal(order.sort().values, torch.arange(shape[0])):
                return order
    raise ValueError(f"{source}: transformers does more than to reorder its rows")


_SPELLED = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2"}


def _own_architectures() -> Collection[str]:
    """Architectures that transformers reads itself, without the package gguf."""
    own: Collection[str] = ()
    with suppress(ImportError):  # a version before its own reader
        own = importlib.import_module("transformers.integrations.gguf").GGUF_CONFIG_ARCHS
    return own


def _check_architecture(header: GgufHeader, path: Path) -> None:
    """ValueError unless transformers reads the architecture; NotInstalled if it needs the package gguf for it."""
    from transformers import modeling_gguf_pytorch_utils as legacy

    name = str(header.metadata.get("general.architecture"))
    own = _own_architectures()
    if name in own:
        return
    known = set(legacy.GGUF_SUPPORTED_ARCHITECTURES)
    if _SPELLED.get(name, name) not in known and not name.startswith("t5"):
        raise ValueError(
            f"{path}: general.architecture: transformers reads no GGUF file of {shortened(repr(name))}; expected one "
            f"of {', '.join(sorted({*known, *own}))}"
        )
    if importlib.util.find_spec("gguf") is None:
        raise NotInstalled(f"{path}: a GGUF file of {name}", "gguf", "gguf")


def read_once(load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """transformers' `load_gguf_checkpoint`, which reads the metadata of a file quickly, and once for several calls.

    The package gguf makes two arrays of each token, and a table of names for each module. transformers reads all tokens
    for the configuration, for the class of the tokenizer and for the weights, and uses their number.
    """
    last: dict[str, Any] = {}  # one file

    def loaded(
        path: str, return_tensors: bool = False, left_out: Collection[str] = (), **options: Any
    ) -> dict[str, Any]:
        gguf: Any = importlib.import_module("gguf")
        if path not in last:
            last.clear()
            last[path] = _quick(gguf.GGUFReader)(path), {}
        reader, read = last[path]
        kept = copy.copy(reader)
        unused = "tokenizer." if return_tensors else _UNUSED
        kept.fields = {name: field for name, field in reader.fields.items() if not name.startswith(unused)}
        kept.tensors = [tensor for tensor in reader.tensors if tensor.name not in left_out]
        whole, gguf.GGUFReader = gguf.GGUFReader, lambda _: kept
        try:
            with _named_once():
                if return_tensors:
                    return load(path, return_tensors=True, **options)
                if not read:
                    read.update(load(path))
                return {part: {name: copy.copy(value) for name, value in of.items()} for part, of in read.items()}
        finally:
            gguf.GGUFReader = whole

    return loaded


@contextmanager
def _named_once() -> Iterator[None]:
    gguf: Any = importlib.import_module("gguf")
    whole, gguf.get_tensor_name_map = gguf.get_tensor_name_map, functools.cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = whole


def _quick(base: type[Any]) -> type[Any]:
    """`gguf.GGUFReader` with the values of an array as they are, read in one pass."""
    kinds: Any = importlib.import_module("gguf").GGUFValueType

    class Quick(base):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != _ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            view, end = memoryview(self.data), orig_offs + 12
            kind, count = struct.unpack_from("<IQ", view, orig_offs)
            values: list[Any] = []
            if kind in _NUMBERS:
                form = _NUMBERS[kind][1]
                values = [(value,) for value in struct.unpack_from(f"<{count}{form}", view, end)]
                end += struct.calcsize(f"<{count}{form}")
            elif kind == _STRING:
                for _ in range(count):
                    length = int.from_bytes(view[end : end + 8], "little")
                    end += 8 + length
                    values.append(bytes(view[end - length : end]))
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [kinds.ARRAY, kinds(kind)]
            return end - orig_offs, values, list(range(count)), types[: 1 + bool(count)]

    return Quick
