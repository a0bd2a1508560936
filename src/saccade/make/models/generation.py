"""Continuing a text: a prompt in, pieces of text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...operator.nn import KVCache
from .decoding.constraints import Constraints
from .decoding.drawing import tokens_after
from .decoding.generating import GeneratingModel, room_after
from .decoding.sampling import Sampling
from .decoding.step import DecoderStep
from .own.checkpoint import LanguageModel
from .own.language_model import DecoderLM


def sample_tokens(
    model: DecoderLM | GeneratingModel,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    cache: KVCache | None = None,
) -> Iterator[int]:
    """Draw up to `count` tokens after `prompt` (start token included), one by one, with a cache.

    Stops when the context is full. With `cache=KVCache.streaming(layers, window)`, of a window and sinks that the
    context holds, it never is. A `GeneratingModel` also stops after an end token, which comes last, and keeps to the
    rules of its files.

    Args:
        cache: an empty one; None: the model's own, which keeps everything.

    Raises:
        ValueError: the prompt leaves no room in the context.
    """
    cache = model.cache() if cache is None else cache
    count = min(count, _room(model, prompt, count, cache))
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    rules = model.rules(len(prompt), count) if isinstance(model, GeneratingModel) else Constraints(count)
    for token in tokens_after(DecoderStep(model, cache=cache), ids, sampling, rules):
        yield int(token)


def generate(
    lm: GeneratingModel, prompt: str, tokens: int = 100, sampling: Sampling | None = None, cache: KVCache | None = None
) -> Iterator[str]:
    """The continuation of `prompt`, piece by piece, `tokens` tokens long or up to the end of the model's context.

    A token that means the end of a text ends it, and is not shown.

    Args:
        lm: a language model with its tokenizer, which `saccade.models.load` opens.
        prompt: the text to continue.
        tokens: the most new tokens.
        sampling: how tokens are drawn; None draws from the model's own distribution, with its files'
            `repetition_penalty`.
        cache: an empty one; None keeps everything. With a streaming one, `KVCache.streaming(layers, window)`, texts can
            be longer than the context.

    Raises:
        TypeError: a model of another kind.
        FileNotFoundError: no tokenizer.
        ValueError: the prompt leaves no room in the context; a model without the head of a language model.

    Example:
        >>> import saccade
        >>> lm = saccade.models.load()
        >>> greedy = saccade.models.Sampling(temperature=0)
        >>> "".join(saccade.models.generate(lm, "Once upon a time", tokens=4, sampling=greedy))
        ', and I have'
    """
    if not isinstance(lm, GeneratingModel):
        raise TypeError(f"lm: expected a decoder of text, which continues one, got {type(lm).__name__}")
    lm.check_generates()
    ids = prompt_ids(lm, prompt)
    cache = lm.cache() if cache is None else cache
    _room(lm, ids, 1, cache)
    sampling = sampling or Sampling(repetition_penalty=lm.repetition_penalty)
    drawn = sample_tokens(lm, ids, tokens, sampling, cache)
    return lm.tokenizer.stream(_until(drawn, lm.end_tokens))


def prompt_ids(lm: GeneratingModel, prompt: str) -> list[int]:
    """The prompt's tokens behind those that begin a text."""
    if isinstance(lm, LanguageModel):
        return [lm.tokenizer.start, *lm.tokenizer.encode(prompt).ids]
    return [*lm.tokenizer.before, *lm.tokenizer.encode(prompt).ids] or list(lm.begin_tokens)


def _room(model: DecoderLM | GeneratingModel, prompt: Sequence[int], count: int, cache: KVCache) -> int:
    """How many of `count` tokens there is room for; ValueError where there is none for the first."""
    context = model.config.context if isinstance(model, DecoderLM) else model.context
    room = room_after(len(prompt), count, cache, context)
    if not prompt or not room:
        raise ValueError(
            f"prompt: {len(prompt)} tokens with the start token; the model's context of {context} must hold them and "
            "at least one more"
        )
    return room


def _until(tokens: Iterator[int], ends: Sequence[int]) -> Iterator[int]:
    for token in tokens:
        if token in ends:
            return
        yield token
