"""How many warps does a multiprocessor hold, and what does a register cost?

    65,536 registers per SM:  r per thread, 128 threads a block  ->  65,536 / (128 r) blocks
    fewer registers by force  ->  more warps, until values no longer fit and spill to memory

A kernel of ours is compiled (no GPU needed) with tighter and tighter limits. Where there is a GPU, its driver is asked
the same question about kernels that are loaded, and must agree with our arithmetic.
"""

from typing import Any

from cairn.core.errors import CairnError
from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

REGISTERS = 65_536
THREADS = 128


def run(bench: Workbench) -> Outcome:
    from cairn.kernels.cases.rmsnorm import VARIANTS
    from cairn.kernels.tooling.compile import compile_variant

    variant = next(v for v in VARIANTS if "4096 + residual + fp8" in v.name)
    rows, built = [], {}
    for limit in (0, *bench.pick((48, 32), (32,))):
        bench.step(f"compiling with {limit or 'any number of'} registers")
        options = {**variant.options, **({"maxnreg": limit} if limit else {})}
        compiled: Any = compile_variant(variant._replace(options=options), "rmsnorm")
        if compiled.error is not None:
            raise CairnError(
                f"rmsnorm does not compile: {compiled.error}", hint="see `cairn kernels check`"
            )
        built[limit] = compiled
        rows.append(
            [
                limit or "any",
                compiled.registers,
                compiled.spill_store_bytes,
                compiled.occupancy.blocks,
                compiled.occupancy.warps,
                compiled.occupancy.limit,
            ]
        )
    free, tight = built[0], built[32]
    return Outcome(
        checks=_checks(tight, free, bench),
        plots=[
            Plot(
                title=Words("Registers against warps", "寄存器与 warp 数"),
                x=Words("registers per thread", "每线程寄存器"),
                y=Words("warps per SM", "每 SM 的 warp 数"),
                lines={"by arithmetic": [(float(r), float(_warps(r))) for r in range(24, 256, 8)]},
                limit=("what an SM can hold", 64.0),
            )
        ],
        table=Table(
            columns=[
                Words("limit", "上限"),
                Words("registers", "寄存器"),
                Words("spilled bytes", "溢出字节"),
                Words("blocks per SM", "每 SM 块数"),
                Words("warps per SM", "每 SM warp 数"),
                Words("limited by", "受限于"),
            ],
            rows=rows,
        ),
    )


def _checks(tight: Any, free: Any, bench: Workbench) -> list[Check]:
    return [
        Check(
            what=Words(
                "blocks per SM with 32 registers a thread", "每线程 32 个寄存器时每 SM 的块数"
            ),
            predicted=REGISTERS / (32 * THREADS),
            measured=float(tight.occupancy.blocks),
            unit="blocks",
        ),
        Check(
            what=Words("bytes spilled without a limit", "不限制时溢出的字节"),
            predicted=0.0,
            measured=float(free.spill_store_bytes),
            unit="B",
        ),
        Check(
            what=Words(
                "bytes spilled with 32 registers, at least what does not fit",
                "限制为 32 时溢出的字节，至少是放不下的部分",
            ),
            # Registers beyond 32 that were wanted, 4 bytes each; some are cheaper to compute again.
            predicted=4.0 * (free.registers - 32) / 2,
            measured=float(tight.spill_store_bytes),
            unit="B",
            kind="at_least",
        ),
        *(_driver_agrees(bench) if bench.on_gpu else []),
    ]


def _warps(registers: int) -> int:
    from cairn.kernels.tooling.machine_code import occupancy

    return occupancy(registers, 0, THREADS // 32).warps


def _driver_agrees(bench: Workbench) -> list[Check]:
    """The sum of differences between the driver's blocks per SM and ours, over several sizes of a block."""
    import torch

    from cairn.kernels.tooling.machine_code import occupancy
    from cairn.labs.gpu._strided_kernel import compiled_gather

    bench.step("asking the driver")
    off = 0
    x, y = torch.ones(1 << 16, device=bench.device), torch.empty(1 << 12, device=bench.device)
    for warps in (1, 4, 8, 32):
        kernel: Any = compiled_gather(x, y, 2, warps)
        ours = occupancy(kernel.n_regs, kernel.metadata.shared, warps)
        off += abs(ours.blocks - _ask_driver(kernel, warps))
    return [
        Check(
            what=Words(
                "blocks per SM: ours beside the driver's", "每 SM 块数：我们的计算与驱动的差"
            ),
            predicted=0.0,
            measured=float(off),
            unit="blocks",
        )
    ]


def _ask_driver(kernel: Any, warps: int) -> int:
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    blocks = ctypes.c_int()
    failed = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks),
        ctypes.c_void_p(kernel.function),
        warps * 32,
        ctypes.c_size_t(kernel.metadata.shared),
    )
    if failed:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor answers {failed}")
    return blocks.value


LAB = described(__file__, run)
