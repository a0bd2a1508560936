import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class TinyEncoderConfig(PretrainedConfig):
    model_type = "tiny-encoder"

    def __init__(self, vocab_size=71, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_hidden_layers = num_hidden_layers
        self.max_position_embeddings = 64
        super().__init__(**kwargs)


class EncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, self.heads = config.hidden_size, config.num_attention_heads
        self.query, self.key, self.value = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)
        self.output = nn.Linear(size, size)
        self.norm_attention, self.norm_output = nn.LayerNorm(size), nn.LayerNorm(size)
        self.intermediate, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, hidden, bias):
        b, n, size = hidden.shape
        q = self.query(hidden).view(b, n, self.heads, -1).transpose(1, 2)
        k = self.key(hidden).view(b, n, self.heads, -1).transpose(1, 2)
        v = self.value(hidden).view(b, n, self.heads, -1).transpose(1, 2)
        scores = q @ k.transpose(2, 3) / (size // self.heads) ** 0.5 + bias
        context = torch.softmax(scores, dim=-1) @ v
        context = context.transpose(1, 2).reshape(b, n, size)
        hidden = self.norm_attention(hidden + self.output(context))
        return self.norm_output(hidden + self.down(torch.relu(self.intermediate(hidden))))


class TinyEncoder(PreTrainedModel):
    config_class = TinyEncoderConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask=None, **kwargs):
        hidden = self.words(input_ids) + self.positions.weight[: input_ids.shape[1]]
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        bias = (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return BaseModelOutput(last_hidden_state=hidden)
