"""Text generation: continues a prompt, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...operator.nn import KVCache
from .decoder_lm.checkpoint import LanguageModel
from .decoder_lm.language_model import DecoderLM
from .decoding.constraints import Constraints
from .decoding.drawing import tokens_after
from .decoding.generating import GeneratingModel, room_after
from .decoding.sampling import Sampling
from .decoding.step import DecoderStep
from .transformers_model import TransformersModel


def sample_tokens(
    model: DecoderLM | GeneratingModel,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    cache: KVCache | None = None,
) -> Iterator[int]:
    """Generate up to `count` tokens after `prompt` (start token included), one by one, with a cache.

    Stops when the context is full; with `cache=KVCache.streaming(layers, window)` it never is, if window and sinks fit
    into the context. A `GeneratingModel` also stops after an end token, which is the last one, and follows the
    constraints of its files.

    Args:
        cache: an empty one; None uses the model's own, which keeps all tokens.

    Raises:
        ValueError: the context has no room after the prompt.
    """
    cache = model.cache() if cache is None else cache
    count = min(count, _room(model, prompt, count, cache))
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    rules = model.rules(len(prompt), count) if isinstance(model, GeneratingModel) else Constraints(count)
    for token in tokens_after(DecoderStep(model, cache=cache), ids, sampling, rules):
        yield int(token)


def generate(
    lm: GeneratingModel | TransformersModel,
    prompt: str,
    tokens: int = 100,
    sampling: Sampling | None = None,
    cache: KVCache | None = None,
) -> Iterator[str]:
    """Generate the continuation of `prompt`, piece by piece, up to `tokens` tokens or the end of the context.

    Stops at a token that ends texts, which is not returned. A model of transformers' class generates all tokens before
    the first piece is returned.

    Args:
        lm: a language model with its tokenizer, from `saccade.models.load`.
        prompt: the text to continue.
        tokens: maximum number of new tokens.
        sampling: settings of sampling; None samples from the model's distribution with its files' `repetition_penalty`.
        cache: an empty one; None keeps all tokens. With `KVCache.streaming(layers, window)` texts can be longer than
            the context.

    Raises:
        TypeError: another kind of model, or a cache for a model of transformers' class, which has its own.
        FileNotFoundError: no tokenizer.
        ValueError: the context has no room after the prompt; a model without a language-model head.

    Example:
        >>> import saccade
        >>> lm = saccade.models.load()
        >>> greedy = saccade.models.Sampling(temperature=0)
        >>> "".join(saccade.models.generate(lm, "Once upon a time", tokens=4, sampling=greedy))
        ', and I have'
    """
    if not isinstance(lm, (GeneratingModel, TransformersModel)):
        raise TypeError(f"lm: expected a decoder that generates text, got {type(lm).__name__}")
    lm.check_generates()
    ids = prompt_ids(lm, prompt)
    sampling = sampling or Sampling(repetition_penalty=lm.repetition_penalty)
    if isinstance(lm, TransformersModel):
        if cache is not None:
            raise TypeError(f"cache: transformers' {lm.family.name} makes its own, got {type(cache).__name__}")
        tokens = lm.room_after(len(ids), tokens) or tokens
        made = lm.generate(torch.tensor([ids], device=lm.device), max_new_tokens=tokens, sampling=sampling)
        return lm.tokenizer.stream(_until(iter(made[0, len(ids) :].tolist()), lm.end_tokens))
    cache = lm.cache() if cache is None else cache
    _room(lm, ids, 1, cache)
    drawn = sample_tokens(lm, ids, tokens, sampling, cache)
    return lm.tokenizer.stream(_until(drawn, lm.end_tokens))


def prompt_ids(lm: GeneratingModel | TransformersModel, prompt: str) -> list[int]:
    """The prompt's tokens, after the begin tokens."""
    if isinstance(lm, LanguageModel):
        return [lm.tokenizer.start, *lm.tokenizer.encode(prompt).ids]
    return [*lm.tokenizer.before, *lm.tokenizer.encode(prompt).ids] or list(lm.begin_tokens)


def _room(model: DecoderLM | GeneratingModel, prompt: Sequence[int], count: int, cache: KVCache) -> int:
    """The number of the `count` tokens that fit into the context; ValueError if none does."""
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
