"""The base class of models with published weights, the description of a family, and saving."""

from __future__ import annotations

import json
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ...operator.nn._rounded import RoundedLinear, described
from ...operator.variants import MechanismConfig
from ...support._whole_file import whole_file
from .checkpoints.eight_bits import as_torchao, in_eight_bits, quantization_config
from .checkpoints.keys import KeyMap, Piece, pieces_of
from .checkpoints.reading import SAFE
from .checkpoints.sentence_files import sentence_file_names
from .checkpoints.settings import CONFIG, CheckpointSettings, generation_settings
from .output import ModelOutput
from .pruned_heads import PRUNED, UNREADABLE, saved_heads
from .tokenizers.text import TextTokenizer, open_tokenizer

MECHANISM = ".mechanism."  # part of the names of tensors that are not published

# Files of tokenizers and processors, copied unchanged when saving.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "target_vocab.json",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class LoadReport:
    """Exceptions when loading a checkpoint.

    Attributes:
        initialised: parameters missing in the files and initialised randomly, because the caller wanted a new head.
        unused: stored tensors that were not read: those of a head that this model does not have.
        tied: stored tensors that equal another one and share its memory.
        left_out: settings that are not used, with their values: dropout of attention weights, which a `mechanism` does
            not have; entries of a GGUF file that transformers does not read.
        rounded: stored tensors with a finer dtype than the model's.
        dequantised: tensors that a file holds in few bits, with their type; their numbers are those of the quantised
            model. Layers that hold such numbers as they are, are not among them.

    Example:
        >>> import saccade
        >>> print(saccade.models.load().report)
        every tensor used as it is
    """

    initialised: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    dequantised: tuple[str, ...] = ()

    def __str__(self) -> str:
        kinds = "initialised", "not used", "tied", "left out", "rounded to a coarser dtype", "dequantised"
        names = self.initialised, self.unused, self.tied, self.left_out, self.rounded, self.dequantised
        entries = zip(kinds, names, strict=True)
        return "; ".join(f"{kind}: {_some(names)}" for kind, names in entries if names) or "every tensor used as it is"


def _some(names: tuple[str, ...], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True)
class Request:
    """Options of building a model, besides its configuration.

    Attributes:
        head: a name in `Family.heads`; None builds only the body.
        labels: number of labels of a classification head.
        mechanism: replaces softmax attention; None keeps the published attention.
        relabelled: whether the number of labels comes from the caller and not from config.json.
        rows: index in the files of each label, if both have the same names in another order; () if the names differ, so
            that the head is initialised randomly; None: the head is used unchanged.
    """

    head: str | None = None
    labels: int = 2
    mechanism: MechanismConfig | None = None
    relabelled: bool = False
    rows: tuple[int, ...] | None = None

    def weight_dropout(self, settings: CheckpointSettings, name: str, default: float) -> float:
        """The dropout probability of attention weights; 0, with a warning, for a mechanism without weights."""
        share = settings.share(name, default)
        if not share or self.mechanism is None or "dropout" in self.mechanism.traits.takes:
            return share
        settings.left_out[name] = share
        return 0.0


class Model(nn.Module, ABC):
    """A model with published weights. Abstract; `saccade.models.load` returns subclasses.

    Attributes:
        settings: contents of config.json; saving writes them back.
        request: the head, its labels, and the mechanism.
        folder: the folder it was loaded from; None for a model made in memory.
        report: the exceptions when loading.

    Example:
        >>> import saccade
        >>> model = saccade.models.load()
        >>> isinstance(model, saccade.models.Model), model.context, model.dtype
        (True, 256, torch.float32)
    """

    settings: CheckpointSettings
    request: Request
    family: Family
    folder: Path | None = None
    report: LoadReport = LoadReport()

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        """The output of the model. Each family has its own arguments, with the names that transformers uses."""

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of a text; longer texts are truncated. None if unknown."""
        longest: int | None = getattr(self, "longest", None)
        return longest

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the folder. Raises FileNotFoundError if there is none, ValueError if it is damaged."""
        if self.folder is None:
            raise FileNotFoundError("tokenizer: the model was not loaded from a folder, so it has no tokenizer")
        return open_tokenizer(self.folder, self.context)

    @property
    def generation(self) -> CheckpointSettings:
        """Generation settings of the files. Raises ValueError for unsupported options."""
        return generation_settings(self.folder, self.settings)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype

    @property
    def label_names(self) -> list[str]:
        """The classifier's labels by index, as in config.json."""
        named = self.settings.get("id2label", {})
        return [str(named.get(str(n), f"LABEL_{n}")) for n in range(self.request.labels)]

    def save(self, folder: str | Path, *, weights: str = SAFE) -> None:
        """Write config.json, the weights (by default in the published file name) and the tokenizer's files.

        Linear layers that hold 8 bits (`weights="int8"`) are written so, as torchao does: transformers reads them where
        torchao is installed, and `load(folder, weights="stored")` gets the same numbers. An output layer that is tied
        to the embedding is not written.

        Each file is written atomically. transformers loads the folder with equal outputs, except for models with a
        `mechanism`, which published files cannot store: it must be given again when loading, and its own tensors are
        not written; and for pruned models (`saccade.prune`) whose remaining heads the published format cannot describe:
        a UserWarning says so, and `saccade.models.load` loads the folder.
        """
        eight, folder = in_eight_bits(self, self._tied_output()), Path(folder)
        settings = self._published_settings()
        if PRUNED in settings:
            warnings.warn(UNREADABLE, stacklevel=2)
        folder.mkdir(parents=True, exist_ok=True)
        eight.as_floats(_transposed(self, eight.tensors), self.dtype)
        tensors, metadata = published(self, eight.tensors), {"format": "pt"}
        if eight.scales:
            scales = published(self, eight.scales)
            tensors, metadata = as_torchao(tensors, scales, self.dtype)
            settings["quantization_config"] = quantization_config()
        with whole_file(folder / weights) as temporary:
            safetensors.torch.save_file(tensors, temporary, metadata=metadata)
        with whole_file(folder / CONFIG) as temporary:
            temporary.write_text(_written(settings), encoding="utf-8")
        self._copy_companions(folder)

    def _tied_output(self) -> str | None:
        """The name of an output layer that holds a copy of the embedding in few bits."""
        head = getattr(self, "head", None)
        return "head" if isinstance(head, RoundedLinear) and getattr(self, "tied", True) else None

    def _copy_companions(self, folder: Path) -> None:
        """Copy the files of the tokenizer, of the processor and of sentence vectors."""
        if self.folder is None or self.folder.resolve() == folder.resolve():
            return
        for name in (*COMPANIONS, *sentence_file_names(self.folder)):
            if (self.folder / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with whole_file(folder / name) as temporary:
                    shutil.copyfile(self.folder / name, temporary)

    def explain(self) -> str:
        """Describe what the model is, where its parts run, and what its linear layers hold."""
        kind = self.settings.get("model_type", "its own")
        return (
            f"Saccade's {type(self).__name__}, type {kind}: attention by saccade.attention, which skips padding and "
            f"what masks hide; layers by saccade.nn{described(self)}"
        )

    def config_json(self) -> str:
        """Contents of config.json, as written by `save`."""
        return _written(self._published_settings())

    def _published_settings(self) -> dict[str, Any]:
        values = dict(self.settings.values)
        values.pop("torch_dtype", None)
        values.pop(PRUNED, None)
        values.pop("quantization_config", None)  # what is saved are floats
        values.update(saved_heads(self, self.family.own_head_width))
        values["dtype"] = str(self.dtype).removeprefix("torch.")
        values["architectures"] = [self.family.architecture(values["model_type"], self.request.head)]
        return values


def _written(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def published(model: Model, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The model's tensors, or some, by published name and in published shape, as contiguous copies."""
    tensors = model.state_dict() if tensors is None else tensors
    return {
        piece.published: piece.of(tensors[name]).detach().to("cpu", copy=True).contiguous()
        for name, pieces in _pieces(model, tensors).items()
        for piece in pieces
    }


def _pieces(model: Model, tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    shapes = {name: tensor.shape for name, tensor in tensors.items() if MECHANISM not in name}
    return pieces_of(model.family.keys(model), shapes, prefixed=model.request.head is not None)


def _transposed(model: Model, tensors: Mapping[str, Tensor]) -> set[str]:
    """The tensors that published files hold as (in, out)."""
    return {name for name, pieces in _pieces(model, tensors).items() if any(piece.transposed for piece in pieces)}


def _unbuilt(*given: Any) -> Any:
    raise NotImplementedError("this model is read by its own loader, not through a key map")


@dataclass(frozen=True)
class Family:
    """A model family: reading config.json, building the model, and naming its tensors.

    Attributes:
        name: for messages.
        types: the `model_type`s of config.json, each with the prefix of its class names: {"bert": "Bert"}.
        heads: suffix of the published class by name of the head: {"masked-lm": "ForMaskedLM"}. The body alone is
            "Model".
        build: returns the model with uninitialised weights.
        keys: its key map.
        new_heads: heads that may be initialised randomly if the files lack them.
        of_tokens: those of them whose labels are tokens, the blank first.
        own_head_width: whether config.json has the width of a head (`head_dim`) besides the number of heads.
        labels: default number of labels of its classifiers.
        aliases: alternative names of settings in config.json: {"num_attention_heads": "n_head"}.
    """

    name: str
    types: Mapping[str, str]
    heads: Mapping[str, str]
    build: Callable[[CheckpointSettings, Request], Model] = _unbuilt
    keys: Callable[[Any], KeyMap] = _unbuilt
    new_heads: tuple[str, ...] = ()
    body: str = field(default="Model")
    of_tokens: tuple[str, ...] = ()
    own_head_width: bool = False
    labels: int = 2
    aliases: Mapping[str, str] = field(default_factory=dict)

    def architecture(self, model_type: str, head: str | None) -> str:
        """The published class of a head."""
        return self.types[model_type] + (self.body if head is None else self.heads[head])

    def head_of(self, architecture: str) -> str | None:
        """The head of a published class. KeyError if the family has no such head."""
        for beginning in sorted(self.types.values(), key=len, reverse=True):
            if architecture.startswith(beginning):
                ending = architecture.removeprefix(beginning)
                return None if ending == self.body else {e: name for name, e in self.heads.items()}[ending]
        raise KeyError(architecture)
