"""Windows: dropped on a path, of width 0, one key too wide, half as wide as meant."""

from __future__ import annotations

from typing import Any

from stacks.reports.case import Case, Proof
from stacks.reports.model import Call, Model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

WINDOW = 3
DOCUMENT = [[7, 11, 13, 17, 19]]
BEYOND = frozenset((0, query, key) for query in range(5) for key in range(query - WINDOW + 1))  # keys that are too far


class Windowed(Model):
    def __init__(self, **how: Any) -> None:
        super().__init__(**{"window": WINDOW, **how})


class DroppedInTraining(Windowed):
    """In training no mask is made, and the kernel's own triangle has no window."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, call: Call) -> Tensor:
        if self.training and query.shape[2] == key.shape[2]:
            return scaled_dot_product_attention(query, key, value, is_causal=True)
        return super().attend(query, key, value, visible, call)


class DroppedWithoutMask(Windowed):
    """Without a padding mask the kernel's own triangle is taken."""

    def reach(self, call: Call, count: int) -> Tensor:
        behind = call.queries - call.keys(count)
        return behind >= 0 if call.mask is None else super().reach(call, count)


class ZeroIsAWidth(Model):
    """A window of 0, which means none, hides every key but the query's own."""

    def reach(self, call: Call, count: int) -> Tensor:
        return call.queries - call.keys(count) == 0


class OneMore(Windowed):
    """The kernel counts keys beside the query's own."""

    def reach(self, call: Call, count: int) -> Tensor:
        behind = call.queries - call.keys(count)
        return (behind >= 0) & (behind <= WINDOW)


class OneLess(Windowed):
    def reach(self, call: Call, count: int) -> Tensor:
        behind = call.queries - call.keys(count)
        return (behind >= 0) & (behind < WINDOW - 1)


class Lopsided(Model):
    """Bidirectional, and its window reaches further to the left than to the right."""

    def reach(self, call: Call, count: int) -> Tensor:
        behind = call.queries - call.keys(count)
        return (behind < 5) & (behind >= -2)


class Chunks(Windowed):
    """Blocks of the window's width see the block before them whole."""

    def reach(self, call: Call, count: int) -> Tensor:
        behind = call.queries - call.keys(count)
        return (behind >= 0) & (call.queries // WINDOW - call.keys(count) // WINDOW <= 1)


def case(report: str, fault: str, probes: tuple[str, ...], words: tuple[str, ...], **more: Any) -> Case:
    promise = {"window": WINDOW, "causal": True}
    faulty, right = more.get("faulty"), more.get("right", Windowed)
    given = {"second": more["second"]} if "second" in more else {}
    return Case(
        report,
        "window",
        fault,
        probes,
        words,
        more.get("tokens", 5),
        lambda: {
            "model": (faulty or right)(),
            **{name: make() for name, make in given.items()},
            **more.get("promise", promise),
        },
        lambda: {"model": right(), **{name: right() for name in given}, **more.get("promise", promise)},
        more["proof"],
    )


def bare(*pairs: tuple[int, int, int], documents: Any = DOCUMENT, path: str = "bare") -> Proof:
    return Proof(frozenset(pairs), documents=documents, path=path)


LONG = [[7, 11, 13, 17, 19, 23, 29]]
CASES = (
    case(
        "unslothai/unsloth#8253",
        "in training the window does not reach the sdpa path",
        ("reach", "training"),
        ("train mode",),
        faulty=DroppedInTraining,
        proof=bare(*BEYOND, path="train"),
    ),
    case(
        "unslothai/unsloth#8253",
        "a window of 0, which means none, hides every key",
        ("reach",),
        ("key",),
        faulty=ZeroIsAWidth,
        right=Model,
        promise={"causal": True},
        proof=bare(*((0, query, key) for query in range(5) for key in range(query))),
    ),
    case(
        "huggingface/transformers#39408",
        "beside the eager path, the flash path sees one key more",
        ("agreement",),
        ("gives other outputs",),
        second=OneMore,
        proof=bare((0, 3, 0), (0, 4, 1), path="second"),
    ),
    case(
        "huggingface/transformers#29623",
        "a window of n keys sees n + 1",
        ("reach",),
        ("window",),
        faulty=OneMore,
        proof=bare((0, 3, 0), (0, 4, 1)),
    ),
    case(
        "huggingface/transformers#40700",
        "a bidirectional window reaches further to one side",
        ("agreement",),
        ("gives other outputs",),
        right=lambda: Model(causal=False, window=5),
        second=lambda: Lopsided(causal=False, window=5),
        promise={"causal": False},
        proof=bare(
            (0, 3, 0), (0, 4, 0), (0, 4, 1), (0, 5, 1), (0, 5, 2), (0, 6, 2), (0, 6, 3), documents=LONG, path="second"
        ),
    ),
    case(
        "planted",
        "without attention_mask the window is dropped",
        ("reach",),
        ("window",),
        faulty=DroppedWithoutMask,
        proof=bare(*BEYOND),
    ),
    case(
        "planted",
        "the window is one key short",
        ("reach",),
        ("window",),
        faulty=OneLess,
        proof=bare((0, 2, 0), (0, 3, 1), (0, 4, 2)),
    ),
    case(
        "planted",
        "the window is one of chunks",
        ("reach",),
        ("window",),
        faulty=Chunks,
        proof=bare((0, 3, 0), (0, 4, 0), (0, 4, 1)),
    ),
)
