"""Position-wise feed-forward layers.

Shape legend: B batch, L length, E model width, F hidden width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as _of_all

from .._int8 import RowNorm
from .._observers import passive
from .._products import FUNCTIONS, Joined, in_one_pass
from ._initial import by_fan_in
from ._linear import Linear
from ._rounded import RoundedLinear
from .config import ACTIVATIONS, GATED, check_choice, check_positive, check_share, default_hidden

_KNOWN = Linear, RoundedLinear, nn.Dropout, nn.LayerNorm


def dropped(dropout: nn.Module, x: Tensor) -> Tensor:
    """`dropout(x)`, without the module's call if it would return x unchanged: a step of decoding is faster so."""
    return x if type(dropout) is nn.Dropout and not (dropout.training and dropout.p) else dropout(x)


def unread(*parts: nn.Module) -> bool:
    """Whether parts are known layers or inactive dropout, and no hook reads or changes what they give."""
    if _of_all._global_forward_hooks or _of_all._global_forward_pre_hooks:
        return False
    for part in parts:
        if type(part) not in _KNOWN or "forward" in vars(part) or (part.training and getattr(part, "p", None)):
            return False
        if not passive(part._forward_pre_hooks, part._forward_hooks):
            return False
    return True


class FeedForward(nn.Module):
    """`down(dropout(f(up(x))))`, or gated `down(dropout(f(gate(x)) * up(x)))`: (B, L, E) -> (B, L, E).

    Vaswani et al., "Attention Is All You Need" (2017), equation 2; gated: Shazeer, "GLU Variants Improve Transformer"
    (2020). `gate_up` holds gate and up one below the other: rows [0, F) and [F, 2 F).

    Args:
        width: E.
        hidden: F; None is 4 E, or where it is gated 8/3 E (as many parameters) rounded up to a multiple of 32.
        activation: "gelu" (exact), "gelu_tanh", "relu", "silu", or gated: "geglu", "geglu_tanh", "reglu", "swiglu".
        dropout: after the activation, in training.
        bias: whether the layers have one.

    Raises:
        ValueError: an unknown activation, sizes below 1, dropout outside of [0, 1).

    Example:
        >>> import torch, saccade
        >>> layer = saccade.nn.FeedForward(16, hidden=64, activation="gelu")
        >>> layer(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        activation: str = "swiglu",
        *,
        dropout: float = 0.0,
        bias: bool = False,
    ):
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        check_share("dropout", dropout)
        self.activation, self.gated = activation, activation in GATED
        hidden = default_hidden(width, gated=self.gated) if hidden is None else hidden
        check_positive("hidden", hidden)
        if self.gated:
            self.gate_up = Linear(width, 2 * hidden, bias=bias)
        else:
            self.up = Linear(width, hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, as they were drawn at first."""
        by_fan_in(self)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, E) to (B, L, E)."""
        if self.gated:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            inner = FUNCTIONS[GATED[self.activation]](gate) * up
        else:
            out = self._in_one_pass(x)
            if out is not None:
                return out
            inner = self.up.activated(x, self.activation)
        return self.down(dropped(self.dropout, inner))

    def _normed_sum(self, x: Tensor, norm: RowNorm) -> Tensor | None:
        """`norm(x + self(x))` in one pass; None where that is more, or hooks read what is between."""
        hooked = self._forward_pre_hooks or self._forward_hooks or "forward" in vars(self)
        return None if type(self) is not FeedForward or hooked else self._in_one_pass(x, ("add", x), norm)

    def _in_one_pass(self, x: Tensor, joined: Joined | None = None, norm: RowNorm | None = None) -> Tensor | None:
        """The output, what is joined to it and the norm of all, if both products are in 8 bits and nothing reads what
        is between them; else None."""
        if self.gated or not (unread(self.up, self.dropout, self.down) and self.up.reads_int8 and self.down.reads_int8):
            return None
        return in_one_pass([self.up, self.down], x, self.activation, joined, norm)

    def extra_repr(self) -> str:
        return repr(self.activation)
