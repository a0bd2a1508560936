"""What the embedded model does with pronouns: which noun do its heads look at, and does it know which one is meant?

    python benchmarks/pronouns.py [--out benchmarks/results/pronouns.md]

Every case is four sentences: two nouns in both orders, each with two words that decide which noun is meant.

    The man stood near the woman because he could not be moved.     ... because she could not be moved.
    The woman stood near the man because he could not be moved.     ... because she could not be moved.

The deciding word alone tells the two of a row apart. The model reads from left to right, so both have the same keys and
values up to it. The number of a case is the weight on the noun that is meant minus that on the other one, averaged
over its four sentences. Each noun, each place and each distance is right as often as wrong, so it is 0 for a head that
looks by place, distance, noun or frequency alone.

Intervals are Student's over pairs of nouns (frames averaged); no noun stands in two pairs of one kind. The best of all
heads is chosen on every other pair and every other frame, and reported on the other pairs and frames.

Shape legend: N pairs of nouns, F frames, O orders of the nouns (2), W deciding words (2), S spots that look, H heads of
all layers.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pronoun_sentences import KINDS, Kind, Sentence, sentences

from saccade.inspection import TextModel, weights_of
from saccade.inspection._models import SaccadeModel
from saccade.models import LanguageModel, load
from saccade.support._numbers import short_number
from saccade.support._uncertainty import LEVEL, student

OUT = Path(__file__).parent / "results" / "pronouns.md"


def weights_on_nouns(model: TextModel, asked: Iterable[Sentence]) -> np.ndarray:
    """(sentences, S, H, 2) float64: the weight of each spot on the pair's first and second noun, summed over pieces."""
    found: list[list[np.ndarray]] = []
    of_length: dict[int, list[tuple[int, Sentence]]] = defaultdict(list)
    for i, one in enumerate(asked):
        of_length[len(one.ids)].append((i, one))
        found.append([])
    for group in of_length.values():

        def keep(layer: int, call: object, group: list[tuple[int, Sentence]] = group) -> None:
            weights = weights_of(call).double().cpu().numpy()  # (B, heads, L, L)
            for (i, one), w in zip(group, weights, strict=True):
                rows = w[:, one.looks]
                found[i].append(np.stack([rows[:, :, noun].sum(-1) for noun in one.nouns], -1))

        model.run(torch.tensor([one.ids for _, one in group]), keep)
    return np.stack([np.concatenate(layers).transpose(1, 0, 2) for layers in found])


def right_minus_wrong(weights: np.ndarray) -> np.ndarray:
    """(N, F, S, H): means over orders and deciding words of the weight on the noun meant minus that on the other.

    Args:
        weights: (N, F, O, W, S, H, 2); word w of W means noun w of the last axis.
    """
    first, second = weights[..., 0], weights[..., 1]
    signed = np.stack([(first - second)[:, :, :, 0], (second - first)[:, :, :, 1]])
    return signed.mean((0, 3))


def share_right(weights: np.ndarray) -> np.ndarray:
    """(N, F, S, H): in which share of the sentences the noun that is meant gets more weight than the other one.

    A head that looks at the nearer noun, at the first one or at the more frequent one is right in .50.
    """
    first, second = weights[..., 0], weights[..., 1]
    right = np.stack([(first > second)[:, :, :, 0], (second > first)[:, :, :, 1]])
    return right.mean((0, 3))


class Mean(NamedTuple):
    """Means over pairs of nouns and half of their intervals."""

    mean: np.ndarray
    half: np.ndarray

    @property
    def clear(self) -> np.ndarray:
        """Where the interval leaves out 0."""
        return np.abs(self.mean) > self.half

    def of(self, *at: int) -> str:
        return f"{float(self.mean[at]):+.3f} ± {float(self.half[at]):.3f}"


def over_pairs(values: np.ndarray, comparisons: int = 1) -> Mean:
    """The mean over axis 0 and half of its 95 % interval, widened for so many comparisons at once (Bonferroni)."""
    n = len(values)
    t = student(n - 1, 1 - (1 - LEVEL) / comparisons)
    return Mean(values.mean(0), t * values.std(0, ddof=1) / np.sqrt(n))


class HeldOut(NamedTuple):
    """The head that was best on one half, and what it does on the other."""

    head: int
    chosen_on: float
    found: Mean
    reported_on: int  # 0: even pairs and frames, 1: odd ones


def held_out(values: np.ndarray) -> list[HeldOut]:
    """Choose the head with the largest mean on one half and report it on the other, both ways.

    The halves share no noun and no frame: even pairs in even frames, odd pairs in odd frames.

    Args:
        values: (N, F, H).
    """
    halves = [values[half::2, half::2].mean(1) for half in (0, 1)]
    out = []
    for half in (0, 1):
        head = int(halves[1 - half].mean(0).argmax())
        out.append(HeldOut(head, float(halves[1 - half][:, head].mean()), over_pairs(halves[half][:, head]), half))
    return out


def log_probabilities(lm: LanguageModel, asked: Sequence[tuple[str, str]], batch: int = 256) -> np.ndarray:
    """(len(asked),): log P(second text | first text) of each, summed over the tokens of the second."""
    found = np.empty(len(asked))
    for start in range(0, len(asked), batch):
        some = asked[start : start + batch]
        known = [len(ids) for ids in lm.tokenizer.encode_many([before for before, _ in some])]
        whole = [[lm.tokenizer.start, *ids] for ids in lm.tokenizer.encode_many([a + b for a, b in some])]
        longest = max(map(len, whole))
        tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in whole])  # no token sees those behind it
        with torch.no_grad():
            told = lm.model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        for i, (count, ids) in enumerate(zip(known, whole, strict=True)):
            found[start + i] = float(told[i, count : len(ids) - 1].sum())
    return found


def log_odds(values: np.ndarray) -> np.ndarray:
    """(N,): (s00 - s01 - s10 + s11) / 2, by how much the log odds of the word that fits rise, in nats.

    Args:
        values: (N, ..., 2, 2), s[given, told]: log probabilities of two words, each after two others. The axes between
            are averaged.
    """
    effect = (values[..., 0, 0] - values[..., 0, 1] - values[..., 1, 0] + values[..., 1, 1]) / 2
    return effect.reshape(len(values), -1).mean(1)


class NextWords(NamedTuple):
    """Probabilities of the next words of one kind, in nats; (N,) each."""

    agrees: np.ndarray  # the pronoun that follows one noun
    named: np.ndarray  # the noun that follows the pronoun, of the two that the text names
    unnamed: np.ndarray  # the same where the text names two other nouns


def next_words(lm: LanguageModel, kind: Kind) -> NextWords:
    """Ask the model for a pronoun after one noun, and for a noun after "..., I mean the"."""
    agrees, named, unnamed = [], [], []
    for n, nouns in enumerate(kind.pairs):
        words = kind.words(n, 0)
        others = kind.pairs[next(m for m in _after(n, len(kind.pairs)) if kind.words(m, 0) == words)]
        for frame in kind.frames:
            before = frame.split("{d}")[0]
            for given in nouns:
                text = before.format(a=given, b="tree" if "tree" not in nouns else "road").rstrip()
                agrees += [(text, f" {word}") for word in words]
            for asked, mentioned in ((named, nouns), (unnamed, others)):
                for a, b in (mentioned, mentioned[::-1]):
                    texts = [f"{before.format(a=a, b=b)}{word}, I mean the" for word in words]
                    asked += [(text, f" {noun}") for text in texts for noun in nouns]
    shape = (len(kind.pairs), -1, 2, 2)
    return NextWords(*(log_odds(log_probabilities(lm, asked).reshape(shape)) for asked in (agrees, named, unnamed)))


def _after(n: int, count: int) -> Iterable[int]:
    return ((n + step) % count for step in range(1, count))


@dataclass(frozen=True)
class Study:
    """One kind of sentence: weights (N, F, O, W, S, H, 2) on the two nouns, and next words where a pronoun decides."""

    kind: Kind
    weights: np.ndarray
    told: NextWords | None
    uniform: float  # what a head that looks everywhere alike gives to a noun from the first spot


def study(lm: LanguageModel, kind: Kind) -> Study:
    model = SaccadeModel(lm)
    asked = list(sentences(model, kind).values())
    weights = weights_on_nouns(model, asked)
    shape = (len(kind.pairs), len(kind.frames), 2, 2)
    uniform = float(np.mean([len(noun) / (one.looks[0] + 1) for one in asked for noun in one.nouns]))
    told = next_words(lm, kind) if kind.by_pronoun else None
    return Study(kind, weights.reshape(*shape, *weights.shape[1:]), told, uniform)


def attention_table(studies: Sequence[Study], heads: int) -> tuple[list[str], int]:
    """The head that looks most at the right noun, for each kind and spot, and what is left of it on the other half.

    Also how many comparisons there are.
    """
    comparisons = sum(len(one.kind.spots) * one.weights.shape[-2] for one in studies)
    lines = [
        "| decided by | looks | most to the right noun | widest interval | clear of 0: right, wrong "
        "| chosen on one half: on the other | right |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in studies:
        difference, share = right_minus_wrong(one.weights), share_right(one.weights)
        for spot, name in enumerate(one.kind.spots):
            found = over_pairs(difference[:, :, spot].mean(1), comparisons)
            if np.abs(found.mean).max() < 1e-6:
                lines.append(f"| {one.kind.name} | {name} | 0 | 0 | 0, 0 | 0 | |")
                continue
            best, widest = int(found.mean.argmax()), int(found.half.argmax())
            left = held_out(difference[:, :, spot])
            rights = [share[h.reported_on :: 2, h.reported_on :: 2, spot, h.head].mean() for h in left]
            lines.append(
                f"| {one.kind.name} | {name} | {layer_head(best, heads)}: {found.of(best)} "
                f"| {layer_head(widest, heads)}: ± {found.half[widest]:.3f} "
                f"| {(found.clear & (found.mean > 0)).sum()}, {(found.clear & (found.mean < 0)).sum()} "
                f"| {', '.join(f'{layer_head(h.head, heads)}: {h.found.of()}' for h in left)} "
                f"| {', '.join(map(short_number, rights))} |"
            )
    return lines, comparisons


def places_table(studies: Sequence[Study], heads: int, most: int = 6) -> list[str]:
    """The heads that give most weight to the two nouns from the pronoun: by place, and by which noun is meant."""
    by_pronoun = [one for one in studies if one.told is not None]
    weights = np.stack([one.weights[:, :, :, :, 0] for one in by_pronoun])  # (kinds, N, F, O, W, H, 2)
    first = np.stack([weights[:, :, :, 0, ..., 0], weights[:, :, :, 1, ..., 1]]).mean((0, 1, 2, 3, 4))
    second = np.stack([weights[:, :, :, 0, ..., 1], weights[:, :, :, 1, ..., 0]]).mean((0, 1, 2, 3, 4))
    right = np.stack([weights[:, :, :, :, 0, :, 0], weights[:, :, :, :, 1, :, 1]]).mean((0, 1, 2, 3, 4))
    lines = ["| head | first noun | second noun | the noun meant | the other |", "|---|---|---|---|---|"]
    for head in np.argsort(-(first + second))[:most]:
        numbers = (first[head], second[head], right[head], first[head] + second[head] - right[head])
        lines.append(f"| {layer_head(int(head), heads)} | {' | '.join(map(short_number, numbers))} |")
    return lines


def next_words_table(studies: Sequence[Study]) -> list[str]:
    lines = [
        "| | the pronoun agrees with the noun before it | the noun fits the pronoun, text names it | text does not "
        "| what the text adds |",
        "|---|---|---|---|---|",
    ]
    for one in studies:
        if one.told is not None:
            numbers = (*one.told, one.told.named - one.told.unnamed)
            lines.append(f"| {one.kind.name} | {' | '.join(over_pairs(x).of() for x in numbers)} |")
    return lines


def layer_head(number: int, heads: int) -> str:
    return f"{number // heads}.{number % heads}"


ATTENTION = """\
Weight on the noun that is meant minus weight on the other, for the head of all {heads} with the largest mean, over all
sentences; intervals are 95 %, widened for {comparisons} comparisons. Then the head that is known least, and how many
heads are clear of 0, to the right noun and to the wrong one. Then the best head of one half of nouns and frames, as it
does on the other half (95 % for one comparison), and in which share of those sentences the right noun gets more weight.
Place, distance, noun and frequency alone give 0 and .50. The last row checks the measure: a noun comes again, and the
heads that copy look at what followed it last time."""
PLACES = """\
Weights from the pronoun, averaged over the three kinds that a pronoun decides, of the heads that look at the two nouns
most. Uniform attention gives {uniform} to a noun."""
NEXT = """\
The model's own next words: by how much, in nats, the log odds of the word that fits rise. First the pronoun after one
noun ("The man stood near the tree because": he). Then the noun after the pronoun ("The man stood near the woman because
he, I mean the": man), where the text names the two nouns and where it names two others of the same kinds. What the
pronoun alone makes likely is in both; the difference is what the text adds."""


def page(lm: LanguageModel) -> str:
    torch.manual_seed(0)
    studies = [study(lm, kind) for kind in KINDS]
    config = lm.model.config
    count = sum(one.weights[..., 0, 0, 0].size for one in studies)
    table, comparisons = attention_table(studies, config.heads)
    parts = [
        "# Which noun a pronoun looks at",
        "    python benchmarks/pronouns.py",
        f"The embedded model, {config.layers} layers x {config.heads} heads, on {count:,} sentences. Method: the "
        "docstring of the command. What follows from it: [Pronouns](../../docs/pronouns.md).",
        ATTENTION.format(heads=config.layers * config.heads, comparisons=comparisons),
        "\n".join(table),
        PLACES.format(uniform=short_number(np.mean([one.uniform for one in studies if one.told is not None]))),
        "\n".join(places_table(studies, config.heads)),
        NEXT,
        "\n".join(next_words_table(studies)),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    text = page(load())
    print(text)
    asked.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
