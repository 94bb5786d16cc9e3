"""The measurement behind `cairn comm bench`: one collective, many sizes, several backends in one run.

On every rank, for every size, the backends take turns in short rounds, so that what else the machine does hits all of
them alike. The time of an iteration is that of the slowest rank: rank 0 alone may be done long before the others. Small
whole numbers are sent, so every result has one right value in every type, and each wrong element is counted.
Needs torch; starts no process and prints nothing.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce", "sendrecv",
    "gather", "scatter",
]  # fmt: skip
SHARED = (
    "all_gather",
    "reduce_scatter",
    "alltoall",
    "gather",
    "scatter",
)  # size = all ranks' parts
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
IN_PLACE_ONLY = ("all_reduce", "broadcast", "reduce")  # torch has no other form: a copy goes before
TYPES = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16,
    "bfloat16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
}  # fmt: skip
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX, "avg": dist.ReduceOp.AVG,
}  # fmt: skip
ROUNDS = 4  # in which the backends take turns at each size


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    operation: Operation
    backends: list[str]
    sizes: list[int]  # bytes
    type: str = "float"
    reduction: str = "sum"
    root: int = 0
    iterations: int = 20
    warmup: int = 5
    check: bool = True
    timeout_s: float = 60.0
    master: tuple[str, int] = ("127.0.0.1", 0)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of every iteration, each by its slowest rank."""

    times_us: list[float]
    wrong: int | None  # elements, of all ranks; None: not looked at

    @property
    def mean_us(self) -> float:
        return float(np.mean(self.times_us))

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.times_us, share))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    size: int
    count: int
    out_of_place: Timing
    in_place: Timing | None  # None: the operation has no such form


class Buffers(NamedTuple):
    """What one rank sends and receives in one form, and what it must end with."""

    run: Callable[[], None]
    reset: Callable[[], None]
    result: torch.Tensor
    expected: torch.Tensor | None  # None: this rank receives nothing


def bus_factor(operation: Operation, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in SHARED else 1.0


def elements(spec: Spec, size: int, ranks: int) -> int:
    """Of the whole vector, a multiple of the ranks where they share it; one for each at least."""
    count = max(size // TYPES[spec.type].itemsize, 1)
    return max(count // ranks, 1) * ranks if spec.operation in SHARED else count


def missing(name: str, ranks: int) -> str | None:
    """Why a backend cannot be measured here."""
    if name == "nccl":
        if not dist.is_nccl_available():
            return "this torch has no NCCL"
        gpus = torch.cuda.device_count()
        return (
            f"it needs a GPU for each of {ranks} ranks, there are {gpus}" if gpus < ranks else None
        )
    if name == "mpi":
        return None if dist.is_mpi_available() else "this torch was built without MPI"
    return None


def measure(rank: int, world: int, tell: Callable[[object], None], spec: Spec) -> list[Row]:
    """On every rank; rank 0 tells how far it is and returns the rows."""
    torch.set_num_threads(1)
    groups = _groups(rank, world, spec)
    rows = []
    for size in spec.sizes:
        count = elements(spec, size, world)
        timings = {}
        for in_place in (False, True):
            if in_place and spec.operation in ("alltoall", "sendrecv", "gather", "scatter"):
                continue
            found = _timed(spec, rank, world, count, in_place, groups)
            for backend, timing in found.items():
                timings[backend, in_place] = timing
        for backend in groups:
            rows.append(
                Row(
                    backend=backend, size=count * TYPES[spec.type].itemsize,
                    count=count // world if spec.operation in SHARED else count,
                    out_of_place=timings[backend, False], in_place=timings.get((backend, True)),
                )
            )  # fmt: skip
        if rank == 0:
            tell(size)
    dist.barrier()
    return rows if rank == 0 else []


def _groups(rank: int, world: int, spec: Spec) -> dict[str, Any]:
    """A gloo group for the measurement itself, and one for each backend."""
    timeout = timedelta(seconds=spec.timeout_s)
    host, port = spec.master
    store = dist.TCPStore(host, port, world, rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    if "cairn" in spec.backends:
        import cairn.comm.backend  # noqa: F401  registers it
    return {name: dist.new_group(backend=name, timeout=timeout) for name in spec.backends}


def _timed(
    spec: Spec, rank: int, world: int, count: int, in_place: bool, groups: dict[str, Any]
) -> dict[str, Timing]:
    prepared = {
        name: _buffers(spec, rank, world, count, in_place, group, name)
        for name, group in groups.items()
    }
    wrong: dict[str, int | None] = {}
    for name, buffers in prepared.items():
        for _ in range(max(spec.warmup, 1)):
            buffers.reset()
            buffers.run()
        wrong[name] = _wrong(buffers) if spec.check else None
    times: dict[str, list[float]] = {name: [] for name in prepared}
    for share in np.array_split(np.arange(spec.iterations), min(ROUNDS, spec.iterations)):
        for name, buffers in prepared.items():
            dist.barrier()
            for _ in share:
                began = time.perf_counter()
                buffers.run()
                times[name].append((time.perf_counter() - began) * 1e6)
    found = {}
    for name, mine in times.items():
        slowest = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        count_wrong = wrong[name]
        if count_wrong is not None:
            summed = torch.tensor([count_wrong])
            dist.all_reduce(summed)
            count_wrong = int(summed)
        found[name] = Timing(times_us=slowest.tolist(), wrong=count_wrong)
    return found


def _wrong(buffers: Buffers) -> int:
    if buffers.expected is None:
        return 0
    return int((buffers.result.cpu() != buffers.expected).sum())


def _values(spec: Spec, rank: int, count: int) -> torch.Tensor:
    """What a rank brings: 1, 2, 3 in turn, beginning differently on each."""
    return ((torch.arange(count) + rank) % 3 + 1).to(TYPES[spec.type])


def _reduced(spec: Spec, world: int, count: int) -> torch.Tensor:
    every = torch.stack([_values(spec, rank, count).double() for rank in range(world)])
    match spec.reduction:
        case "sum":
            result = every.sum(0)
        case "avg":
            result = every.sum(0).to(TYPES[spec.type]) / world
        case "prod":
            result = every.prod(0)
        case "min":
            result = every.amin(0)
        case _:
            result = every.amax(0)
    return result.to(TYPES[spec.type])


def _buffers(
    spec: Spec, rank: int, world: int, count: int, in_place: bool, group: Any, backend: str
) -> Buffers:
    """The call of one operation, on tensors of its own."""
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    op, root = REDUCTIONS[spec.reduction], spec.root
    whole = [_values(spec, other, count) for other in range(world)]
    each = count // world
    mine = whole[rank].to(device)
    result = torch.empty_like(mine)
    expected: torch.Tensor | None = None
    match spec.operation:
        case "all_reduce" | "broadcast" | "reduce":
            expected = (
                whole[root] if spec.operation == "broadcast" else _reduced(spec, world, count)
            )
            if spec.operation == "reduce" and rank != root:
                expected = None

            def call() -> None:
                if not in_place:
                    result.copy_(mine)
                if spec.operation == "all_reduce":
                    dist.all_reduce(result, op, group=group)
                elif spec.operation == "broadcast":
                    dist.broadcast(result, root, group=group)
                else:
                    dist.reduce(result, root, op, group=group)

        case "all_gather":
            expected = torch.cat([values[:each] for values in whole])
            source = result[rank * each : (rank + 1) * each] if in_place else mine[:each].clone()

            def call() -> None:
                dist.all_gather_into_tensor(result, source, group=group)

        case "reduce_scatter":
            expected = _reduced(spec, world, count)[rank * each : (rank + 1) * each]
            source = result if in_place else mine
            result = result[rank * each : (rank + 1) * each] if in_place else result[:each].clone()
            target = result

            def call() -> None:
                dist.reduce_scatter_tensor(target, source, op, group=group)

        case "alltoall":
            expected = torch.cat([values[rank * each : (rank + 1) * each] for values in whole])

            def call() -> None:
                dist.all_to_all_single(result, mine, group=group)

        case "sendrecv":
            expected = whole[(rank - 1) % world]

            def call() -> None:
                work = dist.isend(mine, (rank + 1) % world, group=group)
                dist.recv(result, (rank - 1) % world, group=group)
                if work is not None:
                    work.wait()

        case "gather":
            expected = torch.cat([v[:each] for v in whole]) if rank == root else None
            source, parts = mine[:each].clone(), list(result.split(each)) if rank == root else None

            def call() -> None:
                dist.gather(source, parts, root, group=group)

        case "scatter":
            expected = whole[root][rank * each : (rank + 1) * each]
            parts = list(mine.split(each)) if rank == root else None
            result = result[:each].clone()
            target = result

            def call() -> None:
                dist.scatter(target, parts, root, group=group)

    def reset() -> None:
        """In place means that the input lies where the result will be."""
        if not in_place:
            result.fill_(0)
        elif spec.operation == "all_gather":
            source.copy_(mine[:each])
        elif spec.operation == "reduce_scatter":
            source.copy_(mine)
        else:
            result.copy_(mine)

    def run() -> None:
        call()
        if device != "cpu":
            torch.cuda.synchronize(device)

    return Buffers(run, reset, result, expected)
