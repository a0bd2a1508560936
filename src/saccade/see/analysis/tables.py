"""Tables of studies for a terminal, which fit its width; plain text in a pipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ...support._numbers import counted, short_number, without_zero
from ...support._terminal._console import Console, progress_bar
from ._compare import ModelComparison, ScoreChange
from ._coreference import Coreference
from ._corpus import ROLES, THIRDS, CorpusScores, deviation, mean
from ._probe import Probe
from ._scores import SCORES
from ._syntax import ALL, DIRECTIONS, Syntax
from ._tally import AnswerTally

CHANGES = 12  # of a comparison
SHOWN = 0.005  # the smallest difference that shows in two decimals
RELATIONS, LEAST = 14, 20  # rows of a treebank's table; cases of a relation in it, if any has as many
STRONGEST = 6  # heads of a role
NAMED = 0.05  # a head is named if it is this far above chance
WAYS = dict(zip(DIRECTIONS, ("dep→head", "head→dep"), strict=True))


@contextmanager
def shown_progress(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if that is a terminal. Yields a function to call with (done, total)."""
    with progress_bar(what, quiet=quiet) as update:
        yield lambda done, total: update(completed=done, total=total)


# Many texts


def print_corpus(console: Console, study: CorpusScores) -> None:
    """Print the scores of thirds of the layers, the strongest heads, and the heads by role."""
    size = f"{counted(study.layers, 'layer')}, {counted(sum(study.heads), 'head')}"
    _title(console, f"{study.model}: {size}, on {_texts(study)}")
    _note(console, "average weight on each kind of token, mean ± standard deviation over texts")
    wide = max(1, min(3, (console.width - 52) // 13))
    table = _table("", "chance", *THIRDS, "strongest heads")
    for name in SCORES:
        chance, thirds = mean(study.chance[name].reshape(-1, 1))[0], study.thirds(name)
        if np.isnan(thirds).all():
            continue
        spread = [_spread(*both) for both in zip(mean(thirds), deviation(thirds), strict=True)]
        table.add_row(
            name,
            "-" if name in ("broad", "dormant") else short_number(chance),
            *spread,
            "  ".join(_strongest(study, name, wide)),
        )
    console.print(table)
    absent = [name for name in SCORES if np.isnan(study.scores[name]).all()]
    if absent:
        _note(console, f"no case in these texts: {', '.join(absent)}")
    if study.skipped:
        _note(console, f"left out, too short: {counted(len(study.skipped), 'text')}")
    console.print()
    _print_roles(console, study)


def _texts(study: CorpusScores) -> str:
    return f"{counted(len(study.texts), 'text')}, {counted(sum(study.tokens), 'token')}"


def _strongest(study: CorpusScores, name: str, count: int) -> list[str]:
    above, average, spread = study.above(name), study.mean(name), study.deviation(name)
    ranked = [at for at in _ranked(above) if above[at] >= NAMED][:count]
    return [f"{layer}.{head} {_spread(average[layer, head], spread[layer, head])}" for layer, head in ranked]


def _ranked(values: np.ndarray) -> list[tuple[int, int]]:
    """(layer, head), the largest values first."""
    known = np.argwhere(np.isfinite(values)).tolist()
    return sorted(((i, j) for i, j in known), key=lambda at: (-values[at], at))


def _print_roles(console: Console, study: CorpusScores) -> None:
    by_role: dict[str, list[tuple[float, int, int]]] = {}
    scores = {name: study.mean(name) for name in SCORES}
    for layer, heads in enumerate(study.heads):
        for head in range(heads):
            role, decided_by = study.role(layer, head)
            by_role.setdefault(role, []).append((float(scores[decided_by][layer, head]), layer, head))
    _title(console, "Roles of the heads")
    table = _table("role", "heads", "strongest: layer.head and score")
    order = [name for rule in ROLES for name in rule.roles]
    for role in [*(name for name in order if name in by_role), "mixed"]:
        held = sorted(by_role.get(role, []), key=lambda entry: (-entry[0], entry[1:]))
        if held and role == "mixed":
            table.add_row(role, str(len(held)), "none of these clearly")
        elif held:
            shown = "  ".join(f"{layer}.{head} {short_number(score)}" for score, layer, head in held[:STRONGEST])
            table.add_row(role, str(len(held)), shown)
    console.print(table)


# Two checkpoints


def print_comparison(console: Console, comparison: ModelComparison) -> None:
    """Print what changed between two models: thirds of the layers, and the heads that changed most."""
    before, after = comparison.before, comparison.after
    _title(console, f"{before.model} -> {after.model}, on the same {_texts(before)}")
    _note(console, "difference of the mean weight, ± half of its 95 % interval over texts")
    table = _table("", *THIRDS)
    for name in SCORES:
        difference, wide = comparison.thirds(name)
        if np.isfinite(difference).any():
            table.add_row(name, *(_signed(d, w) for d, w in zip(difference, wide, strict=True)))
    console.print(table)
    console.print()
    if not comparison.by_head:
        _note(console, "different layers or heads: only thirds of the layers are compared")
        return
    changes = comparison.changes()
    largest = [change for change in changes[:CHANGES] if abs(change.difference) >= SHOWN]
    if not largest:
        _note(console, f"no score of any head changed by {SHOWN} or more")
        return
    _title(console, "Heads that changed most")
    table = _table("head", "score", "before", "after", "difference")
    for change in largest:
        table.add_row(*_change(change))
    console.print(table)
    certain = sum(change.certain for change in changes)
    _note(console, f"* not 0, even with {len(changes):,} comparisons at once (95 %, Bonferroni): {certain:,} of them")


def _change(change: ScoreChange) -> tuple[str, ...]:
    difference = _signed(change.difference, change.half_width) + (" *" if change.certain else "")
    both = short_number(change.before), short_number(change.after)
    return f"{change.layer}.{change.head}", change.score, *both, difference


# Relations and antecedents


def print_syntax(console: Console, study: Syntax) -> None:
    """Print for each frequent relation the head that finds it best, and the best fixed offset."""
    size = f"{counted(study.sentences, 'sentence')}, {counted(study.words, 'word')}"
    _title(console, f"{study.model}: relations of {size}")
    _note(console, "share of words whose most attended other word is the right one, and the")
    _note(console, "same of the word at the best fixed offset")
    table = _table("relation", "", "cases", "head", "right", "95 %", "anew", "offset", "right", "anew")
    names = study.relations(LEAST)[: RELATIONS + 1] or study.relations()[: RELATIONS + 1]
    for name in names:
        for direction in DIRECTIONS:
            tally = study.tallies.get((name, direction))
            if tally is not None:
                offset, answer = tally.best_offset
                table.add_row(
                    name,
                    WAYS[direction],
                    *_best_head_cells(tally),
                    f"{offset:+d}",
                    short_number(answer.share),
                    short_number(tally.held_out[1].share),
                )
    console.print(table)
    _note(console, "anew: the best of one half of the sentences, asked about the other half")
    for text in _left_out(study, len(names)):
        _note(console, text)


def _left_out(study: Syntax, shown: int) -> Iterator[str]:
    if study.causal:
        ahead = sum(study.ahead[ALL, way] for way in DIRECTIONS)
        known = sum(study.total(ALL, way) for way in DIRECTIONS)
        yield f"causal model: {ahead:,} of {ahead + known:,} cases are left out, since their answer comes later"
    if study.too_long:
        yield f"left out, longer than the model reads: {counted(study.too_long, 'sentence')}"
    if study.missing:
        yield f"left out, without a token: {counted(study.missing, 'word')}"
    if study.together:
        yield f"left out, two words in the same tokens: {counted(study.together, 'case')}"
    others = len(study.relations()) - shown
    if others:
        yield f"{counted(others, 'less frequent relation')} in --json"


def print_coreference(console: Console, study: Coreference) -> None:
    """Print the head that looks from mentions to antecedents best, and the baselines that use no model."""
    size = f"{counted(study.documents, 'document')}, {counted(study.words, 'word')}"
    _title(console, f"{study.model}: antecedents in {size}")
    _note(console, "share of mentions whose most attended other word belongs to an antecedent")
    table = _table("mention", "cases", "head", "right", "95 %", "anew", "offset", "right", "nearest", "same word")
    for kind, tally in sorted(study.tallies.items(), key=lambda entry: (-entry[1].total, entry[0])):
        offset, answer = tally.best_offset
        table.add_row(
            kind,
            *_best_head_cells(tally),
            f"{offset:+d}",
            short_number(answer.share),
            short_number(study.nearest[kind].share),
            short_number(study.same_word[kind].share),
        )
    console.print(table)
    _note(console, "anew: the best of one half of the texts, asked about the other half")
    _note(console, "nearest: the mention before; same word: the one before with the same head word")
    if study.out_of_reach:
        gone = counted(study.out_of_reach, "mention")
        _note(console, f"left out, no antecedent that the model reads with it: {gone}")
    if study.missing:
        _note(console, f"without a token: {counted(study.missing, 'word')}")


def _best_head_cells(tally: AnswerTally) -> tuple[str, ...]:
    """cases, head, right, 95 %, held out."""
    layer, head = tally.best
    answer = tally.of_head(layer, head)
    held_out = short_number(tally.held_out[0].share)
    return f"{tally.total:,}", f"{layer}.{head}", short_number(answer.share), _range(*answer.interval), held_out


# Layers


def print_probe(console: Console, study: Probe) -> None:
    """Print what a linear probe of each layer gets right."""
    _title(console, f"{study.model}: linear probes for {counted(len(study.labels), 'label')}")
    learned, tested = (
        f"{counted(words, 'word')} of {counted(sentences, 'sentence')}"
        for words, sentences in zip(study.words, study.sentences, strict=True)
    )
    _note(console, f"learned from {learned}, tested on {tested}")
    _note(console, "95 %: intervals over sentences; control: random labels for word types")
    table = _table("layer", "right", "95 %", "over layer 0", "control", "selectivity")
    low, high = study.majority_interval
    table.add_row(f"(all {study.majority})", short_number(study.majority_accuracy), _range(low, high))
    for layer in study.layers:
        low, high = layer.interval
        over = f"{layer.gain:+.2f}"
        if math.isfinite(layer.gain_interval[0]):
            over += " ({:+.2f} to {:+.2f})".format(*layer.gain_interval)
        table.add_row(
            "0 (embedding)" if layer.layer == 0 else str(layer.layer),
            short_number(layer.accuracy) + ("" if layer.converged else "?"),
            _range(low, high),
            over if layer.layer else "",
            short_number(layer.control),
            f"{layer.selectivity:+.2f}",
        )
    console.print(table)
    if not all(layer.converged for layer in study.layers):
        _note(console, "? the optimizer stopped before its end")
    out = {"not needed": study.left, "too long": study.too_long}
    left = [f"{counted(number, 'sentence')} {why}" for why, number in out.items() if number]
    if study.missing:
        left.append(f"{counted(study.missing, 'word')} without a token or a label")
    if left:
        _note(console, f"left out: {', '.join(left)}")


# Text in cells


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        right = column in ("cases", "chance", "before", "after", "offset", "heads")
        table.add_column(column, justify="right" if right else "left", no_wrap=number < 2, style="bold" * (number == 0))
    return table


def _title(console: Console, text: str) -> None:
    console.print(Text(text, style="bold"))


def _note(console: Console, text: str) -> None:
    console.print(Text(text, style="dim"))


def _spread(value: Any, spread: Any) -> str:
    return short_number(value) if not math.isfinite(float(spread)) else f"{short_number(value)}±{short_number(spread)}"


def _range(low: float, high: float) -> str:
    return f"{short_number(low)}-{short_number(high)}".replace("1.00", "1") if math.isfinite(low) else "-"


def _signed(value: Any, wide: Any) -> str:
    if not math.isfinite(float(value)):
        return "-"
    around = f" ±{short_number(wide)}" if math.isfinite(float(wide)) else ""
    return f"{without_zero(f'{value:+.2f}')}{around}"


__all__: Sequence[str] = [
    "print_comparison",
    "print_coreference",
    "print_corpus",
    "print_probe",
    "print_syntax",
    "shown_progress",
]
