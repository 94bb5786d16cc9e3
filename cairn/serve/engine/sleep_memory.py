"""GPU memory that is given back while a model sleeps, and has the same addresses when it wakes.

    allocate -> [address, memory]   sleep: contents to pinned host memory, memory back to the GPU, addresses stay
                                    wake:  new memory under the old addresses, contents back

CUDA graphs keep addresses, so a model that wakes needs neither loading nor capturing. Weights are kept; pages of the
cache are not, and are zero again. The driver's virtual memory does it; torch allocates here through `gpu_memory`.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from cairn.core.errors import ConfigError, HardwareError
from cairn.serve.engine.ranks import device_kind


class MemoryDriver(Protocol):
    """Virtual memory operations of the GPU driver; sizes are multiples of `granularity`."""

    granularity: int

    def reserve(self, size: int) -> int: ...
    def free(self, address: int, size: int) -> None: ...
    def map(self, address: int, size: int) -> int: ...
    def unmap(self, address: int, size: int, handle: int) -> None: ...
    def pin(self, size: int) -> int: ...
    def save(self, host: int, address: int, size: int) -> None: ...
    def load(self, address: int, host: int, size: int) -> None: ...
    def zero(self, address: int, size: int) -> None: ...
    def synchronize(self) -> None: ...


class Block(msgspec.Struct):
    size: int
    kept: bool  # its contents survive a sleep
    handle: int | None  # None: it sleeps
    host: int = 0  # where its contents lie meanwhile; pinned once


class SleepMemory:
    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self.blocks: dict[int, Block] = {}  # by address
        self.asleep = False

    def allocate(self, size: int, kept: bool) -> int:
        driver = self._driver
        size = -(-size // driver.granularity) * driver.granularity
        address = driver.reserve(size)
        try:
            handle = driver.map(address, size)
        except HardwareError:
            driver.free(address, size)
            raise
        self.blocks[address] = Block(size, kept, handle)
        return address

    def release(self, address: int) -> None:
        block = self.blocks.pop(address)
        if block.handle is not None:
            self._driver.unmap(address, block.size, block.handle)
        self._driver.free(address, block.size)

    def held_bytes(self, kept: bool) -> int:
        """Bytes of the mapped blocks."""
        sizes = (one.size for one in self.blocks.values() if one.kept == kept and one.handle)
        return sum(sizes)

    def sleep(self) -> int:
        """Gives the memory back; the bytes that were. A second time changes nothing."""
        driver, freed = self._driver, 0
        driver.synchronize()
        awake = [(at, block) for at, block in self.blocks.items() if block.handle is not None]
        for address, block in awake:
            if block.kept:
                block.host = block.host or driver.pin(block.size)
                driver.save(block.host, address, block.size)
        driver.synchronize()  # until then the device may still use the memory
        for address, block in awake:
            assert block.handle is not None
            driver.unmap(address, block.size, block.handle)
            block.handle = None
            freed += block.size
        self.asleep = True
        return freed

    def wake(self) -> None:
        """Contents are copied while further memory is mapped. A HardwareError leaves it asleep."""
        driver, mapped = self._driver, list[int]()
        try:
            for address, block in self.blocks.items():
                if block.handle is not None:
                    continue
                block.handle = driver.map(address, block.size)
                mapped.append(address)
                if block.kept:
                    driver.load(address, block.host, block.size)
                else:
                    driver.zero(address, block.size)
        except HardwareError:
            driver.synchronize()
            for address in mapped:
                block = self.blocks[address]
                driver.unmap(address, block.size, block.handle or 0)
                block.handle = None
            raise
        driver.synchronize()
        self.asleep = False


class GpuMemory(SleepMemory):
    """The same for torch: what is allocated inside `weights()` or `pages()` lies here."""

    def __init__(self, driver: MemoryDriver) -> None:
        super().__init__(driver)
        self._callbacks: list[Any] = []
        self._weights, self._pages = self._pool(kept=True), self._pool(kept=False)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Contents survive."""
        import torch

        with torch.cuda.use_mem_pool(self._weights):
            yield

    @contextmanager
    def pages(self) -> Iterator[None]:
        """Contents are zero after waking."""
        import torch

        with torch.cuda.use_mem_pool(self._pages):
            yield

    def _pool(self, kept: bool) -> Any:
        """A pool of torch's allocator whose segments come from here; it lives until the process ends."""
        import torch

        def allocate(size: int, device: int, stream: int) -> int:
            try:
                return self.allocate(size, kept)
            except HardwareError:
                return 0  # torch says that memory ran out

        def release(address: int, size: int, device: int, stream: int) -> None:
            self.release(address)

        allocated = ctypes.CFUNCTYPE(
            ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
        )(allocate)
        freed = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
        )(release)
        self._callbacks += [allocated, freed]
        pointers = [ctypes.cast(one, ctypes.c_void_p).value or 0 for one in (allocated, freed)]
        pool = torch.cuda.MemPool(torch._C._cuda_customAllocator(*pointers))
        for one in (
            pool,
            allocated,
            freed,
        ):  # torch calls back when the interpreter is gone otherwise
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        return pool


def sleep_memory(enabled: bool, device: str, ranks: int) -> GpuMemory | None:
    """Memory for the weights of an engine in sleep mode; None without sleep mode or on a CPU."""
    if not enabled or device_kind(device) != "cuda":
        return None
    if ranks > 1:
        raise ConfigError(
            f"enable_sleep_mode is on, and tensor_parallel_size is {ranks}",
            hint="only a model on one GPU can sleep; leave it out",
        )
    return gpu_memory(device)


def gpu_memory(device: str) -> GpuMemory:
    """Memory of a torch device (the current one without an index); its context becomes current."""
    import torch

    from cairn.serve.engine.cuda_memory import CudaMemory

    torch.cuda.init()
    cuda = torch.device("cuda" if device == "auto" else device)
    index = torch.cuda.current_device() if cuda.index is None else cuda.index
    torch.cuda.set_device(index)
    torch.zeros(1, device=torch.device("cuda", index))  # makes the context
    return GpuMemory(CudaMemory(index))
