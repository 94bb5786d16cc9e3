"""Published measurements for validating the models: nccl-tests sweeps and DeepEP's tables.

Times in microseconds by message size; where the source prints bus bandwidth it is turned into time
with the definition of nccl-tests, busbw = bytes / time * 2(n-1)/n. Knows no model.
"""

from typing import NamedTuple

from cairn.comm.nccl_tests import SweepPoint

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DOUBLING = [32 * KIB << power for power in range(20)]  # 32 KiB .. 16 GiB


class PublishedSweep(NamedTuple):
    name: str
    source: str
    fabric: str  # of nccl_model.FABRICS
    gpus: int  # of each NVLink domain
    nodes: int
    nic_gb_per_s: float  # for each GPU
    points: list[SweepPoint]


def _from_busbw(ranks: int, sizes: list[int], gb_per_s: list[float]) -> list[SweepPoint]:
    factor = 2 * (ranks - 1) / ranks
    return [
        SweepPoint(size, size * factor / (rate * 1e3))
        for size, rate in zip(sizes, gb_per_s, strict=True)
    ]


def _timed(sizes: list[int], microseconds: list[float]) -> list[SweepPoint]:
    return [SweepPoint(size, time) for size, time in zip(sizes, microseconds, strict=True)]


ML_ENGINEERING = "stas00/ml-engineering, network benchmarks, 2026-08"
COREWEAVE = "coreweave/nccl-tests README"

ALL_REDUCE: tuple[PublishedSweep, ...] = (
    PublishedSweep("8 x A100", ML_ENGINEERING, "a100", 8, 1, 25.0, _timed(DOUBLING, [
        43.83, 46.80, 51.76, 61.38, 80.40, 101.9, 101.4, 101.5, 133.5, 276.6, 424.0, 684.6, 1327.6,
        2420.6, 4218.4, 8203.9, 16240, 32136, 64074, 127997,
    ])),
    PublishedSweep("8 x H200", ML_ENGINEERING, "h200", 8, 1, 50.0, _from_busbw(8, DOUBLING, [
        1.44, 2.93, 5.73, 11.74, 23.94, 39.93, 64.53, 107.16, 155.53, 219.89, 275.84, 346.51,
        401.93, 436.15, 450.29, 463.58, 469.17, 473.10, 477.45, 482.26,
    ])),
    PublishedSweep("8 x B200", ML_ENGINEERING, "b200", 8, 1, 50.0, _from_busbw(8, DOUBLING, [
        1.20, 2.17, 4.86, 9.54, 18.71, 36.06, 63.09, 76.48, 126.49, 254.96, 325.97, 400.60, 568.38,
        646.11, 688.99, 723.34, 734.97, 740.64, 839.07, 845.67,
    ])),
    PublishedSweep("4 x 8 B200, EFA", ML_ENGINEERING, "b200", 8, 4, 50.0, _from_busbw(32, DOUBLING[2:], [
        0.45, 1.33, 2.84, 5.37, 10.38, 18.90, 35.12, 64.43, 91.19, 156.74, 197.94, 229.09, 326.90,
        361.99, 372.42, 377.34, 380.39, 381.80,
    ])),
    PublishedSweep("8 x 8 H100, SHARP", COREWEAVE, "h100", 8, 8, 50.0, _timed(
        [512 * MIB, GIB, 2 * GIB, 4 * GIB, 8 * GIB], [2984.6, 5808.0, 11163, 22181, 43980],
    )),
    PublishedSweep("GB200, 72 GPUs", COREWEAVE, "b200", 72, 1, 50.0, _timed(
        [512 * MIB, GIB, 2 * GIB, 4 * GIB, 8 * GIB], [1806.7, 3108.8, 5589.1, 10094, 20299],
    )),
    PublishedSweep("GB200, 2 x 72 GPUs", COREWEAVE, "b200", 72, 2, 50.0, _timed(
        [512 * MIB, GIB, 2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB],
        [2156.8, 3574.4, 6264.0, 11469, 21493, 42067],
    )),
    PublishedSweep("GB200, 20 x 72 GPUs", COREWEAVE, "b200", 72, 20, 50.0, _timed(
        [512 * MIB, GIB, 2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB],
        [7108.4, 9805.7, 14980, 24782, 45004, 84625],
    )),
)  # fmt: skip


class Switch(NamedTuple):
    """A size at which a sweep changes its algorithm, stated by the source or visible as a kink."""

    sweep: str
    bytes: int  # the first size with the later one
    before: str  # how the names of algorithm and protocol begin
    after: str
    how: str


NAMED = "named by the source"
SWITCHES: tuple[Switch, ...] = (
    Switch("8 x H200", 2 * MIB, "ring/ll", "nvls", NAMED),
    Switch("8 x A100", 2 * MIB, "ring/ll", "ring/ll128", "1, 2 and 4 MiB take the same time"),
    Switch("8 x A100", 16 * MIB, "ring/ll128", "ring/simple", "bandwidth falls from 8 to 16 MiB"),
    Switch("8 x B200", 4 * MIB, "ring/ll", "nvls", "bandwidth hardly grows from 2 to 4 MiB"),
)


class ExpertFigure(NamedTuple):
    """DeepEP: GB/s of the normal kernels, or microseconds of those for low latency."""

    kernel: str  # normal, low latency
    way: str  # dispatch, combine
    ranks: int
    value: float


DEEPEP_SOURCE = "DeepEP V1 documentation, H800 and ConnectX-7"
DEEPEP_NORMAL_TOKENS, DEEPEP_TOKENS = 4096, 128
DEEPEP_HIDDEN, DEEPEP_EXPERTS, DEEPEP_NODES_OF_A_TOKEN = 7168, 8, 4


def _experts(kernel: str, way: str, ranks: list[int], values: list[float]) -> list[ExpertFigure]:
    return [ExpertFigure(kernel, way, n, value) for n, value in zip(ranks, values, strict=True)]


DEEPEP: tuple[ExpertFigure, ...] = (
    *_experts("normal", "dispatch", [8, 16, 32, 64], [153, 43, 58, 51]),
    *_experts("normal", "combine", [8, 16, 32, 64], [158, 43, 57, 50]),
    *_experts("low latency", "dispatch", [8, 16, 32, 64, 128, 256], [77, 118, 155, 173, 192, 194]),
    *_experts("low latency", "combine", [8, 16, 32, 64, 128, 256], [114, 195, 273, 314, 369, 360]),
)
