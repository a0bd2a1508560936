"""What `auto` chooses where the compiled kernels are, and what `explain` says with and without them."""

from __future__ import annotations

import importlib

import pytest
import torch

import problems
import saccade
from looped import looped
from problems import CASES
from saccade import Causal, Dropout
from saccade.operator._backends import native
from saccade.operator._backends.native import _kernels, _program


def explained(problem, dtype=torch.float32, **more):
    tensors = {name: tensor.to(dtype) for name, tensor in problem.tensors.items()}
    return saccade.explain(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        problem.mask,
        bias=problem.to_bias(tensors),
        sink=tensors.get("sink"),
        **problem.options,
        **more,
    )


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16])
@looped("name", CASES)
def test_native_takes_every_call_in_its_dtypes(name, dtype):
    for options in ({}, {"lse": True}, {"dropout": Dropout(0.3, 5)}):
        plan = explained(CASES[name](), dtype, **options)
        assert plan.backend == "native" and plan.lacks == ()
        assert plan.instructions == _kernels.module.active() and plan.instructions in str(plan)


@pytest.mark.parametrize("name", ["plain", "wide_causal", "everything", "alibi", "one_kv_head"])
def test_auto_is_native_to_the_bit(name, monkeypatch):
    monkeypatch.setattr(problems, "DTYPE", torch.float32)
    problem = CASES[name]()
    auto, named = problems.leaves(problem.tensors), problems.leaves(problem.tensors)
    out, same = problem.out(auto, "auto"), problem.out(named, "native")
    assert torch.equal(out, same)
    cotangent = torch.randn_like(out)
    for one, other in zip(*(problems.pull([x], t, [cotangent]) for x, t in ((out, auto), (same, named))), strict=True):
        assert torch.equal(one, other)


def test_float64_goes_on_as_before():
    query = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    plan = saccade.explain(query, query, query, Causal())
    assert plan.backend == "sdpa" and "float64" in plan.refused["native"]
    assert saccade.explain(query, query, query, Causal(), lse=True).backend == "chunked"


def test_transforms_go_to_chunked():
    query = torch.randn(1, 2, 8, 8)
    seen = []

    def call(q):
        seen.append(saccade.explain(q, query, query))
        return saccade.attention(q, query, query).sum()

    torch.func.grad(call)(query)
    torch.func.jvp(call, (query,), (query,))
    assert [plan.backend for plan in seen] == ["chunked"] * 2
    assert all("torch.func" in plan.refused["native"] for plan in seen)


def test_what_has_no_memory_of_its_own_is_not_native():
    fake = torch.empty(1, 2, 8, 8, device="meta")
    assert "on meta" in saccade.explain(fake, fake, fake).refused["native"]


def test_derivatives_and_memory_are_told():
    query = torch.randn(2, 4, 512, 64)
    plan = saccade.explain(query, query, query, Causal())
    assert any("create_graph" in line and "chunked" in line for line in plan.derivatives)
    assert any("forward mode" in line for line in plan.derivatives)
    assert 0.5 <= plan.work < 0.6  # of blocks of 64 x 64
    packed, out, lse = 2 * 4 * 512 * 128 * 4, query.numel() * 4, 2 * 4 * 512 * 4
    assert plan.peak_bytes == packed + out + lse


@pytest.mark.parametrize("why", ["this installation has no native build", "the native build is broken: no symbol"])
def test_without_kernels_everything_is_as_before(why, monkeypatch):
    monkeypatch.setattr(_kernels, "module", None)
    monkeypatch.setattr(_kernels, "missing", why)
    query = torch.randn(1, 2, 11, 16)
    plan = saccade.explain(query, query, query, Causal())
    assert plan.backend == "sdpa" and plan.refused["native"] == why and plan.instructions is None
    assert why in str(plan)
    assert saccade.explain(query, query, query, softcap=1.0).backend == "chunked"
    want = saccade.attention(query, query, query, Causal(), backend="chunked")
    torch.testing.assert_close(saccade.attention(query, query, query, Causal()), want)
    with pytest.raises(ValueError, match=f"'native' cannot do this call: {why}"):
        saccade.attention(query, query, query, backend="native")
    assert native.fast_forward(query, query, query, None, None) is None


def loaded(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    return _program._load()


def test_no_build_and_a_broken_one_are_told_apart(monkeypatch):
    missing = loaded(monkeypatch, ModuleNotFoundError("No module", name="saccade._native"))
    assert missing[0] is None and missing[1].startswith("this installation has no native build")
    for error in (ImportError("undefined symbol: f"), ModuleNotFoundError("No module named 'x'", name="x")):
        module, why = loaded(monkeypatch, error)
        assert module is None and why == f"the native build is broken: {error}"
