"""A real Slurm on loopback for the tests: munge, one controller, several slurmd on this host, each with a fake GPU.

    with slurm(tmp, nodes=3) as rig:      SLURM_CONF is set; with rig.failed("n2") a node fails

Needs root (munge insists on the owner of its files) and Debian's packages; `why_not()` says what is missing.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil

from cairn.core.die_with_parent import die_with_parent

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "mungekey")


def why_not():
    """Why there can be no Slurm here, or None."""
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"needs Slurm: apt-get install slurmctld slurmd slurm-client munge (no {missing[0]})"
    if os.geteuid() != 0:
        return "needs root: slurmd and munge start as root"
    shown = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=False)
    return None if shown.returncode == 0 else "slurmd does not start"


class Rig:
    def __init__(self, root: Path, nodes: int):
        self.root, self.count = root, nodes
        self.processes = {}
        self.conf = root / "slurm.conf"
        ports = _free_ports(nodes + 1)
        self.controller_port, self.node_ports = ports[0], ports[1:]

    @property
    def names(self):
        return [f"n{i + 1}" for i in range(self.count)]

    def start(self):
        for name in ("state", "spool", "log", "run", "dev", "munge"):
            (self.root / name).mkdir()
        self._munge()
        self._write()
        self._spawn("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self.conf)])
        for name in self.names:
            self.revive(name)
        self._wait()

    def revive(self, name):
        self._spawn(name, ["slurmd", "-D", "-N", name, "-f", str(self.conf)])

    @contextlib.contextmanager
    def failed(self, name):
        """A node that says nothing any more: its slurmd is killed, its tasks stand still until the end of the block."""
        frozen = self.tasks(name)
        for task in frozen:
            task.suspend()
        process = self.processes.pop(name)
        process.kill()
        process.wait()
        # What the controller finds out by itself after SlurmdTimeout, or a health check before that.
        self.ask("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=failed")
        try:
            yield
        finally:
            for task in frozen:
                with contextlib.suppress(psutil.Error):
                    task.kill()
            self.revive(name)
            self._wait()

    def ask(self, *command):
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
        return done.stdout

    def tasks(self, name=None):
        """What Slurm runs here for jobs, on one node or on all."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                env = process.environ()
                ours = env.get("SLURM_CONF") == str(self.conf) and "SLURM_JOB_ID" in env
                if ours and name in (None, env.get("SLURMD_NODENAME")):
                    found.append(process)
        return found

    def stop(self):
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _munge(self):
        folder = self.root / "munge"
        key, self.socket = folder / "key", folder / "socket"
        subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True)
        words = [
            f"--key-file={key}",
            f"--socket={self.socket}",
            f"--pid-file={folder}/pid",
            f"--log-file={folder}/log",
            f"--seed-file={folder}/seed",
        ]
        self._spawn("munged", ["munged", "--foreground", "--force", *words])
        _until(lambda: self.socket.exists(), "munge's socket")

    def _write(self):
        host, root = socket.gethostname().split(".")[0], self.root
        for index in range(self.count):
            device = root / "dev" / f"nvidia{index}"
            os.mknod(device, 0o20666, os.makedev(1, 3))  # what looks like a GPU is /dev/null
        lines = [f"NodeName=n{i + 1} Name=gpu File={root}/dev/nvidia{i}" for i in range(self.count)]
        (root / "gres.conf").write_text("\n".join(lines) + "\n")
        nodes = [
            f"NodeName={name} NodeHostName={host} NodeAddr=127.0.0.{at} Port={port} CPUs=2 RealMemory=2000 Gres=gpu:1"
            for at, (name, port) in enumerate(zip(self.names, self.node_ports, strict=True), 1)
        ]
        self.conf.write_text(
            _CONF.format(root=root, host=host, port=self.controller_port, socket=self.socket)
            + "\n".join(nodes)
            + f"\nPartitionName=main Nodes=n[1-{self.count}] Default=YES MaxTime=INFINITE State=UP\n"
            + f"PartitionName=short Nodes=n[1-{self.count}] MaxTime=1 State=UP\n"
        )

    def _spawn(self, name, command):
        log = (self.root / f"{name}.out").open("ab")
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        self.processes[name] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            preexec_fn=die_with_parent,
        )
        log.close()

    def _wait(self):
        def all_idle():
            try:
                lines = self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
            except subprocess.CalledProcessError:  # not up yet
                return False
            return len([line for line in lines if line.endswith(" idle")]) == self.count

        _until(all_idle, f"{self.count} idle nodes")


_CONF = """\
ClusterName=rig
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/ctld.pid
SlurmdPidFile={root}/run/%n.pid
SlurmctldLogFile={root}/log/ctld.log
SlurmdLogFile={root}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=30
InactiveLimit=0
KillWait=2
MinJobAge=300
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=1
JobRequeue=1
EnforcePartLimits=ALL
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
"""


@contextlib.contextmanager
def slurm(root: Path, nodes: int):
    rig = Rig(root, nodes)
    before = os.environ.get("SLURM_CONF")
    try:
        rig.start()
        os.environ["SLURM_CONF"] = str(rig.conf)
        yield rig
    finally:
        rig.stop()
        os.environ.pop("SLURM_CONF", None)
        if before is not None:
            os.environ["SLURM_CONF"] = before


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _until(condition, what, seconds=60):
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            raise RuntimeError(f"no {what} within {seconds} s")
        time.sleep(0.1)
