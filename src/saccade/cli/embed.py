"""`saccade embed`."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._errors import UserError
from ._options import GroupedCommand, flattened, option
from ._parts._existing import existing, existing_model

if TYPE_CHECKING:
    from ..make.models.embedding_file import EmbeddedTexts

_TABLES = {".csv": ",", ".tsv": "\t"}


@dataclasses.dataclass(frozen=True)
class VectorOptions:
    """Embedding of a text"""

    pooling: str | None = option(
        None,
        "Pooling of token vectors: mean, first, last, max, mean-sqrt or weighted-mean.  [default: from the "
        "model's sentence-transformers files, else mean]",
        metavar="NAME",
    )
    normalize: bool | None = option(
        None,
        "Scale vectors to length 1, or leave them unchanged.  [default: from those files]",
        "--normalize/--no-normalize",
    )
    tokens_per_batch: int = option(4096, "Tokens in one batch.")
    weights: str | None = option(
        None,
        "What linear layers hold: bfloat16, int8, int4 or stored; int8 is up to twice as fast as floats on "
        "processors with AVX-512 VNNI.  [default: floats]",
        metavar="NAME",
    )


def register(app: typer.Typer) -> None:
    app.command("embed", cls=GroupedCommand, short_help="Write an embedding vector for every text of a corpus.")(
        flattened(embed)
    )


def embed(
    texts: Annotated[
        Path,
        typer.Argument(
            metavar="FILE_OR_FOLDER",
            help="A file with one text per line, a .csv or .tsv with --column, or a folder with one text per .txt "
            "file.",
            show_default=False,
            callback=existing(),
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="DIR_OR_HUB_ID",
            help="The model's folder or its name on the hub.",
            show_default=False,
            callback=existing_model(),
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write: .npy or .jsonl.", show_default=False)],
    vectors: VectorOptions,
    column: Annotated[str | None, typer.Option(help="The column of a .csv or .tsv that holds the texts.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE, and discard unfinished work for it.")] = False,
) -> None:
    """Write an embedding vector for every text of a corpus; row n belongs to text n.

    Texts are sorted by length and computed without padding. An interrupted command continues where it stopped: finished
    rows are kept in FILE.partial until FILE is complete.
    """
    from ..make.models.embedding_file import ENDINGS

    if out.suffix.lower() not in ENDINGS:
        raise UserError(f"--out {out}: expected a name that ends in {' or '.join(ENDINGS)}")
    from ..see.viewer import check_target

    if out.is_file() and not force:
        raise UserError(f"{out} exists; --force replaces it, --out writes elsewhere")
    target = check_target(out, force=True)
    corpus = _read(texts, column)
    from ..make.models.embedding import open_embedder
    from ..make.models.embedding_file import embed_to_file

    embedder = open_embedder(
        model,
        pooling=vectors.pooling,
        normalize=vectors.normalize,
        tokens_per_batch=vectors.tokens_per_batch,
        weights=vectors.weights,
    )
    with _progress() as progress:
        written = embed_to_file(corpus, embedder, target, anew=force, progress=progress)
    empty = sum(not text.strip() for text in corpus.texts)
    if empty:
        typer.echo(f"saccade: {empty:,} of the texts are empty; their vectors represent no word", err=True)
    rows, width = written.shape
    reused = f", {written.found:,} of them from the run before" if written.found else ""
    typer.echo(f"{rows:,} vectors of {width:,} numbers{reused}  {out}")


def _read(path: Path, column: str | None) -> EmbeddedTexts:
    """Read the texts of a file or a folder."""
    from ..make.models.embedding_file import EmbeddedTexts

    if column is not None and path.suffix.lower() not in _TABLES:
        raise UserError(f"--column {column}: only for a .csv or .tsv, got {path}")
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise UserError(f"{path}: the folder contains no .txt file")
        return EmbeddedTexts([_content(file) for file in files], [file.relative_to(path).as_posix() for file in files])
    content = _content(path)
    if path.suffix.lower() in _TABLES:
        texts = _column(path, content, column)
    else:
        texts = content.removesuffix("\n").split("\n") if content else []
    if not texts:
        raise UserError(f"{path}: empty, expected at least one text")
    return EmbeddedTexts(texts)


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text in UTF-8 (at byte {error.start:,})") from None


def _column(path: Path, content: str, column: str | None) -> list[str]:
    rows = csv.reader(io.StringIO(content, newline=""), delimiter=_TABLES[path.suffix.lower()])
    usual = csv.field_size_limit(max(csv.field_size_limit(), len(content)))  # cells are never longer than the file
    try:
        names = next(rows, [])
        if column is None or column not in names:
            problem = "--column is missing" if column is None else f"no column {column!r}"
            from ..make.tasks._examples import separated_otherwise

            advice = separated_otherwise(path, content)
            raise UserError(f"{path}: {problem}; it has {', '.join(map(repr, names)) or 'none'}{advice}")
        place = names.index(column)
        texts = []
        for row in rows:
            if row and len(row) <= place:
                raise UserError(f"{path}: line {rows.line_num} has no {column!r}")
            texts += [row[place]] if row else []
        return texts
    except csv.Error as error:
        raise UserError(f"{path}: line {rows.line_num}: {error}") from None
    finally:
        csv.field_size_limit(usual)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar with texts/s on standard error, if that is a terminal."""
    from ..support._terminal._console import progress_bar

    with progress_bar() as update:
        first: list[float] = []  # time and number of texts at the first call: texts of an earlier run took no time

        def report(done: int, total: int) -> None:
            first.extend([] if first else [time.monotonic(), done])
            seconds = time.monotonic() - first[0]
            rate = f", {(done - first[1]) / seconds:,.0f} a second" if seconds > 0.5 else ""
            update(completed=done, total=total, description=f"texts{rate}")

        yield report
