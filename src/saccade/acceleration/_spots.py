"""Modules of a model that are computed another way: which they are, by their structure, and how.

A spot is recognised by what its module is made of, and is believed only after its first call: then both ways compute
the same tensors, and where they differ by more than rounding the module keeps its own way.

Shape legend: ... any axes, E and F widths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _of_all

from .._backends.native._run import interrupted, is_plain
from .._products import FEW, FUNCTIONS, LARGE, Product, dtypes, few_rows, finished, multiply, packed

NOT_CALLED, PROVED, OTHER = "no call for it yet", "taken", "gives something else than its structure says"
GRADIENTS = "was called with gradients on; inference needs torch.no_grad()"
_DROPOUT = "dropout is active; inference needs eval()"
_ARGUMENTS = "was called with other arguments than are known"
INTERRUPTED = "was called under a compiler, a transform, a mode or autocast"


class PackedLinear:
    """The product of one linear layer, by the copy of its weight that all spots share.

    Args:
        module: an `nn.Linear`, or transformers' `Conv1D`, whose weight is transposed.
        half: whether a few rows read a bf16 copy of the weight, and many rows what it is rounded to.
    """

    def __init__(self, module: nn.Module, half: bool):
        self.module, self.half = module, half
        self.turned = not isinstance(module, nn.Linear)
        self.product = Product()
        self.product.users = 1
        self.rounded: tuple[tuple[int, int], Tensor] | None = None  # of which weight, and its bf16 copy
        self.held: Tensor | None = None  # the only copy of a weight that was dropped

    @property
    def weight(self) -> Tensor:
        """W (F, E)."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight.t() if self.turned else weight

    @property
    def bias(self) -> Tensor | None:
        """b (F,)."""
        bias: Tensor | None = self.module.bias  # type: ignore[assignment]
        return bias

    def __call__(self, x: Tensor, activation: str | None = None, joined: Any = None) -> Tensor:
        """x (..., E) to (..., F)."""
        bias = self.bias
        if self.held is not None:
            return multiply(x, self.held, bias, activation, joined)
        if self.half and x.dtype == torch.float32 and not torch.is_grad_enabled():
            return self._rounded(x, bias, activation, joined)
        return self.product(x, self.weight, bias, activation, joined)

    def _rounded(self, x: Tensor, bias: Tensor | None, activation: str | None, joined: Any) -> Tensor:
        weight = self.weight
        version = weight.data_ptr(), weight._version
        if self.rounded is None or self.rounded[0] != version:
            self.rounded = version, weight.detach().to(torch.bfloat16).contiguous()
        copy = self.rounded[1]
        if x.numel() <= FEW * weight.shape[1]:
            return finished(few_rows(x, copy, bias), activation, joined)
        return multiply(x, copy.float(), bias, activation, joined)

    def drop(self) -> None:
        """Keep the packed copy alone: reading the weight gives NaN until `restore`."""
        parameter: nn.Parameter = self.module.weight  # type: ignore[assignment]
        self.held = packed(self.weight)
        parameter.data = parameter.data.new_full((), torch.nan).expand(parameter.shape)

    def restore(self) -> None:
        """Put a dropped weight back, bit for bit: packing is a matter of order."""
        if self.held is None:
            return
        weight = self.held.to_dense()
        self.module.weight.data = weight.t().contiguous() if self.turned else weight
        self.held = None


class Spot(ABC):
    """A module whose call is answered another way.

    Attributes:
        name: of the module in its model.
        state: "no call for it yet", "taken", or why not.
        refused: of the last call that could not be taken, why; None where there was none.
    """

    kind: ClassVar[str]
    method = "forward"

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        self.state = NOT_CALLED
        self.refused: str | None = None
        self.plain: Callable[..., Any] = getattr(module, self.method)
        self._watched = [part for part in module.modules() if part is not module]

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In the module's place."""

    def longest(self) -> int:
        """Terms of the longest sum that an entry of the output is."""
        return max((max(part.weight.shape) for part in self._linears()), default=1)

    def _linears(self) -> Iterator[Any]:
        return (part for part in self.module.modules() if is_linear(part))

    def told(self) -> str:
        """The state, and where no call could be taken the reason."""
        return self.refused or self.state if self.state == NOT_CALLED else self.state

    def _refuse(self, reason: str | None) -> None:
        if not torch.compiler.is_compiling():  # a graph would carry the assignment
            self.refused = reason

    def _proved(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own result, of the call in which both are computed. What cannot compute it has lost."""
        expected = self.plain(*args, **kwargs)
        self._refuse(None)  # of an earlier call
        try:
            out = compute(*args, **kwargs)
        except Exception as error:  # whatever it is: the model shall not notice
            self.state = f"raises {type(error).__name__}"
            return expected
        if out is None:
            self._refuse(self.refused or _ARGUMENTS)
        else:
            first = expected[0] if isinstance(expected, tuple) else expected
            self.state = PROVED if same(out, first, self.longest()) else OTHER
        return expected

    def _why_not(self, args: tuple[Any, ...]) -> str | None:
        """Why a call with these arguments cannot be taken; None where it can."""
        if torch.is_grad_enabled():
            return GRADIENTS
        if interrupted():
            return INTERRUPTED
        return self.watched() if all(map(is_plain, args)) else "was called with what is no plain tensor on a CPU"

    def watched(self) -> str | None:
        """Who looks into the module, or what in it is drawn at random; None where nothing is."""
        if _of_all._global_forward_hooks or _of_all._global_forward_pre_hooks:
            return "forward hooks for all modules are set"
        for part in self._watched:
            if part._forward_hooks or part._forward_pre_hooks:
                return "a forward hook is set inside"
            if isinstance(part, nn.Dropout) and part.training and part.p:
                return _DROPOUT
        return None


class Fused(Spot):
    """A module of tensors alone, computed in fewer passes."""

    @abstractmethod
    def compute(self, *args: Any) -> Tensor | None:
        """What the module gives; None where these arguments are none it knows."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state not in (NOT_CALLED, PROVED):
            return self.plain(*args, **kwargs)
        refused = _ARGUMENTS if kwargs else self._why_not(args)
        if refused is not None:
            self._refuse(refused)
            return self.plain(*args, **kwargs)
        if self.state == PROVED:
            out = self.compute(*args)
            return self.plain(*args) if out is None else out
        return self._proved(self.compute, args, {})


def same(got: Tensor, expected: Any, terms: int) -> bool:
    """Whether two results differ by rounding alone: each entry is a sum of `terms` products, in another order.

    A sum of n terms is off by n u of them at most, u the unit of float32; in half precision the result is rounded on
    the way. What has another structure differs by as much as the entries themselves.
    """
    if not isinstance(expected, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    unit = 8 * terms * 2.0**-24 + (0 if got.dtype == torch.float32 else 8 * torch.finfo(got.dtype).eps)
    real = expected[expected.isfinite()].float()
    largest = float(real.abs().max()) if real.numel() else 0.0
    return torch.allclose(got.float(), expected.float(), rtol=0, atol=min(unit, 0.1) * largest, equal_nan=True)


class Linear(Spot):
    """x W^T + b, with a packed copy of W."""

    kind = "linear"

    def __init__(self, name: str, module: nn.Module, linear: PackedLinear):
        super().__init__(name, module)
        self.linear = linear
        self.beside: Callable[[Tensor], Tensor | None] | None = None  # its part of a product with others (`_together`)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer computes is known, so nothing is to be proved; with gradients its products are ours, too."""
        linear, weight = self.linear, self.linear.weight
        known = len(args) == 1 and not kwargs and is_plain(args[0]) and args[0].dtype == weight.dtype
        grad = torch.is_grad_enabled()
        if not known or grad or interrupted():
            if linear.held is not None:
                raise RuntimeError(
                    f"{self.name}: its weight was dropped (keep_weights=False), so only plain calls without gradients "
                    "are possible (torch.no_grad()); leave the block for others"
                )
            self._refuse(GRADIENTS if grad else INTERRUPTED if interrupted() else _ARGUMENTS)
            return linear.product(args[0], weight, linear.bias) if known else self.plain(*args, **kwargs)
        self.state = PROVED
        out = None if self.beside is None or linear.held is not None else self.beside(args[0])
        return linear(args[0]) if out is None else out


class Activated(Fused):
    """f(x W^T + b)."""

    kind = "linear and activation"

    def __init__(self, name: str, module: nn.Module, linear: PackedLinear, activation: str):
        super().__init__(name, module)
        self.linear, self.activation = linear, activation

    def compute(self, *args: Any) -> Tensor | None:
        return self.linear(args[0], self.activation) if len(args) == 1 else None


class Residual(Fused):
    """norm(x W^T + b + y) or x W^T + b + y."""

    kind = "linear, sum and norm"

    def __init__(self, name: str, module: nn.Module, linear: PackedLinear, norm: nn.Module | None):
        super().__init__(name, module)
        self.linear, self.norm = linear, norm

    def compute(self, *args: Any) -> Tensor | None:
        if len(args) != 2 or args[1].shape != (*args[0].shape[:-1], self.linear.weight.shape[0]):
            return None
        out = self.linear(args[0], joined=("add", args[1]))
        return out if self.norm is None else self.norm(out)


class FeedForward(Fused):
    """f(x W1^T + b1) W2^T + b2."""

    kind = "feed-forward"

    def __init__(self, name: str, module: nn.Module, up: PackedLinear, down: PackedLinear, activation: str):
        super().__init__(name, module)
        self.up, self.down, self.activation = up, down, activation

    def compute(self, *args: Any) -> Tensor | None:
        return self.down(self.up(args[0], self.activation)) if len(args) == 1 else None


class TorchFeedForward(FeedForward):
    """The same in `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`, a method of theirs."""

    kind, method = "feed-forward", "_ff_block"


class Gated(Fused):
    """(f(x Wg^T) * (x Wu^T)) Wd^T, with biases where there are any."""

    kind = "gated feed-forward"

    def __init__(
        self, name: str, module: nn.Module, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: str
    ):
        super().__init__(name, module)
        self.gate, self.up, self.down, self.activation = gate, up, down, activation

    def compute(self, *args: Any) -> Tensor | None:
        if len(args) != 1:
            return None
        return self.down(self.up(args[0], joined=("mul", self.gate(args[0], self.activation))))


class RootMeanSquare(Fused):
    """x / sqrt(mean(x^2) + eps) * weight, in one pass."""

    kind = "RMS norm"

    def __init__(self, name: str, module: nn.Module, eps: float):
        super().__init__(name, module)
        self.eps = eps

    def compute(self, *args: Any) -> Tensor | None:
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        if len(args) != 1 or args[0].dtype != weight.dtype or args[0].dtype != torch.float32:
            return None
        return torch.rms_norm(args[0], weight.shape, weight, self.eps)


class SelfAttention(Spot):
    """`nn.MultiheadAttention` of one sequence with itself: one product for queries, keys and values."""

    kind = "nn.MultiheadAttention"

    def __init__(self, name: str, module: nn.MultiheadAttention, half: bool):
        super().__init__(name, module)
        inner = nn.Linear(1, 1)  # stands for the projection, which has no module
        inner.weight, inner.bias = module.in_proj_weight, module.in_proj_bias
        self.projection, self.output = PackedLinear(inner, half), PackedLinear(module.out_proj, half)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.state != PROVED:
            ready = self.state == NOT_CALLED
            return self._proved(self._own, args, kwargs) if ready else self.plain(*args, **kwargs)
        out = self._own(*args, **kwargs)
        return self.plain(*args, **kwargs) if out is None else (out, None)

    def _own(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Tensor | None:
        module: Any = self.module
        refused = self._why_not((query,))
        if need_weights:
            refused = refused or "was called for its weights (need_weights=True is the default)"
        if query is not key or key is not value:
            refused = refused or "was called with a query that is not the key and value"
        if refused is None and (query.dim() != 3 or query.dtype != module.in_proj_weight.dtype):
            refused = _ARGUMENTS
        if module.training and module.dropout:
            refused = refused or _DROPOUT
        if refused is not None:
            self._refuse(refused)
            return None
        batch, length, width = query.shape
        heads = module.num_heads
        masks = _merged(key_padding_mask, attn_mask, query, heads)
        parts = self.projection(query).view(batch, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], masks)
        return self.output(out.transpose(1, 2).reshape(batch, length, width))


def _merged(padding: Any, attn_mask: Any, query: Tensor, heads: int) -> Tensor | None:
    """Both masks of nn.MultiheadAttention (True or -inf hides) as one of F.scaled_dot_product_attention."""
    batch, length, _ = query.shape
    parts = []
    if padding is not None:
        parts.append(padding.view(batch, 1, 1, length))
    if attn_mask is not None:
        parts.append(attn_mask.view(-1, heads, length, length) if attn_mask.dim() == 3 else attn_mask)
    if not parts:
        return None
    if all(part.dtype == torch.bool for part in parts):
        return ~(parts[0] if len(parts) == 1 else parts[0] | parts[1])
    added = [torch.where(part, -torch.inf, 0.0).to(query) if part.dtype == torch.bool else part for part in parts]
    return added[0] if len(added) == 1 else added[0] + added[1]


def is_linear(module: nn.Module) -> bool:
    """`nn.Linear`, whatever it is called, or transformers' `Conv1D`; not what computes otherwise."""
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def large(module: nn.Module) -> bool:
    """A linear layer on a CPU, in a dtype that oneDNN multiplies, that is worth a copy."""
    weight: Any = getattr(module, "weight", None)
    return is_linear(module) and is_plain(weight) and weight.dtype in dtypes() and weight.numel() >= LARGE


def activation_of(function: Any) -> str | None:
    """The name in `FUNCTIONS` of what computes the same; None where there is none."""
    x = torch.linspace(-6, 6, 997)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # what drops at random shall draw what it would have
            y = function(x)
    except Exception:  # whatever it is, it is no activation
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    found = [name for name, known in FUNCTIONS.items() if torch.allclose(y, known(x), rtol=0, atol=2e-6)]
    return found[0] if found else None
