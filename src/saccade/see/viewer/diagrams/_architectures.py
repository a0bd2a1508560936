"""The published families at the sizes of their papers, without weights: modules on the meta device, to be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....make.models.checkpoints.settings import CheckpointSettings
from ....make.models.families import FAMILIES
from ....make.models.model import Request
from ....operator.nn import AttentionConfig, BlockConfig, Transformer
from ....operator.positions import Sinusoidal

_BART = dict(
    vocab_size=50265, d_model=768, encoder_layers=6, decoder_layers=6, encoder_attention_heads=12,
    decoder_attention_heads=12, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
)  # fmt: skip
_MARIAN = dict(
    vocab_size=58101, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
    decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=512,
)  # fmt: skip
_LLAMA = dict(
    vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
    intermediate_size=11008, max_position_embeddings=4096, rope_theta=10000.0,
)  # fmt: skip
_ESM = dict(
    vocab_size=33, hidden_size=320, num_hidden_layers=6, num_attention_heads=20, intermediate_size=1280,
    position_embedding_type="rotary", token_dropout=True, mask_token_id=32, emb_layer_norm_before=False,
)  # fmt: skip
_PATCHTST = dict(
    num_input_channels=7, context_length=512, patch_length=12, patch_stride=12, d_model=128, num_attention_heads=16,
    ffn_dim=512, num_hidden_layers=3, prediction_length=96,
)  # fmt: skip
_GAT = dict(num_features=1433, num_attention_heads=8, hidden_size=64, num_hidden_layers=1)
_GRAPHORMER = dict(node_types=512, edge_types=512, hidden_size=768, num_hidden_layers=12, num_attention_heads=32)

# Name: title, family, head, labels, settings that differ from the family's defaults.
ARCHITECTURES: dict[str, tuple[str, str, str | None, int, dict[str, Any]]] = {
    "bert": ("BERT base", "bert", "masked-lm", 2, {}),
    "gpt2": ("GPT-2", "gpt2", "causal-lm", 2, {}),
    "llama": ("Llama 2 7B", "llama", "causal-lm", 2, _LLAMA),
    "t5": ("T5 small", "t5", None, 2, {}),
    "bart": ("BART base", "bart", None, 2, _BART),
    "marian": ("Marian", "marian", None, 2, _MARIAN),
    "vit": ("ViT-B/16", "vit", "image-classification", 1000, {}),
    "wav2vec2": ("wav2vec 2.0 base", "wav2vec2", "ctc", 2, {}),
    "esm": ("ESM-2, 8M", "esm", "masked-lm", 2, _ESM),
    "patchtst": ("PatchTST", "patchtst", None, 2, _PATCHTST),
    "gat": ("GAT on Cora", "saccade-gat", "node-classification", 7, _GAT),
    "graphormer": ("Graphormer base", "saccade-graphormer", None, 2, _GRAPHORMER),
}
ORIGINAL = "vaswani"


def is_architecture(name: object) -> bool:
    return name == ORIGINAL or name in ARCHITECTURES


def architecture(name: str) -> tuple[str, nn.Module]:
    """(title, the module on the meta device)."""
    with torch.device("meta"):
        if name == ORIGINAL:
            return "Transformer base (Vaswani et al. 2017)", _Original()
        title, kind, head, labels, given = ARCHITECTURES[name]
        family = next(family for family in FAMILIES if kind in family.types)
        settings = CheckpointSettings({**given, "model_type": kind}, Path("settings"))
        # The largest number of layers: a limit for damaged files, which does not apply here.
        settings.stored = frozenset(str(i) for i in range(999))
        chosen = head if head is not None or not family.heads else next(iter(family.heads))
        model = family.build(settings, Request(chosen, labels))
        model.settings, model.request, model.family = settings, Request(chosen, labels), family
        return title, model


class _Original(nn.Module):
    """The base model of Vaswani et al., "Attention Is All You Need" (2017), table 3: some 65 million parameters.

    Source and target share one vocabulary of 37,000, and the last linear layer is its embedding (section 3.4).
    """

    def __init__(self) -> None:
        super().__init__()
        attention = AttentionConfig(512, 8)
        block = BlockConfig(attention, hidden=2048, activation="relu", norm="layer", placement="post", bias=True)
        self.tokens = nn.Embedding(37000, 512)
        self.places = Sinusoidal(512)
        self.transformer = Transformer(block, 6)
        self.head = self.tokens
