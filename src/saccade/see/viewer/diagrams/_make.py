"""The implementation of `saccade.diagram`: chooses the kind, and the module and numbers to draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....make.models import Model
from ....make.models.text.encoder_decoder import EncoderDecoder
from ....operator._attention import attention
from ....operator._call import ObservedCall
from ....operator._masks import Mask
from ....operator.nn import MultiHeadAttention, SelfAttention, from_torch
from ....operator.variants import MechanismConfig
from ...inspection import TextModel, as_text_model, open_model
from ...inspection._look import check_head
from ...inspection._steps._chosen_head import checked_place
from ._architectures import ARCHITECTURES, ORIGINAL, architecture, is_architecture
from ._attention import MOST_TOKENS, draw_attention
from ._block import draw_blocks, is_graph_layer
from ._canvas import Canvas
from ._decoder_step import draw_step
from ._diagram import Diagram, check_theme
from ._head import LayerNumbers, in_words, layer_numbers, module_numbers, spread_head, usual_text
from ._modules import bare, is_block, parameter_count, tree_of, walk
from ._multi_head import draw_multi_head
from ._plain import NARROW, draw_plain_attention, draw_plain_heads
from ._step_numbers import StepReading, step_numbers
from ._transformer import draw_transformer
from ._variants import all_variants, draw_variants, of_mask, of_mechanism

KINDS = ("attention", "multi-head", "block", "transformer", "decoder-step", "variants")
READING = ("attention", "multi-head", "decoder-step")  # kinds with the numbers of a text
LAYER = 1  # of the embedded model: heads of its first layer mostly attend to neighbours
_TOKENS = 5  # random embeddings for a module without a text
_ATTENTION = (MultiHeadAttention, SelfAttention, nn.MultiheadAttention)

Head = tuple[int, int] | tuple[str, int, int] | str | None


def diagram(
    source: Any = None,
    kind: str | None = None,
    *,
    text: str | None = None,
    model: Any = None,
    head: Head = None,
    theme: str = "auto",
    target: str | None = None,
    plain: bool = False,
) -> Diagram:
    """`saccade.diagram`, which documents arguments and errors."""
    check_theme(theme)
    if isinstance(source, str) and source in KINDS and kind is None:
        source, kind = None, source
    if source is not None and model is not None:
        raise ValueError("model: source already names a model; pass only one of them")
    chosen = source if model is None else model
    kind = _kind_of(chosen) if kind is None else kind
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    for name, given in (("text", text), ("head", head)):
        if given is not None and kind not in READING:
            raise ValueError(f"{name}: not for {kind}, which reads no text; {', '.join(READING)} do")
    make: dict[str, Callable[..., Diagram]] = {"attention": _attention, "multi-head": _multi_head}
    if plain and kind not in make:
        raise ValueError(f"plain: not for {kind}; {' and '.join(make)} have a plain form")
    if kind == "decoder-step":
        return _decoder_step(chosen, text, head, theme, target)
    if target is not None:
        raise ValueError(f"target: not for {kind}; decoder-step of an encoder-decoder reads one")
    if kind in make:
        return make[kind](chosen, text, head, theme, plain)
    return {"block": _block, "transformer": _transformer, "variants": _variants}[kind](chosen, theme)


def _kind_of(source: Any) -> str:
    if isinstance(source, Mask | MechanismConfig):
        return "variants"
    if source is None or isinstance(source, SelfAttention):
        return "attention"
    if isinstance(source, MultiHeadAttention | nn.MultiheadAttention):
        return "multi-head"
    return "block" if isinstance(source, nn.Module) and is_block(source) else "transformer"


# --- with the numbers of a text ---------------------------------------------------------------------------------------


def _attention(source: Any, text: str | None, head: Head, theme: str, plain: bool) -> Diagram:
    numbers, number = _numbers_of(source, text, head)
    number = spread_head(numbers.weights) if number is None else number
    numbers = in_words(numbers) if plain else numbers
    canvas = Canvas(NARROW) if plain else Canvas()
    description = (draw_plain_attention if plain else draw_attention)(canvas, numbers, number)
    title = f"Self-attention of {numbers.of}: layer {numbers.layer} head {number}, {numbers.model}"
    names = ("query", "key", "value", "scores", "weights", "out")
    facts = {name: getattr(numbers, name)[number] for name in names}
    facts |= {"labels": numbers.labels, "layer": numbers.layer, "head": number, "scale": numbers.scale}
    return Diagram("attention", title, description, theme, facts, canvas)


def _multi_head(source: Any, text: str | None, head: Head, theme: str, plain: bool) -> Diagram:
    numbers, _ = _numbers_of(source, text, head)
    if numbers.inputs is None or numbers.outputs is None:
        raise ValueError(f"model: the module of {numbers.model} that makes the attention call is unknown")
    module = numbers.module
    assert module is not None
    numbers = in_words(numbers) if plain else numbers
    canvas, count = Canvas(NARROW) if plain else Canvas(), parameter_count(module)
    draw = draw_plain_heads if plain else draw_multi_head
    description = draw(canvas, numbers, _projection(module), count)
    title = f"Multi-head attention of {numbers.of}: layer {numbers.layer}, {numbers.model}"
    names = ("inputs", "weights", "out", "outputs")
    facts = {name: getattr(numbers, name) for name in names}
    facts |= {"labels": numbers.labels, "layer": numbers.layer, "parameters": count}
    return Diagram("multi-head", title, description, theme, facts, canvas)


def _decoder_step(source: Any, text: str | None, head: Head, theme: str, target: str | None) -> Diagram:
    model, name = _text_model(source, "decoder-step")
    pair = isinstance(model.module, EncoderDecoder)
    if head is not None:
        head, named = _without_part(head)
        checked_place(model, ("decoder", *_parsed(head)) if pair or named else _parsed(head), None)
    layers = len(model.module.decoder.blocks) if isinstance(model.module, EncoderDecoder) else model.layers
    layer, number = (min(LAYER, layers - 1), None) if head is None else _parsed(head)
    read = usual_text(model, MOST_TOKENS) if text is None else text
    numbers = step_numbers(model, read, layer, target)
    number, of_source = (_shown_head(reading, number) for reading in (numbers.own, numbers.source))
    canvas = Canvas()
    description = draw_step(canvas, numbers, number, of_source)
    own = numbers.own
    facts = {"labels": own.labels, "before": numbers.before, "after": own.shape, "token_bytes": own.token_bytes}
    facts |= {"following": numbers.following, "weights": own.weights[number], "layer": layer, "head": number}
    if numbers.source is not None:
        facts |= {"source": numbers.source.labels, "source_weights": numbers.source.weights[of_source]}
    title = f"One step of decoding with a cache: layer {layer} head {number}, {name}"
    return Diagram("decoder-step", title, description, theme, facts, canvas)


def _shown_head(reading: StepReading | None, chosen: int | None) -> int:
    """The chosen head if it exists, else the head that weighs several words most evenly."""
    if reading is None or (chosen is not None and chosen < len(reading.weights)):
        return chosen or 0
    return spread_head(reading.weights[:, None].repeat(2, 1))


def _numbers_of(source: Any, text: str | None, head: Head) -> tuple[LayerNumbers, int | None]:
    """The numbers, and the chosen head, if any."""
    if isinstance(source, _ATTENTION):
        if text is not None:
            raise ValueError(f"text: {type(source).__name__} reads embeddings, not a text")
        numbers = _random_numbers(source)
        _, number = _parsed(head) if head is not None else (0, None)
        if number is not None and not 0 <= number < numbers.heads:
            raise ValueError(f"head: {number} does not exist; this module has the heads 0 to {numbers.heads - 1}")
        return numbers, number
    model, name = _text_model(source, "attention")
    layer, number = _place(head, model)
    read = usual_text(model, MOST_TOKENS) if text is None else text
    return layer_numbers(model, name, read, layer, MOST_TOKENS), number


def _text_model(source: Any, kind: str) -> tuple[TextModel, str]:
    if isinstance(source, str | Path) and is_architecture(str(source)):
        raise ValueError(f"model: {source!r} is an architecture without weights; {kind} needs a model with its weights")
    if source is None:
        return open_model(None), "embedded model"
    if isinstance(source, str | Path):
        return open_model(source), Path(source).name
    if isinstance(source, Model | TextModel):
        model = as_text_model(source)
        return model, Path(getattr(model, "name", "") or "model").name
    raise TypeError(
        f"source: {kind} takes a model that reads text or a module of attention, got {type(source).__name__}"
    )


def _place(head: Head, model: TextModel) -> tuple[int, int | None]:
    if head is None:
        return min(LAYER, model.layers - 1), None
    place = _parsed(head)
    check_head(model, place)
    return place


def _without_part(head: Head) -> tuple[Head, bool]:
    """A head of a decoder as (layer, head) or 'layer.head', and whether the decoder was named."""
    if isinstance(head, str) and head.startswith("decoder."):
        return head.removeprefix("decoder."), True
    if isinstance(head, tuple) and len(head) == 3 and head[0] == "decoder":
        return head[1:], True
    return head, False


def _parsed(head: Head) -> tuple[int, int]:
    """(layer, head) from either form."""
    if isinstance(head, str):
        layer, point, number = head.partition(".")
        if point and layer.isdecimal() and number.isdecimal():
            return int(layer), int(number)
    elif isinstance(head, tuple) and len(head) == 2 and isinstance(head[0], int) and isinstance(head[1], int):
        return head[0], head[1]
    raise ValueError(f"head: expected (layer, head) or 'layer.head' such as 1.3, got {head!r}")


def _random_numbers(module: nn.Module) -> LayerNumbers:
    """The numbers of a module of attention on embeddings from N(0, 1), seed 0."""
    name = type(module).__name__
    own: Any = from_torch(module) if isinstance(module, nn.MultiheadAttention) else module
    width = own.query.in_features if isinstance(own, SelfAttention) else own.config.width
    weight = next(own.parameters())
    x = torch.randn(1, _TOKENS, width, generator=torch.Generator().manual_seed(0)).to(weight)
    calls: list[ObservedCall] = []
    with torch.no_grad():
        if isinstance(own, SelfAttention):
            query, key, value = (layer(x)[:, None] for layer in (own.query, own.key, own.value))
            outputs = own(x)
            calls.append(ObservedCall(query, key, value, out=attention(query, key, value), source=name))
        elif own.config.mechanism is not None:
            raise ValueError(f"source: expected softmax attention, got {own.config.mechanism.name!r} without weights")
        else:
            outputs = own.eval()(x, observe=calls.append)
    return module_numbers(module, name, calls[0], x, outputs)


def _projection(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of the last linear layer of attention."""
    own = getattr(module, "output", None) or getattr(module, "out_proj", None) or getattr(module, "o_proj", None)
    if isinstance(own, nn.Linear):
        return own.in_features, own.out_features
    return None


# --- from the module tree ---------------------------------------------------------------------------------------------


def _module_of(source: Any) -> tuple[str, nn.Module]:
    if isinstance(source, str | Path) and is_architecture(str(source)):
        return architecture(str(source))
    if isinstance(source, nn.Module):
        return type(bare(source)).__name__, bare(source)
    if source is not None and not isinstance(source, str | Path | TextModel):
        raise TypeError(f"source: expected a module, a model or its name, got {type(source).__name__}")
    try:
        model, name = _text_model(source, "transformer")
        return name, bare(model.module)
    except FileNotFoundError as error:
        known = ", ".join((ORIGINAL, *ARCHITECTURES))
        raise FileNotFoundError(f"{error}; architectures without weights: {known}") from None


def _block(source: Any, theme: str) -> Diagram:
    name, module = _module_of(source)
    parts = [part for part in walk(tree_of(module)) if part.kind == "block" or is_graph_layer(part)]
    if not parts:
        raise ValueError(f"source: {name} has no block of saccade.nn, and no torch.nn.TransformerEncoderLayer")
    canvas = Canvas()
    shown = parts[:2]
    description = draw_blocks(canvas, shown, name)
    title = f"{' and '.join(dict.fromkeys(part.label for part in shown))} of {name}"
    facts = {"parameters": [part.parameters for part in shown]}
    return Diagram("block", title, description, theme, facts, canvas)


def _transformer(source: Any, theme: str) -> Diagram:
    name, module = _module_of(source)
    if not any(part.kind in ("attention", "cross") for part in walk(tree_of(module))):
        raise ValueError(f"source: {name} has no attention to draw")
    canvas = Canvas()
    description, total = draw_transformer(canvas, module, name)
    return Diagram("transformer", f"Architecture of {name}", description, theme, {"parameters": total}, canvas)


def _variants(source: Any, theme: str) -> Diagram:
    canvas = Canvas()
    if source is None:
        shown, title = all_variants(), "Variants of attention"
    elif isinstance(source, Mask):
        shown = [of_mask(source, "Pairs that a mask shows")]
        title = f"Pairs that {source!r} shows"
    elif isinstance(source, MechanismConfig):
        shown = [of_mechanism(source)]
        title = f"What {type(source).__name__} computes"
    else:
        raise TypeError(
            f"source: variants takes a mask or a mechanism of saccade.variants, got {type(source).__name__}"
        )
    description = draw_variants(canvas, shown)
    facts = {"pairs": {variant.name: variant.pairs for variant in shown}}
    return Diagram("variants", title, description, theme, facts, canvas)
