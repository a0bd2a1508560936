"""Reading source with Python's parser, which gives up now and then for no fault of the source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def parsed_by(parse: Callable[..., T], *given: Any) -> T:
    """`parse(*given)`, where parse is ast.parse or one of inspect's functions that use it.

    Some releases of Python 3.11 and 3.12 now and then raise "SystemError: AST constructor recursion depth mismatch" for
    source that is well (github.com/python/cpython/issues/106905). Asked once more, they parse it.
    """
    try:
        return parse(*given)
    except SystemError:
        return parse(*given)
