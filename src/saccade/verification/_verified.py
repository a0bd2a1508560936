"""`saccade.verified`: a test or a fixture that returns a stack fails with the report on it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from ._verify_stack import StackReport, report_on
from .running._stack_job import given_by

Function = Callable[..., Any]


class StackError(Exception):
    """A stack breaks a promise; the message is the report, which is also `report`.

    Example:
        >>> import saccade, torch
        >>> from saccade.verification import StackError
        >>> @saccade.verified(causal=True)
        ... def test_stack():
        ...     return torch.nn.Sequential(torch.nn.Embedding(31, 8), torch.nn.RNN(8, 8, bidirectional=True))
        >>> try:
        ...     test_stack()
        ... except StackError as error:
        ...     error.report.ok
        False
    """

    def __init__(self, report: StackReport):
        super().__init__(f"\n{report}")
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.report,)


@overload
def verified(function: Function, /) -> Function: ...
@overload
def verified(**arguments: Any) -> Callable[[Function], Function]: ...
def verified(function: Function | None = None, /, **arguments: Any) -> Function:
    """A test, a fixture or a factory of a stack, which then raises an error if `verify_stack` finds one.

    Args:
        function: it returns a model, a dict of `verify_stack`'s arguments, or a tuple of them in their order. pytest
            gives it its fixtures. Those that pytest collects as tests return None afterwards, others what they made.
        arguments: of `verify_stack`, for those that the function does not return.

    Raises:
        StackError: a finding is an error, or no probe could test the stack.
        ValueError: the function returns something else.

    Example:
        >>> import saccade, torch
        >>> @saccade.verified
        ... def test_recurrent():
        ...     return torch.nn.Sequential(torch.nn.Embedding(31, 8), torch.nn.GRU(8, 8, batch_first=True))
        >>> test_recurrent()
        >>> @saccade.verified(causal=True)  # below @pytest.fixture
        ... def model():
        ...     return torch.nn.Sequential(torch.nn.Embedding(31, 8), torch.nn.GRU(8, 8, batch_first=True))
        >>> type(model()).__name__
        'Sequential'
    """
    if function is None:
        return functools.partial(_verified, arguments)
    return _verified(arguments, function)


def _verified(arguments: dict[str, Any], function: Function) -> Function:
    @functools.wraps(function)
    def verifying(*given: Any, **named: Any) -> Any:
        __tracebackhide__ = True  # pytest shows the report alone
        made = function(*given, **named)
        report = report_on(given_by(made, function.__name__, **arguments))
        if not report.ok:
            raise StackError(report)
        return None if function.__name__.startswith("test") else made

    verifying.is_verified = True  # type: ignore[attr-defined]  # the command verifies what it makes once
    return verifying
