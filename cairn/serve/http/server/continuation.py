"""How a router follows an answer, and how another server goes on with it where the first one was lost.

    x-cairn-router: 1      every write of a stream ends with a comment, `:t 17 4711`: the token ids in it; `:e` ends it
    x-cairn-continue: N    the last N bytes of the body are token ids in MessagePack: the answer so far. The stream
                           begins behind them: text, stop strings, tool calls and grammar are as if it had never moved

Comments are no events: who reads server-sent events ignores them, and the router takes them out. Only a request with a
single answer can be continued. Pure.
"""

from collections.abc import Sequence

import msgspec
from starlette.types import Scope

from cairn.serve.answer import CompletionOutput
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.job import Job

ROUTED, CONTINUED = b"x-cairn-router", b"x-cairn-continue"
TOKENS, END = b":t ", b":e\n\n"
_decode_ids = msgspec.msgpack.Decoder(list[int]).decode


def header(scope: Scope, wanted: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == wanted), None)


def split_body(scope: Scope, body: bytes) -> tuple[bytes, list[int]]:
    """The client's body, and the token ids that a router has put behind it."""
    length = header(scope, CONTINUED)
    if length is None:
        return body, []
    count = int(length) if length.isdigit() else 0
    if not 0 < count <= len(body):
        said = f"x-cairn-continue is {length[:20]!r}; the body has {len(body)} bytes"
        raise Refusal(400, said, code="bad_continuation")
    try:
        return body[:-count], _decode_ids(body[-count:])
    except msgspec.MsgspecError as error:
        said = f"the last {count} bytes of the body are no token ids: {error}"
        raise Refusal(400, said, code="bad_continuation") from None


def ends_already(job: Job) -> bool:
    """Were the tokens so far all of the answer? Then its end is written into it, and the engine is not asked."""
    request, answer = job.request, job.answer
    if answer.finished or not request.outputs:
        return answer.finished
    last, made = request.outputs[-1], len(request.outputs)
    if last in request.stop_ids and made >= request.min_tokens:
        answer.end("stop", None if last in request.eos_ids else last)
    elif made >= job.max_tokens:
        answer.end("length")
    return answer.finished


class TokenMarks:
    """Collects the ids of what is written, and puts them behind the next write that has a text."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: list[int] = []

    def behind(self, body: bytes, deltas: Sequence[CompletionOutput]) -> bytes:
        for delta in deltas:
            self._ids += delta.token_ids
        if not body or not self._ids:
            return body
        written, self._ids = b" ".join(b"%d" % id for id in self._ids), []
        return body + TOKENS + written + b"\n\n"
