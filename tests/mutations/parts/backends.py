"""Faults in the operator and its backends."""

from __future__ import annotations

from ..fault import Fault

SDPA, CHUNKED = "src/saccade/operator/_backends/sdpa.py", "src/saccade/operator/_backends/chunked.py"
DERIVATIVES, REFERENCE = "src/saccade/operator/_backends/_derivatives.py", "src/saccade/operator/_reference.py"
EXPLAIN, VALUES, POISON, CORNERS = (
    "tests/operator/test_explain.py",
    "tests/operator/test_values.py",
    "tests/operator/test_poison.py",
    "tests/operator/test_corner_cases.py",
)

FAULTS = (
    Fault(
        "softcap-factor",
        REFERENCE,
        "call.softcap * torch.tanh(logits / call.softcap)",
        "torch.tanh(logits / call.softcap)",
        (VALUES,),
        "Capped logits are not multiplied by the cap.",
    ),
    Fault(
        "head-group",
        REFERENCE,
        "key = call.key.repeat_interleave(call.heads // call.kv_heads, dim=1)",
        "key = call.key.repeat(1, call.heads // call.kv_heads, 1, 1)",
        (VALUES,),
        "Query heads read the wrong key head.",
    ),
    Fault(
        "sdpa-scale",
        SDPA,
        "scale=call.scale, enable_gqa=grouped",
        "scale=None, enable_gqa=grouped",
        (EXPLAIN, CORNERS, VALUES),
        "A scale that is given is not used.",
    ),
    Fault(
        "sdpa-causal-corner",
        SDPA,
        "if call.length_q == call.length_k or call.length_q == 1:",
        "if call.length_q <= call.length_k:",
        (EXPLAIN, CORNERS, VALUES),
        "PyTorch's top-left triangle is used for fewer queries than keys.",
    ),
    Fault(
        "sdpa-empty-rows",
        SDPA,
        "return (out if rows is None else torch.where(rows, out, 0.0)), None",
        "return out, None",
        (CORNERS, POISON),
        "Rows that see nothing are not 0.",
    ),
    Fault(
        "sdpa-hidden-nan",
        SDPA,
        "key, value = (torch.where(by_kv_head(keys, call.kv_heads), x, 0.0) for x in (key, value))",
        "key = torch.where(by_kv_head(keys, call.kv_heads), key, 0.0)",
        (POISON + "::test_sdpa_keeps_or_refuses_padding", POISON),
        "NaN of a value that nobody sees spreads.",
    ),
    Fault(
        "online-carry",
        CHUNKED,
        "summed = summed * carry[..., None] + weigh(kept, v)",
        "summed = summed + weigh(kept, v)",
        (VALUES,),
        "Sums are not rescaled when the largest logit rises.",
    ),
    Fault(
        "output-dtype",
        CHUNKED,
        "return out.to(call.query.dtype), lse",
        "return out, lse",
        ("tests/operator/test_precision.py", VALUES),
        "Half precision comes back as float32.",
    ),
    Fault(
        "lse-gradient",
        DERIVATIVES,
        "(d_out * out).sum(-1) - torch.where(empty, 0.0, d_lse))",
        "(d_out * out).sum(-1))",
        (VALUES,),
        "The gradient through the lse is lost.",
    ),
    Fault(
        "softcap-gradient",
        "src/saccade/operator/_tiles.py",
        "(d_score if self.tanh is None else d_score * (1 - self.tanh * self.tanh))",
        "(d_score if self.tanh is None else d_score * (1 - self.tanh))",
        (VALUES,),
        "The derivative of the cap is wrong.",
    ),
    Fault(
        "sink-gradient",
        "src/saccade/operator/_call.py",
        "sink = sink.to(lse.dtype)[None, :, None]",
        "sink = sink.detach().to(lse.dtype)[None, :, None]",
        (VALUES,),
        "A learned sink gets no gradient.",
    ),
    Fault(
        "bias-placement",
        "src/saccade/operator/_call.py",
        "return standing(self.mask, self.length_k - self.length_q, self.device)",
        "return standing(self.mask, 0, self.device)",
        ("tests/operator/test_masks_and_biases.py", VALUES),
        "Biases of distances stand top-left, not bottom-right.",
    ),
    Fault(
        "dropout-scale",
        "src/saccade/operator/_dropout.py",
        "return kept.to(dtype) * (1.0 / (1.0 - self.p))",
        "return kept.to(dtype)",
        ("tests/operator/test_weight_dropout.py",),
        "Kept weights are not scaled up.",
    ),
    Fault(
        "dropout-high-seed",
        "src/saccade/operator/_dropout.py",
        "self.seed & _WORD, (self.seed >> 32) & _WORD",
        "self.seed & _WORD, 0",
        ("tests/operator/test_weight_dropout.py", "tests/native/test_backend.py"),
        "Half of the seed is ignored, and the backends draw different masks.",
    ),
    Fault(
        "broadcast-bias-gradient",
        "src/saccade/operator/_biases.py",
        "dims = [d for d in range(4) if",
        "dims = [d for d in range(3) if",
        ("tests/operator/test_broadcast_biases.py",),
        "The gradient of a bias that all keys share is not summed over them.",
    ),
)
