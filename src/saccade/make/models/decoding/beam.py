"""Beam search: an approximate search for the most probable texts, of which several are kept for each item.

Shape legend: B items, k beams, N rows (k for each item still searched), M most new tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ....support._shared_cores import shared_cores
from .constraints import Constraints, masked_prompts
from .step import DecodingStep, Generated


@dataclass(frozen=True)
class BeamSearch:
    """Settings of beam search.

    The score of a text of n new tokens is `sum(log p) / n ** length_penalty`. Names and rules are transformers'.

    Args:
        beams: k, partial texts kept at each step; at most the size of the vocabulary.
        length_penalty: above 0 favours long texts, below 0 short ones, 0 compares sums.
        early_stopping: when an item with k finished texts is done. True: at once. False: when the best beam, with
            its length so far, is no better than the worst of them. "never": when it could not become better at any
            length (with a length penalty of 0 or more, longer texts can become better).
        n_best: how many texts to return for each item; at most k.

    Raises:
        ValueError: numbers outside of these ranges.

    Example:
        >>> import tempfile, torch, transformers, saccade
        >>> sizes = dict(vocab_size=8, d_model=8, num_layers=1, num_heads=2, d_ff=8, d_kv=4, decoder_start_token_id=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(folder)
        ...     model = saccade.models.load(folder)
        >>> search = saccade.models.BeamSearch(beams=3, n_best=2)
        >>> texts = model.generate(torch.tensor([[4, 5, 1]]), max_new_tokens=4, search=search)
        >>> texts.scores.shape
        torch.Size([1, 2])
    """

    beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n_best: int = 1

    def __post_init__(self) -> None:
        for name in ("beams", "n_best"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
        if self.n_best > self.beams:
            raise ValueError(f"n_best: {self.n_best} texts of {self.beams} beams; expected at most as many")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping: expected True, False or 'never', got {self.early_stopping!r}")


@torch.no_grad()
@shared_cores()
def search(
    step: DecodingStep,
    start: Tensor,
    beams: BeamSearch,
    constraints: Constraints,
    pad: int = 0,
    *,
    attention_mask: Tensor | None = None,
) -> Generated:
    """Search the best texts of each item.

    The first step has a row for each item, later ones k for each unfinished item: finished items leave the batch.

    Args:
        step: the model's decoding step, first called with `start`.
        start: (B, L), the tokens that texts begin with.
        pad: the token after the end of a text.
        attention_mask: (B, L) of `start`; constraints ignore masked tokens.

    Raises:
        ValueError: more beams than tokens in the vocabulary, or constraints with tokens outside it.
    """
    k, most, count = beams.beams, constraints.max_new_tokens, 0
    ids, texts, state = start, start[:, None], None
    while count < most:
        logits = step.step(ids)
        if state is None:
            _check(beams, constraints, logits.shape[-1])
            state, texts = _BeamState(logits, k, most, pad), masked_prompts(start, attention_mask)[:, None]
        scores = F.log_softmax(logits.to(state.scores.dtype), -1)
        scores = constraints.apply(scores, texts.flatten(0, 1), count).unflatten(0, texts.shape[:2])
        count += 1
        best, parents, tokens = _candidates(state.scores[..., None] + scores, max(2, 1 + len(constraints.ends)) * k)
        ended = constraints.finished(tokens, count)
        if bool(ended[:, :k].any()):  # finished texts among the first k leave room for other beams
            new = (best / count**beams.length_penalty).masked_fill(~ended, -torch.inf)[:, :k]
            state.finish(new, _continued(texts, parents[:, :k], tokens[:, :k])[..., start.shape[1] :], count)
        if count == most:
            break
        state.scores, chosen = best.masked_fill(ended, -torch.inf).topk(k)
        parents, tokens = parents.gather(1, chosen), tokens.gather(1, chosen)
        going = state.may_improve(beams, count, most).nonzero()[:, 0]
        if not len(going):
            break
        step.reorder((going[:, None] * texts.shape[1] + parents[going]).flatten())
        texts = _continued(texts[going], parents[going], tokens[going])
        ids = tokens[going].flatten()[:, None]
        state.keep(going)
    assert state is not None
    return state.result(beams.n_best)


class _BeamState:
    """The finished texts of all items, and the beams of unfinished items.

    Attributes:
        scores: (A, k), summed log-probabilities of the beams of the A unfinished items; (A, 1) at first.
        items: (A,), the indices of these items.
        best: (B, k), the scores of each item's finished texts, best first; -inf for missing ones.
        ids, lengths: (B, k, M) and (B, k) of those texts.
    """

    def __init__(self, logits: Tensor, k: int, most: int, pad: int):
        batch, device = logits.shape[0], logits.device
        dtype = torch.promote_types(logits.dtype, torch.float32)
        self.scores = torch.zeros(batch, 1, dtype=dtype, device=device)
        self.items = torch.arange(batch, device=device)
        self.best = torch.full((batch, k), -torch.inf, dtype=dtype, device=device)
        self.ids = torch.full((batch, k, most), pad, device=device)
        self.lengths = torch.zeros(batch, k, dtype=torch.int64, device=device)
        self.pad = pad

    def finish(self, scores: Tensor, ids: Tensor, length: int) -> None:
        """Merge texts `ids (A, k, length)` into the finished ones by their scores (A, k); -inf marks missing texts."""
        most, k = self.ids.shape[-1], self.best.shape[1]
        ids = F.pad(ids, (0, most - length), value=self.pad)
        lengths = torch.full_like(scores, length, dtype=torch.int64)
        both, chosen = torch.cat((self.best[self.items], scores), 1).topk(k)
        self.best[self.items] = both
        self.ids[self.items] = _rows(torch.cat((self.ids[self.items], ids), 1), chosen)
        self.lengths[self.items] = torch.cat((self.lengths[self.items], lengths), 1).gather(1, chosen)

    def may_improve(self, beams: BeamSearch, count: int, most: int) -> Tensor:
        """Whether each item can still find better texts, bool (A,)."""
        length = most if beams.early_stopping == "never" and beams.length_penalty > 0 else count
        hope, best = self.scores[:, 0] / length**beams.length_penalty, self.best[self.items]
        full = best.isfinite().all(1)
        worst = torch.where(full, best[:, -1], -torch.inf)
        stopped = full if beams.early_stopping is True else torch.zeros_like(full)
        return (hope > worst) & ~stopped

    def keep(self, going: Tensor) -> None:
        """Keep only these items."""
        self.scores, self.items = self.scores[going], self.items[going]

    def result(self, n: int) -> Generated:
        complete = self.best[:, :n].isfinite()
        lengths = self.lengths[:, :n].masked_fill(~complete, 0)
        longest = int(lengths.max())
        ids = self.ids[:, :n, :longest].masked_fill(~complete[..., None], self.pad)
        return Generated(ids, lengths, self.best[:, :n])


def _candidates(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best entries of `scores (A, rows, V)`, best first: scores, rows and tokens, each (A, count) or fewer."""
    vocabulary = scores.shape[-1]
    best, places = scores.flatten(1).topk(min(count, scores.shape[1] * vocabulary))
    return best, places.div(vocabulary, rounding_mode="floor"), places % vocabulary


def _continued(tensor: Tensor, parents: Tensor, tokens: Tensor) -> Tensor:
    """Append tokens to the texts of their parents: texts (A, rows, t) to (A, c, t + 1)."""
    return torch.cat((_rows(tensor, parents), tokens[..., None]), -1)


def _rows(texts: Tensor, chosen: Tensor) -> Tensor:
    """Select rows (A, c) of texts (A, rows, t): (A, c, t)."""
    return texts.gather(1, chosen[..., None].expand(-1, -1, texts.shape[-1]))


def _check(beams: BeamSearch, constraints: Constraints, vocabulary: int) -> None:
    if beams.beams > vocabulary:
        raise ValueError(f"beams: {beams.beams} are more than the {vocabulary} tokens of the vocabulary")
    constraints.check(vocabulary)
