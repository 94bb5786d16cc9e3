"""A second process for a lab: echoes bytes or burns a fixed amount of work, and says what it cost.

    parent ──go──> partner: the same work in each ──one line of JSON──> Burned(wall_s, cpu_s, waits, pushed)

Started as a program of its own (standard library only, about 50 ms), because a process that has threads of torch must
not fork. Every wait has a limit; a partner ends with the block that started it.
"""

import contextlib
import hashlib
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from typing import NamedTuple

BLOCK = bytes(64 << 10)
PATIENCE_S = 30.0


class Burned(NamedTuple):
    wall_s: float
    cpu_s: float
    waits: int  # voluntary context switches: it had to wait
    pushed: int  # involuntary ones: another was given the core


def burn(blocks: int) -> None:
    """Work without memory traffic and without the interpreter's lock: SHA-256 of 64 KiB each."""
    for _ in range(blocks):
        hashlib.sha256(BLOCK).digest()


def blocks_for(seconds: float) -> int:
    """How many blocks take about so long on this core, when it is free."""
    burn(20)
    best = min(_timed(40) for _ in range(5)) / 40
    return max(10, round(seconds / best))


def burn_together(blocks: int, cpus: Sequence[Sequence[int]]) -> list[Burned]:
    """One partner for each set of cores; all begin at once with the same work."""
    with contextlib.ExitStack() as stack:
        partners = [stack.enter_context(started("burn", str(blocks), cpus=own)) for own in cpus]
        for partner in partners:
            _line(partner)  # "ready": it has started
        for partner in partners:
            assert partner.stdin is not None
            partner.stdin.write(b"g")
            partner.stdin.flush()
        return [Burned(*json.loads(_line(partner))) for partner in partners]


@contextlib.contextmanager
def started(
    mode: str, *arguments: str, cpus: Sequence[int] = (), pass_fds: Sequence[int] = ()
) -> Generator["subprocess.Popen[bytes]"]:
    """A partner that is gone after the block; `cpus` are the cores it may use, all when empty."""
    own = ",".join(map(str, cpus)) or "all"
    # -P: the folder of this file is not a place to import modules from.
    command = [sys.executable, "-P", __file__, own, mode, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds
    ) as partner:
        try:
            yield partner
        finally:
            partner.kill()


def allowed_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _line(partner: "subprocess.Popen[bytes]") -> bytes:
    assert partner.stdout is not None
    ready, _, _ = select.select([partner.stdout], [], [], PATIENCE_S)
    line = partner.stdout.readline() if ready else b""
    if not line:
        raise TimeoutError(f"partner {partner.args} said nothing within {PATIENCE_S:g} s")
    return line


def _timed(blocks: int) -> float:
    began = time.perf_counter()
    burn(blocks)
    return time.perf_counter() - began


def _burn_here(blocks: int) -> None:
    burn(20)
    print("ready", flush=True)
    if not sys.stdin.buffer.read(1):
        return  # the parent has gone
    before = resource.getrusage(resource.RUSAGE_SELF)
    began, spent = time.perf_counter(), time.process_time()
    burn(blocks)
    wall, cpu = time.perf_counter() - began, time.process_time() - spent
    after = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            [wall, cpu, after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw]
        )
    )


def _echo_here(source: int, target: int, rounds: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(rounds):
        if not os.read(source, 1):
            return
        os.write(target, b"x")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before, flush=True)


def _main(own: str, mode: str, *arguments: str) -> None:
    if own != "all":
        os.sched_setaffinity(0, {int(cpu) for cpu in own.split(",")})
    numbers = [int(text) for text in arguments]
    {"burn": _burn_here, "echo": _echo_here}[mode](*numbers)


if __name__ == "__main__":
    _main(*sys.argv[1:])
