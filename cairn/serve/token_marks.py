"""Encoding of an answer's tokens for routers, so that another server can continue it.

    stream     every write ends with a line of its own, `:t 17 4711`: the token ids in it; `:e` ends the answer
    whole      if it takes long it comes in chunks of a media type of its own: `:t 17 4711` with the tokens so far, and
               at last `:a STATUS BYTES`, so many bytes of headers, and the body

No event and no line of JSON begins with a colon, so the lines can be taken out again. A stream with
tokens and without `:e` is one whose engine has failed. Both sides import this, and the
router imports nothing else of a server. Pure.

The server that goes on with an answer takes its tokens from a router alone: `continuation_proof` shows that the sender
knows CAIRN_ROUTER_SECRET, which a fleet gives to the servers that it starts.
"""

from collections.abc import Iterable

from cairn.core.shared_secret import Secret

ROUTER_SECRET = "CAIRN_ROUTER_SECRET"
TOKENS, END = b":t ", b":e\n\n"
PROGRESS = b"application/x-cairn-progress"  # the media type of a whole answer whose tokens are told
ANSWER = b":a "


def continuation_proof(secret: Secret, request_id: bytes, tokens: bytes) -> bytes:
    """The value of the header `x-cairn-proof`; `tokens`: as they stand at the end of the body."""
    return secret.proof(b"continuation", request_id, tokens).hex().encode()


def token_mark(ids: Iterable[int]) -> bytes:
    return b"%b%b\n\n" % (TOKENS, b" ".join(b"%d" % id for id in ids))


def answer_head(status: int, lines: bytes) -> bytes:
    """Header between the tokens of a complete answer and its body."""
    return b"%b%d %d\n%b" % (ANSWER, status, len(lines), lines)


def read_answer(body: bytes) -> tuple[int, bytes, bytes] | None:
    """Status, headers and body of a whole answer whose tokens were told; None: it is not complete."""
    first, _, rest = body.partition(b"\n")
    words = first.removeprefix(ANSWER).split(b" ")
    if not first.startswith(ANSWER) or len(words) != 2 or not all(map(bytes.isdigit, words)):
        return None
    status, length = map(int, words)
    return (status, rest[:length], rest[length:]) if len(rest) >= length else None
