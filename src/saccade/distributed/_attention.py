"""Attention on shards: check the call, make sure that all ranks make the same one, compute it by the plan's layout.

Shape legend: B batch, Hq / Hkv query and key-value heads, n rows and m keys of this rank (m = n unless the plan is one
of cross-attention), Lk keys of all, D and Dv widths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..operator._biases import Bias, TensorBias, as_bias
from ..operator._call import CheckedCall
from ..operator._checks import check_inputs, make_call
from ..operator._dropout import Dropout
from ..operator._observers import aside
from ..operator._unknown_arguments import advised, with_arguments_of
from . import _ring, _ulysses
from ._exchange import agree_quickly
from ._plan import SequencePlan, check_plan
from ._spans import size


@advised
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: SequencePlan,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float | Dropout = 0.0,
) -> Tensor:
    """`saccade.attention` of a whole sequence, of which each rank has its rows. Every rank of the plan calls it.

    Results, gradients and dropped weights are those of one process with the whole sequence, up to rounding. Every rank
    must run the backward pass if one does. The gradients of `bias` and `sink`, of which each rank has a copy, are this
    rank's share, as those of a model's weights are: they are added over ranks with these.

    Args:
        query: (B, Hq, n, D), the rows that `plan.shard` gives this rank.
        key: (B, Hkv, m, D). value: (B, Hkv, m, Dv). Of cross-attention they are shards of the plan of keys.
        plan: of `saccade.distributed.plan`, or its `cross`; it holds the mask.
        bias: as in `saccade.attention`, of the whole sequence, the same on each rank; a tensor may have this rank's
            rows instead, (n, Lk) or (B|1, Hq|1, n, Lk).
        scale, softcap, sink, dropout: as in `saccade.attention`. A float draws rank 0's seed.

    Returns:
        (B, Hq, n, Dv) in the input dtype, this rank's rows.

    Raises:
        TypeError, ValueError: as `saccade.attention`; shards that are not the plan's; arguments that the layout cannot
            do, or that are not the same on all ranks. Every rank raises.
        RankFailed: a rank has ended, hangs, or raised an error.

    Example:
        >>> import torch, torch.distributed as dist, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> plan = saccade.distributed.plan(saccade.Causal(), 128)
        >>> query, key, value = (plan.shard(x) for x in torch.randn(3, 1, 8, 128, 64))
        >>> saccade.distributed.attention(query, key, value, plan=plan).shape  # of two ranks: (1, 8, 64, 64)
        torch.Size([1, 8, 128, 64])
        >>> dist.destroy_process_group()
    """
    return _run(query, key, value, plan, bias=bias, scale=scale, softcap=softcap, sink=sink, dropout=dropout)[0]


@with_arguments_of(attention)
def attention_with_lse(*args: Any, plan: SequencePlan, **options: Any) -> tuple[Tensor, Tensor]:
    """`attention` and the log of each row's softmax denominator. Arguments and errors are those of `attention`.

    Returns:
        out (B, Hq, n, Dv) and lse (B, Hq, n): as from `saccade.attention_with_lse`, this rank's rows.

    Example:
        >>> import torch, torch.distributed as dist, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> plan = saccade.distributed.plan(None, 16)
        >>> query, key, value = torch.randn(3, 1, 2, 16, 8)
        >>> out, lse = saccade.distributed.attention_with_lse(query, key, value, plan=plan)
        >>> torch.allclose(lse, torch.logsumexp(query @ key.mT / 8**0.5, dim=-1), atol=1e-5)
        True
        >>> dist.destroy_process_group()
    """
    found: tuple[Tensor, Tensor] = _run(*args, plan=plan, **options)  # type: ignore[misc]
    return found


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: SequencePlan,
    *,
    bias: Tensor | Bias | None = None,
    dropout: float | Dropout = 0.0,
    **scoring: Any,
) -> tuple[Tensor, Tensor]:
    check_plan(plan, cross=True)
    call, problem = None, None
    try:
        call = checked(query, key, value, plan, bias, {**scoring, "dropout": dropout})
    except (TypeError, ValueError) as error:
        problem = error
    seed = agreed(plan, call, problem, dropout)
    assert call is not None
    whole = call.whole
    if whole.dropout is not None and seed is not None:
        whole = replace(whole, dropout=Dropout(whole.dropout.p, seed))
    if plan.grid[0] > 1:
        with aside():  # no observer is notified of calls on shards
            return _ulysses.run(plan, call.tensors, whole)
    query, key, value = call.tensors
    return _ring.run(plan, replace(whole, query=query, key=key, value=value, bias=call.bias), call.own_rows)


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """A call that is right on this rank; `whole` has tensors of the whole sequence's shapes, without data."""

    whole: CheckedCall
    tensors: tuple[Tensor, Tensor, Tensor]
    bias: Bias | None
    own_rows: bool


def checked(
    query: Any, key: Any, value: Any, plan: SequencePlan, given: Any, options: dict[str, Any], whole_bias: bool = False
) -> ShardedCall:
    """The call, `given` its bias, in the contract's terms; `whole_bias`: a bias of this rank's rows is an error."""
    query, key, value = tensors = check_inputs(query, key, value)
    held, nothing = plan.held(plan.rank), query.new_empty(())
    for name, tensor, count in (("query", query, held), ("key", key, size(plan.key_rows[plan.rank]))):
        if tensor.shape[2] != count:
            sharded = "plan.shard" if name == "query" or plan.key_rows == plan.rows else "the shard of the keys' plan"
            raise ValueError(
                f"{name} has {tensor.shape[2]} rows (axis 2), expected the {count} of {sharded} on rank {plan.rank}"
            )
    lengths = plan.length, plan.key_length, plan.key_length
    wholes = [nothing.expand(*x.shape[:2], length, x.shape[3]) for x, length in zip(tensors, lengths, strict=True)]
    bias = as_bias(given)
    own_rows = isinstance(bias, TensorBias) and bias.parameter.shape[2] == held and held not in (1, plan.length)
    if own_rows:
        if whole_bias or plan.grid[0] > 1:
            raise ValueError("bias has only this rank's rows: this call computes other rows too, pass the whole bias")
        assert bias is not None
        bias._check(query.shape[0], query.shape[1], held, plan.key_length)
    whole_query, whole_key, whole_value = wholes
    shared = None if own_rows else given
    whole = make_call(whole_query, whole_key, whole_value, plan.mask, bias=shared, **options)
    return ShardedCall(whole, tensors, bias if own_rows else whole.bias, own_rows)


def agreed(
    plan: SequencePlan,
    call: ShardedCall | None,
    problem: Exception | None,
    dropout: Any = 0.0,
    operation: str = "attention",
    more: dict[str, Any] | None = None,
) -> int | None:
    """Rank 0's seed where dropout is a float. On every rank ValueError if their calls, or `more` of them, differ; else
    the problem."""
    facts: dict[str, Any] = {"error": None if problem is None else str(problem), "plan": _description(plan)}
    facts |= more or {}
    seed, device = None, torch.device("cpu")
    if call is not None:
        query, key, value = call.tensors
        whole, device = call.whole, query.device
        if whole.dropout is not None and not isinstance(dropout, Dropout):
            seed = whole.dropout.seed
        learned = [*call.tensors, *([] if call.bias is None else [call.bias.parameter])]
        learned += [] if whole.sink is None else [whole.sink]
        shape = None if call.bias is None else tuple(call.bias.parameter.shape)
        if isinstance(call.bias, TensorBias) and shape is not None:
            shape = (*shape[:2], shape[3])
        facts |= {
            "query (B, Hq, D)": (*query.shape[:2], query.shape[3]),
            "key (B, Hkv, D)": (*key.shape[:2], key.shape[3]),
            "width of value": value.shape[3],
            "dtype": str(query.dtype),
            "scale": whole.scale,
            "softcap": whole.softcap,
            "sink": whole.sink is not None,
            "bias": None if call.bias is None else (type(call.bias).__name__, shape),
            "dropout": None if whole.dropout is None else (whole.dropout.p, seed is None and whole.dropout.seed),
            "gradients": torch.is_grad_enabled()
            and (any(x.requires_grad for x in learned), key.requires_grad or value.requires_grad),
        }
    first_seed = agree_quickly(plan.group, facts, device, operation, seed or 0)
    if problem is not None:
        raise problem
    return first_seed if seed is not None else None


def _description(plan: SequencePlan) -> str:
    return f"{plan.layout} {plan.grid} over {plan.length} rows, mask {plan.digest[:12]}, dealt {plan.deal}"
