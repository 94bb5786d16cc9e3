"""The process in which a model's Python program runs: first it gives up what it could do harm with, then it runs it.

    argv: seconds, bytes of memory       stdin: the program       stdout: what it prints

A filter of system calls is put on that allows to compute, to read what is open already and to write to stdout: no file
can be opened, no socket made, no process started or signalled. Nothing can take the filter off again. So every module
that a program may import is imported before. Linux on x86-64 or aarch64; elsewhere it leaves with UNSUPPORTED.
"""

import ctypes
import importlib
import platform
import signal
import sys
import traceback

UNSUPPORTED = 97
# What programs may import; behind the filter nothing else can be read.
MODULES = ("bisect", "collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json",
           "math", "operator", "random", "re", "statistics", "string")  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER_MODE = 1, 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # instructions of the kernel's packet filter
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # refuse: the call fails with EPERM
# read, write, close, fstat, lseek, mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, ioctl,
# mremap, madvise, getpid, exit, gettid, futex, clock_gettime, exit_group, getrandom
CALLS = {
    "x86_64": (0xC000003E, (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 16, 25, 28, 39, 60, 186, 202, 228, 231, 318)),
    "aarch64": (0xC00000B7, (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 29, 216, 233, 172, 93, 178, 98,
                             113, 94, 278)),
}  # fmt: skip


class Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    ]


class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]


def end_with_parent() -> None:
    """A program that waits for ever uses no time of the processor: it must not outlive a trainer that was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit(seconds: int, memory: int) -> None:
    import resource  # not there on every system, and UNSUPPORTED is read on all of them

    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def allow_only(architecture: int, calls: tuple[int, ...]) -> bool:
    """Return whether the filter is in place; every other call fails from now on."""
    wanted = [(LOAD, 0, 0, 4), (JUMP_IF_EQUAL, 0, len(calls) + 1, architecture), (LOAD, 0, 0, 0)]
    wanted += [(JUMP_IF_EQUAL, len(calls) - at, 0, call) for at, call in enumerate(calls)]
    wanted += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    filter = (Instruction * len(wanted))(*wanted)
    program = Program(len(wanted), ctypes.cast(filter, ctypes.POINTER(Instruction)))
    control = ctypes.CDLL(None, use_errno=True).prctl
    if control(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return control(PR_SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0) == 0


def main() -> None:
    known = CALLS.get(platform.machine())
    if sys.platform != "linux" or known is None:
        sys.exit(UNSUPPORTED)
    end_with_parent()
    source = sys.stdin.read()
    for name in MODULES:
        importlib.import_module(name)
    limit(int(sys.argv[1]), int(sys.argv[2]))
    if not allow_only(*known):
        sys.exit(UNSUPPORTED)
    try:
        exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is the answer)
        print("".join(traceback.format_exception_only(error)).strip())
    sys.stdout.flush()


if __name__ == "__main__":
    main()
