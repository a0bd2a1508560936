"""Data of a comparison: random numbers, tensors from a file, or q, k, v of a model for a text.

Shape legend: B batch, Hq / Hkv query and key-value heads, L tokens, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...operator._call import ObservedCall
from ...operator._masks import Causal, as_mask
from ...see.analysis import read_files
from ...see.inspection import TextModel, open_model

NAMES = ("query", "key", "value")
SUFFIXES = (".safetensors", ".pt", ".pth")
TEXT = Path(__file__).with_name("text.txt")
TEXT_NAME = "the start of The Hound of the Baskervilles"


class ProblemSizes(NamedTuple):
    """Sizes of a problem."""

    batch: int
    heads: int  # Hq
    kv_heads: int
    head: int  # D
    value_head: int  # Dv
    length: int
    causal: bool

    @property
    def width(self) -> int:
        """E, the width of tokens: that of all query heads together."""
        return self.heads * self.head


@dataclass(frozen=True, eq=False)
class ComparisonData:
    """Queries, keys and values, and their source.

    note: what to know about the data. unlimited: whether any length is available (random numbers).
    """

    source: str
    query: Tensor | None  # None if only generated lengths are needed
    key: Tensor | None  # (B, Hkv, L, D)
    value: Tensor | None  # (B, Hkv, L, Dv)
    sizes: ProblemSizes  # its length is the longest at which errors are measured
    note: str = ""
    unlimited: bool = False

    def at(self, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first `length` tokens; if there are fewer, random draws of them.

        Times do not depend on values, except if keys are selected by them; drawn tokens have the same statistics.
        """
        if self.query is None or self.key is None or self.value is None:
            return normal(self.sizes._replace(length=length), seed)
        if length <= self.sizes.length:
            return self.query[:, :, :length], self.key[:, :, :length], self.value[:, :, :length]
        chosen = torch.randint(self.sizes.length, (length,), generator=torch.Generator().manual_seed(seed))
        return self.query[:, :, chosen], self.key[:, :, chosen], self.value[:, :, chosen]

    def real(self, length: int) -> bool:
        """Whether `at(length)` returns the data itself."""
        return self.unlimited or length <= self.sizes.length

    def as_json(self) -> dict[str, Any]:
        return {"source": self.source, "note": self.note, "unlimited": self.unlimited, **self.sizes._asdict()}


def normal(sizes: ProblemSizes, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, head, value_head, length, _ = sizes
    shapes = (batch, heads, length, head), (batch, kv_heads, length, head), (batch, kv_heads, length, value_head)
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def random_data(shape: str, *, causal: bool = True) -> ComparisonData:
    """Standard normal tensors of the shape "B,H,D": logits have variance 1, so attention is spread widely.

    Raises:
        ValueError: not three positive numbers.
    """
    try:
        batch, heads, width = (int(part) for part in shape.split(","))
    except ValueError:
        raise ValueError(f"random: expected batch, heads and width as 1,8,64; got {shape!r}") from None
    if min(batch, heads, width) < 1:
        raise ValueError(f"random: batch, heads and width must be at least 1, got {shape!r}")
    sizes = ProblemSizes(batch, heads, heads, width, width, 0, causal)
    note = "independent of each other, so attention is spread widely: hard for mechanisms that select or compress keys"
    return ComparisonData("normal numbers", None, None, None, sizes, note, unlimited=True)


def tensor_data(path: Path, *, causal: bool = True) -> ComparisonData:
    """The tensors query, key and value (B, H, L, D) of a .safetensors or .pt file.

    Raises:
        FileNotFoundError: no such file. ValueError: another format, tensors that are missing or do not match.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"tensors: expected a file that ends in .safetensors or .pt, got {path}")
    read = _read(path)
    for name in NAMES:
        if not isinstance(read.get(name), Tensor):
            raise ValueError(f"{path}: expected the tensors query, key and value; it holds {_held(read)}")
    query, key, value = (read[name] for name in NAMES)
    _check(path, query, key, value)
    length = query.shape[2]
    sizes = ProblemSizes(len(query), query.shape[1], key.shape[1], query.shape[3], value.shape[3], length, causal)
    return ComparisonData(str(path), query.float(), key.float(), value.float(), sizes)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        read = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # both libraries raise many kinds of exceptions for damaged files
        reason = " ".join(str(error).split())[:120]
        raise ValueError(f"{path}: cannot be read as {path.suffix[1:]} ({reason})") from None
    if not isinstance(read, dict):
        raise ValueError(f"{path}: expected a dict of the tensors query, key and value, got {type(read).__name__}")
    return read


def _held(read: dict[str, Any]) -> str:
    return ", ".join(str(name) for name in list(read)[:8]) or "nothing"


def _check(path: Path, query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in zip(NAMES, (query, key, value), strict=True):
        shape = tuple(tensor.shape)
        if tensor.dim() != 4 or 0 in shape:
            raise ValueError(f"{path}: {name}: expected (batch, heads, length, width), got {shape}")
        if not tensor.is_floating_point():
            raise ValueError(f"{path}: {name}: expected floating point, got {tensor.dtype}")
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: {name}: contains NaN or infinity")
        if tensor.shape[0] != query.shape[0] or tensor.shape[2] != query.shape[2]:
            expected = f"batch {query.shape[0]} and length {query.shape[2]}, as the query has"
            raise ValueError(f"{path}: {name}: expected {expected}, got {shape}")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"{path}: key: expected width {query.shape[3]}, as the query has, got {tuple(key.shape)}")
    if value.shape[1] != key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"{path}: value: expected as many heads as the key, and a divisor of the query's {query.shape[1]}, "
            f"got {value.shape[1]} and {key.shape[1]}"
        )


def model_data(
    source: str | None = None,
    text: Path | None = None,
    layer: int | None = None,
    *,
    most: int,
    causal: bool | None = None,
) -> ComparisonData:
    """The q, k, v of all heads in a layer of a model that reads a text.

    Args:
        source: a model folder or a name on the hub; None is the embedded model.
        text: a text file; None is the start of a novel.
        layer: counted from 0; None is the middle one.
        most: maximum number of tokens; fewer if the text or the model's context is shorter.
        causal: None follows the model.

    Raises:
        FileNotFoundError, ValueError: as `saccade.inspection.open_model`; an unknown layer, an empty text.
    """
    model = open_model(source)
    layer = model.layers // 2 if layer is None else layer
    if not 0 <= layer < model.layers:
        raise ValueError(f"layer: the model has layers 0 to {model.layers - 1}, got {layer}")
    words = read_files([TEXT if text is None else text])[0].text
    room = max(1, most - len(model.before) - len(model.after))
    ids = model.encode(words).ids[: room if model.room is None else min(room, model.room)]
    if not ids:
        raise ValueError(f"{text}: is empty; expected at least one word")
    call = _call(model, ids, layer)
    scale = 1.0 if call.scale is None else call.scale * call.query.shape[3] ** 0.5
    query, key, value = (tensor.float() for tensor in (call.query * scale, call.key, call.value))
    sizes = ProblemSizes(
        1,
        query.shape[1],
        key.shape[1],
        query.shape[3],
        value.shape[3],
        query.shape[2],
        _is_causal(call) if causal is None else causal,
    )
    name = "the embedded model" if source is None else model.name
    read = TEXT_NAME if text is None else str(text)
    where = f"{name}, layer {layer} of {model.layers}, reading {sizes.length} tokens of {read}"
    return ComparisonData(where, query.contiguous(), key.contiguous(), value.contiguous(), sizes, _unsupported(call))


def _call(model: TextModel, ids: list[int], layer: int) -> ObservedCall:
    calls: list[ObservedCall] = []

    def keep(number: int, call: ObservedCall) -> None:
        if number == layer:
            calls.append(call)

    model.run(model.whole(ids), keep)
    return calls[0]


def _is_causal(call: ObservedCall) -> bool:
    """Whether the mask is causal: the first token sees only itself."""
    mask, length = as_mask(call.mask), call.query.shape[2]
    if isinstance(mask, Causal):
        return True
    return mask is not None and length > 1 and not bool(mask.dense(length, length)[..., 0, 1:].any())


def _is_narrower(call: ObservedCall) -> bool:
    """Whether the mask also hides earlier tokens, as a window does in longer texts."""
    mask, length = as_mask(call.mask), call.query.shape[2]
    if mask is None or isinstance(mask, Causal):
        return False
    visible = torch.ones(length, length, dtype=torch.bool)
    return not bool(mask.dense(length, length)[..., visible.tril() if _is_causal(call) else visible].all())


def _unsupported(call: ObservedCall) -> str:
    """Features of the model's attention that the compared mechanisms lack, as text; "" without any."""
    parts = {"bias": call.bias, "softcap": call.softcap, "sink": call.sink}
    named = [name for name, part in parts.items() if part is not None] + ["window"] * _is_narrower(call)
    return f"without the {' and '.join(named)} that this layer has" if named else ""
