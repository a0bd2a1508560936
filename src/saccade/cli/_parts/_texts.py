"""Text arguments of commands: in quotes, from a file, from standard input, or a range of words of these."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ...support._terminal import standard_input
from .._errors import UserError
from ._existing import existing

if TYPE_CHECKING:
    from ...see.inspection import TextModel

LARGEST_FILE = 64 * 2**20  # bytes; far above any context
TEXT_FILES = {".txt", ".text", ".md", ".rst", ".html", ".htm", ".tex", ".csv", ".json", ".log", ".py"}
SAVED_FILES = {".watch", ".safetensors"}


class InputText(NamedTuple):
    """A text, the arguments that give it again, and its source ("" for the command line)."""

    text: str
    again: list[str]
    source: str


def given_text(arguments: list[str] | None, command: str) -> InputText:
    """The text given to ``command``: quoted, from a file, or from standard input.

    Raises UserError if it is missing, empty, not UTF-8 or more than one.
    """
    if arguments and len(arguments) > 1:
        if "-" in arguments:
            raise UserError("both a text and - for standard input are given; give one of them")
        raise UserError(
            f"{len(arguments)} texts are given; put the text in quotes: saccade {command} {quoted(' '.join(arguments))}"
        )
    if not arguments or arguments == ["-"]:
        return _from_standard_input(command, asked=bool(arguments))
    return text_or_file(arguments[0])


def text_or_file(argument: str) -> InputText:
    """The argument itself, or the text of the file it names."""
    path = as_file(argument)
    if path is None:
        return InputText(_clean(argument, "the text"), again_arguments(argument), "")
    return InputText(_clean(_decoded(_read(path), str(path)), str(path)), [str(path)], f"from file {path}")


def _from_standard_input(command: str, *, asked: bool) -> InputText:
    if sys.stdin is None or (sys.stdin.isatty() and not asked):
        raise UserError(f'no text is given; for example: saccade {command} "The cat sat on the mat."')
    text = _clean(_decoded(standard_input().buffer.read(LARGEST_FILE + 1), "standard input"), "standard input")
    return InputText(text, again_arguments(" ".join(text.split()[:12])), "from standard input")


def as_file(argument: str) -> Path | None:
    """The path if ``argument`` names a file, None if it is a text. UserError if it can only be a missing file."""
    path = Path(argument)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # impossible as a file name, so a text
        return None
    if path.is_dir() and argument.strip(". "):
        raise UserError(f"{argument}: is a folder; give a text file")
    if exists and not path.is_dir():
        return path
    if _can_only_be_a_file(argument):
        raise UserError(f"{argument}: no such file")
    return None


def existing_text() -> Callable[..., Any]:
    """A callback for typer that checks that an argument which can only be a file exists."""
    return existing(
        "a text in quotes, or a text file",
        kind="file",
        named=lambda argument: Path(argument) if _can_only_be_a_file(argument) else None,
    )


TextArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT",
        help="A text in quotes, a file, or - for standard input.",
        show_default=False,
        callback=existing_text(),
    ),
]


def _can_only_be_a_file(argument: str) -> bool:
    ending = Path(argument).suffix.lower()
    looks_like_one = ending in TEXT_FILES | SAVED_FILES or argument.startswith(("/", "./", "../", "~/"))
    return looks_like_one and not re.search(r"\s", argument)


def _read(path: Path) -> bytes:
    if not (path.is_file() or path.is_fifo()):
        raise UserError(f"{path}: not an ordinary file")
    with path.open("rb") as file:
        return file.read(LARGEST_FILE + 1)


def _decoded(content: bytes, name: str) -> str:
    if len(content) > LARGEST_FILE:
        raise UserError(f"{name}: larger than {LARGEST_FILE >> 20} MiB; give a part of it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}: not a text in UTF-8 (byte {content[error.start]:#04x} at position {error.start:,})"
        ) from None
    if "\0" in text:
        raise UserError(f"{name}: a binary file, not a text")
    return text


def _clean(text: str, name: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    if not text:
        raise UserError(f"{name} is empty; expected at least one word")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{name} is not valid UTF-8") from None
    return text


def word_range(given: InputText, first: int | None, last: int | None) -> InputText:
    """The words ``first`` to ``last``, inclusive and counted from 1."""
    if first is None and last is None:
        return given
    from ...see.inspection import split_words

    spans = split_words(given.text)
    for name, number in (("--from", first), ("--to", last)):
        if number is not None and number < 1:
            raise UserError(f"{name} {number}: words are counted from 1")
    start, stop = first or 1, min(last if last is not None else len(spans), len(spans))
    if start > stop:
        raise UserError(
            f"--from {start} --to {stop if last is None else last}: no such words; the text has 1 to {len(spans):,}"
        )
    again = [*given.again, "--from", str(start), "--to", str(stop)]
    words = f"words {start:,} to {stop:,} of {len(spans):,}"
    return InputText(given.text[spans[start - 1][0] : spans[stop - 1][1]], again, f"{words} {given.source}".strip())


def parse_head(head: str | None) -> tuple[int, int] | None:
    """Parse ``2.5`` to layer and head."""
    if head is None:
        return None
    match = re.fullmatch(r"(\d{1,6})[.:](\d{1,6})", head.strip())
    if not match:
        raise UserError(f"--head {head}: expected layer.head, such as 2.5")
    return int(match[1]), int(match[2])


def check_length(model: TextModel, text: str, first: int, beyond: str = "") -> None:
    """Raise UserError for a text longer than the context, with a part that fits.

    ``first``: number of the first word. ``beyond``: the option that allows more tokens than in training.
    """
    from ...see.inspection import split_words, words_that_fit

    spans = split_words(text)
    fit = words_that_fit(model, text, spans)
    if fit >= len(spans):
        return
    room = f"this model reads {model.room:,} tokens (words or pieces of words) at once"
    longer = "give a model that reads more with --model"
    if beyond and model.positions is None:
        needed = len(model.encode(text).ids) + len(model.before) + len(model.after)
        longer += f", or go beyond what this one was trained on with {beyond} {needed}{_memory(model, needed)}"
    if not fit:
        raise UserError(f"the text is too long: {room}, and its first word alone has more; {longer}")
    part = f"--from {first} --to {first + fit - 1}" if first > 1 else f"--to {fit}"
    raise UserError(
        f"the text is too long: it has {len(spans):,} words and marks, and {room}, which is {fit:,} of them here; "
        f"read these with {part}, or {longer}"
    )


def _memory(model: TextModel, tokens: int) -> str:
    """Memory of queries and keys for so many tokens, as text; "" if unknown.

    It is unknown for encoder-decoders, where it depends on the target, and for foreign modules.
    """
    from ...make.models.text.encoder_decoder import EncoderDecoder
    from ...support._numbers import size

    if model.stack is None or isinstance(model.module, EncoderDecoder):
        return ""

    blocks: Any = model.stack.blocks
    shapes = [block.attention.shape for block in blocks]
    width = sum(shape.head * (shape.query_heads + shape.key_heads) for shape in shapes)
    taken = tokens * width * next(model.module.parameters()).element_size()
    return f" (its queries and keys take {size(taken)} of memory)"


def again_arguments(text: str) -> list[str]:
    """The text as an argument, after -- if it begins with a dash."""
    return ["--", text] if text.startswith("-") else [text]


def command_line(*parts: str) -> str:
    if "--" in parts and "--from" in parts:  # options have to precede the double dash
        at, cut = parts.index("--"), parts.index("--from")
        parts = (*parts[:at], *parts[cut:], *parts[at:cut])
    return " ".join(["saccade", *(quoted(part) for part in parts)])


def quoted(argument: str) -> str:
    """Quote an argument for a shell: bare if possible, else in double quotes, else as shlex does."""
    if os.name == "nt":
        import subprocess

        return subprocess.list2cmdline([argument])
    if shlex.quote(argument) == argument:
        return argument
    return f'"{argument}"' if not re.search(r'["$`\\!\n]', argument) else shlex.quote(argument)
