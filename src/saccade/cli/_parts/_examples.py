"""Examples of every command for its help page; the first of each is also in the help of `saccade`."""

from __future__ import annotations

from typing import Any

EXAMPLES: dict[str, tuple[str, ...]] = {
    "look": (
        'saccade look "I will go if you will go with me."',
        "saccade look my-novel.txt --to 80 --out novel.html",
        "saccade look --corpus my-texts --out scores.csv",
    ),
    "view": (
        'saccade view "The cat sat on the mat because it was soft"',
        "saccade view my-novel.txt --to 80",
        'saccade view "The cat sat on the mat." --against "The cat sat on the hat."',
    ),
    "step": (
        'saccade step "The cat sat because it was soft." --word it',
        "saccade step --example",
    ),
    "heads": (
        'saccade heads "The cat sat on the mat. The cat sat on the" --why the:2 mat',
        'saccade heads "The cat sat on the mat. The cat sat on the" --importance',
    ),
    "diagram": (
        'saccade diagram attention --text "She said it was cold"',
        "saccade diagram transformer --model gpt2 --out gpt2.svg",
    ),
    "generate": (
        'saccade generate "It was a dark night"',
        'saccade generate "It was" --model runs/novel --tokens 50 --seed 3',
    ),
    "test": (
        "saccade test runs/reviews unseen.csv",
        "saccade test runs/reviews unseen.csv --picture confusion.png",
    ),
    "predict": (
        'saccade predict runs/reviews "a film to remember"',
        "saccade predict runs/reviews unseen.csv > predictions.jsonl",
    ),
    "distill": ("saccade distill runs/reviews layers=1 reviews.csv --out runs/smaller",),
    "embed": ("saccade embed texts.txt --model MODEL_FOLDER --out vectors.npy",),
    "prune": (
        "saccade prune MODEL_FOLDER --keep .5 --data my-novel.txt --out smaller",
        "saccade prune runs/reviews --keep .5 --epochs 1 --out runs/pruned",
    ),
    "verify": (
        "saccade verify attention.py",
        "saccade verify attention.py:SelfAttention --arg embed_dim=64 --causal",
    ),
    "bench": ("saccade bench --quick",),
    "compare": ("saccade compare --quick",),
    "plan": (
        'saccade plan --length 1M --ranks 64 --mask "causal & window(4096)"',
        "saccade plan --length 256k --ranks 8 --documents lengths.txt --link 25GB/s",
    ),
    "docs": (
        "saccade docs window mask",
        "saccade docs saccade.nn.SelfAttention --path",
    ),
    "doctor": (
        "saccade doctor",
        "saccade doctor --json > installation.json",
    ),
    "train lm": (
        "saccade train lm my-novel.txt --out runs/novel",
        "saccade train lm my-novel.txt --out runs/novel --minutes 10",
        "saccade train lm my-novel.txt --out runs/novel --resume --steps 4000",
    ),
    "train classify": (
        "saccade train classify reviews.csv --out runs/reviews",
        "saccade train classify reviews.csv --text comment --label stars --out runs/r",
    ),
    "train tag": ("saccade train tag words.conll --out runs/tagger",),
    "train answer": ("saccade train answer questions.jsonl --out runs/answers",),
    "train translate": ("saccade train translate corpus/train --source de --target en --out runs/de-en",),
    "train mlm": ("saccade train mlm my-texts.txt --out runs/encoder",),
    "train image": ("saccade train image my-images --out runs/birds",),
    "train speech": ("saccade train speech my-sounds --out runs/words",),
    "train forecast": ("saccade train forecast load.csv --date time --horizon 24 --out runs/load",),
    "train graph": ("saccade train graph papers.npz --out runs/papers",),
    "train rate": ("saccade train rate my-novel.txt --layers 2 --width 64 --steps 50",),
}


def examples_of(command: str) -> list[str]:
    """Examples of a command ("look", "train lm"); for a group ("train"; "" for `saccade`) the first of each command."""
    if command in EXAMPLES:
        return list(EXAMPLES[command])
    of_all = [name for name in EXAMPLES if not name.startswith("train ") or name in ("train lm", "train classify")]
    shown = [name for name in EXAMPLES if name.startswith(f"{command} ")] if command else of_all
    return [EXAMPLES[name][0] for name in shown]


def write_examples(context: Any, formatter: Any) -> None:
    """The examples on a help page. Lines are not wrapped, so that they can be copied."""
    examples = examples_of(context.command_path.partition(" ")[2])
    if examples:
        with formatter.section("Examples"):
            for line in examples:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")
