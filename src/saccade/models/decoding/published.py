"""How a checkpoint's own files want its texts to be found, as values: the search, and what texts keep to."""

from __future__ import annotations

from typing import Any

from ..checkpoints.settings import Settings
from .beam import BeamSearch
from .constraints import Constraints
from .sampling import Sampling

DEFAULT_TOKENS = 128  # where the files name no length


def published_search(settings: Settings) -> BeamSearch | Sampling:
    """Beam search, sampling, or the likeliest token: as the settings say."""
    beams = settings.count("num_beams", 1)
    if settings.flag("do_sample", False):
        if beams > 1:
            raise settings.error("num_beams", "1, since beams are not drawn")
        top_k = settings.count("top_k", 50, least=0)  # transformers' default; 0 keeps all
        return Sampling(settings.number("temperature", 1.0), top_k or None, settings.number("top_p", 1.0))
    if beams == 1:
        return Sampling(temperature=0.0)
    early = settings.get("early_stopping", False)
    return BeamSearch(beams, settings.number("length_penalty", 1.0), early)


def published_constraints(settings: Settings) -> Constraints:
    """Ends, lengths and forced tokens. Published lengths count the token that a target begins with."""
    most = settings.get("max_new_tokens")
    if most is None:
        most = settings.count("max_length", DEFAULT_TOKENS + 1, least=2) - 1
    least = settings.get("min_new_tokens")
    if least is None:
        least = max(settings.count("min_length", 0, least=0) - 1, 0)
    return Constraints(
        most,
        min(least, most),
        named_tokens(settings, "eos_token_id"),
        settings.count("no_repeat_ngram_size", 0, least=0),
        _banned(settings),
        _token(settings, "forced_bos_token_id"),
        _token(settings, "forced_eos_token_id"),
    )


def named_tokens(settings: Settings, name: str) -> tuple[int, ...]:
    """A setting that is a token or several, such as `eos_token_id`; () where there is none."""
    value = settings.get(name, [])
    tokens: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise settings.error(name, "a token's number, or several")
    return tuple(tokens)


def _token(settings: Settings, name: str) -> int | None:
    tokens = named_tokens(settings, name)
    if len(tokens) > 1:
        raise settings.error(name, "one token's number")
    return tokens[0] if tokens else None


def _banned(settings: Settings) -> tuple[tuple[int, ...], ...]:
    """`bad_words_ids` without end tokens alone, which are left out there as well."""
    words, ends = settings.get("bad_words_ids", []), named_tokens(settings, "eos_token_id")
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise settings.error("bad_words_ids", "a list of lists of tokens")
    return tuple(tuple(word) for word in words if word not in [[end] for end in ends])
