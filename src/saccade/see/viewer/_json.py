"""The numbers of a look, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..inspection import Look, Word


MOST_RECEIVING = 20


def as_json(look: Look) -> dict[str, Any]:
    """What ``saccade look --json`` prints.

    ``format`` 1; ``text``; ``model``; ``causal``: whether no word looks at a later one; ``source``: "" or where the
    text came from; ``words``: each with ``text``, ``start`` and ``stop`` (characters of ``text``), ``tokens`` (how
    many) and ``special`` (a token of the model's own, such as ``<s>``); ``findings``: ``kind``, ``sentence``,
    ``value``, ``telling`` (nats), and ``layer``, ``head``, ``query``, ``key`` where they apply (``query`` and ``key``
    are indices of ``words``); ``shown``: the most telling ``layer`` and ``head``; ``heads``: ``layer``, ``head``,
    ``role``, ``decided_by``, ``score``, ``above_chance`` (that score, as the role was decided), ``here`` (each score in
    this text, null where it cannot tell), ``entropy`` (nats) and ``weights``: row q holds the weights of word q on the
    words it sees, the first ones, to 6 decimals.

    ``whole`` is null, or of a text too long for a map of all of it: how many ``words`` and ``tokens`` it has; ``part``:
    the first and last of each run of words that ``words`` and ``weights`` are of (rows miss what fell elsewhere); the
    words that ``received`` most, with their ``number`` in the text (0 and less: special tokens before it) and their
    share of all heads' weight; and ``outside``: sentences about the shown head. ``here`` is of all of the text.

    Example:
        >>> from saccade.inspection import look, open_model
        >>> from saccade.viewer import as_json
        >>> found = as_json(look(open_model(), "The cat sat on the mat."))
        >>> list(found)
        ['format', 'text', 'model', 'causal', 'source', 'words', 'findings', 'shown', 'whole', 'heads']
        >>> found["findings"][0]["sentence"], found["shown"]
        ("The second 'the' looks mostly at 'sat' (.85) in layer 2 head 1", {'layer': 2, 'head': 1})
    """
    seen = look.seen
    return {
        "format": 1,
        "text": seen.text,
        "model": look.model,
        "causal": seen.causal,
        "source": look.source,
        "words": [_word(w) for w in seen.words],
        "findings": [dict(vars(f)) for f in look.findings],
        "shown": {"layer": look.layer, "head": look.head},
        "whole": _whole(look),
        "heads": [_head(look, layer, head) for layer, head in seen.places()],
    }


def _whole(look: Look) -> dict[str, Any] | None:
    whole = look.whole
    if whole is None:
        return None
    most = np.argsort(-whole.received, kind="stable")[:MOST_RECEIVING]
    return {
        "words": look.words,
        "tokens": look.pieces,
        "part": look.runs(range(len(look.seen.words))),
        "received": [
            {"text": whole.words[i].text, "number": whole.number(int(i)), "share": round(float(whole.received[i]), 6)}
            for i in most
        ],
        "outside": list(look.outside),
    }


def _word(word: Word) -> dict[str, Any]:
    tokens = word.last - word.first
    return {"text": word.text, "start": word.start, "stop": word.stop, "tokens": tokens, "special": word.special}


def _head(look: Look, layer: int, head: int) -> dict[str, Any]:
    role = look.measured(layer, head) or {}
    habits = {name: look.habit(name, layer, head) for name in look.habits if name != "entropy"}
    rows = look.seen.weights[layer, head]
    return {
        "layer": layer,
        "head": head,
        "role": role.get("role"),
        "decided_by": role.get("decided_by"),
        "score": role.get("score"),
        "above_chance": role.get("above_chance", {}).get(role.get("decided_by")),
        "here": {name: None if value is None else round(value, 6) for name, value in habits.items()},
        "entropy": round(float(look.habits["entropy"][layer, head]), 6),
        "weights": [[round(float(x), 6) for x in row[:n]] for row, n in zip(rows, look.seen.seen_by, strict=True)],
    }
