"""Process of one rank, run by an agent: expands placeholders, starts the program, forwards its output, reports its end.

    python -m cairn.cluster.rank -- cairn train tiny-cpu --dp {world}
    r0| step 1 ...                                    lines of the program, with the rank that wrote them
    ::cairn-rank-failed:: {...}                       one line, if it failed

Dies with its agent, and the program dies with it, whatever the signal: a node that is killed leaves nothing behind.
Knows nothing about what the program does.
"""

import collections
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from cairn.cluster.health import fitness
from cairn.core import end_reason
from cairn.core.die_with_parent import die_with_parent
from cairn.core.oom_kills import oom_kills
from cairn.core.rank_failure import RankFailure, collective_of, last_words, mark, shortened

_OWN_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch writes it before every line of a traceback
UNFIT = 69  # the node must not be used: EX_UNAVAILABLE
KEPT = 400  # lines of the program, for the traceback
LINE = 3500  # bytes: longer lines of several ranks would be torn in the log they share


def main(argv: list[str]) -> int:
    command = argv[1:] if argv[:1] == ["--"] else argv
    die_with_parent()
    values = place(os.environ)
    program = [filled(word, values) for word in command]
    if program[0] == "cairn":
        program = [sys.executable, "-m", "cairn", *program[1:]]
    return run(program, values) if _fit(values) else UNFIT


def _fit(values: Mapping[str, str]) -> bool:
    """Check this node, print its problems, and return whether it may be used."""
    complaints, refused = fitness(os.environ, _writable())
    if complaints:
        rank, reasons = int(values["rank"]), "; ".join(complaints)
        _write(f"r{rank}| warning: this node is not fit for work: {reasons}")
        if refused:
            ended = end_reason.EndReason(
                cause="hardware", why=f"the node is not fit for work: {reasons}"
            )
            _write(mark(_failure(rank, values, UNFIT, [], ended)))
    return not refused


def _writable() -> Path:
    """The job's checkpoint folder if it exists, else the temporary folder."""
    folder = os.environ.get("CAIRN_JOB_CHECKPOINTS", "")
    return Path(folder) if folder and Path(folder).is_dir() else Path(tempfile.gettempdir())


def place(env: Mapping[str, str]) -> dict[str, str]:
    """Values of {world} and the other placeholders, from torch elastic's variables or defaults for a single rank."""
    return {
        "world": env.get("WORLD_SIZE", "1"),
        "rank": env.get("RANK", "0"),
        "node": env.get("CAIRN_NODE", env.get("GROUP_RANK", "0")),
        "nodes": env.get("GROUP_WORLD_SIZE", "1"),
        "attempt": str(attempt(env)),
        "job": env.get("CAIRN_JOB", "job"),
        "folder": env.get("CAIRN_JOB_CHECKPOINTS", ""),
    }


def attempt(env: Mapping[str, str]) -> int:
    """Attempt number: restarts by the supervisor, and by the agent within them."""
    outer, inner = env.get("CAIRN_ATTEMPT", "0"), env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return 1000 * int(outer) + int(inner)


def filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def run(program: list[str], values: Mapping[str, str]) -> int:
    rank = int(values["rank"])
    env, oom_before = _environment(values), oom_kills()
    try:
        child = subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
            env=env,
        )
    except OSError as error:
        lines = [f"cannot start {program[0]}: {error.strerror}"]
        _write(mark(_failure(rank, values, 127, lines, None)))
        return 127
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: child.send_signal(received))
    tail: collections.deque[str] = collections.deque(maxlen=KEPT)
    assert child.stdout is not None
    reader = threading.Thread(target=_pump, args=(child.stdout, rank, tail), daemon=True)
    reader.start()
    status = child.wait()
    reader.join(5)  # a grandchild that lives on may hold the pipe
    if status != 0:
        ended = end_reason.read_end_reason(env[end_reason.VARIABLE])
        failure = _failure(rank, values, status, list(tail), ended, oom_kills() - oom_before)
        _write(mark(failure))
    if status < 0:  # so that the agent sees the signal, too
        if -status in (signal.SIGTERM, signal.SIGINT):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _environment(values: Mapping[str, str]) -> dict[str, str]:
    """The job's own variables are filled in; no others."""
    named = os.environ.get("CAIRN_JOB_ENV", "").split()
    own = {name: filled(os.environ[name], values) for name in named if name in os.environ}
    ours = {
        "CAIRN_JOB_ATTEMPT": values["attempt"],
        "CAIRN_NODE_LAUNCHER": str(os.getppid()),
        end_reason.VARIABLE: str(Path(tempfile.gettempdir(), f"cairn-ended-{uuid.uuid4().hex}")),
    }
    return {**os.environ, **own, **ours}


def _pump(stream: IO[bytes], rank: int, tail: collections.deque[str]) -> None:
    for raw in stream:
        line = raw.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
        line = _OWN_RANK.sub("", line)
        tail.append(line)
        _write(f"r{rank}| {line}")


def _write(line: str) -> None:
    """Write a line in one system call, so that lines of different ranks do not interleave."""
    data = line.encode()
    data = data if len(data) <= LINE or line.startswith("::") else data[:LINE] + b" ..."
    with contextlib.suppress(OSError):  # the reader has ended
        os.write(1, data + b"\n")


def _failure(
    rank: int,
    values: Mapping[str, str],
    status: int,
    lines: list[str],
    ended: end_reason.EndReason | None,
    oom: int = 0,
) -> RankFailure:
    words = last_words(lines) if ended is None or not ended.words else ended.words
    failure = RankFailure(
        rank=rank,
        host=socket.gethostname(),
        node=os.environ.get("CAIRN_NODE", ""),
        attempt=int(values["attempt"]),
        at=time.time(),
        status=status,
        meeting=os.environ.get("MASTER_PORT", ""),
        oom_kills=max(0, oom),
        machine=os.environ.get("CAIRN_MACHINE") or os.environ.get("SLURMD_NODENAME", ""),
        collective=collective_of(words),
        words=shortened(words),
    )
    if ended is not None:
        failure = msgspec.structs.replace(
            failure, cause=ended.cause, why=ended.why, step=ended.step, collective=ended.collective
        )
    folder = os.environ.get("CAIRN_JOB_FAILURES")
    if folder:
        with contextlib.suppress(OSError):
            Path(folder).mkdir(exist_ok=True)
            fresh = Path(folder, f".{rank}.{os.getpid()}")
            fresh.write_text(mark(failure) + "\n")
            fresh.replace(Path(folder, f"{failure.attempt}-{rank}-{os.getpid()}.json"))
    return failure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
