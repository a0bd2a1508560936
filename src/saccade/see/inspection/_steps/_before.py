"""The steps before the scores: from the token to its query, key and value.

Written for readers who know matrices but not attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ._parts import HeadNumbers, Step, Vector
from ._writer import StepWriter, length, shape


class BeforeScores(StepWriter):
    """The steps from the embedding to the projections: stream, norm, query, key and value, rotary positions."""

    def __init__(
        self,
        numbers: HeadNumbers,
        names: Sequence[str],
        digits: int,
        query: str | None,
        token: tuple[int, np.ndarray] | None,
    ):
        super().__init__(numbers, names, digits, query)
        self.token = token  # the row's token id, and its row of the embedding

    def steps(self) -> Iterator[Step]:
        around, numbers = self.inputs.around, self.numbers
        if self.token is not None:
            yield self._embedding(*self.token)
        if around is None or numbers.projected is None or numbers.normed is None:
            yield self._given()
            return
        is_first = numbers.stream is not None and np.array_equal(around.embedded, numbers.stream)
        if self.inputs.layer or self.inputs.crosses or not is_first:
            yield self._stream()
        if around.placement not in ("post", "bare"):
            yield self._norm()
        yield self._projections()
        if around.query_norm is not None and numbers.head_normed is not None:
            yield self._head_norm(*numbers.head_normed)
        if around.rotation is not None:
            yield self._rotation()

    def _projections(self) -> Step:
        """The three matrices of the head, on one text or, in cross-attention, on two."""
        around, numbers, row = self.inputs.around, self.numbers, self.inputs.row
        assert around is not None and numbers.projected is not None and numbers.normed is not None
        query, key, value = numbers.projected
        bias = " + b" if around.query.bias is not None else ""
        n = "x" if around.placement in ("post", "bare") else "n"
        read, widths, key_name = n, f"{n} ({len(numbers.normed)},)", self.name
        if around.context is not None:
            row = int(numbers.softmax.weights.argmax())
            read, widths, key_name = "e", f"{widths}, e_j ({around.context.shape[1]},)", self._key(row)
        says, without = self._why_projected()
        if self.inputs.kv_heads < self.inputs.heads:
            group = self.inputs.heads // self.inputs.kv_heads
            says += f" {group} query heads share one key and value head, here number {self.inputs.kv_head}."
        for name, step in (("query", around.query), ("key", around.key), ("value", around.value)):
            if step.factor != 1.0:
                says += f" The model multiplies each {name} by {step.factor:.4g}, which W_{name[0]} holds here."
        return Step(
            "project",
            "Query, key and value",
            f"q = W_q {n}{bias},  k_j = W_k {read}_j{bias},  v_j = W_v {read}_j{bias}",
            f"W_q {shape(around.query.weight)}, W_k {shape(around.key.weight)}, W_v {shape(around.value.weight)}; "
            f"{widths}, q {shape(query)}, k {shape(key)}, v {shape(value)}",
            says,
            without,
            vectors=(
                Vector(f"q of {self.name}", query, "query"),
                Vector(f"k of {key_name}", key[row], "key"),
                Vector(f"v of {key_name}", value[row], "value"),
            ),
        )

    def _why_projected(self) -> tuple[str, str]:
        if self.inputs.crosses:
            return (
                f"Two texts meet here. The query is made from {self.name} in the target and says what it looks for. "
                "Keys and values are made from the source, from the vectors e_j that the encoder gives for its tokens: "
                "a key says what a token offers, a value what it hands over when it is looked at.",
                "Without cross-attention the decoder would not know the source at all.",
            )
        return (
            "Three learned matrices turn the vector of each token into three short ones. The query says what "
            f"{self.name} looks for, the key of token j what that token offers, its value what it hands over when it "
            "is looked at.",
            "Without the matrices query and key would be the same vector, and a token would look mostly at tokens "
            "like itself.",
        )

    def _embedding(self, token: int, table_row: np.ndarray) -> Step:
        around = self.inputs.around
        vectors = [Vector(f"W[{token}]", table_row)]
        formula, made = f"x_0 = W[{token}]", ""
        if around is not None:
            vectors.append(Vector("x_0", around.embedded))
            scale = _factor(table_row, around.embedded)
            if scale is None:
                formula = f"x_0 = f(W[{token}], i)"
                made = " x_0 also holds what the model adds for the position i, and a norm if it has one there."
                if around.rotation is not None:
                    formula = f"x_0 = f(W[{token}])"
                    made = " f is what the model makes of the row first, such as a norm or a projection."
            elif scale != 1.0:
                root = f"√{len(table_row)}" if abs(scale**2 - len(table_row)) < 1e-3 else f"{scale:.4g}"
                formula = f"x_0 = {root} · W[{token}]"
                made = f" This model multiplies the row by a fixed number, {root}."
        return Step(
            "token",
            "Token and embedding",
            formula,
            f"x_0 {shape(table_row if around is None else around.embedded)}",
            f"The text is cut into tokens, and each token has a number: {self.name} is {token}. The number picks a row "
            f"of a learned table W: all that the model knows of a token before it reads the others.{made}",
            "Without the table a token would be a bare number, and nothing would make 'cat' more like 'dog' than "
            "like 'because'.",
            vectors=tuple(vectors),
        )

    def _stream(self) -> Step:
        layer, x = self.inputs.layer, self.numbers.stream
        assert x is not None
        if self.inputs.crosses:
            return Step(
                "stream",
                f"What cross-attention of layer {layer} reads",
                "x = what self-attention of this layer leaves",
                f"x {shape(x)}",
                f"The decoder's self-attention came first: the vector of {self.name} holds information from the "
                "target up to here.",
                vectors=(Vector("x", x),),
            )
        layers = "layer 0" if layer == 1 else f"layers 0 to {layer - 1}" if layer else "layers without attention"
        return Step(
            "stream",
            f"What layer {layer} reads",
            "x = what the layer before gives",
            f"x {shape(x)}",
            f"{layers[0].upper()}{layers[1:]} changed the vector of {self.name}: it now holds information from other "
            "tokens, too.",
            f"Without the layers before, every head would see {self.name} as it stands in the table, whatever the "
            "text.",
            vectors=(Vector("x", x),),
        )

    def _norm(self) -> Step:
        around = self.inputs.around
        x, n = self.numbers.stream, self.numbers.normed
        assert around is not None and x is not None and n is not None
        norm, vectors = around.norm, {"x": x}
        kind, formula, says = "Norm", "n = norm(x)", "The norm rescales every vector before it is compared."
        if norm is not None:
            rms = norm.kind == "rms"
            kind = "Norm (RMS)" if rms else "Norm (layer norm)"
            formula = "n = x / √(mean(x²) + ε)" if rms else "n = (x − mean(x)) / √(var(x) + ε)"
            says = f"The division gives every vector the same norm, √{len(x)} = {len(x) ** 0.5:.4g}."
            if norm.weight is not None:
                formula, vectors = f"{formula} · g", {**vectors, "g": norm.weight}
                says += " Then each component is multiplied by its learned factor in g, so |n| differs again."
            if norm.bias is not None:
                formula, vectors = f"{formula} + b", {**vectors, "b": norm.bias}
                says += " A learned number in b is added to each component."
            says += " ε is tiny and prevents a division by 0."
        elif x.shape != n.shape:
            kind, formula = "Before the projections", "n = f(x)"
            says = "The projections read another vector, made of x by modules that were not recognised."
        vectors["n"] = n
        return Step(
            "norm",
            kind,
            formula,
            ", ".join(f"{name} {shape(values)}" for name, values in vectors.items()),
            says,
            "Without it vectors with a large norm would get large scores, and norms grow from layer to layer: here "
            f"|x| is {length(x):.3g}, and |n| is {length(n):.3g}.",
            vectors=tuple(Vector(name, values) for name, values in vectors.items()),
        )

    def _head_norm(self, query: np.ndarray, key: np.ndarray) -> Step:
        around = self.inputs.around
        assert around is not None and around.query_norm is not None
        heads = "each head" if around.query_norm.sizes is None else "all heads together"
        valued, formula = around.value_norm is not None, "q = norm(q),  k_j = norm(k_j)"
        return Step(
            "head norm",
            "Norm of query, key and value" if valued else "Norm of query and key",
            f"{formula},  v_j = norm(v_j)" if valued else formula,
            f"q {shape(query)}, k {shape(key)}",
            f"A norm rescales queries and keys of {heads}, so that scores cannot grow without bound."
            + (" Values are rescaled, too." if valued else ""),
            vectors=(
                Vector(f"q of {self.name}", query, "query"),
                *([] if self.inputs.crosses else [Vector(f"k of {self.name}", key[self.inputs.row], "key")]),
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
            f"R ({len(query)}, {len(query)}), q {shape(query)}, k {shape(key)}; i = {row}",
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
        query, key, own = self.inputs.query, self.inputs.key, self.inputs.own
        vectors = [Vector("q", query, "query")]
        keys = range(min(len(key), 4)) if own is None or len(key) <= 4 else [own]
        vectors += [Vector(f"k of {self.names[j]}", key[j], "key") for j in keys]
        if self.inputs.value is not None:
            vectors += [Vector(f"v of {self.names[j]}", self.inputs.value[j], "value") for j in keys]
        return Step(
            "given",
            "Query, keys and values",
            "q, k_j, v_j",
            f"q {shape(query)}, k {shape(key)}"
            + ("" if self.inputs.value is None else f", v {shape(self.inputs.value)}"),
            "The query says what this token looks for, a key what a token offers, a value what it hands over when it "
            "is looked at.",
            "Without separate queries and keys a token would look mostly at tokens like itself.",
            vectors=tuple(vectors),
        )


def _factor(row: np.ndarray, made: np.ndarray) -> float | None:
    """The factor between the table's row and ``made``; None if ``made`` is not a multiple of it."""
    if row.shape != made.shape:
        return None
    at = int(np.abs(row).argmax())
    if row[at] == 0:
        return None
    factor = float(made[at] / row[at])
    if not np.allclose(row * factor, made, rtol=1e-5, atol=1e-6):
        return None
    return 1.0 if abs(factor - 1) < 1e-6 else factor
