"""Decoding settings of a checkpoint as `BeamSearch`, `Sampling` and `Constraints`."""

from __future__ import annotations

from typing import Any

from ..checkpoints.settings import CheckpointSettings, check_computed
from .beam import BeamSearch
from .constraints import Constraints
from .sampling import Sampling

DEFAULT_TOKENS = 128  # without a length in the settings


def published_search(settings: CheckpointSettings, *, drawn: bool | None = None) -> BeamSearch | Sampling:
    """Beam search, sampling or greedy decoding, by the settings.

    Args:
        drawn: whether to sample; None follows `do_sample`.

    Raises:
        ValueError: unsupported settings.
    """
    beams, penalty = settings.count("num_beams", 1), settings.number("repetition_penalty", 1.0)
    drawn = settings.flag("do_sample", False) if drawn is None else drawn
    check_computed(settings, drawn=drawn)
    if beams > 1:
        if drawn:
            raise settings.error("num_beams", "1, since beams are not drawn")
        if penalty != 1.0:
            raise settings.error("repetition_penalty", "1, since beams are not penalised")
        early, n_best = settings.get("early_stopping", False), settings.count("num_return_sequences", 1)
        return BeamSearch(beams, settings.number("length_penalty", 1.0), early, n_best)
    settings.only("num_return_sequences", 1)
    if not drawn:
        return Sampling(temperature=0.0, repetition_penalty=penalty)
    top_k = settings.count("top_k", 50, least=0)  # transformers' default; 0 keeps all
    temperature, top_p = settings.number("temperature", 1.0), settings.number("top_p", 1.0)
    return Sampling(temperature, top_k or None, top_p, repetition_penalty=penalty)


def published_constraints(settings: CheckpointSettings, begun: int = 1, most: int | None = None) -> Constraints:
    """End tokens, lengths, and forced or banned tokens.

    Args:
        begun: number of prompt tokens, included in published lengths. A forced first token applies only after a single
            one.
        most: maximum number of new tokens; None follows the settings.

    Raises:
        ValueError: unsupported settings, or lengths without a new token.
    """
    check_computed(settings)
    if most is None and "max_new_tokens" in settings:
        most = settings.count("max_new_tokens")
    if most is None:
        most = settings.count("max_length", DEFAULT_TOKENS + begun, least=2) - begun
        if most < 1:
            raise settings.error("max_length", f"more than the {begun} tokens that texts begin with")
    least = max(settings.count("min_length", 0, least=0) - begun, 0)
    return Constraints(
        most,
        min(settings.count("min_new_tokens", least, least=0), most),
        named_tokens(settings, "eos_token_id"),
        settings.count("no_repeat_ngram_size", 0, least=0),
        _banned(settings),
        _token(settings, "forced_bos_token_id") if begun == 1 else None,
        _token(settings, "forced_eos_token_id"),
        settings.flag("renormalize_logits", False),
    )


def named_tokens(settings: CheckpointSettings, name: str) -> tuple[int, ...]:
    """Token ids of a setting with one or several, such as `eos_token_id`; () if absent."""
    value = settings.get(name, [])
    tokens: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise settings.error(name, "a token id, or a list of them")
    return tuple(tokens)


def _token(settings: CheckpointSettings, name: str) -> int | None:
    tokens = named_tokens(settings, name)
    if len(tokens) > 1:
        raise settings.error(name, "a single token id")
    return tokens[0] if tokens else None


def _banned(settings: CheckpointSettings) -> tuple[tuple[int, ...], ...]:
    """`bad_words_ids` without single end tokens, as in transformers."""
    words, ends = settings.get("bad_words_ids", []), named_tokens(settings, "eos_token_id")
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise settings.error("bad_words_ids", "a list of lists of tokens")
    return tuple(tuple(word) for word in words if word not in [[end] for end in ends])
