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

from torch import Tensor, nn

from ..interception._hooks import checkpoints_wrapped_by, sdpa_handled_by
from ..operator._observers import aside
from ._attention import attention_with_lse
from ._batches import ROWS
from ._plan import SequencePlan


class RunningModel(ABC):
    """The hooks and functions of one block. Abstract.

    Attributes:
        held: n.
        running: ids of the modules that run and whose attention is on shards; empty while other models run.
    """

    def __init__(self, model: nn.Module, plan: SequencePlan) -> None:
        self.model, self.plan, self.held = model, plan, plan.held(plan.rank)
        self.running = set[int]()
        self._thread: int | None = None
        self._attending = False

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
            for handle in self.hooks() if before is None else []:
                stack.callback(handle.remove)
            for block in (*self.replaced(), checkpoints_wrapped_by(self._again), sdpa_handled_by(self._refuse_sdpa)):
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
        return None if output is None else self.result(module, output)

    def check_rows(self, given: dict[str, Any], where: str, axes: dict[str, int] = ROWS) -> None:
        for name, dim in axes.items():
            tensor = given.get(name)
            if isinstance(tensor, Tensor) and tensor.dim() < 4 and tensor.shape[dim] != self.held:
                raise ValueError(
                    f"{where}: {name} is {tuple(tensor.shape)}, expected the {self.held} rows of plan.shard on rank "
                    f"{self.plan.rank} on axis {dim}"
                )

    def attend(
        self, where: str, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """The call over all ranks, with the mask of the whole sequence that a layer has: out (B, H, n, D) and lse."""
        if query.shape[2] != self.held or key.shape[2] != self.held:
            raise ValueError(
                f"{where}: {query.shape[2]} rows and {key.shape[2]} keys, expected {self.held} of both: KV caches and "
                "cross-attention are not shared among ranks"
            )
        before, self._attending = self._attending, True
        try:
            with aside():
                return attention_with_lse(query, key, value, plan=self.plan._narrowed(mask), **options)
        finally:
            self._attending = before

    def _refuse_sdpa(self, call: Any, proceed: Callable[[], Tensor]) -> Tensor:
        if self.running and not self._attending:
            raise ValueError(
                "context_parallel: the model calls F.scaled_dot_product_attention itself, which sees this rank's rows "
                "only; call saccade.attention"
            )
        return proceed()
