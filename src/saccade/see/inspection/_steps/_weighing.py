"""The steps from dot products to weights.

Written for readers who know matrices but not attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ....support._numbers import counted
from ._parts import Column, Step, Vector
from ._scores import largest_exponent, unshifted
from ._writer import StepWriter, weight_text

_FORMATS = ("float16", "float32")


class Weighing(StepWriter):
    """Dot products, scale, cap, bias, mask and softmax."""

    def steps(self) -> Iterator[Step]:
        scores, length = self.numbers.scores, len(self.names)
        width = len(self.inputs.query)
        yield Step(
            "dot",
            "Dot product",
            "d_j = q · k_j",
            f"q ({width},), k ({length}, {width}), d ({length},)",
            "One number for each key, its score: large where query and key point the same way, negative where they "
            "point opposite ways." + self._not_hidden_yet(),
            self._without_comparison(),
            vectors=self._one_product(),
            columns=(Column("d", scores.products),),
        )
        scaled = scores.products * scores.scale
        by_width = abs(scores.scale * width**0.5 - 1) < 1e-6
        if scores.scale != 1.0:
            formula = (
                f"s_j = d_j / √{width} = d_j · {scores.scale:.6g}" if by_width else f"s_j = d_j · {scores.scale:.6g}"
            )
            yield Step(
                "scale",
                "Scale",
                formula,
                f"s ({length},)",
                "Dot products of random vectors grow like the root of their width. Dividing by it keeps the softmax "
                "from giving everything to one key.",
                self._changed("scale"),
                "scale",
                columns=(Column("d", scores.products), Column("s", scaled)),
            )
        if scores.softcap is not None:
            capped = scores.softcap * np.tanh(scaled / scores.softcap)
            yield Step(
                "softcap",
                "Soft cap",
                f"s_j = {scores.softcap:g} · tanh(s_j / {scores.softcap:g})",
                f"s ({length},)",
                f"Scores are kept between -{scores.softcap:g} and {scores.softcap:g}.",
                columns=(Column("before", scaled), Column("s", capped)),
            )
            scaled = capped
        if scores.bias is not None:
            yield self._bias(scaled)
            scaled = scaled + scores.bias
        yield self._mask(scaled)
        yield self._softmax()

    @property
    def _broken(self) -> bool:
        """Whether the weights are NaN: sentences then say nothing about changes."""
        return not np.isfinite(self.numbers.softmax.weights).all()

    def _changed(self, switch: str) -> str:
        return "" if self._broken else super()._changed(switch)

    def _not_hidden_yet(self) -> str:
        visible, own = self.numbers.scores.visible, self.inputs.own
        if visible is None or visible.all():
            return ""
        which = "Later tokens" if own is not None and visible[: own + 1].all() else "Tokens that must not be seen"
        return f" {which} get a score like all others; a later step, the mask, hides them."

    def _without_comparison(self) -> str:
        scores = self.numbers.scores
        if scores.bias is not None or scores.sink is not None:
            return "Without this comparison the weights would be the same whatever the query asks."
        count = len(self.names) if scores.visible is None else int(scores.visible.sum())
        which = "key" if count == len(self.names) else "visible key"
        return f"Without this comparison every {which} would get the same weight, 1/{count} = {1 / max(count, 1):.3g}."

    def _one_product(self) -> tuple[Vector, ...]:
        """The key with the largest weight, component by component: the last vector's components add up to its score.

        For NaN weights, the first key whose score is not finite.
        """
        query, key = self.numbers.placed
        j = int((~np.isfinite(self.numbers.scores.products) if self._broken else self.numbers.softmax.weights).argmax())
        score = float(key[j] @ query)
        total = f"{score:g}" if score.is_integer() else f"{score:.{self.digits}f}"
        together = f"their products, which add up to {total}"
        return (
            Vector("q", query, "query"),
            Vector(f"k of {self._key(j)}", key[j], "key"),
            Vector(together, query * key[j]),
        )

    def _bias(self, before: np.ndarray) -> Step:
        scores = self.numbers.scores
        assert scores.bias is not None
        placed = scores.bias_of_positions
        name = f"Bias ({self.inputs.bias_name})" if self.inputs.bias_name else "Bias"
        says = (
            "A number for each distance between the two tokens is added: this is how the head knows where tokens stand."
            if placed
            else "The model adds a number to each score that does not depend on query and key."
        )
        return Step(
            "bias",
            name,
            "s_j = s_j + b_j",
            f"b ({len(before)},)",
            says,
            self._changed("position") if placed else "",
            "position" if placed else "",
            columns=(Column("before", before), Column("b", scores.bias), Column("s", before + scores.bias)),
        )

    def _mask(self, before: np.ndarray) -> Step:
        visible, length = self.numbers.scores.visible, len(before)
        if visible is None:
            return Step(
                "mask",
                "Mask",
                "every key is seen",
                f"s ({length},)",
                f"There is no mask here: {self.name} sees all {length:,} keys"
                + (", those after it, too." if self.inputs.own is not None else "."),
            )
        hidden = int((~visible).sum())
        own = self.inputs.own
        causal = own is not None and visible[: own + 1].all() and hidden == length - own - 1
        if not hidden:
            says = "Keys that must not be seen get −∞. From here none is hidden."
        elif causal:
            says = (
                f"The {counted(hidden, 'token')} after {self.name} must not be seen, since the model learns to predict "
                "what comes next. The softmax then makes a score of −∞ a weight of exactly 0."
            )
        else:
            says = (
                f"{counted(hidden, 'token')} of {length} are not to be seen from here ({self.inputs.mask_name}). "
                "The softmax then makes a score of −∞ a weight of exactly 0."
            )
        return Step(
            "mask",
            "Mask",
            "s_j = −∞ where key j is hidden",
            f"s ({length},)",
            says,
            self._unmasked(hidden),
            "mask",
            columns=(Column("before", before), Column("s", np.where(visible, before, -np.inf))),
        )

    def _unmasked(self, hidden: int) -> str:
        if not hidden:
            return "Without the mask nothing changes in this row."
        scores = self.numbers.scores
        assert scores.visible is not None
        if self._broken:
            return ""
        taken = float(scores.softmax(("mask",)).weights[~scores.visible].sum())
        return f"Without the mask hidden keys would take {weight_text(taken)} of the weight. {self._changed('mask')}"

    def _softmax(self) -> Step:
        scores, soft = self.numbers.scores, self.numbers.softmax
        logits = scores.logits()
        total = "Σ_j exp(s_j − m)"
        total = total if scores.sink is None else f"({total} + exp(sink − m))"
        says = (
            "exp makes every score positive and a larger score much larger; dividing by the sum makes weights that add "
            "up to 1. Subtracting the largest score m first changes no weight and keeps exp from overflowing."
        )
        if scores.sink is not None:
            says += " A learned number, the sink, takes its share of the sum, so weights add up to less."
        return Step(
            "softmax",
            "Softmax",
            f"w_j = exp(s_j − m) / {total},  m = max s",
            f"s ({len(logits)},), w ({len(logits)},)",
            says,
            self._without_shift(logits),
            "shift",
            columns=(
                Column("s", logits),
                Column("s − m", logits - soft.maximum),
                Column("exp", soft.exponentials),
                Column("w", soft.weights),
            ),
            facts=(("m", soft.maximum), ("sum of exp", soft.total), ("sum of w", float(soft.weights.sum()))),
        )

    def _without_shift(self, logits: np.ndarray) -> str:
        finite = logits[np.isfinite(logits)]
        if self._broken or not finite.size:
            return ""
        largest = float(finite.max())
        formats = list(dict.fromkeys((str(self.inputs.dtype).removeprefix("torch."), *_FORMATS)))
        broken = []
        for name in formats:
            weights = unshifted(logits, self.inputs.sink, getattr(torch, name)).weights
            if not np.isfinite(weights).all():
                broken.append(name)
        with np.errstate(over="ignore"):
            parts = [f"exp({x:.6g}) = {np.exp(x):.7g}" for x in finite] if finite.size < 3 else []
            largest_of = f"exp({largest:.4g}) = {np.exp(largest):.4g}"
            total = f"{np.exp(finite).sum():.7g}"
        text = f"Without the shift the largest term is {largest_of}"
        if parts:
            text = f"Without the shift {' and '.join(parts)}, with the sum {total}: the same weights"
        if broken:
            return f"{text}, too large for {' and '.join(broken)}: inf / inf, and the weights are NaN."
        limits = ", ".join(f"{largest_exponent(getattr(torch, name)):.4g} in {name}" for name in formats)
        return f"{text}{'' if parts else ', and the weights are the same'}. exp overflows above {limits}."
