"""Parts of a stack that a transformers model has: its special tokens, and its ways to decode.

Shape legend: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...verification.stacks._documents import Documents
from ...verification.stacks._stack import Decoder, Generate

_LONGEST = 640  # tokens in a static cache
_AHEAD = 3  # tokens that are read and cropped again


@dataclass(frozen=True)
class StackParts:
    """Parts of a stack that `verify_stack` finds where they are not given."""

    special: tuple[int, ...]
    pad: int
    constants: Mapping[str, Any]  # arguments of every call
    decoders: tuple[Decoder, ...]
    generate: Generate | None
    assumed: tuple[str, ...]


def stack_parts(model: Any, causal: bool | None, vocabulary: int) -> StackParts:
    config = model.config
    special = tuple(token for token in _special(config) if 0 <= token < vocabulary)
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    pad = pad if pad in special else 0
    cached = _takes_flag(model)
    decodes = cached and causal and not config.is_encoder_decoder and _gives_cache(model)
    return StackParts(
        special,
        pad,
        {"use_cache": False} if cached else {},
        tuple(_decoders(model)) if decodes else (),
        _generate(model, pad, special) if decodes and model.can_generate() else None,
        ("use_cache=False in every call but those that test the cache, as in training",) if cached else (),
    )


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

        width = max(map(len, prompts))
        ids = torch.tensor([[*[pad] * (width - len(prompt)), *prompt] for prompt in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = transformers.GenerationConfig(
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=pad,
            suppress_tokens=sorted({pad, *special}),
            output_logits=True,
            return_dict_in_generate=True,
        )
        made = model.generate(input_ids=ids, attention_mask=mask.to(ids), generation_config=config)
        return made.sequences[:, width:].tolist(), torch.stack(made.logits, 1)

    return generate


# Trainers, tokenizers


def trainer_step(trainer: Any) -> Callable[[list[Documents]], Tensor] | None:
    """A training step over micro-batches, as the trainer makes it: its collator, its count of tokens, its loss.

    None for a trainer without the methods of a transformers `Trainer`.
    """
    needed = ("training_step", "get_batch_samples", "data_collator")
    if not all(callable(getattr(trainer, name, None)) for name in needed):
        return None

    def step(batches: list[Documents]) -> Tensor:
        collated = [
            trainer.data_collator([{"input_ids": list(document), "labels": list(document)} for document in batch])
            for batch in batches
        ]
        before = getattr(trainer, "current_gradient_accumulation_steps", None)
        trainer.current_gradient_accumulation_steps = len(batches)
        try:
            samples, count = trainer.get_batch_samples(iter(collated), len(collated), trainer.args.device)
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
