"""Sends and receives between two ranks: each peer has a thread for either direction.

    send(x, 1, tag)  -->  [queue to 1]  -->  link  -->  [waiting for 0]  -->  recv(y, 0, tag)

So a send to one peer never waits for another, nor for a receive, in whatever order they are called.
Messages of a pair come in order; one whose tag is not waited for yet is kept aside. The threads start
with the first message. Runs over links of their own: collectives are not disturbed.
"""

import queue
import threading
import time
from typing import Any

import torch

from cairn.comm.backend.errors import CommError, GroupStopped
from cairn.comm.backend.hang_detector import LOOK_S, HangDetector
from cairn.comm.backend.link import Incoming, Outgoing
from cairn.comm.backend.wire import Call, call_of
from cairn.comm.backend.work import Operation

Posted = tuple[Call, torch.Tensor, Operation]


def message(view: torch.Tensor, tag: int) -> Call:
    """What both sides must mean. Messages are matched by tag and order, so they have no number."""
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
        """What was posted is still sent."""
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
        """Whether the first that waits was already here."""
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


def _attempt(guard: HangDetector, job: Any, *args: Any) -> BaseException | None:
    """What went wrong, if anything; then the group is stopped."""
    try:
        if guard.reason is not None:
            raise GroupStopped(f"{args[0].operation} on rank {guard.name}: {guard.reason}")
        job(*args)
    except Exception as error:  # noqa: BLE001  the waiting thread raises it
        guard.stop(str(error))
        return error
    return None
