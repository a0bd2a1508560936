"""Models from a folder or from the local cache of the Hugging Face hub's library: nothing is fetched.

Weights are read as safetensors, else with `weights_only`; code that comes with a model is never run.
"""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import torch

from ...make.models import load as load_published
from ...make.models._shortened import shortened
from ...make.models.checkpoints.reading import read_json
from ...make.models.decoder_lm.checkpoint import load_own
from ...make.models.loading import is_known
from ...see.inspection._configuration import check_sizes, offline, read_configuration
from ...see.inspection._transformers import quiet
from ...support._extras import installing
from ...support._seeding import seeded

Opened = tuple[Any, tuple[str, ...]]  # (the model, what the report says of it)

_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_SAFE = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def load(named: str) -> Opened:
    """The model in a folder (config.json, weights), or of this name in the local cache, in float32 and eval mode.

    A folder with a configuration alone gives a model of random weights, and the report says so.

    Raises:
        ValueError: no such folder or name, files that are damaged or missing, transformers not installed, or a model
            that needs code of its own.
    """
    folder = _folder(named)
    config = _settings(folder / "config.json")
    if "model_type" not in config:
        return load_own(folder), ()
    if importlib.util.find_spec("transformers") is None:
        if is_known(config["model_type"]):
            return load_published(folder), ("Saccade's own model of these weights is tested",)
        raise ValueError(f"hf:{named}: this needs transformers, which is not installed: {installing('hf')}")
    with quiet(), offline():
        return _opened(named, folder)


def size_of_weights(named: str) -> int:
    """The bytes of a folder's weights as float32, in which they are tested, at the most; 0 where there are none."""
    try:
        folder = _folder(named)
    except ValueError:  # which loading says
        return 0
    kinds = ("*.safetensors", "pytorch_model*.bin")
    return 2 * max(sum(path.stat().st_size for path in folder.glob(kind)) for kind in kinds)


def _folder(named: str) -> Path:
    folder = Path(named).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"hf:{named}: config.json is missing from the folder")
        return folder
    if folder.exists():
        raise ValueError(f"hf:{named}: is a file; expected the folder of a model")
    if not _ID.fullmatch(named):
        raise ValueError(f"hf:{named}: no such folder, and no name of a model such as org/name")
    kept = _kept(named)
    if kept is None or not (kept / "config.json").is_file():
        raise ValueError(
            f"hf:{named}: no such folder, and no model of this name in the local cache; nothing is fetched here: "
            f"`hf download {named}` gets it"
        )
    return kept


def _kept(named: str) -> Path | None:
    """The folder of this model in the hub library's cache on this machine."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(named, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _settings(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: damaged, expected an object of model settings")
    return config


def _opened(named: str, folder: Path) -> Opened:
    import transformers

    try:
        config = read_configuration(str(folder), local=True)
    except Exception as error:  # of several libraries below, some of which raise bare Exception
        raise ValueError(f"hf:{named}: configuration: {shortened(error)}") from None
    kind = _kind(transformers, config, named)
    try:
        check_sizes(config, folder, kind)
    except ValueError as error:
        raise ValueError(f"hf:{named}: configuration: {error}") from None
    safe, pickled = (next((name for name in names if (folder / name).is_file()), None) for names in (_SAFE, _PICKLED))
    if safe is None and pickled is None:
        try:
            model = _random(kind, config)
        except Exception as error:
            raise ValueError(f"hf:{named}: configuration: {shortened(error)}") from None
        return model, ("its folder holds no weights: random ones are tested",)
    model = _read(kind, config, folder, named, safe is not None)
    if safe is not None:
        return model, ()
    return model, (f"its weights are read from {pickled} with weights_only, which runs no code of it",)


def _kind(transformers: Any, config: Any, named: str) -> Any:
    """The class that the configuration names, else the model without a head."""
    for name in config.architectures if isinstance(config.architectures, (list, tuple)) else ():
        kind = getattr(transformers, str(name), None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ValueError(
        f"hf:{named}: transformers has no model of type {config.model_type!r}, and foreign code is not run"
    )


def _random(kind: Any, config: Any) -> Any:
    # Of variance 1 / width, so that what attention does is no small part of the output, as it is with 0.02.
    if hasattr(config, "initializer_range"):
        config.initializer_range = 1 / math.sqrt(config.hidden_size)
    with seeded(0):
        return kind(config).eval()


def _read(kind: Any, config: Any, folder: Path, named: str, is_safe: bool) -> Any:
    try:
        model, report = kind.from_pretrained(
            str(folder),
            config=config,
            local_files_only=True,
            use_safetensors=is_safe,
            weights_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        raise ValueError(f"hf:{named}: weights: {shortened(error)}") from None
    # A checkpoint that predicts words has no pooler.
    lacks = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    lacks += sorted(str(name) for name, *_ in report["mismatched_keys"])
    if lacks:
        more = f" (and {len(lacks) - 3} more)" if len(lacks) > 3 else ""
        raise ValueError(
            f"hf:{named}: expected the weights its config.json describes, missing or of another shape: "
            f"{', '.join(lacks[:3])}{more}"
        )
    return model.eval()
