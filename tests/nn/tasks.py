"""Copying and reversing: tasks of order alone, which two-layer models learn exactly or not at all.

A word of n random symbols is given; the answer is the word again, or the word backwards. Nothing but the place of a
symbol says where it belongs, so a model that answers every fresh word right has learned to use positions.

Shape legend: B batch, n length of a word, V symbols and markers, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.nn import AttentionConfig, BlockConfig, Decoder, Transformer
from saccade.positions import AlibiConfig, Config, Learned, RotaryConfig, Sinusoidal, T5Config

SYMBOLS = 13
START, ANSWER = SYMBOLS, SYMBOLS + 1  # before the word, and between word and answer
LENGTH = 5

Task = Callable[[Tensor], Tensor]
TASKS: dict[str, Task] = {"copy": lambda words: words, "reverse": lambda words: words.flip(1)}

Scheme = Config | type[Sinusoidal] | type[Learned] | None
SCHEMES: dict[str, Scheme] = {
    "none": None,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary, half": RotaryConfig(),
    "rotary, interleaved": RotaryConfig(layout="interleaved"),
    "ALiBi": AlibiConfig(),
    "ALiBi, learned": AlibiConfig(learned=True),
    "T5": T5Config(),
}


def words(batch: int, length: int, random: torch.Generator) -> Tensor:
    """(B, n) symbols, all equally likely."""
    return torch.randint(SYMBOLS, (batch, length), generator=random)


def between(first: int, tokens: Tensor) -> Tensor:
    """`tokens` (B, n) with a marker in front: (B, n + 1)."""
    return F.pad(tokens, (1, 0), value=first)


def block(scheme: Scheme, width: int, heads: int) -> BlockConfig:
    """Blocks with the scheme in attention, where that is its place."""
    inside = scheme if isinstance(scheme, Config) else None
    return BlockConfig(AttentionConfig(width, heads, positions=inside))


class Embedding(nn.Module):
    """Tokens (B, L) to vectors (B, L, E) of variance 1, with positions where the scheme adds them there."""

    def __init__(self, scheme: Scheme, width: int):
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS + 2, width)
        longest = 2 * (LENGTH + 1)
        self.place = (
            Sinusoidal(width) if scheme is Sinusoidal else Learned(longest, width) if scheme is Learned else None
        )

    def forward(self, tokens: Tensor, offset: int = 0) -> Tensor:
        x = self.tokens(tokens)
        return x if self.place is None else self.place(x, offset)


class DecoderOnly(nn.Module):
    """START word ANSWER answer: one causal sequence, as in a language model."""

    def __init__(self, scheme: Scheme, *, width: int, heads: int, layers: int):
        super().__init__()
        self.embedding = Embedding(scheme, width)
        self.decoder = Decoder(block(scheme, width, heads), layers)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, given: Tensor, answer: Tensor) -> Tensor:
        """Logits (B, n, V) of each symbol of the answer after those before it."""
        tokens = torch.cat((between(START, given), between(ANSWER, answer[:, :-1])), 1)
        return self.head(self.decoder(self.embedding(tokens))[:, given.shape[1] + 1 :])

    @torch.no_grad()
    def solve(self, given: Tensor) -> Tensor:
        """The likeliest answer (B, n), symbol by symbol, each read once."""
        cache = self.decoder.cache()
        new, found = F.pad(between(START, given), (0, 1), value=ANSWER), []
        for _ in range(given.shape[1]):
            out = self.decoder(self.embedding(new, cache.length), cache=cache)
            new = self.head(out[:, -1:]).argmax(-1)
            found.append(new)
        return torch.cat(found, 1)


class EncoderDecoder(nn.Module):
    """START word is the source, ANSWER answer the target."""

    def __init__(self, scheme: Scheme, *, width: int, heads: int, layers: int):
        super().__init__()
        self.source, self.target = Embedding(scheme, width), Embedding(scheme, width)
        config = block(scheme, width, heads)
        causal = replace(scheme, bidirectional=False) if isinstance(scheme, T5Config) else scheme
        self.transformer = Transformer(config, layers, decoder=block(causal, width, heads))
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, given: Tensor, answer: Tensor) -> Tensor:
        source = self.source(between(START, given))
        return self.head(self.transformer(source, self.target(between(ANSWER, answer[:, :-1]))))

    @torch.no_grad()
    def solve(self, given: Tensor) -> Tensor:
        memory, cache = self.transformer.encode(self.source(between(START, given))), self.transformer.cache()
        new, found = given.new_full((len(given), 1), ANSWER), []
        for _ in range(given.shape[1]):
            out = self.transformer.decode(self.target(new, cache.length), memory, cache=cache)
            new = self.head(out).argmax(-1)
            found.append(new)
        return torch.cat(found, 1)


MODELS: dict[str, type[DecoderOnly] | type[EncoderDecoder]] = {
    "decoder": DecoderOnly,
    "encoder-decoder": EncoderDecoder,
}


@dataclass(frozen=True)
class Recipe:
    """How a model is made and trained; a run is a function of it, of scheme, task and seed."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    batch: int = 32
    rate: float = 4e-3  # reached after `warmup` steps, then falling to 0 at `steps`
    warmup: int = 50
    steps: int = 1500  # at most
    every: int = 25  # between two looks at the validation words


@dataclass(frozen=True)
class Run:
    """A trained model, the steps it took, and whether it was sure of its answers before they ran out."""

    model: DecoderOnly | EncoderDecoder
    steps: int
    solved: bool


def train(
    kind: str, scheme: Scheme, task: Task, seed: int, recipe: Recipe = Recipe(), tell: Callable[[int], object] = id
) -> Run:
    """Train until sure of every symbol of 769 fresh words at three looks in a row, or out of steps.

    One look would stop where a rate that is still large has been lucky.
    """
    torch.manual_seed(seed)
    model = MODELS[kind](scheme, width=recipe.width, heads=recipe.heads, layers=recipe.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.rate, betas=(0.9, 0.98))
    random, validation = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1_000_003 + seed)
    looks = 0
    for step in range(1, recipe.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * min(step / recipe.warmup, 1 - step / recipe.steps)
        given = words(recipe.batch, LENGTH, random)
        answer = task(given)
        loss = F.cross_entropy(model(given, answer).flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % recipe.every == 0:
            tell(step)
            looks = looks + 1 if loss < 0.2 and sure(model, task, words(769, LENGTH, validation)) else 0
            if looks == 3:
                return Run(model, step, True)
    return Run(model, recipe.steps, False)


@torch.no_grad()
def sure(model: nn.Module, task: Task, given: Tensor) -> bool:
    """Whether each symbol of the answers has a probability above .8, those before it being right."""
    answer = task(given)
    chances = model(given, answer).softmax(-1).gather(-1, answer[..., None])
    return bool((chances > 0.8).all())
