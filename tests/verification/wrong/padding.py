"""Real outputs that are not independent of the padding."""

from __future__ import annotations

from .fault import (
    ANNOTATED,
    BERT,
    BMM,
    DECODER_LAYER,
    DIFFUSERS,
    ENCODER_BLOCK,
    FAIRSEQ,
    LUCIDRAINS,
    Fault,
)

PADDING = ("padding", "mask-meaning")

FAULTS = (
    Fault(
        "faint padding",
        PADDING,
        ENCODER_BLOCK,
        "scores = scores.masked_fill(hidden, -1e4)",
        "scores = scores.masked_fill(hidden, -4.0)",
        "hides padding with -4, which the softmax still sees",
    ),
    Fault(
        "pooled over the padding",
        ("padding",),
        ENCODER_BLOCK,
        "        x = self.norm2(x + self.dropout(self.ff(x)))\n",
        "        x = self.norm2(x + self.dropout(self.ff(x)) + x.mean(dim=1, keepdim=True))\n",
        "adds the mean over all positions, padded ones included",
    ),
    Fault(
        "normalised over the sequence",
        ("padding",),
        LUCIDRAINS,
        "x = self.norm(x)",
        "x = self.norm(x) / x.std(dim=1, keepdim=True)",
        "divides by the deviation along the sequence, padded positions included",
    ),
    Fault(
        "the first padded key is seen",
        PADDING,
        BMM,
        "key_padding_mask.unsqueeze(1)",
        "(key_padding_mask & key_padding_mask.roll(1, 1)).unsqueeze(1)",
        "the first padded key of every sample is seen",
    ),
    Fault(
        "temperature by the padded length",
        ("padding", "scale"),
        BERT,
        "attention_scores = attention_scores / math.sqrt(self.attention_head_size)",
        "attention_scores = attention_scores * math.log(key_layer.size(2)) / math.sqrt(self.attention_head_size)",
        "scales by the logarithm of the padded length",
    ),
    Fault(
        "padding recognised by its zeros",
        PADDING,
        BMM,
        "scores = scores.masked_fill(key_padding_mask.unsqueeze(1), torch.finfo(scores.dtype).min)",
        "scores = scores.masked_fill((key == 0).all(-1).unsqueeze(1), torch.finfo(scores.dtype).min)",
        "takes for padding what is zero, and not what the mask says",
    ),
    Fault(
        "NaN where all is padding",
        ("padding",),
        ANNOTATED,
        "torch.finfo(scores.dtype).min",
        'float("-inf")',
        "a row that sees nothing is NaN",
        severity="warning",
    ),
    Fault(
        "NaN everywhere where one sample is all padding",
        ("padding", "mixing", "mask-meaning"),
        FAIRSEQ,
        "        attn = torch.bmm(attn_probs, v)\n",
        "        attn = torch.bmm(attn_probs, v)\n        attn = attn - 0 * attn.mean()\n",
        "a sample without a real key makes all others NaN",
        line="attn.mean()",
    ),
    Fault(
        "memory's padding is forgotten",
        PADDING,
        DECODER_LAYER,
        "x = x + self.cross_attention(self.norms[1](x), memory, real)",
        "x = x + self.cross_attention(self.norms[1](x), memory)",
        "the mask of the memory is built and not passed on",
    ),
    Fault(
        "keys padded, values averaged",
        ("padding",),
        DIFFUSERS,
        'out = torch.einsum("b i j, b j d -> b i d", attn, v)',
        'out = torch.einsum("b i j, b j d -> b i d", attn, v - v.mean(dim=1, keepdim=True))',
        "centres the values over the context, padding included",
    ),
)
