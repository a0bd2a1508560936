"""Faults in tasks on real data."""

from __future__ import annotations

from ..fault import Fault

CLASSIFY, EXAMPLES = "src/saccade/tasks/classify.py", "src/saccade/tasks/_example_task.py"
LOOP, REQUEST = "src/saccade/training/loop.py", "src/saccade/tasks/_request.py"
CLASSES, RUNS = "tests/tasks/test_classify.py", "tests/tasks/test_runs.py"
GRAPHS = "tests/tasks/test_graph.py"

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
        "src/saccade/tasks/_class_results.py",
        'classes.setdefault(label or "", []).append(n)',
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
        "test-nodes-to-learn-from",
        "src/saccade/tasks/_graph_data.py",
        'return np.setdiff1d(labelled, self.parts.get("test", []))',
        "return labelled",
        (GRAPHS,),
        "A graph that names only its test nodes is trained on them.",
    ),
    Fault(
        "loop-counted-twice",
        "src/saccade/tasks/_graph_baselines.py",
        "pairs = torch.cat((edges, edges.flip(0), own), 1).unique(dim=1)",
        "pairs = torch.cat((torch.cat((edges, edges.flip(0)), 1).unique(dim=1), own), 1)",
        (GRAPHS,),
        "A node with a loop weighs itself twice in the baseline.",
    ),
    Fault(
        "penalty-of-vectors",
        "src/saccade/tasks/_graph_objective.py",
        "if p.ndim >= 2]",
        "]",
        (GRAPHS,),
        "Biases are held down with the weights.",
    ),
    Fault(
        "weights-of-those-who-read",
        "src/saccade/tasks/_graph_picture.py",
        "return [(edges[0, edges[1] == node], weights[edges[1] == node]) for node in nodes]",
        "return [(edges[1, edges[0] == node], weights[edges[0] == node]) for node in nodes]",
        (GRAPHS,),
        "The picture shows who attends to a node, not what it attends to.",
    ),
)
