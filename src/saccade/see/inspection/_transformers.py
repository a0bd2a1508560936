"""Checkpoints of the transformers library as models that read text: BERT-like, GPT-like, Llama-like.

Shape legend: B texts, L tokens with the special ones, Hq query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...interception._hooks import SdpaCall, sdpa_handled_by
from ...interception._hooks.transformers import functions_wrapped_by, meaning_of
from ...make.models import TransformersModel
from ...make.models._shortened import shortened
from ...make.models.checkpoints.transformers_reading import (
    UnreadableCheckpoint,
    body_of,
    class_of,
    contained,
    read_configuration,
    read_tokenizer,
    read_weights,
)
from ...operator import _observers
from ...operator._call import ObservedCall
from ...support._numbers import joined
from ..monitoring import watch
from ..monitoring._layers import sentences
from ._models import LayerObserver, TextModel, Tokens, weights_of

_PROBE = "The cat sat on the mat."
_UNLIMITED = 10**9  # tokenizers without a limit have 10**30


class TransformersTextModel(TextModel):
    """A checkpoint in the transformers layout, with the attention implementation of its config if that is PyTorch's.

    For an encoder-decoder it is the encoder. Heads, layers and causality are not read from the configuration: they are
    observed on a short text when the model is opened.
    """

    headed: nn.Module | None = None  # with its head, once that was read

    def __init__(self, place: tuple[Path, str | None], module: nn.Module, tokenizer: Any):
        folder, gguf = self.place = place
        name = str(folder if gguf is None else folder / gguf)
        if not getattr(tokenizer, "is_fast", False):
            kind = type(tokenizer).__name__
            lacks = "does not give the characters of a token; a tokenizer.json is needed"
            raise ValueError(f"{name}: its {kind} {lacks}")
        self.name = name
        self._module: Any = _reader(module)
        self._tokenizer = tokenizer
        table = self._module.get_input_embeddings()
        if not isinstance(table, nn.Embedding):
            raise ValueError(f"{name}: {type(module).__name__} reads no tokens of a text")
        self._vocabulary = table.num_embeddings
        self.special = _special(tokenizer)
        self.before, self.after = _special_tokens(tokenizer)
        self.context = _context(self._module, tokenizer)
        self.heads, self.causal = self._probe()

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def positions(self) -> int | None:
        config: Any = self._module.config.get_text_config()
        return None if getattr(config, "rope_parameters", None) else self.context

    @property
    def embedding(self) -> nn.Embedding:
        return self._module.get_input_embeddings()

    def encode(self, text: str) -> Tokens:
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if max(encoding["input_ids"], default=0) >= self._vocabulary:
            token = self.written(max(encoding["input_ids"]))
            raise ValueError(
                f"{self.name}: the tokenizer has a token {token!r} that the model, with {self._vocabulary:,}, does not"
            )
        return Tokens(encoding["input_ids"], [(start, stop) for start, stop in encoding["offset_mapping"]])

    def written(self, token: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(token))

    def _forward(self, tokens: Tensor, observe: LayerObserver) -> None:
        calls = 0

        def tell(call: ObservedCall) -> None:
            nonlocal calls
            observe(calls, call)
            calls += 1

        more = {"use_cache": False} if getattr(self._module.config, "use_cache", None) is not None else {}
        with calls_told_to(tell):
            self._module(input_ids=tokens, **more)

    def _probe(self) -> tuple[tuple[int, ...], bool]:
        """(query heads by layer, whether no word sees a later one), from the calls on a short text."""
        heads: list[int] = []
        looks_ahead: list[bool] = []
        tokens = self.whole(self.encode(_PROBE).ids[: self.room])

        def visit(layer: int, call: ObservedCall) -> None:
            length, keys = call.query.shape[2], call.key.shape[2]
            if not length == keys == tokens.shape[1]:
                shapes = f"layer {layer} compares {length} queries with {keys} keys for {tokens.shape[1]} tokens"
                raise ValueError(f"{self.name}: {shapes}; attention from token to token is needed")
            heads.append(call.query.shape[1])
            looks_ahead.append(bool(weights_of(call).triu(1).any()))

        with watch(self._module, alarms=False) as watched:
            self.run(tokens, visit)
        others = sentences(watched.without_attention)
        if not heads:
            kind = type(self._module).__name__
            why = "; ".join(["it has none, or computes attention in code of its own", *others])
            raise ValueError(f"{self.name}: no attention call could be observed in {kind}: {why}")
        if others:
            shown = f"Layers with attention, counted from 0 here: {joined([str(call.layer) for call in watched.calls])}"
            self.other_layers = f"{'; '.join(others)}: no attention weights there. {shown}"
        return tuple(heads), not any(looks_ahead)


def read_checkpoint(folder: Path, gguf: str | None = None) -> TransformersTextModel:
    """The checkpoint in a folder, or in a GGUF file of it.

    Raises:
        UnreadableCheckpoint: the error of transformers, in one line. ValueError: weights that are missing or not
            finite, a tokenizer without characters, a model without observable attention.
    """
    name = str(folder if gguf is None else folder / gguf)
    with contained():
        config = read_configuration(folder, gguf)
        tokenizer = read_tokenizer(folder, gguf)
        # transformers maps the names of a GGUF file to those of the whole class
        kind = body_of(config) if gguf is None else class_of(config)
        module = read_weights(kind, config, folder, gguf=gguf).module
        spoilt = [name for name, tensor in module.state_dict().items() if not _finite(tensor)]
        if spoilt:
            raise ValueError(f"{name}: damaged, {', '.join(spoilt[:3])} holds weights that are not finite numbers")
        try:
            model = TransformersTextModel((folder, gguf), module.base_model, tokenizer)
            model.headed = None if gguf is None else module
            return model
        except ValueError:
            raise
        except Exception as error:  # such as heads that do not divide the width
            raise UnreadableCheckpoint(f"configuration: the model cannot read a text ({shortened(error)})") from error


def of_transformers(model: TransformersModel) -> TransformersTextModel:
    """A model that `saccade.models.load` opened with transformers' class, without its head. Errors as above."""
    if model.place is None:
        raise FileNotFoundError("model: it was not loaded from a folder, so it has no tokenizer")
    with contained():
        made = TransformersTextModel(model.place, model.module.base_model, read_tokenizer(*model.place))
        if type(model.module).__name__ in (model.module.config.architectures or ()):
            made.headed = model.module  # with its weights, which may be others than those of the files
        return made


class TokenHeadModel(NamedTuple):
    """A module of transformers that gives logits of tokens, and its mask token; None if it predicts the next one."""

    module: Any
    mask: int | None


def with_token_head(model: TransformersTextModel) -> TokenHeadModel | None:
    """The checkpoint with the head in its config.json, read once; None if that gives no logits of tokens.

    ValueError: weights of the head that are missing or cannot be read.
    """
    folder, gguf = model.place
    with contained():
        config = read_configuration(folder, gguf)
        kind = class_of(config)
        is_next = kind.__name__.endswith(("ForCausalLM", "LMHeadModel"))
        mask = model._tokenizer.mask_token_id
        if config.is_encoder_decoder or not (is_next or (kind.__name__.endswith("ForMaskedLM") and mask is not None)):
            return None
        try:
            model.headed = model.headed or read_weights(kind, config, folder, gguf=gguf).module
        except UnreadableCheckpoint as error:
            raise ValueError(f"{model.name}: {error}") from None
    return TokenHeadModel(model.headed, None if is_next else mask)


def _finite(tensor: Tensor) -> bool:
    # A sum is quick, and finite unless it overflows.
    return not tensor.is_floating_point() or bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _reader(module: Any) -> Any:
    """The part that reads a text: the encoder of an encoder-decoder."""
    return module.get_encoder() if module.config.is_encoder_decoder else module


def _special(tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens. The token for unknown words stands for a word, and is included only if it has another
    role as well."""
    others = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id]
    unknown = {tokenizer.unk_token_id} - set(others)
    return frozenset(tokenizer.all_special_ids) - unknown


def _special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The special tokens before and after every text."""
    inside = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    whole = tokenizer(_PROBE)["input_ids"]
    for first in range(len(whole) - len(inside) + 1):
        if whole[first : first + len(inside)] == inside:
            return tuple(whole[:first]), tuple(whole[first + len(inside) :])
    return (), ()


def _context(module: nn.Module, tokenizer: Any) -> int | None:
    config: Any = module.config.get_text_config()  # type: ignore[operator, union-attr]
    limits = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
    for part in module.modules():
        # RoBERTa counts positions from after its padding index: two of its 514 are never used.
        if isinstance(getattr(part, "position_embeddings", None), nn.Embedding):
            table: Any = part.position_embeddings
            limits.append(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1))
    known = [limit for limit in limits if limit is not None and 0 < limit < _UNLIMITED]
    return min(known, default=None)


@contextmanager
def calls_told_to(tell: _observers.Observer) -> Iterator[None]:
    """Call `tell` for every attention call that a model of transformers makes on this thread.

    That is every call of its attention functions, for each implementation, and its direct calls of
    F.scaled_dot_product_attention.
    """

    inside = False  # within an attention function, calls of other functions are part of its call

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Any:
            nonlocal inside
            outer, inside = inside, True
            try:
                out = function(module, query, key, value, attention_mask, **more)
            finally:
                inside = outer
            meant = meaning_of(module, query, key, value, attention_mask, **more)
            tell(meant.observed(out[0].transpose(1, 2), "transformers", module))
            return out

        return run

    def handle(call: SdpaCall, proceed: Callable[[], Tensor]) -> Tensor:
        out = proceed()
        if not inside:
            meant = call.meaning()
            if isinstance(meant, str):
                raise ValueError(f"F.scaled_dot_product_attention is called with {meant}")
            rows = (*meant.query.shape[:3], meant.value.shape[-1])
            tell(meant.observed(out.reshape(rows), "F.scaled_dot_product_attention"))
        return out

    with functions_wrapped_by(wrap), sdpa_handled_by(handle):
        yield
