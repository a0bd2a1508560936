"""`saccade.view`: from a subject to a viewer."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....support._numbers import counted
from ....support._terminal import printable
from ._serve import MOST_IDLE, OTHERS, Viewer

if TYPE_CHECKING:
    from ..maps import Run
    from ._session import Session
    from ._subjects import TextReading

SHORT = 60  # characters of a text in a title


def view(
    subject: Any,
    *,
    model: Any = None,
    target: str | None = None,
    generate: int = 0,
    head: tuple[int | str, int] | None = None,
    words: Sequence[str] | None = None,
    budget: int | None = None,
    folder: str | Path | None = None,
    host: str | None = None,
    port: int | None = None,
    browser: bool = True,
    block: bool | None = None,
    keep: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Show attention in an interactive viewer: every head at any zoom, for texts of any length.

    In a notebook it is a widget, without an open port; it needs the kernel and waits while a cell runs. Elsewhere a
    server on this machine answers one page, which the browser opens; the address has a random token, which every
    request needs. The page cannot read files, and loads nothing from elsewhere. At a prompt `view` returns at
    once and the viewer runs until it is closed; in a script it returns when the page is closed or at Ctrl-C, as
    `matplotlib.pyplot.show` does.

    Queries and keys of every layer are kept, 2 * Lq * D numbers for each head; weights are computed for the visible
    part.

    Args:
        subject: a text; a list of texts, which are compared; a `Look`, whose text is read again; the result of
            `saccade.watch`, or the path of its file (`Observations.save`).
        model: reads the text: None for the embedded model, a folder, a name on the Hugging Face hub, an opened model,
            or a list of these, which are compared.
        target: the target text of an encoder-decoder: its cross-attention is shown as well.
        generate: the number of tokens by which the model continues the text first, the most probable one each time. An
            encoder-decoder writes a target of at most so many tokens instead. It stops at the end of the context, with
            a note.
        head: (layer, head), or (name of a call, head), to show first; None: one with a finding about the text.
        words: labels of the tokens of a watch.
        budget: bytes of queries and keys of texts in memory; None: no limit. A watch is in memory already.
        folder: for files with queries and keys beyond the budget, which are deleted when the viewer is closed; needs a
            budget.
        host: the address to listen on instead of 127.0.0.1. Any other lets in other machines that have the token;
            "0.0.0.0" is every address of this machine.
        port: the port to listen on; None: a free one. With `host` or `port` a notebook gets a server, too.
        browser: whether to open it; otherwise the address is only printed.
        block: whether to wait until the viewer ends; None: in a script.
        keep: whether a blocking viewer continues without an open page; otherwise it ends after ten minutes.
        progress: called with (done, total) after each layer.

    Returns:
        The widget in a notebook. Elsewhere a `Viewer`: its `url`, `close()` and `wait()`; a context manager.

    Raises:
        ValueError: a text without a word, or longer than the model's context; a watch without kept calls; a budget that
            is too small; a head that does not exist; a port that is in use; a damaged file.
        TypeError: a subject, a model or another argument of another type.
        FileNotFoundError: no such file or model folder.
        ImportError: the extra "view" is not installed.

    Example:
        >>> import torch, saccade
        >>> layer = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> with saccade.watch(layer, keep=True) as watched:
        ...     out = layer(torch.randn(1, 5, 16), saccade.Causal())
        >>> viewer = saccade.view(watched, words="The cat sat on it".split(), browser=False, block=False)
        Viewer  http://127.0.0.1:...
        >>> viewer.close()
    """
    in_notebook = host is None and port is None and _in_notebook()
    _check_installed(in_notebook)
    session = open_session(
        subject,
        model=model,
        head=head,
        target=target,
        generate=generate,
        words=words,
        budget=budget,
        folder=folder,
        progress=progress,
    )
    for note in session.notes:
        print(note, file=sys.stderr)
    if in_notebook:
        from ._widget import make_widget

        return make_widget(session)
    waits = not _interactive() if block is None else block
    viewer = start(session, host=host, port=port, most_idle=MOST_IDLE if waits and not keep else None)
    announce(viewer, browser=browser)
    if waits:
        with contextlib.suppress(KeyboardInterrupt):  # ends the viewer, and the script continues
            if viewer.wait():
                print("No page is open any more, so the viewer has ended; keep=True keeps it running.", file=sys.stderr)
    return viewer


def open_session(subject: Any, *, model: Any = None, head: tuple[int | str, int] | None = None, **how: Any) -> Session:
    """The session of `view`, with everything read. ``how``: the fields of `TextReading`."""
    from ...inspection import Look
    from ._session import Session
    from ._subjects import TextReading, notes_of, runs_of

    reading = _checked(TextReading(**how))
    models = list(model) if isinstance(model, list | tuple) else [] if model is None else [model]
    runs = runs_of(subject, models, reading)
    if head is None and isinstance(subject, Look):
        head = subject.layer, subject.head
    try:
        return Session(runs, _title(runs), _shown(runs, head), notes_of(runs, reading))
    except BaseException:
        for run in runs:
            run.close()
        raise


def start(session: Session, **how: Any) -> Viewer:
    """A viewer of ``session``, whose files are deleted if it cannot start. ``how``: as `Viewer`."""
    try:
        return Viewer(session, **how)
    except BaseException:
        session.close()
        raise


def announce(viewer: Viewer, *, browser: bool) -> None:
    """Print the address, and open it."""
    print(f"Viewer  {viewer.url}", flush=True)
    if viewer.lets_others_in:
        print(f"{OTHERS[0].upper()}{OTHERS[1:]}.", file=sys.stderr, flush=True)
    if browser and not viewer.open_browser():
        print("No browser could be opened here; open this address in one.", file=sys.stderr, flush=True)


def _checked(reading: TextReading) -> TextReading:
    """The options, checked before minutes of reading; errors as in `view`."""
    if not isinstance(reading.generate, int) or isinstance(reading.generate, bool) or reading.generate < 0:
        raise ValueError(f"generate: expected a number of tokens, at least 0, got {reading.generate!r}")
    if reading.generate and reading.target is not None:
        raise ValueError("generate and target: an encoder-decoder's target is given or written, not both")
    if reading.target is not None and not isinstance(reading.target, str):
        raise TypeError(f"target: expected a text, got {type(reading.target).__name__}")
    budget = reading.budget
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise ValueError(f"budget: expected bytes, at least 1, got {budget!r}")
    folder = _checked_folder(reading.folder)
    if folder is not None and budget is None:
        raise ValueError("folder: only for queries and keys beyond a budget; pass budget, too")
    return replace(reading, words=_checked_words(reading.words), folder=folder)


def _checked_words(words: Any) -> list[str] | None:
    if words is None:
        return None
    if isinstance(words, str) or not isinstance(words, Iterable):
        raise TypeError(f"words: expected a list of strings, one for each token, got {type(words).__name__}")
    listed = list(words)
    for number, word in enumerate(listed):
        if not isinstance(word, str):
            raise TypeError(f"words: expected a string for each token, got {type(word).__name__} for token {number:,}")
    return listed


def _checked_folder(folder: Any) -> Path | None:
    if folder is None:
        return None
    if not isinstance(folder, str | Path):
        raise TypeError(f"folder: expected the path of a folder, got {type(folder).__name__}")
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"folder: {folder} is not a folder")
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        raise ValueError(f"folder: {folder} is not writable; pass another folder") from None
    return path


def _title(runs: Sequence[Run]) -> str:
    first = " ".join(runs[0].text[: 4 * SHORT].split())
    what = f"{first[:SHORT].rstrip()}..." if len(first) > SHORT else first
    return printable(what or counted(len(runs[0].calls), "kept call"))


def _shown(runs: Sequence[Run], head: tuple[int | str, int] | None) -> Any:
    """The place to show first.

    Raises:
        ValueError: there is no such head; the message names the existing ones.
    """
    from ._session import MapPlace

    run = runs[0]
    if head is None:
        return MapPlace("0", *(run.shown or run.clearest()))
    if not isinstance(head, tuple | list) or len(head) != 2:
        raise ValueError(f"head: expected (layer, head) or (name of a call, head), got {head!r}")
    where, number = head
    for call in run.calls:
        if where in (call.layer, call.name) and not isinstance(where, bool) and number in range(call.shape[1]):
            return MapPlace("0", call.id, int(number))
    raise ValueError(f"head: {where}.{number} does not exist; {_heads_of(run)}")


def _heads_of(run: Run) -> str:
    """The existing heads, equal neighbours together: layers 0 to 3 have heads 0 to 7."""
    alike: list[list[Any]] = []  # part of an encoder-decoder or "", heads, first layer, last layer
    parted = [(f"{call.id.partition('.')[0]} " if "." in call.id else "", call) for call in run.calls]
    for part, call in sorted(parted, key=lambda pair: (pair[0], pair[1].layer)):
        if alike and alike[-1][:2] == [part, call.shape[1]] and call.layer <= alike[-1][3] + 1:
            alike[-1][3] = call.layer
        else:
            alike.append([part, call.shape[1], call.layer, call.layer])
    return ", ".join([*(_clause(*group) for group in alike[:6]), *(["..."] if len(alike) > 6 else [])])


def _clause(part: str, heads: int, first: int, last: int) -> str:
    which = f"layer {first} has" if first == last else f"layers {first} to {last} have"
    return f"{part}{which} {f'heads 0 to {heads - 1}' if heads > 1 else 'head 0'}"


def _check_installed(in_notebook: bool) -> None:
    """ImportError before minutes of reading, not after."""
    if in_notebook:
        from ._widget import require_anywidget

        require_anywidget()
    else:
        from ._serve import require_uvicorn

        require_uvicorn()


def _in_notebook() -> bool:
    """Whether this is a kernel with a front end for widgets: Jupyter, VS Code, Colab."""
    shell = _ipython()
    return shell is not None and hasattr(shell, "kernel")


def _interactive() -> bool:
    """Whether this is an interactive prompt, Python's or IPython's."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or _ipython() is not None


def _ipython() -> Any:
    running = sys.modules.get("IPython")
    return None if running is None else running.get_ipython()
