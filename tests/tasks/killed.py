"""A run of a task, killed in training, in evaluating and in writing, and resumed."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from tasks.test_kills import result

MOMENTS = "ewt"


def ends_with_the_same_bits(server, folder: Path, arguments: list[str]) -> None:
    """Each run is killed in one kind of moment, then once more at any, and ends as one that nobody disturbed."""

    def command(out):
        return [*arguments, "--out", str(out), "--no-tensorboard"]

    status, ticks = server(command(folder / "whole"))
    assert status == 0
    expected = result(folder / "whole")
    draws = random.Random(11)
    for moment in MOMENTS:
        out = folder / f"killed-{moment}"
        tick = draws.choice([number for number, kind in enumerate(ticks, 1) if kind == moment])
        assert server(command(out), tick)[0] == -signal.SIGKILL
        again = draws.randrange(1, len(ticks) - tick + 2)
        status, _ = server([*command(out), *(["--resume"] if out.exists() else [])], again)
        if status == -signal.SIGKILL:
            status, _ = server([*command(out), *(["--resume"] if out.exists() else [])])
        assert status == 0
        assert result(out) == expected
