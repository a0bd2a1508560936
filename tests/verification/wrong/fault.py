"""A deliberately wrong implementation: a right one of `styles/`, in which one thing has been changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.verification import Promise

FOLDER = Path(__file__).parent / "styles"


@dataclass(frozen=True, eq=False)
class Style:
    """A right implementation, as people write it: a file of `styles/` that stands on its own."""

    file: str
    target: str  # a name in the file, or an expression in its names that makes an instance
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the constructor, where the target is a class
    causal: bool | None = None
    promise: Promise | None = None
    how: Any = None  # what `verify` has to be told; None: it finds out
    embed_dim: int | None = None

    @property
    def source(self) -> str:
        return (FOLDER / f"{self.file}.py").read_text(encoding="utf-8")


@dataclass(frozen=True, eq=False)
class Fault:
    """`style` with `old` replaced by `new`, which is wrong.

    `families` are those whose finding names it, the best one first. `more` are further replacements that the same
    mistake needs. `severity` is "warning" where the issue is one of convention. `line` is a part of the line to blame
    where that is none of `new`'s own lines; "" where no line can be blamed, as for one that is missing.
    """

    name: str
    families: tuple[str, ...]
    style: Style
    old: str
    new: str
    wrong: str
    more: tuple[tuple[str, str], ...] = ()
    severity: str = "error"
    line: str | None = None
    causal: bool | None = None  # these override the style's where they are given
    promise: Promise | None = None
    arguments: Mapping[str, Any] | None = None
    target: str | None = None
    compiled: bool = False  # whether only torch.compile shows it

    @property
    def source(self) -> str:
        text = self.style.source
        for old, new in ((self.old, self.new), *self.more):
            if text.count(old) != 1:
                raise ValueError(
                    f"{self.name}: {old!r} stands {text.count(old)} times in {self.style.file}.py, not once"
                )
            text = text.replace(old, new)
        return text

    def to_blame(self) -> tuple[str, ...]:
        """The lines, as they stand without their indentation, of which the report should name one; none: any."""
        lines = self.source.splitlines()
        if self.line is not None:
            return tuple(one.strip() for one in lines if self.line and self.line in one)
        before = {one.strip() for one in self.style.source.splitlines()}
        return tuple(one.strip() for one in lines if one.strip() and one.strip() not in before)


TEXTBOOK = Style("textbook_function", "scaled_dot_product_attention")
TORCH_DOCS = Style("torch_docs", "scaled_dot_product_attention")
EINSUM = Style("einsum", "attention")
TF_PORT = Style("tf_port", "scaled_dot_product_attention")
FROM_SCRATCH = Style("from_scratch", "self_attention")
BMM = Style("bmm", "dot_product_attention")
BLOCKWISE = Style("blockwise", "flash_attention")
GQA_FUNCTION = Style("gqa_function", "grouped_query_attention")
AUTOGRAD = Style("autograd_function", "attention")
KARPATHY_HEAD = Style("karpathy_head", "Head", {"n_embd": 32, "head_size": 16}, causal=True)
KARPATHY_HEADS = Style("karpathy_head", "MultiHeadAttention", {"n_embd": 32, "num_heads": 4}, causal=True)
ANNOTATED = Style("annotated", "MultiHeadedAttention", {"h": 4, "d_model": 48})
NANOGPT = Style("nanogpt", "CausalSelfAttention(GPTConfig())", causal=True)
TIMM = Style("timm_vit", "Attention", {"dim": 48, "num_heads": 6})
LLAMA = Style("llama", "Attention", {"dim": 64, "n_heads": 8, "n_kv_heads": 2}, causal=True)
BERT = Style("bert", "BertSelfAttention")
GPT2 = Style("gpt2_cached", "CachedAttention", causal=True)
SLIDING = Style("sliding", "SlidingWindowAttention", causal=True, promise=Promise(causal=True, window=5))
WINDOW_CACHED = Style("window_cached", "LocalAttention", causal=True, promise=Promise(causal=True, window=5))
DIFFUSERS = Style("diffusers_cross", "CrossAttention", {"query_dim": 40, "context_dim": 24, "heads": 4, "dim_head": 8})
LUCIDRAINS = Style("lucidrains", "Attention", {"dim": 40, "heads": 4, "dim_head": 8}, causal=False)
LUCIDRAINS_CAUSAL = Style(
    "lucidrains", "Attention", {"dim": 40, "heads": 8, "dim_head": 8, "causal": True}, causal=True
)
ENCODER_BLOCK = Style("encoder_block", "EncoderBlock", causal=False)
DECODER_LAYER = Style("decoder_layer", "DecoderLayer", causal=True)
FAIRSEQ = Style("fairseq", "MultiheadAttention", {"embed_dim": 32, "num_heads": 4})
SDPA_MODULE = Style("sdpa_module", "SelfAttention", causal=True)
FALCON = Style("falcon_mqa", "MultiQueryAttention")
ALIBI = Style("alibi", "AlibiAttention", causal=True)
META = Style("meta_cache", "Attention", {"dim": 32, "n_heads": 4}, causal=True)
HF_DECODER = Style("tiny_gpt_hf", "TinyForCausalLM(TinyConfig())")
HF_ENCODER = Style("tiny_encoder_hf", "TinyEncoder(TinyEncoderConfig())")
HF_SEQ2SEQ = Style("tiny_seq2seq_hf", "TinySeq2Seq(TinySeq2SeqConfig())")
PAD_SEQ2SEQ = Style("pad_id_seq2seq", "Transformer")

STYLES = (
    TEXTBOOK,
    TORCH_DOCS,
    EINSUM,
    TF_PORT,
    FROM_SCRATCH,
    BMM,
    BLOCKWISE,
    GQA_FUNCTION,
    AUTOGRAD,
    KARPATHY_HEAD,
    KARPATHY_HEADS,
    ANNOTATED,
    NANOGPT,
    TIMM,
    LLAMA,
    BERT,
    GPT2,
    SLIDING,
    WINDOW_CACHED,
    DIFFUSERS,
    LUCIDRAINS,
    LUCIDRAINS_CAUSAL,
    ENCODER_BLOCK,
    DECODER_LAYER,
    FAIRSEQ,
    SDPA_MODULE,
    FALCON,
    ALIBI,
    META,
    HF_DECODER,
    HF_ENCODER,
    HF_SEQ2SEQ,
    PAD_SEQ2SEQ,
)
