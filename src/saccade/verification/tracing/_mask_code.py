"""Lines of code that use a mask argument as the target takes it, for findings that say what to write.

Shape legend: B batch, H heads, Lq / Lk lengths, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..subject._inputs import NamedInputs
from ..subject._reading import MaskReading
from ._trace import TraceStep

_SAYS = {"attend": "True = attend", "ignore": "True = ignore", "additive": "-inf = ignore"}


@dataclass(frozen=True)
class MaskCode:
    """One mask argument in code."""

    mask: MaskReading
    rank: int = 4  # of the scores: (B, H, Lq, Lk), or (B, Lq, Lk)
    is_fused: bool = False  # whether F.scaled_dot_product_attention makes them

    @property
    def hiding(self) -> str:
        """The line that hides keys."""
        if self.is_fused:
            given = self._spread if self.mask.meaning == "additive" else self._of("", "~")
            return f"attn_mask = {given}  # F.scaled_dot_product_attention: True = attend"
        says = f"  # {_SAYS[self.mask.meaning]}, before the softmax"
        if self.mask.meaning == "additive":
            return f"scores = scores + {self._spread}{says}"
        return f'scores = scores.masked_fill({self._of("~", "")}, float("-inf")){says}'

    @property
    def rows(self) -> str:
        """Which queries see no key, against the scores."""
        return self._of("~", "", ".any(-1, keepdim=True)", ".all(-1, keepdim=True)")

    @property
    def keys(self) -> str:
        """Which keys are hidden, against keys or values (B, H, Lk, D), or (B, Lk, D)."""
        if self.mask.axes == "BK":
            return self._of("~", "", at=f"[:, {'None, ' * (self.rank - 3)}:, None]")
        if self.mask.by_pair:
            return self._of("~", "", ".any(-2, keepdim=True).mT", ".all(-2, keepdim=True).mT")
        return self._of("~", "", ".mT", ".mT")

    def _of(self, attend: str, ignore: str, then: str = "", else_: str = "", at: str | None = None) -> str:
        """Code that converts the argument to booleans. Masks whose True attends get the prefix `attend` and the suffix
        `then`, other masks `ignore` and `else_`."""
        spread = self._spread if at is None else f"{self._name}{at}"
        if self.mask.axes == "B":
            return f"{attend}(torch.arange(L, device={self._name}.device) < {spread}){then}"
        if self.mask.meaning == "additive":
            return f"{ignore}{spread}.isneginf(){else_}"
        plain = spread if self.mask.dtype == "bool" else f"{spread}.bool()"
        return f"{attend}{plain}{then}" if self.mask.meaning == "attend" else f"{ignore}{plain}{else_}"

    @property
    def _name(self) -> str:
        return self.mask.argument if isinstance(self.mask.argument, str) else "mask"

    @property
    def _spread(self) -> str:
        """The argument broadcast against the scores."""
        axes, missing = self.mask.axes, self.rank - len(self.mask.axes)
        if axes == "K":
            return f"{self._name}[None]"
        if axes[0] != "B" or self.mask.merged or missing == 0:
            return self._name
        if missing < 0:
            return f"{self._name}[:, 0]"
        return f"{self._name}[:{', None' * missing}{', :' if axes == 'BK' else ''}]"


def mask_code(mask: MaskReading, steps: Sequence[TraceStep], inputs: NamedInputs) -> MaskCode:
    """The mask in code, with the shape of scores or the fused call that the target uses."""
    shape = (inputs.length, inputs.key_length)
    scores = next((step.given for step in steps if step.name == "softmax" and step.given[-2:] == shape), ())
    is_fused = not scores and any(step.name == "scaled_dot_product_attention" for step in steps)
    return MaskCode(mask, 3 if len(scores) == 3 and scores[0] == inputs.batch else 4, is_fused)
