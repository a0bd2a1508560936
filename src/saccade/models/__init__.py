"""Models: the published families with their weights, and a small decoder of Saccade's own.

Begin with `loading.py`, then a file of `families/`. Imports `nn`, `positions`, `batching` and `variants`.
"""

from __future__ import annotations

from .checkpoint import LanguageModel, save
from .config import ModelConfig
from .decoding.sampling import Sampling
from .embedding import embed
from .generation import generate
from .language_model import DecoderLM
from .loading import load
from .model import LoadReport, Model
from .output import ModelOutput
from .text_tokenizer import TextTokenizer
from .tokenizer import Encoding, Tokenizer

__all__ = [
    "DecoderLM",
    "Encoding",
    "LanguageModel",
    "LoadReport",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "Sampling",
    "TextTokenizer",
    "Tokenizer",
    "embed",
    "generate",
    "load",
    "save",
]
