"""The configuration of a `DecoderLM`."""

from __future__ import annotations

import dataclasses
from typing import Any

from ....operator.nn import AttentionConfig
from ....operator.nn._fewer_heads import kept_groups, kept_heads
from ....operator.nn.config import check_causal, check_heads, default_hidden
from ....operator.positions import RotaryConfig
from ....operator.variants import MECHANISMS, MechanismConfig
from ....operator.variants._parse import from_json, to_json
from .._shortened import shortened

# Larger values overflow integers, with an unclear error message.
_MOST = {
    "vocabulary": 2**31,
    "width": 2**24,
    "layers": 2**16,
    "heads": 2**24,
    "kv_heads": 2**24,
    "hidden": 2**24,
    "context": 2**53,
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The configuration of a `DecoderLM`.

    Args:
        vocabulary: the number of tokens.
        width: E, of the embedding and the residual stream.
        layers: decoder blocks.
        heads: query heads of each block; they divide the width.
        kv_heads: key/value heads; they divide `heads`; None is `heads`.
        hidden: width inside the feed-forward layers; None: the default of `saccade.nn.FeedForward`.
        context: the maximum number of tokens, start token included.
        dropout: on the embedding and on the outputs of attention and feed-forward layers, in training.
        rotary_base: as in `saccade.positions.Rotary`.
        mechanism: replaces softmax attention in every block, such as `saccade.variants.LinearConfig()`;
            None is softmax attention. It must support causal attention.
        pruned_heads: for each layer the query heads removed by `saccade.prune`, by their original numbers; None: no
            heads were removed.

    Raises:
        ValueError: numbers outside of these ranges, or a mechanism without causal attention.

    Example:
        >>> import saccade
        >>> config = saccade.models.ModelConfig(vocabulary=256, width=32, layers=2, heads=4)
        >>> config.kv_heads, config.context
        (4, 256)
        >>> saccade.models.ModelConfig.from_dict(config.to_dict()) == config
        True
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int | None = None
    hidden: int | None = None
    context: int = 256
    dropout: float = 0.0
    rotary_base: float = 10000.0
    mechanism: MechanismConfig | None = None
    pruned_heads: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "context"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {shortened(getattr(self, name))}")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name}: must be at most {most}, got {shortened(value)}")
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.hidden is None:
            object.__setattr__(self, "hidden", default_hidden(self.width))
        check_heads(self.width, self.heads, self.kv_heads)
        if self.hidden is None or self.hidden < 1:
            raise ValueError(f"hidden: must be at least 1, got {shortened(self.hidden)}")
        if self.width // self.heads % 2:
            raise ValueError(
                f"heads: rotary positions need heads of even width, got {self.width} / {self.heads} = "
                f"{self.width // self.heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: must be in [0, 1), got {shortened(self.dropout)}")
        check_causal(self.attention())
        if self.pruned_heads is not None:
            self._check_pruned(self.pruned_heads)

    def _check_pruned(self, removed: object) -> None:
        """ValueError unless there is a list of removed heads for each layer, and the others form equal groups."""
        if not isinstance(removed, (list, tuple)) or len(removed) != self.layers:
            raise ValueError(
                f"pruned_heads: expected a list for each of {self.layers} layers, got {shortened(removed)}"
            )
        for layer, heads in enumerate(removed):
            try:
                kept_groups(kept_heads(heads, self.heads), self.heads, self.kv_heads or self.heads)
            except ValueError as error:
                raise ValueError(f"pruned_heads: layer {layer}: {error}") from None
        object.__setattr__(self, "pruned_heads", tuple(tuple(heads) for heads in removed))

    @property
    def heads_by_layer(self) -> tuple[int, ...]:
        """Number of remaining query heads by layer."""
        removed = self.pruned_heads or ((),) * self.layers
        return tuple(self.heads - len(set(gone)) for gone in removed)

    def attention(self) -> AttentionConfig:
        """Configuration of the attention of each block, before pruning."""
        return AttentionConfig(
            self.width, self.heads, self.kv_heads, positions=RotaryConfig(self.rotary_base), mechanism=self.mechanism
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; `mechanism` and `pruned_heads` only if they are not None."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mechanism, removed = values.pop("mechanism"), values.pop("pruned_heads")
        values |= {} if removed is None else {"pruned_heads": [list(heads) for heads in removed]}
        return values if mechanism is None else {**values, "mechanism": to_json(mechanism)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The configuration with these fields. ValueError for missing or unknown fields or mechanisms."""
        fields = dataclasses.fields(cls)
        unknown = sorted(set(values) - {f.name for f in fields})
        missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]
        if unknown or missing:
            raise ValueError(shortened(f"model configuration: missing {_listed(missing)}, unknown {_listed(unknown)}"))
        numbers = [f for f in fields if f.name in values and f.name not in ("mechanism", "pruned_heads")]
        wrong = [f.name for f in numbers if not _fits(values[f.name], str(f.type))]
        if wrong:
            raise ValueError(f"model configuration: expected numbers of another type: {', '.join(wrong)}")
        mechanism = values.get("mechanism")
        try:
            return cls(**{**values, "mechanism": None if mechanism is None else from_json(mechanism, MECHANISMS)})
        except (TypeError, ValueError) as error:
            raise ValueError(shortened(error)) from None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{names[:5]}{more}" if names else "nothing"


def _fits(value: Any, annotation: str) -> bool:
    if value is None:
        return "None" in annotation
    allowed = (int, float) if "float" in annotation else (int,)
    return isinstance(value, allowed) and not isinstance(value, bool)
