"""Models that continue texts, and how: what ends a text, how many positions there are, and the call.

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
from .step import DecoderStep

_STEPS, _MANY = 16, 1000  # steps, and tokens of prompts, from which on packed copies of the weights pay for themselves


class GeneratingModel(Model):
    """A decoder that continues tokens. Abstract.

    Attributes:
        longest: positions there are; None where nothing limits them.
    """

    longest: int | None

    @abstractmethod
    def cache(self) -> KVCache:
        """An empty cache for decoding, which keeps everything."""

    @abstractmethod
    def next_logits(self, ids: Tensor, attention_mask: Tensor | None, cache: KVCache) -> Tensor:
        """Read `ids (B, L)`, which continue what the cache holds; logits (B, V) of what follows the last column."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """V."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text: `eos_token_id` of generation_config.json, or of config.json; () where none is
        named."""
        return named_tokens(self.generation, "eos_token_id")

    @property
    def begin_tokens(self) -> tuple[int, ...]:
        """What a text without a prompt begins with: `bos_token_id`, or else the first end token, which ended another
        text before it."""
        return named_tokens(self.generation, "bos_token_id") or self.end_tokens[:1]

    @property
    def pad_token(self) -> int:
        """What stands after the end of a text: `pad_token_id`, or the first end token, or 0; old folders name -1."""
        named = (*named_tokens(self.generation, "pad_token_id"), *self.end_tokens, 0)
        return next(token for token in named if 0 <= token < self.vocabulary)

    @property
    def repetition_penalty(self) -> float:
        """`repetition_penalty` of the files, for `Sampling`; 1 where they name none."""
        return self.generation.number("repetition_penalty", 1.0)

    def rules(self, begun: int, most: int) -> Constraints:
        """What the files want a text to keep to that goes on for at most `most` tokens after `begun` first ones.

        Raises:
            ValueError: files that ask for what is not computed.
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
        """Continue each text of a batch: ids (B, L + n), n at most `max_new_tokens`, fewer where all texts end before.

        After an item's end token stand `pad_token`s. Padding of the prompts, on either side, is not read. Texts keep to
        the rules of generation_config.json, such as `no_repeat_ngram_size` and `bad_words_ids`.

        Args:
            input_ids: (B, L) ints, the prompts.
            attention_mask: (B, L), 1 for real tokens and 0 for padding. None: `pad_token_id` is padding unless it ends
                texts, too; all other tokens are real.
            max_new_tokens: n, at least 1.
            sampling: how tokens are drawn. None draws none: the most probable are taken, with the files'
                `repetition_penalty`, or the text that a beam search finds where they name `num_beams`.
            cache: an empty one of any kind, such as `KVCache.streaming(layers, window)`; None keeps everything.

        Raises:
            TypeError, ValueError: ids outside the vocabulary, other shapes, an item of padding alone, a head that is no
                language model's, more tokens than the model has positions, files that ask for what is not computed.
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
        with weights_for(self, max_new_tokens, rows, length):
            if isinstance(how, BeamSearch):
                found = search(step, input_ids, how, rules, self.pad_token, attention_mask=attention_mask)
                return torch.cat((input_ids, found.ids[:, 0]), 1)
            new = tokens_after(step, input_ids, how, rules, attention_mask=attention_mask, pad=self.pad_token)
            return torch.cat((input_ids, torch.stack(list(new), 1)), 1)

    def _likeliest(self) -> BeamSearch | Sampling:
        """How the files want texts to be found where none is drawn."""
        self.generation.only("num_return_sequences", 1)
        return published_search(self.generation, drawn=False)

    def _real(self, input_ids: Tensor) -> Tensor | None:
        """A mask (B, L) of the tokens that are no padding, as transformers infers it; None where all are real."""
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
    """Packed copies of the weights where they pay for themselves: steps of few rows, (rows, 1), are as fast without."""
    many = rows > FEW and steps >= _STEPS
    return packed_weights(model) if many or rows * length >= _MANY else nullcontext()


def room_after(length: int, count: int, cache: KVCache, longest: int | None) -> int:
    """How many of `count` tokens there are positions for after `length` more in the cache."""
    if longest is None:
        return count
    return bisect.bisect_right(range(1, count + 1), longest, key=lambda n: cache.reach(length + n))
