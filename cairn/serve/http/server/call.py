"""HTTP request for endpoints and timings. Used in the event loop's thread only."""

import time

from starlette.types import Receive, Scope, Send

from cairn.serve.http.ledger.entry import Entry
from cairn.serve.http.server.continuation import ProgressSend
from cairn.serve.http.server.sse import SSE, EventStream

CUT_TO = b"x-cairn-max-tokens"


class Call:
    """An HTTP request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, holder: str, id: str) -> None:
        self.scope, self.receive, self.send = scope, receive, send
        self.holder = holder  # of the API key
        self.id = id
        self.arrived = time.monotonic()
        self.entry: Entry | None = None  # of the book, once it has been let in
        self.streams = False
        self.wants_ledger = False  # in the headers of its answer, or as a comment
        self.wants_field = False  # in the body as well
        self.routed = False  # a router reads the answer: its tokens are marked
        self.progress: ProgressSend | None = None  # how it learns the tokens of a whole answer
        self.continued: list[int] = []  # of an answer that began at another server
        self.role: str | None = None  # of the server, when the request came
        self.cut_to: int | None = (
            None  # tokens of an answer, where more were asked for than it may have
        )
        self.body = b""  # kept where a router follows the prefix cache
        self._stream: EventStream | None = None

    def event_stream(self, media_type: bytes = SSE) -> EventStream:
        """The answer as events."""
        self._stream = EventStream(self.send, self.headers, media_type)
        return self._stream

    @property
    def stream_begun(self) -> bool:
        """Has a status been sent already, so that no error document can follow?"""
        return self._stream is not None and self._stream.begun

    @property
    def traceparent(self) -> str | None:
        """The trace that the client has begun, as W3C writes it."""
        values = (value for name, value in self.scope["headers"] if name == b"traceparent")
        return next((value.decode("latin-1") for value in values), None)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every response."""
        headers = [(b"x-request-id", self.id.encode("latin-1", "replace"))]
        if self.cut_to is not None:
            headers.append((CUT_TO, b"%d" % self.cut_to))
        return headers
