import ctypes
import subprocess
import threading
import time
from pathlib import Path

from cairn.labs.exercises.grading import Attempt, case, equal, require
from cairn.labs.needs import c_compiler

LIMIT_S = 2.0
BUILT: dict[Path, ctypes.CDLL] = {}


def library(file: Path) -> ctypes.CDLL:
    if file not in BUILT:
        made = file.with_suffix(".so")
        command = [
            c_compiler() or "cc",
            "-std=c11",
            "-O1",
            "-shared",
            "-fPIC",
            str(file),
            "-o",
            str(made),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        require(
            done.returncode == 0,
            f"it does not compile: {done.stderr[:300]}",
            f"无法编译：{done.stderr[:300]}",
        )
        BUILT[file] = ctypes.CDLL(str(made))
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


@case("two threads pass 500 numbers in order", "两个线程按序传递 500 个数")
def threads(attempt: Attempt) -> None:
    ring, out, count = Ring(attempt), [], 500
    require(ring.push(0) and ring.pop() == 0, "one value does not pass", "一个值都传不过去")
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
        value = ring.pop()
        if value is None:
            time.sleep(0)
        else:
            out.append(value)
    thread.join()
    require(
        out == list(range(count)), f"{len(out)} values, not in order", f"{len(out)} 个值，顺序不对"
    )
