"""Models that generate text: special tokens, settings of the checkpoint, and `generate`.

Shape legend: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import bisect
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from ....operator._products import FEW
from ....operator.nn import KVCache, packed_weights
from ..inputs import check_ids
from ..model import Model
from .beam import BeamSearch, search
from .constraints import Constraints
from .drawing import tokens_after
from .published import named_tokens, published_constraints, published_search
from .sampling import Sampling
from .step import MANY, DecoderStep

_STEPS = 16  # minimum steps that justify packing weights


class GeneratingModel(Model):
    """A decoder that generates text. Abstract.

    Attributes:
        longest: number of positions; None if unlimited.
    """

    longest: int | None

    @abstractmethod
    def cache(self, dtype: str | None = None) -> KVCache:
        """An empty cache that keeps all tokens; "int8" keeps their keys and values in 8 bits."""

    @abstractmethod
    def next_logits(self, ids: Tensor, attention_mask: Tensor | None, cache: KVCache) -> Tensor:
        """Logits (B, V) of the token after the last column. `ids (B, L)` continue the tokens in the cache."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """V, the size of the vocabulary."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text: `eos_token_id` of generation_config.json or config.json; () if undefined."""
        return named_tokens(self.generation, "eos_token_id")

    @property
    def begin_tokens(self) -> tuple[int, ...]:
        """First token of a text without a prompt: `bos_token_id`, or the first end token, as after a previous text."""
        return named_tokens(self.generation, "bos_token_id") or self.end_tokens[:1]

    @property
    def pad_token(self) -> int:
        """Token after the end of a text: `pad_token_id` (-1 is none), else the first end token, else 0."""
        named = (*named_tokens(self.generation, "pad_token_id"), *self.end_tokens, 0)
        return next(token for token in named if 0 <= token < self.vocabulary)

    @property
    def repetition_penalty(self) -> float:
        """`repetition_penalty` of the checkpoint, for `Sampling`; 1 if undefined."""
        return self.generation.number("repetition_penalty", 1.0)

    def rules(self, begun: int, most: int) -> Constraints:
        """Constraints of the checkpoint for at most `most` tokens after `begun` prompt tokens.

        Raises:
            ValueError: the checkpoint uses unsupported settings.
        """
        ends = tuple(token for token in self.end_tokens if 0 <= token < self.vocabulary)
        return replace(published_constraints(self.generation, begun, most), ends=ends)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 20,
        sampling: Sampling | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Continue each text of a batch: ids (B, L + n), n at most `max_new_tokens`, fewer if all texts end before.

        Ended items are filled with `pad_token`. Padding of the prompts, on either side, is ignored. The constraints of
        generation_config.json apply, such as `no_repeat_ngram_size` and `bad_words_ids`.

        Args:
            input_ids: (B, L) ints, the prompts.
            attention_mask: (B, L), 1 for real tokens and 0 for padding. None: `pad_token_id` is padding, unless it is
                also an end token; all other tokens are real.
            max_new_tokens: n, at least 1.
            sampling: how to sample. None takes the most probable tokens, with the checkpoint's `repetition_penalty`, or
                uses beam search if the checkpoint sets `num_beams`.
            cache: an empty cache of any kind, such as `KVCache.streaming(layers, window)`, or one that holds the tokens
                before `input_ids`: constraints and penalties then read only `input_ids`. None keeps all tokens.

        Raises:
            TypeError, ValueError: ids outside the vocabulary, other shapes, an item without real tokens, a head other
                than a language model's, more tokens than positions, unsupported settings of the checkpoint.
        """
        self.check_generates()
        length = check_ids("input_ids", input_ids, self.vocabulary)[1]
        if attention_mask is None:
            attention_mask = self._real(input_ids)
        if isinstance(attention_mask, Tensor) and attention_mask.shape == input_ids.shape:
            empty = (attention_mask == 0).all(1)
            if bool(empty.any()):
                raise ValueError(f"attention_mask: item {int(empty.int().argmax())} has no real token to continue")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: must be at least 1, got {max_new_tokens}")
        cache = self.cache() if cache is None else cache
        room = room_after(length, max_new_tokens, cache, self.longest)
        if room < max_new_tokens:
            raise ValueError(
                f"max_new_tokens: {max_new_tokens} after {length} tokens, but the model has {self.longest} positions; "
                f"ask for at most {room}, cut the prompt, or give a streaming cache"
            )
        how = self._likeliest() if sampling is None else sampling
        rules, step = self.rules(length, max_new_tokens), DecoderStep(self, attention_mask, cache)
        rows = input_ids.shape[0] * (how.beams if isinstance(how, BeamSearch) else 1)
        with weights_for(self, max_new_tokens, rows, 0):  # for the prompts alone `DecoderStep` packs them
            if isinstance(how, BeamSearch):
                texts = search(step, input_ids, how, rules, self.pad_token, attention_mask=attention_mask)
                return torch.cat((input_ids, texts.ids[:, 0]), 1)
            new = tokens_after(step, input_ids, how, rules, attention_mask=attention_mask, pad=self.pad_token)
            return torch.cat((input_ids, torch.stack(list(new), 1)), 1)

    def _likeliest(self) -> BeamSearch | Sampling:
        """Default decoding method of the checkpoint."""
        self.generation.only("num_return_sequences", 1)
        return published_search(self.generation, drawn=False)

    def _real(self, input_ids: Tensor) -> Tensor | None:
        """A mask (B, L) of the real tokens, inferred as in transformers; None if all are real."""
        pads = named_tokens(self.generation, "pad_token_id")
        if len(pads) != 1 or pads[0] in self.end_tokens:
            return None
        real = input_ids != pads[0]
        return None if bool(real.all()) else real.long()

    def check_generates(self) -> None:
        """ValueError unless the head is a language model's."""
        if self.request.head != "causal-lm":
            has = "none" if self.request.head is None else repr(self.request.head)
            raise ValueError(f"generate: needs the head 'causal-lm', and this model has {has}")


def weights_for(model: nn.Module, steps: int, rows: int, length: int) -> AbstractContextManager[None]:
    """Pack weights for many steps or long prompts; with a row for each step, (rows, 1), packing gains nothing."""
    many = rows > FEW and steps >= _STEPS
    return packed_weights(model) if many or rows * length >= MANY else nullcontext()


def room_after(length: int, count: int, cache: KVCache, longest: int | None) -> int:
    """The number of the `count` tokens that still have positions, after `length` more tokens in the cache."""
    if longest is None:
        return count
    return bisect.bisect_right(range(1, count + 1), longest, key=lambda n: cache.reach(length + n))
