"""Saccade's own models, and any module whose attention is `saccade.attention`, on shards.

While the model runs, `saccade.attention` goes over all ranks; a mask that a layer gives it is of the whole sequence.
Modules that add or turn positions are given the rows of this rank, where their caller gives the first one or none.

Shape legend: B batch, n rows of this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Container
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..operator._masks import as_mask
from ..operator._observers import THREAD, computed_by
from ..operator.nn import KVCache
from ..operator.nn.cache import GrowingLayer, LayerCache
from ..operator.positions import Learned, Rotary, Sinusoidal
from ..operator.variants import Mechanism
from ._batches import ROWS, check_padding
from ._caches import Prompt, ShardedLayer
from ._plan import SequencePlan
from ._running import RunningModel

DECODERS = ("DecoderLM", "LanguageModel", "GPT2", "GPTNeo", "Llama")  # compared with one process
ENCODERS = ("Bert", "DistilBert", "Electra", "Esm", "Roberta")
_PARTS = ("TokenHead", "VocabularyHead", "Classifier", "ContactHead")  # row by row, or outside of the model's call
_PACKAGE = __name__.partition(".")[0]
_POSITIONS = (Rotary, Learned, Sinusoidal)
_MIXING = (nn.MultiheadAttention, nn.RNNBase, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, Mechanism)
_ABSENT = {  # arguments of Saccade's modules
    "context": "cross-attention is not shared among ranks",
    "padding": "padding belongs into the plan's mask",
    "observe": "a call on shards is of all ranks",
    "return_weights": "a call on shards is of all ranks",
}


class RunningModules(RunningModel):
    """A module whose attention is `saccade.attention`."""

    def __init__(self, model: nn.Module, plan: SequencePlan) -> None:
        super().__init__(model, plan)
        known = (*DECODERS, *ENCODERS, *_PARTS)
        for name, part in model.named_modules():
            own = _own_class(part)
            of_models = own is not None and own.__module__.startswith(f"{_PACKAGE}.make.models.")
            if isinstance(part, _MIXING) or (own is not None and of_models and own.__name__ not in known):
                raise TypeError(
                    f"context_parallel: {name or 'the model'} is a {type(part).__name__}, which mixes rows or is not "
                    f"known to be right on shards; of saccade.models these are {', '.join(known)}; each process can "
                    "call a head that pools on plan.unshard(rows, 1), and divide its loss by plan.ranks"
                )
        self._calls = 0
        rows = [torch.arange(start, stop) for start, stop in plan.rows[plan.rank]]
        self._rows, self._placed = torch.cat(rows), dict[Any, Tensor]()

    def modules(self) -> list[nn.Module]:
        return [part for part in self.model.modules() if part is self.model or next(part.children(), None) is not None]

    def replaced(self) -> list[AbstractContextManager[Any]]:
        return [computed_by(self._elsewhere)]

    def hooks(self) -> list[Any]:
        places = [part for part in self.model.modules() if isinstance(part, _POSITIONS)]
        return super().hooks() + [part.register_forward_pre_hook(self._place, with_kwargs=True) for part in places]

    # --- the model's call -------------------------------------------------------------------------------------------

    def _enter(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if module is self.model and self.on_this_thread():
            self._calls = 0
        return super()._enter(module, args, kwargs)

    def arguments(self, module: Any, given: dict[str, Any], known: Container[str], where: str) -> None:
        caches = {name: value for name, value in given.items() if isinstance(value, KVCache | LayerCache)}
        if len({*map(id, caches.values())}) > 1:
            raise ValueError(f"{where}: {' and '.join(caches)}: a call on shards takes one cache, got {len(caches)}")
        for name in caches:
            prompt = self._prompt_of(given[name], f"{where}: {name}")
            self.take_cache(prompt, int(given[name].length), given, where, name, module.training)
        own = _own_class(module)
        if own is None:
            return
        for name, why in _ABSENT.items():
            if given.get(name) not in (None, False):
                raise ValueError(f"{where}: {name}: {why}")
        if not self.continues:
            self.check_rows(given, where, {**ROWS, "x": 1, "tokens": 1})
            if given.get("logits_to_keep") is not None:
                raise ValueError(f"{where}: logits_to_keep: the last columns are of this rank's rows")
        check_padding(given.get("attention_mask"), where)
        if module.training and getattr(module, "layer_drop", 0):
            raise ValueError(f"{where}: layer_drop leaves out other layers on each rank; set it to 0")
        if own.__name__ in (*DECODERS, *ENCODERS):
            longest = getattr(module, "longest", None) or getattr(getattr(module, "config", None), "context", None)
            if longest is not None and self.plan.length > longest:
                raise ValueError(f"{where}: {self.plan.length} tokens are more than the model's {longest} positions")
            shifted = own.__name__ in DECODERS
            self.check_labels(given, where, shifted)
            self.take_labels(module, given, given.get("shift_labels" if shifted else "labels"))
            if own.__name__ in ENCODERS:
                self._take_positions(module, given, where)
            elif "position_ids" not in known:  # its rotary positions read distances
                given.pop("position_ids", None)

    def _prompt_of(self, cache: KVCache | LayerCache, where: str) -> Prompt:
        """The prompt of a cache. The layers of an empty `KVCache` are replaced by ones on shards."""
        layers = cache.layers if isinstance(cache, KVCache) else [cache]
        prompts = {layer.prompt for layer in layers if isinstance(layer, ShardedLayer)}
        if len(prompts) == 1 and all(isinstance(layer, ShardedLayer) for layer in layers):
            (prompt,) = prompts
            if prompt.plan is self.plan:
                return prompt
        replaceable = all(type(layer) in (GrowingLayer, ShardedLayer) and not layer._rounds for layer in layers)
        if not isinstance(cache, KVCache) or not replaceable or any(layer.lengths().any() for layer in layers):
            kinds = {
                f"{type(layer).__name__}{' in 8 bits' if layer._rounds else ''} of {int(layer.lengths().max())} tokens"
                for layer in layers
            }
            raise ValueError(
                f"{where}: a {type(cache).__name__} ({', '.join(sorted(kinds))}), expected a KVCache as model.cache() "
                "makes it, empty or with a prompt on shards of this plan"
            )
        prompt = Prompt(self.plan)
        cache.layers[:] = [ShardedLayer(prompt) for _ in layers]
        return prompt

    def _take_positions(self, module: Any, given: dict[str, Any], where: str) -> None:
        if isinstance(getattr(module, "mask", None), int):
            raise ValueError(f"{where}: token_dropout scales by the share of masked tokens, which differs by rank")
        padding = getattr(module, "padding", getattr(module, "pad", None))
        if getattr(module, "places", None) is None:  # its rotary positions read distances
            given.pop("position_ids", None)
        elif given.get("position_ids") is None:
            raise ValueError(
                f"{where}: position_ids are missing: without them a shard begins at 0; see distributed.shard"
            )
        elif padding is not None:
            given["position_ids"] = self.counted(given["input_ids"], given["position_ids"], padding)

    def result(self, module: Any, output: Any) -> Any:
        if module is self.model and not self._calls:
            raise ValueError(
                f"context_parallel: {type(module).__name__} made no call of saccade.attention: whatever mixes its rows "
                "sees those of this rank only"
            )
        own = _own_class(module)
        if own is not None and own.__name__ in ENCODERS:
            output.pooler_output = None  # most ranks have another first row
        return self.with_loss(module, output)

    # --- what its layers ask for ------------------------------------------------------------------------------------

    def _elsewhere(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *, backend: str = "auto", **options: Any
    ) -> tuple[Tensor, Tensor] | None:
        if not self.running:
            return None
        if THREAD.editor is not None:
            raise ValueError("context_parallel: a call on shards cannot be edited; intervene in one process")
        if backend != "auto":
            raise ValueError(f"context_parallel: backend {backend!r}: on shards it is chosen for each part of a call")
        self._calls += 1
        where = f"context_parallel: {type(self._around[-1][0]).__name__ if self._around else 'a call'}"
        return self.attend(where, query, key, value, as_mask(mask), self.layer_of(key, where), **options)

    def _place(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Positions of this rank's rows, where the caller has not given one for each."""
        if not (self.running and self.on_this_thread()) or self.continues:
            return None
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        x, offset = given["x"], given.get("offset", 0)
        if isinstance(offset, Tensor) and offset.ndim == 2:
            return None
        key = (x.shape[0], x.device)
        if key not in self._placed:
            self._placed[key] = self._rows.to(x.device).expand(x.shape[0], -1)
        rows = self._placed[key]
        if isinstance(offset, Tensor):
            rows = rows + offset[:, None]
        elif offset:
            rows = rows + offset
        return (x, rows), {}


def _own_class(module: nn.Module) -> type | None:
    """The class of Saccade that a module has; FSDP2 puts one of its own before it."""
    return next((base for base in type(module).__mro__ if base.__module__.startswith(f"{_PACKAGE}.")), None)
