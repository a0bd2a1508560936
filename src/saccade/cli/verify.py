"""`saccade verify`."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .. import __version__
from ..support._tables import Table
from ._errors import UserError
from ._options import GroupedCommand, flattened, option
from ._parts._existing import existing, model_folder
from ._parts._outputs import result_console

if TYPE_CHECKING:
    from ..verification import Report, Undecided
    from ..verification.subject._check import Check

# As `saccade.verification` has them, which loads PyTorch; a test holds the two together.
CHECKS = (
    "scale, softmax, causal-leak, causal-blindness, mask-meaning, padding, mixing, order, cache, precision, gradients, "
    "dropout, robustness, dtype and device, compile, weights, model"
)


def _path_in(target: str) -> Path | None:
    """The file or folder in FILE.py:NAME or hf:DIR; None if there is none, which the verification reports."""
    if target.startswith("hf:"):
        return model_folder(target.removeprefix("hf:"))
    return next((Path(path) for path in (target, target.rpartition(":")[0]) if path.endswith(".py")), None)


@dataclasses.dataclass(frozen=True)
class PromiseOptions:
    """Promises of the implementation (unset options are inferred and listed in the report)"""

    causal: bool | None = option(
        None,
        "Causal: no output depends on a later input. Bidirectional: each output may depend on all inputs.",
        "--causal/--bidirectional",
    )
    window: int | None = option(
        None,
        "Each output depends on its own input and the N inputs before it, and on no earlier input.",
        metavar="N",
        min=0,
    )
    positions: bool | None = option(
        None, "Whether the output depends on the order of the input.", "--positions/--no-positions"
    )
    scale: float | None = option(
        None, "Logits are X q.k; 0 means a plain average, by design.  [default: 1 / sqrt(head width)]", metavar="X"
    )
    mask_meaning: Literal["attend", "ignore", "additive"] | None = option(
        None, "Meaning of True in its mask; additive: the mask is added to the logits."
    )
    kv_order: Literal["repeat_interleave", "repeat"] | None = option(
        None, "How key heads are repeated for more query heads: each several times (0 0 1 1), or all in turn (0 1 0 1)."
    )


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """Calling convention (unset options are inferred and listed in the report)"""

    arg: list[str] | None = option(
        None,
        "An argument of the constructor, or of every call, such as embed_dim=64. The value is a Python "
        "literal, else a string. Repeat it for more.",
        metavar="NAME=VALUE",
    )
    embed_dim: int | None = option(None, "Width of the input.", metavar="N", min=1)
    num_heads: int | None = option(None, "Number of heads.", metavar="N", min=1)
    form: Literal["attention", "self", "cross", "qkv", "tokens"] | None = option(
        None,
        "Arguments of a call. attention: (q, k, v) without projections; self: (x); cross: (x, context); qkv: "
        "(query, key, value), projected inside; tokens: a whole model.",
    )
    layout: str | None = option(
        None, "The axes of the input, such as BHLD or LBD: batch, heads, length, width.", metavar="AXES"
    )
    mask: str | None = option(None, "Name of the argument that takes the mask.", metavar="NAME")
    adapter: str | None = option(
        None,
        "A function that calls the target: (target, query, key, value, mask=None), (target, x, mask=None) or "
        "(target, x, context, mask=None). query, key, value: (batch, heads, length, width); x: (batch, "
        "length, width); mask: boolean, True = attend.",
        metavar="FILE.py:NAME",
        callback=existing("FILE.py:NAME", kind="file", named=_path_in),
    )


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Checks and limits"""

    only: list[str] | None = option(
        None, f"Run only these checks; repeat the option for more. Checks: {CHECKS}.", metavar="CHECK"
    )
    skip: list[str] | None = option(None, "Skip these checks; repeat the option for more.", metavar="CHECK")
    time_limit: float = option(60.0, "Time limit for each check, and for importing the target.", metavar="SECONDS")
    memory_limit: float = option(
        4.0, "Memory limit for the target, on top of what Python and PyTorch use (Linux only).", metavar="GIB"
    )


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Output"""

    as_numbers: bool = option(False, "Print the report as JSON.", "--json")
    junit: Path | None = option(None, "Write the report as JUnit XML, for CI systems.", metavar="FILE.xml")
    out: Path | None = option(None, "Write the report as a web page.", metavar="FILE.html")
    force: bool = option(False, "Replace a file even if Saccade did not write it.", "--force")


def register(app: typer.Typer) -> None:
    app.command("verify", cls=GroupedCommand, short_help="Find errors in an implementation of attention.")(
        flattened(verify)
    )


def verify(
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="path/to/file.py:NAME, where NAME is a function, module or class; or a function without arguments "
            "that returns a stack, as saccade.verify_stack takes it: a model, or a dict of arguments; or hf:DIR_OR_ID "
            "for a transformers model.",
            show_default=False,
            callback=existing(named=_path_in),
        ),
    ],
    promised: PromiseOptions,
    calls: CallOptions,
    runs: RunOptions,
    outputs: ReportOptions,
) -> None:
    """Verify an implementation of attention, or a stack: which promises it breaks, where, and how to fix it.

    This runs the code that you name, as pytest does: run only code that you trust. It runs in a child process with
    limits on time and memory, and nothing is fetched. Exit status: 0 no errors; 1 errors,
    or no attention could be tested; 2 the way to call the target is ambiguous, or a usage error.
    """
    written = _checked(outputs, target)
    report = _stack_verified(target, promised, calls, runs, outputs) or _verified(
        target, promised, calls, runs, outputs
    )
    if outputs.as_numbers:
        from ..verification import as_json

        typer.echo(json.dumps(as_json(report), indent=1, allow_nan=False))
    else:
        _print(report)
    _write(report, written, is_named=not outputs.as_numbers)  # last: a full disk takes the files, and not the report
    if not report.ok:
        raise typer.Exit(1)


def _stack_verified(
    target: str, promised: PromiseOptions, calls: CallOptions, runs: RunOptions, outputs: ReportOptions
) -> Report | None:
    """The report on the stack that the target makes; None if the target is not a function without arguments."""
    if not target.rpartition(":")[0].endswith(".py"):
        return None
    from ..verification import Limits
    from ..verification._verify_stack import is_factory, verify_made

    if not is_factory(target):
        return None
    given = {**vars(calls), "only": runs.only, "skip": runs.skip, **vars(promised), "causal": None, "window": None}
    useless = [name for name, value in given.items() if value is not None]
    if useless:
        option_name = f"--{useless[0].replace('_', '-')}"
        raise UserError(f"{option_name}: {target} makes a stack, which takes --causal, --bidirectional and --window")
    window = None if promised.window is None else promised.window + 1  # of a stack the own key counts
    with _progress(quiet=outputs.as_numbers) as progress:
        limits = Limits(runs.time_limit, runs.memory_limit)
        return verify_made(target, limits, progress, causal=promised.causal, window=window)


def _verified(
    target: str, promised: PromiseOptions, calls: CallOptions, runs: RunOptions, outputs: ReportOptions
) -> Report:
    from ..verification import Hints, Limits, Promise, Undecided, verify as verify_target

    hints = Hints(calls.form, calls.layout, calls.embed_dim, calls.num_heads, calls.mask)
    promise = Promise(*vars(promised).values())
    try:
        with _progress(quiet=outputs.as_numbers) as progress:
            return verify_target(
                target,
                embed_dim=calls.embed_dim,
                num_heads=calls.num_heads,
                arguments=_arguments(calls.arg or []),
                how=calls.adapter or hints,
                promise=promise,
                checks=_chosen(runs.only, runs.skip),
                limits=Limits(runs.time_limit, runs.memory_limit),
                progress=progress,
            )
    except Undecided as undecided:
        _print_candidates(undecided, as_numbers=outputs.as_numbers)
        raise typer.Exit(2) from None


# What comes in


def _arguments(given: list[str]) -> dict[str, Any]:
    """Parse NAME=VALUE: Python literals, any other value as text."""
    arguments: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--arg {text}: expected NAME=VALUE, such as embed_dim=64")
        if name in arguments:
            raise UserError(f"--arg {name} came twice")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


def _chosen(only: list[str] | None, skip: list[str] | None) -> list[Check]:
    """The checks to run, by the names of the report's rows; "robustness" selects its whole family."""
    from ..verification.checks import CHECKS as every

    known = CHECKS.split(", ")
    for given, names in (("--only", only), ("--skip", skip)):
        for name in names or []:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                meant = f"did you mean {near[0]}?" if near else f"expected one of {CHECKS}"
                raise UserError(f"{given} {name}: there is no such check; {meant}")
    wanted, unwanted = set(only or known), set(skip or [])
    chosen = [
        finding
        for finding in every
        if {finding.name, finding.family} & wanted and not {finding.name, finding.family} & unwanted
    ]
    if not chosen:
        raise UserError("--only and --skip leave no check to run")
    return chosen


def _checked(outputs: ReportOptions, target: str) -> dict[str, Path]:
    """The files to write, by kind: whether they can be written is known before any work is done."""
    from ..see.viewer import check_target

    if outputs.out is not None and outputs.out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {outputs.out}: the page is written to an .html; --json and --junit give other forms")
    own = Path(target.rpartition(":")[0] or target).resolve()
    files: dict[str, Path] = {}
    for kind, path in (("JUnit", outputs.junit), ("Page", outputs.out)):
        if path is None:
            continue
        file = check_target(path, force=outputs.force)
        if file == own:
            raise UserError(f"{path} is the file that is verified")
        if file in files.values():
            raise UserError(f"{path} is the file of both --junit and --out; give two files")
        files[kind] = file
    return files


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, if that is a terminal, that names the current stage."""
    from ..support._terminal._console import progress_bar

    with progress_bar("{task.description:<18}", quiet=quiet) as update:
        update(description="starting")
        yield lambda done, total, name: update(completed=done, total=total, description=name)


# What goes out


def _write(report: Report, files: dict[str, Path], *, is_named: bool) -> None:
    from ..see.viewer import check_target, write_whole
    from ..verification import as_junit, as_page

    for at, (kind, path) in enumerate(files.items()):
        content = as_page(report, f"Saccade {__version__}") if kind == "Page" else as_junit(report)
        write_whole(check_target(path, force=True), content.encode("utf-8"))
        if is_named:
            typer.echo(f"{kind:7}{path}" if at else f"\n{kind:7}{path}")


def _print(report: Report) -> None:
    from rich.text import Text

    from ..verification import report_lines

    console = result_console()
    width = min(console.width, 110) if console.is_terminal else 100
    for line in report_lines(report, width):
        text = Text.assemble(*((piece.text, piece.rich) for piece in line))
        text.rstrip()
        console.print(text, soft_wrap=True)


def _print_candidates(undecided: Undecided, *, as_numbers: bool) -> None:
    """The open candidates, and the option that chooses each."""
    if as_numbers:
        candidates = [{"reading": words, "option": option} for words, option in undecided.candidates]
        typer.echo(json.dumps({"undecided": undecided.message, "candidates": candidates}, indent=1))
        return
    typer.echo(f"saccade: error: {undecided.message.rstrip('.:')}", err=True)
    if undecided.candidates:
        lines = Table((), [(option, words) for words, option in undecided.candidates], "l").lines("  ")
        typer.echo("\n".join(["What decides it:", *lines]), err=True)
