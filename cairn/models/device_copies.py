"""Tensors to a GPU in several threads: one alone reads a mapped file more slowly than the link carries it.

    caller:  read a tensor's place -> make its parameter -> submit ...        at most FEW tensors wait
    threads: page in, stage, copy, each in a stream of its own

Knows nothing of models. On a CPU `submit` copies at once.
"""

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

THREADS = 4
FEW = 2 * THREADS  # tensors under way: those that had to be computed first take memory


class DeviceCopies:
    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._pool = ThreadPoolExecutor(THREADS) if self.device.type == "cuda" else None
        self._under_way: deque[Future[None]] = deque()
        self._own = threading.local()

    def submit(self, target: Tensor, value: Tensor) -> None:
        """Copy `value` into `target`, which lies on the device; it is there when the `with` ends."""
        if self._pool is None:
            target.copy_(value)
            return
        computed = torch.cuda.current_stream(self.device).record_event()
        self._under_way.append(self._pool.submit(self._copy, target, value, computed))
        if len(self._under_way) > FEW:
            self._under_way.popleft().result()

    def _copy(self, target: Tensor, value: Tensor, computed: torch.Event) -> None:
        """Copy after previously launched work, which may fill the target with zeros or still use its memory."""
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._own.stream):
            self._own.stream.wait_event(computed)
            target.copy_(value)
            self._own.stream.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=kind is not None)
        while kind is None and self._under_way:
            self._under_way.popleft().result()
