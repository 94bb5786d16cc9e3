"""The ledger of a request in its own answer, for clients that ask for it.

    x-cairn-ledger: 1   (a header of the request)     x-cairn-ledger: {...}   in the headers of a whole answer
    "ledger": true      (a field of its body)         the same header, and "cairn_ledger": {...} in the document
    either, streamed                                  : cairn-ledger {...}    a comment before the last event

A comment is a line of a stream of server-sent events that begins with a colon: every client has to skip it, so it
breaks none, whichever protocol the events follow. The document is a `RequestView`, as of the moment before the answer
leaves; `/cairn/requests/{id}` has it with the last byte included. Requests that do not ask for it cost nothing more.
"""

from collections.abc import Callable

import msgspec
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from cairn.serve.http.ledger.views import RequestView

HEADER = "x-cairn-ledger"
FIELD = b'"cairn_ledger":'
COMMENT = b": cairn-ledger "
NO = (b"", b"0", b"false", b"no")

View = Callable[[], RequestView | None]


def wants_header(scope: Scope) -> bool:
    name = HEADER.encode()
    return any(own == name and value.lower() not in NO for own, value in scope["headers"])


def put_into(response: Response, view: RequestView, in_body: bool) -> None:
    """Into the headers of a whole answer, and into its document if that was asked for."""
    text = msgspec.json.encode(view)
    response.headers[HEADER] = text.decode("ascii", "replace")
    body = bytes(response.body)
    if in_body and len(body) > 2 and body.endswith(b"}"):
        response.body = b"%b,%b%b}" % (body[:-1], FIELD, text)
        response.headers["content-length"] = str(len(response.body))


class LedgerSend:
    """`send` of one answer, which puts the ledger in front of the last bytes of a stream."""

    def __init__(self, send: Send, view: View) -> None:
        self._send, self._view = send, view

    async def __call__(self, message: Message) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        view = self._view() if last else None
        if view is not None:
            comment = COMMENT + msgspec.json.encode(view) + b"\n\n"
            message = {**message, "body": comment + message.get("body", b"")}
        await self._send(message)
