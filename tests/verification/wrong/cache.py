"""Decoding step by step that differs from the whole sequence at once."""

from __future__ import annotations

from .fault import GPT2, LLAMA, META, SLIDING, WINDOW_CACHED, Fault

CACHE = ("cache",)

FAULTS = (
    Fault(
        "values are not cached", ("cache", "robustness"), GPT2,
        "value = torch.cat((past_value, value), dim=-2)",
        "value = torch.cat((torch.zeros_like(past_value), value), dim=-2)",
        "earlier values are lost",
    ),
    Fault(
        "is_causal with one query", ("cache", "causal-blindness"), GPT2,
        "tril()[ns - nd : ns, :ns]", "tril()[:nd, :ns]",
        "with a cache, a new token sees the first key alone",
    ),
    Fault(
        "newest first", CACHE, LLAMA,
        "xk = torch.cat([cache[0], xk], dim=1)", "xk = torch.cat([xk, cache[0]], dim=1)",
        "new keys are put in front of the cached ones",
    ),
    Fault(
        "keys rotated twice", ("cache", "order"), LLAMA,
        "new_cache = (xk, xv)", "new_cache = (apply_rotary_emb(xk, *precompute_freqs_cis(self.head_dim, xk.shape[1])), xv)",
        "cached keys are rotated once more at every step",
    ),
    Fault(
        "one slot off", CACHE, META,
        "self.cache_k[:bsz, start_pos : start_pos + seqlen] = keys",
        "self.cache_k[:bsz, start_pos + 1 : start_pos + 1 + seqlen] = keys",
        "keys are written one slot too far",
    ),
    Fault(
        "the last token is not remembered", CACHE, META,
        "self.cache_v[:bsz, start_pos : start_pos + seqlen] = values",
        "self.cache_v[:bsz, start_pos : start_pos + seqlen - 1] = values[:, :-1]",
        "the value of the last token of each call is never written",
    ),
    Fault(
        "window cache one short", CACHE, WINDOW_CACHED,
        "keep = self.window - 1", "keep = self.window - 2",
        "the cache drops a key that the window still sees", line="keep",
    ),
    Fault(
        "wraps to the wrong slot", CACHE, SLIDING,
        "slot = self.seen % (self.window + 1)", "slot = min(self.seen, self.window)",
        "right until the ring is full, then the last slot is overwritten for ever", line="slot",
    ),
    Fault(
        "wraps too early", CACHE, WINDOW_CACHED,
        "past = cache[0].shape[2]", "past = min(cache[0].shape[2], 4)",
        "right until the cache holds more than four positions", line="past",
    ),
    Fault(
        "cached keys are scaled again", CACHE, GPT2,
        "present = (key, value) if use_cache else None", "present = (key * 0.5, value) if use_cache else None",
        "cached keys are halved at every step", line="present",
    ),
    Fault(
        "no mask where there is a cache", ("cache", "causal-leak"), LLAMA,
        "        scores = scores + mask.to(scores.dtype)\n",
        "        if cache is None:\n            scores = scores + mask.to(scores.dtype)\n",
        "right for one new token, but several new tokens after a cached prefix see each other's future",
        line="if cache is None:",
    ),
    Fault(
        "a count that is not reset", ("cache", "robustness"), SLIDING,
        "        self.ring, self.seen = None, 0\n",
        "        self.ring, self.seen = None, getattr(self, \"seen\", 0)\n",
        "clearing forgets keys but not how many there were: zeros are seen in the next text", line="getattr",
    ),
    Fault(
        "another sample's cache", ("cache", "mixing"), META,
        "values = torch.cat([self.cache_v[:bsz, :start_pos], xv], dim=1)",
        "values = torch.cat([self.cache_v[:1, :start_pos].expand(bsz, -1, -1, -1), xv], dim=1)",
        "every sample reads the first one's cached values",
    ),
)  # fmt: skip
