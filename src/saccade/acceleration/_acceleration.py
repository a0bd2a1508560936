"""`saccade.accelerate()`: switches acceleration on for the current thread and counts the calls.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv key and value width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from ..interception._hooks import flex_handled_by, mha_handled_by, sdpa_handled_by
from ..operator._backends.native import _kernels
from ..support._shared_cores import shared_cores
from ._answers import answer, answer_mha
from ._flex_answers import answer_flex
from ._model import AcceleratedModel
from ._rounding import Bounds, Measurement, Rounding
from ._thread import THREAD, ActiveAccelerations, CallCounts

_LOCK = threading.RLock()  # one may be switched off by another thread than the one that it is on for


class Acceleration(CallCounts):
    """Switches acceleration on and off, and counts accelerated calls; `saccade.accelerate()` returns it.

    It is on inside its `with` block, or between `install()` and `uninstall()`, for the calls of the thread that
    switched it on. Switched on again, it goes on counting.

    Attributes:
        backends: calls that Saccade computed, by backend.
        left: calls left to PyTorch, by the reason.
        traced: how many of all of these torch.compile saw. It sees a call once for each graph that it compiles (those
            of nn.MultiheadAttention, into which it does not look, more often); when graphs run nothing is counted.
        rounding: what 8 bits do to the outputs on the samples, and to each layer, as it was measured when the block was
            entered; None without samples and metric.

    Example:
        >>> import torch, saccade
        >>> run = saccade.accelerate()
        >>> with run:
        ...     out = torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 5, 16))
        >>> run.calls
        1
    """

    def __init__(self, model: AcceleratedModel | None = None, measurement: Measurement | None = None) -> None:
        super().__init__()
        self._held: ActiveAccelerations | None = None
        self._model, self._measurement = model, measurement
        self.rounding: Rounding | None = None

    @property
    def taken(self) -> int:
        """Number of attention calls that Saccade computed."""
        return self.backends.total()

    @property
    def calls(self) -> int:
        """Number of attention calls, computed by Saccade or not."""
        return self.taken + self.left.total()

    def install(self) -> Acceleration:
        """Switch the acceleration on for this thread, until `uninstall()`.

        With samples or a metric, the rounding is measured.

        Raises:
            RuntimeError: it is on already.
            ValueError: a sample that the model cannot run, or a bound that no selection of layers in 8 bits meets.
        """
        with _LOCK:
            if self._held is not None:
                raise RuntimeError("this acceleration is switched on already; saccade.accelerate() makes another")
            if self._model is not None:
                self._model.install()
            held = THREAD.held
            if not held.on:
                with ExitStack() as blocks:
                    blocks.enter_context(sdpa_handled_by(answer))
                    blocks.enter_context(mha_handled_by(answer_mha))
                    blocks.enter_context(flex_handled_by(answer_flex))
                    blocks.enter_context(shared_cores())
                    held.blocks = blocks.pop_all()
            held.on = (*held.on, self)
            self._held = held
        if self._measurement is not None:
            try:
                self._measure(self._measurement)
            except BaseException:
                self.uninstall()
                raise
        return self

    def _measure(self, measurement: Measurement) -> None:
        assert self._model is not None
        self.rounding = None
        self.rounding, in_float = measurement(self._model.model, self._model.products)
        self._model.leave_in_float(in_float, f"left in float so that {measurement.bounds} holds")

    def uninstall(self) -> None:
        """Switch the acceleration off; any thread may do so.

        Raises:
            RuntimeError: it is not on.
        """
        with _LOCK:
            if self._held is None:
                raise RuntimeError("this acceleration is not switched on")
            held, self._held = self._held, None
            held.on = tuple(run for run in held.on if run is not self)
            if not held.on:
                held.blocks.close()
            if self._model is not None:
                self._model.uninstall()

    def __enter__(self) -> Acceleration:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        state = "off" if self._held is None else "on"
        return f"<saccade.accelerate(), {state}: {self.taken} of {self.calls} calls of attention taken>"

    def explain(self, every: bool = False) -> str:
        """A report on which modules and attention calls were accelerated, and why the others were not.

        Args:
            every: whether each module has a line of its own; otherwise those of alike layers share one.
        """
        return "\n".join([*([] if self._model is None else self._model.listed(every)), str(self)])

    def __str__(self) -> str:
        text = self._calls()
        if self._model is None:
            return text
        none = ["    none: no linear layer is large enough, and no other part is known"]
        rounding = [] if self.rounding is None else [str(self.rounding)]
        return "\n".join([text, "modules of the model:", *(list(self._model.lines()) or none), *rounding])

    def _calls(self) -> str:
        if not self.calls:
            return (
                "saccade.accelerate(): no call of F.scaled_dot_product_attention or flex_attention was seen (attention "
                "written as products and a softmax is not seen)"
            )
        share = f"{self.taken / self.calls:.0%}"
        lines = [f"saccade.accelerate(): {self.taken} of {self.calls} calls of attention taken ({share})"]
        kernels = {"native": f" ({_kernels.instructions()})"}
        lines += [f"{count:8}  by {name}{kernels.get(name, '')}" for name, count in self.backends.most_common()]
        lines += [f"{count:8}  left to PyTorch: {reason}" for reason, count in self.left.most_common()]
        if self.traced:
            lines.append(f"{self.traced:8}  of these seen while torch.compile traced; its graphs run uncounted")
        return "\n".join(lines)


def accelerate(
    model: nn.Module | None = None,
    *,
    weights: str | None = None,
    keep_weights: bool = True,
    max_kl: float | None = None,
    min_cosine: float | None = None,
    max_drop: float | None = None,
    samples: Iterable[Mapping[str, Any] | Tensor] | None = None,
    metric: Callable[[Any], float] | None = None,
) -> Acceleration:
    """Run calls of F.scaled_dot_product_attention on Saccade's kernels, and a model's other layers faster.

    **Calls of attention**, from any code: transformers, timm, `nn.MultiheadAttention`, `nn.TransformerEncoder`, your
    own. They mean what they mean in PyTorch (causal from the top left, mask or bias in one argument, dropout, grouped
    heads), and outputs at real tokens are equal to rounding. Calls that Saccade has no kernel for, or would not speed
    up, go to PyTorch unchanged; `run.left` counts them by reason.

    These go to PyTorch because its function is as fast: in float32, fewer than 96 queries or fewer than 2^17 query-key
    pairs in all heads; in half precision without gradients, fewer than 2^14 pairs, or fewer than 48 queries beside more
    than 128 keys; one query (or a few of grouped heads) that reads fewer than 2^21 numbers in float32 or 2^18 in half
    precision (2^16 for a single query in bfloat16); a float mask with entries other than 0 and -inf in float32, or in
    half precision without gradients below 2^21 pairs. PyTorch computes dropout densely, so with dropout calls are taken
    from 2^12 pairs on.

    **Calls of FlexAttention** (`torch.nn.attention.flex_attention.flex_attention`) on CPUs, with all gradients, which
    PyTorch does not compute there: `saccade.flex_attention` answers them at every size, however the function was
    imported, also as `torch.compile(flex_attention)` and in compiled models, whose graphs end at the call.

    **A model's modules**, recognised by what they are made of: linear layers multiply by packed copies of their
    weights, feed-forward layers with their activation and sums in the same pass, and layers of a padded batch compute
    only its real tokens (at padded places they give 0). Each except a plain linear layer is computed both ways before
    it is believed, in its first call, with numbers of all magnitudes, and now and then later, and keeps its own way
    where the two differ by more than rounding; `run.explain()` lists all of them.
    With gradients, in float32, linear layers and their gradients take the faster product; all else stays the model's
    own.

    Calls are taken only on the thread that enters the block or calls `install()`; other threads' calls go to PyTorch.
    The model's modules are changed for all threads. Meanwhile the native fast path of `nn.MultiheadAttention` and
    `nn.TransformerEncoderLayer`, which calls no function, is off in the whole process. With it PyTorch writes zeros at
    padded places, without it what attention gives there. Everything is put back at the end, also after an exception.

    F.scaled_dot_product_attention imported by name before (`from torch.nn.functional import ...`) is not replaced, and
    neither is code that calls `torch._C` or `torch.ops`. Where other code replaces the function inside the
    block, its function stays in place afterwards, and its calls go to PyTorch.
    A backward pass through `torch.utils.checkpoint` computes the forward again: put it inside the block, too.

    Args:
        model: whose modules are accelerated; None takes only calls of attention. Packed copies take as much memory as
            the weights of its linear layers. They are made at the first call, and again after a weight has changed or
            was replaced. The guide says which writes PyTorch does not count, and how soon those are noticed.
        weights: "bfloat16" has linear layers read weights rounded to bfloat16 (relative 2^-9) and multiply in float32:
            half the bytes, which is what a step of decoding costs. "int8" has them read a copy in 8 bits, with a scale
            for each block of 128 weights, and activations as bytes with a scale and a zero for each block of 128; sums
            are exact (int32). On processors with AVX512_VNNI such products are 3 to 3.4 times as fast as in float32.
            Gradients reach inputs and biases; a backward pass to such a weight raises an error. None: as they are.
        keep_weights: False keeps only the packed copies, so that memory does not grow. Meanwhile weights read as NaN,
            and `state_dict()` and gradients raise an error. They are put back bit for bit at the end. Shared weights
            and those of `nn.MultiheadAttention` stay as they are then.
        max_kl: with weights="int8": the largest mean KL(float || int8), in nats, of the distributions by the logits at
            real tokens (or items) of the samples. Linear layers stay in float until it holds, those first that harm
            most for their multiply-adds. `run.rounding` is the report.
        min_cosine: the same for the smallest cosine between last hidden states, or vectors, in float and in int8.
        max_drop: the same for how much lower the metric may be.
        samples: inputs of the model: dicts of keyword arguments, or tensors that are its only argument. It returns an
            object or dict with `logits` or `last_hidden_state`, a tensor, or a tuple whose first tensor counts. Padding
            by attention_mask, decoder_attention_mask or src_key_padding_mask (B, L) does not count. Entering the block
            runs them four times; without a bound, or if int8 fails it, once more for each linear layer, and at most as
            often again to choose. Outputs in float are kept meanwhile.
        metric: a function of the model to a number that is the larger the better, such as the accuracy of a task; it is
            called as often as the samples are run.

    Returns:
        An `Acceleration`: a context manager with `install()` and `uninstall()`, and the counts.

    Raises:
        TypeError: a model that is not a module, or samples that are no list.
        ValueError: unknown weights, weights that could not be put back, a bound out of range or without its samples or
            metric.

    Example:
        >>> import torch, saccade
        >>> layer = torch.nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True).eval()
        >>> x = torch.randn(2, 7, 32)
        >>> with torch.no_grad(), saccade.accelerate(layer) as run:
        ...     out = layer(x)
        >>> run.calls  # print(run) says which kernels took them, and which were left to PyTorch
        1
        >>> torch.allclose(out, layer(x), atol=1e-5)
        True
    """
    if model is None and (weights is not None or not keep_weights):
        raise ValueError("model: weights= and keep_weights= need a module, got None")
    bounds = Bounds(max_kl, min_cosine, max_drop)
    measurement = None
    if samples is not None or metric is not None or bounds.given():
        measurement = Measurement(bounds, samples, metric)
        if weights != "int8":
            raise ValueError(f"weights: bounds, samples= and metric= are about weights='int8', got {weights!r}")
    return Acceleration(None if model is None else AcceleratedModel(model, weights, keep_weights), measurement)
