"""What encoder-decoders of text have in common: a padded source and a padded target in, logits of what comes next out.

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
from ..decoding.step import Generated
from ..decoding.targets import TargetStep
from ..heads import IGNORED, refuse_labels
from ..inputs import check_ids
from ..model import Model
from ..output import ModelOutput
from ..token_layout import Memory, TokenLayout, token_layout
from ..tokenizers.sentencepiece import SentencePieceTokenizer, open_either
from ..tokenizers.text import TextTokenizer


class EncoderDecoder(Model):
    """Source `input_ids (B, Ls)` through an encoder; `decoder_input_ids` through a decoder that reads it. Abstract.

    Padding of source and target is never computed: the real tokens of all items run in one row each, and a target
    token reads the row's tokens of its own source. With another mechanism than softmax attention, or with a cache,
    a padded batch stays as it is. Positions count from each item's first real token.

    Attributes:
        tokens: the embedding of the source, and of the target where `target_tokens` is None.
        target_tokens: of the target.
        encoder, decoder: the stacks.
        head: gives the logits of each next token; None is the body alone.
        longest: tokens that source and target may have; None where nothing limits them.
        start: the token that targets begin with, if the configuration names one.
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
        """What the encoder's first layer reads: ids and positions, both as they are computed, to (.., T, E)."""

    @abstractmethod
    def embed_target(self, input_ids: Tensor, offset: Offset) -> Tensor:
        """What the decoder's first layer reads."""

    @cached_property
    def tokenizer(self) -> TextTokenizer | SentencePieceTokenizer:  # type: ignore[override]
        """The tokenizer of the folder, of tokenizer.json or of SentencePiece's files; both have the same methods."""
        return super().tokenizer if self.folder is None else open_either(self.folder, self.longest)

    def cache(self) -> KVCache:
        """An empty cache for decoding: keys and values of the target grow, those of the source are made once."""
        return self.decoder.cache()

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> Memory:
        """The encoder alone; arguments as in `forward`."""
        batch, length = check_ids("input_ids", input_ids, self.tokens.num_embeddings, self.longest)
        layout = token_layout(batch, length, attention_mask, packed=self.request.mechanism is None)
        states: list[Tensor] | None = [] if hidden_states else None
        x = self.embed_source(layout.take(input_ids), layout.positions().to(input_ids.device))
        x = self.encoder(x, layout.mask, padding=layout.padding, observe=observe, hidden_states=states)
        return Memory(self.finished(x), layout, None if states is None else tuple(map(layout.put, states)))

    def finished(self, x: Tensor) -> Tensor:
        """What a family does to the output of a stack."""
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
        """The decoder's hidden states over a batch of targets, and the logits of each next token.

        Args:
            input_ids: (B, Ls) ints, the sources.
            attention_mask: (B, Ls), 1 for real tokens and 0 for padding; None: all are real.
            decoder_input_ids: (B, Lt) ints, the targets so far; with a cache, those that continue the ones in it, and
                (n B, Lt) for n targets of each source, one after another. None: `labels` after the start token.
            decoder_attention_mask: of the targets, as `attention_mask`. None: all are real; where targets are made of
                `labels`, those up to the last that counts.
            labels: (B, Lt), what is to come after each target token; -100 where nothing is to be learned.
            memory: of `encode`, instead of `input_ids`.
            cache: targets decoded so far, which these join.
            hidden_states: whether to return what each layer reads and the last one gives, of encoder and decoder.
            observe: `observe(layer, observation)` is called in each layer; the decoder's are counted on from the
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
                raise ValueError("decoder_input_ids: missing; give the targets so far, or labels")
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
        """Targets go on by `ids (n B, L)` and read sources `context (B, Ls, E)`; logits (n B, V) of what comes next."""
        offset = TokenLayout(*ids.shape).offset(cache)
        x = self.decoder(self.embed_target(ids, offset), context=context, context_mask=padding, cache=cache)
        assert self.head is not None
        return self.head(self.finished(x[:, -1]))

    @property
    def search(self) -> BeamSearch | Sampling:
        """How the checkpoint's files want texts to be found."""
        return published_search(self.generation)

    @property
    def constraints(self) -> Constraints:
        """What the checkpoint's files want texts to keep to that begin with one token; `dataclasses.replace` changes
        one rule."""
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
        """Texts for a batch of sources: by beam search, drawn, or of the most probable tokens
        (`Sampling(temperature=0)`).

        Args:
            input_ids, attention_mask: the sources, as in `forward`.
            max_new_tokens: of each text; None is as the constraints say.
            search: None is as the checkpoint's files say: `model.search`.
            constraints: None is as they say: `model.constraints`, but lengths count all tokens that targets begin with.
            decoder_input_ids: (B, L), what targets begin with, unpadded; None is the start token.

        Raises:
            TypeError, ValueError: as in `forward`; more tokens than positions, more beams than tokens in the
                vocabulary, a model without a head, files that ask for another kind of search.
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
        """The constraints of a call, no longer than there are positions after the `begun` first tokens."""
        rules = given or published_constraints(self.generation, begun, most)
        room = rules.max_new_tokens if self.longest is None else self.longest - begun + 1
        if most is not None and most > room:
            raise ValueError(f"max_new_tokens: {most} after {begun}, but the model has {self.longest} positions")
        most = min(rules.max_new_tokens if most is None else most, room)
        return replace(rules, max_new_tokens=most, min_new_tokens=min(rules.min_new_tokens, most))

    def _begun(self, input_ids: Tensor, decoder_input_ids: Tensor | None) -> Tensor:
        """What targets begin with, (B, L)."""
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
            raise ValueError("input_ids: give the sources, or memory= of them, and not both")
        if input_ids is not None:
            return self.encode(input_ids, attention_mask, hidden_states=hidden_states, observe=observe)
        if attention_mask is not None:
            raise ValueError("attention_mask: is in the memory already")
        if not isinstance(memory, Memory):
            raise TypeError(f"memory: expected what encode() gives, got {type(memory).__name__}")
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
        """The decoder's output as it is computed, its layout, and its hidden states."""
        source, packed = memory.layout, self.request.mechanism is None and cache is None
        target = token_layout(input_ids.shape[0], input_ids.shape[1], attention_mask, packed=packed)
        packed &= target.padding is None  # a target with holes stays as it is
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
        """Targets that `labels` come after: the start token and all labels but the last."""
        if self.start is None:
            raise ValueError("decoder_input_ids: needed, since config.json has no decoder_start_token_id")
        pad = self.settings.count("pad_token_id", 0, least=0)  # is read where nothing is to be learned on the way
        begun = F.pad(_counted(labels, pad)[:, :-1], (1, 0), value=self.start)
        if attention_mask is None and not torch.compiler.is_compiling():
            counted = (labels != IGNORED).flip(1).cummax(1).values.flip(1)  # up to the last that counts
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
            raise ValueError(
                f"decoder_input_ids: {length} tokens are more than the {self.longest} positions the model has"
            )


class NextTokenHead(nn.Module):
    """Logits of the vocabulary, `scale x W^T + b`: (..., E) to (..., V).

    Args:
        embedding: (V, E) of the target, which W is when tied.
        tied: whether it is; otherwise W is `out`'s.
        scale: of x.
        bias: whether there is b (1, V), a buffer that is stored and not learned.
    """

    bias: Tensor | None

    def __init__(self, embedding: nn.Embedding, *, tied: bool, scale: float = 1.0, bias: bool = False):
        super().__init__()
        self.scale = scale
        self.out = None if tied else nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
        self.register_buffer("bias", torch.zeros(1, embedding.num_embeddings) if bias else None)
        self._embedding = (embedding,)  # in a tuple: it is another module's, and not saved here
        self.product = Product()

    def reset_parameters(self) -> None:
        """The bias at 0, and `out` drawn anew."""
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
    """Labels with `fill` where nothing is to be learned."""
    return labels.masked_fill(labels == IGNORED, fill) if isinstance(labels, Tensor) else labels


def _loss(logits: Tensor, labels: Tensor, layout: TokenLayout) -> Tensor:
    """The mean cross-entropy of the labels that count."""
    if labels.shape != (layout.batch, layout.length):
        raise ValueError(f"labels: expected shape {(layout.batch, layout.length)}, got {tuple(labels.shape)}")
    if layout.real is not None:
        labels = labels.masked_fill(~layout.real, IGNORED)
    return F.cross_entropy(logits.flatten(0, -2), layout.take(labels).flatten(), ignore_index=IGNORED)
