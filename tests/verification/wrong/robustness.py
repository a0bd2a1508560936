"""Right for the author's sizes, layout and device only."""

from __future__ import annotations

from .fault import (
    ALIBI,
    ANNOTATED,
    BMM,
    DIFFUSERS,
    ENCODER_BLOCK,
    FAIRSEQ,
    KARPATHY_HEAD,
    LLAMA,
    LUCIDRAINS,
    NANOGPT,
    SDPA_MODULE,
    TEXTBOOK,
    TIMM,
    Fault,
)  # fmt: skip

ROBUST = ("robustness",)

FAULTS = (
    Fault(
        "hard-coded batch size", ROBUST, ENCODER_BLOCK,
        "return x.view(batch_size, seq_len, self.n_heads, self.d_head).transpose(1, 2)",
        "return x.view(2, seq_len, self.n_heads, -1).transpose(1, 2)",
        "works for two samples only",
    ),
    Fault(
        "squeezed", ROBUST, ANNOTATED,
        "return self.linears[-1](x)", "return self.linears[-1](x).squeeze(1)",
        "loses the axis of a sequence of length 1",
    ),
    Fault(
        "a buffer of twelve", ROBUST, ENCODER_BLOCK,
        "max_len=256", "max_len=12",
        "positions for twelve tokens, with nothing said about longer texts", line="self.pe[:",
    ),
    Fault(
        "position wraps around silently", ("robustness", "order"), ENCODER_BLOCK,
        "return x + self.pe[:, : x.size(1)]",
        "return x + self.pe[:, torch.arange(x.size(1)).clamp(max=9)]",
        "all positions from the tenth on are the same", line="clamp",
    ),
    Fault(
        "hard-coded device", ROBUST, ALIBI,
        "pos = torch.arange(n, device=x.device)", 'pos = torch.arange(n, device="cuda")',
        "needs a GPU",
    ),
    Fault(
        "hard-coded dtype", ("robustness", "precision"), LUCIDRAINS,
        "x = self.norm(x)", "x = self.norm(x.float())",
        "casts to float32, which weights of another type refuse",
    ),
    Fault(
        "a float32 mask", ("robustness", "precision"), LLAMA,
        "scores = scores + mask.to(scores.dtype)", "scores = (scores + mask).view(torch.float32)",
        "reads the scores' memory as float32, whatever their type is",
    ),
    Fault(
        "contiguous only", ROBUST, BMM,
        "scores = torch.bmm(query / math.sqrt(query.size(-1)), key.transpose(1, 2))",
        "query = query.view(-1).view(query.shape)\n"
        "    scores = torch.bmm(query / math.sqrt(query.size(-1)), key.transpose(1, 2))",
        "a view that inputs of other strides refuse", line="view(-1)",
    ),
    Fault(
        "noise", ("robustness", "dropout"), TEXTBOOK,
        "attention = F.softmax(scores, dim=-1)",
        "attention = F.softmax(scores + 0.01 * torch.randn_like(scores), dim=-1)",
        "adds noise to the scores at every call",
    ),
    Fault(
        "changes its input", ROBUST, TEXTBOOK,
        "    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d_k)\n",
        "    q /= math.sqrt(d_k)\n    scores = torch.matmul(q, k.transpose(-2, -1))\n",
        "scales the caller's queries in place", line="q /=",
    ),
    Fault(
        "counts its calls", ROBUST, TIMM,
        "        x = attn @ v\n",
        "        self.calls = getattr(self, \"calls\", 0) + 1\n        x = attn @ v * (1 + 0.1 / self.calls)\n",
        "a warm-up that counts forward calls: outputs depend on how many there were", line="self.calls",
    ),
    Fault(
        "weights outside of the state", ROBUST, KARPATHY_HEAD,
        "self.value = nn.Linear(n_embd, head_size, bias=False)",
        "self.value = nn.Linear(n_embd, head_size, bias=False).__call__",
        "the value projection is no submodule: it is neither saved, nor moved, nor trained",
    ),
    Fault(
        "a list of layers", ROBUST, ANNOTATED,
        "return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])", "return [copy.deepcopy(module) for _ in range(N)]",
        "a plain list hides its layers from parameters() and state_dict()",
    ),
    Fault(
        "eval computes something else", ROBUST, NANOGPT,
        "        y = self.resid_dropout(self.c_proj(y))\n",
        "        y = self.resid_dropout(self.c_proj(y if self.training else y * 0.9))\n",
        "scales the output in evaluation, though dropout is scaled in training",
        target="CausalSelfAttention(GPTConfig(dropout=0.0))",
    ),
    Fault(
        "compiled path lacks the mask", ("robustness", "causal-leak"), SDPA_MODULE,
        "is_causal=True)", "is_causal=not torch.compiler.is_compiling())",
        "under torch.compile there is no mask", more=(("import torch.nn as nn\n", "import torch\nimport torch.nn as nn\n"),),
        compiled=True,
    ),
    Fault(
        "one length only", ROBUST, DIFFUSERS,
        "tensor = tensor.reshape(batch_size // self.heads, self.heads, seq_len, dim)",
        "tensor = tensor.reshape(-1, self.heads, 7, dim)",
        "works for queries of length 7 only",
    ),
    Fault(
        "a mask from the first call", ROBUST, FAIRSEQ,
        "        attn_weights = torch.bmm(q, k.transpose(1, 2))\n",
        "        attn_weights = torch.bmm(q, k.transpose(1, 2))\n"
        "        if not hasattr(self, \"zeros\"):\n"
        "            self.zeros = torch.zeros(tgt_len, src_len, dtype=q.dtype)\n"
        "        attn_weights = attn_weights + self.zeros\n",
        "keeps a tensor of the first call's size, so that another length fails", line="self.zeros",
    ),
)  # fmt: skip
