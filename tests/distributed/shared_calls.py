"""What the processes of a group are given to do. Everything is made of a seed, so that all of them make the same."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import saccade
from saccade import Causal, Documents, Window, distributed
from saccade.distributed import _speed
from saccade.distributed._costs import RankSpeed
from saccade.distributed._prediction import predicted
from saccade.operator._dropout import as_dropout


@dataclass
class Case:
    """One call, and how it is shared."""

    length: int
    mask: Any = None
    layout: str = "ring"
    dtype: torch.dtype = torch.float64
    batch: int = 2
    heads: tuple[int, int] = (6, 3)
    widths: tuple[int, int] = (7, 5)
    bias: str | None = None
    sink: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # scale, softcap, dropout
    poison: list[int] | None = None  # NaN from these rows on, for each item
    keys: int | None = None  # of cross-attention

    def tensors(self) -> dict[str, torch.Tensor]:
        """query, key, value and the cotangents of out and lse."""
        draw = torch.Generator().manual_seed(7)
        (queries, keys), (width, value) = self.heads, self.widths
        lengths = dict.fromkeys(("key", "value"), self.keys or self.length)
        shapes = {
            "query": (queries, width),
            "key": (keys, width),
            "value": (keys, value),
            "d_out": (queries, value),
            "d_lse": (queries, 1),
        }
        made = {
            name: torch.randn(self.batch, h, lengths.get(name, self.length), w, generator=draw, dtype=torch.float64)
            for name, (h, w) in shapes.items()
        }
        made = {name: tensor.to(self.dtype) for name, tensor in made.items()}
        for item, start in enumerate(self.poison or ()):
            for tensor in made.values():
                tensor[item, :, start:] = torch.nan
        return {**made, "d_lse": made["d_lse"][..., 0]}

    def parameters(self) -> dict[str, torch.Tensor]:
        """What is learned besides: leaves that require gradients."""
        draw, heads, keys = torch.Generator().manual_seed(11), self.heads[0], self.keys or self.length
        shapes = {
            None: None,
            "tensor": (1, heads, self.length, keys),
            "own rows": (self.batch, 1, self.length, keys),
            "keys": (1, 1, 1, keys),
            "ALiBi": (heads,),
            "placed ALiBi": (heads,),
            "T5": (8, heads),
            "score": (heads, keys),
            "untraced score": (heads,),
        }
        wanted = {"bias": shapes[self.bias], "sink": (heads,) if self.sink else None}
        dtype = torch.promote_types(self.dtype, torch.float32)
        return {
            name: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
            for name, shape in wanted.items()
            if shape is not None
        }

    def bias_of(self, parameter, plan=None):
        if parameter is None:
            return None
        if self.bias == "own rows":
            return parameter if plan is None else plan.shard(parameter, dim=-2)
        if self.bias == "ALiBi":
            return saccade.ALiBi(parameter)
        if self.bias == "placed ALiBi":
            return saccade.ALiBi(parameter).at(3)
        if self.bias == "T5":
            return saccade.RelativeBias(parameter)
        if self.bias == "score":
            return saccade.Score(
                lambda score, b, h, q, k: score * torch.where(k % 3 == 1, 0.5, 1.0) + parameter[h, k] * b
            )
        if self.bias == "untraced score":
            return saccade.Score(lambda score, b, h, q, k: score - parameter[h] * torch.lgamma((q - k).abs() + 1.0) / 9)
        return parameter

    def planned(self, group=None):
        """The plan of the call, and that of its keys."""
        if self.keys is None:
            plan = distributed.plan(self.mask, self.length, group, layout=self.layout)
            return plan, plan
        rows, keys = (distributed.plan(Causal(), n, group, layout=self.layout) for n in (self.length, self.keys))
        return rows.cross(keys, self.mask), keys

    def shards(self, tensors, plan, of_keys):
        """Query, key and value on this rank."""
        return [holder.shard(x) for holder, x in zip((plan, of_keys, of_keys), tensors, strict=True)]


LINKED = Case(1201, Causal(), dtype=torch.float32, sink=True)  # over a slow link, too


def attend(rank, case: Case, members=None):
    """out and lse of the whole sequence, and this rank's share of every gradient, by name.

    Args:
        members: ranks that make a group of their own; the others end with plan's error.
    """
    group = None if members is None else dist.new_group(members)
    plan, of_keys = case.planned(group)
    given, learned = case.tensors(), case.parameters()
    leaves = {name: given[name].requires_grad_() for name in ("query", "key", "value")}
    shards = case.shards(leaves.values(), plan, of_keys)
    scoring = {"bias": case.bias_of(learned.get("bias"), plan), "sink": learned.get("sink")}
    out, lse = distributed.attention_with_lse(*shards, plan=plan, **scoring, **case.options)
    seen = lse != -torch.inf
    loss = (out * plan.shard(given["d_out"])).sum() + torch.where(seen, lse * plan.shard(given["d_lse"]), 0.0).sum()
    loss.backward()
    grads = {f"d_{name}": x.grad for name, x in {**leaves, **learned}.items()}
    return {"out": plan.unshard(out.detach()), "lse": plan.unshard(lse.detach())}, grads


def expected(case: Case, backend="auto", dtype=None):
    """The same of one process."""
    given, learned = case.tensors(), case.parameters()
    if dtype is not None:
        given = {name: x.to(dtype) for name, x in given.items()}
        learned = {name: x.detach().to(dtype).requires_grad_() for name, x in learned.items()}
    leaves = {name: given[name].requires_grad_() for name in ("query", "key", "value")}
    scoring = {"bias": case.bias_of(learned.get("bias")), "sink": learned.get("sink")}
    out, lse = saccade.attention_with_lse(*leaves.values(), case.mask, **scoring, **case.options, backend=backend)
    seen = lse != -torch.inf
    loss = (out * given["d_out"]).sum() + torch.where(seen, lse * given["d_lse"], 0.0).sum()
    loss.backward()
    grads = {f"d_{name}": x.grad for name, x in {**leaves, **learned}.items()}
    return {"out": out.detach(), "lse": lse.detach(), **grads}


def together(answers):
    """What all ranks have alike, and gradients added over them."""
    first, shares = answers[0][0], [answer[1] for answer in answers]
    assert all(answer[0][name].equal(first[name]) for answer in answers for name in first)
    return {**first, **{name: sum(share[name].double() for share in shares) for name in shares[0]}}


def counted_bytes(rank, case: Case):
    """The plan's own figures, and the bytes of keys and values that this rank receives in a forward pass."""
    received, batched = [], dist.batch_isend_irecv

    def counting(operations):
        received.extend(one.tensor.nbytes for one in operations if one.op is dist.irecv and one.tag == 0)
        return batched(operations)

    (plan, of_keys), given = case.planned(), case.tensors()
    shards = case.shards([given[name] for name in ("query", "key", "value")], plan, of_keys)
    dist.batch_isend_irecv = counting
    try:
        distributed.attention(*shards, plan=plan)
    finally:
        dist.batch_isend_irecv = batched
    where = {"rows": plan.rows, "keys": plan.key_rows, "block": of_keys.block}
    return {**where, "said": plan.traffic(*shards[1:]), "received": sum(received)}


def planned(rank, mask, length, layout="ring"):
    plan = distributed.plan(mask, length, layout=layout)
    return plan.rows, plan.imbalance, plan.layout, plan.explain()


def resharded(rank, length):
    plan = distributed.plan(Causal(), length)
    whole = torch.arange(length * 5.0).view(length, 5).requires_grad_()
    shard = plan.shard(whole, dim=0)
    again = plan.unshard(shard, dim=-2)
    ((rank + 1) / 2 * again**2).sum().backward()
    return {"rows": plan.rows, "shard": shard.detach(), "whole": again.detach(), "gradient": whole.grad}


def attend_unseeded(rank, case: Case):
    """Output where each rank's generator stands elsewhere, and the seed that the rank would have drawn."""
    torch.manual_seed(rank)
    seed = as_dropout(case.options["dropout"]).seed
    torch.manual_seed(rank)
    plan, given = distributed.plan(case.mask, case.length, layout=case.layout), case.tensors()
    shards = [plan.shard(given[name]) for name in ("query", "key", "value")]
    return {"seed": seed, "out": plan.unshard(distributed.attention(*shards, plan=plan, **case.options))}


def faulty_call(rank, fault):
    """A call that is another one on rank 2."""
    other = rank == 2
    length = 101 if fault == "length" and other else 97
    mask = Window(3, 0) if fault == "mask" and other else Causal()
    if fault == "ids":
        mask = Documents([0] * (5 if other else 97))
    layout = "gathered" if fault == "layout" and other else "ring"
    plan = distributed.plan(mask, length, layout=layout)
    case = Case(97, heads=(3, 3) if fault == "heads" and other else (6, 3))
    shards = [plan.shard(case.tensors()[name]) for name in ("query", "key", "value")]
    if other and fault == "dtype":
        shards = [x.float() for x in shards]
    if other and fault == "shard":
        shards = [x[:, :, :5] for x in shards]
    if other and fault == "gradients":
        shards[1].requires_grad_()
    return distributed.attention(*shards, plan=plan, scale=0.25 if fault == "scale" and other else 0.5)


def misused(rank, use):
    """What is no use of a plan of cross-attention, or of `cross`."""
    rows, keys = (distributed.plan(None, n, layout="ring") for n in (13, 31))
    crossed, short = rows.cross(keys), torch.zeros(1, 1, 7, 4)
    even, causal = (distributed.plan(mask, 8, layout="ring") for mask in (None, Causal()))  # dealt apart, masks alike
    one, other = rows.cross(even), rows.cross(causal)
    uses = {
        "mask": lambda: rows.cross(Causal()),
        "grid": lambda: rows.cross(distributed.plan(None, 31, layout="ulysses")),
        "dealt": lambda: distributed.attention(
            rows.shard(torch.zeros(1, 1, 13, 4)), *[torch.zeros(1, 1, 4, 4)] * 2, plan=[one, other][rank]
        ),
        "disagree": lambda: rows.cross(keys, Window(3, rank)),
        "fit": lambda: rows.cross(keys, Documents([0] * 13, [0] * 5)),
        "keys": lambda: distributed.attention(rows.shard(torch.zeros(1, 1, 13, 4)), short, short, plan=crossed),
        "argument": lambda: distributed.attention(short, short, short, plan=rows, mask=Causal()),
        "shard": lambda: distributed.shard({"input_ids": torch.zeros(1, 13)}, crossed),
        "cache": lambda: distributed.ShardedCache(short, short, plan=crossed),
    }
    return uses[use]()


def sink_gradient(rank, upstream):
    """This rank's share of a sink's gradient, of 13 rows, the first two of which see no key."""
    given, sink = Case(13).tensors(), torch.ones(6, dtype=torch.float64, requires_grad=True)
    mask, tensors = Causal().at(-2), [given[name] for name in ("query", "key", "value")]
    cotangent = given["d_out"].clone()
    cotangent[:, :, :2] = upstream
    if rank is None:
        saccade.attention(*tensors, mask, sink=sink).backward(cotangent)
    else:
        plan = distributed.plan(mask, 13, layout="ring")
        shards = [plan.shard(x) for x in tensors]
        distributed.attention(*shards, plan=plan, sink=sink).backward(plan.shard(cotangent))
    return sink.grad


def unequal_shards(rank, size):
    """Rank 1 gives up another width than the others, in the group of all processes but the first."""
    group = dist.new_group(range(1, size))
    if rank == 0:
        return None
    plan = distributed.plan(None, 97, group)
    return plan.unshard(torch.ones(1, 1, plan.held(plan.rank), 4 + (rank == 1)))


def silent(rank):
    """Rank 1 makes a plan with the others, but no call."""
    plan, given = distributed.plan(None, 97), Case(97).tensors()
    return (
        None if rank else distributed.attention(*(plan.shard(given[x]) for x in ("query", "key", "value")), plan=plan)
    )


def measure(rank, case: Case, chosen, **options):
    """Statistics and chosen weights of the whole sequence, on this rank; `case` with or without shards."""
    given, learned = case.tensors(), {name: x.detach() for name, x in case.parameters().items()}
    tensors = [given[name] for name in ("query", "key", "value")]
    plan, of_keys = (None, None) if rank is None else case.planned()
    tensors = tensors if plan is None else case.shards(tensors, plan, of_keys)
    scoring = {"bias": case.bias_of(learned.get("bias")), "sink": learned.get("sink"), **case.options}
    where, room = ({"mask": case.mask}, saccade) if plan is None else ({"plan": plan}, distributed)
    numbers = room.statistics(*tensors[:2], value=tensors[2], **where, **scoring, **options)
    return numbers, room.attention_weights(*tensors[:2], **where, **scoring, **chosen)


def generate(rank, case: Case, steps, block):
    """Outputs of a prompt of `case.length` tokens and `steps` after it, (new tokens, how many of them are taken back).

    Args:
        rank: None decodes in one process, with a cache of the layer's own.
    """
    new = sum(count for count, _ in steps)
    whole = Case(**{**case.__dict__, "length": case.length + new})
    given, learned = whole.tensors(), {name: x.detach() for name, x in whole.parameters().items()}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    prompt = [x[:, :, : case.length] for x in (key, value)]
    bias, sink, outputs, done = whole.bias_of(learned.get("bias")), learned.get("sink"), [], case.length
    if rank is None:
        cache = saccade.nn.GrowingLayer()
        cache.append(*prompt, None)
    else:
        plan = distributed.plan(Causal(), case.length, layout=case.layout)
        cache = distributed.ShardedCache(*(plan.shard(x) for x in prompt), plan=plan, block=block)
    for count, back in steps:
        step = [x[:, :, done : done + count] for x in (query, key, value)]
        if rank is None:
            key_held, value_held, mask, fitted = cache.append(*step[1:], case.mask, bias)
            options = {"bias": fitted, "sink": sink, **case.options}
            outputs.append(saccade.attention(step[0], key_held, value_held, mask, **options))
        else:
            outputs.append(distributed.decode(*step, case.mask, cache=cache, bias=bias, sink=sink, **case.options))
        cache.rollback(back)
        done += count - back
    return outputs, getattr(cache, "held", None)


def messages_of(rank, case: Case):
    """Bytes that this rank receives in a forward and in a backward pass, bytes of messages that are held at most at a
    time, and bytes that autograd keeps beside the shards and out; and what is predicted of them."""
    counts, alive, most, batched = [0], [], 0, dist.batch_isend_irecv

    def counting(operations):
        nonlocal most
        for one in operations:
            if one.tag:  # agreements, which are not predicted
                continue
            counts[-1] += one.tensor.nbytes if one.op is dist.irecv else 0
            alive.append((weakref.ref(one.tensor), one.tensor.nbytes))
        alive[:] = [(tensor, size) for tensor, size in alive if tensor() is not None]
        most = max(most, sum(size for _, size in alive))
        return batched(operations)

    plan, given = distributed.plan(case.mask, case.length, layout=case.layout), case.tensors()
    shards = [plan.shard(given[name]).requires_grad_() for name in ("query", "key", "value")]
    saved, outside = {}, {x.untyped_storage().data_ptr() for x in shards}
    dist.batch_isend_irecv = counting
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.setdefault(x.data_ptr(), x), lambda x: x):
            out, lse = distributed.attention_with_lse(*shards, plan=plan, **case.options)
        counts.append(0)
        (out.sum() + lse.sum()).backward()
    finally:
        dist.batch_isend_irecv = batched
    outside |= {x.untyped_storage().data_ptr() for x in (out, lse)}
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved.values()}
    kept = sum(size for place, size in kept.items() if place not in outside)
    (queries, keys), (width, value) = case.heads, case.widths
    sizes = distributed.CallSizes(queries, keys, width, value, case.batch, case.dtype)
    cost = predicted(plan._table, sizes, RankSpeed(1.0, 1.0, 1.0, 0.0), [(plan.layout, plan.grid)])[0]
    said = {
        "received": (cost.received.forward[rank], cost.received.backward[rank]),
        "in flight": cost.in_flight[rank],
        "kept": cost.kept[rank],
    }
    return {"received": tuple(counts), "in flight": most, "kept": kept}, said


def chosen_by(rank, speed, sizes):
    """The layout of `plan` and what it says of itself, by a speed that counts as measured."""
    measured = _speed._MEASURED.setdefault(dist.group.WORLD, {})
    before, kind = dict(measured), (*(sizes or distributed.CallSizes()).widths, torch.float32)
    measured[kind] = speed
    try:
        plan = distributed.plan(Causal(), 4096, sizes=sizes)
    finally:
        measured.clear()
        measured.update(before)
    return plan.layout, plan.explain()


def measured_twice(rank):
    """Two speeds of the group, and whether the generator of random numbers stands where it stood."""
    torch.manual_seed(3)
    speeds = [str(_speed.speed_of(None, distributed.CallSizes(width=32))) for _ in range(2)]
    drawn = torch.rand(1)
    torch.manual_seed(3)
    return *speeds, bool(torch.rand(1) == drawn)


def train(rank, told, fault=None, steps=10_000):
    """A training loop; `told` gets a file when two steps are done. At step 3 `fault`, (rank, name), happens.

    Gradients are added by the program's own calls of torch.distributed, as those of a model are.
    """
    weight = torch.eye(5, dtype=torch.float64, requires_grad=True)
    plan = distributed.plan(Causal(), 211)
    query, key, value = torch.randn(3, 1, 2, 211, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for step in range(steps):
        if step == 3 and fault == (rank, "raises"):
            raise ValueError("a batch of rank one is wrong")
        if step == 3 and fault == (rank, "leaves"):
            os._exit(0)
        if step == 3 and fault == (rank, "is elsewhere"):
            distributed.plan(Causal(), 97)
        shards = [plan.shard(x) @ weight for x in (query, key, value)]
        out = distributed.attention(*shards, plan=plan)
        out.square().sum().backward()
        dist.all_reduce(weight.grad)
        with torch.no_grad():
            weight -= 1e-3 * weight.grad
        weight.grad = None
        if step == 2:
            (told / str(rank)).touch()
    return weight.detach()


def pytorch_script(rank):
    """PyTorch's script of context parallelism with a causal mask: its error, and the same call with a plan instead."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    draw = torch.Generator().manual_seed(7)
    tensors = [torch.randn(1, 2, 128, 8, generator=draw, dtype=torch.float64) for _ in range(3)]
    buffers, problem = [x.clone() for x in tensors], None
    try:
        with context_parallel(
            init_device_mesh("cpu", (2,)), buffers=buffers, buffer_seq_dims=[2] * 3, no_restore_buffers=set(buffers)
        ):
            torch.nn.functional.scaled_dot_product_attention(*buffers, is_causal=True)
    except NotImplementedError as error:
        problem = str(error)
    plan, leaves = distributed.plan(Causal(), 128), [x.requires_grad_() for x in tensors]
    out = distributed.attention(*(plan.shard(x) for x in leaves), plan=plan)
    out.square().sum().backward()
    return problem, plan.unshard(out.detach()), [x.grad for x in leaves], [x.detach() for x in leaves]
