"""Messages that came whole are read as llhttp reads them, and what is not plain is left to llhttp."""

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.fleet.upstream import Pool, Upstream
from cairn.fleet.wire import (
    NOT_ANSWERED,
    NOT_SENT,
    AnswerReader,
    HttpAnswer,
    RequestReader,
    lines_of,
    whole_answer,
    whole_request,
)
from cairn.fleet.worker import Worker
from cairn.fleet.write_queue import WriteQueue

NAMES = st.sampled_from(
    [
        *[
            "Host",
            "accept",
            "X-Request-Id",
            "Content-Length",
            "connection",
            "Transfer-Encoding",
            "te",
            "server",
        ],
        "x y",
        "",
    ]
)
VALUES = st.sampled_from(
    ["", "a", " keep-alive", "close", "3", "03", "3, 3", "chunked", "x\r y", "é", "\0", "a\nb: c"]
)
HEADERS = st.lists(
    st.tuples(NAMES, st.sampled_from([":", ": ", " : ", "", ":\t"]), VALUES), max_size=5
)


class Read:
    """What llhttp says of some bytes."""

    def __init__(self, parser, data: bytes) -> None:
        self.headers, self.body, self.whole, self.target = [], b"", 0, b""
        self.parser = parser(self)
        self.parser.feed_data(data)

    def on_url(self, url):
        self.target += url

    def on_header(self, name, value):
        self.headers.append((name.lower(), value))

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        self.whole += 1


def written(first, headers, length, body) -> bytes:
    lines = "".join(f"{name}{colon}{value}\r\n" for name, colon, value in headers)
    lines += f"content-length: {length}\r\n" if length is not None else ""
    return f"{first}\r\n{lines}\r\n{body}".encode()


def fields(lines: bytes) -> list[tuple[bytes, bytes]]:
    pairs = [line.partition(b":")[::2] for line in lines.split(b"\r\n")[:-1]]
    return [(name.lower(), value.strip(b" \t")) for name, value in pairs]


@given(
    first=st.sampled_from(
        ["POST /v1/x?y HTTP/1.1", "GET / HTTP/1.0", "GET  / HTTP/1.1", "GET /a b HTTP/1.1", "get"]
    ),
    headers=HEADERS,
    length=st.sampled_from([None, 0, 3, 4]),
    body=st.sampled_from(["", "abc", "abcd"]),
)
def test_a_request_is_read_as_llhttp_reads_it_or_left_to_it(first, headers, length, body):
    data = written(first, headers, length, body)
    mine = whole_request(data)
    if mine is None:
        return
    theirs = Read(httptools.HttpRequestParser, data)
    assert theirs.whole == 1
    assert theirs.parser.should_keep_alive()
    assert (theirs.parser.get_method(), theirs.target, theirs.body) == (
        mine.head.method,
        mine.head.target,
        mine.body,
    )
    assert fields(mine.head.lines) == fields(lines_of(theirs.headers, NOT_SENT))


@given(
    first=st.sampled_from(
        ["HTTP/1.1 200 OK", "HTTP/1.1 204 No", "HTTP/1.0 200 OK", "HTTP/1.1 100 C", "HTTP/1.1 503 "]
    ),
    headers=HEADERS,
    length=st.sampled_from([None, 0, 3, 4]),
    body=st.sampled_from(["", "abc"]),
)
def test_an_answer_too(first, headers, length, body):
    data = written(first, headers, length, body)
    mine = whole_answer(data)
    if mine is None:
        return
    theirs = Read(httptools.HttpResponseParser, data)
    assert theirs.whole == 1
    assert (theirs.parser.get_status_code(), theirs.body) == (mine.status, mine.body)
    assert fields(mine.lines) == fields(lines_of(theirs.headers, NOT_ANSWERED))


def test_the_usual_ones_are_not_left_to_it():
    headers = [
        ("Host", ": ", "a"),
        ("connection", ": ", "keep-alive"),
        ("x-request-id", ":", " r1 "),
    ]
    asked = whole_request(written("POST /v1/chat/completions HTTP/1.1", headers, 3, "abc"))
    assert asked is not None
    assert (asked.head.lines, asked.id, asked.body) == (b"Host: a\r\n", b"r1", b"abc")
    answer = whole_answer(
        written("HTTP/1.1 200 OK", [("server", ": ", "x"), ("a", ": ", "b")], 3, "abc")
    )
    assert answer == HttpAnswer(200, b"a: b\r\n", b"abc")


LINES = """host: a|accept: b|Content-Length: 3|content-length: 0|content-length:3|content-length:0|content-length: 03|
x-request-id: r1|X-Request-Id: r2|x-request-id: a b|x-request-id:r3|connection: keep-alive|te: x|date: now"""
VARIED = st.lists(st.sampled_from(LINES.replace("\n", "").split("|")), max_size=4)
MESSAGES = st.lists(st.tuples(VARIED, st.sampled_from(["", "abc"])), min_size=1, max_size=8)


@given(MESSAGES)
def test_heads_like_the_one_before_say_what_reading_them_says(messages):
    requests, answers = RequestReader(), AnswerReader()
    for lines, body in messages:
        rest = "".join(f"{line}\r\n" for line in lines) + f"\r\n{body}"
        data = f"POST /x HTTP/1.1\r\n{rest}".encode()
        mine, plain = requests.read(data), whole_request(data)
        assert (mine is None) == (plain is None)
        if mine is not None and plain is not None:
            assert (mine.head, mine.id, mine.body) == (plain.head, plain.id, plain.body)
        data = f"HTTP/1.1 200 OK\r\n{rest}".encode()
        answer, read = answers.read(data), whole_answer(data)
        assert (answer is None) == (read is None)
        if answer is not None and read is not None:
            assert (answer.status, answer.body) == (read.status, read.body)
            assert sorted(fields(answer.lines)) == sorted(fields(read.lines))


SIZES = st.lists(st.tuples(st.integers(0, 1100), st.sampled_from([0, 0, 0, 1, -1])), max_size=8)


@given(SIZES)
def test_a_length_that_lies_is_found_whatever_the_lengths_before_it_were(sizes):
    """Also where it has another number of digits than the one before."""
    requests, answers = RequestReader(), AnswerReader()
    for size, lie in sizes:
        rest = b"a: b\r\ncontent-length: %d\r\nc: d\r\n\r\n%b" % (size, b"x" * (size + lie))
        for reader, plain, first in (
            (requests, whole_request, b"POST /x HTTP/1.1\r\n"),
            (answers, whole_answer, b"HTTP/1.1 200 OK\r\n"),
        ):
            mine, read = reader.read(first + rest), plain(first + rest)
            assert (mine is None) == (read is None) == (lie != 0 and size + lie >= 0)
            assert mine is None or mine.body == read.body == b"x" * size


class Heard:
    """A reader of an answer in chunks."""

    def __init__(self) -> None:
        self.chunks, self.ended, self.reason = [], 0, ""

    def head(self, status, lines):
        assert status == 200

    def chunk(self, body):
        self.chunks.append(body)

    def end(self, body):
        self.ended += 1

    def lost(self, reason):
        self.reason = reason


FORMS = st.sampled_from([b"%x\r\n", b"%x\r\n", b"%X\r\n", b"0%x\r\n", b"%x;a=b\r\n"])
CHUNKS = st.lists(
    st.tuples(FORMS, st.sampled_from([b"a", b"\r\n", b"5\r\nabcde\r\n", b"x" * 300, b"0\r\n\r\n"])),
    max_size=6,
)


@given(CHUNKS, st.lists(st.integers(1, 40), max_size=20), st.booleans())
def test_chunks_are_the_same_however_they_are_written_and_cut(chunks, cuts, by_chunk):
    """Those that come whole are read without llhttp, which goes on where it was."""
    pool = Pool(WriteQueue())
    upstream, heard = Upstream(Worker(0, "http://x:1"), pool), Heard()
    upstream.handler = heard
    pieces = [form % len(body) + body + b"\r\n" for form, body in chunks]
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    data = [head, *pieces, b"0\r\n\r\n"]
    if not by_chunk:
        whole, data = b"".join(data), []
        for cut in cuts:
            data.append(whole[:cut])
            whole = whole[cut:]
        data.append(whole)
    for one in data:
        if one:
            upstream.data_received(one)
    assert (heard.chunks, heard.ended, heard.reason) == ([body for _, body in chunks], 1, "")


ONE = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\none"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n0\r\n\r\n"
OTHER = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother"


class Open:
    """A transport."""

    closing = False

    def is_closing(self):
        return self.closing

    def abort(self):
        self.closing = True

    close = abort


@pytest.mark.parametrize("answer", [ONE, CHUNKED])
@pytest.mark.parametrize("behind", [b"", OTHER, b"HTTP/1.1 2", b"nonsense", b"\0"])
@pytest.mark.parametrize("together", [True, False])
def test_nobody_gets_what_a_server_sends_behind_an_answer(answer, behind, together):
    """Whoever is next on the connection would take it for its own."""
    pool = Pool(WriteQueue())
    upstream, heard = Upstream(Worker(0, "http://x:1"), pool), Heard()
    upstream.connection_made(Open())
    upstream.handler = heard
    for data in [answer + behind] if together else [answer, behind]:
        if data:
            upstream.data_received(data)
    assert (heard.ended, heard.reason) == (1, "")
    assert pool.take(upstream.worker) is (None if behind else upstream)
    assert pool.take(upstream.worker) is None


@pytest.mark.parametrize("cut", [0, 20, 60])
def test_an_interim_answer_is_followed_by_the_answer(cut):
    pool = Pool(WriteQueue())
    upstream, heard = Upstream(Worker(0, "http://x:1"), pool), Heard()
    upstream.connection_made(Open())
    upstream.handler = heard
    data = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + ONE
    for part in (data[:cut], data[cut:]):
        if part:
            upstream.data_received(part)
    assert (heard.ended, heard.reason) == (1, "")
    assert pool.take(upstream.worker) is upstream
