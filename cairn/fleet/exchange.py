"""The life of one request in the router: placed, sent, answered; sent again or continued elsewhere when a server fails.

    place --> sent --head, chunks--> the client                a whole answer is passed on when it is complete
      ^         |                                              a stream from its first chunk on
      |         |-- lost before any token was told ----------> the same request again, elsewhere
      '---------'-- lost in the middle of an answer ---------> the request with the tokens so far, elsewhere

A stream of ours carries its token ids between its events, and a whole answer that takes long tells them before it
comes (`serve.token_marks`): both are taken out here. From another kind of server a broken stream ends with an
error event, because its tokens are not known.
"""

import re
import time
from typing import TYPE_CHECKING

import msgspec

from cairn.fleet.downstream import END_OF_HEAD, Downstream, error_body
from cairn.fleet.placement import place, place_next
from cairn.fleet.quota import ANYBODY
from cairn.fleet.refusals import broken_stream
from cairn.fleet.routing_policy import Ask
from cairn.fleet.upstream import Upstream
from cairn.fleet.wire import HttpRequest
from cairn.fleet.worker import Worker
from cairn.serve.text_keys import MOST_WANTED, PromptKeys, RequestFields
from cairn.serve.token_marks import END, PROGRESS, TOKENS, continuation_proof, read_answer

if TYPE_CHECKING:
    from cairn.fleet.hedge import Hedge
    from cairn.fleet.router import Router
    from cairn.fleet.views import RequestRecord

X_ID, CRLF_LENGTH = b"x-request-id: ", b"\r\ncontent-length: "
MARK, LAST_MARK = b"\n" + TOKENS, b"\n" + END
_LAST = END[-3]  # where ids of tokens have a digit
PROGRESS_TYPE = b"content-type: %b\r\n" % PROGRESS
PROGRESS_STATUS = (
    0  # in place of the status of a whole answer that tells its tokens, and has no status yet
)
USAGE = (b'"completion_tokens":', b'"output_tokens":', b'"eval_count":', b'"tokens_predicted":')
_COUNT = re.compile(rb"\s*(\d{1,12})")
LONGEST_ANSWER = 4096  # tokens that a quota reserves where a request sets no limit
BUSY = (429, 503)  # another server may have room
# Unless it is the client's key that has no more: no other server is asked then.
OF_KEY = b'"code":"key_'


class Exchange(msgspec.Struct, eq=False):
    """A request. Every callback may be the last one. A Struct is created in a third of the time."""

    router: "Router"
    downstream: Downstream
    request: HttpRequest
    id: bytes
    ask: Ask
    keys: PromptKeys
    model: str | None
    fields: RequestFields
    arrived_s: float = 0.0
    holder: str = ANYBODY  # of its API key: the key's digest
    computes: bool = True  # it waits for room, and costs its holder what it used
    streams: bool = False  # its answer comes token by token
    worker: Worker | None = None
    upstream: Upstream | None = None
    attempts: int = 0
    attempts_without_token: int = 0  # of them, since a token came; those that reached a server
    new_tokens: int = (
        0  # of its prompt, not cached where it was sent (or at the best server so far)
    )
    metered: bool = False  # they are counted as work that has come
    admitted: bool = False  # by the holder's quota, which is settled when it ends
    reserved: int = 0  # tokens of that quota
    lost_s: float = 0.0  # when its server was lost
    paused: bool = False  # its client does not read
    tried: frozenset[int] = frozenset()  # servers that had no room for it
    hedge: "Hedge | None" = None  # a second copy, until one of them answers
    record: "RequestRecord | None" = None  # where it went, for `fleet explain`
    _head_sent: bool = False  # the client has a head
    _awaits_token: bool = True  # no token has come from the present server
    _tokens_known: bool = True  # every chunk so far told its tokens
    _ended: bool = False  # the last chunk has come
    _complete: bool = False  # a server has answered it, with success
    _resumed: bool = False  # the present server was sent the tokens so far
    _client_left: bool = False  # the client did not wait for the end, and a server had it
    _counted_tokens: int | None = None  # of an answer without marks: its usage, or else its events
    _status: int = 0
    _lines: bytes = b""
    _marks: list[bytes] = []  # ids of tokens that have come, as they were written
    _whole: bytes = b""  # of an answer that is no stream, as far as it came in chunks

    # -- what it asks for ------------------------------------------------------------------------

    @property
    def priority(self) -> int:
        """Lower ones go first."""
        return self.fields.priority or 0

    @property
    def answer_tokens(self) -> int:
        return self.ask.output_tokens

    @property
    def tokens_so_far(self) -> int:
        """Pieces, to be exact; nearly all of them have one token."""
        return len(self._marks)

    @property
    def waits_since_s(self) -> float:
        """Time since which the request has had no server."""
        return max(self.arrived_s, self.lost_s)

    @property
    def most_answer_tokens(self) -> int:
        """Tokens that its answer may have."""
        if not self.request.head.generates:
            return 0
        each, answers = self.fields.wanted_tokens or LONGEST_ANSWER, self.fields.n or 1
        return min(max(each, 1) * max(answers, 1), MOST_WANTED)

    # -- towards a server ------------------------------------------------------------------------

    def assign(self, worker: Worker, new_tokens: int) -> None:
        """The router has chosen; a connection follows."""
        self.worker, self.new_tokens, self._awaits_token = worker, new_tokens, True
        self.attempts += 1
        self.attempts_without_token += 1
        worker.takes(new_tokens, self.streams)
        if self.streams:
            worker.requests.add(self)
        if self.attempts > 1:
            self._resumed = self._head_sent or bool(self._marks)
            worker.continued += self._resumed

    def connected(self, upstream: Upstream | None, reason: str, attempt: int) -> None:
        if self.worker is None or attempt != self.attempts:  # the client left, or a copy was faster
            if upstream is not None:
                upstream.drop()
        elif upstream is None:
            self.attempts_without_token -= 1  # it reached no server, so it cannot be what ended one
            self.lost(reason)
        else:
            self.send(upstream)

    def send(self, upstream: Upstream) -> None:
        self.upstream = upstream
        upstream.send(self, self.request_bytes())
        if self.paused:
            self.pause(True)

    def adopt(self, worker: Worker, upstream: Upstream | None, new_tokens: int) -> None:
        """The copy was faster: its answer is the one that counts."""
        slower = self.upstream
        self._release_worker()
        if slower is not None:
            slower.drop()
        self.worker, self.new_tokens, self._awaits_token, self.hedge = (
            worker,
            new_tokens,
            True,
            None,
        )
        self.attempts += 1
        self.upstream = upstream
        if self.streams:
            worker.requests.add(self)
        if upstream is not None:
            upstream.handler = self

    @property
    def unanswered(self) -> bool:
        """A server has it, and nothing has come from there."""
        return self.worker is not None and not self._head_sent and self._awaits_token

    @property
    def expects_tokens(self) -> bool:
        """Its server should give it some. How long a prompt takes is not known where the server has told no speed."""
        if self.worker is None or not self.streams or self.paused:
            return False
        return self.worker.load.token_s > 0 or not self._awaits_token

    @property
    def movable(self) -> bool:
        """Another server could give the rest of the answer."""
        return self._tokens_known or not self._head_sent

    def request_bytes(self) -> tuple[bytes, ...]:
        """Bytes to send to a server, in pieces."""
        request = self.request
        sent, body = request.head.sent, request.body
        if not self._resumed:
            return sent, self.id, CRLF_LENGTH, b"%d" % len(body), END_OF_HEAD, body
        more = msgspec.msgpack.encode(self.tokens)
        secret, proof = self.router.secret, b""
        if secret is not None:  # else a server will refuse to go on with the answer
            proof = b"x-cairn-proof: %b\r\n" % continuation_proof(secret, self.id, more)
        head = b"%b%b\r\n%bx-cairn-continue: %d\r\ncontent-length: %d\r\n\r\n"
        return head % (sent, self.id, proof, len(more), len(body) + len(more)), body + more

    @property
    def tokens(self) -> list[int]:
        """Tokens of the answer so far; those of a stream were already sent to the client."""
        return [int(id) for marks in self._marks for id in marks.split()]

    @property
    def charged_tokens(self) -> int | None:
        """Answer tokens to charge; None for errors and requests without computation, which are free.

        An answer that was not counted costs as much as it may have.
        """
        if not (self.computes and (self._complete or self._head_sent or self._client_left)):
            return None
        if self._head_sent and self._marks:
            return sum(marks.count(b" ") + 1 for marks in self._marks)
        if self._counted_tokens is not None:
            return self._counted_tokens
        before_first = self.streams and self._client_left
        return 0 if self._head_sent or before_first else self.most_answer_tokens

    def _release_worker(self) -> Worker | None:
        """Its server has nothing more to do for it, and neither has a copy's."""
        if self.hedge is not None:
            self.hedge.cancel()
        worker, self.worker, self.upstream = self.worker, None, None
        if worker is not None:
            worker.requests.discard(self)
            if self._awaits_token:
                worker.computed(self.new_tokens, self.streams)
            else:
                worker.decoding -= 1
        return worker

    def _note_first_token(self) -> None:
        if self.worker is not None:
            if self.hedge is not None:
                self.hedge.cancel()
            self._awaits_token, self.attempts_without_token = False, 0
            self.worker.computed(self.new_tokens, self.streams)
            self.worker.decoding += 1
            if self.router.waiting.models:
                place_next(self.router, time.monotonic())

    # -- from the server -------------------------------------------------------------------------

    def head(self, status: int, lines: bytes) -> None:
        self._status, self._lines, self._whole = status, lines, b""
        if not self.streams and PROGRESS_TYPE in lines:
            self._status = PROGRESS_STATUS

    def chunk(self, body: bytes) -> None:
        if self._status != 200:
            self._collect(body)
            return
        if self._awaits_token:
            self._note_first_token()
        if (worker := self.worker) is not None:
            worker.pieces += 1
        at = body.rfind(MARK)
        if at < 0 or body[-3] == _LAST:
            body = self._without_marks(body)
        else:
            self._marks.append(body[at + len(MARK) : -2])
            body = body[: at + 1]
        if self._head_sent:
            self.downstream.write(body)
            return
        self._head_sent = True
        line = worker.line if worker is not None else X_ID
        self.downstream.begin(200, b"%b%b%b\r\n" % (self._lines, line, self.id), body)

    def _collect(self, body: bytes) -> None:
        """Collect a chunk of an error, or of a complete answer and the tokens before it."""
        if self._status != PROGRESS_STATUS or self._whole or not body.startswith(TOKENS):
            self._whole += body
            return
        self._marks.append(body[len(TOKENS) : -2])
        if self._awaits_token:
            self._note_first_token()
        if self.worker is not None:
            self.worker.pieces += 1

    def _without_marks(self, body: bytes) -> bytes:
        """Remove the token marks of a chunk."""
        if body.endswith(LAST_MARK):
            body, self._ended = body[: -len(END)], True
        at = body.rfind(MARK)
        if at >= 0:
            self._marks.append(body[at + len(MARK) : -2])
            return body[: at + 1]
        self._tokens_known = self._tokens_known and self._ended
        events = body.count(b"data: {") or int(body.startswith(b"{"))
        self._counted_tokens = _usage(body, (self._counted_tokens or 0) + events)
        return body

    def end(self, body: bytes) -> None:
        if self.paused:  # its connection belongs to another request now, which wants to read
            self.pause(False)
        body = body or self._whole
        if self._status == PROGRESS_STATUS:
            if (answer := read_answer(body)) is None:
                self.lost("the answer ended without its end")
                return
            self._status, lines, body = answer
            self._lines = self._lines.replace(PROGRESS_TYPE, lines)
        elif self._marks and self._head_sent and not self._ended and self._status == 200:
            self.lost("its engine has failed in the middle of the answer")
            return
        worker = self._release_worker()
        assert worker is not None
        if self._status == 200 or not self._is_sent_again(worker, body):
            self._pass_on(worker, body)

    def _is_sent_again(self, worker: Worker, body: bytes) -> bool:
        """Retry after an error on another server, or without the tokens that this server cannot continue."""
        if self._status in BUSY and OF_KEY not in body and self.router.can_retry(self, worker):
            self.tried |= {worker.number}
        elif self._resumed and not self._head_sent:
            self._marks.clear()
        else:
            return False
        place(self.router, self, time.monotonic())
        return True

    def _pass_on(self, worker: Worker, body: bytes) -> None:
        """The answer, or its last part, to the client."""
        worker.failures = 0
        worker.pieces += 1
        status = self._status
        self._complete, self._counted_tokens = status == 200, _usage(body, self._counted_tokens)
        if not self._head_sent:
            self.downstream.send(status, self._lines, body, b"%b%b\r\n" % (worker.line, self.id))
        elif status == 200:
            self.downstream.finish()
        else:  # the server that was to continue the answer has refused it
            said = body[:300].decode(errors="replace")
            self._end_with_error(f"the answer could not be continued: {said}")
        self.router.done(self)

    def lost(self, reason: str) -> None:
        """The server is gone, or does not answer any more. A copy elsewhere takes its place."""
        copy, self.hedge = self.hedge, None
        worker, self.lost_s = self._release_worker(), time.monotonic()
        if worker is not None:
            self.router.lost(worker, reason)
        if copy is not None and copy.take_over():
            return
        if self._head_sent and self._ended:
            self.downstream.finish()
            self.router.done(self)
        elif self._head_sent and not self._tokens_known:
            self._end_with_error(f"the server was lost in the middle of the answer: {reason}")
            self.router.done(self)
        else:
            place(self.router, self, self.lost_s)

    def give_up(self, status: int, message: str, code: str) -> None:
        """No server can be found for it."""
        self.router.views.refused[code] += 1
        if self._head_sent:
            self._end_with_error(message)
        else:
            self.downstream.send(status, *error_body(status, message, code))
        self.router.done(self)

    def _end_with_error(self, message: str) -> None:
        """End a stream with an error event, because the status 200 was already sent."""
        self.downstream.write(broken_stream(self.request.head.path, message))
        self.downstream.finish()

    # -- from the client -------------------------------------------------------------------------

    def client_left(self) -> None:
        upstream = self.upstream
        self._client_left = self._release_worker() is not None
        if upstream is not None:
            upstream.drop()
        self.router.done(self)

    def pause(self, paused: bool) -> None:
        self.paused = paused
        transport = self.upstream.transport if self.upstream is not None else None
        if transport is not None and not transport.is_closing():
            (transport.pause_reading if paused else transport.resume_reading)()


def _usage(body: bytes, otherwise: int | None) -> int | None:
    """The tokens of an answer, as it says itself."""
    for name in USAGE:
        if (at := body.rfind(name)) >= 0:
            count = _COUNT.match(body, at + len(name))
            return int(count[1]) if count is not None else otherwise
    return otherwise
