"""A program that runs `saccade` commands in processes of their own and lets each kill itself at a chosen moment.

Moments are counted, not timed, so that the speed of the machine decides nothing: a tick is each backward pass, each
loss, and each time a file is opened for writing, renamed or removed, or a folder made. At its tick the process sends
itself SIGKILL, before what the tick announces has happened. The processes are forked from one that has imported
everything, which saves each of them the seconds that takes.

Reads lines of JSON, {"arguments": [...], "tick": int or null}; answers each with {"status": int, "ticks": "tewww..."}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile


def count_ticks(counter: str, deadly: int | None) -> None:
    """Count in the file `counter`, a byte each (t training, e evaluating, w writing), and die at the deadly tick."""
    import torch
    import torch.nn.functional as F

    handle, done, paused = os.open(counter, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 0, False

    def tick(kind: bytes) -> None:
        nonlocal done
        done += 1
        os.write(handle, kind)
        if done == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal paused
        if paused:
            return
        paused = True  # what a tick itself does is no tick
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            tick(b"w")
        paused = False

    def ticking(function):
        def wrapper(*given, **options):
            tick(b"t" if torch.is_grad_enabled() else b"e")
            return function(*given, **options)

        return wrapper

    torch.Tensor.backward = ticking(torch.Tensor.backward)
    F.cross_entropy, F.mse_loss, F.ctc_loss = map(ticking, (F.cross_entropy, F.mse_loss, F.ctc_loss))
    sys.addaudithook(hook)


def child(arguments: list[str], counter: str, deadly: int | None) -> None:
    from saccade.cli import main

    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    count_ticks(counter, deadly)
    os._exit(main(arguments))


def serve() -> None:
    import accelerate  # noqa: F401
    import pandas  # noqa: F401
    import rich.progress  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.NamedTemporaryFile() as counter:
            process = os.fork()
            if process == 0:
                child(asked["arguments"], counter.name, asked["tick"])
            _, status = os.waitpid(process, 0)
            ticks = counter.read().decode()
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "ticks": ticks}), flush=True)


if __name__ == "__main__":
    serve()
