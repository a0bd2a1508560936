"""Models of transformers behind the interface of `Model`: every type that has no family here.

Shape legend: B batch, L length, E model width, V vocabulary.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...acceleration import accelerate
from ...acceleration._model import is_accelerated
from ...operator.nn._rounded import described
from ...support._restored import seeded
from .checkpoints.eight_bits import in_eight_bits, write_eight_bits
from .checkpoints.reading import SAFE
from .checkpoints.settings import CheckpointSettings
from .checkpoints.tokenizer_files import TokenizerFiles
from .checkpoints.transformers_reading import UnreadableCheckpoint, contained, read_tokenizer
from .decoding.beam import BeamSearch
from .decoding.published import named_tokens
from .decoding.sampling import Sampling
from .decoding.step import padded_on_the_left
from .inputs import check_ids
from .model import Family, Model, Request
from .output import ModelOutput
from .tokenizers.text import TextTokenizer

_MANY = 2**16  # tokens that are worth the proof of each layer, which costs as much as 40,000 of them gain
_FIELDS = frozenset(field.name for field in fields(ModelOutput)) - {"cache", "others"}
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_RENAMED = {"decoder_hidden_states": "hidden_states"}
_OF_TOKENS = (
    *("last_hidden_state", "hidden_states", "encoder_last_hidden_state", "encoder_hidden_states"),
    *("logits", "start_logits", "end_logits"),
)
_CACHES = ("past_key_values", "cache_params", "mems", "state")
_PROCESSORS = {
    "pixel_values": "AutoImageProcessor",
    "input_features": "AutoFeatureExtractor",
    "input_values": "AutoFeatureExtractor",
}
_UNLIMITED = 10**9  # tokenizers without a limit have 10**30


class TransformersModel(Model):
    """A model of transformers' own class. `saccade.models.load` returns one for each type without a family here.

    Its attention calls run on Saccade's kernels where these are faster (`saccade.accelerate`), inside each call of the
    model and never outside of it. `generate` and `embed` of 65,536 tokens or more also pack its weights and leave out
    padding while they run. Nothing of this outlives the call, so training, copies and saving see transformers' module.
    `explain` lists what ran where. For many calls, `with saccade.accelerate(model.module):` around them does the same.

    Attributes:
        module: transformers' module.
        file: the GGUF file it was loaded from, in place of `folder`.

    Example:
        >>> import tempfile, torch, transformers, saccade
        >>> sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> with tempfile.TemporaryDirectory() as folder:  # as a published model's folder
        ...     transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes)).save_pretrained(folder)
        ...     model = saccade.models.load(folder)
        >>> type(model.module).__name__, model(torch.tensor([[3, 1, 4]])).logits.shape
        ('GPTNeoXForCausalLM', torch.Size([1, 3, 8]))
    """

    def __init__(self, module: Any, settings: CheckpointSettings, request: Request, family: Family):
        super().__init__()
        self.module: Any = module
        self.settings, self.request, self.family = settings, request, family
        self.file: Path | None = None
        self._ran = ""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        hidden_states: bool = False,
        **inputs: Any,
    ) -> ModelOutput:
        """The output of transformers' module. Rows of padding are 0.

        Args:
            input_ids: the main input: (B, L) ints, or of other models images, spectrograms or sounds.
            attention_mask: as the module reads it; mostly (B, L), 1 for real tokens and 0 for padding.
            labels: as the module reads them, with -100 for positions without a loss.
            hidden_states: whether to return the input of each layer and the output of the last one.
            inputs: further arguments of the module by name, such as `position_ids` or `pixel_values`. A cache is
                returned, under `others`, only with `use_cache=True`.
        """
        given = {"attention_mask": attention_mask, "labels": labels, **inputs}
        if input_ids is not None:
            given[self.module.main_input_name] = input_ids
        given = {name: value for name, value in given.items() if value is not None}
        if hidden_states:
            given["output_hidden_states"] = True
        with self.accelerated():
            output = self.module(**given, return_dict=True)
        if any("pooler" in name for name in self.report.initialised):
            output = {name: value for name, value in output.items() if name != "pooler_output"}  # of random numbers
        mask = given.get("decoder_attention_mask" if self._is_pair else "attention_mask")
        if "use_cache" not in inputs:  # the module follows its configuration
            output = {name: value for name, value in output.items() if name not in _CACHES}
        return _named(output, mask, attention_mask if self._is_pair else None)

    @property
    def _is_pair(self) -> bool:
        return bool(getattr(self.module.config, "is_encoder_decoder", False))

    def states(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The last hidden state (B, L, E) of a text, without the head; of an encoder-decoder the encoder's."""
        module = self.module.get_encoder() if self._is_pair else self.module.base_model
        with self.accelerated():
            states: Tensor = module(input_ids, attention_mask=attention_mask)[0]
        if states.shape[:2] != input_ids.shape:
            raise ValueError(
                f"{self.family.name}: its states have shape {tuple(states.shape)} for tokens {tuple(input_ids.shape)}; "
                "expected one for each token"
            )
        return states

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 20,
        sampling: Sampling | BeamSearch | None = None,
        **inputs: Any,
    ) -> Tensor:
        """Continue each text of a batch with transformers' `generate`: ids (B, L + n), n at most `max_new_tokens`.

        Ended items are filled with the padding token. Padding of the prompts, on either side, is ignored. An
        encoder-decoder returns only the decoder's tokens, the start token first.

        Args:
            input_ids: (B, L) ints, the prompts; images or spectrograms of models that read these.
            attention_mask: (B, L), 1 for real tokens and 0 for padding. None: `pad_token_id` is padding, unless it is
                also an end token.
            sampling: None takes the most probable tokens, or uses beam search if the checkpoint sets `num_beams`.
            inputs: further inputs of the module by name.

        Raises:
            TypeError, ValueError: ids outside the vocabulary, other shapes, an item without real tokens, a model that
                generates nothing.
        """
        self.check_generates()
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: must be at least 1, got {max_new_tokens}")
        prompts = input_ids
        is_text = self.module.main_input_name == "input_ids"
        if is_text:
            table = self.module.get_input_embeddings()
            check_ids("input_ids", input_ids, getattr(table, "num_embeddings", 2**31))
            attention_mask = self._real(input_ids) if attention_mask is None else attention_mask
        if is_text and attention_mask is not None and not self._is_pair:
            prompts, attention_mask = padded_on_the_left(input_ids, attention_mask)
            moved = [name for name, value in inputs.items() if getattr(value, "shape", ())[:2] == input_ids.shape]
            if moved and not torch.equal(prompts, input_ids):
                raise ValueError(
                    f"{moved[0]}: has an entry for each token, and padding on the right is moved to the left; pad the "
                    "prompts on the left"
                )
        if is_text and not self._is_pair:
            room = self.room_after(prompts.shape[1], max_new_tokens)
            if room < max_new_tokens:
                raise ValueError(
                    f"max_new_tokens: {max_new_tokens} after {prompts.shape[1]} tokens, but the model has "
                    f"{self.longest} positions; ask for at most {room}, or cut the prompt"
                )
        how, seed = _decoding(sampling)
        if is_text:
            how["attention_mask"] = torch.ones_like(prompts) if attention_mask is None else attention_mask
        elif attention_mask is not None:
            how["attention_mask"] = attention_mask
        many = prompts.shape[0] * (prompts.shape[1] + max_new_tokens) if is_text else 0
        with seeded(seed), torch.no_grad(), self.accelerated(many):
            ids: Tensor = self.module.generate(prompts, max_new_tokens=max_new_tokens, **how, **inputs)
        if not is_text or self._is_pair:
            return ids
        return torch.cat((input_ids, ids[:, input_ids.shape[1] :]), 1)

    def room_after(self, length: int, count: int) -> int:
        """The number of the `count` tokens after `length` that have positions; all, unless positions are learned."""
        config = self.module.config.get_text_config()
        computed = getattr(config, "rope_parameters", None) or getattr(config, "alibi", False)
        return count if computed or self.longest is None else max(0, min(count, self.longest - length))

    def check_generates(self) -> None:
        """ValueError unless transformers generates with this class."""
        if not self.module.can_generate():
            raise ValueError(
                f"generate: {self.family.name} generates nothing; load the model with the head of a decoder"
            )

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text; () if undefined."""
        named = getattr(self.module.generation_config, "eos_token_id", None)
        return tuple(named) if isinstance(named, (list, tuple)) else () if named is None else (named,)

    @property
    def begin_tokens(self) -> tuple[int, ...]:
        """First token of a text without a prompt: `bos_token_id`, or the first end token."""
        return named_tokens(self.settings, "bos_token_id") or self.end_tokens[:1]

    @property
    def repetition_penalty(self) -> float:
        """`repetition_penalty` of the checkpoint, for `Sampling`; 1 if undefined."""
        return float(getattr(self.module.generation_config, "repetition_penalty", None) or 1.0)

    def _real(self, input_ids: Tensor) -> Tensor | None:
        """A mask (B, L) of the real tokens; None if all are real."""
        pads = named_tokens(self.settings, "pad_token_id")
        if len(pads) != 1 or pads[0] in self.end_tokens:
            return None
        real = input_ids != pads[0]
        return None if bool(real.all()) else real.long()

    def explain(self) -> str:
        """Describe what the model is, and where its parts ran in the last call."""
        text = f"transformers' {self.family.name}, type {self.module.config.model_type}; no family of Saccade's own"
        ran = self._ran or "attention calls run on Saccade's kernels where these are faster; no call yet"
        return f"{text}\n{ran}{described(self)}"

    @contextmanager
    def accelerated(self, tokens: int = 0) -> Iterator[None]:
        """A block whose attention calls run on Saccade's kernels, and for many tokens also its layers, as in
        `saccade.accelerate(model)`."""
        if torch.compiler.is_compiling():
            yield
            return
        whole = tokens >= _MANY and not torch.is_grad_enabled() and not is_accelerated(self.module)
        run = accelerate(self.module) if whole else accelerate()
        with run:
            yield
        self._ran = run.explain()

    @property
    def place(self) -> tuple[Path, str | None] | None:
        """The folder it was loaded from, and the name of the GGUF file in it; None for a model made in memory."""
        if self.file is not None:
            return self.file.parent, self.file.name
        return None if self.folder is None else (self.folder, None)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer, as transformers reads it. ValueError if there is none, or it is no fast one."""
        if self.place is None:
            raise FileNotFoundError("tokenizer: the model was not loaded from a folder, so it has no tokenizer")
        where = self.file or self.folder
        try:
            with contained():
                tokenizer = read_tokenizer(*self.place)
        except UnreadableCheckpoint as error:
            raise ValueError(f"{where}: {error}") from None
        return TextTokenizer(_files(tokenizer, str(where)), self.longest)

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens by the configuration; None if unknown."""
        config = self.module.config.get_text_config()
        known: int | None = getattr(config, "max_position_embeddings", None)
        return known if known is None or known > 0 else None  # XLNet has -1

    def prepare(self, inputs: Any, rate: int | None = None) -> dict[str, Tensor]:
        """Images or sounds as inputs of `forward`, by transformers' processor of the folder.

        Args:
            inputs: images (PIL, arrays) or sounds (arrays); one or a list.
            rate: of sounds, in Hz.
        """
        import transformers

        kind = _PROCESSORS.get(self.module.main_input_name)
        if kind is None or self.folder is None:
            raise ValueError(
                f"prepare: {self.family.name} reads no images or sounds from a folder; use model.tokenizer"
            )
        with contained():
            processor = getattr(transformers, kind).from_pretrained(
                str(self.folder), local_files_only=True, trust_remote_code=False
            )
            return dict(processor(inputs, return_tensors="pt", **({} if rate is None else {"sampling_rate": rate})))

    def save(self, folder: str | Path, *, weights: str = SAFE) -> None:
        """Write the folder with transformers' `save_pretrained`, and the tokenizer's files. Each file is atomic.

        Linear layers of 8 bits are written as in other models; ValueError for other forms.
        """
        tied = getattr(self.module.config.get_text_config(), "tie_word_embeddings", False)
        output = self.module.get_output_embeddings() if tied else None
        left_out = next((name for name, part in self.module.named_modules() if part is output), None)
        eight, folder = in_eight_bits(self.module, None if output is None else left_out), Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with contained(), tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
            self.module.save_pretrained(temporary, state_dict={} if eight.held else None)
            if eight.held:
                write_eight_bits(Path(temporary), eight, self.dtype)
            if self.file is not None:
                read_tokenizer(self.file.parent, self.file.name).save_pretrained(temporary)
            for file in Path(temporary).iterdir():
                os.replace(file, folder / (weights if file.name == SAFE else file.name))
        self._copy_companions(folder)

    def config_json(self) -> str:
        return str(self.module.config.to_json_string(use_diff=False))


def _files(tokenizer: Any, where: str) -> TokenizerFiles:
    """A tokenizer of transformers as one of the `tokenizers` library."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise ValueError(f"{where}: its {type(tokenizer).__name__} has no fast form; a tokenizer.json is needed")
    inner.no_padding()
    inner.no_truncation()
    ids = {role: getattr(tokenizer, f"{role}_token_id", None) for role in _ROLES}
    limit = tokenizer.model_max_length
    return TokenizerFiles(
        inner,
        {role: number for role, number in ids.items() if number is not None},
        frozenset(tokenizer.all_special_ids),
        limit if 0 < limit < _UNLIMITED else None,
        tokenizer.padding_side == "left",
        tokenizer.truncation_side == "left",
        "token_type_ids" in tokenizer.model_input_names,
    )


def _decoding(sampling: Sampling | BeamSearch | None) -> tuple[dict[str, Any], int | None]:
    """The arguments of transformers' `generate`, and the seed of sampling."""
    if isinstance(sampling, BeamSearch):
        beams = {"num_beams": sampling.beams, "length_penalty": sampling.length_penalty}
        return {"do_sample": False, "early_stopping": sampling.early_stopping, **beams}, None
    if sampling is None:
        return {"do_sample": False}, None
    how: dict[str, Any] = {"num_beams": 1, "repetition_penalty": sampling.repetition_penalty}
    if not sampling.temperature:
        return {"do_sample": False, **how}, None
    how |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    seed = torch.Generator().seed() if sampling.seed is None else sampling.seed
    return {"do_sample": True, **how}, seed


def _named(output: Any, mask: Tensor | None, encoder_mask: Tensor | None) -> ModelOutput:
    """transformers' output as ours, with 0 at padding."""
    values = {_RENAMED.get(name, name): value for name, value in output.items()}
    if "last_hidden_state" not in values and values.get("hidden_states"):
        values["last_hidden_state"] = values["hidden_states"][-1]
    for name, value in values.items():
        of_texts = name == "logits" and isinstance(value, Tensor) and value.dim() == 2  # of classes
        if name in _OF_TOKENS and not of_texts:
            values[name] = _zeroed(value, encoder_mask if name.startswith("encoder_") else mask)
    ours = {name: value for name, value in values.items() if name in _FIELDS}
    others = {name: value for name, value in values.items() if name not in _FIELDS}
    return ModelOutput(**ours, others=others)


def _zeroed(value: Any, mask: Tensor | None) -> Any:
    """States or logits of tokens, with 0 at padding of a mask (B, L)."""
    if isinstance(value, tuple):
        return tuple(_zeroed(states, mask) for states in value)
    if mask is None or mask.dim() != 2 or not isinstance(value, Tensor) or value.shape[:2] != mask.shape:
        return value
    padding = mask == 0
    if not torch.compiler.is_compiling() and not bool(padding.any()):
        return value
    return value.masked_fill(padding.view(*padding.shape, *[1] * (value.dim() - 2)), 0)
