"""What a folder says about generating texts: generation_config.json, or config.json in older ones."""

from __future__ import annotations

from pathlib import Path

from .reading import read_json
from .settings import Settings

GENERATION = "generation_config.json"
TOKENS = ("eos_token_id", "pad_token_id", "decoder_start_token_id")

# What changes which tokens come, and is not computed here: the values that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_p": (0,),
    "top_h": (1,),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": (),
    "force_words_ids": (),
}


def generation_settings(folder: Path | None, settings: Settings) -> Settings:
    """What the folder says about generation: of config.json only tokens, where there is generation_config.json.

    Raises:
        ValueError: a damaged file, or a setting that asks for what is not computed.
    """
    found = settings
    if folder is not None and (folder / GENERATION).is_file():
        given = read_json(folder / GENERATION)
        if not isinstance(given, dict):
            raise ValueError(f"{folder / GENERATION}: damaged, expected an object of settings")
        tokens = {name: settings.get(name) for name in TOKENS}
        found = Settings(tokens | {n: v for n, v in given.items() if v is not None}, folder / GENERATION)
    for name, neutral in NEUTRAL.items():
        found.only(name, *(neutral or (None,)))
    return found
