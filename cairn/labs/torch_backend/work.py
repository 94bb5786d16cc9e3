"""Operations under way: what torch.distributed calls Work, and the thread that does them.

An operation that the caller waits for anyway is done at once in the caller's thread, when nothing else
is under way: that saves two changes of threads, which cost more than a small message. All others go
through one queue and one thread for each group, in the order in which they were called.
"""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from cairn.labs.torch_backend.errors import CommError, CommTimeout


class Done(dist.Work):
    """An operation that had ended before `wait` was called."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._value = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._value

    def get_future(self) -> Future:
        future = Future()
        future.set_result(self._value)
        return future


class Operation(dist.Work):
    """Done, failed, or under way. `wait` raises what the operation raised."""

    def __init__(self, result: Any, name: str) -> None:
        super().__init__()
        self._value, self._name = result, name
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._future: Future | None = None
        self._trigger: Future | None = None
        self._lock = threading.Lock()
        self._afterwards: Callable[[], object] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._error = error
            self._finished.set()
            trigger = self._trigger
            afterwards = self._afterwards
        if afterwards is not None:
            afterwards()
        if trigger is not None:
            trigger.set_result(None)

    def add_done_callback(self, do: Callable[[], object]) -> None:
        """Call `do` once, when the operation is done or has failed; immediately if it already is."""
        with self._lock:
            over = self._finished.is_set()
            self._afterwards = do
        if over:
            do()

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout.total_seconds() if timeout else 0
        if not self._finished.wait(limit if limit > 0 else None):
            raise CommTimeout(f"{self._name} is not done after {limit:g} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._finished.is_set()

    def is_success(self) -> bool:
        return self._finished.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._value

    def get_future(self) -> Future:
        """Made when asked for. A callback that raises is how a future fails for C++ too."""
        with self._lock:
            if self._future is None:
                self._trigger = Future()
                self._future = self._trigger.then(lambda _: self._outcome())
                if not self._finished.is_set():
                    return self._future
                trigger = self._trigger
            else:
                return self._future
        trigger.set_result(None)
        return self._future

    def _outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class Worker:
    """The thread of a group, started when something is first left to it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Operation] | None]
        self._queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left = 0  # operations in the queue or under way
        self._lock = threading.Lock()
        self._running = threading.Lock()
        self._closed = False

    def do(self, job: Callable[[], None], result: Any, name: str, later: bool) -> dist.Work:
        """Now, or later in its turn; now raises at once."""
        with self._lock:
            if self._closed:
                raise CommError(f"{name}: the group has been destroyed")
            now = not later and self._left == 0
            self._left += 1
            if not now and self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
        if not now:
            operation = Operation(result, name)
            self._queue.put((job, operation))
            return operation
        try:
            with self._running:
                job()
        finally:
            with self._lock:
                self._left -= 1
        return Done(result)

    def close(self) -> None:
        """Finish the queued operations; new ones are refused."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join(timeout=10)

    def _loop(self) -> None:
        torch.set_grad_enabled(False)
        while (item := self._queue.get()) is not None:
            job, operation = item
            error: BaseException | None = None
            try:
                with self._running:
                    job()
            except BaseException as caught:  # noqa: BLE001  the waiting thread raises it
                error = caught
            with self._lock:
                self._left -= 1
            operation.finish(error)
            del item, job, operation  # or their tensors live until the next
