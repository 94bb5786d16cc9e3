"""A daemon ends with the process that looked after it, however that went; a stranger's lives on."""

import os
import subprocess
import sys

import psutil
import pytest
from local_job import has_ended, until

from cairn.cluster.orphan_reaper import OrphanReaper

# Starts a daemon with the mark and one without it, and is killed: neither ends by itself.
LOOKS_AFTER = """
import os, signal, subprocess, sys
from cairn.cluster.orphan_reaper import OrphanReaper
mark = {"CAIRN_TEST_MARK": sys.argv[1]}
reaper = OrphanReaper(mark)
for more in (mark, {}):
    env = {**os.environ, **more}
    null = subprocess.DEVNULL
    print(subprocess.Popen(["sleep", "600"], env=env, start_new_session=True, stdout=null).pid)
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.timeout(120)
def test_what_a_killed_process_has_left_behind_is_ended(tmp_path):
    killed = subprocess.run(
        [sys.executable, "-c", LOOKS_AFTER, str(tmp_path)], stdout=subprocess.PIPE, check=False
    )
    daemon, stranger = map(int, killed.stdout.split())
    try:
        until(lambda: has_ended(daemon), "the daemon is gone")
        assert not has_ended(stranger)
    finally:
        psutil.Process(stranger).kill()


@pytest.mark.timeout(120)
def test_it_is_dismissed_though_a_child_still_holds_its_pipe(tmp_path):
    """A child that was forked, not started anew, has all descriptors."""
    reaper = OrphanReaper({"CAIRN_TEST_MARK": str(tmp_path)})
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the test lets go
        os._exit(0)
    reaper.dismiss()
    assert reaper.process.returncode == 0
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)
