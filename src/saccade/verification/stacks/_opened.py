"""What a user has, as a `Stack`: what is not given is found, and listed under `assumed`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...interception._hooks import hooked
from ...support._registered import registered
from ..findings._finding import Inapplicable, TargetError, Undecided, Unmeasured
from ..subject._calling import guarded
from ..subject._decoder import CachedDecoder
from ..subject._influence import is_causal
from ..subject._inputs import NamedInputs
from ..subject._kinds import name_of
from ..subject._models import token_subject
from ..subject._reading import Promise
from ..subject._shortened import shortened
from ..subject._subject import Subject
from ..subject._token_models import TokenModel, longest_input, named
from ..subject._transformers import is_transformers
from ._documents import IDS, Documents, as_inputs, drawn, exchanged, ids_of, padded, positions_in
from ._layer_rules import rows_share_frequencies_until
from ._pad_ids import pad_id
from ._served import served_stack
from ._stack import Decode, Decoder, Promises, Stack
from ._state import kept

_UNKNOWN = 31  # ids that are tried where nothing says how many there are
_WHOLE = 300_000_000  # parameters: of larger models not all layers are tested
_MOST = 499  # ids that documents are drawn from
_LONG = 131  # tokens, more than probes give to a stack without windows
_DECODER = "decoder_input_ids"


@dataclass(frozen=True)
class Given:
    """The arguments of `verify_stack`, as given."""

    model: Any
    batch: Any = None
    pack: Any = None
    decode: Any = None
    second: Any = None
    step: Any = None
    causal: bool | None = None
    window: int | None = None
    trainer: Any = None
    tokenizer: Any = None
    shard: Any = None
    words: tuple[str, ...] = ()  # of what is left out of a large model
    subject: Subject | None = None  # the model, where it is known how to call it


def opened(given: Given) -> Stack:
    """
    Raises:
        TypeError: the model, or one of the functions, cannot be called.
        ValueError: `window` is no positive number.
    """
    if given.window is not None and (not isinstance(given.window, int) or given.window < 1):
        raise ValueError(f"window: expected a positive number of keys, got {given.window!r}")
    if isinstance(given.model, str):
        return _served(given)
    makes_inputs = given.batch is not None or given.pack is not None
    if given.trainer is not None or (not callable(given.model) and hasattr(given.model, "model")):
        given = _of_trainer(given)
    for name in ("model", "batch", "pack", "decode", "step", "shard"):
        value = getattr(given, name)
        if (value is not None or name == "model") and not callable(value):
            raise TypeError(f"{name}: expected a callable, got {type(value).__name__}")
    reads = getattr(given.model, "main_input_name", "input_ids")  # of transformers' models
    if reads != "input_ids" and not makes_inputs:
        raise TypeError(
            f"model: expected a model of token ids, got {name_of(given.model)}, which reads {reads}; "
            "saccade.verify(module) verifies one of its attention modules"
        )
    if isinstance(given.model, nn.Module) and any(own.is_meta for own in given.model.parameters()):
        raise Unmeasured("model: its parameters are on the meta device and have no numbers; load its weights first")
    functions = (given.decode, given.step, given.batch, given.pack, given.shard)
    with kept(given.model, *functions, given.second):
        if isinstance(given.model, nn.Module) and not any(modules_of((*functions, given.second))):
            short, words = shortened(given.model, whole=_WHOLE)
            if words and _takes(short, given):
                given = replace(given, model=short, words=(*given.words, *words))
        modules = tuple(modules_of((given.model, *functions)))
        for module in modules:
            module.eval()
        return _made(given, modules)


def _served(given: Given) -> Stack:
    """The endpoint at an address, and the original beside it, whose vocabulary is used."""
    second = None if given.second is None else opened(Given(given.second, causal=given.causal))
    return replace(served_stack(given.model, given.causal, _words(given, second)), second=second)


def _words(given: Given, second: Stack | None) -> Tensor | None:
    if second is not None:
        return second.vocabulary
    known = getattr(given.tokenizer, "vocab_size", None)
    return token_ids(known, given.tokenizer.all_special_ids) if isinstance(known, int) else None


def stack_of(subject: Subject) -> Stack:
    """The stack of a whole model alone, called as the checks of `saccade.verify` call it."""
    model = subject.target.model if isinstance(subject.target, TokenModel) else subject.target
    given = Given(model, causal=subject.promise.causal, subject=subject)
    return replace(_made(given, tuple(modules_of((model,)))), generate=None)


def _takes(short: nn.Module, given: Given) -> bool:
    """Whether a shortened model takes what the user's functions make, whose special tokens it may lack."""
    try:
        stack = _made(replace(given, model=short), (short,))
        for make in (stack.batch, stack.pack):
            if make is not None:
                stack.run(make(drawn(stack.vocabulary, [5, 3] if stack.takes_padding else [5, 5])))
    except Exception:  # whatever it raises: the whole model is tested
        return False
    return True


def _of_trainer(given: Given) -> Given:
    """The parts of a trainer where the user gives none: model, collator, tokenizer, step.

    Raises:
        TypeError: it has no model; or no collator, and neither `batch` nor `pack` is given.
    """
    trainer = given.model if given.trainer is None else given.trainer
    model = getattr(trainer, "model", None) if given.model is None or given.model is trainer else given.model
    tokenizer = given.tokenizer or getattr(trainer, "processing_class", None) or getattr(trainer, "tokenizer", None)
    given = replace(given, model=model, trainer=trainer, tokenizer=tokenizer)
    if model is None:
        raise TypeError(f"trainer: expected one that has its model, got {name_of(trainer)}; give the model first")
    if None not in (given.batch, given.pack, given.step):
        return given
    try:
        parts = registered("verified_models").trainer_parts(trainer, _names(model))
    except TypeError:
        if given.batch is None and given.pack is None:
            raise
        return given
    return replace(
        given,
        batch=given.batch or parts.batch,
        pack=given.pack or parts.pack,
        step=given.step or parts.step,
        words=(*given.words, *parts.assumed),
    )


def _said_of(given: Given) -> list[str]:
    """The parts of a trainer and a tokenizer that are used, in words for the report."""
    words = []
    if given.trainer is not None:
        trained = ", and its training step" if given.step is not None else ""
        words.append(f"the model and collator are those of the {type(given.trainer).__name__}{trained}")
    side = getattr(given.tokenizer, "padding_side", None)
    if side is not None and given.batch is not None and given.trainer is None:
        words.append(f"batches are padded by the tokenizer, on the {side} (otherwise batch=)")
    return words


def _made(given: Given, modules: tuple[nn.Module, ...]) -> Stack:
    if given.batch is None and not _reads_pairs(given.model):
        given = replace(given, batch=registered("verified_models").tokenizer_batch(given.tokenizer))
    batch, pack = (
        None if make is None else functools.partial(_inputs, argument, make, given.model)
        for argument, make in (("batch", given.batch), ("pack", given.pack))
    )
    given = replace(given, batch=batch, pack=pack)
    stack, model = _found(given, modules)
    stack = replace(stack, assumed=(*stack.assumed, *_said_of(given)))
    if given.batch is None:
        given = replace(given, batch=_of_packs(given, stack))
    tokens = token_ids(model.vocabulary or _vocabulary(stack, given.batch or stack.batch), model.special)
    masked = given.batch is not None or model.masked
    takes_padding = masked or stack.promises.causal is not False
    stack = replace(stack, vocabulary=tokens, batch=given.batch or stack.batch, takes_padding=takes_padding)
    if scaled := rows_share_frequencies_until(stack):
        stack = replace(stack, longest=min(scaled, stack.longest or scaled))
    if stack.longest is None and (longest := _longest(stack)) is not None:
        words = f"a document has at most {longest} tokens, as a call with one more raises an error"
        stack = replace(stack, longest=longest, assumed=(*stack.assumed, words))
    if not masked and stack.promises.causal is None:
        stack = replace(stack, takes_padding=_ignores_later(stack))
    if given.batch is not None and not _pads(stack):
        words = "batch= takes documents of one length only, so no padding is tested"
        stack = replace(stack, takes_padding=False, assumed=(*stack.assumed, words))
    stack = replace(stack, vocabulary=_without_special(stack))
    if isinstance(given.second, str):
        stack = replace(stack, second=served_stack(given.second, given.causal, stack.vocabulary))
    elif given.second is not None:
        second = Given(given.second, given.batch, given.pack, None, None, None, given.causal, given.window)
        stack = replace(stack, second=opened(second), modules=(*modules, *modules_of((given.second,))))
    elif model.other is not None:
        plain = stack.model

        def switched(*places: Any, **inputs: Any) -> Any:
            with model.other.switched():
                return plain(*places, **inputs)

        stack = replace(stack, second=replace(stack, name=f"its {model.other.name} attention", model=switched))
    if zeros := stack.zeros():
        words = f"weights that are all 0, such as {zeros[0][0]}, are drawn while it is tested"
        stack = replace(stack, assumed=(*stack.assumed, words))
    return stack


def _inputs(argument: str, make: Callable[[Documents], Any], model: Any, documents: Documents) -> Any:
    """Inputs of the model, as the user's function makes them of documents.

    Raises:
        Unmeasured: they hold no token ids, or none of the decoder.
    """
    names = _names(model)
    inputs = as_inputs(guarded(make, documents), lambda name: names is None or name in names)
    try:
        ids_of(inputs)
    except Unmeasured as reason:
        raise Unmeasured(f"{argument}: {reason}") from None
    if _reads_pairs(model) and isinstance(inputs, Mapping) and "input_ids" in inputs and _DECODER not in inputs:
        raise Unmeasured(
            f"{argument}: expected {_DECODER}, the documents as the decoder reads them; got {sorted(inputs)}"
        )
    return inputs


def _reads_pairs(model: Any) -> bool:
    """Whether the model is an encoder-decoder of transformers, whose input_ids are the encoder's."""
    return _DECODER in _parameters(model)


def _of_packs(given: Given, stack: Stack) -> Callable[[Documents], Any] | None:
    """The user's packing, where the model cannot be called with tokens and their mask alone.

    Raises:
        Unmeasured: it needs other arguments, and no packing is given.
    """
    own = stack.batch([[0, 1]])
    needed = _required(given.model).difference(own) if isinstance(own, Mapping) else set()
    if not needed or stack.model is not given.model:
        return None
    if given.pack is None:
        also = ", ".join(sorted(needed))
        raise Unmeasured(f"batch: expected a function that makes inputs of {stack.name}, which also needs {also}")
    return given.pack


def _pads(stack: Stack) -> bool:
    """Whether `batch` takes documents of unequal lengths, or raises for others, too."""
    lengths = ([3, 2], [3, 3])
    made = []
    for given in lengths:
        try:
            made.append(ids_of(stack.batch(drawn(stack.vocabulary, given))).dim() > 0)
        except (TargetError, Inapplicable):
            made.append(False)
    return made != [False, True]


def _longest(stack: Stack) -> int | None:
    """The longest document that a call takes, where it takes fewer tokens than probes give; None where it takes
    those, or not even a few."""

    def works(length: int) -> bool:
        try:
            stack.run(stack.batch(drawn(stack.vocabulary, [length])))
        except (Inapplicable, TargetError):
            return False
        return True

    low, high = 7, _LONG
    if works(high) or not works(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def _ignores_later(stack: Stack) -> bool:
    """Whether outputs stay as they are when the last token changes: only then can padding follow without a mask."""
    document = drawn(stack.vocabulary, [stack.length(7)])[0]
    other = exchanged(document, stack.vocabulary, len(document) - 1)
    try:
        before, after = (stack.run(stack.batch([row]))[0, :-1] for row in (document, other))
    except TargetError:  # the probes meet it again
        return True
    return torch.allclose(before, after, rtol=1e-4, atol=1e-4)


class FoundModel(NamedTuple):
    """Properties of a model beside the parts of its stack."""

    masked: bool  # whether its own batches have a padding mask, or an id that stands for padding
    special: tuple[int, ...]
    vocabulary: int | None = None
    other: Any = None  # another attention implementation of the same module


def _found(given: Given, modules: tuple[nn.Module, ...]) -> tuple[Stack, FoundModel]:
    """The stack, its vocabulary and the user's batches aside, with the parts that are found where none are given."""
    decoders = (Decoder("decode", _decode(given.decode), is_given=True),) if given.decode is not None else ()
    subject, module = given.subject, given.model if isinstance(given.model, nn.Module) else None
    if subject is None and module is not None:
        try:
            subject = token_subject(module, Promise(causal=given.causal))
        except (Undecided, TargetError, ValueError) as error:  # compiled code may have no signature
            if given.batch is None and is_transformers(module):
                raise Unmeasured(f"batch: expected a function that makes inputs of this model; {error}") from None
    special = tuple(getattr(given.tokenizer, "all_special_ids", None) or ())
    name, masked = _arguments(given.model)
    stack = Stack(
        name_of(given.model),
        given.model,
        next(iter(modules), None) if module is None else module,
        torch.arange(2),
        functools.partial(_padded, name=name, masked=masked),
        given.pack,
        decoders,
        step=given.step,
        shard=given.shard,
        promises=Promises(given.causal, given.window),
        modules=modules,
        assumed=given.words,
        subject=subject,
    )
    if subject is None:
        return replace(stack, longest=None if module is None else longest_input(module)), FoundModel(masked, special)
    reading = subject.reading
    model = subject.target
    name = reading.names[0] if reading.names else _arguments(model)[0]
    if given.subject is not None:
        model, name = _as_checks_call(subject), "tokens"
    elif isinstance(model, TokenModel):
        model = _either(model, given.model, name)
    masked = bool(reading.masks)
    known_pad = None if masked else pad_id(subject)
    causal, assumed = subject.promise.causal, [*given.words, *reading.assumed]
    if given.causal is None and causal is not None:
        assumed.append(f"it is {'causal' if causal else 'bidirectional'} (otherwise causal=)")
    window = given.window
    if window is None:
        window = min((width + 1 for width in reading.windows if width is not None), default=None)
    constants, generate = dict(reading.constants), None
    pad, special = (0, special) if known_pad is None else (known_pad.number, (*special, known_pad.number))
    left = other = None
    if is_transformers(given.model):
        whole = model if is_transformers(model) else given.model  # or its body, where heads give one output for all
        found = registered("verified_models").stack_parts(whole, causal, reading.vocabulary)
        special += found.special
        pad = found.pad if known_pad is None else pad
        constants = {**found.constants, **constants}
        decoders, generate = decoders or found.decoders, found.generate
        left = found.left if given.batch is None and name == "input_ids" else None
        other = found.other if given.second is None else None
        assumed += found.assumed
    own = given.subject is not None or not is_transformers(given.model)
    if own and given.decode is None and reading.cache is not None and is_causal(subject):
        decoders = (Decoder("its own cache", _cached(subject)), *decoders)
    positioned = given.subject is not None and "position_ids" in inspect.signature(subject.target.forward).parameters
    if positioned and masked and causal:
        left = functools.partial(_padded, name=name, masked=masked, pad=pad, left=True)
    stack = replace(
        stack,
        model=model,
        batch=functools.partial(_padded, name=name, masked=masked, pad=pad),
        decoders=decoders,
        generate=generate,
        left=left,
        promises=Promises(causal if given.causal is None else given.causal, window),
        longest=reading.max_length,
        constants=constants,
        assumed=tuple(assumed),
    )
    return stack, FoundModel(masked or known_pad is not None, special, reading.vocabulary, other)


def _as_checks_call(subject: Subject) -> Callable[..., Any]:
    """The model with its own layout, masks and adapter behind one call."""

    def call(tokens: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Tensor:
        inputs = NamedInputs({"tokens": tokens}, subject.reading.vocabulary)
        real = None if attention_mask is None else attention_mask.bool()
        return subject.with_constants(**more)(inputs, padding=real).out

    return call


def _cached(subject: Subject) -> Decode:
    """Decoding with the cache that was found."""
    decoder = CachedDecoder(subject)

    def decode(tokens: list[int], state: Any) -> tuple[Tensor, Any]:
        if state is None:
            decoder.reset()
        ids = torch.tensor([tokens[decoder.position :]], device=subject.device)
        return decoder(NamedInputs({"tokens": ids}, subject.reading.vocabulary))[0, -1], decoder

    return decode


def _either(wrapper: TokenModel, model: Any, name: str) -> Callable[..., Any]:
    """The user's model for inputs of the user's own making, its wrapper for ours, which give tokens as `name`."""

    def call(*places: Any, **inputs: Any) -> Any:
        return wrapper(*places, **inputs) if name in inputs else model(*places, **inputs)

    return call


def _names(model: Any) -> frozenset[str] | None:
    """The names of the model's arguments; None where it takes others, too, or they are not known."""
    taken = _parameters(model)
    if not taken or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return None
    return frozenset(name for name, one in taken.items() if one.kind is not inspect.Parameter.POSITIONAL_ONLY)


def _required(model: Any) -> set[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, one in _parameters(model).items() if one.kind in kinds and one.default is one.empty}


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters
    except (TypeError, ValueError):  # some functions of C have no signature
        return {}


def _arguments(model: Callable[..., Any]) -> tuple[str, bool]:
    """(the argument that takes token ids, "" where only its place is known; whether it takes attention_mask)."""
    taken = _parameters(model)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return named(taken, IDS) or "input_ids", True
    by_name = [name for name, parameter in taken.items() if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY]
    return named(taken, IDS) or (by_name or [""])[0], "attention_mask" in taken


def _decode(decode: Callable[[Any, Any], tuple[Tensor, Any]]) -> Decode:
    """The user's function; where it takes no list of tokens, it is given them as a tensor."""

    def step(tokens: list[int], state: Any) -> tuple[Tensor, Any]:
        try:
            made = decode(tokens, state)
        except (AttributeError, TypeError):
            made = decode(torch.tensor(tokens), state)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise Unmeasured(f"decode: expected (logits of the last token, state), got {type(made).__name__}")
        logits, state = made
        return logits, state

    return step


def _padded(documents: Documents, *, name: str, masked: bool, pad: int = 0, left: bool = False) -> Any:
    """Inputs that are padded on the right, with a mask if the model takes one; or on the left, with position_ids."""
    ids, mask = padded(documents, pad, left=left)
    if not name:
        return ids
    if left:
        return {name: ids, "attention_mask": mask, "position_ids": positions_in(mask)}
    return {name: ids, "attention_mask": mask} if masked else {name: ids}


# Modules, vocabulary


def modules_of(values: Iterable[Any]) -> Iterator[nn.Module]:
    """The outermost modules that these functions compute with: themselves, what they are bound to, and the variables
    that they use."""
    found: dict[int, nn.Module] = {}
    for value in values:
        for module in _reached(value, 0):
            found[id(module)] = module
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    yield from (module for key, module in found.items() if key not in inner)


def _reached(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
        return
    if depth > 3 or value is None:
        return
    if isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        inner = [value.__self__, value.__func__]
    elif inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        inner = [*used.nonlocals.values(), *used.globals.values(), *(value.__defaults__ or ())]
    elif isinstance(value, (list, tuple)):
        inner = list(value[:64])
    elif hasattr(value, "__dict__") and not inspect.ismodule(value) and not inspect.isclass(value):
        inner = list(vars(value).values())
    else:
        return
    for part in inner:
        yield from _reached(part, depth + 1)


def _vocabulary(stack: Stack, batch: Callable[[Documents], Any]) -> int:
    """How many ids the embedding takes that reads them; else the width of the output."""
    tables = [part for module in stack.modules for part in module.modules() if isinstance(part, nn.Embedding)]
    sizes: list[int] = []

    def keep(part: nn.Module, places: Any, _: Any) -> None:
        if places and isinstance(places[0], Tensor) and torch.equal(places[0].flatten().cpu(), ids.cpu()):
            sizes.append(part.num_embeddings)  # type: ignore[arg-type]

    try:
        inputs = batch([[1, 0, 1]])
        ids = ids_of(inputs).flatten()
        with torch.no_grad(), hooked(tables, before=keep):
            returned = guarded(stack.called, inputs)
    except TargetError:  # it may know other tokens
        return _UNKNOWN
    if sizes:
        return min(sizes)
    out = getattr(returned, "logits", returned)
    return int(out.shape[-1]) if isinstance(out, Tensor) else _UNKNOWN


def token_ids(vocabulary: int, special: Iterable[int]) -> Tensor:
    """Ids to draw documents from, spread over the vocabulary; the first few are special in most vocabularies."""
    left_out = set(special) | set(range(min(4, vocabulary // 3)))
    ids = [token for token in range(vocabulary) if token not in left_out]
    step = -(-len(ids) // _MOST)
    return torch.tensor(ids[::step])


def _without_special(stack: Stack) -> Tensor:
    """The vocabulary without the ids that the collator and the packing add themselves."""
    half = len(stack.vocabulary) // 2
    added: set[int] = set()
    lengths = [stack.length(length) for length in ((3, 5) if stack.takes_padding else (5, 5))]
    for ids in (stack.vocabulary[:half], stack.vocabulary[half:]):
        documents = drawn(ids, lengths)
        for make in (stack.batch, stack.pack):
            with suppress(Inapplicable, TargetError):  # which the probes meet again
                made = set() if make is None else set(ids_of(make(documents)).flatten().tolist())
                added |= made - set(documents[0] + documents[1])
    return torch.tensor([token for token in stack.vocabulary.tolist() if token not in added])
