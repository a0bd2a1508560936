"""The real numbers of one decoding step: the new token's vectors, its weights, and the next tokens.

Shape legend: B items, H / Hkv query and key heads, Lk keys, D and Dv width of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ....make.models import DecoderLM
from ....make.models.text.decoder import TextDecoder
from ....make.models.text.encoder_decoder import EncoderDecoder, NextTokenHead
from ....operator._call import ObservedCall
from ....operator.nn import KVCache
from ....support._restored import evaluating
from ...inspection import TextModel, weights_of
from ...inspection._targets import Target, read_target, target_tokenizer
from ._head import read_short

MOST_TOKENS = 12
WRITTEN = 5  # most tokens of a target that the model writes
_BEST = 3  # next tokens in the picture


@dataclass(frozen=True, eq=False)
class StepReading:
    """The weights and output of the new token's query in one layer, in float64.

    Attributes:
        labels: the Lk tokens of the keys.
        query: (H, D). key, value: (Hkv, Lk, D) and (Hkv, Lk, Dv), as in the cache.
        weights: (H, Lk). out: (H, Dv).
        shape: of the layer's keys in the cache, (B, Hkv, Lk, D).
        token_bytes: of the keys and values of one token, in all layers.
    """

    labels: list[str]
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    weights: np.ndarray
    out: np.ndarray
    shape: tuple[int, ...]
    token_bytes: int

    def of_head(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys and values of a query head."""
        group = head // (len(self.weights) // len(self.key))
        return self.key[group], self.value[group]


@dataclass(frozen=True, eq=False)
class DecoderStepNumbers:
    """One step in one layer.

    Attributes:
        own: of the decoded text, with the new token last. source: of the source, if there is one.
        before: shape of the layer's keys before this step, (B, Hkv, Lk - 1, D).
        following: the most probable next tokens and their probabilities.
    """

    own: StepReading
    source: StepReading | None
    layer: int
    layers: int
    before: tuple[int, ...]
    following: list[tuple[str, float]]


def step_numbers(model: TextModel, text: str, layer: int, target: str | None = None) -> DecoderStepNumbers:
    """Decode the last token of ``text`` after the others; for an encoder-decoder, the last one of its ``target``.

    Raises:
        ValueError: a model that cannot decode, a text or a target that is too long or too short for a picture.
    """
    if isinstance(model.module, EncoderDecoder):
        return _of_pair(model, model.module, text, layer, target)
    module = model.module
    if target is not None:
        raise ValueError(f"target: {model.name} has no target; only an encoder-decoder has one")
    if not isinstance(module, DecoderLM | TextDecoder):
        raise ValueError(f"model: {model.name} does not decode text token by token; a decoder such as GPT-2 does")
    if isinstance(module, TextDecoder) and module.request.head != "causal-lm":
        raise ValueError(f"model: {model.name} has no head that gives next tokens")
    tokens, labels = read_short(model, text, MOST_TOKENS)
    ids = model.whole(tokens.ids)
    if ids.shape[1] < 2:
        raise ValueError("text: expected at least two tokens: a step reads the earlier ones")
    cache, calls = module.cache(), list[ObservedCall]()

    def keep(at: int, call: ObservedCall) -> None:
        if at == layer:
            calls.append(call)

    ids = ids.to(next(module.parameters()).device)
    with evaluating(module), torch.no_grad():
        _logits(module, ids[:, :-1], cache, keep)
        logits = _logits(module, ids[:, -1:], cache, keep)
    first, last = calls
    following = _following(logits, model)
    return DecoderStepNumbers(
        _reading(last, labels, model.layers), None, layer, model.layers, tuple(first.key.shape), following
    )


def _of_pair(model: TextModel, module: EncoderDecoder, text: str, layer: int, target: str | None) -> DecoderStepNumbers:
    tokens, sources = read_short(model, text, MOST_TOKENS)
    device = next(module.parameters()).device
    source = model.whole(tokens.ids).to(device)
    if not isinstance(module.head, NextTokenHead):
        raise ValueError(f"model: {model.name} has no head that gives next tokens")
    with evaluating(module):
        ids, labels = _short(read_target(module, target, source))
    given, cache, calls = torch.tensor([ids], device=device), module.cache(), list[ObservedCall]()
    first = len(module.encoder.blocks)

    def keep(at: int, call: ObservedCall) -> None:
        if at - first == layer:
            calls.append(call)

    with evaluating(module), torch.no_grad():
        memory = module.encode(source)
        for part in (given[:, :-1], given[:, -1:]):
            out = module(memory=memory, decoder_input_ids=part, cache=cache, observe=keep)
    before, _, own, cross = calls  # self- and cross-attention of both calls
    layers = len(module.decoder.blocks)
    return DecoderStepNumbers(
        _reading(own, labels, layers),
        _reading(cross, sources, layers),
        layer,
        layers,
        tuple(before.key.shape),
        _following(out.logits, target_tokenizer(module)),
    )


def _short(target: Target) -> tuple[list[int], list[str]]:
    """The tokens that the decoder has read, the new one last, end tokens left out; and their labels."""
    stop = max((word.last for word in target.words if not word.special), default=len(target.ids))
    stop = min(stop, WRITTEN) if target.written else stop
    if stop > MOST_TOKENS:
        raise ValueError(f"target: expected at most {MOST_TOKENS} tokens with the start token, got {stop}")
    if stop < 2:
        raise ValueError("target: expected at least two tokens: a step reads the earlier ones")
    return target.ids[:stop], list(target.labels[:stop])


def _reading(call: ObservedCall, labels: list[str], layers: int) -> StepReading:
    array = {name: getattr(call, name)[0].double().cpu().numpy() for name in ("query", "key", "value", "out")}
    return StepReading(
        labels=labels,
        query=array["query"][:, 0],
        key=array["key"],
        value=array["value"],
        weights=weights_of(call)[0, :, 0].detach().double().cpu().numpy(),
        out=array["out"][:, 0],
        shape=tuple(call.key.shape),
        token_bytes=layers * sum(x.shape[1] * x.shape[-1] * x.element_size() for x in (call.key, call.value)),
    )


def _logits(module: nn.Module, ids: Tensor, cache: KVCache, keep: object) -> Tensor:
    out = module(ids, cache=cache, observe=keep)
    return out if isinstance(out, Tensor) else out.logits


def _following(logits: Tensor, tokens: Any) -> list[tuple[str, float]]:
    """The most probable next tokens, as text."""
    best = logits[0, -1].double().cpu().softmax(-1).topk(_BEST)
    words = [tokens.written(int(token)).replace("\n", "⏎").strip() or "␣" for token in best.indices]
    return list(zip(words, best.values.tolist(), strict=True))
