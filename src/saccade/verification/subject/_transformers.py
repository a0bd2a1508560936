"""Whole models of the transformers library as subjects: of token numbers, and of images."""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...interception._hooks import hooked
from ..findings._finding import TargetError, Undecided
from ._calling import guarded
from ._families import promised, text_config
from ._reading import CacheReading, MaskReading, Promise, Reading
from ._subject import Subject
from ._token_models import DECODER_TOKENS, EncoderDecoderModel, PatchModel, longest_input, padding_masks, with_direction


def is_transformers(target: Any) -> bool:
    """Whether the target is a whole model of the transformers library."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(target, transformers.PreTrainedModel)


def transformers_subject(module: Any, promise: Promise) -> Subject:
    """The model as a subject of form "tokens", or "self" for a vision model, of its embedded patches.

    Raises:
        Undecided: it reads neither token numbers nor images.
    """
    config = module.config
    promise = promised(module, config, promise)
    if getattr(config, "is_encoder_decoder", False):
        return _encoder_decoder(module, promise)
    if getattr(module, "main_input_name", "") == "pixel_values":
        return _vision(module, promise)
    return _of_transformers(module, promise)


def _of_transformers(module: Any, promise: Promise) -> Subject:
    model, out, assumed = _positioned_part(module)
    taken = inspect.signature(model.forward).parameters
    cached = "past_key_values" in taken and "use_cache" in taken
    promise = with_direction(promise, _says_causal(model))
    reading = Reading(
        "tokens",
        "BL",
        0,
        *heads_of(model.config),
        names=("input_ids",),
        out=out,
        masks=padding_masks(taken),
        windows=_windows(model.config),
        vocabulary=_vocabulary(module),
        max_length=longest_input(model),
        assumed=assumed,
        constants={"use_cache": False} if cached else {},
        cache=_PASSED if cached and promise.causal else None,
    )
    return Subject(model.eval(), reading, promise)


_PASSED = CacheReading("passed", "past_key_values", "past_key_values", flag="use_cache")
# Of images, of sounds, and of another model's layers.
_OTHER_INPUTS = {"pixel_values", "input_features", "input_values", "encoder_inputs_embeds", "shared_kv_states"}


def _of_tokens(part: Any) -> Any:
    """The output of a part of a model for tokens only, without a cache."""
    flags = {"use_cache": False} if "use_cache" in inspect.signature(part.forward).parameters else {}
    return guarded(part.eval(), input_ids=torch.ones(2, 5, dtype=torch.long, device=part.device), **flags)


def _positioned_part(module: Any) -> tuple[Any, str, tuple[str, ...]]:
    """The submodule with an output for each position, such as a classifier's body, and its name."""
    for part in dict.fromkeys((module, module.base_model)):
        try:
            returned = _of_tokens(part)
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
            out = getattr(returned, name, None)
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
    returned = guarded(whole, torch.ones(2, 5, dtype=torch.long, device=module.device))
    cached = "past_key_values" in taken and "use_cache" in taken
    reading = Reading(
        "tokens",
        "BL",
        0,
        *heads_of(module.config),
        out="logits" if hasattr(returned, "logits") else "last_hidden_state",
        masks=(MaskReading("attention_mask", "BK", "attend", "int64"),) if masks[1] else (),
        vocabulary=vocabulary,
        max_length=longest_input(module),
        constants={"use_cache": False} if cached else {},
        cache=_PASSED if cached else None,
        assumed=DECODER_TOKENS,
    )
    return Subject(whole, reading, with_direction(promise, True))


def _vision(module: Any, promise: Promise) -> Subject:
    model = next((part for part in module.modules() if hasattr(part, "embeddings") and hasattr(part, "config")), None)
    if model is None or not hasattr(model.config, "image_size"):
        raise Undecided(f"{type(module).__name__} has no embeddings of patches that could be replaced")
    why = f"the patches of {type(model).__name__} are given as they leave its embeddings, without positions"
    heads, kv_heads = heads_of(model.config)
    reading = Reading("self", "BLD", model.config.hidden_size, heads, kv_heads, out="last_hidden_state", assumed=(why,))
    return Subject(PatchModel(model.eval()), reading, with_direction(replace(promise, positions=False), False))


def kinds_of_layers(config: Any) -> list[tuple[str, Any]]:
    """(type, configuration) of each layer; empty if the configuration has no types of layers."""
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    if not kinds:
        return []
    # of a configuration of its own for each layer, the whole has no width to read
    layers = getattr(config, "per_layer_config", None) or [config] * len(kinds)
    return list(zip(kinds, layers, strict=False))


def _windows(config: Any) -> frozenset[int | None]:
    """The different left windows of the layers, None for full attention; {None} if the configuration has no types of
    layers."""
    windows: set[int | None] = set()
    for kind, layer in kinds_of_layers(text_config(config)):
        width = getattr(layer, "sliding_window", None) if kind == "sliding_attention" else None
        if kind in ("sliding_attention", "full_attention"):
            windows.add(width - 1 if isinstance(width, int) else None)
    return frozenset(windows or (None,))


def _says_causal(module: Any) -> bool | None:
    """Whether the model is causal, by its configuration, the flags of its attention layers, or its class."""
    if getattr(module.config, "causal", None) is False or getattr(module.config, "attn_type", None) == "bi":
        return False  # XLM, FlauBERT and XLNet predict words with both sides in view
    said = {bool(part.is_causal) for part in _read_by(module) if isinstance(getattr(part, "is_causal", None), bool)}
    if len(said) == 1:
        return said.pop() or bool(getattr(module.config, "is_decoder", False))
    name = type(module).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return True
    return False if name.endswith("ForMaskedLM") else None


def _read_by(module: Any) -> list[Any]:
    """The parts that process text. Layers of an image encoder are not among them."""
    ran: list[Any] = []
    with hooked(module.modules(), before=lambda part, *_: ran.append(part)):
        _of_tokens(module)
    return ran


def heads_of(config: Any) -> tuple[int | None, int | None]:
    """(query heads, key-value heads) by a configuration."""
    config = text_config(config)
    heads = getattr(config, "num_attention_heads", None)
    heads = heads if isinstance(heads, int) else None
    kv_heads = getattr(config, "num_key_value_heads", None)
    return heads, kv_heads if isinstance(kv_heads, int) else heads


def _vocabulary(module: Any) -> int:
    """The tokens that both its encoder and its decoder know, where it has the two."""
    decoder = module.get_decoder() if getattr(module.config, "is_encoder_decoder", False) else None
    tables = [getattr(decoder, "embed_tokens", None)]
    with suppress(NotImplementedError):  # a user's model, whose table has a name of its own
        tables.append(module.get_input_embeddings())
    weights = [getattr(part, "weight", None) for part in tables if not isinstance(part, nn.Linear)]
    sizes = [len(tensor) for tensor in weights if isinstance(tensor, Tensor) and tensor.dim() == 2]
    if not sizes and tables == [None] and isinstance(size := getattr(module.config, "vocab_size", None), int):
        return size
    if not sizes:
        raise Undecided(f"{type(module).__name__} reads no tokens of a text")
    return min(sizes)
