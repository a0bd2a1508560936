"""How much a model's loss depends on each head: `head_importance`.

Shape legend: T batches, or the numbers of all their losses, H query heads of a call, N heads of all calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...operator._masks._data import describe
from ...support._restored import evaluating
from ...support._uncertainty import half_width
from ..intervention import Ablate, Intervention
from ._heads import CallHeads, Head, HeadValues, head_map
from ._importance_result import HeadImportance, Removal, kept_count
from ._runs import CallList, Gates, Progress, edited, gradients, no_gradient, run_model, scalar

Loss = Callable[[nn.Module, Any], Any]
BY = ("gradient", "ablation", "greedy")
SIGNED = ("signed", "signed_low", "signed_high")


def head_importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    by: str = "gradient",
    to: str = "zero",
    keep: float | None = None,
    progress: Progress | None = None,
) -> HeadImportance:
    """How much a model's loss depends on each of its heads.

    By "gradient": the derivative of the loss by a factor g_h = 1 on the output of each head; its absolute value is
    averaged over batches (Michel et al., "Are Sixteen Heads Really Better than One?", 2019, equation 2, there with
    batches of one item). One forward and one backward pass a batch for all heads. To first order, the signed derivative
    is the fall of the loss when the head is removed.

        value_h = mean over batches |d loss / d g_h|          signed_h = mean over batches d loss / d g_h

    By "ablation": the loss without the head, less the loss with it, exactly; N + 1 forwards a batch. By "greedy": the
    head whose ablation costs least is removed, again and again, and costs are measured anew each time; about
    (N^2 - M^2) / 2 forwards a batch for M heads that stay.

    All calls that `saccade.intervene` reaches are measured; a module that is called several times in a forward has a
    call for each. The model runs in evaluation mode, without dropout. Afterwards its mode and gradients are as before.
    Batches have equal weight, whatever their sizes.

    Args:
        model: any PyTorch model.
        batches: an iterable of values for `loss`; each is used once, but "greedy" keeps all of them.
        loss: `loss(model, batch)` returns a scalar tensor, or several numbers (T,), such as one for each part of a
            text: their mean is the loss, and intervals are over them; "gradient" makes a backward pass for each. None:
            the `loss` in the model's output for the batch, which is a dict of keyword arguments (with labels), a tuple
            of arguments, or one argument.
        by: "gradient", "ablation" or "greedy".
        to: the output of an ablated head, as in `saccade.intervention.Ablate`: "zero"; "mean" or "resample", which need
            batches of several items.
        keep: for "greedy": the number of heads that stay (int), or their share of all (float). None is half.
        progress: `progress(done, total)` is called after each forward of "ablation" and "greedy", where the total is
            known from the first batch on; for "gradient" after each backward pass, where batches have a length.

    Returns:
        A number for each head, with 95 % intervals over batches, or over the numbers of `loss`, which need two of them.

    Raises:
        TypeError: a model that is not a module, batches that are one dict, a loss of another type.
        ValueError: an unknown `by`, no batches, batches of one item where `to` needs several, a loss that is missing,
            not scalar, not finite, or without a gradient at the heads; a model without attention calls that can be
            reached.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4))
        >>> model = saccade.nn.Encoder(config, layers=2)
        >>> found = saccade.head_importance(model, torch.randn(3, 2, 5, 16), lambda model, x: model(x).square().mean())
        >>> found.batches, len(found.ranked())  # print(found) shows a table
        (3, 8)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    if isinstance(batches, Mapping):
        raise TypeError("batches: expected several batches, such as a list of dicts, got one dict; write [batch]")
    if by not in BY:
        raise ValueError(f"by must be one of {', '.join(BY)}; got {by!r}")
    if by != "greedy" and keep is not None:
        raise ValueError(f"keep: only for by='greedy', got by={by!r}; call least(keep) on the result instead")
    if by == "gradient" and to != "zero":
        raise ValueError(f"to: only for ablation, got to={to!r} with by='gradient', which needs no replacement")
    work = _Work(model, loss, to, progress)
    with evaluating(model):
        if by == "gradient":
            return _by_gradient(work, batches)
        return _by_ablation(work, batches) if by == "ablation" else _greedy(work, list(batches), keep)


@dataclass
class _Work:
    """The model and its loss, and the calls met while it ran."""

    model: nn.Module
    loss: Loss | None
    to: str
    progress: Progress | None
    calls: dict[str, CallHeads] = field(default_factory=dict)
    unobserved: dict[str, str] = field(default_factory=dict)
    done: int = 0

    def value(self, batch: Any) -> Tensor:
        """(T,) the numbers whose mean is the loss; (1,) for a scalar loss."""
        if self.loss is not None:
            return _numbers(self.loss(self.model, batch))
        out = run_model(self.model, batch, "batches")
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        if loss is None:
            raise ValueError(
                "loss: the model's output has none; pass batches with labels, or loss=function(model, batch)"
            )
        return _numbers(loss)

    def without(self, batch: Any, removed: Mapping[str, Sequence[int]]) -> Tensor:
        """(T,) the loss with heads ablated."""
        edits = {name: Ablate(list(heads), self.to) for name, heads in removed.items()}
        with torch.no_grad(), edited(self.model, edits):
            return self.value(batch).cpu().double()

    def loss_and_calls(self, batch: Any) -> Tensor:
        """(T,) the loss without ablation; the calls of the model are added to `calls`."""
        listed = CallList(self.calls)
        with torch.no_grad(), edited(self.model, listed) as run:
            losses = self.value(batch).cpu().double()
        if not self.calls:
            raise ValueError("loss: it ran no forward of the model on this thread")
        alone = [name for name, items in listed.items.items() if items == 1]
        if self.to == "mean" and alone:
            raise ValueError(
                f"to='mean' is the mean over the items of a batch, and {alone[0] or 'the model'} has one item: give "
                "batches of several, or to='zero'"
            )
        self.add_unobserved(run)
        return losses

    def add_unobserved(self, run: Intervention) -> None:
        self.unobserved.update({name: what.reason for name, what in run.unobserved.items()})

    def count_forward(self, total: int) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, total)

    @property
    def heads(self) -> list[Head]:
        return list(HeadValues(tuple(self.calls.values()), torch.empty(0)).heads)


def _by_gradient(work: _Work, batches: Iterable[Any]) -> HeadImportance:
    total = len(batches) if isinstance(batches, Sized) else 0
    losses: list[float] = []
    slopes: list[list[dict[str, Tensor]]] = []
    for batch in batches:
        gates = Gates()
        with torch.enable_grad(), edited(work.model, CallList(work.calls), gates) as run:
            numbers = work.value(batch).unbind()
        work.add_unobserved(run)
        slopes.append([])
        for number in numbers:
            slopes[-1].append(gradients(number, gates.gates, no_gradient("loss", "ablation"), again=len(numbers) > 1))
            work.count_forward((total or len(slopes)) * len(numbers))
        losses += [float(number.detach()) for number in numbers]
    _some(losses)
    calls = tuple(work.calls.values())
    # a call that did not happen for a batch has no effect on its loss
    absent = {call.name: torch.zeros(call.heads) for call in calls}
    by_batch = [torch.stack([head_map(calls, {**absent, **part}).values for part in parts]) for parts in slopes]
    signed = [None if end is None else HeadValues(calls, end) for end in _interval(torch.cat(by_batch))]
    sizes = torch.stack([parts.mean(0).abs() for parts in by_batch])
    return _result(work, "gradient", losses, sizes, len(slopes), **dict(zip(SIGNED, signed, strict=True)))


def _by_ablation(work: _Work, batches: Iterable[Any]) -> HeadImportance:
    total = len(batches) if isinstance(batches, Sized) else 0
    wholes: list[Tensor] = []
    rises: list[dict[Head, Tensor]] = []
    for batch in batches:
        whole = work.loss_and_calls(batch)
        wholes.append(whole)
        heads = work.heads
        forwards = (total or len(wholes)) * (len(heads) + 1)
        work.count_forward(forwards)
        rises.append({})
        for head in heads:
            rises[-1][head] = work.without(batch, {head.call: [head.head]}) - whole
            work.count_forward(forwards)
    _some(wholes)
    by_batch = [
        torch.stack([rise.get(head, torch.zeros_like(whole)) for head in work.heads], 1)
        for rise, whole in zip(rises, wholes, strict=True)
    ]
    return _result(work, "ablation", torch.cat(wholes).tolist(), torch.cat(by_batch), len(wholes))


def _greedy(work: _Work, batches: list[Any], keep: float | None) -> HeadImportance:
    _some(batches)
    whole = now = torch.cat([work.loss_and_calls(batch) for batch in batches])
    heads = work.heads
    stay = kept_count(0.5 if keep is None else keep, len(heads))
    total = sum(range(stay + 1, len(heads) + 1)) * len(batches)
    left, gone, steps = list(range(len(heads))), list[Head](), list[Removal]()
    # (T, N), of the last round that tried the head; NaN if none did
    rises = torch.full((len(whole), len(heads)), math.nan, dtype=torch.float64)
    while len(left) > stay:
        tried = {at: _losses(work, batches, [*gone, heads[at]], total) for at in left}
        for at, losses in tried.items():
            rises[:, at] = losses - now
        best = min(left, key=lambda at: float(tried[at].mean()))
        now = tried[best]
        left.remove(best)
        gone.append(heads[best])
        steps.append(_removal(heads[best], now, whole))
    return _result(work, "greedy", whole.tolist(), rises, len(batches), removed=tuple(steps))


def _result(work: _Work, by: str, losses: Sequence[float], tensor: Tensor, batches: int, **more: Any) -> HeadImportance:
    """The result for numbers (T, N)."""
    calls = tuple(work.calls.values())
    mean, low, high = _interval(tensor)
    return HeadImportance(
        by,
        HeadValues(calls, mean),
        None if low is None else HeadValues(calls, low),
        None if high is None else HeadValues(calls, high),
        loss=sum(losses) / len(losses),
        batches=batches,
        unobserved=work.unobserved,
        **more,
    )


def _losses(work: _Work, batches: Sequence[Any], without: Sequence[Head], total: int) -> Tensor:
    """(T,) the losses without some heads."""
    by_call: dict[str, list[int]] = {}
    for head in without:
        by_call.setdefault(head.call, []).append(head.head)
    losses = []
    for batch in batches:
        losses.append(work.without(batch, by_call))
        work.count_forward(total)
    return torch.cat(losses)


def _removal(head: Head, losses: Tensor, whole: Tensor) -> Removal:
    rise, low, high = _interval((losses - whole)[:, None])
    return Removal(
        head,
        float(losses.mean()),
        float(rise),
        None if low is None else float(low),
        None if high is None else float(high),
    )


def _interval(tensor: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(N,) the mean over batches of (T, N), and its 95 % interval (Student's); None for one batch."""
    mean, count = tensor.mean(0), tensor.shape[0]
    if count < 2:
        return mean, None, None
    half = torch.from_numpy(half_width(tensor.std(0).numpy(), np.asarray(count)))
    return mean, mean - half, mean + half


def _numbers(result: Any) -> Tensor:
    """(T,) the numbers of a loss."""
    if isinstance(result, Tensor) and result.ndim == 1 and len(result):
        return torch.stack([scalar(number, "loss") for number in result])
    return scalar(result, "loss").reshape(1)


def _some(results: Sequence[Any]) -> None:
    if not results:
        raise ValueError("batches: expected at least one batch, got none")
