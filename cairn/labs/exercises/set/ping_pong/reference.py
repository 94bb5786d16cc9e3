"""Whole messages over a stream, and what they cost."""

import socket
import struct


def send_message(link: socket.socket, content: bytes) -> None:
    # begin answer
    link.sendall(struct.pack("<Q", len(content)) + content)
    # end answer


def receive_message(link: socket.socket) -> bytes:
    """One message; ConnectionError when the other side ends in the middle of it."""
    # begin answer
    (count,) = struct.unpack("<Q", _exactly(link, 8))
    return _exactly(link, count)
    # end answer


def _exactly(link: socket.socket, count: int) -> bytes:
    # begin answer
    received = b""
    while len(received) < count:
        part = link.recv(count - len(received))
        if not part:
            raise ConnectionError(f"{len(received)} of {count} bytes came")
        received += part
    return received
    # end answer


def fit(times: list[tuple[float, float]]) -> tuple[float, float]:
    """(alpha in seconds, beta in bytes/s) of (bytes, seconds), by least squares of relative errors."""
    # begin answer
    sw = swx = swxx = swy = swxy = 0.0
    for size, seconds in times:
        weight = 1 / seconds
        x, y, one = size * weight, seconds * weight, weight
        sw, swx, swxx = sw + one * one, swx + x * one, swxx + x * x
        swy, swxy = swy + y * one, swxy + x * y
    slope = (sw * swxy - swx * swy) / (sw * swxx - swx * swx)
    return (swy - slope * swx) / sw, 1 / slope
    # end answer


def half_size(alpha: float, beta: float) -> float:
    """The size at which half of the bandwidth is reached."""
    # begin answer
    return alpha * beta
    # end answer
