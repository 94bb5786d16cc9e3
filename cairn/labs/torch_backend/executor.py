"""Runs one rank's program over its links.

    for each step:   send      give the view to the link; what does not fit waits in a queue
                     receive   wait for it; meanwhile push what is in the queues
                     copy, reduce within the rank

A send never blocks, so a rank always comes to its next receive, and the proof of the schedule (no hang
when each connection holds one chunk) holds here with room to spare. A slot is not overwritten while a
send of it is in a queue; two that exchange a slot larger than the connection go on piece by piece, each
behind what has left. Waiting looks for a while (`spin_us`), then sleeps. Not thread-safe: a group
runs one program at a time.
"""

import os
import time
from collections import deque
from collections.abc import Sequence

import torch

from cairn.comm.schedule.ops import OpKind
from cairn.labs.torch_backend.hang_detector import LOOK_S, HangDetector
from cairn.labs.torch_backend.link import Combine, Incoming, Link, Outgoing
from cairn.labs.torch_backend.program import Program
from cairn.labs.torch_backend.tcp_link import TcpLink, sleep_for_any
from cairn.labs.torch_backend.wire import Call

BUSY_S = 0.0005  # a nap while a queue is not empty: its link may have room again
PUMP_S = 0.0002  # a link that was full is not asked again sooner
QUICK_LOOKS = 8  # between two looks at the clock


class Executor:
    """`links` by rank, `order`: which rank stands at which place of a schedule."""

    def __init__(
        self,
        links: dict[int, Link],
        names: list[int],
        order: list[int],
        guard: HangDetector,
        spin_us: float,
    ) -> None:
        self._links, self._names, self._order, self._guard = links, names, order, guard
        self._own_name = guard.name
        # Where ranks share processors, one that polls keeps another from working.
        crowded = len(links) + 1 > len(os.sched_getaffinity(0))
        self._spin_s = 0.0 if crowded else spin_us / 1e6
        self._queues: dict[int, deque[Outgoing]] = {peer: deque() for peer in links}
        self._waiting = 0  # streams in the queues
        self._pumped = 0.0  # when

    def run(
        self,
        call: Call,
        program: Program,
        views: Sequence[torch.Tensor],
        combine: Combine | None,
        timeout_s: float,
    ) -> None:
        """Every view a vector; those of `program.written` are changed."""
        header = call.header()
        sending: dict[int, list[tuple[int, Outgoing]]] = {}  # by slot, to whom it has not left yet
        for kind, slot, place, source in program.steps:
            view = views[slot]
            if kind is OpKind.SEND:
                out = Outgoing(view, header)
                if not self._send(self._order[place], out):
                    sending.setdefault(slot, []).append((place, out))
                continue
            behind = None
            if slot in sending:
                left = [(to, out) for to, out in sending.pop(slot) if not out.done]
                if kind is OpKind.RECV_REDUCE and [to for to, _ in left] == [place]:
                    behind = left[0][1]
                else:
                    self._drain([out for _, out in left], call, timeout_s)
            if kind is OpKind.COPY:
                view.copy_(views[source])
            elif kind is OpKind.REDUCE:
                assert combine is not None
                combine(view, views[source])
            else:
                peer = self._order[place]
                by = combine if kind is OpKind.RECV_REDUCE else None
                stream = Incoming(view, call, header, by, self._names[peer], self._own_name, behind)
                self._receive(peer, stream, call, timeout_s)
        if self._waiting:
            self._drain([out for queue in self._queues.values() for out in queue], call, timeout_s)

    def _send(self, peer: int, out: Outgoing) -> bool:
        """Push a stream to a peer, or queue it; return whether all of it was sent."""
        queue = self._queues[peer]
        if not queue:
            self._links[peer].push(out)
            if out.done:
                return True
        queue.append(out)
        self._waiting += 1
        return False

    def _receive(self, peer: int, stream: Incoming, call: Call, timeout_s: float) -> None:
        link = self._links[peer]
        waited, stands = False, 0.0  # since when an exchange does not go on
        while not stream.done:
            moved = link.pull(stream)
            if self._waiting and time.monotonic() - self._pumped > PUMP_S:
                moved |= self._pump()
            if moved:
                waited, stands = False, 0.0
                continue
            if waited and link.lost() is not None:
                self._guard.look(call, peer, link, time.monotonic(), timeout_s, receiving=True)
            if stream.behind is not None and not stream.behind.done:
                stands = stands or time.monotonic()
                # A nap, not a wait: both may be here with something for each other to take.
                link.sleep_for_room(BUSY_S)
                self._guard.look(call, peer, link, stands, timeout_s, receiving=True)
                continue
            self._wait(peer, link, call, timeout_s)
            waited = True

    def _wait(self, peer: int, link: Link, call: Call, timeout_s: float) -> None:
        """Until there is something to pull, or an error says that there never will be."""
        began = time.monotonic()
        while time.monotonic() - began < self._spin_s:
            for _ in range(QUICK_LOOKS):
                if link.ready():
                    return
            if self._waiting and self._pump():
                return
        while not self._sleep(link):
            if self._waiting and self._pump():
                began = time.monotonic()
            self._guard.look(call, peer, link, began, timeout_s, receiving=True)

    def _sleep(self, link: Link) -> bool:
        """Until there is something to pull, or room for what waits; whether there is the first.

        Nothing can wait for memory and sockets at once: where both are meant it is a nap.
        """
        if not self._waiting:
            return link.sleep(LOOK_S)
        full = [self._links[peer] for peer, queue in self._queues.items() if queue]
        sockets = [one for one in full if isinstance(one, TcpLink)]
        if isinstance(link, TcpLink) and len(sockets) == len(full):
            return sleep_for_any(link, sockets, LOOK_S)
        return link.sleep(BUSY_S)

    def _pump(self) -> bool:
        """Pushes whatever has room now; whether anything moved."""
        moved = False
        self._pumped = time.monotonic()
        for peer, queue in self._queues.items():
            while queue:
                moved |= self._links[peer].push(queue[0])
                if not queue[0].done:
                    break
                queue.popleft()
                self._waiting -= 1
        return moved

    def _drain(self, streams: list[Outgoing], call: Call, timeout_s: float) -> None:
        """Until all of these have left."""
        began = time.monotonic()
        while not all(stream.done for stream in streams):
            if self._pump():
                began = time.monotonic()
                continue
            peer = next(peer for peer, queue in self._queues.items() if queue)
            link = self._links[peer]
            link.sleep_for_room(BUSY_S)
            self._guard.look(call, peer, link, began, timeout_s, receiving=False)
