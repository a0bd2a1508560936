"""The residual stream of models that others wrote: against decompositions by hand, and what cannot be taken apart.

Tolerances: norms of transformers compute in float32, whose rounding is 1e-7 of some ten numbers of size 1.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import saccade
from saccade.attribution import Component

IDS = torch.tensor([[3, 11, 29, 7, 5, 13, 2]])
ROW, TARGET, HEADS = 4, 17, 3
SMALL = dict(
    **dict(vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=29),
    **dict(bos_token_id=1, eos_token_id=2, pad_token_id=0),
)


def random(model, seed=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


class Seen:
    """The first input and the output of each module of a run, at the row."""

    def __init__(self, model):
        self.read, self.gave = {}, {}
        hooks = [part.register_forward_hook(self._keep) for part in model.modules()]
        with torch.no_grad():
            self.logits = model(input_ids=IDS, use_cache=False).logits[0, ROW]
        for hook in hooks:
            hook.remove()

    def _keep(self, module, given, out):
        if given and torch.is_floating_point(given[0]):
            self.read[module] = given[0][0, ROW].double()
        if isinstance(out, torch.Tensor):
            self.gave[module] = out[0, ROW].double()


def rms(norm, x, gain):
    """x -> norm(x) with the scale of x."""
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    scale = torch.rsqrt(x.square().mean() + eps)
    return lambda part: part * scale * gain


def heads(projection, read):
    """What each head writes: its columns of the output projection times what it made."""
    columns = projection.weight.detach().unflatten(1, (HEADS, -1))
    return torch.einsum("ehd,hd->he", columns, read.unflatten(0, (HEADS, -1)))


def gemma2():
    """Norms behind each layer too, (1 + weight), a scaled embedding, capped logits."""
    config = transformers.Gemma2Config(**SMALL, head_dim=8, num_key_value_heads=1, final_logit_softcapping=3.0)
    model = random(transformers.Gemma2ForCausalLM(config))
    seen, body = Seen(model), model.model
    parts = {Component("token"): seen.read[body.layers[0].input_layernorm]}
    for n, layer in enumerate(body.layers):
        after = layer.post_attention_layernorm
        fixed = rms(after, seen.read[after], 1 + after.weight.detach())
        for head, wrote in enumerate(heads(layer.self_attn.o_proj, seen.read[layer.self_attn.o_proj])):
            parts[Component("head", n, head)] = fixed(wrote)
        parts[Component("feed_forward", n)] = seen.gave[layer.post_feedforward_layernorm]
    last = rms(body.norm, seen.read[body.norm], 1 + body.norm.weight.detach())
    row = model.lm_head.weight.detach()[TARGET]
    raw = row @ seen.gave[body.norm]
    ratio = 3.0 * torch.tanh(raw / 3.0) / raw
    return model, seen, {component: ratio * (row @ last(part)) for component, part in parts.items()}


def gpt_neox():
    """Attention and feed-forward layer read the same stream; layer norms, and biases everywhere."""
    model = random(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL, use_parallel_residual=True)))
    seen, body = Seen(model), model.gpt_neox
    x, norm = seen.read[body.final_layer_norm], body.final_layer_norm
    gain = norm.weight.detach() / torch.sqrt(x.var(unbiased=False) + norm.eps)
    row = model.lm_head.weight.detach()[TARGET]

    def share(part):
        return row @ ((part - part.mean()) * gain)

    found = {Component("token"): share(seen.gave[body.embed_in])}
    biases = row @ norm.bias.detach()
    for n, layer in enumerate(body.layers):
        for head, wrote in enumerate(heads(layer.attention.dense, seen.read[layer.attention.dense])):
            found[Component("head", n, head)] = share(wrote)
        found[Component("feed_forward", n)] = share(seen.gave[layer.mlp])
        biases = biases + share(layer.attention.dense.bias.detach())
    return model, seen, {**found, Component("biases"): biases}


def granite():
    """Multipliers of the embedding, of what layers add, and of the logits."""
    config = transformers.GraniteConfig(
        **SMALL, num_key_value_heads=1, embedding_multiplier=5.0, residual_multiplier=0.4, logits_scaling=7.0
    )
    model = random(transformers.GraniteForCausalLM(config))
    seen, body = Seen(model), model.model
    last = rms(body.norm, seen.read[body.norm], body.norm.weight.detach())
    row = model.lm_head.weight.detach()[TARGET] / 7.0
    found = {Component("token"): row @ last(5.0 * seen.gave[body.embed_tokens])}
    for n, layer in enumerate(body.layers):
        for head, wrote in enumerate(heads(layer.self_attn.o_proj, seen.read[layer.self_attn.o_proj])):
            found[Component("head", n, head)] = row @ last(0.4 * wrote)
        found[Component("feed_forward", n)] = row @ last(0.4 * seen.gave[layer.mlp])
    return model, seen, found


@pytest.mark.parametrize("by_hand", [gemma2, gpt_neox, granite])
def test_every_part_is_that_of_a_decomposition_by_hand(by_hand):
    model, seen, expected = by_hand()
    found = saccade.attribute(model, IDS, TARGET, position=ROW)
    expected.setdefault(Component("biases"), torch.tensor(0.0))
    assert set(found.components) == set(expected)
    for component, share in zip(found.components, found.contributions, strict=True):
        assert float(share) == pytest.approx(float(expected[component]), abs=1e-5), component
    assert found.logit == pytest.approx(float(seen.logits[TARGET]), rel=1e-12)
    wide = torch.tensor([component.kind == "head" for component in found.components])
    assert torch.allclose(found.sources.sum(1), found.contributions[wide], atol=1e-5)


def test_transformers_class_is_attributed_as_the_family_here(tmp_path):
    """Two implementations of one model: logits and pairs have the same parts."""
    config = transformers.Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=10)
    theirs = random(transformers.Qwen3ForCausalLM(config))
    theirs.save_pretrained(tmp_path)
    ours = saccade.models.load(tmp_path, dtype=torch.float64)
    one, two = (saccade.attribute(model, IDS, TARGET, position=ROW) for model in (ours, theirs))
    assert one.components == two.components
    assert torch.allclose(one.contributions, two.contributions, atol=1e-5)
    assert torch.allclose(one.sources, two.sources, atol=1e-5)
    one, two = (saccade.why_attends(model, IDS, 5, 2, head=(1, 2)) for model in (ours, theirs))
    assert one.components == two.components and one.fixed == two.fixed
    assert torch.allclose(one.matrix, two.matrix, atol=1e-5)
    assert one.logit == pytest.approx(two.logit, abs=1e-5)


@pytest.mark.slow
def test_a_type_without_a_family_here_and_a_compiled_module_are_the_module(tmp_path):
    """Loaded without a tokenizer."""
    theirs = random(transformers.OlmoForCausalLM(transformers.OlmoConfig(**SMALL))).float()
    theirs.save_pretrained(tmp_path)
    expected = saccade.attribute(theirs, IDS, TARGET, position=ROW)
    for model in (saccade.models.load(tmp_path), torch.compile(theirs)):
        found = saccade.attribute(model, IDS, TARGET, position=ROW)
        assert found.components == expected.components
        assert torch.allclose(found.contributions, expected.contributions, atol=1e-5)


def test_layers_without_attention_go_by_their_path():
    config = transformers.Qwen3NextConfig(
        **{**SMALL, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
        **dict(layer_types=["linear_attention", "full_attention"] * 2),
        **dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=12, shared_expert_intermediate_size=16),
    )
    torch.manual_seed(3)
    model = transformers.Qwen3NextForCausalLM(config).eval()
    found = saccade.attribute(model, IDS, TARGET, position=ROW)
    assert [str(component) for component in found.components] == [
        "token embedding",
        *("head 0.0", "head 0.1", "head 0.2", "head 0.3", "feed-forward 0"),
        *("head 1.0", "head 1.1", "head 1.2", "head 1.3", "feed-forward 1"),
        *("model.layers.0", "model.layers.2", "biases"),
    ]
    assert found.fixed[1] == "the weights and gates of heads"
    assert all(abs(float(share)) > 0 for share in found.contributions[:-1])


def test_tokens_that_are_the_numbers_of_their_places_are_still_tokens():
    model = random(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=31, n_positions=9, n_embd=24, n_layer=1, n_head=3)
        )
    )
    counted = saccade.attribute(model, torch.arange(7)[None], TARGET, position=ROW)
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
    placeless = saccade.attribute(model, torch.arange(7)[None], TARGET, position=ROW)
    assert counted.of("position") != 0 and placeless.of("position") == 0 and placeless.of("token") != 0


def test_embeddings_of_types_and_positions_are_no_tokens():
    """Would catch: a table that all tokens read alike counted as positions. A table of zeros adds nothing."""
    model = random(transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)))
    tables = model.bert.embeddings
    kinds = {"type": tables.token_type_embeddings, "position": tables.position_embeddings}
    for kind, table in kinds.items():
        before = saccade.attribute(model, IDS, TARGET, position=ROW)
        with torch.no_grad():
            table.weight.zero_()
        after = saccade.attribute(model, IDS, TARGET, position=ROW)
        assert before.of(kind) != 0 and after.of(kind) == 0, kind


class Torch(nn.Module):
    """PyTorch's own modules, as people write a language model first; positions are cut from a parameter."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, HEADS, 37, activation="gelu", batch_first=True, norm_first=True)
        self.table, self.places = nn.Embedding(31, 24), nn.Parameter(torch.zeros(1, 9, 24))
        self.layers, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, 31)

    def forward(self, ids):
        hidden = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.out(self.layers(self.table(ids) * 24**0.5 + self.places[:, : ids.shape[1]], hidden, is_causal=True))


def test_a_model_of_pytorchs_own_modules():
    model = random(Torch())
    found = saccade.attribute(model, IDS, TARGET, position=ROW)
    assert abs(found.remainder) < 1e-12
    assert [component.kind for component in found.components if component.kind != "head"] == [
        *("token", "position", "feed_forward", "feed_forward", "biases")
    ]
    why = saccade.why_attends(model, IDS, 5, 2, head=(1, 2))
    assert abs(why.remainder) < 1e-11 and why.of_query[1] != 0


def test_half_precision_is_summed_in_single():
    model = random(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))).bfloat16()
    found = saccade.attribute(model, IDS, TARGET, position=ROW)
    wide = saccade.attribute(model.float(), IDS, TARGET, position=ROW)
    assert torch.equal(found.contributions, wide.contributions)


class Written(nn.Module):
    """Blocks whose norm, activation, projections and order of modules can be written in another way."""

    def __init__(self, act=nn.functional.relu, norm=None, linear=nn.functional.linear, apart=False, frozen=False):
        super().__init__()
        self.table, self.out = nn.Embedding(31, 24), nn.Linear(24, 31)
        heads = saccade.nn.AttentionConfig(24, heads=HEADS)
        self.attentions = nn.ModuleList(saccade.nn.MultiHeadAttention(heads) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(5))
        self.ups = nn.ModuleList(nn.Linear(24, 29) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(29, 24) for _ in range(2))
        self.act, self.linear, self.frozen = act, linear, frozen
        self.norm = norm or (lambda norm, x: norm(x))
        self.parts = nn.ModuleList(part(self, n) for n in range(2) for part in ([Attends, Feeds] if apart else [Both]))

    def attend(self, n, x):
        return x + self.attentions[n](self.norm(self.norms[2 * n], x))

    def feed(self, n, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            up = self.linear(self.norm(self.norms[2 * n + 1], x), weight=self.ups[n].weight, bias=self.ups[n].bias)
            made = self.downs[n](self.act(up))
        return torch.add(x, other=made)

    def forward(self, ids):
        x = self.table(ids)
        for part in self.parts:
            x = part(x)
        return self.out(self.norm(self.norms[4], x))


class Both(nn.Module):
    def __init__(self, model, n):
        super().__init__()
        self.run = lambda x: model.feed(n, model.attend(n, x))

    def forward(self, x):
        return self.run(x)


class Attends(Both):
    def __init__(self, model, n):
        super().__init__(model, n)
        self.run = lambda x: model.attend(n, x)


class Feeds(Both):
    def __init__(self, model, n):
        super().__init__(model, n)
        self.run = lambda x: model.feed(n, x)


def relu_in_place(h):
    h.relu_()
    return h


def relu_by_index(h):
    h[h < 0] = 0
    return h


def squashed(root):
    return lambda h: h * root(1 + h * h)


def by_moments(norm, x):
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) / torch.sqrt(variance + norm.eps) * norm.weight + norm.bias


def by_squares(norm, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().sum(-1, keepdim=True) / 24 + norm.eps) ** -0.5 * norm.weight + norm.bias


def by_length(norm, x):
    centred = x - x.mean(-1, keepdim=True)
    return nn.functional.normalize(centred, dim=-1) * 24**0.5 * norm.weight + norm.bias


WAYS = {
    "an activation that blocks share": dict(act=nn.ReLU()),
    "an activation in place": dict(act=relu_in_place),
    "an activation by its argument's name": dict(act=lambda h: nn.functional.relu(input=h)),
    "a comparison that chooses": dict(act=lambda h: torch.where(h > 0, h, 0.0)),
    "a comparison as a factor": dict(act=lambda h: h * (h > 0)),
    "a comparison as an index": dict(act=relu_by_index),
    "a comparison that hides": dict(act=lambda h: h.masked_fill(h < 0, 0.0)),
    "values without their graph": dict(act=lambda h: h * (h.data > 0).to(h.dtype)),
    "an activation in place on a view": dict(act=lambda h: (h[..., :].relu_(), h)[1]),
    "a comparison as a whole number": dict(act=lambda h: h * (h > 0).long()),
    "a part of a comparison": dict(act=lambda h: h * (h > 0).to(h.dtype)[..., :]),
    "the largest of two": dict(act=lambda h: torch.stack([h, torch.zeros_like(h)], -1).max(-1).values),
    "a frozen layer": dict(frozen=True),
    "norms by moments": dict(norm=by_moments),
    "norms by squares": dict(norm=by_squares),
    "norms by length": dict(norm=by_length),
    "layers in one list": dict(apart=True),
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
def test_one_model_written_in_another_way_has_the_same_parts(way):
    """Each way hides something else: what is not linear, a scale, or the layer that something belongs to."""
    expected = saccade.attribute(random(Written()), IDS, TARGET, position=ROW)
    found = saccade.attribute(random(Written(**WAYS[way])), IDS, TARGET, position=ROW)
    assert [str(each) for each in found.components if each.kind not in ("head", "token")] == [
        *("feed-forward 0", "feed-forward 1", "biases")
    ]
    assert found.components == expected.components
    # LayerNorm's eps is 1e-5 of variances of size 1, and `normalize` has none
    assert torch.allclose(found.contributions, expected.contributions, atol=1e-3 if way == "norms by length" else 1e-9)


def test_a_root_inside_an_activation_is_no_scale():
    """Held, it would make h / sqrt(1 + h^2) linear, and pass on what the feed-forward layer reads."""
    ways = (lambda h: h / torch.sqrt(1 + h * h), squashed(torch.rsqrt), squashed(lambda x: x**-0.5), Squash.apply)
    found = [saccade.attribute(random(Written(act=act)), IDS, TARGET, position=ROW) for act in ways]
    for other in found[:-1]:
        assert other.components == found[-1].components
        assert torch.allclose(other.contributions, found[-1].contributions, atol=1e-9)


class Squash(torch.autograd.Function):
    """h / sqrt(1 + h^2), whose inside no graph shows."""

    @staticmethod
    def forward(ctx, h):
        return h / torch.sqrt(1 + h * h)

    @staticmethod
    def backward(ctx, slope):
        raise NotImplementedError


def test_a_layer_that_runs_twice_is_two_layers():
    model = random(Written())
    for n in range(2):
        model.parts[n].run = model.parts[0].run
    once = saccade.attribute(model, IDS, TARGET, position=ROW)
    model.parts = nn.ModuleList([model.parts[0]] * 2)
    assert saccade.attribute(model, IDS, TARGET, position=ROW).components == once.components


def test_a_norm_that_is_no_scale_is_a_layer():
    """|h| as the norm of each number: a constant without a past, as a position is."""
    ways = torch.abs, lambda h: h.unsqueeze(-1).norm(dim=-1), lambda h: (h.unsqueeze(-1) ** 2).sum(-1).sqrt()
    found = [saccade.attribute(random(Written(act=act)), IDS, TARGET, position=ROW) for act in ways]
    for other in found[1:]:
        assert other.components == found[0].components
        assert torch.allclose(other.contributions, found[0].contributions, atol=1e-9)


class Ahead(Written):
    """Each feed-forward layer runs before its attention, in modules of its own or in none."""

    def __init__(self, flat):
        super().__init__(apart=True)
        self.flat = flat

    def forward(self, ids):
        x = self.table(ids)
        for n in range(2):
            x = self.attend(n, self.feed(n, x)) if self.flat else self.parts[2 * n](self.parts[2 * n + 1](x))
        return self.out(self.norm(self.norms[4], x))


def test_feed_forward_layers_ahead_of_attention_are_of_that_layer():
    one, two = (saccade.attribute(random(Ahead(flat)), IDS, TARGET, position=ROW) for flat in (False, True))
    assert one.components == two.components and "feed-forward 1" in [str(each) for each in one.components]
    assert torch.allclose(one.contributions, two.contributions, atol=1e-9)


class Placed(Written):
    """Positions of rows first, as in PyTorch's tutorial, a number that is added, and keys that stay in the model."""

    def forward(self, ids):
        x = self.table(ids).transpose(0, 1) + torch.linspace(-1, 1, ids.numel() * 24).view(-1, 1, 24).double()
        x = x.transpose(0, 1) + 0.5
        self.seen = x
        for part in self.parts:
            x = part(x)
        return self.out(self.norm(self.norms[4], x))


def test_positions_of_rows_first_and_what_a_model_keeps():
    model = random(Placed())
    found = saccade.attribute(model, IDS, TARGET, position=ROW)
    assert found.of("position") != 0 and not model.seen.requires_grad


class Reads(Written):
    """A layer behind the last attention moves rows: the logits read heads at two rows."""

    def forward(self, ids):
        x = self.table(ids)
        for part in self.parts:
            x = part(x)
        x = self.norm(self.norms[4], x)
        return self.out(0.5 * x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def test_sources_are_those_of_every_row_that_is_read():
    found = saccade.attribute(random(Reads()), IDS, TARGET, position=ROW)
    of_heads = torch.tensor([component.kind == "head" for component in found.components])
    assert torch.allclose(found.sources.sum(1), found.contributions[of_heads], atol=1e-9)


class Last(Written):
    """Logits of the last token alone, as models that generate return them."""

    def forward(self, ids):
        return super().forward(ids)[:, -1:], None


def test_logits_of_the_last_token_are_no_other_ones():
    found = saccade.attribute(random(Last()), IDS, TARGET)
    whole = saccade.attribute(random(Written()), IDS, TARGET)
    assert torch.allclose(found.contributions, whole.contributions, atol=1e-9)
    with pytest.raises(ValueError, match="position: the model has logits of the last token alone, 6; got 4"):
        saccade.attribute(random(Last()), IDS, TARGET, position=ROW)


def test_a_product_of_two_sums_is_refused():
    """Held, either factor would be as right as the other."""

    class Squared(Written):
        def forward(self, ids):
            x = self.table(ids)
            return self.out(x * self.parts[0](x))

    with pytest.raises(ValueError, match="could not be found"):
        saccade.attribute(random(Squared()), IDS, TARGET)


class Block(nn.Module):
    def __init__(self, add):
        super().__init__()
        self.attention = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(24, heads=HEADS))
        self.add = add

    def forward(self, x):
        return self.add(x, self.attention(x))


class Theirs(nn.Module):
    """A language model with another way to go on from each attention."""

    def __init__(self, add):
        super().__init__()
        self.table, self.out = nn.Embedding(31, 24), nn.Linear(24, 31)
        self.blocks = nn.ModuleList(Block(add) for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def test_a_sum_that_does_not_hold_names_its_first_operation():
    """`index_add` adds a constant that is not seen as one."""

    def add(x, y):
        return torch.index_add(x + y, 1, torch.tensor([ROW]), torch.full_like(x[:, :1], 0.7).detach())

    model = random(Theirs(add))
    with pytest.raises(
        ValueError, match=r"^model: what is added .* does not sum to it, from index_add in blocks\.0 on$"
    ):
        saccade.attribute(model, IDS, TARGET, position=ROW)


def test_a_stream_that_is_not_a_sum_is_refused_with_its_place():
    model = random(Theirs(lambda x, y: torch.softmax(x + y, -1)))
    with pytest.raises(ValueError, match=r"leads back to the embedding; it ends at softmax in blocks\.1$"):
        saccade.attribute(model, IDS, TARGET)


def test_a_run_leaves_a_foreign_model_as_it_was():
    model = random(Theirs(torch.add)).train()
    model.table.weight.requires_grad_(False)
    saccade.attribute(model, IDS, TARGET)
    with pytest.raises(ValueError, match="does not exist"):
        saccade.why_attends(model, IDS, 2, 1, head=(9, 0))
    assert model.training and not model.table.weight.requires_grad and model.out.weight.requires_grad
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_token_alone_is_not_its_place():
    """Would catch: the position counted as the token, as both tables are read by the same number."""
    config = transformers.OPTConfig(
        **{**SMALL, "num_hidden_layers": 1}, ffn_dim=29, max_position_embeddings=9, word_embed_proj_dim=24
    )
    model = random(transformers.OPTForCausalLM(config))
    found = saccade.attribute(model, torch.tensor([[2]]), TARGET)  # OPT's first place is row 2
    assert found.of("position") != 0 and found.of("token") != 0


def test_a_run_that_fails_while_it_is_recorded_says_so_and_leaves_nothing():
    class Counts(Written):
        runs = 0

        def forward(self, ids):
            self.runs += 1
            if self.runs > 1:
                raise KeyError("the second run")
            return super().forward(ids)

    model = random(Counts()).train()
    with pytest.raises(ValueError, match=r"a run that records its operations failed, KeyError: 'the second run'"):
        saccade.attribute(model, IDS, TARGET)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
