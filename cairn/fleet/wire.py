"""An HTTP message that came whole, in one piece of bytes: read by a strict grammar, without a call for each header.

    whole_request(data) -> HttpRequest | None        whole_answer(data) -> HttpAnswer | None

None: it is not whole, has chunks or an upgrade, or is written in a way that this grammar does not know. Then llhttp
reads it (`front`, `upstream`), which gives the same. Either way headers are passed on as they were written, but for
those that belong to one connection, and the length is written anew: what a server sees is framed by the router alone.
"""

import re
from typing import NamedTuple, TypeVar

T = TypeVar("T")
LARGEST_HEAD = 64 * 1024
FRAMING = (b"connection", b"keep-alive", b"transfer-encoding", b"content-length")
ROUTERS = (b"x-request-id", b"x-cairn-router", b"x-cairn-continue")  # the router's to write
NOT_SENT = frozenset((*FRAMING, b"te", b"upgrade", b"expect", b"trailer", *ROUTERS))
NOT_ANSWERED = frozenset((*FRAMING, b"date", b"server"))
ID = b"x-request-id"
_DROPPED = frozenset(
    (b"keep-alive", b"date", b"server", *ROUTERS)
)  # that say nothing about the framing
_VARYING = re.compile(
    rb"\r\n(?:content-length: (\d{1,18})|x-request-id: ([\w-]{1,128}))(?=\r\n|\Z)", re.IGNORECASE
)  # what differs between the heads of one client
MOST_HEADS = 512
_IN_NAMES = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
_IN_TARGETS = bytes(range(ord("!"), 127))


class HttpRequest:
    """`lines` are the headers to pass on, as bytes; `id` is the client's own."""

    __slots__ = ("body", "id", "keep_alive", "lines", "method", "target")

    def __init__(
        self, method: bytes, target: bytes, lines: bytes, body: bytes, id: bytes | None
    ) -> None:
        self.method, self.target, self.lines, self.body = method, target, lines, body
        self.id, self.keep_alive = id, True

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]


class HttpAnswer(NamedTuple):
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
    return HttpRequest(words[0], words[1], kept[0], data[end + 4 :], kept[1])


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
    length, given, kept = -1, None, []
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
            given = value.strip(b" \t")
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
    return None if strange or b"\0" in passed else (passed, given)


class HeadCache:
    """Reads whole messages as `whole_request` and `whole_answer` do, those with a head seen before by looking it up.

    Heads of one client differ in the length and the request's id alone: these are cut out, and the rest is the key.
    """

    def __init__(self) -> None:
        self._requests: dict[bytes, tuple[bytes, bytes, bytes]] = {}  # method, target, lines
        self._answers: dict[bytes, tuple[int, bytes]] = {}  # status, lines

    def request(self, data: bytes) -> HttpRequest | None:
        end = data.find(b"\r\n\r\n", 0, LARGEST_HEAD)
        key, length, id = _cut(data[:end])
        known = self._requests.get(key)
        if known is not None and end >= 0 and (length or 0) == len(data) - end - 4:
            return HttpRequest(*known, data[end + 4 :], id)
        found = whole_request(data)
        if found is not None and _keeps_framing_apart(key):
            plain = whole_request(key + b"\r\n\r\n")
            if plain is not None:
                _remember(self._requests, key, (plain.method, plain.target, plain.lines))
        return found

    def answer(self, data: bytes) -> HttpAnswer | None:
        end = data.find(b"\r\n\r\n", 0, LARGEST_HEAD)
        key, length, id = _cut(data[:end])
        known = self._answers.get(key)
        if known is not None and end >= 0 and length == len(data) - end - 4:
            lines = known[1] if id is None else b"%bx-request-id: %b\r\n" % (known[1], id)
            return HttpAnswer(known[0], lines, data[end + 4 :])
        found = whole_answer(data)
        if found is not None and _keeps_framing_apart(key):
            plain = whole_answer(key + b"\r\ncontent-length: 0\r\n\r\n")
            if plain is not None:
                _remember(self._answers, key, (plain.status, plain.lines))
        return found


def _cut(head: bytes) -> tuple[bytes, int | None, bytes | None]:
    """The head without what varies, the length that it gives, and the id; length -1: one of them is there twice."""
    key, length, id = head, None, None
    parts = _VARYING.split(head)
    if len(parts) > 1:
        key = b"".join(parts[::3])
        sizes = [size for size in parts[1::3] if size is not None]
        ids = [given for given in parts[2::3] if given is not None]
        length = int(sizes[0]) if sizes else None
        id = ids[0] if ids else None
        length = -1 if len(sizes) > 1 or len(ids) > 1 else length
    return key, length, id


def _keeps_framing_apart(key: bytes) -> bool:
    """Is what was cut out the only thing that says the length or the id?"""
    small = key.lower()
    return b"content-length" not in small and ID not in small


def _remember(heads: dict[bytes, T], key: bytes, value: T) -> None:
    if len(heads) >= MOST_HEADS:
        heads.clear()
    heads[key] = value


def lines_of(headers: list[tuple[bytes, bytes]], without: frozenset[bytes]) -> bytes:
    """The same of headers that llhttp has read; their names are in small letters."""
    return b"".join([b"%b: %b\r\n" % pair for pair in headers if pair[0] not in without])
