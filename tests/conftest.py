"""What every test stands on: poisoned uninitialised memory, fixed seeds, and property tests that never flake."""

from __future__ import annotations

import collections
import gc
import os

import hypothesis
import pytest
import torch
from torch.utils._device import _device_constructors

import looped
import slowly

# The same examples on every run; `pytest --hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=16)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=400)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config):
    gc.set_threshold(10_000)  # a look for garbage at every 700th new object takes a twentieth of all time
    # PyTorch's own forward-mode rules warn on their first use.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    # And so does what inductor imports.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is not supported in Python 3.14:FutureWarning")
    if hasattr(config, "workerinput"):
        # One of several processes: together they take as many threads as there are cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.workerinput["workercount"]))
        # And commands that they start say the same whatever the others do: they do not look at busy processors.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["is_whole"] = is_whole(node.config)


def is_whole(config):
    """Whether everything is run: no file is named, no word of a test, and not what failed before."""
    if hasattr(config, "workerinput"):
        return config.workerinput["is_whole"]
    chosen = config.option.keyword or config.getoption("lf", False) or config.getoption("failedfirst", False)
    return config.args_source is not config.ArgsSource.ARGS and not chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items, config):
    """The run of everything takes every other case of a test, and `-m slow` the rest. Each value of several parameters
    still has a case. A test that says which of its cases are slow has the others run."""
    tests = collections.defaultdict(list)
    for item in items if is_whole(config) else ():
        if hasattr(item, "callspec"):
            tests[item.path, item.originalname].append(item)
    for cases in tests.values():
        if not any(item.get_closest_marker(mark) for item in cases for mark in ("slow", "every_case")):
            for item in slowly.every_other(cases):
                item.add_marker("slow")


def pytest_collection_finish():
    # Modules and tests stay until the end: a collection of garbage, of which a benchmark begins each group with one,
    # need not look at them again.
    gc.collect()
    gc.freeze()


def _poisoned(make):
    """`make` filled with what is certain to show: NaN, the largest integer, True."""

    def make_poisoned(*args, **kwargs):
        tensor = make(*args, **kwargs)
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex():
                return tensor.fill_(float("nan"))
            return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)

    return make_poisoned


POISONED = [(torch, name) for name in ("empty", "empty_like", "empty_strided")] + [(torch.Tensor, "new_empty")]
ORIGINALS = [getattr(owner, name) for owner, name in POISONED]


@pytest.fixture(autouse=True, scope="session")
def uninitialised_memory_is_poison():
    # Patched by name and not by use_deterministic_algorithms, which would also change the kernels under test. Once: a
    # patch a test costs as much as a small test.
    with pytest.MonkeyPatch.context() as patch:
        for (owner, name), make in zip(POISONED, ORIGINALS, strict=True):
            patch.setattr(owner, name, _poisoned(make))
        yield


@pytest.fixture
def no_poison():
    """PyTorch's own functions, which alone `torch.device("meta")` knows: models of gigabytes are built on no memory."""
    with pytest.MonkeyPatch.context() as patch:
        for (owner, name), make in zip(POISONED, ORIGINALS, strict=True):
            patch.setattr(owner, name, make)
        _device_constructors.cache_clear()
        yield
    _device_constructors.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def seeding_is_cheap():
    """Without an accelerator `torch.manual_seed` keeps each seed for one that may come, with a stack trace: 1 ms."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            patch.setattr(torch, "manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)))
        yield


@pytest.fixture
def meta_device(monkeypatch):
    """`torch.device("meta")` as it is: poisoned functions are not among those it knows, and take memory."""
    for (owner, name), make in zip(POISONED, ORIGINALS, strict=True):
        monkeypatch.setattr(owner, name, make)
    torch.utils._device._device_constructors.cache_clear()
    yield
    torch.utils._device._device_constructors.cache_clear()


@pytest.fixture(autouse=True)
def seeds():
    looped.seed()


@pytest.fixture
def threads():
    """Sets the number of threads for the test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
