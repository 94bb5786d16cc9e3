"""Waiting and running requests, and the row, blocks and arena rows of each.

    add --> waiting --admit--> running --finish--> finished
               ^----preempt-------'

Pure Python: the scheduler decides who moves, the queues keep the books. Pages and a row belong to a request while it
runs, rows of the arena until it ends: a preempted request is computed again from them.
"""

from bisect import insort
from collections.abc import Callable
from heapq import heappop, heappush

from cairn.core.errors import RequestError
from cairn.serve.engine.block_manager import BlockManager, IntegrityError
from cairn.serve.engine.pieces import ArenaRows
from cairn.serve.engine.request import Finish, Limits, Request, RequestId
from cairn.serve.engine.request_checks import check_request
from cairn.serve.engine.waiting_queue import WaitingQueue


class Queues:
    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        on_finish: Callable[[Request], None] | None = None,
    ) -> None:
        """`on_finish`: is called for each request that ends."""
        self.limits, self.on_finish = limits, on_finish
        self.blocks = blocks
        self.arena = ArenaRows(limits.arena_rows)
        self.requests: dict[RequestId, Request] = {}  # waiting and running
        self.waiting = WaitingQueue(limits.policy)
        self.running: list[Request] = []  # by (priority, arrival)
        self.free_rows = list(range(limits.rows))  # a heap: the lowest is taken first
        self.arrivals = 0
        self.preemptions = 0  # since the start

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue, or refuse it with a RequestError."""
        if request.id in self.requests:
            raise RequestError(
                f"request {request.id} is in the engine already", hint="give each its own id"
            )
        if request.arrival != -1:
            raise ValueError(f"{request!r} was added before; make a new one")
        check_request(request, self.limits)
        most = request.params.max_tokens
        request.most_outputs = self.limits.context - len(request.prompt) if most is None else most
        request.end = len(request.prompt) + request.most_outputs
        request.arrival = self.arrivals
        self.arrivals += 1
        self.requests[request.id] = request
        self.waiting.push(request)

    def admit(self) -> Request:
        """Move the head of the waiting queue, which has its pages, to the running requests."""
        request = self.waiting.pop()
        request.state = "running"
        request.row = heappop(self.free_rows)
        insort(self.running, request, key=_order)
        return request

    def preempt(self, victim: Request | None = None) -> Request:
        """Move a running request, by default the last, back to the waiting queue, without pages and row."""
        victim = self.running[-1] if victim is None else victim
        self.running.remove(victim)
        self._release(victim)
        victim.state = "waiting"
        victim.ledger.preemptions += 1
        self.preemptions += 1
        self.waiting.push(victim)
        return victim

    def finish(
        self, request: Request, reason: Finish, stop_reason: int | str | None = None
    ) -> None:
        """End a request wherever it is; `sweep` takes it out of the running ones."""
        if request.state == "running":
            self._release(request)
        else:
            self.waiting.remove(request)
        for piece in request.pieces:
            self.arena.release(piece.digest)
        request.state = "finished"
        request.finish = reason
        request.stop_reason = stop_reason
        del self.requests[request.id]
        if self.on_finish is not None:
            self.on_finish(request)

    def sweep(self) -> None:
        """Take the finished out of the running, all of them in one pass."""
        self.running[:] = [request for request in self.running if request.state == "running"]

    def rename_waiting(self, before: bytes, after: bytes) -> None:
        """The weights have changed: waiting requests are computed with the new ones, and look for their pages."""
        for request in self.waiting:
            request.identity = after + request.identity.removeprefix(before)
            request.hashes = []

    def _release(self, request: Request) -> None:
        """Pages and row are free at once: steps in flight run before whatever uses them next."""
        self.blocks.free(request)
        heappush(self.free_rows, request.row)
        request.row = -1

    def check_integrity(self) -> None:
        """Raise an IntegrityError with what is wrong. Costs as much as there is to look at."""
        self.blocks.check_integrity()
        rows = sorted([*self.free_rows, *(request.row for request in self.running)])
        if rows != list(range(self.limits.rows)):
            raise IntegrityError(f"rows are lost or given twice: {rows}")
        if [_order(r) for r in self.running] != sorted(_order(r) for r in self.running):
            raise IntegrityError("the running requests are out of order")
        for request in self.running:
            room = len(request.blocks) * self.limits.page_size
            if request.state != "running" or not request.computed <= min(request.total, room):
                raise IntegrityError(f"{request!r} runs with room for {room} tokens")
        for request in self.waiting:
            if request.state != "waiting" or request.blocks or request.row != -1:
                raise IntegrityError(f"{request!r} waits, and holds row {request.row}")
        listed = {request.id: request for request in (*self.waiting, *self.running)}
        if listed != self.requests or len(listed) != len(self.waiting) + len(self.running):
            raise IntegrityError(f"{len(self.requests)} requests, {len(listed)} of them in a queue")


def _order(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
