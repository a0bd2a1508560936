"""Attention to a few blocks of keys, chosen for each query by the mean of their keys.

    s_ib  = q_i . mean(k_j : j in block b)
    C_i   = {own block of i}  and  the k - 1 other blocks of largest s_ib, the first ones in a tie
    out_i = sum_j softmax_j(scale q_i.k_j) v_j        over the keys j in C_i that the mask shows to query i

Lu et al., "MoBA: Mixture of Block Attention for Long-Context LLMs" (2025), equations 2 to 6. k counts the own block, as
in the paper's sparsity 1 - k m / L and in its code; k = 1 is the own block alone. Causal, the own block is read up to
the query, whole blocks before it are chosen among, and no later one is read or looked at. Bidirectional (not in the
paper), all other blocks are. Each query head chooses for itself; heads that share keys share the means.

Blocks are counted over real tokens: a padded item, on whichever side, has the blocks it has alone, and its means are of
real keys. The last block may be short. s is formed in float64 and rounded to float32 (float64 inputs: not rounded), so
that the choice hangs on no order of sums: decoding chooses what training chose, and equal means are ties.

The own block is one call of the operator; all (query, chosen block) pairs, sorted by block, are another; their parts
are merged by their logarithms. Gradients reach query, key and value through the blocks read, not through the choice.

Time O(L k m d + L^2 d / m), m tokens in a block; memory O(L k d), forward and backward. A decoding step reads keys and
values of k blocks, and the sums of all blocks, which `saccade.nn.BlockSumsLayer` keeps; without them all keys once.

Dense attention has the same weights, so that a model may be switched between the two.

Shape legend: B batch, Hq / Hkv query and key-value heads, G = Hq / Hkv, N = B Hkv, Lq / Lk lengths, n blocks,
P = (k - 1) G Lq pairs of a query and a block, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._attention import attention, attention_with_lse, merge
from .._checks import _scale, check_inputs
from .._dropout import Dropout, another
from .._masks import Documents, Mask, Padding, as_mask
from .._masks._data import whole
from .._unknown_arguments import advised
from ._causal_padding import CausalPadding, causal_padding_of
from ._mechanism import HeadSizes, Mechanism, MechanismConfig, Traits

_REASON = "the mean of a block has to be of keys that every later query may see"
_SCORES = 1 << 22  # scores of queries and blocks that are held at once


@advised
def block_topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    block: int,
    k: int,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float | Dropout = 0.0,
) -> Tensor:
    """Softmax attention to the query's own block of keys and the k - 1 other blocks of largest mean score.

    The score of a block is `q_i . mean(k_j : j in block)`. Lu et al., "MoBA: Mixture of Block Attention for
    Long-Context LLMs" (2025), equations 2 to 6. If k is at least the number of blocks, it is `saccade.attention`.

    Args:
        query: (B, Hq, Lq, D).
        key, value: (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv).
        mask: `Causal()` (queries are the last tokens), `Padding(...)`, both or None.
        block: m, tokens in a block.
        k: blocks that a query reads, its own among them.
        scale, softcap, sink, dropout: as in `saccade.attention`. The sink's logit takes no part in the choice.

    Returns:
        (B, Hq, Lq, Dv) in the input dtype; rows that see no key are 0.

    Raises:
        TypeError, ValueError: as `saccade.attention`; a block or k below 1; another mask; another number of keys than
            of queries without `Causal()`.

    Example:
        >>> import torch, saccade
        >>> x = torch.rand(1, 2, 8, 4)
        >>> out = saccade.variants.block_topk_attention(x, x, x, saccade.Causal(), block=2, k=2)
        >>> torch.allclose(out[:, :, :4], saccade.attention(x, x, x, saccade.Causal())[:, :, :4])  # two blocks: all
        True
    """
    return _attend(query, key, value, mask, block, k, scale, softcap, sink, dropout, None)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    block: int,
    k: int,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    dropout: float | Dropout,
    sums: Tensor | None,
) -> Tensor:
    """`block_topk_attention`; `sums` (B, Hkv, n, D) are those of the keys of each block, where they are known."""
    query, key, value = check_inputs(query, key, value)
    scale = _scale(scale, query.shape[3])
    block, k = whole(block, "block", least=1), whole(k, "k", least=1)
    seen = _seen(query, key, mask)
    (_, _, Lq, _), Lk = query.shape, key.shape[2]
    meaning: dict[str, Any] = {"scale": scale, "softcap": softcap}
    if k * block >= Lk or 0 in query.shape:
        return attention(query, key, value, mask, sink=sink, dropout=dropout, **meaning)
    if Lq == 1 and seen == (True, None, None) and dropout == 0.0:
        return attention(query, *_read_by_one(query, key, value, block, k, scale, sums), sink=sink, **meaning)
    blocks = _placed(seen, Lq, Lk, block, query.device)
    given, own = as_mask(mask), Documents(blocks.rows, blocks.keys)
    parts = [
        attention_with_lse(
            query, key, value, own if given is None else own & given, sink=sink, dropout=dropout, **meaning
        )
    ]
    if k > 1:
        others = _others(query.detach(), _means(key.detach(), blocks, sums), blocks.rows, blocks.limits, k, scale)
        # Its rows are numbered anew: with the same seed some would be dropped as others are in the own block.
        parts += _read(query, key, value, others, blocks, dropout=another(dropout), **meaning)
    return merge(parts)[0]


@torch.no_grad()
@advised
def chosen_blocks(
    query: Tensor, key: Tensor, mask: Mask | Tensor | None = None, *, block: int, k: int, scale: float | None = None
) -> Tensor:
    """The blocks that each query of `block_topk_attention` reads.

    Args and errors: as `block_topk_attention`.

    Returns:
        int64 (B, Hq, Lq, k): the query's own block first, then by falling score; -1 for none.

    Example:
        >>> import torch, saccade
        >>> query = key = torch.tensor([1.0, 5.0, 2.0, 1.0]).view(1, 1, 4, 1)
        >>> saccade.variants.chosen_blocks(query, key, saccade.Causal(), block=1, k=2)
        tensor([[[[ 0, -1],
                  [ 1,  0],
                  [ 2,  1],
                  [ 3,  1]]]])
    """
    query, key, _ = check_inputs(query, key, key)
    block, k = whole(block, "block", least=1), whole(k, "k", least=1)
    seen = _seen(query, key, mask)
    if 0 in query.shape or not key.shape[2]:
        return query.new_full((*query.shape[:3], k), -1, dtype=torch.int64)
    blocks = _placed(seen, query.shape[2], key.shape[2], block, query.device)
    own = blocks.rows[:, None, :, None].expand(*query.shape[:3], 1)
    others = _others(query, _means(key, blocks), blocks.rows, blocks.limits, k, _scale(scale, query.shape[3]))
    return torch.cat([own, others], dim=-1)


class _Blocks(NamedTuple):
    """The block of each token. Tables of one item hold for the whole batch."""

    rows: Tensor  # int64 (1 or B, Lq): the own block of a query, -1: it reads nothing
    keys: Tensor  # int64 (1 or B, Lk), never falling
    counts: Tensor  # int64 (1 or B,): blocks with real keys
    real: Tensor | None  # bool (1 or B, Lk); None: all keys are
    size: int
    causal: bool

    @property
    def most(self) -> int:
        """n, the largest number of blocks in an item."""
        return -(-self.keys.shape[1] // self.size)

    @property
    def limits(self) -> Tensor | None:
        """Upper limits (exclusive) of the blocks to choose from, int64 (1 or B,); None if the limit of each query is
        its own block."""
        return None if self.causal else self.counts


def _seen(query: Tensor, key: Tensor, mask: Mask | Tensor | None) -> CausalPadding:
    """The visible pairs by the mask; TypeError or ValueError as `block_topk_attention`."""
    (batch, _, Lq, _), Lk, device = query.shape, key.shape[2], query.device
    seen = causal_padding_of(mask, batch, Lq, Lk, device, "block_topk_attention", _REASON)
    if Lq != Lk and not seen.causal:
        raise ValueError(
            f"key has length (axis 2) {Lk}, expected query's {Lq}: a query has its own block among keys of its own "
            "sequence, and only with Causal() may queries be the last tokens of it"
        )
    return seen


def _placed(padding: CausalPadding, Lq: int, Lk: int, block: int, device: torch.device) -> _Blocks:
    upto = torch.arange(1, Lk + 1, device=device)[None] if padding.keys is None else padding.keys.cumsum(-1)
    # A query that stands on padding is where the last real token before it is.
    rank = F.pad(upto - 1, (Lq - Lk, 0), value=-1)
    if not padding.causal:
        rank = rank.clamp(min=0)
    rows = torch.div(rank, block, rounding_mode="floor")
    if padding.rows is not None:
        rows = rows.masked_fill(~padding.rows, -1)
    counts = -(-upto[:, -1] // block) if Lk else upto.sum(-1)
    return _Blocks(rows, (upto - 1).clamp(min=0) // block, counts, padding.keys, block, padding.causal)


def _others(query: Tensor, means: Tensor, rows: Tensor, limits: Tensor | None, k: int, scale: float) -> Tensor:
    """The other blocks that each query reads: int64 (B, Hq, Lq, k - 1) by falling score, -1 for none.

    `means` (B, Hkv, n, D) of blocks, `rows` (1 or B, Lq) the own block, `limits` as in `_Blocks`.
    """
    kv_heads, most = means.shape[1:3]
    means = means[:, :, None].mT
    number = torch.arange(most, device=query.device)
    # A product of matrices may add each column in an order of its own. Rounded to a narrower dtype, equal blocks have
    # equal scores all the same; in float64 nothing is rounded, so there each sum stands alone.
    alone = query.dtype == torch.float64
    size = query.shape[0] * query.shape[1] * most * (query.shape[3] if alone else 1)
    step = max(1, _SCORES // max(size, 1))
    found = []
    for some, own in zip(query.split(step, dim=2), rows.split(step, dim=1), strict=True):
        some = some.unflatten(1, (kv_heads, -1)).to(means.dtype) * scale
        scores = (some[..., None, :] * means.mT[..., None, :, :]).sum(-1) if alone else some @ means
        scores = scores.flatten(1, 2).to(torch.promote_types(query.dtype, torch.float32))
        own = own[:, None, :, None]
        open_ = number < own if limits is None else (number != own) & (number < limits.view(-1, 1, 1, 1))
        found.append(_largest(scores, open_ & (own >= 0), k - 1))
    return torch.cat(found, dim=2)


def _means(key: Tensor, blocks: _Blocks, sums: Tensor | None = None) -> Tensor:
    """Means of the real keys of each block, (B, Hkv, n, D); 0 for blocks without any."""
    real = blocks.real
    if sums is None:
        if real is not None:
            key = key.masked_fill(~real[:, None, :, None], 0.0)
            order = real.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
            key = key.gather(2, order[:, None, :, None].expand(key.shape))
        sums = _sums(key, blocks.size)
    lengths = torch.full((1,), key.shape[2], device=key.device) if real is None else real.sum(-1)
    starts = blocks.size * torch.arange(blocks.most, device=key.device)
    held = (lengths[:, None] - starts).clamp(1, blocks.size)
    return sums / held[:, None, :, None]


def _sums(key: Tensor, size: int) -> Tensor:
    """Sums of each `size` keys, (B, Hkv, n, D)."""
    wide = key.dtype if key.device.type == "mps" else torch.float64
    return F.pad(key, (0, 0, 0, -key.shape[2] % size)).unflatten(2, (-1, size)).sum(3, dtype=wide)


def _read_by_one(
    query: Tensor, key: Tensor, value: Tensor, block: int, k: int, scale: float, sums: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keys and values (B, Hq, n, D) for the last token: the blocks it chooses, then its own up to itself.

    There are more than k blocks of keys, so it has as many to choose among as it may choose.
    """
    batch, kv_heads, group = query.shape[0], key.shape[1], query.shape[1] // key.shape[1]
    own = (key.shape[2] - 1) // block
    before = own * block
    sums = _sums(key[:, :, :before].detach(), block) if sums is None else sums[:, :, :own]
    rows = torch.full((1, 1), own, device=query.device)
    chosen = _others(query.detach(), sums / block, rows, None, k, scale)[:, :, 0]
    item = torch.arange(batch, device=query.device)[:, None, None]
    head = torch.arange(kv_heads, device=query.device).repeat_interleave(group)[:, None]

    def read(tensor: Tensor) -> Tensor:
        others = tensor[:, :, :before].unflatten(2, (own, block))[item, head, chosen].flatten(2, 3)
        recent = tensor[:, :, None, before:].expand(-1, -1, group, -1, -1).flatten(1, 2)
        return torch.cat((others, recent), 2)

    return read(key), read(value)


def _largest(scores: Tensor, open_: Tensor, count: int) -> Tensor:
    """Indices (..., count) of the `count` largest scores among the open ones. In a tie the first index is taken; a
    missing entry is -1.

    `torch.max` returns the first index of a tie; `torch.topk` does not guarantee it. Overwrites the scores.
    """
    lowest = torch.finfo(scores.dtype).min
    scores = scores.clamp_(min=lowest).masked_fill_(~open_, -torch.inf)
    found = []
    for _ in range(count):
        best, place = scores.max(-1, keepdim=True)
        found.append(place.masked_fill(best == -torch.inf, -1))
        scores.scatter_(-1, place, -torch.inf)
    return torch.cat(found, dim=-1) if found else scores.new_empty((*scores.shape[:-1], 0), dtype=torch.int64)


def _read(
    query: Tensor, key: Tensor, value: Tensor, others: Tensor, blocks: _Blocks, **meaning: Any
) -> list[tuple[Tensor, Tensor]]:
    """The parts of the other blocks: k - 1 times out (B, Hq, Lq, Dv) and lse (B, Hq, Lq).

    For each head of keys, queries are repeated for each block they read, and sorted by it: those of one block read it
    together, as a document.
    """
    batch, heads, length, count = others.shape
    kv_heads = key.shape[1]
    wanted = others.unflatten(1, (kv_heads, -1)).permute(0, 1, 4, 2, 3).reshape(batch * kv_heads, -1)
    held, order = wanted.masked_fill(wanted < 0, blocks.most).sort(dim=-1, stable=True)
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    inverse = torch.empty_like(order).scatter_(-1, order, place)
    rows = query.reshape(batch * kv_heads, -1, query.shape[-1]).repeat(1, count, 1)
    mask: Mask = Documents(held, _by_item(blocks.keys, kv_heads))
    if blocks.real is not None:
        mask = mask & Padding(_by_item(blocks.real, kv_heads))
    out, lse = attention_with_lse(
        _permuted(rows, order)[:, None],
        key.reshape(-1, 1, *key.shape[2:]),
        value.reshape(-1, 1, *value.shape[2:]),
        mask,
        **meaning,
    )
    sizes = (batch, kv_heads, count, heads // kv_heads, length)
    outs = _permuted(out[:, 0], inverse).view(*sizes, -1).unbind(2)
    lses = lse[:, 0].gather(1, inverse).view(sizes).unbind(2)
    return [(one.flatten(1, 2), other.flatten(1, 2)) for one, other in zip(outs, lses, strict=True)]


def _by_item(table: Tensor, kv_heads: int) -> Tensor:
    """(1 or B, L) to (1 or B Hkv, L)."""
    return table if table.shape[0] == 1 else table.repeat_interleave(kv_heads, dim=0)


def _permuted(rows: Tensor, order: Tensor) -> Tensor:
    """(N, P, n) with the row `order[n, p]` at place p."""
    first = torch.arange(rows.shape[0], device=rows.device)[:, None] * rows.shape[1]
    return rows.flatten(0, 1).index_select(0, (order + first).flatten()).view(rows.shape)


@dataclass(frozen=True)
class BlockTopKConfig(MechanismConfig):
    """`block_topk_attention` as the mechanism of `saccade.nn` (MoBA).

    The mean of a block may hide a key, and the choice has no gradient. A decoding step reads k blocks and the sums of
    all blocks.

    Args:
        block: tokens in a block.
        k: blocks that a query reads, its own among them.

    Raises:
        TypeError, ValueError: not ints, or below 1.

    Example:
        >>> import torch, saccade
        >>> mechanism = saccade.variants.BlockTopKConfig(block=2, k=2)
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=mechanism)
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 6, 8), mask=saccade.Causal()).shape
        torch.Size([1, 6, 8])
    """

    name: ClassVar[str] = "block-topk"
    traits: ClassVar[Traits] = Traits(
        paper="Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, 2025",
        computes="softmax",
        time="O(L k block d + L^2 d / block)",
        memory="O(L k d)",
        choose="Long contexts whose queries need a few neighbourhoods, in a model that may go back to dense attention.",
        avoid="Sequences are shorter than some thousands of tokens, or what matters is scattered over many blocks.",
        cross="a query has its own block only among keys of its own sequence",
        masks=_REASON,
        takes=("scale", "softcap", "sink", "dropout"),
    )

    block: int = 512
    k: int = 3

    def __post_init__(self) -> None:
        whole(self.block, "block", least=1)
        whole(self.k, "k", least=1)

    @classmethod
    def usual(cls, length: int) -> BlockTopKConfig:
        """Section 3.1: 3 blocks of 512 among the 16 of a sequence; of shorter sequences, 16 blocks."""
        return cls(block=max(1, min(512, -(-length // 16))), k=3)

    def build(self, heads: HeadSizes) -> BlockTopKAttention:
        return BlockTopKAttention(self)


class BlockTopKAttention(Mechanism):
    """`block_topk_attention` as a module. It has no parameters; `BlockTopKConfig.build` makes it."""

    def __init__(self, config: BlockTopKConfig):
        super().__init__()
        self.config = config

    @property
    def summed_block(self) -> int:
        return self.config.block

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, **options: Any) -> Tensor:
        options = {"scale": None, "softcap": None, "sink": None, "dropout": 0.0, "sums": None} | options
        return _attend(query, key, value, mask, self.config.block, self.config.k, **options)

    def extra_repr(self) -> str:
        return f"block={self.config.block}, k={self.config.k}"
