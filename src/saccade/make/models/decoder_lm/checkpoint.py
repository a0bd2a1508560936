"""A language model on disk: a folder with configuration, weights, tokenizer and, optionally, scores of its heads.

config.json        the fields of `ModelConfig`
model.safetensors  the weights in bfloat16; random features of a mechanism unrounded
tokenizer.json     in the format of the `tokenizers` library
heads.json         the role of each attention head, with scores (optional)
README.md          the model card (optional)
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ....operator.nn import KVCache
from ....operator.nn.stacks import LayerObserver
from ....operator.variants import MechanismConfig
from ....support._restored import on_meta, seeded
from ....support._whole_file import whole_file
from .._shortened import shortened
from ..checkpoints.kept_roles import HEADS as HEADS, KeptRoles
from ..checkpoints.reading import materialised, read_json
from ..checkpoints.settings import CheckpointSettings
from ..decoding.generating import GeneratingModel
from ..held_weights import check_floats
from ..inputs import check_ids
from ..model import Family, Request
from ..output import ModelOutput
from ..output_heads import next_token_loss
from ..token_layout import token_layout
from ..tokenizers.own import Tokenizer
from .config import ModelConfig
from .language_model import DecoderLM

EMBEDDED = Path(__file__).parents[1] / "embedded"
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
CARD = "README.md"


class LanguageModel(GeneratingModel):
    """A `DecoderLM` with its tokenizer and the measured roles of its heads.

    Args:
        model: the decoder.
        tokenizer: the tokenizer it was trained with.
        heads: contents of `heads.json`; None if unmeasured.

    Example:
        >>> import torch, saccade
        >>> lm = saccade.models.load()  # the embedded language model
        >>> lm.longest, lm.vocabulary
        (256, 2048)
        >>> batch = torch.tensor([[lm.tokenizer.start, *lm.tokenizer.encode("the cat").ids]])
        >>> lm(batch).logits.shape
        torch.Size([1, 4, 2048])
    """

    def __init__(
        self, model: DecoderLM, tokenizer: Tokenizer, heads: dict[str, Any] | None = None, name: str = "unnamed"
    ):
        super().__init__()
        self.model, self.heads, self.name = model, heads, name
        self._tokenizer = tokenizer
        self.settings = CheckpointSettings(model.config.to_dict(), Path(name) / CONFIG)
        self.request, self.family = Request("causal-lm", mechanism=model.config.mechanism), OWN

    @property
    def tokenizer(self) -> Tokenizer:  # type: ignore[override]  # its own, which knows one special token
        return self._tokenizer

    @property
    def longest(self) -> int:  # type: ignore[override]
        """The context: the maximum number of tokens, start token included."""
        return self.model.config.context

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocabulary

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The start token, which also ends generated texts."""
        return (self.tokenizer.start,)

    def cache(self, dtype: str | None = None) -> KVCache:
        return self.model.cache(dtype)

    def next_logits(self, ids: Tensor, attention_mask: Tensor | None, cache: KVCache) -> Tensor:
        return self.model.next_logits(ids, attention_mask, cache)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        cache: KVCache | None = None,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> ModelOutput:
        """Logits of each next token. Same arguments as the published families.

        Args:
            input_ids: (B, L) ints.
            attention_mask: (B, L), 1 for real tokens and 0 for padding; None: all are real.
            labels: (B, L): `input_ids`, or -100 for positions without a loss; they are shifted by one inside.
            cache: from `cache()`; the new tokens are appended to it.
            hidden_states: whether to return the input of each layer and the output of the last one.
            observe: `observe(layer, observation)` is called in each layer.
        """
        batch, length = check_ids("input_ids", input_ids, self.model.config.vocabulary)
        layout = token_layout(batch, length, attention_mask, packed=False)
        states: list[Tensor] = []
        logits = self.model(input_ids, padding=layout.padding, cache=cache, observe=observe, hidden_states=states)
        return ModelOutput(
            last_hidden_state=layout.put(states[-1]),
            logits=layout.put(logits),
            loss=None if labels is None else next_token_loss(logits, labels, layout),
            hidden_states=tuple(map(layout.put, states)) if hidden_states else None,
            cache=cache,
        )

    def save(self, folder: str | Path, *, weights: str = WEIGHTS) -> None:
        """Write a folder for `load`, with weights in bfloat16."""
        save(self, folder, weights=weights)


OWN = Family("Saccade", {}, {"causal-lm": "DecoderLM"})


def load_own(
    path: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    mechanism: MechanismConfig | None = None,
    roles: KeptRoles | None = None,
) -> LanguageModel:
    """Load the language model in the folder `path`, in evaluation mode; None loads the embedded one.

    Args:
        dtype: None is float32.
        device: None is the CPU.
        mechanism: replaces the attention mechanism it was trained with; None keeps that.
        roles: where the roles of its heads are; None is its own folder and the cache.

    Raises FileNotFoundError or ValueError in one line with the file if a file is missing, damaged, or does not fit the
    configuration.
    """
    folder = EMBEDDED if path is None else Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder (expected a folder with {CONFIG} and {WEIGHTS})")
    config = _read_config(folder / CONFIG)
    tokenizer = _read_tokenizer(folder / TOKENIZER, config)
    changed = config if mechanism is None else dataclasses.replace(config, mechanism=mechanism)
    with seeded(None):  # loading leaves the global random state unchanged
        empty = _checked_shapes(config, folder / WEIGHTS)
        # Skip the initialisation of weights that the file replaces: it takes longer than reading them.
        model = materialised(empty, torch.float32, "cpu") if mechanism is None else DecoderLM(changed)
    _load_weights(model, folder / WEIGHTS, partly=mechanism is not None)
    place = KeptRoles(folder, str(folder), own=True) if roles is None else roles
    heads, _ = place.read(config.heads_by_layer)
    lm = LanguageModel(model, tokenizer, heads, "embedded" if path is None else str(folder))
    return lm.to(device=device, dtype=dtype).eval()


def save(lm: LanguageModel, path: str | Path, *, weights: str = WEIGHTS) -> None:
    """Write the language model into the folder `path`. Each file is written atomically.

    An interrupted write (a full disk, a kill) leaves the old file.

    Example:
        >>> import tempfile, saccade
        >>> lm = saccade.models.load()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saccade.models.save(lm, folder)
        ...     again = saccade.models.load(folder)
        >>> again.model.config == lm.model.config
        True
    """
    check_floats(lm)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, json.dumps(lm.model.config.to_dict(), indent=2) + "\n")
    write_text(folder / TOKENIZER, lm.tokenizer.to_json())
    if lm.heads is not None:
        write_text(folder / HEADS, json.dumps(lm.heads, indent=1) + "\n")
    tensors = as_stored(lm.model, lm.model.state_dict())
    with whole_file(folder / weights) as temporary:
        safetensors.torch.save_file(tensors, temporary)


def as_stored(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of a state dict as it is stored: on the CPU, parameters in bfloat16.

    Buffers are not rounded: they may be exact (a seed) or orthogonal random features.
    """
    kept = {name for name, _ in model.named_buffers()}
    return {
        name: tensor.detach().to("cpu", tensor.dtype if name in kept else torch.bfloat16, copy=True).contiguous()
        for name, tensor in weights.items()
    }


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _read_config(path: Path) -> ModelConfig:
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged, expected an object of model settings")
    try:
        return ModelConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_tokenizer(path: Path, config: ModelConfig) -> Tokenizer:
    try:
        tokenizer = Tokenizer.load(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing from the model folder") from None
    except ValueError as error:
        raise ValueError(f"{path}: damaged, {shortened(error)}") from None
    if tokenizer.vocabulary != config.vocabulary:
        raise ValueError(
            f"{path}: has {tokenizer.vocabulary} tokens, expected {config.vocabulary} by the model's configuration"
        )
    return tokenizer


def _checked_shapes(config: ModelConfig, path: Path) -> DecoderLM:
    """The model on the meta device. ValueError unless the names and shapes of the file match."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            given = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing from the model folder") from None
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: damaged, not a safetensors file ({shortened(error)})") from None
    problem = f"{path}: does not fit the configuration"
    if config.layers > len(given):  # building even meta modules takes time
        raise ValueError(f"{problem}: layers is {config.layers}, but the file has {len(given)} tensors")
    try:
        with on_meta():
            model = DecoderLM(config)
    except (RuntimeError, OverflowError, TypeError) as error:  # TypeError: a size above int64
        raise ValueError(f"{problem}: {shortened(error)}") from None
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [f"{name} is missing" for name in expected if name not in given]
    problems += [f"{name} is not part of the model" for name in given if name not in expected]
    problems += [
        f"{name} has shape {given[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    if problems:
        more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
        raise ValueError(f"{problem}: {shortened('; '.join(problems[:2]))}{more}")
    return model


def _load_weights(model: DecoderLM, path: Path, *, partly: bool) -> None:
    tensors = safetensors.torch.load_file(path)
    spoilt = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if spoilt:
        raise ValueError(f"{path}: damaged, {shortened(', '.join(spoilt[:3]))} contains numbers that are not finite")
    # Tensors of a replaced mechanism are not in the file.
    mine = set(model.state_dict()) if partly else set(tensors)
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in mine}, strict=not partly)
