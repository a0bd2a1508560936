"""Reads a published tokenizer: tokenizer.json, or the older vocab.txt, or vocab.json with merges.txt.

tokenizer_config.json, special_tokens_map.json and added_tokens.json list the special tokens and the rules for padding
and truncation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from .._shortened import shortened
from .reading import read_json

FILE, CONFIG, SPECIAL, ADDED = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
WORDS, VOCABULARY, MERGES = "vocab.txt", "vocab.json", "merges.txt"
PIECES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "source.spm")  # of SentencePiece
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_ENDLESS = 10**9  # a larger model_max_length means no limit
_SIDES = ("right", "left")

# By the beginning of tokenizer_class, or by model_type: older folders say one of the two.
_WORD_PIECES = ("Bert", "DistilBert", "Electra", "bert", "distilbert", "electra")
_ROBERTAS = ("Roberta", "Bart", "Longformer", "LED", "roberta", "bart", "longformer", "led")
_GPT2S = ("GPT2", "gpt2", "gpt_neo", "gptj", "opt")
_PROTEINS = ("Esm", "esm")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"},
    "roberta": {
        "bos": "<s>",
        "eos": "</s>",
        "unk": "<unk>",
        "sep": "</s>",
        "pad": "<pad>",
        "cls": "<s>",
        "mask": {"content": "<mask>", "lstrip": True},  # stands for a word with the space before it
    },
    "esm": {"eos": "<eos>", "unk": "<unk>", "pad": "<pad>", "cls": "<cls>", "mask": "<mask>"},
    "gpt2": {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>"},
}


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer and its settings.

    Attributes:
        inner: of the `tokenizers` library, without padding and truncation.
        named: ids by role: "bos", "eos", "unk", "sep", "pad", "cls", "mask", as far as defined.
        special: ids of all special tokens.
        longest: maximum number of tokens of an input, special ones included; None without a limit.
        left_padding, left_cut: whether to pad batches, and to truncate long texts, on the left.
        types: whether the model reads token types (first or second text).
    """

    inner: tokenizers.Tokenizer
    named: dict[str, int]
    special: frozenset[int]
    longest: int | None
    left_padding: bool
    left_cut: bool
    types: bool


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """The tokenizer of a folder.

    Raises:
        FileNotFoundError: no file of a tokenizer.
        ValueError: a damaged file, or a tokenizer of another kind.
    """
    config = _object(folder / CONFIG)
    defaults: dict[str, Any] = {}
    if (folder / FILE).is_file():
        inner = _from_json(folder / FILE, config)
    else:
        inner, defaults = _older(folder, config)
    padding, truncation = inner.padding or {}, inner.truncation or {}
    inner.no_padding()
    inner.no_truncation()
    written = {**_named(_object(folder / SPECIAL), folder / SPECIAL), **_named(config, folder / CONFIG)}
    written = {**(defaults or _guessed(inner, written, padding)), **written}
    _add(inner, folder, config, list(written.values()))
    ids = {role: inner.token_to_id(_content(token)) for role, token in written.items()}
    named = {role: number for role, number in ids.items() if number is not None}
    _begin_and_end(inner, config, named)
    special = {number for number, token in inner.get_added_tokens_decoder().items() if token.special}
    return TokenizerFiles(
        inner,
        named,
        frozenset(special | set(named.values())),
        _longest(folder / CONFIG, config),
        _side(folder / CONFIG, config, "padding_side", padding) == "left",
        _side(folder / CONFIG, config, "truncation_side", truncation) == "left",
        _has_types(inner, config, named),
    )


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} without a file."""
    if not path.is_file():
        return {}
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: damaged, expected an object")
    return values


def _from_json(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: damaged, not a tokenizer ({shortened(error)})") from None
    # Explicit settings override tokenizer.json, as in transformers.
    for part, names in (
        (inner.normalizer, {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}),
        (inner.pre_tokenizer, {"add_prefix_space": "add_prefix_space"}),
    ):
        for published, ours in names.items():
            value = config.get(published)
            if isinstance(value, bool) and isinstance(part, (normalizers.BertNormalizer, pre_tokenizers.ByteLevel)):
                setattr(part, ours, value)
    return inner


def _older(folder: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A tokenizer from the files used before tokenizer.json, and its special tokens by role."""
    words, pairs = (folder / WORDS).is_file(), (folder / VOCABULARY).is_file() and (folder / MERGES).is_file()
    if not words and not pairs:
        raise FileNotFoundError(f"{folder}: no tokenizer; expected {FILE}, {WORDS}, or {VOCABULARY} with {MERGES}")
    model_type = _object(folder / "config.json").get("model_type", "")
    kind = config.get("tokenizer_class") or model_type or ("bert" if words else "gpt2")
    known = (*_WORD_PIECES, *_PROTEINS) if words else (*_ROBERTAS, *_GPT2S)
    if not isinstance(kind, str) or not kind.startswith(known):
        raise ValueError(
            f"{folder}: a tokenizer of kind {shortened(repr(kind))} cannot be made from "
            f"{WORDS if words else VOCABULARY} here; expected {FILE}, or one of {', '.join(known)}"
        )
    try:
        if words and kind.startswith(_PROTEINS):
            return _residues(folder / WORDS, config), _DEFAULTS["esm"]
        if words:
            return _word_pieces(folder / WORDS, config), _DEFAULTS["bert"]
        roberta = kind.startswith(_ROBERTAS)
        return _byte_pairs(folder, config, roberta=roberta), _DEFAULTS["roberta" if roberta else "gpt2"]
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exception
        file = folder / (WORDS if words else VOCABULARY)
        raise ValueError(f"{file}: damaged, not a vocabulary ({shortened(error)})") from None


def _word_pieces(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of BERT: basic tokens, then the longest matching pieces of vocab.txt (Wu et al. 2016)."""
    with path.open(encoding="utf-8", newline="\n") as lines:  # tokens may contain other line breaks
        vocabulary = {line.rstrip("\n").rstrip("\r"): n for n, line in enumerate(lines)}
    tokens = _tokens("bert", config, path)
    _known(vocabulary, tokens["unk"], path)
    inner = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=tokens["unk"], max_input_chars_per_word=100))
    inner.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(prefix="##")
    ends = [(token, _known(vocabulary, token, path)) for token in (tokens["cls"], tokens["sep"])]
    (first, _), (last, _) = ends
    inner.post_processor = processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0", pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1", special_tokens=ends
    )
    return inner


def _residues(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of ESM: a token for each residue, <unk> for each run of unknown characters (Rives et al. 2021)."""
    vocabulary = {line.strip(): n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines())}
    tokens = _tokens("esm", config, path)
    ends = [(token, _known(vocabulary, token, path)) for token in (tokens["cls"], tokens["eos"])]
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=tokens["unk"]))
    longest_first = sorted(filter(None, vocabulary), key=len, reverse=True)
    residue = tokenizers.Regex("|".join(map(re.escape, longest_first)))
    split = pre_tokenizers.Split(residue, "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.WhitespaceSplit()])
    (first, _), (last, _) = ends
    inner.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B {last}", special_tokens=ends
    )
    return inner


def _tokens(kind: str, config: dict[str, Any], path: Path) -> dict[str, str]:
    """Special tokens by role: from the settings, else the defaults."""
    return {role: _content(token) for role, token in {**_DEFAULTS[kind], **_named(config, path)}.items()}


def _byte_pairs(folder: Path, config: dict[str, Any], *, roberta: bool) -> tokenizers.Tokenizer:
    """The byte-level BPE of GPT-2; RoBERTa's also puts <s> and </s> around texts."""
    vocabulary = _object(folder / VOCABULARY)
    lines = (folder / MERGES).read_text(encoding="utf-8").split("\n")
    lines = [line for line in lines if line and not line.startswith("#version")]
    wrong = next((line for line in lines if line.count(" ") != 1), None)
    if wrong is not None:
        raise ValueError(f"{folder / MERGES}: damaged, expected two tokens in a line, got {shortened(repr(wrong))}")
    merges = [(first, second) for first, _, second in (line.partition(" ") for line in lines)]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    spaced = bool(config.get("add_prefix_space", False))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=spaced), decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    if roberta:
        tokens = _tokens("roberta", config, folder)
        last, first = ((tokens[role], _known(vocabulary, tokens[role], folder / VOCABULARY)) for role in ("sep", "cls"))
        inner.post_processor = processors.RobertaProcessing(last, first, trim_offsets=True, add_prefix_space=spaced)
    return inner


def _guessed(inner: tokenizers.Tokenizer, written: dict[str, Any], padding: dict[str, Any]) -> dict[str, Any]:
    """Defaults for roles that a folder with only tokenizer.json leaves undefined."""
    pad = {"pad": padding["pad_token"]} if padding and inner.token_to_id(padding["pad_token"]) is not None else {}
    known = inner.get_vocab()
    usual = (kind for kind in _DEFAULTS.values() if {_content(token) for token in kind.values()} <= known.keys())
    return pad if written else {**next(usual, {}), **pad}


def _known(vocabulary: dict[str, int], token: str, path: Path) -> int:
    if token not in vocabulary:
        raise ValueError(f"{path}: {shortened(repr(token))} is missing from the vocabulary")
    return vocabulary[token]


def _named(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Special tokens by role, each a string or an object with its content."""
    tokens = {role: values[f"{role}_token"] for role in _ROLES if values.get(f"{role}_token") is not None}
    for role, token in tokens.items():
        if not isinstance(_content(token), str):
            raise ValueError(f"{path}: {role}_token: expected a token, got {shortened(repr(token))}")
    return tokens


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _add(inner: tokenizers.Tokenizer, folder: Path, config: dict[str, Any], written: list[Any]) -> None:
    """Add the tokens that are listed outside of the tokenizer's file: those with ids first, in order of ids."""
    listed = config.get("added_tokens_decoder", {})
    pairs = [(number, token) for token, number in _object(folder / ADDED).items()]
    pairs += listed.items() if isinstance(listed, dict) else []
    try:
        numbered = {int(number): token for number, token in pairs}
    except (TypeError, ValueError):
        raise ValueError(f"{folder}: its added tokens are damaged, expected tokens with numbers") from None
    more = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    if not isinstance(more, (list, dict)):
        raise ValueError(f"{folder / CONFIG}: expected a list of special tokens, got {shortened(repr(more))}")
    more = list(more.values()) if isinstance(more, dict) else more
    there = {token.content for token in inner.get_added_tokens_decoder().values()}
    roles = {_content(token) for token in (*written, *more)}
    for token in (*(numbered[number] for number in sorted(numbered)), *written, *more):
        content = _content(token)
        if not isinstance(content, str) or content in there:
            continue
        there.add(content)
        detail = token if isinstance(token, dict) else {}
        special = bool(detail.get("special", False)) or content in roles
        flags = {name: bool(detail.get(name, False)) for name in ("single_word", "lstrip", "rstrip")}
        normalised = bool(detail.get("normalized", not special))
        inner.add_tokens([tokenizers.AddedToken(content, special=special, normalized=normalised, **flags)])
    for number, token in numbered.items():
        if inner.token_to_id(_content(token)) != number:
            raise ValueError(
                f"{folder}: the token {shortened(repr(_content(token)))} is to have the id {number}, but gets "
                f"{inner.token_to_id(_content(token))}"
            )


def _begin_and_end(inner: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, int]) -> None:
    """Add begin and end tokens to texts if the settings ask for them explicitly and the tokenizer file does not."""
    asked = {role: config.get(f"add_{role}_token") for role in ("bos", "eos")}
    asked = {role: value for role, value in asked.items() if isinstance(value, bool)}
    if not asked or "cls" in named:
        return
    around = inner.encode("a", add_special_tokens=True).ids
    ends = {"bos": around[:1], "eos": around[-1:]}
    there = {role: role in named and ends[role] == [named[role]] for role in ("bos", "eos")}
    wanted = {role: asked.get(role, there[role]) and role in named for role in ("bos", "eos")}
    if wanted == there:
        return
    first, last = (f"{inner.id_to_token(named[role])}" if wanted[role] else None for role in ("bos", "eos"))
    single, second = (
        " ".join([*([f"{first}:{n}"] if first else []), f"${text}:{n}", *([f"{last}:{n}"] if last else [])])
        for text, n in (("A", 0), ("B", 1))
    )
    inner.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} {second}",
        special_tokens=[(inner.id_to_token(named[role]), named[role]) for role in ("bos", "eos") if wanted[role]],
    )


def _longest(path: Path, config: dict[str, Any]) -> int | None:
    value = config.get("model_max_length")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
        raise ValueError(f"{path}: model_max_length: expected a number of tokens, got {shortened(repr(value))}")
    return int(value) if value < _ENDLESS else None


def _side(path: Path, config: dict[str, Any], name: str, other: dict[str, Any]) -> str:
    side = config.get(name) or str(other.get("direction", "right")).lower()
    if side not in _SIDES:
        raise ValueError(f"{path}: {name}: expected 'right' or 'left', got {shortened(repr(side))}")
    return side


def _has_types(inner: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, int]) -> bool:
    """Whether token types distinguish a second text: from the settings, else from the tokenizer's template for
    pairs."""
    names = config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    if str(config.get("tokenizer_class", "")).startswith("DistilBert"):
        return False
    return "cls" in named and 1 in inner.encode("a", "a").type_ids
