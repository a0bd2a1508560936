"""A model that runs on shards: where its hooks and functions are in place, also when the backward pass calls it again.

Shape legend: B batch, n rows of this rank.
"""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..interception._hooks import FlexCall, SdpaCall, checkpoints_wrapped_by, flex_handled_by, sdpa_handled_by
from ..operator._masks import Causal, Window
from ..operator._observers import aside
from ..operator.nn.cache.key_positions import both
from ._attention import attention_with_lse
from ._batches import IGNORED, ROWS
from ._caches import Prompt, ShardedLayer
from ._decoding import decode_with_lse
from ._plan import SequencePlan, parts_of


class RunningModel(ABC):
    """The hooks and functions of one block. Abstract.

    Attributes:
        held: n.
        running: ids of the modules that run and whose attention is on shards; empty while other models run.
        prompt: of the cache that the module that runs was called with, or one around it.
    """

    def __init__(self, model: nn.Module, plan: SequencePlan) -> None:
        self.model, self.plan, self.held = model, plan, plan.held(plan.rank)
        self.running = set[int]()
        self._thread: int | None = None
        self._attending = False
        self._targets = dict[int, tuple[Tensor, Any]]()
        self.prompt: Prompt | None = None
        self._around = list[tuple[nn.Module, Prompt | None]]()  # modules that run, and the prompt around each

    @abstractmethod
    def modules(self) -> list[nn.Module]:
        """The modules whose calls are on shards."""

    @abstractmethod
    def arguments(self, module: Any, given: dict[str, Any], known: Container[str], where: str) -> None:
        """Change the arguments of `module.forward`, whose parameters are `known`.

        Raises:
            ValueError: what cannot be right on shards.
        """

    @abstractmethod
    def replaced(self) -> list[AbstractContextManager[Any]]:
        """Blocks of the thread, in which the model's attention comes to `attend`."""

    def on_this_thread(self) -> bool:
        """Whether this thread is in the block: calls of others are of whole sequences."""
        return threading.get_ident() == self._thread

    @property
    def continues(self) -> bool:
        """Whether the call has new tokens behind a prompt, the same on every rank."""
        return self.prompt is not None and self.prompt.continues

    def result(self, module: Any, output: Any) -> Any:
        """The output of `module` in place of this one."""
        return output

    def hooks(self) -> list[Any]:
        """Handles of hooks."""
        made = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in self.modules()]
        return made + [module.register_forward_hook(self._leave, always_call=True) for module in self.modules()]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The block on this thread, where it is not there yet."""
        before, self._thread = self._thread, threading.get_ident()
        if before == self._thread:
            yield
            return
        with ExitStack() as stack:
            stack.callback(setattr, self, "_thread", before)
            stack.callback(self._return_to, self.prompt)  # hooks are not called after Ctrl-C
            for handle in self.hooks() if before is None else []:
                stack.callback(handle.remove)
            refused = sdpa_handled_by(self._refuse), flex_handled_by(self._refuse)
            for block in (*self.replaced(), checkpoints_wrapped_by(self._again), *refused):
                stack.enter_context(block)
            yield

    def _again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function for torch.utils.checkpoint, which is on shards in the backward pass as well."""
        running = set(self.running)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.entered():
                before, self.running = self.running, set(running)
                try:
                    return function(*args, **kwargs)
                finally:
                    self.running = before

        return call

    def _enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.on_this_thread():
            return None
        self.running.add(id(module))
        self._around.append((module, self.prompt))
        signature = inspect.signature(module.forward)
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
            return None  # DistributedDataParallel, say, which hands all on
        known = signature.parameters.keys()
        before = {**signature.bind_partial(*args).arguments, **kwargs}
        self.arguments(module, given := dict(before), known, f"context_parallel: {type(module).__name__}")
        same = before.keys() == given.keys() and all(given[name] is value for name, value in before.items())
        return None if same else ((), given)  # a hook of the user's may read positional arguments

    def _leave(self, module: Any, args: Any, output: Any) -> Any:
        if not self.on_this_thread():
            return None
        self.running.discard(id(module))
        try:
            return None if output is None else self.result(module, output)
        finally:
            self._return_to(self._around.pop()[1] if self._around else None)

    def _return_to(self, prompt: Prompt | None) -> None:
        """End the call that runs with a cache, which is part of one with this prompt."""
        ended, self.prompt = self.prompt, prompt
        if ended is not None and ended is not prompt:
            ended.running = False

    def take_cache(
        self, prompt: Prompt, before: int, given: dict[str, Any], where: str, name: str, training: bool
    ) -> None:
        """Keep in `prompt`, with so many tokens before, what the call of a module attends to. `name`: the argument."""
        if prompt is self.prompt:
            return
        if not all(isinstance(part, Causal | Window) for part in parts_of(self.plan.mask)):
            raise ValueError(
                f"{where}: {name}: the plan's mask {self.plan.mask!r} does not say what tokens behind the prompt see; "
                "expected None, Causal() or a window"
            )
        if before and any(given.get(labels) is not None for labels in ("labels", "shift_labels")):
            raise ValueError(f"{where}: labels: a call behind a prompt has no loss on shards")
        if before and training:
            raise ValueError(f"{where}: dropout would differ by rank; call model.eval() behind a prompt")
        prompt.begin(before, given)
        self.prompt = prompt

    def check_rows(self, given: dict[str, Any], where: str, axes: dict[str, int] = ROWS) -> None:
        for name, dim in axes.items():
            tensor = given.get(name)
            if isinstance(tensor, Tensor) and tensor.dim() < 4 and tensor.shape[dim] != self.held:
                raise ValueError(
                    f"{where}: {name} is {tuple(tensor.shape)}, expected the {self.held} rows of plan.shard on rank "
                    f"{self.plan.rank} on axis {dim}"
                )

    def counted(self, ids: Tensor | None, positions: Tensor, padding: int) -> Tensor:
        """Positions (B, n) of models that count tokens other than padding from `padding` + 1. Positions that are not
        those of `shard` are left as they are. Every rank calls it.

        Args:
            ids: (B, n); None: no token is padding.
            positions: (B, n) or (1, n).
        """
        whole = self.plan.unshard(positions, -1)
        if not bool((whole == torch.arange(self.plan.length, device=whole.device)).all()):
            return positions
        real = torch.ones_like(whole) if ids is None else self.plan.unshard(ids, 1) != padding
        return self.plan.shard(real.cumsum(1) * real + padding, 1)

    def check_labels(self, given: dict[str, Any], where: str, shifted: bool) -> None:
        """ValueError unless labels are those that `shard` gives for a loss of next tokens, or of the rows' own ones."""
        if not shifted and given.get("shift_labels") is not None:
            raise ValueError(
                f"{where}: shift_labels: its loss reads the label of each row itself; expected what "
                "distributed.shard(batch, plan, shift_labels=False) returns"
            )
        wanted = ("shift_labels", "num_items_in_batch") if shifted else ("num_items_in_batch",)
        missing = [name for name in wanted if given.get(name) is None]
        if missing and any(given.get(name) is not None for name in ("labels", "shift_labels")):
            raise ValueError(
                f"{where}: labels without {' and '.join(missing)}: the mean is over all ranks' labels"
                f"{', and the next token of a row may be on another rank' if shifted else ''}; expected what "
                f"distributed.shard(batch, plan{'' if shifted else ', shift_labels=False'}) returns, or no labels"
            )

    def take_labels(self, module: nn.Module, given: dict[str, Any], labels: Tensor | None) -> None:
        """Keep the labels (B, n) of the rows for `with_loss`, and give the module none."""
        count = given.get("num_items_in_batch")
        for name in ("labels", "shift_labels", "num_items_in_batch"):
            given.pop(name, None)
        self._targets.pop(id(module), None)  # of a call that failed
        if labels is not None:
            self._targets[id(module)] = labels, count

    def with_loss(self, module: nn.Module, output: Any) -> Any:
        """The output with this rank's share of the mean over all labels, where the module was given some."""
        if id(module) in self._targets:
            labels, count = self._targets.pop(id(module))
            if getattr(output, "logits", None) is None:
                raise ValueError(f"context_parallel: {type(module).__name__}: labels: it has no head with logits")
            logits = output.logits.flatten(0, -2)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
            if isinstance(output, dict):  # of transformers: its first entry is the loss
                others = {name: x for name, x in output.items() if name != "loss"}
                return type(output)(loss=total / count, **others)
            output.loss = total / count
        return output

    def layer_of(self, key: Tensor, where: str) -> ShardedLayer | None:
        """The layer whose cache has just taken this key; None if the call has no cache."""
        return None if self.prompt is None else self.prompt.layer_of(key, where)

    def attend(
        self,
        where: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        layer: ShardedLayer | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """The call over all ranks, with the mask of the whole sequence that a layer has: out (B, H, n, D) and lse."""
        if layer is not None and layer.prompt.before != (held := int(layer.lengths()[0])):
            raise ValueError(
                f"{where}: its cache has {held} tokens, expected {layer.prompt.before} as in the first layer: roll all "
                "layers back to one length, as after a call that failed"
            )
        if not self.continues and (query.shape[2] != self.held or key.shape[2] != self.held):
            raise ValueError(
                f"{where}: {query.shape[2]} rows and {key.shape[2]} keys, expected {self.held} of both: "
                "cross-attention is not shared among ranks"
            )
        before, self._attending = self._attending, True
        try:
            with aside():
                if self.continues:
                    assert layer is not None
                    return self._decode(where, (query, key, value), mask, layer, options)
                made = attention_with_lse(query, key, value, plan=self.plan._narrowed(mask), **options)
        finally:
            self._attending = before
        if layer is not None:
            layer.keep(key, value)
        return made

    def _decode(
        self,
        where: str,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: Any,
        layer: ShardedLayer,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """The call from new tokens to all tokens so far, the same on every rank."""
        if options.pop("dropout", 0.0):
            raise ValueError(f"{where}: dropout would differ by rank, expected none behind a prompt")
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise ValueError(f"{where}: a call behind a prompt records no gradients; call it under torch.no_grad()")
        whole = both(self.plan.mask, mask)
        return decode_with_lse(*tensors, whole, layer.held, options, layer.prompt.facts_once())

    def _refuse(self, call: SdpaCall | FlexCall, proceed: Callable[[], Any]) -> Any:
        if self.running and not self._attending:
            name = "flex_attention" if isinstance(call, FlexCall) else "F.scaled_dot_product_attention"
            raise ValueError(
                f"context_parallel: the model calls {name} itself, which sees this rank's rows only; call "
                "saccade.attention"
            )
        return proceed()
