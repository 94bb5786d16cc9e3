"""The virtual memory of CUDA's driver, through ctypes: addresses are reserved apart from the memory behind them."""

import ctypes

from cairn.core.errors import HardwareError

_DEVICE, _PINNED, _READ_WRITE = (
    1,
    1,
    3,
)  # CU_MEM_LOCATION_TYPE_DEVICE, .._ALLOCATION_TYPE_PINNED, .._PROT_READWRITE
_OUT_OF_MEMORY = 2
_ON_HOST, _ON_DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, .._DEVICE
_MOST_PITCH = 2**31 - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: what is copied, from where, to where."""

    _fields_ = [
        (f"{end}_{name}", kind)
        for end in ("source", "target")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("type", ctypes.c_int),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


class CudaMemory:
    """Virtual memory of one device through the CUDA driver; the calling thread needs its context."""

    def __init__(self, device: int) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise HardwareError(f"the CUDA driver cannot be opened: {error}") from None
        where = _Location(_DEVICE, device)
        self._properties = _Properties(_PINNED, 0, where, None)
        self._access = _Access(where, _READ_WRITE)
        granularity = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            0,
        )
        self.granularity = granularity.value

    def reserve(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), _size(size), _size(0), _at(0), _at(0)
        )
        return address.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", _at(address), _size(size))

    def map(self, address: int, size: int) -> int:
        handle = ctypes.c_uint64()
        properties = ctypes.byref(self._properties)
        self._call("cuMemCreate", ctypes.byref(handle), _size(size), properties, _at(0))
        mapped = False
        try:
            self._call("cuMemMap", _at(address), _size(size), _size(0), handle, _at(0))
            mapped = True
            self._call(
                "cuMemSetAccess", _at(address), _size(size), ctypes.byref(self._access), _size(1)
            )
        except HardwareError:
            if mapped:  # else the address could be neither freed nor mapped again
                self._cuda.cuMemUnmap(_at(address), _size(size))
            self._cuda.cuMemRelease(handle)
            raise
        return handle.value

    def unmap(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemUnmap", _at(address), _size(size))
        self._call("cuMemRelease", _at(handle))

    def pin(self, size: int) -> int:
        host = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(host), _size(size))
        return host.value or 0

    def save(self, host: int, address: int, size: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), _at(address), _size(size), None)

    def load(self, address: int, host: int, size: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", _at(address), ctypes.c_void_p(host), _size(size), None)

    def copy_rows(
        self,
        *,
        host: int,
        device: int,
        pitch: int,
        width: int,
        rows: int,
        to_host: bool,
        stream: int,
    ) -> None:
        """Rows of `width` bytes, `pitch` apart on the device and one behind the other on the host."""
        if pitch > _MOST_PITCH:  # the copy engine counts in 31 bits
            for row in range(rows):
                self.copy_rows(
                    host=host + row * width,
                    device=device + row * pitch,
                    pitch=width,
                    width=width,
                    rows=1,
                    to_host=to_host,
                    stream=stream,
                )
            return
        on_device = (0, 0, _ON_DEVICE, None, device, None, pitch)
        on_host = (0, 0, _ON_HOST, host, 0, None, width)
        ends = (*on_device, *on_host) if to_host else (*on_host, *on_device)
        copy = _Copy2D(*ends, width, rows)
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream))

    def zero(self, address: int, size: int) -> None:
        self._call("cuMemsetD8Async", _at(address), ctypes.c_ubyte(0), _size(size), None)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status == 0:
            return
        name_pointer = ctypes.c_char_p()
        self._cuda.cuGetErrorName(status, ctypes.byref(name_pointer))
        word = (name_pointer.value or b"?").decode()
        hint = "another model may have taken the memory" if status == _OUT_OF_MEMORY else None
        raise HardwareError(f"{name} of the CUDA driver failed: {word} ({status})", hint=hint)


def _at(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(address)


def _size(size: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(size)
