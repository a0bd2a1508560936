"""Parts of a stack that a transformers model has: its special tokens, and its ways to decode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...verification.stacks._stack import Decoder

_LONGEST = 640  # tokens in a static cache


@dataclass(frozen=True)
class StackParts:
    """Parts of a stack that are found by themselves."""

    special: tuple[int, ...]
    pad: int
    decoders: tuple[Decoder, ...]
    assumed: tuple[str, ...]


def stack_parts(model: Any, causal: bool | None) -> StackParts:
    config = model.config
    special = tuple(_special(config))
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    decoders = tuple(_decoders(model)) if causal and not config.is_encoder_decoder else ()
    words = ("use_cache=False in every call but those that test the cache",)
    return StackParts(special, pad if isinstance(pad, int) and pad >= 0 else 0, decoders, words)


def _special(config: Any) -> Iterator[int]:
    """The ids that a configuration gives names to: padding, begin, end, images."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    for part in parts:
        for name, value in (vars(part) if part is not None else {}).items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                yield from (
                    value for value in (value if isinstance(value, list) else [value]) if isinstance(value, int)
                )


def _decoders(model: Any) -> Iterator[Decoder]:
    taken = inspect.signature(model.forward).parameters
    if "past_key_values" not in taken or "use_cache" not in taken:
        return
    yield Decoder("its own cache", _decoder(model, lambda: None))
    if getattr(model, "_can_compile_fullgraph", False):
        import transformers

        yield Decoder(
            "a static cache",
            _decoder(model, lambda: transformers.StaticCache(config=model.config, max_cache_len=_LONGEST)),
        )


def _decoder(model: Any, empty: Callable[[], Any]) -> Callable[[list[int], Any], tuple[Tensor, Any]]:
    def decode(tokens: list[int], state: Any) -> tuple[Tensor, Any]:
        cache, read = state or (empty(), 0)
        ids = torch.tensor([tokens[read:]], device=model.device)
        returned = model(input_ids=ids, past_key_values=cache, use_cache=True)
        out = getattr(returned, "logits", None)
        out = returned.last_hidden_state if out is None else out
        return out[0, -1], (returned.past_key_values, len(tokens))

    return decode
