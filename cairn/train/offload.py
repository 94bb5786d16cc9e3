"""Activation offloading: what some layers keep for backward waits in the host's memory.

    forward    layer -> saved tensors -> pinned memory, on a stream of their own; the device's memory is used again
    backward   two layers ahead: pinned memory -> device; the layer finds its tensors as if they had never left

    layers     kept  MOVED  kept  MOVED  kept          spread, so that copies in both directions have time

A copy is hidden as long as the layers between two moved ones compute for longer than it takes; if they do not, they
wait, and the memory stays bounded. What comes back is what left, bit by bit, with its strides and alignment: a product
may round otherwise with others. A tensor that several operations save is moved once, and so is one that is a part of
another; parameters and small tensors stay where they are. Works on any device; for one that computes in the host's
memory it is a way to test. Knows no model: a layer is something to call.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cairn.core.errors import HardwareError
from cairn.core.units import format_bytes
from cairn.train.recompute_kinds import MOVING

SMALL = 1 << 20  # bytes up to which a tensor stays: its copy would cost more than its place
SLAB = 1 << 28  # bytes that are pinned at a time
LINE = 64  # bytes: what torch's allocators align to, at least
MOST_GAPS = 4  # times its own size may be moved with a tensor that has gaps


class Plan(NamedTuple):
    """Offloading decision of a run."""

    layers: int  # how many are moved
    most_bytes: float  # of the host's memory


def spread(layers: int, moved: int) -> frozenset[int]:
    """Indices of offloaded layers, evenly spaced; the last layer, needed first in backward, only with all others."""
    return frozenset(n * layers // moved for n in range(moved))


class HostMemory:
    """Pinned memory that is taken once and used again by every step: a stack that is empty after each backward."""

    def __init__(self, pinned: bool, most: float, slab: int = SLAB) -> None:
        """`most`: bytes that may be taken."""
        self.pinned, self.most, self.slab = pinned, most, slab
        self.slabs: list[Tensor] = []
        self.used = self.holders = 0

    def take(self, size: int) -> list[Tensor]:
        """So many bytes, in one or more parts."""
        parts: list[Tensor] = []
        while size:
            number, begin = divmod(self.used, self.slab)
            if number == len(self.slabs):
                self.slabs.append(self._new())
            count = min(size, self.slab - begin)
            parts.append(self.slabs[number][begin : begin + count])
            self.used, size = self.used + count, size - count
        self.holders += 1
        return parts

    def release(self) -> None:
        """Release one user of the memory."""
        self.holders -= 1
        if not self.holders:
            self.used = 0

    def _new(self) -> Tensor:
        taken = len(self.slabs) * self.slab
        hint = "use recompute full in place of offload_activations, or a smaller data.microbatch"
        if taken + self.slab > self.most:
            raise HardwareError(
                f"offloaded activations need more than {format_bytes(taken)}, and "
                f"{format_bytes(int(self.most))} of the host's memory may be used",
                hint=f"set precision.offload_gib; or {hint}",
            )
        if self.pinned:
            return _pinned(self.slab, hint)
        return torch.empty(self.slab, dtype=torch.uint8)


def _pinned(size: int, hint: str) -> Tensor:
    """Memory that is there before it is pinned: several times faster than torch's allocator of pinned memory."""
    cuda = cast(Any, torch.cuda.cudart())
    memory = torch.empty(size, dtype=torch.uint8)
    address = memory.fill_(0).data_ptr()  # by several threads
    if (error := cuda.cudaHostRegister(address, size, 0)) != cuda.cudaError.success:
        raise HardwareError(
            f"the driver does not pin {format_bytes(size)} for offloaded activations: {error}",
            hint=f"raise the limit of locked memory (ulimit -l); or {hint}",
        )
    weakref.finalize(memory, cuda.cudaHostUnregister, address)
    return memory


class _OffloadedPiece:
    """A piece of a layer's memory: on the device, on the host, or back."""

    def __init__(self, source: Tensor, memory: HostMemory) -> None:
        self.here: Tensor | None = source  # None: it is on the host alone
        self.device, self.size = source.device, len(source)
        self.phase = source.data_ptr() % LINE
        self.parts = memory.take(self.size)
        weakref.finalize(self, memory.release)

    def send(self) -> None:
        for part, mine in self._pairs():
            part.copy_(mine, non_blocking=True)

    def fetch(self) -> None:
        for part, mine in self._pairs():
            mine.copy_(part, non_blocking=True)

    def room(self) -> Tensor:
        """Device buffer with the original alignment, because some libraries' matmuls round by alignment."""
        room = torch.empty(self.phase + self.size, dtype=torch.uint8, device=self.device)
        return room[self.phase :]

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.here is not None
        return zip(self.parts, self.here.split([len(part) for part in self.parts]), strict=True)


class _Saved(NamedTuple):
    """Placeholder that autograd saves instead of a tensor."""

    moved: _OffloadedPiece
    begin: int  # bytes from the start of what was moved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        assert self.moved.here is not None
        whole = self.moved.here[self.begin :].view(self.dtype)
        return whole.as_strided(self.shape, self.stride)


class _Layer:
    """The saved tensors of one layer in one pass."""

    def __init__(self, owner: "Offload", module: nn.Module, previous: "_Layer | None") -> None:
        """`previous`: the moved layer before this one."""
        self.owner, self.module, self.previous = owner, module, previous
        # Autograd alone keeps them alive: what backward has used goes.
        self.moved: list[weakref.ref[_OffloadedPiece]] = []
        self.spans: list[tuple[int, int, _OffloadedPiece]] = []  # by address, while forward runs
        self.stays: set[int] | None = None
        self.ready: Any = (
            None  # the event that those wait for who use or free what is on the device
        )
        self.on_host = False

    def pack(self, tensor: Tensor) -> _Saved | Tensor:
        begin = tensor.data_ptr()
        end = begin + _reach(tensor) * tensor.itemsize
        if end - begin <= SMALL or self._stays(tensor):
            return tensor
        for first, last, moved in self.spans:
            if first <= begin and end <= last:
                where = begin - first
                return _Saved(moved, where, tensor.dtype, tensor.shape, tensor.stride())
        source = _bytes_around(tensor)
        stride = tensor.stride()
        if source is None:
            packed = tensor.contiguous()
            source, stride = packed.view(-1).view(torch.uint8), packed.stride()
            first = begin
        else:
            first = source.data_ptr()
        moved = _OffloadedPiece(source, self.owner.memory)
        with self.owner.beside():
            moved.send()
        self.moved.append(weakref.ref(moved))
        if stride == tensor.stride():
            self.spans.append((first, first + len(source), moved))
        return _Saved(moved, begin - first, tensor.dtype, tensor.shape, stride)

    def unpack(self, saved: _Saved | Tensor) -> Tensor:
        if isinstance(saved, _Saved):
            self.fetch()
            self.wait()
            return saved.tensor()
        return saved

    def sent(self) -> None:
        """Forward is through with this layer, and its last copy has been asked for."""
        self.spans.clear()
        self.ready = self.owner.event()

    def leave(self) -> None:
        """Free the device memory for work that is ordered after the copies."""
        self.wait()
        for moved in self._alive():
            moved.here = None
        self.on_host = True

    def fetch(self) -> None:
        """Back to the device, once."""
        if not self.on_host:
            return
        self.on_host, coming = False, list(self._alive())
        for moved in coming:
            moved.here = moved.room()
        with self.owner.beside():
            for moved in coming:
                moved.fetch()
        self.ready = self.owner.event()

    def wait(self) -> None:
        """The stream that computes waits for the copies; the host does not."""
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)
            self.ready = None

    def _alive(self) -> Iterator[_OffloadedPiece]:
        return (moved for one in self.moved if (moved := one()) is not None)

    def _stays(self, tensor: Tensor) -> bool:
        """Parameters are there anyway. Looked up while the layer runs: FSDP has made them whole by then."""
        if self.stays is None:
            self.stays = {p.untyped_storage().data_ptr() for p in self.module.parameters()}
        return tensor.untyped_storage().data_ptr() in self.stays


class Offload:
    """Offloading of a sequence of layers, one microbatch after another."""

    def __init__(
        self, device: torch.device | str, layers: Iterable[int], memory: HostMemory
    ) -> None:
        """`layers`: which are moved, by their place in the run."""
        self.layers, self.memory = frozenset(layers), memory
        self.stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
        self.leaving: deque[_Layer] = deque()  # their copies may be on the way
        self.latest: _Layer | None = None
        self.place = 0

    def begin(self) -> None:
        """Forward starts at the first layer."""
        self._settle(0)
        self.latest, self.place = None, 0

    def run(self, layer: nn.Module, call: Callable[[], Any]) -> Any:
        """Run a layer; the last tensor that `call` returns is the first that backward reaches."""
        place, self.place = self.place, self.place + 1
        if not torch.is_grad_enabled():
            return call()
        if place not in self.layers:
            out = call()
            self._fetch_before(out[-1], [self.latest])
            return out
        own = self.latest = _Layer(self, layer, self.latest)
        with saved_tensors_hooks(own.pack, own.unpack):
            out = call()
        own.sent()
        self.leaving.append(own)
        self._settle(MOVING - 1)
        self._fetch_before(out[-1], [own, own.previous])
        return out

    def _fetch_before(self, out: Tensor, layers: list[_Layer | None]) -> None:
        """When backward comes to a layer, its tensors and those of the moved layer before it come back."""

        def fetch(_: Tensor) -> None:
            for layer in layers:
                if layer is not None:
                    layer.fetch()

        if out.requires_grad and any(layers):
            out.register_hook(fetch)

    def _settle(self, most: int) -> None:
        """Wait until at most `most` layers are being copied out."""
        while len(self.leaving) > most:
            self.leaving.popleft().leave()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context of the copy stream, ordered after all launched work."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def event(self) -> Any:
        """Event after the last copy."""
        return None if self.stream is None else self.stream.record_event()


def _bytes_around(tensor: Tensor) -> Tensor | None:
    """The memory that it lies in, so that it comes back with its strides: products round by their layout.

    Of a tensor with gaps, all of its storage, in which its neighbours lie, too; None where that is much larger.
    """
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.itemsize
    begin, count = tensor.storage_offset() * tensor.itemsize, _reach(tensor) * tensor.itemsize
    if count != size:
        begin, count = 0, storage.nbytes()
        if count > MOST_GAPS * size:
            return None
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, begin, (count,), (1,))


def _reach(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
