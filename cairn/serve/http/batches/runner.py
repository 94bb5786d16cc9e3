"""Runs batches beside interactive requests: on the same engine, at a low priority.

    for each batch, oldest first:   validating -> in_progress -> finalizing -> completed
                                             \\-> failed     \\-> expired | cancelled: with what there is
    for each line without a result: a request like any other, when the engine has a row that no other request uses

A line that finds no place (429, 503) is tried again later. When the server stops, lines that run are dropped; the next
server starts them again. Belongs to the thread of the event loop; how a line is performed is handed in.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec

from cairn.serve.http.batches.store import BatchRecord, BatchStore, Mistakes
from cairn.serve.http.protocol.batches import (
    Batch,
    BatchError,
    BatchErrors,
    BatchLine,
    BatchStatus,
    LineResponse,
    LineResult,
)

LOW_PRIORITY = 2**20  # lower numbers run first, and a request's own is 0
PAUSE_S = 0.05  # before it is looked again whether a row is free
RETRY_S = 1.0
LATER = (429, 503)
log = logging.getLogger("cairn")


class Performed(NamedTuple):
    status: int
    body: bytes


class Room(Protocol):
    """Interface that reports free engine capacity."""

    def has_free_row(self) -> bool: ...


Perform = Callable[[str, bytes, str, str], Awaitable[Performed]]  # url, body, holder, request id


class BatchRunner:
    def __init__(
        self, store: BatchStore, perform: Perform, room: Room, clock: Callable[[], float]
    ) -> None:
        self.store, self._perform, self._room, self._clock = store, perform, room, clock
        self._work: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._current: BatchRecord | None = None  # the batch that is being run

    def start(self) -> None:
        self._work = asyncio.create_task(self._run())
        self.wake()

    async def stop(self) -> None:
        if self._work is not None:
            self._work.cancel()
            with suppress(asyncio.CancelledError):
                await self._work

    def wake(self) -> None:
        """There is a new batch."""
        self._woken.set()

    def cancel(self, record: BatchRecord) -> None:
        """Its lines end soon; what they have given so far is kept. One that has to wait for others is over at once."""
        if record.batch.is_over or record.batch.status == "cancelling":
            return
        self._enter(record, "cancelling")
        if record is not self._current:
            self.store.publish(record)
            self._enter(record, "cancelled")

    # -- inside ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            while unfinished := self.store.unfinished():
                record = self._current = unfinished[0]
                try:
                    await self._run_batch(record)
                except OSError as error:  # a full disk, a folder that is gone: the server goes on
                    log.exception("batch %s failed", record.batch.id)
                    self._fail(record, BatchError(code="storage", message=str(error)))
                except Exception as error:  # such as results that are no JSON: others go on
                    log.exception("batch %s failed", record.batch.id)
                    self._fail(record, BatchError(code="server_error", message=str(error)))
                finally:
                    self._current = None

    async def _run_batch(self, record: BatchRecord) -> None:
        batch = record.batch
        if batch.status in ("validating", "in_progress"):
            try:
                lines = await asyncio.to_thread(self.store.lines_to_do, batch)
            except Mistakes as mistakes:
                self._fail(record, *mistakes.errors.data)
                return
            if batch.status == "validating":  # it was not cancelled meanwhile
                self._enter(record, "in_progress")
            await self._run_lines(record, deque(lines))
        counts = batch.request_counts
        final: BatchStatus = "completed"
        if batch.status == "cancelling":
            final = "cancelled"
        elif counts.completed + counts.failed < counts.total:  # its time is over
            final = "expired"
        else:
            self._enter(record, "finalizing")
        self.store.publish(record)
        self._enter(record, final)

    async def _run_lines(self, record: BatchRecord, lines: deque[BatchLine]) -> None:
        batch, running = record.batch, set[asyncio.Task[None]]()
        try:
            while (lines or running) and batch.status == "in_progress" and not self._is_late(batch):
                while lines and (not running or self._room.has_free_row()):
                    running.add(asyncio.create_task(self._run_line(record, lines.popleft())))
                    await asyncio.sleep(0)  # it takes its row before the next one is counted
                done, running = await asyncio.wait(
                    running, timeout=PAUSE_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()  # a full disk ends the batch
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run_line(self, record: BatchRecord, line: BatchLine) -> None:
        batch = record.batch
        body = msgspec.json.encode(line.body | {"priority": LOW_PRIORITY})
        id = f"batch-req-{secrets.token_hex(12)}"
        while True:
            done = await self._perform(line.url, body, record.holder, id)
            if done.status not in LATER:
                break
            await asyncio.sleep(RETRY_S)
        answer = LineResponse(status_code=done.status, request_id=id, body=msgspec.Raw(done.body))
        result = LineResult(id=id, custom_id=line.custom_id, response=answer)
        self.store.add_result(batch, result, failed=done.status != 200)

    def _is_late(self, batch: Batch) -> bool:
        return self._clock() >= batch.expires_at

    def _enter(self, record: BatchRecord, status: BatchStatus) -> None:
        record.batch.status = status
        if status != "validating":
            setattr(record.batch, f"{status}_at", int(self._clock()))
        self.store.save(record)

    def _fail(self, record: BatchRecord, *errors: BatchError) -> None:
        record.batch.errors = BatchErrors(data=list(errors))
        try:
            self._enter(record, "failed")
        except OSError:
            log.exception("batch %s cannot be written", record.batch.id)
