"""Decoders of transformers on shards: `context_parallel`, and `shard` for their batches.

A model asks transformers for a mask function and for an attention function. In the block both are ours: the mask that
the layer asks for is read for the whole sequence, and the attention goes over all ranks. Hooks check what the model is
called with, since a shard looks like a shorter sequence to everything else.

Shape legend: B batch, L rows of the whole sequence, n rows of this rank.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..interception._hooks.transformers import MaskTensor, functions_wrapped_by, masks_wrapped_by, meaning_of
from ..interception._hooks.transformers._mask_functions import MaskFrame, UnknownMaskFunction, read
from ..operator._masks import Causal, Documents, Mask, Window
from ._attention import attention
from ._blocks import survey
from ._plan import SequencePlan

# Types whose logits, loss and gradients were compared with one process, each in a small model. Others may mix tokens
# elsewhere (convolutions, states), or count positions themselves, which nothing here would notice.
TYPES = (
    "arcee cohere cohere2 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neox gpt_oss granite helium "
    "hunyuan_v1_dense llama ministral mistral mixtral nemotron olmo olmo2 olmo3 opt phi phi3 qwen2 qwen2_moe qwen3 "
    "qwen3_moe seed_oss smollm3 stablelm starcoder2"
).split()
_ROWS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "labels": 1, "attention_mask": 1}
_IGNORED = -100  # transformers' label of tokens that the loss leaves out
_EVERYTHING = Window(None, None)


@contextmanager
def context_parallel(model: nn.Module, plan: SequencePlan) -> Iterator[None]:
    """A block in which a decoder of transformers computes this rank's rows of a sequence that all ranks share.

    Self-attention of this thread's calls goes over all ranks by `saccade.distributed.attention`; everything else sees
    this rank's rows only. Each layer uses the plan's mask and its own (causal, sliding window) together. The plan's
    mask stands where `attention_mask` does otherwise: padding and documents belong into it. Give the model what
    `saccade.distributed.shard` returns. Every rank calls the model, and runs the backward pass if one does; it may be
    outside of the block. The gradients of the weights are this rank's share: add them over ranks.

    Args:
        model: a decoder of transformers, or a module that has one inside; with any `attn_implementation`. It makes no
            KV cache.
        plan: of `saccade.distributed.plan`; each rank must have rows.

    Raises:
        TypeError: `model` has no decoder of transformers, or one of a type that is not known to be right on shards;
            the message names those that are.
        ValueError: the plan leaves ranks without rows. At the model's call: `position_ids` are missing, inputs are not
            this rank's rows, or what cannot be done on shards: KV caches, cross-attention, padding in `attention_mask`,
            labels that are not shifted, gradient checkpointing, attention weights, losses of routers, rotary positions
            scaled by the sequence's length. A layer whose mask is not known is named.

    Example:
        >>> import torch, torch.distributed as dist, transformers, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> ids = torch.arange(12)[None]
        >>> plan = saccade.distributed.plan(saccade.Causal(), 12)
        >>> with saccade.distributed.context_parallel(model, plan):
        ...     loss = model(**saccade.distributed.shard({"input_ids": ids, "labels": ids}, plan)).loss
        >>> torch.allclose(loss, model(ids, labels=ids).loss, atol=1e-5)  # of two ranks: the sum of their losses
        True
        >>> dist.destroy_process_group()
    """
    empty = [rank for rank in range(plan.ranks) if plan.held(rank) == 0]
    if empty:
        raise ValueError(
            f"context_parallel: the plan leaves ranks {empty} without rows: share {plan.length} among fewer"
        )
    run = _Run(plan, {id(module): name for name, module in model.named_modules()})
    with ExitStack() as stack:
        for decoder in _decoders(model):
            before = decoder.register_forward_pre_hook(run.enter, with_kwargs=True)
            after = decoder.register_forward_hook(run.leave, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        stack.enter_context(masks_wrapped_by(run.wrap_mask))
        stack.enter_context(functions_wrapped_by(run.wrap))
        yield


def _decoders(model: nn.Module) -> list[Any]:
    """The models of transformers within a module, which must be of types that are right on shards."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        found = []
    else:
        found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    known = (
        f"known to be right on shards are the causal language models, without cross-attention, of {', '.join(TYPES)}"
    )
    if not found:
        raise TypeError(f"context_parallel: {type(model).__name__} has no decoder of transformers inside; {known}")
    for decoder in found:
        config, name = decoder.config, type(decoder).__name__
        whole = decoder.base_model is decoder or name.endswith(("ForCausalLM", "LMHeadModel"))  # other heads pool rows
        if config.model_type not in TYPES or not whole or getattr(config, "add_cross_attention", False):
            raise TypeError(f"context_parallel: {name} has type {config.model_type!r}; {known}")
    return found


class _Run:
    """One block: what its hooks and functions have in common."""

    def __init__(self, plan: SequencePlan, names: dict[int, str]) -> None:
        self.plan, self.names, self.held = plan, names, plan.held(plan.rank)
        self.thread, self.running = threading.get_ident(), set[int]()

    # --- the model's call -------------------------------------------------------------------------------------------

    def enter(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        if threading.get_ident() != self.thread:
            return None
        self.running.add(id(module))
        signature = inspect.signature(module.forward)
        given = dict(signature.bind_partial(*args, **kwargs).arguments)
        more = next((name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), "")
        given |= given.pop(more, {})
        where = f"context_parallel: {type(module).__name__}"
        self._check(given, module, where)
        if "use_cache" in signature.parameters:
            given["use_cache"] = False
        inputs = [given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None]
        if inputs and given.get("attention_mask") is None and "attention_mask" in signature.parameters:
            # With a mask transformers does not look for documents in positions, which on shards have other gaps.
            given["attention_mask"] = inputs[0].new_ones(inputs[0].shape[:2], dtype=torch.long)
        return (), given

    def leave(self, module: Any, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread:
            self.running.discard(id(module))

    def _check(self, given: dict[str, Any], module: Any, where: str) -> None:
        here = f"the {self.held} rows of plan.shard on rank {self.plan.rank}"
        if given.get("position_ids") is None:
            raise ValueError(
                f"{where}: position_ids are missing: without them a shard begins at 0; see distributed.shard"
            )
        for name, dim in _ROWS.items():
            tensor = given.get(name)
            if isinstance(tensor, Tensor) and tensor.dim() < 4 and tensor.shape[dim] != self.held:
                raise ValueError(f"{where}: {name} is {tuple(tensor.shape)}, expected {here} on axis {dim}")
        _check_padding(given.get("attention_mask"), where)
        if given.get("past_key_values") is not None or given.get("use_cache"):
            raise ValueError(
                f"{where}: KV caches are not kept on shards; call it without use_cache and past_key_values"
            )
        if given.get("encoder_hidden_states") is not None:
            raise ValueError(f"{where}: encoder_hidden_states: cross-attention is not shared among ranks")
        missing = [name for name in ("shift_labels", "num_items_in_batch") if given.get(name) is None]
        if given.get("labels") is not None and missing:
            raise ValueError(
                f"{where}: labels without {' and '.join(missing)}: the next token of a shard's row may be on another "
                "rank, and the mean is over all ranks' tokens; give what distributed.shard returns, or take the logits"
            )
        for name in ("output_attentions", "output_router_logits"):
            if given.get(name) or getattr(module.config, name, False):
                raise ValueError(f"{where}: {name}: not there on shards")
        for name, part in module.named_modules():
            if module.training and getattr(part, "gradient_checkpointing", False):
                raise ValueError(f"{where}: gradient checkpointing calls layers again outside the block")
            kind = str(getattr(part, "rope_type", ""))
            if "dynamic" in kind or "longrope" in kind:
                raise ValueError(
                    f"{where}: {name} scales by the length of the sequence ({kind}), which differs by rank"
                )

    # --- what its layers ask for ------------------------------------------------------------------------------------

    def wrap_mask(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **more: Any) -> Any:
            if not self.running:
                return function(batch_size, q_length, kv_length, *args, **more)
            length = self.plan.length
            given = more.get("mask_function")
            try:
                whole: Any = Causal() if given is None else read(given, MaskFrame(length, length, 0, 0))
            except UnknownMaskFunction:
                whole = _Unknown(getattr(given, "__qualname__", repr(given)))
            return _LayerMask(whole, (batch_size, 1, q_length, kv_length), more.get("device", "cpu"))

        return mask

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **more: Any) -> Any:
            name = self.names.get(id(module))
            if name is None or not self.running:
                return function(module, query, key, value, mask, **more)
            return self._attend(f"context_parallel: layer {name}", module, query, key, value, mask, more), None

        return attend

    def _attend(
        self, where: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, more: dict[str, Any]
    ) -> Tensor:
        """(B, n, H, D)."""
        if query.shape[2] != self.held or key.shape[2] != self.held:
            raise ValueError(
                f"{where}: {query.shape[2]} rows and {key.shape[2]} keys, expected {self.held} of both: KV caches and "
                "cross-attention are not shared among ranks"
            )
        own = mask.mask if isinstance(mask, _LayerMask) else mask
        if isinstance(own, _Unknown) or not isinstance(own, Mask | None):
            what = (
                own.name if isinstance(own, _Unknown) else f"a {type(own).__name__} {tuple(getattr(own, 'shape', ()))}"
            )
            raise ValueError(f"{where}: its mask is {what}, which is not known for the whole sequence")
        if mask is None:
            raise ValueError(f"{where}: it has asked for no mask, so that what it sees is not known")
        call = meaning_of(module, query, key, value, _EVERYTHING if own is None else own, **more)
        if call.bias is not None or more.get("cu_seq_lens_q") is not None:
            raise ValueError(f"{where}: biases and cu_seq_lens count positions of a shard")
        scoring = {name: value for name, value in call.arguments().items() if name != "mask"}
        out = attention(call.query, call.key, call.value, plan=self.plan._narrowed(own), **scoring)
        return out.transpose(1, 2).contiguous()


class _LayerMask(MaskTensor):
    """A layer's mask of the whole sequence, in the shape that the model expects for its shard. It has no entries."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ValueError(
            f"context_parallel: a layer reads its mask ({func}): it computes attention itself, of this rank's rows"
        )


class _Unknown(NamedTuple):
    """Stands for a mask that cannot be read, until the layer is known that has it."""

    name: str


def shard(batch: Mapping[str, Tensor], plan: SequencePlan) -> dict[str, Any]:
    """This rank's rows of a decoder's batch, as `context_parallel` needs them. Every rank has the whole batch.

    Args:
        batch: `input_ids` (B, L) or `inputs_embeds` (B, L, D); perhaps `labels` (B, L), -100 where the loss ignores
            them, as transformers takes them; `position_ids` (B, L), which default to 0 ... L - 1; `attention_mask`
            (B, L) of ones.

    Returns:
        The inputs and `position_ids` with this rank's rows. With labels also `shift_labels`, the next tokens, (B, n);
        `num_items_in_batch`, the number of tokens with a label on all ranks, by which the loss divides, so that the
        ranks' losses add up to the mean; and `labels`, all -100: a loss must read `shift_labels`.

    Raises:
        ValueError: another key; a tensor that has not the plan's length; padding in `attention_mask`; `position_ids`
            that start anew where the plan's mask lets rows see earlier documents.

    Example:
        >>> import torch, torch.distributed as dist, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> plan = saccade.distributed.plan(saccade.Causal(), 3)
        >>> batch = saccade.distributed.shard({"input_ids": torch.tensor([[5, 6, 7]])}, plan)
        >>> batch["position_ids"]
        tensor([[0, 1, 2]])
        >>> dist.destroy_process_group()
    """
    unknown = sorted(batch.keys() - _ROWS.keys())
    inputs = [batch[name] for name in ("input_ids", "inputs_embeds") if name in batch]
    if unknown or len(inputs) != 1:
        raise ValueError(f"shard: batch has {sorted(batch)}, expected input_ids or inputs_embeds, and of {list(_ROWS)}")
    for name, tensor in batch.items():
        if tensor.shape[_ROWS[name]] != plan.length:
            raise ValueError(f"shard: {name} is {tuple(tensor.shape)}, expected {plan.length} on axis {_ROWS[name]}")
    _check_padding(batch.get("attention_mask"), "shard")
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(plan.length, device=inputs[0].device)[None]
    _check_documents(positions, plan)
    made: dict[str, Any] = {
        name: plan.shard(x, 1).contiguous() for name, x in batch.items() if name.startswith("input")
    }
    made["position_ids"] = plan.shard(positions, -1).contiguous()
    if "labels" in batch:
        following = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=_IGNORED)
        made["shift_labels"] = plan.shard(following, 1).contiguous()  # transformers views it
        made["labels"] = torch.full_like(made["shift_labels"], _IGNORED)
        made["num_items_in_batch"] = int((following != _IGNORED).sum())
    return made


def _check_padding(mask: Any, where: str) -> None:
    if isinstance(mask, Tensor) and (mask.dim() != 2 or not bool(mask.bool().all())):
        raise ValueError(
            f"{where}: attention_mask {tuple(mask.shape)} hides keys: padding belongs into the plan's mask"
        )


def _check_documents(positions: Tensor, plan: SequencePlan) -> None:
    """Positions that start anew mean documents to transformers: the plan's mask must keep these apart, too."""
    lines = positions.reshape(-1, plan.length).cpu()
    ids = (lines.diff(prepend=lines[:, :1] - 1) != 1).cumsum(-1)
    if not bool(ids[:, -1].any()):
        return
    apart = Documents(ids)
    pairs = survey(apart if plan.mask is None else plan.mask & apart, plan.length).pairs
    if abs(pairs - plan._table.pairs).max() > 1e-6:  # far below one pair, averaged over items and heads
        raise ValueError(
            "shard: position_ids start anew where the plan's mask has no border: add saccade.Documents to it"
        )
