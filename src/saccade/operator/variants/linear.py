"""Linear attention: keys and values are summed once, independently of the queries.

    out_i = phi(q_i) . sum_j phi(k_j) v_j^T / phi(q_i) . sum_j phi(k_j)

Katharopoulos, Vyas, Pappas and Fleuret, "Transformers are RNNs: Fast Autoregressive Transformers with Linear
Attention", 2020: equations 4 and 5; causal with j <= i, equations 9 to 12; as a recurrence, equations 16 to 20. A
product of features stands for exp(q . k).

Time O(L M (Dv + C)) and memory O(L (M + Dv)) for chunks of C = 64 tokens, forward and backward; a decode step O(M Dv),
with a state of M x Dv + M numbers a head (M features, see feature_maps.py).

Shape legend: B batch, Hq / Hkv query and key-value heads (query head h reads h // (Hq // Hkv)), Lq / Lk lengths, D key
width, Dv value width, M features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._call import without_autocast
from .._checks import check_inputs
from .._masks import Mask
from .._unknown_arguments import advised
from ._causal import LinearState, read_all, read_causally, read_elu_plus_one, read_state, summed, wide
from ._causal_padding import CausalPadding, causal_padding_of, padding_of_step, real_rows, zero_padding
from ._mechanism import HeadSizes, MechanismConfig, Recurrent, Traits, check_state
from ._step_native import quick_step
from .feature_maps import EluPlusOne, named

ELU_PLUS_ONE = EluPlusOne()
NAME = "linear attention"
REASON = "it sums the keys before any query reads them, so what a query sees cannot differ from pair to pair"


@advised
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None = None,
    *,
    feature_map: Callable[[Tensor], Tensor] = ELU_PLUS_ONE,
    normalise: bool = True,
) -> Tensor:
    """Linear attention: each query reads the sums of all keys' features, or with `Causal()` of those up to the query.

    `out_i = phi(q_i) . sum_j phi(k_j) v_j^T / phi(q_i) . sum_j phi(k_j)`: Katharopoulos, Vyas, Pappas and Fleuret,
    "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention" (2020), equations 4 and 5; causal,
    equations 9 to 12.

    Args:
        query: (B, Hq, Lq, D). With `Causal()` queries are the last tokens (bottom-right).
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        mask: `Causal()`, `Padding(...)`, both, or None.
        feature_map: features (..., M) of (..., D): a value of `saccade.variants.feature_maps`, or any function. It
            gets float32, or float64 for float64 inputs; everything is summed in that.
        normalise: divide by the sum of a query's weights. Nothing is added to that sum: an epsilon would pull every row
            towards 0. A row without weight (it sees nothing, or all its features vanish) is 0, with gradient 0.

    Returns:
        (B, Hq, Lq, Dv), in the dtype of the inputs. Causal: derivatives of first order only.

    Raises:
        TypeError, ValueError: inputs that do not belong together, another mask.

    Example:
        >>> import torch, saccade
        >>> query, key, value = torch.rand(1, 4, 7, 8), torch.rand(1, 2, 7, 8), torch.rand(1, 2, 7, 5)
        >>> out = saccade.variants.linear_attention(query, key, value, saccade.Causal())
        >>> out.shape
        torch.Size([1, 4, 7, 5])
        >>> torch.allclose(out[:, 0, 0], value[:, 0, 0])  # the first query sees one key
        True
    """
    query, key, value = check_inputs(query, key, value)
    seen = causal_padding_of(mask, query.shape[0], query.shape[2], key.shape[2], query.device, NAME, REASON)
    with without_autocast(query.device):
        if seen.causal and query.shape[2] == key.shape[2]:
            out, _ = _continued(query, key, value, None, seen, feature_map, normalise)
        else:
            queries, keys, values = _features(query, key, value, seen, feature_map)
            read = _read_ahead if seen.causal else read_all
            out = read(queries, keys, values, normalise=normalise)
        return zero_padding(out, seen.rows).to(query.dtype)


@advised
def linear_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LinearState | None = None,
    mask: Mask | None = None,
    *,
    feature_map: Callable[[Tensor], Tensor] = ELU_PLUS_ONE,
    normalise: bool = True,
) -> tuple[Tensor, LinearState]:
    """Read new tokens causally, after those in the state: equal to `linear_attention` over all of them with `Causal()`.

    Katharopoulos et al. (2020), equations 16 to 20. A step costs the same however many tokens came before.

    Args:
        query: (B, Hq, L, D), of any number of new tokens.
        key, value: (B, Hkv, L, D) and (B, Hkv, L, Dv), of the same tokens.
        state: from an earlier step; None: nothing came before. It is not changed.
        mask: `Padding` of the new tokens, or None. Padded ones leave no trace in the state.
        feature_map, normalise: as in `linear_attention`; the same in every step.

    Returns:
        (out (B, Hq, L, Dv), the state after these tokens, in float32, or float64 for float64 inputs).

    Raises:
        TypeError, ValueError: inputs that do not belong together; a state of another shape, dtype or device; a mask
            other than `Padding`.

    Example:
        >>> import torch, saccade
        >>> x, state, outs = torch.rand(1, 2, 4, 8), None, []
        >>> for token in x.split(1, dim=2):
        ...     out, state = saccade.variants.linear_step(token, token, token, state)
        ...     outs.append(out)
        >>> torch.allclose(torch.cat(outs, 2), saccade.variants.linear_attention(x, x, x, saccade.Causal()))
        True
    """
    if mask is None and (quickly := quick_step(query, key, value, state, feature_map, normalise)) is not None:
        return quickly
    query, key, value = check_inputs(query, key, value)
    length = key.shape[2]
    if query.shape[2] != length:
        raise ValueError(
            f"query has length (axis 2) {query.shape[2]}, expected key's {length}: a step reads new tokens"
        )
    seen = padding_of_step(mask, query.shape[0], length, query.device, NAME, REASON)
    # Where all new keys are padded their queries still see what is in the state.
    seen = seen._replace(rows=real_rows(mask, length, length, query.device))
    with without_autocast(query.device):
        out, state = _continued(query, key, value, state, seen, feature_map, normalise)
        return zero_padding(out, seen.rows).to(query.dtype), state


def _continued(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LinearState | None,
    padding: CausalPadding,
    feature_map: Callable[[Tensor], Tensor],
    normalise: bool,
) -> tuple[Tensor, LinearState]:
    """The output of new tokens and the new state: each token reads itself, earlier tokens and the state."""
    if isinstance(feature_map, EluPlusOne):
        _check(state, key, value)
        read = read_elu_plus_one(query, key, value, state, padding.rows, padding.keys, normalise)
        if read is not None:
            return read
    queries, keys, values = _features(query, key, value, padding, feature_map)
    _check(state, keys, values)
    if queries.shape[2] != 1:
        return read_causally(queries, keys, values, state, normalise=normalise)
    # One token needs no chunks: what it adds it may read.
    added = summed(keys, values)
    state = added if state is None else LinearState(state.sums + added.sums, state.weights + added.weights)
    return read_state(queries, state, normalise=normalise), state


def _check(state: LinearState | None, keys: Tensor, values: Tensor) -> None:
    *heads, _, features = keys.shape
    check_state(state, LinearState, [(*heads, features, values.shape[-1]), (*heads, features)], wide(keys), keys.device)


def _features(
    query: Tensor, key: Tensor, value: Tensor, padding: CausalPadding, feature_map: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Features (B, Hq, Lq, M) and (B, Hkv, Lk, M), and values, in the dtype they are summed in, 0 where padded.

    Tokens are zeroed before the map, so that no derivative meets what stands there, and after it, since a map may give
    features to 0 (elu + 1 gives ones).
    """
    dtype = wide(query)
    queries = zero_padding(feature_map(zero_padding(query.to(dtype), padding.rows)), padding.rows)
    keys = zero_padding(feature_map(zero_padding(key.to(dtype), padding.keys)), padding.keys)
    for name, before, after in (("query", query, queries), ("key", key, keys)):
        if after.shape[:-1] != before.shape[:-1] or after.shape[-1:] != keys.shape[-1:] or after.dtype != dtype:
            raise ValueError(
                f"feature_map: expected features (..., M) in {dtype} of {name} {tuple(before.shape)}, the same M for "
                f"query and key; got {tuple(after.shape)} in {after.dtype}"
            )
    return queries, keys, zero_padding(value.to(dtype), padding.keys)


def _read_ahead(queries: Tensor, keys: Tensor, values: Tensor, *, normalise: bool) -> Tensor:
    """Causal attention with other numbers of queries than keys: the last query has the position of the last key."""
    ahead = keys.shape[2] - queries.shape[2]
    if ahead < 0:
        early = queries.new_zeros(*queries.shape[:2], -ahead, values.shape[-1])
        return torch.cat([early, _read_ahead(queries[:, :, -ahead:], keys, values, normalise=normalise)], 2)
    before = summed(keys[:, :, :ahead], values[:, :, :ahead])
    return read_causally(queries, keys[:, :, ahead:], values[:, :, ahead:], before, normalise=normalise)[0]


@dataclass(frozen=True)
class LinearConfig(MechanismConfig):
    """`linear_attention` as the mechanism of `saccade.nn`.

    Args:
        feature_map: a name in `saccade.variants.feature_maps.NAMES`: "elu+1", "relu", "softmax", "dpfp", "taylor".
        normalise: divide by the sum of a query's weights.

    Raises:
        TypeError, ValueError: an unknown feature map, or a `normalise` that is no bool.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=saccade.variants.LinearConfig("relu"))
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    feature_map: str = "elu+1"
    normalise: bool = True

    name: ClassVar[str] = "linear"
    traits: ClassVar[Traits] = Traits(
        paper="Katharopoulos, Vyas, Pappas and Fleuret: Transformers are RNNs: Fast Autoregressive Transformers with "
        "Linear Attention, 2020",
        computes="other",
        time="O(L M d), M features (d for elu+1)",
        memory="O(L (M + d))",
        choose="Long sequences, or many tokens to generate, where a summary of the past is enough.",
        avoid="Single tokens must be found again exactly (copying, recall): the state holds about M of them.",
        masks=REASON,
        cached=True,
        recurrent=True,
    )

    def __post_init__(self) -> None:
        named(self.feature_map)
        if not isinstance(self.normalise, bool):
            raise TypeError(f"normalise: expected True or False, got {type(self.normalise).__name__}")

    def build(self, heads: HeadSizes) -> LinearAttention:
        return LinearAttention(self, heads)


class LinearAttention(Recurrent):
    """`linear_attention` as a module. It has no parameters; `LinearConfig.build` makes it."""

    def __init__(self, config: LinearConfig, heads: HeadSizes):
        super().__init__()
        self.feature_map, self.normalise = named(config.feature_map), config.normalise
        self.feature_map.width(heads.head)  # refuses a head that is too narrow for it

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None = None, **options: Any) -> Tensor:
        return linear_attention(
            query, key, value, mask, feature_map=self.feature_map, normalise=self.normalise, **options
        )

    def step(
        self, query: Tensor, key: Tensor, value: Tensor, state: LinearState | None = None, mask: Mask | None = None
    ) -> tuple[Tensor, LinearState]:
        return linear_step(query, key, value, state, mask, feature_map=self.feature_map, normalise=self.normalise)

    def extra_repr(self) -> str:
        return f"{self.feature_map!r}" + ("" if self.normalise else ", normalise=False")
