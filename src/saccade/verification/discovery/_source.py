"""What the target's source says in words and names: the letters of its axes, what it returns, its comments."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .._parsing import parsed_by

_LETTERS = {
    "B": r"b|bs|bsz|bz|batch|batch_?size|num_?batch(es)?|n_?batch(es)?|nb|b_sz",
    "H": r"h|heads?|n_?heads?|num_?heads?|nh|nhead|hq|hkv|kv_?heads?|n_?kv_?heads?|num_attention_heads|num_kv_heads",
    "L": r"l|t|s|seq|seq_?len(gth)?|length|len|lq|lk|tq|tk|sq|sk|q_?len|k_?len|kv_?len|tgt_?len|src_?len|time"
         r"|l_q|l_k|t_q"
         r"|t_k|seqlen|num_?tokens|n_?tokens|tokens?|sequence(_?length)?|positions?|tgt_?len|m|num_queries|num_keys|ctx"
         r"|(q|k|kv|query|key|src|tgt|trg|source|target|memory|context|mem|enc|dec|x)_?(seq_?)?(len(gth)?|size|tokens)"
         r"|(seq_?)?(len(gth)?)_?(q|k|v|kv|query|key|src|tgt|x|context)|n_ctx|n_?(q|k|kv|src|tgt|queries|keys)|src|tgt|keys?"
         r"|quer(y|ies)|i|j",
    "D": r"d|c|e|dim|dims|emb|embed|embed_?dim|emb_?dim|d_?model|hidden|hidden_?(dim|size)|hd|head_?(dim|size)"
         r"|d_?head|d_?k"
         r"|d_?v|d_?q|channels?|features?|hs|model_?dim|feature_?dim|width|dk|dv|embedding(_dim|_size)?|d_in|n_embd|embed_size"
         r"|num_hiddens|depth|dim_per_head|input_dim|f",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """The source of a function, or of a module's class, and its documentation."""

    text: str  # of the function or of forward
    whole: str  # the same, or the whole class

    @classmethod
    def of(cls, target: Any) -> Source:
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

    def returned_names(self, count: int) -> tuple[str, ...]:
        """The names of the tuple that the last `return` gives."""
        returns = [node.value for node in ast.walk(self.tree) if isinstance(node, ast.Return)] if self.tree else []
        found = [value for value in returns if isinstance(value, ast.Tuple)]
        fitting = [one for one in found if len(one.elts) >= count]
        return tuple(_name(one) for one in fitting[-1].elts) if fitting else ()

    def layout(self, argument: str, rank: int) -> str | None:
        """The letters of an argument's axes, as its unpacked shape, its annotation or the documentation names them."""
        said = [*self._unpacked(argument), *self._annotated(argument), *self._described(argument)]
        return next((axes for axes in map(letters, said) if axes and len(axes) == rank), None)

    def _unpacked(self, argument: str) -> list[list[str]]:
        """`B, L, D = x.shape` and `x.size()`."""
        found = []
        for node in ast.walk(self.tree) if self.tree else ():
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
                continue
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            if isinstance(value, ast.Attribute) and value.attr in ("shape", "size") and _name(value.value) == argument:
                found.append([_name(one) for one in node.targets[0].elts])
        return found

    def _annotated(self, argument: str) -> list[list[str]]:
        """jaxtyping: `Float[Tensor, "batch heads length width"]`."""
        for node in ast.walk(self.tree) if self.tree else ():
            if isinstance(node, ast.arg) and node.arg == argument and isinstance(node.annotation, ast.Subscript):
                words = [one.value for one in ast.walk(node.annotation) if isinstance(one, ast.Constant)]
                return [word.split() for word in words if isinstance(word, str)]
        return []

    def _described(self, argument: str) -> list[list[str]]:
        """`x: (batch, length, width)` in a docstring or comment, or the first shape there."""
        shape = r"[\(\[]\s*([A-Za-z_]\w*(?:\s*[,x]\s*[A-Za-z_]\w*)+)\s*,?\s*[\)\]]"
        words = "\n".join([*comments(self.text), *docstrings(self.text), *docstrings(self.whole)])
        own = re.findall(rf"(?<!\w){re.escape(argument)}(?!\w)[^\n(\[]{{0,40}}{shape}", words)
        return [re.split(r"\s*,\s*|\s+x\s+", one) for one in [*own, *re.findall(shape, words)]]


def letters(names: list[str]) -> str | None:
    """ "batch", "seq_len", "d_model" -> "BLD"; None where a name says nothing or two say the same."""
    found = [letter(name, at, names) for at, name in enumerate(names)]
    if any(letter is None for letter in found) or len(set(found)) < len(found):
        return None
    return "".join(str(letter) for letter in found)


def letter(name: str, at: int, names: list[str]) -> str | None:
    lowered = name.lower().strip("_")
    others = [one.lower() for one in names]
    if lowered == "n":
        return "L" if any(re.fullmatch(_LETTERS["B"], one) for one in others) else "B"
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
