"""Faults in monitoring, inspection, analysis and benchmarks."""

from __future__ import annotations

from ..fault import Fault

RULES, TALLY = "src/saccade/see/monitoring/_alarms_rules.py", "src/saccade/see/monitoring/_monitor.py"
ALARMS, MONITOR = "tests/monitoring/test_alarms.py", "tests/monitoring/test_monitor.py"
SCORES = "src/saccade/see/inspection/_scores.py"

FAULTS = (
    Fault(
        "collapse-inverted",
        RULES,
        "collapsed = mean <= min(limits.evenness, limits.fallen * before)",
        "collapsed = mean >= min(limits.evenness, limits.fallen * before)",
        (ALARMS,),
        "Healthy layers raise the alarm.",
    ),
    Fault(
        "sink-inverted",
        RULES,
        "if limits.sink <= weight < limits.dead:",
        "if weight < limits.sink:",
        (ALARMS,),
        "Heads without a sink are told as sinks.",
    ),
    Fault(
        "lowest-logit",
        RULES,
        "self.lowest_logit = min(self.lowest_logit, self.logit)",
        "self.lowest_logit = max(self.lowest_logit, self.logit)",
        (ALARMS,),
        "Growth is never seen.",
    ),
    Fault(
        "vanishing-one",
        RULES,
        "if max(query, key) <= limits.gain:",
        "if min(query, key) <= limits.gain:",
        (ALARMS,),
        "One small gradient of two is enough for the alarm.",
    ),
    Fault(
        "alarm-over",
        "src/saccade/see/monitoring/_alarms.py",
        "        self.absent = 0\n",
        "",
        (ALARMS,),
        "An alarm that flickers is over although it goes on.",
    ),
    Fault(
        "loss-scale",
        TALLY,
        "square = (norm.double() / scale) ** 2",
        "square = norm.double() ** 2",
        (MONITOR,),
        "Gradients are logged multiplied by the loss scale.",
    ),
    Fault(
        "mean-of-calls",
        TALLY,
        "means = self._sums / self._rows",
        "means = self._sums / self._calls",
        (MONITOR,),
        "Means over rows are sums.",
    ),
    Fault(
        "previous-word",
        SCORES,
        '"previous": w[:, :, beside, beside - 1],',
        '"previous": w[:, :, beside - 1, beside],',
        ("tests/inspection/test_collect.py", "tests/inspection"),
        "The previous-word score is that of the next word.",
    ),
    Fault(
        "repeat-side",
        SCORES,
        "out[:, 1:] = others[:, :-1]",
        "out[:, :-1] = others[:, 1:]",
        ("tests/inspection/test_words.py", "tests/inspection"),
        "The repeat score looks before the word, not after it.",
    ),
    Fault(
        "previous-token",
        "src/saccade/see/inspection/_roles.py",
        '"previous": w[:, :, i, rows - 1]',
        '"previous": w[:, :, i, rows]',
        ("tests/inspection/test_roles.py",),
        "A head that looks at itself has the role of the previous token.",
    ),
    Fault(
        "luck-of-many",
        "src/saccade/see/inspection/_chance.py",
        "inv_cdf(LUCK / max(count, 1))",
        "inv_cdf(LUCK)",
        ("tests/inspection/test_chance.py", "tests/inspection"),
        "Of many random heads some tell something.",
    ),
    Fault(
        "bootstrap-level",
        "src/saccade/support/_uncertainty.py",
        "[(1 - LEVEL) / 2, (1 + LEVEL) / 2]",
        "[1 - LEVEL, LEVEL]",
        ("tests/test_uncertainty.py",),
        "Intervals are too narrow.",
    ),
    Fault(
        "quartiles",
        "src/saccade/benchmark/attention/statistics.py",
        "(0.25, 0.5, 0.75)",
        "(0.25, 0.5, 0.95)",
        ("tests/benchmark/attention/test_statistics.py",),
        "The upper quartile is another percentile.",
    ),
)
