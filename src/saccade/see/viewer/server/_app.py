"""The viewer over HTTP: a page, its script, and the operations of a session. It serves no files.

Requests are authorised before their body is read: by the name and port they came to, the page they came from, and the
token.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ._session import Reply, Session
from ._workers import Workers

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATIENCE = 10.0  # seconds to receive a complete request
LARGEST_BODY = 2**18  # bytes; 20,000 tokens in a list take 140,000
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# The client's script makes its own styles, and images when it saves a picture. The script of a blob shows steps: it
# comes # through the client's own channel.
POLICY = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}' blob:; style-src 'nonce-{nonce}'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style nonce="{nonce}">
html, body, #saccade {{ height: 100%; margin: 0; }}
</style>
</head>
<body>
<div id="saccade"></div>
<noscript>The viewer needs JavaScript: one script, which comes from where Saccade runs.</noscript>
<script type="module" nonce="{nonce}">
import {{ mountPage }} from "/client.js";
mountPage();
</script>
</body>
</html>
"""


class Activity:
    """The time of the latest request."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.running = 0

    @property
    def idle(self) -> float:
        """Seconds without a request; 0 while one is being answered."""
        return 0.0 if self.running else time.monotonic() - self.last


class Addresses:
    """The names and addresses of a server.

    A foreign page can give its own name the address of this machine (DNS rebinding). Its requests then carry that name,
    so names are compared. Addresses cannot be faked: a server that listens on all of them accepts any.
    """

    def __init__(self, bound: str, port: int, name: str = ""):
        """``bound``: the address of the listening socket, whatever ``name`` was given for it."""
        self.port, self.bound = port, bound_address(bound)
        own = (name, socket.gethostname() if self.bound.is_unspecified else str(self.bound))
        self._names = {"127.0.0.1", "localhost", "::1", *(known.lower() for known in own if known)}

    def __str__(self) -> str:
        return " or ".join(f"{name}:{self.port}" for name in sorted(self._names) if name != "::1")

    def knows(self, host: str) -> bool:
        """Whether a ``Host`` header names this server."""
        try:
            parts = urlsplit(f"//{host}")
            name, port = (parts.hostname or "").lower(), parts.port or 80
        except ValueError:
            return False
        if port != self.port or parts.netloc != host or "@" in host:
            return False
        return name in self._names or (self.bound.is_unspecified and _is_address(name))


def bound_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address of a socket, as IPv4 if it is IPv4 in IPv6 notation."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class ViewerApp:
    """The application: accepts only requests to the server's own name and from its own page.

    Every answer gets the strict headers. ``activity`` is idle while the page sends no requests.
    """

    def __init__(self, session: Session, *, token: str, addresses: Addresses, activity: Activity):
        self.workers = Workers()
        self._addresses = addresses
        self._app = _routes(session, token, activity, self.workers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        from starlette.datastructures import Headers, MutableHeaders

        nonce = secrets.token_urlsafe(16)
        scope["nonce"] = nonce

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update({**HEADERS, "Content-Security-Policy": POLICY.format(nonce=nonce)})
            await send(message)

        refused = self._refusal(Headers(scope=scope))
        app: ASGIApp = self._app if refused is None else _plain(refused, 403)
        await app(scope, receive, send_guarded)

    def _refusal(self, headers: Any) -> str | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._addresses.knows(hosts[0]):
            return f"This viewer answers as {self._addresses} only."
        if any(origin != f"http://{hosts[0]}" for origin in headers.getlist("origin")):
            return "This viewer answers its own page only."
        return None


def _plain(text: str, status: int) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(text + "\n", status)


def _routes(session: Session, token: str, activity: Activity, workers: Workers) -> Starlette:
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route

    def allowed(given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), token.encode())

    async def page(request: Request) -> Response:
        if not allowed(request.query_params.get("token")):
            return _plain("The token is missing or wrong. Open the whole address that the terminal shows.", 403)
        return HTMLResponse(PAGE.format(title=escape(f"{session.title} · Saccade"), nonce=request.scope["nonce"]))

    async def script(request: Request) -> Response:
        return Response(client_script(), media_type="text/javascript; charset=utf-8")

    async def operation(request: Request) -> Response:
        if not allowed(request.headers.get("x-saccade-token")):
            return _plain("The token is missing or wrong.", 403)
        try:
            body = await asyncio.wait_for(_body(request), PATIENCE)
        except asyncio.TimeoutError:
            return _framed(Reply({"error": f"the request was not complete within {PATIENCE:.0f} s"}, status=408))
        if body is None:
            return _framed(Reply({"error": f"the request is larger than {LARGEST_BODY:,} bytes"}, status=413))
        activity.running += 1
        try:
            return _framed(await answered(request, body))
        finally:
            activity.running -= 1
            activity.last = time.monotonic()

    async def answered(request: Request, body: bytes) -> Reply:
        op = request.path_params["op"]
        try:
            params = json.loads(body)
        except (ValueError, RecursionError):
            return Reply({"error": "the request is not JSON"}, status=400)
        if op == "alive":  # answered directly, so that a page never seems closed
            return session.reply(op, params)
        return await _unless_left(workers.submit(op, params, session.reply, op, params), request)

    async def lost(request: Request, error: Exception) -> Response:
        return _plain("There is nothing here.", 404)

    routes = [
        Route("/", page, methods=["GET"]),
        Route("/client.js", script, methods=["GET"]),
        Route("/api/{op}", operation, methods=["POST"]),
    ]
    handlers: dict[Any, Callable[..., Any]] = {404: lost, 405: lost}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


@cache
def client_script() -> str:
    """The client, one ES module.

    Raises:
        FileNotFoundError: it was not built; run `npm run build` in client/ of a checkout.
    """
    return resources.files("saccade.viewer").joinpath("client.js").read_text(encoding="utf-8")


async def _body(request: Request) -> bytes | None:
    """The whole body; None if it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            return None
    return bytes(body)


async def _unless_left(work: Future[Reply], request: Request) -> Reply:
    """The result of `work`. If the page no longer waits, as after quick panning, work that has not begun is dropped."""
    done: asyncio.Future[Any] = asyncio.ensure_future(asyncio.wrap_future(work))
    # After the body one more message comes: the client has disconnected.
    left: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({done, left}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            work.cancel()
            await asyncio.wait({done})
        return Reply({"error": "the request was cancelled"}, status=400) if done.cancelled() else done.result()
    finally:  # also if the server ends meanwhile
        done.cancel()
        left.cancel()


def framed(reply: Reply) -> bytes:
    """uint32 length of the header, the header, zeros up to a multiple of 8, then each buffer with zeros likewise."""
    header = {**reply.header, "buffers": [len(buffer) for buffer in reply.buffers]}
    text = json.dumps(header, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    start = struct.pack("<I", len(text)) + text
    return b"".join(part + bytes(-len(part) % 8) for part in (start, *reply.buffers))


def _framed(reply: Reply) -> Response:
    from starlette.responses import Response

    return Response(framed(reply), reply.status, media_type="application/octet-stream")
