"""A training monitor of the whole stack: its probes run before the first step, and a few tokens every n-th step."""

from __future__ import annotations

import inspect
import logging
from typing import Any, Literal

from ...verification import StackError, StackReport, verify_stack
from ...verification.stacks._opened import Given
from ...verification.stacks._runner import broken
from ...verification.stacks._state import kept

LOGGER = logging.getLogger("saccade.monitoring")


class StackMonitor:
    """Verifies a stack before it is trained, and every n-th step for about a second.

    The first step runs all probes of `saccade.verify_stack`. Later ones pack or pad two short documents and call the
    model a few times; only where an output differs do all probes run again. Weights, gradients and random state are as
    before afterwards: the training takes the same steps as without. A stack that cannot be tested trains on, with the
    reason in the logger "saccade.monitoring".

    Args:
        every: multiples of this number are verified again; None: the first step alone.
        on_error: "raise" an error, or "warn" through the logger "saccade.monitoring" and train on.
        stack: the arguments of `saccade.verify_stack`: the model, and what stands around it.

    Raises:
        TypeError: an argument that `verify_stack` does not have.
        ValueError: every is not a positive whole number, or on_error is another word.

    Example:
        >>> import saccade, torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(31, 8), torch.nn.GRU(8, 8, batch_first=True))
        >>> monitor = saccade.monitoring.StackMonitor(model, every=1000)
        >>> for step in range(3):
        ...     monitor.step(step)  # before the forward pass
        ...     model(torch.tensor([[5, 3]]))[0].square().mean().backward()
        >>> monitor.report.ok
        True
    """

    def __init__(
        self, *stack: Any, every: int | None = None, on_error: Literal["raise", "warn"] = "raise", **named: Any
    ):
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"every: must be a whole number of steps from 1 on, got {every!r}")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error: expected 'raise' or 'warn', got {on_error!r}")
        self._given = inspect.signature(verify_stack).bind(*stack, **named)
        self._every, self._raises = every, on_error == "raise"
        self.report: StackReport | None = None

    def step(self, step: int) -> None:
        """Verify the stack if this is the first call, or if the step is due.

        Raises:
            StackError: a finding is an error, and `on_error` is "raise".
        """
        if self.report is not None and (self._every is None or step % self._every):
            return
        with kept(*self._given.arguments.values()):
            report = self._new_report()
        if report is None:
            return
        self.report = report
        is_called = any(outcome.status != "n/a" for outcome in report.outcomes)
        if report.errors and is_called and self._raises:
            raise StackError(report)
        if not report.ok:  # also where it could not be called with documents of random tokens: no fault is known
            LOGGER.warning("step %d: %s", step, report)

    def _new_report(self) -> StackReport | None:
        """All probes' report; None where a short check of the promises that were kept before shows no difference."""
        if self.report is not None:
            passed = _passed(self.report)
            if not passed or not broken(Given(**self._given.arguments), passed):
                return None
        return verify_stack(*self._given.args, **self._given.kwargs)


def _passed(report: StackReport) -> set[str]:
    """The names of the probes that found nothing."""
    return {outcome.name for outcome in report.outcomes if outcome.status == "passed"}
