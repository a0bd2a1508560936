"""Generating text token by token.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..nn import KVCache
from .checkpoint import LanguageModel
from .language_model import DecoderLM


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Args:
        temperature: the logits are divided by it; 0 always takes the likeliest token.
        top_k: keep the k likeliest tokens only; None keeps all.
        top_p: of those, keep the fewest likeliest tokens whose probabilities reach p ("nucleus sampling", Holtzman
            et al. 2020); None keeps all.
        seed: of the draws; None draws a fresh one.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: must be finite and not negative, got {self.temperature}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed: must be a 64-bit integer, got {self.seed}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: must be in (0, 1], got {self.top_p}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution the next token is drawn from: logits (V,) -> (V,) float32."""
        logits = logits.float()
        if self.temperature == 0.0:
            return torch.nn.functional.one_hot(logits.argmax(), logits.shape[0]).float()
        logits = logits / self.temperature
        if self.top_k is not None:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p is not None:
            logits = keep_top_p(logits, self.top_p)
        return logits.softmax(0)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k largest of `logits (V,)` become -inf; equals of the k-th stay."""
    if k >= logits.shape[0]:
        return logits
    return logits.masked_fill(logits < logits.topk(k).values[-1], float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """All of `logits (V,)` but the fewest largest whose probabilities reach p become -inf; at least one stays."""
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(0)
    reached_before = probabilities.cumsum(0) - probabilities >= p
    reached_before[0] = False
    dropped = torch.zeros_like(reached_before).scatter(0, order, reached_before)
    return logits.masked_fill(dropped, float("-inf"))


@torch.no_grad()
def sample_tokens(
    model: DecoderLM, prompt: Sequence[int], count: int, sampling: Sampling, cache: KVCache | None = None
) -> Iterator[int]:
    """Draw up to `count` tokens after `prompt` (start token included), one by one, with a cache.

    Stops when the context is full. With `cache=KVCache.streaming(layers, window)`, of a window and sinks that the
    context holds, it never is.

    Args:
        cache: an empty one; None: the model's own, which keeps everything.

    Raises:
        ValueError: the prompt leaves no room in the context.
    """
    cache = model.cache() if cache is None else cache
    _check_room(model, prompt, cache)
    context = model.config.context
    device = model.embedding.weight.device
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        if cache.reach(tokens.shape[1] + 1) > context:  # no room for one more
            return
        probabilities = sampling.probabilities(model(tokens, cache=cache)[0, -1]).cpu()
        token = int(torch.multinomial(probabilities, 1, generator=generator))
        yield token
        tokens = torch.tensor([[token]], device=device)


def generate(
    lm: LanguageModel, prompt: str, tokens: int = 100, sampling: Sampling | None = None, cache: KVCache | None = None
) -> Iterator[str]:
    """The continuation of `prompt`, piece by piece, `tokens` tokens long or up to the end of the model's context.

    `cache` as in `sample_tokens`: with a streaming one the context has no end.

    A start token drawn on the way ends it, because it means the end of the text.
    """
    ids = [lm.tokenizer.start, *lm.tokenizer.encode(prompt).ids]
    cache = lm.model.cache() if cache is None else cache
    _check_room(lm.model, ids, cache)
    drawn = sample_tokens(lm.model, ids, tokens, sampling or Sampling(), cache)
    return lm.tokenizer.stream(_until(drawn, lm.tokenizer.start))


def _check_room(model: DecoderLM, prompt: Sequence[int], cache: KVCache) -> None:
    context = model.config.context
    if not prompt or cache.reach(len(prompt) + 1) > context:
        raise ValueError(
            f"prompt: {len(prompt)} tokens with the start token; the model's context of {context} must hold them and "
            "at least one more"
        )


def _until(tokens: Iterator[int], end: int) -> Iterator[int]:
    for token in tokens:
        if token == end:
            return
        yield token
