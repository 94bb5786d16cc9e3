"""y = x @ w.T with 4-bit weights and 16-bit activations: a quarter of the bytes of bfloat16 for few rows.

    w = scale * (level - 8) + shift       a scale, and perhaps a shift, for each row and each group of columns
    x [M, K] bfloat16, w [N, K]  ->  + bias  ->  SwiGLU  ->  y [M, N]; or the float32 parts of a K that was cut

Weights are `int4_tiles`; `int4_stream` multiplies them for up to 128 rows. For more rows they are dequantised into a
matrix of bfloat16 by `dequantize_int4`, once for each product: the tensor cores are the limit there.
Bytes moved for few rows: N*K/2, 2*N*K/group of scales (4 in float32, 8 with shifts), 2*M*K and 2*M*N.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, as_rows, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda, needs_hopper
from cairn.kernels.few_rows import padded_rows
from cairn.kernels.kernel import Cost
from cairn.kernels.matmul.epilogue import Activation, Epilogue, matmul_reference
from cairn.kernels.matmul.int4_stream import int4_kernel
from cairn.kernels.matmul.int4_tiles import TILE, TILE_BYTES, unpacked_tiles
from cairn.kernels.matmul.skinny_matmul import JOINED, KERNELS, launch_constants, tile_descriptor
from cairn.kernels.matmul.skinny_plans import FEW_ROWS, Plan
from cairn.kernels.tuned import tuned

MOST_ROWS = 128  # of x: with more, dequantising costs less than unpacking for each 64 rows
RING = 54 << 10  # bytes of shared memory: four programs on a multiprocessor
WIDEST = 256  # columns at a time
ROW_BYTES = 128  # of tiles as TMA sees them
PROGRAMS = 256  # fewer leave multiprocessors waiting
SHORTEST_PART = 1024  # columns
WARP_ROWS = 16  # of x that warps multiply on their own, at most
UNIT = 128  # columns that are multiplied before they are scaled, at most


class Int4(NamedTuple):
    """A packed matrix [N, K]."""

    tiles: Tensor  # uint8 [N / 64, K / 64, 2048]
    # [K / group, N], in 16 bits where those hold them and there are no shifts: 3% of the bytes less
    scales_GN: Tensor
    # What is added to scale * (level - 8); None: 0. Then they and the scales are float32: the kernel keeps both in
    # buffers of one type.
    shifts_GN: Tensor | None
    # int32 zeros [at least 2 * N / 64]: parts of a tile that are ready
    arrived: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        pieces, tiles, _ = self.tiles.shape
        return pieces * TILE, tiles * TILE

    @property
    def group(self) -> int:
        return self.shape[1] // len(self.scales_GN)


def int4_reference(w: Int4, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [N, K] that is meant."""
    scales_NK = w.scales_GN.float().T.repeat_interleave(w.group, 1)
    w_NK = (unpacked_tiles(w.tiles).float() - 8) * scales_NK
    if w.shifts_GN is not None:
        w_NK = w_NK + w.shifts_GN.T.repeat_interleave(w.group, 1)
    return w_NK.to(dtype)


def counted(w: Int4) -> Int4:
    """With counters, so that the last program of a tile joins its parts: no second kernel is launched for that."""
    tiles = len(w.tiles) * (MOST_ROWS // FEW_ROWS)
    return w._replace(arrived=torch.zeros(tiles, dtype=torch.int32, device=w.tiles.device))


@triton.jit
def _dequantize_kernel(
    tiles, scales, shifts, y, N, K,
    GROUP: tl.constexpr, TILE: tl.constexpr, BYTES: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """One tile of 64 x 64 for a program; `int4_tiles` says where its levels are."""
    column_tile, piece = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    byte = thread * 16 + column // 16 * 4 + column % 2 * 2 + column % 16 // 8
    at = (piece * (K // TILE) + column_tile).to(tl.int64) * BYTES
    level = (tl.load(tiles + at + byte) >> (row % 16 // 8 * 4).to(tl.uint8)) & 15
    n = piece * TILE + tl.arange(0, TILE)
    factor = column_tile * TILE // GROUP * N + n
    w = (level.to(tl.float32) - 8.0) * tl.load(scales + factor).to(tl.float32)[:, None]
    if shifts is not None:
        w += tl.load(shifts + factor)[:, None]
    if PAIRED:
        n = n // 16 * 8 + n % 8 + n % 16 // 8 * (N // 2)
    place = n.to(tl.int64)[:, None] * K + column_tile * TILE + column
    tl.store(y + place, w.to(y.dtype.element_ty))


def dequantize_int4(
    w: Int4, out: Tensor | None = None, *, paired: bool = False, impl: Impl = "auto"
) -> Tensor:
    """bfloat16 [N, K]; `paired`: w has the order of `paired_rows`, the result has gate and up one after the other."""
    _check_weight(w)
    n, k = w.shape
    if out is None:
        out = torch.empty(n, k, dtype=torch.bfloat16, device=w.tiles.device)
    check("out", out, dtypes=(torch.bfloat16,), shape=(n, k), beside=w.tiles, packed=True)
    offers = {"triton": needs_cuda(w.tiles), "reference": None}
    if choose("int4_matmul", impl, offers).impl == "reference":
        rows = int4_reference(w)
        return out.copy_(_gate_then_up(rows) if paired else rows)
    kernel: Any = _dequantize_kernel
    kernel[(k // TILE, n // TILE)](
        *(w.tiles, w.scales_GN, w.shifts_GN, out, n, k),
        GROUP=w.group,
        TILE=TILE,
        BYTES=TILE_BYTES,
        PAIRED=paired,
        num_warps=4,
    )
    return out


def _gate_then_up(rows: Tensor) -> Tensor:
    """Back from `paired_rows`."""
    return rows.view(-1, 2, 8, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


def int4_matmul(
    x_MK: Tensor,
    w: Int4,
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
    if choose("int4_matmul", impl, offers).impl == "reference":
        return _by_reference(x, w, epilogue)
    y = torch.empty(m, epilogue.columns(n), dtype=x.dtype, device=x.device)
    if y.numel():
        launch(x, w, y, epilogue, plan, prefetch)
    return y


def int4_parts(x_MK: Tensor, w: Int4, *, prefetch: bool = False) -> Tensor | None:
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


def _by_reference(x: Tensor, w: Int4, epilogue: Epilogue) -> Tensor:
    rows = int4_reference(w)
    if epilogue.activation is not None:
        rows = _gate_then_up(rows)
    return matmul_reference(x, rows, epilogue, x.dtype)


def _checked(x_MK: Tensor, w: Int4) -> Tensor:
    _check_weight(w)
    check("x_MK", x_MK, dtypes=(torch.bfloat16,), shape=(None, w.shape[1]), beside=w.tiles)
    require(len(x_MK) <= MOST_ROWS, "x_MK", f"at most {MOST_ROWS} rows", len(x_MK))
    return as_rows("x_MK", x_MK)


def _check_weight(w: Int4) -> None:
    check("w.tiles", w.tiles, dtypes=(torch.uint8,), shape=(None, None, TILE_BYTES), packed=True)
    n, k = w.shape
    require(n > 0 and k > 0, "w.tiles", "at least one tile", list(w.tiles.shape))
    scales = w.scales_GN
    kinds = FLOATS if w.shifts_GN is None else (torch.float32,)
    check("w.scales", scales, dtypes=kinds, shape=(None, n), beside=w.tiles, packed=True)
    fits = len(scales) > 0 and k % len(scales) == 0 and w.group % TILE == 0
    require(fits, "w.scales", f"groups of a multiple of {TILE} columns", list(scales.shape))
    if w.shifts_GN is not None:
        shape = tuple(scales.shape)
        check("w.shifts", w.shifts_GN, dtypes=(torch.float32,), shape=shape, beside=w.tiles, packed=True)  # fmt: skip
    if w.arrived is not None:
        check("w.arrived", w.arrived, dtypes=(torch.int32,), beside=w.tiles, packed=True)
        fewest = len(w.tiles) * (MOST_ROWS // FEW_ROWS)
        require(w.arrived.numel() >= fewest, "w.arrived", f"{fewest} counters", w.arrived.numel())


def int4_plan(m: int, n: int, k: int, group: int, shifts: bool = False) -> Plan:
    """Four programs on a multiprocessor, each of which waits much, and K cut until all of them have work."""
    width = next(width for width in (WIDEST, 128, TILE) if k % width == 0)
    pieces, split = n // TILE, 1
    while pieces * split < PROGRAMS and k >= 2 * split * SHORTEST_PART:
        split *= 2
    steps = -(-k // (width * split))
    stage = stage_bytes(m, width, group, shifts)
    return Plan("int4", TILE, width, split, 4, max(2, min(RING // stage, steps)))


def row_block(m: int) -> int:
    """Rows of x that a program takes."""
    return min(padded_rows(max(m, 1)), FEW_ROWS)


def stage_bytes(m: int, width: int, group: int, shifts: bool = False) -> int:
    """Of shared memory, for one step of weights, scales and x."""
    scales = width // unit_of(width, group) * TILE * 4 * (1 + shifts)
    return width // TILE * (TILE_BYTES + row_block(m) * TILE * 2) + scales


def unit_of(width: int, group: int) -> int:
    """Columns of a step that have one scale and are multiplied at once."""
    return UNIT if width % UNIT == 0 and group % UNIT == 0 else TILE


def uses_wgmma(m: int, plan: Plan) -> bool:
    """Whether a warpgroup multiplies together, or for few rows each warp on its own."""
    return plan.kernel == "int4" or row_block(m) > WARP_ROWS


def stages_of(plan: Plan) -> int:
    """Of two warpgroups each has buffers of its own, so that none waits for a phase two ahead: an even number."""
    groups = plan.warps // 4
    return max(groups, plan.stages // groups * groups)


class Registers(NamedTuple):
    """Of a thread: on average, and of one that multiplies. One that copies has 24."""

    average: int
    multiplying: int


def registers_of(m: int, plan: Plan) -> Registers:
    groups = plan.warps // 4
    multiplying = 104 if row_block(m) <= 8 else 136 if row_block(m) <= 32 else 200
    return Registers(-(-(multiplying * groups + 24) // (groups + 1) // 8) * 8, multiplying)


def plan_of(m: int, n: int, k: int, w: Int4) -> Plan:
    key = f"m={row_block(m)},n={n},k={k},group={w.group}"
    default = int4_plan(m, n, k, w.group, w.shifts_GN is not None)
    return Plan(**tuned("int4_matmul", key, default._asdict()))


def launch(
    x: Tensor, w: Int4, y: Tensor, epilogue: Epilogue, plan: Plan, prefetch: bool = False
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
    w: Int4,
    y: Tensor,
    parts: Tensor | None,
    epilogue: Epilogue,
    plan: Plan,
    prefetch: bool,
) -> None:
    (m, k), n = x.shape, w.shape[0]
    rows, split, unit = row_block(m), plan.parts(k), unit_of(plan.block_k, w.group)
    bytes_ = w.tiles.view(torch.int8).view(-1, ROW_BYTES)
    shifts = None if w.shifts_GN is None else _numbers_descriptor(w.shifts_GN)
    registers = registers_of(m, plan)
    kernel: Any = int4_kernel
    kernel[(n // TILE * split * triton.cdiv(m, rows),)](
        tile_descriptor(x, [rows, unit]),
        tile_descriptor(bytes_, [unit // 4, ROW_BYTES]),
        *(_numbers_descriptor(w.scales_GN), shifts),
        *(epilogue.bias_N, y, parts, w.arrived, y.stride(-2), m, n, k),
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


def _numbers_descriptor(plane_GN: Tensor) -> Any:
    """A plane of one group is contiguous whatever the stride of its rows is, and TMA reads that stride."""
    return tile_descriptor(plane_GN.reshape(-1).view(plane_GN.shape), [1, TILE])


def cost(m: int, n: int, k: int, group: int = 128) -> Cost:
    return Cost(2.0 * m * n * k, n * k / 2 + 2.0 * n * k / group + 2.0 * (m * k + m * n))
