"""What a rank sends to and receives from each other rank: a `Sender` and a `Receiver` for each peer.

They are made with the first message, and every message stands in the flight recorder while it is under way.
"""

from typing import Any

import torch

from cairn.comm.backend.direct import Receiver, Sender, message
from cairn.comm.backend.errors import CommError
from cairn.comm.backend.flight_recorder import FlightRecorder
from cairn.comm.backend.hang_detector import HangDetector
from cairn.comm.backend.link import Link
from cairn.comm.backend.work import Operation


class Messages:
    """`links` by rank; `names`: what the world calls the ranks of the group."""

    def __init__(
        self,
        links: dict[int, Link],
        rank: int,
        names: list[int],
        guard: HangDetector,
        timeout_s: float,
        flight: FlightRecorder,
    ) -> None:
        self._links, self._rank, self._names = links, rank, names
        self._guard, self._flight = guard, flight
        self.timeout_s = timeout_s
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}

    def send(self, flat: torch.Tensor, peer: int, tag: int, result: Any) -> Operation:
        if peer not in self._senders:
            link = self._link("send", peer)
            self._senders[peer] = Sender(peer, link, self._guard, self.timeout_s)
        return self._noted(self._senders[peer].post(flat, tag, result), "send", flat, peer, tag)

    def recv(self, flat: torch.Tensor, peer: int, tag: int, result: Any) -> Operation:
        if peer not in self._receivers:
            link, name = self._link("recv", peer), self._names[peer]
            self._receivers[peer] = Receiver(peer, name, link, self._guard, self.timeout_s)
        return self._noted(self._receivers[peer].post(flat, tag, result), "recv", flat, peer, tag)

    def close(self) -> None:
        for thread in (*self._senders.values(), *self._receivers.values()):
            thread.close()

    def _noted(
        self, operation: Operation, verb: str, flat: torch.Tensor, peer: int, tag: int
    ) -> Operation:
        me, other = self._names[self._rank], self._names[peer]
        record = self._flight.begin_message(message(flat, tag), verb, me, other)
        operation.add_done_callback(lambda: self._flight.end(record))
        return operation

    def _link(self, verb: str, peer: int) -> Any:
        if peer not in self._links:
            raise CommError(
                f"{verb}: rank {peer} of {len(self._names)}, from rank {self._rank}",
                hint="name another rank of the group",
            )
        return self._links[peer]
