"""Attention that misbehaves as a program. Each is right until it does what its name says.

Shape legend: B batch, H heads, L length, D width.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from saccade.verification import Reading

WIDTH, HEADS = 11, 3
READING = Reading("attention", "BHLD", WIDTH, HEADS)
MODULE_READING = Reading("self", "BLD", WIDTH, 1)


def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v


class Head(nn.Module):
    """Self-attention of a single head."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(right(*self.qkv(x).chunk(3, -1)))


def segfaults(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ctypes.string_at(0)  # reads address 0
    return right(q, k, v)


def aborts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    os.abort()


def loops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    while True:
        pass


def sleeps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    time.sleep(1000)
    return right(q, k, v)


def leaves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    os._exit(7)


def exits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sys.exit(3)


def is_greedy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.zeros(2**34)  # 64 GiB
    return right(q, k, v)


def hoards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = []
    while True:
        kept.append(bytearray(2**26))


def recurses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return recurses(q, k, v)


def wants_gpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return right(q.to("cuda:97"), k, v)


def prints(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    print("from Python", flush=True)
    os.system("echo from a shell; echo from a shell that complains >&2")
    ctypes.CDLL(None).puts(b"from C")
    ctypes.CDLL(None).fflush(None)
    return right(q, k, v)


def chatters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for _ in range(200):
        print("x" * 10_000)
    return right(q, k, v)


def warns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    warnings.warn("old-fashioned", stacklevel=1)
    return right(q, k, v)


def reads_input(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert input() is None
    return right(q, k, v)


def starts_others(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    print("started", subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    return right(q, k, v)


def starts_a_daemon(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    print("started", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
    return right(q, k, v)


@dataclass(frozen=True)
class Forks:
    """Calls itself on in two processes, and writes who called into a file."""

    file: str

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with open(self.file, "a") as calls:
            calls.write(f"{os.getpid()}\n")
        os.fork()  # both come back
        return right(q, k, v)


def floods(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    while True:
        os.write(1, b"x" * 65536)


class Unspeakable(BaseException):
    """An error beside Python's, whose message cannot be made."""

    def __str__(self) -> str:
        raise KeyError("message")


def raises_the_unspeakable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise Unspeakable


def dirties(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Changes what belongs to the whole process."""
    os.environ["DIRTY"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    sys.path.append("dirty")
    return right(q, k, v)
