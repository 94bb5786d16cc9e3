"""Pages of this machine may call a server that listens on loopback, where the settings name no other origins.

    Origin: http://localhost:3000, Host: 127.0.0.1:8000   ->  access-control-allow-origin: http://localhost:3000

A page of the network gets no such header, and neither does one that has its own name resolve to loopback (DNS
rebinding): its Host header is that name. To the browser such a page is of the server's own origin, so only
`allowed_hosts` keeps it out. Cookies are never allowed, since none are used.
"""

from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cairn.core.shared_secret import is_loopback

METHODS = "GET, POST, DELETE, OPTIONS"


class LocalPages:
    """An ASGI application with the headers that browsers ask for before and after a call."""

    def __init__(self, inner: ASGIApp, exposed: list[str]) -> None:
        self.inner, self.exposed = inner, ", ".join(exposed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if origin is None:
            await self.inner(scope, receive, send)
            return
        allowed = _allowed(origin.decode("latin-1"), headers.get(b"host", b"").decode("latin-1"))
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            asked = headers.get(b"access-control-request-headers", b"*").decode("latin-1")
            may = {"access-control-allow-methods": METHODS, "access-control-allow-headers": asked}
            await Response(headers=allowed | may if allowed else {})(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(allowed)
            await send(message)

        if allowed:
            allowed["access-control-expose-headers"] = self.exposed
        await self.inner(scope, receive, with_headers if allowed else send)


def _allowed(origin: str, host: str) -> dict[str, str]:
    """The headers that let a page of this origin read an answer; none for a page from elsewhere."""
    here = is_local(origin) and is_local(f"http://{host}")
    return {"access-control-allow-origin": origin, "vary": "origin"} if here else {}


def is_local(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and is_loopback(parts.hostname or "")
    except ValueError:  # half of an IPv6 address
        return False
