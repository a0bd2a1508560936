"""The configuration of a checkpoint, without what would make transformers fetch code and run it.

A config.json is a stranger's, and transformers obeys more in it than sizes: `attn_implementation: "org/name"` fetches a
kernel from the hub and runs it, and so does flash attention that is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ATTENTION = ("eager", "sdpa", "flex_attention", "saccade")  # of PyTorch, and what `register()` adds
_EXPERTS = ("eager", "batched_mm", "grouped_mm")


def read_configuration(source: str, *, local: bool) -> Any:
    """The configuration in a folder, or of a name on the hub; it asks for implementations of this machine alone.

    Flash attention, which computes the same, is left out: transformers then takes `sdpa`, or `eager` where that is all.

    Raises:
        ValueError: another implementation; a "/" in its name is code on the hub. Exception: of transformers.
    """
    import transformers

    # False: nobody is asked whether foreign code (`auto_map`) may run.
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    there = ("eager", *transformers.AttentionInterface().valid_keys())
    known = tuple(name for name in _ATTENTION if name in there)
    for fields, key, asked in list(_implementations(config)):
        field = key.strip("_").removesuffix("_internal")
        foreign = next((name for name in _strings(asked) if "/" in name), None)
        if foreign is not None:
            raise ValueError(
                f"{field} is {foreign!r}, code on the hub, which is not run; expected one of {', '.join(known)}"
            )
        if asked is None or isinstance(asked, dict) or asked in (_EXPERTS if "expert" in field else known):
            continue  # a dictionary is told part by part, and each of them has it by now
        if "expert" not in field and not str(asked).startswith("flash_attention"):
            raise ValueError(f"{field} is {asked!r}; expected one of {', '.join(known)}")
        fields[key] = None
    return config


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
    waiting, seen = [config], {id(config)}
    while waiting:
        fields = _fields(waiting.pop())
        for key, value in fields.items():
            if "_implementation" in key:
                yield fields, key, value
            elif _fields(value) and id(value) not in seen:
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
