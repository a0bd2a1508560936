"""The steps of one row of one head, in words and numbers.

Written for readers who know matrices and have not seen attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ._steps_parts import Column, HeadNumbers, Step, Vector
from ._steps_scores import largest_exponent, unshifted

_FORMATS = ("float16", "float32")


class StepWriter:
    """Writes the steps of ``numbers``, with keys named by ``labels``."""

    def __init__(self, numbers: HeadNumbers, labels: Sequence[str], token: tuple[int, np.ndarray] | None, digits: int):
        self.digits = digits
        self.numbers, self.inputs, self.labels = numbers, numbers.inputs, labels
        self.token = token  # the row's token, and its row of the embedding
        self.name = f"'{labels[self.inputs.row]}'" if self.inputs.row < len(labels) else "the query"

    def steps(self) -> tuple[Step, ...]:
        return (*self._before(), *self._scoring(), *self._after())

    # Before the scores

    def _before(self) -> Iterator[Step]:
        around, numbers, row = self.inputs.around, self.numbers, self.inputs.row
        if self.token is not None:
            yield self._embedding(*self.token)
        if around is None or numbers.projected is None or numbers.normed is None:
            yield self._given()
            return
        if self.inputs.layer:
            yield self._stream()
        if around.placement != "post":
            yield self._norm()
        query, key, value = numbers.projected
        bias = " + b" if around.query.bias is not None else ""
        n = "x" if around.placement == "post" else "n"
        width = numbers.normed.shape[1]
        shared = ""
        if self.inputs.kv_heads < self.inputs.heads:
            group = self.inputs.heads // self.inputs.kv_heads
            shared = f" {group} query heads share one key and value head, here number {self.inputs.kv_head}."
        yield Step(
            "project",
            "Query, key and value",
            f"q = W_q {n}{bias},  k_j = W_k {n}_j{bias},  v_j = W_v {n}_j{bias}",
            f"W_q {_shape(around.query.weight)}, W_k {_shape(around.key.weight)}, W_v {_shape(around.value.weight)}; "
            f"{n} ({width},), q {_shape(query)}, k {_shape(key)}, v {_shape(value)}",
            "Three learned matrices turn the vector of each token into three short ones. The query says what this "
            "token looks for, a key what a token offers, a value what it hands over when it is looked at." + shared,
            "Without the matrices query and key would be the same vector, and a token would look mostly at tokens "
            "like itself.",
            vectors=(
                Vector(f"q of {self.name}", query, "query"),
                Vector(f"k of {self.name}", key[row], "key"),
                Vector(f"v of {self.name}", value[row], "value"),
            ),
        )
        if around.query_norm is not None and numbers.head_normed is not None:
            yield self._head_norm(*numbers.head_normed)
        if around.rotation is not None:
            yield self._rotation()

    def _embedding(self, token: int, table_row: np.ndarray) -> Step:
        around = self.inputs.around
        vectors = [Vector(f"W[{token}]", table_row)]
        formula, made = f"x_0 = W[{token}]", ""
        if around is not None:
            vectors.append(Vector("x_0", around.embedded))
            scale = _factor(table_row, around.embedded)
            if scale is None:
                formula = f"x_0 = W[{token}] + position, normed where the model norms it"
                made = " What the model adds for the position is in x_0 already."
            elif scale != 1.0:
                root = f"√{len(table_row)}" if abs(scale**2 - len(table_row)) < 1e-3 else f"{scale:.4g}"
                formula = f"x_0 = {root} · W[{token}]"
        return Step(
            "token",
            "Token and embedding",
            formula,
            f"x_0 {_shape(table_row)}",
            f"The text is cut into tokens, and each token has a number: {self.name} is {token}. The number picks a row "
            f"of a learned table W: all that the model knows of a token before it reads the others.{made}",
            "Without the table a token would be a bare number, and nothing would make 'cat' more like 'dog' than "
            "like 'because'.",
            vectors=tuple(vectors),
        )

    def _stream(self) -> Step:
        layer, around = self.inputs.layer, self.inputs.around
        assert around is not None
        layers = "layer 0" if layer == 1 else f"layers 0 to {layer - 1}"
        return Step(
            "stream",
            f"What layer {layer} reads",
            "x = what the layer before gives",
            f"x {_shape(around.embedded)}",
            f"{layers[0].upper()}{layers[1:]} changed the vector: it now holds what was found in other tokens, too.",
            f"Without the layers before, every head would see {self.name} as it stands in the table, whatever the "
            "text.",
            vectors=(Vector("x", around.stream[self.inputs.row]),),
        )

    def _norm(self) -> Step:
        around, row = self.inputs.around, self.inputs.row
        assert around is not None and self.numbers.normed is not None
        x, n = around.stream[row], self.numbers.normed[row]
        kind, formula = "Norm", "n = norm(x)"
        if around.norm is not None and around.norm.kind == "rms":
            kind, formula = "Norm (RMS)", "n = x / √(mean(x²) + ε) · g"
        elif around.norm is not None:
            kind, formula = "Norm (layer norm)", "n = (x − mean(x)) / √(var(x) + ε) · g"
            formula += " + b" if around.norm.bias is not None else ""
        return Step(
            "norm",
            kind,
            formula,
            f"x {_shape(x)}, n {_shape(n)}",
            "Every vector is brought to the same size before it is compared; g holds a learned factor for each "
            "component.",
            f"Without it large vectors would get large scores, and they grow from layer to layer: |x| is "
            f"{_length(x):.3g} here, |n| is {_length(n):.3g}.",
            vectors=(Vector("x", x), Vector("n", n)),
        )

    def _head_norm(self, query: np.ndarray, key: np.ndarray) -> Step:
        return Step(
            "head norm",
            "Norm of query and key",
            "q = norm(q),  k_j = norm(k_j)",
            f"q {_shape(query)}, k {_shape(key)}",
            "Queries and keys of each head are brought to one size, so that scores cannot grow without bound.",
            vectors=(
                Vector(f"q of {self.name}", query, "query"),
                Vector(f"k of {self.name}", key[self.inputs.row], "key"),
            ),
        )

    def _rotation(self) -> Step:
        (query, key), row = self.numbers.placed, self.inputs.row
        before = self.numbers.head_normed
        assert before is not None
        return Step(
            "position",
            "Positions (rotary)",
            "q = R_i q,  k_j = R_j k_j",
            f"R ({len(query)}, {len(query)}), q {_shape(query)}, k {_shape(key)}; i = {row}",
            f"Pairs of components are turned by an angle that grows with the position: {self.name} is token {row}. "
            "The product of a query and a key then depends on how far apart the two stand.",
            f"Without positions a word would get the same score wherever it stands. {self._changed('position')}",
            "position",
            vectors=(
                Vector("q before", before[0], "query"),
                Vector("q turned", query, "query"),
                Vector("k before", before[1][row], "key"),
                Vector("k turned", key[row], "key"),
            ),
        )

    def _given(self) -> Step:
        query, key, row = self.inputs.query, self.inputs.key, self.inputs.row
        vectors = [Vector("q", query, "query")]
        keys = [row] if row < len(key) and len(key) > 4 else range(min(len(key), 4))
        vectors += [Vector(f"k of '{self.labels[j]}'", key[j], "key") for j in keys]
        if self.inputs.value is not None:
            vectors += [Vector(f"v of '{self.labels[j]}'", self.inputs.value[j], "value") for j in keys]
        return Step(
            "given",
            "Query, keys and values",
            "q, k_j, v_j",
            f"q {_shape(query)}, k {_shape(key)}"
            + ("" if self.inputs.value is None else f", v {_shape(self.inputs.value)}"),
            "The query says what this token looks for, a key what a token offers, a value what it hands over when it "
            "is looked at.",
            "Without separate queries and keys a token would look mostly at tokens like itself.",
            vectors=tuple(vectors),
        )

    # Scores and weights

    def _scoring(self) -> Iterator[Step]:
        scores, length = self.numbers.scores, len(self.labels)
        width = len(self.inputs.query)
        yield Step(
            "dot",
            "Dot product",
            "d_j = q · k_j",
            f"q ({width},), k ({length}, {width}), d ({length},)",
            "One number for each key: large where query and key point the same way, negative where they point "
            "opposite ways.",
            f"Without this comparison every key would get the same weight, 1/{length} = {1 / length:.3g}.",
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
                f"There is no mask here: {self.name} sees all {length:,} keys, those after it, too."
                if length > 2
                else "There is no mask here: both keys are seen.",
            )
        hidden = int((~visible).sum())
        later = ~visible[: self.inputs.row + 1]
        causal = not later.any() and hidden == length - self.inputs.row - 1
        if not hidden:
            says = "Keys that must not be seen get −∞. From this token none is hidden: it is the last."
        elif causal:
            says = (
                f"The {_counted(hidden, 'token')} after {self.name} must not be seen, since the model learns to predict "
                "what comes next. A score of −∞ becomes a weight of exactly 0."
            )
        else:
            says = (
                f"{_counted(hidden, 'token')} of {length} are not to be seen from here ({self.inputs.mask_name}). A score "
                "of −∞ becomes a weight of exactly 0."
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
        taken = float(scores.softmax(("mask",)).weights[~scores.visible].sum())
        return f"Without the mask hidden keys would take {_weight(taken)} of the weight. {self._changed('mask')}"

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
        seen = logits[np.isfinite(logits)]
        if not seen.size:
            return ""
        largest = float(seen.max())
        import torch

        formats = list(dict.fromkeys((str(self.inputs.dtype).removeprefix("torch."), *_FORMATS)))
        broken = []
        for name in formats:
            weights = unshifted(logits, self.inputs.sink, getattr(torch, name)).weights
            if not np.isfinite(weights).all():
                broken.append(name)
        with np.errstate(over="ignore"):
            parts = [f"exp({x:.6g}) = {np.exp(x):.7g}" for x in seen] if seen.size < 3 else []
            largest_of = f"exp({largest:.4g}) = {np.exp(largest):.4g}"
            total = f"{np.exp(seen).sum():.7g}"
        text = f"Without the shift the largest term is {largest_of}"
        if parts:
            text = f"Without the shift {' and '.join(parts)}, with the sum {total}: the same weights"
        if broken:
            return f"{text}, too large for {' and '.join(broken)}: inf / inf, and the weights are NaN."
        limits = ", ".join(f"{largest_exponent(getattr(torch, name)):.4g} in {name}" for name in formats)
        return f"{text}{'' if parts else ', and the weights are the same'}. exp overflows above {limits}."

    def _changed(self, switch: str) -> str:
        """What the largest weight becomes where ``switch`` is left out."""
        names = {"scale": "the scale", "mask": "it", "position": "them" if self.inputs.bias is None else "it"}
        before, after = self.numbers.softmax.weights, self.numbers.scores.softmax((switch,)).weights
        if not np.isfinite(after).all():
            return f"Without {names[switch]} the weights are NaN."
        if np.abs(after - before).max() < 0.005:
            return f"Without {names[switch]} no weight of this row would change by a hundredth."
        old, new = int(before.argmax()), int(after.argmax())
        if old == new:
            return (
                f"Without {names[switch]} {self._key(old)} would get the weight {self._share(after[old])}, and not "
                f"{self._share(before[old])}."
            )
        return (
            f"Without {names[switch]} {self._key(new)} would get the largest weight, {self._share(after[new])}; as it is, "
            f"{self._key(old)} has {self._share(before[old])}."
        )

    def _share(self, weight: float) -> str:
        return f"{weight:.3f}".replace("0.", ".", 1) if self.digits < 6 else f"{weight:.{self.digits}f}"

    def _key(self, j: int) -> str:
        return f"'{self.labels[j]}' ({j})" if self.labels.count(self.labels[j]) > 1 else f"'{self.labels[j]}'"

    # After the weights

    def _after(self) -> Iterator[Step]:
        numbers, weights = self.numbers, self.numbers.softmax.weights
        out = numbers.mixed(weights)
        if out is None or numbers.value is None:
            return
        order = np.argsort(-weights, kind="stable")[: min(3, len(weights))]
        mean = (
            numbers.value.mean(0) if numbers.scores.visible is None else numbers.value[numbers.scores.visible].mean(0)
        )
        yield Step(
            "sum",
            "Weighted sum of values",
            "o = Σ_j w_j v_j",
            f"w ({len(weights)},), v {_shape(numbers.value)}, o {_shape(out)}",
            f"The output of the head: a mixture of the values, each as strong as its weight. This is what {self.name} "
            "takes from the tokens it looks at.",
            f"Without the weights it would be the plain mean of all values, whatever the query asks: |o − mean| is "
            f"{_length(out - mean):.3g}, |o| is {_length(out):.3g}.",
            vectors=(
                *(
                    Vector(
                        f"{self._share(weights[j])} · v of '{self.labels[j]}'", weights[j] * numbers.value[j], "value"
                    )
                    for j in order
                ),
                Vector("o", out, "value"),
            ),
        )
        if numbers.joined is not None and self.inputs.heads > 1:
            yield self._concat(out)
        if numbers.written is not None:
            yield from self._output()

    def _concat(self, out: np.ndarray) -> Step:
        inputs, numbers = self.inputs, self.numbers
        assert numbers.joined is not None
        start = inputs.head * len(out)
        vectors = [Vector("c", numbers.joined)]
        formula, says = f"c = [o_0, …, o_{inputs.heads - 1}]", ""
        if numbers.gated is not numbers.joined and numbers.gated is not None:
            vectors.append(Vector("c gated", numbers.gated))
            says = " Each number is then multiplied by a gate between 0 and 1, sigmoid(W_g n)."
        return Step(
            "concat",
            "Concatenate the heads",
            formula,
            f"o {_shape(out)}, c {_shape(numbers.joined)}",
            f"The {inputs.heads} heads work side by side, each with queries, keys and values of its own; their outputs "
            f"are put in a row. Head {inputs.head} fills places {start} to {start + len(out) - 1}.{says}",
            "With a single head a token would have one set of weights: it could not look at two places for two "
            "different reasons.",
            vectors=tuple(vectors),
        )

    def _output(self) -> Iterator[Step]:
        inputs, numbers, around = self.inputs, self.numbers, self.inputs.around
        assert around is not None and numbers.written is not None and numbers.gated is not None
        width = len(numbers.gated) // inputs.heads
        part = slice(inputs.head * width, (inputs.head + 1) * width)
        own = around.output.weight[:, part] @ numbers.gated[part]
        yield Step(
            "output",
            "Output projection",
            "a = W_o c" + (" + b" if around.output.bias is not None else ""),
            f"W_o {_shape(around.output.weight)}, c {_shape(numbers.gated)}, a {_shape(numbers.written)}",
            "One more learned matrix mixes the heads and brings the vector back to the width of the model.",
            "Without it no number of one head could be added to one of another.",
            vectors=(Vector("a", numbers.written), Vector(f"of it from head {inputs.head}", own)),
        )
        if numbers.result is None:
            return
        x = around.stream[inputs.row]
        formula, more = "y = x + a", ""
        if around.placement == "post":
            formula, more = "y = norm(x + a)", " The sum is then brought to one size by a norm."
        elif around.placement == "parallel":
            more = " The feed-forward layer's output is added at the same time; it is not in y here."
        yield Step(
            "residual",
            "Residual",
            formula,
            f"x {_shape(x)}, a {_shape(numbers.written)}, y {_shape(numbers.result)}",
            "What attention found is added to what the token had: it writes into the vector and does not replace it."
            + more,
            f"Without x the token itself would be lost: |x| is {_length(x):.3g}, |a| is {_length(numbers.written):.3g}.",
            vectors=(Vector("x", x), Vector("a", numbers.written), Vector("y", numbers.result)),
        )


def _shape(values: np.ndarray) -> str:
    return str(values.shape)


def _length(values: np.ndarray) -> float:
    return float(np.linalg.norm(values))


def _weight(value: float) -> str:
    """With two decimals and no leading zero."""
    return f"{value:.2f}".replace("0.", ".", 1) if value >= 0.005 else "less than .01"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _factor(row: np.ndarray, made: np.ndarray) -> float | None:
    """The number by which the table's row is multiplied to give ``made``; None where it is not that alone."""
    if row.shape != made.shape:
        return None
    at = int(np.abs(row).argmax())
    if row[at] == 0:
        return None
    factor = float(made[at] / row[at])
    if not np.allclose(row * factor, made, rtol=1e-5, atol=1e-6):
        return None
    return 1.0 if abs(factor - 1) < 1e-6 else factor
