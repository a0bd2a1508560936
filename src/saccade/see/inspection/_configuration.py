"""The configuration of a checkpoint, without what would make transformers fetch code and run it.

A config.json is a stranger's, and transformers obeys more in it than sizes: `attn_implementation: "org/name"` fetches a
kernel from the hub and runs it, and so does flash attention that is not installed.
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

_ATTENTION = ("eager", "sdpa", "flex_attention", "saccade")  # of PyTorch, and what `register()` adds
_MODULES = re.compile(r"layer|block|expert|depth")  # of which a model is made one by one
_FEW = 1000
_LABELS = 10**6  # each is a name in the configuration, made as it is read
_PACKED = 16  # eight numbers may be packed in one, and the embedding be missing
_SMALL = 2**20
_EXPERTS = ("eager", "batched_mm", "grouped_mm")


def read_configuration(source: str, *, local: bool) -> Any:
    """The configuration in a folder, or of a name on the hub; it asks for implementations of this machine alone.

    Flash attention, which computes the same, is left out: transformers then takes `sdpa`, or `eager` where that is all.

    Raises:
        ValueError: another implementation; a "/" in its name is code on the hub. Exception: of transformers.
    """
    import transformers

    if local:
        _check_counts(Path(source))
    # False: nobody is asked whether foreign code (`auto_map`) may run.
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    there = ("eager", *transformers.AttentionInterface().valid_keys())
    known = tuple(name for name in _ATTENTION if name in there)
    for fields, key, asked in list(_implementations(config)):
        field = key.strip("_").removesuffix("_internal")
        choices = _EXPERTS if "expert" in field else known
        foreign = next((name for name in _strings(asked) if "/" in name), None)
        if foreign is not None:
            raise ValueError(
                f"{field} is {shortened(repr(foreign))}, code on the hub, which is not run; expected one of "
                f"{', '.join(choices)}"
            )
        if asked is None or isinstance(asked, dict) or asked in choices:
            continue  # a dictionary is told part by part, and each of them has it by now
        if "expert" not in field and not str(asked).startswith("flash_attention"):
            raise ValueError(f"{field} is {shortened(repr(asked))}; expected one of {', '.join(known)}")
        fields[key] = None
    return config


def check_sizes(config: Any, folder: Path, make: Callable[[Any], Any]) -> None:
    """ValueError where a configuration asks for far more than its weights hold, before anything of it is made.

    Far more: names and shapes are compared by transformers, whose renaming is its own, and parts may be missing. Where
    there are no weights to compare with, more than this machine's memory.
    """
    counts = _stored(folder)
    numbers = sum(counts)
    try:
        # Without memory, and without drawing what a caller's seed is for.
        with torch.device("meta"), seeded(None):
            made = make(copy.deepcopy(config))
        asked = sum(parameter.numel() for parameter in made.parameters())
    except Exception:  # what transformers has to say against it, it says when it makes the model
        return
    most = _PACKED * numbers + _SMALL if counts else _memory() // 4
    if asked > most:
        has = f"its weights hold {numbers:,}" if counts else "there are no weights, nor memory for random ones"
        raise ValueError(f"it asks for {asked:,} numbers, and {has}")


def _check_counts(folder: Path) -> None:
    """ValueError where config.json names counts that reading it would already work through one by one."""
    try:
        values = read_json(folder / "config.json")
    except (OSError, ValueError):  # transformers says it
        return
    tensors = len(_stored(folder))
    for fields in _parts(values):
        for key, value in fields.items():
            if not isinstance(value, int):
                continue
            told = f"{key} is {shortened(f'{value:,}')}"
            if _MODULES.search(key) and value > max(_FEW, tensors):
                raise ValueError(f"{told}, and its weights are {tensors:,} tensors")
            if key == "num_labels" and value > _LABELS:
                raise ValueError(f"{told}; expected at most {_LABELS:,}")


def _stored(folder: Path) -> list[int]:
    """How many numbers are in each tensor of the folder's safetensors, by their headers; damaged files are left out."""
    counts = []
    for path in sorted(folder.glob("*.safetensors")):
        with suppress(OSError, safetensors.SafetensorError), safetensors.safe_open(path, "pt") as file:
            counts += [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    return counts


def _memory() -> int:
    """Bytes of this machine's memory; where it does not tell, what no machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2**50


@contextmanager
def offline() -> Iterator[None]:
    """No request goes to the hub meanwhile, whatever the files of a folder ask for."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _implementations(config: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(where it stands, its key, its value) of each implementation that a configuration or a part of it asks for."""
    for fields in _parts(config):
        yield from ((fields, key, value) for key, value in fields.items() if "_implementation" in key)


def _parts(config: Any) -> Iterator[dict[str, Any]]:
    """The fields of a configuration, and of everything in it that has some; however deep, without recursion."""
    waiting, seen = [config], {id(config)}
    while waiting:
        fields = _fields(waiting.pop())
        yield fields
        for value in fields.values():
            if id(value) not in seen and _fields(value):
                seen.add(id(value))
                waiting.append(value)


def _fields(part: Any) -> dict[str, Any]:
    """Of a configuration (past its setters, which change the parts inside), an object or a list; else none."""
    if isinstance(part, dict):
        return part if all(isinstance(key, str) for key in part) else {str(key): part[key] for key in part}
    if isinstance(part, (list, tuple)):
        return {str(number): one for number, one in enumerate(part)}
    return vars(part) if hasattr(part, "model_type") else {}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in _fields(value).values():
            yield from _strings(one)
