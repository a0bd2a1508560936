"""What is left to PyTorch, and why: each reason, met once; and the sizes from which on the kernels are taken.

B batch, H heads, L length, D width.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import saccade
from saccade.acceleration import _rules
from saccade.acceleration._rules import BIAS, EMPTY, FEW_KEYS_READ, FEW_QUERIES, SMALL
from saccade.interception._hooks import SdpaCall

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def left(*tensors, **options):
    """Why one call was left to PyTorch, whose very bits come back; None where it was taken."""
    state = torch.get_rng_state()
    expected = F.scaled_dot_product_attention(*tensors, **options)
    torch.set_rng_state(state)
    with saccade.accelerate() as run:
        out = F.scaled_dot_product_attention(*tensors, **options)
    assert run.calls == 1
    if run.taken:
        return None
    assert type(out) is type(expected)
    if not out.is_nested:
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    return next(iter(run.left))


class Tagged(torch.Tensor):
    pass


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("every_size")
class TestKinds:
    @pytest.fixture
    def qkv(self):
        return tuple(torch.randn(2, 3, 5, 8) for _ in range(3))

    def test_ordinary_calls_are_taken(self, qkv):
        assert left(*qkv) is None
        assert left(*(torch.nn.Parameter(tensor) for tensor in qkv)) is None

    def test_dtypes_without_kernels(self, qkv):
        assert left(*(tensor.double() for tensor in qkv)) == "in float64, for which there are no native kernels"

    def test_devices(self, qkv):
        on_meta = tuple(tensor.to("meta") for tensor in qkv)
        assert _rules.taken(SdpaCall(*on_meta)) == "on meta, where PyTorch's kernels are the best there are"

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
    def test_subclasses(self, qkv):
        why = "a tensor is of a kind of its own (a subclass, nested, sparse)"
        assert left(qkv[0].as_subclass(Tagged), *qkv[1:]) == why
        assert left(*qkv, attn_mask=torch.ones(5, 5, dtype=torch.bool).as_subclass(Tagged)) == why
        nested = torch.nested.nested_tensor([torch.randn(3, 4, 8), torch.randn(3, 4, 8)], layout=torch.jagged)
        with saccade.accelerate() as run:
            F.scaled_dot_product_attention(*[nested.transpose(1, 2)] * 3)
        assert run.left == {why: 1}

    def test_mask_beside_is_causal(self, qkv):
        mask = torch.ones(5, 5, dtype=torch.bool)
        assert left(*qkv, mask, 0.0, True).startswith("attn_mask and is_causal together")

    @pytest.mark.parametrize("scale", [math.inf, math.nan])
    def test_scales_that_are_no_numbers(self, qkv, scale):
        assert left(*qkv, scale=scale) == "scale is not finite"

    def test_dropping_everything(self, qkv):
        assert left(*qkv, dropout_p=1.0) == "dropout_p is not in [0, 1)"

    def test_a_choice_among_the_kernels_of_pytorch(self, qkv):
        for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                assert left(*qkv) == "torch.nn.attention.sdpa_kernel chose among PyTorch's kernels"

    def test_nothing_to_compute(self, qkv):
        assert left(*(tensor[:0] for tensor in qkv)) == EMPTY
        assert left(qkv[0][:, :, :0], *qkv[1:]) == EMPTY

    def test_transforms(self, qkv):
        query, key, value = qkv
        why = "torch.func or forward-mode derivatives are being taken"
        with saccade.accelerate() as run:
            got = torch.func.vmap(F.scaled_dot_product_attention)(query, key, value)
            torch.func.grad(lambda x: F.scaled_dot_product_attention(x, key, value).sum())(query)
        assert run.left == {why: 2}
        torch.testing.assert_close(got, F.scaled_dot_product_attention(query, key, value))
        with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level(), saccade.accelerate() as run:
            dual = forward_ad.make_dual(query, torch.randn_like(query))
            out = F.scaled_dot_product_attention(dual, key, value)
            assert forward_ad.unpack_dual(out).tangent.abs().max() > 0
        assert run.taken == 0 and run.calls == 1

    def test_modes(self, qkv):
        with Watching():
            assert left(*qkv) == "a TorchFunctionMode wants to see PyTorch's functions"
        with saccade.accelerate() as run, Operators() as operators:
            F.scaled_dot_product_attention(*qkv)
        assert run.left == {"a dispatch mode or torch.jit.trace wants to see PyTorch's operators": 1}
        assert any("scaled_dot_product" in name for name in operators.seen)

    def test_a_default_device_is_no_reason(self, qkv):
        with torch.device("cpu"):
            assert left(*qkv) is None

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_tracing(self, qkv):
        with saccade.accelerate() as run:
            traced = torch.jit.trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), qkv, check_trace=False)
        assert run.taken == 0 and run.calls == 1
        torch.testing.assert_close(traced(*qkv), F.scaled_dot_product_attention(*qkv))

    def test_what_pytorch_refuses_is_refused_in_its_words(self, qkv):
        query, key, value = qkv
        for wrong in ((query, key[..., :7], value), (query, key[:, :2], value[:, :2]), (query.half(), key, value)):
            with pytest.raises(RuntimeError) as theirs:
                F.scaled_dot_product_attention(*wrong)
            with saccade.accelerate() as run, pytest.raises(RuntimeError) as ours:
                F.scaled_dot_product_attention(*wrong)
            assert str(ours.value) == str(theirs.value)
            assert run.taken == 0 and run.calls == 1

    def test_without_kernels_everything_is_left(self, qkv, monkeypatch):
        monkeypatch.setattr(_rules._kernels, "module", None)
        monkeypatch.setattr(_rules._kernels, "missing", "this installation has no native build")
        assert left(*qkv) == "this installation has no native build"


def sized(batch, heads, rows, keys, width, dtype=F32, *, kv_heads=None, grad=False, **options):
    """Why a call of that size is left, without computing it."""
    tensors = [
        torch.empty(0, dtype=dtype).expand(0).new_zeros(()).expand(batch, h, n, width).requires_grad_(grad)
        for h, n in ((heads, rows), (kv_heads or heads, keys), (kv_heads or heads, keys))
    ]
    found = _rules.taken(SdpaCall(*tensors, enable_gqa=kv_heads is not None, **options))
    return found if isinstance(found, str) else None


class TestSizes:
    """Both sides of each line that was measured."""

    def test_float32(self):
        assert sized(2, 8, 95, 1024, 64) == FEW_QUERIES
        assert sized(2, 8, 96, 1024, 64) is None
        assert sized(1, 8, 127, 128, 64) == SMALL
        assert sized(1, 8, 128, 128, 64) is None
        assert sized(1, 8, 128, 128, 64, grad=True) is None
        assert sized(1, 8, 16, 16, 64, grad=True) == FEW_QUERIES

    @pytest.mark.parametrize("dtype", [BF16, F16])
    def test_half_precision(self, dtype):
        assert sized(1, 8, 47, 129, 64, dtype) == FEW_QUERIES
        assert sized(1, 8, 48, 129, 64, dtype) is None
        assert sized(8, 8, 16, 16, 64, dtype) is None
        assert sized(1, 7, 47, 47, 64, dtype) == SMALL
        assert sized(1, 7, 16, 16, 64, dtype, grad=True) is None
        with torch.no_grad():
            assert sized(1, 7, 16, 16, 64, dtype, grad=True) == SMALL

    def test_decoding(self):
        assert sized(1, 8, 1, 2047, 64) == FEW_KEYS_READ
        assert sized(1, 8, 1, 2048, 64) is None
        assert sized(1, 8, 1, 64, 64, BF16) is None
        assert sized(1, 8, 1, 63, 64, BF16) == FEW_KEYS_READ
        assert sized(1, 8, 1, 255, 64, F16) == FEW_KEYS_READ
        assert sized(1, 8, 1, 256, 64, F16) is None
        assert sized(1, 8, 2, 2048, 64, kv_heads=2) is None
        assert sized(1, 8, 3, 2048, 64, kv_heads=2) == FEW_QUERIES  # 12 queries for one key head

    def test_dropout(self):
        assert sized(1, 16, 16, 16, 64, dropout_p=0.1) is None
        assert sized(1, 16, 15, 17, 64, dropout_p=0.1) == SMALL

    def test_biases(self):
        whole = torch.randn(512, 512)
        for dtype in (F32, BF16):
            assert sized(1, 8, 512, 512, 64, dtype, attn_mask=whole) == (BIAS if dtype == F32 else None)
            assert sized(1, 8, 512, 512, 16, dtype, attn_mask=whole) == BIAS
            assert sized(1, 4, 512, 512, 64, dtype, attn_mask=whole) == BIAS
            learnt = whole.clone().requires_grad_()
            assert sized(1, 8, 512, 512, 64, dtype, attn_mask=learnt) is None
            assert sized(1, 4, 512, 512, 64, dtype, attn_mask=learnt) == (BIAS if dtype == F32 else None)
            assert sized(1, 4, 512, 512, 64, dtype, attn_mask=whole, dropout_p=0.1) is None
            assert sized(1, 4, 512, 512, 64, dtype, attn_mask=whole, grad=True) == (BIAS if dtype == F32 else None)
        assert sized(1, 8, 1, 512, 64, BF16, attn_mask=whole[:1]) is None

    def test_a_float_mask_that_only_hides_counts_as_a_mask(self):
        hiding = torch.zeros(512, 512).masked_fill(~torch.ones(512, 512, dtype=torch.bool).tril(), -math.inf)
        assert sized(1, 8, 512, 512, 64, attn_mask=hiding) is None

    def test_autocast_counts_with_its_dtype(self):
        assert sized(1, 8, 1, 512, 64) == FEW_KEYS_READ
        with torch.autocast("cpu", BF16):
            assert sized(1, 8, 1, 512, 64) is None
