"""Weights that a checkpoint holds in few bits, as whole numbers with scales: GPTQ, AWQ, torchao and the blocks of GGUF.

Sources: `quant_linear` of AutoGPTQ, `WQLinear_GEMM` of AutoAWQ, `flatten_tensor_state_dict` of torchao, and the blocks
of ggml-common.h.

Shape legend: F features, E width, N groups of E with a scale each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor

from ....operator._groups import GroupedWeight, GroupForm, empty_groups
from ....operator._int8 import BLOCK, Int8Weight, int8_of
from .._shortened import shortened
from .reading import Stored, StoredWeights

_AT_ONCE = 2**23  # whole numbers that are unpacked at once
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the features 0 to 7 lie in a number of 32 bits
_HELD = torch.float16, torch.bfloat16
_PACKED = {"q": "qweight", "zeros": "qzeros", "scales": "scales", "index": "g_idx"}
_TORCHAO = {"q": "_weight_qdata", "zeros": "_weight_zero_point", "scales": "_weight_scale"}


class Method(NamedTuple):
    """How tensors are packed, by `quantization_config` of config.json.

    Attributes:
        name: "gptq", "awq" or "torchao".
        bits: of a weight; 0: each tensor says so.
        group: entries of a row with one scale; -1: all.
        plus: what is added to stored zeros.
    """

    name: str
    bits: int = 0
    group: int = -1
    plus: int = 0

    @property
    def form(self) -> str:
        """Name of the form in `explain`."""
        return f"{self.name}, {self.bits} bits" if self.bits else self.name


def method_of(settings: Any) -> Method | None:
    """The packing that `quantization_config` names; None: another method, or a variant that is not read."""
    if not isinstance(settings, dict):
        return None
    if settings.get("quant_method") == "torchao":
        return Method("torchao")
    bits, group = settings.get("bits", settings.get("w_bit")), settings.get("group_size", settings.get("q_group_size"))
    if not isinstance(bits, int) or not isinstance(group, int):
        return None
    if settings.get("quant_method") == "gptq" and bits in (4, 8) and not settings.get("is_marlin_format"):
        versions = {"gptq": 1, "gptq_v2": 0}
        plus = versions.get(settings.get("checkpoint_format") or "gptq")
        return None if plus is None else Method("gptq", bits, group, plus)
    if settings.get("quant_method") == "awq" and bits == 4 and str(settings.get("version", "gemm")).lower() == "gemm":
        return Method("awq", bits, group)
    return None


class QuantisedWeights(StoredWeights):
    """The tensors of a GPTQ, AWQ or torchao checkpoint, with a float `weight` in place of the packed ones of a layer.

    Raises:
        ValueError: packed tensors are missing, of a type that is not read, or their shapes do not fit together.
    """

    def __init__(self, stored: StoredWeights, method: Method):
        self._stored, self.method = stored, method
        self._unheld: dict[str, str] = {}
        self._names = _TORCHAO if method.name == "torchao" else _PACKED
        self.tensors = dict(stored.tensors)
        self.packed: dict[str, tuple[int, int]] = {}
        types: dict[Path, dict[str, str]] = {}
        for packed in [name for name in stored.tensors if name.endswith(f".{self._names['q']}")]:
            base = packed.removesuffix(self._names["q"])
            parts = {
                part: self.tensors.pop(base + name) for part, name in self._names.items() if base + name in self.tensors
            }
            for part in ("scales",) if method.name == "torchao" else ("scales", "zeros"):
                if part not in parts:
                    name = base + self._names[part]
                    raise ValueError(f"{parts['q'].file}: {name}: missing; {method.name} needs it beside {packed}")
            name, torchao = f"{base}weight", method.name == "torchao"
            shape = _torchao_shape(name, parts, types) if torchao else self._shape(base, parts)
            self.packed[name] = shape
            self.tensors[name] = Stored(parts["q"].file, shape, parts["scales"].dtype)
        if not self.packed:
            where = next(iter(stored.tensors.values())).file.parent if stored.tensors else "the checkpoint"
            raise ValueError(f"{where}: quantization_config names {method.form}, and no weight has {self._names['q']}")

    def _shape(self, base: str, parts: Mapping[str, Stored]) -> tuple[int, int]:
        """(F, E) of a layer, if its tensors fit together."""
        method, per = self.method, 32 // self.method.bits
        packed = parts["q"].shape
        for part in ("q", "zeros"):
            stored = parts[part]
            if stored.dtype != torch.int32 or len(stored.shape) != 2 or 0 in stored.shape:
                raise ValueError(
                    f"{stored.file}: {base}{self._names[part]}: is {stored.dtype} of the shape {stored.shape}, "
                    "expected int32 of two axes"
                )
        features, width = (packed[1], packed[0] * per) if method.name == "gptq" else (packed[1] * per, packed[0])
        group = width if method.group < 1 else method.group
        groups = -(-width // group)
        wanted = {"zeros": (groups, features // per), "scales": (groups, features), "index": (width,)}
        for part, shape in wanted.items():
            found = parts.get(part)
            if found is not None and found.shape != shape:
                raise ValueError(
                    f"{found.file}: {base}{self._names[part]}: has the shape {found.shape}; {method.form} in groups of "
                    f"{group} and qweight {packed} give {shape}"
                )
        return features, width

    def dequantised(self, used: Collection[str]) -> tuple[str, ...]:
        """Which of the tensors that are used as floats are whole numbers in the files, each with its form."""
        reasons = {name: f", not held: {reason}" for name, reason in self._unheld.items()}
        return tuple(f"{name} ({self.method.form}{reasons.get(name, '')})" for name in self.packed if name in used)

    def leave(self, name: str, reason: str) -> None:
        """Note why a layer is not held."""
        self._unheld.setdefault(name, reason)

    def zero_biases(self) -> tuple[str, ...]:
        """Biases of zeros that quantisation may have added to layers without one, as older AutoGPTQ does."""
        biases = [own for name in self.packed if (own := f"{name.removesuffix('weight')}bias") in self.tensors]
        return tuple(name for name, bias in self._stored.read(biases) if not bool(bias.any()))

    def held(self, name: str) -> GroupedWeight | Int8Weight | None:
        """The weight of a layer as products take it, if they can."""
        numbers = self.whole_numbers(name)
        held = numbers.int8() or numbers.held()
        if isinstance(held, str):
            self.leave(name, held)
            return None
        return held

    def _read(self, names: list[str], most: int | None) -> Iterator[tuple[str, int, Tensor]]:
        yield from self._stored._read([name for name in names if name not in self.packed], most)
        yield from ((name, 0, self.whole_numbers(name).dense()) for name in names if name in self.packed)

    def whole_numbers(self, name: str) -> WholeNumbers:
        """The weight of a layer."""
        base, (features, width) = name.removesuffix("weight"), self.packed[name]
        files = {base + own: part for part, own in self._names.items() if base + own in self._stored.tensors}
        read = {files[own]: x.clone() for own, x in self._stored.read(list(files))}
        if not bool(read["scales"].isfinite().all()):
            raise ValueError(f"{self.tensors[name].file}: {base}{self._names['scales']}: holds NaN or infinities")
        if self.method.name == "torchao":
            return _of_torchao(read)
        q, zeros = (_parts_of(read[part], self.method.bits) for part in ("q", "zeros"))
        if self.method.name == "gptq":
            q = q.transpose(0, 1).reshape(features, width)  # (E / 8, F, 8)
        else:
            q = q[..., list(_AWQ_ORDER)].flatten(1).t().contiguous()
            zeros = zeros[..., list(_AWQ_ORDER)]
        zeros = (zeros.flatten(1).t().int() + self.method.plus) & (2**self.method.bits - 1)
        group = width if self.method.group < 1 else self.method.group
        index = read.get("index", torch.arange(width) // group).long()
        if bool(((index < 0) | (index >= zeros.shape[1])).any()):
            raise ValueError(f"{self.tensors[name].file}: {base}g_idx: names groups beyond {zeros.shape[1]}")
        return WholeNumbers(q, read["scales"].t(), zeros, index, group, self.method.bits)


def _torchao_shape(name: str, parts: Mapping[str, Stored], types: dict[Path, dict[str, str]]) -> tuple[int, int]:
    """(F, E) of a tensor of torchao whose numbers are plain bytes. `types`: what files say about their tensors."""
    q, scales, zeros = parts["q"], parts["scales"], parts.get("zeros")
    if q.file not in types:
        with safetensors.safe_open(q.file, "pt") as opened:
            types[q.file] = opened.metadata() or {}
    kind = str(json.loads(types[q.file].get(name, "{}")).get("_type"))
    whole = q.dtype == torch.int8 and (zeros is None or zeros.dtype == torch.int8)
    if kind not in ("Int8Tensor", "IntxUnpackedToInt8Tensor") or not whole:
        raise ValueError(
            f"{q.file}: {name}: is torchao's {shortened(kind)}, which only torchao reads; expected Int8Tensor or "
            "IntxUnpackedToInt8Tensor with whole zero points"
        )
    count = math.prod(scales.shape)
    fit = len(q.shape) == 2 and count > 0 and count % q.shape[0] == 0 and q.shape[1] % (count // q.shape[0]) == 0
    if not fit or (zeros is not None and math.prod(zeros.shape) != count):
        raise ValueError(f"{q.file}: {name}: scales {scales.shape} do not fit whole numbers {q.shape}")
    return q.shape[0], q.shape[1]


def _of_torchao(read: Mapping[str, Tensor]) -> WholeNumbers:
    q, scales = read["q"], read["scales"].flatten().view(len(read["q"]), -1)
    bits = 4 if int(q.min()) >= -8 and int(q.max()) <= 7 else 8
    middle = 2 ** (bits - 1)
    zeros = read["zeros"].flatten().view(scales.shape).int() if "zeros" in read else torch.zeros(scales.shape).int()
    group = q.shape[1] // scales.shape[1]
    whole = (q.to(torch.int16) + middle).to(torch.uint8)
    return WholeNumbers(whole, scales, zeros + middle, torch.arange(q.shape[1]) // group, group, bits)


def _parts_of(packed: Tensor, bits: int) -> Tensor:
    """(A, B) of 32 bits as whole numbers (A, B, 8), the lowest first; of 8 bits (A, B, 4)."""
    each = packed.contiguous().view(torch.uint8).unflatten(1, (-1, 4))
    return each if bits == 8 else torch.stack((each & 15, each >> 4), -1).flatten(2)


class WholeNumbers(NamedTuple):
    """A weight scale (q - zero): q (F, E), scales and zeros (F, N), the group of each column (E,)."""

    q: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    group: int
    bits: int

    def dense(self) -> Tensor:
        """W (F, E), float32."""
        scales, zeros = self.scales.float(), self.zeros.float()
        return (self.q - zeros[:, self.groups]).mul_(scales[:, self.groups])

    def int8(self) -> Int8Weight | None:
        """The weight as `weights="int8"` holds it, and as such models are saved."""
        q, middle = self.q.to(torch.int16) - 128, bool((self.zeros == 128).all())
        if self.bits != 8 or self.group != BLOCK or not middle or int(q.min()) < -127:
            return None
        return int8_of(q, self.scales)

    def held(self) -> GroupedWeight | str:
        """The weight as products take it, or why they cannot."""
        features, width = self.q.shape
        span = self.group // 32
        if self.group >= width:
            span = 1 << (-(-width // 32) - 1).bit_length()
        elif self.group % 32 or span & (span - 1):
            return f"groups of {self.group}"
        if self.scales.dtype not in _HELD:
            return f"scales of {self.scales.dtype}"
        order = self.groups.argsort(stable=True)
        if not torch.equal(self.groups[order], torch.arange(width) // self.group):
            return "groups of different sizes"
        sorted_already = torch.equal(order, torch.arange(width))
        alike = bool((self.zeros == self.zeros[0, 0]).all())
        middle = 2 ** (self.bits - 1)
        each = (self.zeros - middle).to(torch.int8)
        if (alike and not 0 <= int(self.zeros[0, 0]) <= 255) or (
            not alike and not torch.equal(each.int() + middle, self.zeros)
        ):
            return "zeros beyond 8 bits"
        offset = int(self.zeros[0, 0]) if alike else middle
        form = GroupForm(self.bits, 32, span, offset, self.scales.dtype, zeros=not alike)
        weight = empty_groups(features, width, form, None if sorted_already else order)
        q = self.q if sorted_already else self.q[:, order]
        each = each.repeat_interleave(span, 1)[:, : -(-width // 32)]
        weight.put(0, q, self.scales.contiguous(), **({} if alike else {"zeros": each}))
        return weight


class _Block(NamedTuple):
    """A type of GGUF: its form, numbers and bytes of a block, and how blocks (F, B, bytes) are taken apart."""

    form: GroupForm
    numbers: int
    bytes: int
    parts: Callable[[Tensor], tuple[Tensor, ...]]


def _half(blocks: Tensor, first: int) -> Tensor:
    return blocks[..., first : first + 2].contiguous().view(torch.float16)


def _low_high(packed: Tensor) -> Tensor:
    """Bytes (..., n) as (..., 2 n): the low halves, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth(blocks: Tensor, first: int) -> Tensor:
    """32 bits, one for each number of a block, each as 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (blocks[..., first : first + 4, None] >> shifts & 1).flatten(-2) << 4


def _q4_k(blocks: Tensor, high: Tensor | int = 0, first: int = 16) -> tuple[Tensor, ...]:
    low, middle, both = blocks[..., 4:16].split(4, -1)
    steps = torch.cat((low & 63, both & 15 | low >> 2 & 48), -1)
    zeros = torch.cat((middle & 63, both >> 4 | middle >> 2 & 48), -1)
    q = _low_high(blocks[..., first : first + 128].unflatten(-1, (4, 32))).flatten(-2) | high
    return q, _half(blocks, 0), steps, _half(blocks, 2), zeros


def _q5_k(blocks: Tensor) -> tuple[Tensor, ...]:
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    return _q4_k(blocks, (blocks[..., None, 16:48] >> shifts & 1).flatten(-2) << 4, 48)


def _q6_k(blocks: Tensor) -> tuple[Tensor, ...]:
    low = _low_high(blocks[..., :128].unflatten(-1, (2, 64)))  # (..., 2, 128)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3).flatten(-2) << 4
    return (low | high).flatten(-2), _half(blocks, 208), blocks[..., 192:208]


_K = GroupForm(4, span=8, steps=True, minima=True, zeros=True)
# q and the scales of blocks, then what the form has of steps, minima and zeros.
_BLOCKS = {
    "Q4_0": _Block(GroupForm(4, offset=8), 32, 18, lambda b: (_low_high(b[..., 2:]), _half(b, 0))),
    "Q4_1": _Block(
        GroupForm(4, minima=True), 32, 20, lambda b: (_low_high(b[..., 4:]), _half(b, 0), _half(b, 2).neg())
    ),
    "Q5_0": _Block(GroupForm(offset=16), 32, 22, lambda b: (_low_high(b[..., 6:]) | _fifth(b, 2), _half(b, 0))),
    "Q5_1": _Block(
        GroupForm(minima=True), 32, 24, lambda b: (_low_high(b[..., 8:]) | _fifth(b, 4), _half(b, 0), _half(b, 2).neg())
    ),
    "Q8_0": _Block(GroupForm(offset=128), 32, 34, lambda b: (b[..., 2:] ^ 128, _half(b, 0))),
    "Q4_K": _Block(_K, 256, 144, _q4_k),
    "Q5_K": _Block(_K._replace(bits=8), 256, 176, _q5_k),
    "Q6_K": _Block(GroupForm(group=16, span=16, offset=32, steps=True), 256, 210, _q6_k),
}
HELD_TYPES = tuple(_BLOCKS)


def gguf_weight(file: Path, start: int, kind: str, features: int, width: int, rows: Tensor | None) -> GroupedWeight:
    """A weight W (F, E) of a GGUF file, with the file's numbers.

    Args:
        start: where its bytes begin.
        kind: one of `HELD_TYPES`.
        rows: (F,): the row of the file that each of W's is; None: the same.

    Raises:
        ValueError: scales that are not finite.
    """
    block = _BLOCKS[kind]
    weight = empty_groups(features, width, block.form)
    names = [name for name in ("steps", "minima", "zeros") if getattr(block.form, name)]
    size, at_once = width // block.numbers * block.bytes, max(_AT_ONCE // width // 64, 1) * 64
    with file.open("rb") as opened:

        def read(first: int, count: int) -> Tensor:
            opened.seek(start + first * size)
            return torch.frombuffer(bytearray(opened.read(count * size)), dtype=torch.uint8)

        whole = None if rows is None else read(0, features).view(features, -1)
        for first in range(0, features, at_once):
            count = min(at_once, features - first)
            data = read(first, count) if whole is None or rows is None else whole[rows[first : first + count]]
            q, scales, *more = block.parts(data.view(count, -1, block.bytes))
            parts = dict(zip(names, more, strict=True))
            for number in (scales, *(part for part in more if part.is_floating_point())):
                if not bool(number.isfinite().all()):
                    raise ValueError(f"{shortened(file)}: holds scales that are not finite")
            whole_numbers = {name: x.contiguous().view(torch.int8) for name, x in parts.items() if name != "minima"}
            minima = {"minima": parts["minima"].flatten(1)} if "minima" in parts else {}
            whole_numbers = {name: x.flatten(1) for name, x in whole_numbers.items()}
            weight.put(first, q.flatten(1), scales.flatten(1), **minima, **whole_numbers)
    return weight
