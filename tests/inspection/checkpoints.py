"""Tiny checkpoints in the layout of transformers, with random weights and tokenizers learned from a few lines."""

from __future__ import annotations

import contextlib

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "When the rain came, the old house was dark; when the sun came, the old man was gone.",
    "Nobody knows catalogues untouched, on the shelves.",
]


def bert(folder, *, context=41, layers=2, heads=3, **more):
    """[CLS] text [SEP], in WordPieces of lower case; every word sees every other."""
    config = transformers.BertConfig(
        hidden_size=10 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=37,
        max_position_embeddings=context,
        **more,
    )
    return _saved(folder, transformers.BertModel, config, _word_pieces())


def roberta(folder, *, context=41):
    """<s> text </s>, in bytes; positions begin behind the padding index."""
    config = transformers.RobertaConfig(
        hidden_size=30,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=37,
        max_position_embeddings=context,
        pad_token_id=1,
    )
    tokenizer = _bytes(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return _saved(folder, transformers.RobertaModel, config, (tokenizer, names))


def gpt2(folder, *, context=43, layers=2, heads=5, **more):
    """Nothing before the text, bytes; no word sees a later one."""
    config = transformers.GPT2Config(n_embd=6 * heads, n_layer=layers, n_head=heads, n_positions=context, **more)
    names = dict.fromkeys(["bos_token", "eos_token", "unk_token"], "<|endoftext|>")
    return _saved(folder, transformers.GPT2Model, config, (_bytes(["<|endoftext|>"]), names))


def llama(folder, *, context=47, layers=3, heads=6, kv_heads=2, **more):
    """<s> before the text, sentencepiece-like pieces with bytes for what is unknown; grouped heads."""
    config = transformers.LlamaConfig(
        hidden_size=8 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=29,
        max_position_embeddings=context,
        **more,
    )
    return _saved(folder, transformers.LlamaModel, config, _sentence_pieces())


def t5(folder):
    """An encoder-decoder: text </s> in the encoder."""
    config = transformers.T5Config(d_model=30, d_kv=7, d_ff=37, num_layers=2, num_decoder_layers=2, num_heads=3)
    tokenizer = _bytes(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return _saved(folder, transformers.T5Model, config, (tokenizer, names))


def bart(folder):
    """An encoder-decoder with norms after each sum: <s> text </s> in both, targets begin with </s>."""
    config = transformers.BartConfig(
        d_model=24, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2, decoder_attention_heads=3,
        encoder_ffn_dim=31, decoder_ffn_dim=29, max_position_embeddings=53, max_length=17,
    )  # fmt: skip
    tokenizer = _bytes(["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return _saved(folder, transformers.BartForConditionalGeneration, config, (tokenizer, names))


def falcon(folder):
    """Calls F.scaled_dot_product_attention itself, without asking for an attention function."""
    config = transformers.FalconConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=3)
    return _saved(folder, transformers.FalconModel, config, _sentence_pieces())


def gpt_oss(folder):
    """A sink in every head: weights of a row miss its share."""
    config = transformers.GptOssConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=10,
        intermediate_size=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=5,
    )
    return _saved(folder, transformers.GptOssModel, config, _sentence_pieces())


def jamba(folder):
    """Attention in layers 1 and 4 of five; the others are Mamba's."""
    config = transformers.JambaConfig(
        hidden_size=24, num_hidden_layers=5, num_attention_heads=3, num_key_value_heads=1, intermediate_size=20,
        attn_layer_period=3, attn_layer_offset=1, num_experts=2, mamba_d_state=5, mamba_dt_rank=3,
    )  # fmt: skip
    return _saved(folder, transformers.JambaModel, config, _sentence_pieces())


def vit(folder):
    """Reads pictures."""
    config = transformers.ViTConfig(hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=23)
    return _saved(folder, transformers.ViTModel, config, _sentence_pieces())


def bloom(folder):
    """Attention in code of its own."""
    config = transformers.BloomConfig(hidden_size=24, n_layer=2, n_head=3)
    return _saved(folder, transformers.BloomModel, config, _sentence_pieces())


def mamba(folder):
    """No attention at all."""
    config = transformers.MambaConfig(hidden_size=20, state_size=5, num_hidden_layers=2)
    return _saved(folder, transformers.MambaModel, config, (_bytes(["<|endoftext|>"]), {"bos_token": "<|endoftext|>"}))


def _saved(folder, model, config, tokenizer):
    inner, names = tokenizer
    config.vocab_size = inner.get_vocab_size()
    torch.manual_seed(5)
    with quiet():
        module = model(config)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim > 1:  # weights so large that heads differ, as those of trained models do
                    parameter.normal_(
                        0, parameter.shape[-1] ** -0.5 if config.model_type in ("jamba", "mamba") else 0.5
                    )
        module.save_pretrained(folder)
        transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    return folder


def _word_pieces():
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    inner.train_from_iterator(
        LINES, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False)
    )
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return inner, dict(zip(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], special, strict=True))


def _bytes(special):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(LINES, trainer)
    return inner


def _sentence_pieces():
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    split = [pre_tokenizers.Metaspace(prepend_scheme="first", split=True), pre_tokenizers.Punctuation()]
    inner.pre_tokenizer = pre_tokenizers.Sequence(split)
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=special + pieces, show_progress=False)
    inner.train_from_iterator(LINES, trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@contextlib.contextmanager
def quiet():
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
