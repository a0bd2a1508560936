"""Faults in the positions."""

from __future__ import annotations

from ..fault import Fault

ROTARY, SCALING, WAVES = (f"src/saccade/operator/positions/{name}.py" for name in ("rotary", "scaling", "waves"))
TURNING, STRETCHING = "tests/positions/test_rotary.py", "tests/positions/test_scaling.py"
OFFSETS = "tests/positions/test_offsets.py"

FAULTS = (
    Fault(
        "rotary-direction",
        ROTARY,
        "(first * cos - second * sin, second * cos + first * sin)",
        "(first * cos + second * sin, second * cos - first * sin)",
        (TURNING,),
        "Pairs are turned the other way.",
    ),
    Fault(
        "rotary-interleaved",
        ROTARY,
        "torch.stack(pairs, dim=-1).flatten(-2)",
        "torch.cat(pairs, dim=-1)",
        (TURNING,),
        "Interleaved pairs come out as halves.",
    ),
    Fault(
        "rotary-partial",
        ROTARY,
        "torch.cat((turned, x[..., self.turned :]), dim=-1)",
        "torch.cat((x[..., self.turned :], turned), dim=-1)",
        (TURNING,),
        "Features that are not turned come first.",
    ),
    Fault(
        "rotary-dtype",
        ROTARY,
        "        turned = turned.to(x.dtype)\n",
        "",
        (TURNING,),
        "Half precision comes back as float32.",
    ),
    Fault(
        "negative-positions",
        WAVES,
        "F.embedding(distance, sin) * positions.sign()[..., None]",
        "F.embedding(distance, sin)",
        (OFFSETS, TURNING),
        "Positions before 0 are turned like those after it.",
    ),
    Fault(
        "table-dtype",
        WAVES,
        " or known.dtype != dtype",
        "",
        (TURNING, "tests/positions"),
        "After float32, float64 gets angles in float32.",
    ),
    Fault(
        "table-inference",
        WAVES,
        "with torch.inference_mode(False):",
        "if True:",
        (TURNING, "tests/positions"),
        "Tables made in inference mode cannot be used in training.",
    ),
    Fault(
        "ntk-exponent",
        SCALING,
        "self.factor ** (width / (width - 2))",
        "self.factor",
        (STRETCHING,),
        "The slowest pair is slowed by less than the factor.",
    ),
    Fault(
        "linear-scaling",
        SCALING,
        "return frequencies(width, base, device) / self.factor",
        "return frequencies(width, base, device) * self.factor",
        (STRETCHING,),
        "Positions are stretched, not squeezed.",
    ),
    Fault(
        "yarn-ramp",
        SCALING,
        "plain * (1.0 - ramp) + plain / self.factor * ramp",
        "plain * ramp + plain / self.factor * (1.0 - ramp)",
        (STRETCHING,),
        "Fast pairs are interpolated, slow ones not.",
    ),
    Fault(
        "learned-last",
        "src/saccade/operator/positions/learned.py",
        "if start + length > self.length:",
        "if start + length >= self.length:",
        ("tests/positions/test_learned.py",),
        "The last position cannot be used.",
    ),
    Fault(
        "sine-cosine",
        "src/saccade/operator/positions/sinusoidal.py",
        "torch.stack((sin, cos), dim=-1)",
        "torch.stack((cos, sin), dim=-1)",
        ("tests/positions/test_sinusoidal.py",),
        "Sine and cosine are exchanged.",
    ),
    Fault(
        "alibi-cast",
        "src/saccade/operator/positions/biases.py",
        "        if not self.learned:\n            self.slopes =",
        "        if self.learned:\n            self.slopes =",
        ("tests/positions/test_biases.py",),
        "Fixed slopes are rounded when the module is cast to bfloat16.",
    ),
    Fault(
        "t5-later-keys",
        "src/saccade/operator/_biases.py",
        "first = (distance > 0).to(torch.int64) * count",
        "first = (distance >= 0).to(torch.int64) * count",
        ("tests/positions/test_biases.py", "tests/operator/test_values.py"),
        "The query's own key is in the bucket of later keys.",
    ),
)
