"""Which short, ordinary sentence shows best what attention heads do? Ranks candidates on the embedded model.

    python benchmarks/choose_sentence.py [--model DIR] [--top 10]

A sentence is as clear as the least clear of the three things a newcomer should see in it:

    back    the largest share that any head gives to the word before, averaged over the words
    copy    the largest weight that a head measured as "repeat" puts from a repeated word on the word that followed it
            last time, where that word is no punctuation (any head, if the model has none that is measured so)
    rest    the largest share that any head gives to the start token, averaged over the words

First come those of which `saccade look` tells all three in its sentences, with a map whose cells hold digits in a
terminal of 80 columns. Printed beside: how many of the three it shows, the strongest link between two different words
that it shows, how many heads rest on the start, and how many columns such a map needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from saccade.inspection import Look, look
from saccade.inspection._scores import occurrences
from saccade.models import load

CANDIDATES = (
    "The cat sat on the mat because the cat was tired.",
    "The cat sat on the mat, and the dog sat on the cat.",
    "The old man saw the young man, and the old man smiled.",
    "When Mary met John, Mary gave John a letter.",
    "Anne looked at Mary, and Mary looked at Anne.",
    "My dear sister wrote to my dear mother.",
    "The little girl opened the little door.",
    "The little boy told the little girl a little story.",
    "She opened the door, and behind the door stood a man.",
    "He took the key, and with the key he opened the box.",
    "The king loved the queen, but the queen loved the king's brother.",
    "The bird sang in the tree, and the bird sang all day.",
    "The boy ran to the river, and the dog ran to the boy.",
    "My father told me a story, and my father told it well.",
    "The wind blew all night, and all night the children lay awake.",
    "One day the girl met a wolf, and the wolf said good day.",
    "She loved the garden, and the garden loved her.",
    "The moon rose, and the moon shone on the sea.",
    "He looked at me, and I looked at him.",
    "It was the best of times, it was the worst of times.",
    "Mr. Holmes looked at the letter, and Mr. Holmes smiled.",
    "The white rabbit looked at the clock, and the white rabbit ran.",
    "The young lady smiled, and then the young lady laughed.",
    "I never saw the sea until I saw the sea with you.",
    "The sun rose over the hill, and over the hill came the soldiers.",
    "Where there is love there is life.",
    "No one knew the house, and no one knew the man.",
    "I will go if you will go with me.",
    "Tom asked Jane, and Jane asked Tom.",
    "Miss Jane asked Miss Anne where Miss Jane should sit.",
    "The doctor took his hat, and the doctor left the room.",
    "Every night the old woman told the children a story, and every night the children slept.",
    "He said that he would come, and she said that she would wait.",
    "A good dog is a good friend.",
    "The captain shouted at the sailors, and the sailors laughed at the captain.",
    "My mother loves my father, and my father loves my mother.",
    "The rain fell on the roof, and the rain fell on the road.",
    "The black cat watched the white cat, and the white cat watched the black cat.",
)


def clarity(look: Look) -> dict[str, float]:
    """The three numbers, the least of them as ``clear``, and what is printed beside them."""
    habits, words = look.habits, look.seen.words
    links = [f.value for f in look.findings if f.kind == "look"]
    out = {"back": float(habits["previous"].max()), "copy": copying(look), "rest": float(habits["sink"].max())}
    return out | {
        "clear": min(out.values()),
        "told": len({"previous", "copy", "sink"} & {f.kind for f in look.findings}),
        "link": max(links, default=0.0),
        "resting": int((habits["sink"] > 0.5).sum()),
        "columns": 1 + max(len(w.label) for w in words) + 4 * len(words),
    }


def copying(look: Look) -> float:
    """The largest weight from a repeated word on the word after its earlier occurrence, by a head measured as "repeat"
    or by any head where the model has none."""
    words = look.seen.words
    targets = [(q, j + 1) for q, j in np.argwhere(occurrences(look.seen)) if j + 1 < q]
    targets = [(q, k) for q, k in targets if not words[k].is_delimiter]
    heads = [h for h in (look.roles or {}).get("heads", ()) if h["role"] == "repeat"]
    places = [(h["layer"], h["head"]) for h in heads] or list(np.ndindex(look.seen.layers, look.seen.heads))
    weights = [look.seen.weights[(*place, q, k)] for place in places for q, k in targets]
    return float(max(weights, default=0.0))


def _rank(pair: tuple[dict[str, float], str]) -> tuple[float, bool, float]:
    numbers = pair[0]
    return numbers["told"], numbers["columns"] <= 80, numbers["clear"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--top", type=int, default=len(CANDIDATES))
    options = parser.parse_args()
    lm = load(options.model)
    ranked = sorted(((clarity(look(lm, text)), text) for text in CANDIDATES), key=_rank, reverse=True)
    print("told  clear  back  copy  rest  link  resting  columns")
    for numbers, text in ranked[: options.top]:
        shares = "  ".join(f"{numbers[name]:.2f}" for name in ("clear", "back", "copy", "rest", "link"))
        print(f"{numbers['told']:4d}   {shares}  {numbers['resting']:7d}  {numbers['columns']:7d}  {text}")


if __name__ == "__main__":
    main()
