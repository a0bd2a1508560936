"""The role of each head of a model, measured once on held-out text and on repeated random tokens.

A role is a property of a head, not of one sentence. Scores are average weights. A head with equal weights also puts
some weight everywhere, so a score counts only as far as it is above that: ``(score - chance) / (1 - chance)`` is 0 for
chance and 1 for always.

"Repeat" is the second half of an induction head (Olsson et al. 2022): on a random sequence written twice it attends to
the token that followed last time. "Sink" is the attention sink of Xiao et al. 2023.
Shape legend: B batch, H query heads, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...make.models import LanguageModel
from ._collect import observe_weights

FIRST_ROW = 8  # rows before it see so few keys that all weights are large
WINDOW, WINDOWS = 256, 16
REPEAT_LENGTH, REPEATS = 48, 8
BATCH = 4
LONGEST_TEXT = 2_000_000  # characters; windows are spread evenly over them


class RoleRule(NamedTuple):
    """The head gets the largest of ``roles`` if its score is at least ``at_least`` above chance."""

    roles: tuple[str, ...]
    at_least: float
    measured_on: str


Scores = dict[str, list[np.ndarray]]  # by name, (H,) of each layer

# Copying comes first: a head that copies attends to the first token when there is nothing to copy.
RULES = (
    RoleRule(("repeat", "duplicate"), 0.25, "repeated random tokens"),
    RoleRule(("previous", "self", "delimiter", "sink"), 0.40, "held-out text"),
    RoleRule(("broad",), 0.80, "held-out text"),
)
"""The rules for a head's role, in order; the first that applies decides."""
ROLE_NAMES = {
    "previous": "previous token",
    "self": "self",
    "sink": "first-token sink",
    "delimiter": "delimiter",
    "repeat": "repeat",
    "duplicate": "duplicate",
    "broad": "broad",
    "mixed": "mixed",
}
"""Names of roles in reports."""
SCORES = ("previous", "self", "sink", "delimiter", "repeat", "duplicate", "broad")


def measure_roles(lm: LanguageModel, text: str, seed: int = 0) -> dict[str, Any]:
    """Measure the role of every head of ``lm``.

    The scores come from ``text``, on which ``lm`` was not trained, and from repeated random tokens.

    Returns:
        The content of ``heads.json``: ``rules`` (thresholds on the scores above chance; the first rule that applies
        decides, by the largest score in it), ``chance`` by score, and ``heads``. Each entry of ``heads`` has ``layer``,
        ``head``, ``role``, ``decided_by`` (the name of a score), ``score`` (its value), all ``scores`` and all
        ``above_chance``. ``broad`` is the entropy divided by the largest possible entropy. For a ``mixed`` head
        ``decided_by`` is the score that is closest to its threshold; ``broad`` is left out there.

    Raises:
        ValueError: a text of fewer than 16 tokens, or without two different words.

    Example:
        >>> from saccade.inspection import measure_roles, open_model
        >>> text = "The owl sat in the old oak. It saw a mouse near the barn, and it flew down."
        >>> found = measure_roles(open_model().lm, text)
        >>> len(found["heads"]), sorted(found["heads"][0])
        (32, ['above_chance', 'decided_by', 'head', 'layer', 'role', 'score', 'scores'])
        >>> [(head["layer"], head["head"]) for head in found["heads"] if head["role"] == "repeat"]
        [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
    """
    encoding = lm.tokenizer.encode(text[:LONGEST_TEXT])
    if len(encoding.ids) < 2 * FIRST_ROW:
        raise ValueError(f"text: expected at least {2 * FIRST_ROW} tokens to measure roles, got {len(encoding.ids)}")
    pieces = [text[a:b] for a, b in encoding.spans]
    delimiter = torch.tensor([("\n" in piece or bool(piece.strip())) and not _has_letters(piece) for piece in pieces])
    windows, marks = _windows(lm, torch.tensor(encoding.ids), delimiter)
    on_text, chance = _measure_text(lm, windows, marks)
    ordinary = sorted({t for t, piece in zip(encoding.ids, pieces, strict=True) if _has_letters(piece)})
    if len(ordinary) < 2:
        raise ValueError("text: expected two different tokens with a letter or digit to measure roles")
    on_repeats, repeat_chance, length = _measure_repeats(lm, ordinary, seed)
    scores = on_text | on_repeats
    chance |= repeat_chance
    return {
        "format": 1,
        "seed": seed,
        "text": {"windows": len(windows), "tokens": windows[:, 1:].numel()},
        "repeats": {"sequences": REPEATS, "length": length},
        "rules": [rule._asdict() for rule in RULES],
        "chance": {name: round(value, 4) for name, value in chance.items()},
        "heads": [
            _describe(layer, head, {name: float(scores[name][layer][head]) for name in SCORES}, chance)
            for layer, measured in enumerate(scores["self"])
            for head in range(len(measured))
        ],
    }


def role_of(above: dict[str, float], rules: Sequence[RoleRule] = RULES) -> tuple[str, str]:
    """The role of a head and the score that decides it, from its scores above chance.

    For a mixed head that is the score closest to its threshold. The last of ``rules`` is the one for "broad".

    Args:
        above: scores above chance by name, 0 for chance and 1 for always.

    Example:
        >>> from saccade.inspection import role_of
        >>> above = {"repeat": 0.1, "duplicate": 0.0, "previous": 0.7, "self": 0.1, "delimiter": 0.0, "sink": 0.2}
        >>> role_of({**above, "broad": 0.3})
        ('previous', 'previous')
        >>> role_of({**above, "previous": 0.3, "broad": 0.3})
        ('mixed', 'previous')
    """
    for rule in rules:
        best = max(rule.roles, key=lambda name: above[name])
        if above[best] >= rule.at_least:
            return best, best
    thresholds = {name: rule.at_least for rule in rules[:-1] for name in rule.roles}
    return "mixed", max(thresholds, key=lambda name: above[name] / thresholds[name])


def _describe(layer: int, head: int, scores: dict[str, float], chance: dict[str, float]) -> dict[str, Any]:
    above = {name: max(0.0, (value - chance[name]) / (1 - chance[name])) for name, value in scores.items()}
    role, decided_by = role_of(above)
    return {
        "layer": layer,
        "head": head,
        "role": role,
        "decided_by": decided_by,
        "score": round(scores[decided_by], 4),
        "scores": {name: round(value, 4) for name, value in scores.items()},
        "above_chance": {name: round(value, 4) for name, value in above.items()},
    }


def _has_letters(piece: str) -> bool:
    return any(c.isalnum() for c in piece)


def _windows(lm: LanguageModel, ids: torch.Tensor, delimiter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) windows that begin with the start token, spread over the text, and masks (B, L) of their delimiters."""
    length = min(lm.model.config.context - 1, WINDOW - 1, len(ids))
    count = max(1, min(WINDOWS, len(ids) // length))
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    rows = torch.stack([torch.arange(s, s + length) for s in starts])
    start = torch.full((count, 1), lm.tokenizer.start)
    return torch.cat([start, ids[rows]], 1), torch.cat([start * 0 > 0, delimiter[rows]], 1)


def _measure_text(lm: LanguageModel, tokens: torch.Tensor, marks: torch.Tensor) -> tuple[Scores, dict[str, float]]:
    length = tokens.shape[1]
    rows = torch.arange(min(FIRST_ROW, length - 1), length)
    totals: dict[int, dict[str, torch.Tensor]] = {}
    for part, mark in zip(torch.split(tokens, BATCH), torch.split(marks.double(), BATCH), strict=True):

        def visit(layer: int, weights: torch.Tensor, mark: torch.Tensor = mark) -> None:
            _add(totals.setdefault(layer, {}), _text_scores(weights[:, :, rows].double().cpu(), mark, rows))

        observe_weights(lm, part, visit)
    uniform = float((1 / (rows + 1.0)).mean())
    marked = float((marks.double().cumsum(1)[:, rows] / (rows + 1.0)).mean())
    chance = {"previous": uniform, "self": uniform, "sink": uniform, "delimiter": marked, "broad": 0.0}
    return _by_layer(totals, len(tokens)), chance


def _text_scores(w: torch.Tensor, mark: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """(H,) by score from the weights (B, H, rows, L) of the given rows and the delimiters (B, L)."""
    i = torch.arange(len(rows))
    entropy = -torch.special.xlogy(w, w).sum(-1)
    return {
        "previous": _head_mean(w[:, :, i, rows - 1]),
        "self": _head_mean(w[:, :, i, rows]),
        "sink": _head_mean(w[..., 0]),
        "delimiter": _head_mean(torch.einsum("bhql,bl->bhq", w, mark)),
        "broad": _head_mean(entropy / (rows + 1.0).log()),
    }


def _measure_repeats(lm: LanguageModel, ordinary: list[int], seed: int) -> tuple[Scores, dict[str, float], int]:
    """Scores on random tokens written twice, without repetition in one copy: each has one earlier occurrence."""
    length = min(REPEAT_LENGTH, (lm.model.config.context - 1) // 2, len(ordinary))
    draw = np.random.default_rng(seed)
    copies = torch.tensor(np.stack([draw.choice(ordinary, length, replace=False) for _ in range(REPEATS)]))
    tokens = torch.cat([torch.full((REPEATS, 1), lm.tokenizer.start), copies, copies], 1)
    rows = torch.arange(length + 1, 2 * length + 1)
    totals: dict[int, dict[str, torch.Tensor]] = {}

    def visit(layer: int, weights: torch.Tensor) -> None:
        w, i = weights[:, :, rows].double().cpu(), torch.arange(length)
        totals[layer] = {
            "duplicate": _head_mean(w[:, :, i, rows - length]),
            "repeat": _head_mean(w[:, :, i, rows - length + 1]),
        }

    observe_weights(lm, tokens, visit)
    uniform = float((1 / (rows + 1.0)).mean())
    return _by_layer(totals, REPEATS), {"duplicate": uniform, "repeat": uniform}, length


def _head_mean(x: torch.Tensor) -> torch.Tensor:
    """(B, H, rows) -> (H,): summed over the batch, averaged over the rows."""
    return x.mean(-1).sum(0)


def _add(total: dict[str, torch.Tensor], more: dict[str, torch.Tensor]) -> None:
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value


def _by_layer(layers: dict[int, dict[str, torch.Tensor]], count: int) -> Scores:
    """Each score as a list of arrays, one for each layer: layers may differ in their number of heads."""
    names = next(iter(layers.values()))
    return {name: [(layers[i][name] / count).numpy() for i in sorted(layers)] for name in names}
