"""The model that every contender stands in: nothing else in it moves anything from one token to another.

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
from .examples import Task


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, the same for all contenders.

    Args:
        width: E.
        layers: how many blocks; Zoology's setting has 2, and no feed-forward layers.
        taps: tokens that a short convolution in front of the blocks reads, the token itself among them; 0 is none.
            Without it, the first layer has to learn to look at the token before, and nothing but that is tested of
            mechanisms that cannot; with it, what is tested is what they keep.
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

    As it stands before linear attention in H3 (Fu et al. 2022, "shift"), Based (Arora et al. 2024) and others: it
    shows each token those just before it, which a sum over all keys cannot single out.
    """

    def __init__(self, width: int, taps: int):
        super().__init__()
        self.filter = nn.Conv1d(width, width, taps, groups=width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        earlier = self.filter.kernel_size[0] - 1
        return x + self.filter(F.pad(x.transpose(1, 2), (earlier, 0))).transpose(1, 2)


class SequenceModel(nn.Module):
    """Reads tokens in order, and says what comes after some of them.

        logits = W norm(body(sqrt(E) W[tokens] + positions)),   W the embedding (V, E)

    Sinusoidal positions are added to the embedding, the same for every contender: by them a layer finds the token
    before in fewer steps than by learned ones. The head is the embedding's transpose, as in Zoology's models.
    """

    def __init__(self, contender: TaskContender, task: Task, shape: ModelShape):
        super().__init__()
        self.width = shape.width
        self.embedding = nn.Embedding(task.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=shape.width**-0.5)
        self.positions = Sinusoidal(shape.width)
        self.near = ShortConvolution(shape.width, shape.taps) if shape.taps else nn.Identity()
        self.body = contender.body(shape.width, shape.layers, task.length)

    def forward(self, tokens: Tensor, asked: Tensor) -> Tensor:
        """Logits (n, V) of what comes after those tokens (B, L) where `asked` (B, L) is True."""
        x = self.near(self.positions(self.embedding(tokens) * self.width**0.5))
        return F.linear(self.body(x)[asked], self.embedding.weight)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


@torch.no_grad()
def answers(model: SequenceModel, tokens: Tensor, asked: Tensor, batch: int = 256) -> Tensor:
    """The most probable tokens (n,) where `asked` (B, L), a batch at a time."""
    training = model.training
    model.eval()
    try:
        pieces = zip(tokens.split(batch), asked.split(batch), strict=True)
        return torch.cat([model(some, where).argmax(-1) for some, where in pieces])
    finally:
        model.train(training)
