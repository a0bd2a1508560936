"""Attention models that are written out, whose heads can be overridden from outside, and models of others whose
output projection is cut up: what measures of heads are held against.

Shape legend: B batch, H heads, L length, D width of a head, E model width.
"""

from __future__ import annotations

import copy
import functools
import math

import torch
from torch import Tensor, nn

from saccade.models import DecoderLM, ModelConfig

LENGTH, VOCABULARY = 7, 31


WIDTH = {"q": 5, "k": 5, "v": 2}  # of a head


class HandAttention(nn.Module):
    """3 heads; `given` replaces "query", "key", "value" (B, H, L, D) or, head by head, the output."""

    num_heads = 3

    def __init__(self):
        super().__init__()
        for name, of_head in WIDTH.items():
            setattr(self, name, nn.Linear(11, 3 * of_head))
        self.o = nn.Linear(3 * WIDTH["v"], 11)

    def split(self, x: Tensor, name: str) -> Tensor:
        return getattr(self, name)(x).unflatten(-1, (3, WIDTH[name])).transpose(1, 2)

    def forward(self, x: Tensor, given: dict | None = None) -> Tensor:
        query, key, value = (self.split(x, name) for name in "qkv")
        given = given or {}
        query, key, value = (given.get(n, own) for n, own in (("query", query), ("key", key), ("value", value)))
        logits = query @ key.transpose(-2, -1) / math.sqrt(WIDTH["q"])
        out = torch.softmax(logits, -1) @ value
        self.last = {"query": query, "key": key, "value": value, "output": out}
        for head, other in given.get("output", {}).items():
            out = torch.stack([other if head == h else own for h, own in enumerate(out.unbind(1))], 1)
        return self.o(out.transpose(1, 2).flatten(2))


class HandModel(nn.Module):
    """x (B, L, E) -> the residual stream after all layers. The last layer may be the first one again."""

    def __init__(self, layers: int = 3, feed_forward: bool = True, shared: bool = False):
        super().__init__()
        torch.manual_seed(3)
        own = [HandAttention() for _ in range(layers)]
        self.attention = nn.ModuleList(own[:1] * layers if shared else own)
        self.wide = nn.ModuleList([nn.Linear(11, 13) for _ in own]) if feed_forward else None
        self.narrow = nn.ModuleList([nn.Linear(13, 11) for _ in own])
        self.double()

    def forward(self, x: Tensor, given: dict | None = None) -> Tensor:
        """`given[layer]` as `HandAttention` takes it."""
        for layer, attention in enumerate(self.attention):
            # without the keyword where there is none: saccade is to meet the model as anybody would call it
            x = x + attention(x, *([given[layer]] if given and layer in given else []))
            x = x + self.feed_forward(x, layer)
        return x

    def feed_forward(self, x: Tensor, layer: int) -> Tensor:
        return 0 * x if self.wide is None else self.narrow[layer](torch.tanh(self.wide[layer](x)))


def hand_inputs(batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def decoder(layers: int = 2) -> nn.Module:
    """Saccade's own, with grouped queries: 4 heads of 2 key heads."""
    torch.manual_seed(5)
    return DecoderLM(
        ModelConfig(VOCABULARY, width=24, layers=layers, heads=4, kv_heads=2, hidden=17, context=16)
    ).double()


def encoder() -> nn.Module:
    """PyTorch's, post-norm."""
    torch.manual_seed(6)
    layer = nn.TransformerEncoderLayer(20, 4, 17, dropout=0.3, batch_first=True)
    whole = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, 20), whole).double()


def bert() -> nn.Module:
    import transformers

    torch.manual_seed(7)
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17)
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **sizes)).double()


def gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(8)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=3, n_positions=16)
    return transformers.GPT2LMHeadModel(config).double()


OUTPUT = {  # the output projection of a call's module, and the axis of its weight along which heads stand
    decoder: ("output", 1),
    encoder: ("out_proj", 1),
    bert: ("dense", 1),
    gpt2: ("c_proj", 0),
}


def projection(model: nn.Module, make, name: str) -> nn.Module:
    """The output projection of the call `name`."""
    if make is bert:  # "...attention.self" is beside "...attention.output"
        name = name.rpartition(".")[0] + ".output"
    return model.get_submodule(name).get_submodule(OUTPUT[make][0])


def with_factors(model: nn.Module, make, factors: dict[tuple[str, int], float], heads: int) -> nn.Module:
    """A copy whose output projections read heads (call name, head) times a factor."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for (name, head), factor in factors.items():
            weight = projection(own, make, name).weight
            weight.chunk(heads, OUTPUT[make][1])[head].mul_(factor)
    return own


def tokens(seed: int, batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def near_texts(amount: float):
    """Two runs of `decoder()` on a text, whose embeddings differ by as much."""
    ids, other = tokens(3), torch.randn(24, dtype=torch.float64, generator=torch.Generator().manual_seed(9))

    def run(model, amount):
        handle = model.embedding.register_forward_hook(lambda module, given, out: out + amount * other)
        try:
            return model(ids)
        finally:
            handle.remove()

    return tuple(functools.partial(run, amount=one) for one in (0.0, amount))


def logits(out) -> Tensor:
    """Of any of the models."""
    return out if isinstance(out, Tensor) else out.logits
