"""The decoder of an encoder-decoder: against decompositions by hand, and what cannot be taken apart.

Shape legend: L tokens that the decoder reads, S of the source, E width, H heads, D of each.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import saccade
from linearised import randomised
from saccade.attribution import Component
from saccade.inspection import open_model, read_target
from saccade.models import load

SOURCE = torch.tensor([[3, 11, 29, 7, 5]])
TOKENS = torch.tensor([[2, 13, 7, 19, 11, 23, 5]])
GIVEN = {"input_ids": SOURCE, "decoder_input_ids": TOKENS}
ROW, TARGET, AGAINST, HEADS, WIDE = 4, 17, 9, 2, 3
BART = dict(
    **dict(vocab_size=31, d_model=22, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=29, decoder_ffn_dim=29),
    **dict(encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, max_position_embeddings=17),
    **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2),
)
T5 = dict(vocab_size=31, d_model=23, d_kv=7, num_heads=WIDE, num_layers=2, d_ff=29, decoder_start_token_id=0)


def bart():
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART, scale_embedding=True))
    model.final_logits_bias.copy_(torch.arange(31.0).sin())
    return randomised(model)


def t5():
    return randomised(transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)))


def added_by_heads(query, key, value, out, scores):
    """(H, S, L, E): what each token that each head reads adds; `scores` (H, L, S) are added to the products."""
    heads = len(scores)
    q, k, v = (each.unflatten(-1, (heads, -1)).transpose(0, 1) for each in (query, key, value))
    weights = (q @ k.mT + scores).softmax(-1)
    return torch.einsum("hls,hsd,ehd->hsle", weights, v, out.unflatten(1, (heads, -1)))


class Parts(dict):
    """What has been added to a stream by component, (tokens read, L, E) of a head and (1, L, E) of all others."""

    @property
    def stream(self):
        return sum(part.sum(0) for part in self.values())

    def add(self, component, part):
        self[component] = self.get(component, 0.0) + (part if part.dim() == 3 else part[None])

    def add_heads(self, kind, layer, parts):
        for head, part in enumerate(parts):
            self.add(Component(kind, layer, head), part)

    def apply(self, linear):
        for component, part in self.items():
            self[component] = linear(part)

    def layer_norm(self, norm):
        scale = (self.stream.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
        self.apply(lambda part: (part - part.mean(-1, keepdim=True)) * scale * norm.weight)
        self.add(Component("biases"), norm.bias.expand_as(self.stream))


def bart_by_hand(model):
    """Norms behind each sum, so every part passes through all later ones; biases of the output belong to no head."""
    decoder, memory = model.get_decoder(), model.get_encoder()(SOURCE).last_hidden_state[0]
    length, eye = TOKENS.shape[1], torch.full((TOKENS.shape[1],) * 2, float("-inf")).triu(1)
    masked = {"head": eye.expand(HEADS, -1, -1), "cross_attention": torch.zeros(HEADS, length, SOURCE.shape[1])}
    parts = Parts()
    parts.add(Component("token"), decoder.embed_tokens.weight[TOKENS[0]] * 22**0.5)
    parts.add(Component("position"), decoder.embed_positions.weight[2 : length + 2])
    parts.layer_norm(decoder.layernorm_embedding)
    for n, layer in enumerate(decoder.layers):
        for kind, attention, norm in (
            ("head", layer.self_attn, layer.self_attn_layer_norm),
            ("cross_attention", layer.encoder_attn, layer.encoder_attn_layer_norm),
        ):
            read = parts.stream if kind == "head" else memory
            made = attention.q_proj(parts.stream) * 11**-0.5, attention.k_proj(read), attention.v_proj(read)
            parts.add_heads(kind, n, added_by_heads(*made, attention.out_proj.weight, masked[kind]))
            parts.add(Component("biases"), attention.out_proj.bias.expand(length, -1))
            parts.layer_norm(norm)
        parts.add(Component("feed_forward", n), layer.fc2(F.gelu(layer.fc1(parts.stream))))
        parts.layer_norm(layer.final_layer_norm)
    return parts, decoder.embed_tokens.weight, model.final_logits_bias[0]


def t5_by_hand(model):
    """Norms before each layer without a mean, and a scaled output; one table of positions for all self-attention."""
    decoder, memory = model.get_decoder(), model.get_encoder()(SOURCE).last_hidden_state[0]
    length, blocks = TOKENS.shape[1], decoder.block
    distance = torch.arange(length)[:, None] - torch.arange(length)  # up to 16, each has its own row
    placed = blocks[0].layer[0].SelfAttention.relative_attention_bias.weight[distance.clamp_min(0)].permute(2, 0, 1)
    placed = placed.masked_fill(distance < 0, float("-inf"))
    parts = Parts({Component("biases"): torch.zeros(1, length, 23, dtype=torch.float64)})
    parts.add(Component("token"), decoder.embed_tokens.weight[TOKENS[0]])

    def normed(norm, x):
        return norm.weight * x * scale_of(norm)

    def scale_of(norm):
        return (parts.stream.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    for n, block in enumerate(blocks):
        own, across, last = block.layer
        for kind, attention, norm, scores in (
            ("head", own.SelfAttention, own.layer_norm, placed),
            ("cross_attention", across.EncDecAttention, across.layer_norm, torch.zeros(WIDE, length, SOURCE.shape[1])),
        ):
            x = normed(norm, parts.stream)
            read = x if kind == "head" else memory
            made = attention.q(x), attention.k(read), attention.v(read)
            parts.add_heads(kind, n, added_by_heads(*made, attention.o.weight, scores))
        x = normed(last.layer_norm, parts.stream)
        parts.add(Component("feed_forward", n), last.DenseReluDense.wo(F.relu(last.DenseReluDense.wi(x))))
    scale = scale_of(decoder.final_layer_norm)
    parts.apply(lambda part: part * scale * decoder.final_layer_norm.weight * 23**-0.5)
    return parts, model.lm_head.weight, torch.zeros(31, dtype=torch.float64)


# transformers' T5 computes its norms in float32
@pytest.mark.parametrize(("made", "by_hand", "close"), [(bart, bart_by_hand, 1e-12), (t5, t5_by_hand, 1e-5)])
def test_every_head_is_that_of_a_decomposition_by_hand(made, by_hand, close):
    """Would catch: heads of cross-attention taken for those of self-attention, or of another layer; norms behind
    cross-attention that only its own heads pass through; encoder layers that are counted."""
    model = made()
    with torch.no_grad():
        parts, table, bias = by_hand(model)
        logits = model(**GIVEN).logits[0, ROW]
    readout = table[TARGET] - table[AGAINST]
    shares = {component: part[:, ROW] @ readout for component, part in parts.items()}
    shares[Component("biases")] += bias[TARGET] - bias[AGAINST]
    found = saccade.attribute(model, GIVEN, TARGET, against=AGAINST, position=ROW)
    assert set(found.components) == set(shares)
    for component, share in zip(found.components, found.contributions, strict=True):
        assert float(share) == pytest.approx(float(shares[component].sum()), abs=close), component
    for heads, sources in ((found.heads, found.sources), (found.cross_heads, found.cross_sources)):
        assert torch.allclose(sources, torch.stack([shares[head] for head in heads]), atol=close)
    assert found.logit == pytest.approx(float(logits[TARGET] - logits[AGAINST]), rel=1e-12)
    assert abs(found.remainder) < 1e-12
    assert found.source_labels == tuple(f"'{token}'" for token in SOURCE[0].tolist())


@pytest.mark.parametrize("made", [bart, t5])
def test_the_family_here_is_attributed_as_transformers_class(made, tmp_path):
    """Two implementations of one model. Would catch: an encoder's output that the family's decoder does not get."""
    theirs = made()
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path, dtype=torch.float64)
    one, two = (saccade.attribute(model, GIVEN, TARGET, position=ROW) for model in (ours, theirs))
    assert one.components == two.components and len(one.cross_heads) == len(one.heads)
    assert torch.allclose(one.contributions, two.contributions, atol=1e-5)
    assert torch.allclose(one.cross_sources, two.cross_sources, atol=1e-5)


def test_a_text_is_the_source_of_what_the_model_writes(tmp_path):
    """Would catch: words of the target looked for in the source, and a target explained behind its end."""
    torch.manual_seed(3)
    config = transformers.BartConfig(**{**BART, "vocab_size": 2048, "decoder_start_token_id": 0})
    theirs = transformers.BartForConditionalGeneration(config)
    theirs.generation_config = transformers.GenerationConfig(
        max_length=9, eos_token_id=0, forced_eos_token_id=0, decoder_start_token_id=0
    )
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(open_model().lm.tokenizer.to_json())
    model = load(tmp_path)
    found = saccade.attribute(open_model(tmp_path), "An owl.")
    source = torch.tensor([[*model.tokenizer.before, *model.tokenizer.encode("An owl.").ids, *model.tokenizer.after]])
    written = read_target(model, None, source)
    assert written.words[-1].special and found.pieces == written.pieces[:-1]
    assert found.position == len(found.pieces) - 1
    assert found.source_labels[-1] == "'.'" and found.cross_sources.shape[1] == source.shape[1]
    given = {"input_ids": source, "decoder_input_ids": written.ids}
    again = saccade.attribute(model, given, found.target, position=found.position)
    assert again.contributions.tolist() == pytest.approx(found.contributions.tolist(), abs=1e-6)
    word = next(word for word in written.words if not word.special)
    assert saccade.attribute(model, "An owl.", position=word.text).position == word.last - 1


@pytest.mark.parametrize("padding", [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 1, 1]])
def test_padding_of_the_source_is_read_by_no_head(padding, tmp_path):
    """Would catch: labels that shift where padding is left out: at any place by the family, at the end elsewhere."""
    mask = torch.tensor([padding])
    theirs = bart()
    theirs.save_pretrained(tmp_path)
    for model in (theirs, load(tmp_path, dtype=torch.float64)):
        found = saccade.attribute(model, {**GIVEN, "attention_mask": mask}, TARGET, position=ROW)
        read = {
            label for label, any_share in zip(found.source_labels, found.cross_sources.any(0), strict=True) if any_share
        }
        assert read == {f"'{token}'" for token, real in zip(SOURCE[0].tolist(), padding, strict=True) if real}


def test_sounds_are_read_by_an_encoder_in_half_precision():
    """Would catch: rows of the source that are given labels of tokens, and features left in half precision."""
    sizes = dict(num_mel_bins=5, max_source_positions=7, max_target_positions=17)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**BART, **sizes))
    given = {"input_features": torch.randn(1, 5, 14).half(), "decoder_input_ids": TOKENS}
    found = saccade.attribute(randomised(model).half(), given, TARGET, position=ROW)
    assert found.source_labels == tuple("0123456") and found.cross_sources.shape == (2 * HEADS, 7)
    component = found.cross_heads[-1]
    at, share = found.top_sources(*component[1:], 1, "cross_attention")[0]
    assert found.largest_sources(component)[0] == (str(at), share)
    assert float(found.head_map("cross_attention")[1, 1]) == found.of("cross_attention", 1, 1)
    assert "cross-attention head" in str(found) and found.fixed[-1] == "the output of the encoder"
    assert found.as_json()["cross_sources"][-1]["layer"] == 1


class WithoutBlocks(nn.Module):
    """A decoder whose layers of one kind stand in one list, so that no module is one layer."""

    config, detached = SimpleNamespace(is_encoder_decoder=True), False

    def __init__(self, layers=3, width=8):
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(31, width), nn.Embedding(31, width)
        self.own, self.cross = (
            nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in range(layers))
            for _ in range(2)
        )
        self.wide = nn.ModuleList(nn.Sequential(nn.Linear(width, 11), nn.ReLU()) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(11, width) for _ in range(layers))
        self.head = nn.Linear(width, 31)

    def get_encoder(self):
        return self.encoder

    def get_decoder(self):
        return self

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def attend(self, maps, x, read):
        *maps, out = maps
        causal, read = x is read, read.detach() if self.detached else read
        q, k, v = (
            part(y).unflatten(-1, (2, -1)).transpose(1, 2) for part, y in zip(maps, (x, read, read), strict=True)
        )
        return x + out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))

    def forward(self, input_ids, decoder_input_ids, encoder_outputs=None, use_cache=False):
        memory = self.encoder(input_ids) if encoder_outputs is None else encoder_outputs
        x = self.embedding(decoder_input_ids)
        for own, cross, wide, narrow in zip(self.own, self.cross, self.wide, self.narrow, strict=True):
            x = self.attend(own, x, x)
            x = self.attend(cross, x, memory)
            x = x + narrow(wide(x))
        return self.head(x)


def test_layers_without_blocks_are_counted_by_their_self_attention():
    """Would catch: a feed-forward layer behind two calls that is given the number of the second."""
    torch.manual_seed(3)
    model, wrote = WithoutBlocks().double().eval(), []
    hooks = [each.register_forward_hook(lambda *ran: wrote.append(ran[-1][0, ROW])) for each in model.narrow]
    with torch.no_grad():
        model(**GIVEN)
        shares = [float(model.head.weight[TARGET] @ each) for each in wrote]
    for hook in hooks:
        hook.remove()
    found = saccade.attribute(model, GIVEN, TARGET, position=ROW)
    heads = [f"{kind} {n}.{head}" for n in range(3) for kind in ("head", "cross-attention head") for head in range(2)]
    layers = [f"feed-forward {n}" for n in range(3)]
    assert set(map(str, found.components)) == {"token embedding", *heads, *layers, "biases"}
    assert [found.of("feed_forward", n) for n in range(3)] == pytest.approx(shares, abs=1e-12)


def test_self_attention_whose_keys_and_values_are_detached_is_no_cross_attention():
    """Would catch: cross-attention known by keys and values without a graph alone."""
    torch.manual_seed(3)
    model = WithoutBlocks().double().eval()
    expected = saccade.attribute(model, GIVEN, TARGET, position=ROW)
    model.detached = True
    found = saccade.attribute(model, GIVEN, TARGET, position=ROW)
    assert found.components == expected.components and torch.equal(found.sources, expected.sources)


def test_a_decoder_that_differs_from_the_whole_model_is_found():
    """Would catch: the sum compared with the decoder's own logit, where the whole model has another one."""
    model = bart()
    plain = model.forward

    def forgetful(*, encoder_outputs=None, **given):
        if encoder_outputs is not None:
            encoder_outputs = BaseModelOutput(2 * encoder_outputs.last_hidden_state)
        return plain(encoder_outputs=encoder_outputs, **given)

    model.forward = forgetful
    with pytest.raises(ValueError, match="model: what is added to its residual stream does not sum to it"):
        saccade.attribute(model, GIVEN, TARGET, position=ROW)


def test_inputs_that_are_not_of_a_decoder_with_a_source_are_refused():
    model, decoder = bart(), transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(
        ValueError, match=r"model: the encoder of .* takes \{.input_ids.: \.\.\., .decoder_input_ids.: "
    ):
        saccade.attribute(model, SOURCE, TARGET)
    with pytest.raises(
        ValueError, match=r"text: expected decoder_input_ids, and what the encoder reads, got input_ids"
    ):
        saccade.attribute(model, {"input_ids": SOURCE}, TARGET)
    with pytest.raises(
        ValueError, match=r"text: keyword arguments are those of an encoder-decoder, and GPT2LMHeadModel"
    ):
        saccade.attribute(decoder, GIVEN, TARGET)
    with pytest.raises(
        ValueError, match=r"text: why_attends reads one text; of an encoder-decoder pass the source alone"
    ):
        saccade.why_attends(model, GIVEN, 1, 0)
    with pytest.raises(KeyError, match="cross_attention; there are token, "):
        saccade.attribute(decoder, TOKENS, TARGET).head_map("cross_attention")
