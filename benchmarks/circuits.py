"""Known circuits, found again with `saccade.intervene`, `saccade.patching` and `saccade.head_importance`.

    python benchmarks/circuits.py --text NOVEL.txt [--out benchmarks/results/circuits.md]

Copying what was there before (Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021; Olsson et al.,
"In-context Learning and Induction Heads", 2022) takes two heads: one that looks at the previous token and writes it
down, and one in a later layer whose keys read that, so that a token finds what followed it the last time.

1. In the embedded model: the heads that `heads.json` calls "repeat" are ablated, and as many others drawn at random.
2. There, by path patching: which heads of layer 0 reach the copying heads through their keys.
3. In models of two layers of attention alone, trained here to repeat: exact patching and attribution patching.

The text is one that the embedded model has not read (its card names the two).

Shape legend: B items, L tokens, H heads of a layer, V vocabulary, E width.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade
from saccade.attribution import HeadValues, Patching
from saccade.inspection import open_model
from saccade.intervention import Ablate
from saccade.nn import AttentionConfig, BlockConfig, Decoder
from saccade.positions import RotaryConfig

REPEATED, ITEMS, DRAWS = 48, 32, 10
SYMBOLS, SEEDS, ENOUGH = 64, (0, 1, 2), 0.05
Heads = Sequence[tuple[int, int]]


# --- the embedded model -------------------------------------------------------------------------------------------


class Embedded:
    """The embedded model on repeated random tokens (B, 1 + 2 L) and on text (B, 256)."""

    def __init__(self, text: str) -> None:
        opened = open_model()
        self.model: Any = opened.module
        self.roles = {(one["layer"], one["head"]): one["role"] for one in opened.roles["heads"]}
        start, drawn = opened.before[0], torch.Generator().manual_seed(0)
        first = torch.randint(10, self.model.config.vocabulary, (ITEMS, REPEATED), generator=drawn)
        other = torch.randint(10, self.model.config.vocabulary, (ITEMS, REPEATED), generator=drawn)
        begin = torch.full((ITEMS, 1), start)
        self.repeated = torch.cat([begin, first, first], 1)
        self.unrelated = torch.cat([begin, other, first], 1)
        ids = torch.tensor(opened.encode(text).ids)
        windows = ids[: len(ids) // 255 * 255].view(-1, 255)[:64]
        self.text = torch.cat([torch.full((len(windows), 1), start), windows], 1)

    def of_role(self, role: str) -> list[tuple[int, int]]:
        return [head for head, found in self.roles.items() if found == role]

    @torch.no_grad()
    def losses(self, heads: Heads) -> tuple[float, float, float]:
        """Nats a token on the first half of repeated tokens, on the second, and on text, without `heads`."""
        edits: dict[int | str, Ablate] = {
            layer: Ablate([head for at, head in heads if at == layer]) for layer in sorted({at for at, _ in heads})
        }
        with saccade.intervene(self.model, edits) if edits else torch.no_grad():
            repeated, text = self._losses(self.repeated), self._losses(self.text)
        return float(repeated[:, :REPEATED].mean()), float(repeated[:, REPEATED + 1 :].mean()), float(text.mean())

    def _losses(self, tokens: Tensor) -> Tensor:
        return _nats(self.model(tokens), tokens)

    def copied(self, logits: Tensor) -> Tensor:
        """Minus the nats a token of the second half."""
        return -_nats(logits, self.repeated)[:, REPEATED + 1 :].mean()


def _nats(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def ablated(model: Embedded) -> list[str]:
    copying, before = model.of_role("repeat"), model.of_role("previous")
    others = [head for head, role in model.roles.items() if role not in ("repeat", "previous")]
    drawn = [random.Random(seed).sample(others, len(copying)) for seed in range(DRAWS)]
    of_draws = torch.tensor([model.losses(heads) for heads in drawn])
    rows = {
        "none": model.losses([]),
        f"the {len(copying)} copying heads ({_named(copying)})": model.losses(copying),
        f"{len(copying)} of the {len(others)} that are neither these nor the next, mean of {DRAWS} draws": tuple(
            of_draws.mean(0).tolist()
        ),
        "the draw among them that hurts copying most": tuple(of_draws[of_draws[:, 1].argmax()].tolist()),
        f"the {len(before)} previous-token heads ({_named(before)})": model.losses(before),
    }
    return [
        "| ablated | random tokens | the same again | text |",
        "|---|---|---|---|",
        *(f"| {name} | {first:.2f} | {second:.2f} | {text:.2f} |" for name, (first, second, text) in rows.items()),
    ]


def fed(model: Embedded) -> list[str]:
    copying = sorted(head for layer, head in model.of_role("repeat") if layer == 1)
    lines = ["| through their | " + " | ".join(f"0.{head}" for head in range(8)) + " |", "|---|" + "---|" * 8]
    for part in ("query", "key", "value"):
        found = saccade.patching(
            model.model,
            model.repeated,
            model.unrelated,
            model.copied,
            by="exact",
            direction="noising",
            heads={0: None},
            through=(1, copying, part),
        )
        lines.append(f"| {part} | " + " | ".join(f"{value:.2f}" for value in _of_layer(found.exact, 0)) + " |")
    return lines


# --- models that repeat -------------------------------------------------------------------------------------------


class Repeater(nn.Module):
    """Two layers of attention alone, four heads each: tokens (B, L) to logits (B, L, V)."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, width)
        block = BlockConfig(AttentionConfig(width, heads, positions=RotaryConfig()), hidden=0)
        self.decoder = Decoder(block, 2)
        self.head = nn.Linear(width, SYMBOLS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.decoder(self.embedding(tokens)))
        return logits


def sequences(items: int, length: int, drawn: torch.Generator) -> Tensor:
    """(B, 1 + 2 L): a start symbol, and L symbols, none of them twice, two times over."""
    first = 1 + torch.rand(items, SYMBOLS - 1, generator=drawn).argsort(1)[:, :length]
    return torch.cat([torch.zeros(items, 1, dtype=torch.int64), first, first], 1)


def trained(seed: int) -> tuple[Repeater, int]:
    """A model that repeats, and the steps it took. Lengths differ from batch to batch: only what stands there helps."""
    torch.manual_seed(seed)
    drawn, model, mean = torch.Generator().manual_seed(seed), Repeater(), 4.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1.0, betas=(0.9, 0.99))
    for step in range(3000):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 100)
        tokens = sequences(64, int(torch.randint(8, 33, (1,), generator=drawn)), drawn)
        half = tokens.shape[1] // 2
        loss = _nats(model(tokens), tokens)[:, half + 1 :].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = 0.9 * mean + 0.1 * loss.item()
        if mean < ENOUGH:
            return model.eval(), step + 1
    raise RuntimeError(f"seed {seed}: a mean loss of {mean:.3f} after 3,000 steps")


def traced(model: Repeater) -> dict[str, Patching]:
    """The heads that carry the answer, and the part of layer 0 that does so through the keys of layer 1.

    Clean: ... A B ... C D ... A, and B is next. Corrupted: the first A and the first C change places, so D is. Only
    what stands before B and D differs: which is what a previous-token head has to tell.
    """
    at, other, items = 8, 14, 64
    whole = sequences(items, 20, torch.Generator().manual_seed(99))
    clean = whole[:, : 1 + 20 + at + 1]
    corrupted = clean.clone()
    corrupted[:, 1 + at], corrupted[:, 1 + other] = clean[:, 1 + other], clean[:, 1 + at]
    right, wrong, item = clean[:, 2 + at], clean[:, 2 + other], torch.arange(items)

    def metric(logits: Tensor) -> Tensor:
        return (logits[item, -1, right] - logits[item, -1, wrong]).mean()

    found = {"all": saccade.patching(model, clean, corrupted, metric)}
    for part in ("query", "key", "value"):
        found[part] = saccade.patching(model, clean, corrupted, metric, through=(1, None, part))
    return found


def repeaters() -> list[str]:
    lines = [
        "| seed | steps | way | 0.0 | 0.1 | 0.2 | 0.3 | 1.0 | 1.1 | 1.2 | 1.3 | agreement |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    paths = ["| seed | way | through their | 0.0 | 0.1 | 0.2 | 0.3 |", "|---|---|---|---|---|---|---|"]
    for seed in SEEDS:
        model, steps = trained(seed)
        found = traced(model)
        both = found["all"]
        for way, values in (("exact", both.exact), ("gradient", both.gradient)):
            cells = [f"{value:.2f}" for layer in (0, 1) for value in _of_layer(values, layer)]
            agreed = str(both).splitlines()[-1].removeprefix("by gradient: ") if way == "gradient" else ""
            lines.append(f"| {seed} | {steps} | {way} | {' | '.join(cells)} | {agreed} |")
        for part in ("query", "key", "value"):
            for way, values in (("exact", found[part].exact), ("gradient", found[part].gradient)):
                cells = [f"{value:.2f}" for value in _of_layer(values, 0)]
                paths.append(f"| {seed} | {way} | {part} | {' | '.join(cells)} |")
    return [*lines, "", *paths]


def _of_layer(values: HeadValues | None, layer: int) -> list[float]:
    assert values is not None
    return [float(value) for value in values.grid()[layer]]


def _named(heads: Heads) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in sorted(heads))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = Embedded(given.text.read_text(encoding="utf-8"))
    lines = [
        "# Known circuits, found again",
        "",
        "`python benchmarks/circuits.py --text NOVEL.txt`; the text is *The Secret Garden*, which the embedded model "
        "has not read. Heads are layer.head. What it means is on [the page on heads](../../docs/heads.md).",
        "",
        f"## Without its copying heads the embedded model does not copy (nats a token; {ITEMS} x {REPEATED} tokens)",
        "",
        *ablated(model),
        "",
        "## Previous-token heads of layer 0 feed the copying heads of layer 1 through their keys",
        "",
        "Share of the copying that is lost when a head's output reaches the copying heads as if other tokens had been "
        "there before, by one of their inputs alone.",
        "",
        *fed(model),
        "",
        "## Models trained to repeat: the same heads by exact and by attribution patching",
        "",
        "0: the answer of the corrupted input, 1: that of the clean one.",
        "",
        *repeaters(),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
