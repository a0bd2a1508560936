"""Translates PyTorch's functions to the language of programs, each to one operation or to several.

Arguments that are tensors or numbers come as `Value`; all others (rounding modes, factors) as they are. A rule's result
is converted to the kind that PyTorch's own result has. Floats are computed in one precision: conversions between float
dtypes change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ._values import NotTraceable, Value

_HIGHEST = float(torch.finfo(torch.float32).max)
_UNROLLED = 64  # a power of an int that is made of products


class Rule(NamedTuple):
    """`make` with the arguments of these names as `Value`."""

    names: tuple[str, ...]
    make: Callable[..., Value]
    only_values: bool = False  # whether the other arguments (dtypes, devices, layouts) do not matter


def _add(x: Value, y: Value, *, alpha: float = 1) -> Value:
    return x + (y if alpha == 1 else y * alpha)


def _sub(x: Value, y: Value, *, alpha: float = 1) -> Value:
    return x - (y if alpha == 1 else y * alpha)


def _rsub(x: Value, y: Value, alpha: float = 1) -> Value:
    return _sub(y, x, alpha=alpha)


def _div(x: Value, y: Value, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return x / y
    if "float" in (x.kind, y.kind):
        return (x / y).one("floor" if rounding_mode == "floor" else "trunc")
    return x.two("floor_div" if rounding_mode == "floor" else "trunc_div", y, "int")


def _remainder(x: Value, y: Value) -> Value:
    """x modulo y, with the sign of y."""
    if "float" not in (x.kind, y.kind):
        return x.two("mod", y, "int")
    rest = x - (x / y).one("floor") * y
    wrong = rest.differs(0.0) & (rest < 0.0).differs(y < 0.0)  # the quotient was rounded up
    return wrong.where(rest + y, rest)


def _fmod(x: Value, y: Value) -> Value:
    return x - _div(x, y, rounding_mode="trunc") * y


def _clamp(x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    """At an end the gradient goes to x, as PyTorch's does."""
    ints = all(part is None or part.kind != "float" for part in (x, low, high))
    if low is not None:
        x = x.two("max", low) if ints else (x < low).where(low, x)
    if high is not None:
        x = x.two("min", high) if ints else (x > high).where(high, x)
    return x


def _pow(x: Value, y: Value) -> Value:
    power = y.constant
    if "float" not in (x.kind, y.kind):
        return _whole_power(x, y)
    if power in (0.5, -0.5):
        root = x.floating("sqrt")
        return root if power == 0.5 else 1.0 / root
    if power is not None and abs(power) <= 4 and power == int(power):
        made = _product(x.to("float"), abs(int(power)))
        return made if power >= 0 else 1.0 / made
    return x.two("pow", y, "float")


def _whole_power(x: Value, y: Value) -> Value:
    power, base = y.constant, x.constant
    if power is not None and 0 <= power <= _UNROLLED:
        return _product(x.to("int"), int(power))
    if base is None:
        raise NotTraceable("an integer power without a constant base or a constant exponent from 0 to 64")
    made, factor, places = x.const(1), int(base), y.to("int")
    for bit in range(6):
        on = places.two("floor_div", 1 << bit).two("mod", 2).equals(1)
        made = made * on.where(_wrapped(factor), 1)
        factor *= factor
    return (places < 0).where(0 if abs(int(base)) != 1 else made, made)


def _wrapped(number: int) -> int:
    """As int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


def _product(x: Value, power: int) -> Value:
    """x ** power by squaring."""
    made: Value | None = None
    while power:
        if power & 1:
            made = x if made is None else made * x
        power >>= 1
        x = x * x if power else x
    return x.const(1).to(x.kind) if made is None else made


def _shift(x: Value, y: Value, left: bool) -> Value:
    places = y.constant
    if places is None or not 0 <= places < 63:
        raise NotTraceable("a shift by something other than a constant from 0 to 62")
    return x * (1 << int(places)) if left else x.two("floor_div", 1 << int(places), "int")


def _bits(logical: str, bitwise: str) -> Callable[[Value, Value], Value]:
    def make(x: Value, y: Value) -> Value:
        return x.logical(logical, y) if x.kind == y.kind == "bool" else x.two(bitwise, y, "int")

    return make


def _bits_inverted(x: Value) -> Value:
    return ~x if x.kind == "bool" else -x - 1


def _rounded(op: str) -> Callable[..., Value]:
    return lambda x: x.one(op) if x.kind == "float" else x


def _positive(x: Value) -> Value:
    return x.to("int") if x.kind == "bool" else x


def _absolute(x: Value) -> Value:
    return _positive(x).one("abs")


def _nan_to_num(x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Value:
    if x.kind != "float":
        return x
    high = x.equals(math.inf).where(_HIGHEST if posinf is None else float(posinf), x)
    ends = x.equals(-math.inf).where(-_HIGHEST if neginf is None else float(neginf), high)
    return x.one("is_nan").where(float(nan or 0.0), ends)


def _softplus(x: Value, beta: float = 1, threshold: float = 20) -> Value:
    scaled = x.to("float") * float(beta)
    made = (scaled.two("max", 0.0) + (1.0 + (-scaled.one("abs")).one("exp")).one("log")) / float(beta)
    return (scaled > float(threshold)).where(x, made)


def _elu(x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    below = ((_clamp(x * float(input_scale), high=x.const(0.0))).one("exp") - 1.0) * float(alpha)
    return (x > 0.0).where(x, below) * float(scale)


def _gelu(x: Value, *, approximate: str = "none") -> Value:
    if approximate != "tanh":
        raise NotTraceable('aten.gelu with approximate="none" (the error function)')
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + inner.one("tanh"))


def _relu(x: Value) -> Value:
    return x.two("max", 0, "int") if x.kind != "float" else (x <= 0.0).where(0.0, x)


def _hyperbolic(sign: float) -> Callable[[Value], Value]:
    return lambda x: (x.floating("exp") + sign * (-x).floating("exp")) * 0.5


def _sign(x: Value) -> Value:
    return _positive(x).one("sign")


def _is_finite(x: Value) -> Value:
    return _absolute(x.to("float")) < math.inf


def _rounded_to(x: Value, *, decimals: int = 0) -> Value:
    if x.kind != "float" or decimals == 0:
        return _rounded("round")(x)
    return (x * 10.0**decimals).one("round") / 10.0**decimals


def _same(x: Value) -> Value:
    return x


_ONE: dict[str, Callable[..., Value]] = {
    **{name: (lambda x, name=name: x.floating(name)) for name in ("exp", "log", "sqrt", "sin", "cos", "tanh")},
    "sigmoid": lambda x: x.floating("sigmoid"),
    **{name: _rounded(name) for name in ("floor", "ceil", "trunc")},
    "round": _rounded_to,
    **dict.fromkeys(("detach", "data"), lambda x: x.one("detach") if x.kind == "float" else x),
    "neg": lambda x: -x,
    "positive": _positive,
    "abs": _absolute,
    "sign": _sign,
    "sgn": _sign,
    "signbit": lambda x: x < 0,
    "exp2": lambda x: x.const(2.0).two("pow", x),
    "expm1": lambda x: x.floating("exp") - 1.0,
    "log2": lambda x: x.floating("log") * (1 / math.log(2)),
    "log10": lambda x: x.floating("log") * (1 / math.log(10)),
    "log1p": lambda x: (x + 1.0).one("log"),
    "rsqrt": lambda x: 1.0 / x.floating("sqrt"),
    "reciprocal": lambda x: 1.0 / x,
    "square": lambda x: _product(_positive(x), 2),
    "tan": lambda x: x.floating("sin") / x.floating("cos"),
    "sinh": _hyperbolic(-1.0),
    "cosh": _hyperbolic(1.0),
    "frac": lambda x: x - _rounded("trunc")(x),
    "relu": _relu,
    "silu": lambda x: x * x.floating("sigmoid"),
    "relu6": lambda x: _clamp(x, x.const(0.0), x.const(6.0)),
    "logsigmoid": lambda x: -_softplus(-x),
    "mish": lambda x: x * _softplus(x).one("tanh"),
    "softplus": _softplus,
    "elu": _elu,
    "gelu": _gelu,
    "leaky_relu": lambda x, negative_slope=0.01: (x > 0.0).where(x, x * float(negative_slope)),
    "hardtanh": lambda x, min_val=-1, max_val=1: _clamp(x, x.const(min_val), x.const(max_val)),
    "threshold": lambda x, threshold, value: (x <= threshold).where(value, x),
    "logical_not": lambda x: ~x,
    "bitwise_not": _bits_inverted,
    "isnan": lambda x: x.one("is_nan") if x.kind == "float" else x.const(False),
    "isinf": lambda x: _absolute(x.to("float")).equals(math.inf),
    "isfinite": _is_finite,
    "isposinf": lambda x: x.to("float").equals(math.inf),
    "isneginf": lambda x: x.to("float").equals(-math.inf),
    "nan_to_num": _nan_to_num,
}
_TWO: dict[str, Callable[..., Value]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": lambda x, y: x * y,
    "div": _div,
    "floor_divide": lambda x, y: _div(x, y, rounding_mode="floor"),
    "remainder": _remainder,
    "fmod": _fmod,
    "maximum": lambda x, y: x.two("max", y, "int"),
    "minimum": lambda x, y: x.two("min", y, "int"),
    "eq": lambda x, y: x.equals(y),
    "ne": lambda x, y: x.differs(y),
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "logical_and": lambda x, y: x & y,
    "logical_or": lambda x, y: x | y,
    "logical_xor": lambda x, y: x.logical("xor", y),
    "bitwise_and": _bits("and", "bit_and"),
    "bitwise_or": _bits("or", "bit_or"),
    "bitwise_xor": _bits("xor", "bit_xor"),
    "bitwise_left_shift": lambda x, y: _shift(x, y, True),
    "bitwise_right_shift": lambda x, y: _shift(x, y, False),
    "heaviside": lambda x, y: x.equals(0).where(y, (x > 0).to(y.kind)),
    "hypot": lambda x, y: (x * x + y * y).floating("sqrt"),
}
_CASTS = "to float double half bfloat16 int long short bool type type_as clone contiguous cpu as_tensor".split()
_THREE: dict[str, tuple[tuple[str, ...], Callable[..., Value]]] = {
    "where": (("condition", "input", "other"), lambda condition, x, y: condition.where(x, y)),
    "clamp": (("input", "min", "max"), _clamp),
    "lerp": (("input", "end", "weight"), lambda x, y, weight: x + weight * (y - x)),
    "masked_fill": (("input", "mask", "value"), lambda x, mask, value: mask.where(value, x)),
    "addcmul": (("input", "tensor1", "tensor2"), lambda x, y, z, *, value=1: x + y * z * value),
    "addcdiv": (("input", "tensor1", "tensor2"), lambda x, y, z, *, value=1: x + y / z * value),
    "clamp_min": (("input", "min"), _clamp),
    "clamp_max": (("input", "max"), lambda x, high: _clamp(x, None, high)),
    "pow": (("input", "exponent"), _pow),
}
RULES: dict[str, Rule] = {
    **{name: Rule(("input",), make) for name, make in _ONE.items()},
    **{name: Rule(("input", "other"), make) for name, make in _TWO.items()},
    **{name: Rule(*rule) for name, rule in _THREE.items()},
    **{name: Rule(("input",), _same, only_values=True) for name in _CASTS},
}
# Other names of functions, and those of operators.
ALIASES = {
    **{name: name for name in "add sub mul div pow eq ne lt le gt ge neg abs".split()},
    **{"absolute": "abs", "negative": "neg", "multiply": "mul", "subtract": "sub", "divide": "div", "clip": "clamp"},
    **{"true_divide": "div", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "fix": "trunc"},
    **{"greater": "gt", "less": "lt", "greater_equal": "ge", "less_equal": "le", "not_equal": "ne", "pos": "positive"},
    **{"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not", "max": "amax"},
    **{"lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "swapdims": "transpose", "min": "amin"},
    **{"special_exp2": "exp2", "special_expm1": "expm1", "special_log1p": "log1p", "moveaxis": "movedim"},
    **{"expit": "sigmoid", "special_expit": "sigmoid", "log_sigmoid": "logsigmoid", "float_power": "pow"},
}
# Values that depend on nothing but their arguments' shape.
FILLED: dict[str, float | None] = {  # None: the argument `fill_value`
    "zeros_like": 0,
    "new_zeros": 0,
    "ones_like": 1,
    "new_ones": 1,
    "empty_like": 0,
    "new_empty": 0,
    "full_like": None,
    "new_full": None,
}
# Reductions over few entries, unrolled: of all, and the step.
REDUCTIONS: dict[str, tuple[float | bool | None, Callable[[Value, Value], Value]]] = {
    "sum": (0, lambda x, y: x + y),
    "prod": (1, lambda x, y: x * y),
    "any": (False, lambda x, y: x | y),
    "all": (True, lambda x, y: x & y),
    "amax": (None, lambda x, y: x.two("max", y, "int")),
    "amin": (None, lambda x, y: x.two("min", y, "int")),
    "mean": (0, lambda x, y: x + y),
}
