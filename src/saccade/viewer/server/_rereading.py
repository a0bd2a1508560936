"""The text of a run through its model once more, and which calls of the model are those of the run.

Shape legend: L tokens, V vocabulary, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...inspection import TextModel
from ...inspection._collect import read
from ...inspection._models import SaccadeModel, evaluating
from ...inspection._published import PublishedModel
from ...inspection._targets import target_tokenizer
from ...intervention import Scale, intervene
from ...intervention._edit import Edit
from ...models.text.decoder import TextDecoder
from ...models.text.encoder_decoder import EncoderDecoder, NextTokenHead
from ..maps import ReadPair, Run
from ._params import RequestError
from ._steps import MOST_STEPS, has_steps


@dataclass(frozen=True, eq=False)
class Rereading:
    """How the model of a run reads its text again.

    Attributes:
        module: the model.
        name: what it is called.
        calls: ids of the run's calls, in the order in which a forward makes them.
        forward: logits (L, V) of the token after each one, or the last hidden states (L, E).
        tokens: (L,) ids of the side that is read.
        side: its id.
        predicts: whether `forward` gives logits.
        write: how a token is written.
    """

    module: nn.Module
    name: str
    calls: tuple[str, ...]
    forward: Callable[[], Tensor]
    tokens: Tensor
    side: str
    predicts: bool
    write: Callable[[int], str]

    def plain(self) -> tuple[Tensor, dict[str, str]]:
        """What `forward` gives with all heads on, and for each call of the run the name that `intervene` has for it.

        A factor of 1 changes nothing, and the intervention names the calls in their order.
        """
        with evaluating(self.module), torch.no_grad(), intervene(self.module, {"*": Scale(None, 1.0)}) as seen:
            output = self.forward()
        names = list(seen.changed)
        if any("#" in name for name in names):  # the first of them is called as the module, which is all of them
            raise RequestError(f"heads: layers of {self.name} share a module, and cannot be told apart")
        if len(names) != len(self.calls):
            raise RequestError(f"heads: {len(names)} of the {len(self.calls)} calls of {self.name} can be changed")
        return output, dict(zip(self.calls, names, strict=True))

    def edited(self, edits: dict[int | str, Edit | Sequence[Edit]], *, gradients: bool = False) -> Tensor:
        """What `forward` gives with an edit of each of these calls, which are named as `plain` names them."""
        with evaluating(self.module), torch.set_grad_enabled(gradients), intervene(self.module, edits):
            return self.forward()


def rereading_of(run: Run) -> Rereading:
    """RequestError for a run that holds no model, or whose text is too long to be read for each change."""
    if not has_steps(run):
        raise RequestError(
            f"heads: this needs a text of at most {MOST_STEPS:,} tokens and the model that reads it; what watch kept "
            "holds no model"
        )
    return _of_pair(run, run.source) if isinstance(run.source, ReadPair) else _of_text(run, run.source)


def _of_text(run: Run, reader: TextModel) -> Rereading:
    module: Any = reader.module
    ids = reader.whole(read(reader, run.text)[0].ids).to(next(module.parameters()).device)
    predicts = isinstance(reader, SaccadeModel) or (
        isinstance(module, TextDecoder) and module.request.head == "causal-lm"
    )

    def forward() -> Tensor:
        if isinstance(reader, SaccadeModel):
            return module(ids)[0]
        if isinstance(module, EncoderDecoder):
            memory = module.encode(ids)
            return memory.layout.put(memory.x)[0]
        # transformers' decoders keep keys and values unless they are told not to
        more = {"use_cache": False} if getattr(getattr(module, "config", None), "use_cache", None) is not None else {}
        out = module(input_ids=ids, **more)
        return (out.logits if predicts else out.last_hidden_state)[0]

    def write(token: int) -> str:
        decoded = reader.tokenizer.decode([token]) if isinstance(reader, PublishedModel) else ""
        return decoded or reader.written(token)

    return Rereading(module, run.model, _in_order(run), forward, ids[0], "text", predicts, write)


def _of_pair(run: Run, pair: ReadPair) -> Rereading:
    model, tokenizer = pair.model, target_tokenizer(pair.model)
    device = next(model.parameters()).device
    target = torch.tensor([pair.target.ids], device=device)
    predicts = isinstance(model.head, NextTokenHead)

    def forward() -> Tensor:
        out = model(pair.ids.to(device), None, target)
        found = out.logits if predicts else out.last_hidden_state
        assert found is not None
        return found[0]

    def write(token: int) -> str:
        return tokenizer.decode([token]) or tokenizer.written(token)

    return Rereading(model, run.model, _in_order(run), forward, target[0], "target", predicts, write)


def _in_order(run: Run) -> tuple[str, ...]:
    """Ids of the calls as one forward makes them: in a decoder each layer reads the target, then the source."""
    parts = {"encoder": 0, "decoder": 1, "cross": 1}

    def place(id: str) -> tuple[int, int, bool]:
        part, _, layer = id.rpartition(".")
        return parts.get(part, 0), int(layer), part == "cross"

    return tuple(sorted((call.id for call in run.calls), key=place))
