"""The role of each head of a model, measured once on held-out text and on repeated random tokens.

A role is a property of a head, not of one sentence. Scores are average weights. A head with equal weights also puts
some weight everywhere, so a score counts only as far as it is above that: ``(score - chance) / (1 - chance)`` is 0 for
chance and 1 for always.

"Repeat" is the second half of an induction head (Olsson et al. 2022): on a random sequence written twice it attends to
the token that followed last time. "Sink" is the attention sink of Xiao et al. 2023; BERT's heads also rest on [SEP]
(Clark et al. 2019), here "special". Chance is a head with equal weights on all keys that a row sees in its layer.
Shape legend: B batch, H query heads, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...make.models import Model
from ...operator._call import ObservedCall
from ._chance import even_call, shown
from ._models import TextModel, weights_of, with_progress
from ._published import as_text_model

LEAST_ROOM = 2  # a token that is repeated once
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


Scores = dict[str, list[np.ndarray]]  # by name, (H,) of each layer; (1,) for chance

# Copying comes first: a head that copies attends to the first token when there is nothing to copy.
RULES = (
    RoleRule(("repeat", "duplicate"), 0.25, "repeated random tokens"),
    RoleRule(("previous", "self", "delimiter", "sink"), 0.40, "held-out text"),
    RoleRule(("broad",), 0.80, "held-out text"),
)
"""The rules for a head's role, in order; the first that applies decides."""
_BOTH_WAYS = (RULES[0], RULES[1]._replace(roles=(*RULES[1].roles, "next", "special")), RULES[2])  # of encoders


def measure_roles(
    lm: TextModel | Model, text: str, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Measure the role of every head of ``lm``, which may be any model that reads text.

    The scores come from ``text``, on which ``lm`` was not trained, and from repeated random tokens.

    Args:
        progress: called with (done, total) after each layer.

    Returns:
        The content of ``heads.json``: ``rules`` (thresholds on the scores above chance; the first rule that applies
        decides, by the largest score in it), ``chance`` by score (a list by layer if windows differ), and ``heads``.
        Each entry of ``heads`` has ``layer``, ``head``, ``role``, ``decided_by`` (the name of a score), ``score`` (its
        value), all ``scores`` and all ``above_chance``. ``broad`` is the entropy divided by the largest possible
        entropy. Models that look both ways have two more scores: ``next``, and ``special`` for the tokens that the
        model adds after a text. For a ``mixed`` head ``decided_by`` is the score that is closest to its threshold;
        ``broad`` is left out there.

    Raises:
        ValueError: a text of fewer than 16 tokens, or without two different words; a context for less than 2 tokens.
    """
    model = as_text_model(lm)
    encoding = model.encode(text[:LONGEST_TEXT])
    if len(encoding.ids) < 2 * FIRST_ROW:
        raise ValueError(f"text: expected at least {2 * FIRST_ROW} tokens to measure roles, got {len(encoding.ids)}")
    if model.room is not None and model.room < LEAST_ROOM:
        raise ValueError(f"{model.name}: roles need a context for {LEAST_ROOM} tokens of text, it has {model.room}")
    pieces = [text[a:b] for a, b in encoding.spans]
    delimiter = torch.tensor([("\n" in piece or bool(piece.strip())) and not _has_letters(piece) for piece in pieces])
    ordinary = sorted({t for t, piece in zip(encoding.ids, pieces, strict=True) if _has_letters(piece)})
    if len(ordinary) < 2:
        raise ValueError("text: expected two different tokens with a letter or digit to measure roles")
    windows, marks = _windows(model, torch.tensor(encoding.ids), delimiter)
    repeats, length = _repeats(model, ordinary, seed)
    if progress is not None:
        model = with_progress(model, progress, -(-len(windows) // BATCH) + 1)
    on_text, chance = _measure_text(model, windows, marks)
    on_repeats, repeat_chance = _measure_repeats(model, repeats, length)
    scores, chance = on_text | on_repeats, chance | repeat_chance
    rules = RULES if model.causal else _BOTH_WAYS
    return {
        "format": 1,
        "seed": seed,
        "text": {"windows": len(windows), "tokens": marks.numel() - len(marks) * _around(model)},
        "repeats": {"sequences": REPEATS, "length": length},
        "rules": [rule._asdict() for rule in rules],
        "chance": {name: _in_short(values) for name, values in chance.items()},
        "heads": [
            _describe(
                layer,
                head,
                {name: (float(scores[name][layer][head]), float(chance[name][layer][0])) for name in scores},
                rules,
            )
            for layer, measured in enumerate(scores["self"])
            for head in range(len(measured))
        ],
    }


def role_of(above: dict[str, float], rules: Sequence[RoleRule] = RULES) -> tuple[str, str]:
    """The role of a head and the score that decides it, from its scores above chance.

    For a mixed head that is the score closest to its threshold. The last of ``rules`` is the one for "broad".

    Args:
        above: scores above chance by name, 0 for chance and 1 for always.
    """
    for rule in rules:
        best = max(rule.roles, key=lambda name: above[name])
        if above[best] >= rule.at_least:
            return best, best
    thresholds = {name: rule.at_least for rule in rules[:-1] for name in rule.roles}
    return "mixed", max(thresholds, key=lambda name: above[name] / thresholds[name])


def _describe(
    layer: int, head: int, measured: dict[str, tuple[float, float]], rules: Sequence[RoleRule]
) -> dict[str, Any]:
    """The entry of a head; ``measured`` has its score and the score by chance."""
    scores = {name: score for name, (score, _) in measured.items()}
    above = {name: max(0.0, (score - chance) / (1 - chance)) for name, (score, chance) in measured.items()}
    role, decided_by = role_of(above, rules)
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


def _windows(model: TextModel, ids: torch.Tensor, delimiter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L) windows with the model's special tokens, spread over the text, and masks (B, L) of their delimiters."""
    length = min(_room(model), WINDOW - _around(model), len(ids))
    count = max(1, min(WINDOWS, len(ids) // length))
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    rows = torch.stack([torch.arange(s, s + length) for s in starts])
    marks = torch.nn.functional.pad(delimiter[rows], (len(model.before), len(model.after)))
    return _whole(model, ids[rows]), marks


def _whole(model: TextModel, ids: torch.Tensor) -> torch.Tensor:
    """(B, L): the model's inputs for texts with these tokens."""
    before, after = (torch.tensor(around).expand(len(ids), -1) for around in (model.before, model.after))
    return torch.cat([before.long(), ids, after.long()], 1)


def _around(model: TextModel) -> int:
    return len(model.before) + len(model.after)


def _room(model: TextModel) -> int:
    return WINDOW if model.room is None else model.room


def _measure_text(model: TextModel, tokens: torch.Tensor, marks: torch.Tensor) -> tuple[Scores, Scores]:
    """The scores on text, and those of a head with equal weights."""
    length, after = tokens.shape[1], len(model.after)
    last = length - (after if model.causal else max(after, 1))  # the last token has no next one
    rows = torch.arange(min(FIRST_ROW, last - 1), last)
    i, found = torch.arange(len(rows)), _Found()
    for part, mark in zip(torch.split(tokens, BATCH), torch.split(marks.double(), BATCH), strict=True):

        def scores(w: torch.Tensor, even: torch.Tensor, mark: torch.Tensor = mark) -> dict[str, torch.Tensor]:
            on = {"previous": w[:, :, i, rows - 1], "self": w[:, :, i, rows], "sink": w[..., 0]}
            on["delimiter"] = torch.einsum("bhql,bl->bhq", w, mark)
            if not model.causal:
                on["next"], on["special"] = w[:, :, i, rows + 1], w[..., length - after :].sum(-1)
            return on | {"broad": _entropy(w) / _entropy(even)}

        found.run(model, part, rows, scores)
    return found.own, found.chance | {"broad": [np.zeros(1) for _ in found.own["broad"]]}


def _repeats(model: TextModel, ordinary: list[int], seed: int) -> tuple[torch.Tensor, int]:
    """(REPEATS, L) random tokens written twice, without repetition in one copy, and their number."""
    length = min(REPEAT_LENGTH, _room(model) // 2, len(ordinary))
    draw = np.random.default_rng(seed)
    copies = torch.tensor(np.stack([draw.choice(ordinary, length, replace=False) for _ in range(REPEATS)]))
    return _whole(model, torch.cat([copies, copies], 1)), length


def _measure_repeats(model: TextModel, tokens: torch.Tensor, length: int) -> tuple[Scores, Scores]:
    rows, i, found = torch.arange(length, 2 * length) + len(model.before), torch.arange(length), _Found()

    def scores(w: torch.Tensor, even: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"duplicate": w[:, :, i, rows - length], "repeat": w[:, :, i, rows - length + 1]}

    found.run(model, tokens, rows, scores)
    return found.own, found.chance


class _Found:
    """Scores of the heads and of equal weights, means over the rows of all inputs, by name and layer."""

    def __init__(self) -> None:
        self._parts: dict[tuple[bool, str, int], list[torch.Tensor]] = {}

    def run(
        self,
        model: TextModel,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        scores: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]],
    ) -> None:
        """``scores`` gives (B, H, rows) by name, from weights (B, H, rows, L) and equal ones (B, 1, rows, L)."""

        def visit(layer: int, call: ObservedCall) -> None:
            w = weights_of(call)[:, :, rows].double().cpu()
            even = weights_of(even_call(call, shown(call)))[:, :1, rows].double().cpu().expand(len(w), -1, -1, -1)
            for own, weights in ((True, w), (False, even)):
                for name, values in scores(weights, even).items():
                    self._parts.setdefault((own, name, layer), []).append(values.mean(-1))

        model.run(tokens, visit)

    @property
    def own(self) -> Scores:
        return self._means(True)

    @property
    def chance(self) -> Scores:
        return self._means(False)

    def _means(self, own: bool) -> Scores:
        """Each score as a list of arrays, one for each layer: layers may differ in their number of heads."""
        found: Scores = {}
        for (is_own, name, _), parts in sorted(self._parts.items(), key=lambda part: part[0][2]):
            if is_own == own:
                found.setdefault(name, []).append(torch.cat(parts).mean(0).numpy())
        return found


def _entropy(w: torch.Tensor) -> torch.Tensor:
    return -torch.special.xlogy(w, w).sum(-1)


def _in_short(chance: list[np.ndarray]) -> float | list[float]:
    """One number if all layers have the same one, as without windows."""
    rounded = [round(float(value[0]), 4) for value in chance]
    return rounded[0] if len(set(rounded)) == 1 else rounded
