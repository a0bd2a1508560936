"""Models: the published families with their weights, and a small decoder of Saccade's own.

Begin with `loading.py`, then a file of `families/`. Imports `nn`, `positions`, `batching` and `variants`.
"""

from __future__ import annotations

from .checkpoint import LanguageModel, save
from .config import ModelConfig
from .decoding.beam import BeamSearch
from .decoding.constraints import Constraints
from .decoding.generated import Generated
from .decoding.sampling import Sampling
from .embedding import embed
from .generation import generate
from .language_model import DecoderLM
from .loading import load, new_graph_model
from .model import LoadReport, Model
from .output import ModelOutput
from .protein_tokenizer import ProteinTokenizer
from .text_tokenizer import TextTokenizer
from .tokenizer import Encoding, Tokenizer

__all__ = [
    "BeamSearch",
    "Constraints",
    "DecoderLM",
    "Encoding",
    "Generated",
    "LanguageModel",
    "LoadReport",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "ProteinTokenizer",
    "Sampling",
    "TextTokenizer",
    "Tokenizer",
    "embed",
    "generate",
    "load",
    "new_graph_model",
    "save",
]
