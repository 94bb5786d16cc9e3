"""Why a process ended, from what real programs say when they end."""

import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.exit_cause import CAUSES, ExitEvidence, classify

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2917"


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (ExitEvidence(status=0), "finished"),
        (ExitEvidence(status=-9, oom_kills=1), "oom"),
        (ExitEvidence(status=-9), "killed"),
        (ExitEvidence(status=137), "killed"),
        (ExitEvidence(status=-15), "preemption"),
        (ExitEvidence(status=143), "preemption"),
        (ExitEvidence(status=1, words="x", notice=True), "preemption"),
        (ExitEvidence(status=1, words="torch.OutOfMemoryError: CUDA out of memory. Tried"), "oom"),
        (ExitEvidence(status=1, words="MemoryError"), "oom"),
        (ExitEvidence(status=1, words="NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus"), "hardware"),
        (ExitEvidence(status=1, words="OSError: [Errno 5] Input/output error: '/data/x'"), "hardware"),
        (ExitEvidence(status=1, words=LOST), "network"),
        (ExitEvidence(status=1, words="Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8)"), "network"),
        (ExitEvidence(status=1, words="KeyError: 'embedding'"), "user"),
        (ExitEvidence(status=2, words="error: no such flag", user_error=True), "user"),
        (ExitEvidence(status=-11), "user"),
        (ExitEvidence(status=-7), "hardware"),
        (ExitEvidence(status=None, silent=True), "hang"),
        (ExitEvidence(stuck=True), "hang"),
        (ExitEvidence(status=1, words="rank 1 holds other numbers", corrupted=True), "corruption"),
        (ExitEvidence(status=-9, node_lost=True), "hardware"),
        (ExitEvidence(status=3, words="what?"), "unknown"),
    ],
)  # fmt: skip
def test_each_end_has_its_cause(evidence, cause):
    verdict = classify(evidence)
    assert verdict.cause == cause
    assert verdict.why


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("raise TypeError('no')", "user"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "preemption"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "network"),
        ("bytearray(1 << 62)", "oom"),
        ("open('/nowhere/at/all')", "user"),
    ],
)
def test_real_programs(program, cause):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert classify(ExitEvidence(status=done.returncode, words=done.stderr)).cause == cause


@given(
    st.builds(
        ExitEvidence, status=st.none() | st.integers(-64, 255), words=st.text(max_size=80),
        oom_kills=st.integers(0, 2), notice=st.booleans(), silent=st.booleans(),
        stuck=st.booleans(), user_error=st.booleans(), corrupted=st.booleans(),
        node_lost=st.booleans(),
    )
)  # fmt: skip
def test_there_is_always_one_known_cause_and_a_reason(evidence):
    verdict = classify(evidence)
    assert verdict.cause in CAUSES
    assert verdict.why
    if evidence.status not in (0, None) and verdict.cause == "finished":
        raise AssertionError("a failure was called success")


def test_signals_are_named():
    assert "SIGABRT" in classify(ExitEvidence(status=-signal.SIGABRT)).why
