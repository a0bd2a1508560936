"""Constraints on generated text, for sampling and beam search.

Shape legend: N rows, L prompt tokens, t tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ....support._lazy_names import renamed_arguments
from .step import padded_on_the_left


@dataclass(frozen=True)
class Constraints:
    """Rules for a generated text. Each rule changes the log-probabilities of the next token.

    Args:
        max_new_tokens: the maximum number of generated tokens, end token included.
        min_new_tokens: number of tokens before an end token is allowed.
        ends: end tokens; each of them finishes a text.
        no_repeat_ngram: n-grams of this size occur only once, prompt included. 0 allows repetition.
        banned: tokens, or sequences of tokens, that are never generated.
        forced_first: the first generated token; it does not change the score.
        forced_last: the last token of a text that reaches `max_new_tokens`; it does not change the score.
        renormalized: whether to renormalise the probabilities of the allowed tokens, so that banning a likely token
            does not lower the score of a text.

    Raises:
        ValueError: a number below its minimum, an empty sequence.

    Example:
        >>> import torch, saccade
        >>> constraints = saccade.models.Constraints(min_new_tokens=1, ends=(0,), banned=((2,),))
        >>> constraints.apply(torch.zeros(1, 4), torch.tensor([[3]]), count=0)  # log-probabilities of the first token
        tensor([[-inf, 0., -inf, 0.]])
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    ends: tuple[int, ...] = ()
    no_repeat_ngram: int = 0
    banned: tuple[tuple[int, ...], ...] = ()
    forced_first: int | None = None
    forced_last: int | None = None
    renormalized: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0), ("no_repeat_ngram", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an int of at least {least}, got {value!r}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: {self.min_new_tokens} are more than max_new_tokens={self.max_new_tokens}"
            )
        if not all(self.banned):
            raise ValueError("banned: a sequence is empty, expected at least one token")

    @property
    def reads_text(self) -> bool:
        """Whether a rule depends on the previous tokens."""
        return self.no_repeat_ngram > 0 or any(len(words) > 1 for words in self.banned)

    def check(self, vocabulary: int) -> None:
        """ValueError if a rule names a token outside the vocabulary."""
        forced = [("forced_first", self.forced_first), ("forced_last", self.forced_last)]
        named = [("ends", token) for token in self.ends] + [(n, t) for n, t in forced if t is not None]
        for name, token in named + [("banned", token) for words in self.banned for token in words]:
            if not 0 <= token < vocabulary:
                raise ValueError(f"{name}: tokens must be from 0 to {vocabulary - 1}, got {token}")

    @renamed_arguments(told="tokens")
    def apply(self, scores: Tensor, tokens: Tensor, count: int) -> Tensor:
        """Log-probabilities (N, V) of the next token as a new tensor, -inf for tokens that are not allowed.

        Args:
            tokens: (N, t), all previous tokens, prompt included; -1 is padding.
            count: the number of generated tokens among them.
        """
        kept = self._kept(scores, tokens, count)
        return F.log_softmax(kept, -1).masked_fill(kept == -torch.inf, -torch.inf) if self.renormalized else kept

    def finished(self, tokens: Tensor, count: int) -> Tensor:
        """Whether each text is complete after its newest token: an end token, or the last one allowed.

        Args:
            tokens: one per text or candidate, any shape.
            count: tokens generated, these included.

        Returns:
            bool, the shape of `tokens`.
        """
        if count == self.max_new_tokens:
            return torch.ones_like(tokens, dtype=torch.bool)
        return torch.isin(tokens, torch.tensor(self.ends, device=tokens.device, dtype=tokens.dtype))

    def _kept(self, scores: Tensor, tokens: Tensor, count: int) -> Tensor:
        forced = self.forced_first if count == 0 else None
        forced = self.forced_last if count + 1 == self.max_new_tokens and self.forced_last is not None else forced
        if forced is not None:
            only = torch.full_like(scores, -torch.inf)
            only[:, forced] = 0.0
            return only
        scores = self._without_repeats(scores, tokens)
        for words in self.banned:
            scores = _without(scores, tokens, words)
        if count < self.min_new_tokens:
            scores = scores.index_fill(1, torch.tensor(self.ends, device=scores.device, dtype=torch.int64), -torch.inf)
        return scores

    def _without_repeats(self, scores: Tensor, tokens: Tensor) -> Tensor:
        n = self.no_repeat_ngram
        if n == 0 or tokens.shape[1] < n:
            return scores
        grams = tokens.unfold(1, n, 1)  # (N, t - n + 1, n)
        begun = tokens[:, None, tokens.shape[1] - n + 1 :]
        again = (grams[..., :-1] == begun).all(-1)
        again &= grams[..., -1] >= 0
        banned = torch.where(again, grams[..., -1], scores.shape[1])  # else an extra column, cut off below
        marks = scores.new_zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
        return scores.masked_fill(marks.scatter(1, banned, True)[:, :-1], -torch.inf)


def masked_prompts(ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Prompts (N, L) as input of `Constraints.apply`: masked tokens become -1."""
    if attention_mask is None:
        return ids
    ids, mask = padded_on_the_left(ids, attention_mask)
    return ids.masked_fill(mask == 0, -1)


def _without(scores: Tensor, tokens: Tensor, words: Sequence[int]) -> Tensor:
    """Scores with -inf for the last of `words` in rows of `tokens` that end with the words before it."""
    before = len(words) - 1
    if tokens.shape[1] < before:
        return scores
    ends_so = (tokens[:, tokens.shape[1] - before :] == torch.tensor(words[:-1], device=tokens.device)).all(1)
    marks = torch.zeros_like(scores, dtype=torch.bool)
    marks[:, words[-1]] = ends_so
    return scores.masked_fill(marks, -torch.inf)
