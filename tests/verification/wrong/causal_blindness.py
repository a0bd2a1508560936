"""Outputs that do not see what they should."""

from __future__ import annotations

from .fault import (
    ALIBI,
    DECODER_LAYER,
    KARPATHY_HEAD,
    LLAMA,
    LUCIDRAINS_CAUSAL,
    NANOGPT,
    SLIDING,
    WINDOW_CACHED,
    Fault,
)

BLIND = ("causal-blindness",)

FAULTS = (
    Fault(
        "strict triangle",
        BLIND,
        KARPATHY_HEAD,
        "torch.tril(torch.ones(block_size, block_size))",
        "torch.tril(torch.ones(block_size, block_size), diagonal=-1)",
        "a token cannot see itself, and the first sees nothing",
        line="tril",
    ),
    Fault(
        "strict triangle with a large negative number",
        BLIND,
        ALIBI,
        "future = distance > 0",
        "future = distance >= 0",
        "a token cannot see itself",
        line="future",
    ),
    Fault(
        "not the one before",
        BLIND,
        LUCIDRAINS_CAUSAL,
        "sim = sim.masked_fill(causal_mask, max_neg_value)",
        "sim = sim.masked_fill(causal_mask | causal_mask.new_ones((i, j)).tril(-1).triu(-1), max_neg_value)",
        "a token cannot see the one before it",
    ),
    Fault(
        "window one short",
        BLIND,
        SLIDING,
        "visible = (distance >= 0) & (distance <= self.window)",
        "visible = (distance >= 0) & (distance < self.window)",
        "sees four tokens before itself, not the five of the window",
        line="visible",
    ),
    Fault(
        "window one long",
        BLIND,
        WINDOW_CACHED,
        "hidden = (cols > rows) | (cols <= rows - self.window)",
        "hidden = (cols > rows) | (cols < rows - self.window)",
        "sees six tokens before itself, not the five of the window",
        line="hidden",
    ),
    Fault(
        "no window",
        BLIND,
        SLIDING,
        "visible = (distance >= 0) & (distance <= self.window)",
        "visible = distance >= 0",
        "sees all earlier tokens, not the five of the window",
        line="visible",
    ),
    Fault(
        "the first token is lost",
        BLIND,
        NANOGPT,
        'att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))',
        'att = att.masked_fill(F.pad(self.bias[:, :, :T, 1:T], (1, 0)) + torch.eye(T) == 0, float("-inf"))',
        "nobody but the first token sees the first token",
    ),
    Fault(
        "mask for another length",
        BLIND,
        NANOGPT,
        "self.bias[:, :, :T, :T] == 0",
        "self.bias[:, :, :T, :T].triu(-11) == 0",
        "tokens see the last twelve only, a mask made for chunks of that length",
    ),
    Fault(
        "mask aligned to the wrong end",
        ("causal-blindness", "cache"),
        LLAMA,
        ".triu(diagonal=start_pos + 1)",
        ".triu(diagonal=1)",
        "with a cache, new tokens see the first keys and not the last",
    ),
    Fault(
        "one head of eight",
        BLIND,
        NANOGPT,
        "        att = F.softmax(att, dim=-1)\n",
        '        att[:, 3, 1:] = att[:, 3, 1:].masked_fill(torch.eye(T, dtype=torch.bool)[1:], float("-inf"))\n'
        "        att = F.softmax(att, dim=-1)\n",
        "in head 3 a token cannot see itself",
        line="torch.eye",
    ),
    Fault(
        "decoder layer's strict triangle",
        BLIND,
        DECODER_LAYER,
        "torch.ones(n, n, dtype=torch.bool, device=x.device).tril()",
        "torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-1).index_put((torch.tensor(0),) * 2, torch.tensor(True))",
        "a token cannot see itself, the first one excepted",
        line="causal",
    ),
)
