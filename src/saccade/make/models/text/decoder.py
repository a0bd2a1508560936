"""The base class of decoder language models: from token ids to logits of the next token, with or without a cache.

Shape legend: B batch, L length, T computed tokens, E width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from ....operator._products import LARGE, Product
from ....operator.nn import Decoder, KVCache
from ....operator.nn._rounded import RoundedLinear, output_form
from ....operator.nn.stacks import LayerObserver
from ....operator.positions import Offset
from ..decoding.generating import GeneratingModel
from ..inputs import check_ids, check_like
from ..output import ModelOutput
from ..output_heads import ItemHead, next_token_loss, refuse_labels
from ..token_layout import TokenLayout, token_layout


class TextDecoder(GeneratingModel):
    """A language model: an embedding, a stack of causal blocks, and logits of the next token. Abstract.

    Padding is not computed: without a cache the real tokens of all items are packed in one row. Positions count from
    each item's first real token, with padding on either side.

    Attributes:
        tokens: the token embedding; also the output matrix if `head` is None and the model has logits.
        decoder: the stack of blocks.
        head: an untied vocabulary head, or an `ItemHead` that classifies by the last real token.
        longest: number of positions; None if unlimited.
    """

    tokens: nn.Embedding
    decoder: Decoder
    head: nn.Module | None
    longest: int | None

    def __init__(self) -> None:
        super().__init__()
        self.product = Product()  # with the token embedding

    @abstractmethod
    def embed(self, input_ids: Tensor, offset: Offset) -> Tensor:
        """Input of the first layer (.., T, E) for the computed ids and their positions."""

    @property
    def vocabulary(self) -> int:
        return self.tokens.num_embeddings

    def cache(self, dtype: str | None = None) -> KVCache:
        """An empty cache that keeps all tokens; `dtype` as in `Decoder.cache`."""
        return self.decoder.cache(dtype)

    def next_logits(self, ids: Tensor, attention_mask: Tensor | None, cache: KVCache) -> Tensor:
        logits = self(ids, attention_mask, cache=cache, logits_to_keep=1).logits
        assert logits is not None
        return logits[:, -1]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        cache: KVCache | None = None,
        logits_to_keep: int | None = None,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> ModelOutput:
        """The hidden states of a batch of texts, and logits of each next token or of classes.

        Args:
            input_ids: (B, L) ints; with a cache, they continue the tokens in it.
            attention_mask: (B, L), 1 for real tokens and 0 for padding; None: all are real, but a classifier uses the
                last token that is not `pad_token_id`.
            position_ids: (B, L) or (1, L); None: counted from each item's first real token, or continued from the
                cache.
            labels: (B, L), `input_ids` or -100 for tokens without a loss; they are shifted by one inside. For a
                classifier (B,) or (B, K).
            cache: previous tokens; the new ones are appended.
            logits_to_keep: number of last columns to compute logits for; None: all.
            hidden_states: whether to return the input of each layer and the output of the last one.
            observe: `observe(layer, observation)` is called in each layer.

        Raises:
            TypeError, ValueError: ids outside the vocabulary, too many tokens, other shapes; labels without a head.
        """
        if self.request.head is None:
            refuse_labels(None, labels=labels)
        batch, length = check_ids("input_ids", input_ids, self.tokens.num_embeddings)
        packed = self.request.mechanism is None and cache is None
        layout = token_layout(batch, length, attention_mask, packed=packed)
        if self.longest is not None:
            self._check_length(length if cache is None else cache.reach(length), self.longest)
        offset = self._offset(layout, position_ids, cache)
        states: list[Tensor] | None = [] if hidden_states else None
        x = self.decoder(
            self.embed(layout.take(input_ids), offset),
            layout.mask,
            padding=layout.padding,
            offset=offset if layout.places is not None or position_ids is not None else None,
            cache=cache,
            observe=observe,
            hidden_states=states,
        )
        out = ModelOutput(
            last_hidden_state=layout.put(x),
            hidden_states=None if states is None else tuple(map(layout.put, states)),
            cache=cache,
        )
        return self._read(out, x, layout, input_ids, labels, logits_to_keep)

    def _read(
        self,
        out: ModelOutput,
        x: Tensor,
        layout: TokenLayout,
        input_ids: Tensor,
        labels: Tensor | None,
        keep: int | None,
    ) -> ModelOutput:
        if isinstance(self.head, ItemHead):
            read = self.head(layout.at(x, self._classified(input_ids, layout)), labels)
            out.logits, out.loss = read["logits"], read["loss"]
        elif self.request.head is not None:
            if keep is not None and labels is None:
                assert out.last_hidden_state is not None
                out.logits = self.next_token_logits(out.last_hidden_state[:, -keep:])
                return out
            logits = self.next_token_logits(x)
            out.loss = None if labels is None else next_token_loss(logits, labels, layout)
            out.logits = layout.put(logits)
        return out

    def _classified(self, input_ids: Tensor, layout: TokenLayout) -> Tensor:
        """The column (B,) that a classifier uses: of each item's last real token other than `pad_token_id`, or of its
        first real one if there is none. As in transformers, an end token that is also the padding token does not
        count."""
        real = input_ids != self.settings.get("pad_token_id", -1)
        self._check_padding(real, layout)
        real = real if layout.real is None else real & layout.real
        last = layout.length - 1 - real.flip(1).int().argmax(1)
        return torch.where(real.any(1), last, layout.ends[0].to(last))

    def _check_padding(self, tensor: Tensor, layout: TokenLayout) -> None:
        """ValueError if transformers, which uses `pad_token_id` and no mask, would classify by a padding token."""
        if layout.real is None or "pad_token_id" not in self.settings or torch.compiler.is_compiling():
            return
        last = layout.length - 1 - tensor.flip(1).int().argmax(1, keepdim=True)
        wrong = tensor.any(1) & layout.real.any(1) & ~layout.real.gather(1, last)[:, 0]
        if bool(wrong.any()):
            raise ValueError(
                f"input_ids: the padding of item {int(wrong.nonzero()[0])} is not pad_token_id, "
                f"{self.settings.get('pad_token_id')}, from which a classifier finds the last token; pad with it"
            )

    def round_output(self, form: str) -> None:
        """Give a language model without a head of its own a copy of the token embedding in few bits as its head."""
        if self.head is None and self.request.head == "causal-lm" and self.tokens.weight.numel() >= LARGE:
            self.head = RoundedLinear(self.tokens.weight.detach(), None, output_form(form))

    def next_token_logits(self, x: Tensor) -> Tensor:
        """(..., E) to (..., V)."""
        return self.product(x, self.tokens.weight) if self.head is None else self.head(x)

    def _offset(self, layout: TokenLayout, position_ids: Tensor | None, cache: KVCache | None) -> Offset:
        if position_ids is not None:
            shape = layout.batch, layout.length
            return layout.take(check_like("position_ids", position_ids, shape, self.longest or 2**31))
        return layout.offset(cache)

    def _check_length(self, length: int, longest: int) -> None:
        if length > longest:
            raise ValueError(
                f"input_ids: {length} tokens are more than the model's {longest} positions; cut the text, "
                "or read it in pieces"
            )
