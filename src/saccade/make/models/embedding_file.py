"""Writes sentence vectors to a file, and resumes after an interruption.

Finished vectors are in a partial file beside the output: a line of JSON that identifies model, texts and options, then
rows of float32. The same run continues there. The output is written atomically, then the partial file is removed.

Shape legend: N texts, D dimension of a vector.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ...operator.nn._rounded import RoundedLinear
from ...support._plain_values import parsed_json
from ...support._whole_file import whole_file
from . import embedding
from .embedding import Embedder

ENDINGS = (".npy", ".jsonl")
_READ = ("*.json", "*.txt", "*.safetensors", "*.bin", "*.model", "*.spm", "*/config.json", "*/*.safetensors", "*/*.bin")
_CONTENT = 2**20  # up to this size files are compared by content, larger ones by size and time


@dataclass(frozen=True)
class EmbeddedTexts:
    """Texts with optional names for the rows.

    Args:
        texts: N.
        names: N file names; None without names.
    """

    texts: Sequence[str]
    names: Sequence[str] | None = None


@dataclass(frozen=True)
class Written:
    """The result of `embed_to_file`.

    Attributes:
        shape: (N, D).
        found: number of vectors taken from an earlier, interrupted run.
    """

    shape: tuple[int, int]
    found: int


def partial_of(out: Path) -> Path:
    """Path of the partial file for `out`."""
    return out.with_name(f"{out.name}.partial")


def embed_to_file(
    corpus: EmbeddedTexts,
    embedder: Embedder,
    out: Path,
    *,
    anew: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write vectors of texts to `out`: .npy with float32 (N, D), or .jsonl with an object in each line.

    Args:
        anew: whether to discard unfinished vectors of another run.
        progress: `progress(done, total)`, in texts.

    Raises:
        ValueError: no texts, another file ending, or unfinished vectors of another model, other texts or options.
    """
    texts = corpus.texts
    if not texts:
        raise ValueError("texts: empty, expected at least one text")
    if out.suffix.lower() not in ENDINGS:
        raise ValueError(f"{out}: expected a name that ends in {' or '.join(ENDINGS)}")
    partial, identity = partial_of(out), _identity(texts, embedder)
    done = earlier = _finished_rows(partial, identity, len(texts), anew=anew)
    while done < len(texts):
        begun = done

        def report(more: int) -> None:
            nonlocal begun
            begun += more
            if progress is not None:
                progress(begun, len(texts))

        if progress is not None:
            progress(done, len(texts))
        vectors = embedder.chunk(texts[done : done + embedding.CHUNK], report)
        _append(partial, {**identity, "width": vectors.shape[1]}, vectors, new=not done)
        done += len(vectors)
    with partial.open("rb") as file:
        width = json.loads(file.readline())["width"]
        with whole_file(out) as temporary, temporary.open("wb") as written:
            (_write_npy if out.suffix.lower() == ".npy" else _write_lines)(file, written, corpus, width)
    partial.unlink()
    return Written((len(texts), width), earlier)


def _identity(texts: Iterable[str], embedder: Embedder) -> dict[str, Any]:
    """Model, texts and options, which have to match those in the partial file."""
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    files, folder = embedder.files, embedder.model.folder
    sizes = embedder.longest, embedder.tokens_per_batch, embedding.CHUNK
    forms = [part.form for part in embedder.model.modules() if isinstance(part, RoundedLinear)]
    options = [list(files.pooling), files.normalize, *sizes, forms]
    return {
        "texts": digest.hexdigest(),
        "model": None if folder is None else _folder_digest(folder),
        "options": [*options, str(embedder.model.dtype), str(embedder.model.device), torch.__version__],
    }


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _READ for path in folder.glob(pattern) if path.is_file()):
        state = path.stat()
        small = state.st_size <= _CONTENT
        about = path.read_bytes() if small else f"{state.st_size} {state.st_mtime_ns}".encode()
        digest.update(f"{path.relative_to(folder)} {len(about)} ".encode() + about)
    return digest.hexdigest()


def _finished_rows(partial: Path, identity: dict[str, Any], total: int, *, anew: bool) -> int:
    """Number of vectors of the same run in a partial file, in whole chunks; truncates the rest."""
    if not partial.exists():
        return 0
    with partial.open("rb+") as file:
        line = file.readline()
        try:
            header = parsed_json(line)
            width = header.pop("width")
        except (ValueError, AttributeError, KeyError, TypeError):  # the first line is incomplete
            return 0
        if header != identity and anew:
            return 0
        if header != identity:
            kinds = ", ".join(kind for kind in identity if header.get(kind) != identity[kind])
            raise ValueError(
                f"{partial}: unfinished vectors of another run (other {kinds}); --force discards them, --out writes "
                "elsewhere"
            )
        rows = min((os.fstat(file.fileno()).st_size - len(line)) // (4 * width), total)
        if rows < total:
            rows -= rows % embedding.CHUNK
        file.truncate(len(line) + rows * 4 * width)
        return rows


def _append(partial: Path, header: dict[str, Any], vectors: np.ndarray, *, new: bool) -> None:
    with partial.open("wb" if new else "ab") as file:
        if new:
            file.write(json.dumps(header).encode() + b"\n")
        file.write(vectors.astype("<f4").tobytes())
        file.flush()
        os.fsync(file.fileno())


def _write_npy(file: IO[bytes], written: IO[bytes], corpus: EmbeddedTexts, width: int) -> None:
    shape = (len(corpus.texts), width)
    np.lib.format.write_array_header_1_0(written, {"descr": "<f4", "fortran_order": False, "shape": shape})
    while block := file.read(2**24):
        written.write(block)


def _write_lines(file: IO[bytes], written: IO[bytes], corpus: EmbeddedTexts, width: int) -> None:
    for n, text in enumerate(corpus.texts):
        about = {"text": text} if corpus.names is None else {"file": corpus.names[n]}
        vector = np.frombuffer(file.read(4 * width), "<f4")
        # The shortest decimal that reads back as the same float32.
        numbers = ",".join(np.format_float_positional(x, unique=True, trim="0") for x in vector)
        written.write(f'{json.dumps(about, ensure_ascii=False)[:-1]}, "vector": [{numbers}]}}\n'.encode())
