"""The real numbers of one layer on a short text: inputs, intermediate values and outputs of its heads.

Shape legend: L tokens with the special ones, H query heads, D and Dv width of keys and values, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from ....interception._hooks import hooked
from ....operator._call import ObservedCall
from ....operator._weights import attention_weights
from ....operator.positions.rotary import Rotary
from ...inspection import TextModel, Tokens, Word, weights_of
from ...inspection._collect import read, word_matrices

SENTENCE = "She said it was cold"


@dataclass(frozen=True, eq=False)
class LayerNumbers:
    """One attention layer on one text, in float64.

    Attributes:
        labels: the displayed tokens, special ones included.
        query, value, out: (H, L, D), (H, L, Dv), (H, L, Dv). Keys and values are repeated for each head of their group.
        scores: (H, L, L), q . k before the scale. logits: after scale, softcap and bias.
        weights: (H, L, L), as `saccade.attention_weights`. visible: (L, L) or (H, L, L), the visible pairs.
        steps: the steps from scores to weights, in order: "scale", "softcap", "bias", "mask", "softmax".
        inputs, outputs: (L, E) and (L, E), of the layer's module; None if unknown.
        parts: the words of the tokens, special ones included; empty without a text.
    """

    model: str
    text: str
    labels: list[str]
    layer: int
    kv_heads: int
    scale: float
    steps: list[str]
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    out: np.ndarray
    visible: np.ndarray
    inputs: np.ndarray | None
    outputs: np.ndarray | None
    module: nn.Module | None
    sink: bool = False  # whether a learned logit takes a share, so that rows sum to less than 1
    rotary: bool = False  # whether queries and keys are rotated by their positions
    words: bool = True
    parts: tuple[Word, ...] = ()

    @property
    def heads(self) -> int:
        return len(self.query)

    @property
    def masked(self) -> bool:
        return not bool(self.visible.all())

    @property
    def of(self) -> str:
        """The input, for titles."""
        return f"“{self.text}”" if self.words else "random embeddings"


def layer_numbers(model: TextModel, name: str, text: str, layer: int, most: int) -> LayerNumbers:
    """The numbers of ``layer`` on ``text``. ValueError for a text of more than ``most`` tokens."""
    tokens, words = _short(model, text, most)
    ids = model.whole(tokens.ids)
    calls: list[ObservedCall] = []
    around = _Around(model.module)

    def keep(at: int, call: ObservedCall) -> None:
        if at == layer:
            calls.append(call)
            around.remember()

    with hooked(model.module.modules(), before=around.enter, after=around.leave):
        model.run(ids, keep)
    numbers = _numbers(calls[0], name, text, labels_of(model, text, tokens, words), layer, around)
    first, last = len(model.before), ids.shape[1] - len(model.after)
    return replace(numbers, parts=tuple(_without_signs(word, first, last) for word in words))


def in_words(numbers: LayerNumbers) -> LayerNumbers:
    """The same with labels, weights and visible pairs of whole words: (H, W, W).

    A weight is summed over the tokens of the key word and averaged over those of the query word.
    """
    if not numbers.parts:
        return numbers
    mean, total = (matrix.numpy() for matrix in word_matrices(list(numbers.parts), len(numbers.labels)))
    return replace(
        numbers,
        labels=[word.label for word in numbers.parts],
        weights=mean @ numbers.weights @ total,
        visible=mean @ numbers.visible @ total > 0,
    )


def _without_signs(word: Word, first: int, last: int) -> Word:
    """The word; a special token before ``first`` or from ``last`` on is called start or end, not <s> or [SEP]."""
    name = "start" if word.last <= first else "end" if word.first >= last else word.text
    return replace(word, text=name)


def read_short(model: TextModel, text: str, most: int) -> tuple[Tokens, list[str]]:
    """The tokens of ``text`` and their labels, special ones included. ValueError for more than ``most``."""
    tokens, words = _short(model, text, most)
    return tokens, labels_of(model, text, tokens, words)


def labels_of(model: TextModel, text: str, tokens: Tokens, words: list[Word]) -> list[str]:
    labels = [model.written(int(token)) for token in model.whole(tokens.ids)[0]]
    for i, (start, stop) in enumerate(tokens.spans, len(model.before)):
        labels[i] = _label(words, i, text[start:stop].strip()) or "␣"
    return labels


def module_numbers(module: nn.Module, name: str, call: ObservedCall, inputs: Tensor, outputs: Tensor) -> LayerNumbers:
    """The numbers of a module without a text, for embeddings without words."""
    around = _Around(module)
    around.found, around.inputs, around.outputs = module, inputs, outputs
    labels = [f"x{i + 1}" for i in range(call.query.shape[2])]
    return _numbers(call, name, "", labels, 0, around)


def _numbers(call: ObservedCall, name: str, text: str, labels: list[str], layer: int, around: _Around) -> LayerNumbers:
    query, key, value, out = (x[0].detach().double().cpu() for x in (call.query, call.key, call.value, call.out))
    group = query.shape[0] // key.shape[0]
    kv_heads = key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(query.shape[0] // value.shape[0], 0)
    weights = weights_of(call)[0].detach().double().cpu()
    scale = call.scale if call.scale is not None else query.shape[-1] ** -0.5
    # A bias of -inf hides as a mask does; a pair is visible if equal logits give it weight.
    even = attention_weights(
        call.query.new_zeros(call.query.shape), call.key.new_zeros(call.key.shape), call.mask, bias=call.bias
    )
    visible = (even[0] > 0).cpu().numpy()
    steps = ["scale"]
    steps += ["softcap"] if call.softcap else []
    steps += ["bias"] if call.bias is not None else []
    steps += ["mask"] if not visible.all() else []
    return LayerNumbers(
        model=name,
        text=text,
        labels=labels,
        layer=layer,
        kv_heads=kv_heads,
        scale=float(scale),
        steps=[*steps, "softmax"],
        query=query.numpy(),
        key=key.numpy(),
        value=value.numpy(),
        scores=(query @ key.mT).numpy(),
        weights=weights.numpy(),
        out=out.numpy(),
        visible=visible,
        inputs=around.array(around.inputs),
        outputs=around.array(around.outputs),
        module=around.found,
        sink=call.sink is not None,
        rotary=around.rotary,
        words=bool(text),
    )


def spread_head(weights: np.ndarray) -> int:
    """The head that weighs several words most evenly, without the first token: its picture shows most."""
    w = weights[:, 1:, 1:]
    return int((-np.where(w > 0, w * np.log(np.where(w > 0, w, 1)), 0)).sum((1, 2)).argmax())


def _short(model: TextModel, text: str, most: int) -> tuple[Tokens, list[Word]]:
    tokens, words = read(model, text)
    if len(tokens.ids) > _room(model, most):
        ordinary, fit = _fitting(model, words, most)
        which = f"the first {fit}, {text[: ordinary[fit - 1].stop]!r}" if fit else "no whole word of it"
        raise ValueError(
            f"text: it has {len(ordinary):,} words and marks, and for this model a picture holds "
            f"{_room(model, most)} tokens: {which}"
        )
    return tokens, words


def usual_text(model: TextModel, most: int) -> str:
    """`SENTENCE`, or as many of its words, at least one, as fit the tokens of a picture."""
    ordinary, fit = _fitting(model, read(model, SENTENCE)[1], most)
    return SENTENCE[: ordinary[max(1, fit) - 1].stop]


def _fitting(model: TextModel, words: list[Word], most: int) -> tuple[list[Word], int]:
    """The words of the text, and the number of the first ones that fit a picture."""
    ordinary = [word for word in words if not word.special]
    return ordinary, sum(word.last - len(model.before) <= _room(model, most) for word in ordinary)


def _room(model: TextModel, most: int) -> int:
    return most - len(model.before) - len(model.after)


def _label(words: list[Word], at: int, piece: str) -> str:
    """The token's word if it is the whole word, else the token's own text."""
    word = next((word for word in words if word.first <= at < word.last), None)
    if word is not None and (word.last - word.first == 1 or word.special):
        return word.label
    return Word(piece, 0, len(piece), at, at + 1).label


class _Around:
    """The module that makes the attention call, with its input and output."""

    def __init__(self, module: nn.Module):
        self._inside = list[tuple[nn.Module, Any]]()
        self.found: nn.Module | None = None
        self.rotary = any(isinstance(part, Rotary) for part in module.modules())
        self.inputs: Tensor | None = None
        self.outputs: Tensor | None = None

    def remember(self) -> None:
        """Called during the call: the innermost module with weights is the layer."""
        inner = [(part, x) for part, x in self._inside if any(True for _ in part.children())]
        if inner:
            self.found, self.inputs = inner[-1]

    def enter(self, part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = [x for x in (*given, *named.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        self._inside.append((part, tensors[0] if tensors else None))

    def leave(self, part: nn.Module, out: Any) -> None:
        if self._inside and self._inside[-1][0] is part:
            self._inside.pop()
        if part is self.found and self.outputs is None:
            self.outputs = out if isinstance(out, Tensor) else out[0] if isinstance(out, tuple) else None

    @staticmethod
    def array(x: Tensor | None) -> np.ndarray | None:
        if x is None or x.ndim not in (2, 3):
            return None
        x = x[0] if x.ndim == 3 else x
        return np.asarray(x.detach().double().cpu().numpy())
