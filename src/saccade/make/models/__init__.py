"""Published models with their weights, and Saccade's own small decoder.

Begin with `loading.py`, then a file of `families/`; the docstring of each folder says what it holds. Imports `nn`,
`positions`, `batching` and `variants`.
"""

from __future__ import annotations

from .decoder_lm.checkpoint import LanguageModel, save
from .decoder_lm.config import ModelConfig
from .decoder_lm.language_model import DecoderLM
from .decoding.beam import BeamSearch
from .decoding.constraints import Constraints
from .decoding.sampling import Sampling
from .decoding.step import Generated as Generated
from .embedding import embed
from .generation import generate
from .loading import load, new_graph_model
from .model import LoadReport as LoadReport, Model
from .output import ModelOutput
from .tokenizers.own import Encoding as Encoding, Tokenizer
from .tokenizers.protein import ProteinTokenizer
from .tokenizers.text import TextTokenizer
from .transformers_model import TransformersModel

__all__ = [
    "BeamSearch",
    "Constraints",
    "DecoderLM",
    "LanguageModel",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "ProteinTokenizer",
    "Sampling",
    "TextTokenizer",
    "Tokenizer",
    "TransformersModel",
    "embed",
    "generate",
    "load",
    "new_graph_model",
    "save",
]
