"""What all models with published weights have in common: where they came from, and how they are written back."""

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

from ...operator.variants import MechanismConfig
from ...support._whole_file import whole_file
from .checkpoints.generation import generation_settings
from .checkpoints.keys import KeyMap, pieces_of
from .checkpoints.reading import SAFE
from .checkpoints.sentence_files import sentence_file_names
from .checkpoints.settings import CONFIG, Settings
from .output import ModelOutput
from .pruned_heads import PRUNED, UNREADABLE, saved_heads
from .tokenizers.text import TextTokenizer, open_tokenizer

MECHANISM = ".mechanism."  # in the name of a tensor that no published model has

# What a tokenizer or a processor reads; copied beside saved weights as it is.
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
    """How a checkpoint was opened, beyond filling every parameter from one published tensor.

    Attributes:
        initialised: our tensors that the files lack, drawn anew because the caller asked for a new head.
        unused: published tensors that were left out: those of a head that this model does not have.
        tied: published tensors that equal another one, and are held once.
        left_out: settings that the `mechanism` has no place for, with their values: dropout of weights.
        rounded: published tensors of a finer dtype than the model's.

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

    def __str__(self) -> str:
        kinds = "initialised", "not used", "tied", "left out", "rounded to a coarser dtype"
        told = zip(kinds, (self.initialised, self.unused, self.tied, self.left_out, self.rounded), strict=True)
        return "; ".join(f"{what}: {_some(names)}" for what, names in told if names) or "every tensor used as it is"


def _some(names: tuple[str, ...], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True)
class Request:
    """What a model is built for, beside its configuration.

    Attributes:
        head: what reads the last hidden states, a name in `Family.heads`; None is the body alone.
        labels: how many labels a classifying head tells apart.
        mechanism: instead of softmax attention; None is the published attention.
        relabelled: whether the caller says how many labels, and not config.json.
        rows: which label of the files each of them is, where both have the same names in another order; () where they
            have others, so that the head starts with random weights; None: the head is taken as it is.
    """

    head: str | None = None
    labels: int = 2
    mechanism: MechanismConfig | None = None
    relabelled: bool = False
    rows: tuple[int, ...] | None = None

    def weight_dropout(self, settings: Settings, name: str, default: float) -> float:
        """Dropout of attention's weights as the settings have it; 0 with a mechanism without weights, with a
        warning."""
        share = settings.share(name, default)
        if not share or self.mechanism is None or "dropout" in self.mechanism.traits.takes:
            return share
        settings.left_out[name] = share
        return 0.0


class Model(nn.Module, ABC):
    """A model with published weights. Abstract; `saccade.models.load` makes it.

    Attributes:
        settings: config.json as it was read; saving writes it back.
        request: the head, its labels, and the mechanism.
        folder: where it came from; None for a model made in memory.
        report: what loading did.

    Example:
        >>> import saccade
        >>> model = saccade.models.load()
        >>> isinstance(model, saccade.models.Model), model.context, model.dtype
        (True, 256, torch.float32)
    """

    settings: Settings
    request: Request
    family: Family
    folder: Path | None = None
    report: LoadReport = LoadReport()

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        """The ecosystem's argument names; each family has its own."""

    @property
    def context(self) -> int | None:
        """The most tokens of a text that the model reads at once; longer texts are cut. None where nothing says."""
        longest: int | None = getattr(self, "longest", None)
        return longest

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the folder. Raises FileNotFoundError where there is none, ValueError where it is damaged."""
        if self.folder is None:
            raise FileNotFoundError("tokenizer: the model comes from no folder, so there is none")
        return open_tokenizer(self.folder, self.context)

    @property
    def generation(self) -> Settings:
        """What the files say about generating texts. Raises ValueError for options that are not supported."""
        return generation_settings(self.folder, self.settings)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.parameters()).dtype

    @property
    def label_names(self) -> list[str]:
        """The classifier's labels by number, as config.json names them."""
        named = self.settings.get("id2label", {})
        return [str(named.get(str(n), f"LABEL_{n}")) for n in range(self.request.labels)]

    def save(self, folder: str | Path, *, weights: str = SAFE) -> None:
        """Write config.json, the weights (by their published name, unless another is given) and the tokenizer's files.

        Each file appears whole or not at all. transformers opens the folder, with equal outputs, unless the model was
        opened with a `mechanism`: published files have no place for one, so it must be named again when loading, and
        tensors of its own are not written. Nor does it where heads were removed (`saccade.prune`) and the published
        format cannot say which are left; a UserWarning says so, and `saccade.models.load` opens the folder.
        """
        folder = Path(folder)
        settings = self._published_settings()
        if PRUNED in settings:
            warnings.warn(UNREADABLE, stacklevel=2)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = published(self)
        with whole_file(folder / weights) as temporary:
            safetensors.torch.save_file(tensors, temporary, metadata={"format": "pt"})
        with whole_file(folder / CONFIG) as temporary:
            temporary.write_text(_written(settings), encoding="utf-8")
        if self.folder is None or self.folder.resolve() == folder.resolve():
            return
        for name in (*COMPANIONS, *sentence_file_names(self.folder)):
            if (self.folder / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with whole_file(folder / name) as temporary:
                    shutil.copyfile(self.folder / name, temporary)

    def config_json(self) -> str:
        """config.json as `save` writes it."""
        return _written(self._published_settings())

    def _published_settings(self) -> dict[str, Any]:
        values = dict(self.settings.values)
        values.pop("torch_dtype", None)
        values.pop(PRUNED, None)
        values.update(saved_heads(self, self.family.own_head_width))
        values["dtype"] = str(self.dtype).removeprefix("torch.")
        values["architectures"] = [self.family.architecture(values["model_type"], self.request.head)]
        return values


def _written(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def published(model: Model) -> dict[str, Tensor]:
    """All tensors by their published names, in the published shapes, each in memory of its own."""
    ours = {name: tensor for name, tensor in model.state_dict().items() if MECHANISM not in name}
    keys = model.family.keys(model)
    prefixed = model.request.head is not None
    named: dict[str, Tensor] = {}
    for name, pieces in pieces_of(
        keys, {name: tensor.shape for name, tensor in ours.items()}, prefixed=prefixed
    ).items():
        for piece in pieces:
            named[piece.published] = piece.of(ours[name]).detach().to("cpu", copy=True).contiguous()
    return named


@dataclass(frozen=True)
class Family:
    """Models of one kind: how config.json is read, what is built, and how tensors are named.

    Attributes:
        name: as people call it.
        types: the `model_type`s of config.json, each with the beginning of its classes' names: {"bert": "Bert"}.
        heads: name of a head -> ending of the published class: {"masked-lm": "ForMaskedLM"}. The body alone is
            "Model".
        build: the model, with weights that mean nothing yet.
        keys: its key map.
        new_heads: heads that may start with random weights on a checkpoint without them.
        of_tokens: those of them whose labels are tokens, the blank first.
        own_head_width: whether config.json says how wide a head is (`head_dim`), beside how many there are.
        labels: how many labels its classifiers have where config.json does not say.
        aliases: other names that config.json may have for settings: {"num_attention_heads": "n_head"}.
    """

    name: str
    types: Mapping[str, str]
    heads: Mapping[str, str]
    build: Callable[[Settings, Request], Model]
    keys: Callable[[Any], KeyMap]
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
        """The head of a published class. KeyError where the family has none of that name."""
        for beginning in sorted(self.types.values(), key=len, reverse=True):
            if architecture.startswith(beginning):
                ending = architecture.removeprefix(beginning)
                return None if ending == self.body else {e: name for name, e in self.heads.items()}[ending]
        raise KeyError(architecture)
