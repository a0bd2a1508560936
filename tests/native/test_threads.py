"""The kernels' threads: PyTorch's own team, right from several Python threads and in forked children."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import saccade
from native.forks import in_forks
from saccade import Causal

pytest.importorskip("saccade._native", reason="this installation has no native build")

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def problem(seed: int) -> tuple[torch.Tensor, ...]:
    """Small enough for PyTorch to share none of its own work among threads, which hangs in a forked child."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 6, 101, 16), (2, 3, 151, 16), (2, 3, 151, 24)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def compute(seed: int) -> list[torch.Tensor]:
    """out and the three gradients."""
    inputs = [x.requires_grad_() for x in problem(seed)]
    out = saccade.attention(*inputs, Causal(), backend="native")
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


HEADER = "import torch\nfrom native.test_threads import *\n"


def in_a_new_process(code: str, **environment: str) -> str:
    """What it prints. The code finds `compute`, `same_bits` and `problem` here."""
    command = [sys.executable, "-W", "ignore", "-c", f"import sys\nsys.path[:0] = {sys.path!r}\n{HEADER}{code}"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = compute(1)
        torch.set_num_threads(threads)
        assert same_bits(compute(1), alone)
    finally:
        torch.set_num_threads(before)


def test_several_python_threads_at_once():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        alone = [compute(seed) for seed in range(8)]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(compute, list(range(8)) * 3))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(result, alone[n % 8]) for n, result in enumerate(together))


SMALLER = "torch.set_num_threads(4); a = compute(1); torch.set_num_threads(1); print(same_bits(a, compute(1)))"

TEAM = """
torch.set_num_threads(2)
x = torch.randn(600, 600)
x @ x, x.exp().sum()
threads = len(os.listdir("/proc/self/task"))
for seed in range(5):
    compute(seed)
print(len(os.listdir("/proc/self/task")) - threads)
print({line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/" in line and "omp" in line.split("/")[-1]})
"""

FORK = """
torch.set_num_threads(2)
x = torch.randn(600, 600)
x @ x
expected = compute(1)
child = os.fork()
if child == 0:
    os._exit(0 if all(same_bits(compute(1), expected) for _ in range(3)) else 1)
import signal
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
signal.alarm(60)
print(os.waitpid(child, 0)[1], same_bits(compute(1), expected))
"""

LOADER = """
class Set(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, n):
        torch.set_num_threads(2)
        return compute(n)[0]
expected = [compute(n)[0] for n in range(4)]
loader = torch.utils.data.DataLoader(Set(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
print(same_bits(list(loader), expected))
"""

LITTLE_MEMORY = """
import resource
query, key = torch.randn(1, 1, 61, 64), torch.randn(1, 1, 1, 64).expand(1, 1, 2**25, 64)
saccade.attention(query, key[:, :, :97], key[:, :, :97], backend="native")
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**31, resource.RLIM_INFINITY))
try:
    saccade.attention(query, key, key, backend="native")
except MemoryError as error:
    print(type(error).__name__)
print(saccade.attention(query, key[:, :, :97], key[:, :, :97], backend="native").isfinite().all().item())
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    parts = {"smaller": SMALLER, "team": TEAM, "fork": FORK, "loader": LOADER, "little memory": LITTLE_MEMORY}
    # The other parts ask for no more than two threads.
    return in_forks(HEADER, parts, tmp_path_factory.mktemp("parts"), OMP_THREAD_LIMIT="2")


@pytest.mark.slow
def test_a_team_smaller_than_asked_for_does_all_the_work(ended):
    assert ended["smaller"].out == "True\n", ended["smaller"].err


@pytest.mark.slow
def test_a_team_of_one_does_all_the_work():
    assert in_a_new_process(SMALLER, OMP_THREAD_LIMIT="1") == "True\n"


@pytest.mark.slow
@needs_linux
def test_pytorch_s_team_is_used_and_no_second_runtime_is_loaded(ended):
    assert ended["team"].status == 0, ended["team"].err
    grown, runtimes = ended["team"].out.splitlines()
    assert int(grown) <= 1  # autograd's own thread for a device
    assert runtimes.count("omp") <= 1


@pytest.mark.slow
def test_a_forked_child_computes_though_its_parent_had_a_team(ended):
    """GNU libgomp waits forever there for the threads of the parent's team."""
    assert ended["fork"].out == "0 True\n", ended["fork"].err


def test_data_loader_workers(ended):
    assert ended["loader"].out == "True\n", ended["loader"].err


@needs_linux
def test_memory_that_is_not_there_is_a_memory_error(ended):
    """Keys that share their memory through a stride of 0 are packed one by one: 16 GiB, of which 2 may be had."""
    assert ended["little memory"].out == "MemoryError\nTrue\n", ended["little memory"].err
