"""Copies of whole pages between the page pool and slots of host memory, beside the steps of the engine.

    pool    [layer, plane, page, ...]      a page is one row of bytes in every plane, all equally far apart
    slots   [slot, layer, plane, ...]      a slot has them one behind the other

On a GPU the slots are pinned, and one call of the driver copies a page as a two-dimensional array: the copy engines do
the work on streams of their own, and no kernel and no wait of the host is needed. On a CPU a copy has ended when it
returns. Who may read or overwrite a page or a slot meanwhile is for `page_tiers`.
"""

import ctypes
import time
from collections.abc import Sequence

import numpy as np
import torch

from cairn.core.errors import HardwareError
from cairn.core.units import format_bytes
from cairn.serve.engine.runner import Runner

TRIED_PAGES = 8  # that the first measurement copies
TRIES = 3
FINITE = 61  # bytes below this are finite numbers in every type of a cache


class Copied:
    """A copy that has been asked for; on a CPU it has ended."""

    def __init__(self, bytes: int, seconds: float = 0.0) -> None:
        self.bytes, self._seconds = bytes, seconds

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Until it has ended."""

    def hold_steps(self) -> None:
        """Whatever the device is asked to do from now on begins behind it; the host does not wait."""

    @property
    def seconds(self) -> float:
        """Duration of the copy, once it is complete."""
        return self._seconds


class PageCopies:
    def __init__(self, runner: Runner, slots: int) -> None:
        self.runner, self.page_bytes = runner, runner.pool.page_bytes
        self.memory_SB = self._allocate(slots)  # bytes of each slot
        self._shape = (*runner.pool.cache.shape[:2], *runner.pool.cache.shape[3:])

    def out(self, pages: Sequence[int], slots: Sequence[int]) -> Copied:
        """Pages, which steps that have landed have filled, to slots."""
        return self._copy(pages, slots, to_host=True)

    def into(self, slots: Sequence[int], pages: Sequence[int]) -> Copied:
        """Slots to pages, behind everything that the device was asked to do so far."""
        return self._copy(pages, slots, to_host=False)

    def measure(self) -> float:
        """Bytes per second from slots into pages that were never used; they are zero again behind it."""
        self._check()
        count = min(TRIED_PAGES, len(self.memory_SB), self.runner.pool.pages - 1)
        self.memory_SB[:count] = 0  # what is beyond a sequence in its page has to be finite
        rates = []
        for _ in range(TRIES):
            copied = self.into(range(count), range(1, count + 1))
            copied.wait()
            rates.append(copied.bytes / max(copied.seconds, 1e-9))
        return max(rates)

    def _check(self) -> None:
        """A page that goes there and back is the same, or no answer could be believed."""
        slot_B = self.memory_SB[0]
        slot_B[:] = sent_B = np.arange(self.page_bytes, dtype=np.uint64) % FINITE
        self.into([0], [1]).wait()
        slot_B[:] = 0
        self.out([1], [0]).wait()
        if not np.array_equal(slot_B, sent_B):
            raise HardwareError(
                f"a page that was copied to {self.runner.device} and back is another",
                hint="leave out --kv-offload-host, and report this",
            )

    def _allocate(self, slots: int) -> np.ndarray:
        try:
            return np.empty((slots, self.page_bytes), np.uint8)
        except MemoryError as error:
            raise _no_room(slots * self.page_bytes) from error

    def _copy(self, pages: Sequence[int], slots: Sequence[int], to_host: bool) -> Copied:
        began, cache = time.perf_counter(), self.runner.pool.cache
        for page, slot in zip(pages, slots, strict=True):
            kept = torch.from_numpy(self.memory_SB[slot]).view(cache.dtype).view(self._shape)
            if to_host:
                kept.copy_(cache[:, :, page])
            else:
                cache[:, :, page].copy_(kept)
        return Copied(len(pages) * self.page_bytes, time.perf_counter() - began)


class CopiedOnGPU(Copied):
    def __init__(self, bytes: int, stream: torch.cuda.Stream) -> None:
        super().__init__(bytes)
        self._stream = stream
        self._began = torch.cuda.Event(enable_timing=True)
        self._ended = torch.cuda.Event(enable_timing=True)
        self._began.record(stream)

    def asked(self) -> "CopiedOnGPU":
        self._ended.record(self._stream)
        return self

    def done(self) -> bool:
        return self._ended.query()

    def wait(self) -> None:
        self._ended.synchronize()

    def hold_steps(self) -> None:
        torch.cuda.current_stream().wait_event(self._ended)

    @property
    def seconds(self) -> float:
        return self._began.elapsed_time(self._ended) / 1e3


class PinnedCopies(PageCopies):
    def __init__(self, runner: Runner, slots: int) -> None:
        from cairn.serve.engine.cuda_memory import CudaMemory

        self._driver = CudaMemory(runner.device.index or 0)
        self._out, self._into = (torch.cuda.Stream(runner.device) for _ in range(2))
        super().__init__(runner, slots)

    def _allocate(self, slots: int) -> np.ndarray:
        size = slots * self.page_bytes
        try:
            address = self._driver.pin(size)
        except HardwareError as error:
            raise _no_room(size) from error
        memory = (ctypes.c_ubyte * size).from_address(address)  # for as long as the process lives
        return np.frombuffer(memoryview(memory), np.uint8).reshape(slots, self.page_bytes)

    def _copy(self, pages: Sequence[int], slots: Sequence[int], to_host: bool) -> Copied:
        cache = self.runner.pool.cache
        stream = self._out if to_host else self._into
        if not to_host:  # a step in flight may still write what a page held before
            stream.wait_stream(torch.cuda.current_stream())
        layers, planes, count = cache.shape[:3]
        width = self.page_bytes // (layers * planes)
        copied = CopiedOnGPU(len(pages) * self.page_bytes, stream)
        host, device = self.memory_SB.ctypes.data, cache.data_ptr()
        for page, slot in zip(pages, slots, strict=True):
            self._driver.copy_rows(
                host=host + slot * self.page_bytes,
                device=device + page * width,
                pitch=count * width,
                width=width,
                rows=layers * planes,
                to_host=to_host,
                stream=stream.cuda_stream,
            )
        return copied.asked()


def page_copies(runner: Runner, slots: int) -> PageCopies:
    return (PinnedCopies if runner.device.type == "cuda" else PageCopies)(runner, slots)


def _no_room(size: int) -> HardwareError:
    return HardwareError(
        f"kv_offload_host needs {format_bytes(size)} of host memory, and there is not that much",
        hint="give less, or leave it out",
    )
