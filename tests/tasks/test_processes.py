"""Tasks in two processes: both learn the same, and see the same when they look."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasks.conftest import reviews, write_csv
from tasks.sounds import write_classes
from tasks.test_forecast import series, table
from training.test_processes import launch


@pytest.mark.slow
def test_both_of_two_processes_have_the_same(tmp_path):
    """Or they would not agree on when to stop, and wait for each other forever."""
    write_csv(tmp_path / "reviews.csv", reviews(61, 3))
    table(tmp_path / "series.csv", series(151))
    write_classes(tmp_path / "tones", 41, 3)
    here = Path(__file__)
    launch(str(here.parent / "two_tasks.py"), str(tmp_path), more={"ACCELERATE_USE_CPU": "true"})
    first, second = (torch.load(tmp_path / f"made-{rank}", weights_only=True) for rank in range(2))
    assert list(first) == ["classify", "forecast", "speech"]
    for task, made in first.items():
        assert len(made["looks"]) == 3 and made["looks"] == second[task]["looks"], task
        for name, value in made["weights"].items():
            assert torch.equal(value, second[task]["weights"][name]), (task, name)
