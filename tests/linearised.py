"""Small random models, and the same models with scales, heads and feed-forward layers held at one run: the oracle.

The oracle runs forward through the model's own modules: every norm is replaced by `A x + c` with A of one run, what
heads and feed-forward layers add by what they added in that run. That is linear in what is added, so the share of a
component is what is missing when it adds nothing. Nothing of it is computed as `saccade.attribution` does.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import nn

from saccade.models.checkpoints.settings import CheckpointSettings
from saccade.models.families.gpt2 import FAMILY
from saccade.models.model import Request
from saccade.nn import AttentionConfig, BlockConfig, Decoder

WIDTH, HEADS, KV_HEADS, LENGTH, VOCABULARY, LAYERS = 23, 6, 3, 11, 31, 3


def built(family, head, stored=(), **values):
    """A model of a family, of a config.json with these values."""
    settings = CheckpointSettings(values, Path("config.json"), [f"tensor {n}" for n in range(9)] + list(stored))
    model = family.build(settings, Request(head))
    model.settings, model.request, model.family = settings, Request(head), family
    return model


def randomised(model, seed=3):
    """Every number of the model random, in float64: biases, norms and their running numbers too."""
    model = model.double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor, spread=0.5):
        return spread * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        for parameter in model.parameters():
            vector = parameter.ndim == 1
            parameter.copy_(1.0 + drawn(parameter) if vector else drawn(parameter, parameter.shape[1] ** -0.5))
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.copy_(drawn(buffer).abs() + 0.5)
    return model


def decoder(placement="pre", norm="layer", *, hidden=29, bias=True, final_norm=None, **attention):
    """A decoder of 3 blocks with learned positions and a head of its own matrix, tied to the embedding."""
    config = AttentionConfig(
        WIDTH, HEADS, kv_heads=KV_HEADS, head_width=10, value_head_width=7, bias=bias, output_bias=bias, **attention
    )
    block = BlockConfig(config, hidden=hidden, activation="gelu", norm=norm, placement=placement, bias=bias)
    gpt2 = dict(n_embd=WIDTH, n_head=1, n_layer=1, n_positions=LENGTH + 2, vocab_size=VOCABULARY)
    model = built(FAMILY, "causal-lm", **gpt2)
    model.decoder = Decoder(block, LAYERS, final_norm=final_norm)
    return randomised(model)


def ids(seed=5):
    return torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))


class Linearised:
    """A decoder of `decoder(...)` held at one run."""

    def __init__(self, model, tokens):
        self.model, self.tokens, self.kept = model, tokens, {}
        self.norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm | nn.BatchNorm1d)]
        blocks = list(model.decoder.blocks)
        self.outputs = {block.attention.output: layer for layer, block in enumerate(blocks)}
        self.layers = {block.feed_forward: n for n, block in enumerate(blocks) if block.feed_forward is not None}
        reading = [*self.norms, *self.outputs]

        def keep_read(module, given):
            self.kept[module] = given[0]

        def keep_given(module, given, out):
            self.kept[module] = out

        with self._hooks([(m.register_forward_pre_hook, keep_read) for m in reading], self.layers, keep_given):
            self.calls = []
            self.logits = self._run()

    def without(self, component=None, *, source=None):
        """(logits (L, V), [calls]) when the component adds nothing, or a head nothing of a (Dv,) vector `source`."""
        self.calls = []
        read = [(m.register_forward_pre_hook, self._heads(component, source)) for m in self.outputs]
        embedding = [(self.model.tokens.register_forward_hook, self._embedded(component, "token"))]
        embedding += [(self.model.places.register_forward_hook, self._embedded(component, "position"))]
        norms = [(m.register_forward_hook, self._normed(component)) for m in self.norms]
        with self._biases_removed(component), self._hooks(read + embedding + norms, self.layers, self._fed(component)):
            return self._run(), self.calls

    def _run(self):
        with torch.no_grad():
            return self.model(self.tokens, observe=lambda layer, call: self.calls.append(call)).logits[0]

    @contextlib.contextmanager
    def _hooks(self, registered, layers, fed):
        hooks = [register(hook) for register, hook in registered] + [m.register_forward_hook(fed) for m in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _heads(self, component, source):
        def hook(module, given):
            added = self.kept[module].clone()
            if component is not None and component[:2] == ("head", self.outputs[module]):
                heads = added.view(*added.shape[:2], HEADS, -1)
                heads[:, :, component[2]] -= heads[:, :, component[2]] if source is None else source
            return (added,)

        return hook

    def _fed(self, component):
        def hook(module, given, out):
            gone = component is not None and component[:2] == ("feed_forward", self.layers[module])
            return self.kept[module] * (0.0 if gone else 1.0)

        return hook

    def _embedded(self, component, kind):
        def hook(module, given, out):
            if component is None or component[0] != kind:
                return out
            return given[0] if kind == "position" else torch.zeros_like(out)

        return hook

    def _normed(self, component):
        """`A x + c` of the first run; no c without biases."""
        constant = 0.0 if component is not None and component[0] == "biases" else 1.0

        def hook(module, given, out):
            x, first = given[0], self.kept[module]
            if isinstance(module, nn.BatchNorm1d):
                scale = module.weight / torch.sqrt(module.running_var + module.eps)
                return x * scale + constant * (module.bias - module.running_mean * scale)
            if isinstance(module, nn.RMSNorm):
                eps = torch.finfo(torch.float64).eps if module.eps is None else module.eps
                return x * module.weight / torch.sqrt(first.pow(2).mean(-1, keepdim=True) + eps)
            scale = module.weight / torch.sqrt(first.var(-1, keepdim=True, unbiased=False) + module.eps)
            added = 0.0 if module.bias is None else constant * module.bias
            return (x - x.mean(-1, keepdim=True)) * scale + added

        return hook

    @contextlib.contextmanager
    def _biases_removed(self, component):
        """Those of projections; what norms add, their hook leaves out."""
        if component is None or component[0] != "biases":
            yield
            return
        attentions = [block.attention for block in self.model.decoder.blocks]
        layers = [layer for one in attentions for layer in one.children() if isinstance(layer, nn.Linear)]
        biases = [(layer, layer.bias) for layer in layers]
        try:
            for layer, _ in biases:
                layer.bias = None
            yield
        finally:
            for layer, bias in biases:
                layer.bias = bias
