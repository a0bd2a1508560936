"""The small model that stacks of reports are made of: each fault overrides one of its parts.

Shape legend: R rows, L queries, K keys, H heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY, HEADS, WIDTH, LONGEST = 53, 3, 24, 211


@dataclass(frozen=True)
class Call:
    """What a forward pass is given: ids (R, L), masks, positions (R, L), and how many tokens are cached."""

    ids: Tensor
    mask: Tensor | None  # (R, past + L), 1 = real, or (R, 1, L, L)
    position_ids: Tensor | None
    past: int
    cached: bool = False

    @property
    def queries(self) -> Tensor:
        return torch.arange(self.past, self.past + self.ids.shape[1])[:, None]

    def keys(self, count: int) -> Tensor:
        """The columns of the newest `count` keys."""
        last = self.past + self.ids.shape[1]
        return torch.arange(last - count, last)[None]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.qkv.weight *= 3  # far from uniform weights


class Model(nn.Module):
    """Logits (R, L, VOCABULARY). `window` counts the query's own key; a bidirectional one reaches half to each side."""

    def __init__(
        self, *, positions: str = "learned", window: int | None = None, causal: bool = True, layers: int = 1
    ) -> None:
        super().__init__()
        self.window, self.causal, self.rotary = window, causal, positions == "rotary"
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        past = 0 if cache is None else cache.length
        call = Call(input_ids, attention_mask, position_ids, past, cache is not None)
        positions = self.positions(call)
        x = self.embed(input_ids)
        if not self.rotary:
            x = x + self.places(positions)
        for index, layer in enumerate(self.layers):
            query, key, value = (
                part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in layer.qkv(layer.norm(x)).chunk(3, -1)
            )
            if self.rotary:
                query, key = rotated(query, positions), rotated(key, positions)
            if cache is not None:
                key, value = cache.update(index, key, value)
            mixed = self.attend(query, key, value, self.visible(call, key.shape[2]), call)
            x = x + layer.out(mixed.transpose(1, 2).flatten(2))
        return self.head(x)

    def positions(self, call: Call) -> Tensor:
        """(R, L)."""
        if call.position_ids is not None:
            return call.position_ids if call.position_ids.dim() == 2 else call.position_ids[0]
        return call.queries.T.expand(call.ids.shape)

    def visible(self, call: Call, count: int) -> Tensor:
        """(R or 1, 1, L, K), True = attend. Every query sees itself, so that no row is empty."""
        pairs = self.reach(call, count) & self.padding(call, count) & self.documents(call)
        return pairs | (call.queries == call.keys(count))

    def reach(self, call: Call, count: int) -> Tensor:
        """Triangle and window (L, K)."""
        behind = call.queries - call.keys(count)
        reached = behind >= 0 if self.causal else torch.ones_like(behind, dtype=torch.bool)
        if self.window is not None:
            reached &= behind < self.window if self.causal else behind.abs() <= self.window // 2
        return reached

    def padding(self, call: Call, count: int) -> Tensor:
        if call.mask is None:
            return torch.tensor(True)
        return (call.mask if call.mask.dim() == 4 else call.mask[:, None, None, -count:]).bool()

    def documents(self, call: Call) -> Tensor:
        """Queries and keys of one document: positions begin anew with each."""
        if call.position_ids is None or call.past:
            return torch.tensor(True)
        positions = self.positions(call)
        owner = torch.nn.functional.pad(positions.diff() <= 0, (1, 0)).cumsum(-1)
        return (owner[:, :, None] == owner[:, None])[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=visible)


class Unpacked(Model):
    """Knows no documents but those of a mask of pairs."""

    def documents(self, call: Call) -> Tensor:
        return torch.tensor(True)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * 0.3 ** torch.arange(half, dtype=x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
    ).to(x)


# Collators


def padded(documents: list[list[int]], *, left: bool = False, mask: bool = True, positions: bool = False) -> Any:
    """Rows of one width, padded with token 0."""
    width = max(map(len, documents))
    gaps = [[0] * (width - len(document)) for document in documents]
    rows = [[*gap, *document] if left else [*document, *gap] for gap, document in zip(gaps, documents, strict=True)]
    ones = [[1] * len(document) for document in documents]
    real = [[*gap, *one] if left else [*one, *gap] for gap, one in zip(gaps, ones, strict=True)]
    made = {"input_ids": torch.tensor(rows)}
    if mask:
        made["attention_mask"] = torch.tensor(real)
    if positions:
        made["position_ids"] = (torch.tensor(real).cumsum(-1) - 1).clamp(min=0)
    return made


def packed(documents: list[list[int]], *, positions: bool = True, mask: str = "", labels: bool = False) -> Any:
    """All documents in one row; `mask` is "", "ones" or "blocks"."""
    lengths = torch.tensor([len(document) for document in documents])
    made = {"input_ids": torch.tensor([[token for document in documents for token in document]])}
    restarting = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    if positions:
        made["position_ids"] = restarting
    if mask == "ones":
        made["attention_mask"] = torch.ones_like(made["input_ids"])
    if mask == "blocks":
        owner = torch.repeat_interleave(torch.arange(len(documents)), lengths)
        made["attention_mask"] = (owner[:, None] == owner)[None, None]
    if labels:
        made["labels"] = made["input_ids"].masked_fill(restarting == 0, -100)
    return made


# Decoding


class Cache:
    """Keys and values of each layer, all that came."""

    def __init__(self) -> None:
        self.length = 0
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.held:
            old_key, old_value = self.held[layer]
            key, value = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
        self.held[layer] = (self.kept(key), self.kept(value))
        return key, value

    def kept(self, states: Tensor) -> Tensor:
        """What the next step finds (R, H, K, E)."""
        return states


def decoding(model: nn.Module, fresh: Callable[[], Cache] = Cache) -> Any:
    """(tokens so far, state) -> (logits of the last token, state)."""

    def decode(tokens: list[int], state: Cache | None) -> tuple[Tensor, Cache]:
        state = fresh() if state is None else state
        new = tokens[state.length :]
        logits = model(torch.tensor([new]), cache=state)[0, -1]
        state.length += len(new)
        return logits, state

    return decode
