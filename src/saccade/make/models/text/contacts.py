"""Predicts residue contacts from attention maps by logistic regression, keeping the maps of one layer at a time.

Shape legend: B batch, H heads, n tokens of one item.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....operator._weights import attention_weights
from ....operator.nn.attention import Observation


class ContactHead(nn.Module):
    """p_ij = sigmoid(b + sum_h w_h (s_ij - s_i. s_.j / s_..)),   s = a + a^T, a the weights of head h, over all layers.

    Rao et al., "Transformer protein language models are unsupervised structure learners" (2021); the correction by
    sums of rows and columns is that of Dunn et al. (2008).
    """

    def __init__(self, layers: int, heads: int):
        super().__init__()
        self.layers, self.regression = layers, nn.Linear(layers * heads, 1)

    def weights(self, layer: int) -> Tensor:
        """(H,): w of a layer."""
        return self.regression.weight[0].view(self.layers, -1)[layer]


class ContactMaps:
    """Accumulates the regression over the attention calls of a model, layer by layer.

    Args:
        head: the regression.
        places: row and columns of each item's tokens in the computed batch.
        inside: bool (n,) for each item: which tokens are residues.
    """

    def __init__(self, head: ContactHead, places: list[tuple[int, slice]], inside: list[Tensor]):
        self.head, self.places, self.inside = head, places, inside
        self.logits = [head.regression.bias.expand(int(held.sum()), int(held.sum())) for held in inside]

    def add(self, layer: int, observation: Observation) -> None:
        """The observer of the model's layers."""
        for item in range(len(self.logits)):
            self.logits[item] = self.logits[item] + self._found(layer, observation, item)

    def _found(self, layer: int, observation: Observation, item: int) -> Tensor:
        (row, columns), inside = self.places[item], self.inside[item]
        query, key = observation.query[row, None, :, columns], observation.key[row, None, :, columns]
        maps = attention_weights(query, key, scale=observation.scale)[0]
        return _corrected(maps[:, inside][..., inside], self.head.weights(layer))


def _corrected(maps: Tensor, weight: Tensor) -> Tensor:
    """Weighted sum (n, n) of symmetrised maps (H, n, n), corrected by row and column sums; weights (H,)."""
    maps = (maps + maps.transpose(1, 2)).to(weight.dtype)
    sums = maps.sum(-1)
    explained = sums[:, :, None] * sums[:, None, :] / sums.sum(-1)[:, None, None]
    return torch.einsum("hij,h->ij", maps - explained, weight)
