"""Models: the published families with their weights, and a small decoder of Saccade's own.

Begin with `loading.py`, then a file of `families/`. Imports `nn`, `positions`, `batching` and `variants`.
"""

from __future__ import annotations

from .checkpoint import LanguageModel, save
from .config import ModelConfig
from .generation import Sampling, generate
from .language_model import DecoderLM
from .loading import load, new_graph_model
from .model import LoadReport, Model
from .output import ModelOutput
from .protein_tokenizer import ProteinTokenizer
from .tokenizer import Encoding, Tokenizer

__all__ = [
    "DecoderLM",
    "Encoding",
    "LanguageModel",
    "LoadReport",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "ProteinTokenizer",
    "Sampling",
    "Tokenizer",
    "generate",
    "load",
    "new_graph_model",
    "save",
]
