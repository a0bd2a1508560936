"""No number of Lq x Lk is ever held: neither in one tensor nor, on the way, in all of them together."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import problems
import saccade
from problems import NATIVE
from recording import Largest


def draw(length, heads=1):
    return problems.tensors(1, heads, 1, length, length, 4, 3, dtype=torch.float32)


def observed(length, mask=None, **more):
    named = draw(length)
    groups = {"even": torch.arange(length) % 2 == 0}
    return saccade.statistics(named["query"], named["key"], mask, value=named["value"], groups=groups, top=5, **more)


MASKS = {
    "none": lambda length: None,
    "causal": lambda length: saccade.Causal(),
    "padding": lambda length: saccade.Causal() & saccade.Padding([length - 3], queries=[length - 3]),
    "documents": lambda length: saccade.Documents(torch.arange(length) // 97),
}


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_no_tensor_of_lq_times_lk(mask):
    length = 2048
    with Largest() as largest:
        observed(length, MASKS[mask](length), backend="chunked", histograms=True)
    assert largest.numel < length * length // 4


def test_the_largest_tensor_does_not_grow_with_the_square():
    sizes = []
    for length in (1024, 2048):
        with Largest() as largest:
            observed(length, saccade.Causal(), backend="chunked")
        sizes.append(largest.numel)
    assert sizes[0] > 256 * 256 and sizes[1] <= 2 * sizes[0], sizes


def test_a_large_batch_is_taken_in_turn():
    named = problems.tensors(64, 2, 1, 256, 256, 4, 3, dtype=torch.float32)
    with Largest() as largest:
        saccade.statistics(named["query"], named["key"], backend="chunked")
    assert largest.numel < 64 * 2 * 256 * 256


PEAK = """
import resource, sys, torch, saccade
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def run(length):
    query = torch.randn(1, 2, length, 16)
    saccade.statistics(query, query, saccade.Window(300, 0), value=query, top=3, backend=sys.argv[1])
torch.set_num_threads(1)
run(512)
for length in (2048, 4096):
    before = peak()
    run(length)
    print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["chunked", NATIVE])
def test_the_peak_of_the_process_grows_with_length(backend):
    done = subprocess.run([sys.executable, "-c", PEAK, backend], capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    # 2 heads of 4096 rows of some 40 numbers of 8 bytes, thrice over for what is joined, and some 20 tiles of both
    # heads at once; the matrices of one number are 128 MiB
    assert first + second < 3 * 2 * 4096 * 40 * 8 + 20 * 2 * 256 * 256 * 8, (first, second)
