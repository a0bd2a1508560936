"""The base class of text encoder-decoders: from a padded source and target to logits of the next target token.

Shape legend: B sources, n targets of each, Ls / Lt lengths of source and target, E width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....operator._masks import Padding
from ....operator._products import Product
from ....operator.nn import Decoder, Encoder, KVCache
from ....operator.nn.stacks import LayerObserver
from ....operator.nn.transformer import across_padding
from ....operator.positions import Offset
from ..decoding.beam import BeamSearch, search as find
from ..decoding.constraints import Constraints
from ..decoding.drawing import draw
from ..decoding.generating import weights_for
from ..decoding.published import published_constraints, published_search
from ..decoding.sampling import Sampling
from ..decoding.step import Generated, TargetStep
from ..inputs import check_ids
from ..model import Model
from ..output import ModelOutput
from ..output_heads import IGNORED, refuse_labels
from ..token_layout import Memory, TokenLayout, token_layout
from ..tokenizers.sentencepiece import SentencePieceTokenizer, open_either
from ..tokenizers.text import TextTokenizer


class EncoderDecoder(Model):
    """An encoder-decoder: `input_ids (B, Ls)` are encoded, `decoder_input_ids` decoded with cross-attention. Abstract.

    Padding of source and target is not computed: the real tokens of all items are packed in one row each, and target
    tokens attend to the tokens of their own source in the other row. With a mechanism other than softmax attention, or
    with a cache, batches stay padded. Positions count from each item's first real token.

    Attributes:
        tokens: the embedding of the source, and of the target if `target_tokens` is None.
        target_tokens: a separate embedding of the target, or None.
        encoder, decoder: the stacks of blocks.
        head: computes the logits of the next token; None for the body alone.
        longest: maximum number of tokens of source and of target; None if unlimited.
        start: the first token of targets, if the configuration has one.
    """

    tokens: nn.Embedding
    target_tokens: nn.Embedding | None
    encoder: Encoder
    decoder: Decoder
    head: nn.Module | None
    longest: int | None
    start: int | None

    @abstractmethod
    def embed_source(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Input of the encoder's first layer (.., T, E) for the computed ids and their positions."""

    @abstractmethod
    def embed_target(self, input_ids: Tensor, offset: Offset) -> Tensor:
        """Input of the decoder's first layer."""

    @cached_property
    def tokenizer(self) -> TextTokenizer | SentencePieceTokenizer:  # type: ignore[override]
        """The tokenizer of the folder, from tokenizer.json or SentencePiece files; both have the same methods."""
        return super().tokenizer if self.folder is None else open_either(self.folder, self.longest)

    def cache(self, dtype: str | None = None) -> KVCache:
        """An empty cache for decoding; `dtype` as in `Decoder.cache`. Keys and values of the source are computed once,
        and stay floats."""
        return self.decoder.cache(dtype)

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> Memory:
        """Run only the encoder; arguments as in `forward`."""
        batch, length = check_ids("input_ids", input_ids, self.tokens.num_embeddings, self.longest)
        layout = token_layout(batch, length, attention_mask, packed=self.request.mechanism is None)
        states: list[Tensor] | None = [] if hidden_states else None
        x = self.embed_source(layout.take(input_ids), layout.positions().to(input_ids.device))
        x = self.encoder(x, layout.mask, padding=layout.padding, observe=observe, hidden_states=states)
        return Memory(self.finished(x), layout, None if states is None else tuple(map(layout.put, states)))

    def finished(self, x: Tensor) -> Tensor:
        """The final operation of a family on the output of a stack."""
        return x

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        memory: Memory | None = None,
        cache: KVCache | None = None,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> ModelOutput:
        """The decoder's hidden states of a batch of targets, and the logits of each next token.

        Args:
            input_ids: (B, Ls) ints, the sources.
            attention_mask: (B, Ls), 1 for real tokens and 0 for padding; None: all are real.
            decoder_input_ids: (B, Lt) ints, the targets; with a cache, they continue the tokens in it, and are (n B,
                Lt) for n adjacent targets of each source. None: `labels`, shifted behind the start token.
            decoder_attention_mask: of the targets, as `attention_mask`. None: all are real; if the targets are made
                from `labels`, those up to the last label with a loss.
            labels: (B, Lt), the token after each target token; -100 for positions without a loss.
            memory: from `encode`, in place of `input_ids`.
            cache: previous target tokens; the new ones are appended.
            hidden_states: whether to return the input of each layer and the output of the last one, of both stacks.
            observe: `observe(layer, observation)` is called in each layer; the decoder's layers are numbered after the
                encoder's.

        Raises:
            TypeError, ValueError: ids outside the vocabulary, too many tokens, other shapes; labels without a head.
        """
        if self.head is None:
            refuse_labels(None, labels=labels)
        memory = self._memory(input_ids, attention_mask, memory, hidden_states, observe)
        if labels is not None:
            check_ids("labels", _counted(labels, 0), self._targets.num_embeddings)
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("decoder_input_ids: missing; give targets, or labels")
            decoder_input_ids, decoder_attention_mask = self._shifted(labels, decoder_attention_mask)
        shape = check_ids("decoder_input_ids", decoder_input_ids, self._targets.num_embeddings)
        self._check_targets(shape, memory, cache)
        x, layout, states = self._decode(
            decoder_input_ids, decoder_attention_mask, memory, cache, hidden_states, observe
        )
        logits = None if self.head is None else self.head(x)
        return ModelOutput(
            last_hidden_state=layout.put(x),
            logits=None if logits is None else layout.put(logits),
            loss=None if logits is None or labels is None else _loss(logits, labels, layout),
            hidden_states=states,
            cache=cache,
            encoder_last_hidden_state=memory.last_hidden_state,
            encoder_hidden_states=memory.hidden_states,
        )

    def next_logits(self, ids: Tensor, context: Tensor, padding: Padding | None, cache: KVCache) -> Tensor:
        """Logits (n B, V) of the next token: targets continue with `ids (n B, L)`, sources are `context (B, Ls, E)`."""
        offset = TokenLayout(*ids.shape).offset(cache)
        x = self.decoder(self.embed_target(ids, offset), context=context, context_mask=padding, cache=cache)
        assert self.head is not None
        return self.head(self.finished(x[:, -1]))

    @property
    def search(self) -> BeamSearch | Sampling:
        """Default decoding method of the checkpoint."""
        return published_search(self.generation)

    @property
    def constraints(self) -> Constraints:
        """Default constraints of the checkpoint, for texts with one start token; `dataclasses.replace` changes a
        rule."""
        return published_constraints(self.generation)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        search: BeamSearch | Sampling | None = None,
        constraints: Constraints | None = None,
        decoder_input_ids: Tensor | None = None,
    ) -> Generated:
        """Generate texts for a batch of sources: by beam search, sampling, or greedily (`Sampling(temperature=0)`).

        Args:
            input_ids, attention_mask: the sources, as in `forward`.
            max_new_tokens: of each text; None follows the constraints.
            search: None follows the checkpoint: `model.search`.
            constraints: None follows the checkpoint: `model.constraints`, with lengths that include all start tokens.
            decoder_input_ids: (B, L), the first tokens of targets, without padding; None is the start token.

        Raises:
            TypeError, ValueError: as in `forward`; more tokens than positions, more beams than tokens in the
                vocabulary, a model without a head, unsupported settings of the checkpoint.
        """
        if not isinstance(self.head, NextTokenHead):
            raise ValueError(f"generate: needs the head 'conditional-generation', got {self.request.head!r}")
        begun = self._begun(input_ids, decoder_input_ids)
        search, rules = search or self.search, self._rules(constraints, max_new_tokens, begun.shape[1])
        pad = self.settings.count("pad_token_id", 0, least=0)
        rows = begun.shape[0] * (search.beams if isinstance(search, BeamSearch) else 1)
        with torch.no_grad(), weights_for(self, rules.max_new_tokens, rows, input_ids.shape[1]):
            step = TargetStep(self, self.encode(input_ids, attention_mask))
            if isinstance(search, BeamSearch):
                return find(step, begun, search, rules, pad)
            return draw(step, begun, search, rules, pad)

    def _rules(self, given: Constraints | None, most: int | None, begun: int) -> Constraints:
        """The constraints of a call, limited to the positions after the `begun` first tokens."""
        rules = given or published_constraints(self.generation, begun, most)
        room = rules.max_new_tokens if self.longest is None else self.longest - begun + 1
        if most is not None and most > room:
            raise ValueError(f"max_new_tokens: {most} after {begun} tokens, but the model has {self.longest} positions")
        most = min(rules.max_new_tokens if most is None else most, room)
        return replace(rules, max_new_tokens=most, min_new_tokens=min(rules.min_new_tokens, most))

    def _begun(self, input_ids: Tensor, decoder_input_ids: Tensor | None) -> Tensor:
        """The first tokens of targets, (B, L)."""
        if decoder_input_ids is not None:
            items, _ = check_ids("decoder_input_ids", decoder_input_ids, self._targets.num_embeddings, self.longest)
            if items != input_ids.shape[0]:
                raise ValueError(
                    f"decoder_input_ids: expected a target for each of {input_ids.shape[0]} sources, got {items}"
                )
            return decoder_input_ids
        if self.start is None:
            raise ValueError("decoder_input_ids: needed, since config.json has no decoder_start_token_id")
        return torch.full((input_ids.shape[0], 1), self.start, device=input_ids.device)

    def _memory(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        memory: Memory | None,
        hidden_states: bool,
        observe: LayerObserver | None,
    ) -> Memory:
        if (input_ids is None) == (memory is None):
            raise ValueError("input_ids: give either the sources, or memory= of them")
        if input_ids is not None:
            return self.encode(input_ids, attention_mask, hidden_states=hidden_states, observe=observe)
        if attention_mask is not None:
            raise ValueError("attention_mask: give it to encode(), not with memory=")
        if not isinstance(memory, Memory):
            raise TypeError(f"memory: expected the result of encode(), got {type(memory).__name__}")
        return memory

    def _decode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        memory: Memory,
        cache: KVCache | None,
        hidden_states: bool,
        observe: LayerObserver | None,
    ) -> tuple[Tensor, TokenLayout, tuple[Tensor, ...] | None]:
        """The decoder's output (packed or padded), its layout, and its hidden states."""
        source, packed = memory.layout, self.request.mechanism is None and cache is None
        target = token_layout(input_ids.shape[0], input_ids.shape[1], attention_mask, packed=packed)
        packed &= target.padding is None  # targets with gaps in their masks stay padded
        across: Any
        if packed and (source.places is not None or target.places is not None):
            source, target = source.packed(input_ids.device), target.packed(input_ids.device)
            context, across = source.take(memory.last_hidden_state), target.across(source)
        else:
            context = memory.last_hidden_state
            real = None if source.real is None else Padding(source.real)
            across = real if cache is not None else across_padding(real, target.padding, context)
        states: list[Tensor] | None = [] if hidden_states else None
        first = len(self.encoder.blocks)
        x = self.decoder(
            self.embed_target(target.take(input_ids), target.offset(cache)),
            target.mask,
            context=context,
            context_mask=across,
            padding=target.padding,
            cache=cache,
            observe=None if observe is None else lambda layer, seen: observe(first + layer, seen),
            hidden_states=states,
        )
        return self.finished(x), target, None if states is None else tuple(map(target.put, states))

    @property
    def _targets(self) -> nn.Embedding:
        return self.tokens if self.target_tokens is None else self.target_tokens

    def _shifted(self, labels: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Targets for `labels`: the start token and all labels but the last."""
        if self.start is None:
            raise ValueError("decoder_input_ids: needed, since config.json has no decoder_start_token_id")
        pad = self.settings.count("pad_token_id", 0, least=0)  # replaces ignored labels in the input
        begun = F.pad(_counted(labels, pad)[:, :-1], (1, 0), value=self.start)
        if attention_mask is None and not torch.compiler.is_compiling():
            counted = (labels != IGNORED).flip(1).cummax(1).values.flip(1)  # up to the last label with a loss
            counted[:, 0] = True
            attention_mask = counted
        return begun, attention_mask

    def _check_targets(self, shape: tuple[int, int], memory: Memory, cache: KVCache | None) -> None:
        (items, length), sources = shape, memory.layout.batch
        if items != sources and (cache is None or items % sources):
            several = "" if cache is None else ", or a multiple of them"
            raise ValueError(f"decoder_input_ids: expected targets of {sources} sources{several}, got {items}")
        length = length if cache is None else cache.reach(length)
        if self.longest is not None and length > self.longest:
            raise ValueError(f"decoder_input_ids: {length} tokens are more than the model's {self.longest} positions")


class NextTokenHead(nn.Module):
    """Logits of the vocabulary, `scale x W^T + b`: (..., E) to (..., V).

    Args:
        embedding: (V, E) of the target, used as W if tied.
        tied: whether W is the target embedding; otherwise it is the weight of `out`.
        scale: of x.
        bias: whether there is a b (1, V), a buffer that is stored but not trained.
    """

    bias: Tensor | None

    def __init__(self, embedding: nn.Embedding, *, tied: bool, scale: float = 1.0, bias: bool = False):
        super().__init__()
        self.scale = scale
        self.out = None if tied else nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
        self.register_buffer("bias", torch.zeros(1, embedding.num_embeddings) if bias else None)
        self._embedding = (embedding,)  # a tuple hides it from `parameters()`: another module has and saves it
        self.product = Product()

    def reset_parameters(self) -> None:
        """Set the bias to 0 and initialise `out`."""
        if self.bias is not None:
            self.bias.zero_()
        if self.out is not None:
            self.out.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., V)."""
        x = x if self.scale == 1.0 else x * self.scale
        logits = self.product(x, (self._embedding[0] if self.out is None else self.out).weight)
        return logits if self.bias is None else logits + self.bias


def _counted(labels: Any, fill: int) -> Any:
    """Labels with `fill` in place of ignored ones."""
    return labels.masked_fill(labels == IGNORED, fill) if isinstance(labels, Tensor) else labels


def _loss(logits: Tensor, labels: Tensor, layout: TokenLayout) -> Tensor:
    """The mean cross-entropy of the labels that are not ignored."""
    if labels.shape != (layout.batch, layout.length):
        raise ValueError(f"labels: expected shape {(layout.batch, layout.length)}, got {tuple(labels.shape)}")
    if layout.real is not None:
        labels = labels.masked_fill(~layout.real, IGNORED)
    return F.cross_entropy(logits.flatten(0, -2), layout.take(labels).flatten(), ignore_index=IGNORED)
