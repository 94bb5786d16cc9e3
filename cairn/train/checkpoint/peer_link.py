"""A connection to the memory of a node: messages as frames of `comm/transfer`, and behind them the bytes they announce.

    | kind | meta length | payload length |  JSON of one message  |  payload, from where it lies to where it belongs

Over TCP between nodes, where both ends first prove that they know the job's secret; over a Unix socket on the same
node, where a piece of memory is handed over as it is, by a descriptor behind its message. Knows neither training nor
what the bytes mean.
"""

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from cairn.comm.transfer import wire
from cairn.comm.transfer.mover import OWN
from cairn.comm.transfer.sockets import dialled
from cairn.comm.transfer.wire import MOST_PIECES, Frame, Scattered, Wire
from cairn.core.shared_secret import AuthenticationRefused, Secret
from cairn.train.checkpoint.peer_messages import AnyMessage, Done, Message

MESSAGE = OWN + 16  # the kind of our frames
LARGEST = 64 << 20  # of a message without its bytes
_decode = msgspec.json.Decoder(AnyMessage).decode


class Gone(ConnectionError):
    """The other end has closed, or sent what is no message."""


class Link:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.wire = connection, Wire(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.connection.close()

    def send(
        self, message: Message, payload: Scattered | None = None, handed: int | None = None
    ) -> None:
        """`handed`: a descriptor for the other process, over a Unix socket."""
        self.wire.send_now(Frame(MESSAGE, 0, msgspec.json.encode(message)), payload)
        if handed is not None:
            socket.send_fds(self.connection, [b"\0"], [handed])

    def receive(self) -> tuple[AnyMessage, int]:
        """A message, and how many bytes follow it."""
        try:
            frame = self.wire.receive(LARGEST)
            if frame.kind != MESSAGE:
                raise Gone(f"a frame of kind {frame.kind}")
            return _decode(frame.meta), frame.payload
        except wire.ConnectionGone as error:
            raise Gone(str(error)) from None
        except msgspec.DecodeError as error:
            raise Gone(f"not a message: {error}") from None

    def receive_into(self, rooms: Sequence[memoryview]) -> None:
        """The bytes behind a message, into these rooms one after another."""
        try:
            for first in range(0, len(rooms), MOST_PIECES):
                self.wire.fill(list(rooms[first : first + MOST_PIECES]))
        except wire.ConnectionGone as error:
            raise Gone(str(error)) from None

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Within the block, bytes that do not come for so long are `Gone`."""
        _wait_at_most(self.connection, socket.SO_RCVTIMEO, seconds)
        try:
            yield
        finally:
            _wait_at_most(self.connection, socket.SO_RCVTIMEO, 0.0)

    def receive_descriptor(self) -> int:
        _, descriptors, _, _ = socket.recv_fds(self.connection, 1, 1)
        if not descriptors:
            raise Gone("no memory was handed over")
        return descriptors[0]

    def ask(self, message: Message) -> AnyMessage:
        self.send(message)
        return self.receive()[0]


def connect(address: str, patience_s: float, secret: Secret | None = None) -> Link:
    """Connect to `host:port` with mutual authentication.

    Answers that do not come within the patience are an OSError; `AuthenticationRefused` names the address.
    """
    try:
        connection = dialled(socket.AF_INET, address, secret)
    except AuthenticationRefused as error:
        raise AuthenticationRefused(f"the memory of copies at {address}: {error}") from None
    connection.settimeout(None)
    _wait_at_most(connection, socket.SO_RCVTIMEO, patience_s)
    _wait_at_most(connection, socket.SO_SNDTIMEO, patience_s)
    return Link(connection)


def _wait_at_most(connection: socket.socket, which: int, seconds: float) -> None:
    """The kernel keeps the time, also within a call; 0: for ever."""
    whole, part = divmod(seconds, 1.0)
    connection.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", int(whole), int(part * 1e6)))


def connect_local(path: str, patience_s: float) -> Link:
    """Connect to the memory agent of this node."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(patience_s)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return Link(connection)


def payload(memory: memoryview, stretches: Sequence[tuple[int, int]] | None = None) -> Scattered:
    """Stretches (offset, length) of a piece of memory, or all of it, to be sent from where they lie."""
    bytes_N: Any = np.frombuffer(memory, np.uint8)
    pairs = np.array([(0, len(memory))] if stretches is None else stretches, np.int64)
    starts, sizes = pairs.reshape(-1, 2).T
    return Scattered(bytes_N, np.ascontiguousarray(starts), np.ascontiguousarray(sizes))


def reason(answer: AnyMessage) -> str:
    """Why it is not the answer that was wanted."""
    return answer.why if isinstance(answer, Done) else f"no answer but {answer}"
