"""Batches of items that are about equally long.

Shape legend: N items, n batches of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from .._masks._data import describe, numbers, whole

Batch = np.ndarray
"""Indices of items."""


@dataclass(frozen=True)
class PaddingShare:
    """How much padding grouping by length saves; `LengthGrouped.padding` returns it.

    Attributes:
        grouped: share of the tokens of padded batches that is padding, 0 to 1.
        random_order: the same for batches filled in random order.
        batches: how many batches there are.

    Example:
        >>> import saccade
        >>> sampler = saccade.batching.LengthGrouped([2, 8, 3, 7, 2, 9], batch=2, report=None)
        >>> print(sampler.padding())
        padding 13.9 % of tokens (random order: 22.5 %), 3 batches
    """

    grouped: float
    random_order: float
    batches: int

    def __str__(self) -> str:
        return (
            f"padding {self.grouped:.1%} of tokens (random order: {self.random_order:.1%}), {self.batches:,} batches"
        ).replace("%", " %")


class LengthGrouped(Sampler[list[int]]):
    """Batches of similar length, as `batch_sampler=` of a `DataLoader`, so that padded batches have less padding.

    Each epoch draws an order of the items, cuts it into pools of `pool` batches (the last holds the rest too), sorts
    each pool by length, cuts it into batches, and draws an order of the batches. A larger pool saves more padding; a
    smaller one leaves more of the batches' composition to chance. An epoch is a pure function of the arguments and its
    number: `batches(epoch)`.

    Every index comes exactly once in an epoch, over all ranks together. Every rank gets the same number of batches:
    where the number of batches is no multiple of `world`, the batches with the most items are halved until it is.
    (Only where that leaves batches of one item and still too few of them, fewer than `world` random items come twice.)
    With `drop_last` something is left out instead: with `batch` the `N % (batch * world)` items (random ones, or the
    last without `shuffle`) that would not fill a batch on every rank; with `tokens` as many random batches as are too
    many, unless that is all. In step k the ranks work on batches of neighbouring length, so that none waits long.

    Give exactly one of `batch` and `tokens`.

    Args:
        lengths: of the items, (N,): integers of at least 0.
        batch: the number of items in a batch.
        tokens: the most tokens of a padded batch, `items * longest <= tokens`.
        seed: at least 0.
        shuffle: False sorts all items once, short to long: the least padding, the same in every epoch.
        pool: how many batches are sorted together.
        multiple_of: lengths count rounded up to this, as in `pad(multiple_of=...)`.
        longest_first: put the step with the longest item first, so that memory runs out at once if it does.
        drop_last: see above.
        rank: which process this is. Nothing else must shard the batches then.
        world: how many processes there are.
        report: called with one line on the padding saved (of epoch 0, all ranks together), by rank 0; None is silent.

    Raises:
        TypeError: lengths that are not integers.
        ValueError: no items, both or neither of `batch` and `tokens`, an item beyond the token budget, fewer items
            than processes, with `drop_last` too few items for one batch on each rank; numbers out of range.

    Example:
        >>> import torch, saccade
        >>> data = [torch.arange(length) for length in (2, 8, 3, 7, 2, 9)]
        >>> sampler = saccade.batching.LengthGrouped([len(x) for x in data], batch=2, shuffle=False)
        padding 13.9 % of tokens (random order: 22.5 %), 3 batches
        >>> loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=saccade.batching.pad)
        >>> for epoch in range(1):
        ...     sampler.set_epoch(epoch)
        ...     print([tuple(x.shape) for x, padding in loader])
        [(2, 2), (2, 7), (2, 9)]
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        batch: int | None = None,
        *,
        tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        pool: int = 50,
        multiple_of: int = 1,
        longest_first: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world: int = 1,
        report: Callable[[str], None] | None = print,
    ):
        if (batch is None) == (tokens is None):
            raise ValueError(f"batch, tokens: exactly one must be given, got batch={batch} and tokens={tokens}")
        step = whole(multiple_of, "multiple_of", least=1)
        self._real = _checked(lengths)
        self._lengths = -(-self._real // step) * step
        self.batch_size = None if batch is None else whole(batch, "batch", least=1)
        self.tokens = None if tokens is None else whole(tokens, "tokens", least=1)
        self.seed, self.pool = whole(seed, "seed", least=0), whole(pool, "pool", least=1)
        self.rank, self.world = whole(rank, "rank", least=0), whole(world, "world", least=1)
        self.shuffle, self.longest_first, self.drop_last = shuffle, longest_first, drop_last
        self.epoch = 0
        self._check(step)
        self._known: tuple[int, list[list[Batch]]] | None = None
        if report is not None and self.rank == 0:
            report(str(self.padding()))

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch from now on."""
        self.epoch = whole(epoch, "epoch", least=0)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches(self.epoch))

    def __len__(self) -> int:
        """Batches of this rank in the epoch set; with a token budget, epochs differ by a few."""
        return len(self._steps(self.epoch))

    def batches(self, epoch: int) -> list[list[int]]:
        """This rank's batches of an epoch, in order; `batches(epoch)[k:]` continues a run after k steps."""
        return [step[self.rank].tolist() for step in self._steps(whole(epoch, "epoch", least=0))]

    def padding(self, epoch: int = 0) -> PaddingShare:
        """The padding of an epoch on all ranks, and for comparison that of batches filled in random order under the
        same limits."""
        steps = self._steps(whole(epoch, "epoch", least=0))
        grouped = [batch for step in steps for batch in step]
        # An order of its own: `shuffle=False` is compared with chance too.
        chance = self._cut_into_batches(np.random.default_rng((self.seed, epoch, 1)).permutation(len(self._lengths)))
        return PaddingShare(self._share(grouped), self._share(chance), len(grouped))

    def _steps(self, epoch: int) -> list[list[Batch]]:
        """Steps of an epoch, each with one batch for every rank; the last epoch asked for is kept."""
        if self._known is None or self._known[0] != epoch:
            self._known = (epoch, self._made(np.random.default_rng((self.seed, epoch))))
        return self._known[1]

    def _made(self, random: np.random.Generator) -> list[list[Batch]]:
        order = random.permutation(len(self._lengths)) if self.shuffle else np.arange(len(self._lengths))
        if self.drop_last and self.batch_size is not None:
            order = order[: len(order) - len(order) % (self.batch_size * self.world)]
        batches = [batch for pool in self._pools(order) for batch in self._cut_into_batches(self._sorted(pool))]
        batches = self._dropped(batches, random) if self.drop_last else self._halved(batches, random)
        steps = [batches[at : at + self.world] for at in range(0, len(batches), self.world)]
        if self.shuffle:
            steps = [[step[i] for i in random.permutation(self.world)] for step in steps]
            steps = [steps[i] for i in random.permutation(len(steps))]
        if self.longest_first:
            longest = max(range(len(steps)), key=lambda k: max(self._size(batch) for batch in steps[k]))
            steps.insert(0, steps.pop(longest))
        return steps

    def _pools(self, order: Batch) -> list[Batch]:
        if not self.shuffle:
            return [order]
        if self.batch_size is not None:
            items = self.batch_size
        else:
            assert self.tokens is not None
            items = max(int(self.tokens / max(self._lengths.mean(), 1.0)), 1)
        size = items * self.pool
        ends = [*range(size, len(order) - size + 1, size), len(order)]  # the last pool takes what is left over
        return [order[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def _sorted(self, items: Batch) -> Batch:
        return items[np.argsort(self._lengths[items], kind="stable")]

    def _cut_into_batches(self, items: Batch) -> list[Batch]:
        """Batches of items in the order given, each as large as the limits allow."""
        if self.batch_size is not None:
            return [items[at : at + self.batch_size] for at in range(0, len(items), self.batch_size)]
        assert self.tokens is not None
        cuts, longest, start = [0], 0, 0
        for at, length in enumerate(self._lengths[items].tolist()):
            longest = max(longest, length)
            if (at + 1 - start) * longest > self.tokens:
                cuts.append(at)
                longest, start = length, at
        return [items[a:b] for a, b in zip(cuts, [*cuts[1:], len(items)], strict=True)]

    def _halved(self, batches: list[Batch], random: np.random.Generator) -> list[Batch]:
        """Batches for every rank's steps: the batches with the most items are halved until there are enough."""
        while len(batches) % self.world:
            most = max(range(len(batches)), key=lambda k: len(batches[k]))
            if len(batches[most]) == 1:
                missing = -len(batches) % self.world
                repeated = self._sorted(random.choice(len(self._lengths), missing, replace=False))
                return batches + np.split(repeated, missing)
            middle = len(batches[most]) // 2
            batches[most : most + 1] = [batches[most][:middle], batches[most][middle:]]
        return batches

    def _dropped(self, batches: list[Batch], random: np.random.Generator) -> list[Batch]:
        if len(batches) < self.world:
            return self._halved(batches, random)
        kept = len(batches) - len(batches) % self.world
        places = np.sort(random.permutation(len(batches))[:kept])
        return [batches[k] for k in places.tolist()]

    def _size(self, batch: Batch) -> tuple[int, int]:
        """Longest item, then number of items."""
        return int(self._lengths[batch].max()), len(batch)

    def _share(self, batches: list[Batch]) -> float:
        padded = sum(longest * items for longest, items in map(self._size, batches))
        real = sum(int(self._real[batch].sum()) for batch in batches)
        return 1.0 - real / padded if padded else 0.0

    def _check(self, step: int) -> None:
        items = len(self._lengths)
        if self.rank >= self.world:
            raise ValueError(f"rank: must be below world={self.world}, got {self.rank}")
        if items < self.world:
            raise ValueError(f"world: {self.world} processes cannot share {items} items")
        if self.drop_last and self.batch_size is not None and items < self.batch_size * self.world:
            raise ValueError(
                f"drop_last: {items} items are fewer than one batch of {self.batch_size} on each of {self.world} ranks"
            )
        longest = int(self._lengths.argmax())
        if self.tokens is not None and self._lengths[longest] > self.tokens:
            rounded = f" (rounded up to a multiple of {step})" if step > 1 else ""
            raise ValueError(
                f"tokens: item {longest} has {self._lengths[longest]} tokens{rounded}, the budget is {self.tokens}; "
                f"raise it, or cut or leave out longer items"
            )


def _checked(lengths: Sequence[int] | Tensor) -> np.ndarray:
    table = numbers(lengths, "lengths", least=0)
    if isinstance(table, int):
        raise TypeError(f"lengths: must be integers (N,), one for each item, got {describe(lengths)}")
    if not table.host.size:
        raise ValueError("lengths: got none; at least one item is needed")
    return table.host
