"""Distances between student and teacher: of logits, of hidden states, and of attention.

Shape legend: N rows, K classes, B batch, H heads, R relation heads, L length, D width of a head, E width of a student,
F of its teacher.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ....operator._weights import attention_weights
from ....operator.nn import Observation
from ....operator.nn.attention import weights_of


def softened_divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² KL(softmax(teacher / T) || softmax(student / T)) of each row, (N, K) and (N, K) to (N,).

    The factor keeps the gradient as large as at T = 1 (Hinton et al., "Distilling the Knowledge in a Neural Network",
    2015). Impossible classes have logits of -inf in both.
    """
    of_teacher, of_student = ((logits / temperature).log_softmax(-1) for logits in (teacher, student))
    truth = of_teacher.exp()
    return temperature**2 * torch.where(truth > 0, truth * (of_teacher - of_student), 0.0).sum(-1)


def state_distance(student: Tensor, teacher: Tensor, real: Tensor | None, projected: Tensor | None) -> Tensor:
    """The distance of last hidden states, a mean over the tokens that are not padding.

    With equal widths it is 1 - cosine (Sanh et al., DistilBERT, 2019); else the mean squared difference of `projected`,
    the student's states times a learned matrix (Jiao et al., TinyBERT, 2020).

    Args:
        student, teacher: (B, L, E) and (B, L, F).
        real: (B, L) bool; None: all tokens are.
        projected: (B, L, F); None if the widths are equal.
    """
    if projected is None:
        apart = 1 - F.cosine_similarity(student, teacher, dim=-1)
    else:
        apart = (projected - teacher).square().mean(-1)
    return apart.mean() if real is None else apart[real].mean()


def relation_distance(student: Observation, teacher: Observation) -> Tensor:
    """The distance of two layers: of attention weights and of the similarity of values.

    KL(teacher || student) of the weights, and of softmax(v vᵀ / sqrt(D)), each the mean over heads and tokens (Wang et
    al., MiniLM, 2020). If both have equally many heads, these are the models' own weights. Else queries,
    keys and values of all heads are put side by side and split anew into as many heads for both (Wang et al.,
    MiniLMv2, 2021).

    Raises:
        ValueError: unequal heads, where logits are not of queries and keys alone.
    """
    heads = relation_heads(student, teacher)
    weights = [_weights(call, heads) for call in (teacher, student)]
    values = [_likeness(call, heads) for call in (teacher, student)]
    return _divergence(*weights) + _divergence(*values)


def relation_heads(student: Observation, teacher: Observation) -> int:
    """The number of heads that both are split into: that of one of them, or a divisor of both."""
    counts = student.query.shape[1], teacher.query.shape[1]
    widths = [call.query.shape[1] * tensor.shape[3] for call in (student, teacher) for tensor in (call.key, call.value)]
    known = [heads for heads in (*counts, math.gcd(*counts)) if all(width % heads == 0 for width in widths)]
    return max(known)


def _weights(call: Observation, heads: int) -> Tensor:
    """(B, R, L, L), before dropout."""
    if call.query.shape[1] == heads:
        return weights_of(call)
    named = {"bias": call.bias, "softcap": call.softcap, "sink": call.sink}
    given = [name for name, value in named.items() if value is not None]
    if given:
        raise ValueError(
            f"relations: student and teacher are compared with {heads} heads, into which attention with a {given[0]} "
            "cannot be split; give the student as many heads as the teacher has"
        )
    groups = call.query.shape[1] // call.key.shape[1]
    query, key = (_split(x, heads) for x in (call.query, call.key.repeat_interleave(groups, 1)))
    return attention_weights(query, key, call.mask)


def _likeness(call: Observation, heads: int) -> Tensor:
    """softmax(v vᵀ / sqrt(D)) (B, R, L, L) over the keys that the call sees."""
    value = _split(call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], 1), heads)
    return attention_weights(value, value, call.mask)


def _split(x: Tensor, heads: int) -> Tensor:
    """(B, H, L, D) as (B, R, L, H D / R)."""
    return x.transpose(1, 2).flatten(2).unflatten(-1, (heads, -1)).transpose(1, 2)


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL of rows (B, R, L, L), a mean over rows that see a key."""
    tiny = torch.finfo(student.dtype).tiny  # for keys that are not seen: 0 log 0 is 0
    rows = (teacher * (teacher.clamp(min=tiny).log() - student.clamp(min=tiny).log())).sum(-1)
    return rows.sum() / (teacher.sum(-1) > 0).sum()
