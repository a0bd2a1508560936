"""Attention among tokens that a hash puts into one bucket: each token reads the tokens that it is likely to attend to.

    h_r(i) = argmax([q_i R_r; -q_i R_r])          a bucket for each token i and each of R rounds
    S_r(i) = {j != i : h_r(j) = h_r(i), c_r(i) - c_r(j) in {0, 1}},   causal: j < i only
    out_i  = sum_j softmax_j(scale q_i.k_j) v_j   over the union of S_1(i) ... S_R(i),   k_j = q_j / |q_j|

Kitaev, Kaiser, Levskaya, "Reformer: The Efficient Transformer" (2020): hashing is section 2 and Andoni et al. 2015, the
sets are figure 2, several rounds are equations 4 to 7 of appendix A. In each round tokens are sorted by (bucket,
position) and cut into chunks of m; c_r(i) is the chunk of token i, and a token reads its own chunk and the one before.
Keys are the queries, at unit length: there is no projection to keys. What the paper leaves to its reader:

- A token reads itself (then it is v_i) only where no round shows it anything else: the limit of the paper's -1e5.
- A pair that N rounds show counts once. The paper subtracts log N in each of them; here it counts in the first, which
  is the same sum. N is of rounds that show the pair: the paper's N (equation 7) also counts those where a border of
  chunks hides it, so that such a pair would weigh less than it should.
- The first chunk has none before it; it does not wrap around to the last.
- Causal, chunks are counted inside each bucket. Counted over all sorted tokens, as in the paper and its code, the
  borders of later buckets move with every token in an earlier one, also with tokens of the future: they would decide
  what the past has read, and no decoder could know it.
- Padded tokens stand in a bucket of their own at the end, and no one reads them. A token padded as key is padded as
  query, since it is one vector.

Time O(R L (m d + c d + log L)), c = buckets / 2 or, beyond 128 buckets, the root of their number, as two hashes are
then combined. Memory O(R L + L d), forward and backward: scores are formed a slab at a time, and again in the backward
pass, from the hashes of the forward pass. First derivatives only.

Shape legend: B batch, H query heads, Hv heads of values (head h reads h // (H // Hv)), L tokens, Lq queries (the last
tokens), R rounds, D key width, Dv value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._call import without_autocast
from .._checks import _scale, check_inputs
from .._masks import Mask
from .._masks._data import describe, whole
from .._unknown_arguments import advised
from . import _lsh
from ._causal_padding import CausalPadding, causal_padding_of
from ._mechanism import HeadSizes, Mechanism, MechanismConfig, Traits

_SINGLE_MASKS = "tokens are read as a hash sorts them, whatever a mask says of pairs"


@advised
def lsh_attention(
    query: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    *,
    buckets: int | None = None,
    rounds: int = 4,
    chunk: int = 64,
    seed: int = 0,
    hashes: Tensor | None = None,
    scale: float | None = None,
    key: Tensor | None = None,
) -> Tensor:
    """Reformer: softmax attention among tokens whose hashes fall into the same bucket.

    Kitaev, Kaiser and Levskaya, "Reformer: The Efficient Transformer" (2020), section 2.

    Args:
        query: (B, H, L, D). At unit length they are also the keys.
        value: (B, Hv, L, Dv).
        mask: `Causal()`, `Padding(...)`, both or None.
        buckets: even; more than 128 are rounded up to a product of two even numbers, each with a hash of its own.
            None: twice as many as an item has chunks, at least 2, so that a bucket holds half a chunk on average.
        rounds: R, of hashing.
        chunk: m, tokens in a chunk.
        seed: of the directions. They are the same for all items and different for each head and round.
        hashes: integers (B, H, R, L), not negative: buckets found in another way; `buckets`, `rounds` and `seed` are
            not read then.
        scale: factor of the dot products; None is D ** -0.5.
        key: (B, H, L, D), all tokens, where the queries are only those of the last Lq (decoding, causal); or where
            keys and the vectors to hash differ from the queries.

    Returns:
        (B, H, Lq, Dv) in the input dtype.

    Raises:
        TypeError: not a tensor, a wrong or mixed dtype, a number of another type.
        ValueError: shapes that do not fit, an odd number of buckets, fewer queries than keys without `Causal()`,
            another mask.

    Example:
        >>> import torch, saccade
        >>> query, value = torch.rand(1, 1, 4, 2), torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1)
        >>> hashes = torch.tensor([[[[0, 0, 1, 1]]]])  # tokens 0 and 1 share a bucket, and 2 and 3
        >>> saccade.variants.lsh_attention(query, value, hashes=hashes).flatten()
        tensor([2., 1., 4., 3.])
    """
    key = query if key is None else key
    if isinstance(value, Tensor) and isinstance(key, Tensor) and value.dim() == 4 == key.dim():
        value = _by_head(value, key.shape[1])
    query, key, value = check_inputs(query, key, value)
    scale = _scale(scale, query.shape[3])
    _check_numbers(buckets, rounds, chunk)
    batch, heads, length, _ = key.shape
    if query.shape[1] != heads:
        raise ValueError(f"key has {heads} heads (axis 1), expected query's {query.shape[1]}: keys are the queries")
    seen = causal_padding_of(mask, batch, query.shape[2], length, query.device, "lsh_attention", _SINGLE_MASKS)
    if query.shape[2] != length and not seen.causal:
        raise ValueError(
            f"key has length (axis 2) {length}, expected query's {query.shape[2]}: keys are the queries, and only "
            "with Causal() may the queries be the last ones"
        )
    dtype = torch.promote_types(query.dtype, torch.float32)
    tokens, value, real = _without_padding(key.to(dtype), value.to(dtype), seen.keys)
    rows, out_type = _rows(seen, query, length), query.dtype
    query = query.to(dtype) if rows is None else query.to(dtype).masked_fill(~rows, 0.0)
    with without_autocast(query.device):
        if hashes is None:
            counts = _bucket_counts(buckets, chunk, real, batch, length)
            hashes = _lsh.hashes(_scaled(tokens.detach()), counts, rounds, seed % (1 << 64))
        else:
            hashes = _checked_hashes(hashes, key)
        found = _guarded(query, tokens, value, _TokenFacts(hashes, real, chunk, seen.causal, scale, seed))
    return (found if rows is None else found.masked_fill(~rows, 0.0)).to(out_type)


class _TokenFacts(NamedTuple):
    """Properties of tokens other than their vectors."""

    hashes: Tensor  # int64 (B, H, R, L)
    real: Tensor | None  # bool (B or 1, 1, L, 1)
    chunk: int
    causal: bool
    scale: float
    seed: int


def _guarded(query: Tensor, key: Tensor, value: Tensor, tokens: _TokenFacts) -> Tensor:
    """`_read` with keys of unit length. NaN and infinity reach only the rows that read them.

    Such rows are NaN and have no gradient. Products with weights of 0 would carry NaN to all the chunk.
    """
    if bool(torch.isfinite(query.sum() + key.sum() + value.sum())):
        return _read(query, _unit(key), value, tokens)
    bad = [~torch.isfinite(tensor).all(-1, keepdim=True) for tensor in (query, key, value)]
    query, key, value = (x.masked_fill(wrong, 0.0) for x, wrong in zip((query, key, value), bad, strict=True))
    marks = (bad[1] | bad[2]).to(value.dtype)
    # Queries of 0 weigh all alike: no mark is lost in rounding.
    reached = _read(torch.zeros_like(query), key, marks, tokens) > 0
    return _read(query, _unit(key), value, tokens).masked_fill(reached | bad[0], torch.nan)


def _read(query: Tensor, key: Tensor, value: Tensor, tokens: _TokenFacts) -> Tensor:
    """The attention, (B, H, Lq, Dv). The queries are the last tokens; queries before the first token see nothing and
    give 0."""
    missing = key.shape[2] - query.shape[2]
    if 0 in key.shape or 0 in query.shape:
        return value.new_zeros(*query.shape[:3], value.shape[3]) + 0.0 * (query.sum() + value.sum())
    if missing < 0:
        return F.pad(_chunked(query[:, :, -missing:], key, value, tokens), (0, 0, -missing, 0))
    if missing and query.shape[2] <= tokens.chunk:
        return _one_by_one(query, key, value, tokens)
    return _chunked(F.pad(query, (0, 0, missing, 0)), key, value, tokens)[:, :, missing:]


def _chunked(query: Tensor, key: Tensor, value: Tensor, tokens: _TokenFacts) -> Tensor:
    """All tokens sorted into chunks, (B, H, L, Dv)."""
    length = key.shape[2]
    fill = -length % tokens.chunk
    hashes, real = _flat(tokens, fill)
    sorts = _lsh.in_order(hashes, real, tokens.chunk, inside=tokens.causal)
    flat = [F.pad(tensor, (0, 0, 0, fill)).flatten(0, 1) for tensor in (query, key, value)]
    out, lse = _lsh.ChunkedAttention.apply(*flat, sorts, tokens.chunk, tokens.causal, tokens.scale, tokens.seed)
    found = torch.where((lse == -math.inf)[..., None], flat[2], out)
    return found[:, :length].unflatten(0, key.shape[:2])


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, tokens: _TokenFacts) -> Tensor:
    """A few new queries after many tokens, causally: each is compared with the buckets of every token."""
    count, length = query.shape[2], key.shape[2]
    codes = _lsh.in_order(*_flat(tokens, 0), tokens.chunk, inside=True).codes
    row = torch.arange(length - count, length, device=key.device)
    seen = _lsh.near(codes[..., row], codes).any(1) & (torch.arange(length, device=key.device) < row[:, None])
    scores = (query.flatten(0, 1) * tokens.scale) @ key.flatten(0, 1).mT
    alone = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~(seen | alone), -math.inf).softmax(-1)
    own = value.flatten(0, 1)
    found = torch.where(alone, own[:, row], weights @ own)
    return found.unflatten(0, key.shape[:2])


def _flat(tokens: _TokenFacts, fill: int) -> tuple[Tensor, Tensor | None]:
    """Buckets (N, R, L) and real tokens (N, 1, L), padded by `fill` tokens; N = B Hq."""
    batch, heads = tokens.hashes.shape[:2]
    hashes = F.pad(tokens.hashes, (0, fill)).flatten(0, 1)
    if tokens.real is None and not fill:
        return hashes, None
    length = hashes.shape[-1]
    real = torch.arange(length, device=hashes.device) < length - fill
    if tokens.real is not None:
        real = F.pad(tokens.real[:, :, :, 0], (0, fill)).expand(batch, heads, length)
    return hashes, real.expand(batch, heads, length).reshape(batch * heads, 1, length)


def _unit(tokens: Tensor) -> Tensor:
    """Vectors at length 1, also those whose squares leave the range of floats; 0 stays 0."""
    tokens = _scaled(tokens)
    squares = tokens.square().sum(-1, keepdim=True)
    return tokens / squares.masked_fill(squares == 0, 1.0).sqrt()


def _scaled(tokens: Tensor) -> Tensor:
    """Vectors whose largest number is 1 or -1, so that no product of theirs leaves the range of floats; 0 stays 0."""
    largest = tokens.detach().abs().amax(-1, keepdim=True)
    return tokens / largest.masked_fill(largest == 0, 1.0)


def _by_head(value: Tensor, heads: int) -> Tensor:
    """(B, Hv, L, Dv) to (B, H, L, Dv); indivisible heads stay, and raise an error in the common check."""
    given = value.shape[1]
    return value if given in (0, heads) or heads % given else value.repeat_interleave(heads // given, dim=1)


def _without_padding(key: Tensor, value: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values with 0 in padded places, and the real keys as bool (B or 1, 1, L, 1)."""
    if keys is None:
        return key, value, None
    real = keys[:, None, :, None]
    return key.masked_fill(~real, 0.0), value.masked_fill(~real, 0.0), real


def _rows(padding: CausalPadding, query: Tensor, length: int) -> Tensor | None:
    """Rows that attend, bool (B or 1, 1, Lq, 1); None if all do. A token whose key is padding does not attend."""
    rows = None if padding.rows is None else padding.rows[:, None, :, None]
    if padding.keys is None:
        return rows
    missing = length - query.shape[2]
    own = F.pad(padding.keys, (-missing, 0))[:, None, :, None]  # a negative one cuts off
    return own if rows is None else own & rows


def _bucket_counts(buckets: int | None, chunk: int, real: Tensor | None, batch: int, length: int) -> list[int]:
    """Buckets of each item."""
    if buckets is not None:
        return [buckets] * batch
    lengths = [length] if real is None else real.sum((1, 2, 3)).tolist()
    counts = [2 * max(1, -(-one // chunk)) for one in lengths]
    return counts if len(counts) == batch else counts * batch


def _checked_hashes(hashes: Tensor, key: Tensor) -> Tensor:
    batch, heads, length, _ = key.shape
    if not isinstance(hashes, Tensor) or hashes.is_floating_point() or hashes.dtype == torch.bool:
        raise TypeError(f"hashes: expected integers (B, H, R, L), got {describe(hashes)}")
    wanted = (batch, heads, length)
    if hashes.dim() != 4 or (*hashes.shape[:2], hashes.shape[3]) != wanted or hashes.shape[2] < 1:
        raise ValueError(
            f"hashes: expected shape (B, H, R, L) = ({batch}, {heads}, R, {length}), got {tuple(hashes.shape)}"
        )
    if hashes.device != key.device:
        raise ValueError(f"hashes: are on {hashes.device}, expected query's device {key.device}")
    return hashes.long()


def _check_numbers(buckets: int | None, rounds: int, chunk: int) -> None:
    if buckets is not None and whole(buckets, "buckets", least=2) % 2:
        raise ValueError(
            f"buckets must be even, got {buckets}: each direction makes two, one on its side and one on the other"
        )
    whole(rounds, "rounds", least=1)
    whole(chunk, "chunk", least=1)


@dataclass(frozen=True)
class ReformerConfig(MechanismConfig):
    """`lsh_attention` as the mechanism of `saccade.nn`.

    It has first derivatives only. A decoding step hashes all cached tokens, O(L).

    Args:
        buckets: even; None: twice as many as an item has chunks. A model that decodes, or reads prefixes of what it was
            trained on, needs a number: with None its tokens move to other buckets as the text grows.
        rounds: of hashing. More rounds find more of the keys; each adds the cost of one round.
        chunk: tokens in a chunk.
        redraw: whether training draws directions anew for each call, with a seed from PyTorch's generator, as dropout
            does. If not, and always in evaluation, directions come from the module's own seed, which is part of its
            state. `torch.utils.checkpoint` restores the generator, so hashes repeat; with `preserve_rng_state=False` it
            does not, and needs `redraw=False`. Otherwise, with `use_reentrant=False` the backward pass raises
            RuntimeError; with `use_reentrant=True` nothing tells its recomputation from a new call, and gradients
            would be those of other buckets.

    Raises:
        TypeError, ValueError: numbers outside of these ranges, an odd number of buckets.

    Example:
        >>> import torch, saccade
        >>> mechanism = saccade.variants.ReformerConfig(buckets=2, rounds=1, chunk=4)
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=mechanism)
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 12, 8)).shape
        torch.Size([1, 12, 8])
    """

    name: ClassVar[str] = "reformer"
    shares_key: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        paper="Kitaev, Kaiser, Levskaya, Reformer: The Efficient Transformer, 2020",
        computes="approximation",
        time="O(rounds L (chunk d + sqrt(buckets) d + log L))",
        memory="O(rounds L + L d)",
        choose="Long sequences where few keys matter to a query, those near it in direction, and keys may be queries.",
        avoid="Keys have to differ from queries, attention is broad, or sequences are shorter than some thousands.",
        cross="keys are the queries, which have to be of one sequence",
        masks=_SINGLE_MASKS,
        grouped="keys are the queries, so that each query head has keys of its own",
        takes=("scale",),
    )

    buckets: int | None = None
    rounds: int = 4
    chunk: int = 64
    redraw: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self.buckets, self.rounds, self.chunk)
        if not isinstance(self.redraw, bool):
            raise TypeError(f"redraw must be a bool, got {describe(self.redraw)}")

    @classmethod
    def usual(cls, length: int) -> ReformerConfig:
        """Section 2: chunks of twice the tokens that a bucket holds on average; 64 tokens and 4 rounds."""
        return cls(buckets=2 * max(1, -(-length // 64)))

    def build(self, heads: HeadSizes) -> ReformerAttention:
        return ReformerAttention(self)


class ReformerAttention(Mechanism):
    """`lsh_attention` as a module that stores its random directions. `ReformerConfig.build` makes it."""

    seed: Tensor

    def __init__(self, config: ReformerConfig):
        super().__init__()
        self.config = config
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the seed anew."""
        self.seed.copy_(_drawn())

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, **options: Any) -> Tensor:
        """(B, H, Lq, D), (B, H, L, D), (B, Hv, L, Dv) -> (B, H, Lq, Dv); the queries are those of the last keys.

        Raises:
            ValueError: as `lsh_attention`; new queries after a cache where the buckets depend on the length.
        """
        config = self.config
        if config.buckets is None and query.shape[2] != key.shape[2]:
            raise ValueError(
                "buckets: None takes their number from the length, so that tokens move as it grows; "
                "decoding needs a number"
            )
        seed = _drawn() if self.training and config.redraw else self.seed
        numbers: dict[str, Any] = dict(buckets=config.buckets, rounds=config.rounds, chunk=config.chunk)
        return lsh_attention(query, value, mask, seed=int(seed), key=key, **numbers, **options)

    def extra_repr(self) -> str:
        config = self.config
        return f"buckets={config.buckets}, rounds={config.rounds}, chunk={config.chunk}"


def _drawn() -> Tensor:
    return torch.randint(2**63 - 1, ())
