"""Faults in tasks on real data."""

from __future__ import annotations

from ..fault import Fault

CLASSIFY, EXAMPLES = "src/saccade/tasks/classify.py", "src/saccade/tasks/_example_task.py"
TAG, ANSWER = "src/saccade/tasks/tag.py", "src/saccade/tasks/answer.py"
TAGS, ANSWERS = "tests/tasks/test_tag.py", "tests/tasks/test_answer.py"
LOOP, REQUEST = "src/saccade/training/loop.py", "src/saccade/tasks/_request.py"
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
        "second-piece",
        TAG,
        "            firsts.append(len(ids))\n            ids += self._pieces(example.text[spaced:stop])",
        "            ids += self._pieces(example.text[spaced:stop])\n            firsts.append(len(ids) - 1)",
        (TAGS,),
        "The last piece of a word carries its tag, not the first.",
    ),
    Fault(
        "window-edge",
        "src/saccade/tasks/_windows.py",
        "return min(before, after) if place in part else -1.0",
        "return 0.0 if place in part else -1.0",
        (TAGS,),
        "A word is judged in the first window that has it, at whose edge it may stand.",
    ),
    Fault(
        "entity-after-another",
        "src/saccade/tasks/_entities.py",
        'or before in (OUTSIDE, "E", "S") or kind != last:',
        "or before == OUTSIDE or kind != last:",
        (TAGS,),
        "An entity that ended goes on.",
    ),
    Fault(
        "kind-of-the-validation",
        TAG,
        "and all(left[kind] > 1 for kind in kinds[n]):",
        "and kinds:",
        (TAGS,),
        "A rare kind may be in the validation data alone.",
    ),
    Fault(
        "answer-backwards",
        ANSWER,
        "allowed = np.triu(np.tril(np.ones_like(scores, dtype=bool), longest - 1))",
        "allowed = np.tril(np.ones_like(scores, dtype=bool), longest - 1)",
        (ANSWERS,),
        "An answer may end before it begins.",
    ),
    Fault(
        "answer-of-another-window",
        ANSWER,
        "return second + inside[0] - part.start, second + inside[-1] - part.start",
        "return second + inside[0], second + inside[-1]",
        (ANSWERS,),
        "Answers of later windows are learned in the wrong place.",
    ),
    Fault(
        "none-in-one-window",
        ANSWER,
        "none = min(row.none for row in rows) if impossible",
        "none = max(row.none for row in rows) if impossible",
        (ANSWERS,),
        "A long context has no answer as soon as one window has none.",
    ),
)
