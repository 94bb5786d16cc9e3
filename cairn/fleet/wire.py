"""An HTTP message that came whole, in one piece of bytes: read by a strict grammar, without a call for each header.

    whole_request(data) -> HttpRequest | None        whole_answer(data) -> HttpAnswer | None

None: it is not whole, has chunks or an upgrade, or is written in a way that this grammar does not know. Then llhttp
reads it (`front`, `upstream`), which gives the same. Either way headers are passed on as they were written, but for
those that belong to one connection, and the length is written anew: what a server sees is framed by the router alone.
"""

import re
from collections.abc import Sequence

import msgspec

from cairn.fleet.request_head import RequestHead, request_head

LARGEST_HEAD = 64 * 1024
FRAMING = (b"connection", b"keep-alive", b"transfer-encoding", b"content-length")
# The router's to write.
ROUTERS = (b"x-request-id", b"x-cairn-router", b"x-cairn-continue", b"x-cairn-proof")
NOT_SENT = frozenset(
    (*FRAMING, b"te", b"upgrade", b"http2-settings", b"expect", b"trailer", *ROUTERS)
)
ID = b"x-request-id"
NOT_ANSWERED = frozenset((*FRAMING, b"date", b"server", ID))  # the router writes the id
_DROPPED = frozenset(
    (b"keep-alive", b"date", b"server", *ROUTERS)
)  # that say nothing about the framing
_VARYING = re.compile(
    rb"\r\n(?:content-length: (\d{1,18})|x-request-id: ([\w-]{1,128}))(?=\r\n)", re.IGNORECASE
)  # what differs between the heads of one client
_UPGRADE = re.compile(rb"(?<=\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
NO_MATCH = (None, None)
# By a chunk's bytes: the line of its size. Reading from a table takes a third of the time of writing it.
SIZE_LINES = [b"%x\r\n" % size for size in range(4096)]
LONGEST_VALUE = 130  # of what varies, with the end of its line
_IN_NAMES = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
_IN_TARGETS = bytes(range(ord("!"), 127))


def _lines_by_length() -> list[bytes]:
    """First line of a complete chunk by its total length."""
    lines = [b""] * (len(SIZE_LINES) + len(SIZE_LINES[-1]) + 2)
    for size, line in enumerate(SIZE_LINES[1:], start=1):
        lines[len(line) + size + 2] = line
    return lines


_LINES_BY_LENGTH = _lines_by_length()
_LONGEST_KNOWN = len(_LINES_BY_LENGTH) - 1


def whole_chunk(data: bytes) -> bytes | None:
    """Content of data that is exactly one ordinary chunk, else None."""
    length = len(data)
    line = _LINES_BY_LENGTH[length] if length <= _LONGEST_KNOWN else b""
    if line and data.startswith(line) and data[-2:] == b"\r\n":
        return data[len(line) : -2]
    return None


def chunk_of(body: bytes) -> bytes:
    """Encode a non-empty chunk."""
    size = len(body)
    if size < len(SIZE_LINES):
        return SIZE_LINES[size] + body + b"\r\n"
    return b"%x\r\n%b\r\n" % (size, body)


class HttpRequest(msgspec.Struct, gc=False):
    head: RequestHead
    body: bytes
    id: bytes | None  # the client's own
    keep_alive: bool = True
    version: str = "1.1"


class HttpAnswer(msgspec.Struct, gc=False):
    status: int
    lines: bytes
    body: bytes


def whole_request(data: bytes) -> HttpRequest | None:
    end = data.find(b"\r\n\r\n", 0, LARGEST_HEAD)
    first, *lines = data[:end].split(b"\r\n")
    words = first.split(b" ")
    if end < 0 or len(words) != 3 or words[2] != b"HTTP/1.1" or not words[0].isalpha():
        return None
    if words[1][:1] != b"/" or words[1].translate(None, _IN_TARGETS):
        return None
    kept = _passed_on(lines, NOT_SENT, len(data) - end - 4)
    if kept is None:
        return None
    head = request_head(words[0], words[1], kept[0])
    return HttpRequest(head, data[end + 4 :], kept[1])


def whole_answer(data: bytes) -> HttpAnswer | None:
    end = data.find(b"\r\n\r\n", 0, LARGEST_HEAD)
    first, *lines = data[:end].split(b"\r\n")
    status = first[9:12]
    if end < 0 or first[:9] != b"HTTP/1.1 " or not status.isdigit():
        return None
    if status < b"200" or status in (b"204", b"304"):  # without a body, whatever they say
        return None
    if b"\r\ncontent-length:" not in data[:end].lower():  # it would end with its connection
        return None
    kept = _passed_on(lines, NOT_ANSWERED, len(data) - end - 4)
    return HttpAnswer(int(status), kept[0], data[end + 4 :]) if kept is not None else None


def _passed_on(
    lines: list[bytes], own: frozenset[bytes], body_bytes: int
) -> tuple[bytes, bytes | None] | None:
    """The lines that are passed on, and the request's id; None where more has to be known than the length."""
    length, id, kept = -1, None, []
    for line in lines:
        name, colon, value = line.partition(b":")
        name = name.lower()
        if not colon or not name or name.translate(None, _IN_NAMES):
            return None
        if name not in own:
            kept.append(line)
        elif name == b"content-length":
            value = value.strip(b" \t")
            if length >= 0 or not value.isdigit():
                return None
            length = int(value)
        elif name == ID:
            id = value.strip(b" \t")
        elif name == b"connection":
            if value.strip(b" \t").lower() != b"keep-alive":
                return None
        elif name not in _DROPPED:
            return None
    if max(length, 0) != body_bytes:
        return None
    kept.append(b"")
    passed = b"\r\n".join(kept)
    strange = passed.count(b"\n") != len(kept) - 1 or passed.count(b"\r") != len(kept) - 1
    return None if strange or b"\0" in passed else (passed, id)


class Template:
    """The last head of a connection: the next one mostly differs in its length and the request's id alone."""

    __slots__ = ("_after", "_alone", "_first", "_rest", "_size")

    def __init__(self, head: bytes, first: bytes, rest: Sequence[tuple[bool, bytes]]) -> None:
        """`rest`: is a length written here or an id, and what stands behind it, up to the next one or the body."""
        self._first, self._size = first, len(first)
        self._rest = [(*one, len(one[1])) for one in rest]
        # Nothing but the length varies: bytes of a head whose length has as many digits; 0: more varies.
        self._alone = len(head) if len(rest) == 1 and rest[0][0] else 0
        self._after = rest[0][1] if self._alone else b""

    def match(self, data: bytes) -> tuple[bytes | None, bytes | None]:
        """Body and id of a whole message with the same head; no body: it is another one."""
        if size := self._alone:
            head = b"%b%d%b" % (self._first, len(data) - size, self._after)
            if len(head) == size <= len(data) and data.startswith(head):
                return data[size:], None
        return self._search(data)

    def _search(self, data: bytes) -> tuple[bytes | None, bytes | None]:
        if not data.startswith(self._first):
            return NO_MATCH
        at, length, id = self._size, b"0", None
        for is_length, after, size in self._rest:
            end = data.find(after, at, at + LONGEST_VALUE + size)
            value = data[at:end]
            if end < 0:
                return NO_MATCH
            if is_length:
                length = value
            elif value.replace(b"-", b"").replace(b"_", b"").isalnum():
                id = value
            else:
                return NO_MATCH
            at = end + size
        return (data[at:], id) if length == b"%d" % (len(data) - at) else NO_MATCH


def template_of(data: bytes) -> Template | None:
    """Template of a completely read message; None if its length or id has an unusual form."""
    head = data[: data.find(b"\r\n\r\n") + 4]
    varying = list(_VARYING.finditer(head))
    small = head.lower()
    if small.count(b"content-length") + small.count(ID) != len(varying) or len(varying) > 2:
        return None
    spans = [one.span(1 if one[1] is not None else 2) for one in varying]
    ends = [begin for begin, _ in spans[1:]] + [len(head)]
    kinds = [one[1] is not None for one in varying]
    if len(set(kinds)) != len(kinds):
        return None
    pieces = [head[span[1] : end] for span, end in zip(spans, ends, strict=False)]
    first = head[: spans[0][0]] if spans else head
    return Template(head, first, list(zip(kinds, pieces, strict=True)))


class RequestReader:
    """Whole requests of one connection, as `whole_request` reads them."""

    __slots__ = ("_head", "_template")

    def __init__(self) -> None:
        self._template: Template | None = None
        self._head: RequestHead | None = None  # of the template

    def read(self, data: bytes) -> HttpRequest | None:
        head = self._head
        if head is not None and self._template is not None:
            body, id = self._template.match(data)
            if body is not None:
                return HttpRequest(head, body, id)
        request = whole_request(data)
        if request is not None:
            self._template, self._head = template_of(data), request.head
        return request


class AnswerReader:
    """Whole answers of one connection, as `whole_answer` reads them."""

    __slots__ = ("_lines", "_status", "_template")

    def __init__(self) -> None:
        self._template: Template | None = None
        self._status, self._lines = 0, b""  # of the template

    def read(self, data: bytes) -> HttpAnswer | None:
        if self._template is not None:
            body, _ = self._template.match(data)
            if body is not None:
                return HttpAnswer(self._status, self._lines, body)
        answer = whole_answer(data)
        if answer is not None:
            self._template = template_of(data)
            self._status, self._lines = answer.status, answer.lines
        return answer


def without_upgrade(data: bytes) -> bytes:
    """The beginning of a request, without its offer of another protocol: llhttp would not read the body.

    Java's client offers HTTP/2 with every request, and is content with an answer in HTTP/1.1.
    """
    end = data.find(b"\r\n\r\n", 0, LARGEST_HEAD)
    if end < 0 or not _UPGRADE.search(data, 0, end):
        return data
    return _UPGRADE.sub(b"te", data[:end]) + data[end:]


def lines_of(headers: list[tuple[bytes, bytes]], without: frozenset[bytes]) -> bytes:
    """The same of headers that llhttp has read; their names are in small letters."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers if pair[0] not in without])
