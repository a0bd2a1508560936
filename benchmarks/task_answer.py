"""Questions about stories with one supporting fact: is the answer found, and does a head look at the fact?

    python benchmarks/task_answer.py FOLDER [--seeds 3] [--out benchmarks/results/task-answer.md]

People move between places; the question is where one of them is, and the answer is the place of the last move of that
person (as the first of the bAbI tasks, Weston et al. 2015, but written here). The rule makes 1,000 stories to train on,
300 to choose by and 1,000 to test with; no story comes twice. In the first a question about everybody comes after each
move (bAbI asks after every second one), in the others at the end. Each seed trains `saccade train answer` on them with
the same options and tests it beside the baseline.

Then a head is named on the 300 stories: the one whose largest weight lies on the supporting fact most often, of the
questions that are answered right. Its share on the test stories is the figure. Weights are looked at in the row of the
name in the question, and in the row of the answer's first token; the largest weight is that of the whole row, special
tokens and the question included. FOLDER keeps stories and runs; a run that is there is not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade import attention_weights, tasks
from saccade.nn import Observation
from saccade.tasks import TestReport
from saccade.tasks._texts._answer_baseline import exact_match
from saccade.tasks._texts._questions import Question
from saccade.training import Reporter

PEOPLE = "Mary John Sandra Daniel Julie Fred Anna Bill".split()
PLACES = "kitchen garden office bedroom hallway bathroom park school cellar attic".split()
MOVES = ("went to", "moved to", "walked to", "travelled to", "ran back to")
COUNTS = {"train": 1000, "validation": 300, "test": 1000}
ROWS = {"question": "the name in the question", "answer": "the first token of the answer"}
OPTIONS: dict[str, Any] = {"layers": 3, "width": 64, "heads": 2, "dropout": 0.0, "epochs": 12, "precision": "no"}


@dataclasses.dataclass(frozen=True)
class Story:
    """A story, its question and answer, and the characters of the sentence that supports it."""

    context: str
    question: str
    answer: str
    start: int
    fact: tuple[int, int]

    def as_line(self) -> str:
        answers = [{"text": self.answer, "start": self.start}]
        return json.dumps({"question": self.question, "context": self.context, "answers": answers, "fact": self.fact})


def stories(draw: random.Random) -> list[Story]:
    """Four to ten moves of two to four people; after each move from the second on a question about each of them."""
    people = draw.sample(PEOPLE, draw.randrange(2, 5))
    moves: list[tuple[str, str, str]] = []
    for _ in range(draw.randrange(4, 11)):
        person, place = draw.choice(people), draw.choice(PLACES)
        moves.append((person, place, f"{person} {draw.choice(MOVES)} the {place}."))
    told = (moves[:count] for count in range(2, len(moves) + 1))
    return [question(part, asked) for part in told for asked in sorted({person for person, _, _ in part})]


def question(moves: Sequence[tuple[str, str, str]], asked: str) -> Story:
    """Where a person is, by the last move of theirs."""
    number = max(n for n, (person, _, _) in enumerate(moves) if person == asked)
    begin = sum(len(sentence) + 1 for _, _, sentence in moves[:number])
    place, sentence = moves[number][1:]
    end = begin + len(sentence)
    context = " ".join(sentence for _, _, sentence in moves)
    return Story(context, f"Where is {asked}?", place, end - 1 - len(place), (begin, end))


def write_stories(folder: Path, seed: int = 0) -> None:
    draw, seen = random.Random(seed), set()
    for name, count in COUNTS.items():
        made: list[list[Story]] = []
        while len(made) < count:
            questions = stories(draw)
            if questions[-1].context not in seen:
                seen.add(questions[-1].context)
                made.append(questions)
        if name != "train":
            made = [[one for one in questions if one.context == questions[-1].context] for questions in made]
        lines = [one.as_line() + "\n" for questions in made for one in questions]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def largest_on_facts(run: tasks.TrainedRun, path: Path) -> tuple[dict[str, Tensor], int, int]:
    """How often each head's largest weight lies on the supporting fact, over the questions that are answered right.

    Returns:
        The counts (layers, heads) by the row that is looked at, how many questions are right, and how many there are.
    """
    questions = run.task.read(path)
    facts = [json.loads(line)["fact"] for line in path.read_text().splitlines()]
    found = run.task.predict(run.model, questions)
    counts: dict[str, Tensor] = {}
    right = 0
    for question, fact, answer in zip(questions, facts, found, strict=True):
        if not exact_match(question.context[answer.start : answer.stop], question.expected):
            continue
        right += 1
        for name, hits in _hits(run, question, fact, answer.start).items():
            counts[name] = counts.get(name, torch.zeros_like(hits)) + hits
    return counts, right, len(questions)


@torch.no_grad()
def _hits(run: tasks.TrainedRun, question: Question, fact: tuple[int, int], start: int) -> dict[str, Tensor]:
    """Whether each head's (layers, heads) largest weight of a row lies on the fact, by the row."""
    ((row,),) = run.task.encode(run.model, [question])
    observed: list[Observation] = []
    batch = run.task.collate(run.model, [[row]])
    run.task.forward(run.model, batch, lambda layer, one: observed.append(one))
    inside = torch.tensor([fact[0] <= first < fact[1] for first, _ in row.characters])
    name = run.model.tokenizer.encode(question.question.removeprefix("Where is ")[:-1]).ids[0]
    places = {"question": row.ids.index(name), "answer": next(n for n, c in enumerate(row.characters) if c[0] == start)}
    return {
        which: torch.stack([inside[_weights(one, place).argmax(-1)].int() for one in observed])
        for which, place in places.items()
    }


def _weights(observed: Observation, place: int) -> Tensor:
    """The weights (heads, tokens) of a row of one layer."""
    return attention_weights(observed.query, observed.key, rows=place, **observed.scoring())[0, :, 0]


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of one seed. `heads`: by row the head, and its shares on the validation and on the test stories."""

    seed: int
    report: TestReport
    minutes: float
    epoch: int
    heads: dict[str, tuple[tuple[int, int], float, float]]


def figures(folder: Path, seed: int) -> Figures:
    out = folder / f"seed-{seed}"
    if not (out / "task.json").exists():
        data, judged = folder / "train.jsonl", folder / "validation.jsonl"
        tasks.train("answer", data, out, validation=judged, seed=seed, reporter=Shown(), tensorboard=False, **OPTIONS)
    report = tasks.test(out, folder / "test.jsonl")
    run = tasks.TrainedRun(out, report.task, report.tested.model)
    chosen, known, _ = largest_on_facts(run, folder / "validation.jsonl")
    judged, right, _ = largest_on_facts(run, folder / "test.jsonl")
    heads = {}
    for row, counts in chosen.items():
        layer, head = divmod(int(counts.argmax()), counts.shape[1])
        shares = float(counts[layer, head] / known), float(judged[row][layer, head] / right)
        heads[row] = ((layer, head), *shares)
    curve = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    best = max(curve, key=lambda entry: (entry["exact match"], -entry["validation_loss"]))
    return Figures(seed, report, curve[-1]["seconds"] / 60, curve.index(best) + 1, heads)


class Shown(Reporter):
    """A line for each look."""

    def evaluated(self, step: int, training_loss: float, evaluation: Any, *rest: Any) -> None:
        print(f"  step {step}: training loss {training_loss:.4f}, {dict(evaluation.metrics)}", flush=True)


def page(folder: Path, figures: list[Figures]) -> Iterator[str]:
    first = figures[0]
    parameters = sum(weight.numel() for weight in first.report.tested.model.parameters())
    yield "# Questions about stories, and the head that looks at the fact"
    yield ""
    yield "    python benchmarks/task_answer.py FOLDER"
    yield ""
    counts = ", ".join(f"{count:,} to {name}" for name, count in COUNTS.items())
    options = ", ".join(f"{name} {value}" for name, value in OPTIONS.items() if name != "precision")
    yield f"Stories by a rule ({counts}); method: the docstring of the command. A new encoder of {parameters:,}"
    yield f"parameters, {options}, one thread. Exact match and F1 on the test stories."
    yield ""
    yield "| seed | exact match | F1 | baseline: exact match | minutes | best epoch |"
    yield "|---|---|---|---|---|---|"
    for one in figures:
        ((name, simple),) = one.report.baselines.items()
        mine = one.report.metrics
        yield (
            f"| {one.seed} | {mine['exact match']:.4f} | {mine['F1']:.4f} | {simple['exact match']:.4f} ({name}) | "
            f"{one.minutes:.1f} | {one.epoch} |"
        )
    yield ""
    yield "The head whose largest weight lies on the supporting fact most often, named on the validation stories; its"
    yield "share of the right answers on validation and on test stories. The largest weight is that of the whole row."
    yield ""
    yield "| seed | looked at from | head | validation | test |"
    yield "|---|---|---|---|---|"
    for one in figures:
        for row, ((layer, head), known, share) in one.heads.items():
            yield f"| {one.seed} | {ROWS[row]} | {layer}.{head} | {known:.3f} | {share:.3f} |"
    share = statistics.mean(_share_of_facts(folder))
    yield ""
    yield f"A row that looked anywhere in the story by chance would look at the fact in {share:.3f} of the questions."


def _share_of_facts(folder: Path) -> Iterator[float]:
    """How much of each test story, in characters, is the supporting fact."""
    for line in (folder / "test.jsonl").read_text().splitlines():
        values = json.loads(line)
        yield (values["fact"][1] - values["fact"][0]) / len(values["context"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (options.folder / "test.jsonl").exists():
        write_stories(options.folder)
    found = []
    for seed in range(options.seeds):
        began = time.perf_counter()
        found.append(figures(options.folder, seed))
        print(
            f"seed {seed}: {found[-1].report.metrics}, {found[-1].heads}, {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        text = "\n".join(page(options.folder, found)) + "\n"
        if options.out is not None:
            options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
