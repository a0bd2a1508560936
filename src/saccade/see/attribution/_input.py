"""The models that can be attributed, and their input: a text, or token ids.

Shape legend: L tokens with the special ones, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...make.models import LanguageModel, Model, TransformersModel
from ...make.models.inputs import check_ids
from ...make.models.output_heads import ItemHead, TokenHead, VocabularyHead
from ...make.models.text.decoder import TextDecoder
from ...make.models.text.encoder import TextEncoder
from ...make.models.text.encoder_decoder import EncoderDecoder
from ...support._restored import evaluating
from ..inspection import TextModel, Word, as_predictor, as_text_model, read_target
from ..inspection._collect import read
from ..inspection._steps._chosen_word import find_word
from ..inspection._targets import target_tokenizer
from ..monitoring._walk import is_compiled

_NO_HEAD = "it has no head that gives logits of tokens; `why_attends` needs none"
_ENCODER = (
    "the encoder of an encoder-decoder gives no logits; `why_attends` needs none, and `attribute` takes "
    '{"input_ids": ..., "decoder_input_ids": ...}'
)
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Input:
    """One text as a model reads it.

    Attributes:
        module: in float32 at least.
        run: reads ids with the module, and returns logits (1, L, V), or what has them as `logits`, if there are any; of
            an encoder-decoder the decoder alone, on what the encoder made before.
        plain: the same of the whole module.
        no_logits: why the module gives no logits of tokens; "" if it does.
        ids: (1, L); of an encoder-decoder those of its decoder, if it reads both.
        pieces: the text of each token.
        words: of the text; None for token ids.
        reader: encodes and decodes tokens; None if the model has no tokenizer.
        causal: whether the last token's logits are those of the next one.
        sources: the tokens that the encoder read, as they are shown, and those without padding, () for other inputs;
            None if there is no encoder whose output a decoder reads.
    """

    module: nn.Module
    run: Callable[[], Any]
    plain: Callable[[], Any]
    no_logits: str
    ids: Tensor
    pieces: tuple[str, ...]
    words: list[Word] | None
    reader: Any
    causal: bool
    sources: tuple[tuple[str, ...], ...] | None = None

    @property
    def tables(self) -> list[Tensor]:
        """(V, E), products with which make the logits, as far as that is known."""
        if _of_transformers(self.module):
            made_by = self.module.get_output_embeddings()  # type: ignore[operator]
            return [] if made_by is None else [made_by.weight]
        if not isinstance(self.module, TextDecoder | TextEncoder):
            return []
        count = _vocabulary(self.module)
        named = self.module.named_parameters()
        return [each for name, each in named if len(each) == count and not re.search(r"\.\d", name)]

    def written(self, token: int) -> str:
        """The text of a token; without a tokenizer its number."""
        return str(token) if self.reader is None else self.reader.written(token)

    @property
    def labels(self) -> tuple[str, ...]:
        """Each token as it is shown, in quotes; part of a word of several tokens is shown with its word."""
        return _shown(self.pieces, self.words)

    def place(self, name: str, wanted: int | str) -> int:
        """The column of a token: a number (negative ones count from the end), or the last token of a word."""
        return self.places(name, wanted)[-1]

    def places(self, name: str, wanted: int | str) -> list[int]:
        """The column of a token, or the columns of a word's tokens."""
        count = self.ids.shape[1]
        if isinstance(wanted, str):
            if self.words is None:
                raise ValueError(f"{name}: with token ids only positions are allowed, not words; got {wanted!r}")
            word = self.words[find_word(self.words, wanted)[0]]
            return list(range(word.first, word.last))
        if not isinstance(wanted, int) or isinstance(wanted, bool):
            raise TypeError(f"{name}: expected a position or a word of the text, got {wanted!r}")
        if not -count <= wanted < count:
            raise ValueError(f"{name}: the model reads {count} tokens, 0 to {count - 1}; got {wanted}")
        return [wanted % count]


def _shown(pieces: Sequence[str], words: Sequence[Word] | None) -> tuple[str, ...]:
    shown = [repr(piece) for piece in pieces]
    for word in words or ():
        if word.last - word.first > 1:
            for i in range(word.first, word.last):
                shown[i] += f" of {word.text!r}"
    return tuple(shown)


def read_input(model: object, text: str | Tensor | Sequence[int] | Mapping[str, Any], *, logits: bool) -> Input:
    """Check and combine a model and its input; `logits`: whether its logits are needed.

    Raises:
        TypeError: neither a text nor ids; a text for a model without a tokenizer. ValueError: a text without words or
            too long, a model without logits of tokens.
    """
    if isinstance(text, Mapping):
        if not logits:
            raise ValueError("text: why_attends reads one text; of an encoder-decoder pass the source alone")
        return _of_arguments(model, text)
    if isinstance(text, str):
        reader = _text_model(model)
        tokens, words = read(reader, text)
        ids, pieces = reader.whole(tokens.ids), reader.pieces(text, tokens.spans)
        if logits and isinstance(reader.module, EncoderDecoder):
            return _with_written_target(reader.module, ids, (_shown(pieces, words),))
        module, no_logits, causal = reader.module, _NO_HEAD, reader.causal
        if logits:
            predictor = as_predictor(reader)
            module, no_logits, causal = predictor.module, "", predictor.mask is None
        return _input(module, no_logits, ids, pieces, words, reader, causal)
    if not isinstance(model, TextModel | nn.Module | LanguageModel):
        raise TypeError(f"model: expected a module or a text model, got {type(model).__name__}")
    module = _module_of(model)
    writer = _reader(model)
    ids, pieces = _read_ids(text, _vocabulary(module), writer)
    no_logits, causal = _logits_of_tokens(module)
    return _input(module, no_logits, ids, pieces, None, writer, causal)


def _with_written_target(module: EncoderDecoder, source: Tensor, sources: tuple[tuple[str, ...]]) -> Input:
    """The decoder on what the model writes for a source, without the tokens that end it."""
    _check_head(module)
    source = source.to(next(module.parameters()).device)
    with evaluating(module):
        target = read_target(module, None, source)
    end = max((word.last for word in target.words if not word.special), default=1)
    given = {"input_ids": source, "decoder_input_ids": torch.tensor([target.ids[:end]])}
    words = [word for word in target.words if word.last <= end]
    return _input(module, "", given, target.pieces[:end], words, target_tokenizer(module), True, sources)


def _of_arguments(model: object, given: Mapping[str, Any]) -> Input:
    """The decoder of an encoder-decoder, on the keyword arguments of its module."""
    module: Any = _module_of(model, whole=True)
    if not isinstance(module, EncoderDecoder) and not (_of_transformers(module) and module.config.is_encoder_decoder):
        kind = type(module).__name__
        raise ValueError(f"text: keyword arguments are those of an encoder-decoder, and {kind} is none; pass token ids")
    if "decoder_input_ids" not in given or (isinstance(module, EncoderDecoder) and "input_ids" not in given):
        raise ValueError(f"text: expected decoder_input_ids, and what the encoder reads, got {', '.join(given)}")
    _check_head(module)
    reader = _reader(model)
    count, writer = None, reader  # saccade.models checks ids itself
    if not isinstance(module, EncoderDecoder):
        count = _vocabulary(module.get_decoder())
    elif reader is not None:
        writer = target_tokenizer(module)
    ids, pieces = _read_ids(given["decoder_input_ids"], count, writer)
    sources: tuple[str, ...] = ()
    real = sources
    given = {**given, "decoder_input_ids": ids}
    if "input_ids" in given:
        given["input_ids"], sources = _read_ids(given["input_ids"], _vocabulary(module), reader)
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == given["input_ids"].shape:
            real = tuple(itertools.compress(sources, mask[0].tolist()))
    shown = _shown(sources, None), _shown(real, None)
    return _input(module, "", given, pieces, None, writer, True, shown)


def _read_ids(given: Any, vocabulary: int | None, writer: Any) -> tuple[Tensor, tuple[str, ...]]:
    """(1, L) checked ids, and the text of each."""
    ids = _ids(given, vocabulary)
    return ids, tuple(str(token) if writer is None else writer.written(token) for token in ids[0].tolist())


def _input(module: nn.Module, no_logits: str, given: Tensor | Mapping[str, Any], *more: Any) -> Input:
    if any(parameter.dtype in _HALF for parameter in module.parameters()):
        module = copy.deepcopy(module).float()  # a sum of a hundred rounded numbers says little
    if any(map(is_compiled, module.modules())):
        raise ValueError("model: torch.compile made a part of it, which runs past what is observed; pass the original")
    weight = next(itertools.chain(module.parameters(), module.buffers()), torch.zeros(()))
    if isinstance(given, Tensor):
        ids = given.to(weight.device)
        run = partial(_run, module, ids)
        return Input(module, run, run, no_logits, ids, *more)
    moved = {name: each.to(weight.device) if isinstance(each, Tensor) else each for name, each in given.items()}
    moved = {name: each.to(weight.dtype) if _is_float(each) else each for name, each in moved.items()}
    return Input(module, *_decoding(module, moved), no_logits, moved["decoder_input_ids"], *more)


def _decoding(module: Any, given: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The runs of the decoder and of the whole. What the encoder makes is a constant of the decoder's stream."""
    made: list[Any] = []
    with evaluating(module), torch.no_grad():
        if isinstance(module, EncoderDecoder):
            memory = module.encode(given["input_ids"], given.get("attention_mask"))
            rest = {name: each for name, each in given.items() if name not in ("input_ids", "attention_mask")}
            return partial(module, memory=memory, **rest), partial(module, **given)
        given = {"use_cache": False, **given}
        encoder = module.get_encoder()
        hook = encoder.register_forward_hook(lambda *ran: made.append(ran[-1]))
        try:
            out = module(**given)
        finally:
            hook.remove()
    if not made or encoder is module:
        raise ValueError(f"model: no encoder ran in {type(module).__name__}, whose output the decoder could be given")
    return partial(module, **given, encoder_outputs=made[0]), lambda: out


def _run(module: Any, ids: Tensor) -> Any:
    if isinstance(module, EncoderDecoder):
        return module.encode(ids)
    if not _of_transformers(module):
        return module(ids)
    has_cache = getattr(module.config, "use_cache", None) is not None
    return module(input_ids=ids, **({"use_cache": False} if has_cache else {}))


def logits_of(out: Any, row: int, length: int, *, sliced: bool = False) -> Tensor:
    """(V,) of a row, of what `Input.run` returned; `sliced`: if it has one row, it is this one, and not the last.

    Raises:
        ValueError: logits of another shape; another row of a model that returns the last one alone.
    """
    found = out[0] if isinstance(out, (tuple, list)) and out else getattr(out, "logits", out)
    if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[1] not in (1, length):
        came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"model: expected logits (1, {length}, vocabulary), or those of the last token, got {came}")
    if found.shape[1] < length and row != length - 1 and not sliced:
        raise ValueError(f"position: the model has logits of the last token alone, {length - 1}; got {row}")
    return found[0, row if found.shape[1] == length else 0]


def _text_model(model: Any) -> TextModel:
    if isinstance(model, TextModel):
        return model
    if isinstance(model, Model | LanguageModel | TransformersModel):
        return as_text_model(model)
    raise TypeError(
        f"model: a text needs a tokenizer, which {type(model).__name__} does not have; open the model with "
        "saccade.inspection.open_model or saccade.models.load, or pass token ids"
    )


def _module_of(model: Any, *, whole: bool = False) -> nn.Module:
    """The module that reads a text; `whole`: with the decoder of an encoder-decoder."""
    if isinstance(model, TextModel):
        model = model.lm if hasattr(model, "lm") else model.module
    if isinstance(model, LanguageModel):
        return model.model
    module: Any = model.module if isinstance(model, TransformersModel) else getattr(model, "_orig_mod", model)
    encodes = _of_transformers(module) and module.config.is_encoder_decoder and not whole
    return module.get_encoder() if encodes else module


def _of_transformers(module: Any) -> bool:
    return hasattr(module, "get_input_embeddings") and hasattr(module, "config")


def _logits_of_tokens(module: nn.Module) -> tuple[str, bool]:
    """Why the module gives no logits of tokens, or "", and whether they are those of the next token."""
    if isinstance(module, EncoderDecoder):
        return _ENCODER, False
    if isinstance(module, TextDecoder):
        return "" if module.request.head is not None and not isinstance(module.head, ItemHead) else _NO_HEAD, True
    if isinstance(module, TextEncoder):
        fills = isinstance(module.head, TokenHead) and isinstance(module.head.inner, VocabularyHead)
        return "" if fills else _NO_HEAD, False
    if _of_transformers(module):
        if module.config.is_encoder_decoder:  # type: ignore[union-attr]
            return _ENCODER, False
        fills = type(module).__name__.endswith(("MaskedLM", "PreTraining"))
        return "" if module.get_output_embeddings() is not None else _NO_HEAD, not fills  # type: ignore[operator]
    return "", True


def _check_head(module: Any) -> None:
    """ValueError if an encoder-decoder gives no logits of tokens."""
    if (module.head if isinstance(module, EncoderDecoder) else module.get_output_embeddings()) is None:
        raise ValueError(f"model: {_NO_HEAD}")


def _is_float(each: Any) -> bool:
    return isinstance(each, Tensor) and each.is_floating_point()


def _ids(given: Any, vocabulary: int | None) -> Tensor:
    if not isinstance(given, Tensor):
        if not isinstance(given, Sequence) or not all(isinstance(token, int) for token in given):
            raise TypeError(f"text: expected a text, or token ids, got {type(given).__name__}")
        given = torch.tensor(given, dtype=torch.int64)
    ids = given[None] if given.ndim == 1 else given
    if ids.ndim != 2 or len(ids) != 1 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            "text: expected the ids of one text, integers (length,) or (1, length), got "
            f"{given.dtype} {tuple(given.shape)}"
        )
    if vocabulary is not None:
        check_ids("text", ids, vocabulary)
    return ids


def _vocabulary(module: Any) -> int | None:
    """The number of tokens; None if it is not known."""
    named = (getattr(module, name, None) for name in ("tokens", "embedding"))
    table = next((each for each in named if isinstance(each, nn.Embedding)), None)
    table = module.get_input_embeddings() if _of_transformers(module) else table
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _reader(model: Any) -> TextModel | None:
    """The tokenizer's decoder; None for a model made in memory, without a tokenizer."""
    if not isinstance(model, Model | LanguageModel | TransformersModel):
        return model if isinstance(model, TextModel) else None
    try:
        return as_text_model(model)
    except (FileNotFoundError, TypeError, ValueError):  # no tokenizer, or one that cannot be read
        return None
