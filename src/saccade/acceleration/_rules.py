"""Which calls of F.scaled_dot_product_attention the native kernels compute, and the reason for all others.

Nothing shall be slower for being accelerated. The sizes below are where F.sdpa and the kernels were found equally fast
(PyTorch 2.13, one core of a Xeon with AVX-512, the call's own costs included; docs/accelerating.md has the table):

- float32 without dropout: below 96 queries F.sdpa's products are as fast, and ours fill blocks of 48 queries;
- float16 and bfloat16: beside many keys a block of few queries does not pay either. With gradients F.sdpa is so slow
  that everything pays;
- a single query (or a few, if the kernels stream the keys): what counts is how much is read;
- dropout sends F.sdpa to its dense path, which loses to everything;
- a bias is read pair by pair. It pays in half precision at length, or if PyTorch would take its dense path for it.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D / Dv key and value width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

from ..interception._hooks import SdpaCall, SdpaMeaning
from ..operator import _observers
from ..operator._backends.native import _kernels

SMALL = "too small for the kernels to be faster"
EMPTY = "nothing to compute"
FEW_QUERIES = "too few queries for the kernels to be faster"
FEW_KEYS_READ = "few queries and too few keys for the kernels to be faster"
FAKE = "tensors without values: nothing is computed"
BIAS = "a float mask, with which the kernels are not faster"

_ROWS, _PAIRS = 96, 2**17  # float32, least: queries, and pairs of a query and a key in all heads
_HALF_ROWS, _HALF_PAIRS = 48, 2**14  # the same in half precision
_HALF_KEYS = 128  # beside so many keys at most, fewer queries will do
_FEW = 8  # queries of a group for which the kernels stream the keys
# Least numbers in keys and values of all heads; a single query is what F.sdpa is slowest with in bfloat16.
_READ = {torch.float32: 2**21, torch.float16: 2**18, torch.bfloat16: 2**18}
_READ_BY_ONE = {**_READ, torch.bfloat16: 2**16}
_DROPPED_PAIRS = 2**12
_BIAS_PAIRS, _BIAS_WIDTHS = 2**21, 128  # and the least of D + Dv


def taken(call: SdpaCall) -> SdpaMeaning | str:
    """The call in Saccade's form if the kernels compute it, otherwise the reason why not."""
    return _foreign(call) or _interrupted() or small(call) or _undefined(call) or _meant(call)


def _foreign(call: SdpaCall) -> str | None:
    """The feature of the call that the kernels do not support; None if they support all."""
    if _kernels.module is None:
        return _kernels.missing
    query, key, value, mask = call[:4]
    if not (_plain(query) and _plain(key) and _plain(value) and (mask is None or _plain(mask))):
        return (
            FAKE if isinstance(query, FakeTensor) else "a tensor is of a kind of its own (a subclass, nested, sparse)"
        )
    if query.device.type != "cpu":
        return f"on {query.device.type}, where PyTorch's kernels are the best there are"
    if _dtype(query) not in _kernels.TYPES:
        return f"in {str(query.dtype).removeprefix('torch.')}, for which there are no native kernels"
    return None


def _plain(tensor: Tensor) -> bool:
    if type(tensor) in (Tensor, Parameter):
        return tensor.layout is torch.strided
    # What compilers trace with, where they do not look into the code: torch.export, nn.MultiheadAttention.
    return torch.compiler.is_compiling() and isinstance(tensor, (FakeTensor, FunctionalTensor))


def _dtype(query: Tensor) -> torch.dtype:
    """The dtype of the computation; under autocast it is the autocast dtype."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled("cpu") and query.dtype != torch.float64:
        return torch.get_autocast_dtype("cpu")
    return query.dtype


def small(call: SdpaCall) -> str | None:
    """The reason why a call is too small to be faster with any mask; None if it is large enough."""
    query, key, value = call[:3]
    if min(query.dim(), key.dim(), value.dim()) < 2:
        return None  # not what F.sdpa takes: it says so
    rows, keys, widths = query.shape[-2], key.shape[-2], query.shape[-1] + value.shape[-1]
    heads = query.shape[:-2].numel()
    pairs, dtype = heads * rows * keys, _dtype(query)
    if not pairs or not widths:
        return EMPTY
    if call.dropout_p:
        return SMALL if pairs < _DROPPED_PAIRS else None
    if rows == 1 or rows * _group(query, key) <= _FEW:
        least = (_READ_BY_ONE if rows == 1 else _READ)[dtype]
        return FEW_KEYS_READ if heads * keys * widths < least else None
    if dtype == torch.float32:
        return FEW_QUERIES if rows < _ROWS else SMALL if pairs < _PAIRS else None
    if _trains(query, key, value):
        return None
    if rows < _HALF_ROWS and keys > _HALF_KEYS:
        return FEW_QUERIES
    return SMALL if pairs < _HALF_PAIRS else None


def _group(query: Tensor, key: Tensor) -> int:
    """Number of query heads per key-value head."""
    return query.shape[-3] // max(key.shape[-3], 1) if query.dim() == key.dim() > 2 else 1


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _undefined(call: SdpaCall) -> str | None:
    """The reason why only PyTorch may compute this call: undefined arguments or a kernel chosen by the user."""
    mask = call.attn_mask
    if mask is not None and call.is_causal:
        return "attn_mask and is_causal together, which F.scaled_dot_product_attention does not define"
    if mask is not None and mask.device.type != "cpu":
        return "attn_mask on another device"
    if not 0.0 <= call.dropout_p < 1.0:
        return "dropout_p is not in [0, 1)"
    if call.scale is not None and not math.isfinite(call.scale):
        return "scale is not finite"
    if not (torch._C._get_flash_sdp_enabled() and torch._C._get_math_sdp_enabled()):
        return "torch.nn.attention.sdpa_kernel chose among PyTorch's kernels"
    return None


def _interrupted() -> str | None:
    """The active mode or tensor subclass that has to see PyTorch's own function; None if there is none."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "torch.func or forward-mode derivatives are being taken"
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None:
        return "a dispatch mode or torch.jit.trace wants to see PyTorch's operators"
    modes = torch._C._len_torch_function_stack()
    harmless = DeviceContext, _observers.PassiveMode
    if modes and any(not isinstance(torch._C._get_function_stack_at(n), harmless) for n in range(modes)):
        return "a TorchFunctionMode wants to see PyTorch's functions"
    return None


def _meant(call: SdpaCall) -> SdpaMeaning | str:
    meaning = call.meaning()
    if isinstance(meaning, str) or meaning.bias is None:
        return meaning
    return _biased(meaning) or meaning


def _biased(meaning: SdpaMeaning) -> str | None:
    query, key, value, bias = meaning.query, meaning.key, meaning.value, meaning.bias
    assert isinstance(bias, Tensor)
    pairs = math.prod(meaning.leading) * key.shape[2]
    at_length = pairs >= _BIAS_PAIRS and query.shape[3] + value.shape[3] >= _BIAS_WIDTHS
    half = query.dtype != torch.float32
    if meaning.dropout:
        return None  # dense in PyTorch
    if _trains(bias):  # dense, too
        return None if at_length or (half and pairs >= _HALF_PAIRS) else BIAS
    if half and _trains(query, key, value):
        return None
    few = half and query.shape[2] == 1
    return None if few or (half and at_length) else BIAS
