"""The residual stream between the layers of a model.

Shape legend: B texts, L tokens with the special ones, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...interception._hooks import hooked
from ...make.models import DecoderLM, Model
from ...make.models.text.encoder_decoder import EncoderDecoder
from ..inspection import TextModel


def hidden_states(model: TextModel, tokens: Tensor) -> list[Tensor]:
    """(B, L, E) before the first layer (the embeddings) and after each; in evaluation mode, without gradients.

    The last entry for a published model is its output, after the final norm if it has one.
    """
    module = model.module
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            tokens = tokens.to(next(module.parameters()).device)
            if isinstance(module, DecoderLM):
                return _of_own(module, tokens)
            if isinstance(module, Model):
                return _of_published(module, tokens)
            return list(module(input_ids=tokens, output_hidden_states=True).hidden_states)
    finally:
        module.train(training)


def _of_published(module: Model, tokens: Tensor) -> list[Tensor]:
    read = module.encode if isinstance(module, EncoderDecoder) else module
    return list(read(tokens, hidden_states=True).hidden_states or ())


def _of_own(module: DecoderLM, tokens: Tensor) -> list[Tensor]:
    states: list[Tensor] = []
    blocks = list(module.decoder.blocks)
    with (
        hooked(blocks[:1], before=lambda block, given, named: states.append(given[0])),
        hooked(blocks, after=lambda block, out: states.append(out)),
    ):
        module(tokens)
    return states
