"""Whole models as subjects: of token numbers, and of images.

Shape legend: B batch, L length, S source length, E model width, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...make.models import DecoderLM, LanguageModel
from ...make.models.text.decoder import TextDecoder
from ...make.models.text.encoder import TextEncoder
from ...make.models.text.encoder_decoder import EncoderDecoder
from ...operator._masks import Padding
from ..findings._finding import TargetError, Undecided
from ._calling import guarded
from ._families import promised
from ._published import PublishedText, published_reading
from ._reading import CacheReading, MaskReading, Promise, Reading
from ._shortened import LoadedModel
from ._subject import Subject
from .discovery._documentation import DocumentedSource

_SOURCE_LENGTH = 6
_SOURCES = ("src", "source", "input_ids", "encoder_input_ids", "src_ids", "enc_input", "src_tokens", "encoder_input")
_TARGETS = tuple(
    "tgt trg target decoder_input_ids tgt_ids trg_ids dec_input tgt_tokens prev_output_tokens decoder_input".split()
)
_EMPTY = inspect.Parameter.empty


class TokenModel(nn.Module):
    """A model of token numbers called in one way: `forward(tokens, ...)`, tokens (B, L); `model` is the user's own."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model


class SaccadeDecoder(TokenModel):
    """Saccade's: padding is said by a mask (B, L), True = real."""

    model: DecoderLM

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> Tensor:
        padding = None if attention_mask is None else Padding(attention_mask.bool())
        return self.model(tokens, padding=padding, cache=cache)


class WithTargets(TokenModel):
    """A model that gives every position's logits only where targets are given, as nanoGPT's does."""

    def __init__(self, model: nn.Module, argument: str):
        super().__init__(model)
        self.argument = argument

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens, **{self.argument: tokens.contiguous()})  # which its loss may view(-1)


class EncoderDecoderModel(TokenModel):
    """An encoder-decoder as its decoder: `tokens` go to the decoder.

    `source` (B, S) goes to the encoder; without one every item is given the same few tokens.
    """

    def __init__(self, model: nn.Module, names: tuple[str, str], masks: tuple[str | None, str | None], vocabulary: int):
        super().__init__(model)
        self.names, self.masks = names, masks  # (the encoder's, the decoder's)
        generator = torch.Generator().manual_seed(7)
        low = min(4, vocabulary - 1)
        self.register_buffer(
            "source", torch.randint(low, vocabulary, (1, _SOURCE_LENGTH), generator=generator), persistent=False
        )

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        **more: Any,
    ) -> Any:
        own: Any = self.source
        source = own.expand(len(tokens), -1) if source is None else source
        given = {self.names[0]: source, self.names[1]: tokens, **more}
        for name, mask in zip(self.masks, (source_mask, attention_mask), strict=True):
            if mask is not None and name is not None:
                mask = mask.expand(len(tokens), -1)
                # nn.Transformer's name and meaning: True = padding
                given[name] = ~mask.bool() if name.endswith("key_padding_mask") else mask
        return self.model(**given)


class PatchModel(nn.Module):
    """A vision model from its embedded patches on: x (B, L, E) takes the place of what its embeddings give.

    No positions are added then, and any number of patches can be given.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def pixels(self, batch: int, seed: int = 0) -> Tensor:
        """(B, channels, height, width), standard normal."""
        config: Any = self.model.config
        sides = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn((batch, config.num_channels, *sides), generator=generator, dtype=torch.float64)
        first = next(self.model.parameters())
        return drawn.to(first.device, first.dtype)

    def forward(self, x: Tensor) -> Any:
        model: Any = self.model
        with model.embeddings.register_forward_hook(lambda *_: x):
            return model(pixel_values=self.pixels(len(x)))


def is_transformers(target: Any) -> bool:
    """Whether it is a whole model of the transformers library."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(target, transformers.PreTrainedModel)


def takes_tokens(target: Any) -> bool:
    """Whether a module is a whole model, of token numbers or of images; seen by calling it."""
    known = LoadedModel | LanguageModel | DecoderLM | TokenModel | PatchModel | PublishedText
    if isinstance(target, known) or is_transformers(target):
        return True
    if not isinstance(target, nn.Module) or not any(isinstance(one, nn.Embedding) for one in target.modules()):
        return False
    return _table(target) is not None


def token_subject(target: Any, promise: Promise | None = None) -> Subject:
    """A whole model as a subject: form "tokens", or "self" for a vision model, of its embedded patches.

    Raises:
        Undecided: what it reads is neither token numbers nor images.
    """
    promise = promise or Promise()
    if isinstance(target, LoadedModel):
        subject = token_subject(target.model, promise)
        told = replace(subject.reading, assumed=(*target.assumed, *subject.reading.assumed))
        return replace(subject, reading=told)
    module: nn.Module = target.model if isinstance(target, LanguageModel) else target
    if isinstance(module, DecoderLM):
        return _saccade_decoder(module, promise)
    if isinstance(module, PublishedText):
        return _published(module, promise)
    if not is_transformers(module):
        return _plain_module(module, promise)
    config: Any = module.config
    promise = promised(module, config, promise)
    if getattr(config, "is_encoder_decoder", False):
        return _encoder_decoder(module, promise)
    if getattr(module, "main_input_name", "") == "pixel_values":
        return _vision(module, promise)
    return _of_transformers(module, promise)


def _saccade_decoder(module: DecoderLM, promise: Promise) -> Subject:
    reading = Reading(
        "tokens",
        "BL",
        0,
        module.config.heads,
        module.config.kv_heads,
        vocabulary=module.config.vocabulary,
        masks=(MaskReading("attention_mask", "BK", "attend"),),
        max_length=module.config.context,
        cache=CacheReading("made", "cache", make=module.cache),
    )
    return Subject(SaccadeDecoder(module), reading, _causal(promise, True))


def _published(module: PublishedText, promise: Promise) -> Subject:
    module = module.eval()
    stack: Any = module.encoder if isinstance(module, TextEncoder) else module.decoder
    scales = {block.attention.config.scale for block in stack.blocks}
    if promise.scale is None and len(scales) == 1:
        promise = replace(promise, scale=scales.pop())
    if not isinstance(module, EncoderDecoder):
        return Subject(module, published_reading(module), _causal(promise, isinstance(module, TextDecoder)))
    if "decoder_input_ids" not in inspect.signature(module.forward).parameters:
        raise Undecided(
            f"{type(module).__name__} makes its decoder's tokens of its encoder's, so neither can be changed alone: "
            'load the folder with head="none"'
        )
    names, masks = ("input_ids", "decoder_input_ids"), ("attention_mask", "decoder_attention_mask")
    whole = EncoderDecoderModel(module, names, masks, module.tokens.num_embeddings)
    reading = published_reading(
        module, ("the tokens are the decoder's; its encoder reads the same few for every item",)
    )
    return Subject(whole, reading, _causal(promise, True))


def _of_transformers(module: Any, promise: Promise) -> Subject:
    model, out, assumed = _positioned_part(module)
    taken = inspect.signature(model.forward).parameters
    cached = "past_key_values" in taken and "use_cache" in taken
    promise = _causal(promise, _says_causal(model))
    reading = Reading(
        "tokens",
        "BL",
        0,
        *heads_of(model.config),
        names=("input_ids",),
        out=out,
        masks=_padding(taken),
        windows=_windows(model.config),
        vocabulary=_vocabulary(module),
        max_length=_longest(model),
        assumed=assumed,
        constants={"use_cache": False} if cached else {},
        cache=_PASSED if cached and promise.causal else None,
    )
    return Subject(model.eval(), reading, promise)


_PASSED = CacheReading("passed", "past_key_values", "past_key_values", flag="use_cache")
# Of images, of sounds, and of another model's layers.
_OTHER_INPUTS = {"pixel_values", "input_features", "input_values", "encoder_inputs_embeds", "shared_kv_states"}


def _of_tokens(part: Any) -> Any:
    """What a part of a model returns for tokens alone, without a cache."""
    flags = {"use_cache": False} if "use_cache" in inspect.signature(part.forward).parameters else {}
    return guarded(part.eval(), input_ids=torch.ones(2, 5, dtype=torch.long, device=part.device), **flags)


def _positioned_part(module: Any) -> tuple[Any, str, tuple[str, ...]]:
    """The part of a model that gives something for each position, and the name of it: a classifier's body."""
    for part in dict.fromkeys((module, module.base_model)):
        try:
            found = _of_tokens(part)
        except TargetError as error:
            if part is not module:
                continue  # it reads what its heads make of the tokens
            if needed := _OTHER_INPUTS.intersection(inspect.signature(part.forward).parameters):
                raise Undecided(
                    f"{type(part).__name__} cannot be called with token numbers alone ({error}): it takes "
                    f"{', '.join(sorted(needed))}, which how=Reading(..., call=adapter) can give"
                ) from None
            raise
        for name in ("logits", "last_hidden_state"):
            out = getattr(found, name, None)
            if isinstance(out, Tensor) and out.dim() == 3 and out.shape[:2] == (2, 5):
                whole = part is module
                why = f"{type(module).__name__} gives no output for each position: its {type(part).__name__} is tested"
                return part, name, () if whole else (why,)
    raise Undecided(f"{type(module).__name__} gives neither logits nor a last_hidden_state for each token")


def _encoder_decoder(module: Any, promise: Promise) -> Subject:
    taken = inspect.signature(module.forward).parameters
    if "decoder_input_ids" not in taken or "input_ids" not in taken:
        raise Undecided(f"{type(module).__name__} reads no tokens of a text in its encoder and decoder")
    vocabulary = _vocabulary(module)
    masks = tuple(name if name in taken else None for name in ("attention_mask", "decoder_attention_mask"))
    whole = EncoderDecoderModel(module.eval(), ("input_ids", "decoder_input_ids"), masks, vocabulary)  # type: ignore[arg-type]
    found = guarded(whole, torch.ones(2, 5, dtype=torch.long, device=module.device))
    cached = "past_key_values" in taken and "use_cache" in taken
    reading = Reading(
        "tokens",
        "BL",
        0,
        *heads_of(module.config),
        out="logits" if hasattr(found, "logits") else "last_hidden_state",
        masks=(MaskReading("attention_mask", "BK", "attend", "int64"),) if masks[1] else (),
        vocabulary=vocabulary,
        max_length=_longest(module),
        constants={"use_cache": False} if cached else {},
        cache=_PASSED if cached else None,
        assumed=("the tokens are the decoder's; its encoder reads the same few for every item",),
    )
    return Subject(whole, reading, _causal(promise, True))


def _vision(module: Any, promise: Promise) -> Subject:
    model = next((part for part in module.modules() if hasattr(part, "embeddings") and hasattr(part, "config")), None)
    if model is None or not hasattr(model.config, "image_size"):
        raise Undecided(f"{type(module).__name__} has no embeddings of patches that could be replaced")
    why = f"the patches of {type(model).__name__} are given as they leave its embeddings, without positions"
    heads, kv_heads = heads_of(model.config)
    reading = Reading("self", "BLD", model.config.hidden_size, heads, kv_heads, out="last_hidden_state", assumed=(why,))
    return Subject(PatchModel(model.eval()), reading, _causal(replace(promise, positions=False), False))


def _plain_module(module: nn.Module, promise: Promise) -> Subject:
    found = _table(module)
    if found is None:
        raise Undecided(f"{type(module).__name__} takes no token numbers: an input (batch, length) of them fails")
    vocabulary, names, two = found
    target: nn.Module = module.eval()
    masks: tuple[MaskReading, ...] = ()
    assumed: tuple[str, ...] = ()
    if two:
        taken = inspect.signature(module.forward).parameters
        own = tuple(named(taken, options) for options in _PAIR_MASKS)
        target = EncoderDecoderModel(module, names, own, vocabulary).eval()  # type: ignore[arg-type]
        assumed = (f"{names[0]} is read by its encoder, {names[1]} by its decoder",)
    tokens = torch.ones(2, 5, dtype=torch.long)
    returned = guarded(target, tokens, **({start: 0} if (start := _start(module)) else {}))
    out = _output_place(returned, 5)
    if out is _NOWHERE and not two:
        argument = named(inspect.signature(module.forward).parameters, ("targets", "labels", "target", "y"))
        if argument is not None:
            target = WithTargets(module, argument).eval()
            out = _output_place(guarded(target, tokens), 5)
            assumed = (f"every position's logits come only with {argument}=: the tokens themselves are given",)
    if out is _NOWHERE:
        raise Undecided(f"{type(module).__name__} gives no output (batch, length, ...) for token numbers")
    if not two and target is module:
        masks = _padding(inspect.signature(module.forward).parameters, "bool")
    layout = "LB" if DocumentedSource.of(module).layout(names[0], 2) == "LB" else "BL"
    assumed += ("tokens are (length, batch), as documented",) if layout == "LB" else ()
    reading = Reading(
        "tokens",
        layout,
        0,
        out=out,
        masks=masks,
        vocabulary=vocabulary,
        max_length=_longest(module),
        assumed=assumed,
        constants={} if start is None else {start: 0},
        cache=None if start is None else CacheReading("inside", position=start),
    )
    return Subject(target, reading, _causal(promise, True if two else None))


_NOWHERE = "nowhere"
_PAIR_MASKS = (
    ("attention_mask", "src_mask", "src_key_padding_mask", "source_mask"),
    ("decoder_attention_mask", "tgt_key_padding_mask"),
)


def _table(module: nn.Module) -> tuple[int, tuple[str, ...], bool] | None:
    """(vocabulary, names of the inputs, whether there are two) of a module that looks tokens up, else None."""
    read: list[tuple[int, Tensor]] = []

    def seen(table: Any, given: tuple[Any, ...]) -> None:
        read.append((table.num_embeddings, given[0]))

    hooks = [part.register_forward_pre_hook(seen) for part in module.modules() if isinstance(part, nn.Embedding)]
    tokens = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1]])
    try:
        needed = _needed(module)
        if not 1 <= len(needed) <= 2:
            return None
        two = len(needed) == 2 and needed[0] in _SOURCES and needed[1] in _TARGETS
        if len(needed) == 2 and not two:
            return None
        with torch.no_grad():
            guarded(module, *[tokens] * len(needed), **({start: 0} if (start := _start(module)) else {}))
    except TargetError:
        return None
    finally:
        for hook in hooks:
            hook.remove()
    sizes = [size for size, given in read if isinstance(given, Tensor) and torch.equal(given.cpu(), tokens)]
    return (min(sizes), tuple(needed), two) if sizes else None


def _needed(module: nn.Module) -> list[str]:
    """The arguments of its forward that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = inspect.signature(module.forward).parameters.values()
    needed = [one.name for one in taken if one.default is _EMPTY and one.kind in kinds and one.name not in _STARTS]
    return needed or [one.name for one in taken if one.kind in kinds][:1]


_STARTS = ("start_pos", "start_position", "offset", "past_length", "pos_offset", "cur_pos")


def _start(module: nn.Module) -> str | None:
    """The argument that must say at which position the tokens begin, as in the published reference of Llama."""
    taken = inspect.signature(module.forward).parameters
    return next((name for name in _STARTS if name in taken and taken[name].default is _EMPTY), None)


def _output_place(returned: Any, length: int) -> int | str | None:
    """Where in what was returned the output for each position is; `_NOWHERE` if it is not."""

    def fits(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == (2, length)

    if fits(returned):
        return None
    if isinstance(returned, (tuple, list)):
        return next((at for at, one in enumerate(returned) if fits(one)), _NOWHERE)
    return next((name for name in ("logits", "last_hidden_state") if fits(_item(returned, name))), _NOWHERE)


def _item(returned: Any, name: str) -> Any:
    return returned.get(name) if isinstance(returned, dict) else getattr(returned, name, None)


def named(taken: Any, options: tuple[str, ...]) -> str | None:
    """The first of `options` that is among the arguments `taken`."""
    return next((name for name in options if name in taken), None)


def _padding(taken: Any, dtype: str = "int64") -> tuple[MaskReading, ...]:
    return (MaskReading("attention_mask", "BK", "attend", dtype),) if "attention_mask" in taken else ()


def _causal(promise: Promise, said: bool | None) -> Promise:
    return promise if promise.causal is not None or said is None else replace(promise, causal=said)


def _windows(config: Any) -> frozenset[int | None]:
    """By how many tokens before its own a layer's attention is limited, for layers that differ; {None} where the
    configuration says nothing by layer."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    if not kinds:
        return frozenset((None,))
    # of a configuration of its own for each layer, the whole has no width to read
    layers = getattr(config, "per_layer_config", None) or [config] * len(kinds)
    windows: set[int | None] = set()
    for kind, layer in zip(kinds, layers, strict=False):
        width = getattr(layer, "sliding_window", None) if kind == "sliding_attention" else None
        if kind in ("sliding_attention", "full_attention"):
            windows.add(width - 1 if isinstance(width, int) else None)
    return frozenset(windows or (None,))


def _says_causal(module: Any) -> bool | None:
    """By its configuration, by what its attention layers say of themselves, else by its class."""
    if getattr(module.config, "causal", None) is False or getattr(module.config, "attn_type", None) == "bi":
        return False  # XLM, FlauBERT and XLNet predict words with both sides in view
    said = {bool(one.is_causal) for one in _read_by(module) if isinstance(getattr(one, "is_causal", None), bool)}
    if len(said) == 1:
        return said.pop() or bool(getattr(module.config, "is_decoder", False))
    name = type(module).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return True
    return False if name.endswith("ForMaskedLM") else None


def _read_by(module: Any) -> list[Any]:
    """Its parts that tokens alone run through: the layers of an image encoder say nothing of the text."""
    ran: list[Any] = []
    hooks = [part.register_forward_pre_hook(lambda part, _: ran.append(part)) for part in module.modules()]
    try:
        _of_tokens(module)
    finally:
        for hook in hooks:
            hook.remove()
    return ran


def heads_of(config: Any) -> tuple[int | None, int | None]:
    """(query heads, key-value heads) by a configuration."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", None)
    heads = heads if isinstance(heads, int) else None
    kv_heads = getattr(config, "num_key_value_heads", None)
    return heads, kv_heads if isinstance(kv_heads, int) else heads


def _vocabulary(module: Any) -> int:
    """The tokens that both its encoder and its decoder know, where it has the two."""
    decoder = module.get_decoder() if getattr(module.config, "is_encoder_decoder", False) else None
    tables = [module.get_input_embeddings(), getattr(decoder, "embed_tokens", None)]
    weights = [getattr(one, "weight", None) for one in tables if not isinstance(one, nn.Linear)]
    sizes = [len(one) for one in weights if isinstance(one, Tensor) and one.dim() == 2]
    if not sizes:
        raise Undecided(f"{type(module).__name__} reads no tokens of a text")
    return min(sizes)


def _longest(module: nn.Module) -> int | None:
    """The smallest limit that its configuration or its tables of positions say."""
    config: Any = getattr(module, "config", None)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "block_size")]
    limits += [getattr(module, name, None) for name in ("max_len", "max_length", "block_size", "context_length")]
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding) and ("pos" in name.lower() or name.endswith("wpe")):
            # RoBERTa counts positions from behind its padding index.
            limits.append(part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    return min((one for one in limits if isinstance(one, int) and one > 0), default=None)
