"""Which outputs depend on which inputs, exactly: an input is changed and every output compared bit for bit.

The shapes of the two calls are the same, so a right implementation gives the same bits wherever it promises not to
look: a hidden key's weight is exactly 0, and adding 0 times a number changes nothing.

Shape legend: B batch, H heads (1 for modules, whose heads are merged), Lq / Lk lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from ...support._restored import seeded
from ..findings._finding import Inapplicable, TargetError
from ._inputs import NamedInputs, Side
from ._operations import WatchedOperations
from ._subject import Subject

Direction = Literal["causal", "bidirectional", "neither"]
SEED = 20
T = TypeVar("T")
# In targets that are not repeatable, differences up to this multiple of what equal calls differ by are no influence.
_NOISES = 16
# Changes below this part of the output may be rounding: of that nothing is left in float64, and all of what leaks.
FAINT = 1e-3


@dataclass(frozen=True, eq=False)
class SteadySubject:
    """A subject called so that equal calls give equal bits, as far as it can.

    The random generator starts every call in the same state, so dropout draws the same. A target that remembers
    earlier calls is called on a copy each time. What then still differs is `noise`.
    """

    subject: Subject
    copied: bool
    noise: float

    def __call__(self, inputs: NamedInputs, **masks: Any) -> Tensor:
        """(B, H or 1, Lq, D) output."""
        subject = self.subject.fresh() if self.copied else self.subject
        with seeded(SEED), torch.no_grad():
            return four(subject(inputs, **masks).out)


def exactly(subject: Subject, compute: Callable[[Subject], Tensor]) -> Tensor | None:
    """The result of `compute` for the target in float64; None if the target is in float64 already, raises an error, or
    rounds to fewer bits inside."""
    if subject.dtype == torch.float64:
        return None
    rounding = WatchedOperations(_rounds)
    try:
        exact = in_double(subject)
        with rounding:
            result = compute(exact)
    except (Inapplicable, TargetError, RuntimeError):
        return None
    return None if rounding.found else result


def _rounds(operation: Any, given: tuple[Any, ...], out: Any) -> bool:
    """Whether an operation rounds float64 to fewer bits, as a softmax that is always in float32. A mask in float32
    rounds nothing."""
    if not isinstance(out, Tensor) or not out.is_floating_point() or out.dtype == torch.float64 or out.dim() < 2:
        return False
    return any(isinstance(tensor, Tensor) and tensor.dtype == torch.float64 for tensor in given)


def steady(subject: Subject, inputs: NamedInputs, **masks: Any) -> SteadySubject:
    """Find out how to call a subject repeatably."""
    for copied in (False, True):
        called = SteadySubject(subject if copied else subject.fresh(), copied, 0.0)
        first, second = (called(inputs, **masks) for _ in range(2))
        if first.shape == second.shape and not difference(first, second).any():
            return called
    third = called(inputs, **masks)
    noise = max(float(difference(first, tensor).max()) for tensor in (second, third) if tensor.shape == first.shape)
    return replace(called, noise=noise)


def effects(called: SteadySubject, inputs: NamedInputs, *, side: Side = "key", **masks: Any) -> Tensor:
    """(B, H or 1, Lq, L) the largest change of each output when the input at one position of the side changes: 0 where
    not a bit differs, inf where one of the two is NaN."""
    if side == "key":
        inputs = apart(inputs)
    before = called(inputs, **masks)
    positions = range(inputs.key_length if side == "key" else inputs.length)
    columns = [moved(called, inputs, inputs.changed([at], side), before, **masks) for at in positions]
    return _above(torch.stack(columns, -1), called.noise)


def moved(called: SteadySubject, inputs: NamedInputs, other: NamedInputs, before: Tensor, **masks: Any) -> Tensor:
    """(B, H or 1, Lq) by how much `before`, which `inputs` give, changes with `other` inputs; 0 where only its rounding
    does, as where a sum over all keys is divided out again."""
    sizes = difference(before, called(other, **masks))
    largest = float(before.abs().nan_to_num(0.0, 0.0, 0.0).max())
    if not ((sizes > 0) & (sizes <= FAINT * largest)).any():
        return sizes

    def again(exact: Subject) -> Tensor:
        call, given = replace(called, subject=exact), (variant.to(torch.float64) for variant in (inputs, other))
        return difference(*(call(variant, **masks) for variant in given))

    return small_as_zero(sizes, exactly(called.subject, again), largest, before.dtype, inputs.key_length)


def small_as_zero(sizes: Tensor, exact: Tensor | None, largest: float, dtype: torch.dtype, keys: int) -> Tensor:
    """`sizes`, the changes of numbers up to `largest`, with rounding replaced by 0. With `exact`, the same changes in
    float64: a change is rounding if less than half of it remains there, and no more than the dtype resolves. Without
    `exact`: if it is below the rounding of two sums over the keys, numerator and denominator, in two calls."""
    eps = torch.finfo(dtype).eps
    if exact is None:
        rounded = sizes <= 4 * keys * eps * largest
    else:
        exact = exact.to(sizes.device)
        rounded = (exact <= eps * largest) & (exact < sizes / 2)
    return sizes.masked_fill((sizes <= FAINT * largest) & rounded, 0.0)


def later(called: SteadySubject, inputs: NamedInputs, cut: int, side: Side = "both") -> Tensor:
    """(B, H or 1, cut + 1): the change of each output up to `cut` when all later inputs change at once."""
    other = inputs.changed(range(cut + 1, inputs.length), side)
    return _above(moved(called, inputs, other, called(inputs)), called.noise)[..., : cut + 1]


def gradients(subject: Subject, inputs: NamedInputs, row: int, side: Side = "both") -> Tensor:
    """(B, L) the largest gradient of the output at `row` by each input of the side; 0 without a path, and if it is NaN
    or rounding."""
    sizes = _gradients(subject, inputs, row, side)
    largest = float(sizes.max())
    if not ((sizes > 0) & (sizes <= FAINT * largest)).any():
        return sizes
    exact = exactly(subject, lambda double: _gradients(double, inputs.to(torch.float64), row, side))
    return small_as_zero(sizes, exact, largest, subject.dtype, inputs.key_length)


def _gradients(subject: Subject, inputs: NamedInputs, row: int, side: Side) -> Tensor:
    with torch.enable_grad(), seeded(SEED):
        given = inputs.leaves()
        # on a copy: what a target keeps of a call with gradients cannot be copied afterwards
        out = four(subject.fresh()(given).out)
        drawn = torch.Generator().manual_seed(SEED)
        weigh = torch.randn(out[..., row, :].shape, generator=drawn, dtype=torch.float64)
        chosen = list({id(given[name]): given[name] for name in given.on(side)}.values())
        gradients = torch.autograd.grad((out[..., row, :] * weigh.to(out)).sum(), chosen, allow_unused=True)
    sizes = [
        four(gradient).double().abs().nan_to_num(nan=0.0).amax((1, 3)).cpu()
        for gradient in gradients
        if gradient is not None
    ]
    return torch.stack(sizes).amax(0) if sizes else torch.zeros(inputs.batch, inputs.length)


def direction(subject: Subject) -> Direction:
    """ "causal": no output ever depends on a later input; "bidirectional": all do on all; "neither": in between.
    Found without a mask."""
    return direction_of(own_dependence(subject))


def is_causal(subject: Subject) -> bool:
    """The promised direction, else the measured one; mixed directions count by most pairs."""
    if subject.promise.causal is not None:
        return subject.promise.causal
    way = direction(subject)
    return way == "causal" or (way == "neither" and hides_most(own_dependence(subject)))


def own_dependence(subject: Subject) -> Tensor:
    """`dependence` of 7 positions, measured once for each subject."""
    if "dependence" not in subject.measured:
        subject.measured["dependence"] = dependence(subject, 7)
    return subject.measured["dependence"]


def dependence(subject: Subject, length: int, batch: int = 2) -> Tensor:
    """(B, H or 1, L, L): the change of output i with input j of the same sequence. If a module takes a context, and its
    own positions do not affect one another: with input j of the context."""
    inputs = subject.one_sequence(subject.inputs(batch, length))
    called = steady(subject, inputs)
    sizes = effects(called, inputs, side=sequence_side(subject))
    if subject.form == "cross" and not off_diagonal(sizes > 0).any():
        return effects(called, inputs, side="key")
    return sizes


def at_lengths(subject: Subject, wanted: Iterable[int], measure: Callable[[int], T | None]) -> dict[int, T]:
    """The results of `measure` at the lengths that the target supports.

    Raises:
        TargetError: it takes none of them.
    """
    by_length: dict[int, T] = {}
    raised: TargetError | None = None
    only = subject.reading.only_length
    for length in sorted(wanted) if only is None else [only]:
        if length <= (subject.reading.max_length or length):
            try:
                measured = measure(length)
            except TargetError as error:
                raised = error
            else:
                by_length |= {} if measured is None else {length: measured}
    if not by_length and raised is not None:
        raise raised
    return by_length


def sequence_side(subject: Subject) -> Side:
    """The side whose positions are the positions of the attended sequence."""
    return cast(Side, {"cross": "query", "self": "both", "tokens": "both"}.get(subject.form, "key"))


def direction_of(sizes: Tensor) -> Direction:
    """The direction of sizes or booleans (B, H, L, L), if all heads and items agree."""
    upper = above_diagonal(sizes > 0)
    if not upper.any():
        return "causal"
    length = sizes.shape[-1]
    everything = int(off_diagonal(sizes > 0).sum()) == upper[..., 0, 0].numel() * length * (length - 1)
    return "bidirectional" if everything and not _one_sided(sizes) else "neither"


def hides_most(sizes: Tensor) -> bool:
    """Whether outputs see less than half of the later inputs, and fewer later than earlier inputs."""
    visible = sizes > 0
    length = sizes.shape[-1]
    pairs = max(visible[..., 0, 0].numel() * length * (length - 1) // 2, 1)
    after, before = int(above_diagonal(visible).sum()), int(above_diagonal(visible.mT).sum())
    return (after < pairs / 2 and after < before) or _one_sided(sizes)


def above_diagonal(visible: Tensor) -> Tensor:
    """(..., L, L): the influence of later inputs on each output; all other entries are False or 0."""
    return visible.triu(1)


def off_diagonal(visible: Tensor) -> Tensor:
    """(..., L, L) with the diagonal False or 0."""
    return visible.triu(1) + visible.tril(-1)


def difference(before: Tensor, after: Tensor) -> Tensor:
    """(B, H, L) the largest difference at each position, in float64; NaN equals NaN, and differs from a number by
    inf."""
    same = (before == after) | (before.isnan() & after.isnan())
    size = (before.double() - after.double()).abs().nan_to_num(nan=torch.inf)
    return size.masked_fill(same, 0.0).amax(-1)


def apart(inputs: NamedInputs) -> NamedInputs:
    """Inputs that are one tensor under several names as copies: nn.MultiheadAttention computes the two otherwise."""
    return replace(inputs, tensors={name: tensor.clone() for name, tensor in inputs.tensors.items()})


def in_double(subject: Subject) -> Subject:
    exact = subject.to(torch.float64)
    exact.__dict__["dtype"] = torch.float64  # of functions, too, which have no parameters to tell it
    return exact


def four(tensor: Tensor) -> Tensor:
    """A module's (B, L, E) as (B, 1, L, E)."""
    return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor


def _above(sizes: Tensor, noise: float) -> Tensor:
    return sizes.masked_fill(sizes <= _NOISES * noise, 0.0) if noise else sizes


def _one_sided(sizes: Tensor) -> bool:
    """Whether later inputs have less than a hundredth of the influence of earlier inputs, in every head."""
    heads = [head for head in sizes.double().movedim(1, 0) if above_diagonal(head).any()]
    return all(bool(_middle(above_diagonal(head)) < 0.01 * _middle(above_diagonal(head.mT))) for head in heads)


def _middle(sizes: Tensor) -> Tensor:
    positive = sizes[sizes > 0]
    return positive.median() if len(positive) else sizes.new_zeros(())
