"""MPI beside the other backends: mpi4py on the memory of torch's tensors, in ranks that mpiexec has started.

    cairn comm bench --> mpiexec -n RANKS python -m cairn.comm.bench_mpi_rank SPECS ROWS
                             every rank: the measurement of `bench_sweep`, with MPI as one more group
    progress and rows come back by stdout and a file; a rank that fails ends all of them

A comparison for those who know MPI, not a tool: nothing else in Cairn uses MPI.

`MpiCalls` has the functions of torch.distributed that `bench_operations` uses. A missing MPI (mpi4py, mpiexec), or a
type that MPI does not have, is a reason to leave it out, not an error.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.comm.bench_ranks import BenchRankFailed
from cairn.comm.bench_spec import BenchRow, Spec

if TYPE_CHECKING:
    import torch

NO_TYPES = ("half", "bfloat16")  # of ours, that MPI cannot add
PROGRESS = "cairn-bench-progress "
RANK = "cairn.comm.bench_mpi_rank"  # the program of each rank
# In a process of its own: a library that is loaded stays, and may not like to be started twice.
LOADS = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
LAST_WORDS = 2000  # characters of stderr


def program() -> str | None:
    """The mpiexec that belongs to this Python, or the first on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def missing() -> str | None:
    """Why there is no MPI here."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py, and an MPI such as mpich)"
    if program() is None:
        return "there is no mpiexec"
    tried = subprocess.run(
        [sys.executable, "-c", LOADS], capture_output=True, text=True, check=False
    )
    last = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
    return f"mpi4py cannot load MPI ({last})" if tried.returncode else None


def run_mpi(
    ranks: int, specs: list[Spec], progress: Callable[[int], None], timeout_s: float
) -> list[BenchRow]:
    """`bench_sweep.measure` on ranks of MPI; the rows of rank 0."""
    starter = program()
    assert starter is not None, "missing() was asked before"
    with tempfile.TemporaryDirectory(prefix="cairn-mpi-") as name:
        given, rows, words = (Path(name) / part for part in ("specs.json", "rows.json", "stderr"))
        given.write_bytes(msgspec.json.encode(specs))
        command = [starter, "-n", str(ranks), sys.executable, "-m", RANK, str(given), str(rows)]
        status = _follow(command, words, progress, timeout_s)
        if status != 0 or not rows.exists():
            said = words.read_text(errors="replace").strip()[-LAST_WORDS:]
            raise BenchRankFailed(f"`mpiexec -n {ranks}` ended with status {status}:\n{said}")
        return msgspec.json.decode(rows.read_bytes(), type=list[BenchRow])


def _follow(
    command: list[str], words: Path, progress: Callable[[int], None], timeout_s: float
) -> int:
    """Runs it to its end, or kills it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with words.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(PROGRESS.encode()):
                    progress(int(line.removeprefix(PROGRESS.encode())))
            return process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.communicate()


class MpiCalls:
    """The functions of torch.distributed on MPI. Groups are ignored: every call is over all ranks."""

    def __init__(self) -> None:
        from mpi4py import MPI  # pyrefly: ignore

        self._mpi, self._all = MPI, MPI.COMM_WORLD
        self._reductions = {
            "SUM": MPI.SUM,
            "PRODUCT": MPI.PROD,
            "MIN": MPI.MIN,
            "MAX": MPI.MAX,
            "AVG": MPI.SUM,
        }

    def all_reduce(self, tensor: "torch.Tensor", op: Any, group: Any = None) -> None:
        self._all.Allreduce(self._mpi.IN_PLACE, tensor.numpy(), self._reductions[op.name])
        if op.name == "AVG":
            tensor /= self._all.Get_size()

    def reduce(self, tensor: "torch.Tensor", root: int, op: Any, group: Any = None) -> None:
        here, memory = self._all.Get_rank() == root, tensor.numpy()
        sent = self._mpi.IN_PLACE if here else memory
        self._all.Reduce(sent, memory if here else None, self._reductions[op.name], root)
        if here and op.name == "AVG":
            tensor /= self._all.Get_size()

    def broadcast(self, tensor: "torch.Tensor", root: int, group: Any = None) -> None:
        self._all.Bcast(tensor.numpy(), root)

    def all_gather_single(
        self, into: "torch.Tensor", mine: "torch.Tensor", group: Any = None
    ) -> None:
        within = mine.data_ptr() - into.data_ptr() in range(into.nbytes or 1)
        self._all.Allgather(self._mpi.IN_PLACE if within else mine.numpy(), into.numpy())

    def reduce_scatter_single(
        self, into: "torch.Tensor", whole: "torch.Tensor", op: Any, group: Any = None
    ) -> None:
        """MPI wants a place of its own for the result."""
        result = into.clone()
        self._all.Reduce_scatter_block(whole.numpy(), result.numpy(), self._reductions[op.name])
        into.copy_(result / self._all.Get_size() if op.name == "AVG" else result)

    def all_to_all_single(
        self, into: "torch.Tensor", mine: "torch.Tensor", group: Any = None
    ) -> None:
        self._all.Alltoall(mine.numpy(), into.numpy())

    def isend(self, tensor: "torch.Tensor", to: int, group: Any = None) -> Any:
        request = self._all.Isend(tensor.numpy(), to)
        return _Waiting(request.Wait)

    def recv(self, into: "torch.Tensor", source: int, group: Any = None) -> None:
        self._all.Recv(into.numpy(), source)

    def gather(
        self, mine: "torch.Tensor", into: "list[torch.Tensor] | None", root: int, group: Any = None
    ) -> None:
        """The parts lie one behind the other, as `bench_operations` cuts them."""
        self._all.Gather(mine.numpy(), _whole(into), root)

    def scatter(
        self, into: "torch.Tensor", parts: "list[torch.Tensor] | None", root: int, group: Any = None
    ) -> None:
        self._all.Scatter(_whole(parts), into.numpy(), root)


class _Waiting:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


def _whole(parts: "list[torch.Tensor] | None") -> Any:
    if parts is None:
        return None
    first = parts[0]
    return first.as_strided((len(parts) * first.numel(),), (1,)).numpy()


@functools.cache
def calls() -> MpiCalls:
    """The MPI functions of this rank. MPI is initialised once."""
    return MpiCalls()
