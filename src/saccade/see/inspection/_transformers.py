"""Checkpoints of the transformers library as models that read text: BERT-like, GPT-like, Llama-like.

Shape legend: B texts, L tokens with the special ones, Hq query heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...make.models._shortened import shortened
from ...operator._call import ObservedCall
from ._configuration import check_sizes, offline, read_configuration
from ._models import LayerObserver, TextModel, Tokens, UnreadableCheckpoint, weights_of
from ._observing import calls_told_to

_PROBE = "The cat sat on the mat."
_UNLIMITED = 10**9  # tokenizers without a limit have 10**30


class TransformersModel(TextModel):
    """A checkpoint in the transformers layout, with the attention implementation of its config if that is PyTorch's.

    For an encoder-decoder it is the encoder. Heads, layers and causality are not read from the configuration: they are
    observed on a short text when the model is opened.
    """

    def __init__(self, name: str, module: nn.Module, tokenizer: Any):
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

        self.run(tokens, visit)
        if not heads:
            kind = type(self._module).__name__
            why = "it has none, or computes attention in code of its own"
            raise ValueError(f"{self.name}: no attention call could be observed in {kind}: {why}")
        return tuple(heads), not any(looks_ahead)


def read_checkpoint(source: str, *, local: bool) -> TransformersModel:
    """The checkpoint in the folder, or with the hub's id, ``source``.

    Raises:
        UnreadableCheckpoint: the error of transformers, in one line. ValueError: weights that are missing or not
            finite, a tokenizer without characters, a model without observable attention.
    """
    with quiet(), offline() if local else nullcontext():
        module, tokenizer, missing = _loaded(source, local)
        # Modules on top of the layers may be missing: a checkpoint for predicting words has no pooler.
        missing = sorted(name for name in missing if "pooler" not in name)
        if missing:
            more = f" (and {len(missing) - 3} more)" if len(missing) > 3 else ""
            raise ValueError(
                f"{source}: expected the weights its config.json describes, missing: {', '.join(missing[:3])}{more}"
            )
        spoilt = [name for name, tensor in module.state_dict().items() if not _finite(tensor)]
        if spoilt:
            raise ValueError(f"{source}: damaged, {', '.join(spoilt[:3])} holds weights that are not finite numbers")
        try:
            return TransformersModel(source, module, tokenizer)
        except ValueError:
            raise
        except Exception as error:  # such as heads that do not divide the width
            raise UnreadableCheckpoint(f"configuration: the model cannot read a text ({shortened(error)})") from error


class TokenHeadModel(NamedTuple):
    """A module of transformers that gives logits of tokens, and its mask token; None if it predicts the next one."""

    module: Any
    mask: int | None


def with_token_head(model: TransformersModel) -> TokenHeadModel | None:
    """The checkpoint opened again, with the head in its config.json; None if that gives no logits of tokens.

    ValueError: weights of the head that are missing or cannot be read.
    """
    import transformers

    config: Any = model.module.config
    named = str((config.architectures or [""])[0])
    is_next = named.endswith(("ForCausalLM", "LMHeadModel"))
    mask = model._tokenizer.mask_token_id
    if config.is_encoder_decoder or not (is_next or (named.endswith("ForMaskedLM") and mask is not None)):
        return None
    local = Path(model.name).expanduser().is_dir()
    kind: Any = transformers.AutoModelForCausalLM if is_next else transformers.AutoModelForMaskedLM
    with quiet(), offline() if local else nullcontext():
        try:
            module, report = kind.from_pretrained(
                model.name, output_loading_info=True, local_files_only=local, trust_remote_code=False
            )
        except Exception as error:  # from any of a dozen libraries
            raise ValueError(f"{model.name}: {shortened(error)}") from error
    if report["missing_keys"]:
        raise ValueError(f"{model.name}: its weights lack {', '.join(sorted(report['missing_keys'])[:3])}")
    return TokenHeadModel(module.eval(), None if is_next else mask)


def _loaded(source: str, local: bool) -> tuple[Any, Any, list[str]]:
    """The model, its tokenizer, and the names of the weights missing from its files."""
    import transformers

    where = {"local_files_only": local, "trust_remote_code": False}
    what = "configuration"
    try:
        config = read_configuration(source, local=local)
        if local:
            check_sizes(config, Path(source), transformers.AutoModel.from_config)
        what = "tokenizer"
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
        what = "weights"
        module, report = transformers.AutoModel.from_pretrained(
            source, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **where
        )
    except Exception as error:  # from any of a dozen libraries, some of which raise bare Exception
        raise UnreadableCheckpoint(f"{what}: {shortened(error)}") from error
    # Without its files transformers may still make a tokenizer, which knows only special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UnreadableCheckpoint("tokenizer: its vocabulary is empty")
    for name, held, wanted in sorted(report["mismatched_keys"]):
        raise UnreadableCheckpoint(
            f"weights: {name} has the shape {tuple(held)}, by config.json it is {tuple(wanted)} "
            f"({len(report['mismatched_keys'])} do not fit)"
        )
    return module, tokenizer, list(report["missing_keys"])


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
def quiet() -> Iterator[None]:
    """Switch off progress bars and messages of transformers, and of the hub's library about its retries."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    of_hub = hub.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.set_verbosity_error()
    try:
        yield
    finally:
        hub.set_verbosity(of_hub)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
