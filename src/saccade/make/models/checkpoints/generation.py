"""Settings of text generation, from generation_config.json, or from config.json in older folders."""

from __future__ import annotations

from pathlib import Path

from .reading import read_json
from .settings import CheckpointSettings

GENERATION = "generation_config.json"
TOKENS = ("eos_token_id", "pad_token_id", "decoder_start_token_id")

# Settings that change the generated tokens and are not supported, with the values that have no effect.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": (),
    "force_words_ids": (),
    "stop_strings": ([],),
    "watermarking_config": (),
    "token_healing": (False,),
    "dola_layers": (),
    "max_time": (),
}
# The same for sampling.
NEUTRAL_DRAWING: dict[str, tuple[object, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_p": (0,),
    "top_h": (1,),
}


def generation_settings(folder: Path | None, settings: CheckpointSettings) -> CheckpointSettings:
    """Generation settings of a folder. With generation_config.json, config.json gives only the special tokens.

    Raises:
        ValueError: the file is damaged.
    """
    if folder is None or not (folder / GENERATION).is_file():
        return settings
    given = read_json(folder / GENERATION)
    if not isinstance(given, dict):
        raise ValueError(f"{folder / GENERATION}: damaged, expected an object of settings")
    tokens = {name: settings.get(name) for name in TOKENS}
    return CheckpointSettings(tokens | {n: v for n, v in given.items() if v is not None}, folder / GENERATION)


def check_computed(settings: CheckpointSettings, *, drawn: bool = False) -> None:
    """ValueError if the settings use unsupported features; `drawn`: also check those of sampling."""
    for name, neutral in (NEUTRAL | NEUTRAL_DRAWING if drawn else NEUTRAL).items():
        settings.only(name, *(neutral or (None,)))
