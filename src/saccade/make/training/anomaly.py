"""Finds the first tensor that is not finite: repeats a batch and checks every tensor of the computation.

Shape legend: B batch, L context, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv key and value width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...interception._hooks import hooked
from ...operator._checks import make_call
from ...operator._tiles import TileProblem, logits_of, look, shown
from ...operator.nn import MultiHeadAttention, Observation
from ...operator.nn.attention import weights_of
from ...operator.nn.stacks import LayerObserver
from ...operator.positions import Rotary

ROWS = 64  # of attention weights at once
SHOWN = 12  # finite tensors shown before the first that is not


@dataclasses.dataclass(frozen=True)
class TensorSummary:
    """Shape and statistics of a tensor. `minimum`, `maximum` and `mean` cover finite entries (NaN without any)."""

    place: str
    shape: tuple[int, ...]
    minimum: float
    maximum: float
    mean: float
    count: int
    nan: int
    infinite: int

    @property
    def finite(self) -> bool:
        return not self.nan and not self.infinite

    def __str__(self) -> str:
        text = f"{self.place} {self.shape}: min {self.minimum:.4g}, max {self.maximum:.4g}, mean {self.mean:.4g}"
        if self.finite:
            return text
        bad = self.nan + self.infinite
        return f"{text}; {bad:,} of {self.count:,} not finite ({self.nan:,} NaN, {self.infinite:,} infinite)"


@dataclasses.dataclass(frozen=True)
class AnomalyReport:
    """The result of `find_anomaly`.

    Args:
        found: the first tensor, in the order of computation, that is not finite; None if all are.
        clean: the finite tensors before it, in that order.
        parameters: names of the model's parameters that are not finite themselves.
        note: the reason, if no tensor was checked.
    """

    found: TensorSummary | None
    clean: tuple[TensorSummary, ...] = ()
    parameters: tuple[str, ...] = ()
    note: str = ""

    @property
    def place(self) -> str:
        """Name of the first tensor that is not finite, or the reason why there is none."""
        if self.found is not None:
            return self.found.place
        return self.note or "no tensor: the numbers were finite when the step was repeated"

    def __str__(self) -> str:
        if self.found is None:
            return self.note or f"every one of {len(self.clean)} tensors is finite"
        lines = [f"first not finite: {self.found}"]
        if self.parameters:
            lines.append(f"parameters that are not finite themselves: {', '.join(self.parameters)}")
        if self.clean:
            lines.append(f"before it, all finite (the last {min(SHOWN, len(self.clean))} of {len(self.clean)}):")
        return "\n".join([*lines, *(f"  {entry}" for entry in self.clean[-SHOWN:])])


Loss = Callable[[LayerObserver | None], Tensor]
"""Computes a loss. Its argument is passed to the model's `observe=`."""


def find_anomaly(model: nn.Module, tokens: Tensor) -> AnomalyReport:
    """Run windows through a language model and report the first tensor that is not finite.

    These are checked in the order of computation: the embedding; in each layer the residual stream, query, key, value,
    visible logits, weights and output of the attention, outputs of norms and feed-forward layers; the model's logits;
    the loss; and, when all of these are finite, each parameter's gradient in the order of the backward pass. Logits and
    weights are recomputed in blocks of rows, so memory grows linearly with the length.

    The model keeps its training mode and its gradients. Dropout draws from PyTorch's global generator.

    Args:
        model: takes tokens (B, L) and `observe=`, like `saccade.models.DecoderLM`.
        tokens: windows (B, L + 1): the model sees all but the last token and predicts all but the first.

    Returns:
        A report: `found`, the first tensor that is not finite, and `place`, where it stands.

    Example:
        >>> import torch, saccade
        >>> model = saccade.models.DecoderLM(saccade.models.ModelConfig(5, width=8, layers=1, heads=2, context=4))
        >>> _ = torch.nn.init.constant_(model.decoder.blocks[0].attention.output.weight, float("inf"))
        >>> saccade.training.find_anomaly(model, torch.tensor([[0, 1, 2, 3, 4]])).place
        'output of decoder.blocks.0.attention'
    """

    def loss(observe: LayerObserver | None) -> Tensor:
        logits = model(tokens[:, :-1]) if observe is None else model(tokens[:, :-1], observe=observe)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return locate_anomaly(model, loss)


def locate_anomaly(model: nn.Module, loss: Loss) -> AnomalyReport:
    """`find_anomaly` for any model: checks the computation of `loss(...)` and its gradients."""
    parameters = tuple(name for name, value in model.named_parameters() if not bool(torch.isfinite(value).all()))
    trail = _TensorTrail()
    device = next(model.parameters()).device
    states = _generators(device)
    with contextlib.suppress(_FirstAnomaly):
        _forward(model, loss, trail)
        _restore(states, device)
        _backward(model, loss, trail)
    return AnomalyReport(trail.found, tuple(trail.clean), parameters)


class _FirstAnomaly(Exception):
    """Raised at the first tensor that is not finite, to end the search."""


class _TensorTrail:
    """The tensors checked so far."""

    def __init__(self) -> None:
        self.clean: list[TensorSummary] = []
        self.found: TensorSummary | None = None

    def add(self, place: str, tensor: Tensor) -> None:
        self.merge(place, tuple(tensor.shape), [(tensor, None)])

    def merge(self, place: str, shape: tuple[int, ...], parts: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Check a tensor that comes in parts, each with a mask of the entries to check (None: all)."""
        statistics = _statistics(place, shape, parts)
        if not statistics.finite:
            self.found = statistics
            raise _FirstAnomaly
        self.clean.append(statistics)


@torch.no_grad()
def _statistics(place: str, shape: tuple[int, ...], parts: Iterable[tuple[Tensor, Tensor | None]]) -> TensorSummary:
    low, high, total = math.inf, -math.inf, 0.0
    count = nan = infinite = finite = 0
    for part, counts in parts:
        values = part.detach() if counts is None else part.detach()[counts.expand(part.shape)]
        good = values[torch.isfinite(values)].double()
        count, finite = count + values.numel(), finite + good.numel()
        nan += int(values.isnan().sum())
        infinite += int(values.isinf().sum())
        if good.numel():
            low, high = min(low, good.min().item()), max(high, good.max().item())
            total += good.sum().item()
    if not finite:
        low = high = math.nan
    return TensorSummary(place, shape, low, high, total / finite if finite else math.nan, count, nan, infinite)


# --- forward ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _forward(model: nn.Module, loss: Loss, trail: _TensorTrail) -> None:
    with _hooks(model, trail):
        value = loss(lambda layer, observation: _attention(trail, layer, observation))
    trail.add("loss", value)


@contextlib.contextmanager
def _hooks(model: nn.Module, trail: _TensorTrail) -> Iterator[None]:
    """Hooks that check the inputs of norms and the output of every module, except modules inside attention."""
    inside: set[nn.Module] = set()
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        # Rotary embeddings have no hook: the rotated queries and keys are checked.
        if module not in inside and not isinstance(module, (Rotary, nn.Dropout, nn.Identity)):
            names[module] = name
            inside.update(module.modules() if isinstance(module, MultiHeadAttention) else ())

    def check(place: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            trail.add(place, tensor)

    norms = [module for module in names if "norm" in type(module).__name__.lower()]
    with (
        hooked(norms, before=lambda norm, given, named: check(f"residual stream before {names[norm]}", given[0])),
        hooked(names, after=lambda module, out: check(_output_of(names[module]), out)),
    ):
        yield


def _output_of(name: str) -> str:
    if not name:
        return "logits of the model"
    number = name.rpartition(".")[2]
    return f"residual stream after layer {number}" if number.isdigit() else f"output of {name}"


def _attention(trail: _TensorTrail, layer: int, observation: Observation) -> None:
    """Check query, key, value, logits, weights and output of a call. Attention variants have no logits and weights."""
    where = f"layer {layer}, cross-attention" if observation.cross else f"layer {layer}"
    for name in ("query", "key", "value"):
        trail.add(f"{where}: {name}", getattr(observation, name))
    if observation.mechanism is None:  # variants have logits and weights of another form, or none
        shape = (*observation.query.shape[:3], observation.key.shape[2])
        trail.merge(f"{where}: logits", shape, _logits(observation))
        trail.merge(f"{where}: weights", shape, _weights(observation))
    trail.add(f"{where}: out", observation.out)


def _logits(observation: Observation) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Tiles (B, Hq, r, c) of the logits, each with a mask of the visible entries (not masked, bias above -inf)."""
    options: dict[str, Any] = {name: getattr(observation, name) for name in ("bias", "scale", "softcap")}
    call = make_call(
        observation.query, observation.key, observation.value, observation.mask, sink=None, dropout=0.0, **options
    )
    problem = replace(TileProblem.of(call), guarded=False)  # query and key were checked before: both are finite
    parameter = None if call.bias is None else call.bias.parameter
    key_spans = problem.key_spans()
    for rows in problem.row_spans():
        query, _ = problem.block(call.query, rows)
        for _, keys, kind in problem.tiles(rows, key_spans):
            key, _ = problem.block(call.key, keys)
            scores = problem.bias_tiles(parameter, rows, keys)
            sight = look(problem, rows, keys, kind, scores, (None, None, None), call.heads)
            logits, _ = logits_of(problem, sight, query, key, scores)
            counts = sight.visible
            allowed = shown(problem, scores, logits)
            if allowed is not None:
                counts = allowed if counts is None else counts & allowed
            yield logits, counts


def _weights(observation: Observation) -> Iterator[tuple[Tensor, None]]:
    """The attention weights (B, Hq, r, Lk), in blocks of rows."""
    length = observation.query.shape[2]
    for start in range(0, length, ROWS):
        yield weights_of(observation, range(start, min(start + ROWS, length))), None


# --- backward ---------------------------------------------------------------------------------------------------------


def _backward(model: nn.Module, loss: Loss, trail: _TensorTrail) -> None:
    """Check each parameter's gradient as soon as the backward pass has computed it."""
    before = {parameter: parameter.grad for parameter in model.parameters()}
    handles = []
    for name, parameter in model.named_parameters():
        parameter.grad = None
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(_gradient_looker(trail, name)))
    try:
        with torch.enable_grad():
            loss(None).backward()
    finally:
        for handle in handles:
            handle.remove()
        for parameter, gradient in before.items():
            parameter.grad = gradient


def _gradient_looker(trail: _TensorTrail, name: str) -> Any:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        trail.add(f"gradient of {name}", parameter.grad)

    return hook


def _generators(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
