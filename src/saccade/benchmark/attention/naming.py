"""Contenders by the names that commands and tables give them."""

from __future__ import annotations

from .contenders import Contender, DenseAttention, FlexAttention, SaccadeAttention, SdpaAttention
from .runtimes import OnnxRuntimeAttention, OpenVinoAttention


def others() -> dict[str, Contender]:
    """Everyone but Saccade, by the word that `saccade bench --against` takes."""
    return {
        "sdpa": SdpaAttention(),
        "flex": FlexAttention(),
        "dense": DenseAttention(),
        "onnxruntime": OnnxRuntimeAttention(),
        "openvino": OpenVinoAttention(),
    }


def named(name: str) -> Contender:
    """The contender of a name, as tables and `Contender.name` have it.

    Raises:
        ValueError: an empty name.
    """
    for one in others().values():
        if one.name == name:
            return one
    backend, _, instruction_set = name.partition(":")
    if not backend:
        raise ValueError(f"no contender has the name {name!r}")
    return SaccadeAttention(backend, instruction_set or None)
