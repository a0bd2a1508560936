"""Packed documents that attend to each other."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from stacks.reports.case import Case, Proof, across
from stacks.reports.model import Call, Model, Unpacked, packed
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


class OwnTriangle(Model):
    """Without a mask of padding the sdpa path takes its own triangle, which knows no documents."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        if call.mask is None:
            return scaled_dot_product_attention(query, key, value, is_causal=True)
        return super().attend(query, key, value, visible, call)


class Dropped(Model):
    """The wrapper passes on what it knows: position_ids are not among it."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Tensor:
        return super().forward(input_ids, attention_mask)


class Ones(Model):
    """Documents are looked for only where no mask is given; a mask of ones is one."""

    def documents(self, call: Call) -> Tensor:
        return super().documents(call) if call.mask is None else torch.tensor(True)


class LateSeam(Model):
    """Each document begins one token late: its first token belongs to the document before it."""

    def documents(self, call: Call) -> Tensor:
        owner = pad(self.positions(call).diff() <= 0, (2, 0))[:, :-1].cumsum(-1)
        return (owner[:, :, None] == owner[:, None])[:, None]


class TwoDocuments(Model):
    """Only the first seam is a seam: owners are booleans, so all documents after it are one."""

    def documents(self, call: Call) -> Tensor:
        owner = pad(self.positions(call).diff() <= 0, (1, 0)).cumsum(-1) > 0
        return (owner[:, :, None] == owner[:, None])[:, None]


def tiny_llama(*, use_cache: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 31, "num_hidden_layers": 1, "num_attention_heads": 3}
    config = LlamaConfig(vocab_size=53, max_position_embeddings=61, initializer_range=0.3, use_cache=use_cache, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return LlamaForCausalLM(config).eval()


SEEN = ("attends to document",)
PACKED = Proof(across(3, 2), path="pack")


def case(report: str, fault: str, faulty: Any, right: Any, proof: Proof = PACKED, tokens: int = 2) -> Case:
    return Case(report, "packing", fault, ("packing",), SEEN, tokens, faulty, right, proof)


def stack(model: type[Model], **how: Any) -> dict[str, Any]:
    return {"model": model(), "pack": partial(packed, **how)}


def right() -> dict[str, Any]:
    return stack(Model)


CASES = (
    case("alex-hh/profam#495", "the sdpa path takes a triangle and no documents", lambda: stack(OwnTriangle), right),
    case(
        "huggingface/nanoVLM#204",
        "the pack is one row of ids: positions count on, documents see each other",
        lambda: stack(Model, positions=False),
        right,
        Proof(across(3, 2), positions={0: [0, 1, 2, 3, 4]}, path="pack"),
    ),
    case(
        "huggingface/trl#6843",
        "the model drops position_ids, by which the collator tells documents apart",
        lambda: stack(Dropped),
        right,
        Proof(across(3, 2), positions={0: [0, 1, 2, 3, 4]}, path="pack"),
    ),
    case(
        "huggingface/transformers#46634",
        "an attention_mask of ones hides the seams that position_ids show",
        lambda: {"model": tiny_llama(use_cache=False), "pack": partial(packed, mask="ones")},
        lambda: {"model": tiny_llama(use_cache=False), "pack": packed},
    ),
    case(
        "DeepOpt-com/WrinkleFree-Monorepo#53",
        "positions restart, and no mask tells documents apart",
        lambda: stack(Unpacked),
        right,
    ),
    case("planted", "a mask of ones switches documents off", lambda: stack(Ones, mask="ones"), right),
    case(
        "planted",
        "the first token of a document belongs to the one before",
        lambda: stack(LateSeam),
        right,
        Proof(frozenset({(0, 3, 0), (0, 3, 1), (0, 3, 2), (0, 4, 3)}), path="pack"),
    ),
    case(
        "planted",
        "all documents after the first are one",
        lambda: stack(TwoDocuments),
        right,
        Proof(
            frozenset({(0, 4, 2), (0, 4, 3), (0, 5, 2), (0, 5, 3)}),
            documents=[[7, 11], [13, 17], [19, 23]],
            path="pack",
        ),
        tokens=3,
    ),
)
