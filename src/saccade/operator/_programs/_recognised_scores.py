"""What a score program is in terms that have kernels: softcap, scale, scores of rows, of keys, of distances.

Proved from the program's structure, never from samples. The form is `where(shown, cap(factor * score) + term, -inf)`,
where `cap` may be missing, and neither `shown` nor `term` depends on the score; what the term depends on decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from ._language import Builder, Node, Program

Form = Literal["none", "constant", "query", "key", "distance", "table", "program"]

# Of a table only what is linear: elsewhere a hidden pair's infinite slope could reach it.
_LINEAR = frozenset({"load", "add", "sub", "neg", "where", "mul", "div"})
# A factor made of these is finite at every pair.
_FINITE = frozenset({"add", "sub", "mul", "neg", "abs", "sign", "min", "max", "sin", "cos", "tanh", "sigmoid", "floor"})
_FINITE_TOO = frozenset({"ceil", "round", "trunc", "where", "to_float", "const"})


@dataclass(frozen=True)
class RecognisedScore:
    """`softcap(factor * score) + term` where `shown`, else -inf. Output 0 of a program is its value.

    In the form "program" the term is the new score itself.
    """

    factor: float = 1.0
    softcap: float | None = None
    form: Form = "none"
    term: Program | None = None
    shown: Program | None = None

    def described(self, mask: object = None) -> str:
        """The form in words.

        Args:
            mask: what `shown` is, where it has a name.
        """
        terms = {"constant": "a constant per head", "query": "a term (b, h, q)", "key": "a term (b, h, k)"}
        terms |= {"distance": "distances (h, k - q)", "table": "a tensor of scores"}
        parts = [] if self.shown is None else ["a mask" if mask is None else f"the mask {mask!r}"]
        parts += [f"scale {self.factor:g}"] if self.factor != 1.0 and self.softcap is None else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap is not None else []
        if self.form == "program":
            parts.append("a program")
        elif self.form != "none":
            parts.append(terms[self.form])
        return " and ".join(parts) or "the score itself"


def recognised(program: Program, reads_tables: bool = True) -> RecognisedScore | None:
    """The known form of a program; None where it has none.

    Args:
        reads_tables: whether `shown` may read tables of ints and bools.
    """
    rest, shown = _shown(program, reads_tables)
    known = _added(rest)
    if shown is None:
        return known
    return replace(known or RecognisedScore(form="program", term=rest), shown=shown)


def _shown(program: Program, reads_tables: bool) -> tuple[Program, Program | None]:
    """The score inside of `where(shown, score, -inf)` and `score + where(shown, term, -inf)`, and all conditions."""
    depends, node = program.depends, program.outputs[0]
    build = Builder()
    here = build.copy(program)
    conditions: list[int] = []
    varies = _not_for_masks(program, reads_tables)

    def inside(node: int) -> int:
        """The node without conditions around it."""
        while (choice := program.nodes[node]).op == "where" and not varies[choice.args[0]]:
            hidden = [program.nodes[arg].value == -math.inf for arg in choice.args[1:]]
            if hidden not in ([False, True], [True, False]):
                break
            shown = here[choice.args[0]]
            conditions.append(shown if hidden[1] else build.of("not", shown))
            node = choice.args[1] if hidden[1] else choice.args[2]
        return node

    node = inside(node)
    split = _split(program, depends, node)
    rest = here[node]
    if split is not None:
        core, terms = split
        rest = here[core]
        for term, negative in reversed(terms):
            rest = build.of("sub", rest, here[term]) if negative else build.of("add", rest, here[inside(term)])
    if not conditions:
        return program, None
    return build.program(rest), build.program(reduce(lambda one, other: build.of("and", one, other), conditions))


def _not_for_masks(program: Program, reads_tables: bool) -> list[bool]:
    """Whether each node depends on the score, on a table of floats or, without `reads_tables`, on any table."""
    varies: list[bool] = []
    for node in program.nodes:
        own = node.op == "score" or (node.op == "load" and not (reads_tables and node.kind != "float"))
        varies.append(own or any(varies[arg] for arg in node.args))
    return varies


def _added(program: Program) -> RecognisedScore | None:
    depends = program.depends
    split = _split(program, depends, program.outputs[0])
    if split is None:
        return None
    core, terms = split
    capped = _capped(program, depends, core)
    if capped is None:
        return None
    factor, softcap = capped
    if not terms:
        return RecognisedScore(factor, softcap)
    term = _sum(program, terms)
    form = _form(term)
    return None if form is None else RecognisedScore(factor, softcap, form, term)


# --- the parts of a sum ---------------------------------------------------------------------------------------------


def _split(
    program: Program, depends: tuple[frozenset[str], ...], node: int
) -> tuple[int, list[tuple[int, bool]]] | None:
    """The summand that depends on the score, and the others, each with whether it is subtracted."""
    terms: list[tuple[int, bool]] = []
    while (here := program.nodes[node]).op in ("add", "sub"):
        left, right = here.args
        with_score = ["score" in depends[arg] for arg in here.args]
        if with_score == [True, False]:
            terms.append((right, here.op == "sub"))
            node = left
        elif with_score == [False, True] and here.op == "add":
            terms.append((left, False))
            node = right
        else:
            break
    return (node, terms) if "score" in depends[node] else None


def _sum(program: Program, terms: list[tuple[int, bool]]) -> Program:
    build = Builder()
    here = build.copy(program)
    total = build.const(0.0, "float")
    for node, negative in reversed(terms):
        total = build.of("sub" if negative else "add", total, here[node])
    return build.program(total)


def _capped(program: Program, depends: tuple[frozenset[str], ...], node: int) -> tuple[float, float | None] | None:
    """(factor, softcap) of `softcap * tanh(factor * score / softcap)` or of `factor * score`."""
    outer, inside = _factored(program, depends, node)
    if program.nodes[inside].op == "score":
        return (outer, None) if math.isfinite(outer) else None
    if program.nodes[inside].op != "tanh" or outer == 0:
        return None
    inner, leaf = _factored(program, depends, program.nodes[inside].args[0])
    # c tanh(r s) = |c| tanh(r c s / |c|): tanh is odd.
    factor = outer * inner
    if program.nodes[leaf].op != "score" or not math.isfinite(factor):
        return None
    return (1.0 if math.isclose(factor, 1.0, rel_tol=1e-15) else factor), abs(outer)


def _factored(program: Program, depends: tuple[frozenset[str], ...], node: int) -> tuple[float, int]:
    """A constant, and the node that it multiplies."""
    factor = 1.0
    while True:
        here = program.nodes[node]
        values = [program.nodes[arg].value if program.nodes[arg].op == "const" else None for arg in here.args]
        if here.op == "neg":
            factor, node = -factor, here.args[0]
        elif here.op == "mul" and values[0] is not None:
            factor, node = factor * values[0], here.args[1]
        elif here.op == "mul" and values[1] is not None:
            factor, node = factor * values[1], here.args[0]
        elif here.op == "div" and values[1]:
            factor, node = factor / values[1], here.args[0]
        else:
            return factor, node


# --- what a term depends on -----------------------------------------------------------------------------------------


def _form(term: Program) -> Form | None:
    depends = term.depends[term.outputs[0]]
    if not _linear_in_tables(term):
        return None
    if not depends & {"q", "k"}:
        return "constant"
    if "k" not in depends:
        return "query"
    if "q" not in depends:
        return "key"
    if is_entry(term):
        return "table"
    return "distance" if "b" not in depends and _of_distances(term) else None


def is_entry(term: Program) -> bool:
    """Whether the term is the entry of a float table whose indices are different leaves among b, h, q and k."""
    node = term.nodes[term.outputs[0]]
    names = [term.nodes[arg].op for arg in node.args]
    return node.op == "load" and node.kind == "float" and set(names) <= set("bhqk") and len(set(names)) == len(names)


def _linear_in_tables(program: Program) -> bool:
    """Whether float tables are read linearly, with factors that are finite everywhere."""
    nodes = program.nodes
    read = [False] * len(nodes)
    finite = [False] * len(nodes)
    for n, node in enumerate(nodes):
        args = node.args
        known = node.op in _FINITE or node.op in _FINITE_TOO or node.kind != "float"
        finite[n] = known and all(finite[arg] for arg in args)
        if node.op == "const":
            finite[n] = math.isfinite(node.value or 0)
        if node.op == "div":
            finite[n] = finite[args[0]] and nodes[args[1]].op == "const" and bool(nodes[args[1]].value)
        read[n] = node.kind == "float" and (node.op == "load" or any(read[arg] for arg in args))
        if not read[n] or node.op == "load":
            continue
        if node.op not in _LINEAR:
            return False
        if node.op == "mul" and not any(finite[arg] and not read[arg] for arg in args):
            return False
        if node.op == "div" and not (nodes[args[1]].op == "const" and nodes[args[1]].value):
            return False
    return True


def _of_distances(program: Program) -> bool:
    """Whether every use of q and k is one of k - q.

    Sums of positions are followed as `a q + b k + c` (integers, exact); a node is one of distances if a = -b, and any
    other operation on nodes of distances gives one. A comparison x < y is one of x - y.
    """
    sums: list[tuple[int, int] | None] = []  # (a, b) of a node that is such a sum
    fine: list[bool] = []
    for node in program.nodes:
        sums.append(_sum_of_positions(program, node, sums))
        known = sums[-1]
        if known is not None:
            fine.append(known[0] == -known[1])
        elif node.op in _COMPARISONS and (pair := [sums[arg] for arg in node.args]) and None not in pair:
            (a, b), (c, d) = pair  # type: ignore[misc]
            fine.append(a - c == d - b)
        else:
            fine.append(all(fine[arg] for arg in node.args))
    return fine[program.outputs[0]]


_COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})


def _sum_of_positions(program: Program, node: Node, sums: list[tuple[int, int] | None]) -> tuple[int, int] | None:
    if node.op in ("q", "k"):
        return (1, 0) if node.op == "q" else (0, 1)
    if node.op == "const" and node.kind != "bool":
        return (0, 0)
    if node.op == "to_float" and program.nodes[node.args[0]].kind == "int":
        return sums[node.args[0]]  # positions are exact in floating point
    args = [sums[arg] for arg in node.args]
    if not args or None in args:
        return None
    (a, b), *rest = args  # type: ignore[misc]
    if node.op == "neg":
        return -a, -b
    if node.op in ("add", "sub"):
        sign = 1 if node.op == "add" else -1
        return a + sign * rest[0][0], b + sign * rest[0][1]  # type: ignore[index]
    return None
