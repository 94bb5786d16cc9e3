"""y = x @ w.T with weights of 4 or 8 bits and 16-bit activations: a quarter or half of the bytes for few rows.

    w [N, K] as `packed_weights`: whole numbers or floats of 4 or 8 bits, and scales of groups of columns
    x [M, K] bfloat16  ->  + bias  ->  SwiGLU  ->  y [M, N]; or the float32 parts of a K that was cut

`packed_stream` multiplies up to 128 rows. For more, `dequantize_packed` makes a matrix of bfloat16, once for each
product: the tensor cores are the limit there.
Bytes moved for few rows: N*K/2 or N*K, 2*N*K/group of scales (4 in float32, twice as many with shifts), 2*M*K, 2*M*N.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from cairn.kernels.arguments import FLOATS, as_rows, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda, needs_hopper
from cairn.kernels.few_rows import padded_rows
from cairn.kernels.kernel import Cost
from cairn.kernels.matmul.epilogue import Activation, Epilogue, matmul_reference
from cairn.kernels.matmul.packed_stream import packed_kernel
from cairn.kernels.matmul.packed_weights import (
    BITS,
    MOST_ROWS,
    PackedWeights,
    check_packed,
    gate_then_up,
    packed_reference,
)
from cairn.kernels.matmul.skinny_matmul import JOINED, KERNELS, launch_constants, tile_descriptor
from cairn.kernels.matmul.skinny_plans import FEW_ROWS, MULTIPROCESSORS, Plan
from cairn.kernels.matmul.tile_order import TILE
from cairn.kernels.tuned import tuned

SHARED = 216 << 10  # bytes of a multiprocessor that rings may take
LARGEST_RING = 108 << 10
WIDEST = 256  # columns at a time
ROW_BYTES = 128  # of tiles as TMA sees them
PROGRAMS = 256  # fewer leave multiprocessors waiting
SHORTEST_PART = 1024  # columns
LEAST_ROWS = 8  # of x that a program takes
WARP_ROWS = 16  # of x that warps multiply on their own, at most
UNIT = 128  # columns that are multiplied before they are scaled, at most


def packed_matmul(
    x_MK: Tensor,
    w: PackedWeights,
    *,
    bias_N: Tensor | None = None,
    activation: Activation | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """x [M, K] bfloat16 with at most 128 rows. With SwiGLU the rows of w are in the order of `paired_rows`."""
    x = _checked(x_MK, w)
    require(activation in (None, "swiglu"), "activation", "'swiglu' or None", repr(activation))
    epilogue = Epilogue(bias_N, activation)
    (m, k), n = x.shape, w.shape[0]
    if bias_N is not None:
        check("bias_N", bias_N, dtypes=FLOATS, shape=(n,), beside=x, packed=True)
    plan = plan_of(m, n, k, w)
    offers = {"gluon": needs_cuda(x) or needs_hopper(x), "reference": None}
    if choose("packed_matmul", impl, offers).impl == "reference":
        return _by_reference(x, w, epilogue)
    y = torch.empty(m, epilogue.columns(n), dtype=x.dtype, device=x.device)
    if y.numel():
        launch(x, w, y, epilogue, plan, prefetch)
    return y


def packed_parts(x_MK: Tensor, w: PackedWeights, *, prefetch: bool = False) -> Tensor | None:
    """Float32 sums [parts, M, N], for whoever joins them together with what follows; None where K is not cut."""
    x = _checked(x_MK, w)
    (m, k), n = x.shape, w.shape[0]
    plan = plan_of(m, n, k, w)
    split = plan.parts(k)
    if split == 1 or m == 0 or (needs_cuda(x) or needs_hopper(x)) is not None:
        return None
    parts = x.new_empty(split, m, n, dtype=torch.float32)
    _launch_stream(x, w._replace(arrived=None), parts, parts, Epilogue(), plan, prefetch)
    return parts


def _by_reference(x: Tensor, w: PackedWeights, epilogue: Epilogue) -> Tensor:
    rows = packed_reference(w)
    if epilogue.activation is not None:
        rows = gate_then_up(rows)
    return matmul_reference(x, rows, epilogue, x.dtype)


def _checked(x_MK: Tensor, w: PackedWeights) -> Tensor:
    check_packed(w)
    check("x_MK", x_MK, dtypes=(torch.bfloat16,), shape=(None, w.shape[1]), beside=w.tiles)
    require(len(x_MK) <= MOST_ROWS, "x_MK", f"at most {MOST_ROWS} rows", len(x_MK))
    return as_rows("x_MK", x_MK)


def packed_plan(m: int, n: int, k: int, group: int, shifts: bool = False, bits: int = 4) -> Plan:
    """K is cut until all multiprocessors have work and as long as all programs run at once; rings take what is left.

    Where tiles are few and their bytes or the rows of x many, two warpgroups take turns at one deep ring: that reads
    faster than more programs do, whose sums have to be joined.
    """
    rows, pieces, split = row_block(m), n // TILE, 1
    deep = pieces <= MULTIPROCESSORS and (bits == 8 or rows == FEW_ROWS)
    most = _most_programs(rows, deep)
    while (
        pieces * split < PROGRAMS
        and 2 * pieces * split <= most * MULTIPROCESSORS
        and k >= 2 * split * SHORTEST_PART
    ):
        split *= 2
    narrow = rows == FEW_ROWS and (deep or split > 1)
    narrow = narrow or (bits == 8 and (rows > LEAST_ROWS or group < TILE))
    widest = WIDEST // 2 if narrow else WIDEST
    width = next(width for width in (widest, 128, TILE) if k % width == 0)
    together = min(most, -(-pieces * split // MULTIPROCESSORS))
    ring = min(SHARED // together, LARGEST_RING)
    steps = -(-k // (width * split))
    stage = stage_bytes(m, width, group, shifts, bits)
    return Plan("packed", TILE, width, split, 8 if deep else 4, max(2, min(ring // stage, steps)))


def _most_programs(rows: int, deep: bool) -> int:
    """Maximum number of programs on a multiprocessor; several hide each other's latency."""
    if deep:
        return 2 if rows == LEAST_ROWS else 1
    return 4 if rows < FEW_ROWS else 2


def row_block(m: int) -> int:
    """Rows of x that a program takes."""
    return min(padded_rows(max(m, 1)), FEW_ROWS)


def stage_bytes(m: int, width: int, group: int, shifts: bool = False, bits: int = 4) -> int:
    """Shared memory of one pipeline stage of weights, scales and x."""
    if group < TILE:
        scales = TILE * width // group * 2 * (1 + shifts)
    else:
        scales = width // unit_of(width, group) * TILE * 4 * (1 + shifts)
    return width * (TILE * bits // 8 + row_block(m) * 2) + scales


def unit_of(width: int, group: int) -> int:
    """Columns of a step that are multiplied at once; they have one scale, unless groups are small."""
    return UNIT if width % UNIT == 0 and (group < TILE or group % UNIT == 0) else TILE


def tile_rows(unit: int, bits: int) -> int:
    """Rows of 128 bytes that a tile of `unit` columns has for TMA."""
    return unit * TILE * bits // 8 // ROW_BYTES


def uses_wgmma(m: int, plan: Plan) -> bool:
    """Return whether warpgroups multiply (wgmma); for few rows each warp multiplies on its own."""
    return plan.kernel == "packed" or row_block(m) > WARP_ROWS


def stages_of(plan: Plan) -> int:
    """Number of stages, a multiple of the warpgroups, because each has its own buffers."""
    groups = plan.warps // 4
    return max(groups, plan.stages // groups * groups)


class Registers(NamedTuple):
    """Registers per thread: on average, and of a multiplying one. A copying thread has 24."""

    average: int
    multiplying: int


def registers_of(m: int, plan: Plan) -> Registers:
    groups = plan.warps // 4
    multiplying = 104 if row_block(m) <= 8 else 136 if row_block(m) <= 32 else 216
    return Registers(-(-(multiplying * groups + 24) // (groups + 1) // 8) * 8, multiplying)


def plan_of(m: int, n: int, k: int, w: PackedWeights) -> Plan:
    default = packed_plan(m, n, k, w.group, w.shifts is not None, BITS[w.kind])
    key = tuning_key(m, n, k, w.group, BITS[w.kind])
    return Plan(**tuned("packed_matmul", key, default._asdict()))


def tuning_key(m: int, n: int, k: int, group: int, bits: int = 4) -> str:
    return f"m={row_block(m)},n={n},k={k},group={group},bits={bits}"


def launch(
    x: Tensor, w: PackedWeights, y: Tensor, epilogue: Epilogue, plan: Plan, prefetch: bool = False
) -> None:
    """Run the kernels on checked operands."""
    (m, k), n = x.shape, w.shape[0]
    if (
        epilogue.activation is not None and w.arrived is None
    ):  # which needs whole sums of gate and up
        plan = plan._replace(split=1)
    split = plan.parts(k)
    if split == 1:
        _launch_stream(x, w._replace(arrived=None), y, None, epilogue, plan, prefetch)
        return
    parts = y.new_empty(split, m, n, dtype=torch.float32)
    if w.arrived is not None:
        _launch_stream(x, w, y, parts, epilogue, plan, prefetch)
        return
    _launch_stream(x, w, y, parts, Epilogue(), plan, prefetch)
    common = launch_constants(plan, prefetch)
    KERNELS["join"][triton.cdiv(n, JOINED), m](
        *(parts, epilogue.bias_N, None, y, 0, y.stride(0), m, n),
        PARTS=split,
        SWIGLU=False,
        BLOCK=JOINED,
        OVERLAP=common["OVERLAP"],
        num_warps=2,
        launch_pdl=common["OVERLAP"],
    )


def _launch_stream(
    x: Tensor,
    w: PackedWeights,
    y: Tensor,
    parts: Tensor | None,
    epilogue: Epilogue,
    plan: Plan,
    prefetch: bool,
) -> None:
    (m, k), n = x.shape, w.shape[0]
    rows, split, unit = row_block(m), plan.parts(k), unit_of(plan.block_k, w.group)
    shifts = None if w.shifts is None else _numbers_descriptor(w.shifts, unit)
    registers = registers_of(m, plan)
    kernel: Any = packed_kernel
    kernel[(n // TILE * split * triton.cdiv(m, rows),)](
        tile_descriptor(x, [rows, unit]),
        tile_descriptor(_byte_rows(w.tiles), [tile_rows(unit, BITS[w.kind]), ROW_BYTES]),
        *(_numbers_descriptor(w.scales, unit), shifts, w.factor_N),
        *(epilogue.bias_N, y, parts, w.arrived, y.stride(-2), m, n, k),
        KIND=w.kind,
        GROUP=w.group,
        UNITS=plan.block_k // unit,
        SPLIT=split,
        STAGES=stages_of(plan),
        WGMMA=uses_wgmma(m, plan),
        SWIGLU=epilogue.activation is not None,
        GROUPS=plan.warps // 4,
        REGISTERS=registers.multiplying,
        maxnreg=registers.average,
        **launch_constants(plan, prefetch) | {"num_warps": 4},
    )


def _numbers_descriptor(numbers: Tensor, unit: int) -> Any:
    """A plane of one group is contiguous whatever the stride of its rows is, and TMA reads that stride."""
    if numbers.dim() == 3:
        rows = numbers.shape[2] * 2 // ROW_BYTES  # of a tile
        return tile_descriptor(_byte_rows(numbers), [unit // TILE * rows, ROW_BYTES])
    return tile_descriptor(numbers.reshape(-1).view(numbers.shape), [1, TILE])


def _byte_rows(tiles: Tensor) -> Tensor:
    return tiles.view(torch.int8).view(-1, ROW_BYTES)


def cost(m: int, n: int, k: int, bits: float) -> Cost:
    """`bits` of a weight, with its share of scales and shifts."""
    return Cost(2.0 * m * n * k, n * k * bits / 8 + 2.0 * (m * k + m * n))
