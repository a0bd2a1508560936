"""Who may ask the viewer, and what for. Requests are given to the application itself, without a network."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from saccade.viewer.server._app import LARGEST_BODY, Activity, Addresses, ViewerApp, framed
from saccade.viewer.server._session import Reply, Session
from saccade.viewer.server._view import open_session
from saccade.viewer.server._workers import THREADS, Workers

TOKEN, HOST = "a-token", "127.0.0.1:8123"
TEXT = "</script><script>alert(1)</script> & the cat"


@pytest.fixture(scope="module")
def session():
    return open_session(TEXT)


def new_app(session, activity=None):
    return ViewerApp(session, token=TOKEN, addresses=Addresses("127.0.0.1", 8123), activity=activity or Activity())


@pytest.fixture
def app(session):
    app = new_app(session)
    yield app
    app.workers.close()


async def asked(app, method, path, body=b"", headers=(), query="", *, gone=None):
    """Status, headers and body; `gone`: an event after which the asker no longer waits."""
    sent = []
    parts = [{"type": "http.request", "body": body[i : i + 9000], "more_body": True} for i in range(0, len(body), 9000)]
    parts.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive():
        if parts:
            return parts.pop(0)
        await (asyncio.Event() if gone is None else gone).wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
        "client": ("127.0.0.1", 9),
        "server": ("127.0.0.1", 8123),
    }
    await app(scope, receive, send)
    start = sent[0]
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, content


def ask(app, method, path, body=b"", *, host=HOST, token=TOKEN, query="", **headers):
    named = [("host", host)] if host is not None else []
    named += [("x-saccade-token", token)] if token is not None else []
    return asyncio.run(asked(app, method, path, body, [*named, *headers.items()], query))


def unframed(content):
    """Header and buffers, by the protocol's own words."""
    [size] = struct.unpack_from("<I", content)
    header = json.loads(content[4 : 4 + size])
    at, buffers = 4 + size, []
    for length in header["buffers"]:
        at += -at % 8
        buffers.append(np.frombuffer(content[at : at + length], "<f4"))
        at += length
    assert at + -at % 8 == len(content) and not any(content[at:])
    return header, buffers


def test_the_page_is_ours_alone_and_its_text_is_escaped(app):
    status, headers, content = ask(app, "GET", "/", token=None, query=f"token={TOKEN}")
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    page = content.decode()
    assert "&lt;/script&gt;" in page and "alert(1)</script>" not in page and TOKEN not in page
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and "unsafe" not in headers["content-security-policy"]
    nonce = policy["script-src"].split("'nonce-")[1].partition("'")[0]
    assert page.count(f'nonce="{nonce}"') == page.count("<script ") + page.count("<style ")
    assert "http:" not in page and "https:" not in page
    again = ask(app, "GET", "/", token=None, query=f"token={TOKEN}")[1]["content-security-policy"]
    assert nonce not in again


@pytest.mark.parametrize("path", ["/", "/client.js", "/api/open", "/no"])
def test_every_answer_has_the_strict_headers(app, path):
    for host in (HOST, "evil.example"):
        _, headers, _ = ask(app, "GET", path, host=host)
        assert headers["cache-control"] == "no-store" and headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer" and headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN.upper(), "ü"])
def test_without_the_token_nothing_is_shown(app, token):
    status, _, content = ask(app, "POST", "/api/open", b"{}", token=token)
    assert status == 403 and b"token is missing or wrong" in content
    query = {} if token is None else {"query": f"token={token}"}
    assert ask(app, "GET", "/", token=TOKEN, **query)[0] == 403  # only the address may open the page


@pytest.mark.parametrize(
    "host",
    [
        *(None, "", "evil.example", "evil.example:8123", "127.0.0.1", "127.0.0.1:8124", "127.0.0.1:99999", "[::1"),
        *("localhost:8123@evil.example", "evil@127.0.0.1:8123", "127.0.0.1:8123/evil.example", "127.0.0.1:8123#evil"),
    ],
)
def test_another_name_than_the_loopback_is_refused(app, host):
    status, _, content = ask(app, "POST", "/api/open", b"{}", host=host)
    assert status == 403 and b"localhost:8123" in content


@pytest.mark.parametrize("host", [HOST, "localhost:8123", "LOCALHOST:8123", "[::1]:8123"])
def test_the_loopback_answers_to_its_names(app, host):
    assert ask(app, "POST", "/api/alive", b"{}", host=host)[0] == 200
    assert ask(app, "POST", "/api/alive", b"{}", host=host, origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "http://127.0.0.1", "https://127.0.0.1:8123", ""])
def test_a_page_of_another_origin_is_refused(app, origin):
    status, _, content = ask(app, "POST", "/api/open", b"{}", origin=origin)
    assert status == 403 and b"its own page only" in content


def test_which_names_another_host_answers_to():
    named, every = Addresses("10.0.0.7", 80, "viewer.lab"), Addresses("0.0.0.0", 8123, "0")
    assert named.knows("viewer.lab") and named.knows("Viewer.Lab:80") and named.knows("localhost")
    assert named.knows("10.0.0.7") and not named.knows("10.0.0.5") and not named.knows("viewer.lab:8080")
    assert every.knows("10.0.0.5:8123") and every.knows("[fe80::1]:8123") and every.knows("localhost:8123")
    assert every.knows(f"{socket.gethostname()}:8123")
    assert not every.knows("evil.example:8123")  # a name can be pointed at this machine, an address cannot


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/etc/passwd"),
        ("GET", "/../../etc/passwd"),
        ("GET", "/..%2f..%2fetc/passwd"),
        ("GET", "/client.js/../../__init__.py"),
        ("GET", "//etc/passwd"),
        ("GET", "/api/../__init__.py"),
        ("GET", "/__init__.py"),
        ("GET", "/api/open"),
        ("POST", "/api/open/"),
        ("POST", "/"),
        ("PUT", "/client.js"),
        ("POST", "/api/"),
        ("OPTIONS", "/api/open"),
    ],
)
def test_everything_else_is_nothing(app, method, path):
    status, _, content = ask(app, method, path, query=f"token={TOKEN}")
    assert (status, content) == (404, b"There is nothing here.\n")


def test_an_unknown_operation_and_a_wrong_parameter_are_answers(app):
    status, headers, content = ask(app, "POST", "/api/eval", b"{}")
    assert (status, headers["content-type"]) == (404, "application/octet-stream")
    assert unframed(content) == ({"error": "op: there is no such operation", "buffers": []}, [])
    status, _, content = ask(app, "POST", "/api/overview", b'{"run": "7", "item": 0}')
    assert status == 400 and unframed(content)[0]["error"] == "run: expected one of 0, got '7'"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"run": NaN}x', b"{}{}"],
    ids=lambda body: repr(body[:12]),
)
def test_garbage_is_no_crash(app, body):
    status, _, content = ask(app, "POST", "/api/overview", body)
    assert (status, unframed(content)[0]["error"]) == (400, "the request is not JSON")


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(op=st.text(st.characters(codec="utf-8", exclude_characters="/?#"), min_size=1, max_size=9), body=st.binary())
def test_no_bytes_can_break_it(session, op, body):
    app = new_app(session)
    for path in (f"/api/{op}", "/api/tile"):
        assert ask(app, "POST", path, body)[0] in (400, 404)
    app.workers.close()


def test_a_body_that_is_too_large_is_not_read(app):
    status, _, content = ask(app, "POST", "/api/open", b" " * (LARGEST_BODY + 1))
    assert status == 413 and "larger than" in unframed(content)[0]["error"]
    assert ask(app, "POST", "/api/open", b"{}" + b" " * (LARGEST_BODY - 2))[0] == 200


def test_the_numbers_of_a_reply_stand_where_the_protocol_says():
    parts = np.arange(3, dtype="<f4"), np.zeros(0, "<f4"), np.arange(7, dtype="<f4")
    for error in ("", "ä", "the \ud800 half", "12345", "123456789"):
        content = framed(Reply({"error": error}, [part.tobytes() for part in parts]))
        header, buffers = unframed(content)
        assert header["error"] == error.replace("\ud800", "?")
        for buffer, part in zip(buffers, parts, strict=True):
            np.testing.assert_array_equal(buffer, part)


def test_what_is_quick_waits_for_no_walk(session, monkeypatch):
    """Pages wait for a dozen walks over all pairs; others get words, a pair, a tile meanwhile."""
    begun, go_on, run = threading.Event(), threading.Event(), session.runs[0]
    tile = run.tile

    def slow(*_):
        begun.set()
        assert go_on.wait(30)
        return []

    def slow_if_coarse(*place, exact):
        return slow() if exact and place[5] > 4 else tile(*place, exact=exact)

    monkeypatch.setattr(run, "overview", slow)
    monkeypatch.setattr(run, "tile", slow_if_coarse)
    activity = Activity()
    app = new_app(session, activity)
    headers = [("host", HOST), ("x-saccade-token", TOKEN)]
    place = {"run": "0", "call": "0", "head": 1, "item": 0}
    at = {**place, "what": "weights", "pool": "max", "row": 0, "key": 0}

    def post(op, params):
        return asyncio.ensure_future(asked(app, "POST", f"/api/{op}", json.dumps(params).encode(), headers))

    async def pages():
        walks = [post("overview", {"run": "0", "item": 0}) for _ in range(6)]
        walks += [post("tile", {**at, "level": 5, "exact": True}) for _ in range(6)]
        await asyncio.to_thread(begun.wait, 30)
        quick = [
            post("alive", {}),
            post("words", {"run": "0", "side": "text", "start": 0, "stop": 2}),
            post("cell", {**place, "row": 2, "key": 1}),
            post("row", {**place, "tokens": [2], "start": 0, "stop": 2, "top": 1}),
            post("column", {**place, "tokens": [2], "start": 0, "stop": 2, "top": 1}),
            post("tile", {**at, "level": 0, "exact": True}),
            post("tile", {**at, "level": 5, "exact": False}),
        ]
        try:
            found = await asyncio.wait_for(asyncio.gather(*quick), 20)
            assert activity.idle == 0 and app.workers.busy and not any(walk.done() for walk in walks)
        finally:
            go_on.set()
            await asyncio.gather(*walks)
        return [status for status, *_ in found]

    assert asyncio.run(pages()) == [200] * 7 and activity.running == 0
    app.workers.close()


def test_a_page_is_not_forgotten_while_every_thread_is_taken(session, monkeypatch):
    monkeypatch.setattr(Workers, "submit", lambda *_: pytest.fail("alive waits for a thread"))
    app = new_app(session)
    assert ask(app, "POST", "/api/alive", b"{}")[0] == 200 and ask(app, "POST", "/api/alive", b"[]")[0] == 400
    app.workers.close()


def test_what_nobody_waits_for_any_more_is_not_computed(session, monkeypatch):
    """Quick panning leaves requests behind: those that have not begun are dropped."""
    answered, block = [], threading.Event()

    def reply(self, op, params):
        assert block.wait(30)
        answered.append(params["n"])
        return Reply({})

    monkeypatch.setattr(Session, "reply", reply)
    monkeypatch.setitem(THREADS, "walk", 1)
    app = new_app(session)
    headers = [("host", HOST), ("x-saccade-token", TOKEN)]

    async def pan():
        gone = asyncio.Event()
        first = asyncio.ensure_future(asked(app, "POST", "/api/tile", b'{"n": 0}', headers))
        await asyncio.sleep(0.05)
        left = [
            asyncio.ensure_future(asked(app, "POST", "/api/tile", json.dumps({"n": n}).encode(), headers, gone=gone))
            for n in range(1, 9)
        ]
        await asyncio.sleep(0.05)
        gone.set()
        await asyncio.gather(*left)
        last = asyncio.ensure_future(asked(app, "POST", "/api/tile", b'{"n": 9}', headers))
        await asyncio.sleep(0.05)
        block.set()
        return await asyncio.gather(first, last)

    assert [status for status, *_ in asyncio.run(pan())] == [200, 200]
    app.workers.close()
    assert answered == [0, 9]
