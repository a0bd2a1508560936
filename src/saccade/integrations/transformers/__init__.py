"""Saccade as an attention implementation of Hugging Face transformers: `register()`, `unregister()`.

Of what sees the calls of its models, `functions_wrapped_by` and `meaning_of` are for everybody.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ...interception._hooks.transformers import (
    MaskTensor as MaskTensor,
    UnknownAttention,
    functions_wrapped_by,
    meaning_of,
)
from ...operator._call import AttentionCall as AttentionCall
from ...support._extras import installing
from ._attention import Attentions, function_giving, saccade_mask, statistics, weights
from ._classes import as_before, refuse_by_name

__all__ = ["UnknownAttention", "functions_wrapped_by", "meaning_of", "register", "unregister"]

NAME = "saccade"
LEAST = (5, 0)


def register(*, attentions: Attentions = "weights", ignore: Iterable[str] = ()) -> None:
    """Register "saccade" as an attention implementation of transformers.

    Every model that looks its attention function up there then takes
    `AutoModel.from_pretrained(..., attn_implementation="saccade")` and `model.set_attn_implementation("saccade")`. A
    second call replaces the first.

    Models that look up no attention function raise an error: Bloom, MPT, CodeGen, XGLM, Longformer, BigBird and others;
    so do those that choose a class of attention when they are built: GPT-J, Falcon, GPT-Neo, SAM. Models that request
    no mask either (DeBERTa, XLNet) compute their own attention, as before. Arguments that a model's eager function
    ignores are ignored; `ignore` is for models without such a function.

    Args:
        attentions: what `output_attentions=True` returns for each layer: "weights", (B, Hq, Lq, Lk) as eager does, or
            "statistics", a `saccade.Statistics` in memory linear in the length.
        ignore: names of arguments of attention functions that are ignored.

    Raises:
        ValueError: another word for `attentions`.
        TypeError: `ignore` is one string.
        ImportError: transformers is missing or older than 5.0.

    Example:
        >>> import torch, transformers
        >>> from saccade.integrations.transformers import register, unregister
        >>> register()
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
        ... )
        >>> model = transformers.LlamaModel(config)
        >>> expected = model(torch.tensor([[1, 2, 3]])).last_hidden_state
        >>> model.set_attn_implementation("saccade")
        >>> out = model(torch.tensor([[1, 2, 3]])).last_hidden_state
        >>> torch.allclose(out, expected, atol=1e-5)
        True
        >>> unregister()
    """
    seconds = {"weights": weights, "statistics": statistics}
    if attentions not in seconds:
        raise ValueError(f'register: attentions must be "weights" or "statistics", got {attentions!r}')
    if isinstance(ignore, str):
        raise TypeError(f"register: ignore must be names, as in [{ignore!r}], got {ignore!r}")
    functions, masks = _interfaces()
    functions.register(NAME, function_giving(seconds[attentions], frozenset(ignore)))
    masks.register(NAME, saccade_mask)
    refuse_by_name(_model(), NAME)


def unregister() -> None:
    """Remove "saccade" from transformers again. A model that is still set to it then raises transformers' own KeyError.

    Example:
        >>> import transformers
        >>> from saccade.integrations.transformers import register, unregister
        >>> register()
        >>> "saccade" in transformers.AttentionInterface()
        True
        >>> unregister()
        >>> "saccade" in transformers.AttentionInterface()
        False
    """
    if "transformers" in sys.modules:
        for interface in _interfaces():
            interface._global_mapping.pop(NAME, None)
        as_before(_model(), NAME)


def _interfaces() -> tuple[Any, Any]:
    need = f"transformers >= 5.0 is needed: {installing('hf')}"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"transformers is not installed; {need}") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < LEAST:
        raise ImportError(f"this is transformers {transformers.__version__}; {need}")
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    return AttentionInterface, AttentionMaskInterface


def _model() -> Any:
    from transformers.modeling_utils import PreTrainedModel

    return PreTrainedModel
