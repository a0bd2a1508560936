"""The configuration of a checkpoint, without entries that make transformers download code and run it.

A config.json may be from a stranger, and transformers acts on its entries: `attn_implementation: "org/name"` downloads
a kernel from the hub and runs it, and so does flash attention that is not installed.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors
import torch

from ...make.models._shortened import shortened
from ...make.models.checkpoints.reading import read_json
from ...support._seeding import seeded

_ATTENTION = ("eager", "sdpa", "flex_attention", "saccade")  # PyTorch's, and the one of `register()`
_MODULES = re.compile(r"layer|block|expert|depth")  # counts of modules
_FEW = 1000
_LABELS = 10**6  # transformers makes a name for each label while it reads the configuration
_PACKED = 16  # allowed factor: eight numbers may be packed in one, and the embedding be missing
_SMALL = 2**20
_EXPERTS = ("eager", "batched_mm", "grouped_mm")


def read_configuration(source: str, *, local: bool) -> Any:
    """The configuration in a folder or of a hub name, with attention implementations of this machine only.

    Flash attention, which computes the same, is left out: transformers then chooses `sdpa`, or `eager` if it must.

    Raises:
        ValueError: another implementation; a "/" in its name is code on the hub. Exception: from transformers.
    """
    import transformers

    if local:
        _check_counts(Path(source))
    # False: transformers must not prompt whether to run foreign code (`auto_map`).
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    there = ("eager", *transformers.AttentionInterface().valid_keys())
    known = tuple(name for name in _ATTENTION if name in there)
    for fields, key, implementation in list(_implementations(config)):
        field = key.strip("_").removesuffix("_internal")
        choices = _EXPERTS if "expert" in field else known
        foreign = next((name for name in _strings(implementation) if "/" in name), None)
        if foreign is not None:
            raise ValueError(
                f"{field} is {shortened(repr(foreign))}, code on the hub, which is not run; expected one of "
                f"{', '.join(choices)}"
            )
        if implementation is None or isinstance(implementation, dict) or implementation in choices:
            continue  # the entries of a dictionary are checked one by one
        if "expert" not in field and not str(implementation).startswith("flash_attention"):
            raise ValueError(f"{field} is {shortened(repr(implementation))}; expected one of {', '.join(known)}")
        fields[key] = None
    return config


def check_sizes(config: Any, folder: Path, make: Callable[[Any], Any]) -> None:
    """ValueError if a configuration needs far more numbers than its weights hold, before a model is made of it.

    Far more: names and shapes are only compared by transformers, which renames them, and parts may be missing. Without
    weights to compare with, the limit is this machine's memory.
    """
    counts = _stored(folder)
    numbers = sum(counts)
    try:
        # On the meta device, and without changing the caller's random state.
        with torch.device("meta"), seeded(None):
            made = make(copy.deepcopy(config))
        needed = sum(parameter.numel() for parameter in made.parameters())
    except Exception:  # transformers raises it again when it makes the model
        return
    most = _PACKED * numbers + _SMALL if counts else _memory() // 4
    if needed > most:
        has = f"its weights hold {numbers:,}" if counts else "there are no weights, nor memory for random ones"
        raise ValueError(f"it needs {needed:,} numbers, and {has}")


def _check_counts(folder: Path) -> None:
    """ValueError for counts in config.json that would take long to read one by one."""
    try:
        values = read_json(folder / "config.json")
    except (OSError, ValueError):  # transformers reports it
        return
    tensors = len(_stored(folder))
    for fields in _parts(values):
        for key, value in fields.items():
            if not isinstance(value, int):
                continue
            entry = f"{key} is {shortened(f'{value:,}')}"
            if _MODULES.search(key) and value > max(_FEW, tensors):
                raise ValueError(f"{entry}, and its weights are {tensors:,} tensors")
            if key == "num_labels" and value > _LABELS:
                raise ValueError(f"{entry}; expected at most {_LABELS:,}")


def _stored(folder: Path) -> list[int]:
    """The number of elements of each tensor in the folder's safetensors, by their headers; without damaged files."""
    counts = []
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, safetensors.SafetensorError), safetensors.safe_open(path, "pt") as file:
            counts += [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    return counts


def _memory() -> int:
    """This machine's memory in bytes; a number above any machine's if it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**50


@contextmanager
def offline() -> Iterator[None]:
    """Block requests to the hub, whatever the files of a folder name."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _implementations(config: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(dictionary, its key, its value) of each implementation that a configuration or a part of it names."""
    for fields in _parts(config):
        yield from ((fields, key, value) for key, value in fields.items() if "_implementation" in key)


def _parts(config: Any) -> Iterator[dict[str, Any]]:
    """The fields of a configuration, and of everything in it that has fields; without recursion, so at any depth."""
    waiting, visited = [config], {id(config)}
    while waiting:
        fields = _fields(waiting.pop())
        yield fields
        for value in fields.values():
            if id(value) not in visited and _fields(value):
                visited.add(id(value))
                waiting.append(value)


def _fields(part: Any) -> dict[str, Any]:
    """The fields of a configuration (read past its setters, which change nested parts), object or list; else none."""
    if isinstance(part, dict):
        return part if all(isinstance(key, str) for key in part) else {str(key): part[key] for key in part}
    if isinstance(part, (list, tuple)):
        return {str(number): element for number, element in enumerate(part)}
    return vars(part) if hasattr(part, "model_type") else {}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for element in _fields(value).values():
            yield from _strings(element)
