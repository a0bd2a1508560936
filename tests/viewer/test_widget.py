"""The viewer in a notebook: requests as messages of a widget, answered beside the kernel."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import types

import numpy as np
import pytest

import saccade
from saccade.viewer.server import _view, _widget
from saccade.viewer.server._app import client_script
from saccade.viewer.server._session import Reply
from saccade.viewer.server._view import open_session
from saccade.viewer.server._workers import THREADS

pytest.importorskip("anywidget")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TEXT = "The hen met the fox."


@pytest.fixture(scope="module")
def session():
    """It outlives the widgets that show it."""
    session = open_session(TEXT)
    session.close = lambda: None
    return session


@pytest.fixture
def sent(monkeypatch):
    """What widgets send to the notebook: (message, buffers), from a comm that has no kernel."""
    import comm
    from comm.base_comm import BaseComm

    messages: queue.Queue = queue.Queue()

    class RecordingComm(BaseComm):
        def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
            if msg_type == "comm_msg" and data["method"] == "custom":
                messages.put((data["content"], [bytes(part) for part in buffers or []]))

    monkeypatch.setattr(comm, "create_comm", RecordingComm)
    return messages


def receive(widget, content):
    """As the kernel hands a message of the notebook to the widget."""
    widget._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})


def test_a_request_comes_back_with_its_numbers(session, sent):
    widget = _widget.make_widget(session)
    tile = {"what": "weights", "pool": "max", "level": 0, "row": 0, "key": 0, "exact": True}
    params = {"run": "0", "call": "0", "head": 1, "item": 0, **tile}
    receive(widget, {"kind": "request", "id": "a-7", "op": "tile", "params": params})
    message, [buffer] = sent.get(timeout=20)
    expected = session.reply("tile", params)
    assert message == {"kind": "reply", "id": "a-7", "header": expected.header}
    np.testing.assert_array_equal(np.frombuffer(buffer, "<f4"), np.frombuffer(expected.buffers[0], "<f4"))
    receive(widget, {"kind": "request", "id": "a-8", "op": "tile", "params": {**params, "head": 99}})
    message, buffers = sent.get(timeout=20)
    assert message["id"] == "a-8" and message["header"]["error"].startswith("head: ") and buffers == []
    assert widget._esm == client_script()
    widget.close()


@pytest.mark.parametrize("content", [None, 3, [], {}, {"kind": "reply", "id": "x"}])
def test_other_messages_are_nobodys(session, sent, content):
    widget = _widget.make_widget(session)
    receive(widget, content)
    receive(widget, {"kind": "request"})  # an answer to the last one only
    message, _ = sent.get(timeout=20)
    assert message["header"]["error"] == "op: there is no such operation" and sent.empty()
    widget.close()


def test_the_kernel_goes_on_while_an_answer_is_computed(sent, monkeypatch):
    session = open_session(TEXT)
    go_on, cell = threading.Event(), session.runs[0].cell("0", 0, 0, 1, 0)
    monkeypatch.setattr(session.runs[0], "cell", lambda *_: cell if go_on.wait(20) else None)
    widget = _widget.make_widget(session)
    place = {"run": "0", "call": "0", "head": 0, "item": 0}
    receive(widget, {"kind": "request", "id": "slow", "op": "cell", "params": {**place, "row": 1, "key": 0}})
    receive(
        widget, {"kind": "request", "id": "quick", "op": "alive", "params": {}}
    )  # the kernel is free to hand it over
    assert sent.get(timeout=20)[0]["id"] == "quick"
    go_on.set()
    message, _ = sent.get(timeout=20)
    assert (message["id"], message["header"]) == ("slow", cell._asdict())
    widget.close()


def test_what_the_notebook_no_longer_waits_for_is_dropped(session, sent, monkeypatch):
    """As after quick panning: of what no thread has begun nothing is computed."""
    go_on, computed = threading.Event(), []

    def slow(op, params):
        computed.append(params["number"])
        go_on.wait(20)
        return Reply({"number": params["number"]})

    monkeypatch.setattr(session, "reply", slow)
    widget = _widget.make_widget(session)
    place = {"level": 9, "exact": True}
    for number in range(30):
        receive(widget, {"kind": "request", "id": f"a-{number}", "op": "tile", "params": {**place, "number": number}})
    for number in range(29):
        receive(widget, {"kind": "cancel", "id": f"a-{number}"})
    for nonsense in (None, [], "a-99"):
        receive(widget, {"kind": "cancel", "id": nonsense})
    go_on.set()
    replies = set()
    while "a-29" not in replies:
        replies.add(sent.get(timeout=20)[0]["id"])
    begun = THREADS["walk"]
    assert sorted(computed) == [*range(begun), 29]
    widget.close()
    end = time.monotonic() + 20  # those that threads had begun end after the last one's reply
    while widget._waiting and time.monotonic() < end:
        time.sleep(0.01)
    assert not widget._waiting


def test_a_widget_that_is_closed_says_so(sent, monkeypatch):
    """A message may be on its way when the widget is closed."""
    widget = _widget.make_widget(open_session(TEXT))
    widget.close()
    answers = []
    monkeypatch.setattr(widget, "send", lambda content, buffers: answers.append((content, buffers)))
    receive(widget, {"kind": "request", "id": "late", "op": "open", "params": {}})
    assert answers == [({"kind": "reply", "id": "late", "header": {"error": "the viewer has ended"}}, [])]
    widget.close()


def test_in_a_notebook_view_gives_the_widget_and_opens_no_port(sent, monkeypatch):
    kernel = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setattr(_view, "Viewer", lambda *_, **__: pytest.fail("a server was started"))
    widget = saccade.view(TEXT)
    assert isinstance(widget, _widget._widget_class())
    bundle = widget._repr_mimebundle_()[0]
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"].startswith("Viewer: run this cell to see it; ") and TEXT in bundle["text/plain"]
    widget.close()


def test_without_anywidget_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.setattr(_view, "_in_notebook", lambda: True)
    monkeypatch.setattr(_view, "open_session", lambda *_, **__: pytest.fail("read before it was checked"))
    with pytest.raises(ImportError, match=r'anywidget, which is not installed: pip install "anywidget>=0.9.13"'):
        saccade.view(TEXT)


CELL = """
import saccade
viewer = saccade.view("The hen met the fox.")
viewer
"""


@pytest.mark.slow
def test_a_real_kernel_answers():
    """Through Jupyter's own protocol: the cell shows a widget, whose comm is then asked as the client asks."""
    pytest.importorskip("ipykernel")
    asyncio.run(_ask_a_kernel())


async def _ask_a_kernel():
    from jupyter_client.manager import start_new_async_kernel

    manager, client = await start_new_async_kernel(startup_timeout=120)
    try:
        opened = []

        def note(message):
            if message["msg_type"] == "comm_open" and message["content"]["data"]["state"].get("_esm"):
                opened.append(message["content"]["comm_id"])
            assert message["msg_type"] != "error", message["content"]

        reply = await client.execute_interactive(CELL, output_hook=note, timeout=120)
        assert reply["content"]["status"] == "ok" and len(opened) == 1
        content = {"kind": "request", "id": "x-0", "op": "overview", "params": {"run": "0", "item": 0}}
        data = {"method": "custom", "content": content}
        client.shell_channel.send(client.session.msg("comm_msg", {"comm_id": opened[0], "data": data}))
        while True:
            message = await client.get_iopub_msg(timeout=60)
            if message["msg_type"] == "comm_msg" and message["content"]["data"].get("method") == "custom":
                break
        answer = message["content"]["data"]["content"]
        assert (answer["kind"], answer["id"], answer["header"]["side"]) == ("reply", "x-0", 48)
        heads = len(answer["header"]["heads"])
        assert [len(part) for part in message["buffers"]] == [heads * 48 * 48 * 4]
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
