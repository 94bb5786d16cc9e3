"""Continuation of an answer on another server after its server was lost.

    x-cairn-router: 1      the tokens of the answer are told beside it (`serve.token_marks`)
    x-cairn-continue: N    the last N bytes of the body are token ids in MessagePack: the answer so far. A stream begins
                           behind them, a whole answer has them: text, stop strings, tool calls and grammar are as if
                           it had never moved
    x-cairn-proof: ...     that whoever sends them knows CAIRN_ROUTER_SECRET; a server without that secret refuses

Only a request with a single answer can be continued, and a whole one only without log-probabilities, which are not
told. No clock, no socket.
"""

import hmac
from collections.abc import Sequence

import msgspec
from starlette.types import Message, Scope, Send

from cairn.core.shared_secret import Secret
from cairn.serve.answer import CompletionOutput
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.job import Job
from cairn.serve.serving import GenerateRequest
from cairn.serve.token_marks import (
    PROGRESS,
    ROUTER_SECRET,
    answer_head,
    continuation_proof,
    token_mark,
)

ROUTED, CONTINUED, PROOF = b"x-cairn-router", b"x-cairn-continue", b"x-cairn-proof"
BYTES_PER_ID = (
    5  # the most that MessagePack takes for one of 32 bits; the list itself takes no more
)
TOLD_EVERY_S = 0.5  # the tokens of a whole answer
_NOT_TOLD = (b"content-length", b"x-request-id")  # headers that the router writes itself
_decode_ids = msgspec.msgpack.Decoder(list[int]).decode


def header(scope: Scope, header_name: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == header_name), None)


def split_body(
    scope: Scope, body: bytes, secret: Secret | None, context: int
) -> tuple[bytes, list[int]]:
    """The client's body, and the token ids that a router has put behind it: proved before they are read."""
    length = header(scope, CONTINUED)
    if length is None:
        return body, []
    count = int(length) if length.isdigit() and len(length) < 16 else 0
    if not 0 < count <= len(body):
        message = f"x-cairn-continue is {length[:20]!r}; the body has {len(body)} bytes"
        raise Refusal(400, message, code="bad_continuation")
    if count > BYTES_PER_ID * (context + 1):
        message = f"x-cairn-continue is {count} bytes; an answer has at most {context} tokens"
        raise Refusal(400, message, code="bad_continuation")
    if secret is None or not _is_proved(scope, body[-count:], secret):
        has = "another" if secret is not None else "no"
        message = f"x-cairn-continue is for routers, and this server has {has} {ROUTER_SECRET}"
        raise Refusal(403, message, code="not_a_router")
    try:
        return body[:-count], _decode_ids(body[-count:])
    except msgspec.MsgspecError as error:
        message = f"the last {count} bytes of the body are no token ids: {error}"
        raise Refusal(400, message, code="bad_continuation") from None


def _is_proved(scope: Scope, tokens: bytes, secret: Secret) -> bool:
    expected = continuation_proof(secret, header(scope, b"x-request-id") or b"", tokens)
    return hmac.compare_digest(header(scope, PROOF) or b"", expected)


def ends_already(job: Job) -> bool:
    """Were the tokens so far all of the answer? Then its end is written into it, and the engine is not asked."""
    request, answer = job.request, job.answer
    if answer.finished or not request.outputs:
        return answer.finished
    last, count = request.outputs[-1], len(request.outputs)
    if last in request.stop_ids and count >= request.min_tokens:
        answer.end("stop", None if last in request.eos_ids else last)
    elif count >= job.max_tokens:
        answer.end("length")
    return answer.finished


def continued(
    requests: Sequence[GenerateRequest], outputs: list[int], streams: bool
) -> GenerateRequest:
    """The one request, behind the beginning of its answer: the ids that another server has made."""
    params = requests[0].params
    if len(requests) != 1 or params.n != 1:
        message = "x-cairn-continue is for a request with one answer"
        raise Refusal(400, message, code="bad_continuation")
    if not streams and params.logprobs is not None:
        message = "x-cairn-continue is for whole answers without log-probabilities"
        raise Refusal(400, message, code="bad_continuation")
    return requests[0]._replace(outputs=outputs)


def can_move(job: Job) -> bool:
    """Would its tokens be enough for another server to go on with a whole answer?"""
    params = job.request.params
    return params.logprobs is None and params.pooling is None


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
        written, self._ids = token_mark(self._ids), []
        return body + written


class ProgressSend:
    """`send` of a whole answer, which tells a router its tokens before. Where none were told, it comes as ever."""

    def __init__(self, send: Send, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._send, self._headers = send, [(b"content-type", PROGRESS), *headers]
        self._begun = False
        self._head = b""  # of the answer, until its body comes

    async def tell(self, tokens: Sequence[int]) -> None:
        if not self._begun:
            self._begun = True
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send(start)
        await self._send(
            {"type": "http.response.body", "body": token_mark(tokens), "more_body": True}
        )

    async def __call__(self, message: Message) -> None:
        if not self._begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            kept = [one for one in message["headers"] if one[0].lower() not in _NOT_TOLD]
            lines = b"".join(b"%b: %b\r\n" % one for one in kept)
            self._head = answer_head(message["status"], lines)
        else:
            head, self._head = self._head, b""
            await self._send({**message, "body": head + message.get("body", b"")})
