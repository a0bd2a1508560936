"""Reads checkpoints with transformers, without running code of the checkpoint or of the hub.

A config.json may be from a stranger, and transformers acts on its entries: `attn_implementation: "org/name"` downloads
a kernel from the hub and runs it, and so does flash attention that is not installed.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch

from ....support._extras import installing
from ....support._garbage_collection import uncollected
from ....support._restored import seeded
from .._shortened import shortened
from .gguf import read_header, read_once
from .held_layers import HeldLayer, gguf_layers, leaves_out, packed_layers, put, put_while_loading, replaced
from .quantised import QuantisedWeights, method_of
from .reading import PICKLED, PICKLED_INDEX, SAFE, SAFE_INDEX, find_weights, read_json

_ATTENTION = ("eager", "sdpa", "flex_attention", "saccade")  # PyTorch's, and the one of `register()`
_MODULES = re.compile(r"layer|block|expert|depth")  # counts of modules
_WIDTHS = re.compile(r"size|dim|channel")  # not counts: moe_intermediate_size
_FEW = 1000
_LABELS = 10**6  # transformers makes a name for each label while it reads the configuration
_PACKED = 16  # allowed factor: eight numbers may be packed in one, and the embedding be missing
_SMALL = 2**20
_EXPERTS = ("eager", "batched_mm", "grouped_mm")


class UnreadableCheckpoint(ValueError):
    """transformers cannot read a checkpoint. The message begins with the part: configuration, weights or tokenizer."""


class TransformersWeights(NamedTuple):
    """A module of transformers with its weights.

    Attributes:
        module: in evaluation mode.
        initialised: parameters that the files lack, with random numbers: of a pooler, or allowed by the caller.
        unused: stored tensors that the module does not have.
        held: stored tensors that linear layers hold as they are, and nothing else has as floats.
    """

    module: Any
    initialised: tuple[str, ...]
    unused: tuple[str, ...]
    held: frozenset[str] = frozenset()


def require_transformers(source: str) -> None:
    """ValueError, with the command that installs it, if transformers is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"{source}: this needs transformers, which is not installed: {installing('hf')}")


def read_configuration(folder: Path, gguf: str | None = None) -> Any:
    """The configuration in a folder, or in a GGUF file of it, with attention implementations of this machine only.

    Flash attention, which computes the same, is left out: transformers then chooses `sdpa`, or `eager` if it must.

    Raises:
        UnreadableCheckpoint: an error of transformers; another implementation; a "/" in its name is code on the hub.
        ValueError: as of `read_header`.
    """
    if gguf is not None:
        read_header(folder / gguf)
    try:
        return _configuration(folder, gguf)
    except Exception as error:  # from any of a dozen libraries, some of which raise bare Exception
        raise UnreadableCheckpoint(f"configuration: {shortened(error)}") from error


def _configuration(folder: Path, gguf: str | None) -> Any:
    import transformers

    if gguf is None:
        _check_counts(folder)
    # False: transformers must not prompt whether to run foreign code (`auto_map`).
    config = transformers.AutoConfig.from_pretrained(str(folder), **_options(gguf))
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


def class_of(config: Any) -> Any:
    """The class of transformers that a configuration names, else the model without a head.

    Raises:
        UnreadableCheckpoint: transformers has no model of this type.
    """
    import transformers

    names = config.architectures
    for name in [names] if isinstance(names, str) else names if isinstance(names, (list, tuple)) else ():
        kind = getattr(transformers, str(name), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and _reads(kind, config):
            return kind
    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    return body_of(config)


def _reads(kind: Any, config: Any) -> bool:
    """Whether a class is one of the configuration's type, or of that of its text decoder."""
    return kind.config_class is None or isinstance(configuration_of(kind, config), kind.config_class)


def body_of(config: Any) -> Any:
    """The class of transformers without a head. UnreadableCheckpoint if there is none of this type."""
    import transformers

    if type(config) not in transformers.AutoModel._model_mapping:
        raise UnreadableCheckpoint(
            f"configuration: transformers has no model of type {config.model_type!r}, and foreign code is not run"
        )
    kind = transformers.AutoModel._model_mapping[type(config)]
    return kind[0] if isinstance(kind, tuple) else kind


def configuration_of(kind: Any, config: Any) -> Any:
    """The configuration of a class: of a text decoder in a larger model that model's `text_config`."""
    text = config.get_text_config()
    return text if kind.config_class is type(text) is not type(config) else config


def read_weights(
    kind: Any,
    config: Any,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    gguf: str | None = None,
    is_new: Callable[[str], bool] | None = None,
    packed: QuantisedWeights | None = None,
    stored: bool = False,
) -> TransformersWeights:
    """A module of a class of transformers with the weights of a folder: safetensors first, .bin files without code.

    Args:
        kind, config: the class, and the configuration from `read_configuration`.
        dtype: of the weights; None is that of the configuration, or of the files.
        gguf: the name of a GGUF file in the folder, which is dequantised.
        is_new: whether a parameter that the files lack, or have in another shape, may be initialised randomly; None if
            there are no such parameters.
        packed: the tensors of a folder whose linear layers are quantised; None: found by the configuration.
        stored: whether linear layers hold quantised weights as they are; otherwise these are dequantised.

    Raises:
        UnreadableCheckpoint: an error of transformers, parameters that are missing or of another shape, sizes far above
            those of the files.
    """
    if gguf is not None:
        return _from_gguf(kind, config, folder, dtype, gguf, stored)
    check_sizes(config, stored_sizes(folder), kind)
    method = method_of(getattr(config, "quantization_config", None))
    if packed is None and method is not None:
        packed, config = QuantisedWeights(find_weights(folder), method), copy.deepcopy(config)
        del config.quantization_config
    if packed is not None:
        if any(type(module).__name__ == "Conv1D" for module in _on_meta(kind, config).modules()):
            raise UnreadableCheckpoint(f"weights: {packed.method.form} of {kind.__name__}, whose layers are transposed")
        layers = packed_layers(_on_meta(kind, config), packed) if stored else {}
        held = {layer.source for layer in layers.values()} if leaves_out() else set()
        dtype = dtype or config.dtype or packed.dtype()
        floats = {
            name: x.to(dtype) if name in packed.packed else x.clone()
            for name, x in packed.read([name for name in packed.tensors if name not in held])
        }
        read = _read(kind, config, None, dtype, is_new, {"state_dict": floats}, layers)
        if read.module.can_generate():
            with suppress(OSError):  # without such a file
                read.module.generation_config = _generation(folder)
        return read
    has_safe = any((folder / name).is_file() for name in (SAFE, SAFE_INDEX))
    if not has_safe and not any((folder / name).is_file() for name in (PICKLED, PICKLED_INDEX)):
        raise UnreadableCheckpoint(f"weights: missing from the folder, expected {SAFE} or {PICKLED}")
    options = {"use_safetensors": has_safe, "weights_only": True, **_without_pooler(kind, folder)}
    return _read(kind, config, folder, dtype, is_new, options)


def _generation(folder: Path) -> Any:
    import transformers

    return transformers.GenerationConfig.from_pretrained(str(folder), local_files_only=True)


def _on_meta(kind: Any, config: Any) -> Any:
    # Without changing the caller's random state.
    with torch.device("meta"), seeded(None):
        return kind(copy.deepcopy(config))


def _from_gguf(
    kind: Any, config: Any, folder: Path, dtype: torch.dtype | None, gguf: str, stored: bool
) -> TransformersWeights:
    """The class that the file describes, or its body: transformers maps the names of a file to those of that class."""
    import transformers

    whole, header = class_of(config), read_header(folder / gguf)
    if kind not in (whole, body_of(config)):
        raise UnreadableCheckpoint(f"head: a GGUF file has the weights of {whole.__name__} only, not {kind.__name__}")
    check_sizes(config, header.counts, whole)
    options: dict[str, Any] = {"gguf_file": gguf}
    if hasattr(transformers, "GgufConfig"):  # older versions always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    dtype = dtype or (torch.float32 if header.quantised else header.dtype)
    layers = gguf_layers(_on_meta(whole, config), header, folder / gguf) if stored else {}
    read = _read(whole, config, folder, dtype, None, options, layers)
    return read if kind is whole else read._replace(module=read.module.base_model)


def _read(
    kind: Any,
    config: Any,
    folder: Path | None,
    dtype: torch.dtype | None,
    is_new: Callable[[str], bool] | None,
    options: dict[str, Any],
    layers: dict[str, HeldLayer] | None = None,
) -> TransformersWeights:
    try:
        with seeded(0) if is_new is None else nullcontext(), put_while_loading(layers) if layers else nullcontext():
            module, report = kind.from_pretrained(
                None if folder is None else str(folder),
                config=config,
                dtype="auto" if dtype is None else dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **_options(None),
                **options,
            )
    except Exception as error:  # from any of a dozen libraries
        raise UnreadableCheckpoint(f"weights: {shortened(error)}") from error
    unfit = [shapes for shapes in sorted(report["mismatched_keys"]) if is_new is None or not is_new(shapes[0])]
    for name, held, wanted in unfit:
        raise UnreadableCheckpoint(
            f"weights: {name} has the shape {tuple(held)}, by config.json it is {tuple(wanted)} ({len(unfit)} do not "
            "fit)"
        )
    # Modules on top of the layers may be missing: a checkpoint for predicting words has no pooler.
    absent = [name for name in sorted(report["missing_keys"]) if "pooler" not in name]
    missing = [name for name in absent if is_new is None or not is_new(name)]
    if missing:
        more = f" (and {len(missing) - 3} more)" if len(missing) > 3 else ""
        raise UnreadableCheckpoint(
            f"expected the weights its config.json describes, missing: {', '.join(missing[:3])}{more}"
        )
    initialised = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    put(module, layers or {})
    held = frozenset(layer.source for layer in (layers or {}).values() if not layer.tied)
    return TransformersWeights(
        module.eval(), tuple(sorted(initialised)), tuple(sorted(report["unexpected_keys"])), held
    )


def read_tokenizer(folder: Path, gguf: str | None = None) -> Any:
    """transformers' tokenizer of a folder or GGUF file. UnreadableCheckpoint if there is none, or it is damaged."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **_options(gguf))
    except Exception as error:
        raise UnreadableCheckpoint(f"tokenizer: {shortened(error)}") from error
    # Without its files transformers may still make a tokenizer, which knows only special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UnreadableCheckpoint("tokenizer: its vocabulary is empty")
    return tokenizer


def _options(gguf: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    return options if gguf is None else options | {"gguf_file": gguf}


def _without_pooler(kind: Any, folder: Path) -> dict[str, Any]:
    """Options of a class whose pooler the files lack, if it can be built without one."""
    if "add_pooling_layer" not in inspect.signature(kind.__init__).parameters:
        return {}
    with suppress(OSError, ValueError):
        return {} if any("pooler" in name for name in find_weights(folder).tensors) else {"add_pooling_layer": False}
    return {}


def check_sizes(config: Any, counts: Sequence[int], make: Callable[[Any], Any]) -> None:
    """UnreadableCheckpoint if a configuration needs far more numbers than its weights hold, before a model is made.

    Far more: names and shapes are only compared by transformers, which renames them, and parts may be missing. Without
    weights to compare with, the limit is this machine's memory.

    Args:
        counts: the number of elements of each stored tensor.
    """
    numbers = sum(counts)
    try:
        needed = sum(parameter.numel() for parameter in _on_meta(make, config).parameters())
    except Exception:  # transformers raises it again when it makes the model
        return
    most = _PACKED * numbers + _SMALL if counts else _memory() // 4
    if needed > most:
        has = f"its weights hold {numbers:,}" if counts else "there are no weights, nor memory for random ones"
        raise UnreadableCheckpoint(f"configuration: it needs {needed:,} numbers, and {has}")


def _check_counts(folder: Path) -> None:
    """ValueError for counts in config.json that would take long to read one by one."""
    try:
        values = read_json(folder / "config.json")
    except (OSError, ValueError):  # transformers reports it
        return
    tensors = len(stored_sizes(folder))
    for fields in _parts(values):
        for key, value in fields.items():
            if not isinstance(value, int):
                continue
            entry = f"{key} is {shortened(f'{value:,}')}"
            if _MODULES.search(key) and not _WIDTHS.search(key) and value > max(_FEW, tensors):
                raise ValueError(f"{entry}, and its weights are {tensors:,} tensors")
            if key == "num_labels" and value > _LABELS:
                raise ValueError(f"{entry}; expected at most {_LABELS:,}")


def stored_sizes(folder: Path) -> list[int]:
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


_CONTAINED = threading.RLock()  # the switches are those of the whole process: two loads take turns


def _no_kernel(name: str, **_: Any) -> Any:
    raise ImportError(f"{name} is code on the hub, which is not run")


def _no_bar(values: Iterable[Any], **_: Any) -> Iterable[Any]:
    return values


@contextmanager
def contained() -> Iterator[None]:
    """Block requests to the hub and kernels from its cache, and switch off progress bars, messages and garbage
    collection."""
    with _CONTAINED, uncollected(), _switched():
        yield


@contextmanager
def _switched() -> Iterator[None]:
    from huggingface_hub import constants
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    switches: list[tuple[Any, str, Any]] = [(constants, "HF_HUB_OFFLINE", True)]
    with suppress(ImportError):
        from transformers.integrations import hub_kernels

        switches += [(hub_kernels, "_kernels_enabled", False), (hub_kernels, "get_kernel", _no_kernel)]
    with suppress(ImportError):
        from transformers.integrations.gguf import kernels

        switches.append((kernels, "is_kernels_available", lambda: False))
    with suppress(ImportError):
        from transformers import modeling_gguf_pytorch_utils as legacy

        switches += [
            (legacy, "load_gguf_checkpoint", read_once(legacy.load_gguf_checkpoint)),
            (legacy, "tqdm", _no_bar),
        ]
    verbosity, bars, of_hub = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.set_verbosity_error()
    try:
        with replaced(switches):
            yield
    finally:
        hub.set_verbosity(of_hub)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


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
