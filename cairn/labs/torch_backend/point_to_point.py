"""Sends and receives between two ranks: one thread for each peer and direction.

    send(x, 1, tag)  -->  [queue to 1]  -->  link  -->  [posted receives from 0]  -->  recv(y, 0, tag)

A send to one peer therefore never waits for another peer or for a receive, in any order of calls. Messages of a pair
arrive in order; a message whose tag has not been posted yet is set aside. The threads start with the first message and
use links of their own, so collectives are not affected. Every message is in the flight recorder while it is in flight.
"""

import queue
import threading
import time
from typing import Any

import torch

from cairn.labs.torch_backend.errors import CommError, GroupStopped
from cairn.labs.torch_backend.flight_recorder import FlightRecorder
from cairn.labs.torch_backend.hang_detector import LOOK_S, HangDetector
from cairn.labs.torch_backend.link import Incoming, Link, Outgoing
from cairn.labs.torch_backend.wire import Call, call_of
from cairn.labs.torch_backend.work import Operation

Posted = tuple[Call, torch.Tensor, Operation]


def message(view: torch.Tensor, tag: int) -> Call:
    """The header both sides must agree on. Messages are matched by tag and order, so they have no sequence number."""
    return Call("send", 0, view.dtype, root=tag, total=view.nbytes)


class Sender:
    def __init__(self, peer: int, link: Any, guard: HangDetector, timeout_s: float) -> None:
        self._peer, self._link, self._guard, self._timeout_s = peer, link, guard, timeout_s
        self._queue: queue.SimpleQueue[Posted | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"cairn-to-{peer}", daemon=True)
        self._thread.start()

    def post(self, view: torch.Tensor, tag: int, result: Any) -> Operation:
        operation = Operation(result, f"send to rank {self._peer}")
        self._queue.put((message(view, tag), view, operation))
        return operation

    def close(self) -> None:
        """Send everything that was posted, then stop."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        while (item := self._queue.get()) is not None:
            call, view, operation = item
            operation.finish(_attempt(self._guard, self._send, call, view))
            del item, view, operation

    def _send(self, call: Call, view: torch.Tensor) -> None:
        stream = Outgoing(view, call.header())
        began = time.monotonic()
        self._link.push(stream)
        while not stream.done:
            self._link.sleep_for_room(LOOK_S)
            if self._link.push(stream):
                began = time.monotonic()
            else:
                self._look(call, began)

    def _look(self, call: Call, since: float) -> None:
        self._guard.look(call, self._peer, self._link, since, self._timeout_s, receiving=False)


class Receiver:
    def __init__(
        self, peer: int, name: int, link: Any, guard: HangDetector, timeout_s: float
    ) -> None:
        self._peer, self._name, self._link = peer, name, link
        self._guard, self._timeout_s = guard, timeout_s
        self._waiting: list[Posted] = []
        self._aside: list[tuple[Call, torch.Tensor]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=f"cairn-from-{peer}", daemon=True)
        self._thread.start()

    def post(self, view: torch.Tensor, tag: int, result: Any) -> Operation:
        operation = Operation(result, f"recv from rank {self._name}")
        with self._changed:
            self._waiting.append((message(view, tag), view, operation))
            self._changed.notify()
        return operation

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                posted = list(self._waiting)
            served = [self._from_aside(one) for one in posted]
            if not any(served):
                error = _attempt(self._guard, self._next_message, posted[0][0])
                if error is not None:
                    self._fail(error)
            del posted

    def _from_aside(self, posted: Posted) -> bool:
        """Complete a posted receive from the messages set aside; return whether there was one."""
        call, view, _ = posted
        for index, (kept, payload) in enumerate(self._aside):
            if kept.root == call.root:
                del self._aside[index]
                error = _attempt(self._guard, self._accept, call, view, kept, payload)
                self._finish(posted, error)
                return True
        return False

    def _accept(self, call: Call, view: torch.Tensor, kept: Call, payload: torch.Tensor) -> None:
        stream = Incoming(view, call, call.header(), None, self._name, self._guard.name)
        stream.check(kept.header() + payload.nbytes.to_bytes(8, "little"))
        stream.take(payload)

    def _next_message(self, call: Call) -> None:
        """Takes one message: for the call that waits for its tag, or aside."""
        if call.total == 0:
            self._finish(self._waiting[0], None)  # nothing travels for nothing
            return
        header = self._header(call)
        theirs = call_of(header)
        if theirs is None:
            raise CommError(f"recv: rank {self._name} sent bytes that are no message")
        with self._changed:
            posted = next((p for p in self._waiting if p[0].root == theirs.root), None)
        if posted is None:
            payload = torch.empty(theirs.total // theirs.dtype.itemsize, dtype=theirs.dtype)
            self._pull(theirs, payload)
            self._aside.append((theirs, payload))
        else:
            self._pull(posted[0], posted[1])
            self._finish(posted, None)

    def _header(self, call: Call) -> bytes:
        began = time.monotonic()
        while (header := self._link.peek()) is None:
            self._link.sleep(LOOK_S)
            if (header := self._link.peek()) is not None:
                break
            self._look(call, began)
            if self._closed:
                raise GroupStopped(f"recv from rank {self._name}: the group has been destroyed")
        return header

    def _pull(self, call: Call, view: torch.Tensor) -> None:
        stream = Incoming(view, call, call.header(), None, self._name, self._guard.name)
        began = time.monotonic()
        while not stream.done:
            if self._link.pull(stream):
                began = time.monotonic()
                continue
            self._link.sleep(LOOK_S)
            self._look(call, began)

    def _finish(self, posted: Posted, error: BaseException | None) -> None:
        with self._changed:
            self._waiting = [other for other in self._waiting if other is not posted]
        posted[2].finish(error)

    def _fail(self, error: BaseException) -> None:
        """A connection that failed is not used any more."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for _, _, operation in waiting:
            operation.finish(error)

    def _look(self, call: Call, since: float) -> None:
        self._guard.look(call, self._peer, self._link, since, self._timeout_s, receiving=True)


class Messages:
    """Sends to and receives from each peer. `links` is by rank of the group, `names` holds the global ranks."""

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


def _attempt(guard: HangDetector, job: Any, *args: Any) -> BaseException | None:
    """Run a job; if it raises, stop the group and return the exception."""
    try:
        if guard.reason is not None:
            raise GroupStopped(f"{args[0].operation} on rank {guard.name}: {guard.reason}")
        job(*args)
    except Exception as error:  # noqa: BLE001  the waiting thread raises it
        guard.stop(str(error))
        return error
    return None
