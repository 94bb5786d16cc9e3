"""Counting semaphores of libc in memory that processes share.

They are the only thing here that orders memory: what was written before `post` is seen after the
wait that takes it, also where the processor reorders stores (ARM). A plain flag in a numpy array
would not promise that. Waiting sleeps in the kernel (futex) and lets other Python threads run.
Linux with glibc or musl; does not know what is counted.
"""

import ctypes
import errno
import time

SEMAPHORE_BYTES = 64  # 32 are used; a cache line of its own keeps ranks from disturbing each other
NANOSECONDS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_quick = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: under a microsecond
_slow = ctypes.CDLL(None, use_errno=True)  # gives it to others while it sleeps
_init, _post, _try_wait = _quick.sem_init, _quick.sem_post, _quick.sem_trywait
_timed_wait = _slow.sem_timedwait
_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_post.argtypes = _try_wait.argtypes = (ctypes.c_void_p,)
_timed_wait.argtypes = (ctypes.c_void_p, ctypes.c_void_p)


class Semaphore:
    """A semaphore at `address`; each process maps it at an address of its own."""

    __slots__ = ("_at",)

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)

    def create(self, value: int) -> None:
        """Initialise; called once by one process before any other uses it."""
        if _init(self._at, 1, value) != 0:
            raise OSError(ctypes.get_errno(), "sem_init")

    def post(self) -> None:
        _post(self._at)

    def try_wait(self) -> bool:
        return _try_wait(self._at) == 0

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return whether it was acquired. A signal ends the wait early with False."""
        when = time.time_ns() + int(seconds * NANOSECONDS)
        limit = _Timespec(when // NANOSECONDS, when % NANOSECONDS)
        if _timed_wait(self._at, ctypes.byref(limit)) == 0:
            return True
        if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "sem_timedwait")
        return False
