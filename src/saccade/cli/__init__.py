"""The command `saccade`. Sub-commands are in `_app`; errors that users can fix become one line.

Exit status: 0 success, 1 failed checks of `verify` or nothing to check, 2 an error that the user can fix (one line on
stderr), 130 interrupted by Ctrl-C, 141 the reader of a pipe has left. Other exceptions are bugs and keep their
traceback. SACCADE_TRACEBACK=1 keeps every traceback.
"""

from __future__ import annotations

import _thread
import sys
import time

TYPE_CHECKING = False  # only built-in modules may be imported before `main` can catch Ctrl-C
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` when `arguments` is None) and return the exit status."""
    hook, sys.unraisablehook = sys.unraisablehook, _unraisable
    try:
        from ._run import run  # imported here, so that Ctrl-C during imports is caught

        return run(arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        sys.unraisablehook = hook


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Repeat a Ctrl-C that was raised in a callback or destructor, where Python prints exceptions and continues.
    Imports run many of these."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt_soon, ())
    else:
        sys.__unraisablehook__(lost)


def _interrupt_soon() -> None:
    time.sleep(0.01)
    _thread.interrupt_main()
