"""The viewer in a notebook: a widget that sends requests as messages. No port is opened."""

from __future__ import annotations

from contextvars import copy_context
from functools import cache
from typing import TYPE_CHECKING, Any

from ....support._extras import installing
from ._app import client_script
from ._session import CLOSED, Reply
from ._workers import Workers

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ._session import Session


def make_widget(session: Session) -> Any:
    """An anywidget that shows `session`.

    Raises:
        ImportError: anywidget is not installed.
    """
    return _widget_class()(session)


def require_anywidget() -> Any:
    """ImportError if anywidget is not installed."""
    try:
        import anywidget
    except ImportError:
        raise ImportError(
            f"view: in a notebook this needs anywidget, which is not installed: {installing('view')}"
        ) from None
    return anywidget


@cache
def _widget_class() -> type:
    """Made at first use: `import saccade` needs no anywidget. One class, as notebooks refer to it by name."""
    anywidget = require_anywidget()

    class ViewerWidget(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        """A viewer in a notebook; made by `saccade.view`."""

        _esm = client_script()

        def __init__(self, session: Session) -> None:
            super().__init__()
            self.session = session
            self._workers = Workers()
            self._waiting: dict[str, Future[None]] = {}
            self.on_msg(self._receive)

        def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
            """Answer a request from a thread, so the kernel continues with its cells.

            The message may also cancel a request, as after quick panning: if it has not begun it is dropped.
            """
            kind, id = (content.get(name) if isinstance(content, dict) else None for name in ("kind", "id"))
            if kind == "cancel" and isinstance(id, str) and id in self._waiting:
                self._waiting[id].cancel()
            if kind != "request":
                return
            if self._workers.closed:
                self._send_reply(id, CLOSED)
                return
            # The context tells the kernel which request of the notebook an answer belongs to.
            answer = copy_context().run, self._answer, content
            work = self._workers.submit(content.get("op"), content.get("params"), *answer)
            if isinstance(id, str):
                self._waiting[id] = work
                work.add_done_callback(lambda _: self._waiting.pop(id, None))

        def _answer(self, content: dict[str, Any]) -> None:
            self._send_reply(content.get("id"), self.session.reply(content.get("op"), content.get("params")))

        def _send_reply(self, id: Any, reply: Reply) -> None:
            self.send({"kind": "reply", "id": id, "header": reply.header}, buffers=list(reply.buffers))

        def __repr__(self) -> str:
            """The text without a kernel, as in a notebook converted to HTML; its end may be cut off."""
            return f"Viewer: run this cell to see it; its Save makes a page that stays. {self.session.title!r}"

        def close(self) -> None:
            """Remove the widget, and delete its files."""
            self._workers.close()
            self.session.close()
            super().close()

    return ViewerWidget
