"""What a run says of itself at its end, and while it runs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from saccade.training import Execution, Settings
from saccade.training.language.evaluation import bigram_loss
from saccade.training.pace import Pace
from saccade.training.run_folder.layout import VERDICT
from saccade.training.verdict import untrained, verdict


def curve(*losses):
    return [{"step": 7 * n, "validation_loss": loss} for n, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("losses", "steps", "expected"),
    [
        ((0.9,), 11, "not a result: the run ended in its warm-up, after 11 of 23 steps"),
        ((0.9,), 29, "one evaluation"),
        ((0.9, 0.7), 29, "the validation loss was still falling"),
        ((0.9, 0.7, 0.71), 29, "the validation loss no longer fell"),
    ],
)
def test_a_verdict_tells_an_unfinished_run_from_a_finished_one(losses, steps, expected):
    (line,) = verdict(curve(*losses), Settings(steps=97, warmup=23), steps)
    assert line.startswith(expected)


def test_a_model_that_is_no_result_is_known_by_its_folder(tmp_path):
    assert untrained(tmp_path) == []
    (tmp_path / VERDICT).write_text("not a result: why\nthe validation loss no longer fell\n")
    assert untrained(tmp_path) == ["not a result: why"]


def test_the_bigram_beside_a_language_model_is_the_formula():
    """p(b | a) = (max(n(ab) - d, 0) + d N(a.) p(b)) / n(a), by plain loops; tokens that nothing follows fall back."""
    generator = torch.Generator().manual_seed(3)
    training, validation = (torch.randint(0, high, (size,), generator=generator) for high, size in ((7, 53), (11, 31)))
    known, asked, size = training.tolist(), validation.tolist(), 11
    share = [(known.count(token) + 1) / (len(known) + size) for token in range(size)]
    pairs = list(itertools.pairwise(known))
    total = 0.0
    for a, b in itertools.pairwise(asked):
        after = [second for first, second in pairs if first == a]
        p = share[b]
        if after:
            p = (max(after.count(b) - 0.75, 0) + 0.75 * len(set(after)) * share[b]) / len(after)
        total -= math.log(p)
    assert bigram_loss(training, validation, size) == pytest.approx(total / 30, rel=1e-12)


def paced(seconds):
    """The lines of a run whose steps take these seconds."""
    times = itertools.accumulate(seconds)
    pace = Pace(lambda: next(times))
    return [pace.stepped() for _ in seconds]


def test_a_run_that_falls_far_behind_its_first_steps_says_so_once(monkeypatch):
    """A neighbour that holds a core, of a PyTorch whose threads spin; longer batches are no neighbour."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    (line,) = filter(None, paced([5.0] + [0.1] * 11 + [0.9] * 31))
    assert "OMP_WAIT_POLICY=PASSIVE" in line and "first ones took 0.1 s" in line
    assert not any(paced([5.0] + [0.1] * 11 + [0.3] * 31))


def test_a_run_whose_threads_are_put_to_sleep_says_so_once():
    times, asleep = itertools.count(), iter([False, False, True, True, True])
    pace = Pace(lambda: next(times), lambda: next(asleep))
    lines = [pace.stepped() for _ in range(6)]
    assert [bool(line) for line in lines] == [False, False, False, True, False, False]
    assert "the same results" in str(lines[3])


def test_an_evaluation_is_no_slow_step():
    times = iter(range(10**6))
    pace = Pace(lambda: next(times) if armed else 0.0)
    armed = True
    for n in range(31):
        assert pace.stepped() is None
        if n % 2:
            for _ in range(97):
                next(times)
            pace.paused()


def test_precision_has_the_names_that_pytorch_uses():
    """A user who writes float32 is not sent to the list of names."""
    names = ("bfloat16", "float16", "float32", "fp32")
    assert [Execution(precision=name).precision for name in names] == ["bf16", "fp16", "no", "no"]
