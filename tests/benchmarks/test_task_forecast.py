"""The protocol of the forecast benchmark: which rows give the scale, which windows are judged, what is left out."""

from __future__ import annotations

import csv
import datetime
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from saccade.tasks import Forecast
from saccade.tasks._series._linear import repeated

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "task_forecast.py"
PARTS = {"train": (0, 211), "validation": (211, 301), "test": (301, 417)}
PAST, HORIZON = 29, 7


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("task_forecast_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PARTS", PARTS)
    return module


@pytest.mark.parametrize("dropped", [False, True])
def test_the_last_value_repeated_is_plain_numpys(benchmark, tmp_path, dropped):
    """Over all 110 windows of the test rows, or the 96 of them that fill batches of 32."""
    values = np.random.default_rng(3).normal(size=(431, 3)).cumsum(axis=0) * (1, 10, 100)
    begin = datetime.datetime(2024, 1, 1)
    with (tmp_path / "table.csv").open("w", newline="") as file:
        dates = [str(begin + datetime.timedelta(hours=n)) for n in range(len(values))]
        rows = [(date, *row) for date, row in zip(dates, values.tolist(), strict=True)]
        csv.writer(file).writerows([("date", "a", "b", "c"), *rows])
    files = benchmark.prepare(tmp_path / "table.csv", tmp_path / "data", PAST)
    task = Forecast(past=PAST, horizon=HORIZON)
    task = task.fitted(task.read(files["train"]))
    data = task.read(files["test"])
    outputs = repeated(task.scaled(data.table), data)
    found = benchmark.without_last_batch(task, outputs, data) if dropped else task.scores(outputs, data)

    known = values[:211]
    scaled = (values - known.mean(axis=0)) / known.std(axis=0)
    errors = []
    for now in range(301, 417 - HORIZON + 1):
        for step in range(HORIZON):
            errors.append(scaled[now - 1] - scaled[now + step])
    errors = np.array(errors).reshape(-1, HORIZON, 3)
    assert len(errors) == 110
    errors = errors[:96] if dropped else errors
    assert found["MSE"] == pytest.approx(np.square(errors).mean(), rel=1e-12)
    assert found["MAE"] == pytest.approx(np.abs(errors).mean(), rel=1e-12)
