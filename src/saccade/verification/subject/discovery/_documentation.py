"""Information in the target's source: the letters of its axes, the names of its results, its comments."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .._reading import Meaning
from .._source import parsed_by

_LETTERS = {
    "B": r"b|bs|bsz|bz|batch|batch_?size|num_?batch(es)?|n_?batch(es)?|nb|b_sz",
    "H": r"h|heads?|n_?heads?|num_?heads?|nh|nhead|hq|hkv|kv_?heads?|n_?kv_?heads?|num_attention_heads|num_kv_heads",
    "L": r"l|t|s|seq|seq_?len(gth)?|length|len|lq|lk|tq|tk|sq|sk|q_?len|k_?len|kv_?len|tgt_?len|src_?len|time"
    r"|l_q|l_k|t_q|t_k|seqlen|num_?tokens|n_?tokens|tokens?|sequence(_?length)?|positions?|tgt_?len|m|num_queries"
    r"|num_keys|ctx|(q|k|kv|query|key|src|tgt|trg|source|target|memory|context|mem|enc|dec|x)_?(seq_?)?(len(gth)?|size"
    r"|tokens)|(seq_?)?(len(gth)?)_?(q|k|v|kv|query|key|src|tgt|x|context)|n_ctx|n_?(q|k|kv|src|tgt|queries|keys)|src"
    r"|tgt|keys?|quer(y|ies)|i|j",
    "D": r"d|c|e|dim|dims|emb|embed|embed_?dim|emb_?dim|d_?model|hidden|hidden_?(dim|size)|hd|head_?(dim|size)"
    r"|d_?head|d_?k|d_?v|d_?q|channels?|features?|hs|model_?dim|feature_?dim|width|dk|dv|embedding(_dim|_size)?|d_in"
    r"|n_embd|embed_size|num_hiddens|depth|dim_per_head|input_dim|f",
}


@dataclass(frozen=True)
class DocumentedSource:
    """The source of a function, or of a module's class, and its documentation."""

    text: str  # of the function or of forward
    whole: str  # the same, or the whole class

    @classmethod
    def of(cls, target: Any) -> DocumentedSource:
        target = getattr(target, "_orig_mod", target)
        if isinstance(target, torch.jit.ScriptModule):
            return cls("", "")
        if not isinstance(target, nn.Module):
            text = _text(target if inspect.isroutine(target) else getattr(target, "func", type(target)))
            return cls(text, text)
        owner = next(kind for kind in type(target).__mro__ if "forward" in vars(kind))  # nn.Module itself at last
        own = [_text(kind) for kind in dict.fromkeys((type(target), owner))]
        return cls(_text(type(target).forward), "\n\n".join(own))

    @cached_property
    def tree(self) -> ast.AST | None:
        try:
            return parsed_by(ast.parse, self.text)
        except SyntaxError:
            return None

    @cached_property
    def words(self) -> str:
        """The comments and docstrings of the target."""
        return "\n".join([*comments(self.text), *docstrings(self.text), *docstrings(self.whole)])

    def returned_names(self, count: int) -> tuple[str, ...]:
        """The names of the tuple that the last `return` gives."""
        returns = [node.value for node in ast.walk(self.tree) if isinstance(node, ast.Return)] if self.tree else []
        tuples = [value for value in returns if isinstance(value, ast.Tuple)]
        fitting = [values for values in tuples if len(values.elts) >= count]
        return tuple(_name(node) for node in fitting[-1].elts) if fitting else ()

    def layout(self, argument: str, rank: int) -> str | None:
        """The letters of an argument's axes, as its unpacked shape, its annotation or the documentation names them."""
        said = [*self._unpacked(argument), *self._annotated(argument), *self._described(argument)]
        return next((axes for axes in map(letters, said) if axes and len(axes) == rank), None)

    def _unpacked(self, argument: str) -> list[list[str]]:
        """`B, L, D = x.shape` and `x.size()`."""
        shapes = []
        for node in ast.walk(self.tree) if self.tree else ():
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
                continue
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            if isinstance(value, ast.Attribute) and value.attr in ("shape", "size") and _name(value.value) == argument:
                shapes.append([_name(name) for name in node.targets[0].elts])
        return shapes

    def _annotated(self, argument: str) -> list[list[str]]:
        """jaxtyping: `Float[Tensor, "batch heads length width"]`."""
        for node in ast.walk(self.tree) if self.tree else ():
            if isinstance(node, ast.arg) and node.arg == argument and isinstance(node.annotation, ast.Subscript):
                words = [part.value for part in ast.walk(node.annotation) if isinstance(part, ast.Constant)]
                return [word.split() for word in words if isinstance(word, str)]
        return []

    def _described(self, argument: str) -> list[list[str]]:
        """`x: (batch, length, width)` in a docstring or comment, or the first shape there."""
        shape = r"[\(\[]\s*([A-Za-z_]\w*(?:\s*[,x]\s*[A-Za-z_]\w*)+)\s*,?\s*[\)\]]"
        own = re.findall(rf"(?<!\w){re.escape(argument)}(?!\w)[^\n(\[]{{0,40}}{shape}", self.words)
        return [re.split(r"\s*,\s*|\s+x\s+", axes) for axes in [*own, *re.findall(shape, self.words)]]


def letters(names: list[str]) -> str | None:
    """ "batch", "seq_len", "d_model" -> "BLD"; None if a name has no meaning or two have the same."""
    axes = [letter(name, at, names) for at, name in enumerate(names)]
    if any(letter is None for letter in axes) or len(set(axes)) < len(axes):
        return None
    return "".join(str(letter) for letter in axes)


def letter(name: str, at: int, names: list[str]) -> str | None:
    lowered = name.lower().strip("_")
    others = [view.lower() for view in names]
    if lowered == "n":
        return "L" if any(re.fullmatch(_LETTERS["B"], other) for other in others) else "B"
    if lowered in ("h", "hidden") and at == len(names) - 1:
        return "D"
    if lowered == "s" and len(names) == 4 and at == 1 and "l" in others:
        return "H"
    return next((letter for letter, pattern in _LETTERS.items() if re.fullmatch(pattern, lowered)), None)


def comments(text: str) -> list[str]:
    return [match[1].strip() for match in re.finditer(r"#\s*(.*)", text)]


def docstrings(text: str) -> list[str]:
    try:
        tree = parsed_by(ast.parse, text)
    except SyntaxError:
        return []
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    return [doc for node in ast.walk(tree) if isinstance(node, kinds) and (doc := ast.get_docstring(node))]


def _text(thing: Any) -> str:
    try:
        return textwrap.dedent(parsed_by(inspect.getsource, thing))
    except (OSError, TypeError):
        return ""


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


_TRUE = r"true|ones?|non-?zeros?|1s?|1\.0"
_FALSE = r"false|zeros?|0s?|0\.0"
_VALUE = re.compile(rf"(?<![\w.=!])(?:(?P<on>{_TRUE})|(?P<off>{_FALSE}))(?![\w.])")
_SEEN = re.compile(
    r"\bke(?:ep|pt)|\battend|\bvisible|\bvalid|\breal\b|\bseen?\b|\ballow|\bparticipat|\bunmask|\bused?\b|\binclud|\bpresent\b"
    r"|\b(?:not|un|non)-?(?: be)? ?(?:mask|pad|ignor)|\b(?:may|can) (?:be )?(?:look|see)|\bactual|\btakes? part"
    r"|\bto look|\bopen\b"
)
_HIDDEN = re.compile(
    r"\bmasked\b|\bmask(?:s|ing)? (?:out|it|them|that)\b|^\s*(?:=|means?|:|->)\s*mask\b|\bignor|\bpadd?(?:ed|ing)?\b"
    r"|\bhid(?:den|es?|ing)|\bblock|\bexclud|\bdisallow|\bprevent|\bdrop|\binvisible|\bforbid|\bremoved?|\bdiscard"
    r"|\bsuppress|\binvalid|\b(?:not|never|no|cannot|can't|mustn't)(?: (?:be|to|may|allowed|let|should"
    r"|any))* ?(?:attend|see|look|allow|visible|valid|real|used?|included?)"
)
_ADDED = re.compile(
    r"\badditive|\badded (?:on)?to\b|\badds? to the (?:scores|logits)|\b0(?:\.0)?\b[^.;]{0,40}(?:-inf|-1e|negative"
    r"|minus inf|finfo)|\b(?:large )?negative (?:number|value)s?\b|\bfloat mask"
)


def documented(source: DocumentedSource, argument: str, others: Sequence[str] = ()) -> tuple[Meaning | None, str]:
    """The documented meaning of an argument, and the words that give it; None if there is none, or if there are two.

    `others` are the other arguments' names: text after one of them describes that one.
    """
    said: dict[Meaning, str] = {}
    for words in passages(source, argument, others):
        meaning = meaning_of(words)
        if meaning is not None:
            said.setdefault(meaning, words)
    return next(iter(said.items())) if len(said) == 1 else (None, "")


def documented_axes(source: DocumentedSource, argument: str, others: Sequence[str] = ()) -> str | None:
    """ "(batch, q_len, k_len)" -> "BQK", "(b, m)" -> "BK"; None if no shape is documented, or any that
    broadcasts."""
    for words in passages(source, argument, others):
        if "broadcast" in words.lower():
            return None
        shape = re.search(r"[\(\[]\s*((?:[A-Za-z_]\w*|1)(?:\s*[,x]\s*(?:[A-Za-z_]\w*|1))+)\s*,?\s*[\)\]]", words)
        if shape is None:
            continue
        names = re.split(r"\s*,\s*|\s+x\s+", shape[1])
        axes = _mask_axes(names)
        if axes is not None:
            return axes
    return None


def _mask_axes(names: list[str]) -> str | None:
    plain = ["1" if name == "1" else letter(name, at, names) for at, name in enumerate(names)]
    lengths = [at for at, axis in enumerate(plain) if axis == "L"]
    if None in plain or not 1 <= len(lengths) <= 2:
        return None
    for at, axis in zip(lengths, "QK" if len(lengths) == 2 else "K", strict=True):
        plain[at] = axis
    axes = "".join(map(str, plain))
    return axes if "D" not in axes and len(set(axes.replace("1", ""))) == len(axes.replace("1", "")) else None


def meaning_of(words: str) -> Meaning | None:
    """The meaning of True in a description: "1 = keep", "True where padded", "0 for masked", "added to the scores"."""
    lowered = re.sub(r"[\(\[][^)\]]*,[^)\]]*[\)\]]", " ", words.lower())
    if _ADDED.search(lowered) and "bool" not in lowered:
        return "additive"
    votes = {vote for vote in _votes(lowered) if vote is not None}
    return votes.pop() if len(votes) == 1 else None


def _votes(words: str) -> Iterator[Meaning | None]:
    values = list(_VALUE.finditer(words))
    for at, value in enumerate(values):
        end = values[at + 1].start() if at + 1 < len(values) else len(words)
        after = re.split(r"[.;](?:\s|$)", words[value.end() : end])[0][:70]
        before = re.split(r"[.;](?:\s|$)", words[values[at - 1].end() if at else 0 : value.start()])[-1]
        hidden = _is_hidden(after)
        if hidden is None and re.search(r"\b(?:where|if|when|are|is|by|with|=|:)\s*$", before):
            hidden = _is_hidden(before)
        if hidden is not None:
            yield "ignore" if hidden == (value["on"] is not None) else "attend"


def _is_hidden(words: str) -> bool | None:
    """Whether the first word with a meaning means "hidden"; None if no word has a meaning. If two such words start at
    the same place, the longer one counts."""
    matches = [
        (match.start(), -len(match[0]), hidden)
        for hidden, pattern in ((True, _HIDDEN), (False, _SEEN))
        if (match := pattern.search(words))
    ]
    return min(matches)[2] if matches else None


def passages(source: DocumentedSource, argument: str, others: Sequence[str]) -> Iterator[str]:
    """Text of docstrings and comments from the argument's name to the next argument's."""
    for text in dict.fromkeys([*docstrings(source.text), *docstrings(source.whole)]):
        yield from _entries(text, argument, others)
    for line in dict.fromkeys(source.whole.splitlines()):
        code, sign, comment = line.partition("#")
        if sign and re.match(rf"\s*{re.escape(argument)}\s*[:=,)]", code):
            yield f"{argument}: {comment.strip()}"
        elif sign:
            yield from _entries(comments(line)[0] if comments(line) else "", argument, others)


def _entries(text: str, argument: str, others: Sequence[str]) -> Iterator[str]:
    name = re.compile(rf"(?<![\w.]){re.escape(argument)}(?!\w)")
    others = [re.escape(other) for other in others if other != argument]
    next_entry = re.compile(rf"(?<![\w.])(?:{'|'.join(others)})`*\s*(?:\([^()\n]*\)\s*)?:") if others else None
    lines = text.splitlines()
    for at, line in enumerate(lines):
        for match in name.finditer(line):
            words = line[match.start() :]
            if re.match(rf"\W*(?:param\s+)?{re.escape(argument)}\W", line.strip() + " "):
                words = " ".join([words, *_deeper(lines, at)])
            end = next_entry.search(words, len(argument)) if next_entry else None
            yield " ".join(words[: end.start() if end else 400].split()).rstrip(",; ")


def _deeper(lines: list[str], at: int) -> list[str]:
    """The lines of an entry after its first: those indented deeper."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    taken = []
    for line in lines[at + 1 :]:
        if not line.strip() or indent(line) <= indent(lines[at]):
            break
        taken.append(line.strip())
    return taken
