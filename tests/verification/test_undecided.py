"""Each option that is named where it remains open how to call a target leads to a report."""

from __future__ import annotations

import pytest

from saccade.cli import main

SOURCE = '''
import math
from torch import nn


class Either(nn.Module):
    """What `thing` is its shape decides: a context of x's width, or a mask."""

    def __init__(self, dim=24):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x, thing):
        is_context = thing is not None and thing.is_floating_point() and thing.shape[-1] == x.shape[-1]
        other = thing if is_context else x
        scores = self.query(x) @ self.key(other).mT / math.sqrt(x.shape[-1])
        if thing is not None and not is_context:
            scores = scores.masked_fill(~thing.bool(), -math.inf)
        return scores.softmax(-1) @ self.value(other)


def odd(q, k, v, frobnication):
    return (q @ k.mT / math.sqrt(q.shape[-1]) * frobnication).softmax(-1) @ v
'''


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "called"),
    [
        ("Either", {"--form cross": "x and thing each", "--mask thing": "thing (queries, keys)"}, "forward(x, thing)"),
        ("odd", {"--arg frobnication=VALUE": "frobnication=1.0"}, "odd(q, k, v, frobnication=1.0)"),
    ],
)
def test_each_option_leads_to_a_report(name, options, called, tmp_path, capsys):
    file = tmp_path / "undecided.py"
    file.write_text(SOURCE)
    asked = ["verify", f"{file}:{name}", "--only", "scale"]
    assert main(asked) == 2
    told = [line.strip() for line in capsys.readouterr().err.splitlines() if line.startswith("  --")]
    assert {line.split("  ")[0] for line in told} == set(options)
    for option, words in options.items():
        assert main([*asked, *option.replace("VALUE", "1.0").split()]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert called in out
        assert words in out
