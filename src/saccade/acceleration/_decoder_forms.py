"""The layers of transformers' decoders that may be computed natively, by the names of their parts.

Shape legend: E width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..operator._native_step import ACTIVATIONS, StepNorm
from ._linears import PackedLinear, activation_of, holds_rounded, is_linear
from ._structure import has_own_forward


class Form(NamedTuple):
    """The names of a layer's parts. `projections` are of the attention, three or one that joins them; `up` is gate and
    up where the weight has twice the rows. `norms`: of attention, behind it, of the feed-forward layer, behind that."""

    attention: str
    projections: tuple[str, ...]
    output: str
    up: str
    down: str
    norms: tuple[str | None, ...]
    gate: str | None = None
    head_norms: tuple[str, str] | None = None
    parallel: bool = False
    by_head: bool = False  # the joined projection has each head's query, key and value side by side


_SEPARATE = "q_proj", "k_proj", "v_proj"
_TWO = "input_layernorm", None, "post_attention_layernorm", None
_FOUR = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
_GATED = Form("self_attn", _SEPARATE, "o_proj", "mlp.up_proj", "mlp.down_proj", _TWO, "mlp.gate_proj")
_HEADS = "q_norm", "k_norm"
FORMS = (
    _GATED,  # Llama, Mistral, Qwen2
    _GATED._replace(head_norms=_HEADS),  # Qwen3
    _GATED._replace(norms=_FOUR),  # Gemma 2
    _GATED._replace(norms=_FOUR, head_norms=_HEADS),  # Gemma 3
    Form("self_attn", ("qkv_proj",), "o_proj", "mlp.gate_up_proj", "mlp.down_proj", _TWO),  # Phi-3
    Form("self_attn", _SEPARATE, "o_proj", "mlp.c_fc", "mlp.c_proj", _TWO),  # StarCoder 2
    Form("self_attn", _SEPARATE, "dense", "mlp.fc1", "mlp.fc2", ("input_layernorm", None, None, None), parallel=True),
    Form("self_attn", _SEPARATE, "out_proj", "fc1", "fc2", ("self_attn_layer_norm", None, "final_layer_norm", None)),
    Form("attention", ("query_key_value",), "dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", _TWO, by_head=True),
    Form("attn", ("c_attn",), "c_proj", "mlp.c_fc", "mlp.c_proj", ("ln_1", None, "ln_2", None)),  # GPT-2
)


Linear = PackedLinear | nn.Module  # or one that holds its weight in few bits


class Parts(NamedTuple):
    """The parts of a layer that has a `Form`."""

    form: Form
    projections: tuple[Linear, ...]
    output: Linear
    up: Linear
    gate: Linear | None
    down: Linear
    norms: tuple[StepNorm | None, ...]  # of the form's norms and then of the heads', with the weights of `norm_modules`
    norm_modules: tuple[nn.Module | None, ...]
    activation: str

    def linears(self) -> tuple[Linear, ...]:
        """All linear layers."""
        return (*self.projections, self.output, self.up, self.down, *(() if self.gate is None else (self.gate,)))


def parts_of(layer: nn.Module, linears: dict[nn.Module, PackedLinear]) -> Parts | None:
    """The parts of a layer that may be computed natively; None for any other module."""
    if not type(layer).__module__.startswith("transformers."):
        return None
    modules = dict(layer.named_modules())
    return next((parts for form in FORMS if (parts := _parts(form, modules, linears)) is not None), None)


def _parts(form: Form, modules: dict[str, nn.Module], linears: dict[nn.Module, PackedLinear]) -> Parts | None:
    paths = [f"{form.attention}.{name}" for name in (*form.projections, form.output)] + [form.up, form.down]
    found = [modules.get(path) for path in (*paths, *([] if form.gate is None else [form.gate]))]
    heads = form.head_norms or (None, None)
    names = (*form.norms, *(None if name is None else f"{form.attention}.{name}" for name in heads))
    norms = [None if name is None else modules.get(name) for name in names]
    if any(module is None and name is not None for module, name in zip(norms, names, strict=True)):
        return None
    known = {id(module) for module in (*found, *norms)}
    rest = [module for module in modules.values() if id(module) not in known]
    functions = [m for m in rest if not m._modules and not isinstance(m, nn.Dropout | nn.Identity)]
    holding = any(module._parameters or module._buffers for module in rest)
    if holding or len(functions) != 1 or not all(map(_is_read, found)):
        return None
    activation, described = activation_of(functions[0]), [None if norm is None else _described(norm) for norm in norms]
    if activation not in ACTIVATIONS or any(
        one is None and norm is not None for one, norm in zip(described, norms, strict=True)
    ):
        return None
    packed: list[Linear] = [
        part if holds_rounded(part) else linears.get(part) or PackedLinear(part, None)
        for part in found
        if part is not None
    ]
    count = len(form.projections)
    output, up, down, *gate = packed[count:]
    return Parts(
        form,
        tuple(packed[:count]),
        output,
        up,
        gate[0] if gate else None,
        down,
        tuple(described),
        tuple(norms),
        activation,
    )


def _is_read(module: nn.Module | None) -> bool:
    return module is not None and (is_linear(module) or holds_rounded(module))


def _described(norm: Any) -> StepNorm | None:
    """A norm's formula, without its weights; None for a module that is none."""
    if type(norm) is nn.LayerNorm:
        return StepNorm(2)
    plus = _plus(norm)
    return None if plus is None else StepNorm(1, plus=plus)


def _plus(norm: Any) -> float | None:
    """0 or 1 for an RMS norm that multiplies by its weight or by 1 + weight; None for another module."""
    weight, eps = getattr(norm, "weight", None), eps_of(norm)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None or len(list(norm.parameters())) != 1:
        return None
    x = torch.randn(1, 1, len(weight), generator=torch.Generator().manual_seed(0))
    if has_own_forward(norm):
        return None
    try:
        with torch.no_grad():
            got = type(norm).forward(norm, x.to(weight.dtype)).float()
    except Exception:  # whatever it is, it is no norm
        return None
    if got.shape != x.shape:
        return None
    expected = [torch.rms_norm(x, weight.shape, weight.detach().float() + plus, eps) for plus in (0.0, 1.0)]
    errors = [float((got - one).abs().max()) for one in expected]
    near = 8 * torch.finfo(weight.dtype).eps * float(got.abs().max())
    return float(errors.index(min(errors))) if min(errors) <= near else None


def eps_of(norm: Any) -> float | None:
    found = [getattr(norm, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
    return next((eps for eps in found if isinstance(eps, float)), None)
