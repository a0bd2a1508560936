"""The gated delta rule: a state that fades by alpha, and that each token corrects by beta.

    S_t = alpha_t S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,   o_t = S_t q_t

Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, equation 10. With alpha = 1
it is the delta rule (Schlag, Irie and Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", 2021;
Yang, Wang, Zhang, Shen and Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024).

The state maps keys to values. With u_t = beta_t (v_t - alpha_t S_(t-1) k_t), the correction of its value at k_t, the
rule is S_t = alpha_t S_(t-1) + u_t k_t^T: linear attention with values u_t. In a chunk that begins with the state S,
let g_ij be the product of alpha from j + 1 to i, and g_i of all up to i. The corrections solve a triangular system (WY
representation and UT transform: Yang et al., "Parallelizing", section 3):

    u_i + beta_i sum_(j < i) g_ij (k_i . k_j) u_j = beta_i (v_i - g_i S k_i)

All chunks are solved at once, for v and for g k apart; states are then carried from chunk to chunk.

Time O(L (C (D + Dv) + D Dv)) and memory O(L (C + D + Dv) + L D Dv / C) for chunks of C = 64 tokens, forward and
backward; a decode step O(D Dv), with a state of D x Dv numbers a head.

Shape legend: B batch, Hq / Hkv query and key-value heads (query head h reads h // G, G = Hq // Hkv), L length, D key
width, Dv value width, E model width, C tokens in a chunk, n chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._call import without_autocast
from .._checks import check_inputs
from .._masks import Mask
from .._unknown_arguments import advised
from ._causal import CHUNK, poison_of, unpoisoned, wide
from ._causal_padding import CausalPadding, causal_padding_of, padding_of_step, real_rows, tokens_of_gate, zero_padding
from ._mechanism import HeadSizes, MechanismConfig, Recurrent, Traits, check_state

NAME = "the gated delta rule"
REASON = "the state sums all earlier tokens, so what a query sees cannot differ from pair to pair"
ORDERED = "each token corrects what those before it left in the state, so tokens are read in their order"


class DeltaState(NamedTuple):
    """The state of the gated delta rule: float32, or float64 for float64 inputs.

    Args:
        memory: (B, Hkv, D, Dv): S^T, which gives a value (Dv,) for a key (D,).

    Example:
        >>> import torch, saccade
        >>> key, beta = torch.eye(4)[None, None], torch.ones(1, 1, 4)
        >>> out, state = saccade.variants.gated_delta_step(key, key, torch.ones(1, 1, 4, 3), beta, None)
        >>> state.memory.shape
        torch.Size([1, 1, 4, 3])
    """

    memory: Tensor


@advised
def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_alpha: Tensor | None, mask: Mask | None
) -> Tensor:
    """The gated delta rule over whole sequences, by chunks: each token fades the state, corrects it and reads it.

    `S_t = alpha_t S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T`, `o_t = S_t q_t`: Yang, Kautz and Hatamizadeh,
    "Gated Delta Networks" (2024), equation 10. Neither queries nor keys are normalised or scaled here; models use keys
    of length 1, with which a beta from 0 to 2 keeps the state bounded.

    Args:
        query: (B, Hq, L, D).
        key: (B, Hkv, L, D).
        value: (B, Hkv, L, Dv).
        beta: (B, Hkv, L), how much of the value at the key is replaced: 0 nothing, 1 all of it if the key has length 1.
        log_alpha: (B, Hkv, L), the logarithm of what is left of the state; -inf forgets everything. None is alpha = 1,
            the delta rule.
        mask: `Causal()`, or `Causal() & Padding(...)`. Padded tokens leave the state as it is.

    Returns:
        (B, Hq, L, Dv), in the dtype of query, key and value. Sums are in float32, or float64 for float64 inputs.

    Raises:
        TypeError, ValueError: inputs that do not belong together, another mask.

    Example:
        >>> import torch, saccade
        >>> key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, None]  # the third token has the first's key
        >>> value, beta = torch.tensor([5.0, 6.0, 7.0]).view(1, 1, 3, 1), torch.ones(1, 1, 3)
        >>> saccade.variants.gated_delta_rule(key, key, value, beta, None, saccade.Causal()).flatten()
        tensor([5., 6., 7.])
        >>> saccade.variants.linear_attention(  # which does not replace the first value, but adds
        ...     key, key, value, saccade.Causal(), feature_map=lambda x: x, normalise=False
        ... ).flatten()
        tensor([ 5.,  6., 12.])
    """
    query, key, value, beta, log_alpha = _checked(query, key, value, beta, log_alpha)
    length = key.shape[2]
    seen = causal_padding_of(mask, query.shape[0], length, length, query.device, NAME, REASON)
    if not seen.causal:
        raise ValueError(f"mask: {NAME} takes Causal(), alone or with Padding(...), since {ORDERED}; got {mask!r}")
    return _continued(query, key, value, beta, log_alpha, None, seen)[0]


@advised
def gated_delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_alpha: Tensor | None,
    state: DeltaState | None = None,
    mask: Mask | None = None,
) -> tuple[Tensor, DeltaState]:
    """Read new tokens after those in the state: equal to `gated_delta_rule` over all of them.

    A step costs the same however many tokens came before. One token is computed by the formula itself.

    Args:
        query, key, value, beta, log_alpha: as in `gated_delta_rule`, of any number L of new tokens.
        state: from an earlier step; None: nothing came before. It is not changed.
        mask: `Padding` of the new tokens, or None. Padded ones leave the state as it is.

    Returns:
        (out (B, Hq, L, Dv), the state after these tokens, in float32, or float64 for float64 inputs).

    Raises:
        TypeError, ValueError: inputs that do not belong together; a state of another shape, dtype or device; a mask
            other than `Padding`.

    Example:
        >>> import torch, saccade
        >>> x, beta, state, outs = torch.rand(1, 2, 4, 8), torch.rand(1, 2, 4), None, []
        >>> for token, b in zip(x.split(1, dim=2), beta.split(1, dim=2)):
        ...     out, state = saccade.variants.gated_delta_step(token, token, token, b, None, state)
        ...     outs.append(out)
        >>> whole = saccade.variants.gated_delta_rule(x, x, x, beta, None, saccade.Causal())
        >>> torch.allclose(torch.cat(outs, 2), whole, atol=1e-6)
        True
    """
    query, key, value, beta, log_alpha = _checked(query, key, value, beta, log_alpha)
    length = key.shape[2]
    seen = padding_of_step(mask, query.shape[0], length, query.device, NAME, REASON)
    # Where all new keys are padded their queries still see what is in the state.
    return _continued(
        query, key, value, beta, log_alpha, state, seen._replace(rows=real_rows(mask, length, length, query.device))
    )


def _checked(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_alpha: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    query, key, value = check_inputs(query, key, value)
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"query has length (axis 2) {query.shape[2]}, expected key's {key.shape[2]}: queries and keys are of the "
            "same tokens"
        )
    for name, gate in (("beta", beta), ("log_alpha", log_alpha)):
        if name == "log_alpha" and gate is None:
            continue
        if not isinstance(gate, Tensor):
            raise TypeError(f"{name}: expected a tensor (batch, kv heads, length), got {type(gate).__name__}")
        if gate.shape != key.shape[:-1] or not gate.is_floating_point():
            raise ValueError(
                f"{name}: expected floating-point numbers of shape {tuple(key.shape[:-1])}, one for each token of each "
                f"key head, got {tuple(gate.shape)} in {gate.dtype}"
            )
        if gate.device != key.device:
            raise ValueError(f"{name}: is on {gate.device}, expected key's device {key.device}")
    return query, key, value, beta, log_alpha


def _continued(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_alpha: Tensor | None,
    state: DeltaState | None,
    padding: CausalPadding,
) -> tuple[Tensor, DeltaState]:
    """The output of new tokens and the new state."""
    dtype = wide(query)
    check_state(state, DeltaState, [(*key.shape[:2], key.shape[-1], value.shape[-1])], dtype, key.device)
    with without_autocast(query.device):
        queries = zero_padding(query.to(dtype), padding.rows)
        keys, values = (zero_padding(x.to(dtype), padding.keys) for x in (key, value))
        gates = [torch.zeros_like(beta) if log_alpha is None else log_alpha, beta]
        alphas, betas = (zero_padding(gate.to(dtype)[..., None], padding.keys)[..., 0] for gate in gates)
        memory = keys.new_zeros(*keys.shape[:2], keys.shape[-1], values.shape[-1]) if state is None else state.memory
        queries = queries.unflatten(1, (keys.shape[1], -1))
        read = _recurrent if keys.shape[2] == 1 else _by_chunks
        out, memory = read(queries, keys, values, betas, alphas, memory)
        return zero_padding(out.flatten(1, 2), padding.rows).to(query.dtype), DeltaState(memory)


def _recurrent(
    queries: Tensor, keys: Tensor, values: Tensor, betas: Tensor, log_alphas: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The formula, for one token: (B, Hkv, G, 1, Dv), and the memory after it."""
    faded = log_alphas.exp()[..., None] * memory
    corrections = betas[..., None] * (values - keys @ faded)
    memory = faded + keys.mT @ corrections
    return queries @ memory[:, :, None], memory


def _by_chunks(
    queries: Tensor, keys: Tensor, values: Tensor, betas: Tensor, log_alphas: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """(B, Hkv, G, L, Dv) of queries (B, Hkv, G, L, D), and the memory after these tokens.

    What is not finite is left out and written into the rows that see it: in a chunk's products 0 * NaN would reach
    earlier ones.
    """
    poison = sum(map(poison_of, (keys, values, betas[..., None], log_alphas.exp()[..., None])), keys.new_zeros(()))
    own = poison_of(queries)
    keys, values = unpoisoned(keys, poison), unpoisoned(values, poison)
    betas, log_alphas = (gate.masked_fill(poison.isnan(), 0.0) for gate in (betas, log_alphas))
    outs, memory = _clean_chunks(unpoisoned(queries, own), keys, values, betas, log_alphas, memory)
    seen = poison.cumsum(-1)[:, :, None]
    return outs + (own + seen)[..., None], memory + poison.sum(-1)[..., None, None]


def _clean_chunks(
    queries: Tensor, keys: Tensor, values: Tensor, betas: Tensor, log_alphas: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    length = keys.shape[2]
    chunk = max(1, min(CHUNK, length))
    # (B, Hkv, n, C, ...), 0 past the last token.
    q, k, v = (_cut(x, chunk) for x in (queries, keys, values))
    beta, log_alpha = (_cut(x[..., None], chunk) for x in (betas, log_alphas))
    # Sums from j + 1 to i for each pair, not differences of sums from the start: those lose digits, and -inf less -inf
    # is NaN.
    between = log_alpha.expand(*log_alpha.shape[:-1], chunk).tril(-1).cumsum(-2)
    fading = between.exp().tril()  # (B, Hkv, n, C, C)
    before = log_alpha.cumsum(-2).exp()  # (B, Hkv, n, C, 1): what is left of the state before the chunk
    system = beta * fading * (k @ k.mT)
    right = beta * torch.cat([v, before * k], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, old = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = fading[:, :, None] * (q @ k.mT[:, :, None])
    after, read, kept = before[..., -1:, :], before[:, :, None] * q, fading[..., -1, :, None] * k
    # Unbound at once: the gradient of an index is as large as what it is taken from, for each chunk.
    chunks = zip(*(x.unbind(-3) for x in (new, old, after, read, within, kept)), strict=True)
    outs = []
    for new_values, old_keys, left, reading, weights, writing in chunks:
        corrections = new_values - old_keys @ memory
        outs.append(reading @ memory[:, :, None] + weights @ corrections[:, :, None])
        memory = left * memory + writing.mT @ corrections
    if not outs:
        return queries.new_zeros(*queries.shape[:-1], v.shape[-1]), memory
    return torch.cat(outs, -2)[..., :length, :], memory


def _cut(tensor: Tensor, chunk: int) -> Tensor:
    """(..., L, X) -> (..., n, C, X)."""
    return F.pad(tensor, (0, 0, 0, -tensor.shape[-2] % chunk)).unflatten(-2, (-1, chunk))


@dataclass(frozen=True)
class GatedDeltaConfig(MechanismConfig):
    """`gated_delta_rule` as the mechanism of `saccade.nn`, with gates that read the layer's tokens.

    Args:
        fading: whether the state fades by alpha; False is the delta rule.

    Raises:
        TypeError: not a bool.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=saccade.variants.GatedDeltaConfig())
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 5, 8), saccade.Causal()).shape
        torch.Size([1, 5, 8])
    """

    fading: bool = True

    name: ClassVar[str] = "gated-delta"
    reads_tokens: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        paper="Yang, Kautz and Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule, 2024",
        computes="other",
        time="O(L (c + d) d), c = 64 tokens in a chunk",
        memory="O(L (c + d + d^2 / c))",
        choose="Long sequences, or many tokens to generate, where what is known of a key changes on the way.",
        avoid="More associations than a head is wide must be kept, or sequences are read in both directions.",
        bidirectional=ORDERED,
        cross="each token writes before its query reads, so queries and keys are of the same tokens",
        masks=REASON,
        cached="the gates of earlier tokens are not kept beside their keys and values",
        recurrent=True,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.fading, bool):
            raise TypeError(f"fading: expected True or False, got {self.fading!r}")

    def build(self, heads: HeadSizes) -> GatedDeltaRule:
        return GatedDeltaRule(self, heads)


class GatedDeltaRule(Recurrent):
    """`gated_delta_rule` of queries and keys of length 1, with learned gates for each key-value head.

        beta = sigmoid(x Wb),   alpha = exp(-rate softplus(x Wa + shift))

    Yang et al. (2024), section 3.4, with the gate of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024). Their layer
    has short convolutions before queries, keys and values, and a norm and a gate (`AttentionConfig(gate=True)`) after;
    these are not part of the mechanism. `GatedDeltaConfig.build` makes the module.

    Args:
        config: with alpha or without.
        heads: the sizes of the layer.
    """

    def __init__(self, config: GatedDeltaConfig, heads: HeadSizes):
        super().__init__()
        self.beta = nn.Linear(heads.width, heads.kv_heads, bias=False)
        self.alpha = nn.Linear(heads.width, heads.kv_heads) if config.fading else None
        self.log_rate = nn.Parameter(torch.empty(heads.kv_heads)) if config.fading else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the gates anew: rates from 1 to 16, and softplus(shift) from .001 to .1, as Mamba-2 begins."""
        nn.init.normal_(self.beta.weight, std=self.beta.in_features**-0.5)
        if self.alpha is not None and self.log_rate is not None:
            nn.init.normal_(self.alpha.weight, std=self.alpha.in_features**-0.5)
            self.log_rate.uniform_(1, 16).log_()
            self.alpha.bias.uniform_(math.log(0.001), math.log(0.1)).exp_().expm1_().log_()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None = None,
        *,
        tokens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """As `gated_delta_rule`; `tokens` (B, L, E) are those that queries, keys and values were projected from."""
        query, key, beta, log_alpha = self._read(query, key, mask, tokens)
        return gated_delta_rule(query, key, value, beta, log_alpha, mask, **options)

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: DeltaState | None = None,
        mask: Mask | None = None,
        *,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, DeltaState]:
        query, key, beta, log_alpha = self._read(query, key, mask, tokens)
        return gated_delta_step(query, key, value, beta, log_alpha, state, mask)

    def _read(
        self, query: Tensor, key: Tensor, mask: Mask | None, tokens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query and key of length 1; beta and ln(alpha), (B, Hkv, L), in the dtype of the state. 0 where
        padded: 0 * NaN would reach the gradients."""
        (batch, _, length, _), dtype = key.shape, wide(key)
        kept = causal_padding_of(mask, batch, length, length, key.device, NAME, REASON).keys
        query = _of_length_one(zero_padding(query, real_rows(mask, length, length, key.device)))
        key = _of_length_one(zero_padding(key, kept))
        tokens = tokens_of_gate(tokens, kept, NAME)
        beta = self.beta(tokens).to(dtype).sigmoid().mT
        if self.alpha is None or self.log_rate is None:
            return query, key, beta, None
        return query, key, beta, (-self.log_rate.to(dtype).exp() * F.softplus(self.alpha(tokens).to(dtype))).mT


def _of_length_one(vectors: Tensor) -> Tensor:
    """Vectors of length 1; 0 stays 0."""
    return F.normalize(vectors.to(wide(vectors)), dim=-1).to(vectors.dtype)
