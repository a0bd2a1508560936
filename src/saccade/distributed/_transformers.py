"""Models of transformers on shards: decoders and encoders.

A model asks transformers for a mask function and for an attention function. In the block both are ours: the mask that
the layer asks for is read for the whole sequence, and the attention goes over all ranks. Hooks check what the model is
called with, since a shard looks like a shorter sequence to everything else.

Shape legend: B batch, L rows of the whole sequence, n rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..interception._hooks.transformers import MaskTensor, functions_wrapped_by, masks_wrapped_by, meaning_of
from ..interception._hooks.transformers._mask_functions import MaskFrame, UnknownMaskFunction, read
from ..operator._masks import Causal, Mask, Window
from ._batches import check_padding
from ._caches import Prompt, ShardedLayer
from ._plan import SequencePlan
from ._running import RunningModel

# Types whose logits, loss and gradients were compared with one process, each in a small model. Others may mix tokens
# elsewhere (convolutions, states), or count positions themselves, which nothing here would notice.
DECODERS = (
    "apertus arcee aria_text bitnet cohere cohere2 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neox "
    "gpt_oss granite helium hunyuan_v1_dense llama ministral mistral mixtral nemotron olmo olmo2 olmo3 opt phi "
    "phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2"
).split()
ENCODERS = (
    "albert bert camembert data2vec-text distilbert electra ernie esm eurobert gte jina_embeddings_v3 modernbert "
    "nomic_bert roberta roberta-prelayernorm ultrabert xlm-roberta xlm-roberta-xl xmod"
).split()
HEADS = {"decoders": ("ForCausalLM", "LMHeadModel"), "encoders": ("ForMaskedLM", "ForTokenClassification")}
_EVERYTHING = Window(None, None)


def models_of_transformers(model: nn.Module) -> list[Any]:
    """The models of transformers within a module. TypeError for one that is not known to be right on shards."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return []
    found: list[Any] = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for part in found:
        config, name, encodes = part.config, type(part).__name__, _encodes(part)
        refused = getattr(config, "add_cross_attention", False) or (encodes and getattr(config, "is_decoder", False))
        if refused or not (encodes or config.model_type in DECODERS):
            raise TypeError(
                f"context_parallel: {name} has type {config.model_type!r}; known to be right on shards are, without "
                f"cross-attention, the decoders {', '.join(DECODERS)} and the encoders {', '.join(ENCODERS)}"
            )
        heads = HEADS["encoders" if encodes else "decoders"]
        if part.base_model is not part and not name.endswith(heads):
            raise TypeError(
                f"context_parallel: {name} has a head that may pool rows; expected {' or '.join(heads)}, or the base "
                "model: each process can call the head on plan.unshard(rows, 1), and divide its loss by plan.ranks"
            )
    return found


def _encodes(module: Any) -> bool:
    return module.config.model_type in ENCODERS


def _has_usual_loss(module: Any) -> bool:
    """Whether the loss of a head is transformers' own: a mean of cross-entropies."""
    computes = next(base for base in type(module).__mro__ if "forward" in vars(base))
    return computes.__module__.startswith("transformers.") and "_loss_function" not in vars(module)


class RunningTransformers(RunningModel):
    """Models of transformers, perhaps inside of another module."""

    def __init__(self, model: nn.Module, plan: SequencePlan, parts: list[Any]) -> None:
        super().__init__(model, plan)
        self._parts = parts
        self._calls = 0  # of attention in the model that runs
        self._names = {id(module): name for name, module in model.named_modules()}

    def modules(self) -> list[nn.Module]:
        return self._parts

    def replaced(self) -> list[AbstractContextManager[Any]]:
        return [masks_wrapped_by(self._wrap_mask), functions_wrapped_by(self._wrap)]

    # --- the model's call -------------------------------------------------------------------------------------------

    def arguments(self, module: Any, given: dict[str, Any], known: Container[str], where: str) -> None:
        inputs = [given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None]
        if module.base_model is module:
            self._calls = 0
        cache = self._cache_of(module, given, where)
        before = 0 if cache is None else cache.get_seq_length()
        if cache is not None:
            self.take_cache(cache.prompt, before, given, where, "use_cache", module.training)
        if self.continues and inputs and given.get("position_ids") is None:
            given["position_ids"] = torch.arange(before, before + inputs[0].shape[1], device=inputs[0].device)[None]
        self._check(given, module, where)
        if "use_cache" in known:
            given["use_cache"] = cache is not None
        if inputs and "attention_mask" in known:
            # With a mask transformers does not look for documents in positions, which on shards have other gaps.
            ones = inputs[0].new_ones(len(inputs[0]), before + inputs[0].shape[1], dtype=torch.long)
            given["attention_mask"] = ones if module.base_model is module else None  # a head's loss has all tokens
        if _encodes(module) and module.base_model is not module:
            if given.get("labels") is not None and not _has_usual_loss(module):
                raise ValueError(
                    f"{where}: labels: its loss is not transformers' own, which shards get; give no labels, and "
                    "divide the sum of your loss over this rank's rows by num_items_in_batch"
                )
            self.take_labels(module, given, given.get("labels"))  # those heads take means over their own rows
        places: Any = getattr(getattr(module, "embeddings", None), "position_embeddings", None)
        if getattr(places, "padding_idx", None) is not None:
            given["position_ids"] = self.counted(given.get("input_ids"), given["position_ids"], places.padding_idx)

    def _cache_of(self, module: Any, given: dict[str, Any], where: str) -> ModelCache | None:
        cache = given.get("past_key_values")
        if cache is None and not given.get("use_cache"):
            return None
        if cache is None:
            cache = given["past_key_values"] = ModelCache(self.plan)
        if _encodes(module) or not isinstance(cache, ModelCache) or cache.prompt.plan is not self.plan:
            raise ValueError(
                f"{where}: past_key_values is a {type(cache).__name__}, expected what a decoder returned for the "
                "prompt when it was called with use_cache=True on shards of this plan"
            )
        return cache

    def _check(self, given: dict[str, Any], module: Any, where: str) -> None:
        if given.get("position_ids") is None:
            raise ValueError(
                f"{where}: position_ids are missing: without them a shard begins at 0; see distributed.shard"
            )
        if not self.continues:
            self.check_rows(given, where)
        check_padding(given.get("attention_mask"), where)
        if given.get("encoder_hidden_states") is not None:
            raise ValueError(f"{where}: encoder_hidden_states: cross-attention is not shared among ranks")
        self.check_labels(given, where, shifted=not _encodes(module))
        if getattr(module.config, "token_dropout", False):
            raise ValueError(f"{where}: token_dropout scales by the share of masked tokens, which differs by rank")
        if given.get("output_attentions") or getattr(module.config, "output_attentions", False):
            raise ValueError(f"{where}: output_attentions: not there on shards")
        for name, part in module.named_modules():
            if module.training and getattr(part, "layerdrop", 0):
                raise ValueError(f"{where}: layerdrop leaves out other layers on each rank; set it to 0")
            kind = str(getattr(part, "rope_type", ""))
            if "dynamic" in kind or "longrope" in kind:
                raise ValueError(
                    f"{where}: {name} scales by the length of the sequence ({kind}), which differs by rank"
                )

    def result(self, module: Any, output: Any) -> Any:
        """Losses of routers are of all tokens: each rank computes them whole, and has its share in its loss. Vectors
        that encoders pool from the first row are left out: most ranks have another one."""
        layers = getattr(module.config, "num_hidden_layers", 1)
        if module.base_model is module and self._calls < layers:
            raise ValueError(
                f"context_parallel: {type(module).__name__} called transformers' attention functions {self._calls} "
                f"times, expected {layers}, once in each layer: attention computed otherwise sees this rank's rows"
            )
        if _encodes(module):
            if isinstance(output, tuple):
                raise ValueError(f"context_parallel: {type(module).__name__}: return_dict is False, expected True")
            if "pooler_output" in output:
                output = type(output)(**{name: x for name, x in output.items() if name != "pooler_output"})
            return self.with_loss(module, output)
        logits, loss = getattr(output, "router_logits", None), getattr(output, "loss", None)
        if logits is not None and module.base_model is module and not self.continues:
            output.router_logits = tuple(map(self._whole, logits))
        elif logits is not None and loss is not None:
            output.loss = loss - (1 - 1 / self.plan.ranks) * module.router_aux_loss_coef * output.aux_loss
        return output

    def _whole(self, logits: Tensor) -> Tensor:
        """(B n, experts) to (B L, experts)."""
        return self.plan.unshard(logits.view(-1, self.held, logits.shape[-1]), 1).flatten(0, 1)

    # --- what its layers ask for ------------------------------------------------------------------------------------

    def _wrap_mask(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **more: Any) -> Any:
            if not self.running:
                return function(batch_size, q_length, kv_length, *args, **more)
            length = self.plan.length
            given = more.get("mask_function")
            try:
                whole: Any = Causal() if given is None else read(given, MaskFrame(length, length, 0, 0))
            except UnknownMaskFunction:
                whole = _Unknown(getattr(given, "__qualname__", repr(given)))
            return _LayerMask(whole, (batch_size, 1, q_length, kv_length), more.get("device", "cpu"))

        return mask

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **more: Any) -> Any:
            name = self._names.get(id(module))
            if name is None or not self.running:
                return function(module, query, key, value, mask, **more)
            self._calls += 1
            return self._attend(f"context_parallel: layer {name}", module, query, key, value, mask, more), None

        return attend

    def _attend(
        self, where: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, more: dict[str, Any]
    ) -> Tensor:
        """(B, n, H, D)."""
        own = mask.mask if isinstance(mask, _LayerMask) else mask
        if isinstance(own, _Unknown) or not isinstance(own, Mask | None):
            what = (
                own.name if isinstance(own, _Unknown) else f"a {type(own).__name__} {tuple(getattr(own, 'shape', ()))}"
            )
            raise ValueError(f"{where}: its mask is {what}, which is not known for the whole sequence")
        if mask is None:
            raise ValueError(f"{where}: it has asked for no mask, so that what it sees is not known")
        call = meaning_of(module, query, key, value, _EVERYTHING if own is None else own, **more)
        if call.bias is not None or more.get("cu_seq_lens_q") is not None:
            raise ValueError(f"{where}: biases and cu_seq_lens count positions of a shard")
        scoring = {name: value for name, value in call.arguments().items() if name != "mask"}
        layer = self.layer_of(key, where)
        out, _ = self.attend(where, call.query, call.key, call.value, own, layer, **scoring)
        return out.transpose(1, 2).contiguous()


class ModelCache:
    """The keys and values of a prompt, each on the rank that has its row, and those of the tokens after it. It stands
    in place of transformers' Cache, whose methods it has.

    Attributes:
        layers: by their numbers.
    """

    is_compileable, is_sliding = False, ()

    def __init__(self, plan: SequencePlan) -> None:
        self.prompt, self.layers = Prompt(plan), dict[Any, ShardedLayer]()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        self.layers.setdefault(layer_idx, ShardedLayer(self.prompt)).append(key, value, None)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.layers[layer_idx].lengths()[0]) if layer_idx in self.layers else 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def crop(self, max_length: int) -> None:
        if max_length > 0:  # older versions of transformers read it as the number of tokens that stay
            raise ValueError(f"crop: expected a negative number, -n for the last n tokens, got {max_length}")
        counts = [int(layer.lengths()[0]) for layer in self.layers.values()]
        end = max(counts, default=0) + max_length
        if min(counts, default=0) < end:
            raise ValueError(f"crop: its layers have {min(counts)} to {max(counts)} tokens, got {max_length}")
        for layer, count in zip(self.layers.values(), counts, strict=True):
            layer.rollback(count - end)  # also evens layers after a call that failed

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.layers.values():
            layer.reorder(beam_idx)


class _LayerMask(MaskTensor):
    """A layer's mask of the whole sequence, in the shape that the model expects for its shard. It has no entries."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ValueError(
            f"context_parallel: a layer reads its mask ({func}): it computes attention itself, of this rank's rows"
        )


class _Unknown(NamedTuple):
    """Stands for a mask that cannot be read, until the layer is known that has it."""

    name: str
