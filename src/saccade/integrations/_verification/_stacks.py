"""Parts of a stack that a transformers model has: its special tokens, and its ways to decode.

Shape legend: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...verification.stacks._documents import IDS, Documents, as_inputs, ids_of, padded, positions_in
from ...verification.stacks._stack import Decoder, Generate
from ...verification.stacks._state import attributes

_LONGEST = 640  # tokens in a static cache
_IN_FORCE = "_attn_implementation_internal"
_AHEAD = 3  # tokens that are read and cropped again


@dataclass(frozen=True)
class StackParts:
    """Parts of a stack that `verify_stack` finds where they are not given."""

    special: tuple[int, ...]
    pad: int
    constants: Mapping[str, Any]  # arguments of every call
    decoders: tuple[Decoder, ...]
    generate: Generate | None
    left: Callable[[Documents], Any] | None  # inputs padded on the left, as generate() makes them
    other: OtherAttention | None
    assumed: tuple[str, ...]


class OtherAttention(NamedTuple):
    """Another attention implementation of the same module, in force within `switched()`."""

    name: str
    switched: Callable[[], AbstractContextManager[None]]


def stack_parts(model: Any, causal: bool | None, vocabulary: int) -> StackParts:
    config = model.config
    special = tuple(token for token in _special(config) if 0 <= token < vocabulary)
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    pad = pad if pad in special else 0
    cached = _takes_flag(model)
    other = _other_attention(model)
    left = _left(model, pad) if causal and not config.is_encoder_decoder else None
    assumed = ["use_cache=False in every call but those that test the cache, as in training"] if cached else []
    assumed += ["padding on the left has the positions that generate() gives (otherwise batch=)"] if left else []
    assumed += [f"its {other.name} attention gives the same outputs (otherwise second=)"] if other else []
    decodes = cached and causal and not config.is_encoder_decoder and _gives_cache(model)
    return StackParts(
        special,
        pad,
        {"use_cache": False} if cached else {},
        tuple(_decoders(model)) if decodes else (),
        _generate(model, pad, special) if decodes and model.can_generate() else None,
        left,
        other,
        tuple(assumed),
    )


def _other_attention(model: Any) -> OtherAttention | None:
    other = {"sdpa": "eager", "eager": "sdpa"}.get(getattr(model.config, "_attn_implementation", ""))
    if other is None:
        return None

    @contextmanager
    def switched() -> Iterator[None]:
        configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
        for config in [*configs.values()]:
            parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
            configs |= {id(part): part for part in parts if part is not None}
        held = [config for config in configs.values() if hasattr(config, _IN_FORCE)]
        with attributes((config, _IN_FORCE, getattr(config, _IN_FORCE)) for config in held):
            _set_silently(model, other)
            yield

    try:
        with switched():
            is_set = model.config._attn_implementation == other
    except Exception:  # it has no other
        return None
    return OtherAttention(other, switched) if is_set else None


def _set_silently(model: Any, implementation: str) -> None:
    """Models that know one implementation warn of it."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model.set_attn_implementation(implementation)
    finally:
        logging.set_verbosity(verbosity)


def _left(model: Any, pad: int) -> Callable[[Documents], Any] | None:
    taken = inspect.signature(model.forward).parameters
    if "attention_mask" not in taken:
        return None

    def left(documents: Documents) -> dict[str, Tensor]:
        ids, real = padded(documents, pad, left=True)
        made = {"input_ids": ids, "attention_mask": real}
        return {**made, "position_ids": positions_in(real)} if "position_ids" in taken else made

    return left


def _special(config: Any) -> Iterator[int]:
    """The ids that a configuration gives names to: padding, begin, end, images."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        for name, value in (vars(part) if part is not None else {}).items():
            if name.endswith(("token_id", "token_index", "token_ids")):
                values = value if isinstance(value, list) else [value]
                yield from (value for value in values if isinstance(value, int))


def _takes_flag(model: Any) -> bool:
    """Whether a call takes use_cache, by name or among its keywords."""
    taken = inspect.signature(model.forward).parameters
    keywords = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    return "use_cache" in taken or (keywords and _gives_cache(model))


def _gives_cache(model: Any) -> bool:
    ids = torch.ones(1, 2, dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            return getattr(model(input_ids=ids, use_cache=True), "past_key_values", None) is not None
    except Exception:  # whatever it raises: where it says that it takes a cache, the probe raises it again
        return "past_key_values" in inspect.signature(model.forward).parameters


# Decoding


def _decoders(model: Any) -> Iterator[Decoder]:
    import transformers

    def cropped(read: Callable[..., Any], tokens: list[int]) -> Any:
        cache = transformers.DynamicCache(config=model.config)
        out = read([tokens + tokens[:1] * _AHEAD], cache, 0)
        cache.crop(-_AHEAD)
        return out[:, : len(tokens)], cache

    def reordered(read: Callable[..., Any], tokens: list[int]) -> Any:
        cache = transformers.DynamicCache(config=model.config)
        out = read([tokens[::-1], tokens], cache, 0)
        cache.reorder_cache(torch.tensor([1, 0], device=model.device))  # type: ignore[arg-type]
        cache.batch_select_indices(torch.tensor([0], device=model.device))
        return out[1:], cache

    yield Decoder("its own cache", _decoder(model, lambda: None))
    if getattr(model, "_can_compile_fullgraph", False):
        static: dict[torch.dtype, Any] = {}  # one for all sequences

        def emptied() -> Any:
            if model.dtype not in static:
                static[model.dtype] = transformers.StaticCache(config=model.config, max_cache_len=_LONGEST)
            static[model.dtype].reset()
            return static[model.dtype]

        yield Decoder("a static cache", _decoder(model, emptied))
    if _keeps_everything(model.config):
        yield Decoder("a cache that was cropped", _decoder(model, None, cropped))
        yield Decoder("a cache that was reordered", _decoder(model, None, reordered))


def _keeps_everything(config: Any) -> bool:
    """Whether a cache of this configuration holds all keys of all layers, so that it can be cropped and reordered."""
    from transformers import cache_utils

    try:
        layers = cache_utils.DynamicCache(config=config).layers
    except Exception:  # a configuration without layers: its own cache is what there is
        return False
    return bool(layers) and all(type(layer) is cache_utils.DynamicLayer for layer in layers)


def _decoder(
    model: Any, empty: Callable[[], Any] | None, begin: Callable[..., Any] | None = None
) -> Callable[[list[int], Any], tuple[Tensor, Any]]:
    """Decoding with the cache that `empty` makes, or that `begin` fills with the first tokens."""
    positioned = "position_ids" in inspect.signature(model.forward).parameters  # generate() gives them, too

    def called(rows: list[list[int]], cache: Any, start: int) -> Any:
        ids = torch.tensor(rows, device=model.device)
        positions = torch.arange(start, start + ids.shape[1], device=model.device).expand(ids.shape)
        more = {"position_ids": positions} if positioned else {}
        return model(input_ids=ids, past_key_values=cache, use_cache=True, **more)

    def read(rows: list[list[int]], cache: Any, start: int) -> Tensor:
        return _logits(called(rows, cache, start))

    def decode(tokens: list[int], state: Any) -> tuple[Tensor, Any]:
        if state is None and begin is not None:
            out, cache = begin(read, tokens)
            return out[0, -1], (cache, len(tokens))
        cache, known = state or (empty() if empty is not None else None, 0)
        returned = called([tokens[known:]], cache, known)
        return _logits(returned)[0, -1], (returned.past_key_values, len(tokens))

    return decode


def _logits(returned: Any) -> Tensor:
    logits = getattr(returned, "logits", None)
    out: Tensor = returned.last_hidden_state if logits is None else logits
    return out


def _generate(model: Any, pad: int, special: tuple[int, ...]) -> Generate:
    """`generate` with prompts that are padded on the left."""

    def generate(prompts: Documents, steps: int) -> tuple[Documents, Tensor]:
        import transformers

        ids, mask = (tensor.to(model.device) for tensor in padded(prompts, pad, left=True))
        config = transformers.GenerationConfig(
            max_new_tokens=steps,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            pad_token_id=pad,
            suppress_tokens=sorted({pad, *special}),
            output_logits=True,
            return_dict_in_generate=True,
        )
        # Of the model's own configuration every value is taken that is None here, such as a last token that is forced.
        forced = [(model.generation_config, name, None) for name in ("forced_bos_token_id", "forced_eos_token_id")]
        with attributes(forced):
            made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return made.sequences[:, ids.shape[1] :].tolist(), torch.stack(made.logits, 1)

    return generate


# Trainers, tokenizers


class TrainerParts(NamedTuple):
    """Functions of documents that a trainer has: rows of a batch, one row of all, and its training step."""

    batch: Callable[[Documents], Any] | None
    pack: Callable[[Documents], Any] | None
    step: Callable[[list[Documents]], Tensor] | None
    assumed: tuple[str, ...]


# Examples that collators take, the first of them that works: columns of a dataset, or a tensor.
_COLUMNS = (
    ("input_ids", "labels"),
    ("input_ids",),
    ("input_ids", "attention_mask", "labels"),
    ("input_ids", "attention_mask", "labels", "position_ids", "seq_lengths", "token_type_ids"),
)
_LABELS = ("labels", "targets", "target", "y")


def trainer_parts(trainer: Any, names: frozenset[str] | None) -> TrainerParts:
    """The collator of a trainer, given examples as its dataset has them; its step where it has the methods of a
    transformers `Trainer`. `names` are the model's arguments, None where it takes any.

    Raises:
        TypeError: it has no collator, or one that takes none of the examples that are tried.
    """
    collator: Any
    collator, dataset = _collator(trainer)
    words = []
    if getattr(collator, "mlm", False):
        collator = copy.copy(collator)
        collator.mlm = False  # it would replace tokens by chance
        words.append("the collator's random replacement of tokens (mlm) is turned off")
    example = _first_example(dataset)
    packing = getattr(getattr(trainer, "args", None), "packing", False) is True
    packs = packing or (isinstance(example, Mapping) and "seq_lengths" in example)
    if packing and example is None:
        example = dict.fromkeys(("input_ids", "labels", "seq_lengths"))
    kept = getattr(trainer, "_get_collator_with_removed_columns", lambda collator: collator)(collator)
    example, rows = _example_that_works(kept, example, trainer)

    def collated(documents: Documents) -> Any:
        return kept([_example(example, [document]) for document in documents])

    def inputs(documents: Documents) -> Any:
        return _taken(collated(documents), names, example)

    def joined(documents: Documents) -> Any:
        """All documents but the last are one example, as a dataset that is packed before has them."""
        split = [part for part in (documents[:-1], documents[-1:]) if part]
        return _taken(kept([_example(example, part) for part in split]), names, example)

    pack = joined if packs else inputs if rows == 1 else None
    step = _trainer_step(trainer, collated)
    if getattr(getattr(trainer, "args", None), "gradient_accumulation_steps", None) == 1:
        step = None
        words.append("gradients are not accumulated (gradient_accumulation_steps is 1), so this is not tested")
    return TrainerParts(inputs if rows > 1 else None, pack, step, tuple(words))


def _collator(trainer: Any) -> tuple[Callable[[list[Any]], Any], Any]:
    """(the collator, the dataset or None) of a trainer, or of its data loader.

    Raises:
        TypeError: it has none.
    """
    for name in ("data_collator", "collate_fn"):
        if callable(collator := getattr(trainer, name, None)):
            return collator, getattr(trainer, "train_dataset", None)
    for name in ("train_dataloader", "train_loader", "dataloader"):
        loader = getattr(trainer, name, None)
        loader = loader if hasattr(loader, "collate_fn") or not callable(loader) else loader()
        if callable(collator := getattr(loader, "collate_fn", None)):
            return collator, getattr(loader, "dataset", None)
    raise TypeError(
        f"trainer: expected data_collator, collate_fn or train_dataloader, got {type(trainer).__name__} without one; "
        "give its collator as batch=, or as pack= if it makes one row of all documents"
    )


def _first_example(dataset: Any) -> Any:
    try:
        return dataset[0]
    except Exception:  # None, or a stream, which is not consumed
        return None


def _example_that_works(collator: Callable[[list[Any]], Any], example: Any, trainer: Any) -> tuple[Any, int]:
    """(an example of a form that the collator takes, the number of rows that it makes of two)."""
    forms = [example] if example is not None else [*map(dict.fromkeys, _COLUMNS), torch.zeros(0)]
    error: Exception | None = None
    for documents in ([[5, 6, 7], [7, 6]], [[5, 6, 7], [7, 6, 5]]):  # some take one length only
        for form in forms:
            try:
                made = as_inputs(collator([_example(form, [document]) for document in documents]), lambda _: True)
                return form, len(ids_of(made))
            except Exception as raised:  # whatever a collator raises for examples of another form
                error = error or raised
    raise TypeError(
        f"trainer: the collator of {type(trainer).__name__} takes none of the examples that were tried "
        f"({type(error).__name__}: {error}); give it as batch=, a function of a list of documents"
    )


def _example(form: Any, documents: Documents) -> Any:
    """The documents, one after the other, as an example of the dataset that `form` is one of."""
    ids = [token for document in documents for token in document]
    if isinstance(form, Mapping):
        columns = {name: _column(name, value, documents, ids) for name, value in form.items()}
        return {
            name: torch.tensor(columns[name]) if isinstance(value, Tensor) else columns[name]
            for name, value in form.items()
        }
    if isinstance(form, (tuple, list)) and form and isinstance(form[0], Tensor):  # inputs and targets
        return tuple(torch.tensor(part) for part in (ids, ids[1:] + ids[:1])[: len(form)])
    return torch.tensor(ids) if isinstance(form, Tensor) else ids


def _column(name: str, value: Any, documents: Documents, ids: list[int]) -> Any:
    lengths = [len(document) for document in documents]
    if name in ("seq_lengths", "length"):
        return lengths if name == "seq_lengths" else len(ids)
    if name == "position_ids":
        return [position for length in lengths for position in range(length)]
    if name in ("token_type_ids", "special_tokens_mask"):
        return [0] * len(ids)
    if "mask" in name:  # of attention, of the completion
        return [1] * len(ids)
    return ids if name in (*IDS, *_LABELS) else value


def _taken(made: Any, names: frozenset[str] | None, example: Any) -> Any:
    """The inputs that the model takes: trainers pass on what they need, and keep targets for the loss."""
    if isinstance(made, Mapping) and names is not None:
        return {name: value for name, value in made.items() if name in names}
    pairs = isinstance(made, (tuple, list)) and isinstance(example, (tuple, list))
    return made[0] if pairs and not (names or frozenset()).intersection(_LABELS) else made


def _trainer_step(trainer: Any, collated: Callable[[Documents], Any]) -> Callable[[list[Documents]], Tensor] | None:
    """A training step over micro-batches, as the trainer makes it: its collator, its count of tokens, its loss."""
    if not all(callable(getattr(trainer, name, None)) for name in ("training_step", "get_batch_samples")):
        return None

    def step(batches: list[Documents]) -> Tensor:
        before = getattr(trainer, "current_gradient_accumulation_steps", None)
        trainer.current_gradient_accumulation_steps = len(batches)
        try:
            samples, count = trainer.get_batch_samples(map(collated, batches), len(batches), trainer.args.device)
            return torch.stack([trainer.training_step(trainer.model, sample, count) for sample in samples]).sum()
        finally:
            trainer.current_gradient_accumulation_steps = before

    return step


def tokenizer_batch(tokenizer: Any) -> Callable[[Documents], Any] | None:
    """Batches as the tokenizer pads them; None where it has no padding token."""
    if getattr(tokenizer, "pad_token_id", None) is None or not callable(getattr(tokenizer, "pad", None)):
        return None

    def batch(documents: Documents) -> dict[str, Tensor]:
        rows = [{"input_ids": list(document)} for document in documents]
        return dict(tokenizer.pad(rows, padding=True, return_tensors="pt"))

    return batch
