"""What do matrix products wait for: instructions, memory, or the power that the card may draw?

    python benchmarks/power_limit.py --out benchmarks/h200/power_limit.json

The same products, by the same kernels, on operands that differ only in what switching their bits costs: normal numbers,
as in a model; small integers, whose low bits are zero; and nothing but zeros. Each runs for a second without a pause,
while nvidia-smi says how many watts the card draws and at which clock. A product that waited for instructions or for
memory would not care about the numbers; one that waits for power is faster the less there is to switch.
"""

import argparse
import subprocess
import threading
import time
from collections.abc import Callable
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.bench.record import add_arguments, record
from cairn.kernels.matmul.matmul import matmul

SECONDS = 1.0
SHAPES = {  # rows x columns x summed over
    "square": (8192, 8192, 8192),
    "8B prompt, gate and up": (16384, 24576, 4096),
    "8B decode of 256, gate and up": (256, 24576, 4096),
    "1.7B training, gate and up": (32768, 12288, 2048),
}
NUMBERS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": lambda m, n: torch.randn(m, n, device="cuda", dtype=torch.bfloat16),
    "integers up to 2": lambda m, n: torch.randint(-2, 3, (m, n), device="cuda").bfloat16(),
    "zeros": lambda m, n: torch.zeros(m, n, device="cuda", dtype=torch.bfloat16),
}
ASKED = "clocks.sm,power.draw,power.limit,clocks.max.sm"


class Card(NamedTuple):
    """One line of nvidia-smi."""

    mhz: float
    watts: float
    limit_watts: float
    most_mhz: float


class Watch:
    """Reads the card ten times a second, beside the work."""

    def __enter__(self) -> "Watch":
        command = [
            "nvidia-smi",
            f"--query-gpu={ASKED}",
            "--format=csv,noheader,nounits",
            "-lms",
            "100",
        ]
        self.seen: list[Card] = []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        return self

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.seen.append(Card(*map(float, line.split(","))))

    def __exit__(self, *problem: object) -> None:
        self.process.terminate()
        self.thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    rows = [
        measure(shape, numbers, kernel)
        for shape in SHAPES
        for kernel in ("cuBLAS", "ours")
        for numbers in NUMBERS
    ]
    record({"rows": rows}, options)


def measure(shape: str, numbers: str, kernel: str) -> dict[str, object]:
    m, n, k = SHAPES[shape]
    a_MK, b_NK = NUMBERS[numbers](m, k), NUMBERS[numbers](n, k)
    y_MN = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def product() -> None:
        matmul(a_MK, b_NK, out=y_MN, impl="torch" if kernel == "cuBLAS" else "triton")

    run_for(0.3, product)  # compiled, and as warm as it gets
    with Watch() as watch:
        seconds = run_for(SECONDS, product)
    held = watch.seen[len(watch.seen) // 3 :] or [Card(0, 0, 0, 0)]
    row: dict[str, object] = {
        "shape": shape,
        "size": f"{m} x {n} x {k}",
        "kernel": kernel,
        "numbers": numbers,
        "tflops": 2e-12 * m * n * k / seconds,
        "mhz": mean(card.mhz for card in held),
        "watts": mean(card.watts for card in held),
        "limit_watts": held[-1].limit_watts,
        "most_mhz": held[-1].most_mhz,
    }
    print(
        "{shape}, {kernel}, {numbers}: {tflops:.0f} TFLOP/s at {mhz:.0f} of {most_mhz:.0f} MHz, {watts:.0f} of "
        "{limit_watts:.0f} W".format(**row),
        flush=True,
    )
    return row


def run_for(seconds: float, call: Callable[[], None]) -> float:
    """Seconds of one call, many of which run one after another."""
    call()
    torch.cuda.synchronize()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(8):
            call()
        calls += 8
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
