"""Faults in tasks on real data."""

from __future__ import annotations

from ..fault import Fault

CLASS_TASK, EXAMPLES = "src/saccade/tasks/_class_task.py", "src/saccade/tasks/_example_task.py"
LOOP, REQUEST = "src/saccade/training/loop.py", "src/saccade/tasks/_request.py"
CLASSES, RUNS = "tests/tasks/test_classify.py", "tests/tasks/test_runs.py"
IMAGES = "tests/tasks/test_image.py"

FAULTS = (
    Fault(
        "class-weight-of-a-part",
        CLASS_TASK,
        "return sum(self.weights[label] for label in labels) if self.weights and learning else len(labels)",
        "return len(labels)",
        (CLASSES,),
        "Micro-batches with many rare classes count too little.",
    ),
    Fault(
        "smoothing-while-judging",
        CLASS_TASK,
        "if not learning:",
        "if False:",
        (CLASSES,),
        "The validation loss is that of smoothed labels.",
    ),
    Fault(
        "unstratified-split",
        CLASS_TASK,
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
        "rotation-in-units-of-a-side",
        "src/saccade/tasks/_augmenting.py",
        "aspect = np.cos(turn) / larger, np.sin(turn) / larger, height / width",
        "aspect = np.cos(turn) / larger, np.sin(turn) / larger, 1.0",
        (f"{IMAGES}::test_images_are_changed_as_geometry_has_it",),
        "Images that are not square are sheared when they are turned.",
    ),
    Fault(
        "lower-half-of-sixteen-bits",
        "src/saccade/tasks/_images.py",
        "(values >> 8)",
        "values",
        (f"{IMAGES}::test_every_mode_becomes_what_it_shows",),
        "Images of 16 bits become noise.",
    ),
    Fault(
        "normalisation-of-a-checkpoint",
        "src/saccade/tasks/image.py",
        "PixelStore(ImageInputs.of_folder(model.folder, model.channels), examples)",
        "PixelStore(ImageInputs(model.channels, model.size), examples)",
        (f"{IMAGES}::test_a_new_model_reads_images_as_large_as_they_are",),
        "Mean and deviation of preprocessor_config.json are not used.",
    ),
    Fault(
        "neighbours-of-the-farthest",
        "src/saccade/tasks/_neighbours.py",
        "found[:, :k, None]",
        "found[:, -k:, None]",
        (f"{IMAGES}::test_the_baseline_is_nearest_neighbours",),
        "Shares are taken over other neighbours than the nearest.",
    ),
)
