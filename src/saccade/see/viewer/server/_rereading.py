"""Reading the text of a run again, and matching the model's calls with the calls of the run.

Shape legend: L tokens, P tokens that are predicted, V vocabulary, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ....make.models.text.encoder_decoder import EncoderDecoder, NextTokenHead
from ....support._restored import evaluating
from ...attribution import HeadValues
from ...inspection import Predictor, TextModel, as_predictor
from ...inspection._collect import read
from ...inspection._published import PublishedModel
from ...inspection._targets import target_tokenizer
from ...intervention import Scale, intervene
from ...intervention._edit import Edit
from ..maps import ReadPair, Run
from ._params import ParameterError
from ._steps import check_again


@dataclass(frozen=True)
class Predictions:
    """The tokens of a text that its model predicts.

    Attributes:
        tokens: the predicted tokens.
        rows: the row of `Rereading.forward` that predicts each of them.
        masked: whether each is predicted with itself masked; otherwise from the tokens before it, and the last row
            predicts what may come after the text.
        blanks: tokens that are masks in the text itself; the last rows predict them.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    masked: bool = False
    blanks: tuple[int, ...] = ()

    def row_about(self, token: int) -> int | None:
        """The row that predicts what may come after a token, or, if masked, in its place; None if there is none."""
        if not self.masked:
            return token
        order = *self.tokens, *self.blanks
        return order.index(token) if token in order else None


@dataclass(frozen=True, eq=False)
class Rereading:
    """A function that reads a run's text again, and its context.

    Attributes:
        module: the model.
        name: the model's name.
        calls: ids of the run's calls, in the order of a forward.
        forward: returns logits of tokens (rows, V), or the last hidden states (L, E).
        tokens: (L,) ids of the side that is read.
        side: its id.
        predicts: the tokens that `forward` has logits of; or the reason why there are none.
        write: the text of a token.
    """

    module: nn.Module
    name: str
    calls: tuple[str, ...]
    forward: Callable[[], Tensor]
    tokens: Tensor
    side: str
    predicts: Predictions | str
    write: Callable[[int], str]

    def plain(self) -> tuple[Tensor, dict[str, str]]:
        """The output of `forward` with all heads on, and for each call of the run its name in `intervene`.

        A factor of 1 changes nothing, and the intervention lists the calls in order.
        """
        with evaluating(self.module), torch.no_grad(), intervene(self.module, {"*": Scale(None, 1.0)}) as scaled:
            output = self.forward()
        names = list(scaled.changed)
        shared = [name.partition("#")[0] for name in names if "#" in name]
        if shared:  # a module with several calls: its name means all of them
            raise ParameterError(
                f"heads: expected one call for each attention module, but {self.name} calls {shared[0]} several times"
            )
        if len(names) != len(self.calls):
            raise ParameterError(f"heads: {len(names)} of the {len(self.calls)} calls of {self.name} can be changed")
        return output, dict(zip(self.calls, names, strict=True))

    def edited(self, edits: dict[int | str, Edit | Sequence[Edit]]) -> Tensor:
        """The output of `forward` with an edit of each of these calls, named as by `plain`."""
        with evaluating(self.module), torch.no_grad(), intervene(self.module, edits):
            return self.forward()


def rereading_of(run: Run) -> Rereading:
    """ParameterError for a run without a model, or with a text too long to be read for each change."""
    check_again(run, "heads")
    return _of_pair(run, run.source) if isinstance(run.source, ReadPair) else _of_text(run, run.source)


def in_order_of_run(run: Run, values: HeadValues) -> np.ndarray:
    """A number for each head of the run's calls, from values in the order of one forward."""
    calls = calls_in_order(run)
    if len(values.calls) != len(calls):
        raise ParameterError(f"heads: {len(values.calls)} of the {len(calls)} calls of {run.model} can be changed")
    parts = dict(zip(calls, values.by_call().values(), strict=True))
    return np.concatenate([parts[call.id].numpy() for call in run.calls])


def _of_text(run: Run, reader: TextModel) -> Rereading:
    ids = reader.whole(read(reader, run.text)[0].ids)

    def write(token: int) -> str:
        decoded = reader.tokenizer.decode([token]) if isinstance(reader, PublishedModel) else ""
        return decoded or reader.written(token)

    try:
        module, forward, predicts = _predicting(as_predictor(reader), ids)
    except ValueError as error:
        module, forward, predicts = reader.module, _states(reader.module, ids), str(error).removeprefix("model: ")
    tokens = ids[0].to(next(module.parameters()).device)
    return Rereading(module, run.model, calls_in_order(run), forward, tokens, "text", predicts, write)


def _predicting(predictor: Predictor, ids: Tensor) -> tuple[nn.Module, Callable[[], Tensor], Predictions | str]:
    places = tuple(predictor.places(ids))
    if predictor.mask is None:
        rows = tuple(place - 1 for place in places)
        return predictor.module, lambda: predictor.logits(ids)[0], Predictions(places, rows)
    if not places:
        raise ValueError("all of this text is masked")
    blanks = tuple((ids[0] == predictor.mask).nonzero()[:, 0].tolist())
    masked = Predictions(places, tuple(range(len(places))), masked=True, blanks=blanks)

    def forward() -> Tensor:
        known = predictor.predictions(ids)
        return torch.cat([known, predictor.logits(ids)[0, list(blanks)]]) if blanks else known

    return predictor.module, forward, masked


def _states(module: Any, ids: Tensor) -> Callable[[], Tensor]:
    """A function that computes the last hidden states (L, width), for a model without a head for tokens."""
    ids = ids.to(next(module.parameters()).device)

    def forward() -> Tensor:
        if isinstance(module, EncoderDecoder):
            memory = module.encode(ids)
            return memory.layout.put(memory.x)[0]
        # transformers' decoders keep keys and values by default
        more = {"use_cache": False} if getattr(getattr(module, "config", None), "use_cache", None) is not None else {}
        return module(input_ids=ids, **more).last_hidden_state[0]

    return forward


def _of_pair(run: Run, pair: ReadPair) -> Rereading:
    model, tokenizer = pair.model, target_tokenizer(pair.model)
    device = next(model.parameters()).device
    target = torch.tensor([pair.target.ids], device=device)
    length = target.shape[1]
    heads = isinstance(model.head, NextTokenHead)
    predicts = Predictions(tuple(range(1, length)), tuple(range(length - 1))) if heads else f"{run.model} has no head"

    def forward() -> Tensor:
        out = model(pair.ids.to(device), None, target)
        output = out.logits if heads else out.last_hidden_state
        assert output is not None
        return output[0]

    def write(token: int) -> str:
        return tokenizer.decode([token]) or tokenizer.written(token)

    return Rereading(model, run.model, calls_in_order(run), forward, target[0], "target", predicts, write)


def calls_in_order(run: Run) -> tuple[str, ...]:
    """Ids of the calls in the order of a forward: in a decoder each layer reads the target, then the source."""
    parts = {"encoder": 0, "decoder": 1, "cross": 1}

    def place(id: str) -> tuple[int, int, bool]:
        part, _, layer = id.rpartition(".")
        return parts.get(part, 0), int(layer), part == "cross"

    return tuple(sorted((call.id for call in run.calls), key=place))
