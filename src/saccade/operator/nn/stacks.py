"""Stacks of blocks: an encoder, and a decoder with or without a context.

Shape legend: B batch, L length, Lc length of a context, E model width, C context width.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .._biases import Bias
from .._masks import Mask, Padding, as_mask
from .._unknown_arguments import advised
from ..positions import Offset, RotaryConfig
from ._initial import begin_anew, divide_writers
from ._ragged import refuse_with_nested, through_nested
from ._step import native_step
from .attention import Observation, check_tokens, check_weights
from .blocks import Context, DecoderBlock, EncoderBlock
from .cache import KVCache
from .config import BlockConfig, PositionsConfig, check_causal, check_flag, check_positive, check_share
from .masking import causal, of_context, refuse_rows
from .norm import make_norm

LayerObserver = Callable[[int, Observation], None]


class Stack(nn.Module):
    """Blocks one after another. Abstract: see `Encoder` and `Decoder`."""

    block: type[EncoderBlock]

    def __init__(
        self,
        config: BlockConfig | Sequence[BlockConfig],
        layers: int | None = None,
        *,
        final_norm: bool | None = None,
        checkpointing: bool = False,
        layer_drop: float = 0.0,
    ):
        super().__init__()
        check_share("layer_drop", layer_drop)
        self.configs = _of_layers(config, layers)
        self.config, self.checkpointing, self.layer_drop = self.configs[0], checkpointing, layer_drop
        # One module for all layers that agree: T5's layers share their table, and rotary tables are made once.
        schemes = [_scheme(config) for config in self.configs]
        different = [scheme for scheme in dict.fromkeys(schemes) if scheme is not None]
        made = [positions.build(heads, head) for positions, heads, head in different]
        self.positions = nn.ModuleList(made) if len(made) > 1 else made[0] if made else None
        self.blocks = nn.ModuleList(
            self.block(config.without_positions().at_depth(n)) for n, config in enumerate(self.configs)
        )
        for block, scheme in zip(self.blocks, schemes, strict=True):  # kept there: layers may be taken out later
            assert isinstance(block, EncoderBlock)
            block.shared_positions = None if scheme is None else different.index(scheme)
        last = self.configs[-1]
        wanted = last.placement != "post" if final_norm is None else final_norm
        self.norm = make_norm(last.norm, last.width, bias=last.bias, eps=last.eps) if wanted else nn.Identity()
        self._divide_writers()

    def reset_parameters(self) -> None:
        """Draw all weights anew, as they were drawn at first: after `to_empty` on a model made on the meta device."""
        shared = self.positions if isinstance(self.positions, nn.ModuleList) else [self.positions]
        for part in (*shared, *self.blocks, self.norm):
            begin_anew(part)
        self._divide_writers()

    def _divide_writers(self) -> None:
        if self.config.placement != "post":
            blocks = (block for block in self.blocks if isinstance(block, EncoderBlock))
            divide_writers([writer for block in blocks for writer in block.writers()])

    def positions_of(self, layer: int) -> nn.Module | None:
        """The positions module of a layer, or None. Layers with equal positions share one module."""
        return self._positions_of(self.blocks[layer])

    def _positions_of(self, block: nn.Module) -> nn.Module | None:
        place: int | None = getattr(block, "shared_positions", 0)
        if place is None:
            return None
        return self.positions[place] if isinstance(self.positions, nn.ModuleList) else self.positions

    def _check_weights(self, x: object) -> None:
        for config in self.configs:
            check_weights(config.attention, x)

    def _through_nested(self, x: Tensor, mask: Mask | Tensor | None, **rest: Any) -> Tensor:
        """A nested batch, as all layers can read it."""
        attentions = [config.attention for config in self.configs]
        chosen = next((attention for attention in attentions if attention.mechanism is not None), attentions[0])
        return through_nested(self, x, mask, chosen, **rest)

    def _run(
        self,
        x: Tensor,
        per_layer: Callable[[int], dict[str, Any]],
        return_weights: bool,
        hidden_states: list[Tensor] | None,
        **common: Any,
    ) -> Tensor | tuple[Tensor, tuple[Any, ...]]:
        """x through all blocks and the last norm; `per_layer` returns the arguments that differ between layers."""
        check_tokens("x", x, self.config.width)
        weights, states = [], [] if hidden_states is None else hidden_states
        for layer, block in enumerate(self.blocks):
            states += [] if hidden_states is None else [x]
            if self.training and self.layer_drop and not return_weights and torch.rand(()) < self.layer_drop:
                x = _with_gradients_of(block, x)
                continue
            given = {
                **common,
                **per_layer(layer),
                "positions": self._positions_of(block),
                "return_weights": return_weights,
            }
            out = self._run_block(block, x, given)
            x = out[0] if return_weights else out
            weights += [out[1]] if return_weights else []
        x = self.norm(x)
        states += [] if hidden_states is None else [x]
        return (x, tuple(weights)) if return_weights else x

    def _run_block(self, block: nn.Module, x: Tensor, given: dict[str, Any]) -> Any:
        # A block whose call leaves something behind (a longer cache, an observation) must not be run twice.
        once = given.get("cache") is not None or given.get("observe") is not None
        if self.checkpointing and not once and torch.is_grad_enabled():
            return checkpoint(block, x, use_reentrant=False, **given)
        return block(x, **given)

    def extra_repr(self) -> str:
        return "checkpointing" if self.checkpointing else ""


class Encoder(Stack):
    """A stack of `EncoderBlock`s and a last norm: every token sees every other. (B, L, E) -> (B, L, E).

        out = norm(block_N(... block_1(x)))

    Vaswani et al., "Attention Is All You Need" (2017), section 3.1; bidirectional models of an encoder alone: Devlin et
    al., BERT (2019). Weights start as in `MultiHeadAttention`; in pre-norm and parallel stacks, what writes into the
    residual stream is divided by sqrt(number of writers) (Radford et al., GPT-2, 2019).

    Args:
        config: of every block, or a sequence with one for each. They share width, placement and context, and may differ
            in everything else (windows that alternate, layers without positions). Layers whose `attention.positions`
            agree share them.
        layers: how many blocks; None if `config` is a sequence.
        final_norm: whether a norm comes last; None is where the blocks leave the residual stream unnormalised (all
            but "post").
        checkpointing: keeps only each block's input for the backward pass and computes the rest again: about a third
            more time, and activation memory of one block instead of all (Chen et al. 2016). An attribute too. Calls
            with `observe=` or a cache keep everything, since they must not be run twice.
        layer_drop: probability that a call leaves a block out, in training (Fan et al., "Reducing Transformer Depth on
            Demand with Structured Dropout", 2020). Calls with `return_weights=True` leave none out. An attribute too.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> encoder = saccade.nn.Encoder(config, layers=2)
        >>> encoder(torch.randn(2, 5, 16), padding=saccade.Padding([5, 3])).shape
        torch.Size([2, 5, 16])
    """

    block = EncoderBlock

    @advised
    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        bias: Tensor | Bias | None = None,
        padding: Padding | None = None,
        offset: Offset | None = None,
        observe: LayerObserver | None = None,
        hidden_states: list[Tensor] | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[Any, ...]]:
        """x (B, L, E), or a jagged nested tensor, to the same shape.

        `observe(layer, observation)` is called in each layer, which holds one layer's at a time; `return_weights` gives
        those of all layers, a tuple beside the output. A list `hidden_states` gets what each block reads, and the
        output. All else is as in `MultiHeadAttention`.
        """
        if return_weights:
            self._check_weights(x)
        if isinstance(x, Tensor) and x.is_nested:
            refuse_with_nested(padding=padding, offset=offset, hidden_states=hidden_states)
            return self._through_nested(x, mask, bias=bias, observe=observe)
        given: dict[str, Any] = dict(mask=mask, bias=bias, padding=padding, offset=offset)
        return self._run(
            x, lambda layer: {"observe": _of_layer(observe, layer)}, return_weights, hidden_states, **given
        )


class Decoder(Stack):
    """A stack of causal `DecoderBlock`s and a last norm: (B, L, E) -> (B, L, E).

        out = norm(block_N(... block_1(x, context) ..., context)),   block_n causal

    With `config.cross` each block also reads a context: the decoder of Vaswani et al. (2017), section 3.1; without it
    the language models after Radford et al., GPT (2018).

    `config`, `layers`, `final_norm` and `checkpointing` are as in `Encoder`.

    Args:
        causal: whether tokens see nothing later than themselves, whatever the mask shows. An attribute too.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> decoder, x = saccade.nn.Decoder(config, layers=2).eval(), torch.randn(1, 5, 16)
        >>> cache = decoder.cache()
        >>> with torch.no_grad():
        ...     steps = [decoder(x[:, i : i + 1], cache=cache) for i in range(5)]
        >>> torch.allclose(torch.cat(steps, dim=1), decoder(x), atol=1e-5)
        True
    """

    block = DecoderBlock

    def __init__(
        self,
        config: BlockConfig | Sequence[BlockConfig],
        layers: int | None = None,
        *,
        final_norm: bool | None = None,
        checkpointing: bool = False,
        causal: bool = True,
    ):
        check_flag("causal", causal)
        if causal:
            for one in dict.fromkeys(_of_layers(config, layers)):
                check_causal(one.attention)
        super().__init__(config, layers, final_norm=final_norm, checkpointing=checkpointing)
        self.causal = causal

    @advised
    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        context: Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        bias: Tensor | Bias | None = None,
        padding: Padding | None = None,
        offset: Offset | None = None,
        cache: KVCache | None = None,
        observe: LayerObserver | None = None,
        hidden_states: list[Tensor] | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[Any, ...]]:
        """x (B, L, E), or a jagged nested tensor, to the same shape.

        Args:
            x: the tokens; with a cache, those that continue the ones in it.
            mask: who sees whom; tokens see nothing later in any case, unless `causal` is False.
            context: (B, Lc, C), where the blocks have cross-attention; with a cache also (B / n, Lc, C), each read by
                n items of x that stand one after another, such as the beams of one source.
            context_mask: who sees what of it, by row and key; None shows everything. `Padding(lengths)` says what is
                real. With a cache it can say no more than that.
            bias, padding, offset: as in `MultiHeadAttention`, in self-attention.
            cache: from `cache()`, or any `KVCache` of as many layers.
            observe: `observe(layer, observation)` is called in each layer, for self- and cross-attention.
            hidden_states: a list that gets what each block reads, and the output.
            return_weights: gives beside the output a tuple of what each `DecoderBlock` returns.
        """
        if return_weights:
            self._check_weights(x)
        plain = all(value is None for value in (mask, context, bias, padding, offset, observe, hidden_states))
        mask = causal(as_mask(mask)) if self.causal else mask
        if isinstance(x, Tensor) and x.is_nested:
            refuse_with_nested(
                context=context, padding=padding, offset=offset, cache=cache, hidden_states=hidden_states
            )
            return self._through_nested(x, mask, bias=bias, observe=observe)
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache: expected a KVCache of all layers, got {type(cache).__name__}")
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache: made for {len(cache)} layers, but the decoder has {len(self.blocks)}")
        self._check_context(x, context, context_mask, cache)
        one = plain and self.causal and not return_weights and x.shape[1:] == (1, self.config.width)
        if one and cache is not None:
            step = native_step(x, cache, self)
            if step is not None:
                return step

        def of(layer: int) -> dict[str, Any]:
            kept = None if cache is None else cache.contexts[layer]
            return {
                "observe": _of_layer(observe, layer),
                "cache": None if cache is None else cache[layer],
                "context": None if context is None else Context(context, context_mask, kept),
            }

        with undone_by_errors(cache):
            given: dict[str, Any] = dict(mask=mask, bias=bias, padding=padding, offset=offset)
            return self._run(x, of, return_weights, hidden_states, **given)

    def _layers(self) -> list[tuple[nn.Module, nn.Module | None]]:
        return [(block, self._positions_of(block)) for block in self.blocks]

    def _check_context(
        self, x: Tensor, context: Tensor | None, mask: Mask | Tensor | None, cache: KVCache | None
    ) -> None:
        """Everything about a context before the first layer, so that no cache is half filled by a call that fails."""
        cross, checked = self.config.cross, of_context(as_mask(mask))
        if (context is None) != (cross is None):
            has = "have no cross-attention" if cross is None else "need one"
            raise ValueError(f"context: the blocks of this decoder {has} (BlockConfig.cross)")
        if context is None and mask is not None:
            raise ValueError("context_mask: given without a context")
        if context is None or cross is None:
            return
        check_tokens("x", x, self.config.width)
        check_tokens("context", context, cross.shape.context)
        batch, items = context.shape[0], x.shape[0]
        if batch != items and (cache is None or not batch or items % batch):
            shared = "" if cache is None else ", or a part of it that divides it"
            raise ValueError(f"context: has batch {batch}, expected x's {items}{shared}")
        if checked is not None:
            rows = x.shape[1] * items // batch if batch else x.shape[1]
            checked.check(batch, cross.heads, rows, context.shape[1], x.device)
        if cache is not None:
            refuse_rows(checked)

    def cache(self, dtype: str | None = None) -> KVCache:
        """An empty cache: for each layer's attention, keys and values that grow, or a state of fixed size.

        Others are made by `KVCache.static` and `KVCache.window`.

        Args:
            dtype: "int8" keeps keys and values in 8 bits, as in `KVCache`.

        Raises:
            ValueError: the mechanism has no way to decode token by token; `dtype="int8"` with a state.
        """
        blocks = (block for block in self.blocks if isinstance(block, DecoderBlock))
        return KVCache([block.attention.cache() for block in blocks], dtype)


@contextlib.contextmanager
def undone_by_errors(cache: KVCache | None) -> Iterator[None]:
    """A block. If the call in it fails, every layer of the cache gets its former length; if a layer cannot, the next
    call raises an error."""
    if cache is None or torch.compiler.is_compiling():
        yield
        return
    before = [layer.lengths() for layer in cache.layers]
    held = {lengths.tobytes() for lengths in before}
    if len(held) > 1:
        told = ", ".join(str(lengths.tolist() if lengths.size > 1 else int(lengths[0])) for lengths in before)
        raise ValueError(
            f"cache: its layers have different numbers of tokens, {told}, since an earlier call failed or used only "
            "some layers; call reset()"
        )
    try:
        yield
    except BaseException:  # Ctrl-C as well
        for layer, length in zip(cache.layers, before, strict=True):
            added = layer.lengths() - length
            # A full ring cannot take everything back; then the next call sees that the layers differ.
            with contextlib.suppress(ValueError):
                if (added > 0).any():
                    layer.rollback(torch.from_numpy(added) if added.size > 1 else int(added[0]))
        raise


def _of_layers(config: BlockConfig | Sequence[BlockConfig], layers: int | None) -> tuple[BlockConfig, ...]:
    """The configuration of each layer; TypeError or ValueError if they do not fit together."""
    if isinstance(config, BlockConfig):
        check_positive("layers", layers)
        assert layers is not None
        return (config,) * layers
    if not isinstance(config, Sequence) or not all(isinstance(one, BlockConfig) for one in config):
        got = type(config).__name__
        raise TypeError(f"config: expected BlockConfig, or a sequence of one for each layer, got {got}")
    if not config:
        raise ValueError("config: expected at least one layer, got an empty sequence")
    if layers is not None and layers != len(config):
        raise ValueError(f"layers: {layers}, but config has {len(config)}, one for each layer; leave layers out")
    for number, one in enumerate(config):
        for (name, here), first in zip(_alike(one).items(), _alike(config[0]).values(), strict=True):
            if here != first:
                raise ValueError(
                    f"config: all layers need the same {name}, got {first!r} in layer 0 and {here!r} in layer {number}"
                )
    return tuple(config)


def _alike(config: BlockConfig) -> dict[str, object]:
    """The configuration that all layers of a stack must share."""
    context = None if config.cross is None else config.cross.shape.context
    return {"width": config.width, "placement": config.placement, "context_width": context}


def _scheme(config: BlockConfig) -> tuple[PositionsConfig, int, int] | None:
    """The arguments of a layer's positions module; layers with equal arguments share one module. A rotary module fits
    any number of heads."""
    attention = config.attention
    heads = 1 if isinstance(attention.positions, RotaryConfig) else attention.heads
    return None if attention.positions is None else (attention.positions, heads, attention.shape.head)


def _of_layer(observe: LayerObserver | None, layer: int) -> Callable[[Observation], None] | None:
    return None if observe is None else functools.partial(observe, layer)


def _with_gradients_of(block: nn.Module, x: Tensor) -> Tensor:
    """x unchanged. Distributed training waits for each weight's gradient; those of a block that is left out are 0."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return x
    firsts = [weight.flatten()[:1].sum() for weight in block.parameters() if weight.requires_grad]
    return torch.where(torch.ones_like(x, dtype=torch.bool), x, torch.stack(firsts).sum().to(x.dtype)) if firsts else x
