"""Wraps every attention function that models look up on this thread, eager ones included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ....support._extras import installing
from ....support._threads import ThreadBlocks

Function = Callable[..., Any]


@contextmanager
def functions_wrapped_by(wrap: Callable[[Function], Function]) -> Iterator[None]:
    """A block in which transformers models on this thread look up `wrap(function)` as their attention function.

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
    with _WRAPPERS.holding(wrap):
        yield


@contextmanager
def masks_wrapped_by(wrap: Callable[[Function], Function]) -> Iterator[None]:
    """As `functions_wrapped_by`, for the mask functions that models look up in `AttentionMaskInterface`."""
    with _MASK_WRAPPERS.holding(wrap):
        yield


def _wrapped(function: Function, blocks: ThreadBlocks[Callable[[Function], Function]]) -> Function:
    for wrap in blocks.thread.held.values:
        function = wrap(function)
    return function


def _put() -> Callable[[], None]:
    """Wrap both methods that look a function up; Python finds both on the class."""
    try:
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise ImportError(f"functions_wrapped_by needs transformers >= 5.0: {installing('hf')}") from error
    interface: Any = AttentionInterface
    get_interface, get_item = interface.get_interface, interface.__getitem__

    def wrapping_get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
        entered = _WRAPPERS.thread.held
        wraps, entered.values = entered.values, ()
        try:
            function = get_interface(self, attn_implementation, default)
        finally:
            entered.values = wraps
        return _wrapped(function, _WRAPPERS)

    def wrapping_get_item(self: Any, name: Any) -> Any:
        return _wrapped(get_item(self, name), _WRAPPERS)

    return _replaced(interface, {"get_interface": wrapping_get_interface, "__getitem__": wrapping_get_item})


def _put_on_masks() -> Callable[[], None]:
    from transformers.masking_utils import AttentionMaskInterface

    interface: Any = AttentionMaskInterface
    get_item = interface.__getitem__

    def wrapping_get_item(self: Any, name: Any) -> Any:
        return _wrapped(get_item(self, name), _MASK_WRAPPERS)

    return _replaced(interface, {"__getitem__": wrapping_get_item})


def _replaced(interface: Any, methods: dict[str, Any]) -> Callable[[], None]:
    """Set methods of a class; what it returns restores them."""
    before = {name: interface.__dict__.get(name) for name in methods}
    for name, method in methods.items():
        setattr(interface, name, method)

    def put_back() -> None:
        for name, function in before.items():
            if function is None:  # inherited
                delattr(interface, name)
            else:
                setattr(interface, name, function)

    return put_back


_WRAPPERS: ThreadBlocks[Callable[[Function], Function]] = ThreadBlocks(_put)
_MASK_WRAPPERS: ThreadBlocks[Callable[[Function], Function]] = ThreadBlocks(_put_on_masks)
