"""Writes that wait for the end of a turn arrive as if each had been made at once."""

import asyncio
import re

from fake_servers import text_of
from hypothesis import given
from hypothesis import strategies as st
from test_router import exchange, fleet

from cairn.fleet.write_queue import JOINED, WriteQueue


class Recorded:
    """A transport that remembers what it was given."""

    def __init__(self) -> None:
        self.sent, self.closed = b"", False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent += data

    def writelines(self, parts) -> None:
        self.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self.closed


BODIES = st.sampled_from([b"", b"b", b"c" * (JOINED + 1)])
WRITES = st.tuples(st.integers(0, 2), st.sampled_from([b"x", b"yz"]), BODIES)
TURNS = st.lists(st.lists(WRITES, max_size=6), max_size=4)


@given(TURNS)
def test_each_connection_gets_its_bytes_in_order(turns):
    """Pieces of streams, which need not wait, do not overtake what waits."""

    async def check() -> None:
        writes, made = WriteQueue(), [Recorded() for _ in range(3)]
        expected = [b"", b"", b""]
        for turn in turns:
            for at, head, body in turn:
                expected[at] += head + body
                if body:
                    writes.write(made[at], (head, body))
                else:
                    writes.write_piece(made[at], head)
            await asyncio.sleep(0)
            assert [one.sent for one in made] == expected

    asyncio.run(check())


def test_writes_wait_for_the_end_of_the_turn_and_a_lost_connection_gets_none():
    async def check() -> None:
        writes, lost, other = WriteQueue(), Recorded(), Recorded()
        writes.write(lost, (b"a",))
        writes.write(other, (b"b", b"c"))
        assert (lost.sent, other.sent) == (b"", b"")
        lost.closed = True
        await asyncio.sleep(0)
        assert (lost.sent, other.sent) == (b"", b"bc")

    asyncio.run(check())


def test_the_last_answer_of_a_connection_is_out_before_it_is_closed():
    async def check(url, servers, router):
        asked = [
            ("GET /health", b""),
            ("POST /v1/completions", b'{"prompt": "p", "max_tokens": 3}'),
        ]
        raw = await exchange(url, *asked, ("GET /cairn/fleet/requests/none", b""))
        assert re.findall(rb"HTTP/1.1 (\d+)", raw) == [b"200", b"200", b"404"]
        assert text_of("p", 3).encode() in raw
        assert raw.endswith(b"}")

    fleet(check)
