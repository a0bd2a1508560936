"""ESM-2: an encoder of proteins. Lin et al., "Evolutionary-scale prediction of atomic-level protein structure" (2023).

The block with its norms first and rotary positions, biases everywhere, exact GELU, a norm after the last block. A token
is a residue. Masked tokens are dropped from the input as training dropped them (`token_dropout`), and attention maps
tell which residues touch.

Shape legend: B batch, L length, E width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ....operator._products import FUNCTIONS
from ....operator.nn import BlockConfig, Encoder
from ....operator.positions import RotaryConfig
from ....operator.positions.rotary import StoredRotary
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..inputs import check_ids, check_like
from ..model import Family, Request
from ..output_heads import Classifier, ItemHead, TokenHead, VocabularyHead
from ..text.contacts import ContactHead, ContactMaps
from ..text.encoder import TextEncoder
from ..token_layout import TokenLayout, token_layout
from .bert import bert_block
from .roberta import HEAD_KEYS

HEADS = {
    "masked-lm": "ForMaskedLM",
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
}
NEW_HEADS = ("sequence-classification", "token-classification")
TRAINED_MASKED = 0.15 * 0.8  # of the tokens, in the training of every published ESM
END = 2  # <eos>: the contact head was trained without it
FREQUENCIES = "rotary_embeddings.inv_freq"


class Esm(TextEncoder):
    """ESM-2 with one of its heads, or none.

    Attributes:
        contact_head: of `contacts`; None if the checkpoint has none.
    """

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        for setting in ("is_decoder", "add_cross_attention", "is_folding_model"):
            settings.only(setting, False)
        settings.only("hidden_act", "gelu")
        stored = {name.removeprefix("esm.") for name in settings.stored}
        rotary = settings.choice("position_embedding_type", {"rotary": True, "absolute": False}, "absolute")
        block = _block(settings, request, rotary)
        width, eps, vocabulary = block.width, block.eps, settings.count("vocab_size")
        self.tokens = nn.Embedding(vocabulary, width)
        self.pad = settings.count("pad_token_id", 1, least=0)
        self.mask = settings.count("mask_token_id", least=0) if settings.flag("token_dropout", False) else None
        places = settings.count("max_position_embeddings", 1026)
        self.places = None if rotary else nn.Embedding(places, width)
        self.longest = None if rotary else places - self.pad - 1
        self.norm = nn.LayerNorm(width, eps or 0.0) if settings.flag("emb_layer_norm_before", False) else None
        self.encoder = Encoder(block, settings.layers("num_hidden_layers", 12))
        if rotary and any(name.endswith(FREQUENCIES) for name in stored):
            self.encoder.positions = StoredRotary(block.attention.shape.head, settings.theta("rope_theta", 1e4))
        pooled = request.head is None and "pooler.dense.weight" in stored
        self.pooler = nn.Linear(width, width) if pooled else None
        with_contacts = "contact_head.regression.weight" in stored
        self.contact_head = ContactHead(len(self.encoder.blocks), block.attention.heads) if with_contacts else None
        self.head = _head(settings, request, self.tokens, block)

    def embed(
        self, input_ids: Tensor, layout: TokenLayout, token_type_ids: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        if token_type_ids is not None:
            raise ValueError("token_type_ids: ESM has none; leave them out")
        ids = layout.take(input_ids)
        x = self.tokens(ids)
        if self.mask is not None:
            x = x.masked_fill((ids == self.mask)[..., None], 0.0)
            x = (x * layout.take(self._share_kept(input_ids, layout))[..., None]).to(x.dtype)
        if self.places is not None:
            x = x + self.places(layout.take(self._places(input_ids, layout, position_ids)))
        elif position_ids is not None:
            raise ValueError("position_ids: positions are rotary here and count from each item's first; leave them out")
        return x if self.norm is None else self.norm(x)

    def pool(self, x: Tensor, layout: TokenLayout) -> Tensor | None:
        return None if self.pooler is None else torch.tanh(self.pooler(layout.first(x)))

    def residue_means(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """One vector (B, E) a protein: the mean of the last hidden states of its residues, without <cls> and <eos>.

        Raises:
            ValueError: an item without residues; else as in the call.
        """
        states = self(input_ids, attention_mask).last_hidden_state
        residues = self._residues(input_ids, attention_mask)
        counts = residues.sum(1)
        if not bool(counts.all()):
            raise ValueError(
                f"input_ids: item {int((counts == 0).nonzero()[0, 0])} has no residue between <cls> and <eos>"
            )
        return torch.where(residues[..., None], states, 0).sum(1) / counts[:, None]

    def contacts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The probability that two residues touch (are closer than 8 angstroms), (B, L - 2, L - 2), from all attention
        weights.

        Row and column 0 are token 1, the first residue where padding is on the right; pairs that are not two residues
        are 0. The maps of one layer and item are held at a time; call it under `torch.no_grad()` unless gradients are
        wanted.

        Args:
            input_ids: (B, L), each item <cls>, residues, <eos>; L at least 3.
            attention_mask: (B, L), as in the call.

        Raises:
            ValueError: a checkpoint without a contact head, a mechanism without weights; else as in the call.
        """
        if self.contact_head is None:
            raise ValueError(f"contacts: {self.folder} has no contact head (contact_head.regression)")
        if self.request.mechanism is not None:
            raise ValueError(
                f"contacts: the mechanism {self.request.mechanism.name!r} has no attention weights to read maps from"
            )
        batch, length = check_ids("input_ids", input_ids, self.tokens.num_embeddings, self.longest)
        if length < 3:
            raise ValueError(f"input_ids: contacts need <cls>, residues and <eos>, at least 3 tokens, got {length}")
        residues = self._residues(input_ids, attention_mask)
        residues[:, -1] = False  # as published: it has no place in the result
        layout = token_layout(batch, length, attention_mask)
        places = [layout.place(item) for item in range(batch)]
        maps = ContactMaps(self.contact_head, places, [layout.take(residues)[place] for place in places])
        self(input_ids, attention_mask, observe=maps.add)
        out = maps.logits[0].new_zeros(batch, length, length)
        for item, found in enumerate(maps.logits):
            columns = residues[item].nonzero()[:, 0]
            out[item, columns[:, None], columns] = found.sigmoid()
        return out[:, 1:-1, 1:-1]

    def _share_kept(self, input_ids: Tensor, layout: TokenLayout) -> Tensor:
        """Factors (B, L) of an item's embeddings: their size is as if as many tokens were masked as in training."""
        real = torch.ones_like(input_ids, dtype=torch.bool) if layout.real is None else layout.real
        dtype = torch.promote_types(self.tokens.weight.dtype, torch.float32)
        kept = (real & (input_ids != self.mask)).sum(1).to(dtype) / real.sum(1)
        # Nothing is kept where all is masked, whatever it is multiplied by.
        return ((1 - TRAINED_MASKED) / torch.where(kept > 0, kept, 1.0))[:, None].expand(input_ids.shape)

    def _places(self, input_ids: Tensor, layout: TokenLayout, position_ids: Tensor | None) -> Tensor:
        """(B, L): learned positions count from the number of the padding token + 1, over all tokens but padding."""
        assert self.places is not None
        if position_ids is not None:
            return check_like("position_ids", position_ids, (layout.batch, layout.length), self.places.num_embeddings)
        real = input_ids != self.pad
        return real.cumsum(1) * real + self.pad

    def _residues(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """bool (B, L): real tokens without each item's first, <cls>, and without <eos>."""
        layout = token_layout(input_ids.shape[0], input_ids.shape[1], attention_mask)
        residues = (input_ids != END) if layout.real is None else layout.real & (input_ids != END)
        first = layout.ends[0].to(input_ids.device)[:, None]
        return residues & (torch.arange(input_ids.shape[1], device=input_ids.device) != first)


def _block(settings: CheckpointSettings, request: Request, rotary: bool) -> BlockConfig:
    block = bert_block(settings, request, placement="pre")
    positions = RotaryConfig(settings.theta("rope_theta", 1e4)) if rotary else None
    return replace(block, attention=replace(block.attention, positions=positions))


def _head(settings: CheckpointSettings, request: Request, tokens: nn.Embedding, block: BlockConfig) -> nn.Module | None:
    width, dropout, head = block.width, block.dropout, request.head
    if head == "masked-lm":
        tied, eps = settings.flag("tie_word_embeddings", True), settings.eps("layer_norm_eps", 1e-12)
        return TokenHead(VocabularyHead(width, tokens, FUNCTIONS["gelu"], eps, tied=tied, published_bias="bias"))
    if head == "sequence-classification":
        return ItemHead(Classifier(width, request.labels, dropout, torch.tanh), settings.get("problem_type"))
    return TokenHead(Classifier(width, request.labels, dropout)) if head == "token-classification" else None


LAYER, ATTENTION = "encoder.layer.{n}", "encoder.layer.{n}.attention.self"
BODY = (
    Key("tokens", "embeddings.word_embeddings"),
    Key("places", "embeddings.position_embeddings"),
    Key("norm", "embeddings.layer_norm"),
    Key("encoder.blocks.{n}.attention_norm", f"{LAYER}.attention.LayerNorm"),
    Key("encoder.blocks.{n}.attention.projection", (f"{ATTENTION}.query", f"{ATTENTION}.key", f"{ATTENTION}.value")),
    Key("encoder.blocks.{n}.attention.output", f"{LAYER}.attention.output.dense"),
    Key("encoder.blocks.{n}.feed_forward_norm", f"{LAYER}.LayerNorm"),
    Key("encoder.blocks.{n}.feed_forward.up", f"{LAYER}.intermediate.dense"),
    Key("encoder.blocks.{n}.feed_forward.down", f"{LAYER}.output.dense"),
    Key("encoder.norm", "encoder.emb_layer_norm_after"),
    Key(  # one table for all layers; files have it once, or in every layer
        "encoder.positions.frequencies",
        f"encoder.layer.0.attention.self.{FREQUENCIES}",
        also=(FREQUENCIES, f"encoder.layer.*.attention.self.{FREQUENCIES}"),
    ),
    Key("pooler", "pooler.dense"),
    Key("contact_head", "contact_head"),
)


def _keys(model: Esm) -> KeyMap:
    head = HEAD_KEYS.get(model.request.head or "", ())
    first = f"encoder.layer.0.attention.self.{FREQUENCIES}"
    copies = {first.replace("0", str(n), 1): first for n in range(1, len(model.encoder.blocks))}
    mine = {str(key.published).split(".")[0] for key in head}
    return KeyMap(
        BODY,
        head,
        prefix="esm.",
        tied={
            "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
            **copies,
            **{f"esm.{name}": other for name, other in copies.items()},
        },
        derived=("embeddings.position_ids",),
        unused=(
            *sorted({"lm_head", "classifier"} - mine),
            *(() if model.pooler else ("pooler",)),
            *(() if model.places else ("embeddings.position_embeddings",)),  # older files have them beside rotary ones
        ),
        endings={"gamma": "weight", "beta": "bias"},
    )


FAMILY = Family("ESM-2", {"esm": "Esm"}, HEADS, Esm, _keys, NEW_HEADS)
