"""Readings of a target without its masks: its form by the roles of its arguments, its sizes and layout by trying.

Letters: B batch, H heads, L length, D width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from torch import Tensor, nn

from ...findings._finding import Inapplicable, TargetError, Undecided
from ...findings._words import GPU_WORDS
from .._learned_positions import ends_learned_positions
from .._reading import Form, Hints, MaskReading, Meaning, Reading
from .._subject import Subject
from . import _sizes
from ._documentation import DocumentedSource
from ._needed import FilledCall, by_place, constants, makers
from ._packed import as_sequence, packed_in, packings, takes_images, unpackable
from ._returns import with_returns
from ._signature import TargetArgument
from ._squares import head_width, square_of
from ._trials import TargetTrials, TrialSizes, mixing_axes, tensors_in

WIDTH, VALUE_WIDTH, HEADS, KV_HEADS = 16, 12, 6, 2  # of attention proper, where it takes any


@dataclass(frozen=True)
class TargetClues:
    """Information about a target before it is called: its signature, its source and the user's hints."""

    target: Any
    arguments: tuple[TargetArgument, ...]
    source: DocumentedSource
    hints: Hints
    given: Mapping[str, Any]  # keywords of the user, for the constructor or the call

    def of(self, *roles: str, given: bool | None = None) -> list[TargetArgument]:
        """The arguments of these roles; with `given` only those that the user gives (True) or does not (False)."""
        return [
            argument
            for argument in self.arguments
            if argument.role in roles and given in (None, argument.name in self.given)
        ]

    def names(self, *roles: str) -> tuple[str, ...]:
        """The arguments of these roles, in this order; empty if one is missing, or must be given by place."""
        of_roles = [next(iter(self.of(role)), None) for role in roles]
        if any(argument.is_open for argument in self.arguments) and of_roles == list(self.arguments[: len(of_roles)]):
            return ()  # what stands in *args comes by place, and so does all before it
        return (
            tuple(argument.name for argument in of_roles if argument)
            if all(argument and not argument.by_place for argument in of_roles)
            else ()
        )

    def has(self, *roles: str) -> bool:
        return all(map(self.of, roles))

    def needs(self, role: str) -> bool:
        return any(argument.required for argument in self.of(role))

    @property
    def is_module(self) -> bool:
        return isinstance(self.target, nn.Module)

    @property
    def has_matrices(self) -> bool:
        return self.is_module and any(parameter.dim() >= 2 for parameter in self.target.parameters())


def read(trials: TargetTrials, clues: TargetClues) -> Reading:
    """The reading whose call works.

    Raises:
        Undecided: no call works, or the forms that do cannot be told apart.
        TargetError: every call raises the same error, so the way of calling is not the cause.
    """
    packed = packed_in(clues.arguments, clues.has_matrices)
    for form in _forms(clues) if packed is None or packed[1] < 3 else ():
        for reading in _candidates(clues, form):
            reading_of_call = _working(trials, clues, reading)
            if reading_of_call is not None:
                return _completed(trials, clues, reading_of_call)
    if packed is not None:
        return _packed(trials, clues, *packed)
    reading_of_call = _with_required_masks(trials, clues)
    if reading_of_call is not None:
        return _completed(trials, clues, reading_of_call)
    raised = (
        _of_a_device(trials)
        or _own_fault(trials, clues)
        or _of_a_square(trials, clues)
        or _of_other_sizes(trials, clues)
    )
    reading_of_call = None if raised is not None or takes_images(clues.target) else _of_one_length(trials, clues)
    if reading_of_call is None:
        raise raised or _nothing_works(trials, clues)
    return reading_of_call


def _of_a_device(trials: TargetTrials) -> TargetError | None:
    """The error of a missing device, if any way of calling met it: other ways fail before that line."""
    raised = (error for error in trials.errors.values() if any(word in error.error.lower() for word in GPU_WORDS))
    return next(raised, None)


def _own_fault(trials: TargetTrials, clues: TargetClues) -> TargetError | None:
    """The error of a call that no other form of call avoids: a missing name or module, a missing attribute, a view of
    non-contiguous memory."""
    owner = re.escape(type(clues.target).__name__) if clues.is_module else "Tensor"
    missing = rf"AttributeError: '({owner}|Tensor)' object"
    fault = rf"(NameError|UnboundLocalError|ImportError|ModuleNotFoundError)\b|{missing}|.*view size is not compatible"
    errors = (error for error in trials.errors.values() if error.location is not None and re.match(fault, error.error))
    return next(errors, None)


def _of_a_square(trials: TargetTrials, clues: TargetClues) -> TargetError | None:
    """The error of a target whose mask is as wide as a head or the model instead of the sequence."""
    readings = (reading for form in _forms(clues) for reading in islice(_candidates(clues, form), _LIKELY))
    raised = (
        square_of(trials, candidate, lambda trial, reading: _working(trial, clues, reading)) for candidate in readings
    )
    return next((error for error in raised if error is not None), None)


def _of_other_sizes(trials: TargetTrials, clues: TargetClues) -> TargetError | None:
    """The error of a target with buffers too small for the lengths tried, such as a causal buffer of head width x head
    width, or with a fixed batch size; None if other sizes do not avoid it."""
    few = _fitting(trials, clues, TrialSizes(3, 2, 2))
    for length in range(3, 18):
        raised = None if few is None else _raised(trials, few, TrialSizes(3, length, length))
        if few is not None and raised is not None:
            words = f"{raised.error}, with {length} positions: it takes at most {length - 1}"
            if ends_learned_positions(Subject(trials.target, few), trials.inputs(few, TrialSizes(3, length, length))):
                words += ", where its learned positions end"
            elif length - 1 == head_width(trials, few):
                words += ": the mask is (head_size, head_size), where (length, length) is expected"
            return TargetError(words, raised.location)
    for batch in _sizes.batches(clues.target) if clues.is_module else ():
        fitting = _fitting(trials, clues, TrialSizes(batch, 7, 7))
        raised = None if fitting is None else _raised(trials, fitting, TrialSizes(batch + 1, 7, 7))
        if raised is not None:
            words = f"{raised.error}, with {batch + 1} batch items: it takes a batch of {batch} alone"
            return TargetError(words, raised.location)
    return None


def _fitting(trials: TargetTrials, clues: TargetClues, sizes: TrialSizes) -> Reading | None:
    """The first reading of a module whose call works with inputs of these sizes."""
    trial = replace(trials, forced=sizes, errors={})
    forms = [form for form in _forms(clues) if form != "attention"]
    likely = (reading for form in forms for reading in islice(_candidates(clues, form), _LIKELY))
    return next((working for reading in likely if (working := _working(trial, clues, reading)) is not None), None)


def _raised(trials: TargetTrials, reading: Reading, sizes: TrialSizes) -> TargetError | None:
    trial = replace(trials, forced=sizes, errors={})
    trial.returned(reading, tried="it")
    return trial.errors.get("it")


def _packed(trials: TargetTrials, clues: TargetClues, name: str, count: int) -> Reading:
    """The reading of a target that takes several inputs in one tensor: the packing under which values move along the
    sequence.

    Raises:
        Undecided: no packing works; the message holds an adapter.
    """
    for reading in packings(count, _heads(clues), clues.hints.layout):
        working = _working(trials, clues, reading)
        if working is not None and mixing_axes(trials, working) == [working.layout.index("L")]:
            said = (*_assumptions(clues, working), reading.call.in_words(working.layout, name))
            return replace(working, assumed=said)
    raise unpackable(name, count, [error.error for error in trials.errors.values()])


def _with_required_masks(trials: TargetTrials, clues: TargetClues) -> Reading | None:
    """A reading that gives masks which hide nothing, for a target that must be given one; the most probable sizes
    only."""
    names = [argument.name for argument in clues.of("mask", given=False) if argument.required]
    for form in _forms(clues) if names else ():
        for reading in _likely(clues, form):
            for axes, meaning in product(_MASK_SHAPES, _MEANINGS):
                masks = tuple(MaskReading(name, axes, meaning, required=True) for name in names)
                working = _working(trials, clues, replace(reading, masks=masks))
                if working is not None:
                    return working
    return None


def _likely(clues: TargetClues, form: Form) -> Iterator[Reading]:
    """The most probable sizes; of attention proper, which takes any, every layout."""
    readings = _candidates(clues, form)
    return readings if form == "attention" else islice(readings, _LIKELY)


_LIKELY = 6
_MASK_SHAPES = ("QK", "BK", "B1QK", "BQK", "B1K", "B11K", "BHQK")
_MEANINGS: tuple[Meaning, ...] = ("attend", "additive")


def _forms(clues: TargetClues) -> Iterable[Form]:
    """The forms to try, by the names of the arguments."""
    hint = clues.hints.form
    if hint is not None:
        return (hint,)
    if clues.has("query", "key", "value"):
        if clues.needs("heads") or clues.has("matrix_q"):
            return ("qkv",)
        return ("qkv", "attention") if clues.has_matrices else ("attention", "qkv")
    if clues.has("packed") and not clues.has_matrices:
        return ("attention",)
    if clues.has("query") and (clues.has("key_value") or clues.has("context") or clues.has("key")):
        return ("cross",)
    if clues.has("x") and (clues.has("context") or clues.has("key_value")):
        return ("cross", "self") if _prefers_context(clues) else ("self", "cross")
    if any(not argument.is_open for argument in clues.arguments):
        return ("self",)
    return ("self", "qkv", "cross") if clues.is_module else ("attention", "self")


def _prefers_context(clues: TargetClues) -> bool:
    role = "context" if clues.has("context") else "key_value"
    return clues.needs(role) or "cross" in type(clues.target).__name__.lower()


def is_pytorch(target: Any) -> bool:
    """PyTorch's own layers, whose documentation speaks of float masks first and whose `is_causal` is only a hint."""
    target = getattr(target, "_orig_mod", target)
    return isinstance(target, nn.Module) and type(target).__module__.startswith("torch.nn.")


def input_names(clues: TargetClues, form: Form) -> tuple[str, ...]:
    if form in ("attention", "qkv"):
        return clues.names("query", "key", "value")
    if form == "cross":
        pairs = ("x", "context"), ("query", "context"), ("query", "key_value"), ("x", "key_value"), ("query", "key")
        return next((names for pair in pairs if (names := clues.names(*pair))), ())
    return clues.names("x") or clues.names("query")


def _candidates(clues: TargetClues, form: Form) -> Iterator[Reading]:
    names, heads = input_names(clues, form), _heads(clues)
    if form == "attention":
        yield from _attentions(clues, names)
        return
    for width in _sizes.widths(clues.target, clues.hints.embed_dim):
        two_sided = form in ("cross", "qkv") and clues.is_module
        for other in _sizes.context_widths(clues.target, width) if two_sided else iter([None]):
            for layout in _layouts(clues, names, "LBD" if _sequence_first(clues) else "BLD", "LD"):
                kv_heads, values = _sizes.kv_heads(clues.target), _values(clues, form)
                yield Reading(form, layout, width, heads, kv_heads, values, other, names)


def _values(clues: TargetClues, form: Form) -> int | None:
    """The width of values, if it differs from that of keys, by the attributes of nn.MultiheadAttention."""
    keys, values = (getattr(clues.target, name, None) for name in ("kdim", "vdim"))
    return values if form == "qkv" and isinstance(values, int) and values != keys else None


def _heads(clues: TargetClues) -> int | None:
    """The user's, the module's, or the default of an argument."""
    own = _sizes.heads(clues.target) if clues.is_module else None
    defaults = [argument.default for argument in clues.of("heads") if isinstance(argument.default, int)]
    given = [clues.given[argument.name] for argument in clues.of("heads", given=True)]
    needed = [4] if clues.needs("heads") else []
    return clues.hints.num_heads or own or next(iter([*given, *defaults, *needed]), None)


def _attentions(clues: TargetClues, names: tuple[str, ...]) -> Iterator[Reading]:
    """Readings as attention proper: four axes before three, because an input with four axes has an axis of heads.

    A module that is known to have several heads and takes three axes splits them itself.
    """
    heads = _heads(clues)
    head_width = clues.hints.embed_dim or next(_sizes.head_widths(clues.target), None)
    for layout in _layouts(clues, names, "BHLD", "BLD", "LD"):
        for width in [head_width] if head_width else [WIDTH, 24, 64]:
            if "H" in layout or heads is None or heads == 1:
                yield Reading("attention", layout, width, (heads or 3) if "H" in layout else 1, names=names)
            elif width % heads == 0:
                yield Reading("qkv", layout, width * heads if head_width else width, heads, names=names)


def _layouts(clues: TargetClues, names: tuple[str, ...], *usual: str) -> list[str]:
    """The layouts to try: only the user's, or if the user gives none, the documented layout first."""
    if clues.hints.layout is not None:
        return [clues.hints.layout.upper()]
    if is_pytorch(clues.target) or getattr(clues.target, "batch_first", None) is not None:
        return list(usual)
    first = names[0] if names else next((argument.name for argument in clues.arguments), "")
    said = [axes for rank in (4, 3, 2) if (axes := clues.source.layout(first, rank)) in _KNOWN[rank]]
    fitting = [axes for axes in said if any(len(axes) == len(known) for known in usual)]
    return list(dict.fromkeys([*fitting, *usual]))


_KNOWN = {4: ("BHLD", "BLHD", "LBHD"), 3: ("BLD", "LBD", "HLD"), 2: ("LD",)}


def _sequence_first(clues: TargetClues) -> bool:
    """Whether the sequence is the first axis, by `batch_first` of the module or of the attention in it."""
    holds = clues.target.modules() if is_pytorch(clues.target) else (clues.target,)
    said = (getattr(holder, "batch_first", None) for holder in holds)
    return next((value for value in said if isinstance(value, bool)), True) is False


def _working(trials: TargetTrials, clues: TargetClues, reading: Reading) -> Reading | None:
    """The reading with its constants and places of return, where its call works."""
    heads = reading.heads if reading.form != "attention" else None
    keywords = constants(clues.arguments, clues.given, reading.width, heads)
    keywords = {name: value for name, value in keywords.items() if all(name != mask.argument for mask in reading.masks)}
    made = {name: make for name, make in makers(clues.arguments).items() if name not in keywords}
    placed = by_place(clues.arguments)
    own = FilledCall(made, placed) if made else placed
    reading = replace(reading, constants=keywords, call=own or reading.call)
    inputs = trials.inputs(reading)
    returned = trials.returned(reading, inputs, f"{reading.form} {reading.layout} of width {reading.width}")
    if returned is None:
        return None
    if "B" not in reading.layout:
        inputs = inputs.items([0])
    return with_returns(reading, returned, inputs, clues.source, clues.hints)


def _check_batch(trials: TargetTrials, clues: TargetClues, reading: Reading) -> None:
    """
    Raises:
        TargetError: it takes one sequence, where its documentation says a batch.
    """
    first = reading.names[0] if reading.names else next((argument.name for argument in clues.arguments), "")
    if "B" in reading.layout or clues.hints.layout is not None or clues.source.layout(first, len(reading.layout)):
        return
    said = next((axes for rank in (4, 3) if (axes := clues.source.layout(first, rank)) and "B" in axes), None)
    failed = [error for tried, error in trials.errors.items() if said is not None and f" {said} " in f" {tried} "]
    if not failed:
        return
    cause = (
        "; `.T` reverses all axes, the batch included: write `.mT`" if re.search(r"\.T\b", clues.source.whole) else ""
    )
    raise TargetError(
        f"ValueError: its documentation says {WORDS.get(said or '', said)}, and with a batch it raises "
        f"{failed[0].error}{cause}",
        failed[0].location,
    )


def _completed(trials: TargetTrials, clues: TargetClues, reading: Reading) -> Reading:
    """The reading completed by the observed layout and further arguments."""
    _check_batch(trials, clues, reading)
    reading = _with_layout(trials, clues, reading)
    if reading.form == "attention" and "H" in reading.layout:
        reading = _with_groups(trials, clues, reading)
    if reading.form == "attention":
        with_constants = replace(clues, given={**clues.given, **reading.constants})
        narrow = _working(trials, with_constants, replace(reading, value_width=VALUE_WIDTH))
        # what gives another width than the values', or raises for it, keeps values as wide as keys
        reading = reading if narrow is None or trials.out(narrow, trials.inputs(narrow)) is None else narrow
    longest = _sizes.longest(clues.target) if clues.is_module else None
    return replace(reading, max_length=longest, assumed=(*reading.assumed, *_assumptions(clues, reading)))


def _with_groups(trials: TargetTrials, clues: TargetClues, reading: Reading) -> Reading:
    """The reading with two key heads for six query heads, which never broadcast, if the target accepts them."""
    heads = 6 if reading.heads == 3 else reading.heads or 1
    kv_heads = (_sizes.kv_heads(clues.target) if clues.is_module else None) or KV_HEADS
    if heads % kv_heads or heads == kv_heads:
        return reading
    few = replace(reading, heads=heads, kv_heads=kv_heads)
    flags = {argument.name: True for argument in clues.of("gqa")}
    groups = {argument.name: heads // kv_heads for argument in clues.of("groups") if argument.required}
    with_flags = replace(clues, given={**clues.given, **flags, **groups})
    return _working(trials, with_flags, few) or reading


def _with_layout(trials: TargetTrials, clues: TargetClues, reading: Reading) -> Reading:
    """The reading with another order of its axes, if values move along another axis and neither user nor documentation
    fixes the order."""
    first = reading.names[0] if reading.names else ""
    is_known = clues.hints.layout is not None or clues.source.layout(first, len(reading.layout)) == reading.layout
    others = {"BHLD": ("BLHD", "LBHD"), "BLHD": ("BHLD", "LBHD"), "BLD": ("LBD",), "LBD": ("BLD",)}
    if is_known or reading.layout not in others or getattr(clues.target, "batch_first", None) is not None:
        return reading
    moving = mixing_axes(trials, reading)
    other = next((layout for layout in others[reading.layout] if moving == [layout.index("L")]), None)
    if other is None:
        return reading
    swapped = _working(trials, clues, replace(reading, layout=other, out=None, weights=None))
    if swapped is None or mixing_axes(trials, swapped) != [other.index("L")]:
        return reading
    return swapped


def _assumptions(clues: TargetClues, reading: Reading) -> Iterator[str]:
    hints = clues.hints
    if hints.layout is None:
        yield f"its input is {WORDS.get(reading.layout, reading.layout)} (otherwise --layout)"
    if hints.embed_dim is None and reading.form != "attention":
        yield f"the model width is {reading.width} (otherwise --embed-dim)"
    for name, value in reading.constants.items():
        if name not in clues.given and value is not None:
            shown = value if isinstance(value, (bool, int, float, str)) else "random numbers"
            yield f"{name}={shown} in every call"
    if isinstance(reading.call, FilledCall):
        yield f"{', '.join(reading.call.makers)} made for positions from 0 on"


WORDS = {
    "BHLD": "(batch, heads, length, width)",
    "BLHD": "(batch, length, heads, width)",
    "BLD": "(batch, length, width)",
    "LBD": "(length, batch, width)",
    "LD": "(length, width), one sequence",
    "HLD": "(heads, length, width), one sequence",
    "BL": "(batch, length)",
    "LBHD": "(length, batch, heads, width)",
}


# what PyTorch says where the sizes or the axes of an input are wrong
_SHAPES = (
    r"shape|size|dim|unpack|broadcast|match|expected|axis|axes|einsum|subscript|view|multipl|stack|cat|index|length"
)


def _of_one_length(trials: TargetTrials, clues: TargetClues) -> Reading | None:
    """The reading of a module that takes one length by design, such as the windows of Swin. None for other modules, and
    if that length is the number or width of its heads: confusing two axes has the same effect."""
    only = _one_length(trials, clues)
    if only is None:
        return None
    sizes = TrialSizes(3, only, only)
    only_reading = _fitting(trials, clues, sizes)
    if only_reading is None or only in (only_reading.heads, head_width(trials, only_reading)):
        return None
    only_reading = _completed(replace(trials, forced=sizes), clues, only_reading)
    said = f"it takes {only} positions and no other number: what needs other lengths is not measured"
    return replace(only_reading, max_length=only, only_length=only, assumed=(*only_reading.assumed, said))


def _one_length(trials: TargetTrials, clues: TargetClues) -> int | None:
    """The only length that the target takes, from the sizes of its own tensors: windows of Swin, a mask of a fixed
    size."""
    if not clues.is_module:
        return None
    parts = [
        value
        for part in clues.target.modules()
        for value in (*vars(part).values(), *part._parameters.values(), *part._buffers.values())
    ]
    sizes = {size for tensor in parts if isinstance(tensor, Tensor) for size in tensor.shape}
    sizes |= {value for value in parts if isinstance(value, int)}
    tried = replace(trials, errors={})
    for form in _forms(clues):
        for reading in islice(_candidates(clues, form), _LIKELY):
            for size in sorted(width for width in sizes if 1 < width <= _LONGEST and width != reading.width):
                try:
                    inputs = trials.inputs(reading, TrialSizes(3, size, size))
                except Inapplicable:
                    break
                if tried.returned(reading, inputs) is not None:
                    more = trials.inputs(reading, TrialSizes(3, size + 1, size + 1))
                    return size if tried.returned(reading, more) is None else None
    return None


_LONGEST = 256


def _of_no_position(trials: TargetTrials, clues: TargetClues) -> str:
    """A description of a result without an output for each position: ClassAttn of timm returns only the output of the
    first."""
    tried = replace(trials, errors={})
    for form in _forms(clues):
        for reading in islice(_candidates(clues, form), _LIKELY):
            inputs = trials.inputs(reading)
            returned = tried.returned(reading, inputs)
            if returned is not None:
                shapes = [list(tensor.shape) for _, tensor in tensors_in(returned)]
                what = " and ".join(map(str, shapes)) or type(returned).__name__
                given = list(next(iter(inputs.tensors.values())).shape)
                return f"for an input {given} it returns {what}, no output for each of {inputs.length} positions"
    return ""


def _nothing_works(trials: TargetTrials, clues: TargetClues) -> Exception:
    if takes_images(clues.target):
        return as_sequence()
    errors = list(trials.errors.items())
    words = {error.error for _, error in errors}
    if len(words) == 1 and errors:
        return errors[0][1]
    shown = "; ".join(f"as {tried}: {error.error}" for tried, error in errors[:3])
    first = errors[0][1] if errors else None
    if first is not None and not re.search(_SHAPES, first.error, re.IGNORECASE):
        return first
    only = _one_length(trials, clues)
    if only is not None:
        return Undecided(
            f"it takes inputs of {only} positions and of no other number, while every check compares lengths: it "
            "cannot be tested as it is",
            [
                (f"a function of yours that calls it with {only} and gives the first ones", "--adapter FILE.py:NAME"),
                ("a size of its constructor that is another number", "--arg NAME=VALUE"),
            ],
        )
    returned = _of_no_position(trials, clues)
    if returned:
        return Undecided(
            f"{returned}, where every check compares outputs by position: it cannot be tested as it is",
            [("a function of yours that gives an output for each position", "--adapter FILE.py:NAME")],
        )
    message = f"no way to call it was found ({shown})" if shown else "no way to call it was found"
    options = [
        ("its model width", "--embed-dim N"),
        ("its number of heads", "--num-heads N"),
        ("how the axes of its input stand", "--layout BLD|LBD|BHLD|BLHD|LD"),
        ("what its inputs are", "--form attention|self|cross|qkv|tokens"),
        ("a function of yours that calls it", "--adapter FILE.py:NAME"),
    ]
    return Undecided(message, options)
