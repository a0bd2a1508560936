import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import Seq2SeqLMOutput


class TinySeq2SeqConfig(PretrainedConfig):
    model_type = "tiny-seq2seq"

    def __init__(self, vocab_size=67, d_model=32, heads=4, layers=2, **kwargs):
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.hidden_size = d_model
        self.heads = heads
        self.layers = layers
        self.max_position_embeddings = 64
        kwargs.setdefault("is_encoder_decoder", True)
        kwargs.setdefault("decoder_start_token_id", 0)
        kwargs.setdefault("pad_token_id", 0)
        super().__init__(**kwargs)


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def forward(self, x, memory, visible):
        b, n, d = x.shape
        q, k, v = (
            t.view(b, -1, self.heads, d // self.heads).transpose(1, 2)
            for t in (self.q(x), self.k(memory), self.v(memory))
        )
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, d_model, heads, cross):
        super().__init__()
        self.self_attn, self.self_norm = Attention(d_model, heads), nn.LayerNorm(d_model)
        if cross:
            self.cross_attn, self.cross_norm = Attention(d_model, heads), nn.LayerNorm(d_model)
        self.mlp, self.mlp_norm = (
            nn.Sequential(nn.Linear(d_model, 64), nn.ReLU(), nn.Linear(64, d_model)),
            nn.LayerNorm(d_model),
        )

    def forward(self, x, visible, memory=None, memory_visible=None):
        y = self.self_norm(x)
        x = x + self.self_attn(y, y, visible)
        if memory is not None:
            x = x + self.cross_attn(self.cross_norm(x), memory, memory_visible)
        return x + self.mlp(self.mlp_norm(x))


class TinySeq2Seq(PreTrainedModel):
    config_class = TinySeq2SeqConfig

    def __init__(self, config):
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.encoder_layers = nn.ModuleList(Layer(config.d_model, config.heads, False) for _ in range(config.layers))
        self.decoder_layers = nn.ModuleList(Layer(config.d_model, config.heads, True) for _ in range(config.layers))
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.shared

    def embed(self, tokens):
        return self.shared(tokens) + self.positions.weight[: tokens.shape[1]]

    def forward(
        self, input_ids=None, attention_mask=None, decoder_input_ids=None, decoder_attention_mask=None, **kwargs
    ):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        source = attention_mask[:, None, None, :].bool()
        memory = self.embed(input_ids)
        for layer in self.encoder_layers:
            memory = layer(memory, source)
        n = decoder_input_ids.shape[1]
        visible = torch.ones(n, n, dtype=torch.bool, device=memory.device).tril()[None, None]
        if decoder_attention_mask is not None:
            visible = visible & decoder_attention_mask[:, None, None, :].bool()
        x = self.embed(decoder_input_ids)
        for layer in self.decoder_layers:
            x = layer(x, visible, memory, source)
        return Seq2SeqLMOutput(logits=self.lm_head(x), encoder_last_hidden_state=memory)
