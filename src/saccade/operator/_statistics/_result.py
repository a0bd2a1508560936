"""What `statistics` returns: numbers per row, per key and per head of one attention call.

Shape legend: B items, Hq / Hkv query and key-value heads, Lq / Lk lengths, p_ij the weight of key j in row i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...support._numbers import three_decimals
from ...support._plain_values import plain_values
from ...support._tables import Table

_MASSES = ("self", "previous", "next", "first", "sink")
_MOST = 64  # heads

ROWS = ("lse", "entropy", "evenness", "largest", "distance", "keys_seen")


@dataclass(frozen=True, eq=False, repr=False)
class Statistics:
    """Exact statistics of the weights p of one attention call; `statistics` returns them. Natural logarithms, no graph.

    Numbers are float32 (float64 where the inputs are), indices int64. A row is *counted* where it sees a key. Rows that
    are not counted (padded queries, and rows that the mask leaves without a key) hold 0 everywhere, -1 where a key is
    named, and lse = -inf. A row that sees a logit of NaN or +inf holds NaN, except for the masses on single keys that
    it does not see; its `largest_at` is the first logit that is not finite, its `top_keys` are -1. Do not change any of
    the tensors: what depends on the mask alone is shared by all calls with that mask.

    Attributes:
        shape: (B, Hq, Lq, Lk).
        lse: (B, Hq, Lq), log of the row's softmax denominator, the sink counted.
        entropy: (B, Hq, Lq), -sum_j p_ij log p_ij in nats, over the keys: the sink's share is not among the terms.
        largest: (B, Hq, Lq), the largest weight.
        largest_at: (B, Hq, Lq), its key, the first one where several are equal.
        distance: (B, Hq, Lq), sum_j p_ij |pos(i) - j|, in tokens. pos(i) = i + Lk - Lq unless the mask places the
            queries.
        keys_seen: int64, how many keys the row sees. May be (B, 1, Lq) or smaller where rows do not differ: it
            broadcasts.
        counted: bool (B, Hq, Lq).
        padded: bool, rows that `Padding(queries=...)` marks as no tokens.
        mass: (B, Hq, Lq) by name: the weight on "self" (j = pos(i)), "previous" (pos(i) - 1), "next" (pos(i) + 1),
            "first" (the first key that any row of the item sees), "sink", and on every group asked for. Over keys that
            partition the whole, and the sink, masses add up to 1.
        top_weights: (B, Hq, Lq, top), falling; 0 where a row sees fewer.
        top_keys: (B, Hq, Lq, top), their keys; -1 where a row sees fewer.
        received: (B, Hq, Lk), sum_i p_ij over the counted rows, None if not asked for.
        heads: `heads[what][name]`, numbers per head over rows that are counted, keys that some row sees, and pairs of
            which the row sees the key. (Hq,) for what = "query", "logits", "weights", (Hkv,) for "key" and "value".

    Names in `heads[what]`:

    - `min`, `max`: of the finite entries; +inf and -inf where there is none.
    - `norm`: mean L2 norm of the vectors ("query", "key", "value" only), of those without a non-finite entry.
    - `nonfinite`: share of entries that are NaN or infinite.
    - `nonfinite_at`: (H, 4) int64, the first such place, (item, head, row or key, channel) or, for logits and weights,
      (item, head, row, key); -1 where there is none.
    - `counts`, `edges`: (H, n) int64 and (H, n + 1), the histogram, where asked for: entry x lies in bin m when
      edges[m] <= x < edges[m + 1], the last bin closed.

    Example:
        >>> import torch, saccade
        >>> query = key = torch.zeros(1, 2, 4, 16)
        >>> found = saccade.statistics(query, key, saccade.Causal())
        >>> found.entropy[0, 0]  # log 1 ... log 4
        tensor([0.0000, 0.6931, 1.0986, 1.3863])
        >>> found.mean("mass.self")  # average of 1, 1/2, 1/3, 1/4 for each head
        tensor([0.5208, 0.5208])
    """

    shape: tuple[int, int, int, int]  # (B, Hq, Lq, Lk)
    lse: Tensor
    entropy: Tensor
    largest: Tensor
    largest_at: Tensor
    distance: Tensor
    keys_seen: Tensor
    counted: Tensor
    padded: Tensor
    mass: dict[str, Tensor]
    top_weights: Tensor
    top_keys: Tensor
    received: Tensor | None
    heads: dict[str, dict[str, Tensor]]

    @property
    def evenness(self) -> Tensor:
        """Entropy over the greatest that the row could have, in [0, 1]: 1 spreads evenly over all keys it sees.

            (H / P + log P) / log keys_seen,  P = 1 - p_sink

        is the entropy of the weights among the keys alone. 0 on rows that see one key, which could not differ.
        """
        share = 1 - self.mass["sink"]
        some = torch.where(share > 0, share, 1.0)
        among = self.entropy / some + torch.log(some)
        most = torch.log(self.keys_seen.clamp(min=2).to(among.dtype))
        return torch.where(self._choosing, (among / most).clamp(0, 1), 0.0)

    @property
    def _choosing(self) -> Tensor:
        """Counted rows that see at least two keys."""
        return self.counted & (self.keys_seen > 1)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that `mean` accepts."""
        return (*ROWS, *(f"mass.{name}" for name in self.mass))

    def of(self, name: str) -> Tensor:
        """The row statistic of that name, (B, Hq, Lq): "entropy", "evenness", ..., "mass.self", "mass.<group>".

        Raises:
            ValueError: no such statistic.
        """
        kind, dot, which = name.partition(".")
        if dot and kind == "mass" and which in self.mass:
            return self.mass[which]
        if name not in ROWS:
            raise ValueError(f"name must be one of {', '.join(self.names)}; got {name!r}")
        found: Tensor = getattr(self, name)
        return found.expand(self.counted.shape)

    def mean(self, name: str) -> Tensor:
        """Average per head over the counted rows of all items, (Hq,); NaN for a head without any.

        Args:
            name: "lse", "entropy", "evenness" (over rows that see at least two keys), "largest", "distance",
                "keys_seen", or "mass.self" and the other masses.

        Raises:
            ValueError: no such statistic.
        """
        rows = self.of(name)
        kept = self._choosing if name == "evenness" else self.counted
        values = torch.where(kept, rows, 0).to(self.entropy.dtype)
        return values.sum((0, 2)) / kept.sum((0, 2))

    @property
    def rows_counted(self) -> int:
        """The number of the B * Hq * Lq rows that see a key. The sum with `rows_empty` and `rows_padded` is all
        rows."""
        return int(self.counted.sum())

    @property
    def rows_padded(self) -> int:
        """The number of rows that are padded queries."""
        return int(self.padded.expand(self.counted.shape).sum())

    @property
    def rows_empty(self) -> int:
        """The number of rows that are tokens, but see no key."""
        return self.counted.numel() - self.rows_counted - self.rows_padded

    def to(self, device: torch.device | str) -> Statistics:
        """The same with every tensor on `device`."""
        return Statistics(**{f.name: _mapped(getattr(self, f.name), lambda x: x.to(device)) for f in fields(self)})

    def __getstate__(self) -> dict[str, Any]:
        """Copies of all tensors: pickling a view would store the whole memory that it shares."""
        return {f.name: _mapped(getattr(self, f.name), _alone) for f in fields(self)}

    def summary(self) -> dict[str, Any]:
        """Plain numbers and lists per head, as json takes them; None for what is not finite."""
        items, heads, rows, keys = self.shape
        return {
            "items": items,
            "heads": heads,
            "queries": rows,
            "keys": keys,
            "rows": {"counted": self.rows_counted, "empty": self.rows_empty, "padded": self.rows_padded},
            "mean": {name: plain_values(self.mean(name)) for name in self.names},
            "per_head": {
                what: {name: plain_values(x) for name, x in held.items()} for what, held in self.heads.items()
            },
        }

    def __repr__(self) -> str:
        first, table, more = _shown(self)
        return "\n".join([first, *table.lines(), *more])

    def _repr_html_(self) -> str:
        first, table, more = _shown(self)
        return "".join([f"<p>{first}</p>", table.html(), *(f"<p>{line}</p>" for line in more)])


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, dict):
        return {name: _mapped(held, change) for name, held in value.items()}
    return change(value) if isinstance(value, Tensor) else value


def _alone(tensor: Tensor) -> Tensor:
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def _shown(statistics: Statistics) -> tuple[str, Table, list[str]]:
    """The report: the call, the rows counted, the averages of each head, and the number of heads left out."""
    items, heads, rows, keys = statistics.shape
    first = f"Statistics of {items} items, {heads} heads, {rows} queries, {keys} keys; rows: {_rows(statistics)}"
    names = ["entropy", "evenness", "largest", "distance"]
    names += [f"mass.{name}" for name in _MASSES if name != "sink" or bool(statistics.mass["sink"].any())]
    names += [f"mass.{name}" for name in statistics.mass if name not in _MASSES]
    columns = {name.removeprefix("mass."): statistics.mean(name).tolist() for name in names}
    columns["max logit"] = statistics.heads["logits"]["max"].tolist()
    cells = [[str(h), *(three_decimals(column[h]) for column in columns.values())] for h in range(min(heads, _MOST))]
    return first, Table(["head", *columns], cells, "r"), [f"and {heads - _MOST} heads more"] if heads > _MOST else []


def _rows(statistics: Statistics) -> str:
    counts = {
        "counted": statistics.rows_counted,
        "empty": statistics.rows_empty,
        "padded": statistics.rows_padded,
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "counted")
