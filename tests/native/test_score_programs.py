"""Score programs in the kernels: every operation, every level, gradients of everything, on every instruction set.

The oracle is the function itself, called with float64 tensors that broadcast, and PyTorch's autograd.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

import saccade
from saccade.operator._backends.native._program_writer import slopes
from saccade.operator._programs._language import OPERATIONS, Builder, evaluate
from saccade.operator._scores._score import Score

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 101, 149, 11, 7


def float32(*shape):
    return torch.randn(*shape).requires_grad_()


# Each: tables, and the function of tables, score, b, h, q, k. The level of each load is another one.
FUNCTIONS = {
    "score alone": (lambda: (), lambda t, s, b, h, q, k: s * s - 0.5 * s),
    "uniform": (lambda: (float32(HQ),), lambda t, s, b, h, q, k: s * t[0][h]),
    "row and key": (
        lambda: (float32(B, LK), float32(LK)),  # a query's position is a key's
        lambda t, s, b, h, q, k: torch.tanh(s + t[0][b, k]) * t[1][q],
    ),
    "distance": (
        lambda: (float32(HQ, 2 * LK),),
        lambda t, s, b, h, q, k: torch.sigmoid(s) * t[0][h, k - q + LK],
    ),
    "buckets": (
        lambda: (torch.randint(0, 5, (2 * LK,)), float32(HQ, 5)),
        lambda t, s, b, h, q, k: torch.maximum(s, t[1][h, t[0][k - q + LK]]),
    ),
    "pair in place": (lambda: (float32(HQ, LK, LK),), lambda t, s, b, h, q, k: s * t[0][h, q, k].cos()),
    "pair of all heads": (lambda: (float32(LK, LK),), lambda t, s, b, h, q, k: torch.sin(s * t[0][q, k])),
    "pair by copy": (lambda: (float32(31),), lambda t, s, b, h, q, k: s + s * t[0][(q * k) % 31]),
    "quotient": (lambda: (float32(HQ, LK),), lambda t, s, b, h, q, k: s / (1.5 + t[0][h, k].sin())),
    "detached": (
        lambda: (float32(HQ, 2 * LK),),
        lambda t, s, b, h, q, k: s * t[0][h, k - q + LK].detach() + (s.tanh() - s).detach() * t[0][h, q],
    ),
    "one table twice": (lambda: (float32(HQ, LK),), lambda t, s, b, h, q, k: s * t[0][h, q] - t[0][h, k] * 0.5),
    "bools and wholes": (
        lambda: (torch.rand(LK, LK) < 0.5,),
        lambda t, s, b, h, q, k: torch.where(t[0][q, k] & (q // 3 != k % 7), s, (q - k).float().abs().log1p() * s),
    ),
}


def dense(function, tables, query, key, value, visible, softcap):
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(HQ).view(1, -1, 1, 1)
    q, k = torch.arange(LQ).view(1, 1, -1, 1) + LK - LQ, torch.arange(LK).view(1, 1, 1, -1)
    products = query @ key.repeat_interleave(HQ // HKV, 1).mT / D**0.5
    scores = function(tables, softcap * torch.tanh(products / softcap), b, h, q, k)
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    return weights @ value.repeat_interleave(HQ // HKV, 1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, instructions):
    torch.manual_seed(5)
    make, function = FUNCTIONS[name]
    tables = make()
    query, key, value = float32(B, HQ, LQ, D), float32(B, HKV, LK, D), float32(B, HKV, LK, DV)
    given = [query, key, value, *(table for table in tables if table.is_floating_point())]
    score = Score(lambda s, b, h, q, k: function(tables, s, b, h, q, k))
    out = saccade.attention(query, key, value, saccade.Causal(), bias=score, softcap=3.0, backend="native")
    out.sin().sum().backward()

    exact = [x.detach().double().requires_grad_() for x in given]
    floats = iter(exact[3:])
    wide = [next(floats) if table.is_floating_point() else table for table in tables]
    visible = torch.ones(LQ, LK, dtype=torch.bool).tril(LK - LQ)
    expected = dense(function, wide, *exact[:3], visible, 3.0)
    expected.sin().sum().backward()
    # Sums of at most LQ HQ B terms in float32, each with some ten roundings.
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=2e-5)
    for x, truth in zip(given, exact, strict=True):
        size = truth.grad.abs().max()
        assert (x.grad.double() - truth.grad).abs().max() < 2e-5 * size


NUMBERS = [0.0, 1e-40, 0.3, -0.7, 1.5, -2.5, 17.25, -88.0, 90.0, 3e4, -3e38, torch.inf, -torch.inf, torch.nan]
WHOLE = [-(2**30), -(2**23) - 1, -7, -1, 0, 1, 5, 2**23 + 3, 2**30]
OF_INTS = ("floor_div", "trunc_div", "mod", "bit_and", "bit_or", "bit_xor")
OF_BOOLS = ("and", "or", "xor", "not")
OF_ONE = (
    "neg",
    "abs",
    "sign",
    "exp",
    "log",
    "sqrt",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "floor",
    "ceil",
    "round",
    "trunc",
    "detach",
)
OF_ONE = (*OF_ONE, "not", "to_float", "to_bool", "is_nan")
NAN, MOST = 12345.0, 3e38


def pairs_of(values):
    first, second = torch.meshgrid(torch.tensor(values), torch.tensor(values), indexing="ij")
    return first.flatten(), second.flatten()


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ("where", "to_int")])
def test_an_operation_means_what_pytorch_means(name, instructions):
    # One key: the lse is the score. So that it shows all of them, NaN and infinities are finite numbers there.
    kind = "int" if name in OF_INTS else "float"
    tables = pairs_of(WHOLE if kind == "int" else NUMBERS)
    build = Builder()
    args, given = [build.load(n, kind, build.leaf("q")) for n in (0, 1)], list(tables)
    if name in OF_BOOLS or name == "to_float":
        args, given = [build.of("to_bool", arg) for arg in args], [x != 0 for x in given]
    if name in OF_ONE:
        args, given = args[:1], given[:1]
    made = build.number(build.of(name, *args))
    capped = build.of("max", build.of("min", made, build.const(MOST, "float")), build.const(-MOST, "float"))
    shown = build.of("where", build.of("is_nan", made), build.const(NAN, "float"), capped)
    one = build.of("add", build.leaf("score"), build.const(1.0, "float"))  # 1, which no recognition knows
    score = Score._of_program(build.program(build.of("mul", shown, one)), tables).at(0)
    query, key = torch.zeros(1, 1, len(tables[0]), 1), torch.zeros(1, 1, 1, 1)
    _, lse = saccade.attention_with_lse(query, key, key, bias=score, backend="native")

    truth = OPERATIONS[name].compute(*(x.double() if x.is_floating_point() else x for x in given)).float()
    truth = torch.where(truth.isnan(), NAN, truth.clamp(-MOST, MOST))
    torch.testing.assert_close(lse[0, 0], truth, atol=2e-7, rtol=3e-6)


@given(data=st.data())
def test_a_slope_is_how_a_value_moves_with_query_and_key(data):
    build = Builder()
    ints = [build.leaf("q"), build.leaf("k"), build.leaf("h"), build.const(3, "int"), build.const(-2, "int")]
    bools: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        op = data.draw(st.sampled_from(["add", "sub", "neg", "mul", "min", "max", "lt", "eq", "where", "mod", "abs"]))
        one, other = (data.draw(st.sampled_from(ints)) for _ in range(2))
        if op in ("lt", "eq"):
            bools.append(build.of(op, one, other))
        elif op == "where":
            if bools:
                ints.append(build.of(op, data.draw(st.sampled_from(bools)), one, other))
        else:
            ints.append(build.of(op, one) if op in ("neg", "abs") else build.of(op, one, other))
    program = build.program(*ints, *bools)
    claimed = slopes(program)

    def values(step):
        q, k = torch.meshgrid(torch.arange(7), torch.arange(7), indexing="ij")
        leaves = {"q": q + step, "k": k + step, "h": torch.tensor(4)}
        return evaluate(program, leaves, lambda node, indices: indices[0], torch.float64)

    for output, before, after in zip(program.outputs, values(0), values(5), strict=True):
        if claimed[output] is not None:
            assert torch.equal(after.long(), before.long() + 5 * claimed[output])


def test_bits_do_not_depend_on_threads():
    torch.manual_seed(6)
    tables = float32(HQ, 2 * LK), float32(LK, LK), float32(17)
    query, key, value = float32(B, HQ, LQ, D), float32(B, HKV, LK, D), float32(B, HKV, LK, DV)

    def score(s, b, h, q, k):
        return s * tables[0][h, k - q + LK] + torch.tanh(s * tables[1][q, k]) * tables[2][(q * 3 + k) % 17]

    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            out = saccade.attention(query, key, value, bias=Score(score), backend="native")
            results.append([out, *torch.autograd.grad(out.sin().sum(), (query, key, value, *tables))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_an_index_outside_of_a_table_is_an_error_where_it_is_seen():
    table = float32(LK - 3)
    query, key, value = float32(B, HQ, LQ, D), float32(B, HKV, LK, D), float32(B, HKV, LK, DV)
    score = Score(lambda s, b, h, q, k: s * table[k])
    hidden = saccade.Padding(torch.full((B,), LK - 3))
    saccade.attention(query, key, value, hidden, bias=score, backend="native").sum().backward()
    assert table.grad.isfinite().all()
    with pytest.raises(IndexError, match=f"index {LK - 3} is out of range"):
        saccade.attention(query, key, value, bias=score, backend="native")
    # One before the first negative index that PyTorch takes: wrapped twice it would be the last entry.
    early = Score(lambda s, b, h, q, k: s * table[k - (LK - 2)])
    with pytest.raises(IndexError, match="out of"):
        saccade.attention(query, key, value, hidden, bias=early, backend="native")


def test_what_no_query_sees_reaches_nothing():
    torch.manual_seed(7)
    table = float32(LK)
    query, key, value = float32(B, HQ, LQ, D), float32(B, HKV, LK, D), float32(B, HKV, LK, DV)
    with torch.no_grad():
        key[:, :, 77], value[:, :, 77], table[77] = float("nan"), float("inf"), float("nan")
    seen = saccade.Predicate(lambda b, h, q, k: (k != 77) & (q != k))
    score = Score(lambda s, b, h, q, k: s * table[k] + 1.0 / (q - k))  # a division by 0 on the diagonal
    out = saccade.attention(query, key, value, seen, bias=score, backend="native")
    out.sum().backward()
    assert out.isfinite().all()
    for x in (query, key, value, table):
        assert x.grad.isfinite().all()
    assert table.grad[77] == 0
