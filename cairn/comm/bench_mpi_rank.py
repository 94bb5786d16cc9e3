"""Entry point of a rank of `cairn comm bench` under mpiexec.

mpiexec -n RANKS python -m cairn.comm.bench_mpi_rank SPECS ROWS        started by `bench_mpi`
"""

import sys
from pathlib import Path

import msgspec

from cairn.comm.bench_mpi import PROGRESS
from cairn.comm.bench_spec import Spec
from cairn.comm.bench_sweep import measure


def main(given: Path, rows: Path) -> None:
    """Measure on this rank; rank 0 writes the rows."""
    from mpi4py import MPI  # pyrefly: ignore

    def tell(size: object) -> None:
        sys.stdout.write(f"{PROGRESS}{size}\n")
        sys.stdout.flush()

    world = MPI.COMM_WORLD
    try:
        specs = msgspec.json.decode(given.read_bytes(), type=list[Spec])
        found = measure(world.Get_rank(), world.Get_size(), tell, specs)
        if world.Get_rank() == 0:
            rows.write_bytes(msgspec.json.encode(found))
    except BaseException as error:
        sys.stderr.write(f"rank {world.Get_rank()}: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        world.Abort(1)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
