"""The steps after the weights: the output of the head, and its way into the residual stream.

Written for readers who know matrices but not attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ._parts import Step, Vector
from ._writer import StepWriter, length, shape


class AfterWeights(StepWriter):
    """The weighted sum, the other heads, the output projection and the residual."""

    def steps(self) -> Iterator[Step]:
        numbers, weights = self.numbers, self.numbers.softmax.weights
        out = numbers.mixed(weights)
        if out is None or numbers.value is None:
            return
        order = [j for j in np.argsort(-weights, kind="stable")[:3] if weights[j]]
        visible = numbers.scores.visible
        mean = (numbers.value if visible is None else numbers.value[visible]).mean(0)
        averaged = "all values" if visible is None or visible.all() else "the values of all visible keys"
        yield Step(
            "sum",
            "Weighted sum of values",
            "o = Σ_j w_j v_j",
            f"w ({len(weights)},), v {shape(numbers.value)}, o {shape(out)}",
            f"The output of the head: a mixture of the values, each as strong as its weight. This is what {self.name} "
            "takes from the tokens it looks at.",
            f"Without the weights it would be the plain mean of {averaged}, whatever the query asks: |o − mean| is "
            f"{length(out - mean):.3g}, |o| is {length(out):.3g}.",
            vectors=(
                *(
                    Vector(f"{self._share(weights[j])} · v of {self.names[j]}", weights[j] * numbers.value[j], "value")
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
        start, stop = inputs.head * len(out), (inputs.head + 1) * len(out)
        own = f"o_{inputs.head} = c[{start}:{stop}]"
        own_ones = "queries, keys and values" if inputs.kv_heads == inputs.heads else "queries"
        vectors = [Vector(own, numbers.joined[start:stop], "value"), Vector("c", numbers.joined)]
        formula, says = f"c = [o_0, …, o_{inputs.heads - 1}]", ""
        if numbers.gated is not numbers.joined and numbers.gated is not None:
            vectors.append(Vector("c gated", numbers.gated))
            says = " Each number is then multiplied by a gate between 0 and 1, sigmoid(W_g n)."
        return Step(
            "concat",
            "Concatenate the heads",
            formula,
            f"o {shape(out)}, c {shape(numbers.joined)}",
            f"The {inputs.heads} heads work side by side, each with {own_ones} of its own; their outputs "
            f"are concatenated. The output of head {inputs.head} is components {start} to {stop - 1}.{says}",
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
            f"W_o {shape(around.output.weight)}, c {shape(numbers.gated)}, a {shape(numbers.written)}",
            "One more learned matrix mixes the heads and brings the vector back to the width of the model.",
            f"Without it each head would write only to its own components: head {inputs.head} to {part.start} to "
            f"{part.stop - 1}."
            if inputs.heads > 1
            else "",
            vectors=(Vector("a", numbers.written), Vector(f"of it from head {inputs.head}", own)),
        )
        if numbers.result is None:
            return
        x, added = numbers.stream, numbers.added
        assert x is not None and added is not None
        name, more = "a", ""
        if around.after is not None:
            name, more = "norm(a)", " A norm rescales it first."
        if around.factor != 1.0:
            name, more = f"{around.factor:.4g} · {name}", f"{more} It is added with a fixed factor."
        formula = f"x + {name}"
        if around.placement == "post":
            formula, more = f"norm({formula})", f"{more} A norm then rescales the sum."
        elif around.placement == "parallel":
            more += " The feed-forward layer's output is added at the same time; it is not in y here."
        yield Step(
            "residual",
            "Residual",
            f"y = {formula}",
            f"x {shape(x)}, {name} {shape(added)}, y {shape(numbers.result)}",
            "What attention found is added to what the token had: it writes into the vector and does not replace it."
            + more,
            f"Without x the token itself would be lost: |x| is {length(x):.3g}, |{name}| is {length(added):.3g}.",
            vectors=(Vector("x", x), Vector(name, added), Vector("y", numbers.result)),
        )
