"""Language models: a small decoder, its tokenizer, its files on disk, and generation.

Begin with `language_model.py`. Imports `nn`, `positions` and `variants`.
"""

from __future__ import annotations

from .checkpoint import LanguageModel, load, save
from .config import ModelConfig
from .generation import Sampling, generate
from .language_model import DecoderLM
from .tokenizer import Encoding, Tokenizer

__all__ = ["DecoderLM", "Encoding", "LanguageModel", "ModelConfig", "Sampling", "Tokenizer", "generate", "load", "save"]
