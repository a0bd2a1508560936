"""Exact sparse attention: masks on the one operator, named and parametrised as in their papers.

    out = attention(query, key, value, mask),   softmax over the keys that the mask shows, and over no others

A pattern is a `Mask`: it composes with `& | ~`, places its queries bottom-right, works with padding, bias, sinks and
every backend, and `native`, `chunked` and `flex` pass over the tiles that it leaves empty. Time is that of the visited
tiles, n L of them for n keys a row: O(n L d); memory O(L d), forward and backward.

Choose one where it is known which keys matter, or where a model was trained with it: nothing is approximated. Avoid it
in a model that was trained with full attention: it never learned to do without the keys that are left out (a window
over the last tokens and `streaming` are the exceptions that were measured).

Shape legend: L length, p the position of a query (row i stands at `i + (Lk - Lq)`), j a key, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence

from .._masks import Causal, Chunks, Columns, Dilated, Fixed, Global, Mask, PerHead, RandomBlocks, Strided, Window
from .._masks._data import whole

__all__ = [
    "bigbird",
    "longformer",
    "sliding_window",
    "sparse_fixed",
    "sparse_fixed_heads",
    "sparse_strided",
    "sparse_strided_heads",
    "streaming",
]


def sliding_window(size: int) -> Mask:
    """The last `size` keys, the query's own among them: `p - size < j <= p`. At most `size` keys a row.

    Jiang et al., "Mistral 7B" (2023). Its figure 1 and code count W keys with the query's own, and so do transformers'
    `sliding_window` and this; the sentence beside the figure ("between i - W and i") counts one more. flash-attn's
    `window_size=(left, right)` counts the keys beside the query's own: `(size - 1, 0)`.

    ::

        sliding_window(3), Lq = Lk = 6
          1 . . . . .
          1 1 . . . .
          1 1 1 . . .
          . 1 1 1 . .
          . . 1 1 1 .
          . . . 1 1 1

    Args:
        size: W, at least 1.

    Raises:
        ValueError, TypeError: below 1, or not an int.

    Example:
        >>> import saccade
        >>> saccade.variants.patterns.sliding_window(3)
        Window(2, 0)
    """
    return Window(whole(size, "size", least=1) - 1, 0)


def longformer(
    window: int, *, dilation: int | Sequence[int] = 1, global_tokens: Sequence[int] = (), causal: bool = False
) -> Mask:
    """A window around each query, dilated if wanted, and tokens that see all and are seen by all.

    `j - p in {-w/2 d, ..., -d, 0, d, ..., w/2 d}, or p in G, or j in G`. Beltagy, Peters and Cohan, "Longformer: The
    Long-Document Transformer" (2020), section 3.1: window size w, w/2 on each side, dilation d, global tokens G. At
    most w + 1 + |G| keys a row, L for the rows of G; a global key that lies in the window counts once. The module in
    which global tokens have projections of their own: `LongformerConfig`.

    ::

        longformer(2, global_tokens=[3])    longformer(2, dilation=2)    longformer(4, causal=True)
          1 1 . 1 . .                         1 . 1 . . .                  1 . . . . .
          1 1 1 1 . .                         . 1 . 1 . .                  1 1 . . . .
          . 1 1 1 . .                         1 . 1 . 1 .                  1 1 1 . . .
          1 1 1 1 1 1                         . 1 . 1 . 1                  . 1 1 1 . .
          . . . 1 1 1                         . . 1 . 1 .                  . . 1 1 1 .
          . . . 1 1 1                         . . . 1 . 1                  . . . 1 1 1

    Args:
        window: w, even and at least 2. With `causal` its left half, w/2 + 1 keys.
        dilation: d, at least 1; or one for each query head ("different dilation configurations per head", section 3.1).
            A dilated window visits every tile that it reaches, d times as many as it fills.
        global_tokens: G, positions.
        causal: keep `j <= p`, of the global keys too.

    Raises:
        ValueError: an odd window, or one below 2; a dilation below 1; no dilation at all; a negative position.
        TypeError: not ints.

    Example:
        >>> import saccade
        >>> saccade.variants.patterns.longformer(4, global_tokens=[0])
        Window(2, 2) | Global([0])
    """
    if whole(window, "window", least=2) % 2:
        raise ValueError(f"window: half of it lies on each side of the query, so it must be even, got {window}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected a bool, got {causal!r}")
    if isinstance(dilation, Sequence) and not isinstance(dilation, str):
        if not dilation:
            raise ValueError("dilation: expected one for each query head, got none")
        mask: Mask = PerHead([_dilated_window(window // 2, step, causal) for step in dilation])
    else:
        mask = _dilated_window(window // 2, dilation, causal)
    if not len(global_tokens):
        return mask
    seen = Global(global_tokens)
    return mask | (Causal() & seen if causal else seen)


def sparse_strided(stride: int) -> Mask:
    """The strided pattern of the Sparse Transformer, both of its heads as one: `Strided(stride)`.

    `j <= p and (p - j <= l or (p - j) % l == 0)`. Child et al., "Generating Long Sequences with Sparse Transformers"
    (2019), section 4.2 and the "merged" head of section 4.3. At most l + 1 + L / l keys a row: O(sqrt(L)) for a stride
    near sqrt(L). For data whose period is the stride (images row by row, music); text has none: `sparse_fixed`.

    ::

        sparse_strided(2), Lq = Lk = 7
          1 . . . . . .
          1 1 . . . . .
          1 1 1 . . . .
          . 1 1 1 . . .
          1 . 1 1 1 . .
          . 1 . 1 1 1 .
          1 . 1 . 1 1 1

    Args:
        stride: l, at least 1.

    Raises:
        ValueError, TypeError: below 1, or not an int.

    Example:
        >>> import saccade
        >>> saccade.variants.patterns.sparse_strided(2)
        Strided(2)
    """
    return Strided(stride)


def sparse_strided_heads(stride: int) -> tuple[Mask, Mask]:
    """The strided pattern factorised: the last `stride` keys and the own one, and every `stride`-th key.

    A(1) = {j: 0 <= p - j <= l} and A(2) = {j: j <= p, (p - j) % l == 0} of Child et al. (2019), section 4.2, for half
    of the heads each, `PerHead([local, column] * (heads // 2))`, or for one layer each (section 4.3). At most l + 1 and
    1 + L / l keys a row. From any position to any earlier one it takes one hop through each at most.

    ::

        sparse_strided_heads(2), Lq = Lk = 5
          1 . . . .      1 . . . .
          1 1 . . .      . 1 . . .
          1 1 1 . .      1 . 1 . .
          . 1 1 1 .      . 1 . 1 .
          . . 1 1 1      1 . 1 . 1

    Args:
        stride: l, at least 1.

    Raises:
        ValueError, TypeError: below 1, or not an int.

    Example:
        >>> import saccade
        >>> saccade.PerHead(saccade.variants.patterns.sparse_strided_heads(2))  # for two heads
        PerHead([Window(2, 0), Causal() & Dilated(2)])
    """
    return Window(whole(stride, "stride", least=1), 0), Causal() & Dilated(stride)


def sparse_fixed(stride: int, columns: int = 1) -> Mask:
    """The fixed pattern of the Sparse Transformer, both of its heads as one: `Fixed(stride, columns)`.

    `j <= p and (j // l == p // l or j % l >= l - c)`. Child et al. (2019), section 4.2: the query's own block of l
    positions, and the last c of every block before, which summarise it. At most l + c L / l keys a row.

    ::

        sparse_fixed(3), Lq = Lk = 7
          1 . . . . . .
          1 1 . . . . .
          1 1 1 . . . .
          . . 1 1 . . .
          . . 1 1 1 . .
          . . 1 1 1 1 .
          . . 1 . . 1 1

    Args:
        stride: l, at least 1; the paper takes 128 or 256.
        columns: c, 1 to `stride`; the paper takes 8, 16 or 32.

    Raises:
        ValueError, TypeError: outside of these ranges, or not ints.

    Example:
        >>> import saccade
        >>> saccade.variants.patterns.sparse_fixed(3)
        Fixed(3, 1)
    """
    return Fixed(stride, columns)


def sparse_fixed_heads(stride: int, columns: int = 1) -> tuple[Mask, Mask]:
    """The fixed pattern factorised: the query's own block up to it, and the last columns of all blocks up to it.

    A(1) = {j: j <= p, j // l == p // l} and A(2) = {j: j <= p, j % l >= l - c} of Child et al. (2019), section 4.2, for
    half of the heads each or for one layer each. At most l and c (1 + L / l) keys a row. A row of A(2) may see nothing:
    its output is 0. From any position to any earlier one it takes one hop through each at most.

    ::

        sparse_fixed_heads(3), Lq = Lk = 5
          1 . . . .      . . . . .
          1 1 . . .      . . . . .
          1 1 1 . .      . . 1 . .
          . . . 1 .      . . 1 . .
          . . . 1 1      . . 1 . .

    Args:
        stride: l, at least 1.
        columns: c, 1 to `stride`.

    Raises:
        ValueError, TypeError: outside of these ranges, or not ints.

    Example:
        >>> import saccade
        >>> saccade.PerHead(saccade.variants.patterns.sparse_fixed_heads(3))  # for two heads
        PerHead([Causal() & Chunks(3), Causal() & Columns(3, 1)])
    """
    return Causal() & Chunks(stride), Causal() & Columns(stride, columns)


def bigbird(
    block: int,
    *,
    window_blocks: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    seed: int = 0,
    causal: bool = False,
) -> Mask:
    """Blocks near the query's own, global blocks, and random ones.

    With P = p // b and J = j // b: `|P - J| <= (w - 1) / 2, or P < g, or J < g, or P drew J, or J drew P`. Zaheer et
    al., "Big Bird: Transformers for Longer Sequences" (2020), section 2 and appendix D. At most b (w + g + 2 r) keys a
    row on average, L for the global rows.

    ITC, internal construction: the first g blocks of the text are the global ones (transformers' BigBird takes its
    first and its last, which no cache can know). ETC, extended construction: put g blocks of extra tokens in front of
    the text; n of them that fill no blocks: `bigbird(block, global_blocks=0) | Global(range(n))`.

    Each block draws r of the blocks before it, fewer where there are fewer, by `seed` and its own number alone; a drawn
    pair sees each other, as in the undirected random graph of the paper's section 3. So nothing depends on the length,
    and decoding sees what training saw. A block that is drawn may be near or global already: it counts once.

    ::

        bigbird(1, window_blocks=3, global_blocks=1, random_blocks=1, seed=4), Lq = Lk = 8
          1 1 1 1 1 1 1 1
          1 1 1 . . 1 . .
          1 1 1 1 . . . .
          1 . 1 1 1 . . .
          1 . . 1 1 1 . 1
          1 1 . . 1 1 1 .
          1 . . . . 1 1 1
          1 . . . 1 . 1 1

    Args:
        block: b, tokens in a block, at least 1; the paper takes 64.
        window_blocks: w, odd, the own block and as many on each side; with `causal` the own and those before.
        global_blocks: g, at least 0.
        random_blocks: r, at least 0.
        seed: of the draws, any int; give each layer its own.
        causal: keep `j <= p`. (The paper's is an encoder.)

    Raises:
        ValueError: outside of these ranges, an even window. TypeError: not ints.

    Example:
        >>> import saccade
        >>> saccade.variants.patterns.bigbird(64, random_blocks=0)
        Chunks(64, 1, 1) | Global(<128 int>)
    """
    if whole(window_blocks, "window_blocks", least=1) % 2 == 0:
        raise ValueError(f"window_blocks: the query's own and as many on each side are odd, got {window_blocks}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected a bool, got {causal!r}")
    size, side = whole(block, "block", least=1), window_blocks // 2
    mask: Mask = Chunks(size, side, side)
    if whole(global_blocks, "global_blocks", least=0):
        mask = mask | Global(range(global_blocks * size))
    if whole(random_blocks, "random_blocks", least=0):
        mask = mask | RandomBlocks(seed, size, random_blocks, symmetric=not causal)
    return Causal() & mask if causal else mask


def streaming(window: int, sinks: int = 4) -> Mask:
    """The last `window` keys, the query's own among them, and the first `sinks`.

    `j <= p and (p - j < window or j < s)`. Xiao et al., "Efficient Streaming Language Models with Attention Sinks"
    (2023), section 3.2. At most window + s keys a row. This is who sees whom; positions stay where they are. The
    paper's cache counts positions within the cache instead, so that none is ever beyond those a model was trained on:
    `saccade.nn.StreamingLayer`, which shows the same keys. `saccade.nn.WindowLayer` keeps positions.

    ::

        streaming(2, sinks=1), Lq = Lk = 6
          1 . . . . .
          1 1 . . . .
          1 1 1 . . .
          1 . 1 1 . .
          1 . . 1 1 .
          1 . . . 1 1

    Args:
        window: at least 1.
        sinks: s, at least 0.

    Raises:
        ValueError, TypeError: outside of these ranges, or not ints.

    Example:
        >>> import saccade
        >>> saccade.variants.patterns.streaming(1024, sinks=4)
        Window(1023, 0) | (Causal() & Global([0, 1, 2, 3]))
    """
    recent = Window(whole(window, "window", least=1) - 1, 0)
    return recent | (Causal() & Global(range(sinks))) if whole(sinks, "sinks", least=0) else recent


def _dilated_window(side: int, step: int, causal: bool) -> Mask:
    step = whole(step, "dilation", least=1)
    near = Window(side * step, 0 if causal else side * step)
    return near if step == 1 else near & Dilated(step)
