"""What a folder says about generating texts: generation_config.json, or config.json in older ones."""

from __future__ import annotations

from pathlib import Path

from .reading import read_json
from .settings import Settings

GENERATION = "generation_config.json"
TOKENS = ("eos_token_id", "pad_token_id", "decoder_start_token_id")

# What changes which tokens come, and is not computed here: the values that ask for nothing.
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
# The same, where tokens are drawn.
NEUTRAL_DRAWING: dict[str, tuple[object, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_p": (0,),
    "top_h": (1,),
}


def generation_settings(folder: Path | None, settings: Settings) -> Settings:
    """What the folder says about generation: of config.json only tokens, where there is generation_config.json.

    Raises:
        ValueError: a damaged file.
    """
    if folder is None or not (folder / GENERATION).is_file():
        return settings
    given = read_json(folder / GENERATION)
    if not isinstance(given, dict):
        raise ValueError(f"{folder / GENERATION}: damaged, expected an object of settings")
    tokens = {name: settings.get(name) for name in TOKENS}
    return Settings(tokens | {n: v for n, v in given.items() if v is not None}, folder / GENERATION)


def check_computed(settings: Settings, *, drawn: bool = False) -> None:
    """ValueError where the settings ask for what is not computed; `drawn`: where tokens are drawn."""
    for name, neutral in (NEUTRAL | NEUTRAL_DRAWING if drawn else NEUTRAL).items():
        settings.only(name, *(neutral or (None,)))
