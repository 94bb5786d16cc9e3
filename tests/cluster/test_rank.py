"""One rank: its place filled in, its lines passed on, its end told; and which of several failures is the first."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_job import until

from cairn.core.rank_failure import (
    RankFailure,
    collective_of,
    first_of,
    found_in,
    last_words,
    mark,
    report,
)

FAILURE = """\
some line
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
  File "/x/torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
  File "/x/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()
RuntimeError: {}"""
LOST = FAILURE.format("Read error [127.0.0.1]:45490: Connection reset by peer")
OWN = FAILURE.format("CUDA error: an illegal memory access")


def rank(code, **env):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "cairn.cluster.rank",
            "--",
            sys.executable,
            "-c",
            code,
            "{rank}/{world}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CAIRN_JOB_HEALTH": "off", **env},
    )


def test_lines_carry_the_rank_and_places_are_filled_in():
    done = rank(
        "import sys, os; print(sys.argv[1]); print(os.environ['OUT'], os.environ['RAW']);"
        "print('10%', '100%', sep='\\r', end='\\r\\n')",  # a bar, and the end of line of a terminal
        RANK="3",
        WORLD_SIZE="8",
        CAIRN_JOB_ENV="OUT",
        OUT="run-{rank}",
        RAW="{rank}",
    )
    assert done.stdout.splitlines() == ["r3| 3/8", "r3| run-3 {rank}", "r3| 100%"]
    assert done.returncode == 0


def test_a_failure_is_told_in_one_line():
    done = rank(
        "raise ValueError('no')", RANK="1", CAIRN_NODE="worker-1", TORCHELASTIC_RESTART_COUNT="2"
    )
    (failure,) = found_in(done.stdout.splitlines())
    assert (done.returncode, failure.status) == (1, 1)
    assert (failure.rank, failure.node, failure.attempt) == (1, "worker-1", 2)
    assert failure.words.startswith("Traceback")
    assert failure.words.endswith("ValueError: no")


def test_a_signal_stays_a_signal_and_a_missing_program_is_a_mistake():
    done = rank("import os; os.kill(os.getpid(), 9)")
    assert done.returncode == -9
    assert found_in(done.stdout.splitlines())[0].status == -9
    done = subprocess.run(
        [sys.executable, "-m", "cairn.cluster.rank", "--", "no-such-program"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 127
    assert found_in(done.stdout.splitlines())[0].verdict.cause == "user"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_program_ends_with_its_rank(number):
    process = subprocess.Popen([sys.executable, "-m", "cairn.cluster.rank", "--", "sleep", "1000"])
    child = until(lambda: psutil.Process(process.pid).children(), "the program runs")[0]
    process.send_signal(number)
    assert process.wait(60) == -number
    until(lambda: not psutil.pid_exists(child.pid) or child.status() == "zombie", "it has gone")


def test_the_first_failure_is_the_one_with_a_reason_of_its_own():
    lost = [RankFailure(rank=i, host="h", at=1.0 + i, words=LOST, meeting="7") for i in range(3)]
    own = RankFailure(rank=3, host="h", at=9.0, words=OWN, meeting="7", collective="all_reduce")
    old = RankFailure(rank=0, host="h", at=0.5, words=OWN, meeting="6")
    assert first_of([*lost, own, old]) == own
    assert first_of(lost) == lost[0]
    alone = [RankFailure(rank=0, host="h", at=i, words=OWN, attempt=1000 * i) for i in range(3)]
    assert first_of(alone) == alone[2]  # each attempt of a program that meets nobody
    assert first_of([]) is None
    assert report(own, 3).startswith(
        "rank 3 on h failed with exit status 1 (last collective: all_reduce); 3 others followed"
    )


def test_collective_and_words():
    assert collective_of(OWN) == "all_reduce"
    assert collective_of("no traceback") == "none"
    assert last_words(OWN.splitlines()).startswith("Traceback")
    assert last_words([str(i) for i in range(99)]) == "\n".join(str(i) for i in range(89, 99))


@given(st.integers(0, 9), st.text(), st.integers(-64, 255))
def test_a_failure_survives_the_log(number, words, status):
    failure = RankFailure(rank=number, host="h", words=words, status=status)
    assert found_in(["r0| something", "12:00 " + mark(failure), mark(failure)[:-1]]) == [failure]


def test_a_long_traceback_is_shortened_and_stays_one_write():
    done = rank(
        "def f(n):\n    if n == 0: raise ValueError('x' * 9000 + 'end')\n    f(n - 1)\nf(100)"
    )
    (failure,) = found_in(done.stdout.splitlines())
    assert failure.words.startswith("Traceback")
    assert failure.words.endswith("xend")
    assert all(len(line) < 4096 for line in done.stdout.splitlines())  # what a pipe takes at once


def test_time_is_when_it_ended():
    before = time.time()
    (failure,) = found_in(rank("raise SystemExit(3)").stdout.splitlines())
    assert before <= failure.at <= time.time()
    assert failure.status == 3
