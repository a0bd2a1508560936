"""`saccade.prune`. Its modules for models are imported when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ._heads import Heads
    from ._prune import Optimizers
    from ._report import Pruning


def prune(model: nn.Module, heads: Heads, *, optimizer: Optimizers = None) -> Pruning:
    """Remove attention heads permanently and in place: projections become smaller.

    Outputs and gradients equal, to rounding, those of the model with the removed heads' outputs set to 0. With grouped
    queries, a key-value head is removed together with all of its query heads; each remaining one must keep equally
    many. The rest keeps its dtype, device, ties and `requires_grad`; heads are renumbered from 0. A graph built before
    pruning gives no gradients for the smaller parameters: run its backward pass first. Michel et al., "Are Sixteen
    Heads Really Better than One?" (2019); Voita et al. (2019).

    Args:
        model: a model, or a part of it (prune the whole model if it is to be saved: its configuration holds the heads):
            `saccade.nn`'s attention, blocks and stacks, any model of `saccade.models`, `nn.MultiheadAttention` (which
            becomes a `PrunedMultiheadAttention`) and modules with it, and transformers' models with the structure of
            BERT, GPT-2, Llama or BART (RoBERTa, Mistral, Qwen, Gemma, OPT, ViT, ...), with eager, sdpa and "saccade".
        heads: {4: [1, 3], 5: [0]}, [(4, 1), (4, 3), (5, 0)] or "4.1,4.3,5.0", counted from 0. A layer is its number, as
            in `saccade.watch` and `saccade look`; in an encoder-decoder "encoder.4", "decoder.4" or "cross.4"; or a
            path, or an unambiguous dotted part of one. One head of each layer must stay.
        optimizer: one or several: pruned parameters are replaced in their groups, and their state (moments, momentum)
            is cut accordingly.

    Returns:
        The removed heads, the parameters before and after, and a note if files cannot store the model in the published
        form.

    Raises:
        TypeError: a model, heads or an optimizer of another type.
        ValueError: unknown layers or heads (the existing ones are listed), groups of unequal size, a mechanism or
            module that cannot have fewer heads, adapters, tied projections, an optimizer state that cannot be cut. The
            model is unchanged then.

    Example:
        >>> import saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> model = saccade.nn.Encoder(config, layers=2)
        >>> print(saccade.prune(model, {1: [0, 2]}))
        layer 1: 4 heads, 2 left
        8,272 parameters, 7,760 left (93.8%)
    """
    from ._prune import prune_heads

    return prune_heads(model, heads, optimizer)
