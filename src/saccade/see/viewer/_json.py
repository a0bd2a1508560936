"""The numbers of a look, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..inspection import Look, Word


MOST_RECEIVING = 20


def as_json(look: Look) -> dict[str, Any]:
    """The contents of ``saccade look --json``.

    ``format`` 1; ``text``; ``model``; ``other_layers``: "" or what the model's layers without attention are;
    ``causal``: whether no word attends to a later one; ``source``: "" or where the text came from; ``words``: each with
    ``text``, ``start`` and ``stop`` (characters of ``text``), ``tokens`` (their number) and ``special`` (a special
    token, such as ``<s>``); ``findings``: ``kind``, ``sentence``, ``value``, ``telling`` (nats), and ``layer``,
    ``head``, ``query``, ``key`` where they apply (``query`` and ``key`` are indices of ``words``); ``shown``: the
    ``layer`` and ``head`` of the first finding; ``heads``: ``layer``, ``head``, ``role``, ``decided_by``, ``score``,
    ``above_chance`` (that score, as for the role), ``here`` (each score in this text, null where the text has no case),
    ``entropy`` (nats) and ``weights``: row q holds the weights of word q on the words it sees, the first ones, to 6
    decimals.

    ``whole`` is null, or for a text too long for a full map: its numbers of ``words`` and ``tokens``; ``part``: the
    first and last of each run of words in ``words`` and ``weights`` (rows miss the weight on other words); the words
    that ``received`` most, with their ``number`` in the text (0 and less: special tokens before it) and their share of
    all heads' weight; and ``outside``: sentences about the shown head. ``here`` is for the whole text.

    Example:
        >>> from saccade.inspection import look, open_model
        >>> from saccade.viewer import as_json
        >>> found = as_json(look(open_model(), "The cat sat on the mat."))
        >>> list(found)
        ['format', 'text', 'model', 'other_layers', 'causal', 'source', 'words', 'findings', 'shown', 'whole', 'heads']
        >>> found["findings"][0]["sentence"], found["shown"]
        ("The second 'the' looks mostly at 'sat' (.85) in layer 2 head 1", {'layer': 2, 'head': 1})
    """
    map_ = look.seen
    return {
        "format": 1,
        "text": map_.text,
        "model": look.model,
        "other_layers": look.other_layers,
        "causal": map_.causal,
        "source": look.source,
        "words": [_word(w) for w in map_.words],
        "findings": [dict(vars(f)) for f in look.findings],
        "shown": {"layer": look.layer, "head": look.head},
        "whole": _whole(look),
        "heads": [_head(look, layer, head) for layer, head in map_.places()],
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
