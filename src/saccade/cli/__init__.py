"""The command `saccade`: the boundary where errors become one line. The sub-commands are in `_app`.

Exit status: 0 done, 1 errors found by `verify` or nothing that it could test, 2 something the user can fix (one line
on stderr), 130 interrupted by Ctrl-C, 141 where the reader of a pipe left. Anything else that is raised is a bug of
ours and keeps its traceback. SACCADE_TRACEBACK=1 keeps every one.
"""

from __future__ import annotations

import _thread
import sys
import time

TYPE_CHECKING = False  # nothing but built-in modules is imported before `main` can catch Ctrl-C
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` when `arguments` is None) and return the exit status."""
    hook, sys.unraisablehook = sys.unraisablehook, _unraisable
    try:
        from ._run import run  # here, and all else in there, so that Ctrl-C during imports is caught

        return run(arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        sys.unraisablehook = hook


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Python prints and forgets what is raised in callbacks and destructors, of which imports have many: a Ctrl-C that
    came there comes again, as soon as this has returned."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt_soon, ())
    else:
        sys.__unraisablehook__(lost)


def _interrupt_soon() -> None:
    time.sleep(0.01)
    _thread.interrupt_main()
