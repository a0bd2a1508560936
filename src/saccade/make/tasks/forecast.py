"""`forecast`: the next steps of several series, by PatchTST.

Values are scaled by mean and deviation of the training rows; errors are of scaled values, so that all series count
alike.

Shape legend: B windows of a batch, S steps of the past, F steps of the forecast, C series, N windows of all, T rows.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator.nn.stacks import LayerObserver
from ...support._tables import Table
from .._task_registry import ForecastOptions
from ..models import Model, load
from ..models.families.patchtst import PatchTST
from ..models.loading import new_model
from ._example_task import Batch, ExampleTask
from ._series._dates import continued
from ._series._gaps import FILLS
from ._series._linear import linear, repeated
from ._series._picture import forecast_picture, forecast_table
from ._series._table import SeriesTable, SeriesWindow, Windows, mean_and_deviation, read_series, scaled
from ._task import Baseline, Details, Tested
from ._temporary import kept_while_used, temporary_folder

Item = tuple[Tensor, Tensor]
"""Scaled past (S, C) and future (F, C) of a window; the future is shorter where the table ends."""


@dataclasses.dataclass(frozen=True)
class Forecast(ForecastOptions, ExampleTask):
    r"""The next steps of the series in a table.

    The last share of the rows, at least `horizon` of them, is the validation part; its windows may look back into
    training rows. Windows start at every row. The loss is the mean squared error of scaled values. Dates may be hours,
    days, work days, weeks, months or years apart. A test or a prediction finds the series by name. A picture draws the
    last two windows that do not overlap.

    Args:
        date: the column of dates, in ISO 8601, at even steps.
        columns: names of the series, separated by commas as a line of a .csv; None: all columns except the dates.
        fill: of dates and numbers that are missing: "none": an error that names them; "previous": the number before;
            "linear": on a line to the next number, which may lie in the future of a window.
        past: S, steps that the model reads.
        horizon: F, steps that it forecasts.
        layers, heads, width, hidden, dropout: of a new model; `hidden` is the width inside its feed-forward layers.
        patch, stride: steps in a patch, and from one patch to the next.
        names: of the series; learned from the training data, as are `means` and `deviations` of their training rows,
            and the `step` between dates.

    Raises:
        ValueError: an option outside of its range.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "power.csv")
        ...     _ = path.write_text("date,load\n" + "".join(f"2024-01-{day:02},{day}\n" for day in range(1, 31)))
        ...     windows = saccade.tasks.Forecast(past=20, horizon=5).read(path)
        >>> len(windows)
        6
    """

    names: tuple[str, ...] = ()
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    step: str | None = None

    unit = "windows"
    learned = ("names", "means", "deviations", "step")
    requires = ("pandas",)
    extra = "forecast"

    def __post_init__(self) -> None:
        for name in ("past", "horizon", "layers", "heads", "width", "hidden", "patch", "stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.fill not in FILLS:
            raise ValueError(f"fill: expected one of {', '.join(map(repr, FILLS))}, got {self.fill!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: must be in [0, 1), got {self.dropout}")
        if self.width % self.heads:
            raise ValueError(f"heads: must divide the width, got heads={self.heads} and width={self.width}")
        if self.past <= self.patch:
            raise ValueError(f"past: must be more than the steps of a patch, got past={self.past}, patch={self.patch}")

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> Windows:
        """All windows that lie in the table."""
        window = {"past": self.past, "horizon": self.horizon}
        table = read_series(path, self.date, self._wanted(), window=window, step=self.step, fill=self.fill)
        starts = range(len(table.values) - self.past - self.horizon + 1)
        return Windows(table, self.past, self.horizon, starts)

    def split(self, data: Windows, share: float, seed: int) -> tuple[Windows, Windows]:  # type: ignore[override]
        """Training and validation windows. Validation windows have their future in the last rows, and may look back at
        training rows."""
        rows = len(data.table.values)
        held = max(round(share * rows), self.horizon)
        count = rows - held - self.past - self.horizon + 1
        if count < 1:
            raise ValueError(
                f"{data.table.path}: {rows} rows, expected at least {held + self.past + self.horizon}: {held} to "
                f"validate, and one window of past={self.past} and horizon={self.horizon} to train on"
            )
        return data[:count], data[rows - held - self.past :]

    def fitted(self, training: Windows) -> Forecast:  # type: ignore[override]
        table = training.table
        means, deviations = mean_and_deviation(table.values[: training[-1].end])
        return dataclasses.replace(
            self,
            names=table.names,
            means=tuple(means.tolist()),
            deviations=tuple(deviations.tolist()),
            step=table.step,
        )

    def inputs(self, texts: Sequence[str]) -> Windows:
        raise ValueError(
            "inputs: forecast reads a file of series, .csv, .tsv or .jsonl, no texts or standard input; got the text "
            f"{texts[0]!r:.40}"
        )

    def read_inputs(self, path: Path) -> Windows:
        """The last window of a table, whose future is unknown."""
        window = {"past": self.past}
        table = read_series(path, self.date, self._wanted(), window=window, step=self.step, fill=self.fill)
        now = len(table.values)
        return Windows(table, self.past, self.horizon, range(now - self.past, now - self.past + 1))

    def encode(self, model: Model, examples: Sequence[SeriesWindow]) -> list[Item]:
        scaled = {
            table: torch.from_numpy(self.scaled(table)).float() for table in {window.table for window in examples}
        }
        return [
            (scaled[window.table][window.start : window.now], scaled[window.table][window.now : window.end])
            for window in examples
        ]

    def length(self, item: Item) -> int:
        return len(item[0])

    def collate(self, model: Model, items: Sequence[Item], random: np.random.Generator | None = None) -> Batch:
        batch = {"past": torch.stack([past for past, _ in items])}
        if all(len(future) == self.horizon for _, future in items):
            batch["future"] = torch.stack([future for _, future in items])
        return batch

    def token_names(self, model: Model, batch: Batch) -> list[str]:
        """The first and last step of each patch, counted back from the present."""
        assert isinstance(model, PatchTST)
        ends = range(-((model.steps - model.patch) // model.stride) * model.stride, 1, model.stride)
        return ["[cls]"] * (model.cls is not None) + [f"{end - model.patch + 1} to {end}" for end in ends]

    def scaled(self, table: SeriesTable) -> np.ndarray:
        """All rows (T, C), scaled as the training rows. ValueError for values far outside of their range."""
        return scaled(table, np.array(self.means), np.array(self.deviations))

    def _wanted(self) -> Sequence[str] | None:
        """The series to read: the learned ones of a fitted task, else the option's; None for all."""
        if self.names or self.columns is None:
            return self.names or None
        names = [name.strip() for name in next(csv.reader([self.columns], skipinitialspace=True), [])]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"columns: expected names separated by commas, each once, got {self.columns!r}")
        return names

    # --- model and loss -----------------------------------------------------------------------------------------------

    def new_model(self, training: Sequence[SeriesWindow]) -> Model:
        folder = temporary_folder()
        model = new_model(
            folder,
            head="prediction",
            model_type="patchtst",
            context_length=self.past,
            prediction_length=self.horizon,
            num_input_channels=len(self.names),
            patch_length=self.patch,
            patch_stride=self.stride,
            d_model=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            ffn_dim=self.hidden,
            norm_type="batchnorm",
            pre_norm=False,
            positional_encoding_type="random",
            positional_dropout=self.dropout,
            path_dropout=self.dropout,
            ff_dropout=self.dropout,
            scaling="std",
            pooling_type=None,
            loss="mse",
        )
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.reset_parameters()  # as in the published code: normal with 0.02 is too little for a width of 16
        return kept_while_used(model, folder)

    def open_model(self, source: Path | str) -> Model:
        model = load(source, head="prediction", dtype=torch.float32)
        published = {"context_length": 32, "prediction_length": 24, "num_input_channels": 1}  # what files leave out
        found = tuple(model.settings.count(name, default) for name, default in published.items())
        asked = (self.past, self.horizon, len(self.names))
        if found != asked:
            told = "past {}, horizon {}, {} series"
            raise ValueError(
                f"{source}: is a model of {told.format(*found)}; asked for {told.format(*asked)}: expected the same"
            )
        return model

    def forward(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> Tensor:
        """Scaled forecasts (B, F, C)."""
        result = model(past_values=batch["past"], **({} if observe is None else {"observe": observe}))
        return result.prediction_outputs.float()

    def loss(self, result: Tensor, batch: Batch, *, learning: bool) -> Tensor:
        return F.mse_loss(result, batch["future"])

    def outputs(self, model: nn.Module, result: Tensor, batch: Batch) -> list[np.ndarray]:
        """The scaled forecast (F, C) of each window, float32."""
        return list(result.cpu().numpy())

    # --- metric and picture -------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[np.ndarray], data: Windows) -> dict[str, float]:  # type: ignore[override]
        squared, absolute = self._errors(outputs, data)
        return {"MSE": float(squared.mean()), "MAE": float(absolute.mean())}

    @property
    def protocol(self) -> str:
        return (
            f"every window of {self.past} + {self.horizon} steps, errors over all steps and series together, each "
            "series scaled by mean and deviation of the training rows"
        )

    def cost(self, scores: Mapping[str, float]) -> float:
        return scores["MSE"]

    def baselines(  # type: ignore[override]
        self, model: Model, training: Windows, validation: Windows, tested: Windows
    ) -> list[Baseline]:
        known, judged, asked = ((self.scaled(part.table), part) for part in (training, validation, tested))
        forecasts, kind = linear(known, judged, asked)
        return [Baseline("last value repeated", repeated(*asked)), Baseline(f"linear ({kind})", forecasts)]

    def constant(self, model: Model, training: Windows, tested: Windows) -> Baseline:  # type: ignore[override]
        """Scaled values have the mean 0."""
        mean = np.zeros((self.horizon, len(self.names)))
        return Baseline("the mean of the training rows", [mean] * len(tested))

    def details(self, outputs: Sequence[np.ndarray], data: Windows) -> Details:  # type: ignore[override]
        """`steps` with the errors of each step, and `series` with those of each series, also in its own unit."""
        squared, absolute = self._errors(outputs, data)
        by_series = {
            name: {"MSE": float(squared[:, n].mean()), "MAE": float(absolute[:, n].mean())}
            for n, name in enumerate(self.names)
        }
        for one, deviation in zip(by_series.values(), self.deviations, strict=True):
            one["MAE unscaled"] = one["MAE"] * deviation
        steps = {"MSE": squared.mean(axis=1).tolist(), "MAE": absolute.mean(axis=1).tolist()}
        return Details({"steps": steps, "series": by_series}, forecast_table(steps, by_series))

    def picture(self, tested: Tested, kind: str) -> bytes:
        assert isinstance(tested.data, Windows)
        forecasts = {"this model": tested.outputs, **{baseline.name: baseline.outputs for baseline in tested.baselines}}
        errors = [row["MSE"] for row in tested.details["series"].values()]
        return forecast_picture(tested.data, forecasts, errors, (np.array(self.means), np.array(self.deviations)), kind)

    def shown(self, example: SeriesWindow, output: np.ndarray) -> dict[str, Any]:
        """The columns of the table, the dates first; values in their own units."""
        values = output.astype(np.float64) * np.array(self.deviations) + np.array(self.means)
        dates = continued(example.table.last, example.table.step, self.horizon)
        return {self.date: dates, **dict(zip(self.names, values.T.tolist(), strict=True))}

    def line(self, shown: Mapping[str, Any]) -> str:
        columns = [[name, *(cell if name == self.date else f"{cell:.6g}" for cell in shown[name])] for name in shown]
        return str(Table((), list(zip(*columns, strict=True)), "r"))

    def _errors(self, outputs: Sequence[np.ndarray], data: Windows) -> tuple[np.ndarray, np.ndarray]:
        """Squared and absolute errors (F, C), each a mean over the windows."""
        truth = self.scaled(data.table)
        squared, absolute = (np.zeros((self.horizon, len(self.names))) for _ in range(2))
        for output, window in zip(outputs, data, strict=True):
            error = output - truth[window.now : window.end]
            squared += error**2
            absolute += abs(error)
        return squared / len(data), absolute / len(data)
