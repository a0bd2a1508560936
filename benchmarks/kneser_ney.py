"""Perplexity per word on held-out texts: a Saccade language model beside an interpolated Kneser-Ney trigram.

    python benchmarks/kneser_ney.py TEXTS --hold-out FILE [--hold-out FILE ...] [--model FOLDER] [--json FILE]

A word is a run of letters (with inner apostrophes), a run of digits, a run of other signs, or the end of a paragraph;
spaces are not words. Both models predict the same words of the same texts, in order, each from all that stands before
it in its text (the trigram uses two words of it, the language model at least half of its context where there is as
much).

The trigram: interpolated modified Kneser-Ney (Chen and Goodman, "An Empirical Study of Smoothing Techniques for
Language Modeling", 1998), three discounts for each order from counts of counts, trained on the words of the same
texts as the language model. Two figures:

known words   Only held-out words that occur in the training texts are scored. The trigram knows that nothing else
              can come: below its unigrams stands the even distribution over the training vocabulary.
all words     Below its unigrams stands a spelling model, a Kneser-Ney 6-gram over the characters of the training
              vocabulary, so that every word has a probability.

The language model's probability of a word is the product over its pieces, the spaces before it included: it knows
neither which words occur nor where spaces are, which is to its disadvantage.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from saccade.tasks._language import WORD, token_losses, words_of
from saccade.tasks._texts._kneser_ney import KneserNey


def trigram_losses(training: list[str], held_out: list[str]) -> dict[str, list[float]]:
    """-ln p of each held-out word under the trigram: "closed" (infinite for unknown words) and "open"."""
    sequences = [words_of(text) for text in training]
    vocabulary = sorted(set().union(*sequences))
    known = frozenset(vocabulary)
    characters = {c for word in vocabulary for c in word}
    even = 1 / (len(characters) + 2)  # the end of a word, and one for all other characters
    # Spelled to its end "\0"; what the model says after that does not matter.
    speller = KneserNey(([*word, "\0"] for word in vocabulary), 6, lambda _: even)

    def spelled(word) -> float:
        letters = [*word, "\0"]
        return math.prod(speller.probability(letter, letters[:i]) for i, letter in enumerate(letters))

    trigram = KneserNey(sequences, 3, lambda word: 1 / len(vocabulary) if word in known else 0.0)
    losses: dict[str, list[float]] = {}
    for name, base in (("closed", trigram.base), ("open", spelled)):
        trigram.base = base
        losses[name] = [loss for text in held_out for loss in _losses(trigram, words_of(text))]
    return losses | {"discounts": [d[1:] for d in trigram.discounts]}


def _losses(model: KneserNey, words: list[str]) -> list[float]:
    probabilities = (model.probability(word, words[max(0, i - 2) : i]) for i, word in enumerate(words))
    return [-math.log(p) if p > 0 else math.inf for p in probabilities]


def language_model_losses(lm, text: str) -> list[float]:
    """-ln p of each word of the text under a Saccade language model: the sum over its pieces.

    A piece belongs to the word that holds its last character, or, if that is a space, to the next word.
    """
    encoding = lm.tokenizer.encode(text)
    pieces = token_losses(lm, encoding.ids)
    ends = [match.end() for match in WORD.finditer(text)]
    losses, word = [0.0] * len(ends), 0
    for (_, stop), loss in zip(encoding.spans, pieces, strict=True):
        while word < len(ends) - 1 and ends[word] < stop:
            word += 1
        losses[word] += loss
    return losses


def compare(training: list[str], held_out: list[str], lm) -> dict:
    """Perplexity per word of both, over the known and over all held-out words."""
    trigram = trigram_losses(training, held_out)
    model = [loss for text in held_out for loss in language_model_losses(lm, text)]
    known = [i for i, loss in enumerate(trigram["closed"]) if math.isfinite(loss)]

    def perplexity(losses: list[float]) -> float:
        return math.exp(sum(losses) / len(losses))

    return {
        "words": len(model),
        "known_words": len(known),
        "known": {
            "trigram": perplexity([trigram["closed"][i] for i in known]),
            "model": perplexity([model[i] for i in known]),
        },
        "all": {"trigram": perplexity(trigram["open"]), "model": perplexity(model)},
        "discounts_3_2_1": trigram["discounts"],
    }


def main() -> None:
    from saccade.models import load
    from saccade.training import read_texts

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("--hold-out", type=Path, action="append", required=True)
    parser.add_argument("--model", type=Path, help="a model folder; default: the embedded model")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    held = {path.resolve() for path in arguments.hold_out}
    training = [text for path, text in read_texts(arguments.texts).items() if path.resolve() not in held]
    held_out = [text for path in arguments.hold_out for text in read_texts(path).values()]
    figures = compare(training, held_out, load(arguments.model))
    print(f"{figures['words']:,} held-out words, {figures['known_words']:,} of them known from training")
    for words in ("known", "all"):
        of = figures[words]
        print(f"perplexity per word, {words:>5} words: trigram {of['trigram']:7.1f}   model {of['model']:7.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
