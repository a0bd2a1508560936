"""The way in: `saccade.prune`. What it needs of models is imported when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ._heads import Heads
    from ._prune import Optimizers
    from ._report import Pruning


def prune(model: nn.Module, heads: Heads, *, optimizer: Optimizers = None) -> Pruning:
    """Remove attention heads from a model for good, in place: its projections get smaller.

    Outputs and gradients of the rest equal, to rounding, those of the model whose output projections read 0 from the
    removed heads. Of grouped queries a key-value head goes when all of its query heads have; the query heads that stay
    must be equally many for each key-value head. The rest keeps its dtype, device, ties and `requires_grad`, and is
    numbered again from 0. A backward pass through a graph that was built before gives the smaller parameters no
    gradient: run it before you prune. Michel et al., "Are Sixteen Heads Really Better than One?" (2019); Voita et al.
    (2019).

    Args:
        model: or a part of one (the whole where it is to be saved: its configuration holds the heads):
            `saccade.nn`'s attention, blocks and stacks, any model of `saccade.models`, `nn.MultiheadAttention` (which
            becomes a `PrunedMultiheadAttention`) and modules that hold it, and transformers' models that are built like
            BERT, GPT-2, Llama or BART (RoBERTa, Mistral, Qwen, Gemma, OPT, ViT, ...), with eager, sdpa and "saccade".
        heads: {4: [1, 3], 5: [0]}, [(4, 1), (4, 3), (5, 0)] or "4.1,4.3,5.0", counted from 0. A layer is its number, as
            `saccade.watch` and `saccade look` count; of an encoder-decoder "encoder.4", "decoder.4" or "cross.4"; or a
            path, or a dotted part of one, that no other layer has. One head of each layer must stay.
        optimizer: one or several: parameters are replaced in their groups, and their state (moments, momentum) is cut
            alike.

    Returns:
        What was removed, the parameters before and after, and a note where files cannot hold the model as published.

    Raises:
        TypeError: a model, heads or an optimizer of another type.
        ValueError: layers or heads that do not exist (the existing ones are listed), groups of unequal size, a
            mechanism or module that cannot have fewer heads, adapted or tied projections, an optimizer's state that
            cannot be cut. Nothing has changed then.

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
