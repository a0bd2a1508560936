"""A wrapper around every attention function that a model is handed on this thread, eager ones included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ....support._extras import installing

Function = Callable[..., Any]


class _ThreadWrappers:
    """The wrappers of one thread, the innermost last. Who ends a block on another thread still reaches them."""

    wraps: tuple[Callable[[Function], Function], ...] = ()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held = _ThreadWrappers()


THREAD = _Thread()
_LOCK = threading.Lock()
_USERS = 0
_BEFORE: dict[str, Any] = {}


@contextmanager
def functions_wrapped_by(wrap: Callable[[Function], Function]) -> Iterator[None]:
    """Within the block, on this thread, models of transformers look up `wrap(function)` as their attention function.

    It wraps every function of `AttentionInterface.get_interface(name, default)` and `ALL_ATTENTION_FUNCTIONS[name]`,
    for every name, also the eager function of the model's own file. Wrappers nest: the wrapper of the innermost `with`
    is the outermost function. Other threads are not touched. The class is restored after the last `with`, also after an
    exception. A model that computes its attention itself looks up no function, so its calls are not seen.

    Raises:
        ImportError: transformers is not installed.

    Example:
        >>> import torch, transformers
        >>> from saccade.integrations.transformers import functions_wrapped_by
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaModel(config)
        >>> def printing(function):
        ...     def call(module, query, key, value, *args, **more):
        ...         print(tuple(query.shape))
        ...         return function(module, query, key, value, *args, **more)
        ...     return call
        >>> with functions_wrapped_by(printing):
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        (1, 2, 3, 8)
        (1, 2, 3, 8)
    """
    _install()
    held = THREAD.held
    held.wraps = (*held.wraps, wrap)
    try:
        yield
    finally:
        # The blocks of generators end in any order: this wrapper goes, the others stay.
        at = len(held.wraps) - 1 - held.wraps[::-1].index(wrap)
        held.wraps = held.wraps[:at] + held.wraps[at + 1 :]
        _uninstall()


def _wrapped(function: Function) -> Function:
    for wrap in THREAD.held.wraps:
        function = wrap(function)
    return function


def _interface() -> Any:
    try:
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise ImportError(f"functions_wrapped_by needs transformers >= 5.0: {installing('hf')}") from error
    return AttentionInterface


def _install() -> None:
    global _USERS
    interface = _interface()
    with _LOCK:
        if _USERS == 0:
            # Both are looked up on the class; __getitem__ is inherited, so that restoring it means removing it.
            _BEFORE.update({name: interface.__dict__.get(name) for name in ("get_interface", "__getitem__")})
            get_interface, get_item = interface.get_interface, interface.__getitem__

            def wrapping_get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
                held = THREAD.held
                wraps, held.wraps = held.wraps, ()
                try:
                    function = get_interface(self, attn_implementation, default)
                finally:
                    held.wraps = wraps
                return _wrapped(function)

            def wrapping_get_item(self: Any, name: Any) -> Any:
                return _wrapped(get_item(self, name))

            interface.get_interface, interface.__getitem__ = wrapping_get_interface, wrapping_get_item
        _USERS += 1


def _uninstall() -> None:
    global _USERS
    interface = _interface()
    with _LOCK:
        _USERS -= 1
        if _USERS == 0:
            for name, before in _BEFORE.items():
                if before is None:
                    delattr(interface, name)
                else:
                    setattr(interface, name, before)
            _BEFORE.clear()
