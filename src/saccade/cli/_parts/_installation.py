"""The report of `saccade doctor`: versions, kernels, threads, devices, extras, and what is broken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

from ... import __version__
from ...support._extras import installing
from ...support._machine import processor
from ...support._shared_cores import WAITING

VARIABLES = ("SACCADE_INSTRUCTIONS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", *WAITING, "CUDA_VISIBLE_DEVICES")
EMBEDDED_MODEL = ("config.json", "heads.json", "model.safetensors", "tokenizer.json")
LARGEST_ERROR = 1e-5  # in float32, for outputs of about 1; a wrong kernel has much larger errors
_FOLDER = Path(__file__).parents[2]
_FOR_DEVELOPERS = {"all", "docs", "test"}  # "all" repeats the other extras
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?(?:>=([\d.]+))?")


def describe() -> dict[str, Any]:
    """Describe the installation as JSON values. `broken` has a line for each problem."""
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
    """Requirements by extra, with those of Saccade itself under ""; None if Saccade is not installed."""
    try:
        lines = importlib.metadata.requires("saccade") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    groups: dict[str, list[str]] = {"": []}
    for line in lines:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"""extra == ["']([\w-]+)["']""", marker)
        groups.setdefault(extra[1] if extra else "", []).append(requirement.strip())
    return groups


def lacking(extra: str, requirements: dict[str, list[str]]) -> list[str]:
    """Unmet requirements of an extra, with the installed version if there is one."""
    lines: dict[str, None] = {}  # as an ordered set
    for requirement in requirements.get(extra, []):
        name, extras, least = _parsed(requirement)
        version = _version(name)
        if name == "saccade":
            lines |= dict.fromkeys(line for other in extras for line in lacking(other, requirements))
        elif version is None:
            lines[requirement] = None
        elif least is not None and _release(version) < _release(least):
            lines[f"{requirement} (found {version})"] = None
    return list(lines)


def _parsed(requirement: str) -> tuple[str, list[str], str | None]:
    """Name, extras and minimum version of `saccade[hf,plot]` or `torch>=2.10`, the only forms in pyproject.toml."""
    match = _REQUIREMENT.fullmatch(requirement)
    assert match, requirement
    name, extras, least = match.groups()
    return name, extras.split(",") if extras else [], least


def _release(version: str) -> tuple[int, ...]:
    """Parse 2.13.0+cpu or 2.13.0rc1 to (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages(requirements: dict[str, list[str]] | None) -> dict[str, str | None]:
    """Versions of Saccade's requirements, and of installed packages of its extras."""
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


# --- kernels and devices -----------------------------------------------------------------------------------------


def _computing(broken: list[str]) -> dict[str, Any]:
    """Kernels, threads and devices, as reported by PyTorch."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of PyTorch cannot be loaded
        broken.append(f"PyTorch cannot be imported: {error}")
        return {"kernels": None, "threads": None, "devices": None}
    return {"kernels": _kernels(broken), "threads": torch.get_num_threads(), "devices": _devices()}


def _kernels(broken: list[str]) -> dict[str, Any]:
    """Report on the native kernels: available instruction sets, the active one, and the error of its result."""
    from ...operator._backends.native import _kernels as native

    facts: dict[str, Any] = {
        "present": native.module is not None,
        "why_not": native.missing,
        "in_use": None,
        "available": [],
    }
    facts |= {"compiled": [], "error": None}
    if native.module is None:
        if native.missing is not None and "broken" in native.missing:
            broken.append(native.missing)
        return facts
    facts |= {"compiled": list(native.module.compiled_sets()), "available": list(native.module.sets())}
    try:
        facts |= {"in_use": native.module.active(), "error": self_check()}
    except (ValueError, RuntimeError) as error:  # such as an unknown name in SACCADE_INSTRUCTIONS
        broken.append(f"the native kernels cannot compute: {error}")
        return facts
    if not facts["error"] <= LARGEST_ERROR:
        broken.append(f"the native kernels differ from the reference by {facts['error']:.1e}: please report it")
    return facts


def self_check() -> float:
    """Largest difference between the native kernels (float32) and the reference (float64) in a small call."""
    import torch

    from ... import Causal, attention

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
