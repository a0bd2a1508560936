"""The numbers of studies, for programs: dictionaries for JSON, rows for CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...support._plain_values import plain_values
from ._compare import ModelComparison
from ._coreference import Coreference
from ._corpus import THIRDS, CorpusScores, deviation, mean
from ._probe import Probe
from ._scores import SCORES
from ._syntax import Syntax
from ._tally import AnswerShare, AnswerTally

QUANTILES = (0.1, 0.5, 0.9)
COLUMNS = ("study", "model", "score", "layer", "head", "value", "deviation", "chance", "count")
"""The columns of the tables that `saccade look --out FILE.csv` writes."""


def as_numbers(study: CorpusScores | ModelComparison | Syntax | Coreference | Probe) -> dict[str, Any]:
    """The numbers of a study as plain dictionaries and lists, as `saccade look --json` prints them.

    Of `CorpusScores`: ``texts``, ``skipped``, ``thirds`` and ``heads``, each with ``role``, ``decided_by`` and
    ``scores`` (``mean``, ``deviation``, ``half_width`` of the 95 % interval, ``quantiles``, ``chance``,
    ``above_chance``, ``texts``). Of `ModelComparison`: ``thirds`` and ``changes``. Of `Syntax`: ``relations``. Of
    `Coreference`: ``kinds``, each with ``best``, ``offset`` and ``heads``: right answers by layer and head. Of `Probe`:
    ``layers``. None stands for an unknown number.

    Example:
        >>> from saccade.analysis import Text, as_numbers, study_corpus
        >>> from saccade.inspection import open_model
        >>> words = "The owl sat in the old oak. It saw a mouse near the barn, and it flew down."
        >>> numbers = as_numbers(study_corpus(open_model(), [Text("owl", words)]))
        >>> list(numbers), numbers["texts"]
        (['model', 'texts', 'skipped', 'thirds', 'heads'], [{'name': 'owl', 'tokens': 28}])
        >>> numbers["heads"][5]["role"]
        'previous'
    """
    makers: dict[type, Callable[[Any], dict[str, Any]]] = {
        CorpusScores: _corpus,
        ModelComparison: _comparison,
        Syntax: _syntax,
        Coreference: _coreference,
        Probe: _probe,
    }
    return plain_values(makers[type(study)](study))


def as_rows(study: CorpusScores | Syntax | Coreference | Probe) -> Iterator[tuple[Any, ...]]:
    """The numbers of a study as rows of `COLUMNS`: one row for each head and score, relation or kind of mention.

    A relation is written "nsubj, dependent to head". A probe gives two rows for every layer, "accuracy" and "control",
    without a head; their chance is the share of the most frequent label.

    Example:
        >>> from saccade.analysis import COLUMNS, Text, as_rows, study_corpus
        >>> from saccade.inspection import open_model
        >>> words = "The owl sat in the old oak. It saw a mouse near the barn, and it flew down."
        >>> rows = list(as_rows(study_corpus(open_model(), [Text("owl", words)])))
        >>> dict(zip(COLUMNS, rows[0][:5]))
        {'study': 'corpus', 'model': 'embedded', 'score': 'previous', 'layer': 0, 'head': 0}
    """
    if isinstance(study, CorpusScores):
        for name in SCORES:
            held = study.mean(name), study.deviation(name), study.by_chance(name), study.counts(name)
            for layer, head in np.argwhere(np.isfinite(held[0])).tolist():
                yield ("corpus", study.model, name, layer, head, *(plain_values(x[layer, head]) for x in held))
        return
    if isinstance(study, Probe):
        for knows in study.layers:
            for name, value, chance in (
                ("accuracy", knows.accuracy, study.majority_accuracy),
                ("control", knows.control, None),
            ):
                yield ("probe", study.model, name, knows.layer, None, value, None, chance, study.words[1])
        return
    kind = "syntax" if isinstance(study, Syntax) else "coreference"
    for key, tally in study.tallies.items():
        name = key if isinstance(key, str) else ", ".join(key)
        for layer, heads in enumerate(study.heads):
            for head in range(heads):
                answer = tally.of_head(layer, head)
                yield (kind, study.model, name, layer, head, answer.share, None, None, answer.cases)


def _corpus(study: CorpusScores) -> dict[str, Any]:
    scores = {name: _by_head(study, name) for name in SCORES}
    heads = []
    for layer, count in enumerate(study.heads):
        for head in range(count):
            role, decided_by = study.role(layer, head)
            own = {name: {what: _at(held, layer, head) for what, held in of.items()} for name, of in scores.items()}
            heads.append({"layer": layer, "head": head, "role": role, "decided_by": decided_by, "scores": own})
    return {
        "model": study.model,
        "texts": [{"name": name, "tokens": n} for name, n in zip(study.texts, study.tokens, strict=True)],
        "skipped": list(study.skipped),
        "thirds": {name: _thirds(study, name) for name in SCORES},
        "heads": heads,
    }


def _by_head(study: CorpusScores, name: str) -> dict[str, Any]:
    """Arrays (layers, heads) of everything measured for one score."""
    return {
        "mean": study.mean(name),
        "deviation": study.deviation(name),
        "half_width": study.half_width(name),
        "quantiles": dict(zip(map(str, QUANTILES), study.quantiles(name, QUANTILES), strict=True)),
        "chance": study.by_chance(name),
        "above_chance": study.above(name),
        "texts": study.counts(name),
    }


def _at(held: Any, layer: int, head: int) -> Any:
    return {k: _at(v, layer, head) for k, v in held.items()} if isinstance(held, dict) else held[layer, head]


def _thirds(study: CorpusScores, name: str) -> dict[str, Any]:
    values = study.thirds(name)
    average, spread = mean(values), deviation(values)
    return {third: {"mean": average[k], "deviation": spread[k]} for k, third in enumerate(THIRDS)}


def _comparison(study: ModelComparison) -> dict[str, Any]:
    thirds = {}
    for name in SCORES:
        difference, wide = study.thirds(name)
        thirds[name] = {third: {"difference": difference[k], "half_width": wide[k]} for k, third in enumerate(THIRDS)}
    return {
        "before": study.before.model,
        "after": study.after.model,
        "texts": list(study.before.texts),
        "by_head": study.by_head,
        "thirds": thirds,
        "changes": [change._asdict() for change in study.changes()] if study.by_head else [],
    }


def _tally(tally: AnswerTally) -> dict[str, Any]:
    layer, head = tally.best
    offset, answer = tally.best_offset
    of_head, of_offset = tally.held_out
    return {
        "cases": tally.total,
        "best": {"layer": layer, "head": head, **_answer(tally.of_head(layer, head)), "held_out": _answer(of_head)},
        "offset": {"offset": offset, **_answer(answer), "held_out": _answer(of_offset)},
        "heads": [[tally.of_head(i, j).right for j in range(count)] for i, count in enumerate(tally.heads)],
    }


def _answer(answer: AnswerShare) -> dict[str, Any]:
    return {"right": answer.right, "cases": answer.cases, "share": answer.share, "interval": list(answer.interval)}


def _named(study: object, *names: str) -> dict[str, Any]:
    return {name: getattr(study, name) for name in names}


def _syntax(study: Syntax) -> dict[str, Any]:
    return {
        **_named(study, "model", "causal", "sentences", "too_long", "words", "missing", "together"),
        "relations": [
            {"relation": name, "direction": way, "ahead": study.ahead[name, way], **_tally(tally)}
            for (name, way), tally in study.tallies.items()
        ],
    }


def _coreference(study: Coreference) -> dict[str, Any]:
    return {
        **_named(study, "model", "documents", "pieces", "words", "missing", "out_of_reach"),
        "kinds": [
            {
                "kind": kind,
                **_tally(tally),
                "nearest": _answer(study.nearest[kind]),
                "same_word": _answer(study.same_word[kind]),
            }
            for kind, tally in study.tallies.items()
        ],
    }


def _probe(study: Probe) -> dict[str, Any]:
    return {
        "model": study.model,
        "labels": list(study.labels),
        "majority": {
            "label": study.majority,
            "accuracy": study.majority_accuracy,
            "interval": list(study.majority_interval),
        },
        "words": dict(zip(("learned", "tested"), study.words, strict=True)),
        "sentences": dict(zip(("learned", "tested"), study.sentences, strict=True)),
        "left_out": {"not_needed": study.left, "too_long": study.too_long, "words": study.missing},
        "layers": [{**layer._asdict(), "selectivity": layer.selectivity} for layer in study.layers],
    }
