"""The compiled module: which instruction set runs, and who decides it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from looped import looped

native = pytest.importorskip("saccade._native", reason="this installation has no native build")

ORDER = ["baseline", "avx2", "avx512", "avx512_bf16", "neon", "neon_bf16"]
COMPILED, SUPPORTED = native.compiled_sets(), native.sets()


@pytest.fixture(autouse=True)
def chosen_before() -> Iterator[None]:
    name = native.active()
    yield
    native.use(name if name in SUPPORTED else f"{name}!")


def in_a_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**{k: v for k, v in os.environ.items() if k != "SACCADE_INSTRUCTIONS"}, **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_sets_are_compiled_lowest_first_and_supported_ones_are_among_them():
    assert COMPILED[0] == SUPPORTED[0] == "baseline"
    assert [name for name in ORDER if name in COMPILED] == COMPILED
    assert [name for name in COMPILED if name in SUPPORTED] == SUPPORTED


def test_the_processor_is_asked_for_what_the_system_reports():
    report = Path("/proc/cpuinfo")
    lines = report.read_text().splitlines() if report.exists() else []
    begin = "Features" if platform.machine() == "aarch64" else "flags"
    flags = set(next((line for line in lines if line.startswith(begin)), "").split())
    if not flags:
        pytest.skip(f"this system has no /proc/cpuinfo with {begin}")
    needed = {"avx2": {"avx2", "fma", "f16c"}}
    needed["avx512"] = needed["avx2"] | {"avx512f", "avx512dq", "avx512bw", "avx512vl"}
    needed["avx512_bf16"] = needed["avx512"] | {"avx512_bf16"}
    needed["neon_bf16"] = {"bf16"}
    assert [name for name in COMPILED if needed.get(name, set()) <= flags] == SUPPORTED


@looped("name", SUPPORTED)
def test_a_supported_set_can_be_chosen_and_computes(name):
    native.use(name)
    assert native.active() == name
    x = torch.linspace(-20, 20, 37)
    y = torch.empty_like(x)
    native.exp2(x.data_ptr(), y.data_ptr(), x.numel())
    torch.testing.assert_close(y.double(), torch.exp2(x.double()), rtol=3e-7, atol=0)
    native.use(f"{name}!")  # forcing what is there anyway changes nothing
    assert native.active() == name


def paying() -> str:
    """The highest set that is supported and pays: Intel's bf16 products are slower than its float32 ones, see
    dispatch.cpp."""
    cpuinfo = Path("/proc/cpuinfo")
    intel = cpuinfo.exists() and "GenuineIntel" in cpuinfo.read_text()
    return [name for name in SUPPORTED if not (intel and name == "avx512_bf16")][-1]


def test_auto_is_the_highest_supported_set_that_pays():
    native.use("baseline")
    native.use("auto")
    assert native.active() == paying()


@looped("name", ["sse9", "", "!", "AVX2", "auto!"])
def test_an_unknown_set_is_refused_by_name_and_the_choice_stays(name):
    before = native.active()
    with pytest.raises(
        ValueError, match=r"use\(\) names the instruction set '.*', which is not in this build: expected "
    ):
        native.use(name)
    assert native.active() == before


@pytest.mark.skipif(COMPILED == SUPPORTED, reason="the processor has every set that is compiled")
def test_a_set_that_is_not_reported_is_refused_and_the_way_to_force_it_named():
    name = COMPILED[-1]
    with pytest.raises(ValueError, match=f"'{name}', which (this processor does not report|needs registers)"):
        native.use(name)
    with pytest.raises(ValueError, match=f"this processor has {', '.join(SUPPORTED)}"):
        native.use(name)


ASK = "import saccade, saccade._native as native; print(native.active())"


@pytest.mark.parametrize("name", ["baseline", ""])
def test_the_environment_chooses_at_first_use(name):
    answer = in_a_new_process(ASK, SACCADE_INSTRUCTIONS=name)
    assert answer.stdout.strip() == (name if name in SUPPORTED else paying()), answer.stderr


@pytest.mark.slow
def test_a_first_call_in_inference_mode_is_the_kernels():
    code = """
import torch, saccade
with torch.inference_mode():
    made = torch.ones(1, 1, 5, 8)
plain = torch.ones(1, 1, 5, 8)
with torch.inference_mode():
    print(*(saccade.explain(x, x, x).backend for x in (plain, made)))
"""
    assert in_a_new_process(code).stdout == "native native\n"


@pytest.mark.slow
def test_a_wrong_environment_is_an_error_at_first_use_and_not_at_import():
    code = """
import torch, saccade, saccade._native as native
x = torch.ones(1, 1, 3, 8)
for use in (native.active, lambda: saccade.attention(x, x, x, backend="native")):
    try:
        use()
    except ValueError as error:
        print(error)
native.use("baseline")
print(native.active())
"""
    answer = in_a_new_process(code, SACCADE_INSTRUCTIONS="avx3")
    *refused, after = answer.stdout.splitlines()
    assert len(refused) == 2 and after == "baseline", answer.stderr
    for line in refused:
        assert "SACCADE_INSTRUCTIONS names the instruction set 'avx3', which is not in this build" in line
