"""What ranks and node agents say to each other about copies in memory, and how it travels.

    [4 bytes: length][JSON of one message][the bytes it announces, if any]

Over a Unix socket on the same node, where a piece of memory can be handed over as it is (a file descriptor); over TCP
between nodes, where its bytes are sent. A TCP connection begins with both ends proving that they know the job's secret
(`core/shared_secret`). Knows neither training nor what the bytes mean.
"""

import array
import contextlib
import os
import socket
import struct
from typing import Any

import msgspec
import numpy as np

from cairn.core.shared_secret import Refused, Secret, enter, is_loopback

LENGTH = 4
LARGEST = 64 << 20  # of a message without its bytes
AT_ONCE = 4 << 20  # bytes that may be on their way to a reader that is busy
Buffer = bytes | bytearray | memoryview


class Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Reserve(Message, frozen=True):
    """Room for two copies of one rank's state; answered by Room and a descriptor."""

    generation: int
    rank: int
    size: int  # of one copy
    world: int = 0  # of how many ranks it is one


class Room(Message, frozen=True):
    size: int  # of one copy; two lie side by side
    steps: tuple[int, int]  # what lies there already; -1: nothing


class Written(Message, frozen=True):
    """A copy is complete; the agent sends it on to the other node."""

    generation: int
    rank: int
    step: int
    slot: int
    used: int
    cuts: list[int]  # where its parts begin, each at a word: each has a checksum of its own


class Put(Message, frozen=True):
    """From agent to agent: `used` bytes follow."""

    generation: int
    rank: int
    step: int
    used: int
    cuts: list[int]
    sums: list[int]  # of the 64-bit words of each part
    world: int = 0


class Done(Message, frozen=True):
    fine: bool = True
    why: str = ""


class Ask(Message, frozen=True):
    """Which copies are there?"""


class Held(msgspec.Struct, frozen=True):
    generation: int
    rank: int
    step: int
    used: int
    check: int  # sum of all its 64-bit words; 0: nobody has summed it yet
    world: int = 0  # of how many ranks it is one; 0: nobody said


class Holdings(Message, frozen=True):
    copies: list[Held]


class Open(Message, frozen=True):
    """On the same node: the memory of a rank's copies, as Room and a descriptor."""

    generation: int
    rank: int
    step: int


class Fetch(Message, frozen=True):
    """From anywhere: these stretches of a copy follow the answer, one after another."""

    generation: int
    rank: int
    step: int
    stretches: list[tuple[int, int]]  # offset, length


class Parts(Message, frozen=True):
    """What are the checksums of this copy's parts? Answered by Sums."""

    generation: int
    rank: int
    step: int


class Sums(Message, frozen=True):
    cuts: list[int]
    sums: list[int]  # as they were when the copy was complete


class Forget(Message, frozen=True):
    """Copies that cannot be gone on from: of generations before this one, and of its steps after `after`."""

    generation: int
    after: int


class Keep(Message, frozen=True):
    """To an agent: from now on this one keeps copies of your ranks; empty: nobody does."""

    address: str


AnyMessage = (
    Reserve | Room | Written | Put | Done | Ask | Holdings | Open | Fetch | Parts | Sums | Forget | Keep
)  # fmt: skip
_decode = msgspec.json.Decoder(AnyMessage).decode


class Gone(ConnectionError):
    """The other end has closed, or sent what is no message."""


def connect(address: str, patience_s: float, secret: Secret | None = None) -> socket.socket:
    """To `host:port`, once both ends know that they belong together.

    Answers that do not come within the patience are an OSError; `Refused` names the address.
    """
    host, _, port = address.rpartition(":")
    link = socket.create_connection((host, int(port)), patience_s)
    for_much(link, host)
    try:
        enter(link, secret, patience_s)
    except BaseException as error:
        link.close()
        if isinstance(error, Refused):
            raise Refused(f"the memory of copies at {address}: {error}") from None
        raise
    # One call for a whole tensor; the kernel keeps the time.
    kept = struct.pack("ll", int(patience_s), 0)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, kept)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, kept)
    return link


def for_much(link: socket.socket, host: str) -> None:
    """How a connection for hundreds of megabytes differs from others; also of a listener, for all that it accepts.

    Each setting only saves time, so a kernel that has other ideas is left to them.
    """
    with contextlib.suppress(OSError):
        # A short answer must not wait for the acknowledgement of the one before.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel makes room for as much as one says one waits for, and still finds the best size by itself, which
        # asking for a size (SO_RCVBUF) would end. Nobody waits for that much: the room stays, the mark goes.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, AT_ONCE)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if is_loopback(
            host
        ):  # nothing there is congested: pacing (BBR) would be timers for nothing
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def send(to: socket.socket, message: Message, handed: int | None = None) -> None:
    """`handed`: a descriptor for the other process, over a Unix socket."""
    text = msgspec.json.encode(message)
    head = len(text).to_bytes(LENGTH, "big") + text
    if handed is None:
        to.sendall(head)
    else:
        sent = socket.send_fds(to, [head], [handed])
        to.sendall(head[sent:])


def send_pages(to: socket.socket, descriptor: int, offset: int, length: int) -> None:
    """A stretch of memory that is a file, from its own pages: the kernel copies nothing on this side."""
    end = offset + length
    while offset < end:
        sent = os.sendfile(to.fileno(), descriptor, offset, end - offset)
        if sent == 0:
            raise Gone(f"the memory ends {end - offset:,} bytes before what was wanted")
        offset += sent


def receive(of: socket.socket) -> tuple[AnyMessage, int | None]:
    """A message, and the descriptor that came with it."""
    head, handed = _first(of)
    size = int.from_bytes(head, "big")
    if not 0 < size <= LARGEST:
        raise Gone(f"a message of {size} bytes")
    text = bytearray(size)
    receive_into(of, text)
    try:
        return _decode(text), handed
    except msgspec.DecodeError as error:
        raise Gone(f"not a message: {error}") from None


def receive_into(of: socket.socket, room: Buffer) -> None:
    view: Any = memoryview(room).cast("B")
    got = 0
    while got < len(view):
        count = of.recv_into(view[got:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise Gone(f"closed after {got:,} of {len(view):,} bytes")
        got += count


def ask(of: socket.socket, message: Message) -> AnyMessage:
    send(of, message)
    return receive(of)[0]


def words_of(answer: AnyMessage) -> str:
    """Why it is not the answer that was wanted."""
    return answer.why if isinstance(answer, Done) else f"no answer but {answer}"


def word_sum(data: Buffer) -> int:
    """The sum of all 64-bit words: every single flipped bit changes it, at the speed of memory."""
    whole = len(data) // 8 * 8
    words: Any = np.frombuffer(data[:whole], np.uint64)
    tail = int.from_bytes(data[whole:], "little")
    return (int(np.add.reduce(words, dtype=np.uint64)) + tail) & (2**64 - 1)


def part_sums(data: Buffer, cuts: list[int]) -> list[int]:
    """Of the parts that begin at the cuts; the last one ends with the data."""
    ends = [*cuts[1:], len(data)]
    return [word_sum(data[begin:end]) for begin, end in zip(cuts, ends, strict=True)]


def _first(of: socket.socket) -> tuple[bytes, int | None]:
    """The length, byte by byte if it must be, and a descriptor that travels with its first byte."""
    if of.family != socket.AF_UNIX:
        head = bytearray(LENGTH)
        receive_into(of, head)
        return bytes(head), None
    data, ancillary, *_ = of.recvmsg(LENGTH, socket.CMSG_LEN(array.array("i").itemsize))
    handed = None
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            handed = array.array("i", content[: array.array("i").itemsize])[0]
    if not data:
        raise Gone("closed")
    rest = bytearray(LENGTH - len(data))
    receive_into(of, rest)
    return data + bytes(rest), handed
