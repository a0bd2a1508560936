"""Faults in the compiled kernels. They are planted with --native only, which builds the module for each."""

from __future__ import annotations

from ..fault import Fault

FORWARD = ("tests/native/test_backend.py", "tests/native/test_fuzz.py")
ENGINE = ("tests/native/test_mask_engine.py", *FORWARD)

FAULTS = (
    Fault(
        "native-window",
        "native/mask_positions.h",
        "return {p - left_, p + right_ + 1};",
        "return {p - left_, p + right_};",
        ENGINE,
        "A window is one key shorter on the right.",
    ),
    Fault(
        "native-prefix-profile",
        "native/mask_positions.h",
        "out.add(std::max(length, rows.stop + place.offset), Kind::partial);",
        "out.add(std::max(length, rows.stop + place.offset - 1), Kind::partial);",
        ENGINE,
        "The last key of a partial tile counts as hidden.",
    ),
    Fault(
        "native-chunks",
        "native/mask_residues.h",
        "*keys++ = {(own - left_) * size_, (own + right_ + 1) * size_};",
        "*keys++ = {(own - left_) * size_, (own + right_) * size_};",
        ENGINE,
        "The query's own chunk is hidden.",
    ),
    Fault(
        "native-carry",
        "native/forward.h",
        "block.sum[i] = block.sum[i] * carry + sum;",
        "block.sum[i] = block.sum[i] + sum;",
        FORWARD,
        "The denominator is not rescaled when the largest logit rises.",
    ),
    Fault(
        "native-sink",
        "native/forward.h",
        "if (p.sink) whole += exp2_of((sink - top) * splat(log2_e));",
        "if (p.sink) whole += exp2_of(sink - top);",
        FORWARD,
        "The sink's share is a power of 2 and not of e.",
    ),
    Fault(
        "native-softcap-slope",
        "native/backward_tile.h",
        "steep = splat(1.0f) - t * t;",
        "steep = splat(1.0f) - t;",
        FORWARD,
        "The derivative of the cap is wrong.",
    ),
    Fault(
        "native-decode-group",
        "native/decode.h",
        "return c.kv * p.group() + r / p.length_q;",
        "return c.kv + r / p.length_q;",
        ("tests/native/test_decode.py", *FORWARD),
        "In decoding a query head is taken for another.",
    ),
    Fault(
        "native-dropout-origin",
        "native/weights.h",
        "(uint32_t)(i + dropout.row_origin)",
        "(uint32_t)i",
        FORWARD,
        "Dropout of a slice draws other numbers than the whole.",
    ),
)
