"""Masks and quantities as text: `causal & window(4096)`, 1M, 50GB/s."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...operator._masks import Mask

NAMES = "causal, chunks, dilated, documents, fixed, full, global, prefix, strided, window"
_STEPS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def parsed_mask(text: str, length: int) -> Mask | None:
    """The mask of an expression of names joined by & | ~; None for `full`. ValueError says what is wrong.

    `window(W)` is a query's own key and the W - 1 before it, `window(left, right)` the mask `Window`. `documents(N)`
    are N documents of equal length; `documents([a, b, c])` have these lengths, again and again.
    """
    try:
        return _mask(ast.parse(text.strip(), mode="eval").body, length)
    except (SyntaxError, ValueError, TypeError) as error:
        reason = "it is no expression" if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"mask: {text!r}: {reason}; expected {NAMES}, joined by & | ~") from None


def document_lengths(path: Path) -> list[int]:
    """Lengths of documents from a file of numbers. ValueError names the file."""
    words = path.read_text(encoding="utf-8", errors="replace").split()
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        wrong = next((word for word in words if not word.isdecimal() or int(word) < 1), "nothing")
        raise ValueError(f"documents: {path} must have one length in tokens on each line, got {wrong!r}")
    return [int(word) for word in words]


def packed(lengths: list[int], length: int) -> Mask:
    """Documents of these lengths, again and again, until the sequence is full; the last one is cut."""
    import numpy as np
    import torch

    from ...operator._masks import Documents

    cut = [min(size, length) for size in lengths[:length]]
    sizes = np.resize(np.array(cut, dtype=np.int64), -(-length * len(cut) // sum(cut)) + len(cut))
    sizes = sizes[: 1 + int(np.searchsorted(np.cumsum(sizes), length))]
    ids = np.repeat(np.arange(len(sizes)), sizes)[:length]
    return Documents(torch.from_numpy(ids))


def quantity(text: str, unit: str, name: str, example: str) -> float:
    """A number with a decimal prefix and a unit: 50GB/s, 400TFLOP/s, 5us. ValueError names the option."""
    match = re.fullmatch(rf"([\d.]+)\s*([kMGTPmun]?){re.escape(unit)}", text.strip())
    try:
        value = float(match[1]) * _PREFIXES[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ValueError(f"{name}: expected a number above 0 and {unit}, such as {example}, got {text!r}")
    return value


def tokens(text: str, name: str) -> int:
    """A whole number: 1000, 4k (4,096) or 1M (1,048,576). ValueError names the option."""
    match = re.fullmatch(r"(\d+)([kKmMgG]?)", text.strip())
    count = int(match[1]) * _STEPS[match[2].lower()] if match else 0
    if count < 1:
        raise ValueError(f"{name}: expected a whole number, such as 4096, 4k or 1M, got {text!r}")
    return count


def _mask(node: ast.expr, length: int) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        left, right = _mask(node.left, length), _mask(node.right, length)
        if isinstance(node.op, ast.BitOr):
            return None if left is None or right is None else left | right
        return right if left is None else left if right is None else left & right
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        part = _mask(node.operand, length)
        if part is None:
            raise ValueError("~full shows nothing")
        return ~part
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.keywords:
        raise ValueError(f"{ast.unparse(node)} is no mask")
    return _named(call.func.id, [_value(argument) for argument in call.args], length)


def _value(node: ast.expr) -> Any:
    """A whole number or a list of them."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_value(part) for part in node.elts]
    raise ValueError(f"{ast.unparse(node)} is no whole number")


def _named(name: str, arguments: list[Any], length: int) -> Any:
    from ...operator import _masks as masks

    makers: dict[str, Callable[..., Any]] = {
        "full": lambda: None,
        "causal": masks.Causal,
        "window": lambda left, *right: masks.Window(left, *right) if right else masks.Window(left - 1, 0),
        "documents": lambda count: packed(_documents(count, length), length),
        "prefix": masks.Prefix,
        "strided": masks.Strided,
        "fixed": masks.Fixed,
        "chunks": masks.Chunks,
        "dilated": masks.Dilated,
        "global": masks.Global,
    }
    if name.lower() not in makers:
        raise ValueError(f"{name} is no mask")
    try:
        return makers[name.lower()](*arguments)
    except TypeError as error:
        raise ValueError(f"{name}: {str(error).rpartition('() ')[2]}") from None


def _documents(count: Any, length: int) -> list[int]:
    if isinstance(count, list) and count and all(type(size) is int and size > 0 for size in count):
        return count
    if not isinstance(count, int) or not 0 < count <= length:
        raise ValueError(f"documents: expected 1 to {length} documents, or a list of lengths, got {count}")
    edges = [n * length // count for n in range(count + 1)]
    return [stop - start for start, stop in itertools.pairwise(edges)]
