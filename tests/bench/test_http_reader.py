"""A response and its events are the same wherever the network cuts the bytes; h11-style cases, and what is no HTTP."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.bench.http_reader import EventReader, HttpResponse, ProtocolError

bodies = st.lists(st.binary(max_size=40), max_size=6)


def cut(data, places):
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def read(pieces):
    response = HttpResponse()
    body = b"".join(part for piece in pieces for part in response.feed(piece))
    return response, body


places = st.lists(st.integers(0, 10**6), max_size=12)


@given(bodies, places, st.sampled_from([b"", b";name=value"]), st.booleans())
def test_chunks_cut_anywhere(chunks, cuts, extension, trailer):
    chunks = [chunk for chunk in chunks if chunk]
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
    for chunk in chunks:
        wire += b"%X%s\r\n%s\r\n" % (len(chunk), extension, chunk)
    wire += b"0\r\n" + (b"x-sum: 1\r\n" if trailer else b"") + b"\r\n"
    response, body = read(cut(wire, cuts))
    assert (response.status, response.done, response.reusable) == (200, True, True)
    assert response.headers["x-a"] == "b"
    assert body == b"".join(chunks)


@given(st.binary(max_size=60), places, st.sampled_from(["close", "keep-alive"]))
def test_a_stated_length_cut_anywhere(content, cuts, connection):
    head = f"HTTP/1.1 404 Not Found\r\ncontent-length: {len(content)}\r\nconnection: {connection}\r\n\r\n"
    response, body = read(cut(head.encode() + content, cuts))
    assert (response.status, body, response.done) == (404, content, True)
    assert response.reusable == (connection == "keep-alive")


@given(st.binary(max_size=60), places)
def test_up_to_the_end_of_the_connection(content, cuts):
    response, body = read(cut(b"HTTP/1.0 200 OK\r\n\r\n" + content, cuts))
    assert (body, response.done) == (content, False)
    assert response.end()
    assert not response.reusable


def test_an_interim_answer_is_not_the_answer():
    wire = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    for pieces in ([wire], [wire[at : at + 1] for at in range(len(wire))]):
        response, body = read(pieces)
        assert (response.status, body) == (200, b"ok")


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 70_000,
    ],
)
def test_what_is_no_http(wire):
    with pytest.raises(ProtocolError):
        read([wire])


def test_a_connection_that_ends_too_early():
    for wire in (
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ):
        response, _ = read([wire])
        assert not response.end()


texts = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=6
)


@given(texts, places, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_events_cut_anywhere(values, cuts, end, comments):
    wire = ""
    for value in values:
        wire += f": still here{end}{end}" if comments else ""
        wire += f"event: x{end}" if comments else ""
        wire += f"data: {value}{end}{end}"
    events = EventReader()
    found = [event for piece in cut(wire.encode(), cuts) for event in events.feed(piece)]
    assert found == [value.encode() for value in values]


def test_data_over_several_lines_is_one_value():
    assert EventReader().feed(b"data: {\ndata:}\n\n") == [b"{\n}"]
