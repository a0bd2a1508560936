"""Scores of every head of a model on one text: average weights on kinds of targets, and the scores by chance.

A row counts for a score where it is a token of the text, sees more than 8 keys, and sees a target; the score is the
weight on the targets averaged over those rows. Chance is the score of a head with equal weights on all visible keys:
the same code on a query of zeros. Sparse targets are listed as pairs, whose weights are exact:

    p_ij = exp(s_ij - lse_i),  s_ij = softcap(scale q_i.k_j) + bias_ij

Shape legend: B texts (1 for scores), Hq / Hkv query and key-value heads, L tokens with the special ones, D width, P
pairs of a row and a target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...operator._biases import RelativeScores
from ...operator._call import CheckedCall, ObservedCall
from ...operator._checks import make_call
from ...operator._scores._score import ModifiedScores, leaves_of
from ...operator._statistics import Statistics, statistics
from ..inspection import TextModel
from ..inspection._chance import UniformStatistics

FEW = 8  # rows that see no more keys are left out: their weights are high by chance
DORMANT = 0.2  # of the mean output norm of the layer's heads: below it a head is dormant at a token
REPEAT_LENGTH, SHORTEST_REPEAT = 48, 8
ON_TEXT = ("previous", "next", "self", "first", "delimiter", "punctuation", "induction", "duplicate")
ON_REPEATS = ("repeat induction", "repeat duplicate")
SCORES = (*ON_TEXT, *ON_REPEATS, "broad", "dormant")
"""The names of all scores that a study gives each head."""
GROUPS = ("delimiter", "punctuation")

ByHead = dict[str, np.ndarray]  # (layers, heads) by score; NaN where it was not measured
_ENTRIES = 2**22  # products formed at once: 16 MiB of float32


class TextScores(NamedTuple):
    """The scores of one text, and the scores of a head with equal weights."""

    scores: ByHead
    chance: ByHead


@dataclass(frozen=True, eq=False)
class MarkedText:
    """The tokens that a model reads for a text, and masks (L,) of their kinds."""

    ids: tuple[int, ...]
    is_text: Tensor  # not a special token added by the tokenizer
    ordinary: Tensor  # has a letter or a digit
    groups: dict[str, Tensor]  # by the names of GROUPS
    before: tuple[int, ...]
    after: tuple[int, ...]


def mark(model: TextModel, text: str) -> MarkedText:
    """The tokens of ``text`` as the model reads it.

    Delimiters are the special tokens but the very first one, and line breaks; punctuation is a token of the text
    without a letter, a digit or a line break that is not blank.
    """
    encoding = model.encode(text)
    pieces = [text[start:stop] for start, stop in encoding.spans]
    special = [token in model.special for token in encoding.ids]
    letters = [any(c.isalnum() for c in piece) and not s for piece, s in zip(pieces, special, strict=True)]
    breaks = [not word and ("\n" in piece or s) for piece, word, s in zip(pieces, letters, special, strict=True)]
    marks = [
        not word and not line and bool(piece.strip()) for piece, word, line in zip(pieces, letters, breaks, strict=True)
    ]
    ahead, behind = len(model.before), len(model.after)

    def placed(inner: list[bool], around: bool) -> Tensor:
        mask = torch.tensor([around] * ahead + inner + [around] * behind, dtype=torch.bool)
        if ahead:
            mask[0] = False
        return mask

    return MarkedText(
        (*model.before, *encoding.ids, *model.after),
        placed([True] * len(pieces), False),
        placed(letters, False),
        {"delimiter": placed(breaks, True), "punctuation": placed(marks, False)},
        model.before,
        model.after,
    )


def measure_text(model: TextModel, tokens: MarkedText, draw: np.random.Generator) -> TextScores:
    """Every score of every head on one text; ``draw`` shuffles its tokens for the repeats."""
    on_text = _on_text(model, tokens)
    on_repeats = _on_repeats(model, tokens, draw)
    return TextScores(on_text.scores | on_repeats.scores, on_text.chance | on_repeats.chance)


# A text


def _on_text(model: TextModel, tokens: MarkedText) -> TextScores:
    pairs = {name: _earlier(tokens, shift) for name, shift in (("induction", 1), ("duplicate", 0))}
    taken = _LayerScores(model)
    evens = UniformStatistics(lambda call: _statistics(call, tokens.groups))

    def visit(layer: int, call: ObservedCall) -> None:
        own, (even_call, even) = _statistics(call, tokens.groups), evens.of(call)
        rows = _rows(own, tokens.is_text.to(own.counted.device))
        for name in ON_TEXT[:6]:
            taken.add(name, layer, own.mass[name][0], even.mass[name][0], rows)
        for name, (of_row, keys) in pairs.items():
            both = (pair_weights(each, its.lse, of_row, keys) for each, its in ((call, own), (even_call, even)))
            weights = [_by_row(on_pair, of_row, rows.shape[1]) for on_pair in both]
            taken.add(name, layer, weights[0], weights[1], rows)
        taken.keep("broad", layer, _mean(own.evenness[0], rows), 0.0)
        taken.keep("dormant", layer, _dormant(call, rows), 0.0)

    model.run(torch.tensor([tokens.ids]), visit)
    return taken.measured()


def _earlier(tokens: MarkedText, shift: int) -> tuple[Tensor, Tensor]:
    """(rows, keys) of every ordinary token and each earlier occurrence of it, shifted by ``shift`` tokens."""
    places: dict[int, list[int]] = {}
    rows, keys = [], []
    for row, (token, counts) in enumerate(zip(tokens.ids, tokens.ordinary.tolist(), strict=True)):
        if counts:
            earlier = [place + shift for place in places.get(token, ()) if place + shift < row]
            rows += [row] * len(earlier)
            keys += earlier
            places.setdefault(token, []).append(row)
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(keys, dtype=torch.int64)


def _by_row(weights: Tensor, rows: Tensor, length: int) -> Tensor:
    """(Hq, L): weights of pairs (Hq, P), summed over the pairs of each row."""
    return weights.new_zeros(weights.shape[0], length).index_add_(1, rows.to(weights.device), weights)


def _dormant(call: ObservedCall, rows: Tensor) -> Tensor:
    """(Hq,): the share of rows at which a head's output is below DORMANT of the mean norm over the layer's heads.

    The output is the weighted sum of the head's values, before the projection. Its norm over the layer's mean:
    Sandoval-Segura et al. 2025, "Identifying and Evaluating Inactive Heads in Pretrained LLMs". NaN for a single head.
    """
    norm = call.out[0].to(torch.promote_types(call.out.dtype, torch.float32)).norm(dim=-1)
    if norm.shape[0] < 2:
        return torch.full((1,), float("nan"))
    return _mean((norm < DORMANT * norm.mean(0)).to(norm.dtype), rows)


# Random tokens of the text, written twice


def _on_repeats(model: TextModel, tokens: MarkedText, draw: np.random.Generator) -> TextScores:
    """The scores on repeated random tokens. No token occurs twice in one copy, so each has one earlier occurrence
    (Olsson et al. 2022)."""
    taken = _LayerScores(model)
    known = sorted({token for token, counts in zip(tokens.ids, tokens.ordinary.tolist(), strict=True) if counts})
    around = len(tokens.before) + len(tokens.after)
    room = len(known) if model.context is None else (model.context - around) // 2
    length = min(REPEAT_LENGTH, room, len(known))
    if length < SHORTEST_REPEAT:
        for name in ON_REPEATS:
            taken.miss(name)
        return taken.measured()
    copy = draw.choice(known, length, replace=False).tolist()
    rows = torch.arange(length) + len(tokens.before) + length
    targets = {"repeat induction": rows - length + 1, "repeat duplicate": rows - length}
    evens = UniformStatistics(lambda call: _statistics(call, {}))

    def visit(layer: int, call: ObservedCall) -> None:
        own, (even_call, even) = _statistics(call, {}), evens.of(call)
        for name, keys in targets.items():
            weights, expected = (
                pair_weights(each, its.lse, rows, keys) for each, its in ((call, own), (even_call, even))
            )
            taken.add(name, layer, weights, expected, torch.ones_like(weights, dtype=torch.bool))

    model.run(torch.tensor([[*tokens.before, *copy, *copy, *tokens.after]]), visit)
    return taken.measured()


# Shared by both


def _statistics(call: ObservedCall, groups: dict[str, Tensor]) -> Statistics:
    return statistics(
        call.query,
        call.key,
        **call.scoring(),
        groups={name: mask.to(call.query.device) for name, mask in groups.items()},
        received=False,
    )


def _rows(statistics: Statistics, is_text: Tensor) -> Tensor:
    """(Hq, L): tokens of the text that see more than FEW keys; if none does, those that see the most."""
    keys = statistics.keys_seen.expand(statistics.counted.shape)[0]
    return (keys > min(FEW, int(keys.max()) - 1)) & statistics.counted[0] & is_text


def _mean(values: Tensor, rows: Tensor) -> Tensor:
    """(Hq,) averages of (Hq, L) over the rows that count; NaN for a head without rows."""
    return torch.where(rows, values, 0.0).sum(-1) / rows.sum(-1)


class _LayerScores:
    """Scores and chance, collected layer by layer."""

    def __init__(self, model: TextModel):
        self._heads = model.heads
        self._scores: dict[str, np.ndarray] = {}
        self._chance: dict[str, np.ndarray] = {}

    def add(self, name: str, layer: int, weights: Tensor, even: Tensor, rows: Tensor) -> None:
        """The weights on the targets (Hq, L), averaged over the rows that see one."""
        counted = rows & (even > 0)
        self.keep(name, layer, _mean(weights, counted), _mean(even.expand_as(weights), counted))

    def keep(self, name: str, layer: int, score: Tensor, chance: Tensor | float) -> None:
        self.miss(name)
        heads = self._heads[layer]
        self._scores[name][layer, :heads] = score.double().cpu()
        self._chance[name][layer, :heads] = chance.double().cpu() if isinstance(chance, Tensor) else chance

    def miss(self, name: str) -> None:
        """Keep NaN for a score that was not measured."""
        for held in (self._scores, self._chance):
            held.setdefault(name, np.full((len(self._heads), max(self._heads)), np.nan))

    def measured(self) -> TextScores:
        return TextScores(self._scores, self._chance)


def pair_weights(call: ObservedCall, lse: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The weight that row `rows[n]` gives to key `keys[n]`, for every n: O(P D) work for each head.

    Args:
        call: an attention call of one text (B = 1).
        lse: (1, Hq, Lq), log of each row's softmax denominator, as `saccade.statistics` gives it.
        rows, keys: (P,) int64.

    Returns:
        (Hq, P) in the dtype of `lse`; 0 where the row does not see the key.
    """
    checked = make_call(
        call.query,
        call.key,
        call.value,
        **call.scoring(),
        dropout=0.0,
    )
    if checked.batch != 1:
        raise ValueError(f"call: expected one text, got a batch of {checked.batch}")
    rows, keys = rows.to(checked.device), keys.to(checked.device)
    step = max(1, _ENTRIES // (checked.heads * checked.query.shape[3]))
    parts = [_weights(checked, lse, rows[i : i + step], keys[i : i + step]) for i in range(0, len(rows), step)]
    return torch.cat(parts, 1) if parts else lse.new_zeros(checked.heads, 0)


def _weights(call: CheckedCall, lse: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    heads = torch.arange(call.heads, device=call.device)[:, None]
    of_key = heads[:, 0] // (call.heads // call.kv_heads)
    query, key = call.query[0, :, rows], call.key[0][of_key[:, None], keys]  # (Hq, P, D)
    products = (query.to(lse.dtype) * key.to(lse.dtype)).sum(-1)
    logits = call.scale * products
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    shown = _visible(call, heads, rows, keys)
    if isinstance(call.bias, ModifiedScores):
        logits = _modified(call.bias, call, logits, shown, rows, keys)
    else:
        logits = logits + _scores(call, heads, rows, keys).to(lse.dtype)
    visible = shown & (lse[0, :, rows] > float("-inf"))
    return torch.where(visible, torch.exp(logits - torch.where(visible, lse[0, :, rows], 0.0)), 0.0)


def _scores(call: CheckedCall, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The bias of each head (H, 1) and pair (P,)."""
    bias = call.bias
    if bias is None:
        return torch.zeros((), device=call.device)
    if isinstance(bias, RelativeScores):
        placement = call.placement
        at = placement if isinstance(placement, int) else placement.to(call.device)
        distance = keys - rows - at
        return bias._value(bias.parameter, *torch.broadcast_tensors(heads, distance))
    table = bias.parameter.expand(1, call.heads, call.length_q, call.length_k)
    return table[0, heads, rows, keys]


def _modified(
    bias: ModifiedScores, call: CheckedCall, scores: Tensor, visible: Tensor, rows: Tensor, keys: Tensor
) -> Tensor:
    """The scores (H, P) after a `Score`; pairs lie along the axis of keys."""
    heads, origin = torch.arange(call.heads, device=call.device), 0 if call.mask is None else call.mask._origin()[1]
    leaves = leaves_of((0, 1), heads, rows[:1] * 0, keys + origin, 0)
    at = call.placement if isinstance(call.placement, int) else call.placement.to(call.device)
    leaves["q"] = (rows + at + origin).view(1, 1, 1, -1)
    shown = visible.expand(scores.shape)[None, :, None]
    loads = bias._loads(bias.parameter, leaves, shown, scores.dtype)
    return bias._apply(scores[None, :, None], loads, leaves, shown)[0, :, 0]


def _visible(call: CheckedCall, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    if call.mask is None:
        return torch.ones((), dtype=torch.bool, device=call.device)
    item = torch.zeros_like(heads)
    sizes = call.length_q, call.length_k
    return call.mask._attends(item, heads, rows[None], keys[None], *sizes).expand(call.heads, len(rows))
