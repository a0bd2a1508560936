"""Fitness of variants of a protein: an ESM whose logits are fitted to measurements, beside one-hot ridge regression.

    python benchmarks/task_protein.py P62593.fasta [--splits 5] [--out benchmarks/results/task-protein.md]

The file is facebookresearch/esm's table of TEM-1 beta-lactamase: 5,397 sequences with at most one substitution, header
`index|name|score`. Each split is random: 4 in 5 variants train, 1 in 5 test; an eighth of the former validates. The
figure is Spearman's rank correlation over the tested variants.

A language model of proteins scores a substitution by log p(mutant) - log p(wild type) at its place (Meier et al.,
"Language models enable zero-shot prediction of the effects of mutations on protein function", 2021, wild-type
marginals). Here an ESM with new weights learns these differences from the measurements themselves: one forward of the
wild type scores all variants, and the squared error of `offset + difference` is what is minimised. What it can know
better than the regression is that residues alike in one place are alike in another, and what stands around.

Width, depth, dropout and decay are chosen on the validation variants of split 0 (`--choose` prints them all). The
weights and the ridge's strength are chosen on those of each split.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from saccade.models import ProteinTokenizer
from saccade.models.loading import new_model

LETTERS = "L A G V S E R T I D P K Q N F Y M H W C X B U Z O . -".split()
VOCABULARY = ["<cls>", "<pad>", "<eos>", "<unk>", *LETTERS, "<null_1>", "<mask>"]
CHOSEN = {"layers": 1, "width": 64, "dropout": 0.3, "decay": 0.1}
GRID = {"layers": (1, 2, 3), "width": (32, 64), "dropout": (0.1, 0.3, 0.5), "decay": (0.01, 0.1)}
STEPS, EVERY, RATE = 1500, 25, 3e-3
STRENGTHS = 10.0 ** np.arange(-2, 4)


class Variants(NamedTuple):
    """N variants of a protein of L residues.

    Attributes:
        wild: the sequence that they vary.
        places: (N,) of the substitution, from 0 on; 0 where there is none.
        residues: (N,) what stands there instead, as a letter.
        fitness: (N,) as measured.
        sequences: (N,)
    """

    wild: str
    places: np.ndarray
    residues: list[str]
    fitness: np.ndarray
    sequences: list[str]


def read(path: Path) -> Variants:
    entries = [entry.split("\n", 1) for entry in path.read_text().split(">")[1:]]
    sequences = ["".join(body.split()) for _, body in entries]
    columns = zip(*sequences, strict=True)
    wild = "".join(Counter(column).most_common(1)[0][0] for column in columns)
    places = [[n for n, (a, b) in enumerate(zip(wild, one, strict=True)) if a != b] for one in sequences]
    if max(map(len, places)) > 1:
        raise SystemExit("expected variants of one substitution")
    first = np.array([place[0] if place else 0 for place in places])
    fitness = np.array([float(head.split("|")[2]) for head, _ in entries])
    return Variants(wild, first, [one[n] for one, n in zip(sequences, first, strict=True)], fitness, sequences)


class Split(NamedTuple):
    """Numbers of variants."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def split(count: int, seed: int) -> Split:
    order = np.random.default_rng(seed).permutation(count)
    tested, judged = count // 5, count // 10
    return Split(order[tested + judged :], order[tested : tested + judged], order[:tested])


class Scorer(nn.Module):
    """An ESM of the masked-LM form and an offset: fitness (N,) of all variants from one forward of the wild type."""

    def __init__(self, folder: Path, variants: Variants, *, layers: int, width: int, dropout: float):
        super().__init__()
        (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
        tokenizer = ProteinTokenizer.from_folder(folder)
        self.esm = new_model(
            folder,
            head="masked-lm",
            model_type="esm",
            vocab_size=len(VOCABULARY),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * width,
            max_position_embeddings=len(variants.wild) + 4,
            position_embedding_type="absolute",
            pad_token_id=1,
            mask_token_id=VOCABULARY.index("<mask>"),
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.offset = nn.Parameter(torch.zeros(()))
        self.ids: Tensor = tokenizer([variants.wild])["input_ids"]
        self.places = torch.from_numpy(variants.places) + 1  # behind <cls>
        self.mutants = torch.tensor([VOCABULARY.index(residue) for residue in variants.residues])

    def forward(self) -> Tensor:
        logits = self.esm(self.ids).logits[0]
        return self.offset + logits[self.places, self.mutants] - logits[self.places, self.ids[0, self.places]]


def fitted(variants: Variants, parts: Split, seed: int, **options: Any) -> tuple[np.ndarray, float, int]:
    """Fitness of all variants by the weights that validate best, their correlation there, and how many weights."""
    decay = options.pop("decay")
    mean, spread = variants.fitness[parts.train].mean(), variants.fitness[parts.train].std()
    truth = torch.from_numpy((variants.fitness - mean) / spread).float()
    train, best, found = torch.from_numpy(parts.train), -1.0, np.empty(0)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        model = Scorer(Path(folder), variants, **options)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    for step in range(1, STEPS + 1):
        model.train()
        optimizer.zero_grad()
        (model()[train] - truth[train]).square().mean().backward()
        optimizer.step()
        schedule.step()
        if step % EVERY == 0:
            model.eval()
            with torch.no_grad():
                scores = model().numpy()
            judged = rank_correlation(scores, variants, parts.validation)
            if judged > best:
                best, found = judged, scores
    return found, best, sum(weight.numel() for weight in model.parameters())


def ridge(variants: Variants, parts: Split) -> tuple[np.ndarray, float]:
    """The same by regression on one-hot residues (N, L 20)."""
    letters = sorted(set("".join(variants.sequences)))
    numbers = np.array([[letters.index(residue) for residue in one] for one in variants.sequences])
    x = np.eye(len(letters), dtype=np.float32)[numbers].reshape(len(numbers), -1)
    y, train = variants.fitness, parts.train
    models = [Ridge(strength).fit(x[train], y[train]).predict(x) for strength in STRENGTHS]
    judged = [rank_correlation(scores, variants, parts.validation) for scores in models]
    best = int(np.argmax(judged))
    return models[best], float(STRENGTHS[best])


def rank_correlation(scores: np.ndarray, variants: Variants, part: np.ndarray) -> float:
    return float(spearmanr(scores[part], variants.fitness[part]).statistic)


def choose(variants: Variants) -> None:
    parts = split(len(variants.fitness), 0)
    for values in itertools.product(*GRID.values()):
        options = dict(zip(GRID, values, strict=True))
        _, judged, count = fitted(variants, parts, 0, **options)
        print(f"{judged:.4f}  {count:,}  {options}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    variants = read(given.data)
    if given.choose:
        return choose(variants)
    rows, began = [], time.perf_counter()
    for seed in range(given.splits):
        parts = split(len(variants.fitness), seed)
        scores, judged, count = fitted(variants, parts, seed, **CHOSEN)
        plain, strength = ridge(variants, parts)
        rows.append((rank_correlation(scores, variants, parts.test), rank_correlation(plain, variants, parts.test)))
        print(f"split {seed}: ESM {rows[-1][0]:.4f} (validation {judged:.4f}), ridge {rows[-1][1]:.4f} ({strength:g})")
    text = page(rows, count, (time.perf_counter() - began) / 60)
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


def page(rows: list[tuple[float, float]], count: int, minutes: float) -> str:
    names = (f"ESM of {count:,} parameters, fitted logits", "ridge regression on one-hot residues")
    lines = [
        f"| {name} | {statistics.mean(values):.3f} +- {statistics.stdev(values):.3f} "
        f"| {' '.join(f'{value:.3f}' for value in values)} |"
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    ]
    options = ", ".join(f"{name} {value}" for name, value in CHOSEN.items())
    return "\n".join(
        [
            "# Fitness of variants of TEM-1 beta-lactamase",
            "",
            f"{len(rows)} random splits (4 in 5 variants train, an eighth of these validates), Spearman's correlation "
            "on the rest, mean and standard deviation.",
            "",
            "| | mean | splits |",
            "|---|---:|---|",
            *lines,
            "",
            f"{options}; {STEPS:,} steps of the whole data, {minutes:.1f} minutes for all splits and both models.",
            "",
            "    python benchmarks/task_protein.py P62593.fasta",
            "",
        ]
    )


if __name__ == "__main__":
    main()
