"""Measurements of a device: copy bandwidth, matmul rate and launch overhead.

One function for each ceiling of the compute device, which is a GPU, or the CPU where there is
none. Data is random, because zeros draw less power and run faster than real data will. What a
device cannot do raises `Unmeasurable` with the reason. Knows nothing about files or networks.
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

from cairn.hw.ceilings import Measured, duration, rate
from cairn.hw.cpu_types import multiplies
from cairn.hw.datasheet import Dtype
from cairn.hw.timing import measure, measure_graph

Product = Callable[[], object]

MATMUL_SIZE = 8192  # fills every GPU of the datasheet; its operands exceed the L2
CPU_SIZES = (128, 4096)  # where the search for a CPU's size starts and ends
LAUNCHES = 200  # small operations per sample: one alone is shorter than the clock is exact

# The first compute capability whose tensor cores know the dtype, and that torch multiplies on.
NEEDS_CAPABILITY: dict[Dtype, tuple[int, int]] = {
    "tf32": (8, 0),
    "bf16": (8, 0),
    "fp16": (7, 0),
    "fp8": (8, 9),
    "int8": (7, 5),
}


class Unmeasurable(Exception):
    """This machine does not do that; the message is the reason that lands in `Ceilings.absent`."""


def copy_rate(device: str, size_bytes: int, budget_ms: float) -> Measured:
    """Device memory to device memory; every byte counts twice, read and written."""
    source, target = _random_bytes(size_bytes, device), _random_bytes(size_bytes, device)
    timing = measure(lambda: target.copy_(source), device=device, budget_ms=budget_ms)
    return rate(2 * size_bytes, "B/s", timing, f"copy of {size_bytes >> 20} MiB, read + written")


def matmul_rate(device: str, dtype: Dtype, budget_ms: float) -> Measured:
    """A square product, 2 n^3 operations."""
    reason = why_not(device, dtype)
    if reason is not None:
        raise Unmeasurable(reason)
    with _fp32_precision("tf32" if dtype == "tf32" else "ieee"):
        size = MATMUL_SIZE if device != "cpu" else _cpu_size(dtype, budget_ms)
        timing = measure(make_product(device, dtype, size), device=device, budget_ms=budget_ms)
    return rate(2 * size**3, "FLOP/s", timing, f"{size} x {size} x {size}")


def launch_cost(device: str, budget_ms: float) -> Measured:
    """Time per small operation launched from Python until the device has completed them all."""
    import torch

    add = _small_add(device)
    wait = torch.cuda.synchronize if device != "cpu" else (lambda: None)

    def burst() -> None:
        for _ in range(LAUNCHES):
            add()
        wait()

    timing = measure(burst, budget_ms=budget_ms).per(LAUNCHES)
    return duration(timing, f"one of {LAUNCHES} small additions in a row")


def launch_cost_in_graph(device: str, budget_ms: float) -> Measured:
    if device == "cpu":
        raise Unmeasurable("CUDA graphs need a GPU")
    timing = measure_graph(_small_add(device), device=device, calls=LAUNCHES, budget_ms=budget_ms)
    return duration(timing, f"one of {LAUNCHES} small additions in a CUDA graph")


def transfer_rate(
    device: str,
    direction: Literal["host_to_device", "device_to_host"],
    kind: Literal["pinned", "pageable"],
    size_bytes: int,
    budget_ms: float,
) -> Measured:
    """Between host and device memory, one direction at a time; every byte counts once."""
    if device == "cpu":
        raise Unmeasurable("host and device are the same memory on a CPU")
    host, remote = _random_bytes(size_bytes, "cpu"), _random_bytes(size_bytes, device)
    host = host.pin_memory() if kind == "pinned" else host
    target, source = (remote, host) if direction == "host_to_device" else (host, remote)
    timing = measure(
        lambda: target.copy_(source, non_blocking=kind == "pinned"),
        device=device,
        budget_ms=budget_ms,
        flush=False,
    )
    return rate(size_bytes, "B/s", timing, f"{size_bytes >> 20} MiB, {kind} host memory")


def why_not(device: str, dtype: Dtype) -> str | None:
    """Why this device has no ceiling for the dtype; None when it has one."""
    import torch

    if device == "cpu":
        measured = ("fp32", "bf16")
        if dtype not in measured:
            return f"on a CPU only {' and '.join(measured)} are measured"
        return None if multiplies(dtype) else f"this CPU multiplies {dtype} in fp32"
    needed = NEEDS_CAPABILITY.get(dtype, (0, 0))
    have = torch.cuda.get_device_capability(device)
    if have < needed:
        return (
            f"{dtype} needs compute capability {needed[0]}.{needed[1]}, this is {have[0]}.{have[1]}"
        )
    return None


def make_product(device: str, dtype: Dtype, size: int) -> Product:
    """A call that multiplies two random square matrices of the dtype."""
    import torch

    if dtype == "int8":
        left, right = (_random_int8(size, device) for _ in range(2))
        return lambda: torch._int_mm(left, right.t())
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
    left, right = (
        torch.randn(size, size, device=device).to(kinds.get(dtype, torch.float32)) for _ in range(2)
    )
    if dtype == "fp8":
        one = torch.ones((), device=device)
        # The library wants its right operand by columns: a transposed view.
        return lambda: torch._scaled_mm(
            left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result)


def _cpu_size(dtype: Dtype, budget_ms: float) -> int:
    """A power of two of which about five products fit the budget: CPUs differ a thousandfold."""
    import torch

    smallest, largest = CPU_SIZES
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a trial on all threads waits for the one that a busy core holds up
    try:
        trial = measure(make_product("cpu", dtype, smallest), budget_ms=0)
    finally:
        torch.set_num_threads(threads)
    times_the_work = budget_ms / 1000 / 5 * threads / trial.p10_s
    growth = max(0, int(math.log2(times_the_work) / 3))  # twice the size is eight times the work
    return min(smallest * 2**growth, largest)


def _small_add(device: str) -> Product:
    import torch

    left, right, result = (torch.randn(16, device=device) for _ in range(3))
    return lambda: torch.add(left, right, out=result)


def _random_bytes(size_bytes: int, device: str) -> Any:
    import torch

    return torch.randint(-(2**31), 2**31, (size_bytes // 4,), dtype=torch.int32, device=device)


def _random_int8(size: int, device: str) -> Any:
    import torch

    return torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device)


@contextmanager
def _fp32_precision(mode: Literal["ieee", "tf32"]) -> Generator[None]:
    """Set the precision of cuBLAS for 32-bit matmuls during a measurement."""
    import torch

    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = mode
    try:
        yield
    finally:
        settings.fp32_precision = before
