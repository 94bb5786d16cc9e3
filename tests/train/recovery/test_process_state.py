"""Whether a process of this machine has ended, or is about to."""

import signal
import subprocess
import sys

from cairn.train.recovery.process_state import is_ending, process_state

WITH_MEMORY = (
    "import sys; held = bytearray(b'x' * (256 << 20)); print(flush=True); sys.stdin.read()"
)


def test_a_killed_process_is_ending_from_the_kill_on():
    child = subprocess.Popen(
        [sys.executable, "-c", WITH_MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert not is_ending(child.pid)
        child.send_signal(signal.SIGSTOP)
        child.send_signal(signal.SIGKILL)
        assert is_ending(child.pid)  # at once, where its state may still be T or R
        child.wait()
    assert is_ending(child.pid)
    assert process_state(child.pid) == ""
