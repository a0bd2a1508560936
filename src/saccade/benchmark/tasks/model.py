"""The model around every contender; only the contender moves information between tokens, except a short convolution.

Shape legend: B batch, L length, E width, V vocabulary, n tokens with an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator.nn.config import check_count, check_positive
from ...operator.positions import Sinusoidal
from .contenders import TaskContender
from .examples import SyntheticTask


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, the same for all contenders.

    Args:
        width: E.
        layers: number of blocks; Zoology uses 2, without feed-forward layers.
        taps: number of tokens in a short convolution before the blocks, including the token itself; 0 is none. Without
            it, the first layer has to learn to attend to the previous token, which some mechanisms cannot; with it,
            only their memory is tested.
    """

    width: int = 32
    layers: int = 2
    taps: int = 2

    def __post_init__(self) -> None:
        check_positive("width", self.width)
        check_positive("layers", self.layers)
        check_count("taps", self.taps)


class ShortConvolution(nn.Module):
    """x plus a causal convolution of each feature over the last `taps` tokens: (B, L, E) -> (B, L, E).

        out[t] = x[t] + sum_i weight[i] * x[t - taps + 1 + i]

    As used before linear attention in H3 (Fu et al. 2022, "shift"), Based (Arora et al. 2024) and others: each token
    sees the previous ones, which a sum over all keys cannot distinguish.
    """

    def __init__(self, width: int, taps: int):
        super().__init__()
        self.filter = nn.Conv1d(width, width, taps, groups=width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        earlier = self.filter.kernel_size[0] - 1
        return x + self.filter(F.pad(x.transpose(1, 2), (earlier, 0))).transpose(1, 2)


class SequenceModel(nn.Module):
    """A causal model that predicts the next token at some positions.

        logits = W norm(body(sqrt(E) W[tokens] + positions)),   W the embedding (V, E)

    Sinusoidal positions are added to the embedding for every contender: with them a layer learns to find the previous
    token in fewer steps than with learned ones. The output matrix is the transposed embedding, as in Zoology.
    """

    def __init__(self, contender: TaskContender, task: SyntheticTask, shape: ModelShape):
        super().__init__()
        self.width = shape.width
        self.embedding = nn.Embedding(task.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=shape.width**-0.5)
        self.positions = Sinusoidal(shape.width)
        self.near = ShortConvolution(shape.width, shape.taps) if shape.taps else nn.Identity()
        self.body = contender.body(shape.width, shape.layers, task.length)

    def forward(self, tokens: Tensor, asked: Tensor) -> Tensor:
        """Logits (n, V) of the next token, for tokens (B, L) where `asked` (B, L) is True."""
        x = self.near(self.positions(self.embedding(tokens) * self.width**0.5))
        return F.linear(self.body(x)[asked], self.embedding.weight)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


@torch.no_grad()
def answers(model: SequenceModel, tokens: Tensor, asked: Tensor, batch: int = 256) -> Tensor:
    """The most probable next tokens (n,) where `asked` (B, L) is True, computed in batches."""
    training = model.training
    model.eval()
    try:
        pieces = zip(tokens.split(batch), asked.split(batch), strict=True)
        return torch.cat([model(some, where).argmax(-1) for some, where in pieces])
    finally:
        model.train(training)
