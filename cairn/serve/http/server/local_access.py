"""Access without a key for the local user of this machine.

    check_json      a page of another site cannot send JSON without asking first
    check_near      a browser of this machine that asked this machine by its own name, not through a proxy
    check_own_page  the page that posts came from this server

A lab is this project's own code, so a key of the server starts one as well. An exercise is the learner's code: a key is
not enough, and as not every proxy says that it is one, neither is this (`learn_posts`).
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

from cairn.core.shared_secret import is_loopback
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.call import Call

FORWARDED = {  # what proxies and our router add
    b"forwarded",
    b"via",
    b"x-cairn-router",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-real-ip",
}


def check_json(call: Call, what: str) -> None:
    kinds = [value for name, value in call.scope["headers"] if name == b"content-type"]
    if not kinds or not kinds[0].startswith(b"application/json"):
        raise Refusal(415, f"{what} with content-type: application/json")


def check_near(call: Call, what: str) -> None:
    if not is_near(call):
        host, asked = _client(call), _asked(_headers(call))
        raise Refusal(403, f"{host} asked for {asked or 'no host'}: {what}")


def check_own_page(call: Call, what: str) -> None:
    """Programs such as curl send no origin; a browser always does when it posts."""
    headers = _headers(call)
    site = headers.get(b"sec-fetch-site", b"same-origin")
    origin = headers.get(b"origin")
    own = origin is None or urlsplit(origin.decode("latin-1")).netloc == _host(headers)
    if not own or site not in (b"same-origin", b"none"):
        shown = (origin or site).decode("latin-1")
        raise Refusal(403, f"a page of {shown} asked: {what}")


def is_near(call: Call) -> bool:
    """Return whether a request is local: not through a proxy, and not to a foreign name bound to 127.0.0.1."""
    headers = _headers(call)
    near = is_loopback(_client(call)) and is_loopback(_asked(headers))
    return near and not FORWARDED & headers.keys()


def _headers(call: Call) -> Mapping[bytes, bytes]:
    return dict(call.scope["headers"])


def _client(call: Call) -> str:
    return (call.scope.get("client") or ("", 0))[0]


def _host(headers: Mapping[bytes, bytes]) -> str:
    return headers.get(b"host", b"").decode("latin-1")


def _asked(headers: Mapping[bytes, bytes]) -> str:
    return urlsplit(f"//{_host(headers)}").hostname or ""
