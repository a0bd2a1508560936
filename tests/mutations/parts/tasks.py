"""Faults in tasks on real data."""

from __future__ import annotations

from ..fault import Fault

CLASSIFY, EXAMPLES = "src/saccade/tasks/classify.py", "src/saccade/tasks/_example_task.py"
LOOP, REQUEST = "src/saccade/training/loop.py", "src/saccade/tasks/_request.py"
MLM, TUNING = "src/saccade/tasks/mlm.py", "src/saccade/tasks/_tuning.py"
OF_MLM, OF_TUNING = "tests/tasks/test_mlm.py", "tests/tasks/test_tuning.py"
FORECAST, SERIES = "src/saccade/tasks/forecast.py", "tests/tasks/test_forecast.py"
CLASSES, RUNS = "tests/tasks/test_classify.py", "tests/tasks/test_runs.py"

FAULTS = (
    Fault(
        "class-weight-of-a-part",
        CLASSIFY,
        "return sum(self.weights[label] for label in labels) if self.weights and learning else len(labels)",
        "return len(labels)",
        (CLASSES,),
        "Micro-batches with many rare classes count too little.",
    ),
    Fault(
        "smoothing-while-judging",
        CLASSIFY,
        "if not learning:",
        "if False:",
        (CLASSES,),
        "The validation loss is that of smoothed labels.",
    ),
    Fault(
        "unstratified-split",
        CLASSIFY,
        'classes.setdefault(example.label or "", []).append(n)',
        'classes.setdefault("", []).append(n)',
        (CLASSES,),
        "A rare class may be missing from the validation data.",
    ),
    Fault(
        "stale-epoch",
        EXAMPLES,
        "if epoch != self._epoch[0]:",
        "if False:",
        (CLASSES,),
        "Every epoch has the batches of the first.",
    ),
    Fault(
        "dropout-while-judging",
        "src/saccade/_evaluating.py",
        "    model.eval()\n",
        "    model.train()\n",
        (CLASSES, RUNS),
        "Predictions are made with dropout.",
    ),
    Fault(
        "calibration-bin",
        "src/saccade/tasks/_calibration.py",
        "np.ceil(confidence * bins).astype(int) - 1",
        "np.ceil(confidence * bins).astype(int)",
        (CLASSES,),
        "Confidences are put into the next bin.",
    ),
    Fault(
        "piece-order",
        "src/saccade/models/tokenizers/word_pieces.py",
        "special_tokens=fixed,",
        "special_tokens=list(SPECIAL),",
        (CLASSES,),
        "The same texts give other word pieces in each process.",
    ),
    Fault(
        "baseline-of-all",
        REQUEST,
        "return source.task.split(examples, source.share, source.seed)",
        "return examples, source.task.split(examples, source.share, source.seed)[1]",
        (RUNS,),
        "The baseline learns from the validation data, by which its strength is chosen.",
    ),
    Fault(
        "tie-of-patience",
        LOOP,
        "cost == self.mark and loss < self.mark_loss",
        "False",
        (RUNS,),
        "A run at chance ends before it has learned.",
    ),
    Fault(
        "time-of-the-last-looks",
        LOOP,
        "self.seconds + 3 * self.longest >= 60 * settings.minutes",
        "self.seconds >= 60 * settings.minutes",
        (RUNS,),
        "A run with a budget ends after it.",
    ),
    Fault(
        "task-of-a-folder",
        "src/saccade/training/resume.py",
        "if found != asked:",
        "if False:",
        (RUNS,),
        "A run is resumed as one of another task.",
    ),
    Fault(
        "mask-is-seen",
        MLM,
        "if how < REPLACED:",
        "if how < 0:",
        (OF_MLM,),
        "Pieces to guess stand in the text.",
    ),
    Fault(
        "masks-by-batch",
        MLM,
        "generator = random or np.random.default_rng(zlib.crc32(np.array(ids).tobytes()))",
        "generator = random or np.random.default_rng(len(items))",
        (OF_MLM,),
        "Which pieces of a validation text are hidden hangs on what shares its batch.",
    ),
    Fault(
        "first-window-alone",
        MLM,
        'return windows[:1] if self.long == "cut" else windows',
        "return windows[:1]",
        (OF_MLM,),
        "What stands behind the first window of a text is never read.",
    ),
    Fault(
        "stored-without-changes",
        TUNING,
        'plain[f"{layer}.weight"] = changed(tensor, up, down)',
        'plain[f"{layer}.weight"] = tensor',
        (OF_TUNING,),
        "A run of LoRA stores the weights that it began with.",
    ),
    Fault(
        "scale-of-the-future",
        FORECAST,
        "rows = table.values[: training[-1].end]",
        "rows = table.values",
        (SERIES,),
        "Series are scaled by rows that validate, too.",
    ),
    Fault(
        "future-that-is-trained-on",
        FORECAST,
        "data[rows - held - self.past :]",
        "data[rows - held - self.past - self.horizon :]",
        (SERIES,),
        "Validation judges steps that the model was trained to forecast.",
    ),
    Fault(
        "pooled-centre",
        "src/saccade/tasks/_linear_forecast.py",
        "self.xy / self.count - np.outer(x, y)",
        "self.xy / self.count",
        (SERIES,),
        "The linear baseline has a wrong map where series have means of their own.",
    ),
    Fault(
        "uneven-later-tables",
        "src/saccade/tasks/_series.py",
        "    check_steps(dates, step, places)\n",
        "",
        (SERIES,),
        "A table of days is forecast by what was learned from hours.",
    ),
)
