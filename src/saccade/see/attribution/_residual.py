"""The residual stream of a recorded row as steps: embedding, blocks, and the maps to a head's query or key.

Shape legend: L tokens, E model width, Hq / Hkv query and key-value heads, D key width, Dv value width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...operator.nn.attention import MultiHeadAttention
from ...operator.nn.blocks import EncoderBlock
from ...operator.positions import Rotary
from ._record import Recorded, ResidualModel
from ._steps import (
    POSITION,
    TOKEN,
    TYPE,
    Component,
    Matrix,
    Step,
    Writes,
    applied,
    bias_step,
    exact,
    matrix_step,
    norm_steps,
)


def stream_steps(model: ResidualModel, record: Recorded, at: int, layers: int) -> list[Step]:
    """The stream of the recorded row `at` before block `layers`."""
    steps = _embedding_steps(model, record, at)
    for layer, block in enumerate(model.blocks[:layers]):
        steps += _block_steps(block, layer, record, at)
    return steps


def _embedding_steps(model: ResidualModel, record: Recorded, at: int) -> list[Step]:
    """The input of the first block."""
    embedding = model.embedding
    summed = record.read[model.blocks[0] if embedding.norm is None else embedding.norm][at]
    parts: dict[Component, Tensor] = {}
    if embedding.places is not None:
        placed = record.gave[embedding.places][at]
        table = isinstance(embedding.places, nn.Embedding)
        parts[POSITION] = placed if table else placed - record.read[embedding.places][at]
    if embedding.kind is not None:
        parts[TYPE] = exact(embedding.kind)
    # The remainder belongs to the token embedding, however the model scales or masks it.
    parts = {TOKEN: summed - sum(parts.values(), torch.zeros_like(summed)), **parts}
    steps: list[Step] = [Writes(tuple(parts), torch.stack(list(parts.values())))]
    steps += [] if embedding.norm is None else norm_steps(embedding.norm, summed)
    project = embedding.project
    return steps if project is None else [*steps, matrix_step(project.weight, project.bias)]


def _block_steps(block: EncoderBlock, layer: int, record: Recorded, at: int) -> list[Step]:
    """The steps of a block."""
    attention, after = block.attention, block.config.placement == "post"
    steps: list[Step] = [
        _head_writes(attention, layer, record.read[attention.output][at]),
        *bias_step(attention.output.bias),
        *(norm_steps(block.attention_norm, record.read[block.attention_norm][at]) if after else []),
    ]
    if block.feed_forward is None:
        return steps
    steps.append(Writes((Component("feed_forward", layer),), record.gave[block.feed_forward][at][None]))
    return steps + (norm_steps(block.feed_forward_norm, record.read[block.feed_forward_norm][at]) if after else [])


def _head_matrices(attention: MultiHeadAttention) -> Tensor:
    """(E, Hq, Dv): the columns of the output projection for each head."""
    return exact(attention.output.weight).unflatten(1, (-1, attention.shape.value_head))


def _head_writes(attention: MultiHeadAttention, layer: int, read: Tensor) -> Writes:
    """The output of each head; `read` (Hq Dv) is the input of the output projection."""
    matrices = _head_matrices(attention)
    vectors = torch.einsum("ehd,hd->he", matrices, read.view(matrices.shape[1:]))
    return Writes(tuple(Component("head", layer, head) for head in range(len(vectors))), vectors)


def source_shares(attention: MultiHeadAttention, layer: int, record: Recorded, readout: Tensor) -> Tensor:
    """Contributions (Hq, L) of each head to a readout (1, E) of its output, split over the tokens it reads.

    For the first recorded row, whose sources were kept.
    """
    sources = record.sources[layer]
    wanted = torch.einsum("e,ehd->hd", readout[0], _head_matrices(attention))
    if attention.gate is not None:
        wanted = wanted * record.gave[attention.gate][0].sigmoid().view_as(wanted)
    grouped = wanted.unflatten(0, (len(sources.values), -1))  # (Hkv, heads of the group, Dv)
    return torch.einsum("gld,gnd->gnl", exact(sources.values), grouped).flatten(0, 1) * sources.weights


def read_steps(model: ResidualModel, head: tuple[int, int], record: Recorded, at: int, *, key: bool) -> list[Step]:
    """Steps from the stream before a block to a head's query or key (D,), as it enters the product with the other."""
    layer, number = head
    block = model.blocks[layer]
    attention, before = block.attention, block.config.placement != "post"
    shape = attention.shape
    number = number // (shape.query_heads // shape.key_heads) if key else number
    weight, bias = attention.matrices()[int(key)]
    rows = slice(number * shape.head, (number + 1) * shape.head)
    made = matrix_step(weight[rows], None if bias is None else bias[rows])
    return [
        *(norm_steps(block.attention_norm, record.read[block.attention_norm][at]) if before else []),
        made,
        *norm_steps(attention.key_norm if key else attention.query_norm, applied([made], record.read[attention][at])),
        *_turned(model.stack.positions_of(layer), record.rows[at]),
    ]


def _turned(positions: nn.Module | None, place: int) -> list[Step]:
    """Rotary positions of the token at `place` as a matrix; [] for positions that are a bias, or none."""
    if not isinstance(positions, Rotary):
        return []
    device = next((buffer.device for buffer in positions.buffers()), torch.device("cpu"))
    units = torch.eye(positions.width, dtype=torch.float64, device=device)
    return [Matrix(exact(positions(units[:, None, None], place)[:, 0, 0]).T)]
