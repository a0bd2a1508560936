"""Outputs that are right and gradients that are not."""

from __future__ import annotations

from .fault import (
    ANNOTATED,
    AUTOGRAD,
    BERT,
    DECODER_LAYER,
    ENCODER_BLOCK,
    FALCON,
    GQA_FUNCTION,
    NANOGPT,
    TEXTBOOK,
    TIMM,
    Fault,
)

GRADIENTS = ("gradients",)

FAULTS = (
    Fault(
        "queries detached",
        GRADIENTS,
        BERT,
        "attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))",
        "attention_scores = torch.matmul(query_layer.detach(), key_layer.transpose(-1, -2))",
        "no gradient reaches the query projection",
    ),
    Fault(
        "weights without gradients",
        GRADIENTS,
        NANOGPT,
        "        att = F.softmax(att, dim=-1)\n",
        "        with torch.no_grad():\n            att = F.softmax(att, dim=-1)\n",
        "no gradient reaches queries and keys",
        line="no_grad",
    ),
    Fault(
        "scores by .data",
        GRADIENTS,
        TIMM,
        "attn = attn.softmax(dim=-1)",
        "attn = attn.data.softmax(dim=-1)",
        "no gradient reaches queries and keys",
    ),
    Fault(
        "the scale's gradient",
        GRADIENTS,
        AUTOGRAD,
        "dk = ds.transpose(-1, -2) @ q * ctx.scale",
        "dk = ds.transpose(-1, -2) @ q",
        "the backward of keys lacks the scale",
    ),
    Fault(
        "softmax's gradient",
        GRADIENTS,
        AUTOGRAD,
        "ds = p * (dp - (dp * p).sum(dim=-1, keepdim=True))",
        "ds = p * (dp - dp.mean(dim=-1, keepdim=True))",
        "the backward of the softmax subtracts the plain mean",
    ),
    Fault(
        "values' gradient",
        GRADIENTS,
        AUTOGRAD,
        "dv = p.transpose(-1, -2) @ do",
        "dv = p @ do",
        "the backward of values forgets to transpose the weights",
    ),
    Fault(
        "NaN behind torch.where",
        GRADIENTS,
        NANOGPT,
        "        att = F.softmax(att, dim=-1)\n",
        "        att = F.softmax(att, dim=-1)\n"
        "        att = torch.where(att > 0, torch.exp(torch.log(att)), torch.zeros_like(att))\n",
        "the logarithm's gradient at hidden keys is infinite, and 0 times it is NaN",
        line="torch.log",
    ),
    Fault(
        "saturated at the start",
        GRADIENTS,
        ENCODER_BLOCK,
        "        self.dropout = nn.Dropout(dropout)\n",
        "        self.dropout = nn.Dropout(dropout)\n"
        "        for projection in (self.W_q, self.W_k):\n            nn.init.normal_(projection.weight)\n",
        "query and key weights of standard deviation 1: each row of weights is nearly a single 1",
        line="normal_",
    ),
    Fault(
        "nothing to start from",
        GRADIENTS,
        DECODER_LAYER,
        "        self.kv = nn.Linear(dim, 2 * dim)\n",
        "        self.kv = nn.Linear(dim, 2 * dim)\n"
        "        for projection in (self.q, self.kv):\n"
        "            nn.init.zeros_(projection.weight[:dim]), nn.init.zeros_(projection.bias[:dim])\n",
        "queries and keys of zeros: neither ever has a gradient",
        line="zeros_",
    ),
    Fault(
        "the winner takes all",
        ("gradients", "softmax"),
        TEXTBOOK,
        "attention = F.softmax(scores, dim=-1)",
        "attention = F.one_hot(scores.argmax(dim=-1), scores.size(-1)).to(scores.dtype)",
        "a maximum in place of the softmax: queries and keys have no gradient",
    ),
    Fault(
        "numbers taken out",
        GRADIENTS,
        FALCON,
        "probs = scores.float().softmax(-1).to(query.dtype)",
        "probs = torch.tensor(scores.tolist()).softmax(-1).to(query.dtype)",
        "a new tensor made of numbers has no history",
    ),
    Fault(
        "vanishing",
        GRADIENTS,
        ANNOTATED,
        "                nn.init.xavier_uniform_(p)\n",
        "                nn.init.xavier_uniform_(p, gain=1e-4)\n",
        "weights ten thousand times too small: next to no gradient for queries and keys",
    ),
    Fault(
        "rounded",
        GRADIENTS,
        GQA_FUNCTION,
        "scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])",
        "scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) * 1e6).round() / 1e6",
        "rounds the scores, which has no gradient",
    ),
)
