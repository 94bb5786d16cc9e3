import ctypes
import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path

from cairn.labs.exercises.grading import Attempt, case, equal, require
from cairn.labs.needs import c_compiler

LIMIT_S = 2.0
COUNT = 300
PRODUCER = """
import ctypes, mmap, sys, time
lib, file = ctypes.CDLL(sys.argv[1]), open(sys.argv[2], "r+b")
memory = mmap.mmap(file.fileno(), 0)
at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
sent, end = 0, time.monotonic() + 10
while sent < int(sys.argv[3]) and time.monotonic() < end:
    if lib.ring_push(at, ctypes.c_int64(sent)):
        sent += 1
    else:
        time.sleep(0)
"""
BUILT: dict[Path, ctypes.CDLL] = {}


def library(file: Path) -> ctypes.CDLL:
    if file not in BUILT:
        shared_object = file.with_suffix(".so")
        command = [
            c_compiler() or "cc",
            "-std=c11",
            "-O1",
            "-shared",
            "-fPIC",
            str(file),
            "-o",
            str(shared_object),
        ]
        process = subprocess.run(command, capture_output=True, text=True)
        require(
            process.returncode == 0,
            f"it does not compile: {process.stderr[:300]}",
            f"无法编译：{process.stderr[:300]}",
        )
        BUILT[file] = ctypes.CDLL(str(shared_object))
    return BUILT[file]


class Ring:
    def __init__(self, file: Path) -> None:
        self.lib = library(file)
        self.memory = ctypes.create_string_buffer(self.lib.ring_bytes() + 64)
        self.at = ctypes.c_void_p((ctypes.addressof(self.memory) + 63) // 64 * 64)

    def push(self, value: int) -> int:
        return self.lib.ring_push(self.at, ctypes.c_int64(value))

    def pop(self) -> int | None:
        value = ctypes.c_int64(-1)
        return value.value if self.lib.ring_pop(self.at, ctypes.byref(value)) else None


@case("it compiles, and an empty ring has nothing", "能编译，空环无数据")
def empty(attempt: Attempt) -> None:
    equal(Ring(attempt).pop(), None)


@case("eight values fit, the ninth waits", "放得下 8 个，第 9 个被拒绝")
def full(attempt: Attempt) -> None:
    ring = Ring(attempt)
    equal([ring.push(n) for n in range(9)], [1] * 8 + [0])
    equal([ring.pop() for _ in range(9)], [*range(8), None])


@case("values come out in order, many times around", "多次绕圈仍保持顺序")
def around(attempt: Attempt) -> None:
    ring, out = Ring(attempt), []
    for n in range(100):
        require(ring.push(n), "push failed with room left", "有空位却入队失败")
        if n % 3:
            out += [ring.pop(), ring.pop()] if n % 3 == 2 else [ring.pop()]
    equal([n for n in out if n is not None], list(range(len(out))))


def passing(file: Path) -> Ring:
    """A ring that one value came through; otherwise two sides would wait for each other until the limit."""
    ring = Ring(file)
    require(ring.push(0) and ring.pop() == 0, "one value does not pass", "一个值都传不过去")
    return ring


@case("two threads pass 500 numbers in order", "两个线程按序传递 500 个数")
def threads(attempt: Attempt) -> None:
    ring, out, count = passing(attempt), [], 500
    end = time.monotonic() + LIMIT_S

    def produce() -> None:
        sent = 0
        while sent < count and time.monotonic() < end:
            if ring.push(sent):
                sent += 1
            else:
                time.sleep(0)

    thread = threading.Thread(target=produce)
    thread.start()
    while len(out) < count and time.monotonic() < end:
        ended = not thread.is_alive()  # asked first: what it sent is there before it ends
        value = ring.pop()
        if value is not None:
            out.append(value)
        elif ended:
            break
        else:
            time.sleep(0)
    end = 0.0  # a producer that finds no room for ever ends with the consumer
    thread.join()
    require(
        out == list(range(count)), f"{len(out)} values, not in order", f"{len(out)} 个值，顺序不对"
    )


@case("two processes pass 300 numbers through shared memory", "两个进程经共享内存按序传递 300 个数")
def processes(attempt: Attempt) -> None:
    passing(attempt)
    file = attempt.with_suffix(".ring")
    file.write_bytes(bytes(library(attempt).ring_bytes()))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as memory:
        command = [sys.executable, "-S", "-c", PRODUCER]
        arguments = [str(attempt.with_suffix(".so")), str(file), str(COUNT)]
        out = _popped(library(attempt), memory, subprocess.Popen([*command, *arguments]))
    right = out == list(range(COUNT))
    require(right, f"{len(out)} values, not in order", f"{len(out)} 个值，顺序不对")


def _popped(lib: ctypes.CDLL, memory: mmap.mmap, producer: "subprocess.Popen[bytes]") -> list[int]:
    """What comes until all are there or the producer has ended and nothing is left; never more than are sent."""
    start = ctypes.c_char.from_buffer(memory)
    at, value, out = ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_int64(-1), []
    while len(out) < COUNT:
        ended = producer.poll() is not None  # asked first: what it sent is there before it ends
        if lib.ring_pop(at, ctypes.byref(value)):
            out.append(value.value)
        elif ended:
            break
        else:
            time.sleep(0)
    producer.kill()
    producer.wait()
    del start  # a map with a pointer to it cannot be closed
    return out
