"""What `saccade doctor` reports: versions, kernels, threads, devices, extras, and what of it does not work."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

from .. import __version__
from ..support._extras import installing
from ..support._machine import processor
from ..support._shared_cores import WAITING

VARIABLES = ("SACCADE_INSTRUCTIONS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", *WAITING, "CUDA_VISIBLE_DEVICES")
EMBEDDED_MODEL = ("config.json", "heads.json", "model.safetensors", "tokenizer.json")
LARGEST_ERROR = 1e-5  # in float32, of outputs of about 1; a kernel that computes something else is off by far more
_FOLDER = Path(__file__).parents[1]
_FOR_DEVELOPERS = {"all", "docs", "test"}  # "all" repeats the others
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?(?:>=([\d.]+))?")


def describe() -> dict[str, Any]:
    """The installation, as JSON takes it. `broken` has one line for each thing that does not work."""
    requirements = _requirements()
    needed = [] if requirements is None else lacking("", requirements)
    missing_files = [name for name in EMBEDDED_MODEL if not (_FOLDER / "make" / "models" / "embedded" / name).is_file()]
    broken = [f"{requirement} is needed" for requirement in needed]
    if missing_files:
        broken.append(f"the embedded model lacks {', '.join(missing_files)}")
    report = {
        "saccade": __version__,
        "folder": str(_FOLDER),
        "python": platform.python_version(),
        "system": _system(),
        "processor": processor(),
        "processors": os.cpu_count(),
        "packages": _packages(requirements),
        **_computing(broken),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "embedded_model": not missing_files,
        "extras": None if requirements is None else _extras(requirements),
    }
    return report | {"broken": broken}


def _system() -> str:
    library = " ".join(platform.libc_ver()).strip()
    return " ".join(filter(None, (platform.system(), platform.release(), platform.machine(), library)))


# --- packages -----------------------------------------------------------------------------------------------------


def _requirements() -> dict[str, list[str]] | None:
    """The requirements of each extra, those of Saccade itself under ""; None if Saccade is not installed."""
    try:
        lines = importlib.metadata.requires("saccade") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found: dict[str, list[str]] = {"": []}
    for line in lines:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"""extra == ["']([\w-]+)["']""", marker)
        found.setdefault(extra[1] if extra else "", []).append(requirement.strip())
    return found


def lacking(extra: str, requirements: dict[str, list[str]]) -> list[str]:
    """The requirements of an extra that are not met, with the version that is there instead."""
    found: dict[str, None] = {}  # in order, each once
    for requirement in requirements.get(extra, []):
        name, extras, least = _parsed(requirement)
        version = _version(name)
        if name == "saccade":
            found |= dict.fromkeys(line for other in extras for line in lacking(other, requirements))
        elif version is None:
            found[requirement] = None
        elif least is not None and _release(version) < _release(least):
            found[f"{requirement} (found {version})"] = None
    return list(found)


def _parsed(requirement: str) -> tuple[str, list[str], str | None]:
    """Name, extras and least version of `saccade[hf,plot]` or `torch>=2.10`, the only forms in pyproject.toml."""
    match = _REQUIREMENT.fullmatch(requirement)
    assert match, requirement
    name, extras, least = match.groups()
    return name, extras.split(",") if extras else [], least


def _release(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cpu or 2.13.0rc1."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages(requirements: dict[str, list[str]] | None) -> dict[str, str | None]:
    """Versions of what Saccade needs, and of whatever else is there of its extras."""
    if requirements is None:
        return {name: _version(name) for name in ("torch", "numpy")}
    needed = {_parsed(line)[0] for line in requirements[""]}
    optional = {_parsed(line)[0] for extra in requirements.keys() - _FOR_DEVELOPERS for line in requirements[extra]}
    versions = {name: _version(name) for name in sorted(needed) + sorted(optional - needed - {"saccade"})}
    return {name: version for name, version in versions.items() if version is not None or name in needed}


def _extras(requirements: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    missing = {extra: lacking(extra, requirements) for extra in requirements.keys() - _FOR_DEVELOPERS - {""}}
    return {
        extra: {"missing": lines, "command": installing(extra) if lines else None}
        for extra, lines in sorted(missing.items())
    }


# --- what computes ------------------------------------------------------------------------------------------------


def _computing(broken: list[str]) -> dict[str, Any]:
    """Kernels, threads and devices, which only PyTorch knows."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of PyTorch's that cannot be loaded
        broken.append(f"PyTorch cannot be imported: {error}")
        return {"kernels": None, "threads": None, "devices": None}
    return {"kernels": _kernels(broken), "threads": torch.get_num_threads(), "devices": _devices()}


def _kernels(broken: list[str]) -> dict[str, Any]:
    """The native kernels: which instruction sets there are, which one runs, and how far its result is off."""
    from ..operator._backends.native import _kernels as native

    found: dict[str, Any] = {
        "present": native.module is not None,
        "why_not": native.missing,
        "in_use": None,
        "available": [],
    }
    found |= {"compiled": [], "error": None}
    if native.module is None:
        if native.missing is not None and "broken" in native.missing:
            broken.append(native.missing)
        return found
    found |= {"compiled": list(native.module.compiled_sets()), "available": list(native.module.sets())}
    try:
        found |= {"in_use": native.module.active(), "error": self_check()}
    except (ValueError, RuntimeError) as error:  # such as a name in SACCADE_INSTRUCTIONS that this build has not
        broken.append(f"the native kernels cannot compute: {error}")
        return found
    if not found["error"] <= LARGEST_ERROR:
        broken.append(f"the native kernels differ from the reference by {found['error']:.1e}: please report it")
    return found


def self_check() -> float:
    """The largest difference between the native kernels in float32 and the reference in float64, of one small call."""
    import torch

    from .. import Causal, attention

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, length, 16, generator=generator) for length in (53, 61, 61))
    out = attention(query, key, value, Causal(), backend="native")
    expected = attention(query.double(), key.double(), value.double(), Causal(), backend="reference")
    return float((out - expected).abs().max())


def _devices() -> list[str]:
    """Accelerators that PyTorch can use."""
    import torch

    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    device = torch.accelerator.current_accelerator(check_available=True)
    return [] if device is None else [device.type]
