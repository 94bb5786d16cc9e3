"""The measurement behind `cairn comm bench`: one collective, many sizes, several backends in one run.

On every rank, for every size, the backends take turns in short rounds, so that what else the machine does hits all of
them alike. The time of an iteration is that of the slowest rank: rank 0 alone may be done long before the others. Each
wrong element is counted. What is called is in `bench_operations`. Needs torch; starts no process and prints nothing.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cairn.comm import bench_mpi
from cairn.comm.bench_operations import (
    FORMS,
    NEVER_IN_PLACE,
    SHARED,
    TYPES,
    Operation,
    OperationForm,
    RankData,
)
from cairn.comm.bench_spec import BenchRow, BenchTiming, Spec
from cairn.comm.doctor.ranks import import_backend

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
ROUNDS = 4  # in which the backends take turns at each size


def bus_factor(operation: Operation, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in SHARED else 1.0


def elements(spec: Spec, size: int, ranks: int) -> int:
    """Elements of the whole vector: a multiple of the ranks if they share it, at least one for each."""
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
    return bench_mpi.missing() if name == "mpi" else None


def measure(
    rank: int, world: int, tell: Callable[[object], None], specs: list[Spec]
) -> list[BenchRow]:
    """Measure all specs, which have the same backends, on every rank; rank 0 reports progress and returns the rows."""
    torch.set_num_threads(1)
    groups = _groups(rank, world, specs[0])
    rows = []
    for spec in specs:
        rows += _sweep(rank, world, tell, spec, groups)
    dist.barrier()
    return rows if rank == 0 else []


def _sweep(
    rank: int, world: int, tell: Callable[[object], None], spec: Spec, groups: dict[str, Any]
) -> list[BenchRow]:
    rows = []
    for size in spec.sizes:
        count = elements(spec, size, world)
        timings = {}
        for in_place in (False, True):
            if in_place and spec.operation in NEVER_IN_PLACE:
                continue
            found = _timed(spec, rank, world, count, in_place, groups)
            for backend, timing in found.items():
                timings[backend, in_place] = timing
        for backend in groups:
            rows.append(
                BenchRow(
                    backend=backend,
                    type=spec.type,
                    reduction=spec.reduction,
                    at=time.strftime(TIME_FORMAT),
                    size=count * TYPES[spec.type].itemsize,
                    count=count // world if spec.operation in SHARED else count,
                    out_of_place=timings[backend, False],
                    in_place=timings.get((backend, True)),
                )
            )
        if rank == 0:
            tell(size)
    return rows


def _groups(rank: int, world: int, spec: Spec) -> dict[str, Any]:
    """A gloo group for the measurement itself, and one for each backend."""
    timeout = timedelta(seconds=spec.timeout_s)
    store = dist.FileStore(spec.store, world)  # no port, which another program may have
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    for name in spec.backends:
        import_backend(name)
    return {
        name: None if name == "mpi" else dist.new_group(backend=name, timeout=timeout)
        for name in spec.backends
    }


def _timed(
    spec: Spec, rank: int, world: int, count: int, in_place: bool, groups: dict[str, Any]
) -> dict[str, BenchTiming]:
    prepared = {
        name: _form(spec, rank, world, count, in_place, group, name)
        for name, group in groups.items()
    }
    wrong: dict[str, int | None] = {}
    for name, form in prepared.items():
        for _ in range(max(spec.warmup, 1)):
            form.reset()
            form.call()
        wrong[name] = _wrong(form) if spec.check else None
    times: dict[str, list[float]] = {name: [] for name in prepared}
    clock = time.process_time if spec.cpu_time else time.perf_counter
    for share in np.array_split(np.arange(spec.iterations), min(ROUNDS, spec.iterations)):
        for name, form in prepared.items():
            dist.barrier()
            for _ in share:
                began = clock()
                for _ in range(spec.together):
                    form.call()
                took = max(clock() - began, 1e-9)  # CPU time may stand still
                times[name].append(took * 1e6 / spec.together)
    timings = {}
    for name, mine in times.items():
        whole = _of_ranks(torch.tensor(mine, dtype=torch.float64), spec, world)
        count_wrong = wrong[name]
        if count_wrong is not None:
            summed = torch.tensor([count_wrong])
            dist.all_reduce(summed)
            count_wrong = int(summed)
        timings[name] = BenchTiming(times_us=whole, wrong=count_wrong)
    return timings


def _of_ranks(mine: torch.Tensor, spec: Spec, world: int) -> list[float]:
    """Every iteration's time, from what the ranks have."""
    match spec.of_ranks:
        case "first":
            dist.broadcast(mine, 0)
        case "mean":
            dist.all_reduce(mine)
            mine /= world
        case "least":
            dist.all_reduce(mine, dist.ReduceOp.MIN)
        case _:
            dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.tolist()


def _wrong(form: OperationForm) -> int:
    if form.expected is None:
        return 0
    return int((form.result.cpu() != form.expected).sum())


def _form(
    spec: Spec, rank: int, world: int, count: int, in_place: bool, group: Any, backend: str
) -> OperationForm:
    """The call of the operation on tensors of its own, until it is done on the device."""
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    place = RankData(
        rank,
        world,
        count,
        type=spec.type,
        reduction=spec.reduction,
        root=spec.root,
        in_place=in_place,
        group=group,
        device=device,
        calls=bench_mpi.calls() if backend == "mpi" else dist,
    )
    form = FORMS[spec.operation](place)
    if device == "cpu":
        return form

    def call() -> None:
        form.call()
        torch.cuda.synchronize(device)

    return form._replace(call=call)
