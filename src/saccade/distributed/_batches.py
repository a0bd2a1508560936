"""This rank's rows of a batch: inputs, positions and the labels of next tokens.

Shape legend: B batch, L rows of the whole sequence, n rows of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..operator._masks import Documents
from ._blocks import survey
from ._plan import SequencePlan, check_plan

ROWS = {  # their axis
    "input_ids": 1,
    "inputs_embeds": 1,
    "token_type_ids": 1,
    "position_ids": -1,
    "labels": 1,
    "attention_mask": 1,
}
_MORE = ", ".join(name for name in ROWS if not name.startswith("input"))
IGNORED = -100  # label of tokens that the loss leaves out


def shard(batch: Mapping[str, Tensor], plan: SequencePlan, *, shift_labels: bool = True) -> dict[str, Any]:
    """This rank's rows of a language model's batch, as `context_parallel` needs them. Every rank has the whole batch.

    Args:
        batch: `input_ids` (B, L) or `inputs_embeds` (B, L, D); perhaps `labels` (B, L), -100 where the loss ignores
            them, such as at padding, as transformers takes them; `position_ids` (B, L), which default to 0 ... L - 1,
            also where the plan has padding on the left; `token_type_ids` (B, L); `attention_mask` (B, L) of ones.
        shift_labels: whether a row's loss is of the next token's label, as in decoders. False: of its own label, as in
            masked language models and token classification.

    Returns:
        The inputs and `position_ids` with this rank's rows. With labels also `num_items_in_batch`, the number of tokens
        with a label on all ranks, by which the loss divides, so that the ranks' losses add up to the mean; and
        `labels` (B, n). If shifted, these are all -100, and `shift_labels` (B, n) are the next tokens: a loss must read
        them. Those of transformers and Saccade do; a loss of your own is the sum by `num_items_in_batch`.

    Raises:
        ValueError: another key; a tensor that has not the plan's length; padding in `attention_mask`; with shifted
            labels, `position_ids` that start anew where the plan's mask lets rows see earlier documents.

    Example:
        >>> import torch, torch.distributed as dist, saccade
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> plan = saccade.distributed.plan(saccade.Causal(), 3)
        >>> batch = saccade.distributed.shard({"input_ids": torch.tensor([[5, 6, 7]])}, plan)
        >>> batch["position_ids"]
        tensor([[0, 1, 2]])
        >>> dist.destroy_process_group()
    """
    check_plan(plan)
    inputs = _checked_inputs(batch, plan)
    check_padding(batch.get("attention_mask"), "shard")
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(plan.length, device=inputs[0].device)[None]
    if shift_labels:  # transformers looks for documents behind causal masks only
        _check_documents(positions, plan)
    made: dict[str, Any] = {
        name: plan.shard(x, 1).contiguous() for name, x in batch.items() if name.startswith(("input", "token_type"))
    }
    made["position_ids"] = plan.shard(positions, -1).contiguous()
    if "labels" in batch and not shift_labels:
        made["labels"] = plan.shard(batch["labels"], 1).contiguous()
        made["num_items_in_batch"] = int((batch["labels"] != IGNORED).sum())
    elif "labels" in batch:
        following = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        made["shift_labels"] = plan.shard(following, 1).contiguous()  # transformers views it
        made["labels"] = torch.full_like(made["shift_labels"], IGNORED)
        made["num_items_in_batch"] = int((following != IGNORED).sum())
    return made


def _checked_inputs(batch: Mapping[str, Tensor], plan: SequencePlan) -> list[Tensor]:
    if not isinstance(batch, Mapping):
        raise TypeError(f"shard: batch must be a mapping of names to tensors, got {type(batch).__name__}")
    unknown = sorted(batch.keys() - ROWS.keys())
    inputs = [batch[name] for name in ("input_ids", "inputs_embeds") if name in batch]
    if unknown or len(inputs) != 1:
        wrong = f"unknown {', '.join(unknown)}" if unknown else f"{sorted(batch)}"
        raise ValueError(f"shard: batch has {wrong}; expected input_ids or inputs_embeds, and perhaps {_MORE}")
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"shard: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() < 2 or tensor.shape[ROWS[name]] != plan.length:
            raise ValueError(f"shard: {name} is {tuple(tensor.shape)}, expected {plan.length} on axis {ROWS[name]}")
        if tensor.shape[0] not in (len(inputs[0]), 1) and tensor.dim() == 2:
            raise ValueError(
                f"shard: {name} is {tuple(tensor.shape)}, expected {len(inputs[0])} items as in the inputs"
            )
    return inputs


def check_padding(mask: Any, where: str) -> None:
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
    pairs = survey(apart if plan.mask is None else plan.mask & apart, plan.length, plan.block).pairs
    if abs(pairs - plan._table.pairs).max() > 1e-6:  # far below one pair, averaged over items and heads
        raise ValueError(
            "shard: position_ids start anew where the plan's mask lets rows see earlier documents: plan with "
            "mask & saccade.Documents(...)"
        )
